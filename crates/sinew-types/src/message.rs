//! Chat messages as every dialect of every provider can express them.

use crate::content::Content;
use serde::{Deserialize, Serialize};

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions that precede the conversation.
    System,
    /// The person or the environment.
    User,
    /// The model.
    Assistant,
    /// Result of a tool call.
    Tool,
}

/// A call of a tool that the model asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Id of the call, which the result's `tool_call_id` repeats.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Parsed arguments; a JSON object for every known format.
    pub arguments: serde_json::Value,
}

/// A tool as it is shown to the model: name, description, JSON schema of its arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolSpec {
    /// Name that calls use.
    pub name: String,
    /// Text for the model.
    pub description: String,
    /// JSON Schema of the arguments.
    pub parameters: serde_json::Value,
}

/// One chat message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// The speaker.
    pub role: Role,
    /// Serialized as a string if it is only text.
    pub content: Content,
    /// Text that the model wrote before its answer, without its marks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Calls of a turn of the model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Call that this message answers (role `tool` only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of the tool (role `tool` only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message without reasoning, calls or names.
    pub fn new(role: Role, content: impl Into<Content>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }
}
