//! Anthropic messages.
//!
//! Blocks become messages. Results of tools are separate messages, in their place among a user's texts. The
//! model's reasoning is returned as thinking blocks, whether or not the client asked for them, since a client
//! that does not send them back changes the history.
//!
//! | block of a request | becomes |
//! |---|---|
//! | `system` | the first message, role system |
//! | `text`, `image` of a user | one user message for adjacent blocks |
//! | `tool_result` | a message of role tool |
//! | `text`, `thinking`, `tool_use` of the assistant | one assistant message |
//! | a message of role `system` | a system message in its place; tools that it adds are defined there |
//! | `server_tool_use` and its result, of another server's history | a call and its result |
//!
//! A stream is `message_start`, for each block `content_block_start`, `content_block_delta` and
//! `content_block_stop`, then `message_delta` with the stop reason and usage, then `message_stop`.
//!
//! Source: Anthropic's API reference and the types of its Python client.

mod messages;

use crate::dialect::agent_tools;
use crate::dialect::fields::{Fields, MAX_TOOLS, Notes, wrong};
use crate::dialect::format::flat;
use crate::dialect::openai;
use crate::dialect::{
    AnswerContext, Delta, Dialect, EventWriter, ModelRequest, ModelResponse, ToolChoice, TurnEnd,
    Usage,
};
use crate::error::{ApiError, ErrorKind};
use crate::prompt::Prompt;
use messages::{Reader, texts};
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_render::Piece;
use sinew_types::{Message, Role, ToolCall};

/// Maximum of `stop_sequences`.
const MAX_STOPS: usize = 16;

/// The signature of every thinking block. Clients drop or rewrite blocks without one. It proves nothing:
/// what the model thought is found again by its text.
const SIGNATURE: &str = "c2luZXc=";

/// Code by which Anthropic's clients recognize that they have to send a conversation again.
const THREAD_NOT_FOUND: &str = "thread_not_found";

/// `POST /v1/messages`.
#[derive(Clone, Copy, Debug)]
pub struct Messages;

/// `POST /v1/messages/count_tokens`: the same fields without those of sampling.
///
/// # Errors
/// Same as for a request.
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
                content.push(
                    json!({"type": "thinking", "thinking": reasoning, "signature": SIGNATURE}),
                );
            }
            if !said.content.is_empty() {
                content.push(json!({"type": "text", "text": said.content.text()}));
            }
            content.extend(
                said.tool_calls
                    .iter()
                    .map(|call| tool_use(&context.request, call, true)),
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

/// Fields of the model's input.
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
    let mut request = ModelRequest::new(model, Prompt::default());
    tools(fields, &mut request)?;
    let list = fields.required_array("messages")?;
    let mut reader = Reader {
        request: &mut request,
        notes,
        messages,
    };
    for (i, value) in list.into_iter().enumerate() {
        reader.message(value, &format!("messages[{i}]"))?;
    }
    let messages = reader.messages;
    tool_choice(fields, &mut request)?;
    if messages.last().is_some_and(|m| m.role == Role::Assistant) {
        return Err(ApiError::unsupported(
            "messages",
            "the last message is the assistant's: its turn cannot be begun for the model, as \
             those tokens would not be sampled",
        ));
    }
    request.prompt = Prompt::Messages(messages);
    request.head = head;
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
    let why = "those servers are reached from the model's side: give their tools as tools";
    fields.no_effects(&[("mcp_servers", why)])?;
    fields.refuse(&[("compaction", "the conversation is never rewritten")])
}

/// Edits of the conversation: what keeps everything is not an edit.
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

/// `tools`. A tool without a type, or of type `custom`, is one that the agent runs; so are some of
/// Anthropic's own ([`agent_tools`]).
fn tools(fields: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
    let notes = fields.notes();
    let mut searched = false;
    for (i, value) in fields.tools()?.into_iter().enumerate() {
        let kind = value["type"].as_str().unwrap_or("custom").to_owned();
        searched |= kind.starts_with("tool_search_tool_");
        tool(value, &kind, &format!("tools[{i}]"), notes, false, request)?;
    }
    if searched {
        // The search would run at the server.
        request.show_deferred();
    }
    if request.callable().count() > MAX_TOOLS {
        return Err(ApiError::invalid(
            "tools",
            format!("more than {MAX_TOOLS} tools"),
        ));
    }
    Ok(())
}

/// One tool; with `later` it may be called only from a later point of the conversation on.
fn tool(
    value: Value,
    kind: &str,
    path: &str,
    notes: &Notes,
    later: bool,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let mut tool = Fields::of(value, path, notes)?;
    tool.ignore(&["type", "cache_control", "eager_input_streaming"]);
    tool.no_effects(&[("allowed_callers", "the model alone calls tools here")])?;
    if kind == "custom" || tool.has("input_schema") {
        let schema = tool.object("input_schema")?;
        let schema = schema.ok_or_else(|| tool.missing("input_schema"))?;
        openai::add_tool(&mut tool, "input_schema", schema, None, later, request)?;
        return tool.end();
    }
    let Some((spec, special)) = agent_tools::of_anthropic(kind, &mut tool)? else {
        return agent_tools::dropped(path, kind, notes);
    };
    let deferred = tool.bool("defer_loading")?.unwrap_or(false) || later;
    match special {
        Some(special) => request.add_special(special, spec, deferred),
        None => request.add_spec(spec, deferred),
    }
    tool.no_effect(
        "strict",
        &[json!(false)],
        "its arguments have no schema of the client's",
    )?;
    tool.end()
}

/// `tool_choice`.
fn tool_choice(fields: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
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

/// A call as a block, with its input if it is `whole`.
fn tool_use(request: &ModelRequest, call: &ToolCall, whole: bool) -> Value {
    let (name, input, set) = agent_tools::tool_use_of(request, call);
    let input = if whole { input } else { json!({}) };
    let mut block = json!({"type": "tool_use", "id": call.id, "name": name, "input": input});
    if let Some(set) = set {
        block["toolset_name"] = json!(set);
    }
    block
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
    /// Blocks that were started.
    blocks: usize,
    open: Option<Block>,
    end: Option<TurnEnd>,
}

/// An event of a stream, whose name is also the type of its data.
fn event(kind: &str, mut fields: Value) -> String {
    fields["type"] = json!(kind);
    format!("event: {kind}\ndata: {fields}\n\n")
}

impl MessagesStream {
    /// Begins a block of the answer.
    fn start(&mut self, block: &Value) -> String {
        let index = self.blocks;
        self.blocks += 1;
        event(
            "content_block_start",
            json!({"index": index, "content_block": block}),
        )
    }

    /// A piece of the open block.
    fn part(&self, delta: &Value) -> String {
        let index = self.blocks.saturating_sub(1);
        event(
            "content_block_delta",
            json!({"index": index, "delta": delta}),
        )
    }

    /// Ends the open block.
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
                out.push_str(
                    &self.part(&json!({"type": "signature_delta", "signature": SIGNATURE})),
                );
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
        let request = &self.context.request;
        let block = tool_use(request, call, false);
        let json = agent_tools::tool_use_of(request, call).1.to_string();
        out.push_str(&self.start(&block));
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
