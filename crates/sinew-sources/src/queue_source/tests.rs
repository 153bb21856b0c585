//! Rows between their lease and the commit that consumes them: sessions that die, leases that end, other
//! trainers.

use super::*;
use sinew_store::queue::{DiskQueue, Field, MemoryQueue, NewRow, QueueLimits, RowState, fields};
use std::path::Path;

/// Rows of the only group.
const KEYS: [&str; 2] = ["a", "b"];

/// Longer than any lease but one that is in doubt.
const LATER_MS: u64 = 3_600_000;

fn memory() -> Arc<dyn Queue> {
    filled(Arc::new(MemoryQueue::in_memory(QueueLimits::default())))
}

/// Puts one group of two rows into `queue`.
fn filled(queue: Arc<dyn Queue>) -> Arc<dyn Queue> {
    let row = |key: &str| NewRow {
        group: "g".into(),
        group_size: 2,
        fields: vec![
            Field::new(fields::TRACE, "t"),
            Field::new(fields::REWARD, "r"),
        ],
        ..NewRow::new(key, Field::new(fields::TRACE, "t"))
    };
    queue.put(&KEYS.map(row)).unwrap();
    queue
}

fn source(queue: &Arc<dyn Queue>, run_dir: &Path, lease: Duration) -> QueueSource {
    let config = QueueSourceConfig {
        run_dir: run_dir.to_owned(),
        consumer: "trainer".into(),
        wait: Duration::ZERO,
        lease,
        min_group: 2,
    };
    QueueSource::new(Arc::clone(queue), config, watch::channel(false).1).unwrap()
}

const LEASE: Duration = Duration::from_secs(60);

/// Leases the group for step 1, as a draw does.
fn take(source: &QueueSource) -> LeaseId {
    let (lease, rows) = source.lease().unwrap().unwrap();
    let keys: Vec<String> = rows.into_iter().map(|row| row.key).collect();
    assert_eq!(keys, KEYS);
    source.holds.add(lease, &keys);
    let taken = StepLeases {
        step: 1,
        leases: vec![(lease.0, keys)],
        ..StepLeases::default()
    };
    source.ledger.note(&taken).unwrap();
    lease
}

fn states(queue: &Arc<dyn Queue>) -> [RowState; 2] {
    KEYS.map(|key| queue.state("trainer", key).unwrap().unwrap())
}

/// Ends every lease that is not in doubt.
fn leases_end(queue: &Arc<dyn Queue>) {
    queue.sweep(usize::MAX, now_ms() + LATER_MS).unwrap();
}

/// A session that is killed between the commit and the ack, and the one that continues.
fn goes_on(open: impl Fn() -> Arc<dyn Queue>) {
    let dir = tempfile::tempdir().unwrap();
    let queue = open();
    let mut killed = source(&queue, dir.path(), LEASE);
    take(&killed);
    let consumed = killed.consumes(1).unwrap().unwrap();
    drop((killed, queue));
    let queue = open();
    leases_end(&queue);
    let held = |s: &RowState| matches!(s, RowState::Leased { .. });
    assert!(states(&queue).iter().all(held), "nothing else gets them");
    let mut source = source(&queue, dir.path(), LEASE);
    // The second time is a crash between the ack and whatever follows.
    for _ in 0..2 {
        source.committed(&consumed).unwrap();
        assert_eq!(states(&queue), [RowState::Acked, RowState::Acked]);
    }
}

#[test]
fn rows_in_doubt_wait_for_the_run_that_committed_them() {
    let queue = memory();
    goes_on(|| Arc::clone(&queue));
    // A file that is opened once at a time: a source that is gone must not keep it.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("queue.sqlite");
    let open = || -> Arc<dyn Queue> {
        let queue = DiskQueue::open(&path, QueueLimits::default(), false);
        Arc::new(queue.unwrap())
    };
    drop(filled(open()));
    goes_on(open);
}

