//! Several processes use one store: each is a connection of its own here.

use crate::support::{id, new_name, on_each, open_at, trace, url};
use sinew_database::PostgresStore;
use sinew_store::{
    CommitOutcome, Cursor, Filter, StoreError, StoreReader, TraceStore, TrainedBatch, own,
};
use std::path::Path;
use std::sync::Arc;

#[test]
fn an_episode_of_two_writers_is_stored_once() {
    let name = new_name();
    let url = url();
    let stores: Vec<_> = (0..4).map(|_| open_at(&url, &name, None)).collect();
    let new: usize = std::thread::scope(|scope| {
        let commit = |store: &dyn TraceStore, t: u64| {
            let range = (0..30).map(move |i| trace((i + t * 7) % 30, 10));
            let committed = range.map(|t| store.commit(&t).unwrap());
            committed.filter(|c| *c == CommitOutcome::New).count()
        };
        let threads: Vec<_> = stores
            .iter()
            .zip(0..)
            .map(|(store, t)| scope.spawn(move || commit(store, t)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).sum()
    });
    assert_eq!(new, 30);
    let all = stores[0].list(&Filter::default()).unwrap().episodes;
    let cursors: Vec<Cursor> = all.iter().map(|e| e.cursor).collect();
    assert_eq!(cursors, (1..=30).map(Cursor).collect::<Vec<_>>());
}

#[test]
fn an_owner_that_was_replaced_commits_nothing() {
    let (name, url) = (new_name(), url());
    let first = open_at(&url, &name, None);
    let second: Arc<dyn TraceStore> = Arc::new(open_at(&url, &name, None));
    first.commit_batch(&[trace(0, 3), trace(1, 3)]).unwrap();
    let old = first.take_fence().unwrap();
    let fence = own(&second, Path::new("runs/a")).unwrap();
    assert_eq!(fence.number(), old + 1);
    fence.check().unwrap();
    let update = |n: u64, fence: u64| TrainedBatch {
        fence,
        ..TrainedBatch::new(&format!("s{n}"), 1, &[id(n)])
    };
    let refused = first.commit_update(&update(0, old), false).unwrap_err();
    assert!(matches!(refused, StoreError::Fenced { newest, .. } if newest == old + 1));
    second.commit_update(&update(0, old + 1), false).unwrap();
    // Episodes of the first one stay welcome.
    assert_eq!(first.commit(&trace(2, 3)).unwrap(), CommitOutcome::New);
}

#[test]
fn a_store_is_the_same_when_it_is_opened_again() {
    let (name, url) = (new_name(), url());
    let first = open_at(&url, &name, None);
    let again = open_at(&url, &name, None);
    assert_eq!(first.identity(), again.identity());
    assert_ne!(
        first.identity(),
        open_at(&url, &new_name(), None).identity()
    );
    assert!(first.shown().contains(&name) && !first.shown().contains('?'));
}

#[test]
fn a_reader_begins_no_store_and_reads_that_of_another_process() {
    let address = sinew_database::Address::new(&url(), None).unwrap();
    let name = new_name();
    let existing = || PostgresStore::existing(&address, &name, None, crate::support::patient());
    for _ in 0..2 {
        let refused = existing().unwrap_err().to_string();
        assert!(
            refused.contains("no schema") && refused.contains(&name),
            "{refused}"
        );
    }
    let writer = open_at(&url(), &name, None);
    let reader = StoreReader::of(Arc::new(existing().unwrap()));
    writer.commit_batch(&[trace(0, 3), trace(1, 3)]).unwrap();
    let fence = writer.take_fence().unwrap();
    for step in [1, 2] {
        let update = TrainedBatch {
            fence,
            ..TrainedBatch::new(&format!("s{step}"), step, &[id(step - 1)])
        };
        writer.commit_update(&update, false).unwrap();
    }
    assert_eq!(reader.get(&id(1)).unwrap(), Some(trace(1, 3)));
    let (all, of_step) = (
        reader.trained_batches().unwrap(),
        reader.batches_of(2).unwrap(),
    );
    assert_eq!((all.len(), of_step.as_slice()), (2, &all[1..]));
    assert_eq!(reader.stats().unwrap().episodes, 2);
}

#[test]
fn names_that_are_no_schema_are_refused() {
    let address = sinew_database::Address::new(&url(), None).unwrap();
    let options = crate::support::patient();
    let long = "x".repeat(49);
    for name in ["", "a b", "a\"b", "a;b", long.as_str()] {
        let refused = PostgresStore::open(&address, name, None, options);
        assert!(matches!(refused, Err(StoreError::Queue(_))), "{name}");
    }
}

#[test]
fn callers_may_belong_to_a_runtime() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    on_each(|store| {
        runtime.block_on(async {
            store.commit(&trace(0, 5)).unwrap();
            assert_eq!(store.get(&id(0)).unwrap(), Some(trace(0, 5)));
        });
    });
}
