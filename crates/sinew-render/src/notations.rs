//! Notations of calls of newer families: gpt-oss (Harmony), Kimi K2, MiniMax M2, MiniCPM, Gemma 4, LFM2,
//! Cohere, Apertus, GigaChat.
//!
//! Sources: the chat templates of the models, as the packages of `tests/templates/README.md` ship them.

use crate::marked::{NamedTags, Schemas, named_call};
use crate::python;
use crate::region::{
    Body, Marks, Region, Scan, endless_json, json_calls, object, owned, parse_json, tagged,
};
use crate::tool_call::{ParsedCall, ToolCallError, ToolCallFormat};
use serde_json::{Map, Value};
use sinew_types::json;

/// Start of a call of Harmony behind `<|start|>assistant`; the name follows.
const HARMONY_TO: &str = " to=functions.";
/// The same on a channel that stands before the recipient.
const HARMONY_CHANNEL_TO: &str = "<|channel|>commentary to=functions.";
/// End of the header of a message of Harmony.
const HARMONY_MESSAGE: &str = "<|message|>";
/// End of a call of Harmony, which also ends the turn.
const HARMONY_CALL: &str = "<|call|>";

const KIMI_OPEN: &str = "<|tool_call_begin|>";
const KIMI_ARGUMENTS: &str = "<|tool_call_argument_begin|>";
const KIMI_CLOSE: &str = "<|tool_call_end|>";

const MINIMAX: NamedTags = NamedTags {
    open: "<invoke name=\"",
    close: "</invoke>",
    argument: "<parameter name=\"",
    argument_end: "</parameter>",
};
const MINICPM: NamedTags = NamedTags {
    open: "<function name=\"",
    close: "</function>",
    argument: "<param name=\"",
    argument_end: "</param>",
};

const GEMMA_OPEN: &str = "<|tool_call>";
const GEMMA_CLOSE: &str = "<tool_call|>";
/// Stands before and after a text in the arguments of Gemma.
const GEMMA_QUOTE: &str = "<|\"|>";
/// Values inside of values of Gemma that are read.
const MAX_DEPTH: usize = 64;

const LFM_OPEN: &str = "<|tool_call_start|>";
const LFM_CLOSE: &str = "<|tool_call_end|>";

const COHERE_OPEN: &str = "<|START_ACTION|>";
const COHERE_CLOSE: &str = "<|END_ACTION|>";

const APERTUS_OPEN: &str = "<|tools_prefix|>";
const APERTUS_CLOSE: &str = "<|tools_suffix|>";

/// Start of a call of GigaChat 3.1.
const GIGACHAT_OPEN: &str = "<|function_call|>";
/// Start of a call of GigaChat 3, which writes it as a separate message.
const GIGACHAT_MESSAGE: &str = "function call<|role_sep|>";

/// Markers of a format of this module.
pub(crate) fn marks(format: &ToolCallFormat) -> Marks {
    let pair = Marks::pair;
    match format {
        ToolCallFormat::Harmony => Marks {
            open: owned(&[HARMONY_TO, HARMONY_CHANNEL_TO]),
            wrapper: owned(&[
                "<|start|>assistant",
                "<|channel|>final<|message|>",
                "<|channel|>final <|constrain|>json<|message|>",
                "<|channel|>commentary<|message|>",
                "<|end|>",
                "<|return|>",
                HARMONY_CALL,
            ]),
            ..Marks::default()
        },
        ToolCallFormat::Kimi => {
            let section = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"];
            pair(KIMI_OPEN, KIMI_CLOSE, &section)
        }
        ToolCallFormat::MiniMax => {
            let list = ["<minimax:tool_call>", "</minimax:tool_call>"];
            pair(MINIMAX.open, MINIMAX.close, &list)
        }
        ToolCallFormat::MiniCpm => pair(MINICPM.open, MINICPM.close, &[]),
        ToolCallFormat::Seed => Marks {
            open: owned(&["<function="]),
            wrapper: owned(&["<seed:tool_call>", "</seed:tool_call>"]),
            ..Marks::default()
        },
        ToolCallFormat::Gemma => pair(GEMMA_OPEN, GEMMA_CLOSE, &[]),
        ToolCallFormat::Lfm => pair(LFM_OPEN, LFM_CLOSE, &[]),
        ToolCallFormat::Cohere => pair(COHERE_OPEN, COHERE_CLOSE, &[]),
        ToolCallFormat::Apertus => pair(APERTUS_OPEN, APERTUS_CLOSE, &[]),
        ToolCallFormat::GigaChat => Marks {
            open: owned(&[GIGACHAT_OPEN, GIGACHAT_MESSAGE]),
            wrapper: owned(&["<|message_sep|>"]),
            ..Marks::default()
        },
        _ => Marks::default(),
    }
}

/// Control tokens inside of calls that are in no marker, and whose text the parsers need.
pub(crate) const INNER: [&str; 2] = [KIMI_ARGUMENTS, GEMMA_QUOTE];

