//! Common parts of the OpenAI dialects: functions as tools, contents of parts, log-probabilities, usage, and
//! the objects of chat and text streams.

use super::agent_tools::{self, prompt_name};
use super::fields::{Fields, MAX_TOOLS, Notes, wrong};
use super::{AnswerContext, ModelRequest, ToolChoice, Usage, data_event};
use crate::error::ApiError;
use serde_json::{Map, Value, json};
use sinew_render::Renderer;
use sinew_types::{Content, SampledToken, TokenId, ToolSpec};

/// Largest `top_logprobs` of chat completions and responses, as in OpenAI's API.
pub(super) const MAX_TOP_LOGPROBS: i64 = 20;

/// There is one tier of service; Anthropic's requests name theirs in the same field.
pub(super) fn service_tier(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    let usual = ["auto", "default", "standard_only"].map(Value::from);
    fields.no_effect("service_tier", &usual, "there is one tier: leave it out")
}

/// Reads `tools`, `tool_choice` and `parallel_tool_calls`. A function is in the field `nested` of its tool,
/// or in the tool itself; the same holds for the name of the chosen one.
///
/// # Errors
/// If a field is wrong or unknown, or the chosen tool is not listed.
pub(super) fn tools(
    fields: &mut Fields<'_>,
    nested: Option<&str>,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let notes = fields.notes();
    let mut searched = false;
    // Those of messages, which are defined there.
    let defined = std::mem::take(&mut request.deferred_tools);
    for (i, value) in fields.tools()?.into_iter().enumerate() {
        searched |= value["type"] == "tool_search" && value["execution"] == "client";
        read_tool(
            value,
            &format!("tools[{i}]"),
            nested,
            notes,
            None,
            false,
            request,
        )?;
    }
    if !searched {
        request.show_deferred();
    }
    for spec in defined {
        request.add_spec(spec, true);
    }
    if request.callable().count() > MAX_TOOLS {
        let why = format!("more than {MAX_TOOLS} tools, with those in namespaces");
        return Err(ApiError::invalid("tools", why));
    }
    request.parallel_tool_calls = fields.bool("parallel_tool_calls")?.unwrap_or(true);
    tool_choice(fields, nested, request)?;
    request.check_tool_choice()
}

/// `tool_choice`: a word, the tool that must be called, or those that may be.
fn tool_choice(
    fields: &mut Fields<'_>,
    nested: Option<&str>,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let path = "tool_choice";
    let notes = fields.notes();
    let value = match fields.take(path) {
        None => return Ok(()),
        Some(Value::String(word)) => {
            let expected = "auto, none, required, or an object that names a tool";
            request.tool_choice =
                word_choice(&word).ok_or_else(|| wrong(path, &Value::String(word), expected))?;
            return Ok(());
        }
        Some(value) => value,
    };
    if value["type"] != "allowed_tools" {
        let name = agent_tools::chosen(value, path, nested.is_some(), notes)?;
        request.tool_choice = ToolChoice::Named(name);
        return Ok(());
    }
    let mut choice = Fields::of(value, path, notes)?;
    choice.ignore(&["type"]);
    let mut allowed = match nested {
        Some(_) => choice.required_inner("allowed_tools")?,
        None => choice,
    };
    let mode_path = allowed.path("mode");
    let mode = allowed.required_string("mode")?;
    request.tool_choice = word_choice(&mode)
        .filter(|c| *c != ToolChoice::None)
        .ok_or_else(|| wrong(&mode_path, &Value::String(mode), "auto or required"))?;
    let list = allowed.path("tools");
    let names = allowed
        .required_array("tools")?
        .into_iter()
        .enumerate()
        .map(|(i, tool)| {
            agent_tools::chosen(tool, &format!("{list}[{i}]"), nested.is_some(), notes)
        })
        .collect::<Result<Vec<_>, _>>()?;
    allowed.end()?;
    // The model is shown what it may call, and nothing else.
    request.allow_only(&names);
    Ok(())
}

/// Whether a word lets the model call tools.
fn word_choice(word: &str) -> Option<ToolChoice> {
    match word {
        "auto" => Some(ToolChoice::Auto),
        "none" => Some(ToolChoice::None),
        "required" => Some(ToolChoice::Required),
        _ => None,
    }
}

