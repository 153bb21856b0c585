//! Several servers: dying ones, full ones, near ones.

use crate::mock::{Fault, Kind, Mock};
use crate::support::{backend, config, remote, request, submit, until};
use sinew_types::{Engine, FinishReason};

#[test]
fn episodes_survive_the_death_of_their_server() {
    let mut mocks = vec![Mock::start(Kind::Vllm), Mock::start(Kind::Sglang)];
    let engine = remote(mocks.iter().map(backend).collect(), config());
    until("both are ready", || {
        engine.engines().iter().all(|e| e.idle_because.is_none())
    });
    for mock in &mocks {
        (0..8).for_each(|_| mock.hold_next());
    }
    let pending: Vec<_> = (0..8)
        .map(|id| {
            let mut request = request(id, &[id as u32 + 30, 2, 3], 30);
            request.sampling.stop_ids.clear();
            let pending = submit(&engine, request);
            pending.next();
            pending
        })
        .collect();
    assert!(mocks[0].generations() > 0 && mocks[1].generations() > 0);
    let on_first = mocks[0].generations() as u64;
    mocks[0].kill();
    mocks[1].release();
    for pending in pending {
        let outcome = pending.outcome();
        assert_eq!(outcome.reason(), &FinishReason::Length);
    }
    let counters = engine.counters();
    assert_eq!(counters.failovers, on_first, "{counters:?}");
    assert!(counters.replayed_tokens > 0);
    // 8 x 30 tokens, none lost and none twice.
    assert_eq!(counters.sampled_tokens, 240);
    // A new process on the same port is taken in again.
    mocks[0].restart();
    until("it serves again", || {
        engine.engines()[0].idle_because.is_none()
    });
}

#[test]
fn prefixes_stay_where_they_are_cached() {
    let mocks = [
        Mock::start(Kind::Vllm),
        Mock::start(Kind::Vllm),
        Mock::start(Kind::Vllm),
    ];
    let engine = remote(mocks.iter().map(backend).collect(), config());
    until("all are ready", || {
        engine.engines().iter().all(|e| e.idle_because.is_none())
    });
    for turn in 0..4usize {
        for family in 0..3u32 {
            let prompt = vec![family; 5 + 3 * turn];
            let id = u64::from(family) * 10 + turn as u64;
            submit(&engine, request(id, &prompt, 2)).outcome();
        }
    }
    let counters = engine.counters();
    assert_eq!(
        counters.affinity_misses, 3,
        "the first of each family: {counters:?}"
    );
    assert_eq!(counters.affinity_hits, 9);
}

#[test]
fn full_servers_get_nothing_more() {
    let mocks = [Mock::start(Kind::Vllm), Mock::start(Kind::Sglang)];
    *mocks[0].state.kv_used.lock().unwrap() = 1.0;
    let engine = remote(mocks.iter().map(backend).collect(), config());
    until("both were looked at", || {
        let engines = engine.engines();
        engines.iter().all(|e| e.idle_because.is_none()) && engines[0].kv_tokens_free == Some(0)
    });
    mocks[1].fail_next(Fault::Slow(5));
    let pending: Vec<_> = (0..6)
        .map(|id| submit(&engine, request(id, &[id as u32 + 50; 6], 4)))
        .collect();
    pending
        .into_iter()
        .for_each(|p| assert!(p.outcome().end.is_ok()));
    // An idle server may always try one.
    assert!(mocks[0].generations() <= 6 && mocks[1].generations() >= 1);
    let at_once = mocks[0].state.engine.status();
    assert_eq!(at_once.running, 0);
}

#[test]
fn a_failing_server_is_left_alone() {
    let mocks = [Mock::start(Kind::Vllm), Mock::start(Kind::Vllm)];
    let mut config = config();
    config.router.breaker.open_s = 60.0;
    let engine = remote(mocks.iter().map(backend).collect(), config);
    until("both are ready", || {
        engine.engines().iter().all(|e| e.idle_because.is_none())
    });
    (0..50).for_each(|_| mocks[0].fail_next(Fault::Status(500)));
    for id in 0..30 {
        assert!(
            submit(&engine, request(id, &[id as u32 + 60, 1], 2))
                .outcome()
                .end
                .is_ok()
        );
    }
    let left = mocks[0].state.faults.lock().unwrap().len();
    assert_eq!(50 - left, 3, "three failures open the breaker");
    let why = engine.engines()[0].idle_because.clone().unwrap();
    assert!(why.contains("left alone") && why.contains("500"), "{why}");
}
