//! Advises which resource to buy next: simulates the plan again with one more unit of each kind.
//!
//! Draws do not depend on sizes, so a difference comes from the purchase and not from other episodes.

use crate::measure::{Report, Variant};
use crate::plan::{Mode, Plan, RoleKind};
use crate::{Violation, simulate};

/// Something that can be bought.
type Change = fn(&mut Plan);

/// Named changes to try.
fn changes(plan: &Plan) -> Vec<(String, Change)> {
    let engines: Change = |p| {
        p.engines.count += 1;
        p.add_units(RoleKind::Engine, 1);
    };
    let sandboxes: Change = |p| {
        let more = p.tools.sandboxes.div_ceil(4).max(1);
        p.tools.sandboxes += more;
        p.rollout.in_flight = p.rollout.in_flight.max(p.tools.sandboxes);
        let quarter = |kind| p.roles_of(kind).next().map_or(0, |r| r.count.div_ceil(4));
        let (hosts, workers) = (quarter(RoleKind::Sandbox), quarter(RoleKind::Rollout));
        p.add_units(RoleKind::Sandbox, hosts);
        p.add_units(RoleKind::Rollout, workers);
    };
    let trainer: Change = |p| {
        let faster = (p.trainer.devices + 1.0) / p.trainer.devices;
        p.trainer.devices += 1.0;
        p.trainer.tokens_per_s *= faster;
    };
    let scorers: Change = |p| {
        p.scoring.scorers += p.scoring.scorers.div_ceil(4);
        let first = p.roles_of(RoleKind::Scorer).next();
        let more = first.map_or(0, |r| r.count.div_ceil(4));
        p.add_units(RoleKind::Scorer, more);
    };
    let tools: Change = |p| p.tools.call_s = p.tools.call_s.scaled(0.75);
    let mut changes = vec![
        ("one engine more".to_owned(), engines),
        ("a quarter more sandboxes".to_owned(), sandboxes),
        ("a quarter more scorers".to_owned(), scorers),
        ("tools in three quarters of the time".to_owned(), tools),
    ];
    if !plan.trainer.colocated {
        changes.push(("one trainer device more".to_owned(), trainer));
    }
    if plan.run.mode == Mode::Async {
        changes.push(("one update more of staleness".to_owned(), |p| {
            p.run.max_staleness += 1;
        }));
    }
    changes
}

/// Simulates the plan with one thing more of each kind; the largest gain first. A further device of the
/// trainer adds its full share: the simulation has no loss for more devices.
///
/// # Errors
/// Same as of [`simulate`].
pub fn advise(plan: &Plan, report: &mut Report) -> Result<(), Violation> {
    let before = report.throughput.updates_per_h;
    let mut variants = Vec::new();
    for (what, change) in changes(plan) {
        let mut more = plan.clone();
        change(&mut more);
        let after = simulate(&more, false)?;
        variants.push(Variant {
            what,
            updates_per_h: after.throughput.updates_per_h,
            gain: if before > 0.0 {
                after.throughput.updates_per_h / before
            } else {
                1.0
            },
            cost_per_update: after.cost.per_update,
        });
    }
    variants.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    report.next = variants;
    Ok(())
}
