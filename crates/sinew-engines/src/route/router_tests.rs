use super::*;
use crate::backend::{Probe, ServedWeights};
use proptest::prelude::*;
use sinew_types::SamplingParams;

pub(super) fn config() -> RouterConfig {
    RouterConfig {
        max_waiting: 8,
        max_running: 3,
        max_failures: 3,
        max_wait_s: 50.0,
        block_tokens: 4,
        reserve_tokens: 8,
        max_imbalance: 1,
        ..RouterConfig::default()
    }
}

fn router(engines: usize) -> Router {
    let names = (0..engines).map(|i| format!("e{i}")).collect();
    let mut router = Router::new(config(), names, id(3));
    (0..engines).for_each(|i| router.probed(0.0, i, Ok(good(3))));
    router
}

pub(super) fn good(version: u64) -> Probe {
    Probe::new(ServedWeights::Version(id(version)))
}

pub(super) fn id(version: u64) -> WeightsId {
    WeightsId::new(PolicyVersion(version), Lineage(0xaa))
}

pub(super) fn request(id: u64, prompt: Vec<u32>) -> GenerateRequest {
    let sampling = SamplingParams {
        max_tokens: 10,
        stop_ids: vec![99],
        seed: 5,
        ..SamplingParams::default()
    };
    GenerateRequest::new(RequestId(id), prompt, sampling)
}

pub(super) fn token(id: u32) -> AttemptToken {
    AttemptToken {
        id,
        logprob: -1.0,
        top: Vec::new(),
        version: None,
    }
}

pub(super) fn drain(router: &mut Router) -> Vec<Command> {
    std::iter::from_fn(|| router.command()).collect()
}

/// The only attempt that was started.
fn started(router: &mut Router) -> (usize, crate::attempt::Attempt) {
    let mut starts = drain(router).into_iter().filter_map(|c| match c {
        Command::Start { engine, attempt } => Some((engine, attempt)),
        _ => None,
    });
    let first = starts.next().expect("an attempt was started");
    assert!(starts.next().is_none(), "one attempt only");
    first
}

fn submit(router: &mut Router, now: f64, request: GenerateRequest) {
    router.submit(now, request).unwrap();
    router.tick(now);
}

pub(super) fn end(reason: FinishReason) -> Result<AttemptEnd, AttemptError> {
    Ok(AttemptEnd {
        reason,
        cached_prompt_tokens: 4,
        routes: None,
    })
}

pub(super) fn cut() -> Result<AttemptEnd, AttemptError> {
    Err(AttemptError::Cut("test".to_owned()))
}

#[test]
fn failover_goes_on_from_the_ids_so_far_on_another_engine() {
    let mut r = router(2);
    submit(&mut r, 0.0, request(1, vec![1, 2, 3, 4, 5]));
    let (first, attempt) = started(&mut r);
    assert_eq!(attempt.sampling.seed, 5);
    r.tokens(attempt.id, vec![token(7), token(8)], None);
    r.attempt_ended(1.0, attempt.id, cut(), 0.5);
    r.tokens(attempt.id, vec![token(66)], None);
    r.tick(2.0);
    let commands = drain(&mut r);
    let Some(Command::Start { engine, attempt }) = commands.last().cloned() else {
        panic!("{commands:?}");
    };
    assert_ne!(engine, first);
    assert_eq!(*attempt.prompt, [1, 2, 3, 4, 5, 7, 8]);
    assert_eq!(attempt.sampling.max_tokens, 8);
    assert_ne!(
        attempt.sampling.seed, 5,
        "the same numbers are not drawn again"
    );
    r.tokens(attempt.id, vec![token(99)], None);
    r.attempt_ended(3.0, attempt.id, end(FinishReason::StopId { id: 99 }), 0.5);
    let told = drain(&mut r);
    assert!(
        matches!(&told[0], Command::Tell(EngineEvent::Tokens { tokens, .. })
        if tokens[0].version == PolicyVersion(3))
    );
    assert!(matches!(
        &told[1],
        Command::Tell(EngineEvent::Finished {
            reason: FinishReason::StopId { id: 99 },
            cached_prompt_tokens: 4,
            ..
        })
    ));
    let c = r.counters();
    assert_eq!((c.failovers, c.replayed_tokens, c.attempts), (1, 2, 2));
}

#[test]
fn a_prompt_follows_its_prefix_unless_its_engine_is_overloaded() {
    let mut r = router(3);
    submit(&mut r, 0.0, request(1, (0..20).collect()));
    let (home, _) = started(&mut r);
    submit(&mut r, 0.0, request(2, (0..21).collect()));
    assert_eq!(started(&mut r).0, home, "the prefix attracts");
    submit(&mut r, 0.0, request(3, (0..22).collect()));
    assert_ne!(started(&mut r).0, home, "two attempts more than the idlest");
    assert_eq!(r.counters().affinity_hits, 1);
}

