//! Ctrl-C and TERM.

use crate::failure::Failure;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Both signals from the moment that it is made: until then they end the process at once.
pub(crate) struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    /// Needs a runtime around it.
    ///
    /// # Errors
    /// What the system refuses.
    pub(crate) fn new() -> Result<Self, Failure> {
        let wait = |kind| signal(kind).map_err(Failure::system);
        Ok(Self {
            interrupt: wait(SignalKind::interrupt())?,
            terminate: wait(SignalKind::terminate())?,
        })
    }

    /// Waits for one of them; one that came since the last call counts.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
