//! Messages of Anthropic's API: blocks become messages of the common form.
//!
//! | block | of | in the common form |
//! |---|---|---|
//! | `text` | all roles | text; blocks next to each other are one message |
//! | `image`, `document` | user, results | a part, or a note where models read text |
//! | `search_result` | user, results | title, source and text; citations have no effect |
//! | `tool_reference` | results | the definition of a tool that a search found |
//! | `tool_result` | user | a message of role `tool`; `is_error` stands in front of its text |
//! | `thinking` | assistant | reasoning; the signature is for the client |
//! | `redacted_thinking` | assistant | nothing: another model's, which cannot be read |
//! | `tool_use`, `server_tool_use`, `mcp_tool_use` | assistant | a call; with `server_name` in its namespace |
//! | `*_tool_result` | assistant | a message of role `tool`, after which the model speaks anew |
//! | `tool_addition`, `tool_removal` | system | a text that defines a tool, or says that it is gone |
//!
//! Every other block is refused with its type and those that are known. `cache_control` has no effect on any.

use super::tool;
use crate::dialect::ModelRequest;
use crate::dialect::agent_tools;
use crate::dialect::fields::{Fields, Notes, wrong};
use crate::dialect::media::{Blocks, document_block, image_block};
use crate::error::ApiError;
use serde_json::{Value, json};
use sinew_types::{Content, Message, Role, ToolCall, ToolSpec};

/// Reads messages. Results of tools become separate messages, in their place.
pub(super) struct Reader<'a> {
    /// Knows the tools that results and system messages name.
    pub(super) request: &'a mut ModelRequest,
    pub(super) notes: &'a Notes,
    pub(super) messages: Vec<Message>,
}

impl Reader<'_> {
    /// One message of the list, at `path` of the request.
    ///
    /// # Errors
    /// If its role, a block or a field is not known.
    pub(super) fn message(&mut self, value: Value, path: &str) -> Result<(), ApiError> {
        let mut fields = Fields::of(value, path, self.notes)?;
        let role = fields.required_string("role")?;
        let content_path = fields.path("content");
        let content = fields.required("content")?;
        let role_path = fields.path("role");
        fields.end()?;
        match role.as_str() {
            "user" => self.user(content, &content_path),
            "assistant" => self.assistant(content, &content_path),
            "system" => self.system(content, &content_path),
            _ => {
                let expected = "user, assistant or system";
                Err(wrong(&role_path, &Value::String(role), expected))
            }
        }
    }

    /// Blocks next to each other are one message; each result of a tool is one.
    fn user(&mut self, content: Value, path: &str) -> Result<(), ApiError> {
        let blocks = match content {
            Value::String(text) => {
                self.messages.push(Message::new(Role::User, text));
                return Ok(());
            }
            Value::Array(blocks) => blocks,
            other => return Err(wrong(path, &other, "a string or an array of blocks")),
        };
        let mut said = Blocks::default();
        for (i, block) in blocks.into_iter().enumerate() {
            let mut block = Fields::of(block, &format!("{path}[{i}]"), self.notes)?;
            match block.required_string("type")?.as_str() {
                "tool_result" => {
                    self.say(Role::User, &mut said);
                    let result = tool_result(&mut block, self.request)?;
                    self.messages.push(result);
                }
                kind => self.said(&mut block, kind, &mut said)?,
            }
            block.ignore(&["cache_control"]);
            block.end()?;
        }
        self.say(Role::User, &mut said);
        Ok(())
    }

    /// A block of a message that is not the model's.
    fn said(
        &mut self,
        block: &mut Fields<'_>,
        kind: &str,
        said: &mut Blocks,
    ) -> Result<(), ApiError> {
        if said_block(block, kind, self.request, said)? {
            return Ok(());
        }
        let known = "text, image, document, search_result and tool_result";
        Err(unknown_block(block, kind, known))
    }

    /// Adds what was collected, if anything was.
    fn say(&mut self, role: Role, said: &mut Blocks) {
        let message = said.take().map(|content| Message::new(role, content));
        self.messages.extend(message);
    }

    /// An instruction in the middle of the conversation, with tools that may be called from there on.
    fn system(&mut self, content: Value, path: &str) -> Result<(), ApiError> {
        let blocks = match content {
            Value::Array(blocks) => blocks,
            content => {
                let text = texts(Some(content), path, self.notes)?;
                self.messages.push(Message::new(Role::System, text));
                return Ok(());
            }
        };
        let mut said = Blocks::default();
        for (i, block) in blocks.into_iter().enumerate() {
            let mut block = Fields::of(block, &format!("{path}[{i}]"), self.notes)?;
            match block.required_string("type")?.as_str() {
                "tool_addition" => said.text(self.addition(block.required_inner("tool")?)?),
                "tool_removal" => {
                    let mut tool = block.required_inner("tool")?;
                    let name = tool_name(&mut tool)?;
                    said.text(format!("The tool {name} cannot be called any more."));
                    tool.ignore(&["type"]);
                    tool.end()?;
                }
                kind => self.said(&mut block, kind, &mut said)?,
            }
            block.ignore(&["cache_control"]);
            block.end()?;
        }
        self.say(Role::System, &mut said);
        Ok(())
    }

    /// The definition of a tool that is added, named or given.
    fn addition(&mut self, mut tool: Fields<'_>) -> Result<String, ApiError> {
        let text = match tool.take("definition") {
            Some(definition) => {
                let path = tool.path("definition");
                let kind = definition["type"].as_str().unwrap_or("custom").to_owned();
                let before = self.request.deferred_tools.len();
                self.tool_of_message(definition, &kind, &path)?;
                agent_tools::definitions(&self.request.deferred_tools[before..])
            }
            None => {
                let name = tool_name(&mut tool)?;
                found(self.request, &name)
            }
        };
        tool.ignore(&["type"]);
        tool.end()?;
        Ok(text)
    }

    /// A tool that a message defines: it may be called only from that message on.
    ///
    /// # Errors
    /// Same as for a tool of the request.
    fn tool_of_message(
        &mut self,
        definition: Value,
        kind: &str,
        path: &str,
    ) -> Result<(), ApiError> {
        self.request.defines_tools = true;
        tool(definition, kind, path, self.notes, true, self.request)
    }

    /// A turn of the model: text, thinking and calls in their order. Calls that another server ran, with
    /// their results, end a message.
    fn assistant(&mut self, content: Value, path: &str) -> Result<(), ApiError> {
        let mut message = Message::new(Role::Assistant, "");
        let blocks = match content {
            Value::String(text) => {
                message.content = text.into();
                self.messages.push(message);
                return Ok(());
            }
            Value::Array(blocks) => blocks,
            other => return Err(wrong(path, &other, "a string or an array of blocks")),
        };
        let mut after_result = false;
        for (i, block) in blocks.into_iter().enumerate() {
            let mut block = Fields::of(block, &format!("{path}[{i}]"), self.notes)?;
            let kind = block.required_string("type")?;
            if kind.ends_with("_tool_result") {
                let result = server_result(&mut block)?;
                let spoken = std::mem::replace(&mut message, Message::new(Role::Assistant, ""));
                if !after_result || !is_empty(&spoken) {
                    self.messages.push(spoken);
                }
                self.messages.push(result);
                after_result = true;
            } else {
                assistant_block(&mut block, &kind, &mut message)?;
            }
            block.ignore(&["cache_control"]);
            block.end()?;
        }
        if !after_result || !is_empty(&message) {
            self.messages.push(message);
        }
        Ok(())
    }
}