/// An attempt that is expected to take long counts as several: what comes next goes elsewhere.
#[test]
fn the_load_of_an_engine_is_what_its_attempts_are_expected_to_take() {
    let mut r = router(2);
    let (long, short) = (vec![1; 8], vec![2; 8]);
    for (n, (prompt, tokens)) in [(&long, 10), (&short, 1)].into_iter().enumerate() {
        submit(&mut r, 0.0, request(n as u64, prompt.clone()));
        let (_, attempt) = started(&mut r);
        r.tokens(attempt.id, (0..tokens).map(|_| token(5)).collect(), None);
        r.attempt_ended(0.0, attempt.id, end(FinishReason::Length), 0.5);
        drain(&mut r);
    }
    submit(&mut r, 1.0, request(10, long.clone()));
    let (busy, _) = started(&mut r);
    submit(&mut r, 1.0, request(11, vec![3; 8]));
    let (other, _) = started(&mut r);
    assert_ne!(other, busy);
    submit(&mut r, 1.0, request(12, vec![4; 8]));
    assert_eq!(started(&mut r).0, other, "two short ones for a long one");
}

#[test]
fn attempts_need_free_room() {
    let mut r = router(2);
    let probe = |free: usize| Probe {
        kv_tokens_total: Some(100),
        kv_tokens_free: Some(free),
        ..good(3)
    };
    r.probed(0.0, 0, Ok(probe(40)));
    r.probed(0.0, 1, Ok(probe(30)));
    // Each takes 10 + 8 tokens.
    for (id, engine) in [(1, Some(0)), (2, Some(1)), (3, Some(0)), (4, None)] {
        submit(&mut r, 0.0, request(id, vec![id as u32; 10]));
        let starts = drain(&mut r);
        let found = starts.iter().find_map(|c| match c {
            Command::Start { engine, .. } => Some(*engine),
            _ => None,
        });
        assert_eq!(found, engine, "request {id}");
    }
    r.probed(1.0, 1, Ok(probe(30)));
    assert_eq!(started(&mut r).0, 1, "a probe shows free capacity again");
}

#[test]
fn new_weights_interrupt_and_go_on() {
    let mut r = router(2);
    submit(&mut r, 0.0, request(1, vec![1]));
    let (_, attempt) = started(&mut r);
    r.tokens(attempt.id, vec![token(7)], None);
    r.load_begins(1.0, &[]);
    r.tick(100.0);
    let results = [(0, Ok(())), (1, cut().map(|_| ()))];
    assert!(r.loaded(101.0, id(4), &results));
    let (engine, attempt) = started(&mut r);
    assert_eq!((engine, attempt.weights), (0, id(4)));
    assert_eq!(*attempt.prompt, [1, 7]);
    assert_eq!(r.status(101.0).version, PolicyVersion(4));
    let view = r.engines(101.0);
    assert!(view[1].idle_because.as_deref().unwrap().contains("not v4"));
    // The other one is found to have the version after all.
    r.probed(102.0, 1, Ok(good(4)));
    assert_eq!(r.engines(102.0)[1].idle_because, None);
}

/// Attempts of engines that report the weights of each token stay open while weights are loaded.
#[test]
fn attempts_are_kept_where_each_token_is_named() {
    let mut r = router(3);
    let attempts: Vec<_> = (1..4)
        .map(|n| {
            submit(&mut r, 0.0, request(n, vec![n as u32; 3]));
            started(&mut r)
        })
        .collect();
    let on = |engine: usize| &attempts.iter().find(|a| a.0 == engine).unwrap().1;
    r.load_begins(1.0, &[true, true, false]);
    let cancelled = drain(&mut r);
    assert!(
        matches!(&cancelled[..], [Command::Cancel { engine: 2, .. }]),
        "{cancelled:?}"
    );
    let new = AttemptToken {
        version: Some(PolicyVersion(4)),
        ..token(8)
    };
    r.tokens(on(0).id, vec![token(7), new], None);
    let told = drain(&mut r);
    let Some(Command::Tell(EngineEvent::Tokens { tokens, .. })) = told.last() else {
        panic!("{told:?}");
    };
    let versions: Vec<_> = tokens.iter().map(|t| t.version.0).collect();
    assert_eq!(versions, [3, 4]);
    // An engine that has not loaded them has unknown weights: its request goes elsewhere.
    let results = [(0, Ok(())), (1, cut().map(|_| ())), (2, Ok(()))];
    assert!(r.loaded(2.0, id(4), &results));
    let commands = drain(&mut r);
    assert!(matches!(&commands[0], Command::Cancel { engine: 1, .. }));
    let starts: Vec<_> = commands[1..].iter().collect();
    let with_new = |c: &&Command| match c {
        Command::Start { engine, attempt } => *engine != 1 && attempt.weights == id(4),
        _ => false,
    };
    assert!(
        starts.len() == 2 && starts.iter().all(with_new),
        "{starts:?}"
    );
    assert_eq!(r.request_of(on(0).id), Some(RequestId(1)));
    assert_eq!(r.counters().interrupted_attempts, 2);
}

