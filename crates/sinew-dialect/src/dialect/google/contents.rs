//! Contents of Google's API become messages of the common form.
//!
//! | part | of | in the common form |
//! |---|---|---|
//! | `text` | user | text; parts next to each other are lines of one message |
//! | `text` | model | text; parts follow each other without a separator, as the chunks of a stream do |
//! | `text` with `thought` | model | reasoning |
//! | `inlineData`, `fileData` | user | a part, or a note where models read text |
//! | `functionResponse` | user | a message of role `tool` |
//! | `functionCall` | model | a call |
//! | `executableCode`, `codeExecutionResult` | model | a call that another server ran, and its result |
//!
//! Contents of the model that follow each other are one turn: clients keep each chunk of a stream apart.
//! `thoughtSignature` gives back reasoning whose parts a client dropped ([`super::signature`]).

use super::{inner, signature};
use crate::dialect::fields::{Fields, Notes, wrong};
use crate::dialect::media::{self, Blocks, standard_base64};
use crate::error::ApiError;
use serde_json::{Value, json};
use sinew_types::{Message, Part, Role, ToolCall};

/// Name of the tool that Google's servers run as `codeExecution`.
const CODE: &str = "code_execution";

/// A list, or its only item: Google's servers read both.
pub(super) fn listed(value: Value, path: &str) -> Result<Vec<Value>, ApiError> {
    match value {
        Value::Array(items) => Ok(items),
        Value::Object(_) => Ok(vec![value]),
        other => Err(wrong(path, &other, "an array of objects")),
    }
}

/// The text of `systemInstruction`.
pub(super) fn instruction(value: Value, path: &str, notes: &Notes) -> Result<String, ApiError> {
    let mut fields = Fields::of(value, path, notes)?.in_camel_case();
    fields.ignore(&["role"]);
    let at = fields.path("parts");
    let parts = listed(fields.required("parts")?, &at)?;
    fields.end()?;
    let mut texts = Vec::new();
    for (i, part) in parts.into_iter().enumerate() {
        let mut part = Fields::of(part, &format!("{at}[{i}]"), notes)?.in_camel_case();
        texts.push(part.required_string("text")?);
        end(part)?;
    }
    Ok(texts.join("\n"))
}

/// The messages of `contents`.
pub(super) fn messages(value: Value, notes: &Notes) -> Result<Vec<Message>, ApiError> {
    let mut reader = Reader {
        notes,
        messages: Vec::new(),
        turn: None,
        after_result: false,
    };
    for (i, content) in listed(value, "contents")?.into_iter().enumerate() {
        reader.content(content, &format!("contents[{i}]"))?;
    }
    reader.flush();
    Ok(reader.messages)
}

/// A turn of the model that is being put together.
struct Turn {
    message: Message,
    /// Reasoning in its signatures.
    signed: Option<String>,
}

/// Puts contents together.
struct Reader<'n> {
    notes: &'n Notes,
    /// Complete ones.
    messages: Vec<Message>,
    turn: Option<Turn>,
    /// The open turn follows the result of a call that another server ran.
    after_result: bool,
}

