//! Rows of NeMo Gym as tasks, and a conversation as its verifiers read it.

use serde_json::{Value, json};
use sinew_bridge::SplitTasks;
use sinew_env::TasksetError;
use sinew_types::{Message, Role, Task, TaskId, ToolCall, ToolSpec, mix_seed};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// Maximum bytes of a file of rows.
const MAX_BYTES: u64 = 1 << 30;
/// Divisor: one of this many rows is held out.
const HELD_OUT_EVERY: usize = 10;

/// Reads a file of JSON lines: each has `responses_create_params` and the fields of its verifier. The second
/// row, and every tenth, is held out: a file of two rows has one as well.
pub(super) fn read(path: &str, seed: u64) -> Result<SplitTasks, TasksetError> {
    let config = |allowed: String| TasksetError::Config {
        taskset: "nemo_gym".into(),
        field: "env.rows",
        value: format!("{path:?}"),
        allowed,
    };
    let file = std::fs::File::open(Path::new(path)).map_err(|e| config(e.to_string()))?;
    let (mut train, mut held_out) = (Vec::new(), Vec::new());
    for (number, line) in BufReader::new(file.take(MAX_BYTES)).lines().enumerate() {
        let line = line.map_err(|e| config(e.to_string()))?;
        if line.trim().is_empty() {
            continue;
        }
        let task = task(&line, number, seed).map_err(|message| TasksetError::Row {
            taskset: "nemo_gym".into(),
            line: number + 1,
            message,
        })?;
        if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 || (number == 1) {
            held_out.push(task)
        } else {
            train.push(task)
        }
    }
    if train.is_empty() || held_out.is_empty() {
        return Err(config("a file of 2 rows or more".into()));
    }
    Ok(SplitTasks::new("nemo_gym", train, held_out))
}

/// A task of a row. Its last message is the prompt.
fn task(line: &str, number: usize, seed: u64) -> Result<Task, String> {
    let row: Value = sinew_types::json::from_str(line).map_err(|e| e.to_string())?;
    let input = &row["responses_create_params"]["input"];
    let mut messages = match input {
        Value::String(text) => vec![Message::new(Role::User, text.clone())],
        Value::Array(items) => items.iter().map(message).collect::<Result<_, _>>()?,
        _ => return Err("responses_create_params.input is missing".into()),
    };
    let Some(last) = messages.pop().filter(|m| m.role == Role::User) else {
        return Err("the last message of responses_create_params.input is not the user's".into());
    };
    Ok(Task {
        id: TaskId::new(format!("nemo_gym/{number}")),
        kind: "nemo_gym".into(),
        preamble: messages,
        prompt: last.content.text().into_owned(),
        data: row,
        seed: mix_seed(seed, number as u64),
    })
}

/// A message of a row.
fn message(item: &Value) -> Result<Message, String> {
    let role = match item["role"].as_str() {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        other => return Err(format!("a message has the role {other:?}")),
    };
    let text = match &item["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let text = |part: &Value| match (part["type"].as_str(), part["text"].as_str()) {
                (Some("input_text" | "output_text" | "text") | None, Some(text)) => {
                    Ok(text.to_owned())
                }
                (kind, _) => Err(format!(
                    "a message has a part of type {}: models read text here; remove the row",
                    kind.unwrap_or("unknown")
                )),
            };
            let texts: Vec<String> = parts.iter().map(text).collect::<Result<_, _>>()?;
            texts.join("\n")
        }
        other => return Err(format!("a message has the content {other}")),
    };
    Ok(Message::new(role, text))
}

/// Functions of a row, as the model sees them.
pub(super) fn tools(row: &Value) -> Vec<ToolSpec> {
    let tools = row["responses_create_params"]["tools"].as_array();
    let spec = |tool: &Value| {
        Some(ToolSpec {
            name: tool["name"].as_str()?.to_owned(),
            description: tool["description"].as_str().unwrap_or_default().to_owned(),
            parameters: tool
                .get("parameters")
                .cloned()
                .unwrap_or(json!({"type": "object"})),
        })
    };
    tools.into_iter().flatten().filter_map(spec).collect()
}

/// Texts of the model and answers to it, as the `output` of a response.
#[derive(Clone, Debug, Default)]
pub(super) struct Output {
    /// Items of the Responses API: messages, calls, and results of calls.
    items: Vec<Value>,
}

impl Output {
    /// A text of the model.
    pub(super) fn said(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let id = format!("msg_{}", self.items.len());
        self.items.push(json!({
            "type": "message", "id": id, "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": text, "annotations": []}],
        }));
    }

    /// A call with its result.
    pub(super) fn called(&mut self, call: &ToolCall, result: &str) {
        self.asked(call);
        self.items.push(json!({
            "type": "function_call_output", "call_id": call.id, "output": result,
        }));
    }

    /// A call that the server answers later.
    pub(super) fn asked(&mut self, call: &ToolCall) {
        let id = format!("fc_{}", self.items.len());
        self.items.push(json!({
            "type": "function_call", "id": id, "call_id": call.id, "name": call.name,
            "arguments": call.arguments.to_string(), "status": "completed",
        }));
    }

    /// The body of `/verify` and `/step`: all of the row, and the response.
    pub(super) fn verify(&self, row: &Value) -> Value {
        let mut body = row.clone();
        body["response"] = json!({
            "id": "resp_0", "object": "response", "created_at": 0.0, "model": "sinew", "status": "completed",
            "output": self.items, "parallel_tool_calls": true, "tool_choice": "auto",
            "tools": row["responses_create_params"].get("tools").cloned().unwrap_or(json!([])),
        });
        body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_tasks_with_their_messages_and_wrong_ones_are_named() {
        let row = json!({
            "responses_create_params": {
                "input": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
                "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
            },
            "expected": 4,
        });
        let made = task(&row.to_string(), 3, 1).unwrap();
        assert_eq!((made.prompt.as_str(), made.preamble.len()), ("2+2?", 1));
        assert_eq!(made.data["expected"], 4);
        assert_eq!(tools(&made.data)[0].name, "add");
        for (input, said) in [
            (
                json!([{"role": "assistant", "content": "x"}]),
                "not the user's",
            ),
            (
                json!([{"role": "tool", "content": "x"}]),
                "the role Some(\"tool\")",
            ),
            (json!(7), "input is missing"),
            (
                json!([{"role": "user", "content": [
                    {"type": "input_text", "text": "What is this?"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
                ]}]),
                "a part of type input_image",
            ),
        ] {
            let row = json!({"responses_create_params": {"input": input}});
            let why = task(&row.to_string(), 0, 1).unwrap_err();
            assert!(why.contains(said), "{why}");
        }
    }
}
