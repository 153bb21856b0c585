//! Wrong input: an exit code of 2 (of `sinew check` 1, or 3 if something outside is missing), a text that
//! names what is wrong, and nothing left behind.

use crate::resume::done;
use crate::{json_lines, last_line, newest_checkpoint, sinew, with_changes};
use std::path::Path;
use std::process::{Command, Output};

fn tiny(dir: &Path, typed: &str, replaced: &str) -> String {
    let text = with_changes(crate::small_tiny(), &[(typed, replaced)]);
    let path = dir.join("recipe.toml");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Message of a command that refuses its input.
pub(crate) fn refused(command: &mut Command) -> String {
    refused_with(command, 2)
}

fn refused_with(command: &mut Command, code: i32) -> String {
    let Output { status, stderr, .. } = command.output().unwrap();
    let told = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(code), "{told}");
    assert!(!told.contains("panicked"), "{told}");
    told
}

#[test]
fn what_cannot_run_is_refused_before_a_folder_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    for (typed, replaced, needle) in [
        ("d_model = 64", "d_model = 0", "head_dim is 0"),
        ("layers = 2", "layers = 0", "layers is 0"),
        ("layers = 2", "layers = 1000000", "the limit is 1024"),
        ("d_ff = 128", "d_ff = 5000000000", "this machine has"),
        (
            "d_ff = 128",
            "d_ff = 9223372036854775807",
            "weights, the limit is",
        ),
        (
            "d_ff = 128",
            "d_ff = 18446744073709551615",
            "model.d_ff = 18446744073709551615: allowed: at most 9223372036854775807",
        ),
        (
            "max_turn_tokens = 3",
            "max_turn_tokens = 1",
            "rollout.max_turn_tokens = 1: the shortest turns",
        ),
        (
            "kv_tokens = 32768",
            "kv_tokens = 20000000000000",
            "lower engine.kv_tokens",
        ),
        (
            "steps = 60",
            "steps = 60\nlora = { rank = 4, targets = [\"q_prj\"] }",
            "train.lora.targets",
        ),
        ("name = \"tiny\"", "name = \"../x\"", "name = \"../x\""),
    ] {
        let recipe = tiny(dir.path(), typed, replaced);
        for command in ["check", "train"] {
            let mut sinew = sinew();
            sinew.args([command, &recipe]);
            if command == "train" {
                sinew.arg("--run-dir").arg(&run);
            }
            let code = if command == "check" { 1 } else { 2 };
            let told = refused_with(&mut sinew, code);
            assert!(told.contains(needle), "{replaced}: {told}");
        }
    }
    assert!(!run.exists());
}

/// Right recipes that need a server, a run or a model first: named, with a separate exit code.
#[test]
fn what_a_recipe_needs_from_outside_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    let weights = dir.path().join("weights").display().to_string();
    for (typed, replaced, needle) in [
        (
            "[engine]\nkv_tokens = 32768\nmax_num_seqs = 256\nmax_batched_tokens = 1024\n",
            format!("[engine]\ntype = \"vllm\"\nurl = \"{url}\"\nweights_dir = \"{weights}\""),
            format!("engine.url = \"{url}\" is not reachable"),
        ),
        (
            "[algorithm]\ntype = \"grpo\"",
            format!(
                "[data]\ntype = \"pool\"\nurl = \"{url}\"\ntoken_file = \"token\"\n[algorithm]\ntype = \"decoupled_ppo\""
            ),
            format!("data.url = \"{url}\" is not reachable"),
        ),
        (
            "[algorithm]\ntype = \"grpo\"",
            "[teacher]\nmodel = \"runs/no-such-run\"\n[algorithm]\ntype = \"opd\"".into(),
            "runs/no-such-run".into(),
        ),
    ] {
        let recipe = tiny(dir.path(), typed, &replaced);
        let told = refused_with(sinew().args(["check", &recipe]), 3);
        assert!(told.contains(&needle), "{told}");
        assert!(told.contains("need something outside first"), "{told}");
    }
}

#[test]
fn a_run_that_is_not_there_is_started_by_resume_which_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let recipe = three_steps(dir.path());
    let train = || {
        let mut command = sinew();
        command.args(["train", &recipe, "--json", "--resume", "--run-dir"]);
        command.arg(&run).output().unwrap()
    };
    let first = train();
    let told = String::from_utf8_lossy(&first.stderr).into_owned();
    assert!(
        told.contains("holds no run to resume: this starts it"),
        "{told}"
    );
    let again = train();
    assert!(again.stderr.is_empty(), "{again:?}");
    assert_eq!(last_line(&again)["eval"], last_line(&first)["eval"]);
    // A recipe that cannot run is still refused before a folder is made.
    let broken = tiny(dir.path(), "layers = 2", "layers = 0");
    let other = dir.path().join("other");
    let mut command = sinew();
    command.args(["train", &broken, "--resume", "--run-dir"]);
    refused(command.arg(&other));
    assert!(!other.exists());
}

