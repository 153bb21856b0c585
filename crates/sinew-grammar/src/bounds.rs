//! Bounds on formats whose regular expressions intersect.
//!
//! The compiler counts its work between two derivatives, and the derivative of an intersection has up to as
//! many parts as the product of the branches of its members: fifty patterns in one `allOf` take all memory
//! within one step. Formats are therefore refused before they are compiled if that product is too large. It
//! is estimated from the text, and never too low: a refused format can be written with fewer patterns.

use crate::error::CompileError;
use serde_json::{Map, Value};
use sinew_types::{Format, Grammar};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum product of the branches of expressions that may meet.
const MAX_PRODUCT: f64 = 1e6;
/// Branches of a `format`, such as a date or an address.
const FORMAT_BRANCHES: f64 = 32.0;
/// Maximum `patternProperties` of one object: the compiler compares each with each.
const MAX_KEY_PATTERNS: usize = 16;
/// Keys with subschemas that other places refer to.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// Keys that restrict nothing.
const NOTES: [&str; 12] = [
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "type",
];

/// Refuses a format whose compilation or masks could take time and memory without end.
///
/// # Errors
/// The limit that is exceeded, and the way to keep it.
pub(crate) fn check(format: &Format) -> Result<(), CompileError> {
    match &format.grammar {
        Grammar::JsonSchema { schema } => json(schema),
        Grammar::Lark { grammar } => lark(grammar),
        Grammar::Tools(tools) => {
            let calls = tools.calls.iter().map(|call| &call.schema);
            calls
                .chain(&tools.answer)
                .try_for_each(|schema| json(schema))
        }
        Grammar::JsonObject | Grammar::Regex { .. } | Grammar::Choice { .. } => Ok(()),
    }
}

/// Branches of a regular expression: one, and one more for each choice and each repetition.
fn branches(pattern: &str) -> f64 {
    1.0 + pattern.matches(['|', '*', '+', '?', '{']).count() as f64
}

/// Branches of a pattern of JSON strings: any text may stand before and behind one that names no beginning
/// or end, and each character has an escaped form.
fn quoted_branches(pattern: &str) -> f64 {
    let open = usize::from(!pattern.starts_with('^')) + usize::from(!pattern.ends_with('$'));
    2.0 * (branches(pattern) + open as f64)
}

/// A text that is not JSON is left to the compiler, which names the place.
fn json(text: &str) -> Result<(), CompileError> {
    match serde_json::from_str(text) {
        Ok(schema) => Strings::default().check(&schema),
        Err(_) => Ok(()),
    }
}

/// Rules for strings of a schema, by the name of the property that they are nearest to. Rules that
/// intersect have the same name, unless one of them is in a definition.
#[derive(Debug, Default)]
struct Strings {
    /// Each rule once: equal ones intersect to themselves.
    by_name: BTreeMap<String, BTreeSet<String>>,
    /// Rules at the top of definitions.
    defined: BTreeSet<String>,
    /// Some schemas apply together.
    meet: bool,
    /// Some of those are definitions.
    definitions_meet: bool,
}

impl Strings {
    /// Refuses a schema whose rules for one string have too large a product.
    ///
    /// # Errors
    /// The place, and what is allowed.
    fn check(mut self, schema: &Value) -> Result<(), CompileError> {
        self.read(schema, "", false)?;
        if !self.meet {
            return Ok(());
        }
        let shared = if self.definitions_meet {
            product(&self.defined)
        } else {
            1.0
        };
        let names = self
            .by_name
            .iter()
            .map(|(name, rules)| (name.as_str(), product(rules)));
        for (name, own) in names.chain([("", 1.0)]) {
            if own * shared > MAX_PRODUCT {
                return Err(CompileError::Limit(format!(
                    "too many patterns, formats and lengths of strings apply together at {name:?} (allOf, or a \
                     $ref or anyOf beside other keys): allowed is a product of their branches of {MAX_PRODUCT}; \
                     join them into one pattern"
                )));
            }
        }
        Ok(())
    }

