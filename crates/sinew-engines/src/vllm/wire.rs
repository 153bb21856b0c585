//! Requests to vLLM and the pieces of its answers, as JSON. Pure.
//!
//! | | `/v1/completions` | `/inference/v1/generate` |
//! |---|---|---|
//! | prompt | `prompt`: ids | `token_ids` |
//! | sampling | fields of the body | `sampling_params` |
//! | ids of the output | `choices[].token_ids`, and `logprobs.tokens` as `token_id:ID` | `choices[].token_ids`, and `logprobs.content[].token_id` |
//! | log-probs | `logprobs.token_logprobs` | `logprobs.content[].logprob` |
//! | version | the label before and after (`/weight_info`) | also `choices[].weight_versions` |
//! | experts | - | `choices[].routed_experts`, see [`super::experts`] |
//!
//! Both get `cache_salt` = version and lineage (with an adapter that the request names, its name on the
//! server, too), so that the KV of other weights is not reused, `ignore_eos`, so that only the request's
//! stop ids end it, and penalties that are off.

use super::experts;
use crate::answer_pieces::AnswerPiece;
use crate::attempt::{Attempt, ServerEnd};
use crate::error::AttemptError;
use crate::guided;
use crate::swap::LabelSpan;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sinew_types::{SamplingParams, TokenId, TokenLogprob};
use std::collections::HashMap;

/// Parameters that have the same names at both endpoints.
fn sampling(attempt: &Attempt, max_tokens: u32) -> Map<String, Value> {
    let s = &attempt.sampling;
    let mut map = Map::new();
    let mut set = |key: &str, value: Value| {
        map.insert(key.to_owned(), value);
    };
    set("max_tokens", json!(max_tokens));
    set("temperature", json!(s.temperature));
    set("top_p", json!(s.top_p));
    set("top_k", json!(s.top_k));
    set("min_p", json!(s.min_p));
    set("seed", json!(s.seed & i64::MAX as u64));
    set("stop_token_ids", json!(s.stop_ids));
    // Only what the request names ends it; the server's own idea of an end does not.
    set("ignore_eos", json!(true));
    set("logprobs", json!(s.top_logprobs));
    set("repetition_penalty", json!(1.0));
    set("presence_penalty", json!(0.0));
    set("frequency_penalty", json!(0.0));
    if !s.stop_strings.is_empty() {
        set("stop", json!(s.stop_strings));
        set("include_stop_str_in_output", json!(true));
    }
    if !s.logit_bias.is_empty() {
        let bias = s.logit_bias.iter();
        let bias: Map<_, _> = bias.map(|(id, b)| (id.to_string(), json!(b))).collect();
        set("logit_bias", Value::Object(bias));
    }
    if let Some(Ok(fields)) = s.format.as_deref().map(guided::vllm) {
        set("structured_outputs", fields);
    }
    map
}

/// The body of `/v1/completions`.
pub(super) fn completions(attempt: &Attempt, model: &str, max_tokens: u32) -> Value {
    let mut body = sampling(attempt, max_tokens);
    let more = json!({
        "model": model,
        "prompt": *attempt.prompt,
        "stream": true,
        "stream_options": { "include_usage": true },
        "return_token_ids": true,
        "return_tokens_as_token_ids": true,
        "skip_special_tokens": false,
        "cache_salt": attempt.cache_salt(),
    });
    if let Value::Object(more) = more {
        body.extend(more);
    }
    Value::Object(body)
}

/// The body of `/inference/v1/generate`.
pub(super) fn generate(attempt: &Attempt, model: &str, max_tokens: u32) -> Value {
    let mut sampling = sampling(attempt, max_tokens);
    // Text is only needed to find stop strings in it.
    let detokenize = !attempt.sampling.stop_strings.is_empty();
    sampling.insert("detokenize".to_owned(), json!(detokenize));
    if let Some(start) = attempt.sampling.routes_from {
        sampling.insert("routed_experts_prompt_start".to_owned(), json!(start));
    }
    json!({
        "request_id": format!("sinew-{}", attempt.id.0),
        "model": model,
        "token_ids": *attempt.prompt,
        "stream": true,
        "stream_options": { "include_usage": true },
        "return_token_ids": true,
        "cache_salt": attempt.cache_salt(),
        "sampling_params": sampling,
    })
}

/// A piece of the answer of either endpoint.
#[derive(Debug, Deserialize)]
pub(super) struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    prompt_token_ids: Option<Vec<TokenId>>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    token_ids: Option<Vec<TokenId>>,
    prompt_token_ids: Option<Vec<TokenId>>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<String>,
    stop_reason: Option<StopReason>,
    /// Weights of the parts of the output, with the last piece.
    weight_versions: Option<Vec<LabelSpan>>,
    routed_experts: Option<String>,
}

