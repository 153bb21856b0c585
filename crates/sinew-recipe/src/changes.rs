//! Differences between two recipes, for the check of a resumed run.
//!
//! Both recipes are compared key by key, with all defaults filled in, so that writing a default explicitly is
//! not a change.

use crate::RunPlan;

/// A key with different values in two recipes.
#[derive(Debug, PartialEq, Eq)]
pub struct Change {
    /// Path of the key, such as `train.lora.rank`.
    pub key: String,
    /// Value in the first recipe, in TOML; long values are cut.
    pub old: String,
    /// Value in the second recipe.
    pub new: String,
}

/// Returns the keys whose values differ, except the name and the keys that only limit a run: steps and wall
/// time.
///
/// Effective recipes are compared, so writing a default explicitly is not a change.
pub fn changes(old: &RunPlan, new: &RunPlan) -> Vec<Change> {
    let table = |r: &RunPlan| {
        let table = toml::Table::try_from(r.without_bounds()).unwrap_or_default();
        toml::Value::Table(table)
    };
    let mut found = Vec::new();
    compare("", Some(&table(old)), Some(&table(new)), &mut found);
    found
}

fn compare(key: &str, old: Option<&toml::Value>, new: Option<&toml::Value>, out: &mut Vec<Change>) {
    if old == new {
        return;
    }
    let as_table = |v: Option<&toml::Value>| v.and_then(toml::Value::as_table).cloned();
    if let (Some(a), Some(b)) = (as_table(old), as_table(new)) {
        let mut keys: Vec<&String> = a.keys().chain(b.keys()).collect();
        keys.sort_unstable();
        keys.dedup();
        for name in keys {
            let below = match key {
                "" => name.clone(),
                above => format!("{above}.{name}"),
            };
            compare(&below, a.get(name), b.get(name), out);
        }
        return;
    }
    let as_list = |v: Option<&toml::Value>| v.and_then(toml::Value::as_array).cloned();
    if let (Some(a), Some(b)) = (as_list(old), as_list(new))
        && a.len() == b.len()
        && a.iter().chain(&b).all(toml::Value::is_table)
    {
        for (i, (a, b)) in a.iter().zip(&b).enumerate() {
            compare(&format!("{key}[{i}]"), Some(a), Some(b), out);
        }
        return;
    }
    let shown = |v: Option<&toml::Value>| v.map_or_else(|| "(nothing)".to_owned(), brief);
    out.push(Change {
        key: key.to_owned(),
        old: shown(old),
        new: shown(new),
    });
}

/// Formats a value in one line, and cuts it if it is long.
fn brief(value: &toml::Value) -> String {
    const CHARS: usize = 60;
    let text = match value {
        // A value that a recipe keeps in 32 bits is shown as it was typed.
        toml::Value::Float(x) if f64::from(*x as f32) == *x => format!("{:?}", *x as f32),
        value => value.to_string().replace('\n', " "),
    };
    match text.char_indices().nth(CHARS) {
        Some((at, _)) => format!("{} ...", &text[..at]),
        None => text,
    }
}
