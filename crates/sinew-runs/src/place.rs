//! The commonest slip of a first run: a recipe that is started from another folder than its files are in.

use std::path::Path;
use toml::Value;

/// Proposes the command to type if a file that the recipe names is not in the current folder, but in the
/// recipe's folder.
pub fn wrong_folder(recipe: &Path) -> Option<String> {
    let folder = recipe.parent().filter(|p| !p.as_os_str().is_empty())?;
    let text = std::fs::read_to_string(recipe).ok()?;
    let mut named = Vec::new();
    strings(&text.parse::<toml::Table>().ok()?.into(), &mut named);
    let beside = named.into_iter().find(|name| {
        // `score.py:score` names a function of a file.
        let file = name
            .split_once(".py:")
            .map_or(name.clone(), |(stem, _)| format!("{stem}.py"));
        let file = Path::new(&file);
        let plain = file.extension().is_some() && file.is_relative();
        plain && !file.exists() && folder.join(file).is_file()
    })?;
    let file = recipe.file_name()?.to_string_lossy();
    Some(format!(
        "`{beside}` is beside the recipe, and paths are relative to the current folder: `cd {}` and give the recipe as \
         `{file}`",
        folder.display()
    ))
}

/// All texts of a value, keys included: rewards are named by keys.
fn strings(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::String(text) => found.push(text.clone()),
        Value::Array(items) => items.iter().for_each(|item| strings(item, found)),
        Value::Table(table) => {
            for (key, value) in table {
                found.push(key.clone());
                strings(value, found);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_beside_the_recipe_are_found_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let recipe = dir.path().join("recipe.toml");
        let told = |text: &str| {
            std::fs::write(&recipe, text).unwrap();
            wrong_folder(&recipe)
        };
        std::fs::write(dir.path().join("rows.jsonl"), "").unwrap();
        std::fs::write(dir.path().join("mine.py"), "").unwrap();
        for text in [
            "tasks = \"rows.jsonl\"",
            "tasks = { source = \"rows.jsonl\" }",
            "reward = { \"mine.py:score\" = 1 }",
            "harness = { command = [\"python3\", \"mine.py\"] }",
        ] {
            let hint = told(text).unwrap_or_default();
            assert!(
                hint.contains("cd ") && hint.contains("`recipe.toml`"),
                "{text}: {hint}"
            );
        }
        for text in [
            "tasks = \"none.jsonl\"",
            "tasks = \"/rows.jsonl\"",
            "model = \"hf:a/b\"",
            "not toml [",
        ] {
            assert_eq!(told(text), None, "{text}");
        }
        assert_eq!(wrong_folder(Path::new("recipe.toml")), None);
    }
}
