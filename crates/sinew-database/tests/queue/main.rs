//! The suite of every queue on PostgreSQL and Redis; crashes of the servers, lost connections, several
//! processes.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on fails"
)]

#[path = "../../../sinew-store/tests/queue/cases.rs"]
mod cases;
mod crash;
#[path = "../../../sinew-store/tests/queue/model.rs"]
mod model;
#[path = "../store/proxy.rs"]
mod proxy;
#[path = "../../../sinew-store/tests/queue/samplers.rs"]
mod samplers;
#[expect(dead_code, reason = "the other suite uses the rest")]
#[path = "../servers/mod.rs"]
mod servers;
mod several;
#[path = "../../../sinew-store/tests/queue/support.rs"]
mod support;

use servers::{PostgresServer, RedisServer};
use sinew_database::{Address, DatabaseOptions, open_queue};
use sinew_store::queue::{LeaseClock, QueueLimits, SharedQueue};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use support::{LIMITS, Make, NO_LEASE, Subject, consumer, keys, refusal, row, trainer};

thread_local! {
    /// The servers of this test: they die with its thread.
    static POSTGRES: PostgresServer = PostgresServer::start();
    static REDIS: RedisServer = RedisServer::start();
}

/// Long enough for any machine.
fn patient() -> DatabaseOptions {
    DatabaseOptions {
        patience: Duration::from_secs(300),
        first_patience: Duration::from_secs(300),
        ..DatabaseOptions::default()
    }
}

/// A name that no other queue of this process has.
fn new_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("queue-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A queue whose leases follow the time that its callers name, or the server's.
fn open_at(url: &str, name: &str, limits: QueueLimits, clock: LeaseClock) -> SharedQueue {
    let address = Address::new(url, None).unwrap();
    open_queue(&address, name, limits, patient(), clock).unwrap()
}

fn subject(url: String, limits: QueueLimits) -> Subject {
    let name = new_name();
    let open = move || Arc::new(open_at(&url, &name, limits, LeaseClock::Caller)) as Arc<_>;
    Subject::new(open(), Some(Box::new(open)))
}

fn postgres(limits: QueueLimits) -> Subject {
    subject(POSTGRES.with(PostgresServer::url), limits)
}

fn redis(limits: QueueLimits) -> Subject {
    subject(REDIS.with(RedisServer::url), limits)
}

/// Runs a case on every queue.
fn on_each(limits: QueueLimits, case: impl Fn(&mut Subject)) {
    for mut subject in [postgres(limits), redis(limits)] {
        case(&mut subject);
    }
}

/// Queues for random uses, and how many of them.
fn random_subjects() -> [(u32, Make); 2] {
    [(8, postgres), (12, redis)]
}
