//! Tools that are not plain functions. Those that an agent runs become functions in the prompt, and their
//! calls go back in the items that the agent's client knows. Those that a server runs are dropped and
//! counted, since nothing here could run them.
//!
//! | declared | function in the prompt | a call goes back as |
//! |---|---|---|
//! | `function` in a `namespace` | `NAMESPACE__NAME` | `function_call` with `namespace` |
//! | `custom` | its name, with `input` | `custom_tool_call`, in chat a call of type `custom` |
//! | `local_shell`, `shell`, `apply_patch`, `computer`, `computer_use_preview`, `tool_search` of the client | its type | `local_shell_call`, `shell_call`, ... |
//! | Anthropic's `bash_*`, `text_editor_*`, `memory_*`, `computer_*` | its name | `tool_use` |
//! | Anthropic's `computer_toolset_*`, `browser_toolset_*` | `computer`, `browser`, with `action` | `tool_use` of the action, with `toolset_name` |
//!
//! A tool with `defer_loading` is not shown until a result of a search names it; its definition is then
//! part of that result, so that the prompt only grows.
//!
//! Sources: OpenAI's and Anthropic's API references and the types of their Python clients.

use super::ModelRequest;
use super::fields::{Fields, Notes};
use crate::error::ApiError;
use serde_json::{Map, Value, json};
use sinew_types::{ToolCall, ToolSpec};

/// Separator between a namespace and a name, as agents name the tools of MCP servers.
const BETWEEN: &str = "__";

/// Begins a text that defines tools in the middle of a conversation.
const FROM_HERE: &str = "These tools can be called from here on:";

/// Wire form of a tool's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolForm {
    /// A function, in a namespace.
    Function,
    /// One text.
    Custom,
    LocalShell,
    Shell,
    ApplyPatch,
    /// One action a call.
    ComputerPreview,
    /// A list of actions.
    Computer,
    /// A search for tools that the client runs.
    ToolSearch,
    /// A set of Anthropic's; the argument `action` is the name of the called member.
    Toolset,
}

/// A tool whose calls are not those of a function of its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SpecialTool {
    /// Name that the model calls.
    pub prompt_name: String,
    /// Name that the client calls.
    pub name: String,
    pub namespace: Option<String>,
    pub form: ToolForm,
}

/// The name in the prompt of a tool in a namespace.
pub(super) fn prompt_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) => format!("{namespace}{BETWEEN}{name}"),
        None => name.to_owned(),
    }
}

/// A tool that a server would run is dropped, and counted by its type.
///
/// # Errors
/// If the gateway is strict.
pub(super) fn dropped(path: &str, kind: &str, notes: &Notes) -> Result<(), ApiError> {
    let refusal = || {
        let why = format!(
            "a tool of type {kind:?} runs at the server, and none runs here: give the model a function that the \
             agent runs"
        );
        ApiError::unsupported(&format!("{path}.type"), &why)
    };
    notes.ignored(&format!("{path}.type={kind}"), refusal)
}

/// Collects the functions of a request while its tools are read.
impl ModelRequest {
    /// Wire form of calls of the tool of this name; `None`: as a function of that name.
    pub(super) fn special(&self, prompt_name: &str) -> Option<&SpecialTool> {
        self.special_tools
            .iter()
            .find(|t| t.prompt_name == prompt_name)
    }

    /// Tools that may be called: those that the prompt shows and those that a search may find.
    pub fn callable(&self) -> impl Iterator<Item = &ToolSpec> {
        self.tools.iter().chain(&self.deferred_tools)
    }

    /// Adds a tool that is not a plain function of its name.
    pub(super) fn add_special(&mut self, tool: SpecialTool, spec: ToolSpec, deferred: bool) {
        if self.special(&tool.prompt_name).is_none() {
            self.special_tools.push(tool);
        }
        self.add_spec(spec, deferred);
    }

    /// Adds a function, once.
    pub(super) fn add_spec(&mut self, spec: ToolSpec, deferred: bool) {
        let list = if deferred {
            &mut self.deferred_tools
        } else {
            &mut self.tools
        };
        // A search may find a tool again, and the tool may have been declared as deferred.
        if !deferred || !list.iter().any(|t| t.name == spec.name) {
            list.push(spec);
        }
    }

