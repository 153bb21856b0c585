//! Adapters that requests name, and log-probabilities of their prompts.

use super::tests::{config, drain, end, good, id, request, token};
use super::*;
use crate::attempt::Attempt;
use crate::backend::Probe;
use sinew_types::PromptLogprobs;

fn name(text: &str) -> AdapterName {
    AdapterName::new(text).unwrap()
}

fn routed(server_name: &str, version: u64) -> RoutedAdapter {
    RoutedAdapter {
        id: id(version),
        server_name: server_name.to_owned(),
    }
}

fn router(config: RouterConfig, engines: usize) -> Router {
    let names = (0..engines).map(|i| format!("e{i}")).collect();
    let mut router = Router::new(config, names, id(3));
    (0..engines).for_each(|i| router.probed(0.0, i, Ok(good(3))));
    router
}

/// Loads an adapter where `ok` says so.
fn load(r: &mut Router, text: &str, adapter: RoutedAdapter, ok: &[bool]) -> bool {
    let result = |ok: &bool| {
        let failed = AttemptError::Unsupported("test".to_owned());
        ok.then_some(()).ok_or(failed)
    };
    let results: Vec<_> = ok.iter().map(result).enumerate().collect();
    r.adapter_loaded(0.0, &name(text), adapter, &results)
}

fn asks(id: u64, adapter: Option<&str>) -> GenerateRequest {
    GenerateRequest {
        adapter: adapter.map(name),
        ..request(id, vec![1, 2, 3, 4, 5])
    }
}

fn starts(r: &mut Router) -> Vec<(usize, Attempt)> {
    let starts = drain(r).into_iter().filter_map(|c| match c {
        Command::Start { engine, attempt } => Some((engine, attempt)),
        _ => None,
    });
    starts.collect()
}

fn failed(commands: &[Command]) -> Vec<(u64, EngineError)> {
    let failed = commands.iter().filter_map(|c| match c {
        Command::Tell(EngineEvent::Failed { request, error }) => Some((request.0, error.clone())),
        _ => None,
    });
    failed.collect()
}

fn unknown(text: &str) -> EngineError {
    EngineError::UnknownAdapter { name: name(text) }
}

#[test]
fn a_request_runs_where_its_adapter_is() {
    let mut r = router(config(), 2);
    assert_eq!(r.submit(0.0, asks(1, Some("a"))), Err(unknown("a")));
    assert!(!load(&mut r, "a", routed("a-0", 7), &[false, false]));
    assert_eq!(r.submit(0.0, asks(1, Some("a"))), Err(unknown("a")));
    assert!(load(&mut r, "a", routed("a-1", 7), &[false, true]));
    assert!(load(&mut r, "b", routed("b-2", 9), &[true, false]));
    for (id, adapter) in [(1, Some("a")), (2, Some("b")), (3, None)] {
        r.submit(0.0, asks(id, adapter)).unwrap();
    }
    r.tick(0.0);
    let started = starts(&mut r);
    let seen: Vec<_> = started
        .iter()
        .map(|(engine, a)| (*engine, a.adapter.as_deref(), a.weights, a.base))
        .collect();
    assert_eq!(seen[0], (1, Some("a-1"), id(7), Some(id(3))));
    assert_eq!(seen[1], (0, Some("b-2"), id(9), Some(id(3))));
    assert_eq!((seen[2].1, seen[2].2, seen[2].3), (None, id(3), None));
    assert_eq!(started[0].1.served(), Some(id(3)));
    let salts: BTreeSet<_> = started.iter().map(|(_, a)| a.cache_salt()).collect();
    assert_eq!(salts.len(), 3, "their keys and values are kept apart");
    // Tokens carry the version of the adapter.
    r.tokens(started[0].1.id, vec![token(8)], None);
    let told = drain(&mut r);
    let Some(Command::Tell(EngineEvent::Tokens { tokens, .. })) = told.last() else {
        panic!("{told:?}");
    };
    assert_eq!(tokens[0].version, PolicyVersion(7));
}

