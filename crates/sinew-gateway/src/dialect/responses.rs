//! OpenAI responses.
//!
//! Items of the input become messages: what a model said in one turn (reasoning, text, calls)
//! is one message again. `previous_response_id` continues an answer of the same rollout; as the
//! API has it, `instructions` are not carried over. Thoughts are given as reasoning items with
//! their text, and may be sent back.
//!
//! Source: OpenAI's API reference and the types of its Python client.

use super::fields::{Fields, wrong};
use super::{
    AnswerContext, Continuation, Delta, Dialect, EventWriter, ModelRequest, ModelResponse,
    ToolChoice, TurnEnd,
};
use crate::error::ApiError;
use crate::session::Prompt;
use crate::turn::Piece;
use serde_json::{Map, Value, json};
use sinew_types::{Message, Role, SampledToken, ToolCall, ToolSpec};

const MAX_TOP_LOGPROBS: i64 = 20;

/// Ids of answers begin with this.
const PREFIX: &str = "resp_";

/// `POST /v1/responses`.
#[derive(Clone, Copy, Debug)]
pub struct Responses;

impl Dialect for Responses {
    fn parse(&self, body: &[u8]) -> Result<ModelRequest, ApiError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.required_string("model")?;
        let input = fields
            .take("input")
            .ok_or_else(|| fields.missing("input"))?;
        let mut messages = Vec::new();
        let instructions = fields.string("instructions")?;
        messages.extend(instructions.iter().map(|t| Message::new(Role::System, t)));
        let own_from = messages.len();
        messages.extend(input_messages(input)?);
        let mut request = ModelRequest::new(model, Prompt::Messages(messages));
        request.head = own_from;
        let previous = fields.string("previous_response_id")?;
        let keep = fields.bool("store")?.unwrap_or(true);
        let mut echo = Map::new();
        echo.insert("instructions".into(), json!(instructions));
        echo.insert("previous_response_id".into(), json!(previous));
        echo.insert("store".into(), json!(keep));
        for name in ["metadata", "user", "safety_identifier", "prompt_cache_key"] {
            echo.insert(name.into(), fields.take(name).unwrap_or(Value::Null));
        }
        request.continuation = Some(Continuation {
            prefix: PREFIX,
            previous,
            grown_from: None,
            keep,
            own_from,
        });
        tools(&mut fields, &mut request)?;
        echo.insert("tool_choice".into(), choice_value(&request.tool_choice));
        request.sampling.temperature = fields.number("temperature", 0.0, 2.0)?;
        request.sampling.top_p = fields.number("top_p", 0.0, 1.0)?;
        let limit = fields.integer("max_output_tokens", 1, i64::from(u32::MAX))?;
        request.sampling.max_tokens = limit.map(|n| n as u32);
        logprobs(&mut fields, &mut request)?;
        request.stream = fields.bool("stream")?.unwrap_or(false);
        if let Some(options) = fields.take("stream_options") {
            let mut options = Fields::of(options, "stream_options")?;
            options.ignore(&["include_obfuscation"]);
            options.end()?;
        }
        refuse(&mut fields)?;
        fields.end()?;
        request.echo = Value::Object(echo);
        Ok(request)
    }

    fn repeated(&self) -> Option<&'static str> {
        Some("input")
    }

    fn response(&self, context: &AnswerContext, response: &ModelResponse) -> Value {
        let mut items = Vec::new();
        let end = response.choices.first().map(|c| &c.end);
        let status = item_status(end);
        if let Some(choice) = response.choices.first() {
            let said = &choice.message;
            if let Some(reasoning) = &said.reasoning {
                items.push(reasoning_item(
                    &item_id(context, "rs", 0),
                    reasoning,
                    status,
                ));
            }
            if !said.content.is_empty() || said.tool_calls.is_empty() {
                let id = item_id(context, "msg", items.len());
                let logprobs = logprob_values(context, &choice.tokens);
                items.push(message_item(&id, &said.content, &logprobs, status));
            }
            for call in &said.tool_calls {
                let id = item_id(context, "fc", items.len());
                items.push(call_item(&id, call, "completed"));
            }
        }
        finished(context, response, items)
    }

    fn stream(&self, context: AnswerContext) -> Box<dyn EventWriter> {
        Box::new(ResponsesStream {
            context,
            sequence: 0,
            done: Vec::new(),
            open: None,
            message: None,
            end: None,
        })
    }
}

