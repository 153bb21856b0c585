//! OpenAI responses.
//!
//! Items of the input become messages: the items of one turn (reasoning, text, calls) become one message
//! again. `previous_response_id` continues an answer of the same rollout; `instructions` are not carried
//! over, as in the API. Reasoning is returned as reasoning items with their text, and may be sent back.
//!
//! Source: OpenAI's API reference and the types of its Python client.

mod input;
mod stream;

use super::agent_tools::{ToolForm, input_of};
use super::fields::{Fields, Notes, wrong};
use super::format::flat;
use super::openai::{self, MAX_TOP_LOGPROBS};
use super::{
    AnswerContext, Continuation, Dialect, EventWriter, ModelRequest, ModelResponse, ToolChoice,
    TurnEnd,
};
use crate::error::ApiError;
use crate::prompt::Prompt;
use input::input_messages;
use serde_json::{Map, Value, json};
use sinew_types::{Message, Role, SampledToken, ToolCall};
use stream::ResponsesStream;

/// Ids of answers begin with this.
const PREFIX: &str = "resp_";

/// Ids of items begin with these.
const THOUGHT: &str = "rs";
/// Id prefix of messages.
const TEXT: &str = "msg";
/// Id prefix of calls.
const CALL: &str = "fc";

/// `POST /v1/responses`.
#[derive(Clone, Copy, Debug)]
pub struct Responses;

impl Dialect for Responses {
    fn read(&self, body: &[u8], notes: &Notes) -> Result<ModelRequest, ApiError> {
        let mut fields = Fields::parse(body, notes)?;
        let model = fields.required_string("model")?;
        let input = fields.required("input")?;
        let mut messages = Vec::new();
        let instructions = fields.string("instructions")?;
        messages.extend(instructions.iter().map(|t| Message::new(Role::System, t)));
        let own_from = messages.len();
        let mut request = ModelRequest::new(model, Prompt::default());
        messages.extend(input_messages(input, notes, &mut request)?);
        request.prompt = Prompt::Messages(messages);
        request.head = own_from;
        let previous = fields.string("previous_response_id")?;
        let keep = fields.bool("store")?.unwrap_or(true);
        let mut echo = Map::new();
        echo.insert("instructions".into(), json!(instructions));
        echo.insert("previous_response_id".into(), json!(previous));
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
        let own = |tool: &Value| tool["type"] != "function";
        let declared = fields.at(&["tools"]).and_then(Value::as_array);
        let special: Vec<Value> = declared
            .into_iter()
            .flatten()
            .filter(|t| own(t))
            .cloned()
            .collect();
        openai::tools(&mut fields, None, &mut request)?;
        echo.insert("tools".into(), json!(special));
        echo.insert("tool_choice".into(), choice_value(&request.tool_choice));
        request.sampling.temperature = fields.temperature(2.0)?;
        request.sampling.top_p = fields.number("top_p", 0.0, 1.0)?;
        request.sampling.max_tokens = fields.count("max_output_tokens", 1)?;
        logprobs(&mut fields, &mut request)?;
        request.stream = fields.bool("stream")?.unwrap_or(false);
        if let Some(mut options) = fields.inner("stream_options")? {
            options.ignore(&["include_obfuscation"]);
            options.end()?;
        }
        let told = json!({"type": "text"});
        let told = fields.at(&["text", "format"]).cloned().unwrap_or(told);
        echo.insert("text".into(), json!({"format": told}));
        settings(&mut fields, &mut request)?;
        request.echo = Value::Object(echo);
        fields.end()?;
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
                let id = item_id(context, THOUGHT, 0);
                items.push(reasoning_item(&id, reasoning, status));
            }
            if !said.content.is_empty() || said.tool_calls.is_empty() {
                let id = item_id(context, TEXT, 0);
                let logprobs = logprob_values(context, &choice.tokens);
                items.push(message_item(&id, &said.content.text(), &logprobs, status));
            }
            for (i, call) in said.tool_calls.iter().enumerate() {
                let id = item_id(context, CALL, i);
                items.push(call_item(&context.request, &id, call, "completed"));
            }
        }
        finished(context, response, items)
    }

    fn stream(&self, context: AnswerContext) -> Box<dyn EventWriter> {
        Box::new(ResponsesStream::new(context))
    }
}

/// Settings that have no effect here, and those that cannot be honoured.
fn settings(fields: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
    let cut = "a prompt that is too long is refused, never shortened";
    fields.no_effect("truncation", &[json!("disabled")], cut)?;
    fields.no_effect("background", &[json!(false)], "answers are given at once")?;
    openai::service_tier(fields)?;
    fields.no_effects(&[
        ("max_tool_calls", "no tool runs at this server"),
        ("prompt_cache_retention", "the cache keeps what it can"),
    ])?;
    if let Some(mut text) = fields.inner("text")? {
        flat(&mut text, "format", request)?;
        text.no_effects(&[("verbosity", "the model has no such setting")])?;
        text.end()?;
    }
    if let Some(mut reasoning) = fields.inner("reasoning")? {
        // Reasoning is given whole, which is more than a summary.
        reasoning.ignore(&["summary", "generate_summary"]);
        reasoning.no_effects(&[("effort", "the model has no such setting")])?;
        reasoning.end()?;
    }
    fields.refuse(&[
        ("conversation", "use previous_response_id"),
        ("prompt", "prompts are not stored here: send the messages"),
        ("context_management", "the conversation is never rewritten"),
    ])
}

