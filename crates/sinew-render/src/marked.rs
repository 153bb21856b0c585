//! Calls whose arguments stand between marks: XML (Qwen3-Coder), GLM, Hy3 and DeepSeek's DSML.
//!
//! ```text
//! <function=f>            f
//! <parameter=key>         <arg_key>key</arg_key>
//! value                   <arg_value>value</arg_value>
//! </parameter>
//! </function>
//! ```
//!
//! Values have no quotes. The type of a value follows from the tool's schema ([`crate::values`]), and a mark
//! inside of a value is a part of it ([`value_of`]).

use crate::region::{Body, Region, Scan, tagged};
use crate::tool_call::{ParsedCall, ToolCallError};
use crate::values;
use serde_json::{Map, Value};
use std::slice;

/// Parameter schemas by tool name, for formats with unquoted values.
pub(crate) type Schemas = [(String, Value)];

/// An argument of such a call.
pub(crate) const DSML_PARAMETER: &str = "<｜DSML｜parameter";
pub(crate) const DSML_PARAMETER_END: &str = "</｜DSML｜parameter>";
/// Start of an XML call; also a call of a custom tool of Llama.
pub(crate) const FUNCTION: &str = "<function=";
pub(crate) const FUNCTION_END: &str = "</function>";
/// An argument of an XML call.
pub(crate) const PARAMETER: &str = "<parameter=";
pub(crate) const PARAMETER_END: &str = "</parameter>";
/// Start of a call of Hermes, SmolLM, GLM and XML.
pub(crate) const TOOL_CALL: &str = "<tool_call>";
pub(crate) const TOOL_CALL_END: &str = "</tool_call>";

/// Parses the rest of `<｜DSML｜invoke name="f">` with its parameters (V3.2).
pub(crate) fn dsml(body: &str) -> Result<ParsedCall, ToolCallError> {
    let (head, mut rest) = body
        .split_once('>')
        .ok_or_else(|| ToolCallError::syntax(body, "> after the name"))?;
    let name = dsml_attribute(head, "name")?;
    let mut arguments = Map::new();
    while let Some(after) = rest.trim_start().strip_prefix(DSML_PARAMETER) {
        let (head, value) = after
            .split_once('>')
            .ok_or_else(|| ToolCallError::syntax(after, "> after the attributes"))?;
        let (value, tail) = value_to(value, DSML_PARAMETER, DSML_PARAMETER_END, DSML_PARAMETER)?;
        let key = dsml_attribute(head, "name")?;
        let value = match dsml_attribute(head, "string")? {
            "true" => Value::String(value.to_owned()),
            _ => values::literal(value.trim()).unwrap_or_else(|| value.into()),
        };
        arguments.insert(key.to_owned(), value);
        rest = tail;
    }
    if !rest.trim().is_empty() {
        return Err(ToolCallError::syntax(
            rest,
            "a parameter or the end of the call",
        ));
    }
    Ok(ParsedCall::new(name, arguments))
}

/// Tags of calls whose names and keys are attributes: MiniMax M2, MiniCPM and Muse.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedTags {
    /// Start of a call, up to its name.
    pub(crate) open: &'static str,
    /// End of a call.
    pub(crate) close: &'static str,
    /// Start of an argument, up to its key.
    pub(crate) argument: &'static str,
    /// End of an argument.
    pub(crate) argument_end: &'static str,
}

/// Tags of calls whose arguments are pairs of a key and a value: GLM and Hy3.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairTags {
    /// Start of a call, up to its name.
    pub(crate) open: &'static str,
    /// End of a call.
    pub(crate) close: &'static str,
    /// End of the name. Empty: the name ends where the first key begins.
    pub(crate) name_end: &'static str,
    /// Start of a key.
    pub(crate) key: &'static str,
    /// End of a key.
    pub(crate) key_end: &'static str,
    /// Start of a value.
    pub(crate) value: &'static str,
    /// End of a value.
    pub(crate) value_end: &'static str,
}

