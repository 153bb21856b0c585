//! The [`Policy`] trait, the trainer's interface to a model. It keeps packing, losses, optimizer and
//! checkpoints independent of how log-probabilities are computed and where the weights are.

use crate::checkpoint::{CheckpointError, Draft, LoadedCheckpoint};
use crate::comm::{Comm, CommError};
use crate::optim::{Outcome, Update};
use crate::pack::{MicroBatch, PackError, Packing, pack, pack_flat, pack_routed};
use crate::policy_error::PolicyError;
use serde::{Deserialize, Serialize};
use sinew_types::{PolicyVersion, TensorSource, TokenLogprob, TrainRow};
use std::sync::Arc;

/// Outputs of a forward pass in addition to log-probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputChoice {
    /// Entropies of the items' distributions.
    pub entropies: bool,
    /// Values of the critic. Only allowed if the policy has a critic.
    pub values: bool,
    /// Whether a backward pass will follow. If not, activations need not be kept.
    pub backward: bool,
}

/// The outputs of a forward pass for each of a micro-batch's items, `[items]` each (empty if not asked
/// for). Log-probabilities and entropies in nats.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// Natural logarithm of each target's probability, at the item's temperature and under its
    /// mask.
    pub logprobs: Vec<f32>,
    /// Entropy of each item's distribution, in nats.
    pub entropies: Vec<f32>,
    /// Value of the critic before each item's target token.
    pub values: Vec<f32>,
}

/// Derivatives of the loss by the last forward pass's scores, `[items]` each; empty for scores that are not
/// part of the loss.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScoreGrads {
    /// Derivatives by the log-probabilities.
    pub logprobs: Vec<f32>,
    /// Derivatives by the entropies.
    pub entropies: Vec<f32>,
    /// Derivatives by the values.
    pub values: Vec<f32>,
}

/// Seconds and memory of the processes behind a policy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankUsage {
    /// Seconds for which the processes computed.
    pub compute_s: f64,
    /// Seconds of all calls. The difference to `compute_s` is the cost of the protocol.
    pub wall_s: f64,
    /// Most bytes that each process had in use: of its GPU, or of the process on a CPU.
    pub peak_bytes: Vec<u64>,
}

/// A model being trained (or a frozen one that only scores): weights, gradients and optimizer state, on any
/// device, in this process or in others. Data that pass through this trait are per token: no logits, no
/// gradients, and weights only for checkpoints and engines.
///
/// A **wave** is the micro-batches that are computed at once, at least one and at most one for each lane.
///
/// Contract:
/// - Equal calls give equal bits, on the same machine and build.
/// - A score does not depend on the rest of the micro-batch or wave beyond the rounding of `f32`; an
///   implementation that promises token-exactness gives the bits of the engine that it is paired with.
/// - Gradients are summed over micro-batches, waves and `backward` calls until [`Policy::zero_gradients`].
///   They are not divided by the number of lanes.
/// - [`Policy::apply`] changes nothing when it skips or fails.
/// - [`Policy::load`] of what [`Policy::save`] wrote continues to the bit.
///
/// [`crate::conformance::policy`] tests it.
pub trait Policy {
    /// Maximum number of micro-batches in a wave: the data-parallel ranks behind this policy. Default: 1.
    fn lanes(&self) -> usize {
        1
    }

    /// Whether a prefix that rows share is computed once. A policy without it computes each row by itself,
    /// and gets micro-batches in which nothing is shared. Default: yes.
    fn shares_prefixes(&self) -> bool {
        true
    }

    /// Whether entropies can be computed. Without them no entropy term is trained, and none is measured.
    /// Default: yes.
    fn has_entropies(&self) -> bool {
        true
    }

    /// Whether the experts of [`MicroBatch::routes`] are used. Other policies get micro-batches without them:
    /// their routers choose, or they have none. Default: no.
    fn replays_routes(&self) -> bool {
        false
    }

    /// The load-balancing loss of the model's routers since the last look: its mean over the trie rows of all
    /// passes with gradients. `None`: it is not a part of the gradients, which is the default.
    fn take_router_loss(&mut self) -> Option<f64> {
        None
    }

    /// Computes the scores of each micro-batch's items at the current weights.
    ///
    /// # Errors
    /// If the model cannot compute, or values are requested without a critic, or entropies without
    /// [`Policy::has_entropies`].
    fn forward(
        &mut self,
        wave: &[&MicroBatch],
        want: OutputChoice,
    ) -> Result<Vec<Scores>, PolicyError>;

    /// Accumulates the gradients of the last forward pass, from the derivatives of the loss with respect to
    /// its scores, one for each micro-batch of its wave. That pass must have announced a backward pass.
    ///
    /// # Errors
    /// If there was no such pass; then the gradients are unchanged.
    fn backward(&mut self, wave: &[&MicroBatch], grads: &[ScoreGrads]) -> Result<(), PolicyError>;

