//! Rewards that come from outside: imported during a run, after it was killed, and never. They score episodes
//! of the run, and rollouts of agents that run already.

use crate::first::free_address;
use crate::live::{self, Run};
use crate::resume::{done, recipe, train};
use crate::{failure, json_lines, last_line, sinew, wait_until};
use serde_json::{Value, json};
use sinew_store::{EpisodeSummary, Filter, StoreReader};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};

/// A recipe whose rewards a person gives, in a mode.
fn by_person(dir: &Path, steps: u32, mode: &str, late: &str) -> PathBuf {
    let (late, mode) = (
        format!("{{ names = [\"thumbs\"], {late} }}"),
        format!("\"{mode}\""),
    );
    let more = [
        ("reward.late", late.as_str()),
        ("algorithm.correction", TIS),
        ("train.mode", &mode),
    ];
    recipe(dir, steps, &more)
}

/// Training episodes that the store has and that have no score.
fn unscored(run: &Path) -> Vec<EpisodeSummary> {
    let Ok(reader) = StoreReader::open(&run.join("store")) else {
        return Vec::new();
    };
    let filter = Filter {
        purpose: Some("train".into()),
        limit: 10_000,
        ..Filter::default()
    };
    let episodes = reader.list(&filter).unwrap().episodes;
    let open = |e: &EpisodeSummary| reader.scores(&e.episode).unwrap().is_empty();
    episodes.into_iter().filter(open).collect()
}

/// A person's verdict on an episode.
fn verdict(e: &EpisodeSummary) -> u32 {
    e.episode.as_str().bytes().map(u32::from).sum::<u32>() % 3
}

/// Imports a verdict of each episode that `keep` names; how many.
fn give(run: &Path, keep: impl Fn(&EpisodeSummary) -> bool) -> usize {
    let chosen: Vec<_> = unscored(run).into_iter().filter(|e| keep(e)).collect();
    if chosen.is_empty() {
        return 0;
    }
    let row = |e: &EpisodeSummary| {
        let liked = verdict(e);
        let row = json!({"episode": e.episode, "name": "thumbs", "value": liked, "at": 1.0});
        format!("{row}\n")
    };
    let file = run.with_extension("jsonl");
    std::fs::write(&file, chosen.iter().map(row).collect::<String>()).unwrap();
    let output = import(&file, run);
    let told = last_line(&output);
    assert_eq!(told["refused"], 0, "{told}");
    chosen.len()
}

fn import(file: &Path, run: &Path) -> Output {
    let mut command = sinew();
    command
        .args(["reward", "import"])
        .arg(file)
        .arg("--run")
        .arg(run);
    command.arg("--json").output().unwrap()
}

