//! Log-probabilities of a prompt, by `logprob_start_len` of `/generate`.
//!
//! A stream repeats them with each piece, so they are asked for by a call before it, which samples one
//! token and drops it. SGLang uses its prefix cache up to the first place; the stream that follows finds
//! the whole prompt there. Their distribution is that of the raw logits at temperature 1.
//!
//! The answer has a place for each token from `logprob_start_len` on, the first one empty:
//! `input_token_logprobs`, `input_top_logprobs` (best first), and `input_token_ids_logprobs` of the same
//! tokens at each place.

use super::SglangBackend;
use super::wire::{self, Entry, Finish};
use crate::attempt::Attempt;
use crate::backend::check_label;
use crate::check::refused;
use crate::error::AttemptError;
use serde::Deserialize;
use serde_json::json;
use sinew_types::{PromptLogprob, PromptLogprobs, TokenId};
use std::collections::{BTreeSet, HashMap};

/// Bytes that one log-probability takes in the answer, at most: value, id, no text.
const ENTRY_BYTES: usize = 64;
/// Maximum number of different targets: the server reports all of them at each place.
const MAX_TARGETS: usize = 64;

#[derive(Debug, Deserialize)]
struct Answer {
    prompt_token_ids: Option<Vec<TokenId>>,
    meta_info: MetaInfo,
}

/// Alternatives at each place.
type Places = Vec<Option<Vec<Entry>>>;

#[derive(Debug, Deserialize)]
struct MetaInfo {
    finish_reason: Option<Finish>,
    weight_version: Option<String>,
    input_token_logprobs: Option<Vec<Entry>>,
    input_top_logprobs: Option<Places>,
    input_token_ids_logprobs: Option<Places>,
}

/// All tokens that are a target at any place.
fn all_targets(asked: &PromptLogprobs) -> BTreeSet<TokenId> {
    asked.targets.iter().flatten().copied().collect()
}

/// Refuses what SGLang does not report.
pub(super) fn accepts(asked: &PromptLogprobs) -> Result<(), AttemptError> {
    let count = all_targets(asked).len();
    if count <= MAX_TARGETS {
        return Ok(());
    }
    let value = format!("{count} different tokens");
    let allowed =
        format!("at most {MAX_TARGETS} with SGLang, which reports each of them at each place");
    Err(refused("prompt_logprobs.targets", &value, &allowed))
}

