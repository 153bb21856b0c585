//! Versions: never the wrong one.

use crate::mock::{Fault, Kind, Mock};
use crate::support::{
    self, Bench, PATIENCE, backend, config, load, long, remote, submit, until, until_idle_because,
    vllm,
};
use sinew_engines::{Backend, RemoteEngine, VllmApi};
use sinew_types::{Engine, FinishReason, PolicyVersion};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn bench(kinds: &[Kind]) -> Bench {
    support::bench(kinds, backend, config())
}

#[test]
fn a_swap_in_the_middle_of_a_request_stamps_each_token_with_its_weights() {
    for kind in [Kind::Vllm, Kind::Sglang] {
        let b = bench(&[kind]);
        b.mocks[0].fail_next(Fault::HangAfter(6));
        let pending = submit(&b.engine, long(1));
        for _ in 0..6 {
            pending.next();
        }
        load(&b.engine, 4).unwrap();
        let outcome = pending.outcome();
        assert_eq!(outcome.reason(), &FinishReason::Length);
        assert_eq!(outcome.tokens.len(), 14, "6 came before");
        assert!(outcome.tokens.iter().all(|t| t.version == PolicyVersion(4)));
        assert_eq!(b.mocks[0].label(), "v4-000000aa");
        let counters = b.engine.counters();
        assert_eq!(
            (counters.interrupted_attempts, counters.failed_attempts),
            (1, 0),
            "{kind:?}"
        );
    }
}

#[test]
fn an_engine_that_failed_to_load_does_not_serve_until_it_has() {
    let b = bench(&[Kind::Vllm, Kind::Sglang]);
    b.mocks[1].state.broken_loader.store(true, Ordering::SeqCst);
    load(&b.engine, 2).unwrap();
    let before = b.mocks[1].generations();
    for id in 0..6 {
        let outcome = submit(&b.engine, long(id)).outcome();
        assert!(outcome.tokens.iter().all(|t| t.version == PolicyVersion(2)));
    }
    assert_eq!(b.mocks[1].generations(), before, "nothing was asked of it");
    assert!(b.engine.engines()[1].idle_because.is_some());
    // It is tried again, and taken in once it works.
    b.mocks[1]
        .state
        .broken_loader
        .store(false, Ordering::SeqCst);
    until("it has loaded them", || {
        b.engine.engines()[1].idle_because.is_none()
    });
    assert_eq!(b.mocks[1].label(), "v2-000000aa");
}

#[test]
fn a_load_that_fails_everywhere_says_why_and_serves_nothing_unverified() {
    let b = bench(&[Kind::Vllm]);
    b.mocks[0].state.broken_loader.store(true, Ordering::SeqCst);
    let error = load(&b.engine, 2).unwrap_err();
    assert!(error.to_string().contains("loader is broken"), "{error}");
    assert_eq!(b.engine.status().version, PolicyVersion(0));
    // Half-loaded weights carry the label of none: they are not sampled from.
    assert_eq!(b.mocks[0].label(), "loading-v2-000000aa");
    let pending = submit(&b.engine, long(1));
    assert!(pending.nothing_for(Duration::from_millis(100)));
    b.mocks[0]
        .state
        .broken_loader
        .store(false, Ordering::SeqCst);
    load(&b.engine, 3).unwrap();
    let outcome = pending.outcome();
    assert!(outcome.tokens.iter().all(|t| t.version == PolicyVersion(3)));
}

#[test]
fn a_restarted_server_gets_the_current_weights_before_it_serves() {
    let mut b = bench(&[Kind::Vllm]);
    load(&b.engine, 2).unwrap();
    b.mocks[0].restart();
    let pending = submit(&b.engine, long(1));
    let outcome = pending.outcome();
    assert!(outcome.tokens.iter().all(|t| t.version == PolicyVersion(2)));
    assert_eq!(b.mocks[0].label(), "v2-000000aa");
}

#[test]
fn weights_that_somebody_else_loaded_never_serve() {
    let mock = Mock::start(Kind::Sglang);
    mock.set_label("v7-000000aa");
    let engine = RemoteEngine::new(vec![backend(&mock)], None, config()).unwrap();
    until_idle_because(&engine, "not v0-000000aa: it has v7-000000aa");
    let error = engine.wait_ready(Duration::ZERO).unwrap_err();
    assert!(error.to_string().contains("it has v7"), "{error}");
    let pending = submit(&engine, long(1));
    assert!(pending.nothing_for(Duration::from_millis(100)));
    assert_eq!(mock.generations(), 0);
    mock.set_label("v0-000000aa");
    assert!(pending.outcome().end.is_ok());
}

