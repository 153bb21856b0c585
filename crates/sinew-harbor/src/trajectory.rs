//! The Agent Trajectory Interchange Format: a conversation before the instruction is read, and that of an
//! episode is written for its verifier.
//!
//! Steps of a user and of an agent become messages, with calls and their results. Steps of a system belong to
//! the agent that wrote them, and are not read. Texts only.

use crate::error::{HarborError, SkipReason};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use sinew_types::{Message, Role, ToolCall};
use std::collections::BTreeMap;
use std::path::Path;

/// File with the conversation.
pub(crate) const TRAJECTORY_FILE: &str = "trajectory.json";

/// Versions of the format begin so.
const VERSIONS: &str = "ATIF-v1.";

/// Version of the documents that are written.
const WRITTEN: &str = "ATIF-v1.6";

/// Maximum bytes of a document that is written.
const MAX_BYTES: usize = 16 << 20;

/// Result of a call that has none.
const NO_OUTPUT: &str = "[no output recorded]";

#[derive(Deserialize)]
struct Document {
    schema_version: String,
    steps: Vec<Step>,
    continued_trajectory_ref: Option<String>,
}

#[derive(Deserialize)]
struct Step {
    step_id: usize,
    source: Source,
    message: Text,
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<Call>>,
    observation: Option<Observation>,
}