    /// Collects the rules of a schema and of all below it. `name` is the property that they are nearest to,
    /// `defined` means that they are at the top of a definition.
    ///
    /// # Errors
    /// An object with too many `patternProperties`.
    fn read(&mut self, schema: &Value, name: &str, defined: bool) -> Result<(), CompileError> {
        let map = match schema {
            Value::Object(map) => map,
            Value::Array(items) => {
                return items
                    .iter()
                    .try_for_each(|item| self.read(item, name, defined));
            }
            _ => return Ok(()),
        };
        let rules = rules(map);
        if defined {
            self.defined.extend(rules)
        } else {
            self.by_name
                .entry(name.to_owned())
                .or_default()
                .extend(rules)
        }
        if meets(map) {
            self.meet = true;
            self.definitions_meet |= refers(schema);
        }
        for (key, value) in map {
            match key.as_str() {
                "properties" | "patternProperties" | "dependentSchemas" => {
                    let members = value.as_object().into_iter().flatten();
                    if key == "patternProperties" && members.clone().count() > MAX_KEY_PATTERNS {
                        let why = format!("{key} has more than {MAX_KEY_PATTERNS} patterns");
                        return Err(CompileError::Limit(why));
                    }
                    for (property, value) in members {
                        self.read(value, property, false)?;
                    }
                }
                key if DEFINITIONS.contains(&key) => {
                    for value in value.as_object().into_iter().flat_map(Map::values) {
                        self.read(value, name, true)?;
                    }
                }
                "items" | "prefixItems" | "additionalItems" | "additionalProperties" => {
                    self.read(value, key, false)?;
                }
                "enum" | "const" | "default" | "examples" => {}
                _ => self.read(value, name, defined)?,
            }
        }
        Ok(())
    }
}

/// Rules for strings of one schema, without its subschemas.
fn rules(map: &Map<String, Value>) -> Vec<String> {
    let length = ["minLength", "maxLength"].map(|key| map.get(key).map(Value::to_string));
    let length = length
        .iter()
        .any(Option::is_some)
        .then(|| format!("length {length:?}"));
    let named = ["pattern", "format"].into_iter().filter_map(|key| {
        let text = map.get(key)?.as_str()?;
        Some(format!("{key} {text}"))
    });
    named.chain(length).collect()
}

/// The product of the branches of rules.
fn product(rules: &BTreeSet<String>) -> f64 {
    let each = rules.iter().map(|rule| match rule.split_once(' ') {
        Some(("pattern", pattern)) => quoted_branches(pattern),
        Some(("format", _)) => FORMAT_BRANCHES,
        _ => 4.0,
    });
    each.product()
}

/// Whether a schema applies several schemas to one place.
fn meets(map: &Map<String, Value>) -> bool {
    let others = map
        .keys()
        .filter(|key| !NOTES.contains(&key.as_str()))
        .count();
    let joins = ["$ref", "anyOf", "oneOf", "not", "if"];
    map.contains_key("allOf") || others > 1 && joins.iter().any(|key| map.contains_key(*key))
}

/// Whether a schema or one within it is a reference.
fn refers(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map.contains_key("$ref") || map.values().any(refers),
        Value::Array(items) => items.iter().any(refers),
        _ => false,
    }
}

/// Refuses a Lark grammar with too many intersections and complements. All branches of the grammar are
/// shared out evenly among them, which makes the product largest.
///
/// # Errors
/// Their number, and what is allowed.
fn lark(grammar: &str) -> Result<(), CompileError> {
    if grammar.contains("%json") && grammar.contains("allOf") {
        let why = "allOf inside %json of a Lark grammar: give the schema as a JSON Schema";
        return Err(CompileError::Unsupported(why.into()));
    }
    let (mut members, mut all) = (1.0, 1.0);
    let mut rest = grammar;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match c {
            '"' => rest = after(rest, '"').1,
            '/' if rest.starts_with('/') => {
                rest = rest.split_once('\n').map_or("", |(_, rest)| rest)
            }
            '/' => {
                let (pattern, left) = after(rest, '/');
                all += branches(pattern);
                rest = left;
            }
            '&' | '~' => members += 1.0,
            '|' | '*' | '+' | '?' | '{' => all += 1.0,
            _ => {}
        }
    }
    if members > 1.0 && (1.0 + all / members).powf(members) > MAX_PRODUCT {
        Err(CompileError::Limit(format!(
            "{} intersections and complements (& and ~) over {all} branches: allowed is a product of \
             {MAX_PRODUCT}; use fewer of them",
            members - 1.0
        )))
    } else {
        Ok(())
    }
}

