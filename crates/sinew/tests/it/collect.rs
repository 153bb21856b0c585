//! Collected episodes: counted, killed and resumed, and trained on.

use crate::input::refused;
use crate::resume::recipe;
use crate::serve::signal;
use crate::{json_file, json_lines, last_line, run_ok, sinew};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// Keys of a recipe whose episodes are the solutions of its environment.
const GOLD: [(&str, &str); 3] = [
    ("algorithm.type", "\"sft\""),
    ("data.type", "\"gold\""),
    ("rollout.group_size", "1"),
];

fn collect(recipe: &Path, run: &Path, episodes: u32, more: &[&str]) -> Command {
    let mut command = sinew();
    command.arg("collect").arg(recipe).arg("--json").args(more);
    command.args(["--episodes", &episodes.to_string(), "--run-dir"]);
    command.arg(run);
    command
}

/// Ids and rewards of the stored episodes.
fn stored(run: &Path) -> Vec<(String, f64)> {
    let listed = run_ok(
        sinew()
            .args(["episodes", "--json", "--limit", "10000"])
            .arg(run),
    );
    let row = |row: &Value| {
        let id = row["episode"].as_str().unwrap().to_owned();
        (id, row["reward"].as_f64().unwrap())
    };
    json_lines(&listed).iter().map(row).collect()
}

/// Kills a collection as soon as it reports that some episodes are stored.
fn killed(recipe: &Path, run: &Path, episodes: u32, more: &[&str]) {
    let mut child = collect(recipe, run, episodes, more)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = lines.find(|line| line.as_ref().unwrap().starts_with("{\"collected\""));
    assert!(first.is_some(), "it says how far it is");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_killed_collection_goes_on_without_loss_or_doubles_and_is_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    // Few at a time, so that a kill comes in the middle.
    let teacher = recipe(dir.path(), 1, &[("rollout.max_in_flight", "16")]);
    let run = dir.path().join("collected");
    let episodes = 602;
    killed(&teacher, &run, episodes, &[]);
    let first = stored(&run);
    assert!(!first.is_empty());
    killed(&teacher, &run, episodes, &["--resume"]);
    // Its entry in the list shows how to resume.
    let runs = run_ok(sinew().arg("runs").arg(dir.path()));
    let hint = format!("--run-dir {} --resume --episodes 602", run.display());
    assert!(runs.contains("killed") && runs.contains(&hint), "{runs}");
    let rest = collect(&teacher, &run, episodes, &["--resume"]).output();
    let last = last_line(&rest.unwrap());
    let collected = &last["collected"];
    assert_eq!(collected["episodes"], 602, "{last}");
    let sum = ["scored", "unscored", "failed"].map(|k| collected[k].as_u64().unwrap());
    assert_eq!(sum.iter().sum::<u64>(), 602, "{last}");
    let now = last["now"].as_u64().unwrap();
    assert!(now + first.len() as u64 <= 602, "{last}");
    let all = stored(&run);
    let ids: BTreeSet<&String> = all.iter().map(|(id, _)| id).collect();
    assert_eq!((all.len(), ids.len()), (602, 602));
    assert_eq!(&all[..first.len()], &first[..]);
    // The same as in one piece, except for the order.
    let whole = dir.path().join("whole");
    last_line(&collect(&teacher, &whole, episodes, &[]).output().unwrap());
    let by_id = |all: Vec<(String, f64)>| all.into_iter().collect::<BTreeMap<_, _>>();
    assert_eq!(by_id(stored(&whole)), by_id(all));
    // More of them begin with these.
    let more = collect(&teacher, &run, 640, &["--resume"]).output();
    let more = last_line(&more.unwrap());
    assert_eq!(
        (&more["collected"]["episodes"], &more["now"]),
        (&640.into(), &38.into())
    );
    trained_on(dir.path(), &run);
}

/// Imitates the successes: the student is better than at first.
fn trained_on(dir: &Path, collected: &Path) {
    let folder = dir.join("student");
    std::fs::create_dir(&folder).unwrap();
    let path = format!("{:?}", collected.display().to_string());
    let student = recipe(
        &folder,
        25,
        &[
            ("algorithm.type", "\"sft\""),
            ("data.type", "\"episodes\""),
            ("data.path", &path),
            ("rollout.group_size", "1"),
            ("rollout.tasks_per_step", "16"),
        ],
    );
    let mut train = crate::resume::train(&student, &folder.join("run"), &[]);
    let last = last_line(&train.output().unwrap());
    let success = |when: &str| last["eval"][when]["success"].as_f64().unwrap();
    assert!(success("after") > success("before") + 0.15, "{last}");
}

