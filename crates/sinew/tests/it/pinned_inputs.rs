//! The inputs of a run stay the same over every resume: weights of another run, rows and functions.

use crate::resume::{done, end, recipe, same, train};
use crate::{failure, sinew};
use std::fs;
use std::path::Path;

/// A recipe that begins with the weights of the run in `of`, with adapters: what is below them counts to the
/// end of the run.
fn on_top(dir: &Path, of: &Path, steps: u32) -> std::path::PathBuf {
    let model = format!("\"run:{}\"", of.display());
    let more = [
        ("train.lora", "{ rank = 4 }"),
        ("train.schedule", "\"constant\""),
    ];
    let path = recipe(dir, steps, &more);
    let mut table: toml::Table = fs::read_to_string(&path).unwrap().parse().unwrap();
    let source: toml::Table = format!("v = {model}").parse().unwrap();
    table.insert("model".into(), source["v"].clone());
    fs::write(&path, toml::to_string(&table).unwrap()).unwrap();
    path
}

#[test]
fn a_run_stands_on_the_checkpoint_that_it_began_with() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (base, run, whole) = (at("base"), at("run"), at("whole"));
    done(&recipe(dir.path(), 4, &[]), &base, &[]);
    let expected = done(&on_top(dir.path(), &base, 4), &whole, &[]);
    done(&on_top(dir.path(), &base, 2), &run, &[]);
    let pinned: serde_json::Value =
        serde_json::from_slice(&fs::read(run.join("pinned.json")).unwrap()).unwrap();
    assert_eq!(
        pinned["weights"]["model.weights"]["checkpoint"],
        "step-00000004"
    );
    // The run below continues, and has newer weights.
    done(&recipe(dir.path(), 6, &[]), &base, &["--resume"]);
    let last = done(&on_top(dir.path(), &base, 4), &run, &["--resume"]);
    same(
        "newer weights below",
        &end(&run, &last),
        &end(&whole, &expected),
    );
    // An export of the run stands on the same weights.
    for name in [&run, &whole] {
        let out = name.with_extension("model");
        let status = sinew().arg("export").arg(name).arg(&out).output().unwrap();
        assert!(status.status.success(), "{status:?}");
    }
    let model = |name: &Path| fs::read(name.with_extension("model").join("model.safetensors"));
    assert!(
        model(&run).unwrap() == model(&whole).unwrap(),
        "other weights below"
    );
    // A checkpoint that was removed, or changed, is named, with what to do.
    let kept = base.join("checkpoints/step-00000004");
    let (recipe, away) = (on_top(dir.path(), &base, 6), at("away"));
    let refused = || failure(&train(&recipe, &run, &["--resume"]).output().unwrap(), 2);
    fs::rename(&kept, &away).unwrap();
    let told = refused();
    for needle in [
        "step-00000004",
        "not there any more",
        "--allow-change model.weights",
    ] {
        assert!(told.contains(needle), "{told}");
    }
    let newer = base.join("checkpoints/step-00000006");
    let copied = std::process::Command::new("cp")
        .arg("-r")
        .args([&newer, &kept])
        .status();
    assert!(copied.unwrap().success());
    assert!(refused().contains("it has the weights"), "{told}");
    fs::remove_dir_all(&kept).unwrap();
    fs::rename(&away, &kept).unwrap();
    done(&recipe, &run, &["--resume"]);
    fs::remove_dir_all(&kept).unwrap();
    let longer = on_top(dir.path(), &base, 7);
    done(
        &longer,
        &run,
        &["--resume", "--allow-change", "model.weights"],
    );
    let told = fs::read_to_string(run.join("pinned.json")).unwrap();
    assert!(told.contains("after step 6: model.weights"), "{told}");
    done(&on_top(dir.path(), &base, 8), &run, &["--resume"]);
}

#[test]
fn a_run_with_weights_of_its_own_outlives_the_checkpoint_that_it_began_with() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (base, run) = (at("base"), at("run"));
    done(&recipe(dir.path(), 2, &[]), &base, &[]);
    let whole = |steps| {
        let path = on_top(dir.path(), &base, steps);
        let mut table: toml::Table = fs::read_to_string(&path).unwrap().parse().unwrap();
        table["train"].as_table_mut().unwrap().remove("lora");
        fs::write(&path, toml::to_string(&table).unwrap()).unwrap();
        path
    };
    let expected = done(&whole(3), &at("whole"), &[]);
    done(&whole(2), &run, &[]);
    let pinned = fs::read(run.join("pinned.json")).unwrap();
    done(&recipe(dir.path(), 4, &[]), &base, &["--resume"]);
    fs::remove_dir_all(base.join("checkpoints/step-00000002")).unwrap();
    let last = done(&whole(3), &run, &["--resume"]);
    same(
        "no source",
        &end(&run, &last),
        &end(&at("whole"), &expected),
    );
    assert_eq!(fs::read(run.join("pinned.json")).unwrap(), pinned);
}