fn refuse(fields: &mut Fields) -> Result<(), ApiError> {
    fields.only("background", &[json!(false)], "answers are given at once")?;
    fields.only(
        "truncation",
        &[json!("disabled")],
        "a prompt that is too long is refused, never shortened",
    )?;
    fields.only(
        "service_tier",
        &[json!("auto"), json!("default")],
        "there is one tier: leave it out",
    )?;
    if let Some(text) = fields.take("text") {
        let mut text = Fields::of(text, "text")?;
        text.only(
            "format",
            &[json!({"type": "text"})],
            "sampling is not constrained here, and forced tokens would not be the policy's",
        )?;
        text.refuse(&[("verbosity", "the model has no such setting")])?;
        text.end()?;
    }
    if let Some(reasoning) = fields.take("reasoning") {
        let mut reasoning = Fields::of(reasoning, "reasoning")?;
        // Thoughts are given whole, which is more than a summary.
        reasoning.ignore(&["summary", "generate_summary"]);
        reasoning.refuse(&[("effort", "the model has no such setting")])?;
        reasoning.end()?;
    }
    fields.refuse(&[
        ("conversation", "use previous_response_id"),
        ("prompt", "prompts are not stored here: send the messages"),
        ("max_tool_calls", "there are no built-in tools to limit"),
        ("prompt_cache_retention", "the cache keeps what it can"),
        ("context_management", "the conversation is never rewritten"),
    ])
}

/// `include` and `top_logprobs`.
fn logprobs(fields: &mut Fields, request: &mut ModelRequest) -> Result<(), ApiError> {
    let mut wanted = false;
    for (i, value) in fields
        .array("include")?
        .unwrap_or_default()
        .iter()
        .enumerate()
    {
        match value.as_str() {
            Some("message.output_text.logprobs") => wanted = true,
            // Thoughts are in the reasoning items as they are.
            Some("reasoning.encrypted_content") => {}
            _ => {
                let expected = "message.output_text.logprobs or reasoning.encrypted_content";
                return Err(wrong(&format!("include[{i}]"), value, expected));
            }
        }
    }
    let top = fields
        .integer("top_logprobs", 0, MAX_TOP_LOGPROBS)?
        .unwrap_or(0);
    if wanted || top > 0 {
        request.logprobs = Some(top as u8);
    }
    Ok(())
}

fn tools(fields: &mut Fields, request: &mut ModelRequest) -> Result<(), ApiError> {
    let tools = fields.tools()?;
    for (i, value) in tools.into_iter().enumerate() {
        let mut tool = Fields::of(value, &format!("tools[{i}]"))?;
        let why = "only functions are known: built-in tools run elsewhere";
        tool.only("type", &[json!("function")], why)?;
        request.tools.push(ToolSpec {
            name: tool.required_string("name")?,
            description: tool.string("description")?.unwrap_or_default(),
            parameters: tool
                .object("parameters")?
                .unwrap_or_else(|| json!({"type": "object", "properties": {}})),
        });
        // Clients set it by default. Sampling is not constrained; answers say `strict: false`.
        tool.bool("strict")?;
        tool.end()?;
    }
    request.parallel_tool_calls = fields.bool("parallel_tool_calls")?.unwrap_or(true);
    request.tool_choice = fields.tool_choice(chosen)?;
    request.check_tool_choice()
}

fn chosen(value: Value) -> Result<String, ApiError> {
    let mut fields = Fields::of(value, "tool_choice")?;
    fields.only("type", &[json!("function")], "only functions can be chosen")?;
    let name = fields.required_string("name")?;
    fields.end()?;
    Ok(name)
}

/// A text, or items.
fn input_messages(input: Value) -> Result<Vec<Message>, ApiError> {
    let items = match input {
        Value::String(text) => return Ok(vec![Message::new(Role::User, text)]),
        Value::Array(items) => items,
        other => return Err(wrong("input", &other, "a string or an array of items")),
    };
    let mut turns = Turns::default();
    for (i, value) in items.into_iter().enumerate() {
        turns.item(value, &format!("input[{i}]"))?;
    }
    turns.flush();
    Ok(turns.messages)
}

