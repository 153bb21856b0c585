//! The schema against the recipes that ship, the documentation, and random recipes.

use crate::ALL;
use crate::schema::{Key, json_schema, keys, markdown, run_schema};
use crate::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every recipe that ships: file and text.
fn shipped() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for folder in ["recipes", "recipes/algorithms"] {
        for entry in std::fs::read_dir(root().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "toml") {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    assert!(found.len() > 20, "{}", found.len());
    found
}

/// Checks the part of draft 7 that the schema uses.
fn valid(schema: &Value, value: &Value) -> Result<(), String> {
    let wrong = |why: &str| Err(format!("{value}: {why} {schema}"));
    if schema.get("const").is_some_and(|c| c != value) {
        return wrong("const");
    }
    if schema["enum"]
        .as_array()
        .is_some_and(|e| !e.contains(value))
    {
        return wrong("enum");
    }
    for (key, most) in [("oneOf", 1), ("anyOf", usize::MAX)] {
        if let Some(choices) = schema[key].as_array() {
            let fit = choices.iter().filter(|c| valid(c, value).is_ok()).count();
            if fit == 0 || fit > most {
                return wrong(key);
            }
        }
    }
    let fits = |name: &str| match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        _ => false,
    };
    if schema["type"].as_str().is_some_and(|name| !fits(name)) {
        return wrong("type");
    }
    let number = value.as_f64();
    let below = number
        .zip(schema["minimum"].as_f64())
        .is_some_and(|(v, low)| v < low);
    let above = number
        .zip(schema["maximum"].as_f64())
        .is_some_and(|(v, high)| v > high);
    if below || above {
        return wrong("range");
    }
    for item in value.as_array().into_iter().flatten() {
        valid(&schema["items"], item)?;
    }
    object(schema, value)
}

fn object(schema: &Value, value: &Value) -> Result<(), String> {
    let Some(object) = value.as_object() else {
        return Ok(());
    };
    for required in schema["required"].as_array().into_iter().flatten() {
        if !object.contains_key(required.as_str().unwrap()) {
            return Err(format!("{required} is missing"));
        }
    }
    for (key, value) in object {
        match schema["properties"].get(key) {
            Some(property) => valid(property, value).map_err(|e| format!("{key}: {e}"))?,
            None if schema["additionalProperties"] == json!(false) => {
                return Err(format!("{key} is unknown"));
            }
            None => {}
        }
    }
    Ok(())
}

#[test]
fn every_recipe_that_ships_fits_the_schema() {
    let schema = json_schema(ALL);
    for (path, text) in shipped() {
        let value: Value = toml::from_str(&text).unwrap();
        valid(&schema, &value).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let effective = toml::to_string(&Recipe::parse(&path, &text, ALL).unwrap()).unwrap();
        let value: Value = toml::from_str(&effective).unwrap();
        valid(&schema, &value).unwrap_or_else(|e| panic!("{} as run: {e}", path.display()));
    }
    for wrong in [
        "[train]\nsteps = 0\n",
        "[train]\nsteeps = 1\n",
        "[engine]\ntype = \"ollama\"\n",
        "[env]\ntype = \"tiny\"\ntasks = \"word\"\n",
        "[store]\ntype = 3\n",
    ] {
        let mut value: Value = toml::from_str(&shipped()[0].1).unwrap();
        let table: Value = toml::from_str(wrong).unwrap();
        for (key, table) in table.as_object().unwrap() {
            value[key] = table.clone();
        }
        assert!(valid(&schema, &value).is_err(), "{wrong}");
    }
}

#[test]
fn every_key_has_a_description() {
    for key in keys(&run_schema(ALL)) {
        // Terms of formulas, which the pages of the algorithms explain.
        let formula = key.path.starts_with("algorithm.") && key.path.matches('.').count() > 1;
        let described = key.schema["description"]
            .as_str()
            .is_some_and(|d| d.len() > 3);
        let choice = key.schema.get("const").is_some();
        assert!(described || formula || choice, "{}", key.path);
    }
}

