//! The parts of a worker: environments, harness, sandboxes, rewards, renderer and engine as the owner of the
//! run would make them. The recipe comes from the owner; files that it names must be here as well.

use crate::env::in_run_world;
use crate::environments::ENVIRONMENTS;
use crate::failure::Failure;
use crate::found_engines::{self, WorkerEngines};
use crate::live::{self, WorkerGateway};
use crate::model::{check_context, model_config, renderer};
use crate::owner::{BUILD, parts as own_parts};
use crate::run_pins::{reward_versions, versions};
use crate::servers::sampling_engine;
use crate::{ServeAt, Session, device, engine, episode_parts, plan, run_info, tasks, tinker};
use sinew_judge::Bench;
use sinew_orchestrator::Bus;
use sinew_recipe::{EngineType, RunPlan};
use sinew_render::Renderer;
use sinew_rollout::{EpisodeOptions, EpisodeParts};
use sinew_runs::RunDir;
use sinew_tensor::Cpu;
use sinew_types::{Engine, WeightsId};
use sinew_workers::{
    DeskClient, EngineFinder, FollowParts, Following, LiveAgents, Loaded, MirrorError,
    PublishedMark, RunTerms, WeightsMirror, WeightsOrigin, WorkerWeights, at_service, first_mark,
    first_weights,
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
    /// Token of the owner, which the engines of its registry have as well.
    pub token: String,
    /// Engines that a rollout worker samples with.
    pub engines: WorkerEngines,
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

sinew_types::debug_fields!(WorkerOptions, weights_dir);

/// A worker's parts of one run.
pub struct WorkerRun {
    /// Runs episodes.
    pub episode: EpisodeParts,
    /// Options of the run's episodes.
    pub options: EpisodeOptions,
    /// The recipe of the owner.
    pub recipe: RunPlan,
    /// Weights of the engine.
    pub weights: WorkerWeights,
    /// Agents that open rollouts at this worker by themselves, if the run trains those.
    pub agents: Option<Arc<dyn LiveAgents>>,
    /// Turns true when a budget of the recipe's judges is spent.
    pub spent: watch::Receiver<bool>,
    /// Follows the owner's weights while it lives.
    _following: Option<Following>,
    /// Finds engines while it lives.
    _finder: Option<EngineFinder>,
    /// Serves agents while it lives.
    gateway: Option<WorkerGateway>,
    _dir: RunDir,
    /// Holds what episodes leave on disk.
    _scratch: TempDir,
}

sinew_types::debug_fields!(WorkerRun, episode);

impl WorkerRun {
    /// The run is over: agents that ask while the worker ends hear that they need not wait for it.
    pub fn run_is_over(&self) {
        self.gateway.iter().for_each(WorkerGateway::run_is_over);
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
    let recipe = recipe_of(terms)?;
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
    let roles = options.engines.are_roles(&recipe)?;
    let made = match () {
        () if roles => found(owner, options, &recipe)?,
        () => sampler(owner, terms, options, &recipe, &renderer, &device)?,
    };
    let Some(made) = made else {
        return Ok(None);
    };
    let (envs, shown) = (world.envs, renderer.as_ref());
    let mut info = run_info(&recipe, dir.path(), envs.as_ref(), shown, &device, rewards);
    if roles {
        // Those of the engines may be others.
        info.provenance.kernels = None;
    }
    let wait = world.sandbox_wait;
    let engine = &made.engine;
    let episode = episode_parts(&recipe, &session, info, engine, &renderer, envs, wait)?;
    let options = plan::trained_options(&recipe);
    let gateway = live::on_worker(&recipe, &session, &episode, &options, owner)?;
    drop(session);
    let agents = gateway.as_ref().map(WorkerGateway::agents);
    Ok(Some(WorkerRun {
        episode,
        options,
        recipe,
        weights: made.weights,
        agents,
        spent,
        _following: made.following,
        _finder: made.finder,
        gateway,
        _dir: dir,
        _scratch: scratch,
    }))
}

/// The recipe of an owner. Its program must be this one: another may not even read it.
fn recipe_of(terms: &RunTerms) -> Result<RunPlan, Failure> {
    terms
        .check(BUILD, &terms.parts)
        .map_err(|e| Failure::outside(format!("--owner: {e}")))?;
    let place = Path::new("recipe of the owner");
    Ok(RunPlan::parse(place, &terms.recipe, ENVIRONMENTS)?)
}

/// The engine of a worker, and what keeps its weights new.
struct WorkerEngine {
    engine: Arc<dyn Engine>,
    weights: WorkerWeights,
    following: Option<Following>,
    finder: Option<EngineFinder>,
}

/// Engines of the registry. `None`: the worker was asked to end before there were weights.
fn found(
    owner: &Arc<DeskClient>,
    options: &WorkerOptions,
    recipe: &RunPlan,
) -> Result<Option<WorkerEngine>, Failure> {
    let (token, stop) = (options.token.as_str(), options.stop.as_ref());
    let found = found_engines::find(owner, token, recipe, options.patience, stop)?;
    Ok(found.map(|found| WorkerEngine {
        engine: Arc::<sinew_engines::RemoteEngine>::clone(&found.engine),
        weights: WorkerWeights::Found(found.engine),
        following: None,
        finder: Some(found.finder),
    }))
}

/// An engine in this process that follows the owner's weights, samplers of a service, or the servers of the
/// recipe, which the owner gives new weights. `None`: the worker was asked to end before there were any.
fn sampler(
    owner: &Arc<DeskClient>,
    terms: &RunTerms,
    options: &WorkerOptions,
    recipe: &RunPlan,
    renderer: &Arc<dyn Renderer>,
    device: &Cpu,
) -> Result<Option<WorkerEngine>, Failure> {
    if recipe.engine.kind == EngineType::Tinker {
        return at_the_service(owner, options, recipe);
    }
    if !terms.weights {
        return Ok(Some(WorkerEngine {
            engine: sampling_engine(&recipe.engine, renderer)?,
            weights: WorkerWeights::Servers,
            following: None,
            finder: None,
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
    let origin = WeightsOrigin::Folder { mirror, follower };
    following(owner, Arc::new(engine), (first.id(), mark), origin).map(Some)
}

/// Samplers of a service. The owner names the address of each version there.
fn at_the_service(
    owner: &Arc<DeskClient>,
    options: &WorkerOptions,
    recipe: &RunPlan,
) -> Result<Option<WorkerEngine>, Failure> {
    let mark = first_mark(owner, options.patience, options.stop.as_ref());
    let Some(mark) = mark.map_err(Failure::outside)? else {
        return Ok(None);
    };
    let (id, tensors) = at_service(&mark).map_err(outside)?;
    let engine = tinker::engine(recipe, tinker::shape(recipe)?.vocab, id, tensors)?;
    following(owner, engine, (id, mark), WeightsOrigin::Service).map(Some)
}

/// Lets an engine, which has the first weights, follow the owner.
fn following(
    owner: &Arc<DeskClient>,
    engine: Arc<dyn Engine>,
    (id, first): (WeightsId, PublishedMark),
    origin: WeightsOrigin,
) -> Result<WorkerEngine, Failure> {
    let loaded = Loaded::default();
    loaded.set(id, &first.manifest);
    let following = Following::start(FollowParts {
        owner: Arc::clone(owner),
        origin,
        first,
        engine: Arc::clone(&engine),
        loaded: loaded.clone(),
    });
    Ok(WorkerEngine {
        engine,
        weights: WorkerWeights::Followed(loaded),
        following: Some(following.map_err(Failure::system)?),
        finder: None,
    })
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
    /// Number of token ids of its model.
    pub vocab: usize,
    /// Its weights.
    pub loaded: Loaded,
    /// The recipe of the owner.
    pub recipe: RunPlan,
    /// Follows the owner's weights while it lives.
    _following: Option<Following>,
}

sinew_types::debug_fields!(FollowedEngine, loaded);

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
    let recipe = recipe_of(terms)?;
    if !terms.weights {
        return Err(Failure::input(
            "--role engine: the engines of this run are servers, which get their weights from its owner\n  hint: add \
             their addresses to engine.url of the recipe",
        ));
    }
    let renderer = renderer(&recipe.model, &recipe.env)?;
    let device = device()?;
    let made = sampler(owner, terms, options, &recipe, &renderer, &device)?;
    let Some(made) = made else { return Ok(None) };
    let WorkerWeights::Followed(loaded) = made.weights else {
        return Err(Failure::system("--role engine: the engine follows no weights"));
    };
    Ok(Some(FollowedEngine {
        engine: made.engine,
        renderer,
        vocab: model_config(&recipe)?.vocab,
        loaded,
        recipe,
        _following: made.following,
    }))
}
