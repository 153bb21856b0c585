//! From a recipe to a plan of the simulation: the same file that is trained and launched.
//!
//! A recipe says how many episodes run and what starts them, but neither how long turns are nor how fast an
//! engine is. What is assumed for that is said, and `--calibration` puts measured times in its place.

use clap::Args;
use serde_json::json;
use sinew_assembly::{ENVIRONMENTS, Failure};
use sinew_recipe::{
    EngineType, LaunchOn, LaunchPlan, Order, RoleSection, RolloutPlace, RunPlan, TrainMode,
};
use sinew_sim::{
    Autoscale, Calibration, Link, Mode, Model, Plan, Preemption, Role, RoleKind, WORKER_SLOTS,
};
use std::path::Path;

/// Updates that are simulated of a recipe with more steps.
const UPDATES: u64 = 20;
/// Mean seconds until a preemptible role is lost, unless --preempt-s says another number.
const PREEMPT_S: f64 = 7200.0;
/// Host of roles that are not child processes of the run.
const CLUSTER: &str = "cluster";
/// Seconds until a role works that the run starts as its child, and that a cluster starts.
const START_S: (f64, f64) = (3.0, 60.0);

/// Facts for `sinew sim RECIPE` that a recipe does not have.
#[derive(Debug, Args)]
pub(crate) struct RecipeArgs {
    /// Updates to simulate; default: train.steps of a recipe, at most 20
    #[arg(long, value_name = "N", requires = "plan")]
    pub(super) updates: Option<u64>,
    /// Mean seconds until a preemptible role of a recipe is lost; default: 7200
    #[arg(long, value_name = "SECONDS", requires = "plan")]
    preempt_s: Option<f64>,
    /// Milliseconds one way between the run and the roles of a recipe that others than `local` start
    #[arg(long, value_name = "MS", requires = "plan")]
    latency_ms: Option<f64>,
    /// Megabits a second between them
    #[arg(long, value_name = "MBIT", requires = "plan")]
    mbit_per_s: Option<f64>,
}

impl RecipeArgs {
    /// Refuses what a plan says itself.
    pub(super) fn refuse_for_plans(&self) -> Result<(), Failure> {
        let given = [
            ("--preempt-s", self.preempt_s),
            ("--latency-ms", self.latency_ms),
            ("--mbit-per-s", self.mbit_per_s),
        ];
        match given.iter().find(|(_, value)| value.is_some()) {
            Some((option, _)) => Err(Failure::input(format!(
                "{option}: is for recipes; a plan has [[role]] with preemptible, and [[link]]"
            ))),
            None => Ok(()),
        }
    }
}

/// A plan, and what was assumed for it.
pub(super) struct Planned {
    pub(super) plan: Plan,
    pub(super) assumed: Vec<String>,
}

/// Whether a file is a recipe: a plan has none of these keys.
pub(super) fn is_recipe(text: &str) -> bool {
    let table: toml::Table = text.parse().unwrap_or_default();
    ["model", "algorithm", "env", "launch"]
        .iter()
        .any(|key| table.contains_key(*key))
}

/// The plan of a recipe.
///
/// # Errors
/// If the recipe is refused, or its plan is.
pub(super) fn planned(
    path: &Path,
    args: &RecipeArgs,
    measured: Option<&Calibration>,
) -> Result<Planned, Failure> {
    let recipe = RunPlan::load(path, ENVIRONMENTS).map_err(Failure::input)?;
    let mut assumed = Vec::new();
    let mut plan = Plan {
        name: recipe.name.clone(),
        seed: recipe.seed,
        ..Plan::default()
    };
    sizes(&recipe, args, &mut plan);
    lengths(&recipe, measured, &mut plan, &mut assumed);
    engines(&recipe, &mut plan);
    if let Some(launch) = &recipe.launch {
        roles(&recipe, launch, args, &mut plan, &mut assumed);
    }
    place(&recipe, &mut plan, &mut assumed);
    if let Some(measured) = measured {
        measured.lay_over(&mut plan).map_err(Failure::input)?;
        share_cores(&recipe, measured, &mut plan, &mut assumed);
    } else {
        assumed.push("times of engines, trainer and weights: defaults of a plan".to_owned());
    }
    let plan = plan.checked().map_err(Failure::input)?;
    Ok(Planned { plan, assumed })
}

