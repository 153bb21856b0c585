//! The trainer of a run: new, from a checkpoint, or as a worker of another process.
//!
//! If `train.data_parallel` is set, this program starts itself as workers. A worker reads the recipe from its
//! parent and makes the same model; it has no engine, no environment and no run folder.

use crate::environments::ENVIRONMENTS;
use crate::failure::Failure;
use crate::first_weights::FirstWeights;
use crate::lineage::{self, SessionOrigin};
use crate::model::{loaded_params, renderer};
use crate::run_pins::RunPins;
use crate::start_model::StartWeights;
use crate::start_shape::StartShape;
use crate::tinker::{self, TinkerParts};
use crate::torch::{self, EngineSlot, TorchParts};
use crate::{Session, clock, plan, scoring, servers};
use sinew_algo::Algorithm;
use sinew_orchestrator::{PipelineError, RunEvent, TrainProgress};
use sinew_pipeline::{Learner, PolicyLearner, SavedState, SharedLearner};
use sinew_recipe::{Place, RunPlan};
use sinew_render::Renderer;
use sinew_runs::{Resume, RunDir, TokenSignals};
use sinew_tensor::Cpu;
use sinew_train::Policy;
use sinew_types::Fence;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Parts of a learner that are made before it.
pub(crate) struct LearnerParts<'a> {
    pub(crate) device: &'a Cpu,
    pub(crate) weights: StartWeights,
    pub(crate) shape: &'a StartShape,
    pub(crate) algorithm: &'a Algorithm,
    pub(crate) renderer: &'a Arc<dyn Renderer>,
    /// Fence of this process.
    pub(crate) fence: Fence,
}

/// A learner in the state in which its run begins or continues.
pub(crate) struct BegunLearner {
    pub(crate) learner: SharedLearner,
    pub(crate) saved: SavedState,
    /// The weights that engines begin with.
    pub(crate) first: FirstWeights,
    /// Place for the engine, if it takes turns with the trainer.
    pub(crate) turns: Option<EngineSlot>,
}

/// Creates a trainer with the models that score for it, in the state that it resumes from. From then on, its
/// inputs are pinned.
///
/// # Errors
/// If `train.lora` is wrong, or a reference or teacher cannot be loaded or has another vocabulary; of a
/// resumed run, if its recipe differs in more than was allowed.
pub(crate) fn begin(
    recipe: &RunPlan,
    pins: RunPins,
    parts: LearnerParts<'_>,
    session: &Session<'_>,
) -> Result<BegunLearner, Failure> {
    let fence = parts.fence;
    // Tokenizer and template, so that each checkpoint can be loaded as a model.
    let files = parts.renderer.files().map_err(Failure::system)?;
    let config = plan::learner(recipe, session.dir, fence.clone())?;
    let (device, needs) = (parts.device, parts.algorithm.needs());
    match parts.weights {
        StartWeights::Folder(model, settings) => {
            if settings.place == Place::Turns {
                servers::sleep(recipe, parts.renderer)?;
            }
            let begun = torch::trainer(
                &TorchParts {
                    recipe,
                    pinned: &pins.plan,
                    settings: &settings,
                    device,
                    model: &model,
                    shape: parts.shape,
                    needs,
                    fence: fence.number(),
                },
                session,
            )?;
            let (trainer, scorers) = (begun.trainer, begun.scorers);
            let learner = PolicyLearner::new(config, trainer, scorers, files)?;
            let started = start(learner, fence, recipe, pins, session)?;
            Ok(BegunLearner {
                turns: begun.turns,
                ..started
            })
        }
        StartWeights::Service(service) => {
            let parts = TinkerParts {
                recipe,
                pinned: &pins.plan,
                device,
                start: service,
                shape: parts.shape,
                needs,
            };
            let (trainer, scorers) = tinker::trainer(parts)?;
            let learner = PolicyLearner::new(config, trainer, scorers, files)?;
            start(learner, fence, recipe, pins, session)
        }
        StartWeights::Params(params) => {
            let scorers = scoring::scoring_models(&pins.plan, needs, device, &params)?;
            let worker = toml::to_string(&pins.plan).map_err(Failure::system)?;
            let policy = plan::policy(recipe)?;
            let processes = recipe.train.data_parallel;
            let trainer = policy.shared_trainer(processes, &worker, device, params, clock())?;
            let learner = PolicyLearner::new(config, trainer, scorers, files)?;
            start(learner, fence, recipe, pins, session)
        }
    }
}

