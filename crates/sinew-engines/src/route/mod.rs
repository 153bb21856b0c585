//! Which engine carries out which request, and when. Pure: time and randomness are arguments.

mod breaker;
mod prefix;
mod router;
mod state;

use crate::guided::FormatMode;
pub use breaker::BreakerConfig;
pub use router::Router;
pub use state::{Command, Counters, EngineView};

/// Limits and rules of a [`Router`].
#[derive(Clone, Debug, PartialEq)]
pub struct RouterConfig {
    /// Most requests that wait; more are refused with `QueueFull`.
    pub max_waiting: usize,
    /// Most attempts on one engine at a time.
    pub max_running: usize,
    /// Attempts in a row that may fail without a new token before their request fails.
    pub max_failures: u32,
    /// Seconds that a request may wait for an engine; then it fails.
    pub max_wait_s: f64,
    /// First pause after a failure; doubles with each one, up to `backoff_max_s`, and is
    /// spread by +-25 %.
    pub backoff_s: f64,
    pub backoff_max_s: f64,
    pub breaker: BreakerConfig,
    /// Tokens of a block; only whole leading blocks attract a request to an engine.
    pub block_tokens: usize,
    /// Blocks that are remembered for each engine.
    pub max_blocks: usize,
    /// An engine that has that many attempts more than the idlest one attracts no more.
    pub max_imbalance: usize,
    /// Output tokens for which KV capacity must be free when an attempt starts; a request that
    /// asks for fewer reserves fewer.
    pub reserve_tokens: usize,
    /// What becomes of a request that has tokens when its attempt fails.
    pub on_partial: OnPartial,
    /// What becomes of a request's format.
    pub formats: FormatMode,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            max_waiting: 4096,
            max_running: 256,
            max_failures: 5,
            max_wait_s: 300.0,
            backoff_s: 0.25,
            backoff_max_s: 8.0,
            breaker: BreakerConfig::default(),
            block_tokens: 64,
            max_blocks: 1 << 16,
            max_imbalance: 16,
            reserve_tokens: 256,
            on_partial: OnPartial::Continue,
            formats: FormatMode::default(),
        }
    }
}

/// What becomes of a request whose attempt failed after it had sampled tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnPartial {
    /// Another attempt starts from the ids so far.
    Continue,
    /// It ends as aborted, with what came.
    Keep,
    /// It fails.
    Fail,
}