/// Parses the call at the start of `text`. `last` means that no text follows.
pub(crate) fn read(
    format: &ToolCallFormat,
    text: &str,
    scan: &mut Scan,
    last: bool,
    schemas: &Schemas,
) -> Region {
    let one = |call: Result<ParsedCall, ToolCallError>| call.map(|call| vec![call]);
    match format {
        ToolCallFormat::Harmony => harmony(text, last),
        ToolCallFormat::Kimi => tagged(
            text,
            KIMI_OPEN,
            KIMI_CLOSE,
            scan,
            last,
            Body::Json,
            |body| one(kimi(body)),
        ),
        ToolCallFormat::MiniMax => named_call(text, &MINIMAX, scan, last, schemas),
        ToolCallFormat::MiniCpm => named_call(text, &MINICPM, scan, last, schemas),
        ToolCallFormat::Gemma => tagged(
            text,
            GEMMA_OPEN,
            GEMMA_CLOSE,
            scan,
            last,
            Body::Text,
            |body| one(gemma(body)),
        ),
        ToolCallFormat::Lfm => tagged(text, LFM_OPEN, LFM_CLOSE, scan, last, Body::Text, pythonic),
        ToolCallFormat::Cohere => {
            let (open, close) = (COHERE_OPEN, COHERE_CLOSE);
            tagged(text, open, close, scan, last, Body::Json, json_calls)
        }
        ToolCallFormat::Apertus => {
            let (open, close) = (APERTUS_OPEN, APERTUS_CLOSE);
            tagged(text, open, close, scan, last, Body::Json, keyed)
        }
        ToolCallFormat::GigaChat => gigachat(text, scan, last),
        // The formats of other modules do not come here.
        _ => Region::Text { used: text.len() },
    }
}

/// Parses a call of Harmony. The end of the turn ends it, too: an engine may leave out the token that
/// stopped it.
fn harmony(text: &str, last: bool) -> Region {
    let (end, used) = match text.find(HARMONY_CALL) {
        Some(end) => (end, end + HARMONY_CALL.len()),
        None if last => (text.len(), text.len()),
        None => return Region::More,
    };
    Region::of(used, harmony_call(&text[..end]).map(|call| vec![call]))
}

/// Parses ` to=functions.name<|channel|>commentary json<|message|>{...}`.
fn harmony_call(text: &str) -> Result<ParsedCall, ToolCallError> {
    let (head, json) = text
        .split_once(HARMONY_MESSAGE)
        .ok_or_else(|| ToolCallError::syntax(text, "<|message|> after the name"))?;
    let (_, name) = head
        .split_once(HARMONY_TO)
        .ok_or_else(|| ToolCallError::syntax(head, "to=functions. and the name of a tool"))?;
    let end = name.find([' ', '<', '\n']).unwrap_or(name.len());
    let name = &name[..end];
    if name.is_empty() {
        return Err(ToolCallError::Empty);
    }
    Ok(ParsedCall::new(name, object(Some(&parse_json(json)?))?))
}

/// Parses `<|function_call|>{"name": ..., "arguments": {...}}`, or the same JSON as a separate message.
fn gigachat(text: &str, scan: &mut Scan, last: bool) -> Region {
    let open = [GIGACHAT_OPEN, GIGACHAT_MESSAGE].into_iter();
    let open = open.filter(|mark| text.starts_with(*mark)).map(str::len);
    let start = open.max().unwrap_or(0);
    match scan.json.advance(text, start, text.len()) {
        Some(used) => Region::of(used, json_calls(&text[start..used])),
        None if last => Region::Broken {
            used: text.len(),
            error: match text[start..].trim() {
                "" => ToolCallError::Empty,
                _ => endless_json(),
            },
        },
        None => Region::More,
    }
}

/// Parses `[{"name": {...}}, ...]`, where each name of a tool is the key of its arguments.
fn keyed(body: &str) -> Result<Vec<ParsedCall>, ToolCallError> {
    if body.trim().is_empty() {
        return Err(ToolCallError::Empty);
    }
    let list = match parse_json(body)? {
        Value::Array(list) => list,
        one => vec![one],
    };
    if list.is_empty() {
        return Err(ToolCallError::Empty);
    }
    list.iter().map(keyed_call).collect()
}

fn keyed_call(value: &Value) -> Result<ParsedCall, ToolCallError> {
    let one = value.as_object().filter(|map| map.len() == 1);
    let one = one.and_then(|map| map.iter().next());
    let (name, arguments) = one.ok_or(ToolCallError::Field {
        field: "name",
        expected: "the name of a tool as the only key, with its arguments",
    })?;
    Ok(ParsedCall::new(name, object(Some(arguments))?))
}