/// Puts a learner into the state that its run resumes from, and connects it to the session.
///
/// # Errors
/// If the recipe of the checkpoint differs in more than was allowed, no checkpoint can be read, or the
/// weights cannot be had.
fn start<P: Policy + Send + 'static>(
    mut learner: PolicyLearner<P>,
    fence: Fence,
    recipe: &RunPlan,
    pins: RunPins,
    session: &Session<'_>,
) -> Result<BegunLearner, Failure> {
    let dir = session.dir;
    let saved = match session.resume {
        Some(resume) => {
            let saved = restore(&mut learner, recipe, dir, resume)?;
            let old = RunPlan::saved(&saved.recipe, ENVIRONMENTS).ok();
            let told = old.and_then(|o| plan::rescheduled(&o.train, &recipe.train, saved.step));
            if let Some(text) = told {
                session.bus.emit(RunEvent::Warning(text))?;
            }
            saved
        }
        None => SavedState::default(),
    };
    pins.keep(session, saved.step)?;
    follow(&mut learner, session, saved.wall_s);
    record_tokens(&mut learner, recipe, dir);
    let origin = SessionOrigin {
        fence: fence.number(),
        step: saved.step,
    };
    let first = FirstWeights {
        lineage: lineage::of_session(recipe, dir, origin)?,
        version: learner.version(),
        tensors: learner.weights()?,
        fence,
    };
    Ok(BegunLearner {
        learner: Arc::new(Mutex::new(learner)),
        saved,
        first,
        turns: None,
    })
}

/// Restores the last valid checkpoint, if there is one. Otherwise the run starts again.
///
/// # Errors
/// If the recipe of the checkpoint differs in more than `resume` allows, or no checkpoint can be read.
fn restore<P: Policy + Send>(
    learner: &mut PolicyLearner<P>,
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
        let old = RunPlan::saved(old, ENVIRONMENTS).map_err(|e| unreadable(&e))?;
        let changes = dir.check_changes(&old, recipe, resume);
        changes.map_err(|e| PipelineError::Input(e.to_string()))
    })?;
    let saved = state.map_or_else(|| Ok(SavedState::default()), SavedState::read);
    Ok(saved.map_err(|e| unreadable(&e))?)
}

/// Reports the progress of training steps on the bus, and ends them between micro-batches when the run is
/// asked to stop. `earlier_s` is the wall time of sessions before this one.
fn follow<P: Policy + Send>(learner: &mut PolicyLearner<P>, session: &Session<'_>, earlier_s: f64) {
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

/// Keeps advantage and ratio of trained tokens, if the recipe asks for it.
fn record_tokens<P: Policy + Send>(learner: &mut PolicyLearner<P>, recipe: &RunPlan, dir: &RunDir) {
    let keep = recipe.train.token_signals;
    if keep == 0 {
        return;
    }
    let signals = TokenSignals::new(dir.path(), keep);
    learner.record_rows(Box::new(move |step, rows, logprobs| {
        // Only viewers read it: the run continues.
        if let Err(error) = signals.write(step, rows, logprobs) {
            tracing::error!(step, %error, "train.token_signals: not written");
        }
    }));
}

/// A worker of `train.data_parallel`: computes its share of each gradient until its parent closes the
/// connection. The recipe comes from the parent, which has checked it.
///
/// # Errors
/// If the model cannot be made again from the recipe, or no parent talks to this process.
pub fn train_worker() -> Result<(), Failure> {
    Ok(sinew_pipeline::work(|run, device| {
        let load = || -> Result<_, Failure> {
            let recipe = RunPlan::parse(Path::new("recipe of the run"), run, ENVIRONMENTS);
            let recipe = recipe.map_err(Failure::input)?;
            let renderer = renderer(&recipe.model, &recipe.env)?;
            let params = loaded_params(&recipe, renderer.as_ref())?;
            Ok(plan::policy(&recipe)?.trainer(device, params, clock())?)
        };
        load().map_err(|e| PipelineError::System(e.text().to_owned()))
    })?)
}
