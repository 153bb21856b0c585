//! One run of the training loop: real rollouts, admission, core, driver, trainer and store;
//! only the engine can be a fake one, whose passes take a given time.
//!
//! The real parts: episodes are driven by the rollout's machine under the admission's bounds, groups are
//! scored by the algorithm, the driver of the mode carries the core's commands out, and every episode is
//! committed to a store before it counts. A model's weights are trained and published to the engine that
//! samples.
//!
//! The simplified parts: the vocabulary has eight letters, the model is tiny, and calls only wait. A run
//! therefore shows the costs and the overlap of the loop, not the speed of a model.
//!
//! Limits: an episode has at most an hour, and a store in memory 4 GiB. A run that fails ends the bench with
//! the error of its driver. All files are in the folder that the caller owns.

use super::ideal;
use super::timeline::{Timeline, Trains};
use super::world::{ALPHABET, TASKS, Tasks, World};
use crate::{BenchError, clock, model};
use sinew_algo::{Algorithm, AlgorithmConfig, RunFacts};
use sinew_grammar::Grammars;
use sinew_infer::{
    EmbeddedEngine, EngineConfig, FakeConfig, FakeEngine, FakeModel, ModelForward, SchedulerConfig,
};
use sinew_model::{Family, InferModel, ModelConfig, Params, Precision, RopeScaling};
use sinew_orchestrator::{
    Bus, CoreConfig, EvalConfig, Goal, Overlap, PipelineError, Recorder, RunEvent, SampleKind,
    StepRecord, TaskSampling,
};
use sinew_pipeline::{
    ChangedParts, EngineRollouts, LearnerConfig, Pipeline, PipelineConfig, PolicyConfig,
    PolicyLearner, Reference, RolloutParts, RunStore, SavedState, ScoringModels,
};
use sinew_render::{Renderer, TinyRenderer};
use sinew_rollout::{AdmissionConfig, EpisodeLimits, EpisodeOptions, EpisodeParts, TurnOrder};
use sinew_store::{DiskStore, MemoryStore, StoreOptions, TraceStore};
use sinew_tensor::Cpu;
use sinew_train::{ModelPolicy, TrainerConfig};
use sinew_types::{Engine, Fence, SamplingParams};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Bound of a store in memory.
const MEMORY_STORE_BYTES: u64 = 4 << 30;
/// Longest time of an episode, far above any call.
const PATIENCE: Duration = Duration::from_secs(3600);
/// Tokens of a prompt or an observation with its role and its end, at most.
const GIVEN_TOKENS: usize = 8;

/// Engine that samples.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sampler {
    /// No model; every pass takes its time. All members of a group get the same reward, so that nothing is
    /// trained.
    Fake(ideal::Engine),
    /// A real model that is trained, with a fixed number of tokens per turn.
    Real { turn_tokens: usize },
}

/// Shape of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) sampler: Sampler,
    /// Optimizer steps.
    pub(super) steps: usize,
    /// Groups of a step and their size.
    pub(super) groups: ideal::Groups,
    /// Optimizer steps that a sample may be behind; `None`: generation and training take turns.
    pub(super) staleness: Option<usize>,
    /// Episodes are kept on disk.
    pub(super) durable: bool,
}

/// Result of a run.
pub(super) struct RunTimes {
    /// Seconds from the start of the first step to the end of the last one; without loading and measurements.
    pub(super) wall_s: f64,
    /// The records of all steps, in their order.
    pub(super) steps: Vec<StepRecord>,
    /// Held-out reward of the last weights.
    pub(super) reward: f64,
    /// Episodes whose tokens were trained; the others had a group without a signal.
    pub(super) trained: usize,
    /// State of engine, tools and trainer at each look.
    pub(super) timeline: Timeline,
}

