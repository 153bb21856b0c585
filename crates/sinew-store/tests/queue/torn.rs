//! Files of queues that a crash or a medium damaged.

use super::{keys, row, trainer};
use sinew_store::queue::{
    AckedRow, DiskQueue, Queue, QueueLimits, RowRequest, RowSelection, RowState, Sample, fields,
};
use sinew_store::{DiskStore, StoreError, StoreOptions};
use std::path::Path;

fn open(path: &Path) -> Result<DiskQueue, StoreError> {
    DiskQueue::open(path, QueueLimits::default(), false)
}

/// Steps 0 to 3 of a row's life, each a call that is answered.
fn step(queue: &DiskQueue, n: usize) {
    let take = RowSelection::Sample(Sample::rows(9));
    let ask = RowRequest {
        consumer: "trainer".into(),
        holder: "tests".into(),
        ttl_ms: 1_000,
        take,
    };
    match n {
        0 => queue.join(&trainer()).unwrap(),
        1 => drop(queue.put(&[row("a", 4_000), row("b", 4_000)]).unwrap()),
        2 => {
            let loan = queue.lease(&ask, 0).unwrap();
            assert_eq!(keys(&loan), ["a", "b"]);
            let lease = loan.lease.unwrap();
            assert_eq!(
                queue
                    .ack("trainer", lease, &[AckedRow::of("a")])
                    .unwrap()
                    .changed,
                1
            );
        }
        _ => drop(queue.put(&[row("c", 4_000)]).unwrap()),
    }
}

/// A copy whose log is cut at any byte holds the state after one of the calls.
#[test]
fn a_log_that_is_cut_anywhere_ends_after_some_call() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("q.sqlite");
    let queue = open(&path).unwrap();
    (0..4).for_each(|n| step(&queue, n));
    // Copied while it is open: what a process that is killed leaves.
    let read =
        |suffix: &str| std::fs::read(directory.path().join(format!("q.sqlite{suffix}"))).unwrap();
    let (file, log) = (read(""), read("-wal"));
    drop(queue);
    let mut seen = std::collections::BTreeSet::new();
    for cut in (0..log.len()).step_by(log.len() / 60).chain([log.len()]) {
        let copy = tempfile::tempdir().unwrap();
        let path = copy.path().join("q.sqlite");
        std::fs::write(&path, &file).unwrap();
        std::fs::write(copy.path().join("q.sqlite-wal"), &log[..cut]).unwrap();
        let queue = open(&path).unwrap();
        let stats = queue.stats().unwrap();
        let trainer = stats.of("trainer");
        seen.insert((stats.rows, stats.done, trainer.leased));
        for view in queue.rows(None, 9).unwrap() {
            let value = queue.read(&view.key, fields::TRACE).unwrap();
            assert_eq!(value.map(|v| v.len()), (!view.done).then_some(4_000));
        }
    }
    let expected = [(0, 0, 0), (1, 1, 1), (2, 0, 0), (2, 0, 2), (2, 1, 1)];
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn a_damaged_file_is_refused_and_put_aside_only_on_request() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("q.sqlite");
    let queue = open(&path).unwrap();
    (0..3).for_each(|n| step(&queue, n));
    assert!(matches!(open(&path), Err(StoreError::Locked { .. })));
    drop(queue);
    let good = std::fs::read(&path).unwrap();
    let mut refused = 0;
    for byte in (0..good.len()).step_by(97) {
        let mut bad = good.clone();
        bad[byte] ^= 4;
        std::fs::write(&path, &bad).unwrap();
        match open(&path) {
            Err(StoreError::LostQueue { .. } | StoreError::Format { .. }) => refused += 1,
            Err(other) => panic!("{byte}: {other}"),
            // Bytes that nothing uses.
            Ok(queue) => assert_eq!(queue.stats().unwrap().rows, 1),
        }
    }
    assert!(refused > 40, "{refused}");
    let mut bad = good.clone();
    bad.truncate(good.len() / 2);
    std::fs::write(&path, &bad).unwrap();
    assert!(open(&path).is_err());
    let fresh = DiskQueue::open(&path, QueueLimits::default(), true).unwrap();
    assert_eq!(fresh.stats().unwrap().rows, 0);
    assert_eq!(
        std::fs::read(directory.path().join("q.sqlite.damaged")).unwrap(),
        bad
    );
}

#[test]
fn queues_of_one_store_are_apart_and_outlive_it() {
    let directory = tempfile::tempdir().unwrap();
    let open = || DiskStore::open(directory.path(), StoreOptions::default()).unwrap();
    let store = open();
    let a = store.queue("a", QueueLimits::default()).unwrap();
    let b = store.queue("b", QueueLimits::default()).unwrap();
    step(&a, 0);
    step(&a, 1);
    b.put(&[row("a", 1)]).unwrap();
    drop((a, b, store));
    let store = open();
    let a = store.queue("a", QueueLimits::default()).unwrap();
    assert_eq!(a.stats().unwrap().rows, 2);
    assert_eq!(a.state("trainer", "a").unwrap(), Some(RowState::Ready));
}
