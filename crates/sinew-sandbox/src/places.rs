//! Places of live sandboxes: a provider has a number of them, and callers wait for a free one.

use crate::port::SandboxError;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The places of the sandboxes that a provider may have at once.
#[derive(Debug)]
pub struct Places {
    free: Arc<Semaphore>,
    limit: usize,
    patience: Duration,
}

impl Places {
    /// `limit` places; a caller waits for one for `patience` at most.
    pub fn new(limit: usize, patience: Duration) -> Self {
        Self {
            free: Arc::new(Semaphore::new(limit)),
            limit,
            patience,
        }
    }

    /// A place, which is free again when the permit is dropped.
    ///
    /// # Errors
    /// [`SandboxError::Busy`] if none becomes free in time.
    pub async fn take(&self) -> Result<OwnedSemaphorePermit, SandboxError> {
        let permit = Arc::clone(&self.free).acquire_owned();
        match tokio::time::timeout(self.patience, permit).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(SandboxError::Busy {
                waited_s: self.patience.as_secs(),
                live: self.limit,
                limit: self.limit,
            }),
        }
    }
}
