//! Streamed answers: an item is started, written and done before the next one begins.
//!
//! | part of the turn | events between `response.output_item.added` and `.done` |
//! |---|---|
//! | reasoning | `response.reasoning_text.delta`, `.done` |
//! | text | `response.content_part.added`, `response.output_text.delta`, `.done`, `response.content_part.done` |
//! | a call | `response.function_call_arguments.delta` (once, whole), `.done`; for a custom tool `response.custom_tool_call_input`; none for others |
//!
//! The events `response.created` and `response.in_progress` come first; `response.completed`,
//! `response.incomplete` or `response.failed` comes last. Each event has the next `sequence_number`.

use super::{
    CALL, TEXT, THOUGHT, call_item, finished, item_id, item_status, logprob_values, message_item,
    reasoning_item, skeleton, text_part,
};
use crate::dialect::{AnswerContext, Delta, EventWriter, ModelResponse, TurnEnd};
use crate::error::ApiError;
use serde_json::{Value, json};
use sinew_render::Piece;
use sinew_types::ToolCall;

/// Log-probabilities as events of text have them: items have the bytes of each token, too.
fn without_bytes(logprobs: &Value) -> Value {
    let bare = |entry: &Value| json!({"token": entry["token"], "logprob": entry["logprob"]});
    let entries = logprobs.as_array().into_iter().flatten();
    entries
        .map(|entry| {
            let top = entry["top_logprobs"].as_array().into_iter().flatten();
            let top: Vec<Value> = top.map(bare).collect();
            let mut value = bare(entry);
            value["top_logprobs"] = json!(top);
            value
        })
        .collect()
}

/// A text that is being written: a message or reasoning.
struct OpenText {
    /// Id of the item.
    id: String,
    /// Index in the output.
    index: usize,
    /// Written so far.
    text: String,
    logprobs: Vec<Value>,
}

/// Writes the events of one answer.
pub(super) struct ResponsesStream {
    context: AnswerContext,
    /// Number of the next event.
    sequence: u64,
    /// Items in their order; an open one has its first form.
    done: Vec<Value>,
    /// Messages and calls that were started.
    texts: usize,
    calls: usize,
    /// The reasoning item that is open.
    open: Option<OpenText>,
    /// The message that is open.
    message: Option<OpenText>,
    end: Option<TurnEnd>,
}

impl ResponsesStream {
    pub(super) fn new(context: AnswerContext) -> Self {
        Self {
            context,
            sequence: 0,
            done: Vec::new(),
            texts: 0,
            calls: 0,
            open: None,
            message: None,
            end: None,
        }
    }

