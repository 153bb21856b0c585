//! The decoders of `sinew-model` as a [`Policy`]: with all weights trained, only adapters trained, or frozen.
//!
//! All data is in host memory. The embedded engine shares the weights through an `Arc` while it loads them.
//! An update copies them only if it starts before the engine has finished loading.
//!
//! Policies with adapters can share the weights below them. One that does not compute needs only its adapters
//! and moments: its activation buffers move to another policy, and the memory of gradients that are zero is
//! given back.

use crate::checkpoint::{CheckpointError, Draft, LoadedCheckpoint};
use crate::comm::{Comm, CommError};
use crate::host_state::{self, HostState, TensorFile};
use crate::optim::{AdamW, HostTensor, Outcome, Update};
use crate::pack::{MaskTable, MicroBatch};
use crate::policy::{OutputChoice, Policy, ScoreGrads, Scores, TopTokens};
use crate::policy_error::PolicyError;
use sinew_model::{
    Activations, ForwardError, Grads, Keep, Lora, OutputGrads, ParamEntry, Params, TrainModel,
    ValueGrads, ValueHead, Weights,
};
use sinew_tensor::Cpu;
use sinew_tensor::logprob::Masks;
use sinew_types::{Adapter, PolicyVersion, TensorList, TensorSource, TensorView, TokenId};
use std::sync::Arc;

/// File name of the full weights.
const WEIGHTS: &str = "model.safetensors";
/// File name of the adapters, as PEFT uses it.
const ADAPTER: &str = "adapter_model.safetensors";
/// File name of the critic's head.
const CRITIC: &str = "critic.safetensors";
/// The only tensor of the critic's file.
const VALUE_HEAD: &str = "value_head";

/// Critic on the policy's trunk. Its weights have the shape `[d + 1]`.
#[derive(Debug)]
struct Critic {
    head: ValueHead,
    gradient: ValueGrads,
    shape: [usize; 1],
    /// Factor on the policy's learning rate.
    lr_scale: f32,
}

/// A decoder with its weights, gradients and activation buffers.
#[derive(Debug)]
pub struct ModelPolicy {
    model: TrainModel,
    device: Cpu,
    /// Weights, shared with engines while they load; an update in that time makes a copy.
    params: Arc<Params>,
    lora: Option<Lora>,
    /// Whether passes leave the adapters out.
    is_base: bool,
    /// Name or path of the base model, for `adapter_config.json`.
    base_model: String,
    /// Gradients; `None` for a frozen model.
    gradient: Option<Grads>,
    critic: Option<Critic>,
    optimizer: AdamW,
    /// Activation buffers of passes that are followed by a backward pass.
    training: Activations,
    /// Activation buffers of passes without a backward pass.
    scoring: Activations,
    /// Set if a backward pass may follow the last forward pass; it then tells whether that pass computed
    /// values.
    ready: Option<bool>,
}

impl ModelPolicy {
    /// Trains all weights. Sequences have at most `context` tokens; `keep` trades memory
    /// ([`Activations::bytes_per_row`]) for time. Memory is 16 bytes per weight: weight, gradient and two
    /// moments in f32.
    ///
    /// # Errors
    /// If the configuration is impossible.
    pub fn full(
        params: Params,
        context: usize,
        keep: Keep,
        device: Cpu,
    ) -> Result<Self, PolicyError> {
        let gradient = Grads::of_params(params.layout());
        Self::new(
            Arc::new(params),
            None,
            Some(gradient),
            context,
            keep,
            device,
        )
    }

    /// Trains `lora` on frozen `params`, which several policies can share. `base_model` is the name that the
    /// exported adapter records for the weights it belongs to.
    ///
    /// # Errors
    /// If the configuration is impossible.
    pub fn adapters(
        params: Arc<Params>,
        lora: Lora,
        base_model: &str,
        context: usize,
        keep: Keep,
        device: Cpu,
    ) -> Result<Self, PolicyError> {
        let gradient = Grads::of_lora(lora.layout());
        let policy = Self::new(params, Some(lora), Some(gradient), context, keep, device)?;
        Ok(Self {
            base_model: base_model.to_owned(),
            ..policy
        })
    }

    /// Creates a model that only scores: the reference model of a KL term, or a teacher.
    ///
    /// # Errors
    /// If the configuration is impossible.
    pub fn frozen(params: Params, context: usize, device: Cpu) -> Result<Self, PolicyError> {
        let params = Arc::new(params);
        Self::new(params, None, None, context, Keep::Nothing, device)
    }

