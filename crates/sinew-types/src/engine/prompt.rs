//! Log-probabilities of a prompt's own tokens, which an engine computes while it reads the prompt.

use super::{EngineError, TokenLogprob};
use crate::ids::TokenId;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Maximum number of targets at one place of a prompt.
const MAX_TARGETS: usize = 4096;

/// Log-probabilities of a prompt that a request asks for. The default asks for those of all tokens but the
/// first, which nothing predicts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PromptLogprobs {
    /// Only the last `n` tokens of the prompt, at least 1; `None`: all but the first.
    pub last: Option<u32>,
    /// Number of most likely tokens to report at each place.
    pub top: u8,
    /// Tokens whose log-probabilities are reported at each place: `targets[i]` belongs to the prompt's token
    /// `i + 1`. One list for each token of the prompt but the first, or none at all.
    pub targets: Vec<Vec<TokenId>>,
}

/// Log-probabilities at one place of a prompt, all at temperature 1: natural logarithms under the full
/// softmax of the logits, before any bias, truncation or format, whatever the request samples with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptLogprob {
    /// Index in the prompt of the token that is predicted, at least 1.
    pub position: u32,
    /// Log-probability of the prompt's token.
    pub logprob: f32,
    /// The most likely tokens, best first: [`PromptLogprobs::top`] of them.
    pub top: Vec<TokenLogprob>,
    /// Log-probabilities of the targets of the place, in their order.
    pub targets: Vec<f32>,
}

impl PromptLogprobs {
    /// Indexes of the tokens that are scored, in a prompt of `len` tokens.
    pub fn places(&self, len: usize) -> Range<usize> {
        let last = self.last.map_or(len, |n| n as usize);
        let first = len.saturating_sub(last).max(1);
        first.min(len)..len
    }

    /// Targets of the token at `position`, at least 1.
    pub fn targets_at(&self, position: usize) -> &[TokenId] {
        let targets = position.checked_sub(1).and_then(|i| self.targets.get(i));
        targets.map(Vec::as_slice).unwrap_or_default()
    }

    /// Checks that an engine can report them for a prompt of `len` tokens; `vocab`: number of token ids, if
    /// it is known.
    ///
    /// # Errors
    /// The name of the parameter, its value and what is allowed.
    pub fn check(&self, len: usize, vocab: Option<usize>) -> Result<(), EngineError> {
        let invalid = |name: &str, value: String, allowed: String| {
            Err(EngineError::InvalidSampling {
                name: format!("prompt_logprobs.{name}"),
                value,
                allowed,
            })
        };
        if self.last == Some(0) {
            let allowed = "at least 1; leave prompt_logprobs out for none".to_owned();
            return invalid("last", "0".to_owned(), allowed);
        }
        if !self.targets.is_empty() && self.targets.len() + 1 != len {
            let allowed = format!("none, or {} for this prompt", len.saturating_sub(1));
            return invalid("targets", format!("{} lists", self.targets.len()), allowed);
        }
        if let Some(most) = self.targets.iter().map(Vec::len).find(|n| *n > MAX_TARGETS) {
            let allowed = format!("at most {MAX_TARGETS} at each place");
            return invalid("targets", format!("{most} at one place"), allowed);
        }
        let vocab = vocab.unwrap_or(usize::MAX);
        let mut ids = self.targets.iter().flatten();
        match ids.find(|id| **id as usize >= vocab) {
            Some(id) => {
                let allowed = format!("ids below the vocabulary of {vocab}");
                invalid("targets", id.to_string(), allowed)
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_all_but_the_first_or_the_last_ones() {
        let places = |last, len| {
            PromptLogprobs {
                last,
                ..PromptLogprobs::default()
            }
            .places(len)
        };
        assert_eq!(places(None, 5), 1..5);
        assert_eq!(places(Some(2), 5), 3..5);
        assert_eq!(places(Some(5), 5), 1..5);
        assert_eq!(places(Some(9), 5), 1..5);
        assert!(places(None, 1).is_empty() && places(Some(1), 1).is_empty());
        assert!(places(None, 0).is_empty());
    }

    #[test]
    fn targets_belong_to_the_tokens_after_the_first() {
        let asked = PromptLogprobs {
            targets: vec![vec![7, 8], vec![]],
            ..PromptLogprobs::default()
        };
        assert_eq!(asked.targets_at(1), [7, 8]);
        for position in [0, 2, 3] {
            assert_eq!(asked.targets_at(position), [0; 0]);
        }
        assert_eq!(asked.check(3, Some(9)), Ok(()));
        assert_eq!(asked.check(3, None), Ok(()));
    }

    #[test]
    fn wrong_ones_are_named() {
        let refused = |asked: PromptLogprobs| asked.check(3, Some(9)).unwrap_err().to_string();
        let last = refused(PromptLogprobs {
            last: Some(0),
            ..PromptLogprobs::default()
        });
        assert!(last.contains("prompt_logprobs.last"), "{last}");
        for (targets, expected) in [
            (vec![vec![1]], "1 lists"),
            (vec![vec![1], vec![9]], "vocabulary of 9"),
            (vec![vec![1; 5000], vec![]], "at most 4096"),
        ] {
            let error = refused(PromptLogprobs {
                targets,
                ..PromptLogprobs::default()
            });
            assert!(error.contains("prompt_logprobs.targets"), "{error}");
            assert!(error.contains(expected), "{error}");
        }
    }
}
