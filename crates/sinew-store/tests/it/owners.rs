//! Owners, in every store: only the newest one commits.

use crate::support::{id, on_each, trace};
use sinew_store::{CommitOutcome, StoreError, TraceStore, TrainedBatch};
use std::collections::BTreeSet;

/// Commits episode `n` alone, as owner `fence`.
fn mark(store: &dyn TraceStore, n: u64, fence: u64) -> Result<CommitOutcome, StoreError> {
    let update = TrainedBatch {
        fence,
        ..TrainedBatch::new(&format!("b{n}"), n, &[id(n)])
    };
    store.commit_update(&update, false)
}

fn owners(store: &dyn TraceStore) -> Vec<u64> {
    let batches = store.trained_batches().unwrap();
    batches.iter().map(|b| b.fence).collect()
}

#[test]
fn only_the_newest_owner_commits() {
    on_each(|store| {
        for n in 0..3 {
            store.commit(&trace(n, 3)).unwrap();
        }
        assert_eq!(store.newest_fence().unwrap(), 0);
        assert_eq!(mark(store, 0, 0).unwrap(), CommitOutcome::New);
        assert_eq!(store.take_fence().unwrap(), 1);
        assert_eq!(mark(store, 1, 1).unwrap(), CommitOutcome::New);
        assert_eq!(store.take_fence().unwrap(), 2);
        assert_eq!(store.newest_fence().unwrap(), 2);
        // Records that are stored already are refused, too.
        for (n, fence) in [(2, 1), (1, 1), (0, 0)] {
            let refused = mark(store, n, fence).unwrap_err();
            let told = refused.to_string();
            assert!(
                matches!(refused, StoreError::Fenced { own, newest: 2 } if own == fence),
                "{told}"
            );
            assert!(told.contains("owner 2") && told.contains(&format!("owner {fence}")));
        }
        let untaken = mark(store, 2, 3);
        assert!(matches!(
            untaken,
            Err(StoreError::Argument { field: "fence", .. })
        ));
        // Episodes of the first owner stay welcome.
        assert_eq!(store.commit(&trace(3, 3)).unwrap(), CommitOutcome::New);
        assert_eq!(mark(store, 2, 2).unwrap(), CommitOutcome::New);
        assert_eq!(mark(store, 3, 2).unwrap(), CommitOutcome::New);
        assert_eq!(mark(store, 3, 2).unwrap(), CommitOutcome::Duplicate);
        assert_eq!(owners(store), [0, 1, 2, 2]);
    });
}

#[test]
fn each_owner_gets_another_number() {
    on_each(|store| {
        let take = || -> Vec<u64> { (0..3).map(|_| store.take_fence().unwrap()).collect() };
        let taken: BTreeSet<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(take)).collect();
            let taken = threads.into_iter().flat_map(|t| t.join().unwrap());
            taken.collect()
        });
        assert_eq!(taken, (1..=12).collect::<BTreeSet<u64>>());
        assert_eq!(store.newest_fence().unwrap(), 12);
    });
}
