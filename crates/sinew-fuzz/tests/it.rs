//! Every target on its corpus and on mutations of it.

use sinew_fuzz::{Mutations, TARGETS, Target, target};

/// Any number; with the number of mutations it decides which inputs are tried.
const SEED: u64 = 15;

/// Runs a target. A failure names the input in a form that can be written to a file of the corpus.
fn try_target(name: &str) {
    let target: &Target = target(name).expect("a target of this name");
    let inputs = target.inputs().expect("a corpus");
    assert!(!inputs.is_empty(), "no corpus of {name}");
    let mutations = Mutations::new(SEED, &inputs, target.words);
    let all = inputs
        .iter()
        .cloned()
        .chain(mutations.take(target.mutations as usize));
    for (number, input) in all.enumerate() {
        let ran = std::panic::catch_unwind(|| (target.run)(&input));
        assert!(
            ran.is_ok(),
            "{name}: input {number} breaks a property: b\"{}\"",
            input.escape_ascii()
        );
    }
}

#[test]
fn traces() {
    try_target("trace");
}

#[test]
fn stores() {
    try_target("store");
}

#[test]
fn chat_templates() {
    try_target("chat_template");
}

#[test]
fn tool_calls() {
    try_target("tool_calls");
}

#[test]
fn server_sent_events() {
    try_target("sse");
}

#[test]
fn archives() {
    try_target("archive");
}

#[test]
fn images() {
    try_target("image");
}

#[test]
fn recipes() {
    try_target("recipe");
}

#[test]
fn system_call_filters() {
    try_target("seccomp");
}

#[test]
fn bodies_of_the_tinker_sdk() {
    try_target("tinker");
}

#[test]
fn task_folders_of_harbor() {
    try_target("harbor");
}

#[test]
fn every_target_has_a_test() {
    let source = include_str!("it.rs");
    for target in TARGETS {
        assert!(source.contains(&format!("try_target(\"{}\")", target.name)));
    }
}
