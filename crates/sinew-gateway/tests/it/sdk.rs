//! OpenAI's own Python client, unmodified, against the gateway.

use crate::support::{run_client, world_with};
use sinew_infer::Fault;

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
    // The stream that the client leaves is the ninth request: it has no end before that.
    let world = world_with(script, |_, fake| {
        fake.faults.insert(8, Fault::HangAfter { tokens: 200 });
    });
    let rollout = world.open();
    run_client("openai_client.py", &rollout);
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