#[test]
fn an_engine_without_the_adapter_is_named_when_a_request_is_late() {
    let mut r = router(config(), 1);
    load(&mut r, "a", routed("a-1", 7), &[true]);
    // It was started anew, and has no adapter.
    let lost = Probe {
        adapters: Some(BTreeSet::new()),
        ..good(3)
    };
    r.probed(1.0, 0, Ok(lost));
    r.submit(1.0, asks(1, Some("a"))).unwrap();
    r.tick(60.0);
    let failed = failed(&drain(&mut r));
    let why = failed[0].1.to_string();
    assert!(why.contains("e0: it does not have the adapter a"), "{why}");
    // A probe that does not know leaves what was known.
    r.adapter_repaired(0, "a-1");
    r.probed(61.0, 0, Ok(good(3)));
    r.submit(61.0, asks(2, Some("a"))).unwrap();
    r.tick(61.0);
    assert_eq!(starts(&mut r).len(), 1);
}

#[test]
fn a_replaced_adapter_samples_the_rest_of_its_requests() {
    let mut r = router(config(), 2);
    load(&mut r, "a", routed("a-1", 7), &[true, true]);
    load(&mut r, "b", routed("b-2", 9), &[true, true]);
    r.submit(0.0, asks(1, Some("a"))).unwrap();
    r.submit(0.0, asks(2, Some("b"))).unwrap();
    r.tick(0.0);
    let before = starts(&mut r);
    r.tokens(before[0].1.id, vec![token(8)], None);
    drain(&mut r);
    load(&mut r, "a", routed("a-3", 8), &[false, true]);
    let commands = drain(&mut r);
    let (engine, first) = &before[0];
    let cancelled = Command::Cancel {
        engine: *engine,
        attempt: first.id,
    };
    assert!(commands.contains(&cancelled), "{commands:?}");
    let again = commands.iter().find_map(|c| match c {
        Command::Start { engine, attempt } => Some((*engine, attempt.clone())),
        _ => None,
    });
    let (engine, attempt) = again.expect("it continues at once");
    assert_eq!((engine, attempt.adapter.as_deref()), (1, Some("a-3")));
    assert_eq!(*attempt.prompt, [1, 2, 3, 4, 5, 8]);
    assert_eq!(commands.len(), 2, "the other request goes on");
    r.tokens(attempt.id, vec![token(9)], None);
    let told = drain(&mut r);
    assert!(
        matches!(told.last(), Some(Command::Tell(EngineEvent::Tokens { tokens, .. }))
        if tokens[0].version == PolicyVersion(8))
    );
}

#[test]
fn dropping_an_adapter_ends_its_requests_only() {
    let mut r = router(
        RouterConfig {
            max_running: 2,
            ..config()
        },
        1,
    );
    load(&mut r, "a", routed("a-1", 7), &[true]);
    load(&mut r, "b", routed("b-2", 7), &[true]);
    for (id, adapter) in [(1, Some("a")), (2, Some("b")), (3, Some("a")), (4, None)] {
        r.submit(0.0, asks(id, adapter)).unwrap();
    }
    r.tick(0.0);
    assert_eq!(starts(&mut r).len(), 2);
    r.adapter_dropped(1.0, &name("none"));
    assert!(drain(&mut r).is_empty());
    r.adapter_dropped(1.0, &name("a"));
    let commands = drain(&mut r);
    assert_eq!(failed(&commands), [(1, unknown("a")), (3, unknown("a"))]);
    assert!(matches!(commands[0], Command::Cancel { engine: 0, .. }));
    assert!(
        matches!(commands.last(), Some(Command::Start { .. })),
        "the next one"
    );
    assert_eq!(r.submit(1.0, asks(5, Some("a"))), Err(unknown("a")));
}

