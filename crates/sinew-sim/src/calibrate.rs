//! Errors of predictions for recorded runs.
//!
//! The plan of a run gets the sizes, lengths and latencies of that run. Least squares over the recorded
//! seconds of runs give the costs of an engine pass and of an update. Each run is predicted twice: with its
//! own costs, and with those of the other runs of its kind only, like a plan for a run that was not made yet.
//! The ratios between the costs of a single run are those of its kind.
//!
//! Runs are of one kind if generation and training share the machine in the same way: in turns, or at once.

use crate::measure::Report;
use crate::plan::record::{RecordedRun, Step, line};
use crate::plan::{Mode, Model, Plan, PlanError};
use crate::{Violation, simulate};
use serde::Serialize;
use std::path::Path;

/// Rounds of least squares, with the passes that the costs of the round before lead to.
const ROUNDS: usize = 2;
/// Sweeps over the costs of a pass in one round.
const SWEEPS: usize = 2000;
/// Seconds below which a tool takes no time.
const INSTANT_S: f64 = 0.001;
/// Runs of a kind from which costs of the others are used.
const OTHERS: usize = 2;
/// Costs of a pass, of a sampled token and of a token of a prompt before anything is known: a small
/// model on a processor.
const GUESS: Costs = Costs {
    pass_s: 0.002,
    row_s: 0.000_05,
    prompt_s: 0.000_05,
};

/// Costs of an engine's work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Costs {
    /// Seconds of a pass, whatever is in it.
    pub pass_s: f64,
    /// Seconds of a sequence in it.
    pub row_s: f64,
    /// Seconds of a token of a prompt.
    pub prompt_s: f64,
}

/// Costs of training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Updates {
    /// Seconds of an update, whatever is in it.
    pub fixed_s: f64,
    /// Seconds of a token.
    pub token_s: f64,
    /// Seconds until new weights sample.
    pub publish_s: f64,
    /// Seconds of a step in addition to rollouts, update, weights and checkpoints.
    pub other_s: f64,
}

/// A recorded run.
#[derive(Clone, Debug)]
pub struct ObservedRun {
    /// Name of the folder.
    pub name: String,
    /// Sizes, lengths and latencies are its own.
    plan: Plan,
    /// Recorded lengths and times.
    recorded: RecordedRun,
    /// Mean seconds from one update to the next.
    pub step_s: f64,
    /// Seconds that the engine computed, for each update.
    busy_s: f64,
}

/// One run, measured and predicted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// The run's folder.
    pub run: String,
    pub mode: Mode,
    /// Groups of an update, their size, and episodes at once.
    pub groups: usize,
    pub group_size: usize,
    pub in_flight: usize,
    /// Mean seconds from one update to the next.
    pub measured_s: f64,
    /// Prediction with the run's own costs; its relative error follows.
    pub own_s: f64,
    pub own_error: f64,
    /// Prediction with the costs of the other runs of its kind, if there are enough.
    pub others_s: Option<f64>,
    pub others_error: Option<f64>,
    /// Measured costs of the run.
    pub costs: Costs,
    pub updates: Updates,
}

/// Work of an engine, for each update.
#[derive(Clone, Copy, Debug)]
struct Work {
    passes: f64,
    rows: f64,
    prompts: f64,
    /// Seconds that this work took in the run.
    busy_s: f64,
}

impl Costs {
    /// The costs that fit all of the work best, none below 0: the least sum of squares of relative errors,
    /// by one cost after the other.
    fn fit(work: &[Work], from: Self) -> Self {
        let rows: Vec<[f64; 3]> = work
            .iter()
            .map(|w| [w.passes, w.rows, w.prompts].map(|v| v / w.busy_s.max(1e-9)))
            .collect();
        let mut costs = [from.pass_s, from.row_s, from.prompt_s];
        // First all of them by one factor, so that a single run keeps their ratios.
        let sum = |costs: &[f64; 3], row: &[f64; 3]| -> f64 {
            costs.iter().zip(row).map(|(c, v)| c * v).sum()
        };
        let sums: Vec<f64> = rows.iter().map(|row| sum(&costs, row)).collect();
        let square: f64 = sums.iter().map(|s| s * s).sum();
        let factor = sums.iter().sum::<f64>() / square.max(1e-300);
        costs.iter_mut().for_each(|c| *c *= factor);
        // Fewer runs than costs do not determine the ratios.
        let sweeps = if rows.len() > costs.len() { SWEEPS } else { 0 };
        for n in (0..sweeps).flat_map(|_| 0..3) {
            let under: f64 = rows.iter().map(|row| row[n] * row[n]).sum();
            let over: f64 = rows
                .iter()
                .map(|row| row[n] * (1.0 - sum(&costs, row) + costs[n] * row[n]))
                .sum();
            if under > 0.0 {
                costs[n] = (over / under).max(0.0);
            }
        }
        let [pass_s, row_s, prompt_s] = costs;
        Self {
            pass_s: pass_s.max(1e-9),
            row_s,
            prompt_s: prompt_s.max(1e-12),
        }
    }
}