/// One tool, in a namespace or in none. It may be called only from a later point of the conversation on if
/// `later`.
///
/// # Errors
/// If a field is wrong or unknown.
pub(super) fn read_tool(
    value: Value,
    path: &str,
    nested: Option<&str>,
    notes: &Notes,
    namespace: Option<&str>,
    later: bool,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let kind = value["type"].as_str().unwrap_or("function").to_owned();
    if kind != "function" {
        let value = match nested {
            Some(_) if kind == "custom" => un_nested(value, path, notes)?,
            // Chat completions have no items for the calls of others.
            Some(_) => return agent_tools::dropped(path, &kind, notes),
            None => value,
        };
        return match kind.as_str() {
            "namespace" => read_namespace(value, path, notes, later, request),
            _ => agent_tools::read_openai(value, path, notes, namespace, later, request),
        };
    }
    let mut fields = Fields::of(value, path, notes)?;
    fields.ignore(&["type"]);
    let mut function = match nested {
        Some(nested) => {
            let function = fields.required_inner(nested)?;
            fields.end()?;
            function
        }
        None => fields,
    };
    let empty = || json!({"type": "object", "properties": {}});
    let parameters = function.object("parameters")?.unwrap_or_else(empty);
    add_tool(
        &mut function,
        "parameters",
        parameters,
        namespace,
        later,
        request,
    )?;
    agent_tools::only_the_model_calls(&mut function)?;
    function.end()
}

/// The tools of a namespace. They may be called only from a later point of the conversation on if `later`.
fn read_namespace(
    value: Value,
    path: &str,
    notes: &Notes,
    later: bool,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let mut fields = Fields::of(value, path, notes)?;
    fields.ignore(&["type"]);
    let name = fields.required_string("name")?;
    let about = fields.string("description")?.unwrap_or_default();
    let mut tools = fields.array("tools")?.unwrap_or_default();
    // The model reads the namespace's own words once.
    if let Some(Value::Object(first)) = tools.first_mut()
        && !about.is_empty()
    {
        let own = first.get("description").and_then(Value::as_str);
        let both = format!("{about}\n{}", own.unwrap_or_default());
        first.insert("description".into(), json!(both));
    }
    for (i, tool) in tools.into_iter().enumerate() {
        let path = format!("{path}.tools[{i}]");
        read_tool(tool, &path, None, notes, Some(&name), later, request)?;
    }
    agent_tools::only_the_model_calls(&mut fields)?;
    fields.end()
}

/// A custom tool of chat completions with its fields as in responses.
fn un_nested(value: Value, path: &str, notes: &Notes) -> Result<Value, ApiError> {
    let mut fields = Fields::of(value, path, notes)?;
    let mut own = fields
        .object("custom")?
        .ok_or_else(|| fields.missing("custom"))?;
    fields.ignore(&["type"]);
    fields.end()?;
    own["type"] = json!("custom");
    Ok(own)
}

/// Adds a tool whose schema is in the field `schema`. Its calls must follow the schema if `strict` is set.
pub(super) fn add_tool(
    fields: &mut Fields<'_>,
    schema: &str,
    parameters: Value,
    namespace: Option<&str>,
    later: bool,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let spec = ToolSpec {
        name: fields.required_string("name")?,
        description: fields.string("description")?.unwrap_or_default(),
        parameters,
    };
    let deferred = fields.bool("defer_loading")?.unwrap_or(false) || later;
    if fields.bool("strict")? == Some(true) && !deferred {
        let at = fields.path(schema);
        let name = prompt_name(namespace, &spec.name);
        request.strict_tools.push((name, at));
    }
    match namespace {
        Some(namespace) => agent_tools::add_function(request, spec, namespace, deferred),
        None => request.add_spec(spec, deferred),
    }
    Ok(())
}

