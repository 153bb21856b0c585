//! Answers of all dialects, against the schemas that the providers' packages ship.

use crate::support::{Opened, world};
use std::path::Path;
use std::process::Command;

/// Thinks and calls if it has tools and no result yet; else answers with a long text.
fn speaks(prompt: &str) -> Option<String> {
    let asked = prompt.rsplit("<|im_start|>user\n").next()?;
    let words = asked.split("<|im_end|>").next()?;
    if prompt.contains("<tools>") && !prompt.contains("<|im_start|>tool\n") {
        let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 40}}\n</tool_call>";
        return Some(format!(
            "<think>\nA sum.\n</think>\n\nLet me see.\n{call}\n{call}"
        ));
    }
    Some(format!("you said: {words}"))
}

fn validated(rollout: &Opened) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = here.join("../../.cache/venv/bin/python3");
    let shown = python.display();
    assert!(python.exists(), "{shown} is missing: run scripts/setup.sh");
    let done = Command::new(&python)
        .arg(here.join("tests/it/schemas.py"))
        .env("BASE_URL", &rollout.base_url)
        .env("API_KEY", rollout.key.trim_start_matches("Bearer "))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let output = format!("{}\n{}", text(&done.stdout), text(&done.stderr));
    assert!(done.status.success(), "{output}");
}

#[test]
fn answers_follow_the_schemas_of_the_providers() {
    let world = world(speaks);
    validated(&world.open());
}
