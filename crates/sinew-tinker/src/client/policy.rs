//! The policy whose weights are at a service.

use super::error::ClientError;
use super::flat::{FlatBatch, FlatDatum};
use super::model::{AdamBody, Logprobs, RemoteModel};
use super::options::{AdapterOptions, TinkerSetup};
use super::outputs::{check_outputs, cut, passed, scores, unweighted};
use super::scorer::TinkerScorer;
use super::service::Service;
use super::state::{STATE_FILE, ServiceState};
use super::weights::ServiceWeights;

use sinew_train::checkpoint::{CheckpointError, Draft, LoadedCheckpoint, Part};
use sinew_train::optim::{Outcome, Update};
use sinew_train::pack::MicroBatch;
use sinew_train::{OutputChoice, Policy, PolicyError, ScoreGrads, Scores};
use sinew_types::{PolicyVersion, TensorSource};
use std::collections::VecDeque;
use std::sync::Arc;

/// Micro-batches of a wave: about one request of 5 MB with 4096 tokens each, so that the service divides the
/// work and not the round trips.
const LANES: usize = 64;
/// Seconds after which the service may delete the weights of a version: two days, longer than a step.
const VERSION_TTL: u64 = 2 * 24 * 3600;
/// Versions whose weights stay at the service, the newest included: requests in flight finish with theirs.
const VERSIONS: usize = 3;
/// Largest difference between the log-probabilities of a pass with gradients and of the pass before it that
/// is not reported, in nats: services that compute in bfloat16 stay below it.
const GAP: f32 = 0.1;

/// A datum with the derivatives of an update.
#[derive(Debug)]
struct Pending {
    datum: FlatDatum,
    weights: Vec<f32>,
    /// Log-probabilities of the pass from which the derivatives come.
    logprobs: Vec<f32>,
}

/// A model that a Tinker service trains, by this process's losses.
///
/// A forward pass is a `forward` request. A backward pass sends nothing: the derivatives of all passes of an
/// update become weights of one `cross_entropy` before its `optim_step`. So gradients that are not applied
/// are never at the service, which has no request that sets them to 0.
///
/// Its calls block; it must not be made or used on a thread of an async runtime.
#[derive(Debug)]
pub struct TinkerPolicy {
    model: RemoteModel,
    base_model: String,
    context: Option<usize>,
    adapters: Option<AdapterOptions>,
    start: Option<String>,
    seed: u64,
    /// Checkpoints of the run that are kept.
    keep: usize,
    /// States at the service of this run's checkpoints, oldest first.
    states: Vec<String>,
    /// Weights of versions at the service, oldest first.
    published: VecDeque<String>,
    /// Micro-batches of the last pass, where a backward pass is to follow it.
    ready: Option<Vec<(FlatBatch, Logprobs)>>,
    pending: Vec<Pending>,
    /// Whether it was reported that the service reports no norm.
    norm_reported: bool,
}

impl TinkerPolicy {
    /// Opens a session at a service and makes a model in it.
    ///
    /// # Errors
    /// If the service does not answer, has no such base model, or refuses the model.
    pub fn open(setup: &TinkerSetup) -> Result<Self, ClientError> {
        let service = Arc::new(Service::open(&setup.service)?);
        let base = service.base_model(setup.base_model.as_deref())?;
        let mut policy = Self {
            model: RemoteModel::create(service, &base.name, setup.adapters, setup.seed)?,
            base_model: base.name,
            context: base.context,
            adapters: setup.adapters,
            start: setup.start.clone(),
            seed: setup.seed,
            keep: setup.keep.max(1),
            states: Vec::new(),
            published: VecDeque::new(),
            ready: None,
            pending: Vec::new(),
            norm_reported: false,
        };
        if let Some(start) = &policy.start {
            policy.model.load_state(start, false)?;
        }
        Ok(policy)
    }

    /// Name of the base model at the service.
    pub fn base_model(&self) -> &str {
        &self.base_model
    }

    /// Maximum tokens of a sequence, if the service reports it.
    pub fn context(&self) -> Option<usize> {
        self.context
    }

    /// The id of the model at the service.
    pub fn model_id(&self) -> &str {
        self.model.id()
    }

    /// A frozen model with the weights that training began with: a second model of the same session.
    ///
    /// # Errors
    /// If the service refuses it or fails.
    pub fn reference(&self) -> Result<TinkerScorer, ClientError> {
        let service = Arc::clone(self.model.service());
        let mut model = RemoteModel::create(service, &self.base_model, self.adapters, self.seed)?;
        if let Some(start) = &self.start {
            model.load_state(start, false)?;
        }
        Ok(TinkerScorer::of_model(model))
    }

