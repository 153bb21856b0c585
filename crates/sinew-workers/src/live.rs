//! Rollouts that agents open and finish at the gateway of a worker.
//!
//! The owner stores a finished rollout before its agent is answered, so that one which ended is never lost.
//! An open rollout is its worker's: it ends with it, and its agent begins again elsewhere.

use sinew_store::StoreError;
use sinew_types::{EpisodeId, Trace};

/// Agents at the gateway of a worker.
pub trait LiveAgents: Send + Sync {
    /// Rollouts that were opened since the start.
    fn opened(&self) -> u64;

    /// The number of open rollouts, and the names of at most `most` of them.
    fn open(&self, most: usize) -> (usize, Vec<EpisodeId>);

    /// No more rollouts are opened from now on.
    fn leave(&self);
}

/// The owner's side: rollouts of agents, as the gateways of its workers report them.
pub trait LiveInbox: Send + Sync {
    /// Agents have opened rollouts.
    fn opened(&self);

    /// Stores a finished rollout; it is durable when the call returns. The same one again changes nothing.
    ///
    /// # Errors
    /// If the store refuses, or has another rollout of this name.
    fn finished(&self, trace: &Trace) -> Result<(), StoreError>;
}
