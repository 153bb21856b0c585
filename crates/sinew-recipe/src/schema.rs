//! The keys of a recipe as a JSON Schema for editors, and as pages of the documentation.
//!
//! Both are generated from the types of the tables: descriptions come from doc comments, ranges and names
//! from serde and the rules, and defaults from the plan.
//!
//! A description is the text of a doc comment, on one line. If the documentation of a key changes, the schema
//! and the pages must be generated again.

use crate::keys::RecipeKeys;
use crate::{
    EnginePlan, EvalPlan, JudgePlan, LaunchPlan, RolloutPlan, SandboxPlan, StorePlan, TasksPlan,
    TrainPlan, TrustPlan, UserPlan,
};
use schemars::generate::SchemaSettings;
use serde::Serialize;
use serde_json::{Map, Value, json};
use sinew_env::Registry;
use std::fmt::Write as _;

/// JSON Schema (draft 7, which taplo and Even Better TOML read) of a recipe, with stages or without.
pub fn json_schema(registry: Registry) -> Value {
    let mut schema = run_schema(registry);
    schema["properties"]["stage"] = stages(&schema);
    schema
}

/// Returns the schema of a run. A stage has the same keys, but its `name` is required and names its folder.
pub(crate) fn run_schema(registry: Registry) -> Value {
    let settings = SchemaSettings::draft07().with(|s| s.inline_subschemas = true);
    let mut generator = settings.into_generator();
    let env = crate::env::schema(&mut generator, registry).to_value();
    let mut schema = generator.into_root_schema_for::<RecipeKeys>().to_value();
    schema["properties"]["env"]["oneOf"] = env["oneOf"].clone();
    clean(&mut schema);
    let defaults = [
        ("sandbox", table(SandboxPlan::default().keys())),
        ("tasks", table(TasksPlan::default().keys())),
        ("user", table(UserPlan::default().keys())),
        ("rollout", table(RolloutPlan::default().keys())),
        ("train", table(TrainPlan::default().keys())),
        ("trust", table(TrustPlan::default().keys())),
        ("eval", table(EvalPlan::default().keys())),
        ("engine", table(EnginePlan::default().keys())),
        ("store", table(StorePlan::default().keys())),
        ("launch", table(LaunchPlan::default().keys())),
    ];
    let judge = (
        "judge/additionalProperties",
        table(JudgePlan::default().keys()),
    );
    for (name, values) in defaults.into_iter().chain([judge]) {
        let Some(table) = schema.pointer_mut(&format!("/properties/{name}/properties")) else {
            continue;
        };
        for (key, value) in values {
            if let Some(property) = table.get_mut(&key).and_then(Value::as_object_mut) {
                property.insert("default".into(), value);
            }
        }
    }
    if let Some(seed) = schema
        .pointer_mut("/properties/seed")
        .and_then(Value::as_object_mut)
    {
        seed.insert("default".into(), json!(0));
    }
    schema["title"] = json!("Sinew recipe");
    schema
}

/// Schema of a stage of a chain: its name, and every key of a recipe.
fn stages(run: &Value) -> Value {
    let mut keys = run["properties"].as_object().cloned().unwrap_or_default();
    let described = "Name of the stage and of its folder: 1 to 40 letters, digits, `_` and `-`.";
    keys.insert(
        "name".into(),
        json!({ "type": "string", "description": described }),
    );
    json!({
        "type": "array",
        "description": STAGES,
        "items": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": false,
            "properties": keys,
        },
    })
}

/// Description of `[[stage]]`.
const STAGES: &str = "A chain of runs, each of which starts from the weights of the one before. A stage has a \
    `name` and any key of a recipe; the keys above the stages are the defaults of all of them.";

fn table(keys: impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(keys) {
        Ok(Value::Object(table)) => table,
        _ => Map::new(),
    }
}

/// Removes parts that TOML does not have (null) or that only Rust has (number formats), and shows 32-bit
/// numbers as users write them.
fn clean(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(clean),
        Value::Object(object) => {
            object.remove("format");
            not_null(object);
            object.values_mut().for_each(clean);
        }
        _ => {}
    }
}

fn not_null(object: &mut Map<String, Value>) {
    let null = json!("null");
    if let Some(Value::Array(types)) = object.get_mut("type") {
        types.retain(|t| *t != null);
        if let [only] = &types[..] {
            object["type"] = only.clone();
        }
    }
    if object.get("default").is_some_and(Value::is_null) {
        object.remove("default");
    }
    let Some(Value::Array(choices)) = object.get_mut("anyOf") else {
        return;
    };
    choices.retain(|c| c.get("type") != Some(&null));
    if let [Value::Object(only)] = &choices[..] {
        let only = only.clone();
        object.remove("anyOf");
        for (key, value) in only {
            object.entry(key).or_insert(value);
        }
    }
}

/// A key of a recipe, as documented.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Key {
    /// Path of the key, such as `train.lora.rank`.
    pub(crate) path: String,
    /// The choice that the key belongs to, such as `type = "pool"`.
    pub(crate) only_with: Option<String>,
    pub(crate) schema: Value,
}

/// Returns every key of a schema; the keys of a nested table follow after their table.
pub(crate) fn keys(schema: &Value) -> Vec<Key> {
    let mut found = Vec::new();
    below(schema, "", None, &mut found);
    found
}

fn below(schema: &Value, path: &str, only_with: Option<&str>, found: &mut Vec<Key>) {
    for choice in choices(schema) {
        let tag = tag(choice);
        let with = tag
            .as_ref()
            .map(|(key, name)| format!("{key} = \"{name}\""));
        properties(choice, path, with.as_deref().or(only_with), found);
    }
    if schema["type"] == "array" {
        below(&schema["items"], &format!("{path}[]"), only_with, found);
    }
    let of_names = &schema["additionalProperties"];
    if of_names.is_object() {
        below(of_names, &format!("{path}.NAME"), only_with, found);
    }
    properties(schema, path, only_with, found);
}