    /// Nobody will search for deferred tools: they are shown.
    pub(super) fn show_deferred(&mut self) {
        let deferred = std::mem::take(&mut self.deferred_tools);
        self.tools.extend(deferred);
    }

    /// The tools are those of only these names.
    pub(super) fn allow_only(&mut self, names: &[String]) {
        self.tools.retain(|t| names.contains(&t.name));
        self.deferred_tools.retain(|t| names.contains(&t.name));
        self.strict_tools.retain(|(name, _)| names.contains(name));
    }
}

/// Definitions of tools as a text of the conversation.
pub(super) fn definitions<'a>(tools: impl IntoIterator<Item = &'a ToolSpec>) -> String {
    let mut text = String::from(FROM_HERE);
    for tool in tools {
        let tool = json!({"name": tool.name, "description": tool.description, "parameters": tool.parameters});
        text.push('\n');
        text.push_str(&tool.to_string());
    }
    text
}

/// The schema of an object with these properties, of which the first `required` must be there.
fn schema(properties: &[(&str, Value)], required: usize) -> Value {
    let names: Vec<_> = properties[..required]
        .iter()
        .map(|(name, _)| *name)
        .collect();
    let properties: Map<String, Value> = properties
        .iter()
        .map(|(name, schema)| ((*name).to_owned(), schema.clone()))
        .collect();
    json!({"type": "object", "properties": properties, "required": names})
}

/// Schemas of the arguments.
fn string() -> Value {
    json!({"type": "string"})
}

fn integer() -> Value {
    json!({"type": "integer"})
}

fn strings() -> Value {
    json!({"type": "array", "items": {"type": "string"}})
}

fn numbers() -> Value {
    json!({"type": "array", "items": {"type": "integer"}})
}

fn one_of(names: &[&str]) -> Value {
    json!({"type": "string", "enum": names})
}

/// A function for the prompt.
fn spec(name: &str, description: &str, parameters: Value) -> ToolSpec {
    ToolSpec {
        name: name.to_owned(),
        description: description.to_owned(),
        parameters,
    }
}

/// OpenAI's action on a screen.
fn screen_action() -> Value {
    let kinds = [
        "click",
        "double_click",
        "drag",
        "keypress",
        "move",
        "screenshot",
        "scroll",
        "type",
        "wait",
    ];
    let point = json!({"type": "object", "properties": {"x": integer(), "y": integer()}});
    schema(
        &[
            ("type", one_of(&kinds)),
            ("x", integer()),
            ("y", integer()),
            (
                "button",
                one_of(&["left", "right", "wheel", "back", "forward"]),
            ),
            ("keys", strings()),
            ("text", string()),
            ("scroll_x", integer()),
            ("scroll_y", integer()),
            ("path", json!({"type": "array", "items": point})),
        ],
        1,
    )
}

/// Description of the tools that act on a screen.
const ON_SCREEN: &str = "Acts on a screen; the result is a screenshot.";

/// The function for one of OpenAI's tools that the agent runs by their type.
fn of_type(kind: &str) -> Option<(ToolForm, ToolSpec)> {
    let (form, description, parameters) = match kind {
        "local_shell" => (
            ToolForm::LocalShell,
            "Runs a command on the local machine.",
            schema(
                &[
                    ("command", strings()),
                    ("working_directory", string()),
                    ("timeout_ms", integer()),
                    (
                        "env",
                        json!({"type": "object", "additionalProperties": {"type": "string"}}),
                    ),
                    ("user", string()),
                ],
                1,
            ),
        ),
        "shell" => (
            ToolForm::Shell,
            "Runs shell commands on the local machine.",
            schema(
                &[
                    ("commands", strings()),
                    ("timeout_ms", integer()),
                    ("max_output_length", integer()),
                ],
                1,
            ),
        ),
        "apply_patch" => (
            ToolForm::ApplyPatch,
            "Creates, updates or deletes a file by a diff; a deletion needs none.",
            schema(
                &[
                    (
                        "type",
                        one_of(&["create_file", "update_file", "delete_file"]),
                    ),
                    ("path", string()),
                    ("diff", string()),
                ],
                2,
            ),
        ),
        "computer" => {
            let actions = json!({"type": "array", "items": screen_action()});
            (
                ToolForm::Computer,
                ON_SCREEN,
                schema(&[("actions", actions)], 1),
            )
        }
        "computer_use_preview" => (ToolForm::ComputerPreview, ON_SCREEN, screen_action()),
        "tool_search" => (
            ToolForm::ToolSearch,
            "Finds further tools.",
            schema(&[("query", string())], 1),
        ),
        _ => return None,
    };
    Some((form, spec(kind, description, parameters)))
}

