//! The store of a worker's gateway for agents: that of the owner, at its desk.

use crate::client::DeskClient;
use sinew_store::{
    CommitOutcome, Cursor, Filter, GcPolicy, GcReport, Page, ScorePage, ScoreRecord, ScoreRefused,
    StoreError, StoreStats, TraceStore, TrainedBatch,
};
use sinew_types::{EpisodeId, Trace};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Finished rollouts that a gateway may be asked for again.
const KEPT: usize = 256;

/// The store of a worker's gateway: the owner's, at its desk.
pub struct OwnerTraces {
    owner: Arc<DeskClient>,
    /// The last finished ones.
    last: Mutex<VecDeque<Trace>>,
}

sinew_types::debug_fields!(OwnerTraces, owner);

impl OwnerTraces {
    /// The store of this owner.
    pub fn new(owner: Arc<DeskClient>) -> Self {
        Self {
            owner,
            last: Mutex::default(),
        }
    }

    /// Every change leaves the list whole, so a poisoned lock is usable.
    fn last(&self) -> MutexGuard<'_, VecDeque<Trace>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer of what only the owner can do.
    fn refused<T>(&self) -> Result<T, StoreError> {
        Err(StoreError::Remote {
            url: self.owner.url().to_owned(),
            reason: "the owner of the run has its store: ask there".to_owned(),
        })
    }
}

impl TraceStore for OwnerTraces {
    fn commit_batch(&self, traces: &[Trace]) -> Result<Vec<CommitOutcome>, StoreError> {
        let mut outcomes = Vec::with_capacity(traces.len());
        for trace in traces {
            if self.last().iter().any(|t| t.episode == trace.episode) {
                outcomes.push(CommitOutcome::Duplicate);
                continue;
            }
            let stored = self.owner.finish(trace);
            stored.map_err(|e| StoreError::Remote {
                url: self.owner.url().to_owned(),
                reason: e.to_string(),
            })?;
            let mut last = self.last();
            last.push_back(trace.clone());
            while last.len() > KEPT {
                last.pop_front();
            }
            outcomes.push(CommitOutcome::New);
        }
        Ok(outcomes)
    }

    fn get(&self, episode: &EpisodeId) -> Result<Option<Trace>, StoreError> {
        let last = self.last();
        Ok(last.iter().find(|t| t.episode == *episode).cloned())
    }

    fn list(&self, _: &Filter) -> Result<Page, StoreError> {
        self.refused()
    }

    fn commit_update(&self, _: &TrainedBatch, _: bool) -> Result<CommitOutcome, StoreError> {
        self.refused()
    }

    fn take_fence(&self) -> Result<u64, StoreError> {
        self.refused()
    }

    fn newest_fence(&self) -> Result<u64, StoreError> {
        self.refused()
    }

    fn trained_batches(&self) -> Result<Vec<TrainedBatch>, StoreError> {
        self.refused()
    }

    fn stats(&self) -> Result<StoreStats, StoreError> {
        self.refused()
    }

    fn put_scores(
        &self,
        _: &[ScoreRecord],
    ) -> Result<Vec<Result<CommitOutcome, ScoreRefused>>, StoreError> {
        self.refused()
    }

    fn scores(&self, _: &EpisodeId) -> Result<Vec<ScoreRecord>, StoreError> {
        self.refused()
    }

    fn scores_after(&self, _: Cursor, _: usize) -> Result<ScorePage, StoreError> {
        self.refused()
    }

    fn named(&self, _: &str, _: usize) -> Result<Vec<EpisodeId>, StoreError> {
        self.refused()
    }

    fn remove(&self, _: &[EpisodeId]) -> Result<GcReport, StoreError> {
        self.refused()
    }

    fn gc(&self, _: GcPolicy) -> Result<GcReport, StoreError> {
        self.refused()
    }
}