#[test]
fn a_collection_that_is_interrupted_keeps_what_ended_and_speaks_of_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let teacher = recipe(dir.path(), 1, &[("rollout.max_in_flight", "4")]);
    let mut child = collect(&teacher, &dir.path().join("run"), 1_000_000, &[])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().starts_with("{\"collected\"")));
    signal(child.id(), "INT");
    // Its end is not kept from it by a full pipe.
    lines.for_each(drop);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("episodes that ended are stored"), "{said}");
    assert!(said.contains("--resume --episodes 1000000"), "{said}");
    assert!(!said.contains("checkpoint"), "{said}");
}

#[test]
fn solutions_of_the_environment_are_collected_without_an_engine() {
    let dir = tempfile::tempdir().unwrap();
    let gold = recipe(dir.path(), 1, &GOLD);
    let run = dir.path().join("gold");
    let last = last_line(&collect(&gold, &run, 30, &[]).output().unwrap());
    assert_eq!(last["collected"]["scored"], 30);
    assert_eq!(last["collected"]["success"], 1.0);
    assert_eq!(stored(&run).len(), 30);
}

#[test]
fn what_runs_no_episodes_is_refused_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let chain = sinew()
        .args(["collect", "recipes/chain.toml", "--episodes", "4"])
        .output()
        .unwrap();
    assert_eq!(chain.status.code(), Some(2));
    let told = String::from_utf8(chain.stderr).unwrap();
    assert!(told.contains("chain") && told.contains("run:DIR"), "{told}");
    let cases: [(&[(&str, &str)], &str); 2] = [
        (&[("store.type", "\"memory\"")], "gone with the process"),
        (
            &[
                ("algorithm.type", "\"sft\""),
                ("data.type", "\"episodes\""),
                ("data.path", "\"x\""),
            ],
            "there already",
        ),
    ];
    for (more, why) in cases {
        let refused_recipe = recipe(dir.path(), 1, more);
        let told = refused(&mut collect(&refused_recipe, &run, 4, &[]));
        assert!(told.contains(why), "{told}");
        assert!(!run.exists());
    }
}

/// The number of removed episodes, and of those that are still needed.
fn gc(run: &Path, more: &[&str]) -> (u64, u64) {
    let mut command = sinew();
    command.arg("gc").arg(run).arg("--json").args(more);
    let removed = last_line(&command.output().unwrap());
    let count = |key: &str| removed[key].as_u64().unwrap();
    (count("episodes"), count("needed"))
}

#[test]
fn old_episodes_of_a_collection_go_and_it_goes_on_without_them() {
    let dir = tempfile::tempdir().unwrap();
    let teacher = recipe(dir.path(), 1, &[]);
    let run = dir.path().join("collected");
    // Groups of eight: the last one is not whole, and more episodes continue with it.
    last_line(&collect(&teacher, &run, 36, &[]).output().unwrap());
    let told = refused(sinew().arg("gc").arg(&run));
    assert!(told.contains("--older-than 7d"), "{told}");
    let told = refused(sinew().arg("gc").arg(&run).args(["--older-than", "7"]));
    assert!(told.contains("36h or 7d"), "{told}");
    assert_eq!(gc(&run, &["--older-than", "7d"]), (0, 0));
    let dry = ["--older-than", "0s", "--dry-run"];
    assert_eq!(gc(&run, &dry), (32, 4));
    assert_eq!(stored(&run).len(), 36);
    // The environment is what it was.
    let same = teacher.to_str().unwrap();
    assert_eq!(gc(&run, &["--env-changed", same]), (0, 0));
    let none = sinew()
        .args(["episodes", "--json", "--env-changed", same])
        .arg(&run)
        .output();
    assert!(crate::failure(&none.unwrap(), 2).contains("no episode"));
    assert_eq!(gc(&run, &["--below-version", "1"]), (32, 4));
    assert_eq!(stored(&run).len(), 4);
    let more = last_line(&collect(&teacher, &run, 48, &["--resume"]).output().unwrap());
    assert_eq!(
        (&more["collected"]["episodes"], &more["now"]),
        (&48.into(), &12.into())
    );
    assert_eq!(more["stored"]["collected"], 32, "{more}");
    let whole = dir.path().join("whole");
    let whole = last_line(&collect(&teacher, &whole, 48, &[]).output().unwrap());
    for key in ["episodes", "scored", "reward", "success"] {
        let (a, b) = (&more["collected"][key], &whole["collected"][key]);
        match (a.as_f64(), b.as_f64()) {
            (Some(a), Some(b)) => assert!((a - b).abs() < 1e-9, "{key}: {more} {whole}"),
            _ => panic!("{key}: {more} {whole}"),
        }
    }
    let runs = json_lines(&run_ok(sinew().arg("runs").arg(dir.path()).arg("--json")));
    let mut runs = runs.into_iter();
    let listed = runs
        .find(|l| l["run_dir"] == run.to_str().unwrap())
        .unwrap();
    assert_eq!(listed["state"], "ended", "{listed}");
    assert_eq!(listed["collection"]["stored"]["episodes"], 16, "{listed}");
}