#[test]
fn the_bound_on_adapters_is_named() {
    let mut r = router(
        RouterConfig {
            max_adapters: 1,
            ..config()
        },
        1,
    );
    assert_eq!(r.check_adapter(&name("a")), Ok(()));
    load(&mut r, "a", routed("a-1", 7), &[true]);
    assert_eq!(r.check_adapter(&name("a")), Ok(()), "it is replaced");
    let refused = r.check_adapter(&name("b")).unwrap_err().to_string();
    assert!(refused.contains("max_adapters = 1"), "{refused}");
}

/// A server has the weights that it was started with where weights are adapters themselves.
#[test]
fn named_adapters_stand_next_to_those_of_a_run() {
    let run = RouterConfig {
        adapters: Some("run".to_owned()),
        ..config()
    };
    let mut r = router(run, 1);
    load(&mut r, "a", routed("a-1", 7), &[true]);
    r.submit(0.0, asks(1, Some("a"))).unwrap();
    r.submit(0.0, asks(2, None)).unwrap();
    r.tick(0.0);
    let started = starts(&mut r);
    assert_eq!(started[0].1.adapter.as_deref(), Some("a-1"));
    assert_eq!((started[0].1.base, started[0].1.served()), (None, None));
    assert_eq!(started[1].1.adapter.as_deref(), Some("run-v3-000000aa"));
    assert_eq!(r.in_use(0), BTreeSet::from([id(3)]), "folders of the run");
}

#[test]
fn new_weights_interrupt_attempts_with_adapters_on_every_engine() {
    let mut r = router(config(), 1);
    load(&mut r, "a", routed("a-1", 7), &[true]);
    r.submit(0.0, asks(1, Some("a"))).unwrap();
    r.submit(0.0, asks(2, None)).unwrap();
    r.tick(0.0);
    let started = starts(&mut r);
    r.load_begins(1.0, &[true]);
    let cancelled = [Command::Cancel {
        engine: 0,
        attempt: started[0].1.id,
    }];
    assert_eq!(drain(&mut r), cancelled);
    r.loaded(2.0, id(4), &[(0, Ok(()))]);
    let again = starts(&mut r);
    assert_eq!(again[0].1.base, Some(id(4)));
    assert_eq!(again[0].1.weights, id(7));
}

#[test]
fn a_prompt_is_reported_once_whatever_becomes_of_the_attempt() {
    let mut r = router(config(), 1);
    let asked = PromptLogprobs::default();
    let request = GenerateRequest {
        prompt_logprobs: Some(asked.clone()),
        ..request(1, vec![1, 2])
    };
    r.submit(0.0, request).unwrap();
    r.tick(0.0);
    let (_, first) = starts(&mut r).remove(0);
    assert_eq!(first.prompt_logprobs.as_deref(), Some(&asked));
    // It is interrupted before, and asks again.
    r.pause(1.0, true);
    r.pause(1.0, false);
    let (_, second) = starts(&mut r).remove(0);
    assert_eq!(second.prompt_logprobs.as_deref(), Some(&asked));
    let scored = vec![PromptLogprob {
        position: 1,
        logprob: -1.0,
        top: Vec::new(),
        targets: Vec::new(),
    }];
    r.prompt(first.id, scored.clone());
    assert!(drain(&mut r).is_empty(), "of an attempt that is over");
    r.prompt(second.id, scored.clone());
    let told = EngineEvent::Prompt {
        request: RequestId(1),
        logprobs: scored,
    };
    assert_eq!(drain(&mut r), [Command::Tell(told)]);
    r.pause(2.0, true);
    r.pause(2.0, false);
    let (_, third) = starts(&mut r).remove(0);
    assert_eq!(third.prompt_logprobs, None);
    r.attempt_ended(3.0, third.id, end(FinishReason::Length), 0.0);
    assert!(matches!(
        drain(&mut r)[..],
        [Command::Tell(EngineEvent::Finished { .. })]
    ));
}
