use super::*;
use proptest::prelude::*;
use sinew_types::SamplingParams;
use std::collections::HashSet;

fn config() -> RouterConfig {
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
    let mut router = Router::new(config(), names, PolicyVersion(3));
    (0..engines).for_each(|i| router.probed(0.0, i, Ok(good(3))));
    router
}

fn good(version: u64) -> Probe {
    Probe::new(ServedWeights::Version(PolicyVersion(version)))
}

fn request(id: u64, prompt: Vec<u32>) -> GenerateRequest {
    GenerateRequest {
        id: RequestId(id),
        prompt,
        sampling: SamplingParams {
            max_tokens: 10,
            stop_ids: vec![99],
            seed: 5,
            ..SamplingParams::default()
        },
        priority: 0,
    }
}

fn token(id: u32) -> LegToken {
    LegToken {
        id,
        logprob: -1.0,
        top: Vec::new(),
    }
}

fn drain(router: &mut Router) -> Vec<Command> {
    std::iter::from_fn(|| router.command()).collect()
}

/// The only leg that was started.
fn started(router: &mut Router) -> (usize, crate::backend::Leg) {
    let mut starts = drain(router).into_iter().filter_map(|c| match c {
        Command::Start { engine, leg } => Some((engine, leg)),
        _ => None,
    });
    let first = starts.next().expect("a leg was started");
    assert!(starts.next().is_none(), "one leg only");
    first
}

fn submit(router: &mut Router, now: f64, request: GenerateRequest) {
    router.submit(now, request).unwrap();
    router.tick(now);
}

fn end(reason: FinishReason) -> Result<LegEnd, LegError> {
    Ok(LegEnd {
        reason,
        cached_prompt_tokens: 4,
    })
}

fn cut() -> Result<LegEnd, LegError> {
    Err(LegError::Cut("test".to_owned()))
}

#[test]
fn failover_goes_on_from_the_ids_so_far_on_another_engine() {
    let mut r = router(2);
    submit(&mut r, 0.0, request(1, vec![1, 2, 3, 4, 5]));
    let (first, leg) = started(&mut r);
    assert_eq!(leg.sampling.seed, 5);
    r.tokens(leg.id, vec![token(7), token(8)], None);
    r.leg_ended(1.0, leg.id, cut(), 0.5);
    r.tokens(leg.id, vec![token(66)], None);
    r.tick(2.0);
    let commands = drain(&mut r);
    let Some(Command::Start { engine, leg }) = commands.last().cloned() else {
        panic!("{commands:?}");
    };
    assert_ne!(engine, first);
    assert_eq!(leg.prompt, [1, 2, 3, 4, 5, 7, 8]);
    assert_eq!(leg.sampling.max_tokens, 8);
    assert_ne!(leg.sampling.seed, 5, "the same numbers are not drawn again");
    r.tokens(leg.id, vec![token(99)], None);
    r.leg_ended(3.0, leg.id, end(FinishReason::StopId { id: 99 }), 0.5);
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
    assert_eq!((c.failovers, c.replayed_tokens, c.legs), (1, 2, 2));
}

#[test]
fn a_prompt_follows_its_prefix_unless_its_engine_is_overloaded() {
    let mut r = router(3);
    submit(&mut r, 0.0, request(1, (0..20).collect()));
    let (home, _) = started(&mut r);
    submit(&mut r, 0.0, request(2, (0..21).collect()));
    assert_eq!(started(&mut r).0, home, "the prefix attracts");
    submit(&mut r, 0.0, request(3, (0..22).collect()));
    assert_ne!(started(&mut r).0, home, "two legs more than the idlest");
    assert_eq!(r.counters().affinity_hits, 1);
}

#[test]
fn legs_need_free_room() {
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
    assert_eq!(started(&mut r).0, 1, "a look shows room again");
}

