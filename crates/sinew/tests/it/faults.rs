//! One fault of each kind against a run of real processes: nothing is lost, nothing is left behind.
#![cfg(feature = "full")]

use crate::{json_lines, root};
use serde_json::Value;
use std::process::Command;

/// Faults that `benches/faults.py` injects into runs. The last two need rights that not every machine gives.
const KINDS: [&str; 10] = [
    "process", "trainer", "spawner", "sandbox", "scorer", "memory", "clock", "torn", "disk", "oom",
];

#[test]
fn a_fault_of_each_kind_costs_no_episode() {
    let mut command = Command::new("python3");
    command.arg(root().join("benches/faults.py"));
    command.arg(env!("CARGO_BIN_EXE_sinew"));
    let rounds = KINDS.len().to_string();
    command.args(["--json", "--steps", "6", "--seed", "3", "--rounds", &rounds]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}{text}");
    let rows = json_lines(&text);
    let (each, sums): (Vec<&Value>, Vec<&Value>) =
        rows.iter().partition(|row| row["round"].is_u64());
    assert_eq!(each.len(), KINDS.len(), "{text}");
    assert!(each.iter().all(|row| row["ok"] == true), "{text}");
    assert!(sums.iter().all(|sum| sum["bad"] == 0), "{text}");
    for kind in KINDS {
        let ran = each.iter().any(|row| row["kind"] == kind);
        let refused = KINDS[8..].contains(&kind) && errors.contains(&format!("{kind}: no "));
        assert!(ran || refused, "{kind}: {errors}");
    }
}
