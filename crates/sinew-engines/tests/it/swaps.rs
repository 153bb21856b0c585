//! Loads of full weights: requests that stay open, replicas that disagree, answers that get lost.

use crate::mock::{Keeping, Kind, Mock};
use crate::support::{
    self, Bench, Pending, backend, config, generate, hasty, load, long, submit, until, versions,
};
use sinew_engines::{Backend, VllmApi};
use sinew_types::EngineError;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Servers with the weights of version 1, behind one engine.
fn bench(kinds: &[Kind], backend: fn(&Mock) -> Arc<dyn Backend>) -> Bench {
    let b = support::bench(kinds, backend, config());
    load(&b.engine, 1).unwrap();
    b.all_serve();
    b
}

/// Servers whose answers name the weights of each token; that is known from an answer.
fn naming(kind: Kind) -> Bench {
    match kind {
        Kind::Vllm => naming_by(kind, generate),
        _ => naming_by(kind, backend),
    }
}

fn naming_by(kind: Kind, backend: fn(&Mock) -> Arc<dyn Backend>) -> Bench {
    let b = bench(&[kind], backend);
    b.mocks[0].state.spans.store(true, Ordering::SeqCst);
    assert_eq!(versions(submit(&b.engine, long(100))), [1; 20]);
    b.mocks[0].calls();
    b
}

/// A request that stands in the middle of its output until the server is released.
fn running(b: &Bench, id: u64) -> Pending {
    b.mocks[0].hold_next();
    let before = b.engine.counters().sampled_tokens;
    let pending = submit(&b.engine, long(id));
    until("it samples", || {
        b.engine.counters().sampled_tokens > before + 2
    });
    pending
}

#[test]
fn requests_stay_open_and_each_token_has_the_weights_that_sampled_it() {
    for kind in [Kind::Vllm, Kind::Sglang, Kind::SglangIncremental] {
        let b = naming(kind);
        let pending = running(&b, 1);
        load(&b.engine, 2).unwrap();
        b.mocks[0].release();
        let found = versions(pending);
        assert!(
            found.is_sorted() && found[0] == 1 && found[19] == 2,
            "{kind:?}: {found:?}"
        );
        assert_eq!(b.mocks[0].generations(), 2, "{kind:?}: asked once each");
        let counters = b.engine.counters();
        assert_eq!(
            (counters.interrupted_attempts, counters.failed_attempts),
            (0, 0),
            "{kind:?}"
        );
        let expected: &[&str] = match kind {
            Kind::Vllm => &[
                "/pause?mode=keep",
                "/update_weight_version loading-v2-000000aa",
                "/collective_rpc",
                "/reset_prefix_cache?reset_running_requests=true",
                "/update_weight_version v2-000000aa",
                "/resume",
            ],
            _ => &[
                "/pause_generation",
                "/update_weight_version loading-v2-000000aa",
                "/update_weights_from_disk",
                "/continue_generation",
            ],
        };
        assert_eq!(b.mocks[0].calls(), expected, "{kind:?}");
        assert_eq!(versions(submit(&b.engine, long(2))), [2; 20], "{kind:?}");
    }
}

/// `/v1/completions` names no weights, nor does an SGLang without spans: attempts end, as requests do not.
#[test]
fn requests_go_on_in_another_attempt_where_tokens_are_not_named() {
    for kind in [Kind::Vllm, Kind::Sglang] {
        let b = bench(&[kind], backend);
        assert_eq!(versions(submit(&b.engine, long(100))), [1; 20]);
        b.mocks[0].calls();
        let pending = running(&b, 1);
        load(&b.engine, 2).unwrap();
        b.mocks[0].release();
        let found = versions(pending);
        assert!(found.is_sorted() && found[0] == 1 && found[19] == 2);
        assert_eq!(b.engine.counters().interrupted_attempts, 1, "{kind:?}");
        let calls = b.mocks[0].calls();
        let paused = calls.iter().any(|c| c == "/pause?mode=abort");
        assert_eq!(paused, kind == Kind::Vllm, "{calls:?}");
        assert!(!calls.iter().any(|c| c == "/pause_generation"), "{calls:?}");
    }
}

#[test]
fn a_server_that_cannot_keep_requests_is_asked_once_and_none_is_lost() {
    for kind in [Kind::Vllm, Kind::Sglang] {
        for keeping in [Keeping::Refuses, Keeping::Ends] {
            let b = naming(kind);
            *b.mocks[0].state.keeping.lock().unwrap() = keeping;
            let pending = running(&b, 1);
            load(&b.engine, 2).unwrap();
            b.mocks[0].release();
            let found = versions(pending);
            assert!(
                found.is_sorted() && found[0] == 1 && found[19] == 2,
                "{kind:?} {keeping:?}: {found:?}"
            );
            let asked = |calls: &[String]| {
                let keep = ["/pause?mode=keep", "/pause_generation"];
                calls.iter().any(|c| keep.contains(&c.as_str()))
            };
            assert!(asked(&b.mocks[0].calls()), "{kind:?} {keeping:?}");
            let pending = running(&b, 2);
            load(&b.engine, 3).unwrap();
            b.mocks[0].release();
            assert_eq!(versions(pending)[19], 3);
            let calls = b.mocks[0].calls();
            assert!(!asked(&calls), "{kind:?} {keeping:?}: {calls:?}");
        }
    }
}

