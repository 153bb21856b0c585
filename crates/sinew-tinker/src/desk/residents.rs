//! Models in a trainer's memory: several on one base, or one place that they use in turns.

use super::folders::failed;
use super::types::{LoraSpec, ModelId, ModelSpec};
use crate::TinkerError;
use sinew_model::{Keep, Lora, LoraConfig, Params, Projection};
use sinew_tensor::Cpu;
use sinew_train::checkpoint::{CheckpointStore, Draft, LoadedCheckpoint, Part};
use sinew_train::{ModelPolicy, Policy, PolicyError};
use sinew_types::{PolicyVersion, TensorSource};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// File with adapters, as PEFT names it.
pub(super) const ADAPTER: &str = "adapter_model.safetensors";
/// File with all weights.
const WEIGHTS: &str = "model.safetensors";

/// Models that a trainer can make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainerSupport {
    /// Adapters that it trains.
    pub lora: LoraSupport,
    /// Whether it trains all weights.
    pub full: bool,
    /// Whether changing the model costs more than a turn: the other one's state is written and read, and its
    /// gradients are computed again.
    pub switches: bool,
}

/// Adapters that a trainer can make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoraSupport {
    /// None: it trains all weights.
    None,
    /// Any rank and targets, up to the limit of the configuration.
    Any,
    /// Only this form. Its seed is the one of the trainer's configuration; clients cannot choose another.
    Only(LoraSpec),
}

/// The weights of a model for sampling, as they were written.
#[derive(Clone, Debug, PartialEq)]
pub struct Exported {
    /// Files with weights.
    pub files: Vec<String>,
    /// Adapters are scaled by `alpha / rank`. `None`: the files hold all weights.
    pub alpha: Option<f32>,
}

/// The models in a trainer's memory. All calls come from one thread.
pub trait Residents {
    /// Makes a model the current one. Returns whether its weights, optimizer state and gradients are in
    /// memory as it left them; if not, [`Residents::restart`] or [`Policy::load`] follows.
    ///
    /// # Errors
    /// If such a model cannot be made; then the current model stays.
    fn enter(&mut self, model: &ModelId, spec: &ModelSpec, seed: u64) -> Result<bool, TinkerError>;

    /// Gives the current model the weights that a new one has, and no optimizer state.
    ///
    /// # Errors
    /// If they cannot be read.
    fn restart(&mut self) -> Result<(), TinkerError>;

    /// The current model.
    ///
    /// # Errors
    /// If there is none.
    fn policy(&mut self) -> Result<&mut dyn Policy, TinkerError>;

    /// Writes the current model's weights for sampling.
    ///
    /// # Errors
    /// If a file cannot be written.
    fn export(
        &mut self,
        draft: &mut Draft<'_>,
        version: PolicyVersion,
    ) -> Result<Exported, TinkerError>;

    /// The gradients of the current model are 0: their memory may be given back.
    fn rest(&mut self) {}

    /// Forgets a model.
    fn leave(&mut self, model: &ModelId);

    /// Models in memory.
    fn models(&self) -> Vec<ModelId>;

    /// Maximum number of models in memory.
    fn capacity(&self) -> usize;

    /// Bytes of weights, optimizer states, gradients and buffers; 0 if they are in other processes.
    fn bytes(&self) -> u64;
}

fn no_model() -> TinkerError {
    TinkerError::Internal("the trainer has no current model".to_owned())
}

/// Settings of models on one base in this process.
#[derive(Clone, Debug)]
pub struct EmbeddedConfig {
    /// Name of the base in exported adapters.
    pub base_name: String,
    /// Longest sequence in tokens.
    pub context: usize,
    /// Activations that are kept for the backward pass.
    pub keep: Keep,
    /// Adapters are scaled by `lora_alpha / rank`.
    pub lora_alpha: f32,
    /// Maximum number of models in memory.
    pub capacity: usize,
}

/// Models of this process. Those with adapters share one copy of the base's weights, and the buffers of
/// activations, which the current model has.
#[derive(Debug)]
pub struct Embedded {
    base: Arc<Params>,
    config: EmbeddedConfig,
    device: Cpu,
    models: BTreeMap<ModelId, ModelPolicy>,
    current: Option<ModelId>,
}

impl Embedded {
    /// No models on `base`.
    pub fn new(base: Arc<Params>, config: EmbeddedConfig, device: Cpu) -> Self {
        Self {
            base,
            config,
            device,
            models: BTreeMap::new(),
            current: None,
        }
    }