/// Puts the items of one turn of the model together.
#[derive(Default)]
struct Turns {
    messages: Vec<Message>,
    /// What the model said, as far as it is known.
    turn: Option<Message>,
}

impl Turns {
    fn flush(&mut self) {
        self.messages.extend(self.turn.take());
    }

    /// The model's turn; a new one if `over` says that the open one cannot go on.
    fn turn(&mut self, over: impl Fn(&Message) -> bool) -> &mut Message {
        if self.turn.as_ref().is_some_and(over) {
            self.flush();
        }
        self.turn
            .get_or_insert_with(|| Message::new(Role::Assistant, ""))
    }

    fn item(&mut self, value: Value, path: &str) -> Result<(), ApiError> {
        let mut fields = Fields::of(value, path)?;
        let kind = fields.string("type")?.unwrap_or_else(|| "message".into());
        // What the server said of an item of its own.
        fields.ignore(&["id", "status"]);
        match kind.as_str() {
            "message" => self.message(&mut fields)?,
            "reasoning" => {
                let mut text = String::new();
                for name in ["content", "summary"] {
                    let path = fields.path(name);
                    let part = texts(
                        fields.take(name),
                        &path,
                        &["reasoning_text", "summary_text"],
                    )?;
                    if text.is_empty() {
                        text = part;
                    }
                }
                fields.refuse(&[("encrypted_content", "this server encrypts nothing")])?;
                let over = |m: &Message| !m.content.is_empty() || !m.tool_calls.is_empty();
                self.turn(over).reasoning = Some(text);
            }
            "function_call" => {
                let call = ToolCall {
                    id: fields.required_string("call_id")?,
                    name: fields.required_string("name")?,
                    arguments: arguments(&mut fields)?,
                };
                fields.ignore(&["namespace"]);
                self.turn(|_| false).tool_calls.push(call);
            }
            "function_call_output" => {
                self.flush();
                let path = fields.path("output");
                let output = fields.take("output");
                let text = texts(output, &path, &["input_text", "output_text"])?;
                let mut message = Message::new(Role::Tool, text);
                message.tool_call_id = Some(fields.required_string("call_id")?);
                self.messages.push(message);
            }
            other => {
                let why = format!(
                    "items of type {other:?} are not supported: known are message, reasoning, \
                     function_call and function_call_output"
                );
                return Err(ApiError::unsupported(&fields.path("type"), &why));
            }
        }
        fields.end()
    }

    fn message(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        let role = fields.required_string("role")?;
        let path = fields.path("content");
        let content = fields.take("content");
        let text = texts(content, &path, &["input_text", "output_text"])?;
        fields.ignore(&["phase"]);
        let role = match role.as_str() {
            "system" | "developer" => Role::System,
            "user" => Role::User,
            "assistant" => {
                let over = |m: &Message| !m.content.is_empty() || !m.tool_calls.is_empty();
                self.turn(over).content = text;
                return Ok(());
            }
            _ => {
                let expected = "system, developer, user or assistant";
                return Err(wrong(&fields.path("role"), &Value::String(role), expected));
            }
        };
        self.flush();
        self.messages.push(Message::new(role, text));
        Ok(())
    }
}

fn arguments(fields: &mut Fields) -> Result<Value, ApiError> {
    let path = fields.path("arguments");
    let text = fields.required_string("arguments")?;
    serde_json::from_str(&text)
        .map_err(|e| ApiError::invalid(path.as_str(), format!("{path} is not valid JSON: {e}")))
}

/// Text as a string or as a list of parts of these types.
fn texts(content: Option<Value>, path: &str, types: &[&str]) -> Result<String, ApiError> {
    let parts = match content {
        None => return Ok(String::new()),
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(wrong(path, &other, "a string or a list of text parts")),
    };
    let mut text = String::new();
    let allowed: Vec<Value> = types.iter().map(|t| json!(t)).collect();
    for (i, part) in parts.into_iter().enumerate() {
        let mut part = Fields::of(part, &format!("{path}[{i}]"))?;
        part.only("type", &allowed, "only text parts are supported")?;
        text.push_str(&part.required_string("text")?);
        part.only("annotations", &[json!([])], "only text is generated")?;
        part.ignore(&["logprobs"]);
        part.end()?;
    }
    Ok(text)
}