#[test]
fn new_weights_interrupt_and_go_on() {
    let mut r = router(2);
    submit(&mut r, 0.0, request(1, vec![1]));
    let (_, leg) = started(&mut r);
    r.tokens(leg.id, vec![token(7)], None);
    r.load_begins(1.0);
    r.tick(100.0);
    let results = [(0, Ok(())), (1, cut().map(|_| ()))];
    assert!(r.loaded(101.0, PolicyVersion(4), &results));
    let (engine, leg) = started(&mut r);
    assert_eq!((engine, leg.version), (0, PolicyVersion(4)));
    assert_eq!(leg.prompt, [1, 7]);
    assert_eq!(r.status(101.0).version, PolicyVersion(4));
    let view = r.engines(101.0);
    assert!(view[1].idle_because.as_deref().unwrap().contains("not v4"));
    // The other one is found to have the version after all.
    r.probed(102.0, 1, Ok(good(4)));
    assert_eq!(r.engines(102.0)[1].idle_because, None);
}

#[test]
fn an_end_that_is_known_is_not_sampled_past() {
    for known in [None, Some(FinishReason::StopString { text: "x".into() })] {
        let mut r = router(1);
        submit(&mut r, 0.0, request(1, vec![1]));
        let (_, leg) = started(&mut r);
        let last = if known.is_some() { 7 } else { 99 };
        r.tokens(leg.id, vec![token(last)], known.clone());
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
    let (_, leg) = started(&mut r);
    r.tokens(leg.id, vec![token(7)], None);
    let fault = LegError::Version {
        expected: PolicyVersion(3),
        found: "v4".to_owned(),
    };
    r.leg_ended(1.0, leg.id, Err(fault), 0.0);
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
    let (_, leg) = started(&mut r);
    let refused = EngineError::PromptTooLong {
        prompt: 1,
        context: 1,
    };
    r.leg_ended(0.0, leg.id, Err(LegError::Refused(refused.clone())), 0.0);
    assert!(matches!(drain(&mut r).last(),
        Some(Command::Tell(EngineEvent::Failed { error, .. })) if *error == refused));
}

#[test]
fn a_busy_engine_is_asked_again_until_the_deadline() {
    let mut r = router(1);
    submit(&mut r, 0.0, request(1, vec![1]));
    let mut now = 0.0;
    let mut legs = 0;
    loop {
        let commands = drain(&mut r);
        match commands.last() {
            Some(Command::Start { leg, .. }) => {
                legs += 1;
                let busy = LegError::Busy {
                    status: 429,
                    body: String::new(),
                };
                r.leg_ended(now, leg.id, Err(busy), 0.5);
            }
            Some(Command::Tell(EngineEvent::Failed { .. })) => break,
            other => assert!(other.is_none(), "{other:?}"),
        }
        now = r.next_tick(now).expect("something is waited for");
        r.tick(now);
    }
    assert!(
        legs > 10 && (50.0..51.0).contains(&now),
        "{legs} legs until {now}"
    );
}

#[test]
fn partial_output_is_kept_or_failed_as_configured() {
    for (on_partial, kept) in [(OnPartial::Keep, true), (OnPartial::Fail, false)] {
        let mut r = router(1);
        r.config.on_partial = on_partial;
        submit(&mut r, 0.0, request(1, vec![1]));
        let (_, leg) = started(&mut r);
        r.tokens(leg.id, vec![token(7)], None);
        r.leg_ended(0.0, leg.id, cut(), 0.0);
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

/// One thing that happens, chosen by numbers.
#[derive(Clone, Debug)]
enum Step {
    Submit {
        prompt: u32,
        len: usize,
        priority: i32,
    },
    Abort(usize),
    Tokens {
        leg: usize,
        stop: bool,
    },
    End {
        leg: usize,
        how: u8,
    },
    Probe {
        engine: usize,
        how: u8,
    },
    Pause(bool),
    Load {
        ok: u8,
    },
    Wait(f64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3u32, 1..14usize, 0..3i32)
            .prop_map(|(prompt, len, priority)| Step::Submit { prompt, len, priority }),
        1 => (0..20usize).prop_map(Step::Abort),
        4 => (0..9usize, prop::bool::weighted(0.2))
            .prop_map(|(leg, stop)| Step::Tokens { leg, stop }),
        4 => (0..9usize, 0..8u8).prop_map(|(leg, how)| Step::End { leg, how }),
        3 => (0..3usize, 0..6u8).prop_map(|(engine, how)| Step::Probe { engine, how }),
        1 => any::<bool>().prop_map(Step::Pause),
        1 => (0..8u8).prop_map(|ok| Step::Load { ok }),
        3 => (0.0..20.0f64).prop_map(Step::Wait),
    ]
}

/// What must hold, told by an independent observer.
struct Observer {
    /// By the last look, without trust lost since: the version that each engine has.
    verified: Vec<Option<u64>>,
    version: u64,
    stopped: bool,
    open: HashMap<LegId, (usize, RequestId)>,
    sampled: HashMap<RequestId, Vec<u32>>,
    accepted: HashSet<RequestId>,
    ended: HashSet<RequestId>,
}

impl Observer {
    fn see(&mut self, command: Command, prompts: &HashMap<RequestId, Vec<u32>>) {
        match command {
            Command::Start { engine, leg } => {
                assert!(!self.stopped, "started while stopped");
                assert_eq!(self.verified[engine], Some(self.version), "engine {engine}");
                assert_eq!(leg.version, PolicyVersion(self.version));
                let request = *prompts
                    .iter()
                    .find(|(id, p)| {
                        let sampled = &self.sampled[*id];
                        leg.prompt.len() == p.len() + sampled.len()
                            && leg.prompt.starts_with(p)
                            && leg.prompt.ends_with(sampled)
                            && !self.ended.contains(*id)
                            && !self.open.values().any(|(_, r)| r == *id)
                    })
                    .expect("a leg continues a request that has no other leg")
                    .0;
                self.open.insert(leg.id, (engine, request));
                let on = self.open.values().filter(|(e, _)| *e == engine).count();
                assert!(on <= 3, "{on} legs on engine {engine}");
            }
            Command::Cancel { leg, .. } => {
                self.open.remove(&leg).expect("only running legs are ended");
            }
            Command::Tell(EngineEvent::Tokens { request, tokens }) => {
                assert!(!self.ended.contains(&request), "tokens after the end");
                let ids = tokens.iter().map(|t| t.id);
                self.sampled.get_mut(&request).unwrap().extend(ids);
            }
            Command::Tell(
                EngineEvent::Finished { request, .. } | EngineEvent::Failed { request, .. },
            ) => {
                assert!(self.accepted.contains(&request));
                assert!(self.ended.insert(request), "{request:?} ended twice");
            }
        }
    }
}

fn failure(how: u8) -> LegError {
    match how {
        0 => LegError::Cut("x".to_owned()),
        1 => LegError::Busy {
            status: 503,
            body: String::new(),
        },
        2 => LegError::Protocol("x".to_owned()),
        3 => LegError::Version {
            expected: PolicyVersion(0),
            found: "x".to_owned(),
        },
        4 => LegError::Refused(EngineError::Failed("x".to_owned())),
        _ => LegError::Status {
            status: 500,
            body: String::new(),
        },
    }
}

fn play(steps: Vec<Step>) {
    let mut r = Router::new(
        config(),
        (0..3).map(|i| i.to_string()).collect(),
        PolicyVersion(0),
    );
    let mut seen = Observer {
        verified: vec![None; 3],
        version: 0,
        stopped: false,
        open: HashMap::new(),
        sampled: HashMap::new(),
        accepted: HashSet::new(),
        ended: HashSet::new(),
    };
    let mut prompts = HashMap::new();
    let (mut now, mut next) = (0.0, 0u64);
    let pick = |open: &HashMap<LegId, (usize, RequestId)>, n: usize| {
        let mut legs: Vec<LegId> = open.keys().copied().collect();
        legs.sort_unstable();
        legs.get(n % legs.len().max(1)).copied()
    };
    for step in steps {
        match step {
            Step::Submit {
                prompt,
                len,
                priority,
            } => {
                let id = RequestId(next);
                next += 1;
                // Two tokens of its own make each prompt unlike all others.
                let mut tokens = vec![prompt; len];
                tokens.extend([1000 + id.0 as u32, 2000]);
                let mut new = request(id.0, tokens.clone());
                new.priority = priority;
                if r.submit(now, new).is_ok() {
                    prompts.insert(id, tokens);
                    seen.accepted.insert(id);
                    seen.sampled.insert(id, Vec::new());
                }
                r.tick(now);
            }
            Step::Abort(n) => r.abort(RequestId(n as u64)),
            Step::Tokens { leg, stop } => {
                if let Some(leg) = pick(&seen.open, leg) {
                    let request = seen.open[&leg].1;
                    let sampled = &seen.sampled[&request];
                    if sampled.len() < 10 && sampled.last() != Some(&99) {
                        r.tokens(leg, vec![token(if stop { 99 } else { 7 })], None);
                    }
                }
            }
            Step::End { leg, how } => {
                if let Some(leg) = pick(&seen.open, leg) {
                    let (engine, _) = seen.open.remove(&leg).unwrap();
                    if how == 2 || how == 3 {
                        seen.verified[engine] = None;
                    }
                    let result = if how >= 6 {
                        end(FinishReason::Length)
                    } else {
                        Err(failure(how))
                    };
                    r.leg_ended(now, leg, result, 0.3);
                }
            }
            Step::Probe { engine, how } => {
                let version = seen.version + u64::from(how == 0);
                let mut probe = good(version);
                probe.sleeping = how == 1;
                seen.verified[engine] = (how > 2 || how == 0).then_some(version);
                let result = if how == 2 { Err(failure(0)) } else { Ok(probe) };
                r.probed(now, engine, result);
            }
            Step::Pause(paused) => {
                seen.stopped = paused;
                r.pause(now, paused);
            }
            Step::Load { ok } => {
                let stopped = std::mem::replace(&mut seen.stopped, true);
                r.load_begins(now);
                drain(&mut r)
                    .into_iter()
                    .for_each(|c| seen.see(c, &prompts));
                now += 1.0;
                let version = seen.version + 1;
                let results: Vec<_> = (0..3usize)
                    .map(|i| {
                        (
                            i,
                            if ok >> i & 1 == 1 {
                                Ok(())
                            } else {
                                Err(failure(0))
                            },
                        )
                    })
                    .collect();
                for (i, result) in &results {
                    seen.verified[*i] = result.is_ok().then_some(version);
                }
                if ok > 0 {
                    seen.version = version;
                }
                seen.stopped = stopped;
                assert_eq!(r.loaded(now, PolicyVersion(version), &results), ok > 0);
            }
            Step::Wait(s) => {
                now += s;
                r.tick(now);
            }
        }
        drain(&mut r)
            .into_iter()
            .for_each(|c| seen.see(c, &prompts));
    }
    // Nobody answers any more: every request still ends.
    seen.stopped = false;
    r.pause(now, false);
    for _ in 0..200 {
        drain(&mut r)
            .into_iter()
            .for_each(|c| seen.see(c, &prompts));
        let legs: Vec<LegId> = seen.open.keys().copied().collect();
        for leg in legs {
            seen.open.remove(&leg);
            r.leg_ended(now, leg, cut(), 0.3);
            drain(&mut r)
                .into_iter()
                .for_each(|c| seen.see(c, &prompts));
        }
        now = r.next_tick(now).unwrap_or(now + 60.0);
        r.tick(now);
    }
    drain(&mut r)
        .into_iter()
        .for_each(|c| seen.see(c, &prompts));
    assert_eq!(seen.ended, seen.accepted, "each request ends exactly once");
    assert!(r.requests.is_empty() && r.legs.is_empty() && r.waiting.is_empty());
}

proptest! {
    #[test]
    fn every_request_ends_once_and_only_verified_engines_serve(
        steps in prop::collection::vec(step(), 1..120),
    ) {
        play(steps);
    }

    #[test]
    fn healthy_affinity_is_kept(
        prompts in prop::collection::vec((0..5u32, 5..30usize), 1..20),
    ) {
        // One request at a time: nothing but the prefix can decide.
        let mut r = router(3);
        let mut home = HashMap::new();
        for (id, (kind, len)) in prompts.into_iter().enumerate() {
            submit(&mut r, id as f64, request(id as u64, vec![kind; len]));
            let (engine, leg) = started(&mut r);
            prop_assert_eq!(*home.entry(kind).or_insert(engine), engine);
            r.leg_ended(id as f64, leg.id, end(FinishReason::Length), 0.0);
            drain(&mut r);
        }
    }
}
