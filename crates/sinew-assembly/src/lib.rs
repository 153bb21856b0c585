//! Wiring: from a recipe's plan to engine, environment, rewards, store and trainer.
//!
//! This is the only crate in which concrete parts meet. Each file makes one part, and [`pipeline`] puts them
//! together; `sinew`, the command line, calls it. Each error is a [`Failure`], whose kind shows whose mistake
//! it is.
//!
//! | file | tables of the plan | makes |
//! |---|---|---|
//! | `model` | `model` | files, renderer, shape, first weights |
//! | `run_model` | `model` | models that runs made |
//! | `scoring` | `reference`, `teacher` | frozen models |
//! | `shape` | `model`, `reference`, `teacher` | sizes, for counting memory |
//! | `env` | `env` | tasks and environments |
//! | `harbor` | `sandbox` | tasks of a folder of Harbor, for checks |
//! | `harness` | `harness` | what drives the turns, and the gateway for programs |
//! | `listen` | none | TLS of listeners, trusted authorities |
//! | `launch` | `launch` | launchers, the supervisor of an owner, owners elsewhere |
//! | `launch_record`, `launch_jobs` | `launch` | the jobs of a run whose owner does not answer |
//! | `live` | `harness` | the gateway for agents that run already |
//! | `engine`, `servers` | `engine` | what generates tokens |
//! | `chat_server` | `rollout` | servers that only chat, for measurements |
//! | `admission` | `rollout` | bounds on episodes, and the gateway's part of it |
//! | `learner` | `train`, `critic` | the trainer |
//! | `tinker` | `trainer`, `engine` | training and sampling at a Tinker service |
//! | `sampling` | `rollout`, `engine` | what samples the episodes: this process, or workers |
//! | `owner` | `rollout` | the address of a run for workers and other roles |
//! | `worker` | all but those of training | the parts of a worker |
//! | `found_engines` | `engine`, `launch` | engines of the run's registry as that of a worker |
//! | `lineage` | all | the lineage of the weights that a session publishes |
//! | `source` | `data` | training data that exists already |
//! | `judge` | `judge` | models that grade, for `reward` |
//! | `store` | `store` | traces |
//! | `queue` | `data`, `reward` | queues of episodes, what scores their rows |
//! | `collect` | all but those of training | collections |
//! | `measure` | all but those of training | measurements of held-out tasks |
//! | `replay`, `repeat` | all | episodes that are run again, steps that are done again |
//! | `plan` | all | options of the loop and its parts |
//! | `tinker_service` | `trainer`, `engine` | the desk of a Tinker service |
//!
//! A function takes the tables that it uses where they are one or two, and the whole plan otherwise.
//!
//! # Invariants
//!
//! - Nothing here decides: it connects. The behaviour of a part is in the crate of the part.
//! - Refusals come in the order of their cost: before weights are loaded, all is checked that can be without.
//! - Every part is made once, and ends with the run; sandboxes are started only for those that need them.
//! - A failure has one of three causes: the recipe, the machine, or something outside.

mod adapter;
mod admission;
mod chat_server;
pub mod collection;
mod copy_store;
mod database;
mod device;
mod engine;
mod env;
mod environments;
mod expire;
mod failure;
mod first_weights;
mod found_engines;
mod harbor;
mod harness;
mod judge;
mod judge_settings;
mod launch;
mod launch_jobs;
mod launch_record;
mod learner;
pub mod levels;
mod lineage;
mod listen;
mod live;
mod measure;
mod model;
mod owner;
mod plan;
mod publish;
mod python;
mod queue;
mod repeat;
mod replay;
mod reward;
mod run_model;
mod run_pins;
mod sampling;
mod scoring;
mod servers;
mod shape;
mod source;
mod start_model;
mod start_shape;
mod step_changes;
mod store;
mod tinker;
mod tinker_service;
mod token;
mod torch;
mod worker;

