//! What a rollout was worth, and what is kept of it.

use crate::support::{Opened, World, world};
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
