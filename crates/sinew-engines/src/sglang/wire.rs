//! Requests to SGLang and the pieces of its answers, as JSON. Pure.
//!
//! A request has `input_ids`, `sampling_params` and `return_logprob`. A piece of the answer has
//! `output_ids` and `meta_info`: `completion_tokens` (sampled so far), `output_token_logprobs` (each
//! `[log-prob, id, text]`), `weight_version` (the label now), in newer servers `weight_versions` (the labels
//! of all tokens so far), and with the last piece `finish_reason`:
//!
//! | `finish_reason.type` | `matched` | end |
//! |---|---|---|
//! | `stop` | an id, or a list of them | a stop id |
//! | `stop` | a text | a stop string |
//! | `length` | | out of tokens |
//! | `abort` | | an error of the server |

use crate::answer_pieces::AnswerPiece;
use crate::attempt::{Attempt, ServerEnd};
use crate::error::AttemptError;
use crate::error::TokenFault;
use crate::guided;
use crate::swap::LabelSpan;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_types::{TokenId, TokenLogprob};

/// The body of `/generate`.
pub(super) fn generate(attempt: &Attempt, request_id: &str, max_tokens: u32) -> Value {
    let s = &attempt.sampling;
    let mut body = json!({
        "rid": request_id,
        "input_ids": *attempt.prompt,
        "stream": true,
        "return_logprob": true,
        // None of the prompt's.
        "logprob_start_len": -1,
        "top_logprobs_num": s.top_logprobs,
        "return_text_in_logprobs": false,
        "return_prompt_token_ids": true,
        "sampling_params": {
            "max_new_tokens": max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            // -1 keeps all.
            "top_k": if s.top_k == 0 { -1 } else { i64::from(s.top_k) },
            "min_p": s.min_p,
            "stop_token_ids": s.stop_ids,
            "stop": s.stop_strings,
            // Only what the request names ends it; the server's own idea of an end does not.
            "ignore_eos": true,
            "no_stop_trim": true,
            "skip_special_tokens": false,
            "sampling_seed": s.seed & i64::MAX as u64,
        },
    });
    if let Some(Ok((key, value))) = s.format.as_deref().map(guided::sglang) {
        body["sampling_params"][key] = value;
    }
    body
}

/// A piece of the answer.
#[derive(Debug, Deserialize)]
pub(super) struct Chunk {
    output_ids: Vec<TokenId>,
    prompt_token_ids: Option<Vec<TokenId>>,
    meta_info: MetaInfo,
}

/// Log-probability, id, text.
pub(super) type Entry = (Option<f64>, TokenId, Option<String>);

