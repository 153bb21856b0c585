//! Parsers for a single call at the start of a text.
//!
//! [`marks`] returns the markers at which [`crate::TurnParser`] calls [`read`] with the text from the marker
//! on. The result is [`Region::More`] until the call is complete. [`Scan`] keeps the progress between calls,
//! so that a long call is scanned once.

use crate::elements;
use crate::marked::{
    DSML_PARAMETER, DSML_PARAMETER_END, FUNCTION, FUNCTION_END, GLM, HY3, PARAMETER, PARAMETER_END,
    Schemas, TOOL_CALL, TOOL_CALL_END, dsml, paired_call, xml,
};
use crate::notations;
use crate::python;
use crate::recipients;
use crate::region::{
    Body, MAX_HEAD, Marks, Region, Scan, Span, code, endless_json, json_calls, json_sequence,
    object, owned, parse_json, span, tagged,
};
use crate::tool_call::{ParsedCall, ToolCallError, ToolCallFormat};
use serde_json::{Map, Value};

/// Start of a call of a built-in tool of Llama.
pub(crate) const PYTHON_TAG: &str = "<|python_tag|>";
/// Start of a DeepSeek call up to V3.1.
const DEEPSEEK_BEGIN: &str = "<｜tool▁call▁begin｜>";
/// Separates name and arguments of a DeepSeek call.
const DEEPSEEK_SEP: &str = "<｜tool▁sep｜>";
const DEEPSEEK_END: &str = "<｜tool▁call▁end｜>";
/// Start of a DeepSeek call from V3.2 on.
const DSML_INVOKE: &str = "<｜DSML｜invoke";
const DSML_INVOKE_END: &str = "</｜DSML｜invoke>";

/// Returns the markers of a format.
pub(crate) fn marks(format: &ToolCallFormat) -> Marks {
    let tag = |open: &str, close: &str| Marks::pair(open, close, &[]);
    match format {
        ToolCallFormat::Hermes | ToolCallFormat::SmolLm | ToolCallFormat::Glm => {
            tag(TOOL_CALL, TOOL_CALL_END)
        }
        ToolCallFormat::Xml => Marks {
            open: owned(&[TOOL_CALL, FUNCTION]),
            ..tag(TOOL_CALL, TOOL_CALL_END)
        },
        ToolCallFormat::Tag { tag: name, .. } | ToolCallFormat::List { tag: name } => {
            tag(&format!("<{name}>"), &format!("</{name}>"))
        }
        ToolCallFormat::Hy3 => {
            let wrapper = ["<tool_calls:opensource>", "</tool_calls:opensource>"];
            Marks::pair(HY3.open, HY3.close, &wrapper)
        }
        ToolCallFormat::Fence { language, .. } => Marks {
            open: vec![format!("```{language}")],
            ..Marks::default()
        },
        ToolCallFormat::Llama3 => Marks {
            open: owned(&[PYTHON_TAG, FUNCTION]),
            json_start: true,
            ..Marks::default()
        },
        ToolCallFormat::Mistral => Marks {
            open: owned(&["[TOOL_CALLS]"]),
            ..Marks::default()
        },
        ToolCallFormat::DeepSeek => Marks {
            open: owned(&[DEEPSEEK_BEGIN, DSML_INVOKE]),
            wrapper: owned(&[
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜DSML｜function_calls>",
                "</｜DSML｜function_calls>",
                "<｜DSML｜tool_calls>",
                "</｜DSML｜tool_calls>",
            ]),
            stray: vec![
                (DEEPSEEK_BEGIN.into(), DEEPSEEK_END.into()),
                (DSML_INVOKE.into(), DSML_INVOKE_END.into()),
            ],
            ..Marks::default()
        },
        ToolCallFormat::Json => Marks {
            open: owned(&["```json"]),
            json_start: true,
            ..Marks::default()
        },
        ToolCallFormat::Functionary => recipients::functionary_marks(),
        ToolCallFormat::Muse => recipients::muse_marks(),
        ToolCallFormat::KimiK3 => elements::kimi_marks(),
        ToolCallFormat::MiniMaxM3 => elements::minimax_marks(),
        other => notations::marks(other),
    }
}

