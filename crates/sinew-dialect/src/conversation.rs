//! Conversations outside of requests: in data files, prompts of tasks, environments and exports. They are
//! read as `/v1/chat/completions` reads its messages and tools, and are written by
//! [`sinew_types::Message::to_chat`].
//!
//! Unlike requests, these may have what data sets of the field contain: calls without ids, calls as templates
//! and traces write them, arguments as an object, tools without their frame, and the `weight` of a turn.
//! Unknown fields are counted by name, for a message to the user.

use crate::dialect::chat::{Source, message};
use crate::dialect::fields::{Fields, Notes, wrong};
use crate::error::ApiError;
use crate::ignored::Ignored;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use sinew_types::{Message, Role, ToolSpec};

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Said {
    pub message: Message,
    /// Whether it may be trained: `weight` is not 0.
    pub trained: bool,
}

/// Reads conversations, and counts unknown fields.
#[derive(Debug)]
pub struct Conversations {
    notes: Notes,
}

impl Default for Conversations {
    fn default() -> Self {
        Self {
            notes: Notes::new(false),
        }
    }
}

impl Conversations {
    /// Messages in their order: a list, or JSON text with one. `path` names the list in errors.
    ///
    /// # Errors
    /// Naming the field that is wrong.
    pub fn messages(&self, value: &Value, path: &str) -> Result<Vec<Said>, ApiError> {
        let list = listed(value, path, "a list of messages")?;
        let mut said = Vec::with_capacity(list.len());
        for (i, value) in list.into_iter().enumerate() {
            let (message, trained) =
                message(value, &format!("{path}[{i}]"), &self.notes, Source::Data)?;
            said.push(Said { message, trained });
        }
        name_calls(&mut said);
        Ok(said)
    }

    /// Reads messages like [`Conversations::messages`], and accepts one plain text as well, which becomes one
    /// message of `role`.
    ///
    /// # Errors
    /// Same as [`Conversations::messages`].
    pub fn texts(&self, value: &Value, path: &str, role: Role) -> Result<Vec<Said>, ApiError> {
        match value {
            Value::String(text) if !is_list(text) => Ok(vec![Said {
                message: Message::new(role, text.clone()),
                trained: true,
            }]),
            _ => self.messages(value, path),
        }
    }

    /// Reads tools: a list, or JSON text with a list. Each is `{"type": "function", "function": ...}`, or
    /// only the inner object.
    ///
    /// # Errors
    /// Naming the field that is wrong.
    pub fn tools(&self, value: &Value, path: &str) -> Result<Vec<ToolSpec>, ApiError> {
        let list = listed(value, path, "a list of tools")?;
        let tools = list.into_iter().enumerate();
        tools
            .map(|(i, value)| self.tool(value, &format!("{path}[{i}]")))
            .collect()
    }

    fn tool(&self, value: Value, path: &str) -> Result<ToolSpec, ApiError> {
        let mut fields = Fields::of(value, path, &self.notes)?;
        fields.only("type", &[json!("function")], "only functions are known")?;
        let mut function = match fields.inner("function")? {
            Some(function) => {
                fields.end()?;
                function
            }
            None => fields,
        };
        let given = ["parameters", "input_schema"].into_iter();
        let given = given.map(|name| function.object(name));
        let given = given.collect::<Result<Vec<_>, _>>()?;
        let parameters = given.into_iter().flatten().next();
        let spec = ToolSpec {
            name: function.required_string("name")?,
            description: function.string("description")?.unwrap_or_default(),
            parameters: parameters.unwrap_or_else(|| json!({"type": "object", "properties": {}})),
        };
        function.no_effects(&[("strict", "turns of data are not sampled")])?;
        function.end()?;
        Ok(spec)
    }

    /// Fields that were read and are not known, with their counts.
    pub fn unknown(&self) -> Ignored {
        self.notes.take()
    }
}