#[test]
fn rows_that_nothing_took_after_their_lease_are_leased_anew() {
    let (queue, dir) = (memory(), tempfile::tempdir().unwrap());
    let first = take(&source(&queue, dir.path(), LEASE));
    leases_end(&queue);
    assert_eq!(states(&queue), [RowState::Ready, RowState::Ready]);
    let mut source = source(&queue, dir.path(), LEASE);
    let (taken, gone) = source.hold(1, LEASE).unwrap();
    assert_eq!((gone, taken.leases.len()), (0, 1));
    assert_ne!(taken.leases[0].0, first.0);
    // The new leases are written down for the next session.
    assert_eq!(source.ledger.taken(1).unwrap().unwrap(), taken);
    let consumed = source.consumes(1).unwrap().unwrap();
    source.committed(&consumed).unwrap();
    assert_eq!(states(&queue), [RowState::Acked, RowState::Acked]);
}

#[test]
fn a_step_whose_rows_went_to_another_trainer_is_not_committed() {
    let (queue, dir) = (memory(), tempfile::tempdir().unwrap());
    let mut late = source(&queue, &dir.path().join("late"), LEASE);
    std::fs::create_dir_all(dir.path().join("late")).unwrap();
    take(&late);
    leases_end(&queue);
    let other = source(&queue, dir.path(), LEASE);
    let lease = take(&other);
    let refused = late.consumes(1).unwrap_err().to_string();
    assert!(
        refused.contains("2 rows of step 1 went to another trainer"),
        "{refused}"
    );
    assert!(refused.contains("--resume"), "{refused}");
    // The resumed session leaves them out, and its commit consumes nothing.
    let mut late = source(&queue, &dir.path().join("late"), LEASE);
    let (taken, gone) = late.hold(1, LEASE).unwrap();
    assert_eq!((taken.lost, gone), (KEYS.map(String::from).to_vec(), 0));
    assert_eq!(late.consumes(1).unwrap(), None);
    // If the other one gives them back, they are trained under another name than the one that was left out.
    queue
        .release("trainer", lease, &KEYS.map(String::from))
        .unwrap();
    assert_eq!(late.own_id("a", 1).as_str(), "queue-a");
    assert_eq!(late.own_id("a", 2).as_str(), "queue-a-again1");
    assert_eq!(late.own_id("c", 2).as_str(), "queue-c");
}

/// A store that lost its last commit still has the episodes, and the queue records which lease acked them.
#[test]
fn rows_that_this_lease_acked_are_still_the_run_s() {
    let (queue, dir) = (memory(), tempfile::tempdir().unwrap());
    let mut source = source(&queue, dir.path(), LEASE);
    let lease = take(&source);
    queue
        .ack("trainer", lease, &KEYS.map(AckedRow::of))
        .unwrap();
    let (taken, gone) = source.hold(1, LEASE).unwrap();
    assert_eq!((taken.leases[0].0, gone), (lease.0, 0));
    let other = StepLeases {
        step: 2,
        leases: vec![(lease.0 + 1, KEYS.map(String::from).to_vec())],
        ..StepLeases::default()
    };
    source.ledger.note(&other).unwrap();
    assert_eq!(
        source.hold(2, LEASE).unwrap().1,
        2,
        "another lease acked them"
    );
}

#[test]
fn leases_are_renewed_while_a_step_is_made() {
    let (queue, dir) = (memory(), tempfile::tempdir().unwrap());
    let source = source(&queue, dir.path(), LEASE / 200);
    take(&source);
    let until = |state: &RowState| match state {
        RowState::Leased { until_ms, .. } => *until_ms,
        other => panic!("{other:?}"),
    };
    let first = until(&states(&queue)[0]);
    loop {
        let seen = queue.wait(0, Duration::ZERO).unwrap();
        if until(&states(&queue)[0]) > first {
            break;
        }
        queue.wait(seen, Duration::from_secs(300)).unwrap();
    }
}
