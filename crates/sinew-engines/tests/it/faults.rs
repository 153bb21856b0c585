//! Each thing that a server can do wrong, on each kind of server.

use crate::mock::{Fault, Kind, MODEL, Mock};
use crate::support::{backend, config, hasty, remote, request, submit, until, until_idle_because};
use sinew_engines::{RemoteEngine, VllmApi};
use sinew_types::{Engine, FinishReason};
use std::time::Duration;

/// A server of each kind, with an engine in front of it.
fn each(test: impl Fn(&str, &Mock, &RemoteEngine)) {
    let kinds = [
        Kind::Vllm,
        Kind::Vllm,
        Kind::Sglang,
        Kind::SglangIncremental,
    ];
    for (i, kind) in kinds.into_iter().enumerate() {
        let mock = Mock::start(kind);
        let api = match i {
            1 => VllmApi::Generate,
            _ => VllmApi::Completions,
        };
        let engine = remote(vec![hasty(&mock, api)], config());
        let name = format!("{kind:?} {i}");
        eprintln!("{name}");
        test(&name, &mock, &engine);
    }
}

/// A request whose output does not end before 10 tokens.
fn long(id: u64) -> sinew_types::GenerateRequest {
    let mut request = request(id, &[11, 12, 13], 10);
    request.sampling.stop_ids = vec![255];
    request
}

fn exact(name: &str, outcome: &crate::support::Outcome) {
    let mut prefix = vec![11, 12, 13];
    for token in &outcome.tokens {
        let gap = (token.logprob - MODEL.logprob(&prefix, token.id)).abs();
        assert!(gap < 1e-4, "{name}: token {}", token.id);
        prefix.push(token.id);
    }
    assert_eq!(outcome.tokens.len(), 10, "{name}");
    assert_eq!(outcome.reason(), &FinishReason::Length, "{name}");
}

#[test]
fn failures_before_the_first_token_are_tried_again() {
    for fault in [
        Fault::Status(500),
        Fault::Status(429),
        Fault::Status(503),
        Fault::Hang,
        Fault::CutAfter(0),
        Fault::SilentAfter(0),
        Fault::ErrorAfter(0, 500),
        Fault::ErrorAfter(0, 503),
    ] {
        each(|name, mock, engine| {
            mock.fail_next(fault.clone());
            let outcome = submit(engine, long(1)).outcome();
            exact(&format!("{name} {fault:?}"), &outcome);
            assert_eq!(engine.counters().failed_attempts, 1, "{name} {fault:?}");
        });
    }
}

#[test]
fn failures_in_the_middle_go_on_from_the_ids_so_far() {
    for fault in [
        Fault::CutAfter(4),
        Fault::SilentAfter(4),
        Fault::HangAfter(4),
        Fault::ErrorAfter(4, 500),
    ] {
        each(|name, mock, engine| {
            mock.fail_next(fault.clone());
            let outcome = submit(engine, long(1)).outcome();
            exact(&format!("{name} {fault:?}"), &outcome);
            let counters = engine.counters();
            assert_eq!(
                (counters.attempts, counters.replayed_tokens),
                (2, 4),
                "{name} {fault:?}"
            );
            // The second prompt was the first and what came, and not a token was lost.
            let seen = mock.state.seen.lock().unwrap();
            let ids = ["prompt", "token_ids", "input_ids"];
            let prompt = ids.iter().find_map(|k| seen[1].get(k)).unwrap();
            let mut expected = vec![11, 12, 13];
            expected.extend(&outcome.ids()[..4]);
            assert_eq!(*prompt, serde_json::json!(expected), "{name}");
        });
    }
}

#[test]
fn tokens_that_cannot_be_right_are_never_handed_on() {
    for fault in [
        Fault::WrongIds,
        Fault::UnknownId,
        Fault::NanLogprob,
        Fault::NoLogprobs,
        Fault::WrongEcho,
    ] {
        each(|name, mock, engine| {
            mock.fail_next(fault.clone());
            let outcome = submit(engine, long(1)).outcome();
            exact(&format!("{name} {fault:?}"), &outcome);
            let counters = engine.counters();
            assert_eq!(counters.wrong_answers, 1, "{name} {fault:?}");
            assert_eq!(
                counters.replayed_tokens, 0,
                "{name} {fault:?}: none was believed"
            );
            assert_eq!(counters.breaker_opened, 1, "{name} {fault:?}");
        });
    }
}

#[test]
fn a_stop_that_nobody_asked_for_is_refused() {
    each(|name, mock, engine| {
        mock.fail_next(Fault::OwnStop);
        let outcome = submit(engine, long(1)).outcome();
        assert!(outcome.end.is_ok(), "{name}: {:?}", outcome.end);
        assert_eq!(engine.counters().wrong_answers, 1, "{name}");
    });
}

#[test]
fn a_request_that_the_server_refuses_fails_with_its_words() {
    each(|name, mock, engine| {
        mock.fail_next(Fault::Status(400));
        let outcome = submit(engine, long(1)).outcome();
        assert!(
            outcome.error().contains("told to fail"),
            "{name}: {}",
            outcome.error()
        );
        assert_eq!(engine.counters().attempts, 1, "{name}: not tried again");
    });
}

#[test]
fn retries_are_bounded() {
    each(|name, mock, engine| {
        (0..20).for_each(|_| mock.fail_next(Fault::Status(500)));
        let outcome = submit(engine, long(1)).outcome();
        let error = outcome.error();
        assert!(
            error.contains("5 attempts failed in a row") && error.contains("500"),
            "{name}: {error}"
        );
        assert_eq!(engine.counters().attempts, 5, "{name}");
    });
}

#[test]
fn aborting_closes_the_connection() {
    each(|name, mock, engine| {
        mock.fail_next(Fault::HangAfter(2));
        let pending = submit(engine, long(1));
        pending.next();
        engine.abort(sinew_types::RequestId(1));
        assert_eq!(pending.outcome().reason(), &FinishReason::Aborted, "{name}");
        until("the server notices", || {
            Mock::count(&mock.state.abandoned) == 1
        });
        if name.starts_with("Sglang") {
            until("it is told the name", || {
                Mock::count(&mock.state.aborted_by_name) == 1
            });
        }
    });
}

#[test]
fn slow_servers_are_waited_for() {
    each(|name, mock, engine| {
        mock.fail_next(Fault::Slow(20));
        exact(name, &submit(engine, long(1)).outcome());
        assert_eq!(engine.counters().attempts, 1, "{name}");
    });
}

#[test]
fn a_server_that_starts_late_is_waited_for() {
    let mock = Mock::start(Kind::Vllm);
    mock.state
        .starting
        .store(true, std::sync::atomic::Ordering::SeqCst);
    let backends = vec![backend(&mock)];
    let engine = RemoteEngine::new(backends, None, config()).unwrap();
    until_idle_because(&engine, "Loading model");
    let pending = submit(&engine, long(1));
    assert!(pending.nothing_for(Duration::from_millis(50)));
    mock.state
        .starting
        .store(false, std::sync::atomic::Ordering::SeqCst);
    exact("late", &pending.outcome());
}

#[test]
fn a_queue_without_an_engine_has_a_deadline_and_says_why() {
    let mut mock = Mock::start(Kind::Sglang);
    let backends = vec![backend(&mock)];
    mock.kill();
    let mut config = config();
    config.router.max_wait_s = 2.0;
    let engine = RemoteEngine::new(backends, None, config).unwrap();
    let error = submit(&engine, long(1)).outcome().error();
    assert!(
        error.contains("no engine within 2 s") && error.contains("connect"),
        "{error}"
    );
}
