//! Where concrete parts meet: from a recipe to engine, environment, store and trainer.

use crate::admission;
pub(crate) use crate::device::{device, kernels};
use crate::egress::{WayOut, WithEgress};
use crate::failure::Failure;
use crate::harness;
use crate::plan::Invocation;
use crate::run_dir::{Resume, RunDir};
use sinew_algo::Algorithm;
use sinew_env::{EnvFactory, Sandboxes, Taskset};
use sinew_grammar::Grammars;
use sinew_image::{Image, ImageConfig, ImageError, UnpackLimits};
use sinew_infer::{EmbeddedEngine, EngineConfig, ModelForward, SchedulerConfig, TokenBytes};
use sinew_model::{
    Family, InferModel, LoadedModel, ModelConfig, ModelFiles, Params, ResolveEnv,
    load_gguf_metadata, load_model, resolve_model,
};
use sinew_pipeline::{
    Bus, CrossPolicy, CrossPolicyConfig, DatasetSource, EmbeddedLearner, EngineRollouts, Learner,
    Pipeline, PipelineError, RolloutParts, RunEvent, RunStore, SampleSource, SavedState,
    TrainProgress,
};
use sinew_recipe::{EngineType, Level, ModelSection, RunPlan, SandboxPlan, StoreKind};
use sinew_render::{ChatRenderer, GgufVocab, Renderer, TinyRenderer};
use sinew_rollout::{Admission, EpisodeParts, Gauges, RunInfo};
use sinew_sandbox::{
    Limits, Pool, PoolConfig, ProcessConfig, ProcessProvider, SandboxProvider, SandboxSpec,
};
use sinew_store::{DiskStore, MemoryStore, Recovery, StoreError, StoreOptions};
use sinew_tensor::Cpu;
use sinew_types::{Clock, Component, Engine, Provenance};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;
use tokio::runtime::Handle;
use tokio::sync::watch;

/// Room of a store in memory.
const MEMORY_STORE_BYTES: u64 = 4 << 30;

/// Seconds since the first call: the clock that pure parts are given.
pub(crate) fn clock() -> Clock {
    let start = Instant::now();
    Box::new(move || start.elapsed().as_secs_f64())
}

/// What the environment says about where models are.
pub(crate) fn resolve_env() -> ResolveEnv {
    let var = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
    let home = PathBuf::from(var("HOME").unwrap_or_else(|| ".".into()));
    let cache_root = var("XDG_CACHE_HOME").map_or_else(|| home.join(".cache"), PathBuf::from);
    let hub_home = var("HF_HOME").map_or_else(|| cache_root.join("huggingface"), PathBuf::from);
    let mut package_dirs: Vec<PathBuf> = var("SINEW_PACKAGE_DIRS")
        .map(|v| std::env::split_paths(&v).collect())
        .unwrap_or_default();
    package_dirs.push(PathBuf::from(".cache/wheels"));
    let program = std::env::current_exe().unwrap_or_default();
    package_dirs.extend(program.ancestors().map(|a| a.join(".cache/wheels")));
    package_dirs.extend(crate::python::package_dirs());
    ResolveEnv {
        package_dirs: package_dirs.into_iter().filter(|d| d.is_dir()).collect(),
        cache_dir: var("SINEW_CACHE").map_or_else(|| cache_root.join("sinew"), PathBuf::from),
        hub_cache: var("HF_HUB_CACHE").map_or_else(|| hub_home.join("hub"), PathBuf::from),
        hub_endpoint: var("HF_ENDPOINT").unwrap_or_else(|| ResolveEnv::HUB.into()),
        hub_token: var("HF_TOKEN"),
        offline: var("HF_HUB_OFFLINE").is_some_and(|v| v != "0"),
        progress: None,
    }
}

/// Files of the recipe's model; `None` for one from scratch.
pub(crate) fn model_files(recipe: &RunPlan) -> Result<Option<ModelFiles>, Failure> {
    match &recipe.model {
        ModelSection::Scratch { .. } => Ok(None),
        ModelSection::Pretrained { source } => resolve_model(source, &resolve_env())
            .map(Some)
            .map_err(|e| crate::models::unresolved("model", e)),
    }
}

