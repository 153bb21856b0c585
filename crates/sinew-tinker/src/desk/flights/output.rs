//! The result of a sample request, from the sequences that the engine delivered.

use super::collect::Sequence;
use super::volley::{Drawn, first_scored, targets_at};
use crate::desk::types::{
    Alternatives, Outcome, Reply, SampleInput, SampleOutput, SampledSequence, StopReason,
};
use crate::{Tensor, TensorValues};
use sinew_types::{FinishReason, PromptLogprob};

/// The outcome of a request whose sequences all ended well.
pub(super) fn outcome(
    input: &SampleInput,
    sequences: &[Sequence],
    drawn: Option<&Drawn>,
) -> Outcome {
    let scored = sequences
        .first()
        .map_or(&[][..], |first| first.prompt.as_slice());
    let cached = sequences.first().map_or(0, |first| first.cached);
    let first = first_scored(input);
    let of_prompt = |place: &&PromptLogprob| place.position as usize >= first;
    let len = input.prompt.len();
    let prompt_logprobs = input.prompt_logprobs.then(|| {
        let mut all = vec![None; len];
        for place in scored.iter().filter(of_prompt) {
            if let Some(slot) = all.get_mut(place.position as usize) {
                *slot = Some(place.logprob);
            }
        }
        all
    });
    let top_prompt = (input.top_prompt > 0).then(|| {
        let mut all = vec![None; len];
        for place in scored.iter().filter(of_prompt) {
            if let Some(slot) = all.get_mut(place.position as usize) {
                *slot = Some(place.top.clone());
            }
        }
        all
    });
    let output = SampleOutput {
        sequences: sequences.iter().map(|s| sequence(input, s)).collect(),
        prompt_logprobs,
        top_prompt,
        targets: targets(input, scored),
        target_layout: input.target_layout.clone(),
        alternatives: (input.alternatives > 0).then(|| {
            // A prompt of one token has no place to draw at.
            let none = Drawn(Vec::new());
            alternatives(input, drawn.unwrap_or(&none), scored)
        }),
        cached_prompt_tokens: cached,
    };
    Outcome::Value(Reply::Sample(Box::new(output)))
}

fn sequence(input: &SampleInput, delivered: &Sequence) -> SampledSequence {
    let wanted = match input.params.max_tokens {
        Some(0) => 0,
        _ => delivered.tokens.len(),
    };
    let tokens = &delivered.tokens[..wanted];
    let stop = match &delivered.end {
        Some(Ok(FinishReason::StopId { .. } | FinishReason::StopString { .. })) if wanted > 0 => {
            StopReason::Stop
        }
        _ => StopReason::Length,
    };
    SampledSequence {
        tokens: tokens.iter().map(|token| token.id).collect(),
        logprobs: tokens.iter().map(|token| token.logprob).collect(),
        stop,
        top: (input.top_sample > 0).then(|| tokens.iter().map(|t| t.top.clone()).collect()),
    }
}

/// The scores at the place after `row`: those of the client's ids, then those of the drawn ones.
fn scores_at(scored: &[PromptLogprob], row: usize) -> &[f32] {
    let place = scored.iter().find(|p| p.position as usize == row + 1);
    place.map_or(&[][..], |place| place.targets.as_slice())
}

/// Log-probabilities of the client's ids, 0 where it asked for none.
fn targets(input: &SampleInput, scored: &[PromptLogprob]) -> Option<Tensor> {
    let asked = input.targets.as_ref()?;
    let TensorValues::I64(ids) = &asked.values else {
        return None;
    };
    let columns = asked.shape.last().copied().unwrap_or(0);
    let mut values = vec![0.0f32; ids.len()];
    let rows = values
        .chunks_mut(columns.max(1))
        .zip(ids.chunks(columns.max(1)));
    for (row, (values, ids)) in rows.enumerate() {
        let cells = values.iter_mut().zip(ids).filter(|(_, id)| **id >= 0);
        for ((value, _), score) in cells.zip(scores_at(scored, row)) {
            *value = *score;
        }
    }
    Some(Tensor {
        shape: asked.shape.clone(),
        values: TensorValues::F32(values),
    })
}

/// The drawn tokens and their log-probabilities.
fn alternatives(input: &SampleInput, drawn: &Drawn, scored: &[PromptLogprob]) -> Alternatives {
    let shape = vec![drawn.0.len(), input.alternatives as usize];
    let mut logprobs = Vec::new();
    for (row, ids) in drawn.0.iter().enumerate() {
        let before = targets_at(input, None, row).len();
        let scores = scores_at(scored, row).get(before..).unwrap_or(&[]);
        logprobs.extend((0..ids.len()).map(|i| scores.get(i).copied().unwrap_or(f32::NAN)));
    }
    let tokens = drawn.0.iter().flatten().map(|id| i64::from(*id)).collect();
    Alternatives {
        tokens: Tensor {
            shape: shape.clone(),
            values: TensorValues::I64(tokens),
        },
        logprobs: Tensor {
            shape,
            values: TensorValues::F32(logprobs),
        },
    }
}
