//! Capacity of an engine that the gateway shares with others.

use futures::future::BoxFuture;
use sinew_types::{EpisodeId, TokenId};

/// Permission for one model call; dropping it releases the capacity.
pub type CapacityPermit = Box<dyn Send>;

/// Admission of model calls: a call generates only when the engine has capacity for it.
pub trait Capacity: Send + Sync {
    /// Waits until a call of `rollout` may generate after `prompt`. Dropping the future cancels the wait.
    fn acquire<'a>(
        &'a self,
        rollout: &'a EpisodeId,
        prompt: &'a [TokenId],
    ) -> BoxFuture<'a, CapacityPermit>;
}
