//! Capacity of an engine that the gateway shares with others.

use futures::future::BoxFuture;
use sinew_types::{EpisodeId, TokenId};

/// Capacity for one model call; given back when dropped.
pub type CapacityPermit = Box<dyn Send>;

/// Lets model calls generate when the engine has capacity for them.
pub trait Capacity: Send + Sync {
    /// Waits until a call of `rollout` may generate after `prompt`. Dropping the future gives up.
    fn acquire<'a>(
        &'a self,
        rollout: &'a EpisodeId,
        prompt: &'a [TokenId],
    ) -> BoxFuture<'a, CapacityPermit>;
}
