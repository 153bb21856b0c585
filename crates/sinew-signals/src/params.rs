//! A recipe as flat parameters, for trackers that want names and values. Pure.

use serde_json::Value;
use std::collections::BTreeMap;

/// Parameters of a run, and characters of a name and of a value; what is above is left out or cut. The limits
/// of a value and a name are those of MLflow.
pub(crate) const MAX_PARAMS: usize = 2000;
pub(crate) const MAX_NAME: usize = 250;
pub(crate) const MAX_VALUE: usize = 6000;

/// The way to each value, with points, and the value as text. Keys without a value are left out.
pub(crate) fn params(recipe: &Value) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    flatten("", recipe, &mut out);
    out
}

/// A name with the characters that every tracker allows, and not too long.
pub(crate) fn allowed(name: &str) -> String {
    let fits = |c: char| {
        if c.is_alphanumeric() || "_-. /".contains(c) {
            c
        } else {
            '_'
        }
    };
    name.chars().map(fits).take(MAX_NAME).collect()
}

fn flatten(way: &str, value: &Value, out: &mut BTreeMap<String, String>) {
    let below = |key: &str| match way {
        "" => key.to_owned(),
        way => format!("{way}.{key}"),
    };
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                flatten(&below(key), value, out);
            }
        }
        Value::Array(list) if list.iter().any(Value::is_object) => {
            for (i, value) in list.iter().enumerate() {
                flatten(&below(&i.to_string()), value, out);
            }
        }
        Value::Null => {}
        value if out.len() < MAX_PARAMS => {
            let text = value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned);
            out.insert(allowed(way), text.chars().take(MAX_VALUE).collect());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_recipe_becomes_parameters() {
        let recipe = json!({
            "name": "r", "train": { "steps": 3, "lr": 1e-5, "none": null },
            "env": [{ "type": "shop" }, { "type": "web" }], "tags": ["a", "b"], "odd[key]": true,
        });
        let params = params(&recipe);
        let pairs: Vec<(&str, &str)> = params
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect();
        assert_eq!(
            pairs,
            [
                ("env.0.type", "shop"),
                ("env.1.type", "web"),
                ("name", "r"),
                ("odd_key_", "true"),
                ("tags", "[\"a\",\"b\"]"),
                ("train.lr", "0.00001"),
                ("train.steps", "3"),
            ]
        );
    }

    #[test]
    fn parameters_are_bounded() {
        let many: Vec<Value> = (0..MAX_PARAMS + 9).map(|i| json!({ "k": i })).collect();
        let long = json!({ "k".repeat(999): "v".repeat(MAX_VALUE + 9) });
        assert_eq!(params(&Value::Array(many)).len(), MAX_PARAMS);
        let cut = params(&long).into_iter().next().unwrap();
        assert_eq!((cut.0.len(), cut.1.len()), (MAX_NAME, MAX_VALUE));
    }
}
