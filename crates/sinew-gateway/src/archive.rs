//! Durable storage of rollouts: captured data of open rollouts goes into the journal, and finished traces go
//! into the store.

use crate::failures::store_failed;
use crate::journal::{Journal, Receipt, Record};
use sinew_dialect::ApiError;
use sinew_store::{CommitOutcome, TraceStore};
use sinew_types::{EpisodeId, Trace};
use std::sync::Arc;

/// The journal and the store, if they are configured.
pub(crate) struct Archive {
    /// Journal of open rollouts; without it a crash loses them.
    journal: Option<Arc<Journal>>,
    /// Store of finished traces; without it only the caller of `finish` has them.
    store: Option<Arc<dyn TraceStore>>,
}

impl Archive {
    pub(crate) fn new(journal: Option<Arc<Journal>>, store: Option<Arc<dyn TraceStore>>) -> Self {
        Self { journal, store }
    }

    pub(crate) fn journal(&self) -> Option<&Arc<Journal>> {
        self.journal.as_ref()
    }

    /// Returns the store, if there is one.
    pub(crate) fn store(&self) -> Option<Arc<dyn TraceStore>> {
        self.store.clone()
    }

    /// Appends a record of a rollout to the journal; the receipt resolves when it is durable.
    ///
    /// # Errors
    /// If the journal takes no more.
    pub(crate) fn append(
        &self,
        id: &EpisodeId,
        record: Record,
    ) -> Result<Option<Receipt>, ApiError> {
        let journal = self.journal.as_ref();
        journal.map(|j| j.append(id, record)).transpose()
    }

    /// Reads the trace of a finished rollout.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub(crate) async fn stored(&self, id: &EpisodeId) -> Result<Option<Trace>, ApiError> {
        let Some(store) = self.store.clone() else {
            return Ok(None);
        };
        let id = id.clone();
        blocking("store_failed", move || store.get(&id).map_err(store_failed)).await
    }

    /// Like [`Archive::stored`], but reads on the calling thread.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub(crate) fn stored_now(&self, id: &EpisodeId) -> Result<Option<Trace>, ApiError> {
        match &self.store {
            Some(store) => store.get(id).map_err(store_failed),
            None => Ok(None),
        }
    }

    /// Stores a trace and returns it as stored. Storing the same trace again has no effect.
    ///
    /// # Errors
    /// If the store refuses, or has another trace under this id.
    pub(crate) async fn commit(&self, trace: Trace) -> Result<Trace, ApiError> {
        let Some(store) = self.store.clone() else {
            return Ok(trace);
        };
        blocking("store_failed", move || {
            match store.commit(&trace).map_err(store_failed)? {
                CommitOutcome::New => Ok(trace),
                // Finishing was tried before, and came as far as this.
                CommitOutcome::Duplicate => {
                    match store.get(&trace.episode).map_err(store_failed)? {
                        Some(stored) if stored.nodes == trace.nodes => Ok(stored),
                        _ => Err(taken(&trace.episode)),
                    }
                }
            }
        })
        .await
    }
}

/// Returns the error for a new rollout whose id belongs to a finished one.
pub(crate) fn taken(id: &EpisodeId) -> ApiError {
    let why = format!("a finished rollout has the id {id}: choose another one, or leave it out");
    ApiError::conflict("rollout_exists", why)
}

/// Runs `work` on a thread that may block. A panic becomes an error with this `code`.
pub(crate) async fn blocking<T: Send + 'static>(
    code: &'static str,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(ApiError::server(code, e.to_string())))
}
