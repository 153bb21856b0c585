//! What the OpenAI dialects have in common: functions as tools, contents of parts, log-probabilities,
//! usage, and the objects of chat and text streams.

use super::fields::{Fields, Notes, wrong};
use super::{AnswerContext, ModelRequest, Usage, data_event};
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

/// `tools`, `tool_choice` and `parallel_tool_calls`. A function stands in the field `nested` of its tool,
/// or in the tool itself; so does the name of the chosen one.
///
/// # Errors
/// If a tool is no function, a field is wrong or unknown, or the chosen tool is not listed.
pub(super) fn tools(
    fields: &mut Fields<'_>,
    nested: Option<&str>,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let notes = fields.notes();
    for (i, value) in fields.tools()?.into_iter().enumerate() {
        let why = "only functions are known: built-in tools run elsewhere";
        let mut function = function(value, &format!("tools[{i}]"), why, nested, notes)?;
        let empty = || json!({"type": "object", "properties": {}});
        let parameters = function.object("parameters")?.unwrap_or_else(empty);
        add_tool(&mut function, "parameters", parameters, request)?;
        function.end()?;
    }
    request.parallel_tool_calls = fields.bool("parallel_tool_calls")?.unwrap_or(true);
    request.tool_choice = fields.tool_choice(|value| {
        let why = "only functions can be chosen";
        let mut function = function(value, "tool_choice", why, nested, notes)?;
        let name = function.required_string("name")?;
        function.end()?;
        Ok(name)
    })?;
    request.check_tool_choice()
}

/// The fields of a function, of `type` `function` alone.
pub(super) fn function<'a>(
    value: Value,
    path: &str,
    why: &str,
    nested: Option<&str>,
    notes: &'a Notes,
) -> Result<Fields<'a>, ApiError> {
    let mut fields = Fields::of(value, path, notes)?;
    fields.only("type", &[json!("function")], why)?;
    let Some(nested) = nested else {
        return Ok(fields);
    };
    let function = fields.required_inner(nested)?;
    fields.end()?;
    Ok(function)
}

/// Adds a tool whose schema stands in the field `schema`. With `strict`, its calls must follow the schema.
pub(super) fn add_tool(
    fields: &mut Fields<'_>,
    schema: &str,
    parameters: Value,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let spec = ToolSpec {
        name: fields.required_string("name")?,
        description: fields.string("description")?.unwrap_or_default(),
        parameters,
    };
    if fields.bool("strict")? == Some(true) {
        let at = fields.path(schema);
        request.strict_tools.push((spec.name.clone(), at));
    }
    request.tools.push(spec);
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

/// The object of an answer, or of a chunk of one: `prefix` begins its id, `object` names its type.
pub(super) fn object(
    context: &AnswerContext,
    (prefix, object): (&str, &str),
    choices: Vec<Value>,
) -> Map<String, Value> {
    let mut map = Map::new();
    map.insert("id".into(), json!(format!("{prefix}-{}", context.id)));
    map.insert("object".into(), json!(object));
    map.insert("created".into(), json!(context.created_s));
    map.insert("model".into(), json!(context.request.model));
    map.insert("choices".into(), choices.into());
    map
}

/// A whole answer: its choices, the usage, and the ids of the prompt if they were asked for.
pub(super) fn answer(
    context: &AnswerContext,
    name: (&str, &str),
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
    /// Begins the id, and names the type of each chunk.
    pub(super) name: (&'static str, &'static str),
    /// Whether a chunk was written: the first one has the ids of the prompt, if they were asked for.
    pub(super) opened: bool,
}

impl Chunks {
    /// An event with one choice. With `include_usage` each has a usage, which is null until the last.
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

    /// The end of a stream: the usage if it was asked for, then `[DONE]`.
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