pub(crate) fn chat_renderer(files: &ModelFiles) -> Result<ChatRenderer, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::input(format!("model: {e}"));
    match files {
        ModelFiles::Dir(dir) => ChatRenderer::from_dir(dir).map_err(|e| failed(&e)),
        ModelFiles::Gguf(path) => {
            let meta = load_gguf_metadata(path).map_err(|e| failed(&e))?;
            let config = |e: sinew_model::ConfigError| failed(&e);
            let types = meta.token_types().map_err(config)?.unwrap_or_default();
            let vocab = GgufVocab {
                model: meta.tokenizer_model().map_err(config)?.into(),
                pre: meta
                    .pre_tokenizer()
                    .map_err(config)?
                    .unwrap_or_default()
                    .into(),
                tokens: meta.tokens().map_err(config)?.to_vec(),
                token_types: types.iter().map(|&t| t as i32).collect(),
                merges: meta.merges().map_err(config)?.to_vec(),
            };
            ChatRenderer::from_gguf(
                &vocab,
                meta.chat_template().map_err(config)?,
                meta.token_id("bos").map_err(config)?,
                meta.token_id("eos").map_err(config)?,
            )
            .map_err(|e| failed(&e))
        }
    }
}

/// The renderer of a recipe's model.
pub(crate) fn renderer(recipe: &RunPlan) -> Result<Arc<dyn Renderer>, Failure> {
    Ok(match model_files(recipe)? {
        None => Arc::new(TinyRenderer::new(
            recipe.env.needs().alphabet.unwrap_or_default(),
        )),
        Some(files) => Arc::new(chat_renderer(&files)?),
    })
}

pub(crate) fn loaded_params(recipe: &RunPlan, renderer: &dyn Renderer) -> Result<Params, Failure> {
    if let Some(files) = model_files(recipe)? {
        let loaded: LoadedModel =
            load_model(&files).map_err(|e| Failure::input(format!("model: {e}")))?;
        return Ok(loaded.params);
    }
    let config = scratch_config(recipe, renderer)?;
    Ok(Params::random(&config, recipe.seed))
}

/// Shape of a recipe's model, without its weights.
pub(crate) fn model_config(recipe: &RunPlan) -> Result<ModelConfig, Failure> {
    match model_files(recipe)? {
        None => scratch_config(recipe, renderer(recipe)?.as_ref()),
        Some(files) => {
            sinew_model::check_model(&files).map_err(|e| Failure::input(format!("model: {e}")))
        }
    }
}

/// Configuration of a model from scratch: a small Llama.
fn scratch_config(recipe: &RunPlan, renderer: &dyn Renderer) -> Result<ModelConfig, Failure> {
    let ModelSection::Scratch {
        d_model,
        layers,
        heads,
        kv_heads,
        d_ff,
    } = recipe.model
    else {
        return Err(Failure::system("model.type is not `scratch`"));
    };
    ModelConfig {
        family: Family::Llama,
        vocab: renderer.vocab_size(),
        d_model,
        layers,
        heads,
        kv_heads,
        head_dim: d_model / heads,
        d_ff,
        rope_theta: 10_000.0,
        rope_scaling: sinew_model::RopeScaling::None,
        rms_eps: 1e-5,
        tied_embeddings: true,
        qkv_bias: false,
        qk_norm: false,
        max_context: recipe.rollout.max_context_tokens as usize,
        bos_id: None,
        eos_ids: renderer.stop_ids().to_vec(),
    }
    .checked()
    .map_err(|e| Failure::input(format!("model: {e}")))
}

/// Starts the sandboxes of a recipe and checks that one really works.
pub(crate) fn sandboxes(section: &SandboxPlan) -> Result<Arc<dyn SandboxProvider>, Failure> {
    if let (Some(image), Level::Wasm | Level::Microvm) = (&section.image, section.level) {
        return Err(Failure::input(format!(
            "sandbox.image = {image:?}: level {} has roots of its own; allowed at level process and container",
            section.level
        )));
    }
    let search = std::env::var("PATH").unwrap_or_default();
    let mut config = ProcessConfig::new(&search);
    config.max_live = section.max_live;
    let named = |e: &dyn std::fmt::Display| {
        Failure::system(format!("sandbox.level = \"{}\": {e}", section.level))
    };
    if let Some(other) = crate::levels::sandboxes(section) {
        return other;
    }
    let audit = section.egress_audit.as_ref().map(PathBuf::from);
    let way_out = section.egress.clone().map(|e| WayOut::start(e, audit));
    let way_out = way_out.transpose()?;
    config.shows.extend(way_out.as_ref().map(WayOut::shows));
    let image = image(section)?;
    config.image = image.as_ref().map(|i| i.root.clone());
    let pool = PoolConfig::for_live(config.max_live);
    let provider = ProcessProvider::start(config).map_err(|e| named(&e))?;
    let provider = Pool::new(Arc::new(provider), pool).map_err(|e| named(&e))?;
    let provider: Arc<dyn SandboxProvider> = Arc::new(provider);
    Ok(match way_out {
        Some(way_out) => WithEgress::wrap(provider, way_out),
        None => provider,
    })
}

