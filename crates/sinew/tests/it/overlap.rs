//! Runs in which generation and training overlap: what they train, and what is left of them after kills.

use crate::resume::{done, end, killed_often, recipe, same};
use serde_json::Value;
use std::path::Path;

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
        match path.is_dir() {
            true => copy(&path, &to),
            false => drop(std::fs::copy(&path, &to).unwrap()),
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
