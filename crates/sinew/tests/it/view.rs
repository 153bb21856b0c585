//! The dashboard and the signals of a real run.

use crate::queue::until;
use crate::{Running, failure, sinew, train};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// Answer of an address with the token of a link.
pub(crate) fn get(url: &str, path: &str) -> Value {
    let (address, token) = url
        .strip_prefix("http://")
        .unwrap()
        .split_once("/?token=")
        .unwrap();
    let (status, answer) = crate::serve::get(address, path, token);
    assert_eq!(status, 200, "{path}: {answer}");
    answer
}

/// A dashboard over one run, and its address.
pub(crate) fn view(run: &Path) -> (Running, String) {
    let mut command = sinew();
    command.args(["view", "--json"]).arg(run);
    let (viewing, line) = until(&mut command, |_| true);
    assert_eq!(line["runs"], 1);
    (viewing, line["url"].as_str().unwrap().to_owned())
}

#[test]
fn trained_tokens_of_the_newest_steps_have_their_advantage_and_ratio() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("kept");
    // A part of the rows is trained by another process.
    let keys = [("train.token_signals", "2"), ("train.data_parallel", "2")];
    let recipe = crate::resume::recipe(dir.path(), 4, &keys);
    crate::resume::done(&recipe, &run, &[]);
    assert_eq!(std::fs::read_dir(run.join("tokens")).unwrap().count(), 2);

    let (mut viewing, url) = view(&run);
    let signals = |step: u32| -> Vec<(f64, Value)> {
        let page = format!("/api/runs/kept/episodes?purpose=train&step={step}&limit=200");
        let page = get(&url, &page);
        let episodes = page["episodes"].as_array().unwrap();
        let one = |e: &Value| {
            let id = e["episode"].as_str().unwrap();
            let episode = get(&url, &format!("/api/runs/kept/episodes/{id}"));
            (e["reward"].as_f64().unwrap(), episode["signals"].clone())
        };
        episodes.iter().map(one).collect()
    };
    assert!(signals(1).iter().all(|(_, signals)| signals.is_null()));
    let kept = signals(4);
    let tokens = |signals: &Value| -> Vec<Value> {
        let nodes = signals.as_array().into_iter().flatten();
        nodes.flat_map(|n| n.as_array().unwrap().clone()).collect()
    };
    let all: Vec<Value> = kept.iter().flat_map(|(_, s)| tokens(s)).collect();
    assert!(!all.is_empty());
    for token in &all {
        // The weights that sampled it are those that were trained.
        assert!(
            (token["ratio"].as_f64().unwrap() - 1.0).abs() < 1e-3,
            "{token}"
        );
    }
    // The best trained episode has a higher advantage than the worst.
    let mut trained: Vec<(f64, f64)> = kept
        .iter()
        .filter_map(|(reward, s)| Some((*reward, tokens(s).first()?["advantage"].as_f64()?)))
        .collect();
    trained.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (worst, best) = (trained[0], trained[trained.len() - 1]);
    assert!(worst.1 < best.1, "{trained:?}");
    viewing.kill();
}

