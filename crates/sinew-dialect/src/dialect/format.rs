//! Output formats, as the dialects write them.
//!
//! | field | dialects | meaning |
//! |---|---|---|
//! | `response_format` | chat and text completions | `text`, `json_object`, `json_schema` |
//! | `text.format` | responses | the same, with the schema next to the type |
//! | `output_config.format`, `output_format` | messages | `json_schema` |
//! | `responseMimeType`, `responseSchema`, `responseJsonSchema` | generateContent | JSON, or one of an enum |
//! | `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar` | chat and text completions | as in vLLM |
//! | `structured_outputs` | chat and text completions | the same in one object |

use super::ModelRequest;
use super::fields::{Fields, wrong};
use super::openapi::json_schema;
use crate::error::ApiError;
use serde_json::{Value, json};
use sinew_types::{Format, Grammar};
use std::sync::Arc;

/// A format, and the field that asks for it.
#[derive(Clone, Debug, PartialEq)]
pub struct FormatAsk {
    /// Validated before it goes to the engine.
    pub format: Arc<Format>,
    /// Field that asks for it, for errors.
    pub path: String,
}

/// Any JSON, as a schema.
pub const ANY_OBJECT: &str = "{\"type\":\"object\"}";

impl ModelRequest {
    /// Requires an output of this language, as the field at `path` asks.
    ///
    /// # Errors
    /// If another field asks for one, too, or its texts are too large.
    fn hold_to(&mut self, path: String, grammar: Grammar) -> Result<(), ApiError> {
        if let Some(FormatAsk { path: first, .. }) = &self.format {
            let why = format!("{path}: {first} asks for a format already: an output has one");
            return Err(ApiError::invalid(path, why));
        }
        let format = Format::new(grammar);
        format
            .validate()
            .map_err(|e| ApiError::invalid(path.as_str(), format!("{path}: {e}")))?;
        let format = Arc::new(format);
        self.format = Some(FormatAsk { format, path });
        Ok(())
    }
}

/// `response_format` of chat and text completions.
pub(super) fn response_format(
    fields: &mut Fields<'_>,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let Some(mut format) = fields.inner("response_format")? else {
        return Ok(());
    };
    match format.required_string("type")?.as_str() {
        "text" => {}
        "json_object" => {
            request.hold_to(fields.path("response_format"), Grammar::JsonObject)?;
        }
        "json_schema" => {
            let mut named = format.required_inner("json_schema")?;
            schema(&mut named, request)?;
            named.end()?;
        }
        other => return Err(unknown(&format, other, "text, json_object or json_schema")),
    }
    format.end()
}

/// The format in a field that has its schema next to its type: `text.format` of responses,
/// `output_config.format` and `output_format` of messages.
pub(super) fn flat(
    fields: &mut Fields<'_>,
    name: &str,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let Some(mut format) = fields.inner(name)? else {
        return Ok(());
    };
    match format.required_string("type")?.as_str() {
        "text" => {}
        "json_object" => request.hold_to(fields.path(name), Grammar::JsonObject)?,
        "json_schema" => schema(&mut format, request)?,
        other => return Err(unknown(&format, other, "text, json_object or json_schema")),
    }
    format.end()
}

/// `responseMimeType` of Google's `generationConfig`, with a schema in one of its three fields.
pub(super) fn google(fields: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
    let kind = fields.string("responseMimeType")?.unwrap_or_default();
    let mut held = false;
    for name in [
        "responseSchema",
        "responseJsonSchema",
        "_responseJsonSchema",
    ] {
        let Some(given) = fields.object(name)? else {
            continue;
        };
        let path = fields.path(name);
        let schema = if name == "responseSchema" {
            json_schema(given)
        } else {
            given
        };
        request.hold_to(path.clone(), grammar_of(&kind, schema, &path)?)?;
        held = true;
    }
    match kind.as_str() {
        "application/json" if !held => {
            request.hold_to(fields.path("responseMimeType"), Grammar::JsonObject)
        }
        "" | "text/plain" | "application/json" => Ok(()),
        "text/x.enum" if held => Ok(()),
        "text/x.enum" => Err(fields.missing("responseSchema")),
        other => {
            let known = "text/plain, application/json or text/x.enum";
            Err(wrong(
                &fields.path("responseMimeType"),
                &Value::from(other),
                known,
            ))
        }
    }
}