fn start(recipe: &Path, run: &Path, more: &[&str]) -> Child {
    let mut command = train(recipe, run, more);
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn lines(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    text.lines()
        .filter_map(|l| serde_json::from_str(l).ok())
        .collect()
}

#[test]
fn rewards_that_are_imported_after_the_batch_left_are_trained() {
    imported_after_the_batch_left("sync");
}

#[test]
fn rewards_that_are_imported_while_other_groups_run_are_trained() {
    imported_after_the_batch_left("async");
}

fn imported_after_the_batch_left(mode: &str) {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let late = "wait_s = 600.0, max_waiting = 8, max_staleness = 50";
    let recipe = by_person(dir.path(), 5, mode, late);
    // Nothing is scored: twice four groups are run, then all of them wait.
    let mut child = start(&recipe, &run, &[]);
    wait_until("eight groups wait", || unscored(&run).len() == 64);
    assert!(lines(&run).is_empty(), "a missing reward is not 0");
    // Half of them get their rewards, into the inbox of the run, which is killed when it has taken them.
    let half = |e: &EpisodeSummary| e.draw.is_multiple_of(2);
    let waiting = unscored(&run);
    let given = give(&run, half);
    assert_eq!(given, 32);
    let open = waiting.iter().find(|e| !half(e)).unwrap();
    shown(&run, open, "waits for its reward");
    let taken = || {
        let reader = StoreReader::open(&run.join("store")).unwrap();
        let scored = |e: &&EpisodeSummary| !reader.scores(&e.episode).unwrap().is_empty();
        waiting.iter().filter(scored).count() == given
    };
    wait_until("the run takes the scores", taken);
    wait_until("the first step is done", || !lines(&run).is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    // The other half comes while nothing runs, and then whatever is new as soon as it is there.
    assert!(give(&run, |e| !half(e)) >= 32);
    let mut child = start(&recipe, &run, &["--resume"]);
    wait_until("the run begins", || sinew_runs::in_use(&run));
    let over = || {
        give(&run, |_| true);
        child.try_wait().unwrap().is_some()
    };
    wait_until("the run ends", over);
    let last = last_line(&child.wait_with_output().unwrap());
    let samples = &last["samples"];
    assert_eq!(
        (&samples["trained_twice"], &samples["lost"]),
        (&json!(0), &json!(0)),
        "{last}"
    );
    assert!(samples["trained"].as_u64().unwrap() >= 32, "{last}");
    let steps = lines(&run);
    assert_eq!(steps.len(), 5);
    let scored: u64 = steps
        .iter()
        .map(|s| s["samples"]["scored"].as_u64().unwrap())
        .sum();
    assert!(scored >= 64, "{steps:?}");
    // The mean includes the person's scores, not only the environment's own.
    assert!(
        steps[0]["rollout"]["metrics"]["reward/thumbs"].is_number(),
        "{}",
        steps[0]
    );
    trained_once(&run, half);
    let whole = open.reward + f64::from(verdict(open));
    shown(&run, open, &format!("reward {whole:.3}"));
}

/// `sinew show` prints the outcome of an episode that counts, and `sinew episodes` lists the same one.
fn shown(run: &Path, episode: &EpisodeSummary, expected: &str) {
    let id = episode.episode.as_str();
    let mut show = sinew();
    show.args(["show", id, "--run-dir"]).arg(run);
    let page = String::from_utf8(show.output().unwrap().stdout).unwrap();
    assert!(page.contains(expected), "{expected} not in {page}");
    let mut list = sinew();
    list.args(["episodes", "--json", "--limit", "10000", "--run-dir"]);
    let rows = String::from_utf8(list.arg(run).output().unwrap().stdout).unwrap();
    let mut rows = json_lines(&rows).into_iter();
    let row = rows.find(|r| r["episode"] == id).unwrap();
    let waits = expected.starts_with("waits");
    assert_eq!(
        (&row["waits"], &row["unscored"]),
        (&json!(waits), &json!(waits)),
        "{row}"
    );
    let reward = format!("reward {:.3}", row["reward"].as_f64().unwrap());
    assert!(waits || reward == expected, "{row}, not {expected}");
    // A filter by the same reward finds it, and none by any reward if it waits.
    let reward = row["reward"].to_string();
    let mut found = sinew();
    found.args([
        "episodes",
        "--json",
        "--limit",
        "10000",
        "--min-reward",
        &reward,
    ]);
    let found = found.args(["--max-reward", &reward, "--run-dir"]).arg(run);
    let found = String::from_utf8(found.output().unwrap().stdout).unwrap();
    assert_eq!(found.contains(&format!("\"{id}\"")), !waits, "{found}");
}

/// No episode is in two updates, and groups of the first step were trained in later ones.
fn trained_once(run: &Path, half: impl Fn(&EpisodeSummary) -> bool) {
    let reader = StoreReader::open(&run.join("store")).unwrap();
    let mut trained = BTreeSet::new();
    for batch in reader.trained_batches().unwrap() {
        for episode in batch.episodes {
            assert!(
                trained.insert(episode.clone()),
                "{episode} is trained twice"
            );
        }
    }
    let filter = Filter {
        trained: Some(true),
        limit: 10_000,
        ..Filter::default()
    };
    let page = reader.list(&filter).unwrap();
    let late = page
        .episodes
        .iter()
        .filter(|e| e.draw < 8 && e.update > Some(1));
    assert!(
        late.count() > 0,
        "groups of the first step are trained later"
    );
    assert!(page.episodes.iter().any(|e| !half(e)));
    for episode in page.episodes {
        assert!(!reader.scores(&episode.episode).unwrap().is_empty());
    }
}

#[test]
fn rewards_that_never_come_end_as_unscored_with_the_reason() {
    never_come("sync");
}

#[test]
fn groups_without_rewards_end_as_unscored_while_others_run() {
    never_come("async");
}

fn never_come(mode: &str) {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let recipe = by_person(dir.path(), 2, mode, "wait_s = 0.001, max_waiting = 4");
    let mut command = train(&recipe, &run, &[]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(last["samples"]["trained"], 0, "{last}");
    assert_eq!(last["samples"]["lost"], 0, "{last}");
    let step = &lines(&run)[0]["samples"];
    assert_eq!(step["scored"], 0);
    let first = step["unscored"]["first"].as_str().unwrap();
    assert!(
        first.contains("reward thumbs: not given within 0.001 s"),
        "{first}"
    );
}

#[test]
fn recipes_that_cannot_wait_are_refused_with_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    for (more, needle) in [
        (
            &[("reward.late", "{ names = [\"a\"] }")][..],
            "add to [algorithm] `correction",
        ),
        (
            &[
                ("reward.late", "{ names = [] }"),
                ("algorithm.correction", TIS),
            ][..],
            "reward.late.names",
        ),
        (
            &[
                ("reward.late", "{ names = { a = 0.5 } }"),
                ("algorithm.correction", TIS),
                ("store.type", "\"memory\""),
            ][..],
            "use \"disk\"",
        ),
    ] {
        let recipe = recipe(dir.path(), 2, more);
        let output = sinew().arg("check").arg(recipe).output().unwrap();
        let said = failure(&output, 1);
        assert!(said.contains(needle), "{needle} not in {said}");
    }
}

/// A recipe of live agents whose users rate the answers later.
fn by_users(dir: &Path, steps: usize, late: &str) -> PathBuf {
    let reward = format!(
        "steps = {steps}\ncheckpoint_every = 2\n[reward.late]\nnames = [\"thumbs\"]\n{late}\n\
         [algorithm]\ntype = \"grpo\"\ncorrection = {TIS}\n"
    );
    let text = "learning_rate = 3e-3\nmicro_batch_tokens = 8192";
    let moved = format!("{text}\n{reward}");
    live::recipe(
        dir,
        &[
            ("tasks_per_step = 6", "tasks_per_step = 8"),
            ("steps = 30\n", ""),
            (text, &moved),
        ],
    )
}

/// So many requests, each a separate rollout that ends without a reward; their ids.
fn served(run: &Run, count: usize) -> Vec<String> {
    let one = |_| live::rollout(&run.address, &run.token, "alone", |_| None).unwrap();
    (0..count).map(one).collect()
}

/// Thumbs up or down, which differ.
fn thumbs(id: &str) -> f64 {
    f64::from(id.bytes().map(u32::from).sum::<u32>() % 3)
}

/// A user's verdict comes when the agent has long ended its rollout: by the gateway while the run is at work,
/// by a file while nothing runs, and the killed run continues with both.
#[test]
fn verdicts_about_a_live_agent_are_trained_when_they_come() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("run");
    let recipe = by_users(dir.path(), 4, "max_staleness = 50");
    let address = free_address();
    let mut run = Run::start(&recipe, &run_dir, &address, &[]);
    let ids = served(&run, 40);
    assert!(lines(&run_dir).is_empty(), "a missing reward is not 0");
    let (soon, later) = ids.split_at(16);
    for id in soon {
        let path = format!("/rollouts/{id}/rewards/thumbs");
        let body = json!({"value": thumbs(id)}).to_string();
        let (status, told) = live::send("PUT", &run.address, &path, &run.token, &body).unwrap();
        assert_eq!(status, 200, "{told}");
    }
    run.steps(2);
    drop(run);
    let row = |id: &String| json!({"episode": id, "name": "thumbs", "value": thumbs(id)});
    let rows: String = later.iter().map(|id| format!("{}\n", row(id))).collect();
    let file = dir.path().join("verdicts.jsonl");
    std::fs::write(&file, rows).unwrap();
    assert_eq!(last_line(&import(&file, &run_dir))["new"], 24);
    let last = Run::start(&recipe, &run_dir, &address, &["--resume"]).end();
    let samples = &last["samples"];
    let count = |what: &str| samples[what].as_u64().unwrap();
    assert_eq!((count("trained_twice"), count("lost")), (0, 0), "{last}");
    assert_eq!(count("trained") + count("dropped"), 32, "{last}");
    assert!(count("trained") > 16 && count("waiting") == 8, "{last}");
    let steps = lines(&run_dir);
    assert_eq!(steps.len(), 4, "{steps:?}");
    for step in &steps {
        assert_eq!(step["samples"]["scored"], 8, "{step}");
        assert!(step["rollout"]["metrics"]["reward/thumbs"].is_number());
    }
    assert_eq!(steps[0]["samples"]["waiting"], 32);
    let reader = StoreReader::open(&run_dir.join("store")).unwrap();
    let mut trained = BTreeSet::new();
    for episode in reader
        .trained_batches()
        .unwrap()
        .into_iter()
        .flat_map(|b| b.episodes)
    {
        assert!(
            trained.insert(episode.clone()),
            "{episode} is trained twice"
        );
        assert!(!reader.scores(&episode).unwrap().is_empty());
    }
}

/// Users without a verdict: their episodes are left out when the time is up, with the reason, and never a 0.
#[test]
fn verdicts_that_never_come_are_unscored_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("run");
    let late = "wait_s = 0.001\nmax_waiting = 8";
    let recipe = by_users(dir.path(), 1, late);
    let mut run = Run::start(&recipe, &run_dir, "127.0.0.1:0", &[]);
    served(&run, 8);
    assert!(!run.child.wait().unwrap().success(), "it trained nothing");
    let step = &lines(&run_dir)[0]["samples"];
    assert_eq!(
        (&step["scored"], &step["unscored"]["count"]),
        (&json!(0), &json!(8))
    );
    let first = step["unscored"]["first"].as_str().unwrap();
    assert!(
        first.contains("reward thumbs: not given within 0.001 s"),
        "{first}"
    );
}