    /// A frozen model with the weights of a saved state, such as the checkpoint of another run.
    ///
    /// # Errors
    /// If the service does not have it, refuses it or fails.
    pub fn frozen(&self, state: &ServiceState) -> Result<TinkerScorer, ClientError> {
        let service = Arc::clone(self.model.service());
        let mut model = RemoteModel::create(service, &state.base_model, state.adapters, self.seed)?;
        model.load_state(&state.path, false)?;
        Ok(TinkerScorer::of_model(model))
    }

    /// A frozen model of the service: a base model by its name, or the weights for samplers at a path that
    /// begins with `tinker://`.
    ///
    /// # Errors
    /// If the service has no such weights.
    pub fn scorer(&self, source: &str) -> Result<TinkerScorer, ClientError> {
        TinkerScorer::of_sampler(Arc::clone(self.model.service()), source)
    }

    /// Sends the derivatives of an update, whose gradients the service then has.
    fn send_gradients(&mut self) -> Result<(), ClientError> {
        // Passes over data without weight change nothing.
        let pending = std::mem::take(&mut self.pending);
        let has_weight = |p: &Pending| p.weights.iter().any(|w| *w != 0.0);
        let pending: Vec<Pending> = pending.into_iter().filter(has_weight).collect();
        let mut logprobs = Vec::with_capacity(pending.len());
        let (mut datums, mut sizes) = (Vec::new(), Vec::new());
        for Pending {
            datum,
            weights,
            logprobs: before,
        } in pending
        {
            datums.push(datum.with_weights(weights));
            sizes.push(datum);
            logprobs.push(before);
        }
        let parts = cut(&self.model, &sizes, &datums);
        match self.model.pass(&parts, false) {
            Ok(computed) => {
                report_gap(&logprobs, &computed);
                Ok(())
            }
            // A request that is refused or fails adds nothing; of several, others may have.
            Err(error) if parts.len() == 1 => Err(error),
            Err(error) => Err(self.model.give_up(ClientError::Partial(error.to_string()))),
        }
    }

    /// The norm of an update's derivatives by the log-probabilities, in place of that of its gradients.
    fn derivative_norm(&mut self, squares: f64) -> f64 {
        if !self.norm_reported {
            self.norm_reported = true;
            tracing::warn!(
                "the Tinker service reports no norm of gradients: shown is that of the loss's derivatives by \
                 the log-probabilities"
            );
        }
        squares.sqrt()
    }

    /// Deletes checkpoints at the service that nothing names any more. What is left expires or stays.
    fn delete(&self, paths: impl IntoIterator<Item = String>) {
        for path in paths {
            if let Err(error) = self.model.service().delete(&path) {
                tracing::debug!(path, %error, "a checkpoint of the Tinker service was not deleted");
            }
        }
    }
}

/// Warns if a service's passes with gradients give other log-probabilities than those without.
fn report_gap(before: &[Vec<f32>], computed: &[Vec<f32>]) {
    let pairs = before.iter().flatten().zip(computed.iter().flatten());
    let largest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    if largest > GAP {
        tracing::warn!(
            largest,
            "`forward_backward` of the Tinker service gives other log-probabilities than its `forward`, from \
             which the derivatives come"
        );
    }
}

impl Policy for TinkerPolicy {
    fn lanes(&self) -> usize {
        LANES
    }

    fn shares_prefixes(&self) -> bool {
        false
    }

    fn has_entropies(&self) -> bool {
        false
    }

    fn forward(
        &mut self,
        wave: &[&MicroBatch],
        want: OutputChoice,
    ) -> Result<Vec<Scores>, PolicyError> {
        self.ready = None;
        check_outputs(want)?;
        let passed = passed(wave, |datums| unweighted(&mut self.model, datums))?;
        let scores = scores(&passed);
        self.ready = want.backward.then_some(passed);
        Ok(scores)
    }

    fn backward(&mut self, _wave: &[&MicroBatch], grads: &[ScoreGrads]) -> Result<(), PolicyError> {
        let ready = self.ready.take();
        let ready = ready.ok_or_else(|| {
            PolicyError::failed("backward without a forward pass that was to keep its state")
        })?;
        check_grads(&ready, grads)?;
        for ((flat, logprobs), grads) in ready.into_iter().zip(grads) {
            let zeros = |datum: &FlatDatum| vec![0.0; datum.targets.len()];
            let mut weights: Vec<Vec<f32>> = flat.datums.iter().map(zeros).collect();
            for (place, grad) in flat.places.iter().zip(&grads.logprobs) {
                // The loss of the service falls with weight times log-probability.
                weights[place.datum][place.index] = -grad;
            }
            let parts = flat.datums.into_iter().zip(weights).zip(logprobs);
            let pending = parts.map(|((datum, weights), logprobs)| Pending {
                datum,
                weights,
                logprobs,
            });
            self.pending.extend(pending);
        }
        Ok(())
    }

    fn zero_gradients(&mut self) -> Result<(), PolicyError> {
        self.ready = None;
        self.pending.clear();
        Ok(())
    }

