//! Refuses requests that cannot run, by the name of the parameter, before they enter a queue.

use crate::constraint::Constraint;
use sinew_types::{EngineError, GenerateRequest, SamplingParams, TEMPERATURES, TokenId};
use std::fmt::Display;

/// Maximum stop ids of a request.
const MAX_STOP_IDS: usize = 256;
/// Maximum stop strings of a request.
const MAX_STOP_STRINGS: usize = 64;
/// Maximum bytes of a stop string.
const MAX_STOP_STRING_BYTES: usize = 1024;
/// Maximum entries of a logit bias.
const MAX_LOGIT_BIAS: usize = 4096;

/// The limits that requests are checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestLimits {
    /// Number of token ids.
    pub(crate) vocab: usize,
    /// Maximum number of tokens of prompt and output together.
    pub(crate) context: usize,
    /// Whether stop strings can be matched.
    pub(crate) token_bytes: bool,
}

/// Checks that the engine can run `request` to its end.
///
/// # Errors
/// The name of the parameter, its value and the allowed range.
pub(crate) fn check_request(
    request: &GenerateRequest,
    limits: &RequestLimits,
) -> Result<(), EngineError> {
    let prompt = &request.prompt;
    if prompt.is_empty() {
        return invalid("prompt", "empty", "at least one token");
    }
    if prompt.len() >= limits.context {
        return Err(EngineError::PromptTooLong {
            prompt: prompt.len(),
            context: limits.context,
        });
    }
    // All at once first: a long prompt is compared in vectors, and searched only if it is wrong.
    let outside = |id: TokenId| id as usize >= limits.vocab;
    let end = u32::try_from(limits.vocab).unwrap_or(u32::MAX);
    let wrong = prompt.iter().fold(0, |any, &id| any | u32::from(id >= end));
    if wrong != 0
        && let Some(position) = prompt.iter().position(|&id| outside(id))
    {
        return Err(EngineError::UnknownToken {
            id: prompt[position],
            position,
            vocab: limits.vocab,
        });
    }
    if let Some(asked) = &request.prompt_logprobs {
        asked.check(prompt.len(), Some(limits.vocab))?;
    }
    check_distribution(&request.sampling)?;
    check_stops(&request.sampling, limits)?;
    check_bias(&request.sampling, limits)
}

/// Checks that a request with a format has its constraint: without one, it must not run.
pub(crate) fn check_constraint(
    request: &GenerateRequest,
    constraint: Option<&Constraint>,
) -> Result<(), EngineError> {
    if request.sampling.format.is_some() == constraint.is_some() {
        Ok(())
    } else {
        Err(EngineError::Format(
            "the request has a format and no constraint, or the reverse".to_owned(),
        ))
    }
}

/// Ranges of temperature and truncation.
fn check_distribution(s: &SamplingParams) -> Result<(), EngineError> {
    if s.temperature != 0.0 && !TEMPERATURES.contains(&s.temperature) {
        let allowed = format!(
            "0 (greedy) or {}..={}",
            TEMPERATURES.start(),
            TEMPERATURES.end()
        );
        return invalid("temperature", s.temperature, &allowed);
    }
    if !(s.top_p > 0.0 && s.top_p <= 1.0) {
        return invalid("top_p", s.top_p, "above 0, at most 1 (1 keeps all)");
    }
    if !(0.0..=1.0).contains(&s.min_p) {
        return invalid("min_p", s.min_p, "0..=1 (0 keeps all)");
    }
    if s.max_tokens == 0 {
        return invalid("max_tokens", 0, "at least 1");
    }
    Ok(())
}

/// Limits of stop ids and stop strings: every sampled token is compared with all of them.
fn check_stops(s: &SamplingParams, limits: &RequestLimits) -> Result<(), EngineError> {
    if s.stop_ids.len() > MAX_STOP_IDS {
        let allowed = format!("at most {MAX_STOP_IDS} ids");
        return invalid("stop_ids", s.stop_ids.len(), &allowed);
    }
    if let Some(id) = s.stop_ids.iter().find(|&&id| id as usize >= limits.vocab) {
        return invalid("stop_ids", id, &below_vocab(limits));
    }
    if !s.stop_strings.is_empty() && !limits.token_bytes {
        let allowed = "none: this engine was built without the bytes of its tokens";
        return invalid("stop_strings", format!("{:?}", s.stop_strings), allowed);
    }
    if s.stop_strings.len() > MAX_STOP_STRINGS {
        let allowed = format!("at most {MAX_STOP_STRINGS} strings");
        return invalid("stop_strings", s.stop_strings.len(), &allowed);
    }
    let wrong = |t: &&String| t.is_empty() || t.len() > MAX_STOP_STRING_BYTES;
    if let Some(text) = s.stop_strings.iter().find(wrong) {
        let allowed = format!("1..={MAX_STOP_STRING_BYTES} bytes each");
        return invalid("stop_strings", format!("{} bytes", text.len()), &allowed);
    }
    Ok(())
}

