//! Prompt templates: a row's columns in Jinja.

use crate::error::TasksError;
use crate::row::Row;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior};
use serde_json::Value;
use sinew_dialect::Ignored;
use sinew_dialect::conversation::Conversations;
use sinew_types::{Message, Role};
use std::io::{self, Write};

/// Work that one template may do, so that an endless loop is an error.
const FUEL: u64 = 1_000_000;

/// Maximum bytes of one text that a template makes.
const MAX_BYTES: usize = 16 << 20;

/// Output of a template, up to [`MAX_BYTES`].
#[derive(Default)]
struct Bounded {
    /// The text that was written.
    bytes: Vec<u8>,
    /// More was to be written.
    full: bool,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.full |= self.bytes.len() + bytes.len() > MAX_BYTES;
        if self.full {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Name of the prompt's template in messages.
const PROMPT: &str = "prompt";
/// Name of the filter in messages.
const FILTER: &str = "filter";
/// Name of derived columns in messages.
const COLUMNS: &str = "columns";

/// The template of the prompt and the filter of rows, compiled once. A column that a row does not have is an
/// error.
#[derive(Debug)]
pub struct PromptTemplate {
    env: Environment<'static>,
    /// Source of the template. `None`: the column `prompt` is used unchanged.
    source: Option<String>,
    filtered: bool,
}

impl PromptTemplate {
    /// Compiles the template and the filter expression.
    ///
    /// # Errors
    /// [`TasksError::Key`] for a syntax error.
    pub fn new(prompt: Option<&str>, filter: Option<&str>) -> Result<Self, TasksError> {
        let mut env = environment();
        if let Some(text) = prompt {
            env.add_template_owned(PROMPT, text.to_owned())
                .map_err(|e| wrong(PROMPT, text, &e))?;
        }
        if let Some(text) = filter {
            env.compile_expression(text)
                .map_err(|e| wrong(FILTER, text, &e))?;
            // An expression cannot be kept with its environment: it becomes a template of it.
            let template = format!("{{% if {text} %}}1{{% endif %}}");
            env.add_template_owned(FILTER, template)
                .map_err(|e| wrong(FILTER, text, &e))?;
        }
        Ok(Self {
            env,
            source: prompt.map(str::to_owned),
            filtered: filter.is_some(),
        })
    }

    /// Whether the filter keeps a row.
    ///
    /// # Errors
    /// [`TasksError::Row`] if the filter cannot be computed for it.
    pub fn keeps(&self, row: &Row) -> Result<bool, TasksError> {
        if !self.filtered {
            return Ok(true);
        }
        Ok(!self.text(FILTER, row)?.is_empty())
    }

    /// The messages of a row's prompt: one of the user, or those of a column `prompt` that is a list of
    /// messages. Also returns the unknown fields of that list, with their counts.
    ///
    /// # Errors
    /// [`TasksError::Row`] if a column is missing, the prompt is empty, or its last message is not text of
    /// the user.
    pub fn messages(&self, row: &Row) -> Result<(Vec<Message>, Ignored), TasksError> {
        let plain = |text| Ok((vec![Message::new(Role::User, text)], Ignored::new()));
        if self.source.is_some() {
            let text = self.text(PROMPT, row)?;
            return if text.trim().is_empty() {
                Err(row.error("the prompt is empty"))
            } else {
                plain(text)
            };
        }
        match row.columns.get("prompt") {
            Some(Value::String(text)) if !text.trim().is_empty() => plain(text.clone()),
            Some(list @ Value::Array(items)) if !items.is_empty() => {
                let reader = Conversations::default();
                let said = reader.messages(list, PROMPT);
                let said = said.map_err(|e| row.error(e.message))?;
                let messages: Vec<Message> = said.into_iter().map(|s| s.message).collect();
                match messages.last() {
                    Some(last) if last.content.first_media().is_some() => Err(row.error(
                        "the last message of `prompt` has an image or a sound; only text is read",
                    )),
                    Some(last) if last.role == Role::User => Ok((messages, reader.unknown())),
                    _ => Err(row.error("the last message of `prompt` must be one of the user")),
                }
            }
            Some(other) => Err(row.error(format!(
                "the column `prompt` is {other}; allowed: text, or a list of messages"
            ))),
            None => Err(row.error(format!(
                "no column `prompt`; set tasks.prompt, for example {:?}. Columns: {}",
                example(row),
                columns(row)
            ))),
        }
    }

    /// Fills a template in for a row.
    fn text(&self, name: &'static str, row: &Row) -> Result<String, TasksError> {
        filled(&self.env, name, &format!("tasks.{name}"), row)
    }
}

/// Columns that Jinja templates make of the other columns of a row, such as tests of several columns in one.
#[derive(Debug)]
pub struct DerivedColumns {
    env: Environment<'static>,
    /// Names in their order; a template may use the columns before it.
    names: Vec<String>,
}

impl DerivedColumns {
    /// Compiles a template for each name.
    ///
    /// # Errors
    /// [`TasksError::Key`] for a syntax error.
    pub fn new<'a>(
        templates: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, TasksError> {
        let (mut env, mut names) = (environment(), Vec::new());
        for (name, text) in templates {
            env.add_template_owned(name.to_owned(), text.to_owned())
                .map_err(|e| wrong(COLUMNS, text, &e))?;
            names.push(name.to_owned());
        }
        Ok(Self { env, names })
    }

    /// Adds the columns to a row, in place of its own of these names.
    ///
    /// # Errors
    /// [`TasksError::Row`] if a column that a template uses is missing.
    pub fn add(&self, row: &mut Row) -> Result<(), TasksError> {
        for name in &self.names {
            let text = filled(&self.env, name, &format!("column `{name}`"), row)?;
            row.columns.insert(name.clone(), Value::String(text));
        }
        Ok(())
    }
}

/// Settings of all templates.
fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_fuel(Some(FUEL));
    // An empty cell prints nothing: `none` would be a word of the prompt.
    env.set_formatter(|out, state, value| {
        if value.is_none() {
            Ok(())
        } else {
            minijinja::escape_formatter(out, state, value)
        }
    });
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env
}

/// The error of a template that cannot be compiled.
fn wrong(key: &'static str, text: &str, e: &Error) -> TasksError {
    TasksError::Key {
        key,
        value: format!("{text:?}"),
        reason: format!("{e}; it is Jinja over the columns of a row"),
    }
}

/// Fills a template in for a row; `shown` names it in errors.
fn filled(env: &Environment<'_>, name: &str, shown: &str, row: &Row) -> Result<String, TasksError> {
    let template = env.get_template(name);
    let mut text = Bounded::default();
    let rendered = template.and_then(|t| {
        t.render_captured_to(Serde(&row.columns), &mut text)
            .map(drop)
    });
    if text.full {
        let why = format!("{shown}: the text is larger than {MAX_BYTES} bytes");
        return Err(row.error(why));
    }
    let text = rendered.and_then(|()| {
        let broken =
            |e: std::string::FromUtf8Error| Error::new(ErrorKind::WriteFailure, e.to_string());
        String::from_utf8(text.bytes).map_err(broken)
    });
    text.map_err(|e| {
        let hint = match e.kind() {
            ErrorKind::UndefinedError => format!("; columns: {}", columns(row)),
            _ => String::new(),
        };
        row.error(format!("{shown}: {e}{hint}"))
    })
}

/// Names of a row's columns.
fn columns(row: &Row) -> String {
    let names: Vec<String> = row.columns.keys().map(|k| format!("`{k}`")).collect();
    names.join(", ")
}

/// A template that would work for a row: its first column of text.
fn example(row: &Row) -> String {
    let text = row.columns.iter().find(|(_, v)| v.is_string());
    let name = text.map_or("question", |(name, _)| name);
    format!("{{{{ {name} }}}}")
}