/// Whether the message has no content.
fn is_empty(message: &Message) -> bool {
    message.content.is_empty() && message.tool_calls.is_empty() && message.reasoning.is_none()
}

/// The name of a tool that a block refers to.
fn tool_name(fields: &mut Fields<'_>) -> Result<String, ApiError> {
    match fields.string("tool_name")? {
        Some(name) => Ok(name),
        None => fields.required_string("name"),
    }
}

/// The definition of a tool that a search found.
///
/// A tool that the request does not declare can only be named: its arguments are any object.
fn found(request: &ModelRequest, name: &str) -> String {
    match request.callable().find(|t| t.name == name) {
        Some(tool) => agent_tools::definitions([tool]),
        None => agent_tools::definitions([&ToolSpec {
            name: name.to_owned(),
            description: String::new(),
            parameters: json!({"type": "object"}),
        }]),
    }
}

/// A block of text, media or sources. Whether it is one.
fn said_block(
    block: &mut Fields<'_>,
    kind: &str,
    request: &ModelRequest,
    said: &mut Blocks,
) -> Result<bool, ApiError> {
    match kind {
        "text" => said.text(text_block(block)?),
        "image" => said.media(image_block(block)?),
        "document" => said.text(document_block(block)?),
        "search_result" => {
            let path = block.path("content");
            let title = block.string("title")?.unwrap_or_default();
            let source = block.string("source")?.unwrap_or_default();
            let text = texts(block.take("content"), &path, block.notes())?;
            block.no_effects(&[("citations", "sources are not cited here")])?;
            said.text(format!("{title} ({source})\n{text}"));
        }
        "tool_reference" => said.text(found(request, &tool_name(block)?)),
        _ => return Ok(false),
    }
    Ok(true)
}

/// The result of a call that another server ran.
fn server_result(block: &mut Fields<'_>) -> Result<Message, ApiError> {
    let content = block.take("content").unwrap_or_default();
    let text = match content {
        Value::String(text) => text,
        other => readable(other).to_string(),
    };
    let mut message = Message::new(Role::Tool, text);
    message.tool_call_id = Some(block.required_string("tool_use_id")?);
    block.ignore(&["caller"]);
    Ok(message)
}