/// Mode and sizes of updates.
fn sizes(recipe: &RunPlan, args: &RecipeArgs, plan: &mut Plan) {
    let (r, t) = (&recipe.rollout, &recipe.train);
    plan.run.mode = match t.mode {
        TrainMode::Sync => Mode::Sync,
        TrainMode::OneStepOff => Mode::OneStepOff,
        TrainMode::Async => Mode::Async,
    };
    plan.run.max_staleness = recipe.max_staleness().max(1);
    let steps = t.steps.clamp(2, UPDATES);
    plan.run.updates = args.updates.unwrap_or(steps);
    plan.run.checkpoint_every = t.checkpoint_every.max(1);
    plan.rollout.groups_per_update = r.tasks_per_step;
    plan.rollout.group_size = r.group_size;
    plan.rollout.in_flight = r.max_in_flight;
    plan.rollout.over_sample = r.over_sample;
    plan.rollout.timeout_s = r.episode_timeout_s;
    plan.rollout.longest_first = r.order == Order::LongestFirst;
    plan.episode.max_context_tokens = r.max_context_tokens as usize;
    plan.tools.sandboxes = r.max_in_flight;
    plan.tools.starting = r.max_starting.unwrap_or(64).min(r.max_in_flight);
    plan.scoring.scorers = r.max_in_flight;
    plan.scoring.score_s = 0.0.into();
}

/// Lengths of episodes. A recipe has their limits only.
fn lengths(
    recipe: &RunPlan,
    measured: Option<&Calibration>,
    plan: &mut Plan,
    assumed: &mut Vec<String>,
) {
    if measured.is_some_and(|m| m.episode.turns.is_some() && m.episode.turn_tokens.is_some()) {
        return;
    }
    let r = &recipe.rollout;
    let (turns, context) = (f64::from(r.max_turns), f64::from(r.max_context_tokens));
    let turn = f64::from(r.max_turn_tokens) / 2.0;
    let prompt = (context / 4.0).max(1.0);
    let between = ((context - prompt - turns * turn) / turns / 4.0).max(1.0);
    plan.episode.turns = turns.into();
    plan.episode.turn_tokens = turn.max(1.0).into();
    plan.episode.prompt_tokens = prompt.into();
    plan.episode.observation_tokens = between.floor().max(1.0).into();
    assumed.push(format!(
        "episodes of {turns:.0} turns of {turn:.0} tokens after a prompt of {prompt:.0}: half and a \
         quarter of the limits"
    ));
}

/// Sizes of the engine of the recipe.
fn engines(recipe: &RunPlan, plan: &mut Plan) {
    let own = &recipe.engine;
    let e = &mut plan.engines;
    (e.max_running, e.max_batched_tokens) = (own.max_num_seqs, own.max_batched_tokens);
    if own.kind == EngineType::Embedded {
        (e.count, e.model, e.kv_tokens) = (1, Model::Scheduler, own.kv_tokens);
        // The trainer has the same cores.
        plan.trainer.colocated = plan.run.mode == Mode::Sync;
    } else {
        e.count = own.urls().len().max(1);
    }
}

fn kind_of(name: &str) -> Option<RoleKind> {
    Some(match name {
        "rollout" => RoleKind::Rollout,
        "engine" => RoleKind::Engine,
        "trainer" => RoleKind::Trainer,
        "sandbox" => RoleKind::Sandbox,
        "scorer" => RoleKind::Scorer,
        _ => return None,
    })
}

/// The roles of `[launch]`.
fn roles(
    recipe: &RunPlan,
    launch: &LaunchPlan,
    args: &RecipeArgs,
    plan: &mut Plan,
    assumed: &mut Vec<String>,
) {
    let is_local = launch.on == LaunchOn::Local;
    for (name, section) in launch.roles() {
        let Some(kind) = kind_of(name).filter(|_| section.count > 0) else {
            continue;
        };
        let mut role = role(recipe, kind, section, is_local);
        if section.preemptible && kind != RoleKind::Scorer {
            let mean_s = args.preempt_s.unwrap_or(PREEMPT_S);
            role.preemptible = Some(Preemption {
                mean_s,
                every_s: 0.0,
                share: 0.0,
                notice_s: 30.0,
            });
            assumed.push(format!(
                "each {name} is lost on the mean after {mean_s} s, known 30 s before (--preempt-s)"
            ));
        }
        plan.roles.push(role);
    }
    if let Some(scale) = &launch.autoscale {
        plan.autoscale = Some(Autoscale {
            queue: scale.queue,
            idle_s: scale.idle_s,
            cooldown_s: scale.cooldown_s,
            max_cost_per_hour: scale.max_cost_per_hour,
        });
    }
    if !is_local && !plan.roles.is_empty() {
        if args.latency_ms.is_none() && args.mbit_per_s.is_none() {
            assumed.push("no time between hosts (--latency-ms, --mbit-per-s)".to_owned());
        } else {
            plan.links.push(Link {
                from: "local".to_owned(),
                to: CLUSTER.to_owned(),
                latency_ms: args.latency_ms.unwrap_or(0.0),
                mbit_per_s: args.mbit_per_s,
            });
        }
    }
}

