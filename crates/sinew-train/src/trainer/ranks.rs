//! Data parallelism: other processes compute the gradients of some micro-batches, and all gradients
//! are added up in a fixed order. Weights of tokens carry the batch's global denominators, so that
//! nothing has to be rescaled.
//!
//! In one update, rank 0 sends each rank its part and broadcasts the weights. Each rank computes its
//! gradients, and all ranks gather the reports. If none reports a failure, the gradients are summed, and rank
//! 0 applies them.

use super::{Prox, StepReport, StepState, TrainError, Trainer, kept};
use crate::comm::{Comm, CommError};
use crate::loss::MetricSums;
use crate::pack::{MicroBatch, Packing};
use crate::policy::{Policy, pack_for, waves};
use serde::{Deserialize, Serialize};
use sinew_types::{LossSpec, TrainRow};

/// Part of an update for one process, sent as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Shard {
    /// Rows of its micro-batches, with proximal log-probabilities filled in.
    rows: Vec<TrainRow>,
    spec: LossSpec,
    /// Factor on the weights of the rows.
    scale: f64,
    micro_batch_tokens: usize,
    /// Whether the report has to contain the log-probabilities of the rows.
    keeps_logprobs: bool,
}

/// Report of a process about its part, in addition to the gradient.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct ShardReport {
    loss: f64,
    /// Bits of [`MetricSums`]. JSON cannot represent infinity, which some sums are before anything was
    /// counted.
    sums: Vec<u64>,
    computed_tokens: usize,
    micro_batches: usize,
    /// Log-probabilities of its rows; empty unless requested.
    logprobs: Vec<Prox>,
}

/// Answer of each rank to all others after computing its part: its report, or the reason for its failure.
type ShardAnswer = Result<ShardReport, String>;

