//! Calls and tool descriptions as text, for templates that do not support them.
//!
//! [`crate::ChatRenderer`] finds by trial whether a template prints tools and calls, and uses this module
//! otherwise.

use crate::elements::NS;
use crate::marked::{GLM, HY3, PairTags};
use crate::template::to_python_json;
use crate::tool_call::{ParsedCall, ToolCallFormat};
use serde_json::{Value, json};
use sinew_types::{ToolCall, ToolSpec};

/// Writes calls in a format. [`crate::parse_turn`] parses the text to the same calls. Formats for
/// code write only the argument `code`.
pub fn write_calls(calls: &[ParsedCall], format: &ToolCallFormat) -> String {
    let each = |write: &dyn Fn(&ParsedCall) -> String, between: &str| {
        calls.iter().map(write).collect::<Vec<_>>().join(between)
    };
    match format {
        ToolCallFormat::Hermes => each(
            &|c| format!("<tool_call>\n{}\n</tool_call>", object(c, "arguments")),
            "\n",
        ),
        ToolCallFormat::SmolLm => format!(
            "<tool_call>[{}]</tool_call>",
            each(&|c| object(c, "arguments"), ", ")
        ),
        ToolCallFormat::Llama3 => each(&|c| object(c, "parameters"), "; "),
        ToolCallFormat::Json if calls.len() == 1 => each(&|c| object(c, "arguments"), ""),
        ToolCallFormat::Json => format!("[{}]", each(&|c| object(c, "arguments"), ", ")),
        ToolCallFormat::Mistral => {
            format!("[TOOL_CALLS][{}]", each(&|c| object(c, "arguments"), ", "))
        }
        ToolCallFormat::DeepSeek => format!(
            "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
            each(
                &|c| {
                    let json = arguments(c);
                    format!(
                        "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{json}<｜tool▁call▁end｜>",
                        c.name
                    )
                },
                ""
            )
        ),
        ToolCallFormat::Glm => each(&|c| paired(c, &GLM), "\n"),
        ToolCallFormat::Xml => each(&xml, "\n"),
        ToolCallFormat::Fence { language, .. } => {
            each(&|c| format!("```{language}\n{}\n```", code(c)), "\n")
        }
        ToolCallFormat::Tag { tag, .. } => each(&|c| format!("<{tag}>{}</{tag}>", code(c)), "\n"),
        ToolCallFormat::List { tag } => format!(
            "<{tag}>[{}]</{tag}>",
            each(&|c| object(c, "arguments"), ", ")
        ),
        newer => write_newer(calls, newer),
    }
}

/// Writes calls in the formats of [`crate::notations`].
fn write_newer(calls: &[ParsedCall], format: &ToolCallFormat) -> String {
    let each = |write: &dyn Fn(&ParsedCall) -> String, between: &str| {
        calls.iter().map(write).collect::<Vec<_>>().join(between)
    };
    match format {
        ToolCallFormat::Seed => format!(
            "<seed:tool_call>\n{}\n</seed:tool_call>",
            each(&function, "\n")
        ),
        ToolCallFormat::Harmony => each(
            &|c| {
                let json = arguments(c);
                format!(
                    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{json}<|call|>",
                    c.name
                )
            },
            "",
        ),
        ToolCallFormat::Kimi => kimi(calls),
        ToolCallFormat::MiniMax => format!(
            "<minimax:tool_call>\n{}\n</minimax:tool_call>",
            each(&|c| named(c, "invoke", "parameter"), "\n")
        ),
        ToolCallFormat::Muse => each(&muse, "<|eom|><|start|>assistant"),
        ToolCallFormat::MiniMaxM3 => format!(
            "{NS}<tool_call>\n{}\n{NS}</tool_call>",
            each(&minimax_m3, "\n")
        ),
        ToolCallFormat::KimiK3 => kimi_k3(calls),
        ToolCallFormat::Hy3 => format!(
            "<tool_calls:opensource>\n{}\n</tool_calls:opensource>",
            each(&|c| paired(c, &HY3), "\n")
        ),
        ToolCallFormat::Functionary => each(&|c| format!(">>>{}\n{}", c.name, arguments(c)), ""),
        ToolCallFormat::GigaChat => each(
            &|c| format!("<|function_call|>{}", object(c, "arguments")),
            "",
        ),
        ToolCallFormat::Apertus => format!(
            "<|tools_prefix|>[{}]<|tools_suffix|>",
            each(
                &|c| format!("{{{}: {}}}", json!(c.name), arguments(c)),
                ", "
            )
        ),
        ToolCallFormat::MiniCpm => each(&|c| named(c, "function", "param"), "\n"),
        ToolCallFormat::Gemma => each(
            &|c| {
                let values = gemma(&Value::Object(c.arguments.clone()));
                format!("<|tool_call>call:{}{values}<tool_call|>", c.name)
            },
            "",
        ),
        ToolCallFormat::Lfm => format!(
            "<|tool_call_start|>[{}]<|tool_call_end|>",
            each(&pythonic, ", ")
        ),
        ToolCallFormat::Cohere => cohere(calls),
        // The formats of [`write_calls`] do not come here.
        _ => String::new(),
    }
}

