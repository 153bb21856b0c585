//! Items of the input become messages: the items of one turn of the model become one message again.

use super::{CALL, PREFIX, TEXT, THOUGHT};
use crate::dialect::agent_tools::{definitions, prompt_name};
use crate::dialect::fields::{Fields, Notes, wrong};
use crate::dialect::{ModelRequest, media, openai};
use crate::error::ApiError;
use serde_json::{Map, Value, json};
use sinew_types::{Content, Message, Role, ToolCall};

/// A text, or items. Tools that items define are added to the request.
pub(super) fn input_messages(
    input: Value,
    notes: &Notes,
    request: &mut ModelRequest,
) -> Result<Vec<Message>, ApiError> {
    let items = match input {
        Value::String(text) => return Ok(vec![Message::new(Role::User, text)]),
        Value::Array(items) => items,
        other => return Err(wrong("input", &other, "a string or an array of items")),
    };
    let mut turns = Turns::default();
    for (i, value) in items.into_iter().enumerate() {
        turns.item(value, &format!("input[{i}]"), notes, request)?;
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
    /// The known part of the model's turn.
    turn: Option<Message>,
}

impl Turns {
    /// Ends the model's turn that is being put together.
    fn flush(&mut self) {
        self.messages.extend(self.turn.take());
    }

    /// The model's turn; a new one if `over` returns that the open one cannot continue.
    fn turn(&mut self, over: impl Fn(&Message) -> bool) -> &mut Message {
        if self.turn.as_ref().is_some_and(over) {
            self.flush();
        }
        self.turn
            .get_or_insert_with(|| Message::new(Role::Assistant, ""))
    }

    /// One item.
    ///
    /// | item | in the common form |
    /// |---|---|
    /// | `message` | a message; one of the assistant goes on with the open turn |
    /// | `reasoning` | reasoning of the turn: its text, else its summary |
    /// | `function_call`, `custom_tool_call` | a call |
    /// | `local_shell_call`, `shell_call`, `apply_patch_call`, `computer_call`, `tool_search_call` | a call of the function that stands for the tool |
    /// | `*_output` | a message of role `tool` |
    /// | `tool_search_output`, `additional_tools` | a text that defines tools, which may be called from there on |
    /// | `web_search_call`, `file_search_call`, `code_interpreter_call`, `image_generation_call`, `mcp_call`, `program` | a call and its result: another server ran both |
    /// | `mcp_list_tools`, `mcp_approval_*`, `compaction` | nothing: counted, as only its server can read it |
    /// | `item_reference` | the item of an earlier answer of this rollout |
    ///
    /// # Errors
    /// If its type is none of these, or a field of it is missing or not known.
    fn item(
        &mut self,
        value: Value,
        path: &str,
        notes: &Notes,
        request: &mut ModelRequest,
    ) -> Result<(), ApiError> {
        let mut fields = Fields::of(value, path, notes)?;
        let kind = fields.string("type")?;
        if kind.as_deref() == Some("item_reference") {
            return self.reference(fields);
        }
        let kind = kind.unwrap_or_else(|| "message".into());
        match kind.as_str() {
            "message" => self.message(&mut fields)?,
            "reasoning" => self.reasoning(&mut fields)?,
            "tool_search_output" | "additional_tools" => {
                self.defined(&mut fields, &kind, request)?;
            }
            kind if kind.ends_with("_output") => self.result(&mut fields, kind)?,
            kind => {
                if !self.of_agent(&mut fields, kind)? && !self.of_server(&mut fields, kind)? {
                    let why = format!(
                        "items of type {kind:?} are not supported: known are message, reasoning, calls of \
                         tools with their outputs, additional_tools and item_reference"
                    );
                    return Err(ApiError::unsupported(&fields.path("type"), &why));
                }
            }
        }
        // Fields that the server adds to its own items.
        fields.ignore(&["id", "status", "caller", "created_by"]);
        fields.end()
    }

    /// A call of a tool that the agent runs. Whether it is one.
    ///
    /// Clients fill in fields that the model did not write (`type`, an empty `env`, nulls); they are left
    /// out, so that the call has the tokens that were sampled.
    ///
    /// # Errors
    /// If a field is missing or has another type.
    fn of_agent(&mut self, fields: &mut Fields<'_>, kind: &str) -> Result<bool, ApiError> {
        let (name, arguments) = match kind {
            "function_call" => (fields.required_string("name")?, fields.arguments()?),
            "custom_tool_call" => {
                let name = fields.required_string("name")?;
                (name, json!({"input": fields.required_string("input")?}))
            }
            "local_shell_call" => {
                let mut action = fields.required("action")?;
                if let Value::Object(action) = &mut action {
                    // These were filled in for the client.
                    action.shift_remove("type");
                    action.retain(|name, value| name != "env" || *value != json!({}));
                }
                ("local_shell".into(), without_nulls(action))
            }
            "shell_call" => {
                fields.ignore(&["environment"]);
                ("shell".into(), without_nulls(fields.required("action")?))
            }
            "apply_patch_call" => (
                "apply_patch".into(),
                without_nulls(fields.required("operation")?),
            ),
            "computer_call" => {
                fields.ignore(&["pending_safety_checks"]);
                match fields.take("actions") {
                    Some(actions) => ("computer".into(), json!({"actions": actions})),
                    None => (
                        "computer_use_preview".into(),
                        without_nulls(fields.required("action")?),
                    ),
                }
            }
            "tool_search_call" => {
                fields.ignore(&["execution"]);
                ("tool_search".into(), fields.required("arguments")?)
            }
            _ => return Ok(false),
        };
        let namespace = fields.string("namespace")?;
        let id = fields.string("call_id")?;
        self.call(ToolCall {
            id: id.unwrap_or_else(|| kind.to_owned()),
            name: prompt_name(namespace.as_deref(), &name),
            arguments,
        });
        Ok(true)
    }

    /// A call that another server ran: a call and its result. Whether it is one.
    ///
    /// # Errors
    /// If the gateway is strict and the item cannot be read here.
    fn of_server(&mut self, fields: &mut Fields<'_>, kind: &str) -> Result<bool, ApiError> {
        let (arguments, results): (&[&str], &[&str]) = match kind {
            "web_search_call" => (&["action"], &[]),
            "file_search_call" => (&["queries"], &["results"]),
            "code_interpreter_call" => (&["code"], &["outputs"]),
            "image_generation_call" => (&["revised_prompt"], &[]),
            "mcp_call" => (&["arguments"], &["output", "error"]),
            "program" => (&["code"], &[]),
            "mcp_list_tools" | "mcp_approval_request" | "mcp_approval_response" | "compaction" => {
                let path = fields.path("type");
                let why = "an item of another server, which nothing here can read";
                fields.notes().ignored(&format!("{path}={kind}"), || {
                    ApiError::unsupported(&path, why)
                })?;
                fields.take_rest();
                return Ok(true);
            }
            _ => return Ok(false),
        };
        let mut given = Map::new();
        for name in arguments {
            given.extend(fields.take(name).map(|value| ((*name).to_owned(), value)));
        }
        let results: Vec<Value> = results
            .iter()
            .filter_map(|name| fields.take(name))
            .collect();
        let result = match results.into_iter().next() {
            Some(Value::String(text)) => text,
            Some(value) => value.to_string(),
            // A picture or pages that only the other server had.
            None => fields.string("status")?.unwrap_or_else(|| "done".into()),
        };
        let server = fields.string("server_label")?;
        let name = fields.string("name")?;
        let id = fields.string("id")?.unwrap_or_else(|| kind.to_owned());
        let name = name.unwrap_or_else(|| kind.trim_end_matches("_call").to_owned());
        fields.take_rest();
        self.call(ToolCall {
            id: id.clone(),
            name: prompt_name(server.as_deref(), &name),
            arguments: Value::Object(given),
        });
        self.answer(id, result.into());
        Ok(true)
    }

    /// The result of a call: text, pictures, or how a program ended.
    ///
    /// # Errors
    /// If it names no call, or a part of it is not known.
    fn result(&mut self, fields: &mut Fields<'_>, kind: &str) -> Result<(), ApiError> {
        let path = fields.path("output");
        let content = match (kind, fields.take("output")) {
            ("shell_call_output", Some(Value::Array(outputs))) => {
                fields.ignore(&["max_output_length"]);
                let outputs: Vec<_> = outputs.iter().map(shell_output).collect();
                outputs.join("\n").into()
            }
            ("computer_call_output", Some(screen)) => {
                fields.ignore(&["acknowledged_safety_checks"]);
                let mut screen = Fields::of(screen, &path, fields.notes())?;
                let url = screen.string("image_url")?;
                screen.ignore(&["type", "file_id"]);
                screen.end()?;
                let mut content = Content::new();
                match url {
                    Some(url) => content.push(media::image(&url, &path)?),
                    None => content.push_text(&media::unread_file(&path, None, fields.notes())?),
                }
                content
            }
            ("apply_patch_call_output", None) => {
                fields.string("status")?.unwrap_or_default().into()
            }
            ("program_output", None) => fields.string("result")?.unwrap_or_default().into(),
            (_, output) => parts(
                output,
                &path,
                &["input_text", "output_text"],
                fields.notes(),
            )?,
        };
        // The local shell's output has the id of its call as its own.
        let id = match fields.string("call_id")? {
            Some(id) => id,
            None => fields.required_string("id")?,
        };
        self.answer(id, content);
        Ok(())
    }

    /// A message of role tool.
    fn answer(&mut self, call: String, content: Content) {
        self.flush();
        let mut message = Message::new(Role::Tool, content);
        message.tool_call_id = Some(call);
        self.messages.push(message);
    }

    /// Adds tools that may be called from this point on: those that a search found, or that the client adds.
    fn defined(
        &mut self,
        fields: &mut Fields<'_>,
        kind: &str,
        request: &mut ModelRequest,
    ) -> Result<(), ApiError> {
        let path = fields.path("tools");
        let notes = fields.notes();
        // Read apart: the text defines these tools here, also if they were defined before.
        let mut own = ModelRequest::default();
        for (i, tool) in fields.required_array("tools")?.into_iter().enumerate() {
            openai::read_tool(
                tool,
                &format!("{path}[{i}]"),
                None,
                notes,
                None,
                true,
                &mut own,
            )?;
        }
        let text = definitions(own.callable());
        for special in own.special_tools {
            if request.special(&special.prompt_name).is_none() {
                request.special_tools.push(special);
            }
        }
        for spec in own.tools.into_iter().chain(own.deferred_tools) {
            request.add_spec(spec, true);
        }
        request.defines_tools = true;
        fields.ignore(&["execution", "role"]);
        match kind {
            "tool_search_output" => {
                let id = fields.string("call_id")?;
                self.answer(id.unwrap_or_else(|| "tool_search_call".into()), text.into());
            }
            _ => {
                self.flush();
                self.messages.push(Message::new(Role::System, text));
            }
        }
        Ok(())
    }

    /// A reasoning item: its text, whatever its summary.
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

    /// Adds an item that the request names by its id and does not repeat.
    ///
    /// # Errors
    /// `item_not_found`: another rollout made it, or its answer is not kept.
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

    /// Reasoning begins a turn: it comes before the model's text and calls.
    fn add_reasoning(&mut self, text: String) {
        let over = |m: &Message| !m.content.is_empty() || !m.tool_calls.is_empty();
        self.turn(over).reasoning = Some(text);
    }

    /// Text of the model. Text after a call stays in the same turn, as the call has no result yet; an empty
    /// text adds nothing.
    fn text(&mut self, text: String) {
        let over = |m: &Message| {
            let said = !m.content.is_empty() && m.tool_calls.is_empty();
            said && !text.is_empty()
        };
        self.turn(over).content.push_text(&text);
    }

    /// Adds a call to the open turn, after any other content.
    fn call(&mut self, call: ToolCall) {
        self.turn(|_| false).tool_calls.push(call);
    }

    /// A message item; `phase` has no effect.
    ///
    /// # Errors
    /// If the role is not known, or an assistant's content has a part that is not text.
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

/// A value without null fields: clients fill in all fields of a type.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(mut map) => {
            map.retain(|_, value| !value.is_null());
            Value::Object(map)
        }
        plain => plain,
    }
}

