//! The parts of a worker: environments, harness, sandboxes, rewards, renderer and engine as the owner of the
//! run would make them. The recipe comes from the owner; files that it names must be here as well.

use crate::env::in_run_world;
use crate::environments::ENVIRONMENTS;
use crate::failure::Failure;
use crate::model::{check_context, model_config, renderer};
use crate::owner::{BUILD, parts as own_parts};
use crate::run_pins::{reward_versions, versions};
use crate::servers::sampling_engine;
use crate::{ServeAt, Session, device, engine, episode_parts, plan, run_info, tasks};
use sinew_judge::Bench;
use sinew_orchestrator::Bus;
use sinew_recipe::RunPlan;
use sinew_render::Renderer;
use sinew_rollout::{EpisodeOptions, EpisodeParts};
use sinew_runs::RunDir;
use sinew_tensor::Cpu;
use sinew_types::Engine;
use sinew_workers::{
    DeskClient, FollowParts, Following, Loaded, MirrorError, RunTerms, WeightsMirror, first_weights,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::runtime::Handle;
use tokio::sync::watch;

/// Folder in the memory of this host, if it has one.
const MEMORY: &str = "/dev/shm";

/// Settings of a worker from the command line.
pub struct WorkerOptions {
    /// Folder of this host for weights of the owner; `None`: in its memory, by the run's name.
    pub weights_dir: Option<PathBuf>,
    /// Gateway for services that the recipe drives.
    pub serve: ServeAt,
    /// Longest wait for the first weights.
    pub patience: Duration,
    /// Episodes are tasks of it.
    pub runtime: Handle,
    /// Whether the worker is asked to end.
    pub stop: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl std::fmt::Debug for WorkerOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerOptions")
            .field("weights_dir", &self.weights_dir)
            .finish_non_exhaustive()
    }
}

/// A worker's parts of one run.
pub struct WorkerRun {
    /// Runs episodes.
    pub episode: EpisodeParts,
    /// Options of the run's episodes.
    pub options: EpisodeOptions,
    /// The recipe of the owner.
    pub recipe: RunPlan,
    /// Weights of the engine; `None`: servers outside.
    pub loaded: Option<Loaded>,
    /// Turns true when a budget of the recipe's judges is spent.
    pub spent: watch::Receiver<bool>,
    /// Follows the owner's weights while it lives.
    _following: Option<Following>,
    _dir: RunDir,
    /// Holds what episodes leave on disk.
    _scratch: TempDir,
}

impl std::fmt::Debug for WorkerRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerRun")
            .field("episode", &self.episode)
            .finish_non_exhaustive()
    }
}

/// Makes a worker's parts for the run of an owner. `None`: the worker was asked to end before.
///
/// # Errors
/// If the program or a part has another version than the owner's, a file that the recipe names is missing
/// here, or the weights cannot be had.
pub fn join(
    owner: &Arc<DeskClient>,
    terms: &RunTerms,
    options: &WorkerOptions,
) -> Result<Option<WorkerRun>, Failure> {
    // Before anything is read: another program may not even read the recipe.
    if terms.build != BUILD {
        terms
            .check(BUILD, &terms.parts)
            .map_err(|e| Failure::outside(format!("--owner: {e}")))?;
    }
    let recipe = RunPlan::parse(
        Path::new("recipe of the owner"),
        &terms.recipe,
        ENVIRONMENTS,
    )?;
    let scratch = tempfile::Builder::new().prefix("sinew-worker-").tempdir();
    let scratch = scratch.map_err(|e| Failure::system(format!("folder of a worker: {e}")))?;
    let dir = RunDir::open(&scratch.path().join(&terms.run), &recipe, None)?;
    let (stop, spent) = watch::channel(false);
    let session = Session {
        dir: &dir,
        resume: None,
        tasks: tasks(&recipe)?,
        runtime: options.runtime.clone(),
        bus: Bus::default(),
        cancel: spent.clone(),
        stop: stop.clone(),
        stop_ordered: Arc::default(),
        bench: Bench::of_run(dir.path(), stop),
        started: Instant::now(),
        serve: options.serve.clone(),
    };
    let renderer = renderer(&recipe.model, &recipe.env)?;
    let world = in_run_world(&recipe, dir.path(), &session.tasks, &session.bench)?;
    let named = versions(&recipe, world.envs.as_ref(), &session.tasks.digests)?;
    let rewards = reward_versions(&recipe, &named);
    terms
        .check(BUILD, &own_parts(named, renderer.as_ref()))
        .map_err(|e| Failure::outside(format!("--owner: {e}")))?;
    let device = engine::threads(&recipe, &device()?);
    let Some(made) = sampler(owner, terms, options, &recipe, &renderer, &device)? else {
        return Ok(None);
    };
    let (envs, shown) = (world.envs, renderer.as_ref());
    let info = run_info(&recipe, dir.path(), envs.as_ref(), shown, &device, rewards);
    let wait = world.sandbox_wait;
    let engine = &made.engine;
    let episode = episode_parts(&recipe, &session, info, engine, &renderer, envs, wait)?;
    drop(session);
    Ok(Some(WorkerRun {
        episode,
        options: plan::trained_options(&recipe),
        recipe,
        loaded: made.loaded,
        spent,
        _following: made.following,
        _dir: dir,
        _scratch: scratch,
    }))
}

