//! OpenAI chat completions.
//!
//! A request has `messages` with a `role` and a `content` of text or parts, and limits of the output:
//!
//! ```json
//! {"model": "policy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
//! ```
//!
//! The answer has one choice for each of `n` outputs. `finish_reason` is `stop`, `length` or
//! `tool_calls`; `reasoning_content` holds the reasoning; `token_ids` and `prompt_token_ids` are
//! there if `return_token_ids` asks for them:
//!
//! ```json
//! {"id": "chatcmpl-r-1-1", "object": "chat.completion",
//!  "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
//!  "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}}
//! ```
//!
//! A stream sends `chat.completion.chunk` objects: first the role of a choice, then text, reasoning and whole
//! calls, then the finish reason, then (if requested) the usage, then `[DONE]`.
//!
//! Source: OpenAI's API reference and the types of its Python client.

use super::agent_tools::{ToolForm, input_of};
use super::fields::{Fields, Notes, wrong};
use super::format::{guided, response_format};
use super::media;
use super::openai::{self, Chunks, MAX_TOP_LOGPROBS, ObjectName};
use super::{
    AnswerContext, Choice, Delta, Dialect, EventWriter, ModelRequest, ModelResponse, SamplingAsk,
    TurnEnd, data_event, openai_error,
};
use crate::error::ApiError;
use crate::prompt::Prompt;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_render::Piece;
use sinew_types::{Content, Message, Role, SampledToken, TokenId, ToolCall};

/// Id prefix and type of an answer.
const ANSWER: ObjectName = ObjectName {
    prefix: "chatcmpl",
    object: "chat.completion",
};
/// Id prefix and type of a chunk of an answer.
const CHUNK: ObjectName = ObjectName {
    object: "chat.completion.chunk",
    ..ANSWER
};

/// Most entries of `logit_bias`, `stop`.
const MAX_BIAS: usize = 1024;
/// Most stop strings of a request.
const MAX_STOPS: usize = 16;

/// `POST /v1/chat/completions`.
#[derive(Clone, Copy, Debug)]
pub struct Chat;

impl Dialect for Chat {
    fn read(&self, body: &[u8], notes: &Notes) -> Result<ModelRequest, ApiError> {
        let mut fields = Fields::parse(body, notes)?;
        let model = fields.required_string("model")?;
        let messages = fields.required_array("messages")?;
        let messages = messages
            .into_iter()
            .enumerate()
            .map(|(i, value)| message(value, &format!("messages[{i}]"), notes, Source::Request))
            .map(|read| read.map(|(message, _)| message))
            .collect::<Result<Vec<_>, _>>()?;
        let mut request = ModelRequest::new(model, Prompt::Messages(messages));
        openai::tools(&mut fields, Some("function"), &mut request)?;
        request.sampling = sampling(&mut fields)?;
        let limit = fields.count("max_completion_tokens", 1)?;
        request.sampling.max_tokens = limit.or(request.sampling.max_tokens);
        common(&mut fields, &mut request)?;
        let wanted = fields.bool("logprobs")?.unwrap_or(false);
        let top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)?;
        if top.is_some_and(|n| n > 0) && !wanted {
            let message = "top_logprobs needs logprobs: true";
            return Err(ApiError::invalid("top_logprobs", message));
        }
        request.logprobs = wanted.then_some(top.unwrap_or(0) as u8);
        settings(&mut fields)?;
        fields.end()?;
        Ok(request)
    }

    fn repeated(&self) -> Option<&'static str> {
        Some("messages")
    }

    fn response(&self, context: &AnswerContext, response: &ModelResponse) -> Value {
        let choices: Vec<Value> = response
            .choices
            .iter()
            .enumerate()
            .map(|(i, choice)| choice_value(context, i, choice))
            .collect();
        openai::answer(context, ANSWER, choices, &response.usage)
    }

    fn stream(&self, context: AnswerContext) -> Box<dyn EventWriter> {
        Box::new(ChatStream {
            begun: vec![false; context.request.n as usize],
            calls: vec![0; context.request.n as usize],
            chunks: Chunks {
                name: CHUNK,
                opened: false,
            },
            context,
        })
    }
}

/// Settings that have no effect here, and those that cannot be honoured.
fn settings(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    // Bookkeeping of a hosted service: by their definition they do not change the answer.
    fields.ignore(&["user", "metadata", "safety_identifier", "prompt_cache_key"]);
    fields.no_effect("store", &[json!(false)], "nothing is stored for retrieval")?;
    openai::service_tier(fields)?;
    fields.no_effects(&[
        ("reasoning_effort", "the model has no such setting"),
        ("verbosity", "the model has no such setting"),
        ("prediction", "every token is sampled"),
        ("prompt_cache_retention", "the cache keeps what it can"),
    ])?;
    fields.only("modalities", &[json!(["text"])], "only text is generated")?;
    let calls = [json!("none"), json!("auto")];
    fields.only("function_call", &calls, "use tool_choice")?;
    let why = "nothing is searched here: give the model a tool";
    fields.no_effects(&[("web_search_options", why)])?;
    fields.refuse(&[
        ("functions", "use tools"),
        ("audio", "only text is generated"),
    ])
}