/// Parses the call at the start of `text`. `last` means that no text follows, and the result is not
/// [`Region::More`].
pub(crate) fn read(
    format: &ToolCallFormat,
    text: &str,
    scan: &mut Scan,
    last: bool,
    schemas: &Schemas,
) -> Region {
    match format {
        ToolCallFormat::Hermes | ToolCallFormat::SmolLm => {
            tool_call(text, scan, last, Body::Json, json_calls)
        }
        ToolCallFormat::Glm => paired_call(text, &GLM, scan, last, schemas),
        ToolCallFormat::Hy3 => paired_call(text, &HY3, scan, last, schemas),
        ToolCallFormat::Xml if text.starts_with(TOOL_CALL) => {
            tool_call(text, scan, last, XML_VALUES, |body| {
                xml(body, schemas).map(|call| vec![call])
            })
        }
        ToolCallFormat::Xml => bare_function(text, scan, last, schemas),
        ToolCallFormat::List { tag } => {
            let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
            tagged(text, &open, &close, scan, last, Body::Json, json_sequence)
        }
        ToolCallFormat::Tag { tag, tool } => {
            let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
            tagged(text, &open, &close, scan, last, Body::Text, |body| {
                code(body, tool)
            })
        }
        ToolCallFormat::Fence { language, tool } => {
            let open = format!("```{language}");
            tagged(text, &open, "```", scan, last, Body::Text, |body| {
                code(body, tool)
            })
        }
        ToolCallFormat::Llama3 => llama(text, scan, last, schemas),
        ToolCallFormat::Mistral => mistral(text, scan, last),
        ToolCallFormat::DeepSeek if text.starts_with(DSML_INVOKE) => tagged(
            text,
            DSML_INVOKE,
            DSML_INVOKE_END,
            scan,
            last,
            DSML_VALUES,
            |body| dsml(body).map(|call| vec![call]),
        ),
        ToolCallFormat::DeepSeek => tagged(
            text,
            DEEPSEEK_BEGIN,
            DEEPSEEK_END,
            scan,
            last,
            Body::Json,
            |body| deepseek(body).map(|call| vec![call]),
        ),
        ToolCallFormat::Json if text.starts_with("```json") => fenced_json(text, scan, last),
        ToolCallFormat::Json => bare_json(text, scan, last),
        ToolCallFormat::Seed => bare_function(text, scan, last, schemas),
        ToolCallFormat::Functionary => recipients::functionary(text, scan, last),
        ToolCallFormat::Muse => recipients::muse(text, scan, last, schemas),
        ToolCallFormat::KimiK3 => elements::kimi(text, scan, last),
        ToolCallFormat::MiniMaxM3 => elements::minimax(text, scan, last, schemas),
        other => notations::read(other, text, scan, last, schemas),
    }
}

const XML_VALUES: Body = Body::Values {
    open: PARAMETER,
    ends: &[PARAMETER_END, FUNCTION_END],
};
const DSML_VALUES: Body = Body::Values {
    open: DSML_PARAMETER,
    ends: &[DSML_PARAMETER_END],
};

/// Parses a call in `<tool_call>`.
fn tool_call(
    text: &str,
    scan: &mut Scan,
    last: bool,
    body: Body,
    parse: impl Fn(&str) -> Result<Vec<ParsedCall>, ToolCallError>,
) -> Region {
    tagged(text, TOOL_CALL, TOOL_CALL_END, scan, last, body, parse)
}

/// True if a JSON value has the form of calls.
fn is_call(value: &Value) -> bool {
    let one = |v: &Value| {
        let v = if v["function"].is_object() {
            &v["function"]
        } else {
            v
        };
        v["name"].is_string() && (v.get("arguments").is_some() || v.get("parameters").is_some())
    };
    match value {
        Value::Array(list) => !list.is_empty() && list.iter().all(one),
        other => one(other),
    }
}

