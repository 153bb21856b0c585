//! Log-probabilities of a prompt, by `prompt_logprobs` of `/v1/completions`.
//!
//! A stream does not carry them, so they are asked for by a call before it, which samples one token and
//! drops it. vLLM computes the whole prompt for it and does not read its prefix cache; the stream that
//! follows finds the prompt there. Their distribution is that of the raw logits, whatever `--logprobs-mode`
//! says.
//!
//! The answer has a place for each token of the prompt, the first one empty, and at each place the prompt's
//! own token and the most likely ones, by their ids.

use super::VllmBackend;
use crate::attempt::Attempt;
use crate::check::refused;
use crate::error::AttemptError;
use serde::Deserialize;
use serde_json::json;
use sinew_types::{PromptLogprob, PromptLogprobs, TokenId, TokenLogprob};
use std::collections::HashMap;

/// Bytes that one log-probability takes in the answer, at most: id, value, rank and text of a token.
const ENTRY_BYTES: usize = 512;

#[derive(Debug, Deserialize)]
struct Answer {
    choices: Vec<Choice>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    prompt_token_ids: Option<Vec<TokenId>>,
    prompt_logprobs: Option<Vec<Option<HashMap<TokenId, Entry>>>>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    logprob: f64,
}

/// Refuses what vLLM does not report.
pub(super) fn accepts(asked: &PromptLogprobs) -> Result<(), AttemptError> {
    if asked.targets.iter().all(Vec::is_empty) {
        return Ok(());
    }
    let allowed =
        "none with vLLM, which reports the prompt's own tokens and the most likely ones (`top`)";
    Err(refused("prompt_logprobs.targets", &"set", allowed))
}

impl VllmBackend {
    /// The log-probabilities of an attempt's prompt under `model`, the server's own one or an adapter.
    pub(super) async fn score_prompt(
        &self,
        attempt: &Attempt,
        asked: &PromptLogprobs,
        model: &str,
    ) -> Result<Vec<PromptLogprob>, AttemptError> {
        let len = attempt.prompt.len();
        if asked.places(len).is_empty() {
            return Ok(Vec::new());
        }
        let mut body = json!({
            "model": model,
            "prompt": *attempt.prompt,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": asked.top,
            "return_token_ids": true,
            "cache_salt": attempt.cache_salt(),
        });
        if self.options.priorities {
            body["priority"] = json!(-i64::from(attempt.priority));
        }
        // The prompt is echoed, too.
        let entries = len * (usize::from(asked.top) + 2);
        let max_bytes = (entries * ENTRY_BYTES + (1 << 16)) as u64;
        let answer: Answer = self
            .http
            .compute("/v1/completions", &body, max_bytes)
            .await?;
        read(answer, attempt, asked)
    }
}

/// Reads the places that were asked for.
fn read(
    answer: Answer,
    attempt: &Attempt,
    asked: &PromptLogprobs,
) -> Result<Vec<PromptLogprob>, AttemptError> {
    let protocol = |why: String| AttemptError::Protocol(format!("log-probs of the prompt: {why}"));
    let prompt = &*attempt.prompt;
    let Some(choice) = answer.choices.into_iter().next() else {
        return Err(protocol("no choice".to_owned()));
    };
    if choice.prompt_token_ids.as_ref() != Some(prompt) {
        return Err(protocol(
            "they are of another prompt, or of none".to_owned(),
        ));
    }
    let found = choice.prompt_logprobs.unwrap_or_default();
    if found.len() != prompt.len() {
        let why = format!("{} places for {} tokens", found.len(), prompt.len());
        return Err(protocol(why));
    }
    let places = asked.places(prompt.len());
    let wanted = found.into_iter().enumerate().skip(places.start);
    let scored = wanted.map(|(position, entries)| {
        let entries = entries.unwrap_or_default();
        let own = entries.get(&prompt[position]);
        let own = own.ok_or_else(|| protocol(format!("position {position} has no value")))?;
        let logprob = own.logprob as f32;
        // The prompt's own token is added to the most likely ones.
        let mut top: Vec<TokenLogprob> = entries
            .into_iter()
            .map(|(id, entry)| TokenLogprob {
                id,
                logprob: entry.logprob as f32,
            })
            .collect();
        top.sort_by(|a, b| b.logprob.total_cmp(&a.logprob).then(a.id.cmp(&b.id)));
        top.truncate(usize::from(asked.top));
        Ok(PromptLogprob {
            position: position as u32,
            logprob,
            top,
            targets: Vec::new(),
        })
    });
    scored.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer of vLLM 0.32.0.
    const ANSWER: &str = r#"{"id":"cmpl-1","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":[238],"prompt_logprobs":[null,{"5":{"logprob":-3.5,"rank":4,"decoded_token":"a"},"9":{"logprob":-0.5,"rank":1,"decoded_token":"b"},"7":{"logprob":-1.5,"rank":2,"decoded_token":"c"}},{"9":{"logprob":-0.25,"rank":1,"decoded_token":"b"},"3":{"logprob":-2.0,"rank":2,"decoded_token":"d"}}],"prompt_token_ids":[1,5,9]}],"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1}}"#;

    fn attempt(prompt: &[TokenId]) -> Attempt {
        Attempt {
            prompt: prompt.to_vec().into(),
            ..Attempt::default()
        }
    }

    fn parse(text: &str, last: Option<u32>) -> Result<Vec<PromptLogprob>, AttemptError> {
        let asked = PromptLogprobs {
            last,
            top: 2,
            targets: Vec::new(),
        };
        read(
            serde_json::from_str(text).unwrap(),
            &attempt(&[1, 5, 9]),
            &asked,
        )
    }

    #[test]
    fn places_have_their_own_token_and_the_most_likely_ones() {
        let all = parse(ANSWER, None).unwrap();
        let seen: Vec<_> = all.iter().map(|p| (p.position, p.logprob)).collect();
        assert_eq!(seen, [(1, -3.5), (2, -0.25)]);
        let ids: Vec<_> = all[0].top.iter().map(|t| t.id).collect();
        assert_eq!(ids, [9, 7], "the own token is not among the best");
        assert_eq!(all[1].top[0].id, 9);
        assert_eq!(parse(ANSWER, Some(1)).unwrap(), all[1..]);
    }

    #[test]
    fn contradictions_are_refused() {
        for (from, to) in [
            (
                "\"prompt_token_ids\":[1,5,9]",
                "\"prompt_token_ids\":[1,5,8]",
            ),
            ("\"prompt_token_ids\":[1,5,9]", "\"prompt_token_ids\":null"),
            ("[null,{\"5\"", "[null,{\"6\""),
            ("[null,{", "[{"),
            ("\"choices\":[{", "\"choices\":[],\"others\":[{"),
        ] {
            let other = ANSWER.replace(from, to);
            assert_ne!(other, ANSWER);
            let refused = parse(&other, None);
            assert!(matches!(refused, Err(AttemptError::Protocol(_))), "{to}");
        }
    }

    #[test]
    fn targets_are_refused_by_name() {
        let asked = PromptLogprobs {
            targets: vec![vec![], vec![4]],
            ..PromptLogprobs::default()
        };
        let why = accepts(&asked).unwrap_err().to_string();
        assert!(
            why.contains("prompt_logprobs.targets") && why.contains("vLLM"),
            "{why}"
        );
        assert!(accepts(&PromptLogprobs::default()).is_ok());
    }
}