#[test]
fn episodes_are_listed_by_end_success_and_reward_page_by_page() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    trained(&three_steps(dir.path()), &run);
    let list = |more: &[&str]| {
        let mut command = sinew();
        command.args(["episodes", "--json", "--run-dir"]).arg(&run);
        let output = command.args(more).output().unwrap();
        assert!(output.status.success(), "{more:?}: {output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        json_lines(&text)
    };
    let all = list(&["--limit", "10000"]);
    let won = list(&["--limit", "10000", "--success", "true"]);
    let lost = list(&["--limit", "10000", "--success", "false"]);
    assert!(!won.is_empty() && !lost.is_empty());
    assert_eq!(won.len() + lost.len(), all.len());
    assert!(won.iter().all(|e| e["success"] == true));
    let high = list(&[
        "--limit",
        "10000",
        "--min-reward",
        "0.5",
        "--max-reward",
        "1",
    ]);
    assert!(high.iter().all(|e| e["reward"].as_f64().unwrap() >= 0.5));
    let low = list(&[
        "--limit",
        "10000",
        "--max-reward",
        "0.49",
        "--min-reward",
        "-3",
    ]);
    assert_eq!(high.len() + low.len(), all.len());
    let ended: usize = ["terminated", "truncated"]
        .map(|end| list(&["--limit", "10000", "--end", end]).len())
        .iter()
        .sum();
    assert_eq!(ended, all.len());
    let cursor = list(&["--limit", "3"])[2]["cursor"].to_string();
    let next = list(&["--limit", "2", "--after", &cursor]);
    assert_eq!(next, all[3..5]);
    let refuse = |more: &[&str]| {
        let mut command = sinew();
        command.args(["episodes", "--run-dir"]).arg(&run);
        refused(command.args(more))
    };
    let told = refuse(&["--end", "failed"]);
    assert!(
        told.contains("no episode of") && told.contains("without filters"),
        "{told}"
    );
    let told = refuse(&["--limit", "10001"]);
    assert!(told.contains("1 to 10000; --after"), "{told}");
    let told = refuse(&["--min-reward", "2", "--max-reward", "1"]);
    assert!(
        told.contains("--min-reward 2 is above --max-reward 1"),
        "{told}"
    );
    let mut command = sinew();
    command.args(["episodes", "--limit", "3", "--run-dir"]);
    let text = command.arg(&run).output().unwrap().stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains(&format!("--after {cursor}")), "{text}");
}

#[test]
fn a_model_that_pip_installed_is_found_in_the_environment_that_is_active() {
    let dir = tempfile::tempdir().unwrap();
    let package = dir
        .path()
        .join("venv/lib/python3.12/site-packages/model_of_a_test");
    std::fs::create_dir_all(&package).unwrap();
    std::fs::write(package.join("m.gguf"), "no model").unwrap();
    let recipe = dir.path().join("recipe.toml");
    let text = "name = \"t\"\nmodel = \"package:model-of-a-test\"\nenv = { type = \"tool_math\" }\n\
                algorithm = { type = \"grpo\" }\n";
    std::fs::write(&recipe, text).unwrap();
    let check = |environment: Option<&Path>| {
        let mut command = sinew();
        command.arg("check").arg(&recipe).env_remove("VIRTUAL_ENV");
        command.envs(environment.map(|path| ("VIRTUAL_ENV", path)));
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let told = check(None);
    assert!(told.contains("was not found in"), "{told}");
    let told = check(Some(&dir.path().join("venv")));
    assert!(
        !told.contains("was not found in") && told.contains("m.gguf"),
        "{told}"
    );
}

#[test]
fn shells_complete_what_is_there_and_nothing_hidden_is_suggested() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = sinew().args(["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{shell}");
        assert!(
            script.contains("accept-loss") && script.contains("quarantine"),
            "{shell}"
        );
        assert!(!script.contains("train-worker"), "{shell}");
    }
    let told = refused(sinew().arg("train-wrker"));
    assert!(!told.contains("train-worker"), "{told}");
    refused(sinew().args(["train-worker", "more"]));
}

#[test]
fn arguments_without_effect_are_refused() {
    for args in [
        &["serve", "--sandbox-only", "--engine", "fake"][..],
        &["serve", "--sandbox-only", "--store", "x"],
        &["serve", "--sandbox-only", "--max-sandboxes", "0"],
        &["serve", "--engine", "fake", "--context", "0"],
        &["serve", "--engine", "fake", "--public-url", "host:80"],
        &[
            "serve",
            "--model",
            "x",
            "--tinker",
            "127.0.0.1:0",
            "--engine",
            "fake",
        ],
        &["serve", "--model", "x", "--tinker", "0.0.0.0:0"],
        &["episodes", "--run-dir", "x", "--limit", "0"],
        &["sandbox", "run", "--code", "1", "--timeout", "1e30"],
        &["sandbox", "run", "--code", "1", "--memory-mb", "0"],
    ] {
        let told = refused(sinew().args(args));
        assert!(told.contains(args[args.len() - 2]), "{args:?}: {told}");
    }
}

