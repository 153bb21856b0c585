//! The scripts that generate tasks in the format of Harbor, compare rewards with Harbor's and measure the
//! gain.

use crate::{root, run_ok};
use std::process::Command;

/// Runs a file of `python/tests`, whose last line is `ok`.
fn passes(file: &str) {
    let tests = root().join("python/tests").join(file);
    let said = run_ok(Command::new("python3").arg(tests));
    assert_eq!(said.lines().last(), Some("ok"), "{said}");
}

#[test]
fn generated_tasks_are_solved_by_their_solutions_and_by_nothing_else() {
    passes("harbor_tasks.py");
}

#[test]
fn rewards_are_compared_and_gains_have_intervals() {
    passes("harbor_scripts.py");
}
