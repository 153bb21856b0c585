//! Cross-policy sampling (AgentRL, arXiv 2510.04206): the turns of an episode are drawn by the current policy
//! and by one that is some updates old, so that episodes reach states that the current policy does not reach
//! by itself.

use sinew_types::{
    Adapter, AdapterName, Engine, EngineError, EngineStatus, EventSink, GenerateRequest,
    PolicyVersion, RequestId, TensorSource, mix_seed,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Share and age of the old policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossPolicyConfig {
    /// Share of turns that the old policy draws.
    pub share: f64,
    /// Updates after which it takes the current weights.
    pub every: u64,
}

/// Two engines behind one port. Each request goes to one of them, by its seed, so that a run can
/// be repeated; every token carries the version that drew it.
pub struct CrossPolicy {
    current: Arc<dyn Engine>,
    old: Arc<dyn Engine>,
    /// Configured share; the requests of the old policy follow from their seeds.
    share: f64,
    every: u64,
    /// Version of the old policy.
    old_version: AtomicU64,
    /// False while held-out tasks are measured: only the current policy is measured.
    mixing: AtomicBool,
}

impl CrossPolicy {
    /// Both engines must hold the weights of `version`.
    pub fn new(
        current: Arc<dyn Engine>,
        old: Arc<dyn Engine>,
        config: CrossPolicyConfig,
        version: PolicyVersion,
    ) -> Self {
        Self {
            current,
            old,
            share: config.share,
            every: config.every,
            old_version: AtomicU64::new(version.0),
            mixing: AtomicBool::new(false),
        }
    }

    /// Whether requests may go to the old policy.
    pub fn mix(&self, mixing: bool) {
        self.mixing.store(mixing, Ordering::SeqCst);
    }

    /// The engine that answers a request.
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

sinew_types::debug_fields!(CrossPolicy, share, every);

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

    /// Both engines have it: the share of an old policy is of the weights that are trained.
    fn load_adapter(
        &self,
        name: &AdapterName,
        version: PolicyVersion,
        adapter: Adapter,
    ) -> Result<(), EngineError> {
        self.current.load_adapter(name, version, adapter.clone())?;
        self.old.load_adapter(name, version, adapter)
    }

    fn unload_adapter(&self, name: &AdapterName) -> Result<(), EngineError> {
        let current = self.current.unload_adapter(name);
        current.and(self.old.unload_adapter(name))
    }

    fn sleep(&self) -> Result<(), EngineError> {
        self.current.sleep().and(self.old.sleep())
    }

    fn wake(&self) -> Result<(), EngineError> {
        self.current.wake().and(self.old.wake())
    }

    /// Status of the current policy's engine, with the work of both.
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

    fn holds_formats(&self) -> bool {
        self.current.holds_formats() && self.old.holds_formats()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{SamplingParams, TensorList};
    use std::sync::Mutex;

    #[derive(Default)]
    struct Recorder {
        submitted: AtomicU64,
        loaded: Mutex<Vec<u64>>,
    }

    impl Engine for Recorder {
        fn submit(&self, _: GenerateRequest, _: EventSink) -> Result<(), EngineError> {
            self.submitted.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }

        fn abort(&self, _: RequestId) {}

        fn pause(&self, _: bool) {}

        fn load_weights(
            &self,
            version: PolicyVersion,
            _: Arc<dyn TensorSource>,
        ) -> Result<(), EngineError> {
            self.loaded.lock().unwrap().push(version.0);
            Ok(())
        }

        fn status(&self) -> EngineStatus {
            EngineStatus {
                sampled_tokens: self.submitted.load(Ordering::SeqCst),
                ..EngineStatus::default()
            }
        }
    }

    fn submit(cross: &CrossPolicy, requests: u64) {
        for seed in 0..requests {
            let sampling = SamplingParams {
                seed,
                ..SamplingParams::default()
            };
            let request = GenerateRequest::new(RequestId(seed), vec![1], sampling);
            cross.submit(request, Box::new(|_| {})).unwrap();
        }
    }

    #[test]
    fn turns_are_shared_and_the_old_policy_follows_from_time_to_time() {
        let (current, old) = (Arc::new(Recorder::default()), Arc::new(Recorder::default()));
        let config = CrossPolicyConfig {
            share: 0.25,
            every: 3,
        };
        let cross = CrossPolicy::new(current.clone(), old.clone(), config, PolicyVersion(2));
        let count = |e: &Recorder| e.submitted.load(Ordering::SeqCst);
        // Held-out tasks are the current policy's.
        submit(&cross, 100);
        assert_eq!((count(&current), count(&old)), (100, 0));
        cross.mix(true);
        submit(&cross, 4000);
        let share = count(&old) as f64 / 4000.0;
        assert!((share - 0.25).abs() < 0.03, "{share}");
        assert_eq!(cross.status().sampled_tokens, 4100);
        for version in 3..=9 {
            let weights = Arc::new(TensorList::default());
            cross.load_weights(PolicyVersion(version), weights).unwrap();
        }
        assert_eq!(*current.loaded.lock().unwrap(), [3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(*old.loaded.lock().unwrap(), [5, 8]);
    }
}