/// A recipe of three steps with a checkpoint after each.
fn three_steps(dir: &Path) -> String {
    let recipe = tiny(dir, "steps = 60", "steps = 3");
    let text = std::fs::read_to_string(&recipe).unwrap();
    std::fs::write(
        &recipe,
        text.replace("checkpoint_every = 20", "checkpoint_every = 1"),
    )
    .unwrap();
    recipe
}

/// Trains a recipe in a folder; the last line of it.
fn trained(recipe: &str, run: &Path) -> serde_json::Value {
    done(Path::new(recipe), run, &[])
}

#[test]
fn gc_leaves_what_a_resumed_run_needs() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let told = refused(sinew().arg("gc").arg(&run));
    assert!(told.contains("holds no run"), "{told}");
    let recipe = three_steps(dir.path());
    let first = trained(&recipe, &run);
    let gc = sinew().arg("gc").arg(&run).arg("--json").output().unwrap();
    let removed = last_line(&gc);
    assert_eq!(removed["through_step"], 2, "{removed}");
    assert!(removed["episodes"].as_u64().unwrap() > 0, "{removed}");
    let again = last_line(&sinew().arg("gc").arg(&run).arg("--json").output().unwrap());
    assert_eq!(again["episodes"], 0, "{again}");
    let text = std::fs::read_to_string(&recipe).unwrap();
    std::fs::write(&recipe, text.replace("steps = 3", "steps = 4")).unwrap();
    let after = done(Path::new(&recipe), &run, &["--resume"]);
    assert_eq!(after["eval"]["before"], first["eval"]["before"], "{after}");
    assert_eq!(after["samples"]["trained_twice"], 0, "{after}");
    assert_eq!(after["samples"]["lost"], 0, "{after}");
}

#[test]
fn a_run_that_is_looked_into_says_what_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let (run, out) = (dir.path().join("run"), dir.path().join("out"));
    let told = refused(sinew().arg("export").arg(&run).arg(&out));
    assert!(told.contains("holds no run"), "{told}");
    let recipe = three_steps(dir.path());
    trained(&recipe, &run);
    let list = |more: &[&str]| {
        let mut command = sinew();
        command
            .arg("episodes")
            .args(more)
            .arg("--run-dir")
            .arg(&run);
        command
    };
    let told = refused(&mut list(&["--purpose", "nothing"]));
    assert!(
        told.contains("no episode of") && told.contains("eval-before"),
        "{told}"
    );
    let listed = list(&["--purpose", "train", "--limit", "2"])
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert_eq!(listed.lines().count(), 3, "{listed}");

    // The newest checkpoint is damaged: the one before it is written, which is reported.
    let newest = newest_checkpoint(&run);
    let latest = newest.file_name().unwrap().to_str().unwrap();
    std::fs::write(newest.join("model.safetensors"), b"short").unwrap();
    let told = sinew().arg("export").arg(&run).arg(&out).output().unwrap();
    let (stdout, stderr) = (
        String::from_utf8(told.stdout).unwrap(),
        String::from_utf8(told.stderr).unwrap(),
    );
    assert!(told.status.success(), "{stderr}");
    assert!(
        stdout.contains("checkpoints/step-") && !stdout.contains(latest),
        "{stdout}"
    );
    assert!(
        stderr.contains("passed over") && stderr.contains(latest),
        "{stderr}"
    );
    let told = refused(sinew().arg("export").arg(&run).arg(&out));
    assert!(told.contains("not empty"), "{told}");
}

#[test]
fn what_a_program_says_is_told_however_it_ends() {
    let run = |code: &str| {
        let run = |more: &[&str]| {
            let mut command = sinew();
            command.args(["sandbox", "run", "--code", code]).args(more);
            command.output().unwrap()
        };
        let (told, json) = (run(&[]), run(&["--json"]));
        assert_eq!(told.status.code(), json.status.code(), "{code}");
        let ending: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
        assert!(ending["ending"]["type"].is_string(), "{ending}");
        assert!(json.stderr.is_empty(), "{json:?}");
        (told.status.code(), String::from_utf8(told.stderr).unwrap())
    };
    let code = "import sys; print('careful', file=sys.stderr)";
    assert_eq!(run(code), (Some(0), "careful\n".into()));
    let (status, told) = run("import sys; print('no', file=sys.stderr); sys.exit(7)");
    assert_eq!(status, Some(7));
    assert!(
        told.starts_with("no\nsinew: the program exited with code 7"),
        "{told}"
    );
    let (status, told) = run("import os; os.kill(os.getpid(), 15)");
    assert_eq!(status, Some(128 + 15), "{told}");
    let (status, told) = run("b = bytearray(1 << 34)");
    assert!(matches!(status, Some(1 | 137)), "{status:?} {told}");
}