impl Reader<'_> {
    /// One content, at `path` of the request.
    ///
    /// # Errors
    /// If its role, a part or a field is not known.
    fn content(&mut self, value: Value, path: &str) -> Result<(), ApiError> {
        let mut fields = Fields::of(value, path, self.notes)?.in_camel_case();
        let role_path = fields.path("role");
        let role = fields.string("role")?.unwrap_or_default();
        let at = fields.path("parts");
        let parts = listed(fields.required("parts")?, &at)?;
        fields.end()?;
        match role.as_str() {
            "model" => self.model(parts, &at),
            "" | "user" | "function" => self.user(parts, &at),
            _ => Err(wrong(&role_path, &Value::String(role), "user or model")),
        }
    }

    /// Parts next to each other are one message; each result of a function is one.
    fn user(&mut self, parts: Vec<Value>, path: &str) -> Result<(), ApiError> {
        self.flush();
        self.after_result = false;
        let mut said = Blocks::default();
        for (i, part) in parts.into_iter().enumerate() {
            let mut part = Fields::of(part, &format!("{path}[{i}]"), self.notes)?.in_camel_case();
            match inner(&mut part, "functionResponse")? {
                Some(response) => {
                    self.say(&mut said);
                    self.messages.push(function_response(response)?);
                }
                None => said_part(&mut part, &mut said)?,
            }
            end(part)?;
        }
        self.say(&mut said);
        Ok(())
    }

    /// Adds what was collected, if anything was.
    fn say(&mut self, said: &mut Blocks) {
        let message = said.take().map(|content| Message::new(Role::User, content));
        self.messages.extend(message);
    }

    /// A content of the model, or a part of its turn.
    fn model(&mut self, parts: Vec<Value>, path: &str) -> Result<(), ApiError> {
        self.turn();
        for (i, part) in parts.into_iter().enumerate() {
            let mut part = Fields::of(part, &format!("{path}[{i}]"), self.notes)?.in_camel_case();
            self.spoken(&mut part)?;
            end(part)?;
        }
        Ok(())
    }

    /// The open turn, or a new one.
    fn turn(&mut self) -> &mut Turn {
        self.turn.get_or_insert_with(|| Turn {
            message: Message::new(Role::Assistant, ""),
            signed: None,
        })
    }

    /// A part of the model's turn.
    fn spoken(&mut self, part: &mut Fields<'_>) -> Result<(), ApiError> {
        let thought = part.bool("thought")?.unwrap_or(false);
        let signature = part.string("thoughtSignature")?;
        let turn = self.turn();
        if let Some(reasoning) = signature.as_deref().and_then(signature::read) {
            turn.signed.get_or_insert_default().push_str(&reasoning);
        }
        let message = &mut turn.message;
        if let Some(call) = inner(part, "functionCall")? {
            message.tool_calls.push(function_call(call)?);
        } else if let Some(code) = inner(part, "executableCode")? {
            message.tool_calls.push(executable_code(code)?);
        } else if let Some(result) = inner(part, "codeExecutionResult")? {
            let result = code_result(result)?;
            self.flush();
            self.messages.push(result);
            self.after_result = true;
        } else if let Some(text) = part.string("text")? {
            if thought {
                message.reasoning.get_or_insert_default().push_str(&text);
            } else {
                message.content.push_text(&text);
            }
        } else if signature.is_none() {
            let known = "text, functionCall, executableCode and codeExecutionResult";
            return Err(unknown_part(part, known));
        }
        Ok(())
    }

    /// Ends the model's turn that is being put together.
    fn flush(&mut self) {
        let Some(Turn {
            mut message,
            signed,
        }) = self.turn.take()
        else {
            return;
        };
        message.reasoning = message.reasoning.or(signed);
        let said = !message.content.is_empty()
            || !message.tool_calls.is_empty()
            || message.reasoning.is_some();
        if said || !std::mem::take(&mut self.after_result) {
            self.messages.push(message);
        }
        self.after_result = false;
    }
}

/// Fields that every part may have, and the end of it.
fn end(mut part: Fields<'_>) -> Result<(), ApiError> {
    part.ignore(&["thought", "thoughtSignature"]);
    let media = "the reference is kept as it is";
    part.no_effects(&[
        ("mediaResolution", media),
        ("videoMetadata", media),
        ("partMetadata", "only the parts themselves are read"),
    ])?;
    part.end()
}

/// The refusal of a part of another kind.
fn unknown_part(part: &Fields<'_>, known: &str) -> ApiError {
    let path = part.path("");
    let why = format!("a part of this kind is not supported here: known are {known}");
    ApiError::unsupported(path.trim_end_matches('.'), &why)
}

/// Text or media of a content that is not the model's.
fn said_part(part: &mut Fields<'_>, said: &mut Blocks) -> Result<(), ApiError> {
    if let Some(text) = part.string("text")? {
        said.text(text);
        return Ok(());
    }
    if media_part(part, said)? {
        return Ok(());
    }
    let known = "text, inlineData, fileData and functionResponse";
    Err(unknown_part(part, known))
}

/// Media of a part. Whether it has any.
fn media_part(part: &mut Fields<'_>, said: &mut Blocks) -> Result<bool, ApiError> {
    if let Some(blob) = inner(part, "inlineData")? {
        inline_data(blob, said)?;
    } else if let Some(file) = inner(part, "fileData")? {
        file_data(file, said)?;
    } else {
        return Ok(false);
    }
    Ok(true)
}

/// Bytes in the request: an image or a sound by their hash, a text as it is, and a note for other files.
fn inline_data(mut blob: Fields<'_>, said: &mut Blocks) -> Result<(), ApiError> {
    let media_type = blob.required_string("mimeType")?;
    let path = blob.path("data");
    let data = standard_base64(&blob.required_string("data")?);
    let name = blob.string("displayName")?;
    let unread = || media::unread_file(&path, name.as_deref(), blob.notes());
    match media_type.split('/').next() {
        Some("image") => said.media(Part::Image(media::inline(&data, &media_type, &path)?)),
        Some("audio") => said.media(Part::Audio(media::inline(&data, &media_type, &path)?)),
        Some("text") => said.text(match media::inline_text(&data, &path)? {
            Some(text) => text,
            None => unread()?,
        }),
        _ => said.text(unread()?),
    }
    blob.end()
}