fn choice_value(choice: &ToolChoice) -> Value {
    match choice {
        ToolChoice::Auto => json!("auto"),
        ToolChoice::None => json!("none"),
        ToolChoice::Required => json!("required"),
        ToolChoice::Named(name) => json!({"type": "function", "name": name}),
    }
}

fn item_id(context: &AnswerContext, prefix: &str, index: usize) -> String {
    format!("{prefix}_{}_{index}", context.id)
}

/// Only a limit leaves an item unfinished.
fn item_status(end: Option<&TurnEnd>) -> &'static str {
    match end {
        Some(TurnEnd::Length) => "incomplete",
        _ => "completed",
    }
}

fn reasoning_item(id: &str, text: &str, status: &str) -> Value {
    json!({
        "id": id,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": null,
        "status": status,
    })
}

fn text_part(text: &str, logprobs: &Value) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

fn message_item(id: &str, text: &str, logprobs: &Value, status: &str) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text_part(text, logprobs)],
    })
}

fn call_item(id: &str, call: &ToolCall, status: &str) -> Value {
    json!({
        "id": id,
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments.to_string(),
        "status": status,
    })
}

/// Log-probabilities of sampled tokens; an empty list if nobody asked.
fn logprob_values(context: &AnswerContext, tokens: &[SampledToken]) -> Value {
    if context.request.logprobs.is_none() {
        return json!([]);
    }
    let entry = |id, logprob: f32| {
        let (text, bytes) = super::chat::token_text(context.renderer.as_ref(), id);
        json!({"token": text, "logprob": logprob, "bytes": bytes})
    };
    tokens
        .iter()
        .map(|token| {
            let mut value = entry(token.id, token.logprob);
            let top: Vec<_> = token.top.iter().map(|t| entry(t.id, t.logprob)).collect();
            value["top_logprobs"] = json!(top);
            value
        })
        .collect()
}

/// The response object without output.
fn skeleton(context: &AnswerContext, status: &str) -> Value {
    let request = &context.request;
    let tools: Vec<_> = request
        .tools
        .iter()
        .map(|tool| {
            json!({
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": false,
            })
        })
        .collect();
    let mut value = json!({
        "id": format!("{PREFIX}{}", context.id),
        "object": "response",
        "created_at": context.created_s,
        "status": status,
        "background": false,
        "error": null,
        "incomplete_details": null,
        "max_output_tokens": request.sampling.max_tokens,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": {"effort": null, "summary": null},
        "service_tier": "default",
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tools": tools,
        "top_logprobs": request.logprobs.unwrap_or(0),
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": null,
    });
    if let Value::Object(echo) = &request.echo {
        for (name, echoed) in echo {
            value[name] = echoed.clone();
        }
    }
    value
}

/// The response object of an answer that is over.
fn finished(context: &AnswerContext, response: &ModelResponse, items: Vec<Value>) -> Value {
    let choice = response.choices.first();
    let cut = matches!(choice.map(|c| &c.end), Some(TurnEnd::Length));
    let mut value = skeleton(context, if cut { "incomplete" } else { "completed" });
    if cut {
        value["incomplete_details"] = json!({"reason": "max_output_tokens"});
    }
    let thought = choice.and_then(|c| c.message.reasoning.as_deref());
    // The tokens that the thought has by itself; its marks are not counted.
    let reasoning_tokens = thought
        .and_then(|text| context.renderer.encode_text(text).ok())
        .map_or(0, |ids| ids.len());
    let usage = &response.usage;
    value["output"] = json!(items);
    value["usage"] = json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    });
    value
}

/// A text that is being written: a message or a thought.
struct OpenText {
    id: String,
    index: usize,
    text: String,
    logprobs: Vec<Value>,
}

struct ResponsesStream {
    context: AnswerContext,
    sequence: u64,
    /// Items in their order; an open one has its first form.
    done: Vec<Value>,
    /// The thought that is open.
    open: Option<OpenText>,
    /// The message that is open. Text after a call goes on in it.
    message: Option<OpenText>,
    end: Option<TurnEnd>,
}