/// The root of sandboxes and what it wants to run, unpacked if it is not yet. At level `container`
/// none is also the answer for a tar file of a plain root, and for the name of an image that Docker
/// or Podman has.
pub(crate) fn image(section: &SandboxPlan) -> Result<Option<Image>, Failure> {
    let Some(path) = &section.image else {
        return Ok(None);
    };
    let named = |e: &dyn std::fmt::Display| Failure::system(format!("sandbox.image: {e}"));
    let path = Path::new(path);
    let container = section.level == Level::Container;
    if container && !path.exists() && !sinew_image::is_packed(path) {
        return Ok(None);
    }
    if path.is_dir() && !sinew_image::is_packed(path) {
        return Ok(Some(Image {
            id: String::new(),
            root: path.canonicalize().map_err(|e| named(&e))?,
            config: ImageConfig::default(),
            bytes: 0,
            fresh: false,
        }));
    }
    let cache = Path::new(&section.image_cache);
    match sinew_image::unpack(path, cache, &UnpackLimits::default()) {
        Err(ImageError::NotAnImage { .. }) if container => Ok(None),
        unpacked => unpacked.map(Some).map_err(|e| named(&e)),
    }
}

/// What a recipe allows in a sandbox, with the environment of its image.
///
/// # Errors
/// If the image cannot be unpacked.
pub(crate) fn sandbox_spec(section: &SandboxPlan) -> Result<SandboxSpec, Failure> {
    let env = image(section)?.map(|i| i.config.env).unwrap_or_default();
    Ok(SandboxSpec {
        env,
        live: section.live,
        limits: Limits {
            cpu_s: section.cpu_s,
            memory_bytes: section.memory_mb << 20,
            processes: section.processes,
            ..Limits::default()
        },
        strict: section.strict,
        ..SandboxSpec::default()
    })
}

type World = (Arc<dyn Taskset>, Arc<dyn EnvFactory>);

/// Tasks of a recipe.
pub(crate) fn taskset(recipe: &RunPlan) -> Result<Arc<dyn Taskset>, Failure> {
    let tasks = recipe.env.config().taskset(recipe.seed);
    tasks.map_err(|e| Failure::input(format!("env: {e}")))
}

/// Tasks and environments of a recipe.
pub(crate) fn world(recipe: &RunPlan) -> Result<World, Failure> {
    let sandboxes = match recipe.env.needs().sandbox {
        false => None,
        true => Some(Sandboxes {
            provider: sandboxes(&recipe.sandbox)?,
            spec: sandbox_spec(&recipe.sandbox)?,
        }),
    };
    let envs = recipe.env.config().factory(sandboxes);
    let envs = envs.map_err(|e| Failure::input(format!("env: {e}")))?;
    Ok((taskset(recipe)?, envs))
}

/// The store of a run, and what of trained episodes it has just lost.
fn open_store(recipe: &RunPlan, dir: &RunDir) -> Result<RunStore, Failure> {
    if recipe.store.kind == StoreKind::Memory {
        return Ok(RunStore {
            traces: Arc::new(MemoryStore::new(MEMORY_STORE_BYTES)),
            torn: BTreeSet::new(),
            forgets: true,
            draws_per_step: 1,
        });
    }
    let store = disk_store(&dir.store(), dir.accepts_loss())
        .map_err(|e| Failure::system(format!("store: {e}")))?;
    let recovery = store.recovery();
    let gone = recovery.torn_trained.iter().chain(&recovery.lost_trained);
    let torn = gone.cloned().collect();
    Ok(RunStore {
        traces: Arc::new(store),
        torn,
        forgets: false,
        draws_per_step: 1,
    })
}