/// A content: nothing, a text, or a list of parts. `read` takes the fields and the type of a part and adds
/// what it holds.
///
/// # Errors
/// If the content has another form, `read` refuses a part, or a part has fields that `read` did not take.
pub(super) fn parts(
    content: Option<Value>,
    path: &str,
    notes: &Notes,
    read: impl Fn(&mut Fields<'_>, &str, &mut Content) -> Result<(), ApiError>,
) -> Result<Content, ApiError> {
    let parts = match content {
        None => return Ok(Content::new()),
        Some(Value::String(text)) => return Ok(text.into()),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(wrong(path, &other, "a string or a list of parts")),
    };
    let mut content = Content::new();
    for (i, part) in parts.into_iter().enumerate() {
        let mut part = Fields::of(part, &format!("{path}[{i}]"), notes)?;
        let kind = part.required_string("type")?;
        read(&mut part, &kind, &mut content)?;
        part.end()?;
    }
    Ok(content)
}

/// Text and bytes of a token. Bytes of a part of a character are not text; the text has marks in their place.
pub(super) fn token_text(renderer: &dyn Renderer, id: TokenId) -> (String, Vec<u8>) {
    let bytes = renderer.token_bytes(id).unwrap_or_default();
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}

/// Tokens with their log-probabilities and alternatives, in the form of chat completions and responses;
/// `None` if the request did not ask.
pub(super) fn logprobs(context: &AnswerContext, tokens: &[SampledToken]) -> Option<Value> {
    context.request.logprobs?;
    let entry = |id, logprob: f32| {
        let (text, bytes) = token_text(context.renderer.as_ref(), id);
        json!({"token": text, "logprob": logprob, "bytes": bytes})
    };
    let with_top = |token: &SampledToken| {
        let mut value = entry(token.id, token.logprob);
        let top: Vec<_> = token.top.iter().map(|t| entry(t.id, t.logprob)).collect();
        value["top_logprobs"] = json!(top);
        value
    };
    Some(tokens.iter().map(with_top).collect())
}

/// Usage of chat and text completions, in tokens.
pub(super) fn usage(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    })
}

/// Adds the ids of a choice's tokens, if the request asks for them (`return_token_ids`, as of vLLM).
pub(super) fn add_ids(context: &AnswerContext, choice: &mut Value, tokens: &[SampledToken]) {
    if context.request.return_token_ids {
        let ids: Vec<TokenId> = tokens.iter().map(|t| t.id).collect();
        choice["token_ids"] = json!(ids);
    }
}

/// Id prefix and type of an answer, or of a chunk of one.
#[derive(Clone, Copy)]
pub(super) struct ObjectName {
    /// Beginning of its id.
    pub(super) prefix: &'static str,
    /// Its type, in the field `object`.
    pub(super) object: &'static str,
}

/// The object of an answer, or of a chunk of one.
pub(super) fn object(
    context: &AnswerContext,
    name: ObjectName,
    choices: Vec<Value>,
) -> Map<String, Value> {
    let mut map = Map::new();
    let id = format!("{}-{}", name.prefix, context.id);
    map.insert("id".into(), json!(id));
    map.insert("object".into(), json!(name.object));
    map.insert("created".into(), json!(context.created_s));
    map.insert("model".into(), json!(context.request.model));
    map.insert("choices".into(), choices.into());
    map
}

/// A whole answer: its choices, the usage, and the ids of the prompt if they were requested.
pub(super) fn answer(
    context: &AnswerContext,
    name: ObjectName,
    choices: Vec<Value>,
    used: &Usage,
) -> Value {
    let mut map = object(context, name, choices);
    map.insert("usage".into(), usage(used));
    if context.request.return_token_ids {
        map.insert("prompt_token_ids".into(), json!(context.prompt_ids));
    }
    map.into()
}

/// Chunks of a stream, one choice in each.
pub(super) struct Chunks {
    /// Id prefix and type of each chunk.
    pub(super) name: ObjectName,
    /// Whether a chunk was written: the first one has the ids of the prompt, if they were asked for.
    pub(super) opened: bool,
}

impl Chunks {
    /// An event with one choice. It has a usage if `include_usage` is set, which is null until the last
    /// event.
    pub(super) fn event(&mut self, context: &AnswerContext, choice: Value) -> String {
        let mut chunk = object(context, self.name, vec![choice]);
        if context.request.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        let first = !std::mem::replace(&mut self.opened, true);
        if first && context.request.return_token_ids {
            chunk.insert("prompt_token_ids".into(), json!(context.prompt_ids));
        }
        data_event(&Value::Object(chunk))
    }

    /// The end of a stream: the usage if it was requested, then `[DONE]`.
    pub(super) fn end(&self, context: &AnswerContext, used: &Usage) -> String {
        let mut out = String::new();
        if context.request.include_usage {
            let mut chunk = object(context, self.name, Vec::new());
            chunk.insert("usage".into(), usage(used));
            out.push_str(&data_event(&Value::Object(chunk)));
        }
        out.push_str("data: [DONE]\n\n");
        out
    }
}