    fn new(
        params: Arc<Params>,
        lora: Option<Lora>,
        gradient: Option<Grads>,
        context: usize,
        keep: Keep,
        device: Cpu,
    ) -> Result<Self, PolicyError> {
        let model = TrainModel::new(params.config(), context)
            .map_err(|error| PolicyError::failed(error.to_string()))?;
        Ok(Self {
            model,
            optimizer: AdamW::new(device.clone()),
            device,
            params,
            lora,
            is_base: false,
            base_model: String::new(),
            gradient,
            critic: None,
            training: Activations::new(keep),
            scoring: Activations::new(Keep::Nothing),
            ready: None,
        })
    }

    /// Adds the products of adapters to those of the weights, for an engine that holds adapters next to its
    /// weights: both have the same bits ([`TrainModel::adding_adapters`]). Otherwise adapters are merged, as
    /// in the weights that [`Policy::weights`] returns.
    #[must_use]
    pub fn adding_adapters(mut self) -> Self {
        self.model = self.model.adding_adapters();
        self
    }

    /// Adds a critic: a linear head on the last hidden states, trained with the rest at
    /// `lr_scale` times the learning rate.
    #[must_use]
    pub fn with_critic(mut self, head: ValueHead, lr_scale: f32) -> Self {
        self.critic = Some(Critic {
            gradient: ValueGrads::of(&head),
            shape: [head.values().len()],
            lr_scale,
            head,
        });
        self
    }

    /// The weights (with adapters: those of the base).
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Returns [`ModelPolicy::params`] without a copy, for an engine to load. Later updates do not change
    /// them; an update makes a copy if they are still shared then.
    pub fn shared_params(&self) -> Arc<Params> {
        Arc::clone(&self.params)
    }

    /// Returns the adapters, if they are trained.
    pub fn lora(&self) -> Option<&Lora> {
        self.lora.as_ref()
    }

    /// Returns a copy of the adapters for an engine, if they are trained.
    pub fn adapter(&self) -> Option<Adapter> {
        self.lora.as_ref().map(Lora::to_adapter)
    }

    /// Exchanges the activation buffers of two policies, so that the one that computes next takes those of
    /// the one that computed last. Buffers of training passes are exchanged if both policies keep the same
    /// part of a pass. A backward pass of either needs a new forward pass.
    pub fn swap_buffers(&mut self, other: &mut Self) {
        if self.training.keep() == other.training.keep() {
            std::mem::swap(&mut self.training, &mut other.training);
        }
        std::mem::swap(&mut self.scoring, &mut other.scoring);
        (self.ready, other.ready) = (None, None);
    }

    /// Gives the memory of the gradients back if they are zero, as after [`Policy::zero_gradients`]. The next
    /// backward pass, or update, takes new memory.
    pub fn release_gradients(&mut self) {
        if let Some(gradient) = &mut self.gradient {
            gradient.release();
        }
    }

    /// Returns the bytes of what only this policy holds: trained weights, gradients, moments, activation
    /// buffers and tables. Weights below adapters are left out, since policies share them. The system
    /// provides the memory of large buffers when it is first written, so that this is an upper bound.
    pub fn resident_bytes(&self) -> usize {
        let weights = match &self.lora {
            Some(lora) => lora.values(),
            None => self.params.values(),
        };
        let critic = self.critic.as_ref().map_or(0, |critic| {
            size_of_val(critic.head.values()) + size_of_val(critic.gradient.values())
        });
        size_of_val(weights)
            + self.gradient.as_ref().map_or(0, Grads::bytes)
            + critic
            + self.optimizer.bytes()
            + self.training.bytes()
            + self.scoring.bytes()
            + self.model.bytes()
    }

    /// The trained tensors with their gradients, always in the same order; none for a frozen model.
    fn host_tensors(&mut self) -> Vec<HostTensor<'_>> {
        let Some(gradient) = &mut self.gradient else {
            return Vec::new();
        };
        gradient.settle(&self.device);
        let gradient = gradient.values();
        let pairs = match &mut self.lora {
            Some(lora) => lora.tensors_mut(),
            None => Arc::make_mut(&mut self.params).tensors_mut(),
        };
        let mut tensors: Vec<HostTensor<'_>> = pairs
            .into_iter()
            .map(|(entry, values)| host_tensor(entry, values, gradient))
            .collect();
        if let Some(critic) = &mut self.critic {
            tensors.push(HostTensor {
                name: VALUE_HEAD,
                shape: &critic.shape,
                decay: false,
                lr_scale: critic.lr_scale,
                values: critic.head.values_mut(),
                gradient: critic.gradient.values(),
            });
        }
        tensors
    }
}

fn failed(error: ForwardError) -> PolicyError {
    PolicyError::failed(error.to_string())
}

/// The only micro-batch of a wave: the model computes one at a time.
fn single<'a>(wave: &[&'a MicroBatch]) -> Result<&'a MicroBatch, PolicyError> {
    match wave {
        [batch] => Ok(batch),
        _ => Err(PolicyError::failed(format!(
            "a wave of {} micro-batches, this model computes one at a time",
            wave.len()
        ))),
    }
}

