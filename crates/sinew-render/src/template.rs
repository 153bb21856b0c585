//! Chat templates: Jinja with the extensions of Hugging Face's renderer.
//!
//! Templates read the variables `messages`, `tools` (`none` if empty), `add_generation_prompt`, `bos_token`,
//! `eos_token` and those of the options. They can call `raise_exception(text)` and, with the option `date`,
//! `strftime_now(format)`. The filter `tojson` has the format and the arguments of Python's `json.dumps`, and
//! string methods of Python are supported.
//!
//! Blocks trim whitespace like Hugging Face's renderer: `trim_blocks` and `lstrip_blocks` are on.

use crate::error::RenderError;
use chrono::{NaiveDate, NaiveDateTime, NaiveTime};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::Serialize;
use serde_json::{Map, json};
use sinew_types::{Message, Role, ToolSpec};
use std::fmt::Write as _;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Maximum operations to render a conversation. Templates are untrusted.
const FUEL: u64 = 20_000_000;
/// The error of a template that the engine cannot render.
const ENGINE_FAILS: &str = "the template engine fails on these messages, for instance because the template \
     reverses an empty list or text";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    /// Jinja environment with the template `chat`.
    environment: Environment<'static>,
    /// Variable `bos_token`.
    bos_token: String,
    /// Variable `eos_token`.
    eos_token: String,
    /// Additional variables.
    options: Map<String, serde_json::Value>,
    /// Form of messages with calls.
    style: MessageStyle,
    /// Field of reasoning in messages.
    reasoning: &'static str,
    /// The template may call `strftime_now`, which has no date.
    undated: bool,
}

/// Form of messages with calls that a template expects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MessageStyle {
    /// A turn with only calls has null content.
    pub(crate) null_content: bool,
    /// Arguments are a JSON text.
    pub(crate) text_arguments: bool,
    /// Call ids have nine letters and digits (Mistral).
    pub(crate) short_ids: bool,
}

/// Name of a role in templates.
pub(crate) fn role_name(role: Role) -> &'static str {
    role.name()
}

impl ChatTemplate {
    /// Compiles a template. `options` are variables such as `enable_thinking`. The option `date`
    /// (`"2026-01-31"`) makes `strftime_now` available. The date is fixed for a run, so that prompts do not
    /// change overnight.
    ///
    /// # Errors
    /// [`RenderError::Template`] for a syntax error, an invalid date, or an option that the template does not
    /// read.
    pub fn new(
        source: &str,
        bos_token: &str,
        eos_token: &str,
        options: Map<String, serde_json::Value>,
    ) -> Result<Self, RenderError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|e| failed(&e, false))?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<String, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_filter("tojson", tojson);
        // Jinja does not treat `none` as iterable.
        environment.add_test("iterable", |value: &Value| {
            !value.is_none() && value.try_iter().is_ok()
        });
        check_options(source, &options)?;
        if let Some(date) = options.get(DATE) {
            let date = date_of(date)?;
            environment.add_function(NOW, move |format: &str| strftime(date, format));
        }
        environment
            .add_template_owned("chat", without_generation_tags(source))
            .map_err(|e| failed(&e, false))?;
        let undated = has_word(source, NOW) && !options.contains_key(DATE);
        Ok(Self {
            environment,
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
            options,
            style: MessageStyle::default(),
            reasoning: reasoning_field(source),
            undated,
        })
    }

    /// Sets the form of messages with calls.
    pub(crate) fn with_style(mut self, style: MessageStyle) -> Self {
        self.style = style;
        self
    }

    /// Renders a conversation, optionally with the generation prompt.
    ///
    /// # Errors
    /// [`RenderError::Template`] if the template fails or refuses the messages.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        add_generation_prompt: bool,
    ) -> Result<String, RenderError> {
        let messages: Vec<_> = messages
            .iter()
            .map(|message| message_value(message, self.style, self.reasoning))
            .collect();
        let tools = if tools.is_empty() {
            Value::from(())
        } else {
            Value::from(Serde(tools.iter().map(tool_value).collect::<Vec<_>>()))
        };
        let variables = context! {
            messages => Value::from(Serde(messages)),
            tools => tools,
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos_token.as_str(),
            eos_token => self.eos_token.as_str(),
            ..Value::from(Serde(&self.options))
        };
        // A template is untrusted, and a slice backwards over an empty list or text panics in the engine.
        let rendered = catch_unwind(AssertUnwindSafe(|| {
            let template = self.environment.get_template("chat")?;
            template.render(variables)
        }));
        let failure = || Error::new(ErrorKind::InvalidOperation, ENGINE_FAILS);
        let rendered = rendered.unwrap_or_else(|_| Err(failure()));
        rendered.map_err(|e| failed(&e, self.undated))
    }
}