/// Settings of vLLM and of servers like it. Their clients send its defaults along.
fn of_servers(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    /// Reason for refusing a field of the sampler: trained tokens have one policy.
    const POLICY: &str = "it changes the policy that is sampled";
    /// Reason for refusing a field that changes the prompt: the conversation is rendered unchanged.
    const PROMPT: &str = "it changes what the model is given";
    for (name, neutral) in [
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("length_penalty", 1.0),
        ("min_tokens", 0.0),
    ] {
        fields.only_number(name, neutral, POLICY)?;
    }
    for name in ["ignore_eos", "use_beam_search", "early_stopping"] {
        fields.only(name, &[json!(false)], POLICY)?;
    }
    fields.only("add_generation_prompt", &[json!(true)], PROMPT)?;
    fields.only("continue_final_message", &[json!(false)], PROMPT)?;
    fields.refuse(&[
        ("stop_token_ids", "use stop"),
        ("bad_words", POLICY),
        ("allowed_token_ids", POLICY),
        ("logits_processors", POLICY),
        ("truncate_prompt_tokens", PROMPT),
        ("documents", PROMPT),
        ("chat_template", PROMPT),
        ("chat_template_kwargs", PROMPT),
    ])?;
    let shown = "the text is what was sampled, without marks";
    fields.no_effect("skip_special_tokens", &[json!(true)], shown)?;
    fields.no_effect("spaces_between_special_tokens", &[json!(true)], shown)?;
    fields.no_effect("include_stop_str_in_output", &[json!(false)], shown)?;
    fields.no_effect("return_tokens_as_token_ids", &[json!(false)], shown)?;
    fields.no_effect("prompt_logprobs", &[json!(0)], "prompts are not scored")?;
    fields.no_effect("priority", &[json!(0)], "calls run in their order")?;
    let begun = [json!(true), json!(false)];
    fields.no_effect("add_special_tokens", &begun, shown)
}

/// Fields that chat and text completions share.
pub(super) fn common(fields: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
    request.n = fields.integer("n", 1, 128)?.unwrap_or(1) as u32;
    request.stream = fields.bool("stream")?.unwrap_or(false);
    if let Some(mut options) = fields.inner("stream_options")? {
        request.include_usage = options.bool("include_usage")?.unwrap_or(false);
        options.ignore(&["include_obfuscation"]);
        options.end()?;
        if !request.stream {
            let message = "stream_options needs stream: true";
            let refusal = || ApiError::invalid("stream_options", message);
            fields.notes().ignored("stream_options", refusal)?;
        }
    }
    of_servers(fields)?;
    response_format(fields, request)?;
    guided(fields, request)?;
    request.return_token_ids = fields.bool("return_token_ids")?.unwrap_or(false);
    Ok(())
}

/// Sampling fields that chat and text completions share.
pub(super) fn sampling(fields: &mut Fields<'_>) -> Result<SamplingAsk, ApiError> {
    let seed = fields.integer("seed", i64::MIN, i64::MAX)?;
    Ok(SamplingAsk {
        temperature: fields.temperature(2.0)?,
        top_p: fields.number("top_p", 0.0, 1.0)?,
        // -1 and 0 both keep all tokens.
        top_k: fields.count("top_k", -1)?,
        min_p: fields.number("min_p", 0.0, 1.0)?,
        max_tokens: fields.count("max_tokens", 1)?,
        stop: stop(fields)?,
        seed: seed.map(|s| s as u64),
        logit_bias: logit_bias(fields)?,
    })
}

/// `stop`: one text or a list.
fn stop(fields: &mut Fields<'_>) -> Result<Vec<String>, ApiError> {
    let path = fields.path("stop");
    let expected = format!("a string, or up to {MAX_STOPS} of them, none empty");
    let Some(value) = fields.take("stop") else {
        return Ok(Vec::new());
    };
    let texts = match &value {
        Value::String(text) => Some(vec![text.clone()]),
        list => Vec::<String>::deserialize(list).ok(),
    };
    texts
        .filter(|t| t.len() <= MAX_STOPS && t.iter().all(|s| !s.is_empty()))
        .ok_or_else(|| wrong(&path, &value, &expected))
}

