//! The PyTorch trainer of a run: `[trainer] type = "torch"`.
//!
//! The run starts its processes, or connects to processes that something else started. They read the first
//! weights from a folder, and write each version for engines into a folder.

use crate::failure::Failure;
use crate::scoring;
use crate::start_model::written;
use crate::start_shape::StartShape;
use crate::{Session, clock, plan};
use sinew_algo::Needs;
use sinew_model::ValueHead;
use sinew_pipeline::{FrozenModel, PolicyConfig, Reference, ScoringModels};
use sinew_recipe::{EngineType, Place, ReplayRouting, RunPlan, TrainerDtype, TrainerPlan};
use sinew_tensor::Cpu;
use sinew_torch::{
    Attention, Checkpointing, CriticOptions, Deadlines, EnvironmentVariables, FreeDevices,
    LoraOptions, OpenOptions, PublishForm, PublishOptions, RankGroup, RankOptions, ServerAddress,
    Sharing, TorchDtype, TorchPolicy, TorchSetup, find_python, probe,
};
use sinew_train::Trainer;
use sinew_types::Engine;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Folder in that of a run with the logs of the trainer's processes.
const LOGS: &str = "trainer";
/// Folder in that of a run for the newest weights, if the engine has none.
const WEIGHTS: &str = "weights";
/// Time that a Python gets to load PyTorch and report its GPUs.
const PROBE_LIMIT: Duration = Duration::from_secs(180);
/// Names of the frozen models in the trainer.
const REFERENCE: &str = "reference";
const TEACHER: &str = "teacher";

/// Parts of a PyTorch trainer.
pub(crate) struct TorchParts<'a> {
    pub(crate) recipe: &'a RunPlan,
    /// The recipe with the versions of its models.
    pub(crate) pinned: &'a RunPlan,
    pub(crate) settings: &'a TrainerPlan,
    pub(crate) device: &'a Cpu,
    /// Folder of the first weights.
    pub(crate) model: &'a Path,
    pub(crate) shape: &'a StartShape,
    pub(crate) needs: Needs,
    /// Number of this owner of the run.
    pub(crate) fence: u64,
}

/// The engine that uses the trainer's GPUs in turns, which is made after the trainer.
#[derive(Clone, Default)]
pub(crate) struct EngineSlot(pub(crate) Arc<OnceLock<Arc<dyn Engine>>>);

/// A trainer whose models are loaded.
pub(crate) struct BegunTrainer {
    pub(crate) trainer: Trainer<TorchPolicy>,
    pub(crate) scorers: ScoringModels,
    /// Place for the engine, if it takes turns with the trainer.
    pub(crate) turns: Option<EngineSlot>,
}

/// Starts the trainer and opens its models. An engine on the same GPUs must sleep by then.
///
/// # Errors
/// If there is no Python with PyTorch, a process does not start, or a model cannot be loaded.
pub(crate) fn trainer(
    parts: &TorchParts<'_>,
    session: &Session<'_>,
) -> Result<BegunTrainer, Failure> {
    let (recipe, settings) = (parts.recipe, parts.settings);
    let run = session.dir.path();
    let policy = plan::policy(recipe)?;
    let frozen = frozen(parts, run)?;
    let names: Vec<String> = frozen.keys().cloned().collect();
    let mut opened = open(parts, run, &policy, &frozen, &publish_options(recipe, run))?;
    let turns = (settings.place == Place::Turns).then(EngineSlot::default);
    if let Some(slot) = &turns {
        opened.take_turns(free(slot.clone()));
    }
    let scorer = |name: &str| -> Option<FrozenModel> {
        let known = names.iter().any(|n| n == name);
        known.then(|| Box::new(opened.scorer(name)) as FrozenModel)
    };
    let reference = match scorer(REFERENCE) {
        Some(model) => Reference::Model(model),
        None if parts.needs.reference() => Reference::Base,
        None => Reference::None,
    };
    let tokens = recipe.train.micro_batch_tokens;
    let scorers = ScoringModels::new(reference, scorer(TEACHER), tokens);
    let trainer = Trainer::new(opened, policy.trainer, clock()).map_err(Failure::system)?;
    Ok(BegunTrainer {
        trainer,
        scorers,
        turns,
    })
}

