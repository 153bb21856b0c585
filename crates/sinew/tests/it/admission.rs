//! Admission in front of the embedded engine.

use crate::resume::done;
use crate::{small_tiny, with_changes};
use serde_json::Value;
use std::path::Path;

/// Steps of a short run with little key-value room and turns of very different lengths.
fn steps(dir: &Path, name: &str, admission: &str) -> Vec<Value> {
    let in_flight = format!("max_in_flight = 64\n{admission}");
    let changes = [
        ("max_in_flight = 256", in_flight.as_str()),
        ("max_turn_tokens = 3", "max_turn_tokens = 48"),
        ("max_context_tokens = 64", "max_context_tokens = 256"),
        ("kv_tokens = 32768", "kv_tokens = 512"),
        ("steps = 60", "steps = 4"),
    ];
    let recipe = dir.join(format!("{name}.toml"));
    std::fs::write(&recipe, with_changes(small_tiny(), &changes)).unwrap();
    let run = dir.join(name);
    done(&recipe, &run, &[]);
    crate::steps(&run)
}

fn sum(steps: &[Value], name: &str) -> f64 {
    steps
        .iter()
        .map(|s| s["admission"][name].as_f64().unwrap())
        .sum()
}

/// Runs 64 episodes on 512 tokens of room. The engine takes running requests' room away again and again;
/// episodes that wait their turn lose nothing, and the samples are the same.
#[test]
fn episodes_wait_for_room_instead_of_taking_it_from_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let off = "admission = { kv_capacity = false, adaptive = false }";
    let (on, off) = (steps(dir.path(), "on", ""), steps(dir.path(), "off", off));
    let (with, without) = (sum(&on, "preemptions"), sum(&off, "preemptions"));
    assert!(
        without >= 8.0 && 4.0 * with <= without,
        "{with} of {without}"
    );
    assert!(sum(&on, "waited_turns") > 0.0 && sum(&on, "pauses") > 0.0);
    assert_eq!(sum(&on, "forced_turns"), 0.0);
    assert_eq!((sum(&off, "waited_turns"), sum(&off, "pauses")), (0.0, 0.0));
    for (a, b) in on.iter().zip(&off) {
        assert_eq!(a["rollout"]["reward"], b["rollout"]["reward"]);
        assert_eq!(a["tokens"], b["tokens"]);
    }
}
