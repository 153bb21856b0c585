//! Addresses, limits and times of outside engines.
//!
//! The recipe's `[engine]` section fills these; the defaults stand in the `Default`
//! implementations. Every time is in seconds.

use crate::route::RouterConfig;
use sinew_types::{Lineage, PolicyVersion, WeightsId};

/// Seconds after which a wait is given up. All are positive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timeouts {
    /// Time for a TCP and TLS connection. Default: 5.
    pub connect_s: f64,
    /// Time from the request to its first token; covers the server's queue and the prompt. Default: 120.
    pub first_token_s: f64,
    /// Time between two pieces of a stream. Default: 60.
    pub between_tokens_s: f64,
    /// Time for one attempt; its tokens are kept, and another attempt continues. Default: 1800.
    pub whole_s: f64,
    /// Time for health checks and other small requests. Default: 10.
    pub control_s: f64,
    /// Time for loading weights, and for falling asleep or waking up. Default: 600.
    pub load_s: f64,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect_s: 5.0,
            first_token_s: 120.0,
            between_tokens_s: 60.0,
            whole_s: 1800.0,
            control_s: 10.0,
            load_s: 600.0,
        }
    }
}

/// Address of a server, and the facts that it does not report itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    /// `http://` or `https://`, host, optional port and path; a final `/v1` is left out.
    pub url: String,
    /// Sent as a bearer token with every request; never logged.
    pub api_key: Option<String>,
    /// Name of the served model; `None` takes the first one that the server lists.
    pub model: Option<String>,
    /// Maximum tokens of prompt and output together, if the server does not report it.
    pub context: Option<usize>,
    /// Number of token ids: lets unknown ids be refused before they are sent.
    pub vocab: Option<usize>,
    /// Limits of every call to this server.
    pub timeouts: Timeouts,
}

impl ServerConfig {
    /// The server at `url`, with default times.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            api_key: None,
            model: None,
            context: None,
            vocab: None,
            timeouts: Timeouts::default(),
        }
    }
}

/// Source of random numbers in [0, 1) that spread retries. An argument, so that tests are
/// reproducible.
pub type Jitter = Box<dyn FnMut() -> f64 + Send>;

/// Settings of a [`crate::RemoteEngine`].
pub struct RemoteConfig {
    /// Limits and rules of the router.
    pub router: RouterConfig,
    /// Version of the weights that the servers hold at the start.
    pub version: PolicyVersion,
    /// Origin of all weights that are loaded by this engine: one for each session of a run whose trainer does
    /// not repeat its bits. A server with the right version of another lineage is not sampled from.
    pub lineage: Lineage,
    /// Seconds between two probes of a server. Default: 1. A server that dies is noticed at the
    /// next probe, or by a failing attempt.
    pub probe_interval_s: f64,
    /// Hand tokens on only when their attempt has ended and the server's version is verified again.
    /// Costs streaming; without it a swap of weights by another client during an attempt fails the
    /// request. Default: off.
    pub hold_until_verified: bool,
    /// Spreads the pauses before retries, so that many requests do not come back at the same
    /// moment.
    pub jitter: Jitter,
}

impl RemoteConfig {
    /// Default limits, with retries spread by `jitter`.
    pub fn new(jitter: Jitter) -> Self {
        Self {
            router: RouterConfig::default(),
            version: PolicyVersion::default(),
            lineage: Lineage::default(),
            probe_interval_s: 1.0,
            hold_until_verified: false,
            jitter,
        }
    }

    /// The weights that the servers hold at the start.
    pub(crate) fn first(&self) -> WeightsId {
        WeightsId::new(self.version, self.lineage)
    }
}

sinew_types::debug_fields!(
    RemoteConfig,
    router,
    version,
    lineage,
    probe_interval_s,
    hold_until_verified
);

/// A configuration that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// An address that no client can use.
    #[error("engine url `{url}`: {why}")]
    Url {
        /// Address as it was given.
        url: String,
        /// Reason in words.
        why: String,
    },
    /// A value outside its range.
    #[error("engine {name} = {value}: {allowed}")]
    Value {
        /// Name of the setting.
        name: &'static str,
        /// Value as printed.
        value: String,
        /// Allowed values in words.
        allowed: String,
    },
    /// The thread or its runtime could not be started.
    #[error("engine thread: {0}")]
    Thread(String),
}