/// Tags of GLM.
pub(crate) const GLM: PairTags = PairTags {
    open: TOOL_CALL,
    close: TOOL_CALL_END,
    name_end: "",
    key: "<arg_key>",
    key_end: "</arg_key>",
    value: "<arg_value>",
    value_end: "</arg_value>",
};

/// Tags of Hy3.
pub(crate) const HY3: PairTags = PairTags {
    open: "<tool_call:opensource>",
    close: "</tool_call:opensource>",
    name_end: "<tool_sep:opensource>",
    key: "<arg_key:opensource>",
    key_end: "</arg_key:opensource>",
    value: "<arg_value:opensource>",
    value_end: "</arg_value:opensource>",
};

/// The attribute at the start of a text, without its quote, and what follows its tag.
fn head_of(text: &str) -> Result<(&str, &str), ToolCallError> {
    let found = text.split_once('>');
    let (head, rest) = found.ok_or_else(|| ToolCallError::syntax(text, "> after the name"))?;
    Ok((head.trim_end().trim_end_matches('"').trim(), rest))
}

/// Parses a call whose name and keys are attributes.
pub(crate) fn named_call(
    text: &str,
    tags: &'static NamedTags,
    scan: &mut Scan,
    last: bool,
    schemas: &Schemas,
) -> Region {
    let values = Body::Values {
        open: tags.argument,
        ends: slice::from_ref(&tags.argument_end),
    };
    tagged(text, tags.open, tags.close, scan, last, values, |body| {
        named(body, tags, schemas).map(|call| vec![call])
    })
}

/// Parses the rest of `<invoke name="f">` with its arguments, from the name on.
fn named(body: &str, tags: &NamedTags, schemas: &Schemas) -> Result<ParsedCall, ToolCallError> {
    let (name, mut rest) = head_of(body)?;
    if name.is_empty() {
        return Err(ToolCallError::Empty);
    }
    let mut arguments = Map::new();
    while let Some(after) = rest.trim_start().strip_prefix(tags.argument) {
        let (key, value) = head_of(after)?;
        let (argument, end) = (tags.argument, tags.argument_end);
        let (value, tail) = value_to(value, argument, end, argument)?;
        let quoted = value.strip_prefix("<![CDATA[");
        let value = match quoted.and_then(|text| text.strip_suffix("]]>")) {
            // A text, whatever it looks like.
            Some(text) => Value::String(text.to_owned()),
            None => typed(schemas, name, key, value),
        };
        arguments.insert(key.to_owned(), value);
        rest = tail;
    }
    if !rest.trim().is_empty() {
        return Err(ToolCallError::syntax(
            rest,
            "an argument or the end of the call",
        ));
    }
    Ok(ParsedCall::new(name, arguments))
}

/// Value of an attribute `name="..."`.
pub(crate) fn attribute<'t>(head: &'t str, name: &str) -> Option<&'t str> {
    let (_, after) = head.split_once(&format!("{name}=\""))?;
    after.split_once('"').map(|(value, _)| value)
}

/// An attribute of DSML.
fn dsml_attribute<'t>(head: &'t str, name: &str) -> Result<&'t str, ToolCallError> {
    let found = attribute(head, name);
    found.ok_or_else(|| ToolCallError::syntax(head, "the attributes name and string"))
}

/// Parses a call whose arguments are pairs of a key and a value.
pub(crate) fn paired_call(
    text: &str,
    tags: &'static PairTags,
    scan: &mut Scan,
    last: bool,
    schemas: &Schemas,
) -> Region {
    let values = Body::Values {
        open: tags.value,
        ends: slice::from_ref(&tags.value_end),
    };
    tagged(text, tags.open, tags.close, scan, last, values, |body| {
        pairs(body, tags, schemas).map(|call| vec![call])
    })
}

