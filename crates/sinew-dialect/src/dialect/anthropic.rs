//! Anthropic messages.
//!
//! Blocks become messages: results of tools are messages of their own, in their place among a
//! user's texts. What the model thinks is given as thinking blocks, asked for or not, since a
//! client that does not send them back changes the history.
//!
//! | block of a request | becomes |
//! |---|---|
//! | `system` | the first message, role system |
//! | `text`, `image` of a user | one user message for adjacent blocks |
//! | `tool_result` | a message of role tool |
//! | `text`, `thinking`, `tool_use` of the assistant | one assistant message |
//!
//! A stream is `message_start`, for each block `content_block_start`, `content_block_delta` and
//! `content_block_stop`, then `message_delta` with the stop reason and usage, then `message_stop`.
//!
//! Source: Anthropic's API reference and the types of its Python client.

use super::fields::{Fields, Notes, wrong};
use super::format::flat;
use super::media::{Blocks, image_block};
use super::openai;
use super::{
    AnswerContext, Delta, Dialect, EventWriter, ModelRequest, ModelResponse, ToolChoice, TurnEnd,
    Usage,
};
use crate::error::{ApiError, ErrorKind};
use crate::prompt::Prompt;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_render::Piece;
use sinew_types::{Content, Message, Role, ToolCall};

/// Maximum of `stop_sequences`.
const MAX_STOPS: usize = 16;

/// By this Anthropic's clients recognize that they have to send a conversation again.
const THREAD_NOT_FOUND: &str = "thread_not_found";

/// `POST /v1/messages`.
#[derive(Clone, Copy, Debug)]
pub struct Messages;

/// `POST /v1/messages/count_tokens`: the same fields without those of sampling.
///
/// # Errors
/// As for a request.
pub fn parse_count(body: &[u8], strict: bool) -> Result<ModelRequest, ApiError> {
    let notes = Notes::new(strict);
    let mut fields = Fields::parse(body, &notes)?;
    let request = conversation(&mut fields)?;
    fields.end()?;
    Ok(request)
}

impl Dialect for Messages {
    fn read(&self, body: &[u8], notes: &Notes) -> Result<ModelRequest, ApiError> {
        let mut fields = Fields::parse(body, notes)?;
        let mut request = conversation(&mut fields)?;
        let limit = fields.count("max_tokens", 1)?;
        let limit = limit.ok_or_else(|| fields.missing("max_tokens"))?;
        let sampling = &mut request.sampling;
        sampling.max_tokens = Some(limit);
        sampling.temperature = fields.temperature(1.0)?;
        sampling.top_p = fields.number("top_p", 0.0, 1.0)?;
        sampling.top_k = fields.count("top_k", 0)?;
        sampling.stop = stops(&mut fields)?;
        request.stream = fields.bool("stream")?.unwrap_or(false);
        // Bookkeeping of a hosted service: by its definition it does not change the answer.
        fields.ignore(&["metadata"]);
        openai::service_tier(&mut fields)?;
        fields.no_effects(&[
            ("container", "code is not run here: give the model a tool"),
            ("inference_geo", "there is one place"),
            ("speed", "there is one speed"),
        ])?;
        fields.end()?;
        Ok(request)
    }

    fn repeated(&self) -> Option<&'static str> {
        Some("messages")
    }

    fn response(&self, context: &AnswerContext, response: &ModelResponse) -> Value {
        let mut content = Vec::new();
        let choice = response.choices.first();
        if let Some(choice) = choice {
            let said = &choice.message;
            if let Some(reasoning) = &said.reasoning {
                content.push(json!({"type": "thinking", "thinking": reasoning, "signature": ""}));
            }
            if !said.content.is_empty() {
                content.push(json!({"type": "text", "text": said.content.text()}));
            }
            content.extend(
                said.tool_calls
                    .iter()
                    .map(|call| tool_use(call, &call.arguments)),
            );
        }
        let mut message = skeleton(context);
        message["content"] = json!(content);
        ending(&mut message, choice.map(|c| &c.end));
        message["usage"] = usage(&response.usage);
        message
    }

    fn stream(&self, context: AnswerContext) -> Box<dyn EventWriter> {
        Box::new(MessagesStream {
            context,
            blocks: 0,
            open: None,
            end: None,
        })
    }

    fn error(&self, error: &ApiError) -> Value {
        error_value(error)
    }
}

