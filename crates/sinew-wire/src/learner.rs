//! The trainer of a run: new, from a checkpoint, or as a worker of another process.
//!
//! With `train.data_parallel`, this program starts itself as workers. A worker reads the recipe from its
//! parent and makes the same model; it has no engine, no environment and no run folder.

use crate::failure::Failure;
use crate::model::{loaded_params, renderer};
use crate::{Session, clock, plan, scoring};
use sinew_algo::Algorithm;
use sinew_model::Params;
use sinew_pipeline::{EmbeddedLearner, PipelineError, RunEvent, SavedState, TrainProgress};
use sinew_project::{Resume, RunDir};
use sinew_recipe::RunPlan;
use sinew_tensor::Cpu;
use std::path::Path;

/// A trainer at step 0 with the models that score for it. `files` are the tokenizer and template that each
/// checkpoint gets, so that it can be loaded as a model.
///
/// # Errors
/// If `train.lora` is wrong, or a reference or teacher cannot be loaded or has another vocabulary.
pub(crate) fn learner(
    recipe: &RunPlan,
    dir: &RunDir,
    device: &Cpu,
    params: Params,
    algorithm: &Algorithm,
    files: Vec<(String, Vec<u8>)>,
) -> Result<EmbeddedLearner, Failure> {
    let scorers = scoring::scoring_models(recipe, algorithm.needs(), device, &params)?;
    let config = plan::learner(recipe, dir.path())?;
    Ok(EmbeddedLearner::new(
        config,
        device,
        params,
        scorers,
        files,
        clock(),
    )?)
}

/// Goes back to the last good checkpoint, if there is one; without one the run begins anew.
///
/// # Errors
/// If the recipe of the checkpoint differs in more than `resume` allows, or no checkpoint can be read.
pub(crate) fn restore(
    learner: &mut EmbeddedLearner,
    recipe: &RunPlan,
    dir: &RunDir,
    resume: &Resume,
) -> Result<SavedState, Failure> {
    let unreadable = |e: &dyn std::fmt::Display| {
        PipelineError::System(format!("{}: {e}", dir.checkpoints().display()))
    };
    let state = learner.restore(|state| {
        let old = state["recipe"].as_str().unwrap_or_default();
        if old.is_empty() {
            return Ok(());
        }
        let old = RunPlan::saved(old).map_err(|e| unreadable(&e))?;
        let changes = dir.check_changes(&old, recipe, resume);
        changes.map_err(|e| PipelineError::Input(e.to_string()))
    })?;
    let saved = state.map_or_else(|| Ok(SavedState::default()), SavedState::read);
    Ok(saved.map_err(|e| unreadable(&e))?)
}

/// Reports the progress of training steps on the bus, and ends them between micro-batches when the run is
/// asked to stop. `earlier_s` is the wall time of sessions before this one.
pub(crate) fn follow(learner: &mut EmbeddedLearner, session: &Session<'_>, earlier_s: f64) {
    let (bus, started) = (session.bus.clone(), session.started);
    learner.follow(session.cancel.clone(), move |p| {
        // Only viewers read it: nothing can fail.
        let _ = bus.emit(RunEvent::Train(TrainProgress {
            micro_batch: p.micro_batch,
            micro_batches: p.micro_batches,
            update: p.update + 1,
            updates: p.updates,
            wall_s: earlier_s + started.elapsed().as_secs_f64(),
        }));
    });
}

/// A worker of `train.data_parallel`: computes its share of each gradient until its parent closes the
/// connection. The recipe comes from the parent, which has checked it.
///
/// # Errors
/// If the model cannot be made again from the recipe, or no parent talks to this process.
pub fn train_worker() -> Result<(), Failure> {
    Ok(sinew_pipeline::work(|run, device| {
        let load = || -> Result<_, Failure> {
            let recipe = RunPlan::parse(Path::new("recipe of the run"), run);
            let recipe = recipe.map_err(Failure::input)?;
            let renderer = renderer(&recipe.model, &recipe.env)?;
            let params = loaded_params(&recipe, renderer.as_ref())?;
            Ok(plan::policy(&recipe)?.trainer(device, params, clock())?)
        };
        load().map_err(|e| PipelineError::System(e.text().to_owned()))
    })?)
}
