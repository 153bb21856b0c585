//! Checks whether the statements of a server about an attempt can be true. Pure.
//!
//! Log-probabilities that do not belong to the sampled ids bias a training run without any symptom.
//! So every answer is checked against the request: prompt echoed, as many log-probabilities as ids,
//! values in range, ids inside the vocabulary, nothing after a stop id, and an end that fits the
//! tokens.

use crate::attempt::{Attempt, AttemptToken, ServerEnd};
use crate::error::{AttemptError, ModeError, TokenFault};
use sinew_types::{
    EngineError, FinishReason, PromptLogprob, PromptLogprobs, SamplingParams, TokenId, TokenLogprob,
};
use std::fmt;
use std::sync::Arc;

/// Maximum accepted log-probability: rounding lets a probability of 1 have a logarithm slightly
/// above 0. Larger values are refused, smaller ones are clamped to 0.
const MAX_LOGPROB: f64 = 1e-3;
/// Minimum accepted log-probability: vLLM writes -9999 for one that is missing or not a number.
const MIN_LOGPROB: f64 = -9000.0;

/// Maximum tokens of an attempt: its own limit, or the rest of the server's context if that is
/// less.
///
/// # Errors
/// If the prompt fills the context (`context` in tokens, prompt and output together).
pub fn max_new_tokens(attempt: &Attempt, context: Option<usize>) -> Result<u32, AttemptError> {
    let asked = attempt.sampling.max_tokens;
    let Some(context) = context else {
        return Ok(asked);
    };
    let prompt = attempt.prompt.len();
    match context.checked_sub(prompt) {
        None | Some(0) => Err(AttemptError::Refused(EngineError::PromptTooLong {
            prompt,
            context,
        })),
        Some(left) => Ok(asked.min(u32::try_from(left).unwrap_or(u32::MAX))),
    }
}

/// The distribution that a server's log-probabilities are taken from. It is fixed when a server is started,
/// and no answer contains it, so the recipe must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogprobMode {
    /// The model's logits as they are: the policy's own only at temperature 0 and 1.
    Raw,
    /// The logits that are sampled from: after the temperature, with vLLM also after bias and
    /// truncation.
    Processed,
}

impl std::str::FromStr for LogprobMode {
    type Err = ModeError;

    fn from_str(name: &str) -> Result<Self, ModeError> {
        match name {
            "raw" => Ok(Self::Raw),
            "processed" => Ok(Self::Processed),
            other => Err(ModeError::Logprobs(other.to_owned())),
        }
    }
}

/// The error that refuses a sampling parameter: its name, its value, and what is allowed.
pub fn refused(name: &str, value: &dyn fmt::Display, allowed: &str) -> AttemptError {
    AttemptError::Refused(EngineError::InvalidSampling {
        name: name.to_owned(),
        value: value.to_string(),
        allowed: allowed.to_owned(),
    })
}

/// Refuses temperatures at which log-probabilities of raw logits are not those of the policy. They
/// are at temperature 1, and for greedy sampling, which is recorded at temperature 1.
pub(crate) fn raw_fits(sampling: &SamplingParams, instead: &str) -> Result<(), AttemptError> {
    if sampling.policy_temperature() == 1.0 {
        Ok(())
    } else {
        Err(refused("temperature", &sampling.temperature, instead))
    }
}

/// The checks of one attempt, fed piece by piece.
#[derive(Debug)]
pub(crate) struct AttemptCheck {
    prompt: Arc<Vec<TokenId>>,
    sampling: SamplingParams,
    vocab: Option<usize>,
    context: Option<usize>,
    sampled: Vec<TokenId>,
    /// Log-probabilities of the prompt that are still to come.
    prompt_logprobs: Option<Arc<PromptLogprobs>>,
}

impl AttemptCheck {
    pub(crate) fn new(attempt: &Attempt, vocab: Option<usize>, context: Option<usize>) -> Self {
        Self {
            prompt: Arc::clone(&attempt.prompt),
            sampling: attempt.sampling.clone(),
            vocab,
            context,
            sampled: Vec::new(),
            prompt_logprobs: attempt.prompt_logprobs.clone(),
        }
    }

    pub(crate) fn sampled(&self) -> &[TokenId] {
        &self.sampled
    }

