//! Engines of the simulation: a server's handling of attempts, in virtual time.
//!
//! Lengths are in ids, each of which stands for [`Speed::grain`] tokens; times are of real tokens.

mod cache;
mod curves;
mod tokens;

use crate::agenda::Micros;
use crate::plan::{Engines, Model, Weights};
use curves::Curves;
use sinew_engines::AttemptId;
use sinew_types::{TokenId, mix_seed};
use std::sync::Arc;
use tokens::Tokens;

/// Ids that are drawn: enough that two contexts differ.
pub(crate) const VOCAB: u64 = 1 << 20;

/// One attempt that an engine is given.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Number of the attempt.
    pub(crate) attempt: AttemptId,
    /// Ids before the first sampled one.
    pub(crate) prompt: Arc<Vec<TokenId>>,
    /// Ids to sample, 1 or more.
    pub(crate) length: usize,
    /// Seed of all random numbers.
    pub(crate) seed: u64,
    /// Owner of the context, for the prefix cache.
    pub(crate) episode: u64,
    /// Group whose beginning it shares, and the number of shared ids.
    pub(crate) group: u64,
    pub(crate) shared: usize,
}

/// News of an attempt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AttemptNews {
    /// Number of the attempt.
    pub(crate) attempt: AttemptId,
    /// Ids that are new.
    pub(crate) tokens: Vec<TokenId>,
    /// Whether the attempt has ended.
    pub(crate) ended: bool,
    /// Ids of its prompt that the cache had.
    pub(crate) cached: usize,
}

/// The `n`-th id that an attempt of `seed` samples.
fn drawn(seed: u64, n: usize) -> TokenId {
    (mix_seed(seed, n as u64) % VOCAB) as TokenId
}

/// Times and sizes of an engine in ids.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Speed {
    /// Tokens that an id stands for.
    pub(crate) grain: usize,
    /// Sequences at once, at most.
    pub(crate) max_running: usize,
    /// Ids of a pass, at most.
    pub(crate) max_batched: usize,
    /// Ids that the cache holds.
    pub(crate) kv: usize,
    /// Seconds for an id of every sequence of the batch.
    pass_s: f64,
    row_s: f64,
    kv_s: f64,
    prefill_s: f64,
    /// Old keys and values stay in use.
    pub(crate) keep_kv: bool,
}

impl Speed {
    /// Speed of an engine, in ids of `grain` tokens.
    pub(crate) fn of(engines: &Engines, weights: &Weights, grain: usize) -> Self {
        let g = grain as f64;
        // So many passes make an id.
        let passes = g / engines.tokens_per_pass;
        Self {
            grain,
            max_running: engines.max_running,
            // One id stands for `grain` tokens, so it takes a pass for each of them.
            max_batched: engines.max_batched_tokens.max(2),
            kv: engines.kv_tokens / grain,
            pass_s: engines.pass_s * passes,
            row_s: engines.row_s * passes,
            kv_s: engines.kv_s * passes * g,
            prefill_s: g / engines.prefill_tokens_per_s,
            keep_kv: weights.keep_kv,
        }
    }

    /// Seconds in which each of `rows` sequences with `kv` ids in the cache gets an id.
    pub(crate) fn decode_s(&self, rows: usize, kv: f64) -> f64 {
        self.pass_s + self.row_s * rows as f64 + self.kv_s * kv
    }
}

/// Load of an engine, and its work.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    /// Sequences that generate.
    pub(crate) running: usize,
    /// Attempts without room.
    pub(crate) waiting: usize,
    /// Ids in use.
    pub(crate) kv_used: usize,
    /// Ids that there is room for.
    pub(crate) kv_total: usize,
    /// Ids that were sampled.
    pub(crate) sampled: u64,
    /// Ids of prompts that were computed.
    pub(crate) prefilled: u64,
    /// Ids of its prompt that the cache had.
    pub(crate) cached: u64,
    /// Times that a sequence lost its room.
    pub(crate) preemptions: u64,
    /// Passes; none of an engine as curves.
    pub(crate) passes: u64,
}