/// Variables that the renderer sets.
const OWN: [&str; 5] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
];

/// Option that gives `strftime_now` its date.
const DATE: &str = "date";
/// The function of that date.
const NOW: &str = "strftime_now";
/// The key that a template needs if it calls the clock without a date.
pub(crate) const NEEDS_DATE: &str = "template = { date = \"2026-01-31\" } beside the model's name";

/// Refuses options that the template does not read.
fn check_options(
    source: &str,
    options: &Map<String, serde_json::Value>,
) -> Result<(), RenderError> {
    let refused = |message: String| Err(RenderError::Template { line: 0, message });
    for name in options.keys() {
        if OWN.contains(&name.as_str()) {
            return refused(format!("option {name} is set by the renderer: remove it"));
        }
        let read = has_word(source, name) || (name == DATE && has_word(source, NOW));
        if !read {
            return refused(format!(
                "option {name} has no effect: the chat template does not read it"
            ));
        }
    }
    Ok(())
}

/// Field of a message in which a template looks for reasoning: `reasoning_content` in most, `thinking` or
/// `reasoning` in some.
fn reasoning_field(source: &str) -> &'static str {
    let reads = |field: &str| {
        let forms = [
            format!(".{field} "),
            format!("['{field}']"),
            format!("[\"{field}\"]"),
            format!("'{field}' in"),
            format!("\"{field}\" in"),
            format!(".get('{field}')"),
        ];
        forms.iter().any(|form| source.contains(form.as_str()))
    };
    if has_word(source, "reasoning_content") {
        return "reasoning_content";
    }
    let others = ["thinking", "reasoning"];
    let found = others.into_iter().find(|field| reads(field));
    found.unwrap_or("reasoning_content")
}

/// Whether a name occurs in a template as a whole word.
fn has_word(source: &str, name: &str) -> bool {
    let inside = |c: char| c.is_alphanumeric() || c == '_';
    source.match_indices(name).any(|(at, _)| {
        let (before, after) = (&source[..at], &source[at + name.len()..]);
        !before.ends_with(inside) && !after.starts_with(inside)
    })
}

/// The date of the option `date`: a day, or a day and a time.
fn date_of(value: &serde_json::Value) -> Result<NaiveDateTime, RenderError> {
    let parse = |text: &str| {
        let day =
            NaiveDate::parse_from_str(text, "%Y-%m-%d").map(|day| day.and_time(NaiveTime::MIN));
        day.or_else(|_| NaiveDateTime::parse_from_str(text, "%Y-%m-%dT%H:%M:%S"))
    };
    let date = value.as_str().and_then(|text| parse(text).ok());
    date.ok_or_else(|| RenderError::Template {
        line: 0,
        message: format!(
            "option date is {value}, expected for instance \"2026-01-31\" or \"2026-01-31T08:30:00\""
        ),
    })
}

/// The date in a format of Python's `strftime`.
fn strftime(date: NaiveDateTime, format: &str) -> Result<String, Error> {
    let mut out = String::new();
    write!(out, "{}", date.format(format)).map_err(|_| {
        let message = format!("{NOW}: the format {format:?} has an unknown directive");
        Error::new(ErrorKind::InvalidOperation, message)
    })?;
    Ok(out)
}

/// A template that sets its options by itself, for programs that read it without them. They have their own
/// `strftime_now`.
pub(crate) fn with_options(source: &str, options: &Map<String, serde_json::Value>) -> String {
    let mut out = String::new();
    for (name, value) in options.iter().filter(|(name, _)| *name != DATE) {
        // Texts, numbers, lists and tables of JSON are those of Jinja; constants have other names.
        let value = match value {
            serde_json::Value::Null => "none".to_owned(),
            other => other.to_string(),
        };
        out.push_str(&format!("{{%- set {name} = {value} %}}"));
    }
    out + source
}

/// Error with the line of the template. `undated`: the template may call the clock, which has no date.
fn failed(error: &Error, undated: bool) -> RenderError {
    let mut message = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    // The template engine reports a clock that a macro calls as an undefined variable.
    let clock = match error.kind() {
        ErrorKind::UnknownFunction => message.contains(NOW),
        _ => undated && message.ends_with("undefined is not callable"),
    };
    if clock {
        message += &format!(
            "; the chat template asks for the date of today, which is fixed for a run: set {NEEDS_DATE}"
        );
    }
    RenderError::Template {
        line: error.line().unwrap_or(0),
        message,
    }
}

