//! Own rows and stored episodes as data to imitate: right answers of a column, and new scores.

use crate::input::refused;
use crate::{last_line, run_ok, sinew};
use serde_json::Value;
use sinew_store::{EpisodeSummary, Filter, Score, StoreReader};
use sinew_types::TokenKind;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

/// A recipe in a folder with 60 rows: a model from scratch, which reads and writes bytes.
fn project(dir: &Path, name: &str, keys: &str, steps: u32) {
    let rows = (0..60).fold(String::new(), |mut rows, i| {
        let _ = writeln!(
            rows,
            r#"{{"question": "Say {i}", "answer": {i}, "word": "w{i}"}}"#
        );
        rows
    });
    std::fs::write(dir.join("tasks.jsonl"), rows).unwrap();
    let text = format!(
        "model = {{ type = \"scratch\", d_model = 64, layers = 2, heads = 4, kv_heads = 2, d_ff = 128 }}\n\
         tasks = {{ source = \"tasks.jsonl\", prompt = \"{{{{ question }}}}\" }}\n{keys}\n\
         [rollout]\ntasks_per_step = 6\nmax_turn_tokens = 4\nmax_context_tokens = 160\n\
         [train]\nsteps = {steps}\nlearning_rate = 3e-3\nmicro_batch_tokens = 4096\n"
    );
    std::fs::write(dir.join(name), text).unwrap();
}

fn command(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = sinew();
    command.current_dir(dir).args(arguments);
    command
}

fn last(dir: &Path, arguments: &[&str]) -> Value {
    last_line(&command(dir, arguments).output().unwrap())
}

const GOLD: &str =
    "algorithm = { type = \"sft\" }\ndata = { type = \"gold\" }\nreward = \"exact(answer)\"\n";

/// A column with right answers is a gold policy: its rows are played, scored by the recipe's reward and
/// imitated.
#[test]
fn right_answers_of_a_column_are_imitated() {
    let dir = tempfile::tempdir().unwrap();
    let gold = format!("{GOLD}env = {{ type = \"chat\", gold = \"answer\" }}");
    project(dir.path(), "gold.toml", &gold, 8);
    let ended = last(
        dir.path(),
        &["train", "gold.toml", "--json", "--run-dir", "run"],
    );
    assert_eq!(ended["samples"]["trained"], 48, "{ended}");
    let list = ["episodes", "run", "--purpose", "train", "--json"];
    let played = run_ok(&mut command(dir.path(), &list));
    assert_eq!(played.lines().count(), 48);
    for line in played.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        assert_eq!(
            (&row["reward"], &row["success"]),
            (&1.0.into(), &true.into())
        );
    }
}

/// Worked examples of the prompt come before the first turn: they are neither played nor imitated.
#[test]
fn worked_examples_are_no_turns() {
    let dir = tempfile::tempdir().unwrap();
    let keys = format!("{GOLD}env = {{ type = \"chat\", gold = \"answer\" }}");
    project(dir.path(), "gold.toml", &keys, 1);
    let path = dir.path().join("gold.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let examples = "examples = [{ user = \"Say 70\", assistant = \"70\" }], prompt = ";
    std::fs::write(&path, text.replacen("prompt = ", examples, 1)).unwrap();
    let train = ["train", "gold.toml", "--json", "--run-dir", "run"];
    let ended = last(dir.path(), &train);
    assert_eq!(ended["samples"]["trained"], 6, "{ended}");
    let reader = StoreReader::open(&dir.path().join("run/store")).unwrap();
    let filter = Filter {
        purpose: Some("train".into()),
        ..Filter::default()
    };
    for row in reader.list(&filter).unwrap().episodes {
        let trace = reader.get(&row.episode).unwrap().unwrap();
        let sampled = trace.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
        let said: Vec<_> = sampled.flat_map(|n| &n.messages).collect();
        assert_eq!(said.len(), 1, "{said:?}");
        assert_ne!(said[0].content, "70");
    }
}

/// A wrong column is found before anything is trained, and so is a missing one.
#[test]
fn a_column_that_is_no_right_answer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (env, code, why) in [
        ("", 1, "env.gold = \"answer\""),
        (
            "env = { type = \"chat\", gold = \"word\" }",
            1,
            "env.gold: the right answer \"w",
        ),
        (
            "env = { type = \"chat\", gold = \"anwser\" }",
            1,
            "the row has no such column",
        ),
        (
            "env = { type = \"chat\", glod = \"answer\" }",
            1,
            "did you mean `gold`",
        ),
    ] {
        project(dir.path(), "gold.toml", &format!("{GOLD}{env}"), 1);
        let output = command(dir.path(), &["check", "gold.toml"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{env}: {said}");
        assert!(said.contains(why), "{env}: {said}");
    }
}

/// Training episodes of a run that are solved by their new scores.
fn solved(run: &Path) -> usize {
    let reader = StoreReader::open(&run.join("store")).unwrap();
    let filter = Filter {
        purpose: Some("train".into()),
        limit: 1000,
        ..Filter::default()
    };
    let page = reader.list(&filter).unwrap();
    let solved = |e: &EpisodeSummary| {
        let scores = reader.scores(&e.episode).unwrap();
        let mut new = scores.iter().filter(|s| s.source == "rescore");
        new.any(|s| s.name == "success" && s.score == Score::Value(1.0))
    };
    page.episodes.iter().filter(|e| solved(e)).count()
}

/// Episodes that were scored again are imitated by their new scores; one that a later call scores otherwise
/// is another set of rows, which a resumed run does not take for its own.
#[test]
fn new_scores_of_stored_episodes_decide_what_is_imitated() {
    let dir = tempfile::tempdir().unwrap();
    let sampled = "reward = 'regex(\"[a-z]\")'\n";
    project(dir.path(), "first.toml", sampled, 1);
    last(
        dir.path(),
        &["train", "first.toml", "--json", "--run-dir", "first"],
    );
    let data = "algorithm = { type = \"sft\" }\nreward = 'regex(\"[0-9]\")'\n\
                data = { type = \"episodes\", path = \"first\", scores = \"rescore\" }\n";
    project(dir.path(), "second.toml", data, 1);
    let train = ["train", "second.toml", "--json", "--run-dir", "second"];
    let told = refused(&mut command(dir.path(), &train));
    assert!(
        told.contains("data.scores = \"rescore\"") && told.contains("sinew rescore first"),
        "{told}"
    );
    let digits = ["rescore", "first", "--reward", "regex(\"[0-9]\")", "--json"];
    last(dir.path(), &digits);
    let digits = solved(&dir.path().join("first"));
    assert!(digits > 0, "four random bytes have a digit now and then");
    let ended = last(dir.path(), &train);
    assert_eq!(ended["samples"]["trained"], digits, "{ended}");
    last(
        dir.path(),
        &["rescore", "first", "--reward", "regex(\".\")", "--json"],
    );
    project(dir.path(), "second.toml", data, 2);
    let more = [&train[..], &["--resume"]].concat();
    let told = refused(&mut command(dir.path(), &more));
    assert!(told.contains("--allow-change 'data.rows'"), "{told}");
    let more = [&more[..], &["--allow-change", "data.rows"]].concat();
    let ended = last(dir.path(), &more);
    assert_eq!(ended["samples"]["trained_twice"], 0, "{ended}");
}
