//! Typical clients: they leave and ask again, use one key for everything, and check whether a server is
//! there.

use crate::support::{Narrow, World, answer, world, world_behind, world_with};
use serde_json::{Value, json};
use sinew_gateway::Secret;
use sinew_infer::Fault;
use sinew_types::Engine;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

const API_KEY: &str = "one-key-for-all";

fn yes(_: &str) -> Option<String> {
    Some("yes".into())
}

fn body(text: &str) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": text}]})
}

/// A world whose clients may come back, and whose first generation hangs after one token.
fn patient() -> World {
    world_with(yes, |config, fake| {
        config.server.client_grace = Duration::from_secs(600);
        fake.faults.insert(0, Fault::HangAfter { tokens: 1 });
    })
}

#[test]
fn who_leaves_and_asks_again_gets_the_call_that_runs() {
    let world = patient();
    let rollout = world.open();
    let stats = || world.gateway.stats();
    let ask = || rollout.ask(&body("x"));
    // A repetition that comes before the server sees its client leave is one more sample.
    let leave = |client| {
        drop(client);
        world.until("the client is seen to leave", || stats().unread == 1);
    };
    let first = ask();
    world.until("the call is sampled", || world.engine.status().running == 1);
    leave(first);
    // No header marks the call as a repeat. The equal body does, as the first client has left.
    let second = ask();
    world.until("the call is joined", || stats().coalesced == 1);
    leave(second);
    assert_eq!(
        (world.gateway.running(), world.engine.status().running),
        (1, 1)
    );
    // Another body is another call, and an equal one while someone waits is one more sample.
    rollout.post("/chat/completions", &body("y")).ok();
    assert_eq!(stats().coalesced, 1);
    let finished = world.finish(&rollout.id);
    assert_eq!(finished["sampled_tokens"], 1 + 4, "{finished}");
}

#[test]
fn an_answer_that_nobody_got_is_given_to_the_next_who_asks() {
    let room = Arc::new(Semaphore::new(0));
    let gate = Narrow {
        room: Arc::clone(&room),
        waiting: Arc::default(),
    };
    let world = world_behind(
        yes,
        |config, _| config.server.client_grace = Duration::from_secs(600),
        None,
        Some(Arc::new(gate)),
    );
    let rollout = world.open();
    let first = rollout.ask(&body("x"));
    world.until("the call runs", || world.gateway.running() == 1);
    drop(first);
    world.until("the client is seen to leave", || {
        world.gateway.stats().unread == 1
    });
    room.add_permits(1);
    world.until("the call ends", || world.gateway.running() == 0);
    let said = rollout.post("/chat/completions", &body("x")).ok();
    assert_eq!(said["choices"][0]["message"]["content"], "yes");
    assert_eq!(world.gateway.stats().coalesced, 1);
    // It was given: an equal request is one more sample.
    rollout.post("/chat/completions", &body("x")).ok();
    assert_eq!(
        world.view(&rollout.id)["stats"]["joins"],
        json!({"start": 1, "resample": 1})
    );
}

#[test]
fn a_call_that_failed_counts_under_no_join() {
    let world = world_with(yes, |_, fake| {
        fake.faults.insert(0, Fault::HangAfter { tokens: 0 });
    });
    let rollout = world.open();
    let client = rollout.ask(&body("x"));
    world.until("it runs", || world.engine.status().running == 1);
    drop(client);
    world.until("it has failed", || world.gateway.running() == 0);
    assert_eq!(world.view(&rollout.id)["stats"]["joins"], json!({}));
    assert_eq!(world.gateway.stats().joins.values().sum::<u64>(), 0);
    rollout.post("/chat/completions", &body("x")).ok();
    assert_eq!(
        world.view(&rollout.id)["stats"]["joins"],
        json!({"start": 1})
    );
    let metrics = &world.finish(&rollout.id)["metrics"];
    assert_eq!(metrics["join_start"], 1.0, "{metrics}");
}

fn plain(world: &World, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let key = format!("Bearer {API_KEY}");
    let text = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let headers = [("authorization", key.as_str())];
    let said = answer(
        method,
        &format!("{}{path}", world.url),
        &headers,
        text.as_bytes(),
    );
    (said.status, said.json())
}

