//! An engine whose scheduler, blocks and prefix cache are those of the embedded engine, pass by pass.

use super::{AttemptNews, Job, Load, Speed, VOCAB, drawn};
use crate::agenda::{Micros, micros};
use sinew_engines::AttemptId;
use sinew_infer::{
    Batch, BlockCopy, DeviceError, Draw, Forward, ForwardLimits, PassResult, PromptRow, Sampler,
    SchedulerConfig, Stepper, SwapPolicy,
};
use sinew_types::{
    EngineEvent, GenerateRequest, PolicyVersion, RequestId, SamplingParams, TensorSource,
    TensorView,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Ids of a block, as in the embedded engine.
const BLOCK: usize = 16;

/// A pass that computes nothing and counts its rows.
#[derive(Debug)]
struct Counts {
    /// Sizes that the scheduler works with.
    limits: ForwardLimits,
    /// Rows of the last pass.
    rows: Arc<AtomicU64>,
}

impl Forward for Counts {
    fn limits(&self) -> ForwardLimits {
        self.limits
    }

    fn copy_block(&mut self, _: BlockCopy) {}

    /// One more. No episode asks for log-probabilities of its prompt.
    fn step(
        &mut self,
        batch: &Batch,
        samplers: &[Sampler<'_>],
        _: &[PromptRow<'_>],
    ) -> Result<PassResult, DeviceError> {
        self.rows
            .store(batch.tokens.len() as u64, Ordering::Relaxed);
        let draw = |s: &Sampler<'_>| {
            Ok(vec![Draw {
                id: drawn(s.params.seed, s.position),
                logprob: -1.0,
                top: Vec::new(),
                choice: None,
            }])
        };
        Ok(PassResult {
            drawn: samplers.iter().map(draw).collect(),
            scored: Vec::new(),
        })
    }

    fn logits(&mut self, _: &Batch) -> Result<&[f32], DeviceError> {
        let why = "the simulation computes no logits";
        Err(DeviceError::Device(why.into()))
    }

    fn load_weights(&mut self, _: &dyn TensorSource) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Weights of nothing.
struct Nothing;

impl TensorSource for Nothing {
    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn tensor(&self, _: &str) -> Option<TensorView<'_>> {
        None
    }
}

/// The engine. `None` where the scheduler refuses its limits, which the check of plans rules out.
#[derive(Debug)]
pub(super) struct Tokens {
    /// Times and sizes of an engine, in ids.
    speed: Speed,
    /// Version of the weights.
    version: u64,
    /// The real core of the loop.
    core: Option<Stepper<Counts>>,
    /// Rows of the last pass.
    rows: Arc<AtomicU64>,
    /// End and events of the pass at work.
    pass: Option<(Micros, Vec<EngineEvent>)>,
    /// Passes so far.
    passes: u64,
}

impl Tokens {
    pub(super) fn new(speed: Speed) -> Self {
        let rows = Arc::new(AtomicU64::new(0));
        Self {
            core: stepper(&speed, 0, &rows),
            speed,
            version: 0,
            rows,
            pass: None,
            passes: 0,
        }
    }

    /// Begins.
    pub(super) fn start(&mut self, job: Job, now: Micros, busy_s: &mut f64) {
        let sampling = SamplingParams {
            max_tokens: job.length as u32,
            seed: job.seed,
            ..SamplingParams::default()
        };
        let request = GenerateRequest::new(RequestId(job.attempt.0), job.prompt, sampling);
        if let Some(core) = &mut self.core {
            // Lengths are within the limits: the plan was checked.
            let _ = core.submit(request);
        }
        self.begin_pass(now, busy_s);
    }

    /// Begins a pass if none is at work.
    fn begin_pass(&mut self, now: Micros, busy_s: &mut f64) {
        let Some(core) = self
            .core
            .as_mut()
            .filter(|c| self.pass.is_none() && c.has_work())
        else {
            return;
        };
        let before = core.status();
        let mut events = Vec::new();
        core.step(&mut events);
        let after = core.status();
        let prompts = (after.prefill_tokens - before.prefill_tokens) as usize;
        let rows = (self.rows.swap(0, Ordering::Relaxed) as usize).saturating_sub(prompts);
        let kv = after.kv_tokens_total - after.kv_tokens_free;
        let pass_s = self.speed.decode_s(rows, kv as f64) + self.speed.prefill_s * prompts as f64;
        *busy_s += pass_s;
        self.passes += 1;
        self.pass = Some((now + micros(pass_s).max(1), events));
    }

    pub(super) fn advance(&mut self, now: Micros, busy_s: &mut f64, news: &mut Vec<AttemptNews>) {
        while self.pass.as_ref().is_some_and(|(end, _)| *end <= now)
            && let Some((end, events)) = self.pass.take()
        {
            news.extend(events.into_iter().filter_map(told));
            self.begin_pass(end, busy_s);
        }
    }

    /// Ends an attempt early.
    pub(super) fn cancel(&mut self, attempt: AttemptId) {
        if let Some(core) = &mut self.core {
            core.abort(RequestId(attempt.0), &mut Vec::new());
        }
    }

    /// The next one.
    pub(super) fn next(&self) -> Option<Micros> {
        self.pass.as_ref().map(|(end, _)| *end)
    }

    /// Has other weights.
    pub(super) fn load(&mut self, version: u64) {
        self.version = version;
        if let Some(core) = &mut self.core {
            let _ = core.load_weights(PolicyVersion(version), &Nothing);
        }
    }

    /// Loses everything.
    pub(super) fn crash(&mut self) {
        self.core = stepper(&self.speed, self.version, &self.rows);
        self.pass = None;
    }

    /// Returns the present load.
    pub(super) fn reading(&self) -> Load {
        let status = self.core.as_ref().map(Stepper::status).unwrap_or_default();
        Load {
            running: status.running,
            waiting: status.waiting,
            kv_used: status.kv_tokens_total - status.kv_tokens_free,
            kv_total: status.kv_tokens_total,
            sampled: status.sampled_tokens,
            prefilled: status.prefill_tokens,
            cached: status.cached_prompt_tokens,
            preemptions: status.preemptions,
            passes: self.passes,
        }
    }
}

/// A scheduler without requests.
fn stepper(speed: &Speed, version: u64, rows: &Arc<AtomicU64>) -> Option<Stepper<Counts>> {
    let limits = ForwardLimits {
        vocab: VOCAB as usize,
        context: speed.kv,
        block_tokens: BLOCK,
        blocks: (speed.kv / BLOCK).max(1),
    };
    let config = SchedulerConfig {
        max_num_seqs: speed.max_running,
        max_batched_tokens: speed.max_batched,
        swap: if speed.keep_kv {
            SwapPolicy::Keep
        } else {
            SwapPolicy::Recompute
        },
        ..SchedulerConfig::default()
    };
    let forward = Counts {
        limits,
        rows: Arc::clone(rows),
    };
    Stepper::new(forward, config, PolicyVersion(version)).ok()
}

/// An event as news.
fn told(event: EngineEvent) -> Option<AttemptNews> {
    match event {
        EngineEvent::Tokens { request, tokens } => Some(AttemptNews {
            attempt: AttemptId(request.0),
            tokens: tokens.into_iter().map(|t| t.id).collect(),
            ended: false,
            cached: 0,
        }),
        EngineEvent::Finished {
            request,
            cached_prompt_tokens,
            ..
        } => Some(AttemptNews {
            attempt: AttemptId(request.0),
            tokens: Vec::new(),
            ended: true,
            cached: cached_prompt_tokens as usize,
        }),
        EngineEvent::Prompt { .. } | EngineEvent::Failed { .. } => None,
    }
}
