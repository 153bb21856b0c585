//! Nothing that was acknowledged is lost, and nothing is stored twice: with a server that is killed while it
//! writes, and with connections that are dropped in the middle of calls.

use crate::proxy::Proxy;
use crate::servers::PostgresServer;
use crate::support::{id, open_at, score, trace};
use sinew_store::{CommitOutcome, TraceStore, TrainedBatch};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Episodes of one commit.
const BATCH: u64 = 4;

/// Commits a batch, scores it and trains it, as owner `fence`. Each call must be the one that stores it.
fn step(store: &dyn TraceStore, n: u64, fence: u64) {
    let batch: Vec<_> = (n..n + BATCH).map(|n| trace(n, 40)).collect();
    let committed = store.commit_batch(&batch).unwrap();
    assert_eq!(committed, [CommitOutcome::New; BATCH as usize], "{n}");
    let scored = store.put_scores(&[score(n, "thumbs", 1, 1.0)]).unwrap();
    assert_eq!(scored, [Ok(CommitOutcome::New)], "{n}");
    let ids: Vec<_> = (n..n + BATCH).map(id).collect();
    let update = TrainedBatch {
        fence,
        ..TrainedBatch::new(&format!("s{n}"), n + 1, &ids)
    };
    assert_eq!(
        store.commit_update(&update, false).unwrap(),
        CommitOutcome::New,
        "{n}"
    );
}

/// Checks that everything up to `steps` is there, once.
fn check(store: &dyn TraceStore, steps: u64) {
    let episodes = steps * BATCH;
    let stats = store.stats().unwrap();
    assert_eq!(
        (stats.episodes, stats.trained, stats.batches),
        (episodes, episodes, steps)
    );
    for n in 0..episodes {
        assert_eq!(store.get(&id(n)).unwrap(), Some(trace(n, 40)), "{n}");
    }
    let batches = store.trained_batches().unwrap();
    let steps: Vec<u64> = batches.iter().map(|b| b.step).collect();
    assert!(steps.is_sorted_by(|a, b| a < b), "{steps:?}");
    let scores = store
        .scores_after(Default::default(), 10_000)
        .unwrap()
        .scores;
    assert_eq!(scores.len(), batches.len());
}

#[test]
fn a_server_that_is_killed_loses_nothing() {
    let mut server = PostgresServer::start();
    let store = open_at(&server.url(), "crash", None);
    let fence = store.take_fence().unwrap();
    let (done, over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                let n = done.load(Ordering::SeqCst);
                step(&store, n * BATCH, fence);
                done.store(n + 1, Ordering::SeqCst);
            }
        });
        for round in 1..=4u64 {
            // Killed while the next step is on its way.
            while done.load(Ordering::SeqCst) < round * 5 && !writer.is_finished() {
                std::thread::yield_now();
            }
            server.crash();
        }
        over.store(true, Ordering::SeqCst);
    });
    let steps = done.load(Ordering::SeqCst);
    check(&store, steps);
    assert_eq!(store.newest_fence().unwrap(), fence);
    check(&open_at(&server.url(), "crash", None), steps);
}

#[test]
fn a_dropped_connection_does_nothing_twice() {
    let server = PostgresServer::start();
    // Each connection ends a little later than the one before, so that every answer is cut in turn.
    let proxy = Proxy::start(server.port(), |n| 900 + n * 211 % 6_000);
    let url = format!("postgres://sinew@127.0.0.1:{}/postgres", proxy.port());
    let store = open_at(&url, "chaos", None);
    let fence = store.take_fence().unwrap();
    for n in 0..40 {
        step(&store, n * BATCH, fence);
    }
    assert!(proxy.dropped() > 10, "{}", proxy.dropped());
    check(&open_at(&server.url(), "chaos", None), 40);
}
