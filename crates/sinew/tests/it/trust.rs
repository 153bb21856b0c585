//! Suspicious rewards, through the program: listed with their reasons, and left out of training.

use crate::{json_lines, last_line, run_ok, sinew, steps};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

/// A recipe whose gold runs answer 60 rows; the prompts of every third one state the answer.
fn project(dir: &Path, keys: &str) {
    let rows = (0..60).fold(String::new(), |mut rows, i| {
        let leak = if i % 3 == 0 { " (answer: {i})" } else { "" };
        let leak = leak.replace("{i}", &i.to_string());
        let _ = writeln!(rows, r#"{{"question": "Say {i}{leak}", "answer": {i}}}"#);
        rows
    });
    std::fs::write(dir.join("tasks.jsonl"), rows).unwrap();
    let text = format!(
        "model = {{ type = \"scratch\", d_model = 64, layers = 2, heads = 4, kv_heads = 2, d_ff = 128 }}\n\
         tasks = {{ source = \"tasks.jsonl\", prompt = \"{{{{ question }}}}\" }}\n\
         env = {{ type = \"chat\", gold = \"answer\" }}\nalgorithm = {{ type = \"sft\" }}\n\
         data = {{ type = \"gold\" }}\nreward = \"exact(answer)\"\n{keys}\n\
         [rollout]\ntasks_per_step = 6\nmax_turn_tokens = 4\nmax_context_tokens = 160\n\
         [train]\nsteps = 8\nlearning_rate = 3e-3\nmicro_batch_tokens = 4096\n"
    );
    std::fs::write(dir.join("recipe.toml"), text).unwrap();
}

fn command(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = sinew();
    command.current_dir(dir).args(arguments);
    command
}

/// The lines of a listing as JSON.
fn listed(dir: &Path, arguments: &[&str]) -> Vec<Value> {
    let text = run_ok(&mut command(dir, arguments));
    json_lines(&text)
}

/// Runs the recipe; gives its last line.
fn trained(dir: &Path, run: &str) -> Value {
    let run = ["train", "recipe.toml", "--json", "--run-dir", run];
    last_line(&command(dir, &run).output().unwrap())
}

/// The suspicious training episodes of a run, at most a hundred.
fn suspicious(dir: &Path, run: &str) -> Vec<Value> {
    let words = "--purpose train --suspicious --json --limit 100";
    let list: Vec<&str> = ["episodes", run]
        .into_iter()
        .chain(words.split(' '))
        .collect();
    listed(dir, &list)
}

#[test]
fn suspicious_episodes_are_listed_with_their_evidence() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    project(dir, "");
    assert_eq!(trained(dir, "all")["samples"]["trained"], 48);
    let found = suspicious(dir, "all");
    assert!(!found.is_empty() && found.len() < 48, "{}", found.len());
    for row in &found {
        let flags = row["suspicious"].as_array().unwrap();
        assert_eq!(flags[0]["flag"], "answer_in_prompt", "{row}");
        let evidence = flags[0]["evidence"].as_str().unwrap();
        assert!(evidence.contains("the prompt states the answer"), "{row}");
    }
    let first = ["episodes", "all", "--suspicious", "--limit", "1"];
    let text = run_ok(&mut command(dir, &first));
    let evidence = "\n    answer_in_prompt: the prompt states the answer `";
    assert!(text.contains(evidence), "{text}");
    assert!(text.contains("go on with --after"), "{text}");
    let none = ["episodes", "all", "--type", "none", "--suspicious"];
    assert_eq!(run_ok(&mut command(dir, &none)), "no suspicious episode\n");
}

#[test]
fn suspicious_episodes_are_left_out_of_training_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    project(
        dir,
        "[trust]\nexclude = [\"answer_in_prompt\", \"grader_touched\"]\n",
    );
    let ended = trained(dir, "honest");
    // Excluded episodes stay in the store, and are listed.
    let found = suspicious(dir, "honest").len() as u64;
    assert!(found > 0);
    assert_eq!(ended["samples"]["trained"], 48 - found, "{ended}");
    assert_eq!(ended["samples"]["lost"], 0, "{ended}");
    let (mut left_out, mut counted, mut first) = (0, 0, String::new());
    for step in steps(&dir.join("honest")) {
        let dropped = &step["dropped"]["suspicious: answer_in_prompt"];
        left_out += dropped.as_u64().unwrap_or(0);
        let status = &step["samples"]["suspicious"];
        counted += status["count"].as_u64().unwrap_or(0);
        first += status["first"].as_str().unwrap_or("");
    }
    assert_eq!((left_out, counted), (found, found));
    let evidence = "answer_in_prompt: the prompt states the answer";
    assert!(first.contains(evidence), "{first}");
}

#[test]
fn wrong_keys_of_trust_are_refused() {
    for (keys, part) in [
        ("exclude = [\"cheating\"]", "solved_too_fast"),
        (
            "exclude = [\"one_answer\", \"one_answer\"]",
            "each flag once",
        ),
        ("protected = [\"a\"]", "4 to 200 characters"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        project(dir.path(), &format!("[trust]\n{keys}\n"));
        let checked = command(dir.path(), &["check", "recipe.toml"])
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert!(!checked.status.success() && told.contains(part), "{told}");
    }
}