/// Fields that say what the model sees.
fn conversation(fields: &mut Fields<'_>) -> Result<ModelRequest, ApiError> {
    let notes = fields.notes();
    let model = fields.required_string("model")?;
    thread(fields)?;
    let mut messages = Vec::new();
    let system = fields.take("system");
    if let Some(system) = system {
        let text = texts(Some(system), "system", notes)?;
        messages.push(Message::new(Role::System, text));
    }
    let head = messages.len();
    let list = fields.required_array("messages")?;
    for (i, value) in list.into_iter().enumerate() {
        message(value, &format!("messages[{i}]"), notes, &mut messages)?;
    }
    if messages.last().is_some_and(|m| m.role == Role::Assistant) {
        return Err(ApiError::unsupported(
            "messages",
            "the last message is the assistant's: its turn cannot be begun for the model, as \
             those tokens would not be sampled",
        ));
    }
    let mut request = ModelRequest::new(model, Prompt::Messages(messages));
    request.head = head;
    tools(fields, &mut request)?;
    settings(fields, &mut request)?;
    Ok(request)
}

/// Settings that have no effect here, and those that cannot be honoured.
fn settings(fields: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
    if let Some(mut thinking) = fields.inner("thinking")? {
        let kinds = [json!("enabled"), json!("adaptive"), json!("disabled")];
        thinking.only("type", &kinds, "allowed: enabled, adaptive, disabled")?;
        // The model decides how much it reasons; `max_tokens` bounds reasoning and answer.
        thinking.ignore(&["budget_tokens", "display"]);
        thinking.end()?;
    }
    fields.ignore(&["cache_control"]);
    if let Some(mut config) = fields.inner("output_config")? {
        flat(&mut config, "format", request)?;
        config.no_effects(&[("effort", "the model has no effort to set")])?;
        config.end()?;
    }
    flat(fields, "output_format", request)?;
    context(fields)?;
    fields.refuse(&[
        ("compaction", "the conversation is never rewritten"),
        (
            "mcp_servers",
            "tools run with the agent: give them as tools",
        ),
    ])
}

/// Edits of the conversation: what keeps everything is no edit.
fn context(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    let Some(mut management) = fields.inner("context_management")? else {
        return Ok(());
    };
    let notes = fields.notes();
    for (i, edit) in management
        .array("edits")?
        .unwrap_or_default()
        .into_iter()
        .enumerate()
    {
        let path = format!("context_management.edits[{i}]");
        let mut edit = Fields::of(edit, &path, notes)?;
        let why = "the conversation is never rewritten";
        let all = edit.take("keep") == Some(json!("all"));
        let kind = edit.string("type")?.unwrap_or_default();
        if !all || !kind.starts_with("clear_thinking") {
            return Err(ApiError::unsupported(&path, why));
        }
        edit.end()?;
    }
    management.end()
}

/// A conversation that the server keeps: none is. A client that begins one sends all of it
/// again after this error.
fn thread(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    let why = "no thread is kept here: send the whole conversation";
    let kind = |v: &Value| v["type"].as_str().map(str::to_owned);
    match fields.take("thread") {
        Some(thread) if kind(&thread).as_deref() == Some("continue") => Err(ApiError {
            code: THREAD_NOT_FOUND,
            param: Some("thread".into()),
            ..ApiError::not_found(format!("thread: {why}"))
        }),
        Some(_) => fields
            .notes()
            .ignored("thread", || ApiError::unsupported("thread", why)),
        None => Ok(()),
    }
}

/// `stop_sequences`.
fn stops(fields: &mut Fields<'_>) -> Result<Vec<String>, ApiError> {
    let list = fields.array("stop_sequences")?.unwrap_or_default();
    let expected = format!("up to {MAX_STOPS} strings, none empty");
    let list = Value::Array(list);
    let texts = Vec::<String>::deserialize(&list).ok();
    texts
        .filter(|t| t.len() <= MAX_STOPS && t.iter().all(|s| !s.is_empty()))
        .ok_or_else(|| wrong("stop_sequences", &list, &expected))
}

