//! Reading a store that another process writes.

use crate::support::{id, score, trace};
use sinew_store::{
    DiskStore, Filter, GcPolicy, MemoryStore, StoreError, StoreOptions, StoreReader, TraceStore,
    TrainedBatch,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn open(directory: &Path) -> DiskStore {
    let options = StoreOptions {
        segment_bytes: 20_000,
        ..StoreOptions::default()
    };
    DiskStore::open(directory, options).unwrap()
}

#[test]
fn a_reader_follows_a_live_writer_and_sees_nothing_half_done() {
    const EPISODES: u64 = 300;
    let directory = tempfile::tempdir().unwrap();
    let writer = open(directory.path());
    let done = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        scope.spawn(|| {
            for first in (0..EPISODES).step_by(3) {
                let batch: Vec<_> = (first..first + 3).map(|n| trace(n, 40)).collect();
                writer.commit_batch(&batch).unwrap();
                if first % 90 == 87 {
                    // Records move and files go while they are read.
                    let trained: Vec<_> = (0..30).map(id).collect();
                    let update = TrainedBatch::new("b", 1, &trained);
                    writer.commit_update(&update, false).unwrap();
                    writer
                        .gc(GcPolicy {
                            before_update: 2,
                            keep_untrained: true,
                        })
                        .unwrap();
                }
            }
            done.store(true, Ordering::SeqCst);
        });
        let mut most = 0;
        loop {
            let last = done.load(Ordering::SeqCst);
            let reader = StoreReader::open(directory.path()).unwrap();
            let filter = Filter {
                limit: 1000,
                ..Filter::default()
            };
            let page = reader.list(&filter).unwrap();
            let newest = page.episodes.last().map(|e| e.cursor.0).unwrap_or(0);
            assert_eq!(newest % 3, 0, "a batch is visible whole or not at all");
            for e in page.episodes.iter().rev().take(5) {
                let n: u64 = e.episode.as_str()[1..].parse().unwrap();
                if n >= 30 {
                    assert_eq!(reader.get(&e.episode).unwrap(), Some(trace(n, 40)));
                }
            }
            most = most.max(newest);
            if last {
                break most;
            }
        }
    });
    // The marks of 30 episodes take numbers as well.
    assert_eq!(seen, EPISODES + 30);
    // The writer is as it was: it writes on and a second one is still refused.
    writer.commit(&trace(EPISODES, 40)).unwrap();
    let second = DiskStore::open(directory.path(), StoreOptions::default());
    assert!(matches!(second, Err(StoreError::Locked { .. })));
}

#[test]
fn a_reader_writes_nothing_and_takes_no_lock() {
    let directory = tempfile::tempdir().unwrap();
    let missing = StoreReader::open(&directory.path().join("none"));
    assert!(matches!(missing, Err(StoreError::Missing { .. })));
    assert!(!directory.path().join("none").exists());
    let store = directory.path().join("store");
    open(&store).commit(&trace(1, 10)).unwrap();
    let reader = StoreReader::open(&store).unwrap();
    // A writer may come after the reader.
    let writer = open(&store);
    writer.commit(&trace(2, 10)).unwrap();
    assert_eq!(reader.get(&id(2)).unwrap(), Some(trace(2, 10)));
    assert_eq!(reader.stats().unwrap().episodes, 2);
    assert!(reader.trained_batches().unwrap().is_empty());
}

#[test]
fn a_reader_of_any_store_sees_what_that_of_a_folder_sees() {
    let directory = tempfile::tempdir().unwrap();
    let disk = open(directory.path());
    let memory = Arc::new(MemoryStore::new(1 << 20));
    let stores: [&dyn TraceStore; 2] = [&disk, &*memory];
    for store in stores {
        let batch: Vec<_> = (0..4).map(|n| trace(n, 10)).collect();
        store.commit_batch(&batch).unwrap();
        store.put_scores(&[score(2, "a", 1, 1.0)]).unwrap();
        for (name, step) in [("s1", 1), ("s2", 2)] {
            let update = TrainedBatch::new(name, step, &[id(step)]);
            store.commit_update(&update, false).unwrap();
        }
    }
    let traces: Arc<dyn TraceStore> = memory.clone();
    let readers = [
        StoreReader::open(directory.path()).unwrap(),
        StoreReader::of(traces),
    ];
    let seen = readers.map(|reader| {
        let ids = |filter: &Filter| -> Vec<_> {
            let page = reader.list(filter).unwrap();
            page.episodes.into_iter().map(|e| e.episode).collect()
        };
        let trained = Filter {
            updates: Some(2..=2),
            ..Filter::default()
        };
        (
            (ids(&Filter::default()), ids(&trained)),
            (reader.get(&id(3)).unwrap(), reader.get(&id(9)).unwrap()),
            reader.scores(&id(2)).unwrap(),
            (
                reader.trained_batches().unwrap(),
                reader.batches_of(2).unwrap(),
            ),
            reader.stats().unwrap().trained,
        )
    });
    assert_eq!(seen[0], seen[1]);
    assert_eq!(seen[0].3.1.len(), 1);
}

#[test]
fn a_damaged_index_is_named_to_readers_and_made_anew_by_a_writer() {
    let directory = tempfile::tempdir().unwrap();
    open(directory.path()).commit(&trace(1, 10)).unwrap();
    let index = directory.path().join("index.sqlite");
    std::fs::write(&index, "no database").unwrap();
    let refused = StoreReader::open(directory.path()).unwrap_err().to_string();
    assert!(refused.contains(&index.display().to_string()), "{refused}");
    assert!(refused.contains("made anew"), "{refused}");
    let store = open(directory.path());
    assert!(store.recovery().index_remade.is_some());
    assert_eq!(store.get(&id(1)).unwrap(), Some(trace(1, 10)));
    let aside = directory.path().join("index.sqlite.damaged");
    assert_eq!(std::fs::read(aside).unwrap(), b"no database");
    assert!(StoreReader::open(directory.path()).is_ok());
}
