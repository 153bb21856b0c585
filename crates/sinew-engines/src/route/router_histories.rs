//! Random histories against an independent observer.

use super::tests::{config, cut, drain, end, good, id, request, token};
use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

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
        attempt: usize,
        stop: bool,
    },
    End {
        attempt: usize,
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
            .prop_map(|(attempt, stop)| Step::Tokens { attempt, stop }),
        4 => (0..9usize, 0..8u8).prop_map(|(attempt, how)| Step::End { attempt, how }),
        3 => (0..3usize, 0..6u8).prop_map(|(engine, how)| Step::Probe { engine, how }),
        1 => any::<bool>().prop_map(Step::Pause),
        1 => (0..8u8).prop_map(|ok| Step::Load { ok }),
        3 => (0.0..20.0f64).prop_map(Step::Wait),
    ]
}

/// The invariants, checked by an independent observer.
struct Observer {
    /// Version of each engine at the last look, if trust was not lost since.
    verified: Vec<Option<u64>>,
    version: u64,
    stopped: bool,
    open: HashMap<AttemptId, (usize, RequestId)>,
    sampled: HashMap<RequestId, Vec<u32>>,
    accepted: HashSet<RequestId>,
    ended: HashSet<RequestId>,
}

impl Observer {
    fn see(&mut self, command: Command, prompts: &HashMap<RequestId, Vec<u32>>) {
        match command {
            Command::Start { engine, attempt } => {
                assert!(!self.stopped, "started while stopped");
                assert_eq!(self.verified[engine], Some(self.version), "engine {engine}");
                assert_eq!(attempt.weights, id(self.version));
                let request = *prompts
                    .iter()
                    .find(|(id, p)| {
                        let sampled = &self.sampled[*id];
                        attempt.prompt.len() == p.len() + sampled.len()
                            && attempt.prompt.starts_with(p)
                            && attempt.prompt.ends_with(sampled)
                            && !self.ended.contains(*id)
                            && !self.open.values().any(|(_, r)| r == *id)
                    })
                    .expect("an attempt continues a request that has no other attempt")
                    .0;
                self.open.insert(attempt.id, (engine, request));
                let on = self.open.values().filter(|(e, _)| *e == engine).count();
                assert!(on <= 3, "{on} attempts on engine {engine}");
            }
            Command::Cancel { attempt, .. } => {
                self.open
                    .remove(&attempt)
                    .expect("only running attempts are ended");
            }
            Command::Tell(EngineEvent::Tokens { request, tokens }) => {
                assert!(!self.ended.contains(&request), "tokens after the end");
                let ids = tokens.iter().map(|t| t.id);
                self.sampled.get_mut(&request).unwrap().extend(ids);
            }
            Command::Tell(EngineEvent::Prompt { request, .. }) => {
                panic!("{request:?} did not ask for it")
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

fn failure(how: u8) -> AttemptError {
    match how {
        0 => AttemptError::Cut("x".to_owned()),
        1 => AttemptError::Busy {
            status: 503,
            body: String::new(),
        },
        2 => AttemptError::Protocol("x".to_owned()),
        3 => AttemptError::Version {
            expected: id(0),
            found: "x".to_owned(),
        },
        4 => AttemptError::Refused(EngineError::Failed("x".to_owned())),
        _ => AttemptError::Status {
            status: 500,
            body: String::new(),
        },
    }
}

/// A router, what it is observed to do, and the time.
struct History {
    router: Router,
    seen: Observer,
    prompts: HashMap<RequestId, Vec<u32>>,
    now: f64,
}

impl History {
    fn new() -> Self {
        let names = (0..3).map(|i| i.to_string()).collect();
        Self {
            router: Router::new(config(), names, id(0)),
            seen: Observer {
                verified: vec![None; 3],
                version: 0,
                stopped: false,
                open: HashMap::new(),
                sampled: HashMap::new(),
                accepted: HashSet::new(),
                ended: HashSet::new(),
            },
            prompts: HashMap::new(),
            now: 0.0,
        }
    }

    fn observe(&mut self) {
        for command in drain(&mut self.router) {
            self.seen.see(command, &self.prompts);
        }
        for request in self.router.requests.values() {
            let picked = self.router.pick(self.now, request);
            assert_eq!(picked, self.best(request), "{request:?}");
        }
    }

    /// The engine by a look at each of them: the rule as it is written down.
    fn best(&self, request: &RequestState) -> Option<(usize, usize)> {
        let router = &self.router;
        let tokens = request.kv_tokens(router.config.reserve_tokens);
        let mut able: Vec<usize> = (0..router.engines.len()).collect();
        able.retain(|i| {
            let engine = &router.engines[*i];
            engine.unusable(router.weights, self.now).is_none()
                && engine.has_capacity(&router.config, tokens)
        });
        if able.len() > 1 {
            able.retain(|i| Some(*i) != request.failed_on);
        }
        let seen = router.seen.matched(request.blocks.hashes());
        let depth = |i: usize| seen.iter().find(|s| s.1.contains(i)).map_or(0, |s| s.0);
        let load = |i: usize| router.engines[i].load;
        let idlest = able.iter().map(|i| load(*i)).min_by(f64::total_cmp)?;
        let limit = idlest + router.config.max_imbalance as f64;
        let near = able
            .iter()
            .copied()
            .filter(|i| load(*i) <= limit && depth(*i) > 0);
        let lighter = |a: usize, b: usize| load(b).total_cmp(&load(a)).then(b.cmp(&a));
        let near = near.max_by(|a, b| depth(*a).cmp(&depth(*b)).then(lighter(*a, *b)));
        let idle = able.iter().copied().filter(|i| load(*i) == idlest);
        let probed = |i: usize| router.engines[i].probe.as_ref();
        let free = |i: usize| probed(i).and_then(|p| p.kv_tokens_free).unwrap_or(0);
        let idle = idle.max_by_key(|i| (free(*i), usize::MAX - i));
        near.or(idle).map(|i| (i, depth(i)))
    }

    /// One of the attempts that run.
    fn attempt(&self, n: usize) -> Option<AttemptId> {
        let mut attempts: Vec<AttemptId> = self.seen.open.keys().copied().collect();
        attempts.sort_unstable();
        attempts.get(n % attempts.len().max(1)).copied()
    }

    fn submit(&mut self, id: u64, prompt: u32, len: usize, priority: i32) {
        // Two tokens of its own make each prompt unlike all others.
        let mut tokens = vec![prompt; len];
        tokens.extend([1000 + id as u32, 2000]);
        let mut new = request(id, tokens.clone());
        new.priority = priority;
        let id = new.id;
        if self.router.submit(self.now, new).is_ok() {
            self.prompts.insert(id, tokens);
            self.seen.accepted.insert(id);
            self.seen.sampled.insert(id, Vec::new());
        }
        self.router.tick(self.now);
    }

    fn tokens(&mut self, attempt: AttemptId, stop: bool) {
        let request = self.seen.open[&attempt].1;
        let sampled = &self.seen.sampled[&request];
        if sampled.len() < 10 && sampled.last() != Some(&99) {
            let id = if stop { 99 } else { 7 };
            self.router.tokens(attempt, vec![token(id)], None);
        }
    }

    fn end(&mut self, attempt: AttemptId, how: u8) {
        let (engine, _) = self.seen.open.remove(&attempt).unwrap();
        if how == 2 || how == 3 {
            self.seen.verified[engine] = None;
        }
        let result = match how {
            6.. => end(FinishReason::Length),
            _ => Err(failure(how)),
        };
        self.router.attempt_ended(self.now, attempt, result, 0.3);
    }

    fn probe(&mut self, engine: usize, how: u8) {
        let version = self.seen.version + u64::from(how == 0);
        let mut probe = good(version);
        probe.sleeping = how == 1;
        self.seen.verified[engine] = (how > 2 || how == 0).then_some(version);
        let result = if how == 2 { Err(failure(0)) } else { Ok(probe) };
        self.router.probed(self.now, engine, result);
    }

    /// New weights, which the engines of the set bits load.
    fn load(&mut self, ok: u8) {
        let stopped = std::mem::replace(&mut self.seen.stopped, true);
        self.router.load_begins(self.now, &[]);
        self.observe();
        self.now += 1.0;
        let version = self.seen.version + 1;
        let loaded = |i: usize| (ok >> i) & 1 == 1;
        let result = |i| (i, loaded(i).then_some(()).ok_or_else(|| failure(0)));
        let results: Vec<_> = (0..3).map(result).collect();
        for i in 0..3 {
            self.seen.verified[i] = loaded(i).then_some(version);
        }
        self.seen.version += u64::from(ok > 0);
        self.seen.stopped = stopped;
        let changed = self.router.loaded(self.now, id(version), &results);
        assert_eq!(changed, ok > 0);
    }

    fn step(&mut self, number: usize, step: &Step) {
        match *step {
            Step::Submit {
                prompt,
                len,
                priority,
            } => self.submit(number as u64, prompt, len, priority),
            Step::Abort(n) => self.router.abort(RequestId(n as u64)),
            Step::Tokens { attempt, stop } => {
                if let Some(attempt) = self.attempt(attempt) {
                    self.tokens(attempt, stop);
                }
            }
            Step::End { attempt, how } => {
                if let Some(attempt) = self.attempt(attempt) {
                    self.end(attempt, how);
                }
            }
            Step::Probe { engine, how } => self.probe(engine, how),
            Step::Pause(paused) => {
                self.seen.stopped = paused;
                self.router.pause(self.now, paused);
            }
            Step::Load { ok } => self.load(ok),
            Step::Wait(s) => {
                self.now += s;
                self.router.tick(self.now);
            }
        }
        self.observe();
    }

    /// No server answers any more: every request still ends.
    fn finish(&mut self) {
        self.seen.stopped = false;
        self.router.pause(self.now, false);
        for _ in 0..200 {
            self.observe();
            let attempts: Vec<AttemptId> = self.seen.open.keys().copied().collect();
            for attempt in attempts {
                self.seen.open.remove(&attempt);
                self.router.attempt_ended(self.now, attempt, cut(), 0.3);
                self.observe();
            }
            self.now = self.router.next_tick(self.now).unwrap_or(self.now + 60.0);
            self.router.tick(self.now);
        }
        self.observe();
        let seen = &self.seen;
        assert_eq!(seen.ended, seen.accepted, "each request ends exactly once");
        let r = &self.router;
        assert!(r.requests.is_empty() && r.attempts.is_empty() && r.waiting.is_empty());
    }
}

proptest! {
    #[test]
    fn every_request_ends_once_and_only_verified_engines_serve(
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut history = History::new();
        for (number, step) in steps.iter().enumerate() {
            history.step(number, step);
        }
        history.finish();
    }
}
