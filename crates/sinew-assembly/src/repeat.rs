//! Steps of a run, done again in a copy of its folder from the episodes that its commits name.

use crate::failure::Failure;
use crate::step_changes::StopAfter;
use crate::store::{database_of, disk_store};
use crate::{Invocation, ServeAt, Session, pipeline, tasks};
use sinew_judge::Bench;
use sinew_orchestrator::{Bus, Goal, StepRecord};
use sinew_pipeline::run;
use sinew_recipe::{RolloutPlace, RunPlan, StorePlan};
use sinew_runs::{Resume, RunDir, checkpoint_of, copy_before, store_path};
use sinew_train::checkpoint::weights_hash;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use tokio::runtime::Handle;
use tokio::sync::watch;

/// Tables that do not change a repeated step: it runs no episodes, takes the stored scores, and writes to its
/// own store.
const NOT_RUN: [&str; 5] = ["env", "tasks", "reward", "judge", "store"];

/// Steps that were done again.
#[derive(Debug)]
pub struct RepeatReport {
    /// Step of the checkpoint that they began with; 0: the first weights.
    pub from: u64,
    /// Records of the repeated steps, in order.
    pub records: Vec<StepRecord>,
    /// The inputs of the run that have changed, a line each.
    pub changed: Vec<String>,
    /// Hash of the weights after the last step, then and now; `None`: no checkpoint of it is kept.
    pub weights: Option<(String, String)>,
}

/// Repeats the steps of a run up to `step`, from the newest checkpoint before it, in a copy at `copy` outside
/// the run. The steps train on the committed episodes and run none, so tables that only episodes need may
/// have changed. `allow_change` names other keys that may.
///
/// # Errors
/// If the run keeps no episodes, a part of it is gone or not what it was, or the copy cannot be made.
pub fn repeat_steps(
    run_dir: &Path,
    copy: &Path,
    step: u64,
    allow_change: &[String],
    runtime: Handle,
    cancel: watch::Receiver<bool>,
) -> Result<RepeatReport, Failure> {
    let from = copy_before(run_dir, copy, step);
    let from = from.map_err(|e| Failure::system(format!("{}: {e}", copy.display())))?;
    // People may have edited `recipe.toml` since.
    let began = copy.join("began.toml");
    if began.is_file() {
        let restored = std::fs::copy(&began, copy.join("recipe.toml"));
        restored.map_err(|e| Failure::system(format!("{}: {e}", began.display())))?;
    }
    let mut recipe = crate::environments::recipe_of(copy)?;
    // Its episodes are in the store.
    recipe.rollout.place = RolloutPlace::Here;
    copy_episodes(run_dir, copy, &mut recipe)?;
    let allow_change = allow_change.iter().cloned();
    let resume = Resume {
        allow_change: allow_change.chain(NOT_RUN.map(str::to_owned)).collect(),
    };
    let dir = RunDir::open(copy, &recipe, Some(&resume)).map_err(Failure::input)?;
    let (bus, stop) = (Bus::default(), StopAfter::new(step));
    bus.record(Box::new(stop.clone()));
    let session = Session {
        dir: &dir,
        resume: Some(&resume),
        tasks: tasks(&recipe)?,
        runtime,
        bus,
        cancel: cancel.clone(),
        stop: watch::channel(false).0,
        stop_ordered: Arc::default(),
        bench: Bench::default(),
        started: Instant::now(),
        serve: ServeAt::default(),
    };
    let how = Invocation {
        goal: Goal::Train,
        command: "replay",
        accept_loss: false,
        adapter: None,
    };
    let (pipeline, _) = pipeline(&recipe, how, session)?;
    match run(pipeline) {
        Ok(_) => {}
        Err(e) if e.is_interrupt() && !*cancel.borrow() => {}
        Err(e) => return Err(e.into()),
    }
    let hash = |folder: &Path| -> Result<Option<String>, Failure> {
        let checkpoint = checkpoint_of(folder, step).map_err(Failure::system)?;
        let hash = checkpoint.map(|c| weights_hash(&c)).transpose();
        hash.map_err(Failure::system)
    };
    let records = stop.records().into_iter();
    Ok(RepeatReport {
        from,
        changed: stop.warnings(),
        records: records.filter(|r| r.step > from).collect(),
        weights: hash(run_dir)?.zip(hash(copy)?),
    })
}

/// Copies episodes that are in a database into the folder of the copy: the steps commit again, which the
/// run's own store must not see.
fn copy_episodes(run_dir: &Path, copy: &Path, recipe: &mut RunPlan) -> Result<(), Failure> {
    let Some(episodes) = database_of(run_dir)? else {
        return Ok(());
    };
    let folder = disk_store(&store_path(copy), false).map_err(Failure::system)?;
    let copied = sinew_store::copy(episodes.as_ref(), &folder, &mut |_| {});
    copied.map_err(Failure::system)?;
    recipe.store = StorePlan::default();
    Ok(())
}
