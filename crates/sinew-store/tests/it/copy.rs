//! Copies of stores: everything comes along, a copy is taken up, other data is refused.

use crate::traces::{id, score, trace};
use sinew_store::{
    CopyError, CopyPhase, CopyProgress, DiskStore, Filter, MemoryStore, StoreOptions, TraceStore,
    TrainedBatch, copy,
};

/// A store with trained, removed and scored episodes of several owners.
fn used() -> MemoryStore {
    let store = MemoryStore::new(1 << 30);
    for n in 0..200 {
        store.commit(&trace(n, n as usize % 9)).unwrap();
    }
    store
        .put_scores(&[score(3, "thumbs", 1, 0.5), score(1, "thumbs", 2, 1.0)])
        .unwrap();
    for step in 1..=3 {
        let fence = store.take_fence().unwrap();
        let update = TrainedBatch {
            fence,
            detail: serde_json::json!({ "step": step, "lr": 0.1 }),
            dropped: [(id(step), "no spread".to_owned())].into(),
            ..TrainedBatch::new(&format!("s{step}"), step, &[id(step * 2), id(step * 2 + 1)])
        };
        store.commit_update(&update, false).unwrap();
    }
    store.remove(&[id(2), id(3), id(150)]).unwrap();
    store
}

fn quiet(_: CopyProgress) {}

#[test]
fn everything_is_there_after_the_copy() {
    let directory = tempfile::tempdir().unwrap();
    let (from, back) = (used(), MemoryStore::new(1 << 30));
    let disk = DiskStore::open(directory.path(), StoreOptions::default()).unwrap();
    let mut phases = Vec::new();
    let report = copy(&from, &disk, &mut |p: CopyProgress| phases.push(p.phase)).unwrap();
    assert_eq!(
        (report.episodes, report.removed, report.copied),
        (197, 3, 200)
    );
    assert_eq!((report.scores, report.updates, report.fence), (1, 3, 3));
    phases.dedup();
    use CopyPhase::{Check, Episodes, Scores, Updates};
    assert_eq!(phases, [Episodes, Scores, Updates, Check]);
    let returned = copy(&disk, &back, &mut quiet).unwrap();
    assert_eq!(returned, report);
    assert_eq!(
        back.trained_batches().unwrap(),
        from.trained_batches().unwrap()
    );
    assert_eq!(back.get(&id(7)).unwrap(), from.get(&id(7)).unwrap());
    // Nothing is copied twice.
    let again = copy(&from, &disk, &mut quiet).unwrap();
    assert_eq!((again.copied, again.checksum), (0, report.checksum));
}

#[test]
fn a_copy_that_was_cut_short_is_taken_up() {
    let (from, to) = (used(), MemoryStore::new(1 << 30));
    let first: Vec<_> = (0..70).map(|n| trace(n, n as usize % 9)).collect();
    to.commit_batch(&first).unwrap();
    let report = copy(&from, &to, &mut quiet).unwrap();
    assert_eq!(report.copied, 130);
    let filter = Filter {
        removed: true,
        limit: 1_000,
        ..Filter::default()
    };
    assert_eq!(to.list(&filter).unwrap().episodes.len(), 200);
}

#[test]
fn a_target_of_another_run_is_refused() {
    let from = used();
    let refused = |to: &MemoryStore| copy(&from, to, &mut quiet).unwrap_err();
    let other = MemoryStore::new(1 << 30);
    other.commit(&trace(999, 3)).unwrap();
    assert!(matches!(refused(&other), CopyError::OtherData { what } if what == "episode e999"));
    let other = MemoryStore::new(1 << 30);
    other.commit(&trace(0, 0)).unwrap();
    other
        .commit_update(&TrainedBatch::new("s1", 1, &[id(0)]), false)
        .unwrap();
    assert!(matches!(refused(&other), CopyError::OtherData { what } if what == "update s1"));
    let other = MemoryStore::new(1 << 30);
    (0..4).for_each(|_| drop(other.take_fence().unwrap()));
    assert!(matches!(refused(&other), CopyError::OtherData { what } if what == "owner 4"));
    // Equal names with other contents are found by the comparison.
    let other = MemoryStore::new(1 << 30);
    other.commit(&trace(0, 5)).unwrap();
    assert!(matches!(refused(&other), CopyError::Differs { .. }));
}