/// Model of the computation.
#[derive(Debug)]
enum Inside {
    Curves(Box<Curves>),
    Scheduler(Box<Tokens>),
}

/// An engine.
#[derive(Debug)]
pub(crate) struct Engine {
    inside: Inside,
    /// Ids that its cache holds.
    kv: usize,
    /// Version of its weights; `None` while it has none.
    pub(crate) version: Option<u64>,
    /// Time until which it is down.
    pub(crate) down_until: Micros,
    /// Not reached until then.
    pub(crate) cut_until: Micros,
    /// Number of the wake-up that counts: older ones are of a state that has changed.
    pub(crate) wake: u32,
    /// Seconds in which it computed.
    pub(crate) busy_s: f64,
}

impl Engine {
    /// One that takes `filled` times what its cache holds: 1, except for a fault of the harness.
    pub(crate) fn new(model: Model, mut speed: Speed, filled: usize) -> Self {
        let kv = speed.kv;
        speed.kv *= filled;
        Self {
            kv,
            inside: match model {
                Model::Curves => Inside::Curves(Box::new(Curves::new(speed))),
                Model::Scheduler => Inside::Scheduler(Box::new(Tokens::new(speed))),
            },
            version: Some(0),
            down_until: 0,
            cut_until: 0,
            wake: 0,
            busy_s: 0.0,
        }
    }

    /// Answers come back from it at `now`.
    pub(crate) fn is_up(&self, now: Micros) -> bool {
        now >= self.down_until && now >= self.cut_until
    }

    /// Begins an attempt.
    pub(crate) fn start(&mut self, job: Job, now: Micros) {
        match &mut self.inside {
            Inside::Curves(inside) => inside.start(job, now, &mut self.busy_s),
            Inside::Scheduler(inside) => inside.start(job, now, &mut self.busy_s),
        }
    }

    /// Ends an attempt early.
    pub(crate) fn cancel(&mut self, attempt: AttemptId, now: Micros) {
        match &mut self.inside {
            Inside::Curves(inside) => inside.cancel(attempt, now, &mut self.busy_s),
            Inside::Scheduler(inside) => inside.cancel(attempt),
        }
    }

    /// Advances to `now`, and adds the news of attempts.
    pub(crate) fn advance(&mut self, now: Micros, news: &mut Vec<AttemptNews>) {
        match &mut self.inside {
            Inside::Curves(inside) => inside.advance(now, &mut self.busy_s, news),
            Inside::Scheduler(inside) => inside.advance(now, &mut self.busy_s, news),
        }
    }

    /// Reports sampled ids of running attempts that were not reported yet.
    pub(crate) fn flush(&mut self, now: Micros, news: &mut Vec<AttemptNews>) {
        self.advance(now, news);
        if let Inside::Curves(inside) = &mut self.inside {
            inside.flush(news);
        }
    }

    /// Time of its next event, if nothing comes from outside.
    pub(crate) fn next(&self) -> Option<Micros> {
        match &self.inside {
            Inside::Curves(inside) => inside.next(),
            Inside::Scheduler(inside) => inside.next(),
        }
    }

    /// Sets the weights. All attempts have ended before.
    pub(crate) fn load(&mut self, version: u64) {
        self.version = Some(version);
        match &mut self.inside {
            Inside::Curves(inside) => inside.load(),
            Inside::Scheduler(inside) => inside.load(version),
        }
    }

    /// Loses everything.
    pub(crate) fn crash(&mut self) {
        self.version = None;
        match &mut self.inside {
            Inside::Curves(inside) => inside.crash(),
            Inside::Scheduler(inside) => inside.crash(),
        }
    }

    pub(crate) fn load_now(&self) -> Load {
        match &self.inside {
            Inside::Curves(inside) => inside.reading(),
            Inside::Scheduler(inside) => inside.reading(),
        }
    }

    /// The bound that is broken, if there is one.
    pub(crate) fn fault(&self) -> Option<String> {
        let load = self.load_now();
        let kv = self.kv;
        (load.kv_used > kv).then(|| format!("{} of {kv} ids of the cache are in use", load.kv_used))
    }
}
