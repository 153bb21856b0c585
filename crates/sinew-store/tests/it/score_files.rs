//! Scores in the files of a store on disk: an index made anew, and a damaged record.

use crate::traces::{id, score, trace};
use sinew_store::{DiskStore, GcPolicy, StoreOptions, StoreReader, TraceStore};
use std::path::Path;

fn options() -> StoreOptions {
    StoreOptions {
        segment_bytes: 4_000,
        ..StoreOptions::default()
    }
}

fn open(directory: &Path) -> DiskStore {
    DiskStore::open(directory, options()).unwrap()
}

#[test]
fn an_index_made_anew_has_the_scores_of_what_can_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let mut outside = trace(2, 30);
    outside.origin.external = Some("ticket 7".into());
    store
        .commit_batch(&[trace(0, 30), trace(1, 30), outside])
        .unwrap();
    let all = [
        score(0, "a", 1, 1.0),
        score(1, "a", 1, 2.0),
        score(2, "b", 3, 3.0),
    ];
    store.put_scores(&all).unwrap();
    // Scores come to lie before the traces that gc moves, and one loses its trace.
    let update = sinew_store::TrainedBatch::new("b", 1, &[id(0)]);
    store.commit_update(&update, false).unwrap();
    let policy = GcPolicy {
        before_update: 2,
        keep_untrained: true,
    };
    store.gc(policy).unwrap();
    drop(store);
    for suffix in ["", "-wal", "-shm"] {
        // Only the first is always there.
        let _ = std::fs::remove_file(directory.path().join(format!("index.sqlite{suffix}")));
    }
    let store = open(directory.path());
    for n in 0..3 {
        let expected: &[_] = if n == 0 {
            &[]
        } else {
            &all[n as usize..=n as usize]
        };
        assert_eq!(store.scores(&id(n)).unwrap(), expected, "{n}");
    }
    let reader = StoreReader::open(directory.path()).unwrap();
    assert_eq!(reader.scores(&id(1)).unwrap(), [all[1].clone()]);
    assert_eq!(store.named("ticket 7", 2).unwrap(), [id(2)]);
}

#[test]
fn a_damaged_score_is_written_again_from_the_index() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.commit(&trace(0, 30)).unwrap();
    let path = directory.path().join("segments/00000000.seg");
    let before = std::fs::metadata(&path).unwrap().len() as usize;
    store.put_scores(&[score(0, "a", 1, 0.5)]).unwrap();
    store.commit(&trace(1, 30)).unwrap();
    drop(store);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[before + 40] ^= 4;
    std::fs::write(&path, bytes).unwrap();
    let accept = StoreOptions {
        accept_loss: true,
        ..options()
    };
    drop(DiskStore::open(directory.path(), accept).unwrap());
    for suffix in ["", "-wal", "-shm"] {
        // Only the first is always there.
        let _ = std::fs::remove_file(directory.path().join(format!("index.sqlite{suffix}")));
    }
    let store = DiskStore::open(directory.path(), accept).unwrap();
    assert_eq!(store.scores(&id(0)).unwrap(), [score(0, "a", 1, 0.5)]);
}
