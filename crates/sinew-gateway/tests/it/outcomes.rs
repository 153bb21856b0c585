//! Rewards of rollouts, and the parts that are kept of them.

use crate::support::{Opened, World, answer, world};
use serde_json::{Value, json};
use sinew_store::TraceStore;
use sinew_types::{EpisodeId, Trace};

fn yes(_: &str) -> Option<String> {
    Some("yes".into())
}

fn user() -> Value {
    json!([{"role": "user", "content": "x"}])
}

fn reward(world: &World, rollout: &Opened, body: &Value) {
    let path = format!("/rollouts/{}/reward", rollout.id);
    world.control("POST", &path, body).ok();
}

fn stored(world: &World, rollout: &Opened) -> Trace {
    let id = EpisodeId::new(rollout.id.as_str());
    world.store.get(&id).unwrap().unwrap()
}

#[test]
fn a_rollout_without_a_reward_has_none() {
    let world = world(yes);
    let silent = world.open();
    silent.chat(&user());
    assert_eq!(world.view(&silent.id)["reward"], Value::Null);
    let finished = world.finish(&silent.id);
    assert_eq!(finished["reward"], Value::Null, "{finished}");
    assert_eq!(finished["success"], Value::Null, "{finished}");
    assert_eq!(finished["end"], json!({"type": "terminated"}));
    let trace = stored(&world, &silent);
    assert!(trace.outcome.unscored);
    assert_eq!(trace.score(), None);
    let view = world.view(&silent.id);
    assert_eq!(view["reward"], Value::Null);
    assert_eq!(view["trace"]["outcome"]["unscored"], true);
    // Neither an answer's absence nor an end without one is a score.
    let failed = world.open();
    let path = format!("/rollouts/{}/finish", failed.id);
    let end = json!({"end": {"type": "truncated", "limit": "wall_time"}});
    let finished = world.control("POST", &path, &end).ok();
    assert_eq!(finished["reward"], Value::Null, "{finished}");
}

#[test]
fn the_id_of_a_finished_rollout_is_taken() {
    let world = world(yes);
    let open = || world.control("POST", "/rollouts", &json!({"id": "mine"}));
    let first = open().ok();
    let key = format!("Bearer {}", first["api_key"].as_str().unwrap());
    let url = format!("{}/chat/completions", first["base_url"].as_str().unwrap());
    let body = json!({"model": "m", "messages": user()}).to_string();
    let call = || answer("POST", &url, &[("authorization", &key)], body.as_bytes());
    call().ok();
    let path = "/rollouts/mine/reward";
    world.control("POST", path, &json!({"reward": 1})).ok();
    let finished = world.finish("mine");
    for _ in 0..2 {
        let again = open();
        assert_eq!(again.status, 409, "{again:?}");
        assert_eq!(again.error("code"), "rollout_exists");
        assert!(again.error("message").contains("finished"), "{again:?}");
    }
    let spec = sinew_gateway::RolloutSpec {
        id: Some(EpisodeId::new("mine")),
        ..Default::default()
    };
    let refused = world.gateway.open_rollout(spec).unwrap_err();
    assert_eq!(refused.status, 409);
    assert_eq!(call().status, 401);
    assert_eq!(world.finish("mine"), finished);
    let stats = world.gateway.stats();
    assert_eq!((stats.opened, stats.finished, stats.rollouts), (1, 1, 0));
    assert_eq!(stats.stored_tokens, 4);
    assert_eq!(stats.sampled_tokens, stats.stored_tokens);
}

/// A trace that came into the store by another way while the rollout was open.
#[test]
fn what_is_not_stored_is_not_counted_as_stored() {
    let world = world(yes);
    let rollout = world.open();
    rollout.chat(&user());
    let other = world.open();
    other.chat(&json!([{"role": "user", "content": "y"}]));
    world.finish(&other.id);
    let mut trace = stored(&world, &other);
    trace.episode = EpisodeId::new(rollout.id.as_str());
    world.store.commit(&trace).unwrap();
    let path = format!("/rollouts/{}/finish", rollout.id);
    let refused = world.control("POST", &path, &json!({}));
    assert_eq!(refused.status, 409, "{refused:?}");
    let stats = world.gateway.stats();
    assert_eq!((stats.stored_tokens, stats.open_tokens), (4, 4));
}

#[test]
fn a_reward_of_zero_is_a_reward() {
    let world = world(yes);
    for (body, expected) in [
        (json!({"reward": 0}), 0.0),
        (json!({"reward": 0, "turn": 1}), 0.0),
        (json!({"reward": 0.25, "turn": 1}), 0.25),
        (json!({"reward": -1, "success": false}), -1.0),
    ] {
        let rollout = world.open();
        rollout.chat(&user());
        reward(&world, &rollout, &body);
        assert_eq!(world.view(&rollout.id)["reward"], expected, "{body}");
        let finished = world.finish(&rollout.id);
        assert_eq!(finished["reward"], expected, "{body}: {finished}");
        assert_eq!(finished["success"], false, "{body}: {finished}");
        let trace = stored(&world, &rollout);
        assert!(!trace.outcome.unscored, "{body}");
        assert_eq!(trace.score(), Some(expected), "{body}");
        // The word is only in traces that need it.
        let raw = serde_json::to_value(&trace).unwrap();
        assert_eq!(raw["outcome"].get("unscored"), None);
    }
}