#[derive(Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Source {
    System,
    User,
    Agent,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Text {
    Plain(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

#[derive(Deserialize)]
struct Call {
    tool_call_id: String,
    function_name: String,
    arguments: serde_json::Map<String, serde_json::Value>,
}

#[derive(Deserialize)]
struct Observation {
    results: Vec<CallResult>,
}

#[derive(Deserialize)]
struct CallResult {
    source_call_id: Option<String>,
    content: Option<Text>,
    subagent_trajectory_ref: Option<IgnoredAny>,
}

/// Reads a conversation. One with a part that cannot be shown to a model as text is the inner error.
///
/// # Errors
/// If the text is not of this format.
pub(crate) fn parse(
    path: &Path,
    text: &str,
) -> Result<Result<Vec<Message>, SkipReason>, HarborError> {
    let wrong = |reason: String| HarborError::Format {
        path: path.into(),
        reason: format!("{reason}; allowed: the Agent Trajectory Interchange Format, {VERSIONS}x"),
    };
    let document: Document = serde_json::from_str(text).map_err(|e| wrong(e.to_string()))?;
    if !document.schema_version.starts_with(VERSIONS) {
        return Err(wrong(format!(
            "schema_version = {:?}",
            document.schema_version
        )));
    }
    let mut counted = document.steps.iter().zip(1..);
    if document.steps.is_empty() || !counted.all(|(step, at)| step.step_id == at) {
        let why = "step_id does not count from 1, or there are no steps";
        return Err(wrong(why.into()));
    }
    if document.continued_trajectory_ref.is_some() {
        return Ok(skipped("it continues in another file"));
    }
    let mut messages = Vec::new();
    for step in document.steps {
        if step.source != Source::Agent && step.tool_calls.is_some() {
            return Err(wrong(format!(
                "step {}: tool_calls of a step that is no agent's",
                step.step_id
            )));
        }
        if step.source == Source::System {
            continue;
        }
        match of_step(step) {
            Ok(all) => messages.extend(all),
            Err(Fault::Wrong(why)) => return Err(wrong(why)),
            Err(Fault::Unsupported(why)) => return Ok(skipped(why)),
        }
    }
    Ok(Ok(messages))
}

fn skipped<T>(why: &str) -> Result<T, SkipReason> {
    Err(SkipReason::Trajectory { why: why.into() })
}

/// Reason why a step has no messages.
enum Fault {
    Wrong(String),
    Unsupported(&'static str),
}

/// Messages of a step: its text with its calls, then a result for each call, then other results.
fn of_step(step: Step) -> Result<Vec<Message>, Fault> {
    let role = match step.source {
        Source::Agent => Role::Assistant,
        Source::User | Source::System => Role::User,
    };
    let mut said = Message::new(role, plain(step.message)?);
    said.reasoning = step.reasoning_content.filter(|text| !text.is_empty());
    let mut results = BTreeMap::new();
    let mut others = Vec::new();
    for result in step.observation.into_iter().flat_map(|o| o.results) {
        if result.subagent_trajectory_ref.is_some() {
            return Err(Fault::Unsupported("a result is another agent's trajectory"));
        }
        let text = result.content.map(plain).transpose()?.unwrap_or_default();
        match result.source_call_id {
            Some(id) => {
                let all: &mut Vec<String> = results.entry(id).or_default();
                all.push(text);
            }
            None => others.push(Message::new(Role::User, text)),
        }
    }
    let mut answers = Vec::new();
    for call in step.tool_calls.into_iter().flatten() {
        let found = results.remove(&call.tool_call_id);
        let text = found.map_or_else(|| NO_OUTPUT.to_owned(), |all| all.join("\n"));
        let mut answer = Message::new(Role::Tool, text);
        answer.tool_call_id = Some(call.tool_call_id.clone());
        answer.name = Some(call.function_name.clone());
        answers.push(answer);
        said.tool_calls.push(ToolCall {
            id: call.tool_call_id,
            name: call.function_name,
            arguments: call.arguments.into(),
        });
    }
    if let Some(id) = results.keys().next() {
        let why = format!("step {}: a result of the unknown call {id:?}", step.step_id);
        return Err(Fault::Wrong(why));
    }
    Ok([vec![said], answers, others].concat())
}

/// A text, or the parts of one.
fn plain(text: Text) -> Result<String, Fault> {
    let parts = match text {
        Text::Plain(text) => return Ok(text),
        Text::Parts(parts) => parts,
    };
    let mut whole = String::new();
    for part in parts {
        match (part.kind.as_str(), part.text) {
            ("text", Some(text)) => whole.push_str(&text),
            ("text", None) => return Err(Fault::Wrong("a part of type text has no text".into())),
            _ => return Err(Fault::Unsupported("it has a part that is no text")),
        }
    }
    Ok(whole)
}

/// The document of a conversation: each message is a step, and results belong to the step of their calls.
/// `None`: it has no message, or is too long.
pub(crate) fn document(messages: &[Message]) -> Option<Vec<u8>> {
    let mut steps: Vec<Value> = Vec::new();
    for message in messages {
        let text = message.content.text();
        if message.role == Role::Tool
            && let Some(step) = steps.last_mut().filter(|step| has_call(step, message))
        {
            let result = json!({ "source_call_id": message.tool_call_id, "content": text });
            match step["observation"]["results"].as_array_mut() {
                Some(results) => results.push(result),
                None => step["observation"] = json!({ "results": [result] }),
            }
            continue;
        }
        let source = match message.role {
            Role::System => "system",
            Role::Assistant => "agent",
            Role::User | Role::Tool => "user",
        };
        let mut step = json!({ "step_id": steps.len() + 1, "source": source, "message": text });
        if let Some(reasoning) = &message.reasoning {
            step["reasoning_content"] = json!(reasoning);
        }
        if !message.tool_calls.is_empty() {
            step["tool_calls"] = message.tool_calls.iter().map(call).collect();
        }
        steps.push(step);
    }
    let agent = json!({ "name": "sinew", "version": env!("CARGO_PKG_VERSION") });
    let whole = json!({ "schema_version": WRITTEN, "agent": agent, "steps": steps });
    let bytes = whole.to_string().into_bytes();
    (!messages.is_empty() && bytes.len() <= MAX_BYTES).then_some(bytes)
}

/// Whether a step made the call that a message answers.
fn has_call(step: &Value, answer: &Message) -> bool {
    let mut calls = step["tool_calls"].as_array().into_iter().flatten();
    calls.any(|call| call["tool_call_id"].as_str() == answer.tool_call_id.as_deref())
}

/// A call of a step.
fn call(call: &ToolCall) -> Value {
    let arguments = match &call.arguments {
        Value::Object(_) => call.arguments.clone(),
        other => json!({ "value": other }),
    };
    json!({ "tool_call_id": call.id, "function_name": call.name, "arguments": arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(document: &serde_json::Value) -> Result<Result<Vec<Message>, SkipReason>, HarborError> {
        parse(Path::new("trajectory.json"), &document.to_string())
    }

    fn with(steps: &serde_json::Value) -> serde_json::Value {
        json!({ "schema_version": "ATIF-v1.6", "agent": { "name": "a", "version": "1" }, "steps": steps })
    }

    #[test]
    fn steps_become_messages_with_calls_and_results() {
        let steps = json!([
            { "step_id": 1, "source": "system", "message": "You are a." },
            { "step_id": 2, "source": "user", "message": [{ "type": "text", "text": "Look." }] },
            { "step_id": 3, "source": "agent", "message": "I look.", "reasoning_content": "hm", "model_name": "m",
              "tool_calls": [
                { "tool_call_id": "1", "function_name": "shell", "arguments": { "command": "ls" } },
                { "tool_call_id": "2", "function_name": "shell", "arguments": {} }],
              "observation": { "results": [
                { "source_call_id": "1", "content": "a.txt" }, { "content": "5 s left" }] } },
        ]);
        let messages = of(&with(&steps)).unwrap().unwrap();
        let seen: Vec<(Role, String)> = messages
            .iter()
            .map(|m| (m.role, m.content.text().into_owned()))
            .collect();
        let text = |role, text: &str| (role, text.to_owned());
        assert_eq!(
            seen,
            [
                text(Role::User, "Look."),
                text(Role::Assistant, "I look."),
                text(Role::Tool, "a.txt"),
                text(Role::Tool, NO_OUTPUT),
                text(Role::User, "5 s left"),
            ]
        );
        let said = &messages[1];
        assert_eq!(
            (said.reasoning.as_deref(), said.tool_calls.len()),
            (Some("hm"), 2)
        );
        assert_eq!(said.tool_calls[0].arguments, json!({ "command": "ls" }));
        assert_eq!(messages[2].tool_call_id.as_deref(), Some("1"));
    }

    #[test]
    fn what_is_written_is_read_again() {
        let mut said = Message::new(Role::Assistant, "I look.");
        said.reasoning = Some("hm".into());
        said.tool_calls = ["1", "2"]
            .map(|id| ToolCall {
                id: id.into(),
                name: "shell".into(),
                arguments: json!({ "command": "ls" }),
            })
            .into();
        let answer = |id: &str, text: &str| {
            let mut answer = Message::new(Role::Tool, text);
            answer.tool_call_id = Some(id.into());
            answer.name = Some("shell".into());
            answer
        };
        let messages = [
            Message::new(Role::User, "Look."),
            said,
            answer("1", "a.txt"),
            answer("2", "b.txt"),
            Message::new(Role::User, "More."),
            Message::new(Role::Assistant, "Done."),
        ];
        let written = |messages: &[Message]| {
            let bytes = document(messages).unwrap();
            serde_json::from_slice::<Value>(&bytes).unwrap()
        };
        let whole = written(&messages);
        assert_eq!(whole["steps"].as_array().unwrap().len(), 4);
        assert_eq!(of(&whole).unwrap().unwrap(), messages);
        let system = Message::new(Role::System, "You are.");
        let stray = [&[system, answer("9", "late")][..], &messages[..]].concat();
        let whole = written(&stray);
        assert_eq!(whole["steps"][0]["source"], "system");
        assert_eq!(whole["steps"][1]["source"], "user");
        assert_eq!(of(&whole).unwrap().unwrap()[1..], messages);
        assert_eq!(document(&[]), None);
        let long = Message::new(Role::User, "x".repeat(MAX_BYTES));
        assert_eq!(document(&[long]), None);
    }

    #[test]
    fn what_is_no_text_is_a_reason_and_what_is_no_conversation_an_error() {
        let image = json!([{ "step_id": 1, "source": "user", "message": [
            { "type": "image", "source": { "media_type": "image/png", "path": "a.png" } }] }]);
        let e = of(&with(&image)).unwrap().unwrap_err();
        assert!(matches!(e, SkipReason::Trajectory { .. }), "{e}");
        assert!(e.to_string().contains("no text"), "{e}");
        let user = |id: u32| json!([{ "step_id": id, "source": "user", "message": "x" }]);
        let mut continued = with(&user(1));
        continued["continued_trajectory_ref"] = json!("b.json");
        assert!(of(&continued).unwrap().is_err());
        let stray = json!([{ "step_id": 1, "source": "agent", "message": "x", "observation": { "results": [
            { "source_call_id": "9", "content": "y" }] } }]);
        let by_user = json!([{ "step_id": 1, "source": "user", "message": "x", "tool_calls": [] }]);
        for (wrong, why) in [
            (json!({ "steps": [] }), "schema_version"),
            (
                json!({ "schema_version": "2", "steps": user(1) }),
                "schema_version = \"2\"",
            ),
            (with(&json!([])), "no steps"),
            (with(&user(2)), "step_id"),
            (with(&stray), "unknown call \"9\""),
            (with(&by_user), "tool_calls"),
        ] {
            let e = of(&wrong).unwrap_err().to_string();
            assert!(e.contains(why) && e.contains("allowed"), "{e}");
        }
    }
}