/// The output of one command, with how it ended where that is not well.
fn shell_output(output: &Value) -> String {
    let text = |name: &str| output[name].as_str().unwrap_or_default();
    let mut lines = vec![text("stdout"), text("stderr")];
    let code = output["outcome"]["exit_code"].to_string();
    let ended = match output["outcome"]["type"].as_str() {
        Some("timeout") => "It was stopped after its time.".to_owned(),
        Some("exit") if code != "0" => format!("Exit code {code}"),
        _ => String::new(),
    };
    lines.push(&ended);
    lines.retain(|line| !line.is_empty());
    lines.join("\n")
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
                match part.string("image_url")? {
                    Some(url) => content.push(media::image(&url, &at)?),
                    None => content.push_text(&media::unread_file(&at, None, part.notes())?),
                }
                part.ignore(&["file_id"]);
                part.no_effects(&[("detail", "the reference is kept as it is")])?;
            }
            "input_audio" => content.push(media::audio(part)?),
            "input_file" => {
                let name = part.string("filename")?;
                let at = part.path("file_data");
                content.push_text(&media::unread_file(&at, name.as_deref(), part.notes())?);
                part.ignore(&["file_data", "file_id", "file_url", "detail"]);
            }
            other => {
                let why = format!(
                    "parts of type {other:?} are not supported here: known are {}, input_image, \
                     input_audio and input_file",
                    types.join(", ")
                );
                return Err(ApiError::unsupported(&part.path("type"), &why));
            }
        }
        Ok(())
    })
}