/// Opens a store for writing, and says what of it was found damaged.
pub(crate) fn disk_store(folder: &Path, accept_loss: bool) -> Result<DiskStore, StoreError> {
    let options = StoreOptions {
        accept_loss,
        ..StoreOptions::default()
    };
    let store = DiskStore::open(folder, options)?;
    let Recovery {
        torn,
        torn_trained,
        damaged,
        lost,
        lost_trained,
        index_remade,
        ..
    } = store.recovery();
    if let Some(reason) = index_remade {
        tracing::error!(
            store = %folder.display(), reason,
            "the index was damaged: it was made anew from the segments, the old one is index.sqlite.damaged"
        );
    }
    for stretch in damaged {
        tracing::error!(
            segment = %stretch.path.display(), from = stretch.from, to = stretch.to,
            "cannot be read: left as it is, what was stored there is given up"
        );
    }
    if let Some(first) = lost.first().or(lost_trained.first()) {
        tracing::error!(
            store = %folder.display(), lost = lost.len(), lost_trained = lost_trained.len(), first = %first,
            "known episodes cannot be read: those that are still needed are run again, trained ones are not"
        );
    }
    if let Some(first) = torn.first().or(torn_trained.first()) {
        tracing::error!(
            store = %folder.display(), lost = torn.len(), lost_trained = torn_trained.len(), first = %first,
            "the newest segment ended in a torn write: what of the lost episodes is still needed is run again, trained ones are not"
        );
    }
    Ok(store)
}

fn engine(
    recipe: &RunPlan,
    device: &Cpu,
    params: &Params,
    renderer: &dyn Renderer,
    grammars: &Arc<dyn Grammars>,
    learner: &EmbeddedLearner,
) -> Result<EmbeddedEngine, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::system(format!("engine: {e}"));
    let precision = crate::device::precision(recipe, device.kernels());
    let model = InferModel::with_precision(
        device,
        params.config(),
        params,
        recipe.rollout.max_context_tokens as usize,
        precision,
    )
    .map_err(|e| failed(&e))?;
    let forward = ModelForward::new(device.clone(), model, recipe.engine.kv_tokens)
        .map_err(|e| failed(&e))?;
    let bytes = (0..renderer.vocab_size() as u32)
        .map(|id| renderer.token_bytes(id).unwrap_or_default())
        .collect::<Vec<_>>();
    let config = EngineConfig {
        scheduler: SchedulerConfig {
            max_num_seqs: recipe.engine.max_num_seqs,
            max_batched_tokens: recipe.engine.max_batched_tokens,
            speculative_tokens: recipe.engine.speculative_tokens,
            ..SchedulerConfig::default()
        },
        max_waiting: recipe.rollout.max_in_flight.max(4096),
        version: learner.version(),
    };
    let (bytes, grammars) = (TokenBytes::new(bytes), Arc::clone(grammars));
    EmbeddedEngine::with_formats(forward, config, Some(bytes), Some(grammars), clock())
        .map_err(|e| failed(&e))
}

/// The engine that episodes use, and what cross-policy sampling adds to it.
type Engines = (Arc<dyn Engine>, Option<Arc<CrossPolicy>>);

/// The engine that episodes use: one, or two for cross-policy sampling.
fn engines(
    recipe: &RunPlan,
    device: &Cpu,
    renderer: &dyn Renderer,
    grammars: &Arc<dyn Grammars>,
    learner: &EmbeddedLearner,
) -> Result<Engines, Failure> {
    let weights = learner.params()?;
    if recipe.engine.kind != EngineType::Embedded {
        let base = match model_files(recipe)? {
            Some(ModelFiles::Dir(dir)) => Some(dir),
            _ => None,
        };
        let version = learner.version();
        let engine = crate::outside::training_engine(recipe, renderer, base, version, weights)?;
        return Ok((engine, None));
    }
    let one = || engine(recipe, device, &weights, renderer, grammars, learner);
    let current: Arc<dyn Engine> = Arc::new(one()?);
    let Some(section) = recipe.rollout.cross_policy else {
        return Ok((current, None));
    };
    let old: Arc<dyn Engine> = Arc::new(one()?);
    let config = CrossPolicyConfig {
        share: section.share,
        every: section.every,
    };
    let both = CrossPolicy::new(current, old, config, learner.version());
    let both = Arc::new(both);
    Ok((both.clone(), Some(both)))
}

