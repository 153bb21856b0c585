//! Set-ups of papers: the statements of docs/simulation.md about them hold.
//!
//! Each plan runs as it is, except the largest, of which an eighth runs. A simulation is a function of its
//! plan; the tolerances leave room for changes of the cores, and a larger one is to be written down.

use crate::root;
use sinew_sim::{Claim, Plan, claims, simulate};
use std::path::Path;

/// Allowed difference of a simulated gain from that of the documentation, as a share.
const DOCUMENTED: f64 = 0.05;

/// The same where an eighth of the set-up runs: fewer answers have a shorter tail.
const EIGHTH: f64 = 0.15;

/// A line of the table: what is stated, what was simulated, and how far apart they may be, in percent.
struct Line {
    gain: f64,
    within: f64,
}

/// The cells of the table, a line for each claim in order.
fn lines() -> Vec<Line> {
    let text = std::fs::read_to_string(root().join("docs/simulation.md")).unwrap();
    let (_, section) = text.split_once("## Set-ups of papers").unwrap();
    let rows = section.lines().filter(|l| l.starts_with("| ")).skip(1);
    let rows = rows.take(claims().len());
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let number = |cell: &str, ends: &str| -> f64 {
            let (number, _) = cell.split_once(ends).unwrap_or_else(|| panic!("{row}"));
            number.trim().parse().unwrap_or_else(|_| panic!("{row}"))
        };
        Line {
            gain: number(cells[3], "x"),
            within: number(cells[4], "%"),
        }
    })
    .collect()
}

/// Holds the claims of a system: each gain as it is measured, within a share of the documented one.
fn holds(system: &str, measure: impl Fn(Claim) -> f64, documented: f64) {
    let lines = lines();
    let all: Vec<(Claim, &Line)> = claims().into_iter().zip(&lines).collect();
    let own: Vec<_> = all.iter().filter(|(c, _)| c.system == system).collect();
    assert!(!own.is_empty() && all.len() == claims().len());
    for (claim, line) in own {
        let gain = measure(*claim);
        let what = format!("{system}, {}: {gain:.3}x", claim.what);
        let change = (gain / line.gain - 1.0).abs();
        assert!(change < documented, "{what}, documented {:.2}x", line.gain);
        let (least, most) = claim.published;
        let near = 1.0 - line.within / 100.0..=1.0 + line.within / 100.0;
        let off = if gain < least {
            gain / least
        } else {
            (gain / most).max(1.0)
        };
        assert!(near.contains(&off), "{what}, stated {least} to {most}");
    }
}

/// The gain of a set-up at its size.
fn full(claim: Claim) -> f64 {
    claim.measure().unwrap().gain
}

/// The gain with an eighth of the groups and of what works on them.
fn eighth(claim: Claim) -> f64 {
    let rate = |name: &str| {
        let mut plan = Plan::parse(Path::new(name), &format!("preset = \"{name}\"\n")).unwrap();
        plan.rollout.groups_per_update /= 8;
        plan.rollout.in_flight /= 8;
        plan.tools.sandboxes /= 8;
        plan.tools.starting /= 8;
        plan.engines.count /= 8;
        plan.trainer.tokens_per_s /= 8.0;
        simulate(&plan, false).unwrap().throughput.trained_per_s
    };
    rate(claim.preset) / rate(claim.baseline)
}

#[test]
fn gains_of_relax_are_as_documented() {
    holds("Relax", full, DOCUMENTED);
}

#[test]
fn gains_of_seer_are_as_documented() {
    holds("Seer", full, DOCUMENTED);
}

#[test]
fn gains_of_skyrl_are_as_documented() {
    holds("SkyRL-Agent", full, DOCUMENTED);
}

#[test]
fn gains_of_areal_are_as_documented() {
    holds("AReaL", eighth, EIGHTH);
}