/// Parses a JSON value at the start of a turn. It is text if it does not have the form of a call.
fn bare_json(text: &str, scan: &mut Scan, last: bool) -> Region {
    let Some(used) = scan.json.advance(text, 0, text.len()) else {
        return if last {
            bare_json_end(text)
        } else {
            Region::More
        };
    };
    match parse_json(&text[..used]) {
        Ok(value) if is_call(&value) => Region::of(used, json_calls(&text[..used])),
        Ok(_) => Region::Text { used },
        Err(error) if text[..used].contains("\"name\"") => Region::Broken { used, error },
        Err(_) => Region::Text { used },
    }
}

/// Parses a call in a Markdown fence.
fn fenced_json(text: &str, scan: &mut Scan, last: bool) -> Region {
    let (open, close) = ("```json", "```");
    let end = match span(text, open, close, scan, last, Body::Json) {
        Span::More => return Region::More,
        Span::Missing => return bare_json_end(text),
        Span::End(end) => end,
    };
    let (body, used) = (&text[open.len()..end], end + close.len());
    match parse_json(body) {
        Ok(value) if is_call(&value) => Region::of(used, json_calls(body)),
        Err(error) if body.contains("\"name\"") => Region::Broken { used, error },
        _ => Region::Text { used },
    }
}

/// Classifies an incomplete value at the end of a turn.
fn bare_json_end(text: &str) -> Region {
    let used = text.len();
    if text.contains("\"name\"") {
        let error = endless_json();
        return Region::Broken { used, error };
    }
    Region::Text { used }
}

/// Parses the formats of Llama 3.
fn llama(text: &str, scan: &mut Scan, last: bool, schemas: &Schemas) -> Region {
    if text.starts_with(FUNCTION) {
        return tagged(
            text,
            FUNCTION,
            FUNCTION_END,
            scan,
            last,
            Body::Json,
            |body| {
                let (name, json) = body
                    .split_once('>')
                    .ok_or_else(|| ToolCallError::syntax(body, "> after the name"))?;
                let arguments = object(Some(&parse_json(json)?))?;
                Ok(vec![ParsedCall::new(name.trim(), arguments)])
            },
        );
    }
    let Some(body) = text.strip_prefix(PYTHON_TAG) else {
        return bare_json(text, scan, last);
    };
    let start = text.len() - body.trim_start().len();
    let rest = &text[start..];
    if rest.starts_with(['{', '[']) {
        return match scan.json.advance(text, start, text.len()) {
            Some(used) => {
                let json = &text[start..used];
                let call = python_arguments(json, schemas).map(|call| Ok(vec![call]));
                Region::of(used, call.unwrap_or_else(|| json_calls(json)))
            }
            None if last => Region::Broken {
                used: text.len(),
                error: endless_json(),
            },
            None => Region::More,
        };
    }
    if !last {
        return Region::More;
    }
    let calls = match built_in(rest.trim()) {
        Some(call) => call.map(|call| vec![call]),
        None => code(rest, "code_interpreter"),
    };
    Region::of(text.len(), calls)
}

/// A call of the declared tool `python` by its arguments only, as Functionary 3.1 writes it.
fn python_arguments(json: &str, schemas: &Schemas) -> Option<ParsedCall> {
    let value = parse_json(json).ok().filter(|value| !is_call(value))?;
    let declared = schemas.iter().any(|(name, _)| name == "python");
    match value {
        Value::Object(arguments) if declared => Some(ParsedCall::new("python", arguments)),
        _ => None,
    }
}

/// Parses a built-in tool call `brave_search.call(query="...")`.
fn built_in(text: &str) -> Option<Result<ParsedCall, ToolCallError>> {
    let (name, rest) = text.split_once(".call(")?;
    let inner = rest.strip_suffix(')')?;
    let word = |s: &str| !s.is_empty() && s.chars().all(|c| c.is_alphanumeric() || c == '_');
    if !word(name) {
        return None;
    }
    let mut arguments = Map::new();
    let mut rest = inner.trim();
    while !rest.is_empty() {
        let Some((key, after)) = rest.split_once('=').filter(|(key, _)| word(key.trim())) else {
            return Some(Err(ToolCallError::syntax(
                rest,
                "an argument key=\"value\"",
            )));
        };
        let Some((value, left)) = python::first(after) else {
            return Some(Err(ToolCallError::syntax(after, "a JSON value")));
        };
        arguments.insert(key.trim().to_owned(), value);
        rest = left.trim_start_matches([',', ' ', '\n']);
    }
    Some(Ok(ParsedCall::new(name, arguments)))
}