/// A trainer at step 0 with the models that score for it.
fn learner(
    recipe: &RunPlan,
    dir: &RunDir,
    device: &Cpu,
    params: Params,
    algorithm: &Algorithm,
    files: Vec<(String, Vec<u8>)>,
) -> Result<EmbeddedLearner, Failure> {
    let scorers = crate::models::scoring_models(recipe, algorithm.needs(), device, &params)?;
    let config = crate::plan::learner(recipe, dir.path())?;
    Ok(EmbeddedLearner::new(
        config,
        device,
        params,
        scorers,
        files,
        clock(),
    )?)
}

/// Goes back to the last good checkpoint, if there is one. What it was trained with may
/// differ in what `resume` allows.
fn restore(
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

/// What `sinew train-worker` does.
pub(crate) fn train_worker() -> Result<(), Failure> {
    Ok(sinew_pipeline::work(|run, device| {
        let load = || -> Result<_, Failure> {
            let recipe = RunPlan::parse(Path::new("recipe of the run"), run);
            let recipe = recipe.map_err(Failure::input)?;
            let renderer = renderer(&recipe)?;
            let params = loaded_params(&recipe, renderer.as_ref())?;
            Ok(crate::plan::policy(&recipe)?.trainer(device, params, clock())?)
        };
        load().map_err(|e| PipelineError::System(e.text().to_owned()))
    })?)
}

/// What every trace of a run says of how it came about.
fn run_info(
    recipe: &RunPlan,
    dir: &RunDir,
    (envs, renderer): (&dyn EnvFactory, &dyn Renderer),
    device: &Cpu,
) -> RunInfo {
    let name = dir.path().file_name().unwrap_or_default();
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
            tools: envs.tools(),
            kernels: embedded.then(|| kernels(device)),
            sandbox: sandboxed.then(|| recipe.sandbox.level.name().into()),
            ..Provenance::default()
        },
    }
}

/// Where and how a run goes on.
pub(crate) struct Session<'a> {
    pub(crate) dir: &'a RunDir,
    pub(crate) resume: Option<&'a Resume>,
    pub(crate) runtime: Handle,
    pub(crate) bus: Bus,
    /// Turns true when the run is asked to stop.
    pub(crate) cancel: watch::Receiver<bool>,
    pub(crate) started: Instant,
}

/// The training loop of a recipe with all its parts; with `resume`, from the last good checkpoint. And
/// what reads its tokens.
pub(crate) fn pipeline(
    recipe: &RunPlan,
    how: Invocation,
    session: Session<'_>,
) -> Result<(Pipeline, Arc<dyn Renderer>), Failure> {
    let (dir, cancel) = (session.dir, &session.cancel);
    let device = device()?;
    let renderer = renderer(recipe)?;
    let (taskset, envs) = world(recipe)?;
    let mut store = open_store(recipe, dir)?;
    let params = loaded_params(recipe, renderer.as_ref())?;
    let model = params.config().clone();
    check_context(recipe, &model)?;
    let algorithm = recipe
        .algorithm()
        .map_err(|e| Failure::input(format!("algorithm: {e}")))?;
    let files = renderer.files().map_err(Failure::system)?;
    let config = crate::plan::pipeline(recipe, how, dir.path(), taskset.as_ref(), &algorithm)?;
    store.draws_per_step = config.core.draws_per_step();
    let mut learner = learner(recipe, dir, &device, params, &algorithm, files)?;
    let saved = match session.resume {
        Some(resume) => restore(&mut learner, recipe, dir, resume)?,
        None => SavedState::default(),
    };
    follow(&mut learner, &session, saved.wall_s);
    let grammars = grammars(recipe, &renderer, model.vocab)?;
    let source = source(recipe, dir, renderer.as_ref(), &grammars, cancel)?;
    let (engine, cross) = engines(recipe, &device, renderer.as_ref(), &grammars, &learner)?;
    let admission = Admission::new(admission::config(recipe), Arc::clone(&engine));
    let requests = Arc::new(AtomicU64::new(1));
    let shared = harness::Shared {
        engine: &engine,
        renderer: &renderer,
        admission: &admission,
        requests: &requests,
    };
    let runtime = &session.runtime;
    let harness = harness::build(&recipe.harness, &recipe.sandbox, &shared, runtime)?;
    let run = run_info(recipe, dir, (envs.as_ref(), renderer.as_ref()), &device);
    let parts = RolloutParts {
        episode: EpisodeParts {
            run: Arc::new(run),
            engine: Arc::clone(&engine),
            renderer: Arc::clone(&renderer),
            envs,
            harness,
            admission,
            gauges: Arc::new(Gauges::default()),
            requests,
        },
        taskset,
        options: crate::plan::episode_options(recipe),
        max_in_flight: recipe.rollout.max_in_flight,
        cross,
    };
    let traces = Arc::clone(&store.traces);
    let rollouts = EngineRollouts::new(session.runtime, parts, traces, session.cancel);
    session
        .bus
        .emit(RunEvent::Described(describe(&model, &device)))?;
    let pipeline = Pipeline {
        config,
        algorithm,
        rollouts: Box::new(rollouts),
        source,
        learner: Box::new(learner),
        transport: Box::new(engine),
        store,
        grammars,
        bus: session.bus,
        saved,
        started: session.started,
    };
    Ok((pipeline, renderer))
}