    /// Models that it can make.
    pub fn support() -> TrainerSupport {
        TrainerSupport {
            lora: LoraSupport::Any,
            full: true,
            switches: false,
        }
    }

    fn make(&self, spec: &ModelSpec, seed: u64) -> Result<ModelPolicy, TinkerError> {
        let (context, keep) = (self.config.context, self.config.keep);
        let device = self.device.clone();
        let Some(lora) = &spec.lora else {
            let params = Params::clone(&self.base);
            return Ok(ModelPolicy::full(params, context, keep, device)?);
        };
        let config = lora_config(lora, self.config.lora_alpha);
        let lora = Lora::random(&config, self.base.config(), seed)
            .map_err(|e| TinkerError::value("lora_config", format!("{lora:?}"), e.to_string()))?;
        let (base, name) = (Arc::clone(&self.base), &self.config.base_name);
        Ok(ModelPolicy::adapters(
            base, lora, name, context, keep, device,
        )?)
    }

    fn current(&mut self) -> Result<&mut ModelPolicy, TinkerError> {
        let Some(current) = &self.current else {
            return Err(no_model());
        };
        self.models.get_mut(current).ok_or_else(no_model)
    }
}

/// Adapters as the trainer makes them.
fn lora_config(spec: &LoraSpec, alpha: f32) -> LoraConfig {
    let attn = [Projection::Q, Projection::K, Projection::V, Projection::O];
    let mlp = [Projection::Gate, Projection::Up, Projection::Down];
    let mut targets = Vec::new();
    if spec.attn {
        targets.extend(attn);
    }
    if spec.mlp {
        targets.extend(mlp);
    }
    if spec.unembed {
        targets.push(Projection::Head);
    }
    LoraConfig {
        rank: spec.rank as usize,
        alpha,
        targets,
    }
}

impl Residents for Embedded {
    fn enter(&mut self, model: &ModelId, spec: &ModelSpec, seed: u64) -> Result<bool, TinkerError> {
        let known = self.models.contains_key(model);
        if known && self.current.as_ref() == Some(model) {
            return Ok(true);
        }
        let mut policy = match self.models.remove(model) {
            Some(policy) => policy,
            None => self.make(spec, seed)?,
        };
        if let Some(last) = self.current.take()
            && let Some(last) = self.models.get_mut(&last)
        {
            policy.swap_buffers(last);
        }
        self.models.insert(model.clone(), policy);
        self.current = Some(model.clone());
        Ok(known)
    }

    /// A model that was just made has them.
    fn restart(&mut self) -> Result<(), TinkerError> {
        Ok(())
    }

    fn policy(&mut self) -> Result<&mut dyn Policy, TinkerError> {
        self.current().map(|policy| policy as &mut dyn Policy)
    }

    fn export(
        &mut self,
        draft: &mut Draft<'_>,
        _version: PolicyVersion,
    ) -> Result<Exported, TinkerError> {
        let base_name = self.config.base_name.clone();
        let policy = self.current()?;
        let Some(lora) = policy.lora() else {
            let params = policy.shared_params();
            let text = params.config().to_json("float32");
            let text = text.map_err(|e| TinkerError::Internal(e.to_string()))?;
            side_file(draft, "config.json", text)?;
            return tensors_file(draft, WEIGHTS, &*params, None);
        };
        side_file(
            draft,
            "adapter_config.json",
            lora.config().to_json(&base_name),
        )?;
        tensors_file(draft, ADAPTER, lora, Some(lora.config().alpha))
    }

    fn rest(&mut self) {
        if let Ok(policy) = self.current() {
            policy.release_gradients();
        }
    }

    fn leave(&mut self, model: &ModelId) {
        self.models.remove(model);
        if self.current.as_ref() == Some(model) {
            self.current = None;
        }
    }

    fn models(&self) -> Vec<ModelId> {
        self.models.keys().cloned().collect()
    }

    fn capacity(&self) -> usize {
        self.config.capacity
    }

    fn bytes(&self) -> u64 {
        let base = size_of_val(self.base.values());
        let own = self.models.values().map(ModelPolicy::resident_bytes);
        (base + own.sum::<usize>()) as u64
    }
}

/// Writes a text file of a checkpoint.
fn side_file(draft: &mut Draft<'_>, file: &str, text: String) -> Result<(), TinkerError> {
    let part = Part::Bytes {
        file: file.to_owned(),
        bytes: text.into_bytes(),
    };
    draft.write(&part).map_err(failed)
}

