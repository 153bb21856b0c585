//! What bounds a gateway. Nothing in it grows without one of these.

use std::time::Duration;

/// Bounds of one rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Most model calls.
    pub max_turns: u32,
    /// Most tokens of prompt and output together in one call.
    pub max_context_tokens: u32,
    /// Most tokens in all nodes of the trace.
    pub max_trace_tokens: u64,
    /// Most bytes of message text in the trace.
    pub max_message_bytes: u64,
    /// Most calls at the same time.
    pub max_concurrent: u32,
    /// Output tokens of a call that asks for no number.
    pub default_max_tokens: u32,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            max_turns: 1024,
            max_context_tokens: 8192,
            max_trace_tokens: 4 << 20,
            max_message_bytes: 64 << 20,
            max_concurrent: 64,
            default_max_tokens: 512,
        }
    }
}

/// Bounds of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Most live rollouts.
    pub max_rollouts: usize,
    /// Most model calls at the same time, over all rollouts.
    pub max_in_flight: usize,
    /// Most open connections.
    pub max_connections: usize,
    /// Most bytes of a request body.
    pub max_body_bytes: usize,
    /// Most bytes of a request's head.
    pub max_head_bytes: usize,
    /// Most choices (`n`) of one call.
    pub max_choices: u32,
    /// Time for a request's head and body to arrive.
    pub read_timeout: Duration,
    /// Time in which a client takes something of what it is sent.
    pub write_timeout: Duration,
    /// Time for a model call, queueing included.
    pub call_timeout: Duration,
    /// Time from a rollout's last call after which it is ended.
    pub rollout_ttl: Duration,
    /// Time that running calls get to end when the server stops.
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
            call_timeout: Duration::from_secs(600),
            rollout_ttl: Duration::from_secs(3600),
            shutdown_grace: Duration::from_secs(5),
        }
    }
}
