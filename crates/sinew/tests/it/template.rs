//! Variables of chat templates, from the recipe to the program.

use crate::{root, runs::small_folder, sinew};
use serde_json::Value;
use std::path::Path;

/// `sinew check` of a recipe with this model and these variables: whether it is ok, and its output.
fn checked(dir: &Path, model: &Path, template: &str) -> (bool, String) {
    let text = format!(
        "name = \"t\"\ntasks = {{ source = \"tasks.jsonl\", prompt = \"{{{{ question }}}}\" }}\n\
         reward = \"number(answer)\"\n[model]\ntype = \"pretrained\"\nsource = {:?}\n{template}\n\
         [rollout]\nmax_context_tokens = 1024\n",
        model.display().to_string()
    );
    let rows = (0..40).map(|n| format!("{{\"question\": \"{n} + 1\", \"answer\": {}}}\n", n + 1));
    std::fs::write(dir.join("tasks.jsonl"), rows.collect::<String>()).unwrap();
    let recipe = dir.join("recipe.toml");
    std::fs::write(&recipe, text).unwrap();
    let done = sinew()
        .current_dir(dir)
        .arg("check")
        .arg(&recipe)
        .output()
        .unwrap();
    let said = [done.stdout, done.stderr].concat();
    (
        done.status.success(),
        String::from_utf8_lossy(&said).into_owned(),
    )
}

/// Gives a model folder another chat template, a published one.
fn with_template(model: &Path, name: &str) {
    let path = root().join(format!("crates/sinew-render/tests/templates/{name}.jinja"));
    let file = model.join("tokenizer_config.json");
    let text = std::fs::read_to_string(&file).unwrap();
    let mut settings: Value = serde_json::from_str(&text).unwrap();
    settings["chat_template"] = std::fs::read_to_string(path).unwrap().into();
    std::fs::write(&file, settings.to_string()).unwrap();
}

#[test]
fn a_recipe_gives_the_template_its_variables() {
    let dir = tempfile::tempdir().unwrap();
    let model = small_folder(dir.path());
    with_template(&model, "mistral-small-3.2");
    let (ok, said) = checked(dir.path(), &model, "");
    assert!(!ok && said.contains("template = { date"), "{said}");
    for date in ["\"2026-01-31\"", "2026-01-31"] {
        let (ok, said) = checked(
            dir.path(),
            &model,
            &format!("template = {{ date = {date} }}"),
        );
        assert!(ok && said.contains("joins between turns"), "{said}");
    }
    let (ok, said) = checked(dir.path(), &model, "template = { enable_thinking = false }");
    assert!(
        !ok && said.contains("enable_thinking has no effect"),
        "{said}"
    );
    with_template(&model, "qwen3");
    let (ok, said) = checked(dir.path(), &model, "template = { enable_thinking = false }");
    assert!(ok, "{said}");
}