    fn apply(&mut self, update: &Update) -> Result<Outcome, PolicyError> {
        self.ready = None;
        let weights = self.pending.iter().flat_map(|p| &p.weights);
        let squares: f64 = weights.map(|w| f64::from(*w) * f64::from(*w)).sum();
        if !squares.is_finite() {
            self.pending.clear();
            return Ok(Outcome::SkippedNonFinite {
                tensor: "derivatives by log-probabilities".to_owned(),
            });
        }
        self.send_gradients()?;
        let norm = self.model.step(&AdamBody {
            learning_rate: update.lr,
            beta1: update.adamw.beta1,
            beta2: update.adamw.beta2,
            eps: update.adamw.epsilon,
            weight_decay: update.adamw.weight_decay,
            grad_clip_norm: update.max_grad_norm.unwrap_or(0.0),
        })?;
        match norm {
            Some(norm) if !norm.is_finite() => Ok(Outcome::SkippedNonFinite {
                tensor: "gradients at the Tinker service".to_owned(),
            }),
            Some(grad_norm) => Ok(Outcome::Applied { grad_norm }),
            None => {
                let grad_norm = self.derivative_norm(squares);
                Ok(Outcome::Applied { grad_norm })
            }
        }
    }

    /// Saves the state at the service, and a file with its path. States of checkpoints that the run does not
    /// keep are deleted.
    fn save(&mut self, draft: &mut Draft<'_>) -> Result<Vec<String>, CheckpointError> {
        self.ready = None;
        let name = format!("state-{:08}", self.model.next());
        let saved = self.model.save_state(&name);
        let path = saved.map_err(PolicyError::from)?;
        // One more than is kept: the checkpoint that is being written may never be named.
        let stale = (self.states.len() + 1).saturating_sub(self.keep + 1);
        let stale: Vec<String> = self.states.drain(..stale).collect();
        let state = ServiceState::new(
            &self.base_model,
            self.adapters,
            path.clone(),
            self.states.clone(),
        );
        let bytes = serde_json::to_vec_pretty(&state).map_err(PolicyError::failed)?;
        let file = STATE_FILE.to_owned();
        draft.write(&Part::Bytes { file, bytes })?;
        self.states.push(path);
        self.delete(stale);
        Ok(vec![STATE_FILE.to_owned()])
    }

    fn load(
        &mut self,
        loaded: &LoadedCheckpoint,
        weights: &[String],
        updates: u64,
    ) -> Result<(), CheckpointError> {
        if weights != [STATE_FILE] {
            return Err(loaded.mismatch(format!(
                "it holds {weights:?}, the weights of this run are at a Tinker service"
            )));
        }
        let state = ServiceState::parse(&loaded.bytes(STATE_FILE)?);
        let state = state.map_err(|why| loaded.mismatch(format!("{STATE_FILE}: {why}")))?;
        if (&state.base_model, &state.adapters) != (&self.base_model, &self.adapters) {
            return Err(loaded.mismatch(format!(
                "it is of the base model {:?} with {:?}, this run trains {:?} with {:?}",
                state.base_model, state.adapters, self.base_model, self.adapters
            )));
        }
        self.zero_gradients()?;
        let done = self.model.load_state(&state.path, updates > 0);
        done.map_err(PolicyError::from)?;
        self.states = state.earlier;
        self.states.push(state.path);
        Ok(())
    }

    /// Saves the weights for samplers at the service. The result has their path and no tensors.
    fn weights(&mut self, version: PolicyVersion) -> Result<Arc<dyn TensorSource>, PolicyError> {
        self.ready = None;
        // The number of the command makes the name of a version that is published again a new one.
        let name = format!("v{:08}-{}", version.0, self.model.next());
        let path = self.model.save_for_sampler(&name, VERSION_TTL)?;
        self.published.push_back(path.clone());
        let stale = self.published.len().saturating_sub(VERSIONS);
        let stale: Vec<String> = self.published.drain(..stale).collect();
        self.delete(stale);
        Ok(Arc::new(ServiceWeights::new(path)))
    }
}

/// Refuses derivatives that are not those of the last pass.
fn check_grads(ready: &[(FlatBatch, Logprobs)], grads: &[ScoreGrads]) -> Result<(), PolicyError> {
    if ready.len() != grads.len() {
        return Err(PolicyError::failed(format!(
            "derivatives of {} micro-batches, the last pass had {}",
            grads.len(),
            ready.len()
        )));
    }
    for ((flat, _), grads) in ready.iter().zip(grads) {
        if !grads.entropies.is_empty() || !grads.values.is_empty() {
            return Err(PolicyError::failed(
                "derivatives by entropies or values: the Tinker protocol has log-probabilities only",
            ));
        }
        let (found, items) = (grads.logprobs.len(), flat.places.len());
        if found != 0 && found != items {
            return Err(PolicyError::failed(format!(
                "{found} derivatives of a micro-batch with {items} items"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