#[test]
fn weights_that_differ_between_replicas_are_kept_out_until_they_are_loaded_again() {
    let mut r = router(2);
    r.load_begins(1.0, &[]);
    let differs = || AttemptError::Sums {
        replica: "e0".to_owned(),
        differing: 1,
        tensors: 5,
        tensor: "a".to_owned(),
    };
    r.loaded(2.0, id(4), &[(0, Ok(())), (1, Err(differs()))]);
    let why = |r: &Router| r.engines(2.0)[1].idle_because.clone().unwrap_or_default();
    let label = ServedWeights::Foreign("quarantined-v4-000000aa".to_owned());
    r.probed(3.0, 1, Ok(Probe::new(label)));
    assert!(r.is_in_quarantine(1));
    assert!(
        why(&r).contains("quarantine: v4-000000aa: its weights differ from those of e0"),
        "{}",
        why(&r)
    );
    r.probed(4.0, 1, Ok(Probe::new(ServedWeights::Unlabelled)));
    assert!(!r.is_in_quarantine(1) && why(&r).contains("no label"));
    r.not_repaired(5.0, 1, &differs());
    assert!(r.is_in_quarantine(1));
    r.load_begins(6.0, &[]);
    r.loaded(7.0, id(5), &[(0, Ok(())), (1, Ok(()))]);
    assert!(!r.is_in_quarantine(1) && why(&r).is_empty());
}

#[test]
fn an_end_that_is_known_is_not_sampled_past() {
    for known in [None, Some(FinishReason::StopString { text: "x".into() })] {
        let mut r = router(1);
        submit(&mut r, 0.0, request(1, vec![1]));
        let (_, attempt) = started(&mut r);
        let last = if known.is_some() { 7 } else { 99 };
        r.tokens(attempt.id, vec![token(last)], known.clone());
        r.pause(1.0, true);
        let told = drain(&mut r);
        let expected = known.unwrap_or(FinishReason::StopId { id: 99 });
        assert!(
            matches!(told.last(), Some(Command::Tell(EngineEvent::Finished { reason, .. }))
                if *reason == expected),
            "{told:?}"
        );
    }
}

#[test]
fn a_version_fault_taints_what_came_and_the_engine() {
    let mut r = router(1);
    submit(&mut r, 0.0, request(1, vec![1]));
    let (_, attempt) = started(&mut r);
    r.tokens(attempt.id, vec![token(7)], None);
    let fault = AttemptError::Version {
        expected: id(3),
        found: "v4-000000aa".to_owned(),
    };
    r.attempt_ended(1.0, attempt.id, Err(fault), 0.0);
    assert!(matches!(
        drain(&mut r).last(),
        Some(Command::Tell(EngineEvent::Failed { .. }))
    ));
    submit(&mut r, 1.0, request(2, vec![1]));
    assert!(drain(&mut r).is_empty(), "nothing is started on it");
    r.tick(60.0);
    let told = drain(&mut r);
    assert!(
        matches!(&told[..], [Command::Tell(EngineEvent::Failed {
        error: EngineError::Stopped(why), .. })] if why.contains("not v3")),
        "{told:?}"
    );
    assert_eq!(r.counters().wrong_version, 1);
}

#[test]
fn a_request_that_no_server_takes_fails_at_once() {
    let mut r = router(2);
    submit(&mut r, 0.0, request(1, vec![1]));
    let (_, attempt) = started(&mut r);
    let refused = EngineError::PromptTooLong {
        prompt: 1,
        context: 1,
    };
    r.attempt_ended(
        0.0,
        attempt.id,
        Err(AttemptError::Refused(refused.clone())),
        0.0,
    );
    assert!(matches!(drain(&mut r).last(),
        Some(Command::Tell(EngineEvent::Failed { error, .. })) if *error == refused));
}

