//! One suite over every queue: in memory and on disk here, in another process in `sinew-queue`.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod cases;
mod model;
mod samplers;
mod support;
mod torn;

use sinew_store::queue::{DiskQueue, MemoryQueue, QueueLimits};
use std::sync::Arc;
use support::{LIMITS, Make, NO_LEASE, Subject, consumer, keys, refusal, row, trainer};

fn memory(limits: QueueLimits) -> Subject {
    Subject::new(Arc::new(MemoryQueue::in_memory(limits)), None)
}

fn disk(limits: QueueLimits) -> Subject {
    let directory = tempfile::tempdir().unwrap();
    let open = move || {
        let path = directory.path().join("q.sqlite");
        Arc::new(DiskQueue::open(&path, limits, false).unwrap()) as Arc<_>
    };
    Subject::new(open(), Some(Box::new(open)))
}

/// Runs a case on every queue.
fn on_each(limits: QueueLimits, case: impl Fn(&mut Subject)) {
    for mut subject in [memory(limits), disk(limits)] {
        case(&mut subject);
    }
}

/// Queues for random uses, and how many of them.
fn random_subjects() -> [(u32, Make); 2] {
    [(300, memory), (12, disk)]
}
