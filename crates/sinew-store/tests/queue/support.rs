//! Support of the suite for a queue under test; queues of other crates bring their own `on_each`.

use sinew_store::StoreError;
use sinew_store::queue::{
    AckedRow, Consumer, Field, LeaseBatch, LeaseId, MemoryQueue, NewRow, Queue, QueueError,
    QueueLimits, RowRequest, RowSelection, Sample, fields,
};
use std::sync::Arc;

pub(crate) const LIMITS: QueueLimits = QueueLimits {
    max_rows: 16,
    max_bytes: 1_000,
    max_attempts: 3,
};

/// Makes a queue with some limits.
pub(crate) type Make = fn(QueueLimits) -> Subject;

/// A queue under test.
pub(crate) struct Subject {
    pub(crate) queue: Arc<dyn Queue>,
    /// Opens it again, where it outlives its process.
    again: Option<Box<dyn FnMut() -> Arc<dyn Queue>>>,
}

impl Subject {
    pub(crate) fn new(
        queue: Arc<dyn Queue>,
        again: Option<Box<dyn FnMut() -> Arc<dyn Queue>>>,
    ) -> Self {
        Self { queue, again }
    }

    /// The process with the queue starts anew, where the queue outlives it.
    pub(crate) fn restart(&mut self) {
        if let Some(again) = &mut self.again {
            // The file is free before it is opened again.
            self.queue = Arc::new(MemoryQueue::in_memory(LIMITS));
            self.queue = again();
        }
    }

    pub(crate) fn lease(
        &self,
        consumer: &str,
        take: RowSelection,
        ttl_ms: u64,
        now: u64,
    ) -> LeaseBatch {
        self.try_lease(consumer, take, ttl_ms, now).unwrap()
    }

    pub(crate) fn try_lease(
        &self,
        consumer: &str,
        take: RowSelection,
        ttl_ms: u64,
        now: u64,
    ) -> Result<LeaseBatch, StoreError> {
        let ask = RowRequest {
            consumer: consumer.into(),
            holder: "tests".into(),
            ttl_ms,
            take,
        };
        self.queue.lease(&ask, now)
    }

    pub(crate) fn rows(&self, consumer: &str, rows: usize, now: u64) -> LeaseBatch {
        self.lease(consumer, RowSelection::Sample(Sample::rows(rows)), 10, now)
    }

    pub(crate) fn ack(&self, consumer: &str, loan: &LeaseBatch) -> usize {
        let done: Vec<AckedRow> = keys(loan).iter().map(AckedRow::of).collect();
        let lease = loan.lease.unwrap();
        self.queue.ack(consumer, lease, &done).unwrap().changed
    }
}

pub(crate) fn keys(loan: &LeaseBatch) -> Vec<String> {
    loan.rows.iter().map(|r| r.key.clone()).collect()
}

pub(crate) fn row(key: &str, bytes: usize) -> NewRow {
    NewRow::new(
        key,
        Field::new(fields::TRACE, key.repeat(bytes.div_ceil(key.len()))),
    )
}

pub(crate) fn trainer() -> Consumer {
    consumer("trainer", &[fields::TRACE], &[], true)
}

pub(crate) fn consumer(name: &str, needs: &[&str], writes: &[&str], last: bool) -> Consumer {
    let owned = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
    Consumer {
        name: name.into(),
        needs: owned(needs),
        writes: owned(writes),
        last,
    }
}

pub(crate) fn refusal<T: std::fmt::Debug>(result: Result<T, StoreError>) -> QueueError {
    match result.unwrap_err() {
        StoreError::Queue(e) => e,
        other => panic!("{other}"),
    }
}

/// A lease that no loan has.
pub(crate) const NO_LEASE: LeaseId = LeaseId(u64::MAX >> 1);