    /// One event with the next number.
    fn event(&mut self, kind: &str, mut fields: Value) -> String {
        fields["type"] = json!(kind);
        fields["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        format!("event: {kind}\ndata: {fields}\n\n")
    }

    /// Adds an item in its first form.
    fn add(&mut self, item: Value) -> (usize, String) {
        let index = self.done.len();
        self.done.push(item.clone());
        let fields = json!({"output_index": index, "item": item});
        (index, self.event("response.output_item.added", fields))
    }

    /// Replaces an item by its last form.
    fn item_done(&mut self, index: usize, item: Value) -> String {
        self.done[index] = item.clone();
        let fields = json!({"output_index": index, "item": item});
        self.event("response.output_item.done", fields)
    }

    /// Position of a text in the output.
    fn place(text: &OpenText) -> Value {
        json!({"item_id": text.id, "output_index": text.index, "content_index": 0})
    }

    fn part(&mut self, kind: &str, text: &OpenText, part: Value) -> String {
        let mut fields = Self::place(text);
        fields["part"] = part;
        self.event(kind, fields)
    }

    /// Writes reasoning; the first of it opens an item.
    fn reason(&mut self, text: &str) -> String {
        let mut out = String::new();
        let mut open = match self.open.take() {
            Some(open) => open,
            None => {
                out.push_str(&self.say_done("completed"));
                let id = item_id(&self.context, THOUGHT, self.done.len());
                let item = reasoning_item(&id, "", "in_progress");
                let part = json!({"type": "reasoning_text", "text": ""});
                self.begin(id, item, part, &mut out)
            }
        };
        if !text.is_empty() {
            let mut fields = Self::place(&open);
            fields["delta"] = json!(text);
            out.push_str(&self.event("response.reasoning_text.delta", fields));
            open.text.push_str(text);
        }
        self.open = Some(open);
        out
    }

    /// Adds an item that holds one part of text, which is still empty.
    fn begin(&mut self, id: String, mut item: Value, part: Value, out: &mut String) -> OpenText {
        item["content"] = json!([]);
        let (index, added) = self.add(item);
        out.push_str(&added);
        let open = OpenText {
            id,
            index,
            text: String::new(),
            logprobs: Vec::new(),
        };
        out.push_str(&self.part("response.content_part.added", &open, part));
        open
    }

    /// Closes the reasoning item, if one is open.
    fn reason_done(&mut self, status: &str) -> String {
        let Some(open) = self.open.take() else {
            return String::new();
        };
        let mut fields = Self::place(&open);
        fields["text"] = json!(open.text);
        let mut out = self.event("response.reasoning_text.done", fields);
        let part = json!({"type": "reasoning_text", "text": open.text});
        out.push_str(&self.part("response.content_part.done", &open, part));
        let item = reasoning_item(&open.id, &open.text, status);
        out.push_str(&self.item_done(open.index, item));
        out
    }

    /// Writes text; the first of it opens a message.
    fn say(&mut self, text: &str, logprobs: Value) -> String {
        let mut out = String::new();
        let mut open = match self.message.take() {
            Some(open) => open,
            None => {
                let id = item_id(&self.context, TEXT, self.texts);
                self.texts += 1;
                let item = message_item(&id, "", &json!([]), "in_progress");
                self.begin(id, item, text_part("", &json!([])), &mut out)
            }
        };
        if !text.is_empty() {
            let mut fields = Self::place(&open);
            fields["delta"] = json!(text);
            fields["logprobs"] = without_bytes(&logprobs);
            out.push_str(&self.event("response.output_text.delta", fields));
            open.text.push_str(text);
        }
        if let Value::Array(logprobs) = logprobs {
            open.logprobs.extend(logprobs);
        }
        self.message = Some(open);
        out
    }

    /// Closes the message, if one is open.
    fn say_done(&mut self, status: &str) -> String {
        let Some(open) = self.message.take() else {
            return String::new();
        };
        let logprobs = json!(open.logprobs);
        let mut fields = Self::place(&open);
        fields["text"] = json!(open.text);
        fields["logprobs"] = without_bytes(&logprobs);
        let mut out = self.event("response.output_text.done", fields);
        let part = text_part(&open.text, &logprobs);
        out.push_str(&self.part("response.content_part.done", &open, part));
        let item = message_item(&open.id, &open.text, &logprobs, status);
        out.push_str(&self.item_done(open.index, item));
        out
    }

    /// Writes a call as a whole.
    fn call(&mut self, call: &ToolCall) -> String {
        let id = item_id(&self.context, CALL, self.calls);
        self.calls += 1;
        let whole = call_item(&self.context.request, &id, call, "completed");
        let mut item = whole.clone();
        item["status"] = json!("in_progress");
        // Items of other kinds are sent as a whole.
        let written = match whole["type"].as_str() {
            Some("function_call") => Some(("arguments", "function_call_arguments")),
            Some("custom_tool_call") => Some(("input", "custom_tool_call_input")),
            _ => None,
        };
        if let Some((field, _)) = written {
            item[field] = json!("");
        }
        let (index, mut out) = self.add(item);
        if let Some((field, kind)) = written {
            for (step, name) in [("delta", "delta"), ("done", field)] {
                let mut fields = json!({"item_id": id, "output_index": index});
                fields[name] = whole[field].clone();
                out.push_str(&self.event(&format!("response.{kind}.{step}"), fields));
            }
        }
        out.push_str(&self.item_done(index, whole));
        out
    }
}

impl EventWriter for ResponsesStream {
    fn begin(&mut self) -> String {
        let response = skeleton(&self.context, "in_progress");
        let mut out = self.event("response.created", json!({"response": response}));
        out.push_str(&self.event("response.in_progress", json!({"response": response})));
        out
    }

    fn delta(&mut self, delta: &Delta) -> String {
        let mut out = String::new();
        // The tokens of a delta go with its text; those of reasoning and calls are dropped.
        let mut tokens = delta.tokens.as_slice();
        for piece in &delta.pieces {
            match piece {
                Piece::Reasoning(text) => out.push_str(&self.reason(text)),
                Piece::Text(text) => {
                    out.push_str(&self.reason_done("completed"));
                    let logprobs = logprob_values(&self.context, std::mem::take(&mut tokens));
                    out.push_str(&self.say(text, logprobs));
                }
                Piece::Call(call) => {
                    out.push_str(&self.reason_done("completed"));
                    out.push_str(&self.say_done("completed"));
                    out.push_str(&self.call(call));
                }
            }
        }
        self.end = delta.end.clone().or(self.end.take());
        out
    }

    fn end(&mut self, response: &ModelResponse) -> String {
        let status = item_status(self.end.as_ref());
        let mut out = self.reason_done(status);
        let nothing_said = response
            .choices
            .first()
            .is_some_and(|c| c.message.content.is_empty() && c.message.tool_calls.is_empty());
        if nothing_said {
            out.push_str(&self.say("", json!([])));
        }
        out.push_str(&self.say_done(status));
        let items = std::mem::take(&mut self.done);
        let whole = finished(&self.context, response, items);
        let kind = match whole["status"].as_str() {
            Some("incomplete") => "response.incomplete",
            _ => "response.completed",
        };
        out.push_str(&self.event(kind, json!({"response": whole})));
        out
    }

    fn error(&mut self, error: &ApiError) -> String {
        let mut failed = skeleton(&self.context, "failed");
        failed["error"] = json!({"code": "server_error", "message": error.message});
        failed["output"] = json!(std::mem::take(&mut self.done));
        let fields = json!({"code": error.code, "message": error.message, "param": error.param});
        let mut out = self.event("error", fields);
        out.push_str(&self.event("response.failed", json!({"response": failed})));
        out
    }
}