/// A text up to a closing character, which a backslash hides, and what follows it.
fn after(text: &str, close: char) -> (&str, &str) {
    let mut hidden = false;
    for (at, c) in text.char_indices() {
        if c == close && !hidden {
            return (&text[..at], &text[at + c.len_utf8()..]);
        }
        hidden = c == '\\' && !hidden;
    }
    (text, "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn letters(n: usize) -> Vec<Value> {
        let letter = |i: usize| (b'a' + (i % 26) as u8) as char;
        let one = |i| json!({"pattern": format!("^.*{}.*{}.*$", letter(i), letter(i / 26 + i))});
        (0..n).map(one).collect()
    }

    fn check_json(schema: &Value) -> Result<(), CompileError> {
        json(&schema.to_string())
    }

    #[test]
    fn many_patterns_of_one_string_are_refused() {
        let many = json!({"type": "string", "allOf": letters(50)});
        // These have no operator, and any text around them.
        let words: Vec<_> = (0..50)
            .map(|i| json!({"pattern": format!("word{i}")}))
            .collect();
        let refused = [
            many.clone(),
            json!({"allOf": words}),
            json!({"type": "object", "properties": {"a": many}}),
            json!({"allOf": letters(50).into_iter().map(|p| json!({"properties": {"a": p}})).collect::<Vec<_>>()}),
            json!({
                "$defs": letters(50).into_iter().enumerate().map(|(i, p)| (format!("d{i}"), p)).collect::<Map<_, _>>(),
                "allOf": (0..50).map(|i| json!({"$ref": format!("#/$defs/d{i}")})).collect::<Vec<_>>(),
            }),
            letters(50).into_iter().fold(json!({}), |inner, mut own| {
                own["anyOf"] = json!([inner, {"type": "string"}]);
                own
            }),
        ];
        for schema in refused {
            let why = check_json(&schema).unwrap_err();
            assert!(
                why.to_string().contains("join them into one pattern"),
                "{why}"
            );
        }
        let keys = letters(26)
            .into_iter()
            .map(|p| (p["pattern"].to_string(), json!({})));
        let keys = json!({"patternProperties": keys.collect::<Map<_, _>>()});
        let refused = check_json(&keys).unwrap_err().to_string();
        assert!(refused.contains("patternProperties"), "{refused}");
    }

    #[test]
    fn usual_schemas_pass() {
        let many: Map<_, _> = letters(50)
            .into_iter()
            .enumerate()
            .map(|(i, p)| (format!("p{i}"), p))
            .collect();
        for schema in [
            json!({"properties": many}),
            json!({"$defs": many, "properties": {"a": {"$ref": "#/$defs/p1"}, "b": {"$ref": "#/$defs/p2"}}}),
            json!({"properties": many, "allOf": [{"required": ["p1"]}, {"required": ["p2"]}]}),
            json!({"allOf": letters(3), "minLength": 2, "maxLength": 9}),
            json!({"anyOf": letters(50)}),
        ] {
            assert_eq!(check_json(&schema), Ok(()), "{schema}");
        }
    }

    #[test]
    fn intersections_of_lark_are_counted_outside_of_texts() {
        let many: Vec<_> = (0..50).map(|i| format!("/.*x{i}.*y/")).collect();
        assert!(lark(&format!("start: A\nA: {}\n", many.join(" & "))).is_err());
        assert_eq!(
            lark(&format!("start: A\nA: {}\n", many.join(" | "))),
            Ok(())
        );
        assert_eq!(
            lark("start: A\nA: /[a-z]+/ & ~/.*bad.*/ // & & & & & & &\n"),
            Ok(())
        );
        let quoted = "\"a & \\\" & b\"".to_owned() + &" | \"&\"".repeat(50);
        assert_eq!(lark(&format!("start: {quoted}\n")), Ok(()));
        assert!(lark("start: %json {\"allOf\": []}").is_err());
    }
}