impl ObservedRun {
    /// Reads the folder of a run with the embedded engine: its recipe, its store and its metrics.
    ///
    /// # Errors
    /// If one of them is missing, or there are fewer than 3 steps.
    pub fn read(run: &Path) -> Result<Self, PlanError> {
        let recorded = RecordedRun::read(run)?;
        let name = run.file_name().unwrap_or(run.as_os_str());
        let name = name.to_string_lossy().into_owned();
        let path = run.join("recipe.toml");
        let refused = |why: String| PlanError::Read {
            path: path.clone(),
            why,
        };
        let text = std::fs::read_to_string(&path).map_err(|e| refused(e.to_string()))?;
        let recipe: toml::Table = text.parse().map_err(|e| refused(format!("{e}")))?;
        let steps = &recorded.steps;
        let [first, .., last] = &steps[..] else {
            let why = format!("{} steps are recorded, allowed: 3 or more", steps.len());
            return Err(refused(why));
        };
        let intervals = (steps.len() - 1) as f64;
        let saved: f64 = steps[1..].iter().map(|s| s.checkpoint_s).sum();
        // Tools that take no time are not waited for: what looks so is the runner's work between passes.
        let calls = recorded.call_s.iter().sum::<f64>() / recorded.call_s.len().max(1) as f64;
        let busy = |s: &Step| {
            // On workers the engine waits for tickets and weights, too.
            if calls < INSTANT_S && recorded.hops().is_none() {
                s.waits.engine_busy_s + s.waits.engine_tools_s
            } else {
                s.waits.engine_busy_s
            }
        };
        let busy: f64 = steps[1..].iter().map(busy).sum();
        let mut plan = plan_of(&recipe);
        plan.name.clone_from(&name);
        plan.run.updates = steps.len().max(2) as u64;
        plan.rollout.no_signal = recorded.no_signal();
        recorded.fill(&mut plan, "")?;
        if recorded.hops().is_some() {
            on_workers(&recipe, &mut plan);
        }
        let e = &mut plan.episode;
        e.task_share = 0.0;
        Ok(Self {
            name,
            step_s: (last.wall_s - first.wall_s - saved) / intervals,
            // Records have the mean of the workers' engines.
            busy_s: busy / intervals * plan.engines.count as f64,
            plan,
            recorded,
        })
    }

