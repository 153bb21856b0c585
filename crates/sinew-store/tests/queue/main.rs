//! One suite over every queue: in memory, on disk, in another process.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod cases;
mod model;
mod samplers;
mod torn;

use sinew_store::StoreError;
use sinew_store::queue::{
    Ask, Consumer, DiskQueue, Done, Field, LeaseId, Loan, MemoryQueue, NewRow, Queue, QueueError,
    QueueLimits, Sample, Take, fields,
};
use std::sync::Arc;

const LIMITS: QueueLimits = QueueLimits {
    max_rows: 16,
    max_bytes: 1_000,
    max_attempts: 3,
};

/// A queue under test.
struct Subject {
    queue: Arc<dyn Queue>,
    limits: QueueLimits,
    kind: Kind,
}

enum Kind {
    Memory,
    Disk(tempfile::TempDir),
}

impl Subject {
    fn memory(limits: QueueLimits) -> Self {
        Self {
            queue: Arc::new(MemoryQueue::in_memory(limits)),
            limits,
            kind: Kind::Memory,
        }
    }

    fn disk(limits: QueueLimits) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("q.sqlite");
        Self {
            queue: Arc::new(DiskQueue::open(&path, limits, false).unwrap()),
            limits,
            kind: Kind::Disk(directory),
        }
    }

    /// The process with the queue starts anew, where the queue outlives it.
    fn restart(&mut self) {
        if let Kind::Disk(directory) = &self.kind {
            self.queue = Arc::new(MemoryQueue::in_memory(self.limits));
            let path = directory.path().join("q.sqlite");
            self.queue = Arc::new(DiskQueue::open(&path, self.limits, false).unwrap());
        }
    }

    fn lease(&self, consumer: &str, take: Take, ttl_ms: u64, now: u64) -> Loan {
        self.try_lease(consumer, take, ttl_ms, now).unwrap()
    }

    fn try_lease(
        &self,
        consumer: &str,
        take: Take,
        ttl_ms: u64,
        now: u64,
    ) -> Result<Loan, StoreError> {
        let ask = Ask {
            consumer: consumer.into(),
            holder: "tests".into(),
            ttl_ms,
            take,
        };
        self.queue.lease(&ask, now)
    }

    fn rows(&self, consumer: &str, rows: usize, now: u64) -> Loan {
        self.lease(consumer, Take::Sample(Sample::rows(rows)), 10, now)
    }

    fn ack(&self, consumer: &str, loan: &Loan) -> usize {
        let done: Vec<Done> = keys(loan).iter().map(Done::of).collect();
        let lease = loan.lease.unwrap();
        self.queue.ack(consumer, lease, &done).unwrap().changed
    }
}

/// Runs a case on every queue.
fn on_each(limits: QueueLimits, case: impl Fn(&mut Subject)) {
    for mut subject in [Subject::memory(limits), Subject::disk(limits)] {
        case(&mut subject);
    }
}

fn keys(loan: &Loan) -> Vec<String> {
    loan.rows.iter().map(|r| r.key.clone()).collect()
}

fn row(key: &str, bytes: usize) -> NewRow {
    NewRow::new(
        key,
        Field::new(fields::TRACE, key.repeat(bytes.div_ceil(key.len()))),
    )
}

fn trainer() -> Consumer {
    consumer("trainer", &[fields::TRACE], &[], true)
}

fn consumer(name: &str, needs: &[&str], writes: &[&str], last: bool) -> Consumer {
    let owned = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
    Consumer {
        name: name.into(),
        needs: owned(needs),
        writes: owned(writes),
        last,
    }
}

fn refusal<T: std::fmt::Debug>(result: Result<T, StoreError>) -> QueueError {
    match result.unwrap_err() {
        StoreError::Queue(e) => e,
        other => panic!("{other}"),
    }
}

/// A lease that no loan has.
const NO_LEASE: LeaseId = LeaseId(u64::MAX >> 1);
