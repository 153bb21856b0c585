//! One request while it waits or runs.

use crate::constraint::Constraint;
use crate::forward::{AdapterSlot, BlockId};
use crate::prompt_scores::PromptScores;
use crate::stop::{StopMatcher, TokenBytes};
use sinew_types::{FinishReason, GenerateRequest, RequestId, SamplingParams, TokenId};
use std::cmp::Reverse;
use std::sync::{Mutex, PoisonError};

/// Place in every queue: larger priorities first, of equals the one that came first.
/// A preempted request keeps its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct OrderKey {
    pub(crate) priority: Reverse<i32>,
    pub(crate) arrival: u64,
}

/// Maximum length of a sequence's first draft.
const FIRST_DRAFT: usize = 4;
/// Maximum length of a draft: a longer one is rarely accepted to its end.
const MAX_DRAFT: usize = 16;

/// Tokens of output for which memory is reserved at the start; most turns are shorter.
const MAX_RESERVED: usize = 1024;

/// A request with its tokens, its blocks and its limits.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    pub(crate) sampling: SamplingParams,
    /// Prompt and output.
    pub(crate) tokens: Vec<TokenId>,
    /// Prompt's length.
    pub(crate) prompt: usize,
    /// Blocks that hold its keys and values, in order; it is the writer of the last one
    /// unless that is full.
    pub(crate) chain: Vec<BlockId>,
    /// Number of tokens whose keys and values are stored in `chain`, or will be after this pass.
    pub(crate) computed: usize,
    /// Whether tokens that were known when it began to run are still to be computed.
    pub(crate) prefilling: bool,
    /// Maximum tokens of the next draft.
    pub(crate) draft_limit: usize,
    /// Prompt tokens found in the cache when it first ran.
    pub(crate) cached_prompt: Option<usize>,
    /// Slot of its adapter; `None`: the engine's own weights.
    pub(crate) adapter: Option<AdapterSlot>,
    /// Log-probabilities of its prompt, until they are reported.
    pub(crate) scores: Option<PromptScores>,
    /// Constraint of its format, if it has one. Only the one task that draws for the sequence locks
    /// it.
    pub(crate) constraint: Option<Mutex<Constraint>>,
    stop: StopMatcher,
}

impl Sequence {
    /// `adapter`: slot of the adapter that the request names.
    pub(crate) fn new(
        request: GenerateRequest,
        constraint: Option<Constraint>,
        adapter: Option<AdapterSlot>,
    ) -> Self {
        let prompt = request.prompt.len();
        // The output grows at the end of the sequence's own copy, without a second one.
        let output = (request.sampling.max_tokens as usize).min(MAX_RESERVED);
        let mut tokens = Vec::with_capacity(prompt + output);
        tokens.extend_from_slice(&request.prompt);
        Self {
            id: request.id,
            prompt,
            tokens,
            sampling: request.sampling,
            chain: Vec::new(),
            computed: 0,
            prefilling: true,
            draft_limit: FIRST_DRAFT,
            cached_prompt: None,
            adapter,
            scores: request
                .prompt_logprobs
                .map(|asked| PromptScores::new(asked, prompt)),
            constraint: constraint.map(Mutex::new),
            stop: StopMatcher::default(),
        }
    }

    /// Tokens to compute before the next one can be sampled: at least one.
    pub(crate) fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Number of its first known tokens whose keys and values may come from a cache. The last one is computed
    /// in any case, since its logits are needed; so are the rows before tokens of the prompt that are scored.
    pub(crate) fn cacheable(&self) -> usize {
        let known = self.tokens.len() - 1;
        let scores = self.scores.as_ref();
        scores.map_or(known, |scores| scores.cacheable().min(known))
    }

    /// Number of rows to compute of the next `rows`, if logits of at most `limit` rows of its prompt may be
    /// computed.
    pub(crate) fn rows_within(&self, rows: usize, limit: usize) -> usize {
        let scores = self.scores.as_ref();
        scores.map_or(rows, |s| s.rows_within(self.computed, rows, limit))
    }

    /// Whether the output is over by its format.
    pub(crate) fn ended(&self) -> bool {
        let constraint = self.constraint.as_ref();
        constraint.is_some_and(|h| h.lock().unwrap_or_else(PoisonError::into_inner).ended())
    }

    /// Maximum number of tokens that can be drawn after the first `known`.
    pub(crate) fn max_draws(&self, known: usize, context: usize) -> usize {
        let drawn = known - self.prompt;
        let allowed = (self.sampling.max_tokens as usize).saturating_sub(drawn);
        allowed.min(context.saturating_sub(known))
    }

    /// Maximum length of the next draft; one more token is sampled after it.
    pub(crate) fn draftable(&self, context: usize) -> usize {
        let sampled = self.tokens.len() - self.prompt;
        let allowed = self.sampling.max_tokens as usize - sampled;
        let fitting = context - self.tokens.len();
        allowed.min(fitting).saturating_sub(1).min(self.draft_limit)
    }

    /// Doubles the limit of drafts after one that was accepted as a whole, and lowers it to the
    /// accepted length plus one otherwise.
    pub(crate) fn adapt_draft(&mut self, drafted: usize, accepted: usize) {
        if accepted == drafted {
            self.draft_limit = (self.draft_limit * 2).min(MAX_DRAFT);
        } else {
            self.draft_limit = (accepted + 1).min(MAX_DRAFT);
        }
    }

    /// Adds a sampled token and returns the reason if it is the last one. `ends`: the format is
    /// complete. Order of the reasons: stop id or format, stop string, `max_tokens`, context.
    pub(crate) fn push(
        &mut self,
        id: TokenId,
        ends: bool,
        context: usize,
        bytes: Option<&TokenBytes>,
    ) -> Option<FinishReason> {
        self.tokens.push(id);
        let s = &self.sampling;
        if s.stop_ids.contains(&id) || ends {
            return Some(FinishReason::StopId { id });
        }
        if let Some(bytes) = bytes
            && !s.stop_strings.is_empty()
            && let Some(hit) = self.stop.push(bytes.get(id), &s.stop_strings)
        {
            let text = s.stop_strings[hit].clone();
            return Some(FinishReason::StopString { text });
        }
        if self.tokens.len() - self.prompt >= s.max_tokens as usize {
            return Some(FinishReason::Length);
        }
        (self.tokens.len() >= context).then_some(FinishReason::ContextFull)
    }
}