/// `include` and `top_logprobs`.
fn logprobs(fields: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
    let mut wanted = false;
    let notes = fields.notes();
    for (i, value) in fields
        .array("include")?
        .unwrap_or_default()
        .iter()
        .enumerate()
    {
        let path = format!("include[{i}]");
        let expected = "message.output_text.logprobs or reasoning.encrypted_content";
        match value.as_str() {
            Some("message.output_text.logprobs") => wanted = true,
            // Reasoning is in its own items as they are.
            Some("reasoning.encrypted_content") => {}
            // Values for tools that do not run here.
            Some(_) => notes.ignored(&path, || wrong(&path, value, expected))?,
            None => return Err(wrong(&path, value, expected)),
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

/// `tool_choice` as the answer repeats it.
fn choice_value(choice: &ToolChoice) -> Value {
    match choice {
        ToolChoice::Auto => json!("auto"),
        ToolChoice::None => json!("none"),
        ToolChoice::Required => json!("required"),
        ToolChoice::Named(name) => json!({"type": "function", "name": name}),
    }
}

/// Id of an item: `number` counts those of its kind. A request may name it, see [`named`].
fn item_id(context: &AnswerContext, kind: &str, number: usize) -> String {
    format!("{kind}_{}_{number}", context.id)
}

/// Only a limit leaves an item unfinished.
fn item_status(end: Option<&TurnEnd>) -> &'static str {
    match end {
        Some(TurnEnd::Length) => "incomplete",
        _ => "completed",
    }
}

/// An item with the model's thought.
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

/// A part of a message with its log-probabilities, null where none were requested.
fn text_part(text: &str, logprobs: &Value) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

/// An item with the model's text.
fn message_item(id: &str, text: &str, logprobs: &Value, status: &str) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text_part(text, logprobs)],
    })
}

/// A call as the item that its tool's client knows. Arguments that do not fit the item are given as they are,
/// so that the agent's own check answers them.
fn call_item(request: &ModelRequest, id: &str, call: &ToolCall, status: &str) -> Value {
    let mut item = json!({"id": id, "call_id": call.id, "status": status});
    let special = request.special(&call.name);
    let form = special.map_or(ToolForm::Function, |t| t.form);
    item["type"] = json!(match form {
        ToolForm::Function | ToolForm::Toolset => "function_call",
        ToolForm::Custom => "custom_tool_call",
        ToolForm::LocalShell => "local_shell_call",
        ToolForm::Shell => "shell_call",
        ToolForm::ApplyPatch => "apply_patch_call",
        ToolForm::ComputerPreview | ToolForm::Computer => "computer_call",
        ToolForm::ToolSearch => "tool_search_call",
    });
    let mut arguments = call.arguments.clone();
    // A client reads these even if the model left them out.
    let mut filled = |name: &str, value: Value| {
        if let Value::Object(map) = &mut arguments {
            map.entry(name).or_insert(value);
        }
    };
    match form {
        ToolForm::Function | ToolForm::Toolset => {
            item["name"] = json!(special.map_or(&call.name, |t| &t.name));
            item["arguments"] = json!(arguments.to_string());
        }
        ToolForm::Custom => {
            item["name"] = json!(special.map_or(&call.name, |t| &t.name));
            item["input"] = json!(input_of(call));
        }
        ToolForm::LocalShell => {
            filled("type", json!("exec"));
            filled("command", json!([]));
            filled("env", json!({}));
            item["action"] = arguments;
        }
        ToolForm::Shell => {
            filled("commands", json!([]));
            item["action"] = arguments;
        }
        ToolForm::ApplyPatch => item["operation"] = arguments,
        ToolForm::ComputerPreview => item["action"] = arguments,
        ToolForm::Computer => item["actions"] = arguments["actions"].take(),
        ToolForm::ToolSearch => {
            item["execution"] = json!("client");
            item["arguments"] = arguments;
        }
    }
    if matches!(form, ToolForm::ComputerPreview | ToolForm::Computer) {
        item["pending_safety_checks"] = json!([]);
    }
    if let Some(namespace) = special.and_then(|t| t.namespace.as_ref()) {
        item["namespace"] = json!(namespace);
    }
    item
}

/// Log-probabilities of sampled tokens; an empty list if the request did not ask.
fn logprob_values(context: &AnswerContext, tokens: &[SampledToken]) -> Value {
    openai::logprobs(context, tokens).unwrap_or_else(|| json!([]))
}

/// The response object without output.
fn skeleton(context: &AnswerContext, status: &str) -> Value {
    let request = &context.request;
    let tools: Vec<_> = request
        .tools
        .iter()
        .filter(|tool| request.special(&tool.name).is_none())
        .map(|tool| {
            json!({
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": request.is_strict(&tool.name),
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
        "tools": tools,
        "top_logprobs": request.logprobs.unwrap_or(0),
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": null,
    });
    if let Value::Object(echo) = &request.echo {
        for (name, echoed) in echo {
            match (&mut value[name], echoed) {
                // Those that are not functions follow the functions.
                (Value::Array(tools), Value::Array(special)) if name == "tools" => {
                    tools.extend(special.iter().cloned());
                }
                (place, echoed) => *place = echoed.clone(),
            }
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
    let reasoning = choice.and_then(|c| c.message.reasoning.as_deref());
    // The tokens of the reasoning itself; its marks are not counted.
    let reasoning_tokens = reasoning
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
