//! Variables of chat templates, from the recipe to the program.

use crate::{failure, json_lines, root, run_ok, runs::small_folder, sinew};
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

/// The lines of `sinew check-template --json`: one a case, then the counts.
fn cases(lines: &str) -> (Vec<Value>, Value) {
    let mut cases = json_lines(lines);
    let counts = cases.pop().unwrap();
    (cases, counts)
}

#[test]
fn a_template_is_checked_without_its_model() {
    let templates = root().join("crates/sinew-render/tests/templates");
    let check = |name: &str| {
        let mut command = sinew();
        command
            .arg("check-template")
            .arg(templates.join(format!("{name}.jinja")));
        command
    };
    let (all, counts) = cases(&run_ok(check("qwen3.5").arg("--json")));
    let named = |name: &str| all.iter().find(|c| c["case"] == name).unwrap();
    assert_eq!(named("calls and results")["verdict"], "exact");
    let thinking = named("thinking returned");
    assert_eq!(thinking["rewrites"], serde_json::json!(["reasoning"]));
    let difference = &thinking["difference"];
    let text = |key: &str| difference[key].as_str().unwrap();
    assert!(
        text("before").ends_with("<|im_start|>assistant\n"),
        "{difference}"
    );
    assert!(text("sampled").starts_with("<think>"), "{difference}");
    assert!(text("rebuilt").starts_with("It is 391."), "{difference}");
    assert_eq!(counts["broken"], 0);
    assert_eq!(counts["tool_calls"], "xml");
    // GLM 4.7 has a variable that keeps thinking.
    let (_, counts) = cases(&run_ok(check("glm-4.7").arg("--json")));
    assert_eq!(
        counts["settings"][0]["template"]["clear_thinking"], false,
        "{counts}"
    );
    let said = run_ok(&mut check("glm-4.7"));
    assert!(
        said.contains("template = { clear_thinking = false }"),
        "{said}"
    );
    // DeepSeek V3.1 moves later system messages to the start.
    let done = check("deepseek-v3.1").output().unwrap();
    let said = failure(&done, 1);
    assert!(said.contains("system message in the middle"), "{said}");
}

#[test]
fn the_template_of_a_model_folder_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let model = small_folder(dir.path());
    with_template(&model, "qwen2.5");
    let (all, counts) = cases(&run_ok(
        sinew().arg("check-template").arg(&model).arg("--json"),
    ));
    assert_eq!(all.len(), 13);
    assert_eq!(counts["broken"], 0, "{counts}");
}
