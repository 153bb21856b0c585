//! Conversion of formats to grammars that `llguidance` compiles.

use crate::error::CompileError;
use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Value, json};
use sinew_types::{Format, Grammar, TokenId, ToolGrammar, ToolNeed, Whitespace};
use std::fmt::Write;

/// Schema key from which `llguidance` reads its settings. A user's schema must not contain it, because it
/// could disable checks.
const SETTINGS_KEY: &str = "x-guidance";

/// Converts a format to a grammar. `specials` holds the text and id of each control token. The error text
/// states the problem and what to change.
pub(crate) fn grammar(
    format: &Format,
    specials: &[(String, TokenId)],
) -> Result<TopLevelGrammar, CompileError> {
    let space = format.whitespace;
    match &format.grammar {
        Grammar::JsonSchema { schema } => {
            Ok(TopLevelGrammar::from_json_schema(schema_of(schema, space)?))
        }
        Grammar::JsonObject => {
            let schema = schema_of("{\"type\":\"object\"}", space)?;
            Ok(TopLevelGrammar::from_json_schema(schema))
        }
        Grammar::Regex { pattern } => Ok(TopLevelGrammar::from_regex(pattern)),
        Grammar::Lark { grammar } => Ok(TopLevelGrammar::from_lark(grammar.clone())),
        Grammar::Choice { texts } => {
            let texts: Vec<String> = texts.iter().map(|t| quoted(t)).collect();
            let rule = format!("start: {}\n", texts.join(" | "));
            Ok(TopLevelGrammar::from_lark(rule))
        }
        Grammar::Tools(tools) => {
            let rules = tool_rules(tools, space, specials)?;
            Ok(TopLevelGrammar::from_lark(rules))
        }
    }
}

/// Parses a JSON Schema and adds settings that fix the whitespace of the output.
fn schema_of(text: &str, space: Whitespace) -> Result<Value, CompileError> {
    let wrong = CompileError::Unsupported;
    let schema: Value =
        serde_json::from_str(text).map_err(|e| wrong(format!("it is not JSON: {e}")))?;
    let mut schema: Map<String, Value> = match schema {
        Value::Object(map) => map,
        Value::Bool(true) => Map::new(),
        _ => return Err(wrong("a schema is a JSON object, or true".to_owned())),
    };
    if schema.contains_key(SETTINGS_KEY) {
        return Err(wrong(format!(
            "{SETTINGS_KEY:?} is not a key of JSON Schema: remove it"
        )));
    }
    if let Some(key) = ignored(&Value::Object(schema.clone()), 0)? {
        return Err(wrong(format!(
            "{key:?} cannot be enforced: remove it, or check the output yourself"
        )));
    }
    let (item, key) = match space {
        Whitespace::Spaced => (", ", ": "),
        Whitespace::Compact | Whitespace::Free => (",", ":"),
    };
    let settings = json!({
        "item_separator": item,
        "key_separator": key,
        "whitespace_flexible": space == Whitespace::Free,
        "lenient": false,
    });
    schema.insert(SETTINGS_KEY.to_owned(), settings);
    Ok(Value::Object(schema))
}

/// Maximum nesting depth of a schema.
const MAX_DEPTH: usize = 64;
/// Keywords that `llguidance` ignores without an error.
const IGNORED: [&str; 2] = ["$dynamicRef", "$recursiveRef"];

/// Finds a keyword of [`IGNORED`] anywhere in `schema`.
fn ignored(schema: &Value, depth: usize) -> Result<Option<&'static str>, CompileError> {
    if depth > MAX_DEPTH {
        let why = format!("it has more than {MAX_DEPTH} levels");
        return Err(CompileError::Limit(why));
    }
    let children: Vec<&Value> = match schema {
        Value::Object(map) => {
            if let Some(key) = IGNORED.into_iter().find(|k| map.contains_key(*k)) {
                return Ok(Some(key));
            }
            map.values().collect()
        }
        Value::Array(items) => items.iter().collect(),
        _ => Vec::new(),
    };
    for child in children {
        if let Some(key) = ignored(child, depth + 1)? {
            return Ok(Some(key));
        }
    }
    Ok(None)
}

/// Quotes `text` as a Lark string.
fn quoted(text: &str) -> String {
    Value::String(text.to_owned()).to_string()
}

