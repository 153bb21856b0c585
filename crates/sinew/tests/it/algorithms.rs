//! Every recipe of recipes/algorithms through the program, for a couple of steps.

use crate::resume::done;
use crate::{failure, newest_checkpoint, root, sinew, steps};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

fn recipes() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("recipes/algorithms")).unwrap();
    let mut paths: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
}

fn weights(run: &Path) -> Vec<u8> {
    std::fs::read(newest_checkpoint(run).join("model.safetensors")).unwrap()
}

/// Writes `text` shortened to `steps` steps and runs it; returns the run's folder.
fn run(dir: &Path, name: &str, text: &str, steps: usize) -> PathBuf {
    let short = text
        .replace("steps = 40", &format!("steps = {steps}"))
        .replace("episodes_per_task = 8", "episodes_per_task = 1");
    let recipe = dir.join(format!("{name}.toml"));
    std::fs::write(&recipe, short).unwrap();
    let run = dir.join(name);
    let result = done(&recipe, &run, &[]);
    assert_eq!(result["samples"]["trained_twice"], 0, "{name}: {result}");
    assert_eq!(result["samples"]["lost"], 0, "{name}: {result}");
    assert!(
        result["samples"]["trained"].as_u64().unwrap() > 0,
        "{name}: {result}"
    );
    run
}

/// Checks that apply only to this algorithm's run.
fn check_own(name: &str, steps: &[Value]) {
    let trained = steps.iter().filter(|s| s["rows"].as_u64() > Some(0));
    let shows = |key: &str| {
        let value = |s: &&Value| s["metrics"][key].as_f64().is_some_and(|v| v != 0.0);
        assert!(trained.clone().any(|s| value(&s)), "{name}: no {key}");
    };
    match name {
        "ppo" | "turn_ppo" => shows("value_loss"),
        "grpo" => shows("kl_reference"),
        "opd_top_k" => shows("kl_teacher"),
        "decoupled_ppo" => shows("correction_mean"),
        "dpo" => {
            let first = &trained.clone().next().unwrap()["preference"];
            let loss = first["loss"].as_f64().unwrap();
            // Policy and reference are the same before the first update.
            assert!((loss - 2f64.ln()).abs() < 1e-3, "{first}");
        }
        _ => {}
    }
}

#[test]
fn every_algorithm_trains_from_its_recipe() {
    let dir = tempfile::tempdir().unwrap();
    let text = |path: &Path| std::fs::read_to_string(path).unwrap();
    let grpo = text(&root().join("recipes/algorithms/grpo.toml"));
    // Teachers of the right size are made here; recipes/tiny.toml makes good ones.
    let teacher = run(dir.path(), "teacher", &grpo, 2);
    let waiting = Mutex::new(recipes());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(path) = waiting.lock().unwrap().pop() else {
                        return;
                    };
                    let name = path.file_stem().unwrap().to_str().unwrap();
                    let teacher = teacher.display().to_string();
                    let recipe = text(&path).replace("runs/tiny", &teacher);
                    let run = run(dir.path(), name, &recipe, 3);
                    let steps = steps(&run);
                    assert_eq!(steps.len(), 3, "{name}");
                    let finite = |s: &Value| s["loss"].as_f64().is_some_and(f64::is_finite);
                    assert!(steps.iter().all(finite), "{name}");
                    check_own(name, &steps);
                }
            });
        }
    });
}