/// The mask of each item.
fn mask_rows(batch: &MicroBatch) -> Vec<u32> {
    batch.items.iter().map(|item| item.mask).collect()
}

/// Returns the masks of the items, if there are any.
fn masks<'a>(batch: &'a MicroBatch, rows: &'a [u32]) -> Option<Masks<'a>> {
    let MaskTable { words, table } = &batch.masks;
    (*words > 0).then_some(Masks {
        words: *words,
        table,
        rows,
    })
}

/// A tensor of the weights or of the adapters with its gradient.
fn host_tensor<'a>(
    entry: &'a ParamEntry,
    values: &'a mut [f32],
    gradient: &'a [f32],
) -> HostTensor<'a> {
    HostTensor {
        name: &entry.name,
        shape: &entry.shape,
        decay: !entry.name.ends_with("norm.weight") && !entry.name.ends_with(".bias"),
        lr_scale: 1.0,
        values,
        gradient: &gradient[entry.range()],
    }
}

impl Policy for ModelPolicy {
    fn forward(
        &mut self,
        wave: &[&MicroBatch],
        want: OutputChoice,
    ) -> Result<Vec<Scores>, PolicyError> {
        let batch = single(wave)?;
        self.ready = None;
        let acts = if want.backward {
            &mut self.training
        } else {
            &mut self.scoring
        };
        let weights = Weights {
            params: &self.params,
            lora: self.lora.as_ref().filter(|_| !self.is_base),
        };
        let (model, device) = (&self.model, &self.device);
        let rows: Vec<u32> = batch.items.iter().map(|item| item.row).collect();
        model
            .forward_for(device, weights, &batch.tokens, &batch.layout, &rows, acts)
            .map_err(failed)?;
        let items: Vec<(u32, TokenId)> = batch.items.iter().map(|i| (i.row, i.target)).collect();
        let temperatures: Vec<f32> = batch.items.iter().map(|i| i.temperature).collect();
        let rows_of_masks = mask_rows(batch);
        let masks = masks(batch, &rows_of_masks);
        let want_entropies = want.entropies;
        let scored = model
            .logprobs(
                device,
                weights,
                acts,
                &items,
                &temperatures,
                masks,
                want_entropies,
            )
            .map_err(failed)?;
        let mut scores = Scores {
            logprobs: scored.logprob.to_vec(),
            entropies: scored.entropy.to_vec(),
            values: Vec::new(),
        };
        if want.values {
            let critic = self.critic.as_ref();
            let critic =
                critic.ok_or_else(|| PolicyError::failed("there is no critic".to_owned()))?;
            scores.values = vec![0.0; rows.len()];
            model
                .values(
                    device,
                    weights,
                    acts,
                    &critic.head,
                    &rows,
                    &mut scores.values,
                )
                .map_err(failed)?;
        }
        self.ready = want.backward.then_some(want.values);
        Ok(vec![scores])
    }

    fn backward(&mut self, wave: &[&MicroBatch], grads: &[ScoreGrads]) -> Result<(), PolicyError> {
        single(wave)?;
        let state = |text: &str| PolicyError::failed(text.to_owned());
        let [grads] = grads else {
            return Err(state("backward needs the derivatives of one micro-batch"));
        };
        let values_ready = self
            .ready
            .ok_or_else(|| state("backward without a forward pass that was to keep its state"))?;
        let gradient = self
            .gradient
            .as_mut()
            .ok_or_else(|| state("a frozen model has no gradients"))?;
        let values = match &mut self.critic {
            Some(critic) if values_ready && !grads.values.is_empty() => {
                Some((&critic.head, &grads.values[..], &mut critic.gradient))
            }
            _ => None,
        };
        let outputs = OutputGrads {
            d_logprob: &grads.logprobs,
            d_entropy: &grads.entropies,
            values,
        };
        let weights = Weights {
            params: &self.params,
            lora: self.lora.as_ref(),
        };
        self.model
            .backward(&self.device, weights, &mut self.training, outputs, gradient)
            .map_err(failed)
    }

    fn top(&mut self, wave: &[&MicroBatch], k: usize) -> Result<Vec<TopTokens>, PolicyError> {
        let batch = single(wave)?;
        self.ready = None;
        let weights = Weights {
            params: &self.params,
            lora: self.lora.as_ref().filter(|_| !self.is_base),
        };
        let (model, device) = (&self.model, &self.device);
        let acts = &mut self.scoring;
        let rows: Vec<u32> = batch.items.iter().map(|item| item.row).collect();
        model
            .forward_for(device, weights, &batch.tokens, &batch.layout, &rows, acts)
            .map_err(failed)?;
        let temperatures: Vec<f32> = batch.items.iter().map(|item| item.temperature).collect();
        let rows_of_masks = mask_rows(batch);
        let masks = masks(batch, &rows_of_masks);
        let top = model.top(device, weights, acts, &rows, &temperatures, masks, k);
        Ok(vec![top.map_err(failed)?])
    }

