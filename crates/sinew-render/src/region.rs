//! Regions of a turn that may be calls: markers, the progress in a region, texts between two markers, and
//! calls as JSON.

use crate::python;
use crate::tool_call::{ParsedCall, ToolCallError};
use serde_json::{Map, Value};
use sinew_types::json;

/// Maximum bytes of name and id before the arguments, and of the name of a recipient.
pub(crate) const MAX_HEAD: usize = 256;

/// Markers of a format in running text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Marks {
    /// Start of a call.
    pub(crate) open: Vec<String>,
    /// Text around a list of calls, which is ignored.
    pub(crate) wrapper: Vec<String>,
    /// Start and end of a call, to detect an end without a start.
    pub(crate) stray: Vec<(String, String)>,
    /// A JSON value at the start of the turn is a call.
    pub(crate) json_start: bool,
    /// The turn starts with a recipient, whose mark is the end of the prompt.
    pub(crate) addressed: bool,
}

impl Marks {
    /// Markers of a format whose calls stand between `open` and `close`, and those around its calls.
    pub(crate) fn pair(open: &str, close: &str, wrapper: &[&str]) -> Self {
        Self {
            open: owned(&[open]),
            wrapper: owned(wrapper),
            stray: vec![(open.to_owned(), close.to_owned())],
            ..Self::default()
        }
    }
}

/// Markers as [`Marks`] keeps them.
pub(crate) fn owned(marks: &[&str]) -> Vec<String> {
    marks.iter().map(|mark| (*mark).to_owned()).collect()
}

/// Result of parsing a text that starts with a marker.
#[derive(Debug, PartialEq)]
pub(crate) enum Region {
    /// More text is needed.
    More,
    /// Complete calls in the first `used` bytes; none if they are a header without calls.
    Calls { used: usize, calls: Vec<ParsedCall> },
    /// The first `used` bytes open reasoning.
    Thought { used: usize },
    /// The first `used` bytes are text, not a call.
    Text { used: usize },
    /// An invalid call in the first `used` bytes.
    Broken { used: usize, error: ToolCallError },
}

impl Region {
    /// The calls that the first `used` bytes hold, or why they are broken.
    pub(crate) fn of(used: usize, calls: Result<Vec<ParsedCall>, ToolCallError>) -> Self {
        match calls {
            Ok(calls) => Self::Calls { used, calls },
            Err(error) => Self::Broken { used, error },
        }
    }
}

/// Progress in a region, so that every byte is scanned once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scan {
    /// Scan for the end of a JSON value.
    pub(crate) json: JsonScan,
    /// Start of the search for the end marker.
    close_from: usize,
    /// First end marker inside of a value.
    inner_close: Option<usize>,
}

/// State of a scan for the end of a JSON value.
#[derive(Clone, Debug, Default)]
pub(crate) struct JsonScan {
    /// Number of scanned bytes.
    at: usize,
    /// Number of open brackets.
    depth: usize,
    /// True inside of a JSON string.
    in_string: bool,
    /// True after a backslash in a string.
    escaped: bool,
}

