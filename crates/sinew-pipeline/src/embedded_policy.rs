//! The embedded policy of a run: a decoder on the CPUs of this process, and of others on this host.

use crate::parallel::WorkerGroup;
use crate::trainer_error::system;
use sinew_model::{Keep, Lora, LoraConfig, Params, ValueHead};
use sinew_orchestrator::PipelineError;
use sinew_tensor::Cpu;
use sinew_train::{ModelPolicy, Trainer, TrainerConfig};
use sinew_types::Clock;
use std::sync::Arc;

/// A policy that is trained, as the processes of `train.data_parallel` build it, too.
#[derive(Clone, Debug)]
pub struct PolicyConfig {
    /// Seed of adapters and of a value head; the weights of a full model come from elsewhere.
    pub seed: u64,
    /// Longest path that is trained.
    pub max_context_tokens: usize,
    /// Adapters instead of full fine-tuning, with the name of the model below.
    pub lora: Option<(LoraConfig, String)>,
    /// Learning rate of a value head, as a factor of the policy's.
    pub critic: Option<f32>,
    /// Optimizer, schedule, micro-batches.
    pub trainer: TrainerConfig,
}

impl PolicyConfig {
    /// The policy that is trained, with a critic if the algorithm reads one.
    fn policy(&self, device: &Cpu, params: Params) -> Result<ModelPolicy, PipelineError> {
        let context = self.max_context_tokens;
        let (dev, d_model) = (device.clone(), params.config().d_model);
        let policy = match &self.lora {
            None => ModelPolicy::full(params, context, Keep::All, dev),
            Some((config, source)) => {
                let lora = Lora::random(config, params.config(), self.seed).map_err(system)?;
                let params = Arc::new(params);
                ModelPolicy::adapters(params, lora, source, context, Keep::All, dev)
            }
        };
        let policy = policy.map_err(system)?;
        let Some(scale) = self.critic else {
            return Ok(policy);
        };
        let head = ValueHead::random(d_model, self.seed);
        Ok(policy.with_critic(head, scale))
    }

    /// A trainer at step 0: what a run and its other processes compute with.
    ///
    /// # Errors
    /// If the parts do not fit together.
    pub fn trainer(
        &self,
        device: &Cpu,
        params: Params,
        clock: Clock,
    ) -> Result<Trainer<ModelPolicy>, PipelineError> {
        let policy = self.policy(device, params)?;
        Trainer::new(policy, self.trainer, clock).map_err(system)
    }

    /// A trainer as [`PolicyConfig::trainer`] makes it, whose gradients `processes` processes of this host
    /// compute, this one included; the threads of `device` are divided among them. `worker` describes the
    /// run to the others.
    ///
    /// # Errors
    /// If the parts do not fit together, or a process cannot be started.
    pub fn shared_trainer(
        &self,
        processes: usize,
        worker: &str,
        device: &Cpu,
        params: Params,
        clock: Clock,
    ) -> Result<Trainer<ModelPolicy>, PipelineError> {
        if processes <= 1 {
            return self.trainer(device, params, clock);
        }
        let threads = (device.threads() / processes).max(1);
        let device = Cpu::new(device.kernels(), threads);
        let mut trainer = self.trainer(&device, params, clock)?;
        let group = WorkerGroup::start(processes, worker, &device, trainer.policy())?;
        trainer.with_comm(Box::new(group));
        Ok(trainer)
    }
}