/// Parses the body of a call whose arguments are pairs of a key and a value.
fn pairs(body: &str, tags: &PairTags, schemas: &Schemas) -> Result<ParsedCall, ToolCallError> {
    let (name, mut rest) = match body.find(tags.key) {
        Some(at) => body.split_at(at),
        None => (body, ""),
    };
    let name = name.trim();
    let name = name.strip_suffix(tags.name_end).unwrap_or(name).trim();
    if name.is_empty() {
        return Err(ToolCallError::Empty);
    }
    if name.contains(['\n', '<', '{']) {
        return Err(ToolCallError::syntax(name, "the name of a tool"));
    }
    let mut arguments = Map::new();
    while !rest.trim().is_empty() {
        let (key, after) = between(rest, tags.key, tags.key_end)?;
        let (value, after) = value_of(after, tags.value, tags.value_end, tags.key)?;
        let key = key.trim();
        arguments.insert(key.to_owned(), typed(schemas, name, key, value));
        rest = after;
    }
    Ok(ParsedCall::new(name, arguments))
}

/// Text behind a marker at the start of `text`.
fn opened<'t>(text: &'t str, open: &'static str) -> Result<&'t str, ToolCallError> {
    let body = text.trim_start().strip_prefix(open);
    body.ok_or_else(|| ToolCallError::syntax(text, open))
}

/// Text between two markers at the start of `text`, and the rest.
fn between<'t>(
    text: &'t str,
    open: &'static str,
    close: &'static str,
) -> Result<(&'t str, &'t str), ToolCallError> {
    opened(text, open)?
        .split_once(close)
        .ok_or_else(|| ToolCallError::Unclosed {
            open: open.into(),
            close: close.into(),
        })
}

/// Reads like [`between`], for a value that may contain its end. It extends to the end after which the
/// arguments are over, or the next one begins.
fn value_of<'t>(
    text: &'t str,
    open: &'static str,
    close: &'static str,
    next: &str,
) -> Result<(&'t str, &'t str), ToolCallError> {
    value_to(opened(text, open)?, open, close, next)
}

/// Reads like [`value_of`], after the opening.
pub(crate) fn value_to<'t>(
    body: &'t str,
    open: &'static str,
    close: &'static str,
    next: &str,
) -> Result<(&'t str, &'t str), ToolCallError> {
    let mut ends = body.match_indices(close).map(|(at, _)| at);
    let ends_at = |at: &usize| {
        let after = body[at + close.len()..].trim_start();
        after.is_empty() || after.starts_with(next)
    };
    // Other text behind a value is an error of the caller.
    let first = ends.clone().next();
    let end = ends
        .find(ends_at)
        .or(first)
        .ok_or_else(|| ToolCallError::Unclosed {
            open: open.into(),
            close: close.into(),
        })?;
    Ok((&body[..end], &body[end + close.len()..]))
}

/// Parses the body of an XML call.
pub(crate) fn xml(body: &str, schemas: &Schemas) -> Result<ParsedCall, ToolCallError> {
    if body.trim().is_empty() {
        return Err(ToolCallError::Empty);
    }
    let inner = match body.trim().strip_suffix(FUNCTION_END) {
        Some(inner) => inner
            .strip_prefix(FUNCTION)
            .ok_or_else(|| ToolCallError::syntax(body, FUNCTION))?,
        None => {
            let (_, tail) = between(body, FUNCTION, FUNCTION_END)?;
            return Err(ToolCallError::syntax(tail, TOOL_CALL_END));
        }
    };
    let (name, mut rest) = inner
        .split_once('>')
        .ok_or_else(|| ToolCallError::syntax(inner, "> after the name"))?;
    let name = name.trim();
    let mut arguments = Map::new();
    while !rest.trim().is_empty() {
        let (parameter, after) = value_of(rest, PARAMETER, PARAMETER_END, PARAMETER)?;
        let (key, value) = parameter
            .split_once('>')
            .ok_or_else(|| ToolCallError::syntax(parameter, "> after the name"))?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let key = key.trim();
        arguments.insert(key.to_owned(), typed(schemas, name, key, value));
        rest = after;
    }
    Ok(ParsedCall::new(name, arguments))
}

/// The value of an argument that is written without quotes.
fn typed(schemas: &Schemas, tool: &str, key: &str, raw: &str) -> Value {
    let schema = schemas.iter().find(|(name, _)| name == tool);
    values::read(schema.map_or(&Value::Null, |(_, schema)| schema), key, raw)
}
