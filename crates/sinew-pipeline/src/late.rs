//! Groups that wait for rewards from outside.
//!
//! A group whose episodes have ended waits in [`WaitingGroups`](sinew_orchestrator::WaitingGroups) until
//! every required reward was given, or its time is up. Its traces stay in the store; this holds only ids,
//! times and versions, and is rebuilt from the store: every training episode that no commit names waits. The
//! fate of a group is a function of the waiting groups, the scores and the time, which is an argument.

use sinew_orchestrator::{LateConfig, PipelineError};
use sinew_store::{Inbox, TraceStore};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// Interval between two readings of the inbox.
const POLL: Duration = Duration::from_millis(100);
/// Time after which a wait returns, so that the loop can check its time.
const PATIENCE: Duration = Duration::from_secs(1);

/// Brings scores from outside into the store of a run that is at work.
pub trait LateScores {
    /// Takes the scores that came since the last call. If `wait` is set and nothing comes, it returns after a
    /// moment.
    ///
    /// # Errors
    /// If the store refuses them, or the run is to stop.
    fn take(&mut self, store: &dyn TraceStore, wait: bool) -> Result<(), PipelineError>;

    /// Seconds since 1970.
    fn now_s(&self) -> f64;
}

/// Rewards that other processes left in the inbox of the run's store, and those that are put into the store
/// itself.
#[derive(Debug)]
pub struct InboxScores {
    inbox: Inbox,
    cancel: watch::Receiver<bool>,
}

impl InboxScores {
    /// The inbox of the store in a folder; `cancel` ends a wait.
    pub fn new(store: &Path, cancel: watch::Receiver<bool>) -> Self {
        Self {
            inbox: Inbox::of_store(store),
            cancel,
        }
    }
}

impl LateScores for InboxScores {
    fn take(&mut self, store: &dyn TraceStore, wait: bool) -> Result<(), PipelineError> {
        let begun = Instant::now();
        loop {
            let (new, bad) = self.inbox.take(store).map_err(PipelineError::system)?;
            for place in &bad {
                tracing::error!(
                    place,
                    "a score of the inbox cannot be read; its file is kept"
                );
            }
            if *self.cancel.borrow() {
                return Err(PipelineError::Interrupted);
            }
            if !wait || new > 0 || begun.elapsed() >= PATIENCE {
                return Ok(());
            }
            std::thread::sleep(POLL);
        }
    }

    fn now_s(&self) -> f64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.map_or(0.0, |d| d.as_secs_f64())
    }
}

/// Source of late rewards, and the rules for waiting for them.
pub struct LateRewards {
    pub config: LateConfig,
    pub scores: Box<dyn LateScores>,
}

impl std::fmt::Debug for LateRewards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Late")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
