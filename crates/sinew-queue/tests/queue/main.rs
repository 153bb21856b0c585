//! The queue over HTTP: the suite of every queue, and faults that only the network can cause.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../../sinew-store/tests/queue/cases.rs"]
mod cases;
mod feed;
#[path = "../../../sinew-store/tests/queue/model.rs"]
mod model;
#[path = "../../../sinew-store/tests/queue/samplers.rs"]
mod samplers;
mod scorer;
#[path = "../../../sinew-store/tests/queue/support.rs"]
mod support;
mod wire;

use bytes::Bytes;
use sinew_queue::{HttpQueue, QueueServer, QueueServerConfig};
use sinew_store::StoreError;
use sinew_store::queue::{
    AckedRow, Consumer, DiskQueue, LeaseBatch, LeaseId, NewRow, PutOutcome, Queue, QueueLimits,
    QueueStats, ReturnOutcome, RowRequest, RowState, RowView,
};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use support::{LIMITS, Make, NO_LEASE, Subject, consumer, keys, refusal, row, trainer};
use tokio::runtime::Runtime;

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

const TOKEN: &str = "token-of-the-tests";

/// Long enough for any machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// Serves a file at an address; the number is the time.
fn serve(path: &Path, limits: QueueLimits, port: u16, now: &Arc<AtomicU64>) -> QueueServer {
    let queue = Arc::new(DiskQueue::open(path, limits, false).unwrap());
    let now = Arc::clone(now);
    let serving = QueueServerConfig {
        listen: SocketAddr::from((Ipv4Addr::LOCALHOST, port)).into(),
        token: TOKEN.into(),
        clock: Arc::new(move || now.load(Ordering::SeqCst)),
        sweep: None,
    };
    RUNTIME
        .block_on(QueueServer::start(queue, serving))
        .unwrap()
}

fn client(server: &QueueServer) -> HttpQueue {
    HttpQueue::new(&format!("http://{}", server.address()), TOKEN, PATIENCE).unwrap()
}

/// A client whose calls set the clock of the server.
#[derive(Debug)]
struct Clocked(HttpQueue, Arc<AtomicU64>);

impl Clocked {
    fn at(&self, now_ms: u64) -> &HttpQueue {
        self.1.store(now_ms, Ordering::SeqCst);
        &self.0
    }
}

impl Queue for Clocked {
    fn put(&self, rows: &[NewRow]) -> Result<Vec<PutOutcome>, StoreError> {
        self.0.put(rows)
    }
    fn fill(&self, rows: &[AckedRow]) -> Result<usize, StoreError> {
        self.0.fill(rows)
    }
    fn join(&self, consumer: &Consumer) -> Result<(), StoreError> {
        self.0.join(consumer)
    }
    fn lease(&self, ask: &RowRequest, now_ms: u64) -> Result<LeaseBatch, StoreError> {
        self.at(now_ms).lease(ask, 0)
    }
    fn ack(
        &self,
        consumer: &str,
        lease: LeaseId,
        rows: &[AckedRow],
    ) -> Result<ReturnOutcome, StoreError> {
        self.0.ack(consumer, lease, rows)
    }
    fn release(
        &self,
        c: &str,
        lease: LeaseId,
        keys: &[String],
    ) -> Result<ReturnOutcome, StoreError> {
        self.0.release(c, lease, keys)
    }
    fn fail(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
        reason: &str,
    ) -> Result<ReturnOutcome, StoreError> {
        self.0.fail(consumer, lease, keys, reason)
    }
    fn renew(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
        ttl_ms: u64,
        now_ms: u64,
    ) -> Result<ReturnOutcome, StoreError> {
        self.at(now_ms).renew(consumer, lease, keys, ttl_ms, 0)
    }
    fn revive(&self, consumer: &str, keys: &[String]) -> Result<usize, StoreError> {
        self.0.revive(consumer, keys)
    }
    fn remove(&self, keys: &[String]) -> Result<usize, StoreError> {
        self.0.remove(keys)
    }
    fn sweep(&self, keep: usize, now_ms: u64) -> Result<usize, StoreError> {
        self.at(now_ms).sweep(keep, 0)
    }
    fn read(&self, key: &str, field: &str) -> Result<Option<Bytes>, StoreError> {
        self.0.read(key, field)
    }
    fn state(&self, consumer: &str, key: &str) -> Result<Option<RowState>, StoreError> {
        self.0.state(consumer, key)
    }
    fn rows(&self, after: Option<u64>, limit: usize) -> Result<Vec<RowView>, StoreError> {
        self.0.rows(after, limit)
    }
    fn stats(&self) -> Result<QueueStats, StoreError> {
        self.0.stats()
    }
    fn wait(&self, seen: u64, at_most: Duration) -> Result<u64, StoreError> {
        self.0.wait(seen, at_most)
    }
}

/// A queue behind a server, which restarts over the same file.
fn remote(limits: QueueLimits) -> Subject {
    let directory = tempfile::tempdir().unwrap();
    let now = Arc::new(AtomicU64::new(0));
    let mut server: Option<QueueServer> = None;
    let mut open = move || {
        if let Some(server) = server.take() {
            RUNTIME.block_on(server.stop());
        }
        let started = serve(&directory.path().join("q.sqlite"), limits, 0, &now);
        let client = Clocked(client(&started), Arc::clone(&now));
        server = Some(started);
        Arc::new(client) as Arc<_>
    };
    Subject::new(open(), Some(Box::new(open)))
}

/// Runs a case on the queue.
fn on_each(limits: QueueLimits, case: impl Fn(&mut Subject)) {
    case(&mut remote(limits));
}

/// Queues for random uses, and how many of them.
fn random_subjects() -> [(u32, Make); 1] {
    [(8, remote)]
}
