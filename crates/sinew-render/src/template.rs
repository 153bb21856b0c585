//! Chat templates as models ship them: Jinja, with what Hugging Face's renderer adds.

use crate::renderer::RenderError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::Serialize;
use serde_json::{Map, json};
use sinew_types::{Message, Role, ToolSpec};

/// Most operations that rendering one conversation may take: templates come from outside.
const FUEL: u64 = 20_000_000;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
    options: Map<String, serde_json::Value>,
}

/// A role as templates name it.
pub(crate) fn role_name(role: Role) -> &'static str {
    match role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    }
}

impl ChatTemplate {
    /// Compiles a template. `options` are variables that some templates read, for instance
    /// `enable_thinking`.
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
        environment
            .add_template_owned("chat", without_generation_tags(source))
            .map_err(|e| failed(&e))?;
        Ok(Self {
            environment,
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
            options,
        })
    }

    /// The text of a conversation, with the opening of the model's turn if asked for.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        add_generation_prompt: bool,
    ) -> Result<String, RenderError> {
        let messages: Vec<_> = messages.iter().map(message_value).collect();
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

fn failed(error: &Error) -> RenderError {
    RenderError::Template {
        line: error.line().unwrap_or(0),
        message: match error.detail() {
            Some(detail) => format!("{}: {detail}", error.kind()),
            None => error.kind().to_string(),
        },
    }
}

/// `{% generation %}` marks the model's text for supervised training and prints nothing.
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

fn message_value(message: &Message) -> serde_json::Value {
    let mut value = Map::new();
    value.insert("role".into(), json!(role_name(message.role)));
    value.insert("content".into(), json!(message.content));
    if let Some(reasoning) = &message.reasoning {
        value.insert("reasoning_content".into(), json!(reasoning));
    }
    if !message.tool_calls.is_empty() {
        let calls: Vec<_> = message
            .tool_calls
            .iter()
            .map(|call| {
                json!({
                    "id": call.id,
                    "type": "function",
                    "function": { "name": call.name, "arguments": call.arguments },
                })
            })
            .collect();
        value.insert("tool_calls".into(), json!(calls));
    }
    if let Some(id) = &message.tool_call_id {
        value.insert("tool_call_id".into(), json!(id));
    }
    if let Some(name) = &message.name {
        value.insert("name".into(), json!(name));
    }
    value.into()
}

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

/// `tojson` as `json.dumps(value, ensure_ascii=False)` writes it; Jinja's own filter escapes
/// HTML, which no model saw in training.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    let wrong =
        |e: serde_json::Error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {e}"));
    let value = serde_json::to_value(value).map_err(wrong)?;
    let mut out = Vec::new();
    match indent {
        Some(n) => {
            let spaces = " ".repeat(n.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(
                &mut out, formatter,
            ))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(
            &mut out,
            SpacedFormatter,
        )),
    }
    .map_err(wrong)?;
    let mut text = String::from_utf8_lossy(&out).into_owned();
    if ensure_ascii == Some(true) {
        text = escape_non_ascii(&text);
    }
    Ok(Value::from_safe_string(text))
}

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
    fn json_is_written_as_python_writes_it() {
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
        let source = "{% for m in messages %}\n    {% if m.content.startswith('x') %}\n{% continue %}\n    {% endif %}\n{{ m.content.strip().split('|')[-1] }};{% endfor %}";
        let messages = ["xa", " p|q "].map(|c| Message::new(Role::User, c));
        assert_eq!(
            template(source).render(&messages, &[], false).unwrap(),
            "q;"
        );
    }

    #[test]
    fn generation_marks_print_nothing() {
        let source = "a {%- generation -%} b{% generation %}{{ bos_token }}{% endgeneration %}";
        assert_eq!(template(source).render(&[], &[], false).unwrap(), "ab<s>");
    }

    #[test]
    fn errors_of_the_template_are_told_with_their_line() {
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
        let source = "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}{% if strftime_now is defined %}clock{% endif %}";
        let template = ChatTemplate::new(source, "", "", options).unwrap();
        assert_eq!(template.render(&[], &[], true).unwrap(), "off");
    }

    #[test]
    fn a_template_cannot_run_forever() {
        let source =
            "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";
        assert!(template(source).render(&[], &[], false).is_err());
    }
}
