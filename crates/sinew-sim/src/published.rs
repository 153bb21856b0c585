//! Set-ups of papers: their figures, and the simulated ones for their workloads.

use crate::measure::Report;
use crate::plan::{Plan, PlanError};
use crate::{Violation, simulate};
use serde::Serialize;
use std::path::Path;

/// A published gain of one set-up over another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Claim {
    /// System of the paper.
    pub system: &'static str,
    /// The comparison, in words.
    pub what: &'static str,
    /// Presets of the set-up and of what it is compared with.
    pub preset: &'static str,
    pub baseline: &'static str,
    /// Times as fast: the least and the most that is published.
    pub published: (f64, f64),
    /// Published seconds of a step, where they are.
    pub step_s: Option<(f64, f64)>,
}

/// A claim and the simulated figures for it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SimulatedClaim {
    pub claim: Claim,
    /// Trained episodes a second, compared.
    pub gain: f64,
    /// Mean seconds of an update of both.
    pub step_s: f64,
    pub baseline_step_s: f64,
}

/// The set-ups, in the order of the documentation.
pub fn claims() -> Vec<Claim> {
    vec![
        Claim {
            system: "AReaL",
            what: "asynchronous over its own synchronous mode, 1.5B, 128 GPUs",
            preset: "areal-async",
            baseline: "areal-sync",
            published: (2.77, 2.77),
            step_s: Some((53.3, 147.6)),
        },
        Claim {
            system: "Relax",
            what: "asynchronous over its own colocated mode, 4B, 16 GPUs",
            preset: "relax-async",
            baseline: "relax-colocate",
            published: (1.76, 1.76),
            step_s: Some((128.6, 225.9)),
        },
        Claim {
            system: "Relax",
            what: "over veRL, both one update behind, 4B, 16 GPUs",
            preset: "relax-async",
            baseline: "verl-async",
            published: (1.20, 1.20),
            step_s: Some((125.6, 150.5)),
        },
        Claim {
            system: "Seer",
            what: "rollouts over synchronous veRL, Moonlight, 32 GPUs",
            preset: "seer",
            baseline: "seer-baseline",
            published: (1.74, 1.97),
            step_s: None,
        },
        Claim {
            system: "SkyRL-Agent",
            what: "pipeline over waves of 64 agents, 32B, 16 GPUs",
            preset: "skyrl-pipeline",
            baseline: "skyrl-batch",
            published: (1.55, 1.55),
            step_s: None,
        },
    ]
}

impl Claim {
    /// Simulates both set-ups.
    ///
    /// # Errors
    /// An invariant that does not hold. Presets are plans: a test reads them.
    pub fn measure(self) -> Result<SimulatedClaim, Violation> {
        let run = |name: &str| -> Result<Report, Violation> {
            let plan = plan_of(name).map_err(|e| Violation::new("progress", e.to_string()))?;
            simulate(&plan, false)
        };
        let (ours, theirs) = (run(self.preset)?, run(self.baseline)?);
        Ok(SimulatedClaim {
            claim: self,
            gain: ours.throughput.trained_per_s / theirs.throughput.trained_per_s,
            step_s: ours.tail.step_s.mean,
            baseline_step_s: theirs.tail.step_s.mean,
        })
    }
}

/// The plan of a preset.
fn plan_of(name: &str) -> Result<Plan, PlanError> {
    let text = format!("name = \"{name}\"\npreset = \"{name}\"\n");
    Plan::parse(Path::new(name), &text)
}