/// Writes like [`write_calls`], for calls of messages. Arguments other than objects are omitted.
pub(crate) fn write_tool_calls(calls: &[ToolCall], format: &ToolCallFormat) -> String {
    let parsed: Vec<_> = calls
        .iter()
        .map(|call| ParsedCall {
            id: Some(call.id.clone()),
            name: call.name.clone(),
            arguments: call.arguments.as_object().cloned().unwrap_or_default(),
        })
        .collect();
    write_calls(&parsed, format)
}

/// Text for a system message that describes tools and the call format.
pub fn tool_instructions(tools: &[ToolSpec], format: &ToolCallFormat) -> String {
    let list: Vec<String> = tools
        .iter()
        .map(|tool| {
            to_python_json(&json!({
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                },
            }))
        })
        .collect();
    let mut arguments = serde_json::Map::new();
    arguments.insert("argument".into(), Value::String("value".into()));
    let example = write_calls(&[ParsedCall::new("name", arguments)], format);
    format!(
        "# Tools\n\nYou can call these functions:\n<tools>\n{}\n</tools>\n\nTo call one, write \
         its name and arguments like this, and stop:\n{example}",
        list.join("\n")
    )
}

/// Arguments as JSON.
fn arguments(call: &ParsedCall) -> String {
    to_python_json(&Value::Object(call.arguments.clone()))
}

/// A call as a JSON object with its arguments at `key`.
fn object(call: &ParsedCall, key: &str) -> String {
    let mut map = serde_json::Map::new();
    map.insert("name".into(), json!(call.name));
    map.insert(key.into(), Value::Object(call.arguments.clone()));
    to_python_json(&Value::Object(map))
}

/// A value without quotes.
fn raw(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => to_python_json(other),
    }
}

/// The argument `code` of a call, or nothing.
fn code(call: &ParsedCall) -> String {
    call.arguments.get("code").map(raw).unwrap_or_default()
}

/// A call whose arguments are pairs of a key and a value.
fn paired(call: &ParsedCall, tags: &PairTags) -> String {
    let mut out = format!("{}{}{}\n", tags.open, call.name, tags.name_end);
    for (key, value) in &call.arguments {
        let value = raw(value);
        out.push_str(&format!(
            "{}{key}{}\n{}{value}{}\n",
            tags.key, tags.key_end, tags.value, tags.value_end
        ));
    }
    out + tags.close
}

fn xml(call: &ParsedCall) -> String {
    format!("<tool_call>\n{}\n</tool_call>", function(call))
}

fn function(call: &ParsedCall) -> String {
    let mut out = format!("<function={}>\n", call.name);
    for (key, value) in &call.arguments {
        out.push_str(&format!(
            "<parameter={key}>\n{}\n</parameter>\n",
            raw(value)
        ));
    }
    out + "</function>"
}

