//! Answers of all dialects, against the schemas that the providers' packages ship.

use crate::support::{run_client, world};

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

#[test]
fn answers_follow_the_schemas_of_the_providers() {
    let world = world(speaks);
    run_client("schemas.py", &world.open());
}
