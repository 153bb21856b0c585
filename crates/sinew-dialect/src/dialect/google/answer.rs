//! Answers of Google's API: one object, or the same object again and again with what is new.

use super::{error_value, signature};
use crate::dialect::openai::token_text;
use crate::dialect::{
    AnswerContext, Choice, Delta, EventWriter, ModelRequest, ModelResponse, TurnEnd, data_event,
};
use crate::error::ApiError;
use serde_json::{Value, json};
use sinew_render::Piece;
use sinew_types::{SampledToken, TokenId, ToolCall};

/// Whether the request asks for thoughts as parts of the answer.
fn shows_thoughts(request: &ModelRequest) -> bool {
    request.echo["thoughts"] == json!(true)
}

/// A whole answer.
pub(super) fn whole(context: &AnswerContext, response: &ModelResponse) -> Value {
    let choices = response.choices.iter().enumerate();
    let candidates = choices.map(|(index, choice)| {
        let mut value = candidate(index, parts(&context.request, choice));
        value["finishReason"] = json!(finish_reason(Some(&choice.end)));
        add_logprobs(context, &mut value, &choice.tokens);
        value
    });
    let mut value = object(context, candidates.collect());
    value["usageMetadata"] = usage(context, response);
    value
}

/// The answer object with these candidates.
fn object(context: &AnswerContext, candidates: Vec<Value>) -> Value {
    json!({
        "candidates": candidates,
        "modelVersion": context.request.model,
        "responseId": context.id,
    })
}

/// A candidate with these parts. Clients expect at least one: a piece of a stream that only has
/// log-probabilities gets an empty text.
fn candidate(index: usize, mut parts: Vec<Value>) -> Value {
    if parts.is_empty() {
        parts.push(json!({"text": ""}));
    }
    json!({"content": {"parts": parts, "role": "model"}, "index": index})
}

/// The parts of a whole turn. Clients expect at least one.
fn parts(request: &ModelRequest, choice: &Choice) -> Vec<Value> {
    let said = &choice.message;
    let mut parts = Vec::new();
    let mut signed = None;
    if let Some(reasoning) = &said.reasoning {
        signed = Some(signature::write(reasoning));
        if shows_thoughts(request) {
            parts.push(thought(reasoning));
        }
    }
    let calls = said.tool_calls.iter().map(call_part);
    let calls: Vec<Value> = calls.collect();
    if !said.content.is_empty() || calls.is_empty() {
        parts.push(json!({"text": said.content.text()}));
    }
    let first_call = parts.len();
    parts.extend(calls);
    // The first call has the signature, else the text.
    let place = first_call.min(parts.len() - 1);
    if let Some(signed) = signed {
        parts[place]["thoughtSignature"] = json!(signed);
    }
    parts
}

fn thought(text: &str) -> Value {
    json!({"text": text, "thought": true})
}

/// A call, whole.
fn call_part(call: &ToolCall) -> Value {
    json!({"functionCall": {"id": call.id, "name": call.name, "args": call.arguments}})
}

/// Google's word for the end of a candidate: calls are an end like any other.
fn finish_reason(end: Option<&TurnEnd>) -> &'static str {
    match end {
        Some(TurnEnd::Length) => "MAX_TOKENS",
        _ => "STOP",
    }
}

/// Adds `logprobsResult` and `avgLogprobs`, if the request asked for them.
fn add_logprobs(context: &AnswerContext, candidate: &mut Value, tokens: &[SampledToken]) {
    if context.request.logprobs.is_none() || tokens.is_empty() {
        return;
    }
    let one = |id: TokenId, logprob: f32| {
        let (text, _) = token_text(context.renderer.as_ref(), id);
        json!({"token": text, "tokenId": id, "logProbability": logprob})
    };
    let chosen: Vec<Value> = tokens.iter().map(|t| one(t.id, t.logprob)).collect();
    let top: Vec<Value> = tokens
        .iter()
        .map(|token| {
            let top: Vec<Value> = token.top.iter().map(|t| one(t.id, t.logprob)).collect();
            json!({"candidates": top})
        })
        .collect();
    let sum: f32 = tokens.iter().map(|t| t.logprob).sum();
    candidate["avgLogprobs"] = json!(sum / tokens.len() as f32);
    candidate["logprobsResult"] = json!({
        "chosenCandidates": chosen, "topCandidates": top, "logProbabilitySum": sum,
    });
}

