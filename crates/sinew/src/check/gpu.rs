//! Memory of a PyTorch trainer: on the GPUs that are there, or on those that the user states.
//!
//! The figures are formulas of `sinew_sim::GpuPlan`: upper bounds for full micro-batches.

use super::memory;
use crate::gpus::{self, Gpu, gb};
use serde_json::{Value, json};
use sinew_assembly::Failure;
use sinew_model::ModelShape;
use sinew_recipe::{
    Attention, Checkpointing, EngineType, Place, RunPlan, TrainerDtype, TrainerPlan,
};
use sinew_sim::{
    Adapters, AttentionMemory, ComputeType, EngineSetup, GpuPlan, Gpus, KeyNames, PlanRow,
    TrainerSetup,
};

/// Memory of other programs from which on a GPU counts as busy.
const BUSY: u64 = 1_000_000_000;

/// The devices that a plan is made for.
#[derive(Clone, Debug)]
pub(super) enum Devices {
    /// Those that the user states, of another machine.
    Stated(Gpus),
    /// Those of this host; none: the ranks compute on the CPU.
    Here(Vec<Gpu>),
}

impl Devices {
    /// Stated GPUs, or those that the driver reports.
    pub(super) fn look(stated: Option<Gpus>) -> Self {
        stated.map_or_else(|| Self::Here(gpus::found()), Self::Stated)
    }

    fn gpus(&self) -> Option<Gpus> {
        match self {
            Self::Stated(gpus) => Some(*gpus),
            Self::Here(found) => gpus::as_one_size(found),
        }
    }

    /// The devices in words; a warning if other programs use them.
    fn text(&self) -> String {
        let found = match self {
            Self::Stated(gpus) => return format!("{gpus}, as stated"),
            Self::Here(found) => found,
        };
        let Some(gpus) = gpus::as_one_size(found) else {
            return "none: the ranks compute on the CPU".to_owned();
        };
        let used = |gpu: &Gpu| gpu.bytes.saturating_sub(gpu.free);
        let busy = found.iter().map(used).max().filter(|used| *used >= BUSY);
        let busy = busy.map_or(String::new(), |used| {
            let of_it = "which must be gone, or an engine's that takes turns";
            format!(
                "; warning: other programs use up to {} of one, {of_it}",
                gb(used)
            )
        });
        format!("{gpus} here: {}{busy}", found[0].name)
    }

    fn figures(&self) -> Value {
        match self {
            Self::Stated(gpus) => json!({ "stated": true, "gpus": gpus }),
            Self::Here(found) => {
                let each =
                    |gpu: &Gpu| json!({ "name": gpu.name, "bytes": gpu.bytes, "free": gpu.free });
                json!({ "stated": false, "found": found.iter().map(each).collect::<Vec<_>>() })
            }
        }
    }
}

/// The rows of a recipe that PyTorch trains: devices, trainer, engine, host.
pub(super) fn rows(recipe: &RunPlan, stated: Option<Gpus>) -> Result<Vec<PlanRow>, Failure> {
    let Some(trainer) = recipe.torch() else {
        return Ok(Vec::new());
    };
    if let (Some(url), None) = (&trainer.url, stated) {
        let text =
            format!("{url} has the trainer: --gpus COUNTxGB states its GPUs for an estimate");
        return Ok(vec![PlanRow {
            name: "gpus",
            result: Ok(text),
            figures: Value::Null,
        }]);
    }
    let devices = Devices::look(stated);
    let mut rows = vec![PlanRow {
        name: "gpus",
        result: Ok(devices.text()),
        figures: devices.figures(),
    }];
    rows.extend(plan(recipe, trainer, &devices)?.rows());
    Ok(rows)
}