/// `logit_bias`: token ids as texts, with what is added to their logits.
fn logit_bias(fields: &mut Fields<'_>) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let Some(value) = fields.take("logit_bias") else {
        return Ok(Vec::new());
    };
    let expected = "an object from token ids to numbers from -100 to 100";
    let refused = || wrong("logit_bias", &value, expected);
    let map = value.as_object().ok_or_else(refused)?;
    if map.len() > MAX_BIAS {
        return Err(refused());
    }
    let entry = |(id, bias): (&String, &Value)| {
        let bias = bias.as_f64().filter(|b| (-100.0..=100.0).contains(b))?;
        Some((id.parse().ok()?, bias as f32))
    };
    map.iter()
        .map(entry)
        .collect::<Option<_>>()
        .ok_or_else(refused)
}

/// Source of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A request of an agent.
    Request,
    /// Data: files, tasks, environments. Calls need no ids and may be written as templates and traces have
    /// them; a turn may have a `weight`.
    Data,
}

/// A message with its calls, reasoning and parts; and whether it may be trained, by its `weight`.
pub(crate) fn message(
    value: Value,
    path: &str,
    notes: &Notes,
    source: Source,
) -> Result<(Message, bool), ApiError> {
    let mut fields = Fields::of(value, path, notes)?;
    let role = fields.required_string("role")?;
    let role = match role.as_str() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        _ => {
            let expected = "system, developer, user, assistant or tool";
            return Err(wrong(&fields.path("role"), &Value::String(role), expected));
        }
    };
    let content = fields.take("content");
    let content = openai::parts(
        content,
        &fields.path("content"),
        notes,
        |fields, kind, content| part(fields, kind, content, source),
    )?;
    let mut message = Message::new(role, content);
    message.name = fields.string("name")?;
    if role == Role::Tool {
        message.tool_call_id = match source {
            Source::Request => Some(fields.required_string("tool_call_id")?),
            Source::Data => fields.string("tool_call_id")?,
        };
    }
    let mut trained = true;
    if role == Role::Assistant {
        trained = assistant(&mut fields, &mut message, source)?;
    }
    fields.end()?;
    Ok((message, trained))
}

/// Reads the fields that only turns of the model have. Returns whether the turn may be trained.
fn assistant(
    fields: &mut Fields<'_>,
    message: &mut Message,
    source: Source,
) -> Result<bool, ApiError> {
    let (notes, path) = (fields.notes(), fields.path("tool_calls"));
    let reasoning = fields.string("reasoning_content")?;
    message.reasoning = reasoning.or(fields.string("reasoning")?);
    let calls = fields.array("tool_calls")?.unwrap_or_default();
    message.tool_calls = calls
        .into_iter()
        .enumerate()
        .map(|(i, value)| tool_call(value, &format!("{path}[{i}]"), notes, source))
        .collect::<Result<_, _>>()?;
    let weight = match source {
        Source::Request => None,
        Source::Data => fields.integer("weight", 0, 1)?,
    };
    fields.no_effects(&[("annotations", "only text is generated")])?;
    fields.refuse(&[
        ("refusal", "the model does not refuse in a field of its own"),
        ("audio", "only text is generated"),
        ("function_call", "use tool_calls"),
    ])?;
    Ok(weight != Some(0))
}

/// Text, images and sounds of a list of parts.
fn part(
    part: &mut Fields<'_>,
    kind: &str,
    content: &mut Content,
    source: Source,
) -> Result<(), ApiError> {
    match kind {
        "image" | "audio" if source == Source::Data => content.push(media::reference(part, kind)?),
        "text" => content.push_text(&part.required_string("text")?),
        "image_url" => {
            let mut image = part.required_inner("image_url")?;
            let at = image.path("url");
            content.push(media::image(&image.required_string("url")?, &at)?);
            image.no_effects(&[("detail", "the reference is kept as it is")])?;
            image.end()?;
        }
        "input_audio" => content.push(media::audio(part)?),
        other => {
            let why = format!(
                "parts of type {other:?} are not supported: known are text, image_url and input_audio"
            );
            return Err(ApiError::unsupported(&part.path("type"), &why));
        }
    }
    Ok(())
}

/// A call that an assistant's message repeats. A call in data may be only its function, with its arguments as
/// an object; a missing id is made later.
fn tool_call(
    value: Value,
    path: &str,
    notes: &Notes,
    source: Source,
) -> Result<ToolCall, ApiError> {
    let mut fields = Fields::of(value, path, notes)?;
    let kind = fields.string("type")?.unwrap_or_else(|| "function".into());
    fields.ignore(&["index"]);
    let id = match source {
        Source::Request => fields.required_string("id")?,
        Source::Data => fields.string("id")?.unwrap_or_default(),
    };
    if kind == "custom" {
        let mut custom = fields.required_inner("custom")?;
        fields.end()?;
        let name = custom.required_string("name")?;
        let arguments = json!({"input": custom.required_string("input")?});
        custom.end()?;
        return Ok(ToolCall {
            id,
            name,
            arguments,
        });
    }
    if kind != "function" {
        return Err(wrong(
            &fields.path("type"),
            &Value::String(kind),
            "function or custom",
        ));
    }
    let plain = source == Source::Data && !fields.has("function");
    let mut function = if plain {
        fields
    } else {
        let function = fields.required_inner("function")?;
        fields.end()?;
        function
    };
    let name = function.required_string("name")?;
    let at = function.path("arguments");
    let object = match source {
        Source::Request => None,
        Source::Data => function.take_object("arguments"),
    };
    let arguments = match object {
        Some(object) => object,
        None => function.arguments()?,
    };
    if source == Source::Data && !arguments.is_object() {
        return Err(wrong(&at, &arguments, "a JSON object"));
    }
    function.end()?;
    Ok(ToolCall {
        id,
        name,
        arguments,
    })
}