fn properties(schema: &Value, path: &str, only_with: Option<&str>, found: &mut Vec<Key>) {
    let Some(properties) = schema["properties"].as_object() else {
        return;
    };
    for (name, property) in properties {
        let path = match path {
            "" => name.clone(),
            above => format!("{above}.{name}"),
        };
        let known = found.iter().any(|k| k.path == path && is_tag(&k.schema));
        if !(known && is_tag(property)) {
            found.push(Key {
                path: path.clone(),
                only_with: only_with.filter(|_| !is_tag(property)).map(str::to_owned),
                schema: property.clone(),
            });
        }
        below(property, &path, only_with, found);
    }
}

/// Returns the alternatives of a schema.
fn choices(schema: &Value) -> &[Value] {
    let all = ["oneOf", "anyOf"]
        .iter()
        .find_map(|k| schema[*k].as_array());
    all.map_or(&[], Vec::as_slice)
}

fn is_tag(schema: &Value) -> bool {
    schema.get("const").is_some()
}

/// Returns the key that distinguishes an alternative from others, and its value.
fn tag(schema: &Value) -> Option<(String, String)> {
    let properties = schema["properties"].as_object()?;
    properties.iter().find_map(|(key, property)| {
        let name = property["const"].as_str()?;
        Some((key.clone(), name.to_owned()))
    })
}

/// Returns the names that a schema accepts, in TOML.
fn names(schema: &Value) -> Vec<String> {
    let listed = schema["enum"].as_array().into_iter().flatten();
    let one = schema.get("const").into_iter();
    let own = listed.chain(one).map(shown);
    let of_choices = choices(schema).iter().flat_map(|choice| match tag(choice) {
        Some((key, name)) => vec![format!("{key} = \"{name}\"")],
        None => names(choice),
    });
    own.chain(of_choices).collect()
}

/// Formats a value as TOML.
fn shown(value: &Value) -> String {
    match value {
        Value::Number(n) => number(n.as_f64().unwrap_or_default()),
        Value::Object(table) if table.is_empty() => "{}".into(),
        Value::Object(table) => {
            let keys = table.iter().map(|(k, v)| format!("{k} = {}", shown(v)));
            format!("{{ {} }}", keys.collect::<Vec<_>>().join(", "))
        }
        value => value.to_string(),
    }
}

/// Formats a 32-bit or 64-bit number in its shortest form.
fn number(x: f64) -> String {
    match f64::from(x as f32) == x {
        true if x.abs() < 1e-3 && x != 0.0 => format!("{:e}", x as f32),
        true => (x as f32).to_string(),
        false => x.to_string(),
    }
}

fn kind(schema: &Value) -> &str {
    match schema["type"].as_str() {
        Some("integer") => "integer",
        Some("number") => "number",
        Some("boolean") => "true or false",
        Some("array") => "list",
        Some("object") => "table",
        Some("string") => "text",
        _ if names(schema).is_empty() => "",
        _ => "name",
    }
}

fn allowed(schema: &Value) -> String {
    let bound = |key: &str| schema[key].as_f64().map(number);
    let names = names(schema);
    match (bound("minimum"), bound("maximum")) {
        _ if !names.is_empty() => names
            .iter()
            .map(|n| format!("`{n}`"))
            .collect::<Vec<_>>()
            .join(", "),
        (Some(low), Some(high)) => format!("{low} to {high}"),
        (Some(low), None) => format!("{low} or more"),
        (None, Some(high)) => format!("up to {high}"),
        (None, None) => kind(schema).to_owned(),
    }
}

/// Returns the text of `docs/recipe-keys.md`: one table of keys for each table of a recipe.
pub fn markdown(registry: Registry) -> String {
    let mut schema = run_schema(registry);
    schema["properties"]["stage"] = json!({ "type": "array", "description": STAGES });
    let mut page = String::from(
        "# Keys of a recipe\n\nMade by `sinew schema --markdown` from the program itself; \
         [recipes.md](recipes.md) explains how keys work together. Times are in seconds, memory is in MiB.\n",
    );
    let all = keys(&schema);
    let top: Vec<&Key> = all.iter().filter(|k| !k.path.contains('.')).collect();
    let (tables, single): (Vec<&Key>, Vec<&Key>) = top.into_iter().partition(|key| {
        let start = format!("{}.", key.path);
        all.iter().any(|k| k.path.starts_with(&start))
    });
    rows(&mut page, single.into_iter());
    for table in tables {
        let _ = write!(page, "\n## `[{}]`\n\n", table.path);
        if let Some(text) = table.schema["description"].as_str() {
            let _ = writeln!(page, "{}", one_line(text));
        }
        let start = format!("{}.", table.path);
        rows(&mut page, all.iter().filter(|k| k.path.starts_with(&start)));
    }
    page
}

fn rows<'a>(page: &mut String, keys: impl Iterator<Item = &'a Key>) {
    page.push_str("\n| key | default | allowed | meaning |\n|---|---|---|---|\n");
    for key in keys {
        let default = key.schema.get("default").map(|d| format!("`{}`", shown(d)));
        let with = key.only_with.as_ref();
        let with = with.map_or_else(String::new, |w| format!("With `{w}`: "));
        let meaning = key.schema["description"].as_str().unwrap_or_default();
        let choice = if is_tag(&key.schema) {
            String::new()
        } else {
            allowed(&key.schema)
        };
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {with}{} |",
            key.path,
            default.unwrap_or_default(),
            choice.replace('|', "\\|"),
            one_line(meaning).replace('|', "\\|"),
        );
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
