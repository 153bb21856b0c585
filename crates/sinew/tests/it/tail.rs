//! Steps whose longest episodes begin first, and steps that begin more groups than they train.

use crate::overlap::{copy, count};
use crate::resume::{done, end, killed_often, recipe, same};
use crate::steps;

/// The order in which episodes begin, turns in pieces and drafts change nothing that is sampled or trained.
#[test]
fn the_longest_first_in_pieces_is_the_same_run() {
    let dir = tempfile::tempdir().unwrap();
    let plain = recipe(dir.path(), 4, &[]);
    let run = dir.path().join("plain");
    let last = done(&plain, &run, &[]);
    let plain = end(&run, &last);
    let tail_aware = [
        ("rollout.order", "\"longest_first\""),
        ("rollout.chunk_tokens", "1"),
        ("rollout.max_in_flight", "5"),
        ("engine.speculative_tokens", "16"),
    ];
    let recipe = recipe(dir.path(), 4, &tail_aware);
    let run = dir.path().join("longest-first");
    let last = done(&recipe, &run, &[]);
    same("longest first", &plain, &end(&run, &last));
}

/// Killed at any instant, a run that stops groups loses nothing, counts what it stopped, and is repeated to
/// the bit from its commits.
#[test]
fn a_run_that_stops_groups_is_repeated_from_its_commits() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 6, &[("rollout.over_sample", "2")]);
    let run = dir.path().join("killed");
    let (last, kills) = killed_often(&recipe, &run, 3);
    assert!(kills > 0);
    assert_eq!(
        (count(&last, "lost"), count(&last, "trained_twice")),
        (0, 0)
    );
    let stopped: Vec<u64> = steps(&run)
        .iter()
        .map(|s| s["dropped"]["stopped: enough groups"].as_u64().unwrap_or(0))
        .collect();
    // Two groups of eight are stopped in two steps, and four that were put off are run in the third.
    assert_eq!(stopped, [16, 16, 0, 16, 16, 0]);
    let repeated = dir.path().join("repeated");
    copy(&run, &repeated);
    std::fs::remove_dir_all(repeated.join("checkpoints")).unwrap();
    let again = done(&recipe, &repeated, &["--resume"]);
    let (mut a, mut b) = (end(&run, &last), end(&repeated, &again));
    for end in [&mut a, &mut b] {
        // The last measurement is stored, and so is the training; what is left of the line is the same.
        end.1.as_object_mut().unwrap().remove("tokens");
    }
    same("repeated from the commits", &a, &b);
}