impl JsonScan {
    /// Scans up to `until`. Returns the end of the outermost value when it is found.
    pub(crate) fn advance(&mut self, text: &str, from: usize, until: usize) -> Option<usize> {
        self.at = self.at.max(from);
        for (i, &byte) in text.as_bytes()[..until].iter().enumerate().skip(self.at) {
            self.at = i + 1;
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(i + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// End of the body between two markers.
pub(crate) enum Span {
    /// The end marker may still arrive.
    More,
    /// Offset of the end marker.
    End(usize),
    /// The text has no end marker.
    Missing,
}

/// Text between two markers: where an end marker is part of a value.
#[derive(Clone, Copy)]
pub(crate) enum Body {
    /// Nowhere.
    Text,
    /// A marker in a string of JSON is part of the value.
    Json,
    /// A marker after an opening of a value is part of it, unless the text before the marker ends as one of
    /// `ends`.
    Values {
        open: &'static str,
        ends: &'static [&'static str],
    },
}

impl Body {
    /// Whether a value continues at the end of `body`.
    fn is_inside(self, body: &str, json: &JsonScan) -> bool {
        match self {
            Self::Text => false,
            Self::Json => json.in_string,
            Self::Values { open, ends } => {
                let body = body.trim_end();
                !ends.iter().any(|end| body.ends_with(end)) && body.contains(open)
            }
        }
    }
}

/// Finds the end marker. Markers inside of values are ignored.
pub(crate) fn span(
    text: &str,
    open: &str,
    close: &str,
    scan: &mut Scan,
    last: bool,
    body: Body,
) -> Span {
    scan.close_from = scan.close_from.max(open.len());
    while let Some(found) = text[scan.close_from..].find(close) {
        let end = scan.close_from + found;
        scan.json.advance(text, open.len(), end);
        if !body.is_inside(&text[open.len()..end], &scan.json) {
            return Span::End(end);
        }
        scan.inner_close.get_or_insert(end);
        scan.close_from = end + close.len();
    }
    // The text may end with a part of the marker.
    let mut from = text.len().saturating_sub(close.len() - 1);
    while !text.is_char_boundary(from) {
        from -= 1;
    }
    scan.close_from = scan.close_from.max(from);
    match scan.inner_close {
        _ if !last => Span::More,
        // The value has no end: the first marker counts.
        Some(end) => Span::End(end),
        None => Span::Missing,
    }
}

/// Parses a call between two markers.
pub(crate) fn tagged(
    text: &str,
    open: &str,
    close: &str,
    scan: &mut Scan,
    last: bool,
    body: Body,
    parse: impl Fn(&str) -> Result<Vec<ParsedCall>, ToolCallError>,
) -> Region {
    match span(text, open, close, scan, last, body) {
        Span::More => Region::More,
        Span::End(end) => {
            let used = end + close.len();
            Region::of(used, parse(&text[open.len()..end]))
        }
        Span::Missing => Region::Broken {
            used: text.len(),
            error: ToolCallError::Unclosed {
                open: open.to_owned(),
                close: close.to_owned(),
            },
        },
    }
}

/// Parses JSON with whitespace around it, or the same in the notation of Python.
pub(crate) fn parse_json(text: &str) -> Result<Value, ToolCallError> {
    json::from_str(text.trim()).or_else(|e| {
        let python = python::literal(text.trim()).filter(|v| v.is_object() || v.is_array());
        python.ok_or_else(|| ToolCallError::Json(e.to_string()))
    })
}

/// Error of a JSON value whose end is missing at the end of a turn.
pub(crate) fn endless_json() -> ToolCallError {
    ToolCallError::Json("the JSON value does not end".into())
}

/// Parses calls as JSON: a list, or objects one after another.
pub(crate) fn json_sequence(body: &str) -> Result<Vec<ParsedCall>, ToolCallError> {
    let whole = json_calls(body);
    let mut rest = body.trim();
    if whole.is_ok() || !rest.starts_with('{') {
        return whole;
    }
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let end = JsonScan::default().advance(rest, 0, rest.len());
        let (one, after) = rest.split_at(end.unwrap_or(rest.len()));
        calls.extend(json_calls(one)?);
        let after = after.trim_start();
        rest = after.strip_prefix(',').unwrap_or(after).trim_start();
    }
    Ok(calls)
}

/// A call of `tool` with the body as argument `code`, without its surrounding line breaks.
pub(crate) fn code(body: &str, tool: &str) -> Result<Vec<ParsedCall>, ToolCallError> {
    if body.trim().is_empty() {
        return Err(ToolCallError::Empty);
    }
    let mut arguments = Map::new();
    let code = body.trim_matches(['\n', '\r']).trim_end();
    arguments.insert("code".into(), Value::String(code.to_owned()));
    Ok(vec![ParsedCall::new(tool, arguments)])
}

/// Parses a JSON object or a list of objects as calls.
pub(crate) fn json_calls(body: &str) -> Result<Vec<ParsedCall>, ToolCallError> {
    if body.trim().is_empty() {
        return Err(ToolCallError::Empty);
    }
    match parse_json(body)? {
        Value::Array(list) if list.is_empty() => Err(ToolCallError::Empty),
        Value::Array(list) => list.iter().map(call_of).collect(),
        one => Ok(vec![call_of(&one)?]),
    }
}

/// Parses `{"name": ..., "arguments": {...}}`. Also accepts `parameters` (Llama), an outer `function`
/// (OpenAI), `tool_name` and `tool_call_id` (Cohere).
fn call_of(value: &Value) -> Result<ParsedCall, ToolCallError> {
    let value = if value["function"].is_object() {
        &value["function"]
    } else {
        value
    };
    let text = |key: &str| value[key].as_str();
    let name = text("name").or_else(|| text("tool_name"));
    let name = name.ok_or(ToolCallError::Field {
        field: "name",
        expected: "the name of a tool",
    })?;
    let arguments = value.get("arguments").or_else(|| value.get("parameters"));
    Ok(ParsedCall {
        id: text("id")
            .or_else(|| text("tool_call_id"))
            .map(str::to_owned),
        name: name.to_owned(),
        arguments: object(arguments)?,
    })
}

/// Parses arguments: an object, or a string that contains one.
pub(crate) fn object(value: Option<&Value>) -> Result<Map<String, Value>, ToolCallError> {
    match value {
        Some(Value::Object(map)) => Ok(map.clone()),
        Some(Value::String(text)) => match parse_json(text)? {
            Value::Object(map) => Ok(map),
            _ => Err(not_an_object()),
        },
        _ => Err(not_an_object()),
    }
}

fn not_an_object() -> ToolCallError {
    ToolCallError::Field {
        field: "arguments",
        expected: "a JSON object",
    }
}
