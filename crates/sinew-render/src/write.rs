//! Calls and tool descriptions as text, for templates that do not support them.
//!
//! [`crate::ChatRenderer`] finds by trial whether a template prints tools and calls, and uses this module
//! otherwise.

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
        ToolCallFormat::Glm => each(&glm, "\n"),
        ToolCallFormat::Xml => each(&xml, "\n"),
        ToolCallFormat::Fence { language, .. } => {
            each(&|c| format!("```{language}\n{}\n```", code(c)), "\n")
        }
        ToolCallFormat::Tag { tag, .. } => each(&|c| format!("<{tag}>{}</{tag}>", code(c)), "\n"),
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

fn glm(call: &ParsedCall) -> String {
    let mut out = format!("<tool_call>{}\n", call.name);
    for (key, value) in &call.arguments {
        out.push_str(&format!(
            "<arg_key>{key}</arg_key>\n<arg_value>{}</arg_value>\n",
            raw(value)
        ));
    }
    out + "</tool_call>"
}

fn xml(call: &ParsedCall) -> String {
    let mut out = format!("<tool_call>\n<function={}>\n", call.name);
    for (key, value) in &call.arguments {
        out.push_str(&format!(
            "<parameter={key}>\n{}\n</parameter>\n",
            raw(value)
        ));
    }
    out + "</function>\n</tool_call>"
}