/// OpenAI's word for the end of a choice.
fn finish_reason(end: &TurnEnd) -> &'static str {
    match end {
        TurnEnd::Stop | TurnEnd::StopString(_) => "stop",
        TurnEnd::Length => "length",
        TurnEnd::ToolCalls => "tool_calls",
    }
}

/// A call, whole: arguments are not streamed in pieces.
fn call_value(request: &ModelRequest, call: &ToolCall) -> Value {
    if request
        .special(&call.name)
        .is_some_and(|t| t.form == ToolForm::Custom)
    {
        let custom = json!({"name": call.name, "input": input_of(call)});
        return json!({"id": call.id, "type": "custom", "custom": custom});
    }
    call.to_chat()
}

/// A choice of a whole answer.
fn choice_value(context: &AnswerContext, index: usize, choice: &Choice) -> Value {
    let said = &choice.message;
    let mut message = said.to_chat();
    message["refusal"] = Value::Null;
    if !said.tool_calls.is_empty() {
        let calls = said.tool_calls.iter();
        let calls = calls.map(|call| call_value(&context.request, call));
        message["tool_calls"] = calls.collect();
    }
    let mut value = json!({
        "index": index,
        "message": message,
        "logprobs": logprobs(context, &choice.tokens),
        "finish_reason": finish_reason(&choice.end),
    });
    openai::add_ids(context, &mut value, &choice.tokens);
    value
}

/// `logprobs` of a choice; `null` if they were not asked for.
fn logprobs(context: &AnswerContext, tokens: &[SampledToken]) -> Value {
    openai::logprobs(context, tokens).map_or(
        Value::Null,
        |content| json!({"content": content, "refusal": null}),
    )
}

/// State of a stream, by choice.
struct ChatStream {
    context: AnswerContext,
    /// Choices whose role was sent.
    begun: Vec<bool>,
    /// Calls sent of each choice.
    calls: Vec<usize>,
    chunks: Chunks,
}

impl ChatStream {
    /// An event with one body; tokens and end go with the last one of a delta.
    fn event(&mut self, delta: &Delta, body: &Value, last: bool) -> String {
        let end = delta.end.as_ref().filter(|_| last).map(finish_reason);
        let tokens: &[SampledToken] = if last { &delta.tokens } else { &[] };
        let asked = self.context.request.logprobs.is_some() && !tokens.is_empty();
        let mut choice = json!({
            "index": delta.choice,
            "delta": body,
            "logprobs": if asked { logprobs(&self.context, tokens) } else { Value::Null },
            "finish_reason": end,
        });
        if !tokens.is_empty() {
            openai::add_ids(&self.context, &mut choice, tokens);
        }
        self.chunks.event(&self.context, choice)
    }
}

impl EventWriter for ChatStream {
    fn delta(&mut self, delta: &Delta) -> String {
        let index = delta.choice as usize;
        let mut bodies = Vec::new();
        if !std::mem::replace(&mut self.begun[index], true) {
            bodies.push(json!({"role": "assistant", "content": "", "refusal": null}));
        }
        for piece in &delta.pieces {
            bodies.push(match piece {
                Piece::Text(text) => json!({"content": text}),
                Piece::Reasoning(text) => json!({"reasoning_content": text}),
                Piece::Call(call) => {
                    let mut value = call_value(&self.context.request, call);
                    value["index"] = json!(self.calls[index]);
                    self.calls[index] += 1;
                    json!({"tool_calls": [value]})
                }
            });
        }
        if delta.end.is_some() || (bodies.is_empty() && !delta.tokens.is_empty()) {
            bodies.push(json!({}));
        }
        let last = bodies.len().saturating_sub(1);
        let events = bodies.iter().enumerate();
        events
            .map(|(i, body)| self.event(delta, body, i == last))
            .collect()
    }

    fn end(&mut self, response: &ModelResponse) -> String {
        self.chunks.end(&self.context, &response.usage)
    }

    fn error(&mut self, error: &ApiError) -> String {
        data_event(&openai_error(error))
    }
}