#[test]
fn a_run_is_seen_while_it_works_and_afterwards_and_its_signals_arrive() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("seen");
    let signals = dir.path().join("signals.toml");
    let textfile = dir.path().join("sinew.prom");
    std::fs::write(&signals, format!("[prometheus]\ntextfile = {textfile:?}\n")).unwrap();
    let options = ["--view", "--signals", signals.to_str().unwrap()];
    let mut child = train(&run, &options)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let url = lines.find_map(|line| {
        let line: Value = serde_json::from_str(&line.unwrap()).unwrap();
        Some(line["view"].as_str()?.to_owned())
    });
    // It is there from the beginning, before the model is loaded.
    let runs = get(&url.unwrap(), "/api/runs");
    assert_eq!(
        (&runs["runs"][0]["run"], &runs["runs"][0]["state"]),
        (&"seen".into(), &"running".into())
    );
    assert!(lines.last().unwrap().unwrap().contains("\"eval\""));
    assert!(child.wait().unwrap().success());

    let (mut viewing, url) = view(&run);
    let url = url.as_str();
    let curves = get(url, "/api/runs/seen/curves");
    assert_eq!(curves["step"].as_array().unwrap().len(), 60);
    let live = get(url, "/api/runs/seen/live");
    assert_eq!(
        (&live["state"], &live["live"]["phase"]),
        (&"ended".into(), &"done".into())
    );
    // It has ended: nothing is live, and the phases of its episodes are kept to the last.
    assert_eq!(live["live"]["in_flight"], 0);
    assert_eq!(live["live"]["board"].as_array().unwrap().len(), 0);
    let trace = get(url, "/api/runs/seen/trace");
    let events = trace["traceEvents"].as_array().unwrap().iter();
    let threads = events.filter(|e| e["name"] == "thread_name");
    let rows = get(url, "/api/runs/seen/episodes?limit=500");
    assert!(threads.count() >= rows["episodes"].as_array().unwrap().len());
    let page = get(url, "/api/runs/seen/episodes?purpose=train&limit=3");
    let id = page["episodes"][2]["episode"].as_str().unwrap();
    let episode = get(url, &format!("/api/runs/seen/episodes/{id}"));
    assert!(
        episode["no_text"].is_null() && episode["nodes"][1]["logprobs"][0].is_f64(),
        "{episode}"
    );
    let stopped = Command::new("kill").arg(viewing.id().to_string()).status();
    assert!(stopped.unwrap().success() && viewing.wait().unwrap().success());

    let metrics = std::fs::read_to_string(&textfile).unwrap();
    assert!(
        metrics.contains("sinew_steps_total{run=\"tiny\"} 60"),
        "{metrics}"
    );
    assert!(run.join("timeline.jsonl").exists());
    assert!(
        metrics.contains("# HELP sinew_rollout_reward Training episodes"),
        "{metrics}"
    );
    mailed(&run, id);
}

/// The episode as a page that can be mailed.
fn mailed(run: &Path, id: &str) {
    let file = run.join("episode.html");
    let mut show = sinew();
    show.args(["show", id, "--run-dir"]).arg(run);
    let shown = show.arg("--html").arg(&file).output().unwrap();
    assert!(shown.status.success(), "{shown:?}");
    let page = std::fs::read_to_string(&file).unwrap();
    assert!(page.contains(&format!("<h1>Episode {id}</h1>")), "{page}");
    assert!(
        page.contains("log-prob") && !page.contains("<script"),
        "{page}"
    );
}

/// A copy of a run shows all of its text from any folder, without the model that the run began with.
pub(crate) fn copied(run: &Path, model: &Path) {
    let elsewhere = tempfile::tempdir().unwrap();
    let copy = elsewhere.path().join("copied");
    let done = Command::new("cp").arg("-r").args([run, &copy]).status();
    assert!(done.unwrap().success());
    let away = model.with_extension("away");
    std::fs::rename(model, &away).unwrap();
    let ask = |args: &[&str]| -> String {
        let mut command = sinew();
        command
            .current_dir("/")
            .args(args)
            .arg("--run-dir")
            .arg(&copy);
        let output = command.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {errors}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let rows = ask(&["episodes", "--json"]);
    let first: Value = serde_json::from_str(rows.lines().next().unwrap()).unwrap();
    let id = first["episode"].as_str().unwrap();
    let shown = ask(&["show", id, "--tokens"]);
    assert!(shown.contains("<|im_start|>"), "{shown}");
    let (mut viewing, url) = view(&copy);
    let episode = get(&url, &format!("/api/runs/copied/episodes/{id}"));
    assert!(episode["no_text"].is_null(), "{}", episode["no_text"]);
    let pieces = episode["nodes"][0]["pieces"].as_array().unwrap();
    assert!(
        pieces
            .iter()
            .any(|p| p.as_str().unwrap().contains("im_start"))
    );
    viewing.kill();
    std::fs::rename(away, model).unwrap();
}

#[test]
fn what_cannot_be_shown_or_sent_is_refused_before_the_run_begins() {
    let dir = tempfile::tempdir().unwrap();
    let missing = sinew().args(["view", "no-such-folder"]).output().unwrap();
    assert!(failure(&missing, 2).contains("no-such-folder is no folder"));
    let signals = dir.path().join("signals.toml");
    std::fs::write(&signals, "[alerts]\nwebhok = \"http://x\"\n").unwrap();
    let run = dir.path().join("run");
    let refused = train(&run, &["--signals", signals.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(failure(&refused, 2).contains("webhok"));
}