/// A run on rows with a reward of Python: 60 rows, and a function.
fn project(dir: &Path, steps: u32) {
    let row = |i: u32| format!("{{\"question\": \"Say {i}\", \"answer\": \"{i}\"}}\n");
    let rows: String = (0..60).map(row).collect();
    fs::write(dir.join("tasks.jsonl"), rows).unwrap();
    fs::write(
        dir.join("score.py"),
        "def small(output):\n    return 'a' in output\n",
    )
    .unwrap();
    lasts(dir, steps);
}

fn lasts(dir: &Path, steps: u32) {
    let text = format!(
        "model = {{ type = \"scratch\", d_model = 32, layers = 1, heads = 2, kv_heads = 1, d_ff = 64 }}\n\
         tasks = {{ source = \"tasks.jsonl\", prompt = \"{{{{ question }}}}\", filter = \"answer != '59'\" }}\n\
         reward = {{ \"score.py:small\" = 1.0, 'regex(\"[a-z]\")' = 0.5 }}\n\
         [rollout]\ntasks_per_step = 4\ngroup_size = 4\nmax_turn_tokens = 4\nmax_context_tokens = 160\n\
         [train]\nsteps = {steps}\nmicro_batch_tokens = 4096\n[eval]\ntasks = 2\n"
    );
    fs::write(dir.join("own.toml"), text).unwrap();
}

fn resumed(dir: &Path, more: &[&str]) -> std::process::Output {
    let mut command = sinew();
    command
        .current_dir(dir)
        .args(["train", "own.toml", "--json", "--run-dir", "run"]);
    command.args(more).output().unwrap()
}

#[test]
fn rows_and_functions_that_changed_are_refused_until_the_change_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    project(dir, 1);
    crate::last_line(&resumed(dir, &[]));
    // A file that was written again, a row that the filter leaves out: nothing changed.
    project(dir, 2);
    let rows = fs::read_to_string(dir.join("tasks.jsonl")).unwrap();
    fs::write(dir.join("tasks.jsonl"), rows.replace("Say 59", "Say it")).unwrap();
    crate::last_line(&resumed(dir, &["--resume"]));
    lasts(dir, 3);
    fs::write(
        dir.join("tasks.jsonl"),
        rows.replace("Say 7\"", "Say seven\""),
    )
    .unwrap();
    let code = fs::read_to_string(dir.join("score.py")).unwrap();
    fs::write(dir.join("score.py"), code.replace("'a'", "'b'")).unwrap();
    let told = failure(&resumed(dir, &["--resume"]), 2);
    for needle in [
        "    tasks.rows: ",
        "    reward.score.py:small: ",
        "--allow-change 'tasks.rows'",
    ] {
        assert!(told.contains(needle), "{needle}: {told}");
    }
    let told = failure(
        &resumed(dir, &["--resume", "--allow-change", "tasks.rows"]),
        2,
    );
    assert!(
        !told.contains("tasks.rows") && told.contains("reward.score.py:small"),
        "{told}"
    );
    let allowed = [
        "--resume",
        "--allow-change",
        "tasks.rows",
        "--allow-change",
        "reward",
    ];
    let output = resumed(dir, &allowed);
    crate::last_line(&output);
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(lines.contains("changed, as allowed: tasks.rows"), "{lines}");
    let pinned = fs::read_to_string(dir.join("run/pinned.json")).unwrap();
    assert!(
        pinned.contains("after step 2: reward.score.py:small"),
        "{pinned}"
    );
    lasts(dir, 4);
    crate::last_line(&resumed(dir, &["--resume"]));
    // A folder that lost the file is resumed with a warning.
    fs::remove_file(dir.join("run/pinned.json")).unwrap();
    lasts(dir, 5);
    let output = resumed(dir, &["--resume"]);
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(lines.contains("pinned.json is missing"), "{lines}");
}
