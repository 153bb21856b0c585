//! Items of the input become messages: what a model said in one turn is one message again.

use super::{CALL, PREFIX, TEXT, THOUGHT};
use crate::dialect::fields::{Fields, Notes, wrong};
use crate::dialect::{media, openai};
use crate::error::ApiError;
use serde_json::Value;
use sinew_types::{Content, Message, Role, ToolCall};

/// A text, or items.
pub(super) fn input_messages(input: Value, notes: &Notes) -> Result<Vec<Message>, ApiError> {
    let items = match input {
        Value::String(text) => return Ok(vec![Message::new(Role::User, text)]),
        Value::Array(items) => items,
        other => return Err(wrong("input", &other, "a string or an array of items")),
    };
    let mut turns = Turns::default();
    for (i, value) in items.into_iter().enumerate() {
        turns.item(value, &format!("input[{i}]"), notes)?;
    }
    turns.flush();
    Ok(turns.messages)
}

/// An item of an answer of the same rollout.
enum Named {
    Reasoning(String),
    Text(String),
    Call(ToolCall),
}

/// The item that `id` names: its kind, the call that answered, its number among those of its
/// kind (see [`item_id`]).
fn named(id: &str, notes: &Notes) -> Option<Named> {
    let (kind, rest) = id.split_once('_')?;
    let (call, number) = rest.rsplit_once('_')?;
    let number: usize = number.parse().ok()?;
    let said = notes.answer(&format!("{PREFIX}{call}"))?;
    match kind {
        THOUGHT => said.reasoning.map(Named::Reasoning),
        // Text that was streamed in parts is one text, in the place of the first.
        TEXT if number == 0 => Some(Named::Text(said.content.text().into_owned())),
        TEXT => Some(Named::Text(String::new())),
        CALL => said.tool_calls.into_iter().nth(number).map(Named::Call),
        _ => None,
    }
}

/// Puts the items of one turn of the model together.
#[derive(Default)]
struct Turns {
    /// Complete ones.
    messages: Vec<Message>,
    /// What the model said, as far as it is known.
    turn: Option<Message>,
}

impl Turns {
    /// Ends the model's turn that is being put together.
    fn flush(&mut self) {
        self.messages.extend(self.turn.take());
    }

    /// The model's turn; a new one if `over` says that the open one cannot go on.
    fn turn(&mut self, over: impl Fn(&Message) -> bool) -> &mut Message {
        if self.turn.as_ref().is_some_and(over) {
            self.flush();
        }
        self.turn
            .get_or_insert_with(|| Message::new(Role::Assistant, ""))
    }

    /// One item; unknown types are refused by name.
    fn item(&mut self, value: Value, path: &str, notes: &Notes) -> Result<(), ApiError> {
        let mut fields = Fields::of(value, path, notes)?;
        let kind = fields.string("type")?;
        if kind.as_deref() == Some("item_reference") {
            return self.reference(fields);
        }
        let kind = kind.unwrap_or_else(|| "message".into());
        // What the server said of an item of its own.
        fields.ignore(&["id", "status"]);
        match kind.as_str() {
            "message" => self.message(&mut fields)?,
            "reasoning" => self.reasoning(&mut fields)?,
            "function_call" => {
                let call = ToolCall {
                    id: fields.required_string("call_id")?,
                    name: fields.required_string("name")?,
                    arguments: fields.arguments()?,
                };
                fields.ignore(&["namespace"]);
                self.call(call);
            }
            "function_call_output" => {
                self.flush();
                let path = fields.path("output");
                let output = fields.take("output");
                let content = parts(output, &path, &["input_text", "output_text"], notes)?;
                let mut message = Message::new(Role::Tool, content);
                message.tool_call_id = Some(fields.required_string("call_id")?);
                self.messages.push(message);
            }
            other => {
                let why = format!(
                    "items of type {other:?} are not supported: known are message, reasoning, \
                     function_call, function_call_output and item_reference"
                );
                return Err(ApiError::unsupported(&fields.path("type"), &why));
            }
        }
        fields.end()
    }