/// Opens the models in processes of this host, or in those that `trainer.url` names.
fn open(
    parts: &TorchParts<'_>,
    run: &Path,
    policy: &PolicyConfig,
    frozen: &BTreeMap<String, PathBuf>,
    publish: &PublishOptions,
) -> Result<TorchPolicy, Failure> {
    let (recipe, settings) = (parts.recipe, parts.settings);
    let setup = |dtype| TorchSetup {
        open: open_options(parts, policy, frozen.clone(), dtype),
        publish: publish.clone(),
        fence: parts.fence,
        deadlines: deadlines(settings),
    };
    let opened = match (&settings.url, &settings.token_file) {
        (Some(url), Some(file)) => {
            let server = ServerAddress::with_token_file(url, Path::new(file));
            let server = server.map_err(|e| Failure::input(format!("trainer.token_file: {e}")))?;
            TorchPolicy::attach(&server, &setup(dtype(recipe, settings, true)))
        }
        _ => {
            let python = python(settings)?;
            let gpus = gpus(&python)?;
            let group = start(parts, &python, gpus, run)?;
            TorchPolicy::start(group, &setup(dtype(recipe, settings, gpus > 0)))
        }
    };
    opened.map_err(|e| Failure::system(format!("trainer: {e}")))
}

/// The trainer of a service whose models use it in turns: adapters are published by themselves, so that an
/// engine holds those of several models.
pub(crate) fn service_policy(parts: &TorchParts<'_>, state: &Path) -> Result<TorchPolicy, Failure> {
    let recipe = parts.recipe;
    let form = match &recipe.train.lora {
        Some(_) => PublishForm::Adapter,
        None => PublishForm::Full,
    };
    let publish = PublishOptions {
        form,
        ..publish_options(recipe, state)
    };
    let policy = plan::policy(recipe)?;
    open(parts, state, &policy, &BTreeMap::new(), &publish)
}

/// Makes the engine sleep before the trainer takes back the GPUs.
fn free(slot: EngineSlot) -> FreeDevices {
    Box::new(move || match slot.0.get() {
        Some(engine) => engine.sleep().map_err(|e| format!("engine: {e}")),
        // Its servers sleep since the start.
        None => Ok(()),
    })
}

/// The Python of the trainer.
fn python(settings: &TrainerPlan) -> Result<PathBuf, Failure> {
    let explicit = settings.python.as_deref().map(Path::new);
    find_python(explicit, &torch_variables()).map_err(Failure::outside)
}

/// Variables of this process that name the Python of the trainer.
pub fn torch_variables() -> EnvironmentVariables {
    let path = |name: &str| {
        let value = std::env::var_os(name).filter(|value| !value.is_empty());
        value.map(PathBuf::from)
    };
    EnvironmentVariables {
        torch_python: path("SINEW_TORCH_PYTHON"),
        sinew_cache: path("SINEW_CACHE"),
        xdg_cache_home: path("XDG_CACHE_HOME"),
        home: path("HOME"),
    }
}

/// Number of GPUs that PyTorch sees. It is asked only if the host has the device of a driver, since loading
/// it takes seconds.
///
/// # Errors
/// If it lacks a package or does not answer.
fn gpus(python: &Path) -> Result<usize, Failure> {
    let drivers = ["/dev/nvidiactl", "/dev/kfd"];
    if !drivers.iter().any(|driver| Path::new(driver).exists()) {
        return Ok(0);
    }
    let report = probe(python, PROBE_LIMIT).map_err(Failure::outside)?;
    Ok(report.gpus.len())
}

/// Starts the processes on this host.
fn start(
    parts: &TorchParts<'_>,
    python: &Path,
    gpus: usize,
    run: &Path,
) -> Result<RankGroup, Failure> {
    let ranks = parts.settings.ranks.unwrap_or_else(|| gpus.max(1));
    if gpus > 0 && ranks > gpus {
        return Err(Failure::input(format!(
            "trainer.ranks = {ranks}: allowed: up to {gpus}, the GPUs of this host"
        )));
    }
    let options = RankOptions {
        threads: Some((parts.device.threads() / ranks).max(1)),
        collective: Duration::from_secs_f64(parts.settings.timeout_s),
        ..RankOptions::new(python, ranks, run.join(LOGS))
    };
    RankGroup::start(&options).map_err(|e| Failure::system(format!("trainer: {e}")))
}