/// One of OpenAI's tools that is not a function: the agent's are added, a server's dropped and counted.
///
/// # Errors
/// If a field is wrong, or the gateway is strict and the tool is dropped.
pub(super) fn read_openai(
    value: Value,
    path: &str,
    notes: &Notes,
    namespace: Option<&str>,
    later: bool,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let mut fields = Fields::of(value, path, notes)?;
    let kind = fields.string("type")?.unwrap_or_default();
    match kind.as_str() {
        "custom" => {
            let tool = custom(&mut fields)?;
            let deferred = fields.bool("defer_loading")?.unwrap_or(false) || later;
            add_named(request, tool, namespace, ToolForm::Custom, deferred);
        }
        "shell" if !is_local(&fields) => return dropped(path, &kind, notes),
        "tool_search" if fields.at(&["execution"]) != Some(&json!("client")) => {
            return dropped(path, &kind, notes);
        }
        _ => {
            let Some((form, mut tool)) = of_type(&kind) else {
                return dropped(path, &kind, notes);
            };
            if form == ToolForm::ToolSearch {
                tool.description = fields.string("description")?.unwrap_or(tool.description);
                tool.parameters = fields.object("parameters")?.unwrap_or(tool.parameters);
                fields.ignore(&["execution"]);
            }
            if form == ToolForm::ComputerPreview {
                let mut size = |name| fields.integer(name, 0, 1 << 20);
                if let (Some(width), Some(height)) =
                    (size("display_width")?, size("display_height")?)
                {
                    tool.description += &format!(" The screen has {width} x {height} pixels.");
                }
            }
            fields.ignore(&["environment"]);
            add_named(request, tool, namespace, form, later);
        }
    }
    only_the_model_calls(&mut fields)?;
    fields.end()
}

/// `allowed_callers` has no effect: no code calls tools here.
pub(super) fn only_the_model_calls(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    fields.no_effects(&[("allowed_callers", "the model alone calls tools here")])
}

/// Whether a shell is the agent's: a container runs at the server.
fn is_local(fields: &Fields<'_>) -> bool {
    let place = fields.at(&["environment", "type"]);
    place.is_none_or(|place| place == "local")
}

/// A tool that takes a text; the notation of the text is a part of its description, as nothing enforces it.
fn custom(fields: &mut Fields<'_>) -> Result<ToolSpec, ApiError> {
    let mut about = fields.string("description")?.unwrap_or_default();
    if let Some(mut format) = fields.inner("format")? {
        let grammar = format.inner("grammar")?;
        let mut own = grammar.unwrap_or(format);
        if let Some(definition) = own.string("definition")? {
            let syntax = own.string("syntax")?.unwrap_or_default();
            let path = own.path("definition");
            let why = "the notation is in the tool's description, and is not enforced";
            own.notes()
                .ignored(&path, || ApiError::unsupported(&path, why))?;
            about += &format!("\nThe input has this notation ({syntax}):\n{definition}");
        }
        own.ignore(&["type"]);
        own.end()?;
    }
    let name = fields.required_string("name")?;
    Ok(spec(&name, &about, schema(&[("input", string())], 1)))
}