/// Number of the engine in quarantine.
fn in_quarantine(b: &Bench) -> Option<usize> {
    let engines = b.engine.engines();
    let why = |e: &sinew_engines::route::EngineView| e.idle_because.clone().unwrap_or_default();
    engines.iter().position(|e| why(e).contains("quarantine"))
}

#[test]
fn a_replica_that_differs_from_the_first_is_never_sampled_from() {
    for kind in [Kind::Vllm, Kind::Sglang] {
        let b = bench(&[kind, kind], backend);
        b.mocks[1].state.wrong_sums.store(true, Ordering::SeqCst);
        load(&b.engine, 2).unwrap();
        // The one that is compared first decides.
        let out = in_quarantine(&b).expect("one is in quarantine");
        let why = b.engine.engines()[out].idle_because.clone().unwrap();
        assert!(
            why.contains("v2-000000aa: its weights differ from those of http://")
                && why.contains("1 of 1 tensors")
                && why.contains("number`"),
            "{why}"
        );
        assert_eq!(b.mocks[out].label(), "quarantined-v2-000000aa");
        let before = b.mocks[out].generations();
        b.mocks[out].calls();
        for id in 0..4 {
            assert_eq!(versions(submit(&b.engine, long(id))), [2; 20]);
        }
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(b.mocks[out].generations(), before, "{kind:?}");
        assert_eq!(in_quarantine(&b), Some(out), "{kind:?}");
        let calls = b.mocks[out].calls();
        assert!(calls.is_empty(), "it is not loaded again: {calls:?}");
        b.mocks[1].state.wrong_sums.store(false, Ordering::SeqCst);
        load(&b.engine, 3).unwrap();
        b.all_serve();
    }
}

#[test]
fn servers_without_sums_are_not_compared() {
    for kind in [Kind::Vllm, Kind::Sglang] {
        let b = bench(&[kind, kind], backend);
        for mock in &b.mocks {
            mock.state.no_sums.store(true, Ordering::SeqCst);
        }
        b.mocks[1].state.wrong_sums.store(true, Ordering::SeqCst);
        load(&b.engine, 2).unwrap();
        b.all_serve();
    }
}

/// Whatever answer gets lost, nothing is sampled by weights that are not verified, and the next load works.
#[test]
fn a_lost_answer_leaves_no_server_paused_or_wrong() {
    let vllm: &[&str] = &[
        "/pause",
        "/update_weight_version",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/resume",
    ];
    let sglang: &[&str] = &[
        "/pause_generation",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/continue_generation",
    ];
    for (kind, commands) in [(Kind::Vllm, vllm), (Kind::Sglang, sglang)] {
        for command in commands {
            let b = naming(kind);
            *b.mocks[0].state.loses.lock().unwrap() = Some((*command).to_owned());
            let pending = running(&b, 1);
            let lost = load(&b.engine, 2);
            b.mocks[0].release();
            assert!(
                matches!(lost, Err(EngineError::Weights(_))),
                "{kind:?} {command}: {lost:?}"
            );
            // The last good version is loaded again. Tokens of the new one are named as such.
            let found = versions(pending);
            let continued = ["/resume", "/continue_generation"].contains(command);
            let right = |v: &u64| *v == 1 || (continued && *v == 2);
            assert!(found.iter().all(right), "{kind:?} {command}: {found:?}");
            load(&b.engine, 3).unwrap();
            assert_eq!(versions(submit(&b.engine, long(2))), [3; 20]);
            assert!(!b.mocks[0].state.frozen.load(Ordering::SeqCst));
            assert!(!b.mocks[0].state.paused.load(Ordering::SeqCst));
        }
    }
}

/// Another process on the port has the weights that it was started with, whatever was loaded before.
#[test]
fn a_server_that_is_restarted_in_the_middle_of_a_load_gets_no_label() {
    let vllm: &[&str] = &["/collective_rpc", "/reset_prefix_cache"];
    let sglang: &[&str] = &["/update_weights_from_disk"];
    for (kind, commands) in [(Kind::Vllm, vllm), (Kind::Sglang, sglang)] {
        for command in commands {
            let b = naming(kind);
            *b.mocks[0].state.restarts_after.lock().unwrap() = Some((*command).to_owned());
            let pending = running(&b, 1);
            let error = load(&b.engine, 2).unwrap_err().to_string();
            b.mocks[0].release();
            assert!(
                error.contains("default") || error.contains("no label"),
                "{kind:?} {command}: {error}"
            );
            assert_eq!(versions(pending), [1; 20], "{kind:?} {command}");
            let calls = b.mocks[0].calls();
            let wrong = "/update_weight_version v2-000000aa".to_owned();
            assert!(!calls.contains(&wrong), "{calls:?}");
            assert_eq!(b.mocks[0].label(), "v1-000000aa");
        }
    }
}

#[test]
fn a_load_that_lasts_longer_than_a_token_may_take_cuts_no_request() {
    let b = naming_by(Kind::Vllm, |mock| hasty(mock, VllmApi::Generate));
    let pending = running(&b, 1);
    // Longer than the limit between two tokens, 2 s.
    *b.mocks[0].state.load_ms.lock().unwrap() = 2500;
    load(&b.engine, 2).unwrap();
    b.mocks[0].release();
    let found = versions(pending);
    assert!(found.is_sorted() && found[19] == 2, "{found:?}");
    assert_eq!(b.engine.counters().failed_attempts, 0);
}
