//! Responses and messages: their own clients, unmodified, and their streams byte by byte.

use crate::support::{Opened, World, world};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Calls `add` twice where it has tools and no result yet, thinking first; else an echo.
fn script(prompt: &str) -> Option<String> {
    let asked = prompt.rsplit("<|im_start|>user\n").next()?;
    let words = asked.split("<|im_end|>").next()?;
    if prompt.contains("<tools>") && !prompt.contains("<|im_start|>tool\n") {
        let call =
            "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 40, \"b\": 2}}\n</tool_call>";
        return Some(format!("<think>\nA sum.\n</think>\n\n{call}\n{call}"));
    }
    Some(format!("you said: {words}"))
}

fn run(program: &str, rollout: &Opened) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = here.join("../../.cache/venv/bin/python3");
    let shown = python.display();
    assert!(python.exists(), "{shown} is missing: run scripts/setup.sh");
    let key = rollout.key.trim_start_matches("Bearer ");
    let done = Command::new(&python)
        .arg(here.join("tests/it").join(program))
        .env("OPENAI_BASE_URL", &rollout.base_url)
        .env("OPENAI_API_KEY", key)
        .env(
            "ANTHROPIC_BASE_URL",
            rollout.base_url.trim_end_matches("/v1"),
        )
        .env("ANTHROPIC_API_KEY", key)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let output = format!("{}\n{}", text(&done.stdout), text(&done.stderr));
    assert!(done.status.success(), "{output}");
}

/// Histories that clients send back as they came are joined to what was captured.
fn joined(world: &World, rollout: &Opened) {
    let joins = world.view(&rollout.id)["stats"]["joins"].clone();
    for wrong in ["fork", "realign", "rollback"] {
        assert_eq!(joins[wrong].as_u64().unwrap_or(0), 0, "{joins}");
    }
    assert!(joins["extend"].as_u64().unwrap_or(0) > 0, "{joins}");
}

#[test]
fn the_openai_client_works_with_responses() {
    let world = world(script);
    let rollout = world.open();
    run("responses_client.py", &rollout);
    joined(&world, &rollout);
}

#[test]
fn the_anthropic_client_works_unmodified() {
    let world = world(script);
    let rollout = world.open();
    run("anthropic_client.py", &rollout);
    joined(&world, &rollout);
}

/// Name and JSON of each event of a stream.
fn events(text: &str) -> Vec<(String, Value)> {
    text.split("\n\n")
        .filter(|event| !event.is_empty() && !event.starts_with(':'))
        .map(|event| {
            let (name, data) = event.split_once('\n').unwrap();
            let name = name.strip_prefix("event: ").unwrap().to_owned();
            let data = data.strip_prefix("data: ").unwrap();
            (name, serde_json::from_str(data).unwrap())
        })
        .collect()
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    json!({
        "openai": [{"type": "function", "name": "add", "parameters": parameters}],
        "anthropic": [{"name": "add", "input_schema": parameters}],
    })
}

#[test]
fn events_of_responses_have_the_names_and_numbers_of_the_api() {
    let world = world(script);
    let rollout = world.open();
    let body = json!({"model": "m", "input": "x", "stream": true, "tools": tools()["openai"]});
    let answer = rollout.post("/responses", &body);
    assert_eq!(answer.status, 200, "{answer:?}");
    let events = events(&answer.text);
    for (i, (name, data)) in events.iter().enumerate() {
        assert_eq!(data["type"], **name);
        assert_eq!(data["sequence_number"], i);
    }
    let item = |index: usize| {
        let of = |(name, data): &(String, Value)| {
            let place = data["output_index"] == index;
            place.then(|| name.trim_start_matches("response.").to_owned())
        };
        let mut names: Vec<_> = events.iter().filter_map(of).collect();
        names.dedup();
        names
    };
    assert_eq!(
        item(0),
        [
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done"
        ]
    );
    let call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ];
    assert_eq!(item(1), call);
    assert_eq!(item(2), call);
    // The stream and the whole answer are the same.
    let whole = &events.last().unwrap().1["response"];
    let body = json!({"model": "m", "input": "x", "tools": tools()["openai"]});
    let told = rollout.post("/responses", &body).ok();
    let bare = |value: &Value| -> Vec<Value> {
        let mut items = value["output"].as_array().unwrap().clone();
        for item in &mut items {
            item["id"] = Value::Null;
            item["call_id"] = Value::Null;
        }
        items
    };
    assert_eq!(bare(whole), bare(&told));
    assert_eq!(
        whole["usage"]["output_tokens"],
        told["usage"]["output_tokens"]
    );
}

#[test]
fn events_of_messages_have_the_order_of_the_api() {
    let world = world(script);
    let rollout = world.open();
    let body = json!({
        "model": "m", "max_tokens": 200, "stream": true, "tools": tools()["anthropic"],
        "messages": [{"role": "user", "content": "x"}],
    });
    // With Anthropic's header, and with `/v1` twice, as its clients make it of our base URL.
    let key = rollout.key.trim_start_matches("Bearer ");
    let url = format!("{}/v1/messages", rollout.base_url);
    let sent = body.to_string();
    let answer = crate::support::answer("POST", &url, &[("x-api-key", key)], sent.as_bytes());
    assert_eq!(answer.status, 200, "{answer:?}");
    let events = events(&answer.text);
    let mut names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    let block = [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ];
    let expected: Vec<&str> = ["message_start"]
        .into_iter()
        .chain(block)
        .chain(block)
        .chain(block)
        .chain(["message_delta", "message_stop"])
        .collect();
    assert_eq!(names, expected);
    for (name, data) in &events {
        assert_eq!(data["type"], **name);
    }
    let last = &events[events.len() - 2].1;
    assert_eq!(last["delta"]["stop_reason"], "tool_use");
    assert!(last["usage"]["output_tokens"].as_u64().unwrap() > 10);
}

#[test]
fn each_api_refuses_in_its_own_shape() {
    let world = world(script);
    let rollout = world.open();
    let answer = rollout.post("/messages", &json!({"model": "m", "messages": []}));
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json()["type"], "error");
    assert_eq!(answer.error("type"), "invalid_request_error");
    assert!(answer.error("message").contains("max_tokens"), "{answer:?}");
    let answer = rollout.post(
        "/messages/count_tokens",
        &json!({"model": "m", "max_tokens": 1}),
    );
    assert_eq!(answer.json()["type"], "error", "{answer:?}");
    let answer = rollout.post("/responses", &json!({"model": "m"}));
    assert_eq!(answer.error("param"), "input");
    assert_eq!(answer.error("code"), "missing_field");
    let url = format!("{}/messages", rollout.base_url);
    let answer = crate::support::answer("POST", &url, &[("x-api-key", "no")], b"{}");
    assert_eq!(answer.status, 401);
    assert_eq!(answer.error("type"), "authentication_error");
}

/// Nobody else's answers can be gone on from.
#[test]
fn answers_are_kept_for_their_rollout_alone() {
    let world = world(script);
    let (one, other) = (world.open(), world.open());
    let first = one
        .post("/responses", &json!({"model": "m", "input": "x"}))
        .ok();
    let next = json!({"model": "m", "input": "y", "previous_response_id": first["id"]});
    let refused = other.post("/responses", &next);
    assert_eq!(refused.status, 400);
    assert_eq!(refused.error("code"), "previous_response_not_found");
    let answer = one.post("/responses", &next).ok();
    assert_eq!(answer["output"][0]["content"][0]["text"], "you said: y");
    assert_eq!(world.view(&one.id)["stats"]["joins"]["extend"], 1);
}