/// The stop token or the stop string that ended the output.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum StopReason {
    Id(TokenId),
    Text(String),
}

#[derive(Debug, Deserialize)]
struct Logprobs {
    /// Tokens of `/v1/completions`; each is `token_id:ID`.
    tokens: Option<Vec<String>>,
    token_logprobs: Option<Vec<Option<f64>>>,
    #[serde(default)]
    top_logprobs: Vec<Option<HashMap<String, f64>>>,
    /// Entries of `/inference/v1/generate`.
    content: Option<Vec<Content>>,
}

#[derive(Debug, Deserialize)]
struct Content {
    token_id: TokenId,
    logprob: Option<f64>,
    #[serde(default)]
    top_logprobs: Vec<Candidate>,
}

#[derive(Debug, Deserialize)]
struct Candidate {
    token_id: TokenId,
    logprob: f64,
}

#[derive(Debug, Deserialize)]
struct Usage {
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Debug, Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u32>,
}

/// Reads a piece. The ids come twice, next to and inside the log-probabilities: they must
/// be the same.
pub(super) fn read(chunk: Chunk, sampling: &SamplingParams) -> Result<AnswerPiece, AttemptError> {
    let details = chunk.usage.and_then(|u| u.prompt_tokens_details);
    let mut seen = AnswerPiece {
        prompt: chunk.prompt_token_ids,
        cached: details.and_then(|d| d.cached_tokens),
        ..AnswerPiece::default()
    };
    if chunk.choices.len() > 1 {
        let why = format!("{} choices, one was asked for", chunk.choices.len());
        return Err(AttemptError::Protocol(why));
    }
    let Some(choice) = chunk.choices.into_iter().next() else {
        return Ok(seen);
    };
    seen.prompt = seen.prompt.or(choice.prompt_token_ids);
    seen.ids = choice.token_ids.ok_or_else(|| {
        AttemptError::Protocol("no `token_ids`: is it a vLLM of 0.10.2 or later?".to_owned())
    })?;
    seen.spans = choice.weight_versions.unwrap_or_default();
    if let (Some(start), Some(text)) = (sampling.routes_from, &choice.routed_experts) {
        seen.routes = experts::parse(text, start)?;
    }
    let listed = match choice.logprobs {
        Some(logprobs) => read_logprobs(logprobs, usize::from(sampling.top_logprobs), &mut seen)?,
        None => Vec::new(),
    };
    if listed != seen.ids && seen.logprobs.len() == seen.ids.len() {
        let why = format!(
            "`token_ids` are {:?}, log-probs are of {listed:?}",
            seen.ids
        );
        return Err(AttemptError::Protocol(why));
    }
    seen.end = match (choice.finish_reason.as_deref(), choice.stop_reason) {
        (None, _) => None,
        (Some("stop"), Some(StopReason::Text(text))) => Some(ServerEnd::StopString(text)),
        (Some("stop"), Some(StopReason::Id(id))) => Some(ServerEnd::StopId(Some(id))),
        (Some("stop"), None) => Some(ServerEnd::StopId(None)),
        (Some("length"), _) => Some(ServerEnd::Length),
        (Some(other), _) => Some(ServerEnd::Aborted(other.to_owned())),
    };
    Ok(seen)
}

/// Fills in log-probabilities; returns the ids that they are of.
fn read_logprobs(
    logprobs: Logprobs,
    asked: usize,
    seen: &mut AnswerPiece,
) -> Result<Vec<TokenId>, AttemptError> {
    if let Some(content) = logprobs.content {
        for token in &content {
            let top = token.top_logprobs.iter().map(|c| (c.token_id, c.logprob));
            seen.top.push(best(top, asked));
            seen.logprobs.push(token.logprob);
        }
        return Ok(content.iter().map(|c| c.token_id).collect());
    }
    seen.logprobs = logprobs.token_logprobs.unwrap_or_default();
    for top in logprobs.top_logprobs {
        let mut all = Vec::new();
        for (token, logprob) in top.into_iter().flatten() {
            all.push((token_id(&token)?, logprob));
        }
        seen.top.push(best(all.into_iter(), asked));
    }
    let tokens = logprobs.tokens.unwrap_or_default();
    tokens.iter().map(|t| token_id(t)).collect()
}

