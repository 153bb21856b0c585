//! Data of an episode that a judge sees: one JSON object.

use serde_json::{Map, Value, json};
use sinew_env::{RewardSample, Unscored};
use sinew_types::{Message, Role};

/// Maximum bytes of the data of one question: what is longer is not judged.
pub const MAX_DATA_BYTES: usize = 1 << 20;

/// The part of an episode that a judge sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// The prompt and the model's last turn.
    Last,
    /// All messages.
    Dialogue,
    /// The prompt, tool calls with their results, and the last turn.
    Calls,
}

impl View {
    /// The data of a sample: `columns` of the task, then what the view shows.
    ///
    /// # Errors
    /// If the task has no such column, or the data is longer than [`MAX_DATA_BYTES`].
    pub fn of(self, sample: &RewardSample, columns: &[String]) -> Result<Value, Unscored> {
        let mut data = Map::new();
        for column in columns {
            let Some(value) = sample.task.data.get(column) else {
                return Err(Unscored::new(format!("the task has no column {column}")));
            };
            data.insert(column.clone(), value.clone());
        }
        let said = |m: &Message| m.role == Role::Assistant;
        let prompt = sample.messages.iter().take_while(|m| !said(m));
        let (own, rest) = sample.messages.split_at(prompt.count());
        match self {
            Self::Dialogue => {
                data.insert("messages".into(), texts(&sample.messages, true));
            }
            Self::Last => {
                data.insert("prompt".into(), texts(own, false));
            }
            Self::Calls => {
                data.insert("prompt".into(), texts(own, false));
                data.insert("calls".into(), calls(rest));
            }
        }
        if self != Self::Dialogue {
            data.insert("output".into(), json!(sample.output));
        }
        let data = Value::Object(data);
        let bytes = data.to_string().len();
        if bytes <= MAX_DATA_BYTES {
            Ok(data)
        } else {
            Err(Unscored::new(format!(
                "the judged data has {bytes} bytes; at most {MAX_DATA_BYTES} are judged"
            )))
        }
    }
}

/// Messages with their roles, and the tool calls of turns if requested.
fn texts(messages: &[Message], with_calls: bool) -> Value {
    let shown = messages.iter().map(|m| {
        let mut shown = json!({"role": m.role, "text": m.content.text()});
        if with_calls && !m.tool_calls.is_empty() {
            let calls = m.tool_calls.iter();
            let calls = calls.map(|c| json!({"tool": c.name, "arguments": c.arguments}));
            shown["calls"] = calls.collect();
        }
        shown
    });
    shown.collect()
}

/// Calls, each with the text that answers it.
fn calls(messages: &[Message]) -> Value {
    let of_tools: Vec<&Message> = messages.iter().filter(|m| m.role == Role::Tool).collect();
    let calls = messages.iter().flat_map(|m| &m.tool_calls).map(|call| {
        let answers = |m: &&&Message| m.tool_call_id.as_deref() == Some(call.id.as_str());
        let result = of_tools.iter().find(answers).map(|m| m.content.text());
        json!({"tool": call.name, "arguments": call.arguments, "result": result})
    });
    calls.collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use sinew_types::{Task, TaskId, ToolCall};

    /// A sample with one tool call.
    pub(crate) fn sample(output: &str) -> RewardSample {
        let call = ToolCall {
            id: "c1".into(),
            name: "add".into(),
            arguments: json!({"a": 1}),
        };
        let mut asked = Message::new(Role::Assistant, String::new());
        asked.tool_calls.push(call.clone());
        let mut result = Message::new(Role::Tool, "2".to_owned());
        result.tool_call_id = Some("c1".into());
        let task = Task {
            id: TaskId::new("t"),
            kind: "k".into(),
            preamble: Vec::new(),
            prompt: "1 + 1?".into(),
            data: json!({"answer": "2", "level": 3}),
            seed: 0,
        };
        RewardSample {
            messages: vec![
                Message::new(Role::User, "1 + 1?".to_owned()),
                asked,
                result,
                Message::new(Role::Assistant, output.to_owned()),
            ],
            calls: vec![call],
            ..RewardSample::new(task, output)
        }
    }

    #[test]
    fn views_show_what_they_say() {
        let sample = sample("two");
        let view = |view: View| view.of(&sample, &["answer".into()]).unwrap();
        let prompt = json!([{"role": "user", "text": "1 + 1?"}]);
        let last = json!({"answer": "2", "prompt": prompt, "output": "two"});
        assert_eq!(view(View::Last), last);
        let calls = json!([{"tool": "add", "arguments": {"a": 1}, "result": "2"}]);
        assert_eq!(view(View::Calls)["calls"], calls);
        let all = view(View::Dialogue);
        assert_eq!(all["messages"][1]["calls"][0]["tool"], "add");
        assert_eq!(all["messages"][3]["text"], "two");
        assert!(all.get("output").is_none());
    }

    #[test]
    fn what_cannot_be_shown_has_no_score() {
        let error = View::Last.of(&sample("x"), &["source".into()]).unwrap_err();
        assert!(error.reason.contains("no column source"), "{error}");
        let error = View::Last.of(&sample(&"x".repeat(MAX_DATA_BYTES)), &[]);
        assert!(error.unwrap_err().reason.contains("bytes"));
    }
}
