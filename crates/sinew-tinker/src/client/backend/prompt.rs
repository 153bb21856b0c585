//! Log-probabilities of prompts, by the fields of `asample` for them.

use crate::desk::types::{SampleInput, SampleOutput};
use crate::types::{Tensor, TensorValues};
use sinew_engines::AttemptError;
use sinew_types::{PromptLogprob, PromptLogprobs, TokenId};

/// Mark of a place without a target.
const NONE: i64 = -1;

/// Adds to a request what it asks for. A prompt of one token has nothing that is scored.
pub(super) fn ask(asked: &PromptLogprobs, input: &mut SampleInput) {
    let len = input.prompt.len();
    if asked.places(len).is_empty() {
        return;
    }
    input.prompt_logprobs = true;
    input.prompt_last = asked.last.filter(|&last| (last as usize) < len);
    input.top_prompt = u32::from(asked.top);
    let width = asked.targets.iter().map(Vec::len).max().unwrap_or(0);
    if width > 0 {
        let row = |ids: &Vec<TokenId>| {
            let none = std::iter::repeat_n(NONE, width - ids.len());
            ids.iter().map(|&id| i64::from(id)).chain(none).collect()
        };
        let rows: Vec<Vec<i64>> = asked.targets.iter().map(row).collect();
        input.targets = Some(Tensor {
            shape: vec![rows.len(), width],
            values: TensorValues::I64(rows.concat()),
        });
    }
}

/// The log-probabilities of a prompt of `len` tokens.
///
/// # Errors
/// If the service does not report a part of them.
pub(super) fn read(
    asked: &PromptLogprobs,
    len: usize,
    output: &SampleOutput,
) -> Result<Vec<PromptLogprob>, AttemptError> {
    let missing = |field: &str| {
        let what = format!("reporting log-probs of prompts (`{field}`)");
        AttemptError::Unsupported(what)
    };
    let place = |position: usize| -> Result<PromptLogprob, AttemptError> {
        let own = output.prompt_logprobs.as_ref();
        let own = own.and_then(|all| *all.get(position)?);
        let mut top = Vec::new();
        if asked.top > 0 {
            let ranked = output.top_prompt.as_ref();
            let ranked = ranked.and_then(|all| all.get(position)?.clone());
            top = ranked.ok_or_else(|| missing("topk_prompt_logprobs"))?;
            top.truncate(usize::from(asked.top));
        }
        let targets = targets(output, position, asked.targets_at(position).len());
        Ok(PromptLogprob {
            position: position as u32,
            logprob: own.ok_or_else(|| missing("prompt_logprobs"))?,
            top,
            targets: targets.ok_or_else(|| missing("target_prompt_logprobs"))?,
        })
    };
    asked.places(len).map(place).collect()
}

/// The first `count` numbers of a place's targets.
fn targets(output: &SampleOutput, position: usize, count: usize) -> Option<Vec<f32>> {
    if count == 0 {
        return Some(Vec::new());
    }
    let scored = output.targets.as_ref()?;
    let (&[_, width], TensorValues::F32(values)) = (scored.shape.as_slice(), &scored.values) else {
        return None;
    };
    let row = values.chunks(width.max(1)).nth(position - 1)?;
    row.get(..count).map(<[f32]>::to_vec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::TokenLogprob;

    fn input(prompt: &[TokenId]) -> SampleInput {
        SampleInput {
            prompt: prompt.to_vec(),
            ..SampleInput::default()
        }
    }

    #[test]
    fn targets_are_a_matrix_with_marks_of_empty_places() {
        let asked = PromptLogprobs {
            last: Some(3),
            top: 2,
            targets: vec![vec![5, 6], Vec::new(), vec![7]],
        };
        let mut sent = input(&[1, 2, 3, 4]);
        ask(&asked, &mut sent);
        assert_eq!((sent.prompt_last, sent.top_prompt), (Some(3), 2));
        let targets = sent.targets.unwrap();
        assert_eq!(targets.shape, [3, 2]);
        assert_eq!(
            targets.values,
            TensorValues::I64(vec![5, 6, NONE, NONE, 7, NONE])
        );
        let mut whole = input(&[1, 2, 3]);
        let last = Some(9);
        ask(
            &PromptLogprobs {
                last,
                ..PromptLogprobs::default()
            },
            &mut whole,
        );
        assert!(whole.prompt_logprobs && whole.prompt_last.is_none());
        let mut one = input(&[1]);
        ask(&PromptLogprobs::default(), &mut one);
        assert_eq!(one, input(&[1]));
    }

    #[test]
    fn places_are_read_and_what_is_missing_is_named() {
        let asked = PromptLogprobs {
            last: Some(1),
            top: 1,
            targets: vec![vec![5], vec![6]],
        };
        let entry = |id| TokenLogprob { id, logprob: -0.5 };
        let whole = SampleOutput {
            prompt_logprobs: Some(vec![None, None, Some(-2.0)]),
            top_prompt: Some(vec![None, None, Some(vec![entry(1), entry(2)])]),
            targets: Some(Tensor {
                shape: vec![2, 1],
                values: TensorValues::F32(vec![0.0, -3.0]),
            }),
            ..SampleOutput::default()
        };
        let expected = PromptLogprob {
            position: 2,
            logprob: -2.0,
            top: vec![entry(1)],
            targets: vec![-3.0],
        };
        assert_eq!(read(&asked, 3, &whole).unwrap(), [expected]);
        for (field, part) in [
            (
                "prompt_logprobs",
                SampleOutput {
                    prompt_logprobs: None,
                    ..whole.clone()
                },
            ),
            (
                "topk_prompt_logprobs",
                SampleOutput {
                    top_prompt: None,
                    ..whole.clone()
                },
            ),
            (
                "target_prompt_logprobs",
                SampleOutput {
                    targets: None,
                    ..whole.clone()
                },
            ),
        ] {
            let error = read(&asked, 3, &part).unwrap_err().to_string();
            assert!(error.contains(&format!("(`{field}`)")), "{error}");
        }
    }
}
