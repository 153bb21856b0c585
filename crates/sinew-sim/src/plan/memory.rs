//! `[memory]`: the model and the size of the GPUs, which must have room for trainer and engines.

use super::{Plan, PlanError};
use crate::gpu::{
    Adapters, AttentionMemory, Checkpointing, ComputeType, EngineSetup, GpuPlan, Gpus, KeyNames,
    TrainerSetup,
};
use serde::{Deserialize, Serialize};
use sinew_model::ModelShape;
use std::path::PathBuf;

/// `[memory]`. The trainer has a rank on each of `trainer.devices`, an engine `engines.devices` GPUs with
/// `engines.kv_tokens`; `trainer.colocated` lets them take turns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Memory {
    /// Folder of the model, or its `config.json`, of the working directory.
    pub model: PathBuf,
    /// Memory of each GPU in GB of 10^9 bytes. Default: 80.
    pub gpu_gb: f64,
    /// Type of the trainer's computation. Default: bf16.
    pub dtype: ComputeType,
    /// Activations that are computed again. Default: full.
    pub checkpointing: Checkpointing,
    /// Packed tokens of a rank's micro-batch. Default: 16,384.
    pub micro_batch_tokens: u64,
    /// Inner width of LoRA adapters on all linear layers; 0: all weights are trained. Default: 0.
    pub lora_rank: u64,
    /// The trainer also has a frozen copy of the model that scores. Default: false.
    pub reference: bool,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            model: PathBuf::new(),
            gpu_gb: 80.0,
            dtype: ComputeType::Bf16,
            checkpointing: Checkpointing::Full,
            micro_batch_tokens: 16_384,
            lora_rank: 0,
            reference: false,
        }
    }
}

impl Plan {
    /// The memory plan, if the plan names a model.
    ///
    /// # Errors
    /// If the model cannot be read, or a number is out of its bounds.
    pub fn gpu_plan(&self) -> Result<Option<GpuPlan>, PlanError> {
        let Some(memory) = &self.memory else {
            return Ok(None);
        };
        let refused = |key: &str, value: String, allowed: &str| PlanError::Value {
            key: format!("memory.{key}"),
            value,
            allowed: allowed.to_owned(),
        };
        let found = ModelShape::read(&memory.model);
        let model = found.map_err(|e| {
            let value = format!("{:?}", memory.model.display().to_string());
            refused("model", value, &e.to_string())
        })?;
        if !(1.0..=10_000.0).contains(&memory.gpu_gb) {
            let value = memory.gpu_gb.to_string();
            return Err(refused("gpu_gb", value, "allowed: 1 to 10000"));
        }
        if memory.lora_rank > 1024 {
            let value = memory.lora_rank.to_string();
            return Err(refused("lora_rank", value, "allowed: 0 to 1024"));
        }
        let least = self.episode.max_context_tokens as u64;
        if !(least..=1 << 24).contains(&memory.micro_batch_tokens) {
            let value = memory.micro_batch_tokens.to_string();
            let allowed = format!("allowed: episode.max_context_tokens = {least} to 16777216");
            return Err(refused("micro_batch_tokens", value, &allowed));
        }
        Ok(Some(self.gpu_plan_of(memory, model)))
    }

    /// The plan for numbers that are allowed.
    fn gpu_plan_of(&self, memory: &Memory, model: ModelShape) -> GpuPlan {
        let (ranks, parallel) = (
            self.trainer.devices.ceil() as u64,
            self.engines.devices.ceil() as u64,
        );
        GpuPlan {
            engine: Some(EngineSetup {
                model: model.clone(),
                kv_tokens: self.engines.kv_tokens as u64,
                tensor_parallel: Some(parallel),
                here: true,
            }),
            turns: self.trainer.colocated,
            gpus: Some(Gpus {
                count: ranks.max(parallel),
                bytes: (memory.gpu_gb * 1e9) as u64,
            }),
            installed: None,
            own: 0,
            keys: KeyNames::PLAN,
            trainer: TrainerSetup {
                frozen: memory
                    .reference
                    .then(|| model.clone())
                    .into_iter()
                    .collect(),
                model,
                ranks,
                cuda: true,
                dtype: memory.dtype,
                checkpointing: memory.checkpointing,
                attention: AttentionMemory::Linear,
                micro_batch_tokens: memory.micro_batch_tokens,
                least_tokens: self.episode.max_context_tokens as u64,
                adapters: (memory.lora_rank > 0).then(|| Adapters {
                    rank: memory.lora_rank,
                    targets: Vec::new(),
                }),
            },
        }
    }

    /// Refuses a plan whose GPUs are too small.
    pub(crate) fn check_memory(&self) -> Result<(), PlanError> {
        match self.gpu_plan()? {
            Some(plan) => plan.check().map_err(PlanError::Memory),
            None => Ok(()),
        }
    }
}
