//! The script that generates tasks in the format of Harbor, and those that compare and measure on them.

use crate::{root, run_ok};
use std::process::Command;

#[test]
fn generated_tasks_are_solved_by_their_solutions_and_by_nothing_else() {
    let tests = root().join("python/tests/harbor_tasks.py");
    let said = run_ok(Command::new("python3").arg(tests));
    assert_eq!(said.lines().last(), Some("ok"), "{said}");
}