pub use adapter::AdapterFolder;
pub use chat_server::{ChatServers, ServedUsage, served_usage};
pub use collection::{CollectOptions, check_collect, collection};
pub use copy_store::{StorePlace, copy_store};
pub use device::{device, kernels, precision};
pub use env::{OwnReward, Tasks, World, own_rewards, tasks, world};
pub use environments::{ENVIRONMENTS, recipe_of};
pub use expire::{Expiry, RemovedEpisodes, expire, versions};
pub use harbor::{harbor_environments, harbor_tasks};
pub use harness::{agents_folder, asks_model, check as check_harness, program_harness};
pub use judge::{judge, server_config};
pub use launch::{
    OwnerLaunch, control_address, control_limits, control_token, kubernetes_token_file, launch_on,
    launch_owner, launched_name, launcher, owner_url, supervise,
};
pub use launch_jobs::{EndedJob, end_jobs};
pub use learner::train_worker;
pub use listen::{
    CertificateFiles, TlsArgs, host_certificate, host_name, reached_at, trust_authorities,
};
pub use live::ServeAt;
pub use measure::{
    MeasureOptions, MeasuredServers, Measurement, dataset_files, measure, measurement, spread,
    trained_prompts,
};
pub use model::{
    chat_renderer, check_context, keep_renderer, loaded_params, model_config, renderer,
    renderer_of, resolve_env,
};
pub use plan::{Invocation, check_lora, dataset, facts, late_config, lora_config, sampling};
pub use queue::{
    FeedPlan, QueuedRollouts, RecipeScore, open_queue, place as queue_place, recipe_score,
};
pub use repeat::{RepeatReport, repeat_steps};
pub use replay::Replayer;
pub use run_model::{RunModel, origin, run_model, typed_source};
pub use scoring::{check as check_scoring, named as scoring_sources};
pub use servers::{check_trained, serve_engine};
pub use shape::{model_shape, scoring_shape};
pub use source::{check_gold, check_pool, check_queue, data_queue};
pub use step_changes::{StepChange, step_changes};
pub use store::{disk_store, import_rewards, run_reader, run_store};
pub use tinker::{check_service, is_at_service, key as service_key, service_model};
pub use tinker_service::{TenantSection, TinkerFile, TinkerOptions, tinker_desk};

pub use failure::Failure;
pub use found_engines::WorkerEngines;
pub use sinew_http::server::{Endpoint, Listener};
pub use token::{read_token, token_of};
pub use torch::torch_variables;
pub use worker::{FollowedEngine, WorkerOptions, WorkerRun, follow_engine, join};

use adapter::MeasuredAdapter;
use learner::LearnerParts;
use owner::{Owner, OwnerParts};
use run_pins::{ADAPTER, DATA, RunPins};
use sampling::Sampling;
use sinew_env::{EnvFactory, Split, Taskset};
use sinew_judge::Bench;
use sinew_orchestrator::{Bus, Goal, RunEvent};
use sinew_pipeline::{
    ChangedParts, CrossPolicy, EngineRollouts, GroupParts, GroupRewards, InboxScores, LateRewards,
    Pipeline, RolloutParts, RunStore, TurnSchedule,
};
use sinew_recipe::{EngineType, Order, RolloutPlan, RunPlan, TrainMode};
use sinew_render::Renderer;
use sinew_rollout::{EpisodeOptions, EpisodeParts, RunInfo, TurnOrder};
use sinew_runs::{Resume, RunDir};
use sinew_sandbox::SandboxWait;
use sinew_sources::Dataset;
use sinew_store::TraceStore;
use sinew_tensor::Cpu;
use sinew_types::{Clock, Component, Engine, Fidelity, Provenance};
use start_model::start_model;
use start_shape::StartShape;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use tokio::runtime::Handle;
use tokio::sync::watch;

/// Seconds since the first call: the clock that pure parts are given.
pub fn clock() -> Clock {
    let start = Instant::now();
    Box::new(move || start.elapsed().as_secs_f64())
}