#[test]
fn equal_episodes_are_listed_and_exported_once() {
    let dir = tempfile::tempdir().unwrap();
    let gold = recipe(dir.path(), 1, &GOLD);
    // Solutions of a tiny world repeat themselves.
    let run = dir.path().join("gold");
    last_line(&collect(&gold, &run, 300, &[]).output().unwrap());
    let rows = |more: &[&str]| {
        let mut list = sinew();
        list.args(["episodes", "--json", "--limit", "10000"])
            .args(more)
            .arg(&run);
        run_ok(&mut list).lines().count()
    };
    let unique = rows(&["--unique"]);
    assert!(unique < rows(&[]) && unique > 1, "{unique}");
    let file = dir.path().join("unique.jsonl");
    let exported = sinew()
        .args(["episodes", "--json", "--unique", "--export"])
        .arg(&file)
        .arg(&run)
        .output();
    assert_eq!(last_line(&exported.unwrap())["episodes"], unique);
}

/// Episodes of the built-in loop are exported as whole conversations, and read again as demonstrations.
#[test]
fn exported_episodes_are_whole_conversations() {
    let dir = tempfile::tempdir().unwrap();
    let teacher = recipe(dir.path(), 1, &[]);
    let run = dir.path().join("teacher");
    last_line(&collect(&teacher, &run, 24, &[]).output().unwrap());
    let file = dir.path().join("rows.jsonl");
    let export = sinew()
        .args(["episodes", "--json", "--export"])
        .arg(&file)
        .arg(&run)
        .output();
    let done = last_line(&export.unwrap());
    assert_eq!(done["without_messages"], 0, "{done}");
    let rows = json_file(&file);
    assert!(rows.len() >= 24, "{}", rows.len());
    for row in &rows {
        let messages = row["messages"].as_array().unwrap();
        let said = messages.iter().filter(|m| m["role"] == "assistant");
        assert_eq!(said.count() as u64, row["turns"].as_u64().unwrap(), "{row}");
        assert!(messages[0]["role"] != "assistant", "{row}");
    }
    let sft = std::fs::read_to_string(crate::root().join("recipes/algorithms/sft.toml")).unwrap();
    let path = file.display().to_string();
    let sft = sft.replace("data/tiny-demonstrations.jsonl", &path);
    let student = dir.path().join("student.toml");
    std::fs::write(&student, sft).unwrap();
    let checked = sinew().arg("check").arg(&student).output().unwrap();
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(checked.status.success(), "{checked:?}");
    assert!(
        said.contains(&format!("{} rows to train on", rows.len())),
        "{said}"
    );
    assert!(
        said.contains("column reward (") && said.contains("is not trained on"),
        "{said}"
    );
}

#[test]
fn a_stopped_collection_says_that_it_makes_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let teacher = recipe(dir.path(), 1, &[("rollout.max_in_flight", "16")]);
    let run = dir.path().join("stopped");
    let mut child = collect(&teacher, &run, 100_000, &["--stop-on-eof"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = lines.find(|line| line.as_ref().unwrap().starts_with("{\"collected\""));
    assert!(first.is_some(), "it says how far it is");
    drop(child.stdin.take());
    lines.for_each(drop);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
    child.wait().unwrap();
    assert!(said.contains("run again with --resume"), "{said}");
    assert!(!said.contains("checkpoint"), "{said}");
}