#[test]
fn the_right_number_of_another_lineage_never_serves() {
    for kind in [Kind::Vllm, Kind::Sglang] {
        let mock = Mock::start(kind);
        mock.set_label("v0-000000bb");
        let engine = RemoteEngine::new(vec![backend(&mock)], None, config()).unwrap();
        until_idle_because(&engine, "not v0-000000aa: it has v0-000000bb");
        let pending = submit(&engine, long(1));
        assert!(pending.nothing_for(Duration::from_millis(100)));
        assert_eq!(mock.generations(), 0, "{kind:?}");
        // A label without a lineage is of another client.
        mock.set_label("v0");
        until_idle_because(&engine, "it has the label `v0`");
        mock.set_label("v0-000000aa");
        assert!(pending.outcome().end.is_ok());
    }
}

#[test]
fn a_server_with_weights_of_another_lineage_is_loaded_again() {
    for kind in [Kind::Vllm, Kind::Sglang] {
        let b = bench(&[kind]);
        load(&b.engine, 2).unwrap();
        // Another session of the trainer has loaded its own version of that number.
        b.mocks[0].set_label("v2-000000bb");
        until("it is loaded again", || b.mocks[0].label() == "v2-000000aa");
        let outcome = submit(&b.engine, long(1)).outcome();
        assert!(outcome.tokens.iter().all(|t| t.version == PolicyVersion(2)));
    }
}

#[test]
fn a_swap_by_somebody_else_fails_what_it_may_have_touched() {
    let backends: [fn(&Mock) -> Arc<dyn Backend>; 3] =
        [backend, |m| vllm(m, VllmApi::Generate), backend];
    for (kind, make) in [Kind::Vllm, Kind::Vllm, Kind::Sglang]
        .into_iter()
        .zip(backends)
    {
        let mock = Mock::start(kind);
        let engine = remote(vec![make(&mock)], config());
        mock.fail_next(Fault::OtherWeights);
        let outcome = submit(&engine, long(1)).outcome();
        assert!(
            outcome.error().contains("v999-000000aa"),
            "{kind:?}: {outcome:?}"
        );
        assert!(engine.counters().wrong_version >= 1, "{kind:?}");
        let waits = submit(&engine, long(2));
        assert!(waits.nothing_for(Duration::from_millis(60)), "{kind:?}");
    }
}

#[test]
fn held_back_tokens_are_never_of_the_wrong_weights() {
    for kind in [Kind::Vllm, Kind::Sglang] {
        let mock = Mock::start(kind);
        let mut config = config();
        config.hold_until_verified = true;
        let engine = remote(vec![backend(&mock)], config);
        mock.fail_next(Fault::OtherWeights);
        let pending = submit(&engine, long(1));
        assert!(pending.nothing_for(Duration::from_millis(150)), "{kind:?}");
        mock.set_label("v0-000000aa");
        let outcome = pending.outcome();
        assert_eq!(
            (outcome.tokens.len(), outcome.reason()),
            (20, &FinishReason::Length)
        );
    }
}

#[test]
fn servers_without_labels_are_known_by_their_process() {
    let mut mock = Mock::start(Kind::Vllm);
    mock.state.bare.store(true, Ordering::SeqCst);
    let engine = remote(vec![backend(&mock)], config());
    assert!(submit(&engine, long(1)).outcome().end.is_ok());
    let error = load(&engine, 1).unwrap_err();
    assert!(error.to_string().contains("weights_dir"), "{error}");
    // A restarted server has the first version again: it may serve.
    mock.restart();
    mock.state.bare.store(true, Ordering::SeqCst);
    assert!(submit(&engine, long(2)).outcome().end.is_ok());
}

#[test]
fn sleeping_servers_are_not_asked_and_requests_wait() {
    for kind in [Kind::Vllm, Kind::Sglang] {
        let b = bench(&[kind]);
        load(&b.engine, 1).unwrap();
        b.engine.sleep().unwrap();
        assert!(b.mocks[0].state.sleeping.load(Ordering::SeqCst));
        let pending = submit(&b.engine, long(1));
        assert!(pending.nothing_for(Duration::from_millis(100)), "{kind:?}");
        b.engine.wake().unwrap();
        let outcome = pending.outcome();
        assert!(outcome.end.is_ok(), "{kind:?}: {outcome:?}");
        b.engine.wait_ready(PATIENCE).unwrap();
    }
}