    pub(crate) fn echo(&self, found: &[TokenId]) -> Result<(), TokenFault> {
        if *self.prompt == found {
            return Ok(());
        }
        let same = self.prompt.iter().zip(found).take_while(|(a, b)| a == b);
        let position = same.count();
        Err(TokenFault::Prompt {
            position,
            sent: self.prompt.get(position).copied(),
            found: found.get(position).copied(),
        })
    }

    /// Checks the log-probabilities of the prompt: one for each place that was asked for, all in range, with
    /// one for each target.
    ///
    /// # Errors
    /// The first fault; or if they were not asked for, or came already.
    pub(crate) fn prompt(&mut self, scored: &mut [PromptLogprob]) -> Result<(), TokenFault> {
        let fault = |position: usize, why: String| TokenFault::PromptLogprob { position, why };
        let asked = self.prompt_logprobs.take();
        let asked = asked.ok_or_else(|| fault(0, "nobody asked for them".to_owned()))?;
        let places = asked.places(self.prompt.len());
        let found = scored.iter().map(|place| place.position as usize);
        if !found.eq(places.clone()) {
            let why = format!("{} came for the places {places:?}", scored.len());
            return Err(fault(places.start, why));
        }
        for (place, position) in scored.iter_mut().zip(places) {
            let (count, expected) = (place.targets.len(), asked.targets_at(position).len());
            if count != expected {
                let why = format!("{count} targets came, {expected} were asked for");
                return Err(fault(position, why));
            }
            let top = place.top.iter_mut().map(|t| &mut t.logprob);
            let all = [&mut place.logprob].into_iter().chain(top);
            for value in all.chain(&mut place.targets) {
                if !(MIN_LOGPROB..=MAX_LOGPROB).contains(&f64::from(*value)) {
                    return Err(fault(position, format!("{value} is not a log-probability")));
                }
                *value = value.min(0.0);
            }
        }
        Ok(())
    }

    /// Checks the next tokens and counts them as sampled.
    ///
    /// # Errors
    /// The first fault; then none of the tokens counts.
    pub(crate) fn tokens(
        &mut self,
        ids: &[TokenId],
        logprobs: &[Option<f64>],
        top: Vec<Vec<TokenLogprob>>,
    ) -> Result<Vec<AttemptToken>, TokenFault> {
        if ids.len() != logprobs.len() {
            let (ids, logprobs) = (ids.len(), logprobs.len());
            return Err(TokenFault::Count { ids, logprobs });
        }
        if self.prompt_logprobs.is_some() && !ids.is_empty() {
            let why = "the first token came before them".to_owned();
            return Err(TokenFault::PromptLogprob { position: 0, why });
        }
        let asked = self.sampling.max_tokens;
        let sampled = self.sampled.len() + ids.len();
        if sampled > asked as usize {
            return Err(TokenFault::TooMany { sampled, asked });
        }
        let mut top = top.into_iter();
        let mut tokens = Vec::with_capacity(ids.len());
        for (&id, &value) in ids.iter().zip(logprobs) {
            let position = self.sampled.len() + tokens.len();
            self.id(position, id, tokens.last())?;
            let finite = value.filter(|v| (MIN_LOGPROB..=MAX_LOGPROB).contains(v));
            let Some(logprob) = finite else {
                return Err(TokenFault::Logprob {
                    position,
                    id,
                    value,
                });
            };
            tokens.push(AttemptToken {
                id,
                logprob: logprob.min(0.0) as f32,
                top: top.next().unwrap_or_default(),
                version: None,
            });
        }
        self.sampled.extend_from_slice(ids);
        Ok(tokens)
    }

    /// Checks an id at a position: inside the vocabulary, and not after a stop id.
    fn id(
        &self,
        position: usize,
        id: TokenId,
        last: Option<&AttemptToken>,
    ) -> Result<(), TokenFault> {
        if let Some(vocab) = self.vocab
            && id as usize >= vocab
        {
            return Err(TokenFault::UnknownId {
                position,
                id,
                vocab,
            });
        }
        let last = last.map(|t| t.id).or(self.sampled.last().copied());
        match last {
            Some(stop) if self.sampling.stop_ids.contains(&stop) => {
                Err(TokenFault::PastStop { position, stop })
            }
            _ => Ok(()),
        }
    }