/// Parses `functions.name:0<|tool_call_argument_begin|>{...}`. The part before the arguments is the id.
fn kimi(body: &str) -> Result<ParsedCall, ToolCallError> {
    let (id, json) = body
        .split_once(KIMI_ARGUMENTS)
        .ok_or_else(|| ToolCallError::syntax(body, KIMI_ARGUMENTS))?;
    let id = id.trim();
    let name = id.strip_prefix("functions.").unwrap_or(id);
    let digits = |index: &str| !index.is_empty() && index.bytes().all(|b| b.is_ascii_digit());
    let name = match name.rsplit_once(':') {
        Some((name, index)) if digits(index) => name,
        _ => name,
    };
    if name.is_empty() {
        return Err(ToolCallError::Empty);
    }
    Ok(ParsedCall {
        id: Some(id.to_owned()),
        name: name.to_owned(),
        arguments: object(Some(&parse_json(json)?))?,
    })
}

/// Parses `[name(k='v', n=5), other()]`.
fn pythonic(body: &str) -> Result<Vec<ParsedCall>, ToolCallError> {
    let body = body.trim();
    let list = body.strip_prefix('[').and_then(|b| b.strip_suffix(']'));
    let mut rest = list.unwrap_or(body).trim();
    let word =
        |s: &str| !s.is_empty() && s.chars().all(|c| c.is_alphanumeric() || "_.-".contains(c));
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let call = rest.split_once('(').filter(|(name, _)| word(name.trim()));
        let (name, mut inner) =
            call.ok_or_else(|| ToolCallError::syntax(rest, "name(key=value)"))?;
        let mut arguments = Map::new();
        loop {
            inner = inner.trim_start();
            if let Some(after) = inner.strip_prefix(')') {
                rest = after.trim_start().trim_start_matches(',').trim_start();
                break;
            }
            let pair = inner.split_once('=').filter(|(key, _)| word(key.trim()));
            let (key, value) =
                pair.ok_or_else(|| ToolCallError::syntax(inner, "key=value or )"))?;
            let read = python::first_of_lines(value);
            let (value, left) = read.ok_or_else(|| ToolCallError::syntax(value, "a value"))?;
            arguments.insert(key.trim().to_owned(), value);
            let left = left.trim_start();
            inner = left.strip_prefix(',').unwrap_or(left);
        }
        calls.push(ParsedCall::new(name.trim(), arguments));
    }
    if calls.is_empty() {
        return Err(ToolCallError::Empty);
    }
    Ok(calls)
}

/// Parses `call:name{k:<|"|>v<|"|>,n:5}`.
fn gemma(body: &str) -> Result<ParsedCall, ToolCallError> {
    let wrong = |text: &str, expected| ToolCallError::syntax(text, expected);
    let body = body.trim();
    let call = body.strip_prefix("call:");
    let call = call.ok_or_else(|| wrong(body, "call: and the name of a tool"))?;
    let at = call
        .find('{')
        .ok_or_else(|| wrong(call, "{ after the name"))?;
    let (name, braces) = call.split_at(at);
    let mut rest = braces;
    match gemma_value(&mut rest, 0) {
        Some(Value::Object(arguments)) if rest.trim().is_empty() && !name.trim().is_empty() => {
            Ok(ParsedCall::new(name.trim(), arguments))
        }
        _ => Err(wrong(rest, "arguments as in {key:5}")),
    }
}

/// A value of Gemma at the start of `rest`, which is moved behind it.
fn gemma_value(rest: &mut &str, depth: usize) -> Option<Value> {
    if depth > MAX_DEPTH {
        return None;
    }
    let text = rest.trim_start();
    if let Some(text) = text.strip_prefix(GEMMA_QUOTE) {
        let (text, after) = text.split_once(GEMMA_QUOTE)?;
        *rest = after;
        return Some(text.into());
    }
    if let Some(mut inner) = text.strip_prefix('{') {
        let mut map = Map::new();
        while !took(&mut inner, '}') {
            let (key, after) = inner.split_once(':')?;
            inner = after;
            let key = key.replace(GEMMA_QUOTE, "");
            let value = gemma_value(&mut inner, depth + 1)?;
            map.insert(key.trim().to_owned(), value);
            if !took(&mut inner, ',') && !inner.trim_start().starts_with('}') {
                return None;
            }
        }
        *rest = inner;
        return Some(map.into());
    }
    if let Some(mut inner) = text.strip_prefix('[') {
        let mut items = Vec::new();
        while !took(&mut inner, ']') {
            items.push(gemma_value(&mut inner, depth + 1)?);
            if !took(&mut inner, ',') && !inner.trim_start().starts_with(']') {
                return None;
            }
        }
        *rest = inner;
        return Some(items.into());
    }
    let end = text.find([',', '}', ']']).unwrap_or(text.len());
    let (word, after) = text.split_at(end);
    *rest = after;
    let word = word.trim();
    match json::from_str::<Value>(word) {
        Ok(value) => Some(value),
        Err(_) if word == "none" || word == "None" => Some(Value::Null),
        Err(_) if word.is_empty() => None,
        Err(_) => Some(word.into()),
    }
}

/// Takes a character behind white space.
fn took(rest: &mut &str, wanted: char) -> bool {
    match rest.trim_start().strip_prefix(wanted) {
        Some(after) => {
            *rest = after;
            true
        }
        None => false,
    }
}