#[test]
fn one_key_serves_clients_that_open_no_rollouts() {
    let world = world_with(yes, |config, _| {
        config.api_key = Some(Secret::new(API_KEY));
        config.server.max_rollouts = 6;
    });
    assert_eq!(
        plain(&world, "GET", "/v1/models", &Value::Null).1["data"][0]["id"],
        "policy"
    );
    // A conversation continues in its rollout, whichever API it comes by.
    let ask = json!({"role": "user", "content": "first"});
    let (status, said) = plain(&world, "POST", "/v1/chat/completions", &body("first"));
    assert_eq!(
        (status, &said["choices"][0]["message"]["content"]),
        (200, &json!("yes"))
    );
    let messages =
        json!([ask, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]);
    let anthropic = json!({"model": "m", "max_tokens": 9, "messages": messages});
    assert_eq!(plain(&world, "POST", "/v1/messages", &anthropic).0, 200);
    let responses = json!({"model": "m", "input": "by id"});
    let (_, stored) = plain(&world, "POST", "/v1/responses", &responses);
    let responses = json!({"model": "m", "input": "go on", "previous_response_id": stored["id"]});
    assert_eq!(plain(&world, "POST", "/v1/responses", &responses).0, 200);
    let stats = world.gateway.stats();
    assert_eq!(
        (stats.opened, stats.joins[&sinew_gateway::Join::Extend]),
        (2, 2),
        "{stats:?}"
    );
    // Many more conversations than rollouts may be open: the oldest are finished and stored.
    for i in 0..20 {
        assert_eq!(
            plain(
                &world,
                "POST",
                "/v1/chat/completions",
                &body(&format!("task {i}"))
            )
            .0,
            200
        );
    }
    let stats = world.gateway.stats();
    assert_eq!(
        (stats.opened, stats.rollouts, stats.finished),
        (22, 3, 19),
        "{stats:?}"
    );
    // It opens the model and nothing else; another key opens nothing.
    assert_eq!(plain(&world, "GET", "/rollouts", &Value::Null).0, 401);
    let stranger = [("x-api-key", "another")];
    let url = format!("{}/v1/chat/completions", world.url);
    assert_eq!(
        answer("POST", &url, &stranger, body("x").to_string().as_bytes()).status,
        401
    );
}

#[test]
fn without_a_fixed_key_no_rollout_opens_by_itself() {
    let world = world(yes);
    assert_eq!(
        plain(&world, "POST", "/v1/chat/completions", &body("x")).0,
        401
    );
    assert_eq!(world.gateway.stats().opened, 0);
}

#[test]
fn a_trace_id_is_no_part_of_the_key_and_scores_nothing() {
    let world = world(yes);
    let opened = world
        .control("POST", "/rollouts", &json!({"agent_scores": true}))
        .ok();
    let text = |name: &str| opened[name].as_str().unwrap().to_owned();
    let (trace, key) = (text("traceparent"), text("api_key"));
    let id = trace.split('-').nth(1).unwrap();
    let hash = blake3::hash(key.as_bytes()).to_hex();
    assert!(!hash.contains(id), "{trace}");
    let by_trace = [("traceparent", trace.as_str())];
    let url = |path: &str| format!("{}{path}", text("base_url"));
    let called = answer(
        "POST",
        &url("/chat/completions"),
        &by_trace,
        body("x").to_string().as_bytes(),
    );
    assert_eq!(called.status, 200, "{called:?}");
    let reward = json!({"reward": 1.0}).to_string();
    assert_eq!(
        answer("POST", &url("/reward"), &by_trace, reward.as_bytes()).status,
        401
    );
    // Half of the stored hash of the key, which was the trace id once, opens nothing.
    let guessed = format!("00-{}-{}-01", &hash[..32], &hash[..16]);
    let by_hash = [("traceparent", guessed.as_str())];
    let called = answer(
        "POST",
        &url("/chat/completions"),
        &by_hash,
        body("x").to_string().as_bytes(),
    );
    assert_eq!(called.status, 401);
    let bearer = format!("Bearer {key}");
    let by_key = [("authorization", bearer.as_str())];
    assert_eq!(
        answer("POST", &url("/reward"), &by_key, reward.as_bytes()).status,
        200
    );
}

#[test]
fn clients_that_look_for_a_server_find_one() {
    let world = world(yes);
    let rollout = world.open();
    for path in [
        "",
        "/",
        "/v1",
        &format!("/r/{}", rollout.id),
        &format!("/r/{}/v1", rollout.id),
    ] {
        for method in ["HEAD", "GET"] {
            let said = answer(method, &format!("{}{path}", world.url), &[], b"");
            assert_eq!(said.status, 200, "{method} {path}");
        }
    }
}