/// Tokens of the call. Those of the reasoning itself are counted apart; its marks are not.
fn usage(context: &AnswerContext, response: &ModelResponse) -> Value {
    let reasoning = response
        .choices
        .iter()
        .filter_map(|c| c.message.reasoning.as_deref());
    let thoughts: usize = reasoning
        .filter_map(|text| context.renderer.encode_text(text).ok())
        .map(|ids| ids.len())
        .sum();
    let usage = &response.usage;
    let sampled = usage.completion_tokens;
    let thoughts = (thoughts as u32).min(sampled);
    let mut value = json!({
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": sampled - thoughts,
        "totalTokenCount": usage.prompt_tokens + sampled,
    });
    if thoughts > 0 {
        value["thoughtsTokenCount"] = json!(thoughts);
    }
    if usage.cached_tokens > 0 {
        value["cachedContentTokenCount"] = json!(usage.cached_tokens);
    }
    value
}

/// A candidate of a stream so far.
#[derive(Default)]
struct Open {
    /// Reasoning that no part has as a signature yet; it may be empty.
    reasoning: Option<String>,
    end: Option<TurnEnd>,
}

/// State of a stream.
pub(super) struct GoogleStream {
    context: AnswerContext,
    /// The items of an array, instead of events.
    array: bool,
    /// Whether an item was written.
    begun: bool,
    open: Vec<Open>,
}

impl GoogleStream {
    pub(super) fn new(context: AnswerContext, array: bool) -> Self {
        let count = context.request.n as usize;
        Self {
            context,
            array,
            begun: false,
            open: (0..count).map(|_| Open::default()).collect(),
        }
    }

    /// An item of the stream.
    fn item(&mut self, value: &Value) -> String {
        if !self.array {
            return data_event(value);
        }
        let before = if std::mem::replace(&mut self.begun, true) {
            ",\n"
        } else {
            "["
        };
        format!("{before}{value}")
    }

    /// The parts for new pieces of a candidate.
    fn parts(&mut self, index: usize, pieces: &[Piece]) -> Vec<Value> {
        let shown = shows_thoughts(&self.context.request);
        let open = &mut self.open[index];
        let mut parts = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Text(text) => parts.push(json!({"text": text})),
                Piece::Reasoning(text) => {
                    open.reasoning.get_or_insert_default().push_str(text);
                    if shown {
                        parts.push(thought(text));
                    }
                }
                Piece::Call(call) => {
                    let mut part = call_part(call);
                    sign(&mut part, open);
                    parts.push(part);
                }
            }
        }
        parts
    }
}

/// Adds the signature of the reasoning so far, once.
fn sign(part: &mut Value, open: &mut Open) {
    if let Some(reasoning) = open.reasoning.take() {
        part["thoughtSignature"] = json!(signature::write(&reasoning));
    }
}

impl EventWriter for GoogleStream {
    fn content_type(&self) -> &'static str {
        if self.array {
            "application/json"
        } else {
            "text/event-stream"
        }
    }

    /// Google's JavaScript client stops at a comment: clients get an item without text.
    fn ping(&mut self) -> String {
        if self.array {
            return if self.begun {
                "\n".into()
            } else {
                String::new()
            };
        }
        let value = candidate(0, vec![json!({"text": ""})]);
        data_event(&object(&self.context, vec![value]))
    }

    fn delta(&mut self, delta: &Delta) -> String {
        let index = delta.choice as usize;
        let parts = self.parts(index, &delta.pieces);
        let open = &mut self.open[index];
        open.end = delta.end.clone().or(open.end.take());
        let scored = self.context.request.logprobs.is_some() && !delta.tokens.is_empty();
        if parts.is_empty() && !scored {
            return String::new();
        }
        let mut value = candidate(index, parts);
        add_logprobs(&self.context, &mut value, &delta.tokens);
        let value = object(&self.context, vec![value]);
        self.item(&value)
    }

    fn end(&mut self, response: &ModelResponse) -> String {
        let open = self.open.iter_mut().enumerate();
        let candidates = open.map(|(index, open)| {
            let mut part = json!({"text": ""});
            sign(&mut part, open);
            let mut value = candidate(index, vec![part]);
            value["finishReason"] = json!(finish_reason(open.end.as_ref()));
            value
        });
        let candidates = candidates.collect();
        let mut value = object(&self.context, candidates);
        value["usageMetadata"] = usage(&self.context, response);
        let mut out = self.item(&value);
        if self.array {
            out.push_str("]\n");
        }
        out
    }

    /// Google's clients look for an error outside of events.
    fn error(&mut self, error: &ApiError) -> String {
        let value = error_value(error);
        if self.array {
            let mut out = self.item(&value);
            out.push_str("]\n");
            return out;
        }
        format!("{value}\n\n")
    }
}
