//! The engine's requests of a sample request: one for each sequence, and before them one for each token that
//! is drawn at a place of the prompt.

use super::collect::Sequence;
use crate::TensorValues;
use crate::desk::flight_orders::SampleTask;
use crate::desk::rules::BaseRules;
use crate::desk::types::{SampleInput, Stop};
use sinew_types::{
    AdapterName, GenerateRequest, PromptLogprobs, RequestId, SamplingParams, TokenId, mix_seed,
};
use std::sync::Arc;

/// Distinguishes the seeds of draws from those of sequences.
const DRAWS: u64 = 0x7d_ca5e;

/// Tokens drawn at the places of a prompt: `[prompt - 1][k]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Drawn(pub(super) Vec<Vec<TokenId>>);

impl Drawn {
    /// The tokens of sequences that were made by [`draws`].
    pub(super) fn of(sequences: &[Sequence], k: usize) -> Self {
        let token = |sequence: &Sequence| sequence.tokens.first().map_or(0, |token| token.id);
        let places = sequences.chunks(k.max(1));
        Self(
            places
                .map(|place| place.iter().map(token).collect())
                .collect(),
        )
    }
}

/// A request with an id that is set later.
fn request(
    prompt: Arc<Vec<TokenId>>,
    sampling: SamplingParams,
    adapter: Option<&AdapterName>,
) -> GenerateRequest {
    GenerateRequest {
        adapter: adapter.cloned(),
        ..GenerateRequest::new(RequestId(0), prompt, sampling)
    }
}

/// Requests that draw `alternatives` tokens at each place of the prompt after the first: of the whole
/// distribution at the request's temperature. The engine finds the common parts of the prompts in its cache.
pub(super) fn draws(task: &SampleTask, adapter: Option<&AdapterName>) -> Vec<GenerateRequest> {
    let input = &task.input;
    let k = u64::from(input.alternatives);
    let mut requests = Vec::new();
    for place in 1..input.prompt.len() {
        let prompt = Arc::new(input.prompt[..place].to_vec());
        for draw in 0..k {
            let index = (place as u64 - 1) * k + draw;
            let sampling = SamplingParams {
                temperature: input.params.temperature,
                max_tokens: 1,
                seed: mix_seed(task.seed ^ DRAWS, index),
                ..SamplingParams::default()
            };
            requests.push(request(Arc::clone(&prompt), sampling, adapter));
        }
    }
    requests
}

/// Requests of the sequences; the first also scores the prompt.
pub(super) fn mains(
    task: &SampleTask,
    adapter: Option<&AdapterName>,
    rules: &BaseRules,
    drawn: Option<&Drawn>,
) -> Vec<GenerateRequest> {
    let input = &task.input;
    let prompt = Arc::new(input.prompt.clone());
    let scored = scored(input, drawn);
    (0..u64::from(input.samples))
        .map(|index| {
            let seed = mix_seed(task.seed, index);
            let sampling = sampling(input, rules, seed);
            GenerateRequest {
                prompt_logprobs: scored.clone().filter(|_| index == 0),
                ..request(Arc::clone(&prompt), sampling, adapter)
            }
        })
        .collect()
}

/// Rules by which the tokens of a sequence are drawn.
fn sampling(input: &SampleInput, rules: &BaseRules, seed: u64) -> SamplingParams {
    let params = &input.params;
    let room = rules.context.saturating_sub(input.prompt.len()) as u32;
    let own = || rules.stop_ids.clone();
    let (stop_ids, stop_strings) = match &params.stop {
        Stop::Model => (own(), Vec::new()),
        Stop::Never => (Vec::new(), Vec::new()),
        Stop::Tokens(ids) => {
            // A list does not turn off the model's own end; only an empty one does.
            let mut all = own();
            all.extend(ids.iter().filter(|id| !rules.stop_ids.contains(id)));
            (all, Vec::new())
        }
        Stop::Texts(texts) => (own(), texts.clone()),
    };
    SamplingParams {
        temperature: params.temperature,
        top_p: params.top_p,
        // -1 keeps all, as 0 does at the engine.
        top_k: u32::try_from(params.top_k).unwrap_or(0),
        // A sequence of no tokens has one that is dropped later.
        max_tokens: params.max_tokens.unwrap_or(room).clamp(1, room.max(1)),
        stop_ids,
        stop_strings,
        seed,
        top_logprobs: u8::try_from(input.top_sample).unwrap_or(u8::MAX),
        ..SamplingParams::default()
    }
}

/// First place of the prompt that the client asks log-probabilities of, if it does.
pub(super) fn first_scored(input: &SampleInput) -> usize {
    let len = input.prompt.len();
    let last = input.prompt_last.map_or(len, |last| last as usize);
    len.saturating_sub(last).max(1)
}

/// Ids to score at the place after `row`: those of the client, then those that were drawn.
pub(super) fn targets_at(input: &SampleInput, drawn: Option<&Drawn>, row: usize) -> Vec<TokenId> {
    let mut ids = Vec::new();
    if let Some(targets) = &input.targets
        && let TensorValues::I64(values) = &targets.values
    {
        let columns = targets.shape.last().copied().unwrap_or(0);
        let cells = values.get(row * columns..(row + 1) * columns);
        let known = cells.unwrap_or_default().iter();
        ids.extend(known.filter_map(|id| TokenId::try_from(*id).ok()));
    }
    if let Some(drawn) = drawn.and_then(|drawn| drawn.0.get(row)) {
        ids.extend(drawn);
    }
    ids
}

/// The scores of the prompt that the engine computes, if any.
fn scored(input: &SampleInput, drawn: Option<&Drawn>) -> Option<PromptLogprobs> {
    let len = input.prompt.len();
    if len < 2 {
        return None;
    }
    let mut targets: Vec<Vec<TokenId>> = (0..len - 1)
        .map(|row| targets_at(input, drawn, row))
        .collect();
    let asked = input.prompt_logprobs || input.top_prompt > 0;
    let by_prompt = asked.then(|| first_scored(input));
    let by_target = targets.iter().position(|ids| !ids.is_empty());
    let by_target = by_target.map(|row| row + 1);
    if by_target.is_none() {
        targets.clear();
    }
    let first = [by_prompt, by_target].into_iter().flatten().min()?;
    Some(PromptLogprobs {
        last: Some((len - first) as u32),
        top: u8::try_from(input.top_prompt).unwrap_or(u8::MAX),
        targets,
    })
}