/// Truncated importance sampling.
pub(crate) const TIS: &str = "{ type = \"truncate\", low = 0.0, high = 2.0 }";

#[test]
fn an_import_into_nothing_and_bad_rows_are_wrong_input() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rows.jsonl");
    std::fs::write(&file, "{\"episode\": \"e\"}\n").unwrap();
    let said = failure(&import(&file, dir.path()), 2);
    assert!(said.contains("holds no store"), "{said}");
}

#[test]
fn stored_episodes_are_scored_again_and_what_was_trained_stays() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let recipe = recipe(dir.path(), 2, &[]);
    done(&recipe, &run, &[]);
    let reader = || StoreReader::open(&run.join("store")).unwrap();
    let before = reader().trained_batches().unwrap();
    let rescore = |more: &[&str]| {
        let mut command = sinew();
        command.arg("rescore").arg(&run).arg("--json").args(more);
        command.output().unwrap()
    };
    let none = failure(&rescore(&[]), 2);
    assert!(none.contains("no reward of its own"), "{none}");
    let reward = ["--reward", "length(max = 1)"];
    let told = last_line(&rescore(&[&reward[..], &["--dry-run"]].concat()));
    assert_eq!(
        (&told["episodes"], &told["scores"]),
        (&json!(64), &json!(0))
    );
    let output = rescore(&reward);
    let told = last_line(&output);
    assert_eq!(
        (&told["unscored"], &told["scores"]),
        (&json!(0), &json!(192)),
        "{told}"
    );
    let table = String::from_utf8(output.stdout).unwrap();
    let rows = json_lines(&table);
    let length = rows.iter().find(|r| r["component"] == "length").unwrap();
    assert_eq!(
        (&length["old_episodes"], &length["new_episodes"]),
        (&json!(0), &json!(64))
    );
    let total = rows.iter().find(|r| r["component"] == "total").unwrap();
    assert!(
        total["new_mean"].as_f64().unwrap() <= 0.0,
        "a penalty: {total}"
    );
    assert_eq!(reader().trained_batches().unwrap(), before);
    let episode = &before[0]
        .episodes
        .first()
        .or(before[1].episodes.first())
        .unwrap();
    let scores = reader().scores(episode).unwrap();
    assert!(scores.iter().all(|s| s.source == "rescore"), "{scores:?}");
}