/// Adds a tool by the name that the model sees, and remembers how its calls go back.
fn add_named(
    request: &mut ModelRequest,
    mut tool: ToolSpec,
    namespace: Option<&str>,
    form: ToolForm,
    deferred: bool,
) {
    let name = std::mem::take(&mut tool.name);
    tool.name = prompt_name(namespace, &name);
    let special = SpecialTool {
        prompt_name: tool.name.clone(),
        name,
        namespace: namespace.map(str::to_owned),
        form,
    };
    request.add_special(special, tool, deferred);
}

/// A function in a namespace.
pub(super) fn add_function(
    request: &mut ModelRequest,
    tool: ToolSpec,
    namespace: &str,
    deferred: bool,
) {
    add_named(request, tool, Some(namespace), ToolForm::Function, deferred);
}

/// The prompt's name of the tool that `tool_choice` or `allowed_tools` of OpenAI's dialects name.
///
/// # Errors
/// If the object names none.
pub(super) fn chosen(
    value: Value,
    path: &str,
    nested: bool,
    notes: &Notes,
) -> Result<String, ApiError> {
    let mut fields = Fields::of(value, path, notes)?;
    let kind = fields.required_string("type")?;
    let mut own = if nested {
        fields.inner(&kind)?.unwrap_or(fields)
    } else {
        fields
    };
    let name = match kind.as_str() {
        "function" | "custom" => own.required_string("name")?,
        _ => own.string("name")?.unwrap_or(kind),
    };
    let namespace = own.string("namespace")?;
    own.ignore(&["server_label"]);
    own.end()?;
    Ok(prompt_name(namespace.as_deref(), &name))
}

/// The text of a call of a custom tool. Arguments that are another object are given as they are, so that
/// the agent's own check answers them.
pub(super) fn input_of(call: &ToolCall) -> String {
    match call.arguments.get("input") {
        Some(Value::String(text)) => text.clone(),
        _ => call.arguments.to_string(),
    }
}

/// One of Anthropic's tools by its type; `None`: a server runs it, or it is not known.
///
/// # Errors
/// If a field is wrong.
pub(super) fn of_anthropic(
    kind: &str,
    fields: &mut Fields<'_>,
) -> Result<Option<(ToolSpec, Option<SpecialTool>)>, ApiError> {
    let set = kind.split_once("_toolset_").map(|(family, _)| family);
    if let Some(family) = set {
        return toolset(family, fields);
    }
    let family = kind.trim_end_matches(|c: char| c.is_ascii_digit() || c == '_');
    let (usual, description, parameters) = match family {
        "bash" => (
            "bash",
            "Runs a command in a shell that stays open; `restart` begins a new one.",
            schema(
                &[
                    ("command", string()),
                    ("restart", json!({"type": "boolean"})),
                ],
                0,
            ),
        ),
        "text_editor" => (
            "str_replace_based_edit_tool",
            "Shows and edits files.",
            file_commands(
                &["view", "create", "str_replace", "insert", "undo_edit"],
                &[],
            ),
        ),
        "memory" => (
            "memory",
            "Reads and writes files below /memories, which outlive the conversation.",
            file_commands(
                &[
                    "view",
                    "create",
                    "str_replace",
                    "insert",
                    "delete",
                    "rename",
                ],
                &["old_path", "new_path"],
            ),
        ),
        "computer" => (
            "computer",
            "Acts on a screen; the result is a screenshot.",
            action(&COMPUTER_ACTIONS),
        ),
        _ => return Ok(None),
    };
    let name = fields.string("name")?.unwrap_or_else(|| usual.into());
    let mut tool = spec(&name, description, parameters);
    let mut size = |name| fields.integer(name, 0, 1 << 20);
    if let (Some(width), Some(height)) = (size("display_width_px")?, size("display_height_px")?) {
        tool.description += &format!(" The screen has {width} x {height} pixels.");
    }
    fields.ignore(&["display_number", "enable_zoom", "max_characters"]);
    Ok(Some((tool, None)))
}

