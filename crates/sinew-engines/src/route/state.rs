//! State of engines and requests in the router.

use super::breaker::{Breaker, Permit};
use super::prefix::BlockHashes;
use super::{BreakerConfig, RouterConfig};
use crate::attempt::{Attempt, AttemptId};
use crate::backend::Probe;
use crate::error::AttemptError;
use serde::Serialize;
use sinew_types::{
    AdapterName, EngineEvent, FinishReason, FormatLaw, GOLDEN_GAMMA, PolicyVersion, PromptLogprobs,
    RequestId, RouteSpan, SamplingParams, TokenId, WeightsId,
};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A thing to do for the caller of the router.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Run an attempt on an engine, by its index.
    Start {
        /// Index of the engine.
        engine: usize,
        /// The attempt, with the prompt and the ids sampled so far.
        attempt: Attempt,
    },
    /// Close the connection of an attempt; its results are not wanted any more.
    Cancel {
        /// Index of the engine that runs it.
        engine: usize,
        /// Id of the attempt.
        attempt: AttemptId,
    },
    /// Hand an event to the sink of its request.
    Tell(EngineEvent),
}

/// Counters since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Accepted requests.
    pub requests: u64,
    /// Started attempts, at least one per request that was served.
    pub attempts: u64,
    /// Tokens forwarded.
    pub sampled_tokens: u64,
    /// Attempts that failed, for any reason.
    pub failed_attempts: u64,
    /// Requests that went on, on another engine, after an attempt had failed.
    pub failovers: u64,
    /// Attempts that were ended to load weights or to pause; their requests went on later.
    pub interrupted_attempts: u64,
    /// Sampled ids that were sent again as a prompt, over all later attempts.
    pub replayed_tokens: u64,
    /// Attempts that went to an engine that had seen a leading block.
    pub affinity_hits: u64,
    /// Attempts that went to an engine that had seen none of their blocks.
    pub affinity_misses: u64,
    /// Times that a breaker opened.
    pub breaker_opened: u64,
    /// Times that an engine was found with weights other than it had to have.
    pub wrong_version: u64,
    /// Times that an engine sent something that could not be right.
    pub wrong_answers: u64,
}

/// The state of an engine, for users.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EngineView {
    /// Name of the backend, for messages.
    pub name: String,
    /// Attempts of this router that run on it.
    pub attempts: usize,
    /// Version of its weights, once it is verified.
    pub version: Option<PolicyVersion>,
    /// Free KV capacity in tokens at the last probe, if the server reports it.
    pub kv_tokens_free: Option<usize>,
    /// KV capacity in tokens, if the server reports it.
    pub kv_tokens_total: Option<usize>,
    /// The reason for which nothing is started on it now; `None`: it serves.
    pub idle_because: Option<String>,
}

/// An adapter that requests can name, as servers have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutedAdapter {
    /// Version of tokens that it samples.
    pub id: WeightsId,
    /// Its name on servers, which no other adapter has.
    pub server_name: String,
}

/// An engine from the router's view.
#[derive(Debug)]
pub(super) struct EngineState {
    pub(super) name: String,
    pub(super) breaker: Breaker,
    /// Its weights, once they are verified.
    pub(super) weights: Option<WeightsId>,
    /// Adapters that it has, by their names on servers.
    pub(super) adapters: BTreeSet<String>,
    /// The last probe, if it succeeded.
    pub(super) probe: Option<Probe>,
    /// The last problem, for display.
    pub(super) trouble: Option<String>,
    /// Its weights were found to differ from those of its replicas: the reason.
    pub(super) quarantine: Option<String>,
    pub(super) attempts: BTreeSet<AttemptId>,
    /// Expected remaining work of the attempts, in requests of mean length.
    pub(super) load: f64,
    /// KV tokens promised to attempts since the last probe.
    pub(super) reserved: usize,
    /// Time until which it gets no attempts, because it answered that it was busy.
    pub(super) busy_until: f64,
}

impl EngineState {
    pub(super) fn new(name: String, breaker: BreakerConfig) -> Self {
        Self {
            name,
            breaker: Breaker::new(breaker),
            weights: None,
            adapters: BTreeSet::new(),
            probe: None,
            trouble: Some("it was not looked at yet".to_owned()),
            quarantine: None,
            attempts: BTreeSet::new(),
            load: 0.0,
            reserved: 0,
            busy_until: 0.0,
        }
    }

    /// It has not loaded `weights`.
    pub(super) fn not_loaded(&mut self, weights: WeightsId, error: &AttemptError) {
        self.weights = None;
        self.trouble = Some(format!("loading {weights}: {error}"));
        if let AttemptError::Sums { .. } = error {
            self.quarantine = Some(format!("{weights}: {error}"));
        }
    }

    /// Reason why it must not be asked to sample with `weights` now; `None` if it can serve.
    pub(super) fn unusable(&self, weights: WeightsId, now: f64) -> Option<String> {
        let Some(probe) = &self.probe else {
            let why = self.trouble.clone();
            return Some(why.unwrap_or_else(|| "it does not answer".to_owned()));
        };
        if probe.sleeping {
            return Some("it sleeps".to_owned());
        }
        if let Some(why) = &self.quarantine {
            return Some(format!("it is in quarantine: {why}"));
        }
        if self.weights != Some(weights) {
            let why = format!("its weights are not {weights}");
            let detail = self.trouble.as_ref().map(|t| format!(": {t}"));
            return Some(why + &detail.unwrap_or_default());
        }
        match self.breaker.permit(now) {
            Permit::None => {
                let why = self.trouble.as_deref().unwrap_or("it failed");
                Some(format!("it is left alone for a while: {why}"))
            }
            Permit::Trial if !self.attempts.is_empty() => Some("a trial attempt runs".to_owned()),
            _ if now < self.busy_until => Some("it is busy".to_owned()),
            _ => None,
        }
    }