/// The part of a trace's provenance that is the same for all episodes of a run: its name, environment,
/// chat template, tools, and the kernels and sandbox level where those matter.
fn run_info(
    recipe: &RunPlan,
    dir: &Path,
    envs: &dyn EnvFactory,
    renderer: &dyn Renderer,
    device: &Cpu,
    rewards: BTreeMap<String, String>,
) -> RunInfo {
    let name = dir.file_name().unwrap_or_default();
    let embedded = recipe.engine.kind == EngineType::Embedded;
    let sandboxed = recipe.env.needs().sandbox;
    RunInfo {
        name: name.to_string_lossy().into_owned(),
        provenance: Provenance {
            environment: Some(Component {
                name: envs.name().to_owned(),
                version: envs.version().to_owned(),
            }),
            chat_template: renderer.template_hash(),
            template: renderer.template_options().into_iter().collect(),
            tools: envs.tools().into_iter().chain(rewards).collect(),
            kernels: embedded.then(|| kernels(device)),
            sandbox: sandboxed.then(|| recipe.sandbox.level.name().into()),
            ..Provenance::default()
        },
        members: envs.members(),
    }
}

/// Process-specific parts of a run: those that do not come from the recipe.
pub struct Session<'a> {
    /// The run's folder, which this process holds.
    pub dir: &'a RunDir,
    /// Tasks, read before.
    pub tasks: Tasks,
    /// Allowed differences from the checkpoint; `None`: the run is new.
    pub resume: Option<&'a Resume>,
    /// Runs episodes, tools and the gateway; training has separate threads.
    pub runtime: Handle,
    /// Events of the run, for views and files.
    pub bus: Bus,
    /// Turns true when the run is asked to stop.
    pub cancel: watch::Receiver<bool>,
    /// Asks the run to stop.
    pub stop: watch::Sender<bool>,
    /// Set once `sinew stop` asked the run to stop.
    pub stop_ordered: Arc<AtomicBool>,
    /// Judges of the run: their stored decisions, and the run that a spent budget ends.
    pub bench: Bench,
    /// Time at which this session started. Wall times are measured from it.
    pub started: Instant,
    /// Address at which agents outside reach the run.
    pub serve: ServeAt,
}

impl std::fmt::Debug for Session<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// The parts that every episode of a run shares: one admission in front of the engine, and one source of
/// request ids for the built-in loop and the gateway. A program's harness starts its gateway here.
fn episode_parts(
    recipe: &RunPlan,
    session: &Session<'_>,
    mut run: RunInfo,
    engine: &Arc<dyn Engine>,
    renderer: &Arc<dyn Renderer>,
    envs: Arc<dyn EnvFactory>,
    sandbox_wait: Arc<SandboxWait>,
) -> Result<EpisodeParts, Failure> {
    let mut bounds = admission::config(&recipe.rollout, &recipe.harness);
    bounds.max_running = bounds
        .max_running
        .min(envs.capabilities().places.unwrap_or(usize::MAX));
    let mut parts = EpisodeParts::new(Arc::clone(engine), Arc::clone(renderer), envs, bounds);
    run.provenance.logprobs_unknown = matches!(engine.fidelity(), Fidelity::Evaluation { .. });
    parts.run = Arc::new(run);
    parts.sandbox_wait = sandbox_wait;
    let longest_first = recipe.rollout.order == Order::LongestFirst;
    parts.outlook = longest_first.then(Arc::default);
    parts.turn_order = match recipe.train.mode {
        TrainMode::Sync => TurnOrder::FewestFirst,
        TrainMode::OneStepOff | TrainMode::Async => TurnOrder::MostFirst,
    };
    parts.harness = harness::build(recipe, &parts, session)?;
    Ok(parts)
}

