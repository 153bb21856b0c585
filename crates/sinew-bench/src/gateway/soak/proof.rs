//! A store that checks and counts the traces that it gets, and keeps nothing, so that its memory does not
//! grow.

use sinew_store::{
    CommitOutcome, Cursor, Filter, GcPolicy, GcReport, Page, ScorePage, ScoreRecord, ScoreRefused,
    StoreError, StoreStats, TraceStore, TrainedBatch,
};
use sinew_types::{EpisodeId, Trace};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Traces that were valid, as numbers.
#[derive(Debug, Default)]
pub(super) struct Proven {
    /// Sampled tokens of all committed traces.
    sampled_tokens: AtomicU64,
    /// Requests of all committed traces, shared with the load.
    requests: Arc<AtomicU64>,
}

impl Proven {
    /// Sampled tokens of all traces.
    pub(super) fn sampled_tokens(&self) -> u64 {
        self.sampled_tokens.load(Ordering::Relaxed)
    }

    /// Source of request ids of all gateways that use the engine.
    pub(super) fn requests(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.requests)
    }
}

/// The answer of what a gateway never asks a store.
fn refused<T>() -> Result<T, StoreError> {
    let why = "this store only counts";
    Err(StoreError::Io {
        path: "soak".into(),
        source: std::io::Error::new(std::io::ErrorKind::Unsupported, why),
    })
}

impl TraceStore for Proven {
    /// Counts the traces that are valid; an invalid one is an error of the gateway.
    fn commit_batch(&self, traces: &[Trace]) -> Result<Vec<CommitOutcome>, StoreError> {
        for trace in traces {
            trace.validate()?;
            let tokens = trace.sampled_tokens() as u64;
            self.sampled_tokens.fetch_add(tokens, Ordering::Relaxed);
        }
        Ok(vec![CommitOutcome::New; traces.len()])
    }

    /// Returns nothing, since no trace is kept.
    fn get(&self, _: &EpisodeId) -> Result<Option<Trace>, StoreError> {
        Ok(None)
    }

    /// Refused: there is nothing to list.
    fn list(&self, _: &Filter) -> Result<Page, StoreError> {
        refused()
    }

    /// Refused: nothing is trained here.
    fn commit_update(&self, _: &TrainedBatch, _: bool) -> Result<CommitOutcome, StoreError> {
        refused()
    }

    /// Refused: nothing is trained here.
    fn take_fence(&self) -> Result<u64, StoreError> {
        refused()
    }

    /// Refused: no number was taken.
    fn newest_fence(&self) -> Result<u64, StoreError> {
        refused()
    }

    /// Refused: nothing was trained.
    fn trained_batches(&self) -> Result<Vec<TrainedBatch>, StoreError> {
        refused()
    }

    /// Refused: the counts have separate methods.
    fn stats(&self) -> Result<StoreStats, StoreError> {
        refused()
    }

    fn put_scores(
        &self,
        _: &[ScoreRecord],
    ) -> Result<Vec<Result<CommitOutcome, ScoreRefused>>, StoreError> {
        refused()
    }

    /// Refused: no score is kept.
    fn scores(&self, _: &EpisodeId) -> Result<Vec<ScoreRecord>, StoreError> {
        refused()
    }

    /// Refused: no score is kept, on no page.
    fn scores_after(&self, _: Cursor, _: usize) -> Result<ScorePage, StoreError> {
        refused()
    }

    /// Refused: no name is kept.
    fn named(&self, _: &str, _: usize) -> Result<Vec<EpisodeId>, StoreError> {
        refused()
    }

    /// Refused: there is nothing to remove.
    fn remove(&self, _: &[EpisodeId]) -> Result<GcReport, StoreError> {
        refused()
    }

    /// Refused: there is nothing to remove.
    fn gc(&self, _: GcPolicy) -> Result<GcReport, StoreError> {
        refused()
    }
}