/// Number type of the computation.
fn dtype(recipe: &RunPlan, settings: &TrainerPlan, has_gpus: bool) -> TorchDtype {
    let servers = recipe.engine.kind != EngineType::Embedded;
    match settings.dtype {
        Some(TrainerDtype::F32) => TorchDtype::F32,
        Some(TrainerDtype::Bf16) => TorchDtype::Bf16,
        None if servers && has_gpus => TorchDtype::Bf16,
        None => TorchDtype::F32,
    }
}

/// Limits of time: the processes notice a lost one at `timeout_s`, and then report it.
fn deadlines(settings: &TrainerPlan) -> Deadlines {
    let limit = Duration::from_secs_f64(settings.timeout_s);
    Deadlines {
        open: limit.max(Deadlines::default().open),
        compute: limit + Duration::from_secs(5),
        files: limit.max(Deadlines::default().files),
        ..Deadlines::default()
    }
}

/// The model and how it is trained.
fn open_options(
    parts: &TorchParts<'_>,
    policy: &PolicyConfig,
    frozen: BTreeMap<String, PathBuf>,
    dtype: TorchDtype,
) -> OpenOptions {
    let (recipe, settings) = (parts.recipe, parts.settings);
    let lora = recipe.train.lora.as_ref().map(|lora| LoraOptions {
        rank: lora.rank as u32,
        alpha: lora.alpha,
        targets: lora.targets.clone(),
        base_name: Some(recipe.model_source()),
        seed: recipe.seed,
    });
    let critic = policy.critic.map(|lr_scale| CriticOptions {
        head: ValueHead::random(parts.shape.hidden, recipe.seed)
            .values()
            .to_vec(),
        lr_scale,
    });
    OpenOptions {
        dtype,
        attention: match settings.attention {
            sinew_recipe::Attention::Auto => Attention::Auto,
            sinew_recipe::Attention::Flex => Attention::Flex,
            sinew_recipe::Attention::Sdpa => Attention::Sdpa,
            sinew_recipe::Attention::Eager => Attention::Eager,
        },
        sharing: match settings.sharing {
            sinew_recipe::Sharing::Auto => Sharing::Auto,
            sinew_recipe::Sharing::Flat => Sharing::Flat,
        },
        checkpointing: match settings.checkpointing {
            sinew_recipe::Checkpointing::None => Checkpointing::None,
            sinew_recipe::Checkpointing::Full => Checkpointing::Full,
            sinew_recipe::Checkpointing::Offload => Checkpointing::Offload,
        },
        deterministic: settings.deterministic,
        seed: recipe.seed,
        replay_routes: settings.replay_routing == ReplayRouting::Auto,
        router_loss: settings.router_aux_loss,
        lora,
        critic,
        frozen,
        ..OpenOptions::new(parts.model, recipe.train.micro_batch_tokens as u32)
    }
}

/// The folder, form and type of weights for engines.
fn publish_options(recipe: &RunPlan, run: &Path) -> PublishOptions {
    let engine = &recipe.engine;
    let root = engine.weights_dir.as_ref().map(PathBuf::from);
    PublishOptions {
        form: if engine.adapters {
            PublishForm::Adapter
        } else {
            PublishForm::Full
        },
        dtype: TorchDtype::F32,
        untied: engine.untied,
        ..PublishOptions::new(root.unwrap_or_else(|| run.join(WEIGHTS)))
    }
}

/// Folders of the models that only score, by name.
///
/// # Errors
/// If a model is missing, or has another number of tokens than the policy.
fn frozen(parts: &TorchParts<'_>, run: &Path) -> Result<BTreeMap<String, PathBuf>, Failure> {
    let plan = parts.pinned;
    let folder = |name: &str, source: &str| -> Result<PathBuf, Failure> {
        let key = format!("{name}.model");
        let vocab = parts.shape.vocab;
        match scoring::folder(&key, source, vocab)? {
            Some(folder) => Ok(folder),
            None => written(run.join(format!("{name}-model")), || {
                scoring::load(&key, source, vocab)
            }),
        }
    };
    let reference = match &plan.reference {
        _ if !parts.needs.reference() => None,
        Some(named) => Some(folder(REFERENCE, &named.model)?),
        None if plan.train.lora.is_some() => None,
        None => Some(parts.model.to_owned()),
    };
    let teacher = plan.teacher.as_ref();
    let teacher = teacher.map(|named| folder(TEACHER, &named.model));
    let named = [(REFERENCE, reference), (TEACHER, teacher.transpose()?)];
    let there = named
        .into_iter()
        .filter_map(|(name, folder)| Some((name.to_owned(), folder?)));
    Ok(there.collect())
}