/// A call whose name and keys are attributes.
fn named(call: &ParsedCall, tag: &str, argument: &str) -> String {
    let mut out = format!("<{tag} name=\"{}\">\n", call.name);
    for (key, value) in &call.arguments {
        let value = raw(value);
        out.push_str(&format!(
            "<{argument} name=\"{key}\">{value}</{argument}>\n"
        ));
    }
    out + &format!("</{tag}>")
}

fn muse(call: &ParsedCall) -> String {
    let invoke = named(call, "atem:invoke", "atem:parameter");
    format!(
        " to={}<|message|><atem:function_calls>\n{invoke}\n</atem:function_calls>",
        call.name
    )
}

fn minimax_m3(call: &ParsedCall) -> String {
    let mut out = format!("{NS}<invoke name=\"{}\">", call.name);
    for (key, value) in &call.arguments {
        element(key, value, &mut out);
    }
    out + NS + "</invoke>"
}

/// A value as an element of MiniMax M3. Empty lists and objects are JSON.
fn element(key: &str, value: &Value, out: &mut String) {
    out.push_str(&format!("{NS}<{key}>"));
    match value {
        Value::Object(map) if !map.is_empty() => {
            map.iter().for_each(|(key, value)| element(key, value, out));
        }
        Value::Array(items) if !items.is_empty() => {
            items.iter().for_each(|value| element("item", value, out));
        }
        other => out.push_str(&raw(other)),
    }
    out.push_str(&format!("{NS}</{key}>"));
}

fn kimi_k3(calls: &[ParsedCall]) -> String {
    let attribute = |text: &str| text.replace('&', "&amp;").replace('"', "&quot;");
    let mut out = "<|open|>tools<|sep|>".to_owned();
    for (index, call) in calls.iter().enumerate() {
        let (name, number) = (attribute(&call.name), index + 1);
        out.push_str(&format!(
            "<|open|>call tool=\"{name}\" index=\"{number}\"<|sep|>"
        ));
        for (key, value) in &call.arguments {
            let (key, kind, value) = (attribute(key), kind(value), raw(value));
            out.push_str(&format!(
                "<|open|>argument key=\"{key}\" type=\"{kind}\"<|sep|>{value}<|close|>argument<|sep|>"
            ));
        }
        out.push_str("<|close|>call<|sep|>");
    }
    out + "<|close|>tools<|sep|>"
}

/// The type of a value in JSON Schema.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn kimi(calls: &[ParsedCall]) -> String {
    let mut out = "<|tool_calls_section_begin|>".to_owned();
    for (index, call) in calls.iter().enumerate() {
        let made_up = || format!("functions.{}:{index}", call.name);
        let id = call.id.clone().filter(|id| id.starts_with("functions."));
        out.push_str(&format!(
            "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>",
            id.unwrap_or_else(made_up),
            arguments(call)
        ));
    }
    out + "<|tool_calls_section_end|>"
}

fn cohere(calls: &[ParsedCall]) -> String {
    let list = calls.iter().enumerate().map(|(index, call)| {
        let id = call.id.clone().unwrap_or_else(|| index.to_string());
        json!({"tool_call_id": id, "tool_name": call.name, "parameters": call.arguments})
    });
    let list = to_python_json(&Value::Array(list.collect()));
    format!("<|START_ACTION|>{list}<|END_ACTION|>")
}

/// A value as Gemma writes it: texts between its quotes, keys without any.
fn gemma(value: &Value) -> String {
    match value {
        Value::String(text) => format!("<|\"|>{text}<|\"|>"),
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(gemma).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(map) => {
            let items = map.iter();
            let items: Vec<_> = items.map(|(k, v)| format!("{k}:{}", gemma(v))).collect();
            format!("{{{}}}", items.join(","))
        }
        other => other.to_string(),
    }
}

/// A call in the notation of Python, with texts as JSON writes them.
fn pythonic(call: &ParsedCall) -> String {
    let arguments = call.arguments.iter();
    let arguments: Vec<_> = arguments
        .map(|(key, value)| format!("{key}={}", to_python_json(value)))
        .collect();
    format!("{}({})", call.name, arguments.join(", "))
}