/// The training loop of a recipe with all its parts, and the renderer of its model. If [`Session::resume`] is
/// set, it begins at the last good checkpoint.
///
/// The order is that of the refusals: what is cheap to check comes before what loads weights, and the
/// engine, which copies them, comes last.
pub fn pipeline(
    recipe: &RunPlan,
    how: Invocation<'_>,
    session: Session<'_>,
) -> Result<(Pipeline, Arc<dyn Renderer>), Failure> {
    let (dir, device) = (session.dir, device()?);
    let adapter = how.adapter.map(MeasuredAdapter::read).transpose()?;
    let mut pins = RunPins::weights(recipe, &session)?;
    let renderer = kept(recipe, how.goal, dir)?;
    let world = env::in_run_world(recipe, dir.path(), &session.tasks, &session.bench)?;
    check_training_tasks(recipe, how.goal, world.taskset.as_ref())?;
    let data = plan::dataset(recipe, renderer.as_ref())?;
    let digest = data.as_ref().map(Dataset::digest);
    let adapted = adapter.as_ref().map(MeasuredAdapter::digest);
    let outside = [(DATA, digest), (ADAPTER, adapted)];
    pins.inputs(recipe, world.envs.as_ref(), &session, outside)?;
    let rewards = pins.rewards(recipe);
    let mut store = store::open_for(how.goal, &recipe.store, dir)?;
    let (weights, shape) = start_model(&pins.plan, renderer.as_ref(), dir.path())?;
    let algorithm = plan::algorithm(recipe)?;
    let config = plan::pipeline(recipe, how, dir, world.taskset.as_ref(), &algorithm)?;
    store.draws_per_step = config.core.draws_per_step();
    let owner = owner(recipe, &session, &pins, (how.goal, &store), &renderer)?;
    let parts = LearnerParts {
        device: &device,
        weights,
        shape: &shape,
        algorithm: &algorithm,
        renderer: &renderer,
        fence: store.fence.clone(),
    };
    let mut begun = learner::begin(recipe, pins, parts, &session)?;
    let grammars = engine::grammars(recipe.rollout.format.as_ref(), &renderer, shape.vocab)?;
    let (own, envs) = (engine::threads(recipe, &device), world.envs.as_ref());
    let run = run_info(recipe, dir.path(), envs, renderer.as_ref(), &own, rewards);
    let gold = source::Gold::new(&world.taskset, &world.envs, &renderer, run.clone());
    let source = source::source(recipe, data, gold, &grammars, &session)?;
    let mut late = late(recipe, &session);
    let sampling = Sampling {
        recipe,
        session: &session,
        device: &own,
        renderer: &renderer,
        grammars: &grammars,
        shape: &shape,
        store: &store,
        world,
        run,
        adapter,
        turns: plan::turns(recipe, &config.core),
    };
    let sampled = sampling.begin(&mut begun, owner, &mut late)?;
    described(&session, &shape, &own)?;
    let pipeline = Pipeline {
        config,
        algorithm: Arc::new(algorithm),
        rollouts: sampled.rollouts,
        groups: Some(Box::new(sampled.groups)),
        source: sampled.live.or(source),
        late,
        learner: begun.learner,
        transport: sampled.transport,
        store,
        grammars,
        bus: session.bus,
        saved: begun.saved,
        started: session.started,
    };
    Ok((pipeline, renderer))
}

/// The address of the run for workers and other roles, if it has one.
fn owner(
    recipe: &RunPlan,
    session: &Session<'_>,
    pins: &RunPins,
    (goal, store): (Goal, &RunStore),
    renderer: &Arc<dyn Renderer>,
) -> Result<Option<Owner>, Failure> {
    Owner::open(&OwnerParts {
        recipe,
        pinned: &pins.plan,
        session,
        goal,
        fence: &store.fence,
        versions: pins.versions(),
        renderer: renderer.as_ref(),
    })
}

/// Refuses to run training episodes of tasks that are all held out.
fn check_training_tasks(
    recipe: &RunPlan,
    goal: Goal,
    taskset: &dyn Taskset,
) -> Result<(), Failure> {
    let runs = recipe.data.is_none() && recipe.harness.live().is_none();
    if goal == Goal::Train && runs && taskset.is_empty(Split::Train) {
        return Err(Failure::input(format!(
            "tasks: all tasks of `{}` are held out, so there are none to train on
  hint: `sinew eval` measures them; \
             to train, set tasks.held_out below 1",
            taskset.name()
        )));
    }
    Ok(())
}

