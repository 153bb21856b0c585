//! Weights that another program publishes: requests continue during every change.

use crate::mock::{Fault, Kind, Mock};
use crate::support::{backend, config, remote, request, submit, until, vllm};
use sinew_engines::{Backend, RemoteConfig, RemoteEngine, VllmApi};
use sinew_types::{Engine, FinishReason, GenerateRequest, PolicyVersion};
use std::sync::Arc;

fn following() -> RemoteConfig {
    let mut config = config();
    config.router.follow = true;
    config
}

fn long(id: u64) -> GenerateRequest {
    let mut request = request(id, &[id as u32, 2, 3], 20);
    request.sampling.stop_ids.clear();
    request
}

/// All tokens of a request that must end well, and the version of the engine.
fn versions(engine: &RemoteEngine, id: u64) -> Vec<u64> {
    let outcome = submit(engine, long(id)).outcome();
    assert_eq!(outcome.reason(), &FinishReason::Length, "{outcome:?}");
    assert_eq!(outcome.tokens.len(), 20);
    outcome.tokens.iter().map(|t| t.version.0).collect()
}

#[test]
fn the_version_that_a_trainer_published_samples_next() {
    for kind in [Kind::Vllm, Kind::Sglang] {
        let mock = Mock::start(kind);
        mock.set_label("v7-000000aa");
        let engine = remote(vec![backend(&mock)], following());
        assert_eq!(versions(&engine, 1), [7; 20], "{kind:?}");
        // No probe runs in between: the request finds the new weights by itself.
        mock.set_label("v8-000000aa");
        assert_eq!(versions(&engine, 2), [8; 20], "{kind:?}");
        // A trainer may go back to a checkpoint.
        mock.set_label("v5-000000aa");
        assert_eq!(versions(&engine, 3), [5; 20], "{kind:?}");
        assert_eq!(engine.status().version, PolicyVersion(5));
        assert_eq!(engine.counters().failed_attempts, 0, "{kind:?}");
    }
}

/// Weights that change in the middle of an attempt refuse nothing: its tokens stay, as those of the older
/// version, and the rest is sampled by the newer one.
#[test]
fn a_swap_in_the_middle_refuses_no_request() {
    let backends: [fn(&Mock) -> Arc<dyn Backend>; 3] =
        [backend, |m| vllm(m, VllmApi::Generate), backend];
    let kinds = [Kind::Vllm, Kind::Vllm, Kind::Sglang];
    for (kind, make) in kinds.into_iter().zip(backends) {
        let mock = Mock::start(kind);
        let engine = remote(vec![make(&mock)], following());
        mock.fail_next(Fault::OtherWeights);
        let found = versions(&engine, 1);
        assert!(
            found.is_sorted() && found.iter().all(|v| [0, 999].contains(v)),
            "{found:?}"
        );
        assert_eq!(versions(&engine, 2), [999; 20], "{kind:?}");
        assert_eq!(engine.counters().wrong_version, 0, "{kind:?}");
    }
}

/// SGLang's label reports that weights are being loaded: a request that runs meanwhile waits for the new
/// ones.
#[test]
fn a_request_in_flight_while_weights_are_loaded_is_not_refused() {
    for kind in [Kind::Sglang, Kind::SglangIncremental] {
        let mock = Mock::start(kind);
        mock.set_label("v0-000000aa");
        let engine = remote(vec![backend(&mock)], following());
        mock.hold_next();
        let running = submit(&engine, long(1));
        until("it samples", || engine.counters().sampled_tokens > 1);
        mock.set_label("loading-v1-000000aa");
        mock.release();
        until("the attempt is interrupted", || {
            engine.counters().interrupted_attempts > 0
        });
        assert_eq!(mock.generations(), 1, "nothing is sampled meanwhile");
        mock.set_label("v1-000000aa");
        let outcome = running.outcome();
        assert_eq!(outcome.reason(), &FinishReason::Length, "{outcome:?}");
        let found: Vec<u64> = outcome.tokens.iter().map(|t| t.version.0).collect();
        assert!(found.len() == 20 && found.is_sorted(), "{found:?}");
        assert_eq!((found[0], found[19]), (0, 1), "{found:?}");
        let counters = engine.counters();
        assert_eq!((counters.failed_attempts, counters.wrong_version), (0, 0));
    }
}

/// While a trainer loads one server after the other, those that have the newest weights serve.
#[test]
fn servers_are_followed_one_by_one() {
    let mocks = [Mock::start(Kind::Vllm), Mock::start(Kind::Sglang)];
    let engine = remote(mocks.iter().map(backend).collect(), following());
    mocks[1].set_label("loading-v1-000000aa");
    until("the loading one is left alone", || {
        engine.engines()[1].idle_because.is_some()
    });
    assert_eq!(versions(&engine, 1), [0; 20]);
    mocks[1].set_label("v1-000000aa");
    until("the new version is found", || {
        engine.status().version == PolicyVersion(1)
    });
    let before = mocks[0].generations();
    assert_eq!(versions(&engine, 2), [1; 20]);
    assert_eq!(mocks[0].generations(), before, "it has the older weights");
    mocks[0].set_label("v1-000000aa");
    until("both serve", || {
        engine.engines().iter().all(|e| e.idle_because.is_none())
    });
    assert_eq!(versions(&engine, 3), [1; 20]);
}

/// A server that was started anew has its first weights again, and serves with them if no other is newer.
#[test]
fn a_restarted_server_is_followed_back_to_its_first_weights() {
    let mut mock = Mock::start(Kind::Vllm);
    let engine = remote(vec![backend(&mock)], following());
    mock.set_label("v3-000000aa");
    assert_eq!(versions(&engine, 1), [3; 20]);
    mock.restart();
    assert_eq!(versions(&engine, 2), [0; 20]);
}