fn role(recipe: &RunPlan, kind: RoleKind, section: &RoleSection, is_local: bool) -> Role {
    let launch = recipe.launch.as_ref();
    // Without engines in the registry, workers of a run with an embedded engine have one each.
    let own_engines = recipe.engine.kind == EngineType::Embedded
        && launch.is_none_or(|launch| launch.engine.is_none());
    let count = section.count as usize;
    let scales = matches!(
        kind,
        RoleKind::Engine | RoleKind::Rollout | RoleKind::Sandbox
    );
    let bound = |bound: Option<u32>| bound.filter(|_| scales).map(|n| n as usize);
    Role {
        kind,
        count,
        host: if is_local { "local" } else { CLUSTER }.to_owned(),
        capacity: match kind {
            RoleKind::Rollout => Some(recipe.rollout.max_in_flight.min(WORKER_SLOTS)),
            RoleKind::Sandbox => Some(recipe.sandbox.max_sandboxes),
            RoleKind::Engine | RoleKind::Trainer | RoleKind::Scorer => None,
        },
        price_per_hour: section.price_per_hour,
        start_s: if is_local { START_S.0 } else { START_S.1 },
        min: bound(section.min),
        max: bound(section.max),
        with_engine: kind == RoleKind::Rollout && own_engines,
        preemptible: None,
        prices: Vec::new(),
    }
}

/// The place of episodes: `rollout.place`.
fn place(recipe: &RunPlan, plan: &mut Plan, assumed: &mut Vec<String>) {
    let has_workers = plan.roles.iter().any(|role| role.kind == RoleKind::Rollout);
    if !recipe.on_workers(has_workers) {
        plan.roles.retain(|role| role.kind != RoleKind::Rollout);
    } else if !has_workers && recipe.rollout.place == RolloutPlace::Workers {
        assumed.push(
            "rollout.place = \"workers\" without [launch.rollout]: one worker, as people start it"
                .to_owned(),
        );
        let section = RoleSection::default();
        plan.roles
            .push(role(recipe, RoleKind::Rollout, &section, true));
    }
    // The bounds of a role that is gone would be refused.
    if !plan.roles.iter().any(|role| role.max.is_some()) {
        plan.autoscale = None;
    }
    if plan.roles.iter().any(|role| role.kind == RoleKind::Rollout) {
        plan.trainer.colocated = false;
    }
}

/// Engines of one host share its cores, unless the times were measured so.
fn share_cores(
    recipe: &RunPlan,
    measured: &Calibration,
    plan: &mut Plan,
    assumed: &mut Vec<String>,
) {
    let local =
        |role: &&Role| (role.with_engine || role.kind == RoleKind::Engine) && role.host == "local";
    let sharing: usize = plan.roles.iter().filter(local).map(|role| role.count).sum();
    let is_embedded = recipe.engine.kind == EngineType::Embedded;
    if sharing < 2 || !is_embedded || measured.hops.is_some() {
        return;
    }
    let by = sharing as f64;
    let e = &mut plan.engines;
    e.pass_s *= by;
    e.row_s *= by;
    e.kv_s *= by;
    e.prefill_tokens_per_s /= by;
    assumed.push(format!(
        "{sharing} engines share the cores on which one was measured: each is {by:.0} times as slow"
    ));
}

/// The parts of a plan that are the recipe's, for `--json`.
pub(super) fn described(plan: &Plan) -> serde_json::Value {
    json!({ "run": plan.run, "rollout": plan.rollout, "episode": plan.episode, "engines": plan.engines,
            "trainer": plan.trainer, "weights": plan.weights, "hops": plan.hops, "role": plan.roles,
            "link": plan.links, "autoscale": plan.autoscale })
}