/// Reason why a conversation is not one of a protocol with fixed fields.
#[derive(Debug, thiserror::Error)]
pub enum StrictError {
    #[error(transparent)]
    Refused(#[from] ApiError),
    #[error("{0} is not known: remove it")]
    Unknown(String),
}

/// Reads with `read` and refuses fields that are not known. Protocols with fixed fields use it.
///
/// # Errors
/// The refusal of `read`, or the name of a field that is not known.
pub fn strictly<T>(
    read: impl FnOnce(&Conversations) -> Result<T, ApiError>,
) -> Result<T, StrictError> {
    let reader = Conversations::default();
    let value = read(&reader)?;
    match reader.unknown().into_keys().next() {
        None => Ok(value),
        Some(field) => Err(StrictError::Unknown(field)),
    }
}

/// Messages of a protocol, for `deserialize_with`.
///
/// # Errors
/// Same as [`strictly`].
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Message>, D::Error> {
    Ok(deserialize_some(from)?.unwrap_or_default())
}

/// Reads like [`deserialize`]; null gives `None`.
///
/// # Errors
/// Same as [`strictly`].
pub fn deserialize_some<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<Vec<Message>>, D::Error> {
    let Some(value) = Option::<Value>::deserialize(from)? else {
        return Ok(None);
    };
    let said = strictly(|reader| reader.messages(&value, "messages"));
    let said = said.map_err(serde::de::Error::custom)?;
    Ok(Some(said.into_iter().map(|s| s.message).collect()))
}

/// Whether a text is a list of messages as JSON.
fn is_list(text: &str) -> bool {
    let items = sinew_types::json::from_str::<Vec<Value>>(text).unwrap_or_default();
    !items.is_empty() && items.iter().all(|item| item.get("role").is_some())
}

/// The items of a list, or of JSON text with one, as Parquet files have it.
fn listed(value: &Value, path: &str, expected: &str) -> Result<Vec<Value>, ApiError> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(items) => Ok(items.clone()),
        Value::String(text) => match sinew_types::json::from_str(text) {
            Ok(Value::Array(items)) => Ok(items),
            _ => Err(wrong(
                path,
                value,
                &format!("{expected}, or JSON text with one"),
            )),
        },
        _ => Err(wrong(path, value, expected)),
    }
}

