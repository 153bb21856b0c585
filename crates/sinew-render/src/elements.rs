//! Calls as elements whose tags have control tokens, so that no text can close them: Kimi K3 and MiniMax M3.
//!
//! ```text
//! <|open|>call tool="run" index="1"<|sep|>                          NS<invoke name="run">
//! <|open|>argument key="n" type="number"<|sep|>5<|close|>argument<|sep|>    NS<n>5NS</n>
//! <|close|>call<|sep|>                                              NS</invoke>
//! ```
//!
//! `NS` is `]<]minimax[>[`. MiniMax M3 writes objects and lists as elements inside of elements; the types of
//! their texts follow from the tool's schema ([`crate::values`]).
//!
//! Sources: the chat templates of the models, as the packages of `tests/templates/README.md` ship them.

use crate::marked::{Schemas, attribute, value_to};
use crate::region::{Body, Marks, Region, Scan, object, parse_json, tagged};
use crate::tool_call::{ParsedCall, ToolCallError};
use crate::values::{self, Schema};
use serde_json::{Map, Value};

const KIMI_OPEN: &str = "<|open|>call ";
const KIMI_CLOSE: &str = "<|close|>call<|sep|>";
/// End of a tag of Kimi K3.
const KIMI_SEP: &str = "<|sep|>";
const KIMI_ARGUMENT: &str = "<|open|>argument ";
const KIMI_ARGUMENT_END: &str = "<|close|>argument<|sep|>";
/// Arguments of Kimi K3 that are no object in the client's message.
const KIMI_JSON: &str = "<|open|>json ";
const KIMI_JSON_END: &str = "<|close|>json<|sep|>";
const KIMI_VALUES: Body = Body::Values {
    open: KIMI_ARGUMENT,
    ends: &[KIMI_ARGUMENT_END, KIMI_JSON_END],
};

/// Stands before each tag of MiniMax M3.
pub(crate) const NS: &str = "]<]minimax[>[";
const MINIMAX_OPEN: &str = "]<]minimax[>[<invoke name=\"";
const MINIMAX_CLOSE: &str = "]<]minimax[>[</invoke>";
/// Name of the elements of a list of MiniMax M3.
const ITEM: &str = "item";
/// Elements inside of elements that are read.
const MAX_DEPTH: usize = 64;

/// Markers of Kimi K3.
pub(crate) fn kimi_marks() -> Marks {
    let wrapper = [
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        "<|close|>message<|sep|>",
    ];
    Marks::pair(KIMI_OPEN, KIMI_CLOSE, &wrapper)
}

/// Markers of MiniMax M3.
pub(crate) fn minimax_marks() -> Marks {
    let wrapper = ["]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"];
    Marks::pair(MINIMAX_OPEN, MINIMAX_CLOSE, &wrapper)
}

/// Parses a call of Kimi K3.
pub(crate) fn kimi(text: &str, scan: &mut Scan, last: bool) -> Region {
    let (open, close) = (KIMI_OPEN, KIMI_CLOSE);
    tagged(text, open, close, scan, last, KIMI_VALUES, |body| {
        kimi_call(body).map(|call| vec![call])
    })
}

/// Splits a tag of Kimi K3 from what follows it.
fn kimi_tag(text: &str) -> Result<(&str, &str), ToolCallError> {
    let found = text.split_once(KIMI_SEP);
    found.ok_or_else(|| ToolCallError::syntax(text, KIMI_SEP))
}

/// An attribute of a tag of Kimi K3.
fn kimi_attribute(tag: &str, name: &str) -> Result<String, ToolCallError> {
    let found = attribute(tag, name).filter(|value| !value.is_empty());
    let value =
        found.ok_or_else(|| ToolCallError::syntax(tag, "the attributes tool, or key and type"))?;
    Ok(value.replace("&quot;", "\"").replace("&amp;", "&"))
}