    /// The plan of the run: its sizes, lengths, latencies and hops.
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Mean seconds of rollouts, training, publication and checkpoints of a step, as they were recorded. They
    /// overlap where training does.
    pub fn parts_s(&self) -> [(&'static str, f64); 4] {
        let steps = &self.recorded.steps;
        let count = steps.len().max(1) as f64;
        let mean = |of: fn(&Step) -> f64| steps.iter().map(of).sum::<f64>() / count;
        [
            ("rollouts", mean(|s| s.rollout_s)),
            ("training", mean(|s| s.train_s)),
            ("publication", mean(|s| s.publish_s)),
            ("checkpoints", mean(|s| s.checkpoint_s)),
        ]
    }

    /// Whether workers ran its episodes.
    pub(crate) fn has_hops(&self) -> bool {
        self.recorded.hops().is_some()
    }

    /// Generation and training run at once.
    fn overlaps(&self) -> bool {
        self.plan.run.mode != Mode::Sync
    }

    /// The run with these costs.
    fn simulate(&self, costs: Costs, updates: Updates) -> Result<Report, Violation> {
        let mut plan = self.plan.clone();
        let e = &mut plan.engines;
        (e.pass_s, e.row_s, e.kv_s) = (costs.pass_s, costs.row_s, 0.0);
        e.prefill_tokens_per_s = 1.0 / costs.prompt_s;
        plan.trainer.fixed_s = updates.fixed_s;
        plan.trainer.tokens_per_s = 1.0 / updates.token_s.max(1e-12);
        plan.weights.load_s = updates.publish_s;
        plan.weights.transfer_s = updates.other_s;
        simulate(&plan, false)
    }

    /// Work of the engine in the simulation, with the seconds that it took in the run.
    fn work(&self, report: &Report) -> Work {
        let each = |n: f64| n / report.updates.max(1) as f64;
        Work {
            passes: each(report.work.passes as f64),
            rows: each(report.work.sampled as f64),
            prompts: each(report.work.prefilled as f64),
            busy_s: self.busy_s,
        }
    }
}

/// Costs of updates over runs.
fn updates(runs: &[&ObservedRun]) -> Updates {
    let steps = || runs.iter().flat_map(|r| &r.recorded.steps);
    let count = steps().count().max(1) as f64;
    let tokens: Vec<f64> = runs
        .iter()
        .flat_map(|r| r.recorded.train_tokens.clone())
        .collect();
    let seconds: Vec<f64> = steps().map(|s| s.train_s).collect();
    let (fixed_s, token_s) = line(&tokens, &seconds);
    let others = runs.iter().flat_map(|r| {
        let pairs = r.recorded.steps.windows(2);
        // The parts of a step overlap in asynchronous modes, so no sum of them leaves the rest.
        pairs.filter(|_| !r.overlaps()).map(|pair| {
            let s = &pair[1];
            let known = s.rollout_s + s.train_s + s.publish_s + s.checkpoint_s;
            (s.wall_s - pair[0].wall_s - known).max(0.0)
        })
    });
    let others: Vec<f64> = others.collect();
    Updates {
        fixed_s,
        token_s,
        publish_s: steps().map(|s| s.publish_s).sum::<f64>() / count,
        other_s: others.iter().sum::<f64>() / others.len().max(1) as f64,
    }
}

/// Work of engines in runs of one kind, and costs that fit all of them: passes follow from costs, and costs
/// from passes.
fn work(runs: &[&ObservedRun]) -> Result<(Vec<Work>, Costs), Violation> {
    let updates = updates(runs);
    let (mut work, mut costs) = (Vec::new(), GUESS);
    for _ in 0..ROUNDS {
        work.clear();
        for run in runs {
            work.push(run.work(&run.simulate(costs, updates)?));
        }
        costs = Costs::fit(&work, costs);
    }
    Ok((work, costs))
}

/// Predicts each run: those in turns first, then those at once.
///
/// # Errors
/// If a simulation does not end.
pub fn calibrate(runs: &[ObservedRun]) -> Result<Vec<Prediction>, Violation> {
    let mut out = Vec::with_capacity(runs.len());
    for overlaps in [false, true] {
        let kind: Vec<&ObservedRun> = runs.iter().filter(|r| r.overlaps() == overlaps).collect();
        let (work, costs) = work(&kind)?;
        for n in 0..kind.len() {
            out.push(predict(&kind, &work, n, costs)?);
        }
    }
    Ok(out)
}

/// Predicts the `n`-th run of a kind. The ratios of a single run's costs are those of its kind.
fn predict(
    kind: &[&ObservedRun],
    work: &[Work],
    n: usize,
    ratios: Costs,
) -> Result<Prediction, Violation> {
    let run = kind[n];
    let own = (Costs::fit(&work[n..=n], ratios), updates(&kind[n..=n]));
    let step_s = |(costs, updates): (Costs, Updates)| -> Result<f64, Violation> {
        Ok(run.simulate(costs, updates)?.tail.step_s.mean)
    };
    let own_s = step_s(own)?;
    let without = |m: &usize| *m != n;
    let others: Vec<usize> = (0..kind.len()).filter(without).collect();
    let others_s = if others.len() >= OTHERS {
        let work: Vec<Work> = others.iter().map(|m| work[*m]).collect();
        let others: Vec<&ObservedRun> = others.iter().map(|m| kind[*m]).collect();
        Some(step_s((Costs::fit(&work, ratios), updates(&others)))?)
    } else {
        None
    };
    let error = |s: f64| (s / run.step_s - 1.0).abs();
    let r = &run.plan.rollout;
    Ok(Prediction {
        run: run.name.clone(),
        mode: run.plan.run.mode,
        groups: r.groups_per_update,
        group_size: r.group_size,
        in_flight: r.in_flight,
        measured_s: run.step_s,
        own_s,
        own_error: error(own_s),
        others_s,
        others_error: others_s.map(error),
        costs: own.0,
        updates: own.1,
    })
}

/// The middle one of some errors.
pub fn median(errors: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut errors: Vec<f64> = errors.into_iter().collect();
    errors.sort_by(f64::total_cmp);
    let last = errors.len().checked_sub(1)?;
    Some(0.5 * (errors[last / 2] + errors[last.div_ceil(2)]))
}

/// Sizes and modes of a run's recipe; other values are those of [`Plan`].
fn plan_of(recipe: &toml::Table) -> Plan {
    let key = |section: &str, key: &str| recipe.get(section).and_then(|s| s.get(key));
    let number = |section: &str, name: &str| {
        let value = key(section, name)?;
        value.as_float().or(value.as_integer().map(|n| n as f64))
    };
    let set = |to: &mut usize, section: &str, name: &str| {
        if let Some(value) = number(section, name) {
            *to = value.max(0.0) as usize;
        }
    };
    let mut plan = Plan::default();
    plan.run.mode = match key("train", "mode").and_then(toml::Value::as_str) {
        Some("one_step_off") => Mode::OneStepOff,
        Some("async") => Mode::Async,
        _ => Mode::Sync,
    };
    plan.run.max_staleness = number("train", "max_staleness").unwrap_or(1.0) as u64;
    let r = &mut plan.rollout;
    set(&mut r.groups_per_update, "rollout", "tasks_per_step");
    set(&mut r.group_size, "rollout", "group_size");
    set(&mut r.in_flight, "rollout", "max_in_flight");
    set(&mut r.over_sample, "rollout", "over_sample");
    let context = &mut plan.episode.max_context_tokens;
    set(context, "rollout", "max_context_tokens");
    // Sandboxes that are functions of this process take no time to start.
    let places = plan.rollout.in_flight;
    (plan.tools.sandboxes, plan.tools.starting) = (places, places);
    plan.tools.boot_s = 0.0.into();
    plan.scoring.scorers = places;
    plan.scoring.score_s = 0.0.into();
    let e = &mut plan.engines;
    (e.count, e.model, e.grain) = (1, Model::Scheduler, 1);
    set(&mut e.kv_tokens, "engine", "kv_tokens");
    set(&mut e.max_running, "engine", "max_num_seqs");
    set(&mut e.max_batched_tokens, "engine", "max_batched_tokens");
    plan.trainer.colocated = plan.run.mode == Mode::Sync;
    plan.weights.keep_kv = false;
    plan.store.commit_s = 0.0;
    plan
}

/// Episodes of a worker at once, at most, unless its command says otherwise.
pub const WORKER_SLOTS: usize = 32;

/// The sizes of a run whose episodes workers ran: engines, and places for episodes.
fn on_workers(recipe: &toml::Table, plan: &mut Plan) {
    let launch = recipe.get("launch").and_then(|l| l.get("rollout"));
    let count = launch.map(|r| r.get("count").and_then(toml::Value::as_integer));
    // A table without a count has one; without a table the number of workers is not known.
    let Some(count) = count else {
        return;
    };
    let number = |n: Option<i64>| n.map_or(1, |n| usize::try_from(n).unwrap_or(1)).max(1);
    let count = number(count);
    // Engines of the registry, where the recipe has them, else one of each worker.
    let engines = recipe.get("launch").and_then(|l| l.get("engine"));
    let engines = engines.map(|e| e.get("count").and_then(toml::Value::as_integer));
    plan.engines.count = engines.map_or(count, number);
    let slots = plan.rollout.in_flight.min(WORKER_SLOTS);
    plan.rollout.in_flight = plan.rollout.in_flight.min(count * slots);
    plan.tools.sandboxes = plan.rollout.in_flight;
    plan.tools.starting = plan.rollout.in_flight;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_found_again_and_a_single_run_keeps_their_ratios() {
        let real = Costs {
            pass_s: 0.003,
            row_s: 0.0001,
            prompt_s: 0.0002,
        };
        let work = |passes: f64, rows: f64, prompts: f64| Work {
            passes,
            rows,
            prompts,
            busy_s: real.pass_s * passes + real.row_s * rows + real.prompt_s * prompts,
        };
        let all = [
            work(10.0, 1000.0, 500.0),
            work(40.0, 800.0, 2000.0),
            work(12.0, 200.0, 100.0),
            work(80.0, 3000.0, 900.0),
            work(30.0, 100.0, 1500.0),
        ];
        let found = Costs::fit(&all, GUESS);
        for (found, real) in [
            (found.pass_s, real.pass_s),
            (found.row_s, real.row_s),
            (found.prompt_s, real.prompt_s),
        ] {
            assert!((found / real - 1.0).abs() < 0.02, "{found} {real}");
        }
        let one = Costs::fit(&all[..1], GUESS);
        assert!((one.pass_s / one.row_s - GUESS.pass_s / GUESS.row_s).abs() < 1e-9);
        let sum = one.pass_s * 10.0 + one.row_s * 1000.0 + one.prompt_s * 500.0;
        assert!((sum / all[0].busy_s - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_middle_of_errors() {
        assert_eq!(median([0.3, 0.1, 0.2]), Some(0.2));
        assert_eq!(median([0.1, 0.2, 0.4, 0.3]), Some(0.25));
        assert_eq!(median([]), None);
    }
}
