//! Users' tasks and rewards: a file of rows, a reward by name, a model that learns from them.

use crate::{failure, json_lines, last_line, root, run_ok, sinew, steps};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A recipe next to 60 rows: a model from scratch, which reads and writes bytes.
fn project(dir: &Path, more: &str) -> PathBuf {
    let rows = (0..60).fold(String::new(), |mut rows, i| {
        let _ = writeln!(
            rows,
            r#"{{"question": "Say {i}", "answer": "{i}", "level": {}}}"#,
            i % 3
        );
        rows
    });
    std::fs::write(dir.join("tasks.jsonl"), rows).unwrap();
    let recipe = dir.join("own.toml");
    let text = format!(
        "model = {{ type = \"scratch\", d_model = 64, layers = 2, heads = 4, kv_heads = 2, d_ff = 128 }}\n{more}\n\
         [rollout]\ntasks_per_step = 6\ngroup_size = 8\nmax_turn_tokens = 4\nmax_context_tokens = 160\n\
         [train]\nsteps = 25\nlearning_rate = 3e-3\nmicro_batch_tokens = 4096\n"
    );
    std::fs::write(&recipe, text).unwrap();
    recipe
}

const TASKS: &str =
    "tasks = { source = \"tasks.jsonl\", prompt = \"{{ question }}\", kind = \"level\" }";

#[test]
fn a_model_learns_from_rows_and_a_reward_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let rewards =
        r#"reward = { 'regex("[a-z]")' = 1.0, "repetition(n = 1)" = 0.1, "exact(answer)" = 0 }"#;
    project(dir.path(), &format!("{TASKS}\n{rewards}"));
    let mut command = sinew();
    command
        .current_dir(dir.path())
        .args(["train", "own.toml", "--json", "--run-dir", "run"]);
    let output = command.output().unwrap();
    let last = last_line(&output);
    let success = |at: &str| last["eval"][at]["success"].as_f64().unwrap();
    // Four random bytes hold a small letter in about a third of all cases.
    assert!(success("before") < 0.7 && success("after") > 0.9, "{last}");
    assert_eq!(last["samples"]["trained_twice"], 0);
    // The gain is paired by task; folder and report have the same one.
    let gain = &last["eval"]["gain"];
    let difference = gain["sampled"]["difference"].as_f64().unwrap();
    assert!(
        (difference - (success("after") - success("before"))).abs() < 1e-9,
        "{last}"
    );
    let mut show = sinew();
    show.current_dir(dir.path()).args(["show", "run", "--json"]);
    let shown: Value = serde_json::from_str(&run_ok(&mut show)).unwrap();
    assert_eq!(&shown["gain"], gain);
    let report = std::fs::read_to_string(dir.path().join("run/report.html")).unwrap();
    assert!(
        report.contains("gain of success<td colspan=2>+"),
        "{report}"
    );
    // Every reward is measured in every step, that of weight 0 as well.
    for step in steps(&dir.path().join("run")) {
        let metrics = &step["rollout"]["metrics"];
        assert!(
            metrics["reward/exact"].is_f64() && metrics["reward/regex"].is_f64(),
            "{step}"
        );
    }
}