impl SglangBackend {
    /// The log-probabilities of an attempt's prompt.
    pub(super) async fn score_prompt(
        &self,
        attempt: &Attempt,
        asked: &PromptLogprobs,
    ) -> Result<Vec<PromptLogprob>, AttemptError> {
        let places = asked.places(attempt.prompt.len());
        if places.is_empty() {
            return Ok(Vec::new());
        }
        let targets = all_targets(asked);
        let mut body = json!({
            "rid": format!("{}-prompt", self.request_id(attempt.id)),
            "input_ids": *attempt.prompt,
            "stream": false,
            "return_logprob": true,
            // The first place is empty.
            "logprob_start_len": places.start - 1,
            "top_logprobs_num": asked.top,
            "return_text_in_logprobs": false,
            "return_prompt_token_ids": true,
            "sampling_params": { "max_new_tokens": 1, "temperature": 0.0, "ignore_eos": true },
        });
        if !targets.is_empty() {
            body["token_ids_logprob"] = json!(targets);
        }
        if self.options.priorities {
            body["priority"] = json!(attempt.priority);
        }
        if let Some(name) = &attempt.adapter {
            body["lora_path"] = json!(name);
        }
        // The prompt is echoed, too.
        let entries = attempt.prompt.len() * (usize::from(asked.top) + targets.len() + 3);
        let max_bytes = (entries * ENTRY_BYTES + (1 << 16)) as u64;
        let answer: Answer = self.http.compute("/generate", &body, max_bytes).await?;
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
    let (prompt, meta) = (&*attempt.prompt, answer.meta_info);
    wire::refuse_abort(meta.finish_reason.as_ref())?;
    if answer
        .prompt_token_ids
        .as_ref()
        .is_some_and(|found| found != prompt)
    {
        return Err(protocol("they are of another prompt".to_owned()));
    }
    check_label(attempt, &meta.weight_version.unwrap_or_default())?;
    let places = asked.places(prompt.len());
    let own = meta.input_token_logprobs.unwrap_or_default();
    if own.len() != places.len() + 1 {
        let why = format!("{} places, {} were asked for", own.len(), places.len() + 1);
        return Err(protocol(why));
    }
    let mut top = meta
        .input_top_logprobs
        .unwrap_or_default()
        .into_iter()
        .skip(1);
    let mut others = meta
        .input_token_ids_logprobs
        .unwrap_or_default()
        .into_iter()
        .skip(1);
    let scored = places
        .zip(own.into_iter().skip(1))
        .map(|(position, (own, ..))| {
            let missing = || protocol(format!("position {position} has no value"));
            let values = others.next().flatten().unwrap_or_default().into_iter();
            let values: HashMap<TokenId, Option<f64>> =
                values.map(|(logprob, id, _)| (id, logprob)).collect();
            let target = |id: &TokenId| {
                let value = values.get(id).copied().flatten();
                value.map(|value| value as f32).ok_or_else(missing)
            };
            let targets = asked.targets_at(position).iter().map(target);
            Ok(PromptLogprob {
                position: position as u32,
                logprob: own.ok_or_else(missing)? as f32,
                top: wire::best(top.next().flatten(), usize::from(asked.top)),
                targets: targets.collect::<Result<_, _>>()?,
            })
        });
    scored.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"{"text":null,"output_ids":[4],"prompt_token_ids":[1,5,9],"meta_info":{"id":"r","finish_reason":{"type":"length","length":1},"prompt_tokens":3,"weight_version":"v0-00000000","completion_tokens":1,"cached_tokens":0,"input_token_logprobs":[[null,1,null],[-3.5,5,null],[-0.25,9,null]],"output_token_logprobs":[[-1.0,4,null]],"input_top_logprobs":[null,[[-0.5,9,null],[-1.5,7,null]],[[-0.25,9,null],[-2.0,3,null]]],"output_top_logprobs":[[[-1.0,4,null],[-2.0,5,null]]],"input_token_ids_logprobs":[null,[[-4.0,2,null],[-5.0,6,null]],[[-4.5,2,null],[-5.5,6,null]]],"output_token_ids_logprobs":[[[-1.0,2,null]]]}}"#;

    fn asked(last: Option<u32>) -> PromptLogprobs {
        PromptLogprobs {
            last,
            top: 2,
            targets: vec![vec![6], vec![6, 2, 6]],
        }
    }

    fn parse(text: &str, asked: &PromptLogprobs) -> Result<Vec<PromptLogprob>, AttemptError> {
        let attempt = Attempt {
            prompt: vec![1, 5, 9].into(),
            ..Attempt::default()
        };
        read(serde_json::from_str(text).unwrap(), &attempt, asked)
    }

    #[test]
    fn places_have_their_token_the_best_and_the_targets() {
        let all = parse(ANSWER, &asked(None)).unwrap();
        let seen: Vec<_> = all.iter().map(|p| (p.position, p.logprob)).collect();
        assert_eq!(seen, [(1, -3.5), (2, -0.25)]);
        let ids: Vec<_> = all[0].top.iter().map(|t| t.id).collect();
        assert_eq!(ids, [9, 7]);
        assert_eq!(all[0].targets, [-5.0]);
        assert_eq!(all[1].targets, [-5.5, -4.5, -5.5]);
    }

    #[test]
    fn contradictions_and_other_weights_are_refused() {
        for (from, to) in [
            ("[[null,1,null],[-3.5", "[[-3.5"),
            ("[-3.5,5,null]", "[null,5,null]"),
            ("[-5.5,6,null]", "[-5.5,8,null]"),
            (
                "\"prompt_token_ids\":[1,5,9]",
                "\"prompt_token_ids\":[1,5,8]",
            ),
            ("\"input_token_logprobs\"", "\"others\""),
        ] {
            let other = ANSWER.replace(from, to);
            assert_ne!(other, ANSWER);
            let refused = parse(&other, &asked(None));
            assert!(matches!(refused, Err(AttemptError::Protocol(_))), "{to}");
        }
        let other = ANSWER.replace("v0-00000000", "v1-00000000");
        let refused = parse(&other, &asked(None));
        assert!(matches!(refused, Err(AttemptError::Version { .. })));
        let aborted = ANSWER.replace("\"type\":\"length\"", "\"type\":\"abort\"");
        let refused = parse(&aborted, &asked(None));
        assert!(matches!(refused, Err(AttemptError::Cut(_))));
    }

    #[test]
    fn many_targets_are_refused_by_name() {
        let mut many = asked(None);
        assert!(accepts(&many).is_ok());
        many.targets = vec![(0..60).collect(), (5..65).collect()];
        let why = accepts(&many).unwrap_err().to_string();
        assert!(
            why.contains("65 different tokens") && why.contains("at most 64"),
            "{why}"
        );
    }
}