#[derive(Debug, Deserialize)]
struct MetaInfo {
    finish_reason: Option<Finish>,
    prompt_tokens: Option<usize>,
    completion_tokens: usize,
    cached_tokens: Option<u32>,
    weight_version: Option<String>,
    #[serde(default)]
    weight_versions: Vec<LabelSpan>,
    output_token_logprobs: Option<Vec<Entry>>,
    output_top_logprobs: Option<Vec<Option<Vec<Entry>>>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Finish {
    r#type: String,
    matched: Option<MatchedStop>,
    message: Option<String>,
    status_code: Option<u16>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum MatchedStop {
    Id(TokenId),
    Text(String),
    Ids(Vec<TokenId>),
}

/// Reads a piece after `before` was sampled. Servers repeat all tokens in each piece, or send,
/// with `--incremental-streaming-output`, only the new ones; the count shows which.
pub(super) fn read(
    chunk: Chunk,
    before: &[TokenId],
    prompt: usize,
    asked: usize,
) -> Result<AnswerPiece, AttemptError> {
    let meta = chunk.meta_info;
    refuse_abort(meta.finish_reason.as_ref())?;
    if let Some(count) = meta.prompt_tokens
        && count != prompt
    {
        let why = format!("it counted {count} prompt tokens, {prompt} were sent");
        return Err(AttemptError::Protocol(why));
    }
    let entries = meta.output_token_logprobs.unwrap_or_default();
    let skip = fresh(&chunk.output_ids, before, meta.completion_tokens)?;
    let tops = meta.output_top_logprobs.unwrap_or_default();
    if entries.len() != chunk.output_ids.len() {
        let (ids, logprobs) = (chunk.output_ids.len(), entries.len());
        return Err(TokenFault::Count { ids, logprobs }.into());
    }
    let said = entries.iter().map(|(_, id, _)| *id);
    if !said.eq(chunk.output_ids.iter().copied()) {
        let why = "the ids of `output_token_logprobs` are not `output_ids`".to_owned();
        return Err(AttemptError::Protocol(why));
    }
    let top = tops.into_iter().skip(skip).map(|t| best(t, asked));
    Ok(AnswerPiece {
        prompt: chunk.prompt_token_ids,
        ids: chunk.output_ids[skip..].to_vec(),
        logprobs: entries[skip..].iter().map(|(l, _, _)| *l).collect(),
        top: top.collect(),
        end: meta.finish_reason.map(end),
        label: Some(meta.weight_version.unwrap_or_default()),
        spans: meta.weight_versions,
        cached: meta.cached_tokens,
        routes: None,
    })
}

/// The error that an end stands for by which the server gives up.
pub(super) fn refuse_abort(finish: Option<&Finish>) -> Result<(), AttemptError> {
    let Some(finish) = finish.filter(|finish| finish.r#type == "abort") else {
        return Ok(());
    };
    let why = finish.message.clone().unwrap_or_default();
    Err(match finish.status_code {
        Some(400) => AttemptError::Refused(sinew_types::EngineError::Failed(why)),
        Some(status @ (429 | 503)) => AttemptError::Busy { status, body: why },
        _ => AttemptError::Cut(format!("the server aborted: {why}")),
    })
}

/// Number of leading `ids` that came before.
///
/// # Errors
/// If the count fits neither form, or an earlier id has changed.
fn fresh(ids: &[TokenId], before: &[TokenId], count: usize) -> Result<usize, AttemptError> {
    if ids.len() + before.len() == count {
        return Ok(0);
    }
    if ids.len() != count || count < before.len() {
        let why = format!(
            "{} ids came after {}, it counts {count}",
            ids.len(),
            before.len()
        );
        return Err(AttemptError::Protocol(why));
    }
    let same = ids.iter().zip(before).position(|(a, b)| a != b);
    if let Some(position) = same {
        let (before, now) = (before[position], ids[position]);
        return Err(TokenFault::Rewritten {
            position,
            before,
            now,
        }
        .into());
    }
    Ok(before.len())
}

/// Returns the `asked` best alternatives of one token, best first.
pub(super) fn best(entries: Option<Vec<Entry>>, asked: usize) -> Vec<TokenLogprob> {
    let entries = entries.unwrap_or_default().into_iter();
    let known = entries.filter_map(|(logprob, id, _)| {
        Some(TokenLogprob {
            id,
            logprob: logprob? as f32,
        })
    });
    known.take(asked).collect()
}

fn end(finish: Finish) -> ServerEnd {
    match (finish.r#type.as_str(), finish.matched) {
        ("stop", Some(MatchedStop::Id(id))) => ServerEnd::StopId(Some(id)),
        ("stop", Some(MatchedStop::Text(text))) => ServerEnd::StopString(text),
        ("stop", Some(MatchedStop::Ids(ids))) => ServerEnd::StopId(ids.last().copied()),
        ("stop", None) => ServerEnd::StopId(None),
        ("length", _) => ServerEnd::Length,
        (other, _) => ServerEnd::Aborted(other.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(ids: &str, logprobs: &str, count: usize, finish: &str) -> Chunk {
        let text = format!(
            "{{\"text\":null,\"output_ids\":{ids},\"meta_info\":{{\"id\":\"r\",\
             \"finish_reason\":{finish},\"prompt_tokens\":2,\"weight_version\":\"v3-000000aa\",\
             \"completion_tokens\":{count},\"cached_tokens\":1,\
             \"output_token_logprobs\":{logprobs}}}}}"
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn pieces_may_repeat_or_go_on() {
        let first = "[[-0.5,7,null]]";
        let both = "[[-0.5,7,null],[-1.5,8,null]]";
        let again = read(chunk("[7,8]", both, 2, "null"), &[7], 2, 0).unwrap();
        assert_eq!((again.ids, again.logprobs), (vec![8], vec![Some(-1.5)]));
        let on = read(chunk("[7]", first, 2, "null"), &[5], 2, 0).unwrap();
        assert_eq!(
            (on.ids, on.label),
            (vec![7], Some("v3-000000aa".to_owned()))
        );
    }

    #[test]
    fn contradictions_are_refused() {
        let entry = "[[-0.5,7,null]]";
        let rewritten = read(
            chunk("[7,8]", "[[-0.5,7,null],[-1,8,null]]", 2, "null"),
            &[6],
            2,
            0,
        );
        assert!(matches!(
            rewritten,
            Err(AttemptError::Tokens(TokenFault::Rewritten {
                position: 0,
                ..
            }))
        ));
        let other = read(chunk("[8]", entry, 1, "null"), &[], 2, 0);
        assert!(matches!(other, Err(AttemptError::Protocol(_))));
        let count = read(chunk("[7]", "[]", 1, "null"), &[], 2, 0);
        assert!(matches!(
            count,
            Err(AttemptError::Tokens(TokenFault::Count { .. }))
        ));
        let prompt = read(chunk("[7]", entry, 1, "null"), &[], 3, 0);
        assert!(matches!(prompt, Err(AttemptError::Protocol(why)) if why.contains("3 were sent")));
        let lost = read(chunk("[7]", entry, 5, "null"), &[1], 2, 0);
        assert!(matches!(lost, Err(AttemptError::Protocol(_))));
    }

    #[test]
    fn ends_and_aborts() {
        let entry = "[[-0.5,7,null]]";
        let finish = |text: &str| read(chunk("[7]", entry, 1, text), &[], 2, 0);
        let end = |text: &str| finish(text).unwrap().end;
        assert_eq!(
            end("{\"type\":\"stop\",\"matched\":7}"),
            Some(ServerEnd::StopId(Some(7)))
        );
        assert_eq!(
            end("{\"type\":\"stop\",\"matched\":\"x\"}"),
            Some(ServerEnd::StopString("x".into()))
        );
        assert_eq!(
            end("{\"type\":\"length\",\"length\":1}"),
            Some(ServerEnd::Length)
        );
        let abort = "{\"type\":\"abort\",\"message\":\"m\",\"status_code\":503,\"err_type\":null}";
        assert!(matches!(finish(abort), Err(AttemptError::Busy { .. })));
    }
}
