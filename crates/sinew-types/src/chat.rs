//! Messages and tools as the chat-completions protocol writes them: the one form in which conversations leave
//! the system, in answers and in exports. `sinew_dialect::conversation` reads it.

use crate::content::{Content, MediaSource, Part};
use crate::message::{Message, Role, ToolCall, ToolSpec};
use serde_json::{Map, Value, json};

impl Role {
    /// Name in the protocol.
    pub const fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

impl ToolCall {
    /// The call with its arguments as JSON text.
    pub fn to_chat(&self) -> Value {
        json!({
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments.to_string()},
        })
    }
}

impl ToolSpec {
    /// The tool as a function.
    pub fn to_chat(&self) -> Value {
        json!({
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        })
    }
}

impl Message {
    /// The message. Images and sounds are references: those that the protocol has no form for are written as
    /// in traces.
    pub fn to_chat(&self) -> Value {
        let mut out = Map::new();
        out.insert("role".into(), json!(self.role.name()));
        out.insert("content".into(), self.chat_content());
        if let Some(reasoning) = &self.reasoning {
            out.insert("reasoning_content".into(), json!(reasoning));
        }
        if !self.tool_calls.is_empty() {
            out.insert(
                "tool_calls".into(),
                self.tool_calls.iter().map(ToolCall::to_chat).collect(),
            );
        }
        if let Some(id) = &self.tool_call_id {
            out.insert("tool_call_id".into(), json!(id));
        }
        if let Some(name) = &self.name {
            out.insert("name".into(), json!(name));
        }
        out.into()
    }

    /// The content: null if there are only calls, a text, or a list of parts.
    fn chat_content(&self) -> Value {
        match self.content.as_text() {
            Some("") if !self.tool_calls.is_empty() => Value::Null,
            Some(text) => text.into(),
            None => parts(&self.content),
        }
    }
}

fn parts(content: &Content) -> Value {
    let part = |part: &Part| match part {
        Part::Image(media) if media.media_type.is_none() => match &media.source {
            MediaSource::Url(url) => json!({"type": "image_url", "image_url": {"url": url}}),
            MediaSource::Blake3(_) => json!(part),
        },
        part => json!(part),
    };
    content.parts().iter().map(part).collect()
}