/// Returns the renderer of a run. The folder of the run keeps a copy from then on.
///
/// # Errors
/// If the recipe cannot be trained where that is the goal, the model cannot be found, or the folder cannot be
/// written.
fn kept(recipe: &RunPlan, goal: Goal, dir: &RunDir) -> Result<Arc<dyn Renderer>, Failure> {
    if goal == Goal::Train {
        check_trained(recipe)?;
    }
    let renderer = renderer(&recipe.model, &recipe.env)?;
    keep_renderer(dir.path(), renderer.as_ref())?;
    Ok(renderer)
}

/// Runs episodes with their parts, and scores their groups.
fn rollouts(
    session: &Session<'_>,
    parts: RolloutParts,
    renderer: &Arc<dyn Renderer>,
    traces: &Arc<dyn TraceStore>,
) -> (EngineRollouts, GroupRewards) {
    let (envs, taskset) = (&parts.episode.envs, &parts.taskset);
    let groups = groups(session, envs, taskset, renderer, traces);
    let (runtime, cancel) = (session.runtime.clone(), session.cancel.clone());
    let traces = Arc::clone(traces);
    (EngineRollouts::new(runtime, parts, traces, cancel), groups)
}

/// Parts for running episodes, and the settings for those in flight.
fn rollout_parts(
    recipe: &RunPlan,
    dir: &RunDir,
    episode: EpisodeParts,
    options: EpisodeOptions,
    taskset: Arc<dyn Taskset>,
    cross: Option<Arc<CrossPolicy>>,
    turns: Option<TurnSchedule>,
) -> RolloutParts {
    RolloutParts {
        episode,
        taskset,
        options,
        max_in_flight: recipe.rollout.max_in_flight,
        cross,
        in_flight: plan::in_flight(recipe, dir.path()),
        turns,
        changed: plan::changed(recipe.rollout.changed),
    }
}

/// Parts for running episodes of one policy that does not learn from them: stored ones stay as they are.
fn untrained_parts(
    rollout: &RolloutPlan,
    episode: EpisodeParts,
    taskset: &Arc<dyn Taskset>,
) -> RolloutParts {
    RolloutParts {
        episode,
        taskset: Arc::clone(taskset),
        options: plan::episode_options(rollout),
        max_in_flight: rollout.max_in_flight,
        cross: None,
        in_flight: None,
        turns: None,
        changed: ChangedParts::Keep,
    }
}

/// Scores that come after the episode, for recipes that wait for them.
fn late(recipe: &RunPlan, session: &Session<'_>) -> Option<LateRewards> {
    let config = plan::late_config(recipe)?;
    // A store in a database has no inbox: what comes from outside is put into the store itself.
    let scores = InboxScores::new(&session.dir.store(), session.cancel.clone());
    Some(LateRewards {
        config,
        scores: Box::new(scores),
    })
}

/// Scorer of groups, for environments with a reward of groups.
fn groups(
    session: &Session<'_>,
    envs: &Arc<dyn EnvFactory>,
    taskset: &Arc<dyn Taskset>,
    renderer: &Arc<dyn Renderer>,
    store: &Arc<dyn TraceStore>,
) -> GroupRewards {
    let parts = GroupParts {
        envs: Arc::clone(envs),
        renderer: Arc::clone(renderer),
        taskset: Arc::clone(taskset),
        store: Arc::clone(store),
    };
    GroupRewards::new(session.runtime.clone(), parts, session.cancel.clone())
}

/// Reports model and machine to the views, in one line.
fn described(session: &Session<'_>, model: &StartShape, device: &Cpu) -> Result<(), Failure> {
    let line = format!(
        "{}, vocabulary {}; kernels {}, {} threads",
        model.words,
        model.vocab,
        kernels(device),
        device.threads()
    );
    Ok(session.bus.emit(RunEvent::Described(line))?)
}