/// Removes `{% generation %}` tags, which mark the model's text for supervised training and print nothing.
fn without_generation_tags(source: &str) -> String {
    let mut out = source.to_owned();
    for word in ["generation", "endgeneration"] {
        for (open, close) in [("{%", "%}"), ("{%-", "%}"), ("{%", "-%}"), ("{%-", "-%}")] {
            // A comment with the same dashes trims the same whitespace.
            let comment = format!("{}{}", open.replace('%', "#"), close.replace('%', "#"));
            out = out.replace(&format!("{open} {word} {close}"), &comment);
        }
    }
    out
}

/// A message as templates read it.
fn message_value(
    message: &Message,
    style: MessageStyle,
    reasoning_field: &str,
) -> serde_json::Value {
    let mut value = Map::new();
    value.insert("role".into(), json!(role_name(message.role)));
    let calls_alone = message.content.is_empty() && !message.tool_calls.is_empty();
    let content = if style.null_content && calls_alone {
        serde_json::Value::Null
    } else {
        json!(message.content.text())
    };
    value.insert("content".into(), content);
    if let Some(reasoning) = &message.reasoning {
        value.insert(reasoning_field.into(), json!(reasoning));
    }
    let id_of = |id: &str| {
        if style.short_ids {
            short_id(id)
        } else {
            id.to_owned()
        }
    };
    if !message.tool_calls.is_empty() {
        let calls: Vec<_> = message
            .tool_calls
            .iter()
            .map(|call| {
                let arguments = if style.text_arguments {
                    json!(to_python_json(&call.arguments))
                } else {
                    call.arguments.clone()
                };
                json!({
                    "id": id_of(&call.id),
                    "type": "function",
                    "function": { "name": call.name, "arguments": arguments },
                })
            })
            .collect();
        value.insert("tool_calls".into(), json!(calls));
    }
    if let Some(id) = &message.tool_call_id {
        value.insert("tool_call_id".into(), json!(id_of(id)));
    }
    if let Some(name) = &message.name {
        value.insert("name".into(), json!(name));
    }
    value.into()
}

/// Nine letters and digits for an id: the id itself if it has that form, else its FNV-1a hash.
fn short_id(id: &str) -> String {
    if id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    let mut hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let digits = b"abcdefghijklmnopqrstuvwxyz0123456789";
    (0..9)
        .map(|_| {
            let digit = digits[(hash % 36) as usize];
            hash /= 36;
            char::from(digit)
        })
        .collect()
}

/// A tool in the form of OpenAI's API, which templates expect.
fn tool_value(tool: &ToolSpec) -> serde_json::Value {
    json!({
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        },
    })
}

/// The `tojson` filter, equal to `json.dumps(value, ensure_ascii=False)` with the arguments of that function.
/// Jinja's own filter escapes HTML, which models did not see in training.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = kwargs.get("indent")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    let wrong = |why: &str| Error::new(ErrorKind::InvalidOperation, format!("tojson: {why}"));
    let mut value = serde_json::to_value(value).map_err(|e| wrong(&e.to_string()))?;
    if sort_keys == Some(true) {
        value.sort_all_objects();
    }
    let indent = match indent.filter(|i| !i.is_none()) {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(count) => {
            let count =
                usize::try_from(count).map_err(|_| wrong("indent must be a number or a text"))?;
            Some(" ".repeat(count.min(16)))
        }
    };
    let mut format = PythonFormat {
        item: if indent.is_some() { "," } else { ", " }.to_owned(),
        key: ": ".to_owned(),
        indent,
        depth: 0,
        has_value: false,
    };
    match separators.as_deref() {
        None => {}
        Some([item, key]) => (format.item, format.key) = (item.clone(), key.clone()),
        Some(_) => return Err(wrong("separators must be two texts")),
    }
    let mut text = format.written(&value);
    if ensure_ascii == Some(true) {
        text = escape_non_ascii(&text);
    }
    Ok(Value::from_safe_string(text))
}

/// JSON in the format of Python's `json.dumps(value, ensure_ascii=False)`.
pub(crate) fn to_python_json(value: &serde_json::Value) -> String {
    let format = PythonFormat {
        item: ", ".to_owned(),
        key: ": ".to_owned(),
        indent: None,
        depth: 0,
        has_value: false,
    };
    format.written(value)
}

/// Text with all other characters as `\u` escapes, as Python writes JSON by default.
fn escape_non_ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            let mut units = [0u16; 2];
            for unit in c.encode_utf16(&mut units) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    out
}

