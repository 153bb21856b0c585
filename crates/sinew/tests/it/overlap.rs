//! Runs in which generation and training overlap: their training, and their state after kills.

use crate::resume::{done, end, killed_often, recipe, same, start};
use crate::serve::signal;
use serde_json::Value;
use sinew_rollout::SavedEpisode;
use sinew_store::StoreReader;
use sinew_types::{EpisodeId, TokenKind, Trace};
use std::path::Path;
use std::time::{Duration, Instant};

const CORRECTION: (&str, &str) = (
    "algorithm.correction",
    "{ type = \"truncate\", low = 0.0, high = 2.0 }",
);

pub(crate) fn count(last: &Value, name: &str) -> u64 {
    last["samples"][name].as_u64().unwrap()
}

/// Rows by updates behind.
fn staleness(last: &Value) -> Vec<(u64, u64)> {
    let by = last["staleness"].as_object().unwrap();
    let number =
        |(behind, rows): (&String, &Value)| (behind.parse().unwrap(), rows.as_u64().unwrap());
    by.iter().map(number).collect()
}

pub(crate) fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &to)
        } else {
            std::fs::copy(&path, &to).unwrap();
        }
    }
}

/// Killed at any instant, a run that overlaps loses no episode and trains none twice. Its commits are the log
/// from which all of its training is repeated: without checkpoints the same weights come out of them, to the
/// bit.
#[test]
fn an_async_run_is_repeated_from_its_commits() {
    let dir = tempfile::tempdir().unwrap();
    let mode = [
        CORRECTION,
        ("train.mode", "\"async\""),
        ("train.max_staleness", "2"),
    ];
    let recipe = recipe(dir.path(), 10, &mode);
    let run = dir.path().join("killed");
    let (last, kills) = killed_often(&recipe, &run, 5);
    assert!(kills > 0);
    assert_eq!(
        (count(&last, "lost"), count(&last, "trained_twice")),
        (0, 0)
    );
    assert!(count(&last, "trained") > 0);
    let behind = staleness(&last);
    assert!(behind.iter().all(|(behind, _)| *behind <= 2), "{behind:?}");
    let repeated = dir.path().join("repeated");
    copy(&run, &repeated);
    std::fs::remove_dir_all(repeated.join("checkpoints")).unwrap();
    let again = done(&recipe, &repeated, &["--resume"]);
    assert_eq!(
        (count(&again, "lost"), count(&again, "trained_twice")),
        (0, 0)
    );
    let (mut a, mut b) = (end(&run, &last), end(&repeated, &again));
    for end in [&mut a, &mut b] {
        // The last measurement is stored, and so is the training; what is left of the line is the same.
        end.1.as_object_mut().unwrap().remove("tokens");
    }
    same("repeated from the commits", &a, &b);
}

/// One step off, a run is a function of its seed: killed or not, with episodes that are exactly a step old.
#[test]
fn one_step_off_ends_the_same_killed_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(
        dir.path(),
        8,
        &[CORRECTION, ("train.mode", "\"one_step_off\"")],
    );
    let whole = dir.path().join("whole");
    let last = done(&recipe, &whole, &[]);
    let behind = staleness(&last);
    assert!(behind.iter().all(|(behind, _)| *behind <= 1), "{behind:?}");
    assert!(
        behind
            .iter()
            .any(|(behind, rows)| *behind == 1 && *rows > 0)
    );
    let killed = dir.path().join("killed");
    let (again, kills) = killed_often(&recipe, &killed, 11);
    assert!(kills > 0);
    same("one step off", &end(&whole, &last), &end(&killed, &again));
    assert_eq!(
        (count(&again, "lost"), count(&again, "trained_twice")),
        (0, 0)
    );
}

/// The traces of a run's store that are asked for.
fn traces(run: &Path, episodes: &[EpisodeId]) -> Vec<Option<Trace>> {
    let store = StoreReader::open(&run.join("store")).unwrap();
    let get = |episode| store.get(episode).unwrap();
    episodes.iter().map(get).collect()
}

/// Sampled tokens with their log-probs, in their order.
fn sampled(trace: &Trace) -> Vec<(u32, f32)> {
    let sampled = trace.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
    let tokens = sampled.flat_map(|n| n.tokens.iter().copied().zip(n.logprobs.iter().copied()));
    tokens.collect()
}