/// Writes the tensors of a checkpoint for sampling.
fn tensors_file(
    draft: &mut Draft<'_>,
    file: &str,
    tensors: &dyn TensorSource,
    alpha: Option<f32>,
) -> Result<Exported, TinkerError> {
    let part = Part::Tensors {
        file: file.to_owned(),
        tensors: Box::new(tensors),
    };
    draft.write(&part).map_err(failed)?;
    Ok(Exported {
        files: vec![file.to_owned()],
        alpha,
    })
}

/// Settings of a place for one model.
#[derive(Clone, Debug)]
pub struct SwitchedConfig {
    /// Folder for the state of a new model, which is written once.
    pub first: PathBuf,
    /// Files that are written next to the weights for sampling, such as `config.json`.
    pub side_files: Vec<(String, String)>,
    /// Adapters are scaled by `alpha / rank`. `None`: all weights are trained.
    pub alpha: Option<f32>,
}

/// One policy that models use in turns. The caller loads a model that enters from its checkpoint, and
/// computes its gradients again.
pub struct Switched<P> {
    policy: P,
    config: SwitchedConfig,
    current: Option<ModelId>,
    /// The state of a new model.
    first: LoadedCheckpoint,
    first_files: Vec<String>,
}

impl<P: Policy + std::fmt::Debug> std::fmt::Debug for Switched<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Switched")
            .field("policy", &self.policy)
            .field("current", &self.current)
            .finish_non_exhaustive()
    }
}

impl<P: Policy> Switched<P> {
    /// A place whose policy has the weights of a new model.
    ///
    /// # Errors
    /// If its state cannot be written.
    pub fn new(mut policy: P, config: SwitchedConfig) -> Result<Self, TinkerError> {
        let (first, first_files) = save_first(&mut policy, &config.first)?;
        Ok(Self {
            policy,
            config,
            current: None,
            first,
            first_files,
        })
    }
}

/// Writes the state of a new model. What an earlier process wrote is replaced: it may be of another model.
fn save_first(
    policy: &mut dyn Policy,
    folder: &Path,
) -> Result<(LoadedCheckpoint, Vec<String>), TinkerError> {
    let store = CheckpointStore::open(folder, 1).map_err(failed)?;
    let mut draft = store.begin(0).map_err(failed)?;
    let files = policy.save(&mut draft).map_err(failed)?;
    draft.commit().map_err(failed)?;
    let loaded = store.load().map_err(failed)?;
    let loaded = loaded.ok_or_else(|| {
        TinkerError::Internal(format!("{}: the state was not written", folder.display()))
    })?;
    Ok((loaded, files))
}

impl<P: Policy> Residents for Switched<P> {
    fn enter(
        &mut self,
        model: &ModelId,
        _spec: &ModelSpec,
        _seed: u64,
    ) -> Result<bool, TinkerError> {
        if self.current.as_ref() == Some(model) {
            return Ok(true);
        }
        self.current = Some(model.clone());
        Ok(false)
    }

    fn restart(&mut self) -> Result<(), TinkerError> {
        let loaded = self.policy.load(&self.first, &self.first_files, 0);
        loaded.map_err(failed)
    }

    fn policy(&mut self) -> Result<&mut dyn Policy, TinkerError> {
        if self.current.is_none() {
            return Err(no_model());
        }
        Ok(&mut self.policy)
    }

    fn export(
        &mut self,
        draft: &mut Draft<'_>,
        version: PolicyVersion,
    ) -> Result<Exported, TinkerError> {
        let tensors = self.policy.weights(version)?;
        let adapters = tensors.folder().is_some_and(|folder| folder.is_adapter);
        if adapters != self.config.alpha.is_some() {
            let form = if adapters { "adapters" } else { "all weights" };
            let why =
                format!("the trainer published {form}, which its configuration does not expect");
            return Err(PolicyError::failed(why).into());
        }
        for (file, text) in &self.config.side_files {
            side_file(draft, file, text.clone())?;
        }
        let file = if adapters { ADAPTER } else { WEIGHTS };
        tensors_file(draft, file, &*tensors, self.config.alpha)
    }

    fn leave(&mut self, model: &ModelId) {
        if self.current.as_ref() == Some(model) {
            self.current = None;
        }
    }

    fn models(&self) -> Vec<ModelId> {
        self.current.iter().cloned().collect()
    }

    fn capacity(&self) -> usize {
        1
    }

    fn bytes(&self) -> u64 {
        0
    }
}
