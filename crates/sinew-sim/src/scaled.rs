//! A plan whose counts follow the work, next to the same plan without losses and with fixed counts.

use crate::measure::Report;
use crate::plan::Plan;
use crate::{Violation, simulate};
use serde::Serialize;

/// A way to size a cluster, and its result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SizedRun {
    /// The way, in words.
    pub sizes: String,
    /// Mean number of units whose count may change.
    pub units: f64,
    pub sampled_tokens_per_s: f64,
    /// Sampled tokens a second over those of the same plan without losses.
    pub of_capacity: f64,
    pub updates_per_h: f64,
    /// Rent of all machines for an hour, and trained tokens for one unit of the currency.
    pub per_hour: f64,
    pub trained_tokens_per_unit: f64,
    /// Changes of counts, and those of them in the other direction than the one before.
    pub changes: u64,
    pub reversals: u64,
}

impl SizedRun {
    fn of(sizes: &str, plan: &Plan, report: &Report, capacity: f64) -> Self {
        let scaled = || report.roles.iter().filter_map(|role| role.scaling);
        let fixed = plan.roles.iter().map(|role| role.count as f64).sum();
        let has_scaled = scaled().next().is_some();
        let rest = plan.roles.iter().filter(|role| !role.is_scaled());
        let rest: f64 = rest.map(|role| role.count as f64).sum();
        let t = &report.throughput;
        Self {
            sizes: sizes.to_owned(),
            units: if has_scaled {
                rest + scaled().map(|s| s.mean).sum::<f64>()
            } else {
                fixed
            },
            sampled_tokens_per_s: t.sampled_tokens_per_s,
            of_capacity: t.sampled_tokens_per_s / capacity.max(1e-9),
            updates_per_h: t.updates_per_h,
            per_hour: report.cost.per_hour,
            trained_tokens_per_unit: report.cost.trained_tokens_per_unit,
            changes: scaled().map(|s| s.changes).sum(),
            reversals: scaled().map(|s| s.reversals).sum(),
        }
    }
}

/// Simulates a plan with `[autoscale]` without its losses, and with fixed counts: those at the start, and the
/// most. The first row is the plan's own `report`.
///
/// # Errors
/// Same as of [`simulate`].
pub fn compare_sizes(plan: &Plan, report: &Report) -> Result<Vec<SizedRun>, Violation> {
    let mut calm = plan.clone();
    calm.roles
        .iter_mut()
        .for_each(|role| role.preemptible = None);
    let calm_report = simulate(&calm, false)?;
    let capacity = calm_report.throughput.sampled_tokens_per_s;
    let mut rows = vec![
        SizedRun::of("autoscaled", plan, report, capacity),
        SizedRun::of("autoscaled, without losses", &calm, &calm_report, capacity),
    ];
    for (sizes, most) in [
        ("fixed at the first counts", false),
        ("fixed at the most", true),
    ] {
        let fixed = plan.fixed(most);
        rows.push(SizedRun::of(
            sizes,
            &fixed,
            &simulate(&fixed, false)?,
            capacity,
        ));
    }
    Ok(rows)
}