fn kimi_call(body: &str) -> Result<ParsedCall, ToolCallError> {
    let (tag, mut rest) = kimi_tag(body)?;
    let name = kimi_attribute(tag, "tool")?;
    let mut arguments = Map::new();
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix(KIMI_ARGUMENT) {
            let (tag, value) = kimi_tag(after)?;
            let next = KIMI_ARGUMENT;
            let (value, tail) = value_to(value, KIMI_ARGUMENT, KIMI_ARGUMENT_END, next)?;
            let value = match kimi_attribute(tag, "type")?.as_str() {
                "string" => Value::String(value.to_owned()),
                _ => values::literal(value.trim()).unwrap_or_else(|| value.into()),
            };
            arguments.insert(kimi_attribute(tag, "key")?, value);
            rest = tail;
        } else if let Some(after) = rest.strip_prefix(KIMI_JSON) {
            let (_, value) = kimi_tag(after)?;
            let (value, tail) = value_to(value, KIMI_JSON, KIMI_JSON_END, KIMI_ARGUMENT)?;
            arguments.extend(object(Some(&parse_json(value)?))?);
            rest = tail;
        } else if rest.is_empty() {
            return Ok(ParsedCall::new(name, arguments));
        } else {
            let expected = "an argument or the end of the call";
            return Err(ToolCallError::syntax(rest, expected));
        }
    }
}

/// Parses a call of MiniMax M3.
pub(crate) fn minimax(text: &str, scan: &mut Scan, last: bool, schemas: &Schemas) -> Region {
    let (open, close) = (MINIMAX_OPEN, MINIMAX_CLOSE);
    tagged(text, open, close, scan, last, Body::Text, |body| {
        minimax_call(body, schemas).map(|call| vec![call])
    })
}

fn minimax_call(body: &str, schemas: &Schemas) -> Result<ParsedCall, ToolCallError> {
    let found = body
        .split_once("\">")
        .map(|(name, rest)| (name.trim(), rest));
    let (name, rest) = found.ok_or_else(|| ToolCallError::syntax(body, "\"> after the name"))?;
    if name.is_empty() {
        return Err(ToolCallError::Empty);
    }
    let parameters = schemas.iter().find(|(tool, _)| tool == name);
    let schema = Schema::of(parameters.map_or(&Value::Null, |(_, parameters)| parameters));
    let arguments = elements(rest)?.into_iter();
    let arguments = arguments.map(|element| {
        let value = element.value(schema.property(element.key));
        (element.key.to_owned(), value)
    });
    Ok(ParsedCall::new(name, arguments.collect()))
}

/// An element of MiniMax M3.
struct Element<'t> {
    /// Name in its tags.
    key: &'t str,
    /// Text before the first inner element.
    text: &'t str,
    /// Elements in it.
    inner: Vec<Element<'t>>,
}

impl Element<'_> {
    /// The value by its schema: a list or an object if the element has elements, else a text or what the text
    /// reads as.
    fn value(&self, schema: Schema<'_>) -> Value {
        if self.inner.is_empty() {
            let empty = schema.empty().filter(|_| self.text.trim().is_empty());
            return empty.unwrap_or_else(|| schema.value(self.text));
        }
        let items = self.inner.iter();
        if schema.takes_lists() && self.inner.iter().all(|element| element.key == ITEM) {
            return items.map(|e| e.value(schema.items())).collect();
        }
        let pairs = items.map(|e| (e.key.to_owned(), e.value(schema.property(e.key))));
        Value::Object(pairs.collect())
    }
}

/// Parses a sequence of elements.
fn elements(body: &str) -> Result<Vec<Element<'_>>, ToolCallError> {
    let mut parts = body.split(NS);
    let text = parts.next().unwrap_or_default();
    let root = Element {
        key: "",
        text,
        inner: Vec::new(),
    };
    let mut open = vec![root];
    for part in parts {
        let tag = part.strip_prefix('<').and_then(|tag| tag.split_once('>'));
        let (tag, text) = tag.ok_or_else(|| ToolCallError::syntax(part, "a tag"))?;
        let Some(key) = tag.strip_prefix('/') else {
            if tag.is_empty() || open.len() > MAX_DEPTH {
                return Err(ToolCallError::syntax(part, "a tag that ends"));
            }
            let (key, inner) = (tag, Vec::new());
            open.push(Element { key, text, inner });
            continue;
        };
        let done = open.pop().filter(|element| element.key == key);
        let (Some(done), Some(around)) = (done, open.last_mut()) else {
            return Err(ToolCallError::syntax(part, "the end of the last tag"));
        };
        let stray = [around.text, text]
            .into_iter()
            .find(|t| !t.trim().is_empty());
        if let Some(text) = stray {
            return Err(ToolCallError::syntax(text, "either text or elements"));
        }
        around.inner.push(done);
    }
    match open.pop() {
        Some(root) if open.is_empty() && root.text.trim().is_empty() => Ok(root.inner),
        Some(last) if last.key.is_empty() => Err(ToolCallError::syntax(last.text, "a tag")),
        Some(last) => Err(ToolCallError::syntax(last.key, "the end of the tag")),
        None => Ok(Vec::new()),
    }
}