/// Limits of the logit bias.
fn check_bias(s: &SamplingParams, limits: &RequestLimits) -> Result<(), EngineError> {
    if s.logit_bias.len() > MAX_LOGIT_BIAS {
        let allowed = format!("at most {MAX_LOGIT_BIAS} entries");
        return invalid("logit_bias", s.logit_bias.len(), &allowed);
    }
    for &(id, bias) in &s.logit_bias {
        if id as usize >= limits.vocab {
            return invalid("logit_bias", format!("token {id}"), &below_vocab(limits));
        }
        if !bias.is_finite() {
            let allowed = "a finite number; -100 or less keeps a token from being sampled";
            return invalid("logit_bias", format!("{bias} for token {id}"), allowed);
        }
    }
    Ok(())
}

fn below_vocab(limits: &RequestLimits) -> String {
    format!("ids below the vocabulary of {}", limits.vocab)
}

fn invalid(name: &str, value: impl Display, allowed: &str) -> Result<(), EngineError> {
    Err(EngineError::InvalidSampling {
        name: name.to_owned(),
        value: value.to_string(),
        allowed: allowed.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{PromptLogprobs, RequestId};

    const LIMITS: RequestLimits = RequestLimits {
        vocab: 10,
        context: 8,
        token_bytes: true,
    };

    fn request(prompt: Vec<u32>, edit: impl FnOnce(&mut SamplingParams)) -> GenerateRequest {
        let mut sampling = SamplingParams::default();
        edit(&mut sampling);
        GenerateRequest::new(RequestId(1), prompt, sampling)
    }

    #[test]
    fn prompts_are_checked() {
        let ok = |s: &mut SamplingParams| s.seed = 1;
        assert_eq!(check_request(&request(vec![1, 2], ok), &LIMITS), Ok(()));
        assert_eq!(
            check_request(&request(vec![1; 8], ok), &LIMITS),
            Err(EngineError::PromptTooLong {
                prompt: 8,
                context: 8
            })
        );
        assert_eq!(
            check_request(&request(vec![1, 10], ok), &LIMITS),
            Err(EngineError::UnknownToken {
                id: 10,
                position: 1,
                vocab: 10
            })
        );
        let err = check_request(&request(vec![], ok), &LIMITS).unwrap_err();
        assert!(err.to_string().contains("prompt"), "{err}");
    }

    type Edit = fn(&mut SamplingParams);

    #[test]
    fn bad_parameters_are_named() {
        let cases: [(&str, Edit); 15] = [
            ("temperature", |s| s.temperature = -1.0),
            ("temperature", |s| s.temperature = f32::NAN),
            ("temperature", |s| s.temperature = 1e-9),
            ("temperature", |s| s.temperature = f32::INFINITY),
            ("top_p", |s| s.top_p = 0.0),
            ("top_p", |s| s.top_p = 1.5),
            ("top_p", |s| s.top_p = f32::NAN),
            ("min_p", |s| s.min_p = -0.1),
            ("min_p", |s| s.min_p = f32::NAN),
            ("max_tokens", |s| s.max_tokens = 0),
            ("stop_ids", |s| s.stop_ids = vec![10]),
            ("stop_strings", |s| s.stop_strings = vec![String::new()]),
            ("stop_strings", |s| s.stop_strings = vec!["x".repeat(1025)]),
            ("logit_bias", |s| s.logit_bias = vec![(10, 1.0)]),
            ("logit_bias", |s| s.logit_bias = vec![(1, f32::NAN)]),
        ];
        for (field, edit) in cases {
            match check_request(&request(vec![1], edit), &LIMITS) {
                Err(EngineError::InvalidSampling { name, .. }) => assert_eq!(name, field),
                other => panic!("{field}: {other:?}"),
            }
        }
    }

    #[test]
    fn places_of_the_prompt_are_checked() {
        let asked = |targets: Vec<Vec<u32>>| GenerateRequest {
            prompt_logprobs: Some(PromptLogprobs {
                targets,
                ..PromptLogprobs::default()
            }),
            ..request(vec![1, 2, 3], |_| {})
        };
        assert_eq!(check_request(&asked(vec![]), &LIMITS), Ok(()));
        assert_eq!(
            check_request(&asked(vec![vec![9], vec![]]), &LIMITS),
            Ok(())
        );
        for wrong in [vec![vec![10], vec![]], vec![vec![1]]] {
            let error = check_request(&asked(wrong), &LIMITS).unwrap_err();
            assert!(error.to_string().contains("prompt_logprobs"), "{error}");
        }
    }

    #[test]
    fn stop_strings_need_token_bytes() {
        let limits = RequestLimits {
            token_bytes: false,
            ..LIMITS
        };
        let stop = |s: &mut SamplingParams| s.stop_strings = vec!["x".into()];
        assert_eq!(check_request(&request(vec![1], stop), &LIMITS), Ok(()));
        let err = check_request(&request(vec![1], stop), &limits).unwrap_err();
        assert!(err.to_string().contains("stop_strings"), "{err}");
    }
}