/// A file elsewhere: an image by its address, and a note for others.
fn file_data(mut file: Fields<'_>, said: &mut Blocks) -> Result<(), ApiError> {
    let media_type = file.string("mimeType")?.unwrap_or_default();
    let path = file.path("fileUri");
    let uri = file.required_string("fileUri")?;
    let name = file.string("displayName")?;
    let is_web = uri.starts_with("https://") || uri.starts_with("http://");
    if media_type.starts_with("image/") && is_web {
        said.media(media::image(&uri, &path)?);
    } else {
        let name = name.as_deref().unwrap_or(&uri);
        said.text(media::unread_file(&path, Some(name), file.notes())?);
    }
    file.end()
}

/// The result of a function.
fn function_response(mut result: Fields<'_>) -> Result<Message, ApiError> {
    let name = result.required_string("name")?;
    let id = result.string("id")?;
    let mut said = Blocks::default();
    said.text(result_text(&result.take("response").unwrap_or_default()));
    let at = result.path("parts");
    let (parts, notes) = (result.array("parts")?.unwrap_or_default(), result.notes());
    for (i, part) in parts.into_iter().enumerate() {
        let mut part = Fields::of(part, &format!("{at}[{i}]"), notes)?.in_camel_case();
        if !media_part(&mut part, &mut said)? {
            return Err(unknown_part(&part, "inlineData and fileData"));
        }
        part.end()?;
    }
    let whole = "a result is given whole, and answered at once";
    result.no_effects(&[("scheduling", whole), ("willContinue", whole)])?;
    result.end()?;
    let mut message = Message::new(Role::Tool, said.take().unwrap_or_default());
    message.tool_call_id = Some(call_id(id, &name));
    message.name = Some(name);
    Ok(message)
}

/// A result as text. By the API's convention it is in `output` or `error`; the Python client writes `result`.
fn result_text(response: &Value) -> String {
    let plain = |value: &Value| match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    if let Value::Object(map) = response
        && map.len() == 1
    {
        for (name, before) in [("output", ""), ("result", ""), ("error", "Error: ")] {
            if let Some(value) = map.get(name) {
                return format!("{before}{}", plain(value));
            }
        }
    }
    plain(response)
}

/// A call that the model made.
fn function_call(mut call: Fields<'_>) -> Result<ToolCall, ApiError> {
    let name = call.required_string("name")?;
    let id = call.string("id")?;
    let arguments = call.object("args")?.unwrap_or_else(|| json!({}));
    call.end()?;
    Ok(ToolCall {
        id: call_id(id, &name),
        name,
        arguments,
    })
}

/// The id of a call. Gemini CLI puts the name of the function in front of it. A call without an id is named
/// by its function, and so is its result.
fn call_id(id: Option<String>, name: &str) -> String {
    let Some(id) = id else {
        return name.to_owned();
    };
    let own = id
        .strip_prefix(name)
        .and_then(|rest| rest.strip_prefix("__"));
    match own {
        Some(own) if !own.is_empty() => own.to_owned(),
        _ => id,
    }
}

/// Code that another server ran.
fn executable_code(mut code: Fields<'_>) -> Result<ToolCall, ApiError> {
    let text = code.required_string("code")?;
    let language = code.string("language")?.unwrap_or_default();
    let id = code.string("id")?;
    code.end()?;
    Ok(ToolCall {
        id: id.unwrap_or_else(|| CODE.into()),
        name: CODE.into(),
        arguments: json!({"language": language, "code": text}),
    })
}

/// The output of code that another server ran.
fn code_result(mut result: Fields<'_>) -> Result<Message, ApiError> {
    let output = result.string("output")?.unwrap_or_default();
    let outcome = result.string("outcome")?.unwrap_or_default();
    let id = result.string("id")?;
    result.end()?;
    let failed = !outcome.is_empty() && outcome != "OUTCOME_OK";
    let before = if failed { "Error: " } else { "" };
    let mut message = Message::new(Role::Tool, format!("{before}{output}"));
    message.tool_call_id = Some(id.unwrap_or_else(|| CODE.into()));
    message.name = Some(CODE.into());
    Ok(message)
}