#[test]
fn a_model_imitates_demonstrations_and_stored_episodes() {
    let dir = tempfile::tempdir().unwrap();
    let sft = std::fs::read_to_string(root().join("recipes/algorithms/sft.toml")).unwrap();
    let learned = run(dir.path(), "sft", &sft, 40);
    let loss = |steps: &[Value], i: usize| steps[i]["loss"].as_f64().unwrap();
    let learning = steps(&learned);
    assert!(
        loss(&learning, 39) < 0.5 * loss(&learning, 0),
        "{learning:?}"
    );
    // Another run learns from what this one sampled when it was measured.
    let episodes = sft
        .replace(
            "\"demonstrations\"",
            "\"episodes\"\npurpose = \"eval-after\"",
        )
        .replace(
            "data/tiny-demonstrations.jsonl",
            &learned.display().to_string(),
        );
    let second = run(dir.path(), "again", &episodes, 3);
    assert!(steps(&second).iter().any(|s| s["rows"].as_u64() > Some(0)));
    assert_ne!(weights(&second), weights(&learned));
}

/// A rounded engine samples from another policy. Losses that bound the ratio by themselves train on that, and
/// no token weighs more than their bound.
#[test]
fn losses_with_a_bound_train_with_rounded_weights() {
    let dir = tempfile::tempdir().unwrap();
    for (name, more) in [
        ("cispo", ""),
        ("sapo", ""),
        ("dr_grpo", "dual_clip = 3.0\n"),
    ] {
        let path = root().join(format!("recipes/algorithms/{name}.toml"));
        let text = std::fs::read_to_string(path).unwrap();
        let rounded = text.replace("[engine]\n", "[engine]\nweights = \"int8\"\n");
        let kind = format!("type = \"{name}\"\n");
        let rounded = rounded.replace(&kind, &format!("{kind}{more}"));
        let steps = steps(&run(dir.path(), name, &rounded, 3));
        let largest = |key: &str| {
            let values = steps.iter().filter_map(|s| s[key].as_f64());
            values.fold(0.0, f64::max)
        };
        assert!(largest("logprob_gap_max") > 0.0, "{name}: {steps:?}");
        assert!(largest("rows") > 0.0, "{name}: {steps:?}");
    }
}

#[test]
fn impossible_combinations_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let grpo = std::fs::read_to_string(root().join("recipes/algorithms/grpo.toml")).unwrap();
    let plain = grpo.replace("kl = { coefficient = 0.01 }\n", "");
    let with = |more: &str| plain.replace("[train]", &format!("{more}\n[train]"));
    let kind = |kind: &str, more: &str| {
        with(more).replace("type = \"grpo\"", &format!("type = \"{kind}\""))
    };
    for (text, needle) in [
        (with("[critic]"), "`grpo` reads no values"),
        (
            with("[reference]\nmodel = \"x\""),
            "compares with no reference",
        ),
        (with("[teacher]\nmodel = \"x\""), "asks no teacher"),
        (kind("opd", ""), "[teacher] model"),
        (kind("opd_top_k", ""), "[teacher] model"),
        (
            kind("opd", "[teacher]\nmodel = \"no/such/run\""),
            "teacher.model",
        ),
        (
            with("[data]\ntype = \"pairs\"\npath = \"x\""),
            "serves `dpo`",
        ),
        (
            kind("sft", "[data]\ntype = \"pairs\"\npath = \"x\""),
            "serves `dpo`",
        ),
        (
            kind(
                "sft",
                "[data]\ntype = \"demonstrations\"\npath = \"none.jsonl\"",
            ),
            "none.jsonl",
        ),
        (
            kind("reinforce", "[rollout.cross_policy]\nshare = 0.5"),
            "no importance ratio",
        ),
        (
            with("[rollout.cross_policy]\nshare = 1.5"),
            "above 0, below 1",
        ),
    ] {
        let recipe = dir.path().join("r.toml");
        std::fs::write(&recipe, &text).unwrap();
        let run = dir.path().join("run");
        let mut command = sinew();
        command.arg("train").arg(&recipe).arg("--run-dir").arg(&run);
        // A model that is not there is something to get first.
        let code = if needle == "teacher.model" { 3 } else { 2 };
        let errors = failure(&command.output().unwrap(), code);
        assert!(errors.contains(needle), "{needle}: {errors}");
        assert!(!run.exists(), "{needle}");
    }
}
