//! Decides which engine carries out which request, and when. Pure: time and randomness are arguments.
//!
//! The parts: [`Router`] decides, `state` holds the facts about engines and requests, `prefix` remembers
//! which leading blocks engines have seen, `loads` orders them by their load, `breaker` keeps failing engines
//! out.

mod breaker;
mod lengths;
mod loads;
mod prefix;
mod router;
mod state;

use crate::guided::FormatMode;
pub use breaker::BreakerConfig;
pub use router::Router;
pub(crate) use state::adapter_name;
pub use state::{Command, Counters, EngineView, RoutedAdapter};

/// Limits and rules of a [`Router`].
#[derive(Clone, Debug, PartialEq)]
pub struct RouterConfig {
    /// Maximum requests that wait; more are refused with `QueueFull`. Default: 4096.
    pub max_waiting: usize,
    /// Maximum attempts on one engine at a time. Default: 256.
    pub max_running: usize,
    /// Attempts in a row that may fail without a new token before their request fails. A busy
    /// server does not count. Default: 5.
    pub max_failures: u32,
    /// Seconds that a request may wait for an engine; then it fails. A pause does not count.
    /// Default: 300.
    pub max_wait_s: f64,
    /// First pause after a failure, in seconds; doubles with each one, up to `backoff_max_s`, and
    /// is spread by ±25 %. Default: 0.25.
    pub backoff_s: f64,
    /// Maximum pause after a failure, in seconds. Default: 8.
    pub backoff_max_s: f64,
    /// Conditions for leaving out a failing engine.
    pub breaker: BreakerConfig,
    /// Tokens of a block; only whole leading blocks attract a request to an engine. Default: 64.
    pub block_tokens: usize,
    /// Maximum blocks that are remembered for each engine. Default: 65,536.
    pub max_blocks: usize,
    /// Maximum imbalance, in attempts of mean length: an engine whose load exceeds the lowest load by more
    /// gets no request because of its cached prefix. Default: 16.
    pub max_imbalance: usize,
    /// Output tokens for which KV capacity must be free when an attempt starts; a request that asks
    /// for fewer reserves fewer. Default: 256.
    pub reserve_tokens: usize,
    /// Continuation of a request that has tokens when its attempt fails. Default: from the ids so far.
    pub on_partial: OnPartial,
    /// Handling of requests' output formats. Default: by the server.
    pub formats: FormatMode,
    /// Another program publishes weights to the engines and labels them: the newest version that an
    /// engine is found to have samples from then on. Default: only [`Router::loaded`] changes it.
    pub follow: bool,
    /// Weights are LoRA adapters by name, `NAME-v13-9f3c12ab` for this name: an attempt asks for the
    /// adapter of its weights, and continues with it while others are loaded. Default: whole weights.
    pub adapters: Option<String>,
    /// Maximum adapters that requests can name at the same time; loading one more is refused. Default: 64.
    pub max_adapters: usize,
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
            follow: false,
            adapters: None,
            max_adapters: 64,
        }
    }
}

/// Continuation of a request whose attempt failed after it had sampled tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnPartial {
    /// Another attempt starts from the ids so far.
    Continue,
    /// It ends as aborted, with the tokens that came.
    Keep,
    /// It fails, as if nothing had come.
    Fail,
}