#[test]
fn the_page_of_the_keys_is_current() {
    let path = root().join("docs/recipe-keys.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, markdown(ALL)).unwrap();
    }
    let page = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        page == markdown(ALL),
        "docs/recipe-keys.md is not current: sinew schema --markdown > docs/recipe-keys.md"
    );
}

/// A recipe with one key of a table set to its default: refused for a reason, if at all, but known.
#[test]
fn every_key_of_the_schema_is_known() {
    const MINIMAL: &str = "name = \"t\"\nmodel = \"x\"\nenv = { type = \"tool_math\" }\n";
    let all = keys(&json_schema(ALL));
    let plain = |key: &&Key| key.only_with.is_none() && !key.path.contains("[]");
    let mut known = 0;
    for key in all.iter().filter(plain) {
        let Some((table, name)) = key.path.rsplit_once('.') else {
            continue;
        };
        let own = if table == "algorithm" {
            ""
        } else {
            "algorithm = { type = \"grpo\" }\n"
        };
        let kind = if own.is_empty() {
            "type = \"grpo\"\n"
        } else {
            ""
        };
        if table == "env" || name == "type" {
            continue;
        }
        let text = format!("{MINIMAL}{own}[{table}]\n{kind}{name} = \"\\u0000\"\n");
        let e = RunPlan::parse(Path::new("r.toml"), &text, ALL).err();
        let unknown = e.is_some_and(|e| e.to_string().contains("unknown field"));
        assert!(!unknown, "{text}");
        known += 1;
    }
    assert!(known > 80, "{known}");
}

/// Typed, effective, typed again: the same plan, and nothing that is refused.
#[test]
fn effective_recipes_are_recipes_of_the_same_run() {
    for (path, text) in shipped() {
        let plan = Recipe::parse(&path, &text, ALL).unwrap();
        let effective = toml::to_string(&plan).unwrap();
        let again = Recipe::parse(&path, &effective, ALL).unwrap();
        assert_eq!(again, plan, "{}", path.display());
        assert_eq!(toml::to_string(&again).unwrap(), effective);
    }
}

/// Values that some key takes, and that others do not.
const VALUES: [&str; 14] = [
    "0",
    "1",
    "2",
    "64",
    "100000",
    "-1",
    "0.5",
    "1e30",
    "nan",
    "true",
    "\"x\"",
    "[]",
    "{}",
    "18446744073709551615",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Recipes with any keys set to any values are read or refused, never a panic, and what is read
    /// is written and read again as the same.
    #[test]
    fn random_recipes_never_panic(
        base in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..4),
    ) {
        use std::sync::LazyLock;
        static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
            let all = keys(&json_schema(ALL)).into_iter();
            all.filter(|k| !k.path.contains("[]") && k.path.contains('.')).collect()
        });
        static BASES: LazyLock<Vec<(PathBuf, String)>> = LazyLock::new(shipped);
        let (path, text) = base.get(&BASES);
        let mut table: toml::Table = text.parse().unwrap();
        for (at, (key, value)) in changes.iter().enumerate() {
            let key = &key.get(&KEYS).path;
            put(&mut table, key, format!("@{at}").into());
            let _ = value;
        }
        let mut text = toml::to_string(&table).unwrap();
        for (at, (_, value)) in changes.iter().enumerate() {
            text = text.replace(&format!("\"@{at}\""), value.get::<&str>(&VALUES));
        }
        if let Ok(plan) = Recipe::parse(path, &text, ALL) {
            let effective = toml::to_string(&plan).unwrap();
            let again = Recipe::parse(path, &effective, ALL);
            prop_assert_eq!(again.map_err(|e| e.to_string()), Ok(plan));
        }
    }
}

fn put(table: &mut toml::Table, key: &str, value: toml::Value) {
    match key.split_once('.') {
        None => {
            table.insert(key.into(), value);
        }
        Some((name, below)) => {
            let inner = table
                .entry(name)
                .or_insert_with(|| toml::Table::new().into());
            match inner.as_table_mut() {
                Some(inner) => put(inner, below, value),
                None => *inner = value,
            }
        }
    }
}