/// What makes masks for the format of a recipe, which must be one that can be compiled.
fn grammars(
    recipe: &RunPlan,
    renderer: &Arc<dyn Renderer>,
    columns: usize,
) -> Result<Arc<dyn Grammars>, Failure> {
    let grammars = sinew_pipeline::grammars(renderer, columns)?;
    if let Some(format) = &recipe.rollout.format {
        let compiled = grammars.start(&Arc::new(format.clone()));
        compiled.map_err(|e| Failure::input(format!("rollout.format: {e}")))?;
    }
    Ok(grammars)
}

/// One line about what runs.
fn describe(model: &ModelConfig, device: &Cpu) -> String {
    format!(
        "model {:?}, {} layers of {}, vocabulary {}; kernels {}, {} threads",
        model.family,
        model.layers,
        model.d_model,
        model.vocab,
        kernels(device),
        device.threads()
    )
}

/// Where training episodes come from that are not run here.
fn source(
    recipe: &RunPlan,
    dir: &RunDir,
    renderer: &dyn Renderer,
    grammars: &Arc<dyn Grammars>,
    cancel: &watch::Receiver<bool>,
) -> Result<Option<Box<dyn SampleSource>>, Failure> {
    if let Some(data) = crate::plan::dataset(recipe, renderer)? {
        let grammars = Arc::clone(grammars);
        return Ok(Some(Box::new(DatasetSource { data, grammars })));
    }
    let pool = crate::pool::source(recipe, dir.path(), cancel.clone())?;
    Ok(pool.map(|pool| Box::new(pool) as Box<dyn SampleSource>))
}

/// Reports the progress of training steps, and ends them on request.
fn follow(learner: &mut EmbeddedLearner, session: &Session<'_>, earlier_s: f64) {
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

fn check_context(recipe: &RunPlan, config: &ModelConfig) -> Result<(), Failure> {
    let asked = recipe.rollout.max_context_tokens as usize;
    if asked <= config.max_context {
        return Ok(());
    }
    Err(Failure::input(format!(
        "rollout.max_context_tokens = {asked}: allowed: up to {}, the context of the model",
        config.max_context
    )))
}

/// Whether a folder can be written and has room for `bytes`.
pub(crate) fn room(path: &Path, bytes: u64) -> Result<(), Failure> {
    let mut at = path;
    while !at.exists() {
        match at.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => at = parent,
            _ => {
                at = Path::new(".");
                break;
            }
        }
    }
    let free = rustix::fs::statvfs(at)
        .map(|s| s.f_bavail * s.f_frsize)
        .map_err(|e| Failure::system(format!("{}: {e}", at.display())))?;
    if free >= bytes {
        return Ok(());
    }
    let mib = |b: u64| b >> 20;
    Err(Failure::input(format!(
        "{}: {} MiB free, checkpoints of this run need about {} MiB\n  hint: free some space, or lower train.keep_checkpoints",
        at.display(),
        mib(free),
        mib(bytes)
    )))
}
