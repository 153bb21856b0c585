//! Addresses, keys and retries in the forms that clients write.

use crate::support::{answer, events, world, world_with};
use serde_json::{Value, json};

fn yes(_: &str) -> Option<String> {
    Some("yes".into())
}

fn body() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "x"}]})
}

#[test]
fn slashes_too_many_and_any_case_of_bearer_are_understood() {
    let world = world(yes);
    let rollout = world.open();
    let sent = body().to_string();
    let base = rollout.base_url.clone();
    for url in [
        format!("{base}//chat/completions"),
        format!("{base}/chat/completions/"),
        format!("{}//r/{}/v1/chat/completions", world.url, rollout.id),
    ] {
        let headers = [("authorization", rollout.key.as_str())];
        answer("POST", &url, &headers, sent.as_bytes()).ok();
    }
    let key = rollout.key.trim_start_matches("Bearer ");
    for scheme in ["bearer", "BEARER", "Bearer "] {
        let value = format!("{scheme} {key}");
        let url = format!("{base}/chat/completions");
        let headers = [("authorization", value.as_str())];
        answer("POST", &url, &headers, sent.as_bytes()).ok();
    }
    let url = format!("{base}/chat/completions");
    let basic = format!("Basic {key}");
    let headers = [("authorization", basic.as_str())];
    assert_eq!(answer("POST", &url, &headers, sent.as_bytes()).status, 401);
    let health = format!("{}/health/", world.url);
    answer("GET", &health, &[], b"").ok();
}

#[test]
fn one_model_can_be_asked_for() {
    let world = world(yes);
    let rollout = world.open();
    let get = |path: &str, key: &str| {
        let url = format!("{}{path}", rollout.base_url);
        answer("GET", &url, &[("authorization", key)], b"")
    };
    for name in ["policy", "gpt-x", "org/model"] {
        let told = get(&format!("/models/{name}"), &rollout.key).ok();
        assert_eq!(told["id"], name);
        assert_eq!(told["object"], "model");
    }
    assert_eq!(get("/models", &rollout.key).ok()["object"], "list");
    assert_eq!(get("/models/policy", "Bearer no").status, 401);
}

#[test]
fn a_key_of_a_retry_stands_for_one_body() {
    let world = world(yes);
    let rollout = world.open();
    let keyed = [("idempotency-key", "k1")];
    let first = rollout.post_with("/chat/completions", &body(), &keyed).ok();
    let again = rollout.post_with("/chat/completions", &body(), &keyed).ok();
    assert_eq!(first, again);
    let mut other = body();
    other["messages"][0]["content"] = json!("y");
    let second = rollout.post_with("/chat/completions", &other, &keyed).ok();
    assert_ne!(second["id"], first["id"]);
    let another = [("idempotency-key", "k2")];
    let third = rollout
        .post_with("/chat/completions", &body(), &another)
        .ok();
    assert_ne!(third["id"], first["id"]);
    assert_eq!(world.view(&rollout.id)["stats"]["calls"], 3);
    assert_eq!(world.gateway.stats().coalesced, 1);
}

#[test]
fn streams_tell_the_ids_of_the_prompt_once() {
    let world = world(yes);
    let rollout = world.open();
    for (path, mut body, n) in [
        ("/chat/completions", body(), 2),
        ("/completions", json!({"model": "m", "prompt": "x"}), 1),
    ] {
        body["return_token_ids"] = json!(true);
        body["n"] = json!(n);
        let whole = rollout.post(path, &body).ok();
        let expected = &whole["prompt_token_ids"];
        assert!(!expected.as_array().unwrap().is_empty());
        body["stream"] = json!(true);
        let events = events(&rollout.post(path, &body).text);
        let told: Vec<&Value> = events.iter().map(|e| &e["prompt_token_ids"]).collect();
        assert_eq!(told[0], expected, "{path}");
        assert!(told[1..].iter().all(|ids| ids.is_null()), "{path}");
    }
}

#[test]
fn the_lowest_temperature_stands_for_lower_ones() {
    let world = world_with(yes, |_, _| {});
    let rollout = world.open();
    let mut temperatures = Vec::new();
    for temperature in [1e-6, 0.0005, 0.001, 0.0] {
        let mut body = body();
        body["temperature"] = json!(temperature);
        rollout.post("/chat/completions", &body).ok();
        let nodes = world.view(&rollout.id)["trace"]["nodes"].clone();
        let last = nodes.as_array().unwrap().last().unwrap().clone();
        temperatures.push(last["temperature"].as_f64().map(|t| t as f32));
    }
    let lowest = Some(0.001);
    // Greedy sampling has its log-probabilities at 1, which is not written.
    assert_eq!(temperatures, [lowest, lowest, lowest, None]);
}
