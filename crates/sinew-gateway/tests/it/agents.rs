//! The programs of `examples/`, unmodified, each with its framework, against the gateway.

use crate::support::{Opened, World, client, python, world_with};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const CALL: &str = "<tool_call>\n{\"name\": \"calculator\", \"arguments\": {\"expression\": \"17 * 23\"}}\n</tool_call>";
const CODE: &str = "I compute it.\n<code>\nprint(calculator(\"17 * 23\"))\n</code>";
const FINAL_CODE: &str = "That is it.\n<code>\nfinal_answer(391)\n</code>";
const ANSWER: &str = "Answer: 391";

/// A model that calls the tool, and repeats its result.
fn mathematician(prompt: &str) -> Option<String> {
    let last = prompt.rsplit("<|im_start|>").nth(1)?;
    if prompt.contains("final_answer") {
        let seen = last.contains("391");
        return Some(if seen { FINAL_CODE } else { CODE }.into());
    }
    match last.strip_prefix("tool\n") {
        Some(result) => Some(format!("Answer: {}", result.split("<|im_end|>").next()?)),
        None => Some(CALL.into()),
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn world() -> World {
    world_with(mathematician, |config, fake| {
        // Each byte is a token here, and frameworks have long prompts.
        config.session.max_context_tokens = 1 << 16;
        fake.context = 1 << 16;
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn run(program: &str, rollout: &Opened, env: &[(&str, &str)]) -> Output {
    client(&root().join("examples").join(program), rollout)
        .env("SINEW_TASK", "What is 17 * 23?")
        .envs(env.iter().copied())
        .output()
        .unwrap()
}

/// Runs a program to its answer; gives what was captured.
fn answers(program: &str, env: &[(&str, &str)], said: &[&str]) -> Value {
    let world = world();
    let rollout = world.open();
    let done = run(program, &rollout, env);
    let printed = text(&done.stdout);
    assert!(done.status.success(), "{program}: {}", text(&done.stderr));
    assert_eq!(printed.lines().last(), Some(ANSWER), "{program}: {printed}");
    let view = world.view(&rollout.id);
    let finished = world.finish(&rollout.id);
    // Each byte of the model's text is one token, and so is the end of a turn that no stop string of the
    // agent ended earlier.
    let stopped = |s: &str| s.ends_with("</code>");
    let tokens: usize = said
        .iter()
        .map(|s| s.len() + usize::from(!stopped(s)))
        .sum();
    assert_eq!(finished["sampled_tokens"], tokens, "{program}: {finished}");
    assert_eq!(view["stats"]["calls"], said.len(), "{program}: {view}");
    view
}

fn joins(view: &Value, kind: &str) -> u64 {
    view["stats"]["joins"][kind].as_u64().unwrap_or(0)
}

/// An agent of two calls, the second of which continues where the first ended.
fn extends(program: &str, env: &[(&str, &str)]) {
    let view = answers(program, env, &[CALL, ANSWER]);
    let joined = (joins(&view, "start"), joins(&view, "extend"));
    assert_eq!(joined, (1, 1), "{view}");
}

#[test]
fn the_openai_sdk_agent_extends_what_was_sampled() {
    extends("openai_agent.py", &[]);
}

#[test]
fn the_langgraph_agent_extends_what_was_sampled() {
    extends("langgraph_agent.py", &[]);
}

#[test]
fn the_agents_sdk_speaks_chat_completions() {
    let env = [("AGENT_API", "chat_completions")];
    extends("openai_agents_agent.py", &env);
}

#[test]
fn the_agents_sdk_speaks_responses() {
    let env = [("AGENT_API", "responses")];
    extends("openai_agents_agent.py", &env);
}

#[test]
fn the_anthropic_sdk_agent_extends_what_was_sampled() {
    extends("anthropic_agent.py", &[]);
}

#[test]
fn the_google_sdk_agent_extends_what_was_sampled() {
    extends("google_agent.py", &[]);
}

/// It adds its own words to each turn of the model, so each call is a branch; that is counted, and nothing
/// sampled is lost.
#[test]
fn the_smolagents_agent_branches_and_loses_nothing() {
    let view = answers("smolagents_agent.py", &[], &[CODE, FINAL_CODE]);
    let diverged = joins(&view, "rollback") + joins(&view, "fork");
    assert_eq!((joins(&view, "start"), diverged), (1, 1), "{view}");
    assert!(view["divergence_rate"].as_f64().unwrap() > 0.0, "{view}");
}

#[test]
fn the_python_client_runs_functions_as_agents() {
    let world = world();
    let done = Command::new(python())
        .arg(root().join("python/tests/against_gateway.py"))
        .env("PYTHONPATH", root().join("python/src"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("SINEW_URL", &world.url)
        .env("SINEW_TOKEN", crate::support::CONTROL)
        .output()
        .unwrap();
    assert!(
        done.status.success(),
        "{}\n{}",
        text(&done.stdout),
        text(&done.stderr)
    );
    assert_eq!(text(&done.stdout).lines().last(), Some("ok"));
}