    /// A reasoning item: its text, whatever its summary says.
    fn reasoning(&mut self, fields: &mut Fields<'_>) -> Result<(), ApiError> {
        let types = ["reasoning_text", "summary_text"];
        let mut text = String::new();
        for name in ["content", "summary"] {
            let path = fields.path(name);
            let part = texts(fields.take(name), &path, &types, fields.notes())?;
            if text.is_empty() {
                text = part;
            }
        }
        fields.no_effects(&[("encrypted_content", "this server encrypts nothing")])?;
        self.add_reasoning(text);
        Ok(())
    }

    /// An item that is named, not repeated.
    fn reference(&mut self, mut fields: Fields<'_>) -> Result<(), ApiError> {
        let path = fields.path("id");
        let id = fields.required_string("id")?;
        match named(&id, fields.notes()) {
            Some(Named::Reasoning(text)) => self.add_reasoning(text),
            Some(Named::Text(text)) => self.text(text),
            Some(Named::Call(call)) => self.call(call),
            None => {
                let message = format!(
                    "{path} is {id:?}: no item of that name in this rollout; its answer was made \
                     with store: false, in another rollout, or is not kept any more: send the \
                     item itself"
                );
                return Err(ApiError {
                    code: "item_not_found",
                    ..ApiError::invalid(path, message)
                });
            }
        }
        fields.end()
    }

    fn add_reasoning(&mut self, text: String) {
        let over = |m: &Message| !m.content.is_empty() || !m.tool_calls.is_empty();
        self.turn(over).reasoning = Some(text);
    }

    /// Text of the model's. After a call it goes on in the same turn, as there is no result
    /// the call yet; an empty one says nothing more.
    fn text(&mut self, text: String) {
        let over = |m: &Message| {
            let said = !m.content.is_empty() && m.tool_calls.is_empty();
            said && !text.is_empty()
        };
        self.turn(over).content.push_text(&text);
    }

    fn call(&mut self, call: ToolCall) {
        self.turn(|_| false).tool_calls.push(call);
    }

    fn message(&mut self, fields: &mut Fields<'_>) -> Result<(), ApiError> {
        let role = fields.required_string("role")?;
        let path = fields.path("content");
        let content = fields.take("content");
        let types = ["input_text", "output_text"];
        let content = parts(content, &path, &types, fields.notes())?;
        fields.ignore(&["phase"]);
        let role = match role.as_str() {
            "system" | "developer" => Role::System,
            "user" => Role::User,
            "assistant" => {
                if let Some((part, media)) = content.first_media() {
                    let why = format!("an assistant says text alone, this is an {}", media.kind());
                    return Err(ApiError::unsupported(&format!("{path}[{part}]"), &why));
                }
                self.text(content.text().into_owned());
                return Ok(());
            }
            _ => {
                let expected = "system, developer, user or assistant";
                return Err(wrong(&fields.path("role"), &Value::String(role), expected));
            }
        };
        self.flush();
        self.messages.push(Message::new(role, content));
        Ok(())
    }
}

/// Text as a string or as a list of parts of these types.
fn texts(
    content: Option<Value>,
    path: &str,
    types: &[&str],
    notes: &Notes,
) -> Result<String, ApiError> {
    let content = parts(content, path, types, notes)?;
    match content.first_media() {
        None => Ok(content.text().into_owned()),
        Some((part, media)) => {
            let why = format!("reasoning is text, this is an {}", media.kind());
            Err(ApiError::unsupported(&format!("{path}[{part}]"), &why))
        }
    }
}

/// Text as a string, or a list of parts: text of these types, images and sounds.
fn parts(
    content: Option<Value>,
    path: &str,
    types: &[&str],
    notes: &Notes,
) -> Result<Content, ApiError> {
    openai::parts(content, path, notes, |part, kind, content| {
        match kind {
            text if types.contains(&text) => {
                content.push_text(&part.required_string("text")?);
                part.no_effects(&[("annotations", "only text is generated")])?;
                part.ignore(&["logprobs"]);
            }
            "input_image" => {
                let at = part.path("image_url");
                content.push(media::image(&part.required_string("image_url")?, &at)?);
                part.no_effects(&[("detail", "the reference is kept as it is")])?;
            }
            "input_audio" => content.push(media::audio(part)?),
            other => {
                let why = format!(
                    "parts of type {other:?} are not supported here: known are {}, input_image and \
                     input_audio",
                    types.join(", ")
                );
                return Err(ApiError::unsupported(&part.path("type"), &why));
            }
        }
        Ok(())
    })
}
