//! Owners: only the newest one commits, wherever it runs and whatever was lost.

use crate::traces::{id, trace};
use sinew_store::{
    CommitOutcome, DiskStore, MemoryStore, StoreError, StoreOptions, TraceStore, TrainedBatch, own,
};
use std::fs;
use std::path::Path;
use std::sync::Arc;

fn open(directory: &Path) -> DiskStore {
    DiskStore::open(directory, StoreOptions::default()).unwrap()
}

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
fn a_fence_asks_its_store() {
    let directory = tempfile::tempdir().unwrap();
    let stores: [Arc<dyn TraceStore>; 2] = [
        Arc::new(MemoryStore::new(1 << 30)),
        Arc::new(open(directory.path())),
    ];
    for store in stores {
        let first = own(&store, Path::new("runs/a")).unwrap();
        first.check().unwrap();
        let second = own(&store, Path::new("runs/a")).unwrap();
        second.check().unwrap();
        assert_eq!((first.number(), second.number()), (1, 2));
        let told = first.check().unwrap_err().to_string();
        for part in ["runs/a", "owner 1", "owner 2"] {
            assert!(told.contains(part), "{told}");
        }
        drop(store);
        let told = second.check().unwrap_err().to_string();
        assert!(told.contains("its store is closed"), "{told}");
    }
}

/// A process can die between its number and its first commit, and the index can be lost: no number is taken
/// twice.
#[test]
fn a_taken_number_survives_reopening_and_a_lost_index() {
    let directory = tempfile::tempdir().unwrap();
    for number in 1..=3 {
        let store = open(directory.path());
        assert_eq!(store.newest_fence().unwrap(), number - 1);
        assert_eq!(store.take_fence().unwrap(), number);
        drop(store);
        for suffix in ["", "-wal", "-shm"] {
            let _ = fs::remove_file(directory.path().join(format!("index.sqlite{suffix}")));
        }
    }
    let store = open(directory.path());
    store.commit(&trace(0, 3)).unwrap();
    assert!(matches!(
        mark(&store, 0, 2),
        Err(StoreError::Fenced { own: 2, newest: 3 })
    ));
    mark(&store, 0, 3).unwrap();
}

/// Without the file, the newest commit is known from the segments.
#[test]
fn without_its_file_the_number_follows_from_the_commits() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.commit(&trace(0, 3)).unwrap();
    store.take_fence().unwrap();
    let fence = store.take_fence().unwrap();
    mark(&store, 0, fence).unwrap();
    drop(store);
    let file = directory.path().join("owner.sqlite");
    for content in [None, Some("")] {
        fs::remove_file(&file).unwrap();
        if let Some(content) = content {
            fs::write(&file, content).unwrap();
        }
        for suffix in ["", "-wal", "-shm"] {
            let _ = fs::remove_file(directory.path().join(format!("index.sqlite{suffix}")));
        }
        let store = open(directory.path());
        assert_eq!(owners(&store), [2]);
        assert_eq!(store.newest_fence().unwrap(), 2);
        assert_eq!(store.take_fence().unwrap(), 3);
    }
}

#[test]
fn a_damaged_file_is_reported_and_nobody_commits() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.commit(&trace(0, 3)).unwrap();
    store.take_fence().unwrap();
    drop(store);
    let file = directory.path().join("owner.sqlite");
    let changed = || {
        let connection = rusqlite::Connection::open(&file).unwrap();
        connection
            .execute("UPDATE owner SET newest = newest + 1", [])
            .unwrap();
    };
    let scribbled = || fs::write(&file, [b'x'; 4096]).unwrap();
    for damage in [&changed as &dyn Fn(), &scribbled] {
        damage();
        let store = open(directory.path());
        assert!(matches!(
            mark(&store, 0, 1),
            Err(StoreError::LostFence { .. })
        ));
        let taken = store.take_fence();
        assert!(
            matches!(taken, Err(StoreError::LostFence { .. })),
            "{taken:?}"
        );
        // Episodes do not need it.
        store.commit(&trace(1, 3)).unwrap();
    }
}

/// Two processes write one folder, as on a file system without locks. The first one is refused only what the
/// second one decides, and neither damages the records of the other.
#[test]
fn an_owner_whose_lock_was_lost_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let first = open(directory.path());
    first.commit(&trace(0, 30)).unwrap();
    let old = first.take_fence().unwrap();
    fs::remove_file(directory.path().join("lock")).unwrap();
    let second = open(directory.path());
    let new = second.take_fence().unwrap();
    assert_eq!((old, new), (1, 2));
    for n in [1, 3, 5] {
        assert_eq!(first.commit(&trace(n, 30)).unwrap(), CommitOutcome::New);
        assert_eq!(
            second.commit(&trace(n + 1, 30)).unwrap(),
            CommitOutcome::New
        );
        assert!(matches!(
            mark(&first, n, old),
            Err(StoreError::Fenced { own: 1, newest: 2 })
        ));
        mark(&second, n, new).unwrap();
    }
    drop((first, second));
    let store = open(directory.path());
    assert!(store.recovery().damaged.is_empty());
    for n in 0..7 {
        assert_eq!(store.get(&id(n)).unwrap(), Some(trace(n, 30)), "{n}");
    }
    assert_eq!(owners(&store), [2, 2, 2]);
}