/// JSON as Python writes it.
struct PythonFormat {
    /// Separator of items.
    item: String,
    /// Separator of a key and its value.
    key: String,
    /// Indent of each item, once for each level.
    indent: Option<String>,
    /// Lists and objects around the value at hand.
    depth: usize,
    /// Whether the list or object at hand has an item.
    has_value: bool,
}

impl PythonFormat {
    /// A value in this format.
    fn written(self, value: &serde_json::Value) -> String {
        let mut out = Vec::new();
        let mut serializer = serde_json::Serializer::with_formatter(&mut out, self);
        // Writing a JSON value to memory cannot fail.
        let written = value.serialize(&mut serializer);
        debug_assert!(written.is_ok());
        String::from_utf8_lossy(&out).into_owned()
    }

    /// Writes a new line, up to where its item begins, if there is an indent.
    fn line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = &self.indent else {
            return Ok(());
        };
        writer.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| writer.write_all(indent.as_bytes()))
    }

    /// Begins a list or an object.
    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_value = false;
        writer.write_all(bracket)
    }

    /// Ends a list or an object. An empty one has no separate line.
    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_value {
            self.line(writer)?;
        }
        self.has_value = true;
        writer.write_all(bracket)
    }

    /// Begins an item.
    fn next<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.has_value = true;
        self.line(writer)
    }
}