/// `tools` and `tool_choice`. A tool without a type, or of type `custom`, is one that the agent runs.
fn tools(fields: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
    let notes = fields.notes();
    let tools = fields.tools()?;
    for (i, value) in tools.into_iter().enumerate() {
        let mut tool = Fields::of(value, &format!("tools[{i}]"), notes)?;
        let why = "only tools that the agent runs are known: type custom";
        tool.only("type", &[json!("custom")], why)?;
        let schema = tool.object("input_schema")?;
        let schema = schema.ok_or_else(|| tool.missing("input_schema"))?;
        openai::add_tool(&mut tool, "input_schema", schema, request)?;
        tool.ignore(&["cache_control", "eager_input_streaming"]);
        tool.end()?;
    }
    let Some(mut choice) = fields.inner("tool_choice")? else {
        return Ok(());
    };
    let kind = choice.required_string("type")?;
    request.tool_choice = match kind.as_str() {
        "auto" => ToolChoice::Auto,
        "any" => ToolChoice::Required,
        "none" => ToolChoice::None,
        "tool" => ToolChoice::Named(choice.required_string("name")?),
        _ => {
            let path = choice.path("type");
            return Err(wrong(
                &path,
                &Value::String(kind),
                "auto, any, none or tool",
            ));
        }
    };
    let alone = choice.bool("disable_parallel_tool_use")?.unwrap_or(false);
    request.parallel_tool_calls = !alone;
    choice.end()?;
    request.check_tool_choice()
}

/// A message. Results of tools become messages of their own, before the text of the same message.
fn message(
    value: Value,
    path: &str,
    notes: &Notes,
    out: &mut Vec<Message>,
) -> Result<(), ApiError> {
    let mut fields = Fields::of(value, path, notes)?;
    let role = fields.required_string("role")?;
    let content_path = fields.path("content");
    let content = fields.required("content")?;
    let role_path = fields.path("role");
    fields.end()?;
    match role.as_str() {
        "user" => user(content, &content_path, notes, out),
        "assistant" => {
            out.push(assistant(content, &content_path, notes)?);
            Ok(())
        }
        _ => Err(wrong(&role_path, &Value::String(role), "user or assistant")),
    }
}

