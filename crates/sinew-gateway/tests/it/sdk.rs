//! OpenAI's own Python client, unmodified, against the gateway.

use crate::support::world_with;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

fn script(prompt: &str) -> Option<String> {
    let asked = prompt.rsplit("<|im_start|>user\n").next()?;
    let words = asked.split("<|im_end|>").next()?;
    if words == "count" {
        return Some((1..400).map(|n| format!("{n} ")).collect());
    }
    if prompt.contains("<tools>") && !prompt.contains("<|im_start|>tool\n") {
        let call =
            "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 40, \"b\": 2}}\n</tool_call>";
        return Some(format!("<think>\nA sum.\n</think>\n\n{call}\n{call}"));
    }
    Some(format!("you said: {words}"))
}

#[test]
fn the_openai_client_works_unmodified() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let python = root.join(".cache/venv/bin/python3");
    assert!(
        python.exists(),
        "{} is missing: run scripts/setup.sh",
        python.display()
    );
    // Slow enough that a stream can be left in the middle.
    let world = world_with(script, |_, fake| fake.latency = Duration::from_millis(1));
    let rollout = world.open();
    let done = Command::new(&python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/openai_client.py"))
        .env("OPENAI_BASE_URL", &rollout.base_url)
        .env("OPENAI_API_KEY", rollout.key.trim_start_matches("Bearer "))
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        done.status.success(),
        "{}\n{}",
        text(&done.stdout),
        text(&done.stderr)
    );
    // The stream that the client left was aborted, and everything was captured.
    world.until("the left stream ends", || {
        world.view(&rollout.id)["stats"]["aborted"] == 1
    });
    let view = world.view(&rollout.id);
    let joins = &view["stats"]["joins"];
    assert_eq!(joins["fork"].as_u64().unwrap_or(0), 0, "{joins}");
    // The client drops reasoning when it sends the turn back.
    assert_eq!(joins["realign"], 1, "{joins}");
    assert!(
        world.finish(&rollout.id)["sampled_tokens"]
            .as_u64()
            .unwrap()
            > 100
    );
}
