//! The real cores under virtual time: whole-system tests, and plans of clusters that nobody has
//! to build first.
//!
//! | part | purpose |
//! |---|---|
//! | [`Plan`] | what is simulated: a TOML file, presets, distributions of a recorded run |
//! | `world` | the system: cores that are real, and models of what takes time |
//! | `engine` | engines: curves of time by batch, or the embedded engine's scheduler |
//! | `check` | invariants at every event, and faults that show that they can be broken |
//! | `search` | seeded schedules with failures, and the smallest plan that still fails |
//! | `measure`, `report` | what a plan comes to, as text, JSON and SVG |
//! | `advise` | what to buy next, by simulating it |
//! | `record` | distributions of a recorded run |
//! | `calibrate` | how far predictions are from recorded runs |
//! | [`Calibration`] | measured times as a file, in the place of a plan's |
//! | `scaled` | counts that follow the work, next to fixed ones |
//! | [`GpuPlan`] | memory of a trainer and an engine on GPUs, and the way out where it is too little |
//! | `published` | set-ups of papers, with their figures and ours |
//!
//! Invariants: a simulation is a function of its plan; no clock is read and nothing is drawn from outside.
//! The cores are those that a run uses, and do not depend on the simulation.

mod advise;
mod agenda;
mod calibrate;
mod calibration;
mod check;
mod dist;
mod engine;
mod gpu;
mod measure;
mod plan;
mod published;
mod report;
mod scaled;
mod search;
mod world;

pub use advise::advise;
pub use calibrate::{Costs, ObservedRun, Prediction, Updates, WORKER_SLOTS, calibrate, median};
pub use calibration::{Calibration, EngineTimes, Lengths, ToolTimes, TrainerTimes, WeightsTimes};
pub use check::{Bug, Violation};
pub use dist::{Dist, Form, Lognormal, MAX_VALUES, Pareto};
pub use gpu::{
    Adapters, AttentionMemory, Checkpointing, ComputeType, EngineBytes, EngineSetup, GpuPlan, Gpus,
    KeyNames, PlanRow, TrainerBytes, TrainerSetup,
};
pub use measure::{
    Cost, Gauge, Percentiles, Report, RoleScaling, RoleUse, Tail, Throughput, Utilization, Variant,
    Work,
};
pub use plan::record::RecordedRun;
pub use plan::{
    Autoscale, Burst, Engines, Episode, Fault, FaultKind, HopTimes, Link, Memory, Mode, Model,
    PRESETS, Plan, PlanError, Preemption, PriceStep, Prices, Role, RoleKind, Rollout, Run, Scoring,
    Store, Tools, Trainer, Weights, preset,
};
pub use published::{Claim, SimulatedClaim, claims};
pub use report::{bottleneck, svg, table, text};
pub use scaled::{SizedRun, compare_sizes};
pub use search::{Failure, find, random_plan, replay, shrink};

use std::sync::Arc;
use world::{End, World};

/// Simulates a plan with the invariants held at every event if `checks`.
///
/// # Errors
/// The invariant that does not hold.
pub fn simulate(plan: &Plan, checks: bool) -> Result<Report, Violation> {
    let mut plan = plan.clone();
    plan.apply_roles();
    let mut world = World::new(Arc::new(plan), checks, None);
    match world.run() {
        End::Broken(violation) => Err(violation),
        End::Done | End::Time => Ok(world.report()),
    }
}