/// Blocks next to each other are one message; each result of a tool is one.
fn user(content: Value, path: &str, notes: &Notes, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let blocks = match content {
        Value::String(text) => {
            out.push(Message::new(Role::User, text));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        other => return Err(wrong(path, &other, "a string or an array of blocks")),
    };
    let mut said = Blocks::default();
    let flush = |said: &mut Blocks, out: &mut Vec<Message>| {
        out.extend(said.take().map(|content| Message::new(Role::User, content)));
    };
    for (i, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::of(block, &format!("{path}[{i}]"), notes)?;
        match block.required_string("type")?.as_str() {
            "text" => said.text(text_block(&mut block)?),
            "image" => said.media(image_block(&mut block)?),
            "tool_result" => {
                flush(&mut said, out);
                out.push(tool_result(&mut block)?);
            }
            other => return Err(unknown_block(&block, other, "text, image and tool_result")),
        }
        block.ignore(&["cache_control"]);
        block.end()?;
    }
    flush(&mut said, out);
    Ok(())
}

/// The result of one call, with `is_error` in front of its text.
fn tool_result(block: &mut Fields<'_>) -> Result<Message, ApiError> {
    let path = block.path("content");
    let said = blocks(block.take("content"), &path, block.notes(), true)?;
    let content = match block.bool("is_error")?.unwrap_or(false) {
        // The one place where a model can read it.
        true => {
            let mut failed = Content::from("Error: ");
            said.parts()
                .iter()
                .for_each(|part| failed.push(part.clone()));
            failed
        }
        false => said,
    };
    let mut message = Message::new(Role::Tool, content);
    message.tool_call_id = Some(block.required_string("tool_use_id")?);
    Ok(message)
}

/// What the model said: text, thinking and calls in their order.
fn assistant(content: Value, path: &str, notes: &Notes) -> Result<Message, ApiError> {
    let mut message = Message::new(Role::Assistant, "");
    let blocks = match content {
        Value::String(text) => {
            message.content = text.into();
            return Ok(message);
        }
        Value::Array(blocks) => blocks,
        other => return Err(wrong(path, &other, "a string or an array of blocks")),
    };
    for (i, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::of(block, &format!("{path}[{i}]"), notes)?;
        match block.required_string("type")?.as_str() {
            "text" => message.content.push_text(&text_block(&mut block)?),
            "thinking" => {
                let reasoning = block.required_string("thinking")?;
                message
                    .reasoning
                    .get_or_insert_default()
                    .push_str(&reasoning);
                block.ignore(&["signature"]);
            }
            // Another model's, and unreadable.
            "redacted_thinking" => {
                block.no_effects(&[("data", "it cannot be read here")])?;
            }
            "tool_use" => message.tool_calls.push(tool_use_block(&mut block)?),
            other => return Err(unknown_block(&block, other, "text, thinking and tool_use")),
        }
        block.ignore(&["cache_control"]);
        block.end()?;
    }
    Ok(message)
}

/// A call that the model made.
fn tool_use_block(block: &mut Fields<'_>) -> Result<ToolCall, ApiError> {
    let path = block.path("input");
    let arguments = block.take("input").unwrap_or_else(|| json!({}));
    if !arguments.is_object() {
        return Err(wrong(&path, &arguments, "an object"));
    }
    let call = ToolCall {
        id: block.required_string("id")?,
        name: block.required_string("name")?,
        arguments,
    };
    block.ignore(&["caller"]);
    Ok(call)
}

/// The refusal of a block of another type.
fn unknown_block(block: &Fields<'_>, kind: &str, known: &str) -> ApiError {
    let why = format!("blocks of type {kind:?} are not supported here: known are {known}");
    ApiError::unsupported(&block.path("type"), &why)
}

/// The text of a block; `cache_control` and citations have no effect.
fn text_block(block: &mut Fields<'_>) -> Result<String, ApiError> {
    block.no_effects(&[("citations", "sources are not cited here")])?;
    block.required_string("text")
}

/// A string, or text blocks, one a line.
fn texts(content: Option<Value>, path: &str, notes: &Notes) -> Result<String, ApiError> {
    let content = blocks(content, path, notes, false)?;
    Ok(content.text().into_owned())
}

/// A string, or blocks of text and, where there may be some, of images.
fn blocks(
    content: Option<Value>,
    path: &str,
    notes: &Notes,
    images: bool,
) -> Result<Content, ApiError> {
    let blocks = match content {
        None => return Ok(Content::new()),
        Some(Value::String(text)) => return Ok(text.into()),
        Some(Value::Array(blocks)) => blocks,
        Some(other) => return Err(wrong(path, &other, "a string or an array of blocks")),
    };
    let mut said = Blocks::default();
    for (i, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::of(block, &format!("{path}[{i}]"), notes)?;
        match block.required_string("type")?.as_str() {
            "text" => said.text(text_block(&mut block)?),
            "image" if images => said.media(image_block(&mut block)?),
            other => {
                let known = if images { "text and image" } else { "text" };
                return Err(unknown_block(&block, other, known));
            }
        }
        block.ignore(&["cache_control"]);
        block.end()?;
    }
    Ok(said.take().unwrap_or_default())
}

/// The message object without content.
fn skeleton(context: &AnswerContext) -> Value {
    json!({
        "id": format!("msg_{}", context.id),
        "type": "message",
        "role": "assistant",
        "model": context.request.model,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
        "usage": usage(&Usage::default()),
    })
}

/// A call as a block.
fn tool_use(call: &ToolCall, input: &Value) -> Value {
    json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
}

/// `stop_reason` and `stop_sequence`.
fn ending(value: &mut Value, end: Option<&TurnEnd>) {
    value["stop_reason"] = json!(match end {
        Some(TurnEnd::Length) => "max_tokens",
        Some(TurnEnd::StopString(_)) => "stop_sequence",
        Some(TurnEnd::ToolCalls) => "tool_use",
        Some(TurnEnd::Stop) | None => "end_turn",
    });
    value["stop_sequence"] = match end {
        Some(TurnEnd::StopString(text)) => json!(text),
        _ => Value::Null,
    };
}

/// Tokens that came from the cache are not counted as input.
fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    })
}