/// The language of a schema of Google's: JSON, or with the type of an enum one of its texts.
fn grammar_of(kind: &str, schema: Value, path: &str) -> Result<Grammar, ApiError> {
    if kind != "text/x.enum" {
        return Ok(Grammar::JsonSchema {
            schema: schema.to_string(),
        });
    }
    let texts = schema["enum"].as_array().into_iter().flatten();
    let texts: Option<Vec<String>> = texts.map(|t| t.as_str().map(str::to_owned)).collect();
    let texts = texts.filter(|texts| !texts.is_empty());
    let texts = texts.ok_or_else(|| wrong(path, &schema, "a schema with an enum of strings"))?;
    Ok(Grammar::Choice { texts })
}

fn unknown(format: &Fields<'_>, kind: &str, known: &str) -> ApiError {
    wrong(&format.path("type"), &Value::from(kind), known)
}

/// A schema with its name. It is held to whether it is `strict` or not.
fn schema(fields: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
    fields.ignore(&["name", "description"]);
    fields.bool("strict")?;
    let path = fields.path("schema");
    let schema = fields.object("schema")?;
    let schema = schema.ok_or_else(|| fields.missing("schema"))?;
    let schema = schema.to_string();
    request.hold_to(path, Grammar::JsonSchema { schema })
}

/// Formats as vLLM's clients ask for them.
pub(super) fn guided(fields: &mut Fields<'_>, request: &mut ModelRequest) -> Result<(), ApiError> {
    for (name, kind) in [
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "grammar"),
    ] {
        one(fields, name, kind, request)?;
    }
    fields.no_effects(&[
        ("guided_decoding_backend", "there is one"),
        ("guided_whitespace_pattern", "separators are fixed"),
    ])?;
    let Some(mut outputs) = fields.inner("structured_outputs")? else {
        return Ok(());
    };
    for kind in ["json", "regex", "choice", "grammar"] {
        one(&mut outputs, kind, kind, request)?;
    }
    if outputs.bool("json_object")? == Some(true) {
        request.hold_to(outputs.path("json_object"), Grammar::JsonObject)?;
    }
    outputs.refuse(&[("structural_tag", "give the model tools")])?;
    let no = [json!(false)];
    outputs.only("disable_additional_properties", &no, "say so in the schema")?;
    outputs.no_effect(
        "disable_any_whitespace",
        &[json!(true)],
        "separators are fixed",
    )?;
    outputs.no_effect("disable_fallback", &[json!(true)], "there is none")?;
    outputs.no_effects(&[("whitespace_pattern", "separators are fixed")])?;
    outputs.end()
}

fn one(
    fields: &mut Fields<'_>,
    name: &str,
    kind: &str,
    request: &mut ModelRequest,
) -> Result<(), ApiError> {
    let Some(value) = fields.take(name) else {
        return Ok(());
    };
    let path = fields.path(name);
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let (grammar, expected) = match kind {
        "json" => {
            // A schema as an object, or as the text of one.
            let schema = match &value {
                Value::Object(_) => Some(value.to_string()),
                other => text(other),
            };
            let grammar = schema.map(|schema| Grammar::JsonSchema { schema });
            (grammar, "a schema")
        }
        "choice" => {
            let items = value.as_array().into_iter().flatten();
            let texts: Option<Vec<String>> = items.map(text).collect();
            let texts = texts.filter(|_| value.is_array());
            (
                texts.map(|texts| Grammar::Choice { texts }),
                "an array of strings",
            )
        }
        "regex" => (
            text(&value).map(|pattern| Grammar::Regex { pattern }),
            "a string",
        ),
        _ => (
            text(&value).map(|grammar| Grammar::Lark { grammar }),
            "a string",
        ),
    };
    let grammar = grammar.ok_or_else(|| wrong(&path, &value, expected))?;
    request.hold_to(path, grammar)
}