impl RunTimes {
    /// Percent of the time in which the loop waited until something was on disk.
    pub(super) fn loop_disk_share(&self) -> f64 {
        let waited: f64 = self.steps.iter().map(|s| s.waits.loop_disk_s).sum();
        100.0 * waited / self.wall_s.max(1e-9)
    }
}

/// Steps as they come.
struct Steps(Arc<Mutex<Vec<StepRecord>>>);

impl Recorder for Steps {
    /// Keeps the record of a step; all other events pass.
    fn record(&mut self, event: &RunEvent) -> Result<(), PipelineError> {
        if let RunEvent::Step(record) = event {
            let mut steps = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            steps.push(record.as_ref().clone());
        }
        Ok(())
    }
}

impl Shape {
    /// Episodes of one step.
    fn episodes(&self) -> usize {
        self.groups.of_step * self.groups.size
    }

    /// Tokens that a turn may have.
    fn turn_tokens(&self) -> usize {
        match self.sampler {
            Sampler::Fake(engine) => engine.turn_tokens,
            Sampler::Real { turn_tokens } => turn_tokens,
        }
    }

    /// Tokens of an episode, at most.
    fn context(&self, turns: usize) -> usize {
        (turns + 1) * (self.turn_tokens() + GIVEN_TOKENS)
    }

    /// Episodes that may run at once: those of a step, and of each step that may be ahead.
    fn in_flight(&self) -> usize {
        self.episodes() * (self.staleness.unwrap_or(0) + 1)
    }

    /// The core's configuration: no retries, no refill, no measurement but the last.
    fn core(&self) -> CoreConfig {
        CoreConfig {
            goal: Goal::Train,
            seed: 0,
            steps: self.steps as u64,
            max_wall_s: None,
            checkpoint_every: self.steps as u64,
            samples: SampleKind::Run,
            tasks_per_step: self.groups.of_step,
            over_sample: 0,
            group_size: self.groups.size,
            stop_decided: None,
            retries: 0,
            refill: 0,
            late_rounds: None,
            overlap: self.staleness.map(|updates| Overlap {
                max_staleness: updates as u64,
                updates_per_step: 1,
                in_order: false,
                late: None,
            }),
            tasks: TaskSampling::Uniform,
            train_tasks: TASKS,
            held_out_tasks: 8,
            eval: EvalConfig {
                tasks: 8,
                episodes_per_task: 4,
                every: 0,
                temperature: 1.0,
                greedy: false,
            },
        }
    }

    /// GRPO, with the correction of the ratio that older samples need.
    fn algorithm(&self) -> Result<Algorithm, BenchError> {
        let facts = RunFacts {
            group_size: self.groups.size,
            reference: false,
            teacher: false,
            critic: false,
            max_staleness: self.staleness.unwrap_or(0) as u64,
            updates_per_batch: 1,
        };
        let config: AlgorithmConfig = serde_json::from_value(serde_json::json!({
            "type": "grpo",
            "correction": { "type": "truncate", "low": 0.0, "high": 2.0 },
        }))
        .map_err(BenchError::system)?;
        config.resolve(&facts).map_err(BenchError::system)
    }

    /// The engine, with weights that it can be given others for.
    fn engine(
        &self,
        device: &Cpu,
        params: &Params,
        context: usize,
    ) -> Result<Arc<dyn Engine>, BenchError> {
        let Sampler::Fake(shape) = self.sampler else {
            let model = InferModel::with_precision(
                device,
                params.config(),
                params,
                context,
                Precision::F32,
            )
            .map_err(BenchError::system)?;
            let tokens = self.in_flight() * context;
            let forward =
                ModelForward::new(device.clone(), model, tokens).map_err(BenchError::system)?;
            let config = EngineConfig {
                scheduler: SchedulerConfig {
                    max_num_seqs: self.in_flight(),
                    max_batched_tokens: self.in_flight().max(512),
                    ..SchedulerConfig::default()
                },
                ..EngineConfig::default()
            };
            let engine = EmbeddedEngine::new(forward, config, None, clock());
            return Ok(Arc::new(engine.map_err(BenchError::system)?));
        };
        let vocab = params.config().vocab;
        let word = vocab as u32 - 1;
        let config = FakeConfig {
            model: FakeModel {
                vocab,
                seed: 0,
                end: None,
            },
            // Room for all: the cache is not what this engine is short of.
            context: context * self.in_flight().div_ceil(shape.slots).max(1) * 2,
            max_running: shape.slots,
            script: Some(Arc::new(move |_| Some(vec![word; shape.turn_tokens]))),
            latency: Duration::from_secs_f64(shape.pass_s),
            ..FakeConfig::default()
        };
        let engine = FakeEngine::threaded(config, clock()).map_err(BenchError::system)?;
        Ok(Arc::new(engine))
    }