/// Anthropic's error object.
pub fn error_value(error: &ApiError) -> Value {
    let kind = match error.kind {
        _ if error.status == 413 => "request_too_large",
        ErrorKind::InvalidRequest => "invalid_request_error",
        ErrorKind::Authentication => "authentication_error",
        ErrorKind::Permission => "permission_error",
        ErrorKind::NotFound => "not_found_error",
        ErrorKind::RateLimit => "rate_limit_error",
        ErrorKind::Overloaded => "overloaded_error",
        ErrorKind::Server if error.status == 504 => "timeout_error",
        ErrorKind::Server => "api_error",
    };
    let mut value = json!({
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": null,
    });
    if error.code == THREAD_NOT_FOUND {
        value["error"]["details"] = json!({"error_code": THREAD_NOT_FOUND});
    }
    value
}

/// The kind of block that is open in a stream.
#[derive(Clone, Copy, PartialEq)]
enum Block {
    Text,
    Thinking,
}

/// Blocks are opened, written and closed one after the other; an index counts them.
struct MessagesStream {
    context: AnswerContext,
    /// Blocks that were begun.
    blocks: usize,
    open: Option<Block>,
    end: Option<TurnEnd>,
}

fn event(kind: &str, mut fields: Value) -> String {
    fields["type"] = json!(kind);
    format!("event: {kind}\ndata: {fields}\n\n")
}

impl MessagesStream {
    fn start(&mut self, block: &Value) -> String {
        let index = self.blocks;
        self.blocks += 1;
        event(
            "content_block_start",
            json!({"index": index, "content_block": block}),
        )
    }

    fn part(&self, delta: &Value) -> String {
        let index = self.blocks.saturating_sub(1);
        event(
            "content_block_delta",
            json!({"index": index, "delta": delta}),
        )
    }

    fn stop(&self) -> String {
        let index = self.blocks.saturating_sub(1);
        event("content_block_stop", json!({"index": index}))
    }

    /// Closes what is open, unless it is `next`.
    fn close(&mut self, next: Option<Block>) -> String {
        if self.open == next {
            return String::new();
        }
        let mut out = String::new();
        if let Some(open) = self.open.take() {
            if open == Block::Thinking {
                out.push_str(&self.part(&json!({"type": "signature_delta", "signature": ""})));
            }
            out.push_str(&self.stop());
        }
        out
    }

    fn write(&mut self, block: Block, text: &str) -> String {
        let mut out = self.close(Some(block));
        let (empty, delta) = match block {
            Block::Text => (
                json!({"type": "text", "text": ""}),
                json!({"type": "text_delta", "text": text}),
            ),
            Block::Thinking => (
                json!({"type": "thinking", "thinking": "", "signature": ""}),
                json!({"type": "thinking_delta", "thinking": text}),
            ),
        };
        if self.open.is_none() {
            out.push_str(&self.start(&empty));
            self.open = Some(block);
        }
        if !text.is_empty() {
            out.push_str(&self.part(&delta));
        }
        out
    }

    fn call(&mut self, call: &ToolCall) -> String {
        let mut out = self.close(None);
        out.push_str(&self.start(&tool_use(call, &json!({}))));
        let json = call.arguments.to_string();
        out.push_str(&self.part(&json!({"type": "input_json_delta", "partial_json": json})));
        out.push_str(&self.stop());
        out
    }
}

impl EventWriter for MessagesStream {
    fn begin(&mut self) -> String {
        let message = skeleton(&self.context);
        event("message_start", json!({"message": message}))
    }

    fn delta(&mut self, delta: &Delta) -> String {
        let mut out = String::new();
        for piece in &delta.pieces {
            out.push_str(&match piece {
                Piece::Text(text) => self.write(Block::Text, text),
                Piece::Reasoning(text) => self.write(Block::Thinking, text),
                Piece::Call(call) => self.call(call),
            });
        }
        self.end = delta.end.clone().or(self.end.take());
        out
    }

    fn end(&mut self, response: &ModelResponse) -> String {
        let mut out = self.close(None);
        let mut delta = json!({});
        ending(&mut delta, self.end.as_ref());
        let fields = json!({"delta": delta, "usage": usage(&response.usage)});
        out.push_str(&event("message_delta", fields));
        out.push_str(&event("message_stop", json!({})));
        out
    }

    fn error(&mut self, error: &ApiError) -> String {
        event("error", error_value(error))
    }
}