/// Lark rules for tool calls. [`ToolNeed::Auto`] gives free text up to the trigger, then a call;
/// [`ToolNeed::Required`] gives only calls.
fn tool_rules(
    tools: &ToolGrammar,
    space: Whitespace,
    specials: &[(String, TokenId)],
) -> Result<String, CompileError> {
    let mut rules = String::new();
    let trigger = Pieces::of(&tools.trigger, specials);
    let times = if tools.parallel { "*" } else { "?" };
    let start = match tools.need {
        ToolNeed::Auto => {
            let (opened, rest) = free_text(&trigger, &tools.trigger)?;
            rules.push_str(&opened);
            let _ = writeln!(rules, "rest: REST\nREST: {rest}");
            let _ = writeln!(rules, "opened: head tail");
            format!("start: opened{times} rest\n")
        }
        ToolNeed::Required => {
            let more = if tools.parallel {
                " (/[ \\n]*/ opened)*"
            } else {
                ""
            };
            let _ = writeln!(rules, "opened: {} tail", trigger.lark());
            format!("start: opened{more}\n")
        }
    };
    let start = match &tools.answer {
        None => start,
        Some(answer) => {
            let schema = schema_of(answer, space)?;
            let _ = writeln!(rules, "answer: %json {schema}");
            format!("{} | answer\n", start.trim_end())
        }
    };
    let names: Vec<String> = (0..tools.calls.len()).map(|i| format!("c{i}")).collect();
    let _ = writeln!(rules, "tail: {}", names.join(" | "));
    for (name, call) in names.iter().zip(&tools.calls) {
        let begin = call
            .begin
            .strip_prefix(&tools.trigger)
            .unwrap_or(&call.begin);
        let schema = schema_of(&call.schema, space)?;
        let begin = Pieces::of(begin, specials).lark();
        let end = Pieces::of(&call.end, specials).lark();
        let _ = writeln!(rules, "{name}: {begin} %json {schema} {end}");
    }
    Ok(start + &rules)
}

/// Returns the rule `head` (free text that ends with the trigger) and a pattern for text without a trigger.
fn free_text(trigger: &Pieces, text: &str) -> Result<(String, String), CompileError> {
    const ANY: &str = "/(.|\\n)*/";
    match &trigger.0[..] {
        [Piece::Special(id)] => Ok((
            format!("head: FREE <[{id}]>\nFREE: {ANY}\n"),
            ANY.to_owned(),
        )),
        [Piece::Text(_)] => {
            let escaped = escaped(text);
            let head = format!("head[lazy]: /(.|\\n)*{escaped}/\n");
            Ok((head, format!("{ANY} & ~/(.|\\n)*{escaped}(.|\\n)*/")))
        }
        _ => Err(CompileError::Unsupported(format!(
            "the trigger {text:?} mixes text and control tokens: use one or the other"
        ))),
    }
}

/// Escapes `text` for a Lark regular expression between slashes.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c.is_ascii_alphanumeric() || !c.is_ascii() || c == ' ' || c == '_' => out.push(c),
            '<' | '>' | '"' | '\'' | '=' | ':' | ';' | ',' | '@' | '%' | '`' | '!' => out.push(c),
            c => {
                out.push('\\');
                out.push(c);
            }
        }
    }
    out
}

/// Text split at control tokens.
struct Pieces(Vec<Piece>);

/// Part of a split text.
enum Piece {
    Text(String),
    /// Control token by id.
    Special(TokenId),
}

impl Pieces {
    /// Splits `text` at the control tokens in `specials`.
    fn of(text: &str, specials: &[(String, TokenId)]) -> Self {
        let mut pieces = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let found = specials
                .iter()
                .filter_map(|(s, id)| rest.find(s.as_str()).map(|at| (at, s.len(), *id)))
                // The first match wins; at equal positions, the longest one.
                .min_by_key(|&(at, len, _)| (at, std::cmp::Reverse(len)));
            let Some((at, len, id)) = found else {
                pieces.push(Piece::Text(rest.to_owned()));
                break;
            };
            if at > 0 {
                pieces.push(Piece::Text(rest[..at].to_owned()));
            }
            pieces.push(Piece::Special(id));
            rest = &rest[at + len..];
        }
        Self(pieces)
    }

    /// Formats the pieces as items of a Lark rule.
    fn lark(&self) -> String {
        let item = |p: &Piece| match p {
            Piece::Text(text) => quoted(text),
            Piece::Special(id) => format!("<[{id}]>"),
        };
        if self.0.is_empty() {
            "\"\"".to_owned()
        } else {
            self.0.iter().map(item).collect::<Vec<_>>().join(" ")
        }
    }
}
