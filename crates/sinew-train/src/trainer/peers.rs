//! Data parallelism: other processes compute the gradient of some micro-batches, and the parts
//! are added up in a fixed order. Weights of tokens carry the batch's global denominators, so that
//! nothing has to be rescaled.

use super::{StepReport, StepState, TrainError, Trainer};
use crate::loss::MetricSums;
use crate::pack::{MicroBatch, Packing, pack};
use crate::policy::Policy;
use serde::{Deserialize, Serialize};
use sinew_types::{LossSpec, TrainRow};
use std::fmt::Debug;

/// A part of an update, for one process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shard {
    pub rows: Vec<TrainRow>,
    pub spec: LossSpec,
    /// Factor on the rows' weights.
    pub scale: f64,
    pub micro_batch_tokens: usize,
}

/// What a process tells of its part, beside the gradient.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ShardReport {
    pub loss: f64,
    /// [`MetricSums`], bit by bit: some of them are infinite until something was counted.
    pub sums: Vec<u64>,
    pub computed_tokens: usize,
    pub micro_batches: usize,
}

/// Why another process's part is missing. The update did not take place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    #[error("training process {rank} of {count} is gone: {reason}")]
    Gone {
        rank: usize,
        count: usize,
        reason: String,
    },
    #[error("training process {rank} of {count} failed: {reason}")]
    Failed {
        rank: usize,
        count: usize,
        reason: String,
    },
}

/// The other processes. Rank 0 is the trainer itself.
pub trait Peers: Debug + Send {
    /// Number of processes, this one included.
    fn count(&self) -> usize;

    /// Starts each peer on its shard, at `weights` (all trained tensors, in order).
    fn start(&mut self, weights: &[&[f32]], shards: &[Shard]) -> Result<(), PeerError>;

    /// Waits for all of them and adds their gradients, rank by rank, to `gradients` (in the order
    /// of [`Policy::gradients_mut`]).
    fn finish(&mut self, gradients: &mut [&mut [f32]]) -> Result<Vec<ShardReport>, PeerError>;
}

/// Micro-batches of each rank, as even in tokens as whole ones allow: the largest first, each to
/// whoever has least.
pub(super) fn share(batches: &[MicroBatch], ranks: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..batches.len()).collect();
    order.sort_by_key(|&b| std::cmp::Reverse(batches[b].tokens.len()));
    let mut shares = vec![(0usize, Vec::new()); ranks];
    for batch in order {
        let least = (0..ranks).min_by_key(|&r| shares[r].0).unwrap_or(0);
        shares[least].0 += batches[batch].tokens.len();
        shares[least].1.push(batch);
    }
    let sorted = shares.into_iter().map(|(_, mut batches)| {
        batches.sort_unstable();
        batches
    });
    sorted.collect()
}

impl<P: Policy> Trainer<P> {
    /// Lets other processes compute parts of every update.
    pub fn with_peers(&mut self, peers: Box<dyn Peers>) {
        self.peers = Some(peers);
    }

    /// Packs rows, into at least as many micro-batches as there are processes where the rows
    /// allow it.
    pub(super) fn pack(&self, rows: &[TrainRow]) -> Result<Packing, TrainError> {
        let most = self.config.micro_batch_tokens;
        let packing = pack(rows, most)?;
        let ranks = self.peers.as_ref().map_or(1, |p| p.count());
        if packing.micro_batches.len() >= ranks {
            return Ok(packing);
        }
        let longest = rows.iter().map(|r| r.tokens.len()).max().unwrap_or(0);
        let even = packing.computed_tokens.div_ceil(ranks);
        Ok(pack(rows, even.max(longest).min(most))?)
    }

    /// Computes this process's part of an update; the gradient is then in the policy.
    pub fn shard(&mut self, shard: &Shard) -> Result<ShardReport, TrainError> {
        let packing = pack(&shard.rows, shard.micro_batch_tokens)?;
        let mut state = StepState {
            rows: &shard.rows,
            spec: &shard.spec,
            prox: vec![None; shard.rows.len()],
            report: StepReport::new(&packing),
            sums: MetricSums::default(),
            first: MetricSums::default(),
        };
        self.policy.zero_gradients();
        for batch in &packing.micro_batches {
            let sums = self.micro_batch(batch, shard.scale, &mut state)?;
            state.sums.merge(&sums);
        }
        Ok(ShardReport {
            loss: state.report.loss,
            sums: state.sums.to_bits(),
            computed_tokens: state.report.computed_tokens,
            micro_batches: state.report.micro_batches,
        })
    }

    /// Hands out all but this process's share of `batches`; returns what stays here.
    pub(super) fn hand_out(
        &mut self,
        batches: &[MicroBatch],
        scale: f64,
        state: &StepState<'_>,
    ) -> Result<Vec<usize>, TrainError> {
        let Some(peers) = &mut self.peers else {
            return Ok((0..batches.len()).collect());
        };
        let mut shares = share(batches, peers.count());
        let rows_of = |share: &Vec<usize>| {
            let packed = share.iter().flat_map(|&b| &batches[b].rows);
            let row = |index: usize| TrainRow {
                prox_logprobs: state.rows[index]
                    .prox_logprobs
                    .clone()
                    .or_else(|| state.prox[index].clone()),
                ..state.rows[index].clone()
            };
            packed.map(|p| row(p.row)).collect()
        };
        let shard = |share: &Vec<usize>| Shard {
            rows: rows_of(share),
            spec: state.spec.clone(),
            scale,
            micro_batch_tokens: self.config.micro_batch_tokens,
        };
        let shards: Vec<Shard> = shares[1..].iter().map(shard).collect();
        let tensors = self.policy.tensors();
        let weights: Vec<&[f32]> = tensors.iter().map(|t| &*t.values).collect();
        peers.start(&weights, &shards)?;
        Ok(shares.swap_remove(0))
    }

    /// Adds what the others computed.
    pub(super) fn gather(
        &mut self,
        first: bool,
        state: &mut StepState<'_>,
    ) -> Result<(), TrainError> {
        let Some(peers) = &mut self.peers else {
            return Ok(());
        };
        let mut gradients = self.policy.gradients_mut();
        for report in peers.finish(&mut gradients)? {
            let sums = MetricSums::from_bits(&report.sums);
            state.sums.merge(&sums);
            if first {
                state.first.merge(&sums);
            }
            state.report.loss += report.loss;
            state.report.computed_tokens += report.computed_tokens;
            state.report.micro_batches += report.micro_batches;
        }
        Ok(())
    }
}