/// The alternatives of one token, best first. The server adds the sampled token to the requested
/// ones, so the list is cut to `asked`.
fn best(all: impl Iterator<Item = (TokenId, f64)>, asked: usize) -> Vec<TokenLogprob> {
    let mut all: Vec<_> = all.collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let best = all
        .into_iter()
        .take(asked)
        .map(|(id, logprob)| TokenLogprob {
            id,
            logprob: logprob as f32,
        });
    best.collect()
}

fn token_id(text: &str) -> Result<TokenId, AttemptError> {
    let number = text.strip_prefix("token_id:").and_then(|n| n.parse().ok());
    number.ok_or_else(|| {
        let why = format!("token `{text}` is not of the form token_id:ID");
        AttemptError::Protocol(why)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, top: u8) -> Result<AnswerPiece, AttemptError> {
        let sampling = SamplingParams {
            top_logprobs: top,
            ..SamplingParams::default()
        };
        read(serde_json::from_str(text).unwrap(), &sampling)
    }

    /// Pieces of answers of vLLM 0.32.0.
    const COMPLETION: &str = r#"{"id":"cmpl-93ac197f6d36694a","object":"text_completion","created":1795247434,"model":"tiny","choices":[{"index":0,"text":"","logprobs":{"text_offset":[0],"token_logprobs":[-4.767938613891602],"tokens":["token_id:238"],"top_logprobs":[{"token_id:238":-4.767938613891602,"token_id:422":-2.8688528537750244,"token_id:203":-3.1215927600860596}]},"finish_reason":null,"stop_reason":null,"prompt_token_ids":[1,5,9,12],"token_ids":[238]}]}"#;
    const GENERATE: &str = r#"{"request_id":"generate-tokens-r1","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":"length","stop_reason":null,"token_ids":[465],"routed_experts":null,"sampling_mask":null,"weight_versions":[{"version":"default","start":0,"end":3}],"logprobs":{"content":[{"token_id":465,"logprob":-4.9395880699157715,"rank":23,"top_logprobs":[{"token_id":465,"logprob":-4.9395880699157715,"rank":23},{"token_id":12,"logprob":-2.015076160430908,"rank":1}]}]}}]}"#;
    const USAGE: &str = r#"{"id":"cmpl-1","object":"text_completion","created":1,"model":"tiny","choices":[],"usage":{"prompt_tokens":4,"total_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":3}},"system_fingerprint":"vllm-0.32.0-4992fc96"}"#;

    #[test]
    fn recorded_pieces_are_read() {
        let seen = parse(COMPLETION, 2).unwrap();
        assert_eq!(seen.prompt.as_deref(), Some(&[1, 5, 9, 12][..]));
        assert_eq!(
            (seen.ids, seen.logprobs),
            (vec![238], vec![Some(-4.767938613891602)])
        );
        let top: Vec<_> = seen.top[0].iter().map(|t| t.id).collect();
        assert_eq!(
            top,
            [422, 203],
            "without the sampled one, which is not among the best"
        );
        assert_eq!(seen.end, None);
        let seen = parse(GENERATE, 1).unwrap();
        assert_eq!(seen.end, Some(ServerEnd::Length));
        let spans: Vec<_> = seen
            .spans
            .iter()
            .map(|s| (&*s.label, s.start, s.end))
            .collect();
        assert_eq!(spans, [("default", 0, 3)]);
        assert_eq!(seen.top[0][0].id, 12);
        assert_eq!(parse(USAGE, 0).unwrap().cached, Some(3));
    }

    #[test]
    fn experts_are_read_where_they_are_asked_for() {
        let broken = GENERATE.replace("\"routed_experts\":null", "\"routed_experts\":\"AAAA\"");
        let sampling = |routes_from| SamplingParams {
            routes_from,
            ..SamplingParams::default()
        };
        let read_with = |start| read(serde_json::from_str(&broken).unwrap(), &sampling(start));
        assert_eq!(read_with(None).unwrap().routes, None);
        assert!(matches!(read_with(Some(0)), Err(AttemptError::Protocol(_))));
    }

    #[test]
    fn contradictions_are_refused() {
        let other = COMPLETION.replace("\"token_ids\":[238]", "\"token_ids\":[239]");
        assert!(matches!(parse(&other, 0), Err(AttemptError::Protocol(_))));
        let none = COMPLETION.replace("\"token_ids\":[238]", "\"token_ids\":null");
        assert!(
            matches!(parse(&none, 0), Err(AttemptError::Protocol(why)) if why.contains("0.10.2"))
        );
        let text = COMPLETION.replace("[\"token_id:238\"]", "[\" the\"]");
        assert!(matches!(parse(&text, 0), Err(AttemptError::Protocol(_))));
    }
}
