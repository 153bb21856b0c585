//! Arguments that a model writes without quotes, read by the tool's schema.
//!
//! Schemas are read as agents write them: JSON Schema with every place where a type can stand, and the names
//! of types in Python and other languages. A text that does not fit its type stays text, so that the agent's
//! own validation answers.
//!
//! | type | text | value |
//! |---|---|---|
//! | `string`, `str`, `date`, ... | `5` | `"5"` |
//! | `integer`, `int`, `long`, ... | `5.0` | `5` |
//! | `integer` | `18446744073709551617` | the text: it is beyond 64 bits |
//! | `boolean`, `bool` | `True` | `true` |
//! | `array`, `list`, `tuple`, ... | `('a', 1)` | `["a", 1]` |
//! | `Optional[int]`, `["integer", "null"]` | `None` | `null` |
//! | none, or a name that is not known | `5`, `five` | `5`, `"five"` |

use crate::python;
use serde_json::Value;
use sinew_types::json;

/// Kinds of values, as bits.
type Kinds = u8;

const TEXT: Kinds = 1;
const INTEGER: Kinds = 2;
const NUMBER: Kinds = 4;
const BOOLEAN: Kinds = 8;
const LIST: Kinds = 16;
const OBJECT: Kinds = 32;
const NULL: Kinds = 64;
/// Every value, and what nothing is known of.
const ANY: Kinds = 127;

/// Schemas inside of schemas that are followed: references may form a circle.
const MAX_DEPTH: usize = 16;

/// Parses `raw` as the argument `key` of a tool with these parameters.
pub(crate) fn read(parameters: &Value, key: &str, raw: &str) -> Value {
    Schema::of(parameters).property(key).value(raw)
}

/// A schema within the parameters of a tool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schema<'s> {
    /// The parameters, in which references point.
    root: &'s Value,
    /// The schema; null if nothing is known.
    at: &'s Value,
}

impl<'s> Schema<'s> {
    /// The schema of all parameters.
    pub(crate) fn of(parameters: &'s Value) -> Self {
        let (root, at) = (parameters, parameters);
        Self { root, at }
    }

    /// The schema of a property.
    pub(crate) fn property(self, key: &str) -> Self {
        let at = property(self.root, self.at, key, 0).unwrap_or(&Value::Null);
        Self { at, ..self }
    }

    /// The schema of the items of a list.
    pub(crate) fn items(self) -> Self {
        let at = items(self.root, self.at, 0).unwrap_or(&Value::Null);
        Self { at, ..self }
    }

    /// Whether a value can be a list.
    pub(crate) fn takes_lists(self) -> bool {
        kinds(self.root, self.at, 0) & LIST != 0
    }

    /// The empty list or object, if a value can be nothing else that is empty.
    pub(crate) fn empty(self) -> Option<Value> {
        match kinds(self.root, self.at, 0) & !NULL {
            LIST => Some(Value::Array(Vec::new())),
            OBJECT => Some(Value::Object(serde_json::Map::new())),
            _ => None,
        }
    }

    /// Parses `raw` as a value. Without a declared type, numbers, booleans, lists and objects are recognized.
    pub(crate) fn value(self, raw: &str) -> Value {
        let text = || Value::String(raw.to_owned());
        let kinds = kinds(self.root, self.at, 0);
        let members = enumerated(self.root, self.at, 0);
        if kinds == TEXT || members.iter().any(|m| m.as_str() == Some(raw)) {
            return text();
        }
        match literal(raw.trim()) {
            // A tuple or a set is a list only where a list is expected.
            Some(Value::Array(_)) if kinds == ANY && !raw.trim_start().starts_with('[') => text(),
            Some(value) if kind(&value) & kinds != 0 && !value.is_string() => value,
            Some(value) if kinds & INTEGER != 0 => whole(&value).unwrap_or_else(text),
            _ => text(),
        }
    }
}

/// A value in the notation of JSON or of Python.
pub(crate) fn literal(text: &str) -> Option<Value> {
    json::from_str(text).ok().or_else(|| python::literal(text))
}

/// The kinds of a value. An integer is also a number.
fn kind(value: &Value) -> Kinds {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(n) if n.is_f64() => NUMBER,
        Value::Number(_) => INTEGER | NUMBER,
        Value::String(_) => TEXT,
        Value::Array(_) => LIST,
        Value::Object(_) => OBJECT,
    }
}

/// The integer that a number such as `5.0` is.
fn whole(value: &Value) -> Option<Value> {
    /// Every whole number up to this one is a different `f64`.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let number = value.as_f64()?;
    let exact = number.fract() == 0.0 && number.abs() <= EXACT;
    exact.then(|| Value::from(number as i64))
}

