//! Lines of a report on an environment, and random values of a schema.

use serde::Serialize;
use serde_json::{Map, Value};
use sinew_types::mix_seed;

/// Weight of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// The check passed.
    Ok,
    /// Training would work, but probably not as intended.
    Warning,
    /// Training would fail.
    Error,
}

/// One line of a report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EnvCheck {
    /// Name of the check: `gold`, `null`, `random`, `constant`, `other_gold`, `blind`, `no_tool`, `odd`,
    /// `determinism`, `snapshots`, `leaks`, `speed`.
    pub name: &'static str,
    /// Result of the check.
    pub finding: Finding,
    /// One line for users.
    pub detail: String,
    /// Measured values by name.
    pub values: Map<String, Value>,
}

/// A line of the report. `values` is an object, or null.
pub(crate) fn line(
    name: &'static str,
    finding: Finding,
    detail: String,
    values: Value,
) -> EnvCheck {
    let values = match values {
        Value::Object(values) => values,
        _ => Map::new(),
    };
    EnvCheck {
        name,
        finding,
        detail,
        values,
    }
}

/// The line of a check that found an error, without measured values.
pub(crate) fn failed(name: &'static str, detail: String) -> EnvCheck {
    line(name, Finding::Error, detail, Value::Null)
}

/// Random values of a JSON Schema, from a seed: equal seeds give equal values. Values deeper than four levels
/// are null, so that recursive schemas end.
pub(crate) struct Draw(pub(crate) u64);

impl Draw {
    /// A number from 0 below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = mix_seed(self.0, 1);
        (self.0 % n.max(1) as u64) as usize
    }

    /// A text as models write it: a word, a number, nothing.
    pub(crate) fn word(&mut self) -> String {
        const WORDS: [&str; 6] = ["a", "tea", "7", "hello world", "left", ""];
        WORDS[self.below(WORDS.len())].to_owned()
    }

    /// A value that fits a schema, at a depth from 0.
    pub(crate) fn value(&mut self, schema: &Value, depth: usize) -> Value {
        if let Some(options) = schema["enum"].as_array().or(schema["anyOf"].as_array()) {
            let picked = options
                .get(self.below(options.len()))
                .unwrap_or(&Value::Null);
            return if schema["enum"].is_array() {
                picked.clone()
            } else {
                self.value(picked, depth)
            };
        }
        match schema["type"].as_str() {
            Some("string") => self.word().into(),
            Some("integer") => (self.below(12) as i64 - 2).into(),
            Some("number") => (self.below(100) as f64 / 8.0).into(),
            Some("boolean") => (self.below(2) == 1).into(),
            Some("array") if depth < 4 => self.array(schema, depth),
            Some("object") if depth < 4 => self.object(schema, depth),
            _ => Value::Null,
        }
    }

    /// An array with up to two items, or as many as the schema requires.
    fn array(&mut self, schema: &Value, depth: usize) -> Value {
        if let Some(items) = schema["prefixItems"].as_array() {
            return items.iter().map(|s| self.value(s, depth + 1)).collect();
        }
        let count = self.below(3);
        (0..count)
            .map(|_| self.value(&schema["items"], depth + 1))
            .collect()
    }

    /// All required properties, and half of the others.
    fn object(&mut self, schema: &Value, depth: usize) -> Value {
        let required = |name: &str| {
            let names = schema["required"].as_array();
            names.is_some_and(|names| names.iter().any(|n| n == name))
        };
        let mut object = Map::new();
        for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
            if required(name) || self.below(2) == 1 {
                object.insert(name.clone(), self.value(schema, depth + 1));
            }
        }
        Value::Object(object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn random_arguments_fit_their_schema() {
        let schema = json!({
            "type": "object",
            "properties": {
                "item": {"type": "string"},
                "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "color": {"enum": ["red", "blue"]},
                "pair": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "boolean"}]},
            },
            "required": ["item", "color", "pair", "count"],
        });
        for seed in 0..50 {
            let value = Draw(seed).value(&schema, 0);
            assert!(
                value["item"].is_string() && value["pair"][1].is_boolean(),
                "{value}"
            );
            assert!(
                value["count"].is_i64() || value["count"].is_null(),
                "{value}"
            );
            assert!(["red", "blue"].contains(&value["color"].as_str().unwrap_or_default()));
        }
    }
}
