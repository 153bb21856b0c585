//! Nothing that was acknowledged is lost, and nothing is done twice: with servers that are killed while they
//! write, and with connections that are dropped in the middle of calls.

use crate::proxy::Proxy;
use crate::servers::{PostgresServer, RedisServer};
use crate::{keys, open_at, row, trainer};
use sinew_store::queue::{
    AckedRow, LeaseClock, PutOutcome, Queue, QueueLimits, RowRequest, RowSelection, RowState,
    Sample, SharedQueue,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const HOUR_MS: u64 = 3_600_000;

/// Puts a row, leases it and acks it. Each call must be the one that does it.
fn step(queue: &dyn Queue, n: u64) {
    let key = format!("k{n}");
    assert_eq!(
        queue.put(&[row(&key, 200)]).unwrap(),
        [PutOutcome::New],
        "{n}"
    );
    let ask = RowRequest {
        consumer: "trainer".into(),
        holder: "tests".into(),
        ttl_ms: HOUR_MS,
        take: RowSelection::Sample(Sample::rows(9)),
    };
    let batch = queue.lease(&ask, 0).unwrap();
    assert_eq!(keys(&batch), [key.as_str()]);
    assert_eq!((batch.rows[0].attempt, batch.rows[0].fields.len()), (1, 1));
    let acked = queue.ack("trainer", batch.lease.unwrap(), &[AckedRow::of(&key)]);
    assert_eq!(acked.unwrap().changed, 1, "{n}");
}

fn check(queue: &dyn Queue, steps: u64) {
    let stats = queue.stats().unwrap();
    assert_eq!((stats.rows, stats.done as u64, stats.bytes), (0, steps, 0));
    for n in 0..steps {
        let state = queue.state("trainer", &format!("k{n}")).unwrap();
        assert_eq!(state, Some(RowState::Acked), "{n}");
    }
}

fn open(url: &str) -> SharedQueue {
    open_at(url, "crash", QueueLimits::default(), LeaseClock::Server)
}

/// Works while the server is killed several times.
fn killed(url: &str, mut crash: impl FnMut()) {
    let queue = open(url);
    queue.join(&trainer()).unwrap();
    let (done, over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                let n = done.load(Ordering::SeqCst);
                step(&queue, n);
                done.store(n + 1, Ordering::SeqCst);
            }
        });
        for round in 1..=4u64 {
            while done.load(Ordering::SeqCst) < round * 9 && !worker.is_finished() {
                std::thread::yield_now();
            }
            crash();
        }
        over.store(true, Ordering::SeqCst);
    });
    let steps = done.load(Ordering::SeqCst);
    check(&queue, steps);
    check(&open(url), steps);
}

#[test]
fn postgres_that_is_killed_loses_nothing() {
    let mut server = PostgresServer::start();
    killed(&server.url(), || server.crash());
}

#[test]
fn redis_that_is_killed_loses_nothing() {
    let mut server = RedisServer::start();
    killed(&server.url(), || server.crash());
}

/// Works through a proxy that drops every connection.
fn dropped(through: &str, direct: &str, proxy: &Proxy) {
    let queue = open(through);
    queue.join(&trainer()).unwrap();
    for n in 0..60 {
        step(&queue, n);
    }
    assert!(proxy.dropped() > 10, "{}", proxy.dropped());
    check(&open(direct), 60);
}

#[test]
fn a_dropped_connection_to_postgres_does_nothing_twice() {
    let server = PostgresServer::start();
    let proxy = Proxy::start(server.port(), |n| 900 + n * 211 % 6_000);
    let through = format!("postgres://sinew@127.0.0.1:{}/postgres", proxy.port());
    dropped(&through, &server.url(), &proxy);
}

#[test]
fn a_dropped_connection_to_redis_does_nothing_twice() {
    let server = RedisServer::start();
    let proxy = Proxy::start(server.port(), |n| 2_000 + n * 211 % 4_000);
    let through = format!("redis://127.0.0.1:{}", proxy.port());
    dropped(&through, &server.url(), &proxy);
}