    /// Runs it to its end in `folder`.
    pub(super) fn run(&self, world: &World, folder: &Path) -> Result<RunTimes, BenchError> {
        let device = model::device()?;
        let own = Cpu::new(device.kernels(), device.threads());
        let renderer = TinyRenderer::new(ALPHABET);
        let context = self.context(world.calls.turns);
        let params = Params::random(&shape_of_model(&renderer, context)?, 1);
        let engine = self.engine(&own, &params, context)?;
        let learner = learner(&device, params, context, folder)?;
        let store = store(self.durable, folder)?;
        let runtime = Runtime::new().map_err(BenchError::system)?;
        // It is never asked to stop: it stands here until the run is over.
        let (_stop, cancel) = watch::channel(false);
        let parts = self.parts(world, &engine, &renderer);
        let trains = Arc::default();
        let looking = Timeline::start(&engine, &parts.gauges, &trains);
        let rollouts = EngineRollouts::new(
            runtime.handle().clone(),
            RolloutParts {
                options: self.options(context),
                taskset: Arc::new(Tasks),
                max_in_flight: self.in_flight(),
                cross: None,
                in_flight: None,
                turns: None,
                changed: ChangedParts::Keep,
                episode: parts,
            },
            Arc::clone(&store),
            cancel,
        );
        let steps = Arc::new(Mutex::new(Vec::new()));
        let bus = Bus::default();
        bus.record(Box::new(Steps(Arc::clone(&steps))));
        bus.record(Box::new(Trains(trains)));
        let core = Arc::new(self.core());
        let ended = sinew_pipeline::run(Pipeline {
            config: config(&core, context, folder),
            algorithm: Arc::new(self.algorithm()?),
            rollouts: Box::new(rollouts),
            groups: None,
            source: None,
            late: None,
            learner: Arc::new(Mutex::new(learner)),
            transport: Box::new(engine),
            store: RunStore {
                traces: store,
                fence: Fence::default(),
                torn: BTreeSet::new(),
                forgets: false,
                draws_per_step: core.draws_per_step(),
            },
            grammars: grammars(&renderer)?,
            bus,
            saved: SavedState::default(),
            started: Instant::now(),
        })
        .map_err(BenchError::system)?;
        let steps = std::mem::take(&mut *steps.lock().unwrap_or_else(PoisonError::into_inner));
        let (Some(first), Some(last)) = (steps.first(), steps.last()) else {
            return Err(BenchError::system("the run had no step"));
        };
        let begun = first.wall_s - first.rollout_s - first.train_s - first.publish_s;
        Ok(RunTimes {
            wall_s: last.wall_s - begun,
            reward: ended.after.reward,
            trained: ended.samples.trained,
            timeline: looking.end(begun, last.wall_s),
            steps,
        })
    }

