//! Limits of a gateway. Nothing in it grows without one of these.
//!
//! Defaults suit training runs of thousands of rollouts on one host. An opener narrows the limits of a
//! rollout and cannot widen them. A request above a limit of its rollout gets a 400 with a separate code, and
//! the episode counts as truncated. A request above a limit of the server gets a 429 or 503, after which
//! clients try again.

use std::time::Duration;

/// Bounds of one rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Maximum model calls.
    /// Default 1,024.
    pub max_turns: u32,
    /// Maximum tokens of prompt and output together in one call.
    /// Default 8,192.
    pub max_context_tokens: u32,
    /// Maximum tokens in all nodes of the trace.
    /// Default 4 Mi.
    pub max_trace_tokens: u64,
    /// Maximum bytes of message text in the trace.
    /// Default 64 MiB.
    pub max_message_bytes: u64,
    /// Maximum names of metrics that its rewards give.
    /// Default 256, of at most 128 bytes each.
    pub max_metrics: u32,
    /// Maximum bytes of all rewards that it is given, replaced ones included: they are kept in the journal.
    /// Default 1 MiB.
    pub max_reward_bytes: u64,
    /// Maximum calls at the same time.
    /// Default 64: an agent that fans out samples side by side.
    pub max_concurrent: u32,
    /// Output tokens of a call that asks for no number.
    /// Default 512.
    pub default_max_tokens: u32,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            max_turns: 1024,
            max_context_tokens: 8192,
            max_trace_tokens: 4 << 20,
            max_message_bytes: 64 << 20,
            max_metrics: 256,
            max_reward_bytes: 1 << 20,
            max_concurrent: 64,
            default_max_tokens: 512,
        }
    }
}

/// Bounds of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Maximum live rollouts.
    /// Default 16,384.
    pub max_rollouts: usize,
    /// Maximum model calls at the same time, over all rollouts.
    /// Default 8,192.
    pub max_in_flight: usize,
    /// Maximum open connections with a key, at most half of the files that the process may open. One
    /// rollout has a quarter of them. A request on a further one gets status 429.
    /// Default 16,384.
    pub max_connections: usize,
    /// Maximum bytes of a request body.
    /// Default 16 MiB.
    pub max_body_bytes: usize,
    /// Maximum bytes of a request's head.
    /// Default 64 KiB.
    pub max_head_bytes: usize,
    /// Maximum choices (`n`) of one call.
    /// Default 16.
    pub max_choices: u32,
    /// Time for a request's head and body to arrive.
    /// Default 30 s.
    pub read_timeout: Duration,
    /// Time in which a client takes something of what it is sent.
    /// Default 120 s.
    pub write_timeout: Duration,
    /// Time in which a client that closed its connection may ask again and get the call that it left.
    /// Default 10 s: SDKs wait up to 8 s before they try again.
    pub client_grace: Duration,
    /// Time for a model call, queueing included.
    /// Default 600 s.
    pub call_timeout: Duration,
    /// Time from a rollout's last call after which it is ended.
    /// Default one hour.
    pub rollout_ttl: Duration,
    /// Time that running calls get to end when the server stops.
    /// Default 5 s.
    pub shutdown_grace: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            max_rollouts: 16_384,
            max_in_flight: 8192,
            max_connections: 16_384,
            max_body_bytes: 16 << 20,
            max_head_bytes: 64 << 10,
            max_choices: 16,
            read_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(120),
            client_grace: Duration::from_secs(10),
            call_timeout: Duration::from_secs(600),
            rollout_ttl: Duration::from_secs(3600),
            shutdown_grace: Duration::from_secs(5),
        }
    }
}