/// The engine of a worker, and what keeps its weights new.
pub(crate) struct WorkerEngine {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) loaded: Option<Loaded>,
    pub(crate) following: Option<Following>,
}

/// An engine in this process that follows the owner's weights, or the servers of the recipe, which the owner
/// gives new weights. `None`: the worker was asked to end before there were any.
pub(crate) fn sampler(
    owner: &Arc<DeskClient>,
    terms: &RunTerms,
    options: &WorkerOptions,
    recipe: &RunPlan,
    renderer: &Arc<dyn Renderer>,
    device: &Cpu,
) -> Result<Option<WorkerEngine>, Failure> {
    if !terms.weights {
        return Ok(Some(WorkerEngine {
            engine: sampling_engine(&recipe.engine, renderer)?,
            loaded: None,
            following: None,
        }));
    }
    let config = model_config(recipe)?;
    check_context(recipe.rollout.max_context_tokens, config.max_context)?;
    let format = recipe.rollout.format.as_ref();
    let grammars = engine::grammars(format, renderer, config.vocab)?;
    let mirror = WeightsMirror::open(&weights_dir(options, terms)).map_err(outside)?;
    let mut follower = mirror.follower();
    let stop = options.stop.as_ref();
    let first = first_weights(owner, &mirror, &mut follower, options.patience, stop);
    let Some((first, mark)) = first.map_err(outside)? else {
        return Ok(None);
    };
    let model = engine::EngineModel {
        config: &config,
        version: first.version(),
        weights: &first,
    };
    let renderer = renderer.as_ref();
    let (section, rollout) = (&recipe.engine, &recipe.rollout);
    let engine = engine::embedded(section, rollout, device, &model, renderer, &grammars)?;
    let engine: Arc<dyn Engine> = Arc::new(engine);
    let loaded = Loaded::default();
    loaded.set(first.id());
    let following = Following::start(FollowParts {
        owner: Arc::clone(owner),
        mirror,
        follower,
        first: mark,
        engine: Arc::clone(&engine),
        loaded: loaded.clone(),
    });
    Ok(Some(WorkerEngine {
        engine,
        loaded: Some(loaded),
        following: Some(following.map_err(Failure::system)?),
    }))
}

/// The folder of this host for weights of a run.
fn weights_dir(options: &WorkerOptions, terms: &RunTerms) -> PathBuf {
    let named = format!("sinew-{}", terms.id);
    match &options.weights_dir {
        Some(dir) => dir.clone(),
        None if Path::new(MEMORY).is_dir() => Path::new(MEMORY).join(named),
        None => std::env::temp_dir().join(named),
    }
}

fn outside(error: MirrorError) -> Failure {
    match error {
        MirrorError::Io { .. } => Failure::system(error),
        error => Failure::outside(error),
    }
}

/// An engine in this process that follows the weights of a run.
pub struct FollowedEngine {
    /// The engine.
    pub engine: Arc<dyn Engine>,
    /// Tokenizer and chat template of its model.
    pub renderer: Arc<dyn Renderer>,
    /// Its weights.
    pub loaded: Loaded,
    /// The recipe of the owner.
    pub recipe: RunPlan,
    /// Follows the owner's weights while it lives.
    _following: Option<Following>,
}

impl std::fmt::Debug for FollowedEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FollowedEngine")
            .field("loaded", &self.loaded)
            .finish_non_exhaustive()
    }
}

/// Makes an engine that follows the weights of an owner. `None`: the process was asked to end before there
/// were any.
///
/// # Errors
/// If the program is another one than the owner's, the run has servers as engines, or the weights cannot be
/// had.
pub fn follow_engine(
    owner: &Arc<DeskClient>,
    terms: &RunTerms,
    options: &WorkerOptions,
) -> Result<Option<FollowedEngine>, Failure> {
    terms
        .check(BUILD, &terms.parts)
        .map_err(|e| Failure::outside(format!("--owner: {e}")))?;
    if !terms.weights {
        return Err(Failure::input(
            "--role engine: the engines of this run are servers, which get their weights from its owner\n  hint: add \
             their addresses to engine.url of the recipe",
        ));
    }
    let recipe = RunPlan::parse(
        Path::new("recipe of the owner"),
        &terms.recipe,
        ENVIRONMENTS,
    )?;
    let renderer = renderer(&recipe.model, &recipe.env)?;
    let device = device()?;
    let made = sampler(owner, terms, options, &recipe, &renderer, &device)?;
    let made = made.and_then(|made| Some((made.engine, made.loaded?, made.following)));
    Ok(made.map(|(engine, loaded, following)| FollowedEngine {
        engine,
        renderer,
        loaded,
        recipe,
        _following: following,
    }))
}