#[test]
fn a_busy_engine_is_asked_again_until_the_deadline() {
    let mut r = router(1);
    submit(&mut r, 0.0, request(1, vec![1]));
    let mut now = 0.0;
    let mut attempts = 0;
    loop {
        let commands = drain(&mut r);
        match commands.last() {
            Some(Command::Start { attempt, .. }) => {
                attempts += 1;
                let busy = AttemptError::Busy {
                    status: 429,
                    body: String::new(),
                };
                r.attempt_ended(now, attempt.id, Err(busy), 0.5);
            }
            Some(Command::Tell(EngineEvent::Failed { .. })) => break,
            other => assert!(other.is_none(), "{other:?}"),
        }
        now = r.next_tick(now).expect("something is waited for");
        r.tick(now);
    }
    assert!(
        attempts > 10 && (50.0..51.0).contains(&now),
        "{attempts} attempts until {now}"
    );
}

#[test]
fn partial_output_is_kept_or_failed_as_configured() {
    for (on_partial, kept) in [(OnPartial::Keep, true), (OnPartial::Fail, false)] {
        let mut r = router(1);
        r.config.on_partial = on_partial;
        submit(&mut r, 0.0, request(1, vec![1]));
        let (_, attempt) = started(&mut r);
        r.tokens(attempt.id, vec![token(7)], None);
        r.attempt_ended(0.0, attempt.id, cut(), 0.0);
        let told = drain(&mut r);
        let aborted = matches!(
            told.last(),
            Some(Command::Tell(EngineEvent::Finished {
                reason: FinishReason::Aborted,
                ..
            }))
        );
        assert_eq!(aborted, kept, "{told:?}");
    }
}

proptest! {
    #[test]
    fn healthy_affinity_is_kept(
        prompts in prop::collection::vec((0..5u32, 5..30usize), 1..20),
    ) {
        // One request at a time: nothing but the prefix can decide.
        let mut r = router(3);
        let mut home = HashMap::new();
        for (id, (kind, len)) in prompts.into_iter().enumerate() {
            submit(&mut r, id as f64, request(id as u64, vec![kind; len]));
            let (engine, attempt) = started(&mut r);
            prop_assert_eq!(*home.entry(kind).or_insert(engine), engine);
            r.attempt_ended(id as f64, attempt.id, end(FinishReason::Length), 0.0);
            drain(&mut r);
        }
    }
}

fn formatted(id: u64) -> GenerateRequest {
    let mut request = request(id, vec![1, 2]);
    let format = sinew_types::Format::new(sinew_types::Grammar::JsonObject);
    request.sampling.format = Some(format.into());
    request
}

#[test]
fn no_server_goes_on_in_the_middle_of_a_format() {
    let mut r = router(2);
    submit(&mut r, 0.0, formatted(1));
    let (_, attempt) = started(&mut r);
    assert!(attempt.sampling.format.is_some());
    let token = |id| AttemptToken {
        id,
        logprob: -0.5,
        top: Vec::new(),
        version: None,
    };
    r.tokens(attempt.id, vec![token(5)], None);
    let told = drain(&mut r);
    let Some(Command::Tell(EngineEvent::Tokens { tokens, .. })) = told.last() else {
        panic!("{told:?}");
    };
    let choice = tokens[0].choice.as_ref().unwrap();
    let outside = sinew_types::Enforced::Outside {
        engine: "e0".into(),
    };
    assert_eq!((&choice.law.enforced, choice.allowed), (&outside, 0));
    r.pause(0.0, true);
    r.pause(0.0, false);
    let told = drain(&mut r);
    let failed = matches!(told.last(), Some(Command::Tell(EngineEvent::Failed {
        error: EngineError::Format(why), .. })) if why.contains("after 1 tokens"));
    assert!(failed, "{told:?}");
}

#[test]
fn a_format_as_advice_is_not_sent_and_goes_on_elsewhere() {
    let names = vec!["e0".to_owned(), "e1".to_owned()];
    let config = RouterConfig {
        formats: crate::guided::FormatMode::Advice,
        ..config()
    };
    let mut r = Router::new(config, names, id(3));
    (0..2).for_each(|i| r.probed(0.0, i, Ok(good(3))));
    submit(&mut r, 0.0, formatted(1));
    let (_, attempt) = started(&mut r);
    assert_eq!(attempt.sampling.format, None);
    let token = AttemptToken {
        id: 5,
        logprob: -0.5,
        top: Vec::new(),
        version: None,
    };
    r.tokens(attempt.id, vec![token], None);
    let cut = AttemptError::Cut("it went away".to_owned());
    r.attempt_ended(0.0, attempt.id, Err(cut), 0.0);
    r.tick(60.0_f64.min(r.next_tick(0.0).unwrap()));
    let commands = drain(&mut r);
    let advised = commands.iter().any(|c| match c {
        Command::Tell(EngineEvent::Tokens { tokens, .. }) => {
            let law = &tokens[0].choice.as_ref().unwrap().law;
            law.enforced == sinew_types::Enforced::Advice
        }
        _ => false,
    });
    let goes_on = matches!(
        commands.last(),
        Some(Command::Start { attempt, .. }) if *attempt.prompt == [1, 2, 5]
    );
    assert!(advised && goes_on, "{commands:?}");
}