    fn use_base(&mut self, base: bool) -> Result<(), PolicyError> {
        if self.lora.is_none() {
            return Err(PolicyError::no_base());
        }
        self.is_base = base;
        self.ready = None;
        Ok(())
    }

    fn has_critic(&self) -> bool {
        self.critic.is_some()
    }

    fn zero_gradients(&mut self) -> Result<(), PolicyError> {
        if let Some(gradient) = &mut self.gradient {
            gradient.restart(&self.device);
        }
        if let Some(critic) = &mut self.critic {
            critic.gradient.zero();
        }
        Ok(())
    }

    fn reduce_gradients(&mut self, comm: &mut dyn Comm) -> Result<(), CommError> {
        let device = &self.device;
        let own = self.gradient.as_mut().map(|gradient| {
            gradient.settle(device);
            gradient.values_mut()
        });
        let critic = self.critic.as_mut().map(|c| c.gradient.values_mut());
        let mut buffers: Vec<&mut [f32]> = own.into_iter().chain(critic).collect();
        comm.all_reduce(&mut buffers)
    }

    fn broadcast_weights(&mut self, comm: &mut dyn Comm) -> Result<(), CommError> {
        self.ready = None;
        let mut tensors = self.host_tensors();
        let mut buffers: Vec<&mut [f32]> = tensors.iter_mut().map(|t| &mut *t.values).collect();
        comm.broadcast(&mut buffers)
    }

    fn apply(&mut self, update: &Update) -> Result<Outcome, PolicyError> {
        if self.gradient.is_none() {
            return Err(PolicyError::failed(
                "a frozen model is not updated".to_owned(),
            ));
        }
        self.ready = None;
        let mut optimizer = std::mem::replace(&mut self.optimizer, AdamW::new(self.device.clone()));
        let outcome = optimizer.apply(update, &mut self.host_tensors());
        self.optimizer = optimizer;
        outcome
    }

    fn save(&mut self, draft: &mut Draft<'_>) -> Result<Vec<String>, CheckpointError> {
        host_state::save(self, draft)
    }

    fn load(
        &mut self,
        loaded: &LoadedCheckpoint,
        weights: &[String],
        updates: u64,
    ) -> Result<(), CheckpointError> {
        host_state::load(self, loaded, weights, updates)
    }

    /// The weights of a full model are the policy's own, not a copy.
    fn weights(&mut self, _version: PolicyVersion) -> Result<Arc<dyn TensorSource>, PolicyError> {
        let Some(lora) = &self.lora else {
            return Ok(self.shared_params());
        };
        let merged = lora.merged(&self.device, &self.params);
        Ok(Arc::new(merged.map_err(PolicyError::failed)?))
    }
}

impl HostState for ModelPolicy {
    fn trained(&self) -> Vec<TensorFile<'_>> {
        let mut files = Vec::new();
        if self.gradient.is_none() {
            return files;
        }
        files.push(match &self.lora {
            Some(lora) => TensorFile {
                name: ADAPTER,
                tensors: Box::new(lora),
            },
            None => TensorFile {
                name: WEIGHTS,
                tensors: Box::new(&*self.params),
            },
        });
        if let Some(critic) = &self.critic {
            let view = TensorView::f32(&critic.shape, critic.head.values());
            let list = view.map(|view| vec![(VALUE_HEAD.to_owned(), view)]);
            files.push(TensorFile {
                name: CRITIC,
                tensors: Box::new(TensorList(list.unwrap_or_default())),
            });
        }
        files
    }

    fn optimizer(&self) -> Box<dyn TensorSource + '_> {
        Box::new(&self.optimizer)
    }

    fn restore(
        &mut self,
        weights: &dyn TensorSource,
        optimizer: Option<&dyn TensorSource>,
    ) -> Result<(), PolicyError> {
        self.ready = None;
        let released = self.gradient.as_ref().is_some_and(Grads::is_released);
        let mut own = std::mem::replace(&mut self.optimizer, AdamW::new(self.device.clone()));
        let restored = own.restore(&mut self.host_tensors(), weights, optimizer);
        self.optimizer = own;
        if released {
            self.release_gradients();
        }
        restored
    }

    fn side_files(&self) -> Result<Vec<(String, Vec<u8>)>, PolicyError> {
        let (name, text) = match &self.lora {
            Some(lora) => {
                let text = lora.config().to_json(&self.base_model);
                ("adapter_config.json", text)
            }
            None => {
                let text = self.params.config().to_json("float32");
                (
                    "config.json",
                    text.map_err(|e| PolicyError::failed(e.to_string()))?,
                )
            }
        };
        Ok(vec![(name.to_owned(), text.into_bytes())])
    }
}
