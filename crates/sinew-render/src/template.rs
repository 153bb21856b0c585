//! Chat templates: Jinja with the extensions of Hugging Face's renderer.
//!
//! Templates read the variables `messages`, `tools` (`none` if empty), `add_generation_prompt`, `bos_token`,
//! `eos_token` and those of the options. They can call `raise_exception(text)` and, with the option `date`,
//! `strftime_now(format)`. The filter `tojson` has the format of Python, and string methods of Python are
//! supported.
//!
//! Blocks trim whitespace like Hugging Face's renderer: `trim_blocks` and `lstrip_blocks` are on.

use crate::error::RenderError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::Serialize;
use serde_json::{Map, json};
use sinew_types::{Message, Role, ToolSpec};

/// Maximum operations to render a conversation. Templates are untrusted.
const FUEL: u64 = 20_000_000;

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
    match role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    }
}

impl ChatTemplate {
    /// Compiles a template. `options` are variables such as `enable_thinking`. With the option `date`
    /// (`"2026-01-31"`), `strftime_now` is available. The date is fixed for a run, so that prompts do not
    /// change overnight.
    ///
    /// # Errors
    /// [`RenderError::Template`] for a syntax error or an invalid date.
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
            .map_err(|e| failed(&e))?;
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
        // In Jinja, `none` is not iterable.
        environment.add_test("iterable", |value: &Value| {
            !value.is_none() && value.try_iter().is_ok()
        });
        if let Some(date) = options.get("date") {
            let date = Date::parse(date)?;
            environment.add_function("strftime_now", move |format: &str| date.format(format));
        }
        environment
            .add_template_owned("chat", without_generation_tags(source))
            .map_err(|e| failed(&e))?;
        Ok(Self {
            environment,
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
            options,
            style: MessageStyle::default(),
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
            .map(|message| message_value(message, self.style))
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
        self.environment
            .get_template("chat")
            .and_then(|template| template.render(variables))
            .map_err(|e| failed(&e))
    }
}

/// Date for `strftime_now`.
#[derive(Clone, Copy, Debug)]
struct Date {
    year: u16,
    /// Month, 1 to 12.
    month: u8,
    /// Day, 1 to 31.
    day: u8,
}

/// English names for `%B` and `%b`.
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

impl Date {
    /// Parses `YYYY-MM-DD`.
    fn parse(value: &serde_json::Value) -> Result<Self, RenderError> {
        let parse = |text: &str| {
            let mut parts = text.splitn(3, '-');
            let date = Self {
                year: parts.next()?.parse().ok()?,
                month: parts.next()?.parse().ok()?,
                day: parts.next()?.parse().ok()?,
            };
            ((1..=12).contains(&date.month) && (1..=31).contains(&date.day)).then_some(date)
        };
        value
            .as_str()
            .and_then(parse)
            .ok_or_else(|| RenderError::Template {
                line: 0,
                message: format!("option date is {value}, expected for instance \"2026-01-31\""),
            })
    }

    /// Formats the date with the directives that templates use.
    fn format(self, format: &str) -> Result<String, Error> {
        let month = MONTHS[usize::from(self.month) - 1];
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            match (c, if c == '%' { chars.next() } else { None }) {
                ('%', Some('Y')) => out.push_str(&self.year.to_string()),
                ('%', Some('m')) => out.push_str(&format!("{:02}", self.month)),
                ('%', Some('d')) => out.push_str(&format!("{:02}", self.day)),
                ('%', Some('B')) => out.push_str(month),
                ('%', Some('b')) => out.push_str(&month[..3]),
                ('%', other) => {
                    return Err(Error::new(
                        ErrorKind::InvalidOperation,
                        format!("strftime_now knows %Y, %m, %d, %B and %b, not %{other:?}"),
                    ));
                }
                (c, _) => out.push(c),
            }
        }
        Ok(out)
    }
}

/// Error with the line of the template.
fn failed(error: &Error) -> RenderError {
    RenderError::Template {
        line: error.line().unwrap_or(0),
        message: match error.detail() {
            Some(detail) => format!("{}: {detail}", error.kind()),
            None => error.kind().to_string(),
        },
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
fn message_value(message: &Message, style: MessageStyle) -> serde_json::Value {
    let mut value = Map::new();
    value.insert("role".into(), json!(role_name(message.role)));
    let calls_alone = message.content.is_empty() && !message.tool_calls.is_empty();
    let content = match style.null_content && calls_alone {
        true => serde_json::Value::Null,
        false => json!(message.content.text()),
    };
    value.insert("content".into(), content);
    if let Some(reasoning) = &message.reasoning {
        value.insert("reasoning_content".into(), json!(reasoning));
    }
    let id_of = |id: &str| match style.short_ids {
        true => short_id(id),
        false => id.to_owned(),
    };
    if !message.tool_calls.is_empty() {
        let calls: Vec<_> = message
            .tool_calls
            .iter()
            .map(|call| {
                let arguments = match style.text_arguments {
                    true => json!(to_python_json(&call.arguments)),
                    false => call.arguments.clone(),
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

/// The `tojson` filter, equal to `json.dumps(value, ensure_ascii=False)`. Jinja's own filter escapes HTML,
/// which models did not see in training.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    let wrong =
        |e: serde_json::Error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {e}"));
    let value = serde_json::to_value(value).map_err(wrong)?;
    let mut text = match indent {
        Some(n) => {
            let mut out = Vec::new();
            let spaces = " ".repeat(n.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value
                .serialize(&mut serde_json::Serializer::with_formatter(
                    &mut out, formatter,
                ))
                .map_err(wrong)?;
            String::from_utf8_lossy(&out).into_owned()
        }
        None => to_python_json(&value),
    };
    if ensure_ascii == Some(true) {
        text = escape_non_ascii(&text);
    }
    Ok(Value::from_safe_string(text))
}

/// JSON in the format of Python's `json.dumps(value, ensure_ascii=False)`.
pub(crate) fn to_python_json(value: &serde_json::Value) -> String {
    let mut out = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, SpacedFormatter);
    // Writing a JSON value to memory cannot fail.
    let written = value.serialize(&mut serializer);
    debug_assert!(written.is_ok());
    String::from_utf8_lossy(&out).into_owned()
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

/// Python's default separators: `", "` and `": "`.
struct SpacedFormatter;

impl serde_json::ser::Formatter for SpacedFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
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
        let source = "{{ strftime_now('%d %B %b %Y-%m') }}";
        let dated = ChatTemplate::new(source, "", "", options.clone()).unwrap();
        assert_eq!(
            dated.render(&[], &[], true).unwrap(),
            "31 January Jan 2026-01"
        );
        let error = template(source).render(&[], &[], true).unwrap_err();
        assert!(error.to_string().contains("strftime_now"), "{error}");
        options.insert("date".into(), json!("today"));
        assert!(ChatTemplate::new(source, "", "", options).is_err());
    }

    #[test]
    fn none_is_not_iterable() {
        let source = "{% if tools is iterable and tools | length > 0 %}x{% endif %}\
                      {% if 'a' is iterable and messages is iterable %}y{% endif %}";
        assert_eq!(template(source).render(&[], &[], false).unwrap(), "y");
    }

    #[test]
    fn templates_have_an_operation_limit() {
        let source =
            "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";
        assert!(template(source).render(&[], &[], false).is_err());
    }
}