impl ResponsesStream {
    fn event(&mut self, kind: &str, mut fields: Value) -> String {
        fields["type"] = json!(kind);
        fields["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        format!("event: {kind}\ndata: {fields}\n\n")
    }

    fn add(&mut self, item: Value) -> (usize, String) {
        let index = self.done.len();
        self.done.push(item.clone());
        let fields = json!({"output_index": index, "item": item});
        (index, self.event("response.output_item.added", fields))
    }

    fn item_done(&mut self, index: usize, item: Value) -> String {
        self.done[index] = item.clone();
        let fields = json!({"output_index": index, "item": item});
        self.event("response.output_item.done", fields)
    }

    /// Where in the output a text is.
    fn place(text: &OpenText) -> Value {
        json!({"item_id": text.id, "output_index": text.index, "content_index": 0})
    }

    fn part(&mut self, kind: &str, text: &OpenText, part: Value) -> String {
        let mut fields = Self::place(text);
        fields["part"] = part;
        self.event(kind, fields)
    }

    fn reason(&mut self, text: &str) -> String {
        let mut out = String::new();
        let mut open = match self.open.take() {
            Some(open) => open,
            None => {
                let id = item_id(&self.context, "rs", self.done.len());
                let mut item = reasoning_item(&id, "", "in_progress");
                item["content"] = json!([]);
                let (index, added) = self.add(item);
                out.push_str(&added);
                let open = OpenText {
                    id,
                    index,
                    text: String::new(),
                    logprobs: Vec::new(),
                };
                let part = json!({"type": "reasoning_text", "text": ""});
                out.push_str(&self.part("response.content_part.added", &open, part));
                open
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

    fn say(&mut self, text: &str, logprobs: Value) -> String {
        let mut out = String::new();
        let mut open = match self.message.take() {
            Some(open) => open,
            None => {
                let id = item_id(&self.context, "msg", self.done.len());
                let mut item = message_item(&id, "", &json!([]), "in_progress");
                item["content"] = json!([]);
                let (index, added) = self.add(item);
                out.push_str(&added);
                let open = OpenText {
                    id,
                    index,
                    text: String::new(),
                    logprobs: Vec::new(),
                };
                let part = text_part("", &json!([]));
                out.push_str(&self.part("response.content_part.added", &open, part));
                open
            }
        };
        if !text.is_empty() {
            let mut fields = Self::place(&open);
            fields["delta"] = json!(text);
            fields["logprobs"] = logprobs.clone();
            out.push_str(&self.event("response.output_text.delta", fields));
            open.text.push_str(text);
        }
        if let Value::Array(logprobs) = logprobs {
            open.logprobs.extend(logprobs);
        }
        self.message = Some(open);
        out
    }

    fn say_done(&mut self, status: &str) -> String {
        let Some(open) = self.message.take() else {
            return String::new();
        };
        let logprobs = json!(open.logprobs);
        let mut fields = Self::place(&open);
        fields["text"] = json!(open.text);
        fields["logprobs"] = logprobs.clone();
        let mut out = self.event("response.output_text.done", fields);
        let part = text_part(&open.text, &logprobs);
        out.push_str(&self.part("response.content_part.done", &open, part));
        let item = message_item(&open.id, &open.text, &logprobs, status);
        out.push_str(&self.item_done(open.index, item));
        out
    }

    fn call(&mut self, call: &ToolCall) -> String {
        let id = item_id(&self.context, "fc", self.done.len());
        let mut item = call_item(&id, call, "in_progress");
        item["arguments"] = json!("");
        let (index, mut out) = self.add(item);
        let arguments = call.arguments.to_string();
        let place = json!({"item_id": id, "output_index": index});
        let mut fields = place.clone();
        fields["delta"] = json!(arguments);
        out.push_str(&self.event("response.function_call_arguments.delta", fields));
        let mut fields = place;
        fields["name"] = json!(call.name);
        fields["arguments"] = json!(arguments);
        out.push_str(&self.event("response.function_call_arguments.done", fields));
        out.push_str(&self.item_done(index, call_item(&id, call, "completed")));
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
        // The tokens of a delta go with its text; those of thoughts and calls go nowhere.
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
        let fields = json!({
            "code": error.code,
            "message": error.message,
            "param": error.param,
        });
        let mut out = self.event("error", fields);
        out.push_str(&self.event("response.failed", json!({"response": failed})));
        out
    }
}
