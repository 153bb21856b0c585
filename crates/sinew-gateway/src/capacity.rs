//! Who may generate, where the gateway is not alone with its engine.

use futures::future::BoxFuture;
use sinew_types::{EpisodeId, TokenId};

/// Room of the engine for one model call; given back when dropped.
pub type Room = Box<dyn Send>;

/// Lets model calls generate when there is room for them.
pub trait Gate: Send + Sync {
    /// Waits until a call of `rollout` may generate after `prompt`. Dropping the future gives up.
    fn enter<'a>(&'a self, rollout: &'a EpisodeId, prompt: &'a [TokenId]) -> BoxFuture<'a, Room>;
}