/// A result without what only its server can read.
fn readable(value: Value) -> Value {
    match value {
        Value::Object(map) => map
            .into_iter()
            .filter(|(name, _)| !name.starts_with("encrypted_"))
            .map(|(name, value)| (name, readable(value)))
            .collect(),
        Value::Array(items) => items.into_iter().map(readable).collect(),
        plain => plain,
    }
}

/// A block of the model's message.
fn assistant_block(
    block: &mut Fields<'_>,
    kind: &str,
    message: &mut Message,
) -> Result<(), ApiError> {
    match kind {
        "text" => message.content.push_text(&text_block(block)?),
        "thinking" => {
            let reasoning = block.required_string("thinking")?;
            message
                .reasoning
                .get_or_insert_default()
                .push_str(&reasoning);
            block.ignore(&["signature"]);
        }
        // Another model's, and unreadable.
        "redacted_thinking" => {
            block.no_effects(&[("data", "it cannot be read here")])?;
        }
        "tool_use" | "server_tool_use" | "mcp_tool_use" => {
            message.tool_calls.push(tool_use_block(block)?);
        }
        other => return Err(unknown_block(block, other, "text, thinking and tool_use")),
    }
    Ok(())
}

/// The result of one call, with `is_error` in front of its text.
///
/// # Errors
/// If it names no call, or a block of it is not known.
fn tool_result(block: &mut Fields<'_>, request: &ModelRequest) -> Result<Message, ApiError> {
    let path = block.path("content");
    let said = blocks(block.take("content"), &path, block.notes(), Some(request))?;
    let content = if block.bool("is_error")?.unwrap_or(false) {
        // The one place where a model can read it.

        let mut failed = Content::from("Error: ");
        said.parts()
            .iter()
            .for_each(|part| failed.push(part.clone()));
        failed
    } else {
        said
    };
    let mut message = Message::new(Role::Tool, content);
    message.tool_call_id = Some(block.required_string("tool_use_id")?);
    Ok(message)
}

/// A call that the model made.
///
/// # Errors
/// If it has no id or name, or its input is not an object.
fn tool_use_block(block: &mut Fields<'_>) -> Result<ToolCall, ApiError> {
    let path = block.path("input");
    let arguments = block.take("input").unwrap_or_else(|| json!({}));
    if !arguments.is_object() {
        return Err(wrong(&path, &arguments, "an object"));
    }
    let id = block.required_string("id")?;
    let name = block.required_string("name")?;
    let set = block.string("toolset_name")?;
    let (name, arguments) = match (set, block.string("server_name")?) {
        // A set that is no longer declared is read all the same.
        (Some(set), _) => agent_tools::of_member(set, name, arguments),
        (None, server) => (
            agent_tools::prompt_name(server.as_deref(), &name),
            arguments,
        ),
    };
    block.ignore(&["caller"]);
    Ok(ToolCall {
        id,
        name,
        arguments,
    })
}

/// The refusal of a block of another type.
fn unknown_block(block: &Fields<'_>, kind: &str, known: &str) -> ApiError {
    let why = format!("blocks of type {kind:?} are not supported here: known are {known}");
    ApiError::unsupported(&block.path("type"), &why)
}

/// The text of a block; `cache_control` and citations have no effect.
fn text_block(block: &mut Fields<'_>) -> Result<String, ApiError> {
    block.no_effects(&[("citations", "sources are not cited here")])?;
    block.required_string("text")
}

/// A string, or text blocks, one a line.
///
/// # Errors
/// If a block is not text.
pub(super) fn texts(content: Option<Value>, path: &str, notes: &Notes) -> Result<String, ApiError> {
    let content = blocks(content, path, notes, None)?;
    Ok(content.text().into_owned())
}

/// A string, or blocks of text and, with the request of a result, of media, sources and tools.
fn blocks(
    content: Option<Value>,
    path: &str,
    notes: &Notes,
    result: Option<&ModelRequest>,
) -> Result<Content, ApiError> {
    let blocks = match content {
        None => return Ok(Content::new()),
        Some(Value::String(text)) => return Ok(text.into()),
        Some(Value::Array(blocks)) => blocks,
        Some(other) => return Err(wrong(path, &other, "a string or an array of blocks")),
    };
    let mut said = Blocks::default();
    for (i, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::of(block, &format!("{path}[{i}]"), notes)?;
        let kind = block.required_string("type")?;
        let read = match result {
            Some(request) => said_block(&mut block, &kind, request, &mut said)?,
            None if kind == "text" => {
                said.text(text_block(&mut block)?);
                true
            }
            None => false,
        };
        if !read {
            let known = match result {
                Some(_) => "text, image, document, search_result and tool_reference",
                None => "text",
            };
            return Err(unknown_block(&block, &kind, known));
        }
        block.ignore(&["cache_control"]);
        block.end()?;
    }
    Ok(said.take().unwrap_or_default())
}