/// Parses both formats of Mistral.
fn mistral(text: &str, scan: &mut Scan, last: bool) -> Region {
    let open = "[TOOL_CALLS]";
    let broken = |error| Region::Broken {
        used: text.len(),
        error,
    };
    let body = &text[open.len()..];
    let start = text.len() - body.trim_start().len();
    let rest = &text[start..];
    let json_at = if rest.starts_with('[') || rest.starts_with('{') {
        start
    } else {
        // The text may arrive in any pieces: the search ends at the same byte for all of them.
        let head = &rest[..rest.floor_char_boundary(MAX_HEAD)];
        match head.find('{') {
            Some(i) => start + i,
            None if !last && rest.len() < MAX_HEAD => return Region::More,
            None if rest.is_empty() => return broken(ToolCallError::Empty),
            None => {
                let error = ToolCallError::syntax(head, "[ARGS] and a JSON object");
                let used = start + head.len();
                return Region::Broken { used, error };
            }
        }
    };
    let Some(used) = scan.json.advance(text, json_at, text.len()) else {
        return if last {
            broken(endless_json())
        } else {
            Region::More
        };
    };
    let json = &text[json_at..used];
    if json_at == start {
        return Region::of(used, json_calls(json));
    }
    let head = text[start..json_at].trim();
    let head = head.strip_suffix("[ARGS]").unwrap_or(head);
    let (name, id) = match head.split_once("[CALL_ID]") {
        Some((name, id)) => (name.trim(), Some(id.trim().to_owned())),
        None => (head.trim(), None),
    };
    if name.is_empty() || name.contains(char::is_whitespace) {
        let error = ToolCallError::syntax(head, "the name of a tool");
        return Region::Broken { used, error };
    }
    let arguments = parse_json(json).and_then(|value| object(Some(&value)));
    let call = arguments.map(|arguments| ParsedCall {
        id,
        name: name.to_owned(),
        arguments,
    });
    Region::of(used, call.map(|call| vec![call]))
}

/// Parses `function<｜tool▁sep｜>name` with fenced JSON (V3, R1), or `name<｜tool▁sep｜>` with JSON (V3.1).
fn deepseek(body: &str) -> Result<ParsedCall, ToolCallError> {
    let (left, right) = body
        .split_once(DEEPSEEK_SEP)
        .ok_or_else(|| ToolCallError::syntax(body, "<｜tool▁sep｜> after the name"))?;
    let (name, json) = match right.split_once("```json") {
        Some((name, fenced)) if left.trim() == "function" && !name.contains('{') => {
            let json = fenced.trim_end();
            (name, json.strip_suffix("```").unwrap_or(json))
        }
        _ => (left, right),
    };
    let name = name.trim();
    if name.is_empty() {
        return Err(ToolCallError::Field {
            field: "name",
            expected: "the name of a tool",
        });
    }
    Ok(ParsedCall::new(name, object(Some(&parse_json(json)?))?))
}

/// Parses `<function=` without `<tool_call>`, which Qwen3-Coder sometimes omits. A following `</tool_call>`
/// is part of the call.
fn bare_function(text: &str, scan: &mut Scan, last: bool, schemas: &Schemas) -> Region {
    let region = tagged(text, "", FUNCTION_END, scan, last, XML_VALUES, |body| {
        xml(&format!("{body}{FUNCTION_END}"), schemas).map(|call| vec![call])
    });
    let used = match &region {
        Region::Calls { used, .. } => *used,
        _ => return region,
    };
    let tail = &text[used..];
    let trimmed = tail.trim_start();
    if trimmed.starts_with(TOOL_CALL_END) {
        let used = text.len() - trimmed.len() + TOOL_CALL_END.len();
        return match region {
            Region::Calls { calls, .. } => Region::Calls { used, calls },
            other => other,
        };
    }
    if !last && TOOL_CALL_END.starts_with(trimmed) {
        // Parsed again from the start, when the rest of the marker has arrived.
        *scan = Scan::default();
        return Region::More;
    }
    region
}