/// Refuses a recipe whose trainer, engine or host have too little memory here.
pub(super) fn check(recipe: &RunPlan) -> Result<(), Failure> {
    let refused = rows(recipe, None)?;
    let refused = refused
        .into_iter()
        .find_map(|row| Some((row.name, row.result.err()?)));
    match refused {
        Some((name, why)) => Err(Failure::input(format!("{name}: {why}"))),
        None => Ok(()),
    }
}

/// The memory plan of a recipe on some devices.
fn plan(recipe: &RunPlan, trainer: &TrainerPlan, devices: &Devices) -> Result<GpuPlan, Failure> {
    let model = sinew_assembly::model_shape(recipe)?;
    let gpus = devices.gpus();
    let servers = matches!(recipe.engine.kind, EngineType::Vllm | EngineType::Sglang);
    let engine = gpus.filter(|_| servers).map(|_| EngineSetup {
        model: model.clone(),
        kv_tokens: u64::from(recipe.rollout.max_context_tokens),
        tensor_parallel: None,
        here: trainer.place == Place::Turns,
    });
    let installed = match devices {
        Devices::Stated(_) => None,
        Devices::Here(_) => {
            let looked = sinew_telemetry::Memory::look();
            Some(looked.map_err(Failure::system)?.installed)
        }
    };
    Ok(GpuPlan {
        trainer: setup(recipe, trainer, model, gpus)?,
        engine,
        turns: trainer.place == Place::Turns,
        gpus,
        installed,
        own: memory::own(recipe)?,
        keys: KeyNames::RECIPE,
    })
}

/// The trainer of a recipe; what is left out is chosen as a run chooses it.
fn setup(
    recipe: &RunPlan,
    trainer: &TrainerPlan,
    model: ModelShape,
    gpus: Option<Gpus>,
) -> Result<TrainerSetup, Failure> {
    let servers = matches!(recipe.engine.kind, EngineType::Vllm | EngineType::Sglang);
    let narrow = match trainer.dtype {
        Some(dtype) => dtype == TrainerDtype::Bf16,
        None => servers && gpus.is_some(),
    };
    let lora = recipe.train.lora.as_ref();
    Ok(TrainerSetup {
        frozen: frozen(recipe, &model)?,
        model,
        ranks: trainer
            .ranks
            .map_or_else(|| gpus.map_or(1, |gpus| gpus.count), |ranks| ranks as u64),
        cuda: gpus.is_some(),
        dtype: if narrow {
            ComputeType::Bf16
        } else {
            ComputeType::F32
        },
        checkpointing: match trainer.checkpointing {
            Checkpointing::Full => sinew_sim::Checkpointing::Full,
            Checkpointing::None => sinew_sim::Checkpointing::None,
            Checkpointing::Offload => sinew_sim::Checkpointing::Offload,
        },
        attention: match (trainer.attention, gpus) {
            (Attention::Flex, _) | (Attention::Auto, Some(_)) => AttentionMemory::Linear,
            (Attention::Sdpa, _) | (Attention::Auto, None) => AttentionMemory::Mask,
            (Attention::Eager, _) => AttentionMemory::Scores,
        },
        micro_batch_tokens: recipe.train.micro_batch_tokens as u64,
        least_tokens: u64::from(recipe.rollout.max_context_tokens),
        adapters: lora.map(|lora| Adapters {
            rank: lora.rank as u64,
            targets: lora.targets.clone(),
        }),
    })
}

/// Reference and teacher. Without `[reference]`, the first weights are the reference: a copy of them, or with
/// adapters the policy without its adapters.
fn frozen(recipe: &RunPlan, model: &ModelShape) -> Result<Vec<ModelShape>, Failure> {
    let mut frozen = Vec::new();
    for (key, source) in sinew_assembly::scoring_sources(recipe) {
        frozen.push(sinew_assembly::scoring_shape(key, &source, model.vocab)?);
    }
    let first = recipe.needs().reference() && recipe.reference.is_none();
    if first && recipe.train.lora.is_none() {
        frozen.push(model.clone());
    }
    Ok(frozen)
}