/// A trainer that restarts goes back to its checkpoint: what it loads then is newer, whatever the number.
#[test]
fn the_lineage_that_was_seen_last_is_followed() {
    let following = RouterConfig {
        follow: true,
        ..config()
    };
    let names = vec!["e0".to_owned(), "e1".to_owned()];
    let mut r = Router::new(following, names, WeightsId::default());
    let of = |version, lineage| {
        let id = WeightsId::new(PolicyVersion(version), Lineage(lineage));
        Ok(Probe::new(ServedWeights::Version(id)))
    };
    r.probed(0.0, 0, of(13, 0xaa));
    r.probed(0.0, 1, of(13, 0xaa));
    r.probed(1.0, 0, of(13, 0xbb));
    assert_eq!(r.weights().to_string(), "v13-000000bb");
    let why = r.engines(1.0)[1].idle_because.clone().unwrap();
    assert!(why.contains("not v13-000000bb"), "{why}");
    // One that was away comes back with the older one.
    r.probed(2.0, 1, cut().map(|_| Probe::new(ServedWeights::Unlabelled)));
    r.probed(3.0, 1, of(13, 0xaa));
    assert_eq!(r.weights().to_string(), "v13-000000bb");
    r.probed(4.0, 1, of(12, 0xbb));
    assert_eq!(r.weights().to_string(), "v13-000000bb");
    // Only the older one is left.
    r.probed(5.0, 0, cut().map(|_| Probe::new(ServedWeights::Unlabelled)));
    r.probed(5.0, 1, of(14, 0xaa));
    assert_eq!(r.weights().to_string(), "v14-000000aa");
}

#[test]
fn the_right_version_of_another_lineage_is_not_sampled_from() {
    let mut r = router(1);
    let other = WeightsId::new(PolicyVersion(3), Lineage(0xbb));
    r.probed(0.0, 0, Ok(Probe::new(ServedWeights::Version(other))));
    submit(&mut r, 0.0, request(1, vec![1]));
    assert!(drain(&mut r).is_empty());
    let why = r.engines(0.0)[0].idle_because.clone().unwrap();
    assert!(why.contains("not v3-000000aa: it has v3-000000bb"), "{why}");
    r.probed(1.0, 0, Ok(good(3)));
    started(&mut r);
}

/// A router that follows, with one engine whose info has version 3, and a request; each attempt finds
/// `label` in its first piece. Returns the number of attempts until the request ends, and the error that
/// ends it.
fn attempts_under(label: &str) -> (usize, String) {
    let following = RouterConfig {
        follow: true,
        ..config()
    };
    let mut r = Router::new(following, vec!["e0".into()], id(3));
    r.probed(0.0, 0, Ok(good(3)));
    submit(&mut r, 0.0, request(1, vec![1]));
    let mut attempts = 0;
    for second in 1..200 {
        let now = f64::from(second);
        for command in drain(&mut r) {
            match command {
                Command::Start { attempt, .. } => {
                    attempts += 1;
                    let wrong = AttemptError::Version {
                        expected: id(3),
                        found: label.to_owned(),
                    };
                    r.attempt_ended(now, attempt.id, Err(wrong), 0.0);
                }
                Command::Tell(EngineEvent::Failed { error, .. }) => {
                    return (attempts, error.to_string());
                }
                _ => {}
            }
        }
        r.probed(now, 0, Ok(good(3)));
        r.tick(now);
    }
    panic!("{attempts} attempts without an end");
}

#[test]
fn tokens_without_a_version_are_no_swap_without_end() {
    let (attempts, error) = attempts_under("");
    assert_eq!(attempts, 3, "{error}");
    assert!(error.contains("3 attempts failed in a row"), "{error}");
    // Weights that are being loaded are waited for, up to the deadline.
    let (attempts, error) = attempts_under("loading-v4-000000aa");
    assert!((40..=60).contains(&attempts), "{attempts}: {error}");
}
