//! Cross-policy sampling (AgentRL, arXiv 2510.04206): the turns of an episode are drawn by the
//! current policy and by one that is some updates old, so that episodes reach states that the
//! current policy alone does not.

use crate::recipe::CrossPolicySection;
use sinew_rollout::mix_seed;
use sinew_types::{
    Engine, EngineError, EngineStatus, EventSink, GenerateRequest, PolicyVersion, RequestId,
    TensorSource,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Two engines behind one port. Each request goes to one of them, by its seed, so that a run can
/// be repeated; every token carries the version that drew it.
pub(crate) struct CrossPolicy {
    current: Arc<dyn Engine>,
    old: Arc<dyn Engine>,
    share: f64,
    every: u64,
    /// Version of the old policy.
    old_version: AtomicU64,
    /// Off while held-out tasks are measured: those are the current policy's alone.
    mixing: AtomicBool,
}

impl CrossPolicy {
    /// Both engines must hold the weights of `version`.
    pub(crate) fn new(
        current: Arc<dyn Engine>,
        old: Arc<dyn Engine>,
        section: CrossPolicySection,
        version: PolicyVersion,
    ) -> Self {
        Self {
            current,
            old,
            share: section.share,
            every: section.every,
            old_version: AtomicU64::new(version.0),
            mixing: AtomicBool::new(false),
        }
    }

    /// Whether requests may go to the old policy.
    pub(crate) fn mix(&self, mixing: bool) {
        self.mixing.store(mixing, Ordering::SeqCst);
    }

    fn of(&self, request: &GenerateRequest) -> &Arc<dyn Engine> {
        let drawn = mix_seed(request.sampling.seed, 0x6372_6f73) >> 11;
        let uniform = drawn as f64 / (1u64 << 53) as f64;
        if self.mixing.load(Ordering::SeqCst) && uniform < self.share {
            &self.old
        } else {
            &self.current
        }
    }
}

impl Engine for CrossPolicy {
    fn submit(&self, request: GenerateRequest, sink: EventSink) -> Result<(), EngineError> {
        self.of(&request).submit(request, sink)
    }

    fn abort(&self, request: RequestId) {
        self.current.abort(request);
        self.old.abort(request);
    }

    fn pause(&self, paused: bool) {
        self.current.pause(paused);
        self.old.pause(paused);
    }

    fn load_weights(
        &self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), EngineError> {
        self.current.load_weights(version, Arc::clone(&weights))?;
        if version.0 >= self.old_version.load(Ordering::SeqCst) + self.every {
            self.old.load_weights(version, weights)?;
            self.old_version.store(version.0, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Of the current policy's engine, with the work of both.
    fn status(&self) -> EngineStatus {
        let (a, b) = (self.current.status(), self.old.status());
        EngineStatus {
            running: a.running + b.running,
            waiting: a.waiting + b.waiting,
            kv_tokens_free: a.kv_tokens_free + b.kv_tokens_free,
            kv_tokens_total: a.kv_tokens_total + b.kv_tokens_total,
            sampled_tokens: a.sampled_tokens + b.sampled_tokens,
            prefill_tokens: a.prefill_tokens + b.prefill_tokens,
            cached_prompt_tokens: a.cached_prompt_tokens + b.cached_prompt_tokens,
            preemptions: a.preemptions + b.preemptions,
            busy_s: a.busy_s + b.busy_s,
            ..a
        }
    }
}