impl serde_json::ser::Formatter for PythonFormat {
    /// Python's `repr`: an exponent has a sign and two digits, and begins below 0.0001.
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let plain = serde_json::Number::from_f64(value)
            .map_or_else(|| value.to_string(), |n| n.to_string());
        let text = if plain.contains('e') || (value != 0.0 && value.abs() < 1e-4) {
            format!("{value:e}")
        } else {
            plain
        };
        match text.split_once('e') {
            None => writer.write_all(text.as_bytes()),
            Some((digits, exponent)) => {
                let (sign, exponent) = match exponent.strip_prefix('-') {
                    Some(exponent) => ('-', exponent),
                    None => ('+', exponent),
                };
                write!(writer, "{digits}e{sign}{exponent:0>2}")
            }
        }
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, "<s>", "</s>", Map::new()).unwrap()
    }

    fn user(content: &str) -> [Message; 1] {
        [Message::new(Role::User, content)]
    }

    #[test]
    fn json_has_the_format_of_python() {
        let tool = ToolSpec {
            name: "f".into(),
            description: "a < b & 'c' é".into(),
            parameters: json!({"b": [1, 2.5], "a": {}}),
        };
        let text = template("{{ tools[0].function | tojson }}")
            .render(&[], std::slice::from_ref(&tool), false)
            .unwrap();
        assert_eq!(
            text,
            r#"{"name": "f", "description": "a < b & 'c' é", "parameters": {"b": [1, 2.5], "a": {}}}"#
        );
        let text =
            template("{{ tools[0].function.parameters | tojson(indent=2, ensure_ascii=True) }}")
                .render(&[], &[tool], false)
                .unwrap();
        assert_eq!(text, "{\n  \"b\": [\n    1,\n    2.5\n  ],\n  \"a\": {}\n}");
    }

    /// The expected texts are those of `json.dumps` of Python 3.13.
    #[test]
    fn tojson_takes_the_arguments_of_python() {
        let tool = ToolSpec {
            name: "f".into(),
            description: String::new(),
            parameters: json!({"b": [1, 2.5, {}], "a": {"z": [], "y": "é"}, "n": [1e-5, 1e16, 0.0001, 100.0]}),
        };
        for (arguments, expected) in [
            (
                "separators=(',', ':')",
                r#"{"b":[1,2.5,{}],"a":{"z":[],"y":"é"},"n":[1e-05,1e+16,0.0001,100.0]}"#,
            ),
            (
                "sort_keys=true",
                r#"{"a": {"y": "é", "z": []}, "b": [1, 2.5, {}], "n": [1e-05, 1e+16, 0.0001, 100.0]}"#,
            ),
            (
                "indent=1, separators=(' ,', '='), sort_keys=true",
                "{\n \"a\"={\n  \"y\"=\"é\" ,\n  \"z\"=[]\n } ,\n \"b\"=[\n  1 ,\n  2.5 ,\n  {}\n ] ,\n \
                 \"n\"=[\n  1e-05 ,\n  1e+16 ,\n  0.0001 ,\n  100.0\n ]\n}",
            ),
        ] {
            let source = format!("{{{{ tools[0].function.parameters | tojson({arguments}) }}}}");
            let text = template(&source).render(&[], std::slice::from_ref(&tool), false);
            assert_eq!(text.unwrap(), expected, "{arguments}");
        }
        let wrong = template("{{ messages | tojson(separators=(',',)) }}").render(&[], &[], false);
        assert!(
            wrong
                .unwrap_err()
                .to_string()
                .contains("separators must be two texts")
        );
    }

    #[test]
    fn python_methods_blocks_and_loop_controls_work() {
        let source = "{% for m in messages %}\n    {% if m.content.startswith('x') %}\n\
                      {% continue %}\n    {% endif %}\n\
                      {{ m.content.strip().split('|')[-1] }};{% endfor %}";
        let messages = ["xa", " p|q "].map(|c| Message::new(Role::User, c));
        assert_eq!(
            template(source).render(&messages, &[], false).unwrap(),
            "q;"
        );
    }

    #[test]
    fn generation_tags_print_nothing() {
        let source = "a {%- generation -%} b{% generation %}{{ bos_token }}{% endgeneration %}";
        assert_eq!(template(source).render(&[], &[], false).unwrap(), "ab<s>");
    }

    #[test]
    fn template_errors_have_a_line() {
        let source = "\n{{ raise_exception('roles must alternate') }}";
        let error = template(source).render(&user("x"), &[], false).unwrap_err();
        assert!(
            matches!(error, RenderError::Template { line: 2, ref message }
            if message.contains("roles must alternate"))
        );
        assert!(ChatTemplate::new("{% if %}", "", "", Map::new()).is_err());
    }

    #[test]
    fn options_are_variables() {
        let mut options = Map::new();
        options.insert("enable_thinking".into(), json!(false));
        let source = "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}\
                      {% if strftime_now is defined %}clock{% endif %}";
        let template = ChatTemplate::new(source, "", "", options).unwrap();
        assert_eq!(template.render(&[], &[], true).unwrap(), "off");
    }

    #[test]
    fn strftime_now_needs_a_date() {
        let mut options = Map::new();
        options.insert("date".into(), json!("2026-01-31"));
        let source = "{{ strftime_now('%A %d %B %b %Y-%m %H:%M %j') }}";
        let dated = |options| ChatTemplate::new(source, "", "", options).unwrap();
        assert_eq!(
            dated(options.clone()).render(&[], &[], true).unwrap(),
            "Saturday 31 January Jan 2026-01 00:00 031"
        );
        options.insert("date".into(), json!("2026-01-31T08:30:00"));
        let text = dated(options.clone()).render(&[], &[], true).unwrap();
        assert!(text.contains("08:30"), "{text}");
        let in_macro = format!("{{% macro day() %}}{source}{{% endmacro %}}{{{{ day() }}}}");
        for source in [source, in_macro.as_str()] {
            let error = template(source).render(&[], &[], true).unwrap_err();
            assert!(error.to_string().contains(NEEDS_DATE), "{error}");
        }
        let wrong = ChatTemplate::new("{{ strftime_now('%Q') }}", "", "", options.clone()).unwrap();
        assert!(wrong.render(&[], &[], true).is_err());
        options.insert("date".into(), json!("today"));
        assert!(ChatTemplate::new(source, "", "", options).is_err());
    }

    #[test]
    fn options_without_effect_are_refused() {
        for (name, expected) in [
            ("enable_thinkin", "does not read it"),
            ("date", "does not read it"),
            ("tools", "set by the renderer"),
        ] {
            let options = [(name.to_owned(), json!("2026-01-31"))]
                .into_iter()
                .collect();
            let error =
                ChatTemplate::new("{{ enable_thinking }}{{ tools }}", "", "", options).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn none_is_not_iterable() {
        let source = "{% if tools is iterable and tools | length > 0 %}x{% endif %}\
                      {% if 'a' is iterable and messages is iterable %}y{% endif %}";
        assert_eq!(template(source).render(&[], &[], false).unwrap(), "y");
    }

    #[test]
    fn a_failure_of_the_engine_is_an_error() {
        for source in [
            "{{ messages[0].content[::-1] }}",
            "{{ messages[1:][::-1] | list }}",
        ] {
            let error = template(source).render(&user(""), &[], false).unwrap_err();
            assert!(error.to_string().contains(ENGINE_FAILS), "{error}");
        }
        let text = template("{{ messages[0].content[::-1] }}").render(&user("ab"), &[], false);
        assert_eq!(text.unwrap(), "ba");
    }

    #[test]
    fn templates_have_an_operation_limit() {
        let source =
            "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";
        assert!(template(source).render(&[], &[], false).is_err());
    }
}