/// A command on a file, with the arguments that all of them may take.
fn file_commands(commands: &[&str], more: &[&'static str]) -> Value {
    let mut properties = vec![
        ("command", one_of(commands)),
        ("path", string()),
        ("view_range", numbers()),
        ("file_text", string()),
        ("old_str", string()),
        ("new_str", string()),
        ("insert_line", integer()),
        ("insert_text", string()),
    ];
    properties.extend(more.iter().map(|name| (*name, string())));
    schema(&properties, 1)
}

/// Names of what can be done on a screen.
const COMPUTER_ACTIONS: [&str; 17] = [
    "screenshot",
    "left_click",
    "right_click",
    "middle_click",
    "double_click",
    "triple_click",
    "left_click_drag",
    "left_mouse_down",
    "left_mouse_up",
    "mouse_move",
    "cursor_position",
    "key",
    "hold_key",
    "type",
    "scroll",
    "wait",
    "zoom",
];

/// Names of what can be done in a browser.
const BROWSER_ACTIONS: [&str; 26] = [
    "navigate",
    "screenshot",
    "left_click",
    "right_click",
    "middle_click",
    "double_click",
    "triple_click",
    "left_click_drag",
    "left_mouse_down",
    "left_mouse_up",
    "mouse_move",
    "hover",
    "key",
    "hold_key",
    "type",
    "scroll",
    "scroll_to",
    "wait",
    "zoom",
    "find",
    "form_input",
    "get_page_text",
    "read_page",
    "new_tab",
    "switch_tab",
    "list_tabs",
];

/// Names of a browser's actions that give away or take in more than a page.
const MORE_BROWSER_ACTIONS: [&str; 5] = [
    "close_tab",
    "file_upload",
    "javascript_exec",
    "read_console",
    "read_network",
];

/// An action with the arguments that all of them may take.
fn action(names: &[&str]) -> Value {
    schema(
        &[
            ("action", one_of(names)),
            ("coordinate", numbers()),
            ("start_coordinate", numbers()),
            ("text", string()),
            ("duration", json!({"type": "number"})),
            ("scroll_direction", one_of(&["up", "down", "left", "right"])),
            ("scroll_amount", integer()),
            ("region", numbers()),
        ],
        1,
    )
}

/// A set of tools as one function, with the members that its `configs` leave.
fn toolset(
    family: &str,
    fields: &mut Fields<'_>,
) -> Result<Option<(ToolSpec, Option<SpecialTool>)>, ApiError> {
    let (mut names, about) = match family {
        "computer" => (
            COMPUTER_ACTIONS.to_vec(),
            "Acts on a screen; the result is a screenshot.",
        ),
        "browser" => (
            [&BROWSER_ACTIONS[..], &MORE_BROWSER_ACTIONS].concat(),
            "Acts in a browser.",
        ),
        _ => return Ok(None),
    };
    let configs = fields.object("configs")?.unwrap_or_default();
    names.retain(|name| configs[*name]["enabled"] != json!(false));
    let mut parameters = action(&names);
    if family == "browser" {
        for name in ["url", "query", "ref", "value", "tab_id", "code"] {
            parameters["properties"][name] = string();
        }
    }
    let special = SpecialTool {
        prompt_name: family.to_owned(),
        name: family.to_owned(),
        namespace: None,
        form: ToolForm::Toolset,
    };
    Ok(Some((spec(family, about, parameters), Some(special))))
}

/// The name, the input and the set of a call, as `tool_use` has them.
pub(super) fn tool_use_of(
    request: &ModelRequest,
    call: &ToolCall,
) -> (String, Value, Option<String>) {
    let set = request
        .special(&call.name)
        .filter(|t| t.form == ToolForm::Toolset);
    if let (Some(set), Value::Object(arguments)) = (set, &call.arguments)
        && let Some(Value::String(member)) = arguments.get("action")
    {
        let mut input = arguments.clone();
        input.shift_remove("action");
        return (member.clone(), Value::Object(input), Some(set.name.clone()));
    }
    (call.name.clone(), call.arguments.clone(), None)
}

/// The call that a `tool_use` of a member of a set stands for.
pub(super) fn of_member(set: String, member: String, input: Value) -> (String, Value) {
    let mut arguments = Map::new();
    arguments.insert("action".into(), Value::String(member));
    if let Value::Object(input) = input {
        arguments.extend(input);
    }
    (set, Value::Object(arguments))
}