/// Assigns micro-batches to ranks with similar numbers of tokens: the largest first, each to the rank with
/// the fewest tokens.
fn share(batches: &[MicroBatch], ranks: usize) -> Vec<Vec<usize>> {
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

/// Rows of a process's micro-batches, in their order.
pub(super) fn rows_of(batches: &[MicroBatch], share: &[usize]) -> Vec<usize> {
    let packed = share.iter().flat_map(|&b| &batches[b].rows);
    packed.map(|p| p.row).collect()
}

/// Encodes a message of the protocol as JSON, which preserves the bits of `f64` and `f32`.
fn encode<T: Serialize>(comm: &dyn Comm, message: &T) -> Result<Vec<u8>, CommError> {
    serde_json::to_vec(message).map_err(|e| failed(comm, comm.rank(), &e))
}

/// The error of a rank that could not do its part.
fn failed(comm: &dyn Comm, rank: usize, reason: &dyn std::fmt::Display) -> CommError {
    CommError::Failed {
        rank,
        ranks: comm.ranks(),
        reason: reason.to_string(),
    }
}

impl<P: Policy> Trainer<P> {
    /// Shares the work of every update with the other ranks of `comm`. Rank 0 calls [`Trainer::step`], the
    /// others [`Trainer::serve`].
    ///
    /// Gradients are then summed over all ranks, with the batch's global denominators, so that the update
    /// equals that of one process except for rounding.
    pub fn with_comm(&mut self, comm: Box<dyn Comm>) {
        self.comm = comm;
    }

    /// Packs rows into at least as many micro-batches as there are processes and lanes, if the rows allow it.
    pub(super) fn pack(&self, rows: &[TrainRow]) -> Result<Packing, TrainError> {
        let most = self.config.micro_batch_tokens;
        let packing = pack_for(&self.policy, rows, most)?;
        let ranks = self.comm.ranks() * self.policy.lanes();
        if packing.micro_batches.len() >= ranks {
            return Ok(packing);
        }
        let longest = rows.iter().map(|r| r.tokens.len()).max().unwrap_or(0);
        let even = packing.computed_tokens.div_ceil(ranks);
        Ok(pack_for(&self.policy, rows, even.max(longest).min(most))?)
    }

    /// Computes the parts of updates that rank 0 sends, until rank 0 ends.
    ///
    /// # Errors
    /// If a message is not of this protocol or the group is broken. A part that cannot be computed
    /// is reported to rank 0 and does not end the loop.
    pub fn serve(&mut self) -> Result<(), TrainError> {
        loop {
            let message = match self.comm.receive(0) {
                Err(CommError::Closed { .. }) => return Ok(()),
                message => message?,
            };
            let shard: Shard =
                serde_json::from_slice(&message).map_err(|e| failed(&*self.comm, 0, &e))?;
            self.policy.broadcast_weights(&mut *self.comm)?;
            let own: ShardAnswer = self.shard(&shard).map_err(|e| e.to_string());
            let own = encode(&*self.comm, &own)?;
            // The rank that failed reports it to rank 0, and all of them wait for the next part.
            if self.answers(&own)?.iter().all(Result::is_ok) {
                self.policy.reduce_gradients(&mut *self.comm)?;
            }
        }
    }

    /// Computes this process's part of an update; the gradient is then in the policy.
    fn shard(&mut self, shard: &Shard) -> Result<ShardReport, TrainError> {
        let packing = pack_for(&self.policy, &shard.rows, shard.micro_batch_tokens)?;
        let mut state = StepState {
            rows: &shard.rows,
            spec: &shard.spec,
            prox: vec![None; shard.rows.len()],
            logprobs: kept(shard.keeps_logprobs, &shard.rows),
            report: StepReport::new(&packing),
            sums: MetricSums::default(),
            first: MetricSums::default(),
        };
        self.policy.zero_gradients()?;
        let batches: Vec<&MicroBatch> = packing.micro_batches.iter().collect();
        for wave in waves(&batches, self.policy.lanes()) {
            for sums in self.wave(&wave, shard.scale, &mut state)? {
                state.sums.merge(&sums);
            }
        }
        Ok(ShardReport {
            loss: state.report.loss,
            sums: state.sums.to_bits(),
            computed_tokens: state.report.computed_tokens,
            micro_batches: state.report.micro_batches,
            logprobs: state.logprobs,
        })
    }

    /// Sends each other process its share of `batches`, and the weights. Returns the indices of each
    /// process's micro-batches, those of this process first.
    pub(super) fn hand_out(
        &mut self,
        batches: &[MicroBatch],
        scale: f64,
        state: &StepState<'_>,
    ) -> Result<Vec<Vec<usize>>, TrainError> {
        let ranks = self.comm.ranks();
        if ranks == 1 {
            return Ok(vec![(0..batches.len()).collect()]);
        }
        let shares = share(batches, ranks);
        let rows = |share: &Vec<usize>| {
            let row = |index: usize| TrainRow {
                prox_logprobs: state.rows[index]
                    .prox_logprobs
                    .clone()
                    .or_else(|| state.prox[index].clone()),
                ..state.rows[index].clone()
            };
            rows_of(batches, share).into_iter().map(row).collect()
        };
        for (rank, share) in shares.iter().enumerate().skip(1) {
            let shard = Shard {
                rows: rows(share),
                spec: state.spec.clone(),
                scale,
                micro_batch_tokens: self.config.micro_batch_tokens,
                keeps_logprobs: self.keeps_logprobs,
            };
            let message = encode(&*self.comm, &shard)?;
            self.comm.send(rank, &message)?;
        }
        self.policy.broadcast_weights(&mut *self.comm)?;
        Ok(shares)
    }

    /// Returns the answers of all ranks.
    fn answers(&mut self, own: &[u8]) -> Result<Vec<ShardAnswer>, CommError> {
        let all = self.comm.all_gather(own)?;
        let parse = |(rank, message): (usize, &Vec<u8>)| {
            serde_json::from_slice(message).map_err(|e| failed(&*self.comm, rank, &e))
        };
        all.iter().enumerate().map(parse).collect()
    }

    /// Adds the reports and the gradients of the other ranks. `rows` are the rows that each rank received.
    pub(super) fn gather(
        &mut self,
        first: bool,
        state: &mut StepState<'_>,
        rows: Vec<Vec<usize>>,
    ) -> Result<(), TrainError> {
        if self.comm.ranks() == 1 {
            return Ok(());
        }
        let own: ShardAnswer = Ok(ShardReport::default());
        let own = encode(&*self.comm, &own)?;
        for (rank, answer) in self.answers(&own)?.into_iter().enumerate().skip(1) {
            let report = answer.map_err(|reason| failed(&*self.comm, rank, &reason))?;
            let sums = MetricSums::from_bits(&report.sums);
            state.sums.merge(&sums);
            if first {
                state.first.merge(&sums);
            }
            state.report.loss += report.loss;
            state.report.computed_tokens += report.computed_tokens;
            state.report.micro_batches += report.micro_batches;
            for (&row, column) in rows[rank].iter().zip(report.logprobs) {
                if let Some(kept) = state.logprobs.get_mut(row) {
                    *kept = kept.take().or(column);
                }
            }
        }
        Ok(self.policy.reduce_gradients(&mut *self.comm)?)
    }
}