    /// Shared parts of the episodes: engine, world, gauges and admission.
    fn parts(
        &self,
        world: &World,
        engine: &Arc<dyn Engine>,
        renderer: &TinyRenderer,
    ) -> EpisodeParts {
        let bounds = AdmissionConfig::new(self.in_flight(), self.turn_tokens());
        let (renderer, envs) = (Arc::new(renderer.clone()), Arc::new(world.clone()));
        let mut parts = EpisodeParts::new(Arc::clone(engine), renderer, envs, bounds);
        parts.turn_order = match self.staleness {
            None => TurnOrder::FewestFirst,
            Some(_) => TurnOrder::MostFirst,
        };
        parts
    }

    /// Limits of an episode. None of them is reached: the world ends its episodes.
    fn options(&self, context: usize) -> EpisodeOptions {
        EpisodeOptions {
            limits: EpisodeLimits {
                max_turns: u32::MAX,
                max_turn_tokens: self.turn_tokens() as u32,
                max_context_tokens: context as u32,
            },
            sampling: SamplingParams::default(),
            chunk_tokens: None,
            replay_always: false,
            thinking: sinew_types::Thinking::Kept,
            boot_timeout: PATIENCE,
            timeout: PATIENCE,
            score_timeout: PATIENCE,
        }
    }
}

/// The driver's configuration, with `folder` as the folder of the run.
fn config(core: &Arc<CoreConfig>, context: usize, folder: &Path) -> PipelineConfig {
    PipelineConfig {
        core: Arc::clone(core),
        max_context_tokens: context,
        run_dir: folder.to_owned(),
        command: "bench",
        recipe: String::new(),
        trust: Arc::default(),
        accept_loss: false,
    }
}

/// A model that learns in seconds and hardly computes: tools are what takes time.
fn shape_of_model(renderer: &TinyRenderer, context: usize) -> Result<ModelConfig, BenchError> {
    ModelConfig {
        family: Family::Llama,
        vocab: renderer.vocab_size(),
        d_model: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        d_ff: 128,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        rms_eps: 1e-5,
        tied_embeddings: true,
        qkv_bias: false,
        qk_norm: false,
        max_context: context,
        bos_id: None,
        eos_ids: renderer.stop_ids().to_vec(),
    }
    .checked()
    .map_err(BenchError::system)
}

/// A learner that trains all weights, with its checkpoints in `folder`.
fn learner(
    device: &Cpu,
    params: Params,
    context: usize,
    folder: &Path,
) -> Result<PolicyLearner<ModelPolicy>, BenchError> {
    /// Tokens of a pass of the learner.
    const MICRO_BATCH: usize = 4096;
    let scorers = ScoringModels::new(Reference::None, None, MICRO_BATCH);
    let policy = PolicyConfig {
        seed: 0,
        max_context_tokens: context,
        lora: None,
        critic: None,
        trainer: TrainerConfig::new(MICRO_BATCH, 3e-3),
    };
    let trainer = policy.trainer(device, params, clock());
    let config = LearnerConfig {
        micro_batch_tokens: MICRO_BATCH,
        run_dir: folder.to_owned(),
        keep_checkpoints: 1,
        config_hash: String::new(),
        fence: Fence::default(),
    };
    let trainer = trainer.map_err(BenchError::system)?;
    PolicyLearner::new(config, trainer, scorers, Vec::new()).map_err(BenchError::system)
}

/// The store: on disk below `folder`, or in memory with a bound.
fn store(durable: bool, folder: &Path) -> Result<Arc<dyn TraceStore>, BenchError> {
    if !durable {
        return Ok(Arc::new(MemoryStore::new(MEMORY_STORE_BYTES)));
    }
    let store = DiskStore::open(&folder.join("store"), StoreOptions::default());
    Ok(Arc::new(store.map_err(BenchError::system)?))
}

/// Grammars over the vocabulary of the renderer, which the engine is built with.
fn grammars(renderer: &TinyRenderer) -> Result<Arc<dyn Grammars>, BenchError> {
    let renderer: Arc<dyn Renderer> = Arc::new(renderer.clone());
    let columns = renderer.vocab_size();
    sinew_pipeline::grammars(&renderer, columns).map_err(BenchError::system)
}