/// Names calls without an id by their place, and the answers to them in their order.
fn name_calls(said: &mut [Said]) {
    let mut open: std::collections::VecDeque<(String, String)> = Default::default();
    let mut count = 0;
    for Said { message, .. } in said {
        for call in &mut message.tool_calls {
            if call.id.is_empty() {
                call.id = format!("call-{count}");
            }
            count += 1;
            open.push_back((call.id.clone(), call.name.clone()));
        }
        if message.role != Role::Tool {
            continue;
        }
        match &message.tool_call_id {
            Some(id) => open.retain(|(known, _)| known != id),
            None => {
                let answered = open.pop_front();
                message.tool_call_id = answered.as_ref().map(|(id, _)| id.clone());
                message.name = message.name.take().or(answered.map(|(_, name)| name));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{Content, Media, MediaSource, Part, ToolCall};

    fn read(value: &Value) -> Result<(Vec<Said>, Ignored), String> {
        let all = Conversations::default();
        let said = all.messages(value, "messages").map_err(|e| e.message)?;
        Ok((said, all.unknown()))
    }

    #[test]
    fn messages_are_read_as_the_gateway_reads_them() {
        let (said, unknown) = read(&json!([
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "2 + 2?", "mood": "good"},
            {"role": "assistant", "content": null, "reasoning_content": "add", "weight": 0, "refusal": null,
             "tool_calls": [{"id": "c", "type": "function",
                             "function": {"name": "add", "arguments": "{\"a\": 18446744073709551617}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "4"},
            {"role": "assistant", "content": "4", "weight": 1},
        ]))
        .unwrap();
        assert_eq!(said[0].message, Message::new(Role::System, "Be brief."));
        let turn = &said[2];
        assert!(!turn.trained && said[4].trained && said[1].trained);
        assert_eq!(turn.message.reasoning.as_deref(), Some("add"));
        assert!(turn.message.content.is_empty());
        assert_eq!(
            turn.message.tool_calls[0].arguments,
            json!({"a": "18446744073709551617"})
        );
        assert_eq!(
            unknown.into_iter().collect::<Vec<_>>(),
            [("messages[].mood".to_owned(), 1)]
        );
    }

    #[test]
    fn calls_of_data_sets_need_no_ids_and_no_frame() {
        let (said, unknown) = read(&json!([
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [
                {"name": "a", "arguments": {"k": 1}},
                {"type": "function", "function": {"name": "b", "arguments": {}}},
            ]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "name": "b", "content": "2"},
            {"role": "assistant", "reasoning": "so", "content": "3"},
        ]))
        .unwrap();
        let calls = &said[1].message.tool_calls;
        assert_eq!(
            (calls[0].id.as_str(), calls[1].id.as_str()),
            ("call-0", "call-1")
        );
        assert_eq!(calls[0].arguments, json!({"k": 1}));
        let answers = [&said[2].message, &said[3].message];
        let answers = answers.map(|m| {
            (
                m.tool_call_id.as_deref().unwrap(),
                m.name.as_deref().unwrap(),
            )
        });
        assert_eq!(answers, [("call-0", "a"), ("call-1", "b")]);
        assert_eq!(said[4].message.reasoning.as_deref(), Some("so"));
        assert!(unknown.is_empty());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (message, needle) in [
            (
                json!({"role": "narrator", "content": "x"}),
                "messages[0].role",
            ),
            (json!({"content": "x"}), "messages[0].role is missing"),
            (json!({"role": "user", "content": 3}), "messages[0].content"),
            (
                json!({"role": "assistant", "content": "x", "weight": 0.5}),
                "messages[0].weight",
            ),
            (
                json!({"role": "assistant", "tool_calls": [{"id": "c"}]}),
                "tool_calls[0].name is missing",
            ),
            (
                json!({"role": "assistant", "function_call": {"name": "f"}}),
                "use tool_calls",
            ),
            (
                json!({"role": "user", "content": [{"type": "smell"}]}),
                "smell",
            ),
            (json!("hello"), "messages[0]"),
        ] {
            let error = read(&json!([message])).unwrap_err();
            assert!(error.contains(needle), "{message}: {error}");
        }
        assert!(
            read(&json!({"role": "user"}))
                .unwrap_err()
                .contains("a list of messages")
        );
    }

    #[test]
    fn tools_are_read_with_and_without_their_frame() {
        let all = Conversations::default();
        let spec = ToolSpec {
            name: "f".into(),
            description: "d".into(),
            parameters: json!({"type": "dict", "properties": {"x": {"type": "int"}}}),
        };
        let plain = json!({"name": "f", "description": "d", "parameters": spec.parameters});
        let schema = json!({"name": "f", "description": "d", "input_schema": spec.parameters, "strict": true});
        let text = json!([spec.to_chat()]).to_string();
        for value in [
            json!([plain]),
            json!([schema]),
            json!([spec.to_chat()]),
            json!(text),
        ] {
            assert_eq!(
                all.tools(&value, "tools").unwrap(),
                std::slice::from_ref(&spec),
                "{value}"
            );
        }
        let error = all
            .tools(&json!([{"type": "web_search"}]), "tools")
            .unwrap_err();
        assert!(error.message.contains("web_search"), "{}", error.message);
    }

    #[test]
    fn what_is_written_reads_back() {
        let mut turn = Message::new(Role::Assistant, "");
        turn.reasoning = Some("why".into());
        turn.tool_calls = vec![ToolCall {
            id: "c".into(),
            name: "f".into(),
            arguments: json!({"x": [1, null, "a\"b"]}),
        }];
        let mut answer = Message::new(Role::Tool, "r");
        answer.tool_call_id = Some("c".into());
        answer.name = Some("f".into());
        let image = |source, media_type: Option<&str>| {
            Part::Image(Media {
                source,
                media_type: media_type.map(str::to_owned),
            })
        };
        let parts = [
            Part::Text { text: "see".into() },
            image(MediaSource::Url("https://example.org/a.png".into()), None),
            image(MediaSource::Blake3("ab".into()), Some("image/png")),
        ];
        let seen = Message::new(Role::User, parts.into_iter().collect::<Content>());
        let messages = vec![Message::new(Role::System, "s"), seen, turn, answer];
        let written: Value = messages.iter().map(Message::to_chat).collect();
        let all = Conversations::default();
        let text = json!(written.to_string());
        for value in [written, text] {
            let said = all.texts(&value, "messages", Role::User).unwrap();
            let said: Vec<Message> = said.into_iter().map(|s| s.message).collect();
            assert_eq!(said, messages);
        }
        assert!(all.unknown().is_empty());
        let plain = all
            .texts(&json!("[{\"a\": 1}]"), "prompt", Role::User)
            .unwrap();
        assert_eq!(plain[0].message, Message::new(Role::User, "[{\"a\": 1}]"));
    }
}
