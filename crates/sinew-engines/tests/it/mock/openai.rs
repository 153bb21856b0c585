//! A server that supports only `/v1/completions`, with or without ids.

use super::generate::{Piece, sampling_of, stream_of};
use super::serve::{Answer, Call, error, json_answer, unknown_field};
use super::{END, Kind, State, text_of};
use serde_json::{Value, json};
use sinew_types::{FinishReason, SampledToken};
use std::sync::Arc;

const FIELDS: &[&str] = &[
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "stream",
    "logprobs",
    "stop",
];

pub(super) fn answer(state: &Arc<State>, call: Call) -> Answer {
    match call.path.as_str() {
        "/v1/models" => json_answer(&json!({ "object": "list", "data": [{ "id": "tiny" }] })),
        "/v1/completions" => completions(state, call.body),
        _ => error(404, "Not Found"),
    }
}

/// Ids of the words that [`text_of`] makes.
fn ids(prompt: &Value) -> Option<Vec<u32>> {
    match prompt {
        Value::String(text) => {
            let words = text.split_whitespace();
            words.map(|w| u32::from_str_radix(w, 16).ok()).collect()
        }
        Value::Array(list) => list.iter().map(|v| v.as_u64().map(|n| n as u32)).collect(),
        _ => None,
    }
}

fn completions(state: &Arc<State>, body: Value) -> Answer {
    if let Some(field) = unknown_field(&body, FIELDS) {
        return error(400, &format!("unknown field {field}"));
    }
    let Some(prompt) = ids(&body["prompt"]) else {
        return error(400, "what prompt is that?");
    };
    state.seen.lock().unwrap().push(body.clone());
    let mut sampling = sampling_of(&body, "max_tokens");
    // It has a separate end and does not show it.
    sampling.stop_ids = vec![END];
    let with_ids = state.kind == Kind::OpenaiWithIds && body.get("logprobs").is_some();
    let write = move |_: &State, piece: &Piece| {
        let shown = piece.new.iter().filter(|t| t.id != END);
        let content = |t: &SampledToken| {
            json!({ "id": t.id, "token": text_of(t.id), "bytes": text_of(t.id).as_bytes(),
                "logprob": t.logprob, "top_logprobs": [] })
        };
        let content: Vec<_> = shown.clone().map(content).collect();
        let logprobs = with_ids.then(|| json!({ "content": content }));
        let finish = piece.end.as_ref().map(|end| match end {
            FinishReason::StopId { .. } | FinishReason::StopString { .. } => "stop",
            _ => "length",
        });
        json!({ "id": "cmpl-1", "object": "text_completion", "model": "tiny",
            "choices": [{ "index": 0, "text": shown.map(|t| text_of(t.id)).collect::<String>(),
                "logprobs": logprobs, "finish_reason": finish }] })
    };
    stream_of(state, (prompt, None), sampling, Box::new(write), Vec::new())
}