    /// The `k` most likely tokens at the position of each item's target, best first, for each micro-batch.
    ///
    /// # Errors
    /// If the model cannot compute. By default the model ranks no tokens.
    fn top(&mut self, _wave: &[&MicroBatch], _k: usize) -> Result<Vec<TopTokens>, PolicyError> {
        Err(PolicyError::failed("this model ranks no tokens".to_owned()))
    }

    /// Whether the critic's values are available. Default: no.
    fn has_critic(&self) -> bool {
        false
    }

    /// Whether scores are those of the weights under the adapters (`true`), or of both (`false`, at the
    /// start). No backward pass follows while it is `true`.
    ///
    /// # Errors
    /// If there are no adapters, which is the default.
    fn use_base(&mut self, _base: bool) -> Result<(), PolicyError> {
        Err(PolicyError::no_base())
    }

    /// Sets all gradients to 0: the start of an update.
    ///
    /// # Errors
    /// If another process that computes cannot be reached.
    fn zero_gradients(&mut self) -> Result<(), PolicyError>;

    /// Replaces the gradients of every rank by their sum ([`Comm::all_reduce`]). By default it fails: a
    /// policy with lanes shares its work itself.
    fn reduce_gradients(&mut self, comm: &mut dyn Comm) -> Result<(), CommError> {
        Err(not_shared(comm))
    }

    /// Replaces the trained weights of every rank by those of rank 0 ([`Comm::broadcast`]). By default it
    /// fails, as [`Policy::reduce_gradients`].
    fn broadcast_weights(&mut self, comm: &mut dyn Comm) -> Result<(), CommError> {
        Err(not_shared(comm))
    }

    /// Clips the accumulated gradients and applies one AdamW update.
    ///
    /// # Errors
    /// If the model is frozen, or its moments are those of other tensors.
    fn apply(&mut self, update: &Update) -> Result<Outcome, PolicyError>;

    /// Writes the trained weights, the optimizer's state, and the files that make the weights loadable by
    /// other programs (`config.json`) into a checkpoint. Returns the names of the files with weights, which
    /// show what kind of weights was trained.
    ///
    /// # Errors
    /// If a file cannot be written, or the model is frozen.
    fn save(&mut self, draft: &mut Draft<'_>) -> Result<Vec<String>, CheckpointError>;

    /// Restores the trained weights and the optimizer's state from a checkpoint after `updates` updates
    /// (without the optimizer's state if there were none), whose weights are in the files `weights`.
    ///
    /// # Errors
    /// If a file or tensor is missing, left over or of another shape; nothing is changed in that case.
    fn load(
        &mut self,
        loaded: &LoadedCheckpoint,
        weights: &[String],
        updates: u64,
    ) -> Result<(), CheckpointError>;

    /// Seconds and memory of the processes behind the policy since the last look; none for a policy of this
    /// process, which is the default.
    fn take_usage(&mut self) -> Option<RankUsage> {
        None
    }

    /// The weights of `version` as engines use them: adapters are merged, unless they are published by
    /// themselves.
    ///
    /// # Errors
    /// If they cannot be computed or written.
    fn weights(&mut self, version: PolicyVersion) -> Result<Arc<dyn TensorSource>, PolicyError>;
}

/// The most likely tokens of a micro-batch's items, best first: `[items][k]`.
pub type TopTokens = Vec<Vec<TokenLogprob>>;

fn not_shared(comm: &dyn Comm) -> CommError {
    CommError::Failed {
        rank: comm.rank(),
        ranks: comm.ranks(),
        reason: "this policy shares its work among its own processes".to_owned(),
    }
}

/// Packs rows as the policy computes them.
pub(crate) fn pack_for<P: Policy + ?Sized>(
    policy: &P,
    rows: &[TrainRow],
    max_tokens: usize,
) -> Result<Packing, PackError> {
    match (policy.replays_routes(), policy.shares_prefixes()) {
        (true, shares) => pack_routed(rows, max_tokens, shares),
        (false, true) => pack(rows, max_tokens),
        (false, false) => pack_flat(rows, max_tokens),
    }
}

/// Divides micro-batches into waves of at most `lanes`. With several lanes, micro-batches of similar size
/// are computed together, since the lanes of a wave wait for each other; with one lane the order is kept.
pub(crate) fn waves<'a>(batches: &[&'a MicroBatch], lanes: usize) -> Vec<Vec<&'a MicroBatch>> {
    let mut order = batches.to_vec();
    if lanes > 1 {
        order.sort_by_key(|batch| std::cmp::Reverse(batch.tokens.len()));
    }
    order.chunks(lanes.max(1)).map(<[_]>::to_vec).collect()
}