/// The schema of a property, wherever the parameters have it.
fn property<'s>(root: &'s Value, schema: &'s Value, key: &str, depth: usize) -> Option<&'s Value> {
    if depth > MAX_DEPTH {
        return None;
    }
    let schema = resolved(root, schema);
    if let Some(found) = schema.get("properties").and_then(|p| p.get(key)) {
        return Some(found);
    }
    let branches = ["allOf", "anyOf", "oneOf"];
    let mut branches = branches.iter().flat_map(|name| list(schema, name));
    branches
        .find_map(|branch| property(root, branch, key, depth + 1))
        .or_else(|| schema.get("additionalProperties").filter(|s| s.is_object()))
        // Parameters by only their names, without the frame of a schema.
        .or_else(|| {
            let framed = schema.get("properties").is_some()
                || schema.get("type").is_some_and(Value::is_string);
            schema.get(key).filter(|_| !framed)
        })
}

/// The schema of the items of a list, wherever a schema has it.
fn items<'s>(root: &'s Value, schema: &'s Value, depth: usize) -> Option<&'s Value> {
    if depth > MAX_DEPTH {
        return None;
    }
    let schema = resolved(root, schema);
    let branches = ["allOf", "anyOf", "oneOf"];
    let mut branches = branches.iter().flat_map(|name| list(schema, name));
    let inner = || branches.find_map(|branch| items(root, branch, depth + 1));
    schema.get("items").or_else(inner)
}

/// Returns the schema that a reference within `root` names; another schema is returned unchanged.
fn resolved<'s>(root: &'s Value, mut schema: &'s Value) -> &'s Value {
    for _ in 0..MAX_DEPTH {
        let name = schema.get("$ref").and_then(Value::as_str);
        let Some(pointer) = name.and_then(|name| name.strip_prefix('#')) else {
            break;
        };
        match root.pointer(pointer) {
            Some(found) => schema = found,
            None => break,
        }
    }
    schema
}

/// The schemas in a list, such as `anyOf`; none where the keyword is absent or has another value.
fn list<'s>(schema: &'s Value, name: &str) -> impl Iterator<Item = &'s Value> {
    schema
        .get(name)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
}

/// The values that a schema lists, in `enum` and `const` and in those of its branches.
fn enumerated<'s>(root: &'s Value, schema: &'s Value, depth: usize) -> Vec<&'s Value> {
    if depth > MAX_DEPTH {
        return Vec::new();
    }
    let schema = resolved(root, schema);
    let mut members: Vec<&Value> = list(schema, "enum").chain(schema.get("const")).collect();
    for name in ["anyOf", "oneOf", "allOf"] {
        for branch in list(schema, name) {
            members.extend(enumerated(root, branch, depth + 1));
        }
    }
    members
}

/// The kinds that a schema allows: what all of its conditions allow.
fn kinds(root: &Value, schema: &Value, depth: usize) -> Kinds {
    let schema = resolved(root, schema);
    if let Value::String(name) = schema {
        return named(name);
    }
    if depth > MAX_DEPTH || !schema.is_object() {
        return ANY;
    }
    let mut kinds = match schema.get("type") {
        Some(Value::String(name)) => named(name),
        Some(Value::Array(names)) => {
            let names = names.iter().filter_map(Value::as_str);
            names.fold(0, |all, name| all | named(name))
        }
        // A property of an object in a separate place: {"type": {"type": "string"}}.
        _ => ANY,
    };
    for name in ["anyOf", "oneOf"] {
        let mut branches = list(schema, name).peekable();
        if branches.peek().is_some() {
            kinds &= branches.fold(0, |all, s| all | self::kinds(root, s, depth + 1));
        }
    }
    kinds &= list(schema, "allOf").fold(ANY, |all, s| all & self::kinds(root, s, depth + 1));
    let mut members = list(schema, "enum").chain(schema.get("const")).peekable();
    if members.peek().is_some() {
        // A list of whole numbers is one of integers.
        let member = |value: &Value| match kind(value) {
            kinds if kinds & INTEGER != 0 => INTEGER,
            kinds => kinds,
        };
        kinds &= members.fold(0, |all, value| all | member(value));
    }
    if kinds == ANY {
        kinds = implied(schema);
    }
    if schema.get("nullable") == Some(&Value::Bool(true)) {
        kinds |= NULL;
    }
    match kinds {
        0 => ANY,
        kinds => kinds,
    }
}

/// The kinds of a schema without a type: what its other keywords speak of.
fn implied(schema: &Value) -> Kinds {
    let has = |names: &[&str]| names.iter().any(|name| schema.get(*name).is_some());
    if has(&["properties", "additionalProperties", "patternProperties"]) {
        OBJECT
    } else if has(&["items", "prefixItems", "minItems", "maxItems"]) {
        LIST
    } else if has(&["pattern", "minLength", "maxLength"]) {
        TEXT
    } else if has(&[
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    ]) {
        INTEGER | NUMBER
    } else {
        ANY
    }
}