/// Kills a run after a checkpoint, until one had episodes in flight; gives these.
fn killed_in_flight(recipe: &Path, run: &Path) -> Vec<SavedEpisode> {
    let file = run.join("in-flight.jsonl");
    let mut kept: Vec<SavedEpisode> = Vec::new();
    for session in 0..12 {
        let resume: &[&str] = if session > 0 { &["--resume"] } else { &[] };
        let mut child = start(recipe, run, resume);
        let newer = std::fs::metadata(&file).and_then(|m| m.modified()).ok();
        let begun = Instant::now();
        // The file is written anew at each checkpoint, or the run ends before.
        while child.try_wait().unwrap().is_none()
            && std::fs::metadata(&file).and_then(|m| m.modified()).ok() == newer
        {
            assert!(begun.elapsed() < Duration::from_secs(240));
            std::thread::sleep(Duration::from_millis(2));
        }
        child.kill();
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let saved = text.lines().skip(1);
        let saved = saved.map(|line| serde_json::from_str(line).unwrap());
        kept = saved.collect();
        if !kept.is_empty() {
            break;
        }
    }
    kept
}

/// Killed after a checkpoint, a run continues with the episodes that were in flight: what they had sampled is
/// not sampled again, nothing is lost, and nothing is trained twice. Groups that are decided early and tasks
/// that follow what the policy can do are repeated from the commits as all others.
#[test]
fn episodes_in_flight_go_on_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(
        dir.path(),
        12,
        &[
            CORRECTION,
            ("algorithm.equal_groups", "\"drop\""),
            ("tasks.sampling", "\"adaptive\""),
            ("rollout.stop_decided", "3"),
            ("train.mode", "\"async\""),
            ("train.max_staleness", "2"),
            ("train.checkpoint_every", "1"),
        ],
    );
    let run = dir.path().join("run");
    let kept = killed_in_flight(&recipe, &run);
    assert!(!kept.is_empty(), "no checkpoint had an episode in flight");
    let before: Vec<EpisodeId> = kept.iter().map(|s| s.trace.episode.clone()).collect();
    let stored = traces(&run, &before);
    let last = done(&recipe, &run, &["--resume"]);
    assert_eq!(
        (count(&last, "lost"), count(&last, "trained_twice")),
        (0, 0)
    );
    let open = stored.iter().filter(|trace| trace.is_none()).count() as u64;
    let resumed = &last["resumed"];
    assert!(resumed["episodes"].as_u64().unwrap() <= open, "{resumed}");
    assert_eq!(resumed["restarted"], 0, "{resumed}");
    let after = traces(&run, &before);
    for ((saved, stored), after) in kept.iter().zip(stored).zip(after) {
        // Episodes that were not needed any more did not begin again.
        let (None, Some(after)) = (stored, after) else {
            continue;
        };
        let turn = saved.turn.iter().map(|t| (t.id, t.logprob));
        let begun: Vec<_> = sampled(&saved.trace).into_iter().chain(turn).collect();
        assert_eq!(
            sampled(&after)[..begun.len()],
            begun[..],
            "{}",
            after.episode
        );
    }
    let repeated = dir.path().join("repeated");
    copy(&run, &repeated);
    std::fs::remove_dir_all(repeated.join("checkpoints")).unwrap();
    let again = done(&recipe, &repeated, &["--resume"]);
    let (mut a, mut b) = (end(&run, &last), end(&repeated, &again));
    for end in [&mut a, &mut b] {
        end.1.as_object_mut().unwrap().remove("tokens");
    }
    same("repeated from the commits", &a, &b);
}

/// Asked to stop, a run keeps its episodes in flight, in every mode; the next session continues with them and
/// ends as one that was not stopped.
#[test]
fn a_sync_run_that_is_asked_to_stop_goes_on_within_its_episodes() {
    let dir = tempfile::tempdir().unwrap();
    let more = [
        ("rollout.stop_decided", "3"),
        ("algorithm.equal_groups", "\"drop\""),
    ];
    let recipe = recipe(dir.path(), 8, &more);
    let whole = dir.path().join("whole");
    let last = done(&recipe, &whole, &[]);
    assert!(last["not_begun"].as_u64().unwrap() > 0, "{last}");
    let stopped = dir.path().join("stopped");
    let mut child = start(&recipe, &stopped, &[]);
    let begun = Instant::now();
    let metrics = stopped.join("metrics.jsonl");
    while std::fs::metadata(&metrics).map_or(0, |m| m.len()) == 0 {
        assert!(begun.elapsed() < Duration::from_secs(240));
        std::thread::sleep(Duration::from_millis(2));
    }
    signal(child.id(), "INT");
    child.wait().unwrap();
    let again = done(&recipe, &stopped, &["--resume"]);
    assert_eq!(again["resumed"]["restarted"], 0, "{again}");
    same("asked to stop", &end(&whole, &last), &end(&stopped, &again));
}