    /// Checks the server's end against the tokens, and translates it. An end by length is
    /// `ContextFull` if the server's context was the limit.
    pub(crate) fn end(&self, end: &ServerEnd) -> Result<FinishReason, AttemptError> {
        let fault = |why: String| {
            AttemptError::from(TokenFault::End {
                end: format!("{end:?}"),
                sampled: self.sampled.len(),
                why,
            })
        };
        let last = self.sampled.last().copied();
        match end {
            ServerEnd::Aborted(why) => Err(AttemptError::Cut(format!("the server aborted: {why}"))),
            ServerEnd::StopId(said) => {
                let Some(id) = last.filter(|id| self.sampling.stop_ids.contains(id)) else {
                    let asked = &self.sampling.stop_ids;
                    return Err(fault(format!(
                        "the last id is {last:?}, it may stop at {asked:?}; does the server add stop tokens of its own?"
                    )));
                };
                match said {
                    Some(said) if *said != id => Err(fault(format!("the last id is {id}"))),
                    _ => Ok(FinishReason::StopId { id }),
                }
            }
            ServerEnd::StopString(text) => {
                if !self.sampling.stop_strings.contains(text) {
                    let asked = &self.sampling.stop_strings;
                    return Err(fault(format!("it may stop at {asked:?}")));
                }
                let text = text.clone();
                Ok(FinishReason::StopString { text })
            }
            ServerEnd::Length => {
                let sampled = self.sampled.len();
                let full = self
                    .context
                    .is_some_and(|c| self.prompt.len() + sampled >= c);
                if sampled >= self.sampling.max_tokens as usize {
                    Ok(FinishReason::Length)
                } else if full {
                    Ok(FinishReason::ContextFull)
                } else {
                    let asked = self.sampling.max_tokens;
                    Err(fault(format!("{asked} were asked for and fit")))
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(edit: impl FnOnce(&mut SamplingParams)) -> AttemptCheck {
        let mut sampling = SamplingParams {
            max_tokens: 4,
            stop_ids: vec![9],
            ..SamplingParams::default()
        };
        edit(&mut sampling);
        let attempt = Attempt {
            prompt: vec![1, 2].into(),
            sampling,
            ..Attempt::default()
        };
        AttemptCheck::new(&attempt, Some(100), Some(10))
    }

    /// The check of a prompt of five tokens, of which the last two are scored.
    fn scoring() -> AttemptCheck {
        let asked = PromptLogprobs {
            last: Some(2),
            top: 1,
            targets: vec![vec![], vec![], vec![7], vec![]],
        };
        AttemptCheck {
            prompt: vec![1, 2, 3, 4, 5].into(),
            prompt_logprobs: Some(asked.into()),
            ..check(|_| {})
        }
    }

    fn place(position: u32, logprob: f32, targets: &[f32]) -> PromptLogprob {
        PromptLogprob {
            position,
            logprob,
            top: vec![TokenLogprob {
                id: 1,
                logprob: -0.25,
            }],
            targets: targets.to_vec(),
        }
    }

    #[test]
    fn log_probs_of_the_prompt_come_first_and_whole() {
        let mut c = scoring();
        let early = push(&mut c, &[3]).unwrap_err();
        assert!(matches!(early, TokenFault::PromptLogprob { .. }), "{early}");
        let mut right = [place(3, 1e-5, &[-2.0]), place(4, -1.0, &[])];
        c.prompt(&mut right).unwrap();
        assert_eq!(right[0].logprob, 0.0, "rounding is cut");
        assert_eq!(push(&mut c, &[3]).unwrap().len(), 1);
        let twice = c.prompt(&mut right).unwrap_err();
        assert!(twice.to_string().contains("nobody asked"), "{twice}");
        let wrong = [
            vec![place(3, -1.0, &[-2.0])],
            vec![place(2, -1.0, &[-2.0]), place(4, -1.0, &[])],
            vec![place(3, -1.0, &[]), place(4, -1.0, &[])],
            vec![place(3, f32::NAN, &[-2.0]), place(4, -1.0, &[])],
            vec![place(3, -1.0, &[-9999.0]), place(4, -1.0, &[])],
            vec![place(3, -1.0, &[-2.0]), place(4, 0.5, &[])],
        ];
        for mut scored in wrong {
            let fault = scoring().prompt(&mut scored).unwrap_err();
            assert!(matches!(fault, TokenFault::PromptLogprob { .. }), "{fault}");
        }
    }

    fn push(check: &mut AttemptCheck, ids: &[TokenId]) -> Result<Vec<AttemptToken>, TokenFault> {
        let logprobs = vec![Some(-0.5); ids.len()];
        check.tokens(ids, &logprobs, Vec::new())
    }

    #[test]
    fn good_tokens_pass_and_are_counted() {
        let mut c = check(|_| {});
        assert!(c.echo(&[1, 2]).is_ok());
        assert_eq!(push(&mut c, &[3, 4]).unwrap().len(), 2);
        assert_eq!(push(&mut c, &[9]).unwrap()[0].logprob, -0.5);
        assert_eq!(c.sampled(), [3, 4, 9]);
        let end = c.end(&ServerEnd::StopId(Some(9)));
        assert_eq!(end, Ok(FinishReason::StopId { id: 9 }));
    }

    #[test]
    fn each_fault_is_named() {
        let wrong = |c: &AttemptCheck, ids: &[TokenId]| c.echo(ids).unwrap_err();
        let c = check(|_| {});
        assert!(matches!(
            wrong(&c, &[1, 3]),
            TokenFault::Prompt { position: 1, .. }
        ));
        assert!(matches!(
            wrong(&c, &[1]),
            TokenFault::Prompt { position: 1, .. }
        ));
        let mut c = check(|_| {});
        let fault = |c: &mut AttemptCheck, ids: &[TokenId], lp: &[Option<f64>]| {
            c.tokens(ids, lp, Vec::new()).unwrap_err()
        };
        assert!(matches!(fault(&mut c, &[3], &[]), TokenFault::Count { .. }));
        for bad in [
            None,
            Some(f64::NAN),
            Some(f64::NEG_INFINITY),
            Some(0.5),
            Some(-9999.0),
        ] {
            let f = fault(&mut c, &[3], &[bad]);
            assert!(matches!(f, TokenFault::Logprob { .. }), "{bad:?}");
        }
        assert!(matches!(
            fault(&mut c, &[100], &[Some(-1.0)]),
            TokenFault::UnknownId { vocab: 100, .. }
        ));
        let five = [Some(-1.0); 5];
        assert!(matches!(
            fault(&mut c, &[3; 5], &five),
            TokenFault::TooMany { .. }
        ));
        assert!(matches!(
            fault(&mut c, &[9, 3], &five[..2]),
            TokenFault::PastStop {
                position: 1,
                stop: 9
            }
        ));
        assert_eq!(
            c.sampled(),
            [] as [TokenId; 0],
            "nothing of a bad chunk is kept"
        );
    }

    #[test]
    fn the_end_must_agree_with_the_tokens() {
        let mut c = check(|s| s.stop_strings = vec!["END".to_owned()]);
        push(&mut c, &[3]).unwrap();
        assert!(c.end(&ServerEnd::StopId(None)).is_err(), "3 is no stop id");
        assert!(c.end(&ServerEnd::Length).is_err(), "three more may come");
        assert!(c.end(&ServerEnd::StopString("other".to_owned())).is_err());
        let end = c.end(&ServerEnd::StopString("END".to_owned())).unwrap();
        assert_eq!(
            end,
            FinishReason::StopString {
                text: "END".to_owned()
            }
        );
        let gone = c.end(&ServerEnd::Aborted("x".to_owned())).unwrap_err();
        assert!(matches!(gone, AttemptError::Cut(_)));
        push(&mut c, &[3, 3, 3]).unwrap();
        assert_eq!(c.end(&ServerEnd::Length), Ok(FinishReason::Length));
        let mut c = check(|s| s.max_tokens = 20);
        push(&mut c, &[3; 8]).unwrap();
        assert_eq!(c.end(&ServerEnd::Length), Ok(FinishReason::ContextFull));
        push(&mut c, &[9]).unwrap();
        assert!(c.end(&ServerEnd::StopId(Some(8))).is_err(), "9 came last");
    }
}