/// The kinds of a type by its name in JSON Schema, Python or another language: `int | None`,
/// `Optional[List[int]]`, `Union[int, str]`. A name that is not known, such as that of a class, is any kind.
fn named(name: &str) -> Kinds {
    let name = name.trim().to_ascii_lowercase();
    let name = name.strip_prefix("typing.").unwrap_or(&name);
    if let Some((outer, inner)) = name.split_once(['[', '<']) {
        let inner = inner.trim_end_matches([']', '>']);
        let alternatives =
            |between: char| inner.split(between).fold(0, |all, one| all | named(one));
        return match outer.trim() {
            "optional" => named(inner) | NULL,
            "union" => alternatives(','),
            outer => named(outer),
        };
    }
    if name.contains('|') {
        return name.split('|').fold(0, |all, one| all | named(one));
    }
    match name {
        "string" | "str" | "text" | "char" | "varchar" | "bytes" | "date" | "datetime"
        | "date-time" | "time" | "timedelta" | "uuid" | "url" | "uri" | "email" | "path" => TEXT,
        "number" | "num" | "float" | "float32" | "float64" | "double" | "decimal" | "numeric"
        | "real" => NUMBER,
        "boolean" | "bool" => BOOLEAN,
        "array" | "arr" | "list" | "tuple" | "set" | "frozenset" | "sequence" | "iterable"
        | "vector" | "arraylist" => LIST,
        "object" | "dict" | "dictionary" | "map" | "hashmap" | "mapping" | "record" | "struct" => {
            OBJECT
        }
        "null" | "none" | "nonetype" => NULL,
        "long" | "short" => INTEGER,
        _ if name.starts_with("int") || name.starts_with("uint") => INTEGER,
        _ => ANY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(schema: Value, raw: &str) -> Value {
        let parameters = json!({"type": "object", "properties": {"x": schema}, "$defs": {
            "Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"},
        }});
        read(&parameters, "x", raw)
    }

    #[test]
    fn types_have_the_names_that_agents_give_them() {
        for (name, raw, expected) in [
            ("int", "5", json!(5)),
            ("integer", "5.0", json!(5)),
            ("integer", "5.5", json!("5.5")),
            (
                "integer",
                "18446744073709551617",
                json!("18446744073709551617"),
            ),
            ("str", "5", json!("5")),
            ("str", "True", json!("True")),
            ("float", "5", json!(5)),
            ("float", "5.0", json!(5.0)),
            ("bool", "True", json!(true)),
            ("bool", "maybe", json!("maybe")),
            ("list", "['a', 2]", json!(["a", 2])),
            ("List[int]", "[1, 2]", json!([1, 2])),
            ("tuple", "(1, 2)", json!([1, 2])),
            ("dict", "{'a': None}", json!({"a": null})),
            ("dict", "not a dict", json!("not a dict")),
            ("any", "5", json!(5)),
            ("any", "(1, 2)", json!("(1, 2)")),
            ("datetime", "20260131", json!("20260131")),
            ("Optional[int]", "None", json!(null)),
            ("int | None", "7", json!(7)),
            ("Union[int, str]", "seven", json!("seven")),
            ("Address", "{\"street\": 1}", json!({"street": 1})),
        ] {
            assert_eq!(of(json!({"type": name}), raw), expected, "{name} {raw}");
        }
    }

    #[test]
    fn types_are_found_wherever_json_schema_has_them() {
        for (schema, raw, expected) in [
            (
                json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}),
                "null",
                json!(null),
            ),
            (
                json!({"oneOf": [{"type": "string"}, {"type": "null"}]}),
                "5",
                json!("5"),
            ),
            (
                json!({"allOf": [{"$ref": "#/$defs/Count"}]}),
                "5.0",
                json!(5),
            ),
            (json!({"$ref": "#/$defs/Count"}), "5.0", json!(5)),
            (json!({"$ref": "#/$defs/Loop"}), "5", json!(5)),
            (json!({"$ref": "#/$defs/Gone"}), "5", json!(5)),
            (json!({"type": ["string", "null"]}), "5", json!("5")),
            (
                json!({"type": "string", "nullable": true}),
                "null",
                json!(null),
            ),
            (json!({"enum": ["1", "2"]}), "1", json!("1")),
            (json!({"enum": ["1", 2]}), "2", json!(2)),
            (
                json!({"anyOf": [{"const": "1"}, {"type": "integer"}]}),
                "1",
                json!("1"),
            ),
            (json!({"const": 3}), "3.0", json!(3)),
            (json!({"pattern": "^[0-9]+$"}), "007", json!("007")),
            (json!({"minLength": 1}), "5", json!("5")),
            (json!({"items": {}}), "(1,)", json!([1])),
            (json!(true), "5", json!(5)),
            (json!("str"), "5", json!("5")),
            (json!({}), "hello", json!("hello")),
        ] {
            assert_eq!(of(schema.clone(), raw), expected, "{schema} {raw}");
        }
    }

    #[test]
    fn parameters_are_found_wherever_a_schema_has_them() {
        let text = json!({"type": "string"});
        for parameters in [
            json!({"properties": {"x": text}}),
            json!({"$ref": "#/$defs/In", "$defs": {"In": {"properties": {"x": text}}}}),
            json!({"allOf": [{"properties": {"y": {}}}, {"properties": {"x": text}}]}),
            json!({"type": "object", "additionalProperties": text}),
            json!({"x": text}),
            json!({"x": "str"}),
        ] {
            assert_eq!(read(&parameters, "x", "5"), json!("5"), "{parameters}");
        }
        assert_eq!(read(&Value::Null, "x", "5"), json!(5));
    }
}