#[test]
fn a_function_in_python_scores_and_a_missing_score_is_never_0() {
    let dir = tempfile::tempdir().unwrap();
    let code = "def small(output):\n    return any('a' <= c <= 'z' for c in output)\n\n\
                def fails(output, level):\n    if level == 1:\n        raise ValueError('no rule for level 1')\n    \
                return 0.5\n\n\
                def unknown(reply):\n    return 0\n";
    std::fs::write(dir.path().join("score.py"), code).unwrap();
    let run = |reward: &str, steps: u32| {
        let recipe = project(dir.path(), &format!("{TASKS}\nreward = {reward}"));
        let text = std::fs::read_to_string(&recipe).unwrap();
        let text = text.replace("steps = 25", &format!("steps = {steps}"));
        std::fs::write(&recipe, text).unwrap();
        let _ = std::fs::remove_dir_all(dir.path().join("run"));
        let mut command = sinew();
        command
            .current_dir(dir.path())
            .args(["train", "own.toml", "--json", "--run-dir", "run"]);
        command.output().unwrap()
    };
    let output = run("\"score.py:small\"", 25);
    let last = last_line(&output);
    let success = |at: &str| last["eval"][at]["success"].as_f64().unwrap();
    assert!(success("before") < 0.7 && success("after") > 0.9, "{last}");

    let output = run(r#"{ "score.py:small" = 1, "score.py:fails" = 1 }"#, 3);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let steps = steps(&dir.path().join("run"));
    let unscored: u64 = steps
        .iter()
        .map(|s| s["rollout"]["unscored"].as_u64().unwrap())
        .sum();
    assert!(unscored > 0, "a third of the tasks has no score");
    // Each scored sample has at least the constant: zeros of unscored ones would pull the mean down.
    assert!(
        steps
            .iter()
            .all(|s| s["rollout"]["reward"].as_f64().unwrap() >= 0.5),
        "{steps:?}"
    );
    let dropped = steps.iter().flat_map(|s| s["dropped"].as_object().unwrap());
    let reasons: Vec<&String> = dropped.map(|(reason, _)| reason).collect();
    assert!(
        reasons.iter().any(|r| r.contains("no rule for level 1")),
        "{reasons:?}"
    );

    let errors = failure(&run("\"score.py:unknown\"", 1), 2);
    assert!(
        errors.contains("reply") && errors.contains("valid names: a, answer"),
        "{errors}"
    );
    let errors = failure(&run("\"score.py:none\"", 1), 2);
    assert!(errors.contains("none"), "{errors}");
}

/// Training episodes that the listing of a run shows without a score.
fn listed_unscored(dir: &Path) -> u64 {
    let mut list = sinew();
    let of_run = ["episodes", "run", "--purpose", "train", "--limit", "1000"];
    list.current_dir(dir).args(of_run).arg("--json");
    let listed = String::from_utf8(list.output().unwrap().stdout).unwrap();
    let missing = listed.lines().filter(|l| l.contains("\"unscored\":true"));
    missing.count() as u64
}

/// A reward of the whole group and a comparison of two, together with a reward of each sample.
#[test]
fn groups_are_ranked_and_compared_when_all_members_have_ended() {
    let dir = tempfile::tempdir().unwrap();
    let code = "def letters(output):\n    return sum('a' <= c <= 'z' for c in output)\n\n\
                def rank(group, level):\n    if level == 1:\n        raise ValueError('no rank for level 1')\n    \
                order = sorted(letters(m.output) for m in group)\n    \
                return [order.index(letters(m.output)) / len(group) for m in group]\n\n\
                def better(a, b):\n    x, y = letters(a.output), letters(b.output)\n    \
                return 0.5 if x == y else a if x > y else b\n";
    std::fs::write(dir.path().join("score.py"), code).unwrap();
    let rewards = r#"reward = { "score.py:rank" = { weight = 1, timeout_s = 20 }, "score.py:better" = { weight = 1, pairs = 16 }, "repetition(n = 1)" = 0.1, workers = 3 }"#;
    let recipe = project(dir.path(), &format!("{TASKS}\n{rewards}"));
    let text = std::fs::read_to_string(&recipe).unwrap();
    std::fs::write(&recipe, text.replace("steps = 25", "steps = 3")).unwrap();
    let mut command = sinew();
    command
        .current_dir(dir.path())
        .args(["train", "own.toml", "--json", "--run-dir", "run"]);
    let output = command.output().unwrap();
    let last = last_line(&output);
    assert_eq!(last["samples"]["lost"], 0, "{last}");
    let steps = steps(&dir.path().join("run"));
    let mut unscored = 0;
    for step in &steps {
        let rollout = &step["rollout"];
        let metrics = &rollout["metrics"];
        let mean = |name: &str| metrics[name].as_f64().unwrap();
        // Wins and losses of a group are equally many.
        assert!((mean("reward/better") - 0.5).abs() < 1e-9, "{metrics}");
        let sum = mean("reward/rank") + mean("reward/better") + 0.1 * mean("reward/repetition");
        assert!(
            (rollout["reward"].as_f64().unwrap() - sum).abs() < 1e-9,
            "{rollout}"
        );
        unscored += rollout["unscored"].as_u64().unwrap();
    }
    assert!(
        unscored > 0 && unscored.is_multiple_of(8),
        "whole groups: {unscored}"
    );
    let dropped = steps.iter().flat_map(|s| s["dropped"].as_object().unwrap());
    let reasons: Vec<&String> = dropped.map(|(reason, _)| reason).collect();
    assert!(
        reasons.iter().any(|r| r.contains("no rank for level 1")),
        "{reasons:?}"
    );
    assert_eq!(listed_unscored(dir.path()), unscored);
    // A held-out task has one episode: there is nothing to compare it with, and it is counted.
    let evals = std::fs::read_to_string(dir.path().join("run/evals.jsonl")).unwrap();
    let eval: Value = serde_json::from_str(evals.lines().next().unwrap()).unwrap();
    let stats = &eval["stats"];
    assert_eq!(stats["unscored"], stats["episodes"], "{eval}");
}

#[test]
fn tasks_are_shown_as_the_model_sees_them() {
    let dir = tempfile::tempdir().unwrap();
    project(dir.path(), &format!("{TASKS}\nreward = \"exact(answer)\""));
    let show = |args: &[&str]| {
        let mut command = sinew();
        command
            .current_dir(dir.path())
            .args(["tasks", "own.toml"])
            .args(args);
        let output = command.output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let text = show(&["--limit", "2"]);
    assert!(
        text.contains("tasks/train/1 [") && text.contains("tokens\n"),
        "{text}"
    );
    assert!(
        text.contains("Say ") && text.contains("    answer = "),
        "{text}"
    );
    let text = show(&["--split", "held-out", "--limit", "1", "--json"]);
    let row: Value = serde_json::from_str(text.trim()).unwrap();
    assert!(row["tokens"].as_u64().unwrap() > 10, "{row}");
    assert!(
        row["prompt"]
            .as_str()
            .unwrap()
            .contains(row["data"]["question"].as_str().unwrap())
    );
}

#[test]
fn tasks_and_rewards_that_cannot_work_are_refused_before_training() {
    let dir = tempfile::tempdir().unwrap();
    let check = |more: &str, code: i32| {
        project(dir.path(), more);
        let mut command = sinew();
        command.current_dir(dir.path()).args(["check", "own.toml"]);
        failure(&command.output().unwrap(), code)
    };
    let reward = "reward = \"exact(answer)\"";
    let cases = [
        (reward.to_owned(), 1, "tasks = missing"),
        (TASKS.to_owned(), 1, "reward = missing"),
        (
            format!("{TASKS}\nreward = \"exct(answer)\""),
            1,
            "allowed: exact(COLUMN)",
        ),
        (
            format!("{TASKS}\nreward = {{ \"exact(answer)\" = 0 }}"),
            1,
            "at least one weight",
        ),
        (
            format!("{TASKS}\nreward = \"exact(reply)\""),
            1,
            "no column reply; columns: question",
        ),
        (
            format!("tasks = \"tasks.jsonl\"\n{reward}"),
            1,
            "line 1: no column `prompt`",
        ),
        (format!("tasks = \"none.jsonl\"\n{reward}"), 3, "none.jsonl"),
        (
            format!(
                "tasks = {{ source = \"tasks.jsonl\", prompt = \"{{{{ text }}}}\" }}\n{reward}"
            ),
            1,
            "columns: `question`",
        ),
        (
            format!(
                "tasks = {{ source = \"tasks.jsonl\", prompt = \"x\", decay = 0.5 }}\n{reward}"
            ),
            1,
            "without tasks.sampling = \"adaptive\"",
        ),
        (
            format!("tasks = {{ prompt = \"x\" }}\nenv = {{ type = \"tiny\" }}\n{reward}"),
            1,
            "has no effect without tasks.source",
        ),
        (
            format!("tasks = \"tasks.jsonl\"\nenv = {{ type = \"tiny\" }}\n{reward}"),
            1,
            "has tasks of its own",
        ),
    ];
    for (more, code, expected) in cases {
        let errors = check(&more, code);
        assert!(errors.contains(expected), "{more}: {errors}");
    }
}

/// The row of `sinew check` for the environment and its reward.
fn checked_reward(dir: &Path, more: &str, code: i32) -> String {
    project(dir, more);
    let mut command = sinew();
    let output = command
        .current_dir(dir)
        .args(["check", "own.toml", "--json"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(code), "{more}: {text}");
    let rows = json_lines(&text).into_iter();
    let mut env = rows.filter(|row| row["check"] == "env");
    env.next().unwrap()["detail"].as_str().unwrap().to_owned()
}

#[test]
fn a_recipe_whose_rewards_all_come_from_outside_passes_its_checks() {
    let dir = tempfile::tempdir().unwrap();
    let late = format!(
        "{TASKS}\nalgorithm = {{ type = \"grpo\", correction = {{ type = \"truncate\", low = 0.0, high = 2.0 }} }}\n\
         [reward.late]\nnames = [\"thumbs\"]"
    );
    let env = checked_reward(dir.path(), &late, 0);
    assert!(env.contains("every score comes from outside"), "{env}");
}

#[test]
fn rewards_are_tried_with_several_answers() {
    let dir = tempfile::tempdir().unwrap();
    let functions = "import json\n\
        def parses(output):\n    return 1.0 if isinstance(json.loads(output), dict) else 0.0\n\
        def never(output):\n    return 1.0 if output == 'kqx' else 0.0\n\
        def always(output):\n    return 1.0\n";
    std::fs::write(dir.path().join("mine.py"), functions).unwrap();
    let env = |reward: &str, code| {
        checked_reward(dir.path(), &format!("{TASKS}\nreward = \"{reward}\""), code)
    };
    let right = env("exact(answer)", 0);
    assert!(
        right.contains("column answer: 1") && right.contains("an empty answer: 0"),
        "{right}"
    );
    assert!(!right.contains("warning"), "{right}");
    // It raises for text that is not JSON, and scores what is.
    let parses = env("mine.py:parses", 0);
    assert!(parses.contains("the row as JSON: 1"), "{parses}");
    let never = env("mine.py:never", 0);
    assert!(
        never.contains("no attempt earned more than an empty answer"),
        "{never}"
    );
    let gold = format!(
        "{TASKS}\nenv = {{ type = \"chat\", gold = \"answer\" }}\nreward = \"mine.py:always\""
    );
    let always = checked_reward(dir.path(), &gold, 0);
    assert!(
        always.contains("does not tell it from a right one"),
        "{always}"
    );
}

/// A project of `sinew init` trains at once, and gains.
fn starts(start: &str) {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str], folder: &Path| {
        let mut command = sinew();
        command.current_dir(folder).args(args);
        command.output().unwrap()
    };
    let output = run(&["init", "mine", "--start", start], dir.path());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let project = dir.path().join("mine");
    let test = if start == "env" {
        "test_env.py"
    } else {
        "test_score.py"
    };
    let package = root().join("python/src").canonicalize().unwrap();
    let mut python = Command::new("python3");
    python.current_dir(&project).env("PYTHONPATH", package);
    assert_eq!(run_ok(python.arg(test)), "ok\n");
    let output = run(&["check", "recipe.toml"], &project);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    let output = run(
        &["train", "recipe.toml", "--json", "--run-dir", "run"],
        &project,
    );
    let last = last_line(&output);
    let reward = |at: &str| last["eval"][at]["reward"].as_f64().unwrap();
    assert!(reward("after") > reward("before") + 0.3, "{last}");
    // A second project in the folder would overwrite the first: refused, and nothing is changed.
    let recipe = std::fs::read_to_string(project.join("recipe.toml")).unwrap();
    let errors = failure(
        &run(&["init", "mine", "--model", "package:x"], dir.path()),
        2,
    );
    assert!(errors.contains("exists already"), "{errors}");
    assert_eq!(
        std::fs::read_to_string(project.join("recipe.toml")).unwrap(),
        recipe
    );
}

#[test]
fn init_with_tasks_trains_at_once() {
    starts("tasks");
}

#[test]
fn init_with_an_environment_trains_at_once() {
    starts("env");
}

#[test]
fn init_with_an_agent_trains_at_once() {
    starts("agent");
}

#[test]
fn init_proposes_a_recipe_for_rows_that_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let rows = (0..40).map(|i| {
        format!(
            "{{\"problem\": \"{i} + 1?\", \"solution\": \"{}\"}}\n",
            i + 1
        )
    });
    std::fs::write(dir.path().join("data.jsonl"), rows.collect::<String>()).unwrap();
    let init = |name: &str, rows: &str| {
        let mut command = sinew();
        command
            .current_dir(dir.path())
            .args(["init", name, "--from", rows]);
        command.output().unwrap()
    };
    let output = init("mine", "data.jsonl");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(told.contains("number(solution)"), "{told}");
    let mut tasks = sinew();
    let mine = dir.path().join("mine");
    tasks
        .current_dir(&mine)
        .args(["check", "recipe.toml", "--json"]);
    let output = tasks.output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let rows = json_lines(&told);
    let checked = |name: &str| {
        rows.iter()
            .any(|row| row["check"] == name && row["ok"] == true)
    };
    assert!(
        checked("recipe") && checked("tasks") && checked("env"),
        "{told}"
    );
    let recipe = std::fs::read_to_string(mine.join("recipe.toml")).unwrap();
    assert!(recipe.contains("prompt = \"{{ problem }}\""), "{recipe}");
    // Worked answers need room, in the model's tokens.
    let worked = (0..40).map(|i| {
        let steps = format!("First {i} and {i} are added. ").repeat(12);
        let answer = format!("{steps}#### {}", 2 * i);
        serde_json::json!({ "question": format!("{i} twice?"), "answer": answer }).to_string()
            + "\n"
    });
    std::fs::write(dir.path().join("worked.jsonl"), worked.collect::<String>()).unwrap();
    let told = init("worked", "worked.jsonl");
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    let read = |name: &str| {
        let recipe = std::fs::read_to_string(dir.path().join(name).join("recipe.toml")).unwrap();
        let plan: toml::Value = toml::from_str(&recipe).unwrap();
        plan["rollout"]["max_turn_tokens"].as_integer().unwrap()
    };
    let turn = read("worked");
    assert!(turn > 128, "{turn}: {told}");
    assert!(
        told.contains(&format!("max_turn_tokens = {turn}")),
        "{told}"
    );
    std::fs::write(dir.path().join("bad.jsonl"), "{\"a\": 1}\n".repeat(20)).unwrap();
    let errors = failure(&init("other", "bad.jsonl"), 2);
    assert!(
        errors.contains("looks like a question") && errors.contains("columns: a"),
        "{errors}"
    );
    assert!(!dir.path().join("other").exists());
}