    /// Whether an attempt that needs `tokens` of KV capacity fits. An idle engine takes any: only the engine
    /// can report that a request can never fit.
    pub(super) fn has_capacity(&self, config: &RouterConfig, tokens: usize) -> bool {
        if self.attempts.len() >= config.max_running {
            return false;
        }
        let free = self.probe.as_ref().and_then(|p| p.kv_tokens_free);
        self.attempts.is_empty() || free.is_none_or(|free| free >= self.reserved + tokens)
    }

    pub(super) fn view(&self, weights: WeightsId, now: f64) -> EngineView {
        EngineView {
            name: self.name.clone(),
            attempts: self.attempts.len(),
            version: self.weights.map(|id| id.version),
            kv_tokens_free: self.probe.as_ref().and_then(|p| p.kv_tokens_free),
            kv_tokens_total: self.probe.as_ref().and_then(|p| p.kv_tokens_total),
            idle_because: self.unusable(weights, now),
        }
    }
}

/// Name of an adapter on a server.
pub(crate) fn adapter_name(of: &str, weights: WeightsId) -> String {
    format!("{of}-{weights}")
}

/// Place in the queue: larger priority first, then the order of arrival.
pub(super) type Place = (Reverse<i32>, u64, RequestId);

/// A request that has not ended.
#[derive(Debug)]
pub(super) struct RequestState {
    pub(super) id: RequestId,
    pub(super) prompt: Arc<Vec<TokenId>>,
    pub(super) sampled: Vec<TokenId>,
    pub(super) sampling: SamplingParams,
    /// Adapter that the request names.
    pub(super) adapter: Option<AdapterName>,
    /// Log-probabilities of its prompt, until they are handed on.
    pub(super) prompt_logprobs: Option<Arc<PromptLogprobs>>,
    /// The record of the request's format that goes with its tokens.
    pub(super) law: Option<Arc<FormatLaw>>,
    pub(super) priority: i32,
    pub(super) arrival: u64,
    pub(super) blocks: BlockHashes,
    /// Whole blocks of its prompt.
    pub(super) prompt_blocks: usize,
    /// Blocks of it that its engine was given when its attempt began, and what the engine had forgotten then.
    pub(super) remembered: (usize, u64),
    /// Expected remaining work of its attempt, in requests of mean length.
    pub(super) rest: f64,
    /// The attempt that runs, and where.
    pub(super) attempt: Option<(AttemptId, usize)>,
    /// Weights that the last attempt samples with.
    pub(super) weights: WeightsId,
    /// Tokens that the running attempt has sampled.
    pub(super) attempt_tokens: usize,
    /// Reason of the running attempt's end, reported before it is over.
    pub(super) end: Option<FinishReason>,
    /// Attempts in a row that failed without a token.
    pub(super) failures: u32,
    /// Time before which it is not started.
    pub(super) not_before: f64,
    /// Time at which it fails if it has no engine.
    pub(super) deadline: f64,
    /// Engine of its last failed attempt; another one is preferred.
    pub(super) failed_on: Option<usize>,
    pub(super) cached_prompt_tokens: u32,
    /// Experts of its tokens, as the attempt that ended it reported them.
    pub(super) routes: Option<RouteSpan>,
}

impl RequestState {
    pub(super) fn place(&self) -> Place {
        (Reverse(self.priority), self.arrival, self.id)
    }

    /// Whether it would continue in the middle of a format, which a server would start again.
    pub(super) fn cut_in_a_format(&self) -> bool {
        self.sampling.format.is_some() && !self.sampled.is_empty()
    }

    /// The end of the output, if the tokens or the server have shown it already.
    pub(super) fn known_end(&self) -> Option<FinishReason> {
        let last = self.sampled.last();
        let stop = last.filter(|id| self.sampling.stop_ids.contains(id));
        let stop = stop.map(|&id| FinishReason::StopId { id });
        let full = (self.left() == 0).then_some(FinishReason::Length);
        self.end.clone().or(stop).or(full)
    }

    /// Tokens that it may still sample.
    pub(super) fn left(&self) -> u32 {
        let sampled = u32::try_from(self.sampled.len()).unwrap_or(u32::MAX);
        self.sampling.max_tokens.saturating_sub(sampled)
    }

    /// KV tokens that its next attempt should find free.
    pub(super) fn kv_tokens(&self, reserve: usize) -> usize {
        self.prompt.len() + self.sampled.len() + (self.left() as usize).min(reserve)
    }

    /// Returns the next attempt: the ids so far, and a seed that does not draw the same numbers again.
    pub(super) fn next_attempt(&self, id: AttemptId, sampled_by: SampledBy) -> Attempt {
        let mut prompt = Arc::clone(&self.prompt);
        if !self.sampled.is_empty() {
            Arc::make_mut(&mut prompt).extend_from_slice(&self.sampled);
        }
        let mut sampling = self.sampling.clone();
        sampling.max_tokens = self.left();
        let drawn = self.sampled.len() as u64;
        sampling.seed = sampling.seed.wrapping_add(drawn.wrapping_mul(GOLDEN_GAMMA));
        Attempt {
            id,
            prompt,
            sampling,
            priority: self.priority,
            weights: sampled_by.weights,
            adapter: sampled_by.adapter,
            base: sampled_by.base,
            prompt_logprobs: self.prompt_logprobs.clone(),
        }
    }
}

/// The weights of an attempt, as in the fields of [`Attempt`].
#[derive(Debug)]
pub(super) struct SampledBy {
    pub(super) weights: WeightsId,
    pub(super) adapter: Option<String>,
    pub(super) base: Option<WeightsId>,
}
