//! Limits of a gateway. Everything that can grow has a limit here.
//!
//! Defaults suit training runs of thousands of rollouts on one host. The client that opens a rollout can
//! lower its limits but not raise them. A call above its rollout's limit on calls, tokens or message text
//! gets status 400 with a code for this limit, and the episode counts as truncated. A call above
//! `max_concurrent`, or above the server's limit on rollouts, calls or connections, gets status 429 or 503,
//! after which clients retry.

use std::time::Duration;

/// Limits of one rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Maximum number of model calls, not counting failed ones. Default 1,024.
    pub max_turns: u32,
    /// Maximum number of tokens of prompt and output together in one call. Default 8,192.
    pub max_context_tokens: u32,
    /// Maximum number of tokens in all nodes of the trace. Default 4 Mi.
    pub max_trace_tokens: u64,
    /// Maximum bytes of message text in the trace.
    /// Default 64 MiB.
    pub max_message_bytes: u64,
    /// Maximum number of metric names in its rewards. Default 256, of at most 128 bytes each.
    pub max_metrics: u32,
    /// Maximum bytes of all rewards of the rollout, including replaced ones, since the journal keeps them.
    /// Default 1 MiB.
    pub max_reward_bytes: u64,
    /// Maximum number of concurrent calls. Default 64, for agents that sample in parallel.
    pub max_concurrent: u32,
    /// Maximum output tokens of a call that does not set a limit. Default 512.
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

/// Limits of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Maximum number of open rollouts. Default 16,384.
    pub max_rollouts: usize,
    /// Maximum number of concurrent model calls over all rollouts. Default 8,192.
    pub max_in_flight: usize,
    /// Maximum number of open connections with a key, at most half of the process's limit on open files. One
    /// rollout may use a quarter of them. A request on a further connection gets status 429. Default 16,384.
    pub max_connections: usize,
    /// Maximum bytes of a request body.
    /// Default 16 MiB.
    pub max_body_bytes: usize,
    /// Maximum bytes of an adapter's tensors, which are kept in memory until the engine has them. Default 512
    /// MiB.
    pub max_adapter_bytes: usize,
    /// Maximum bytes of a request's headers. Default 64 KiB.
    pub max_head_bytes: usize,
    /// Maximum number of choices (`n`) of one call. Default 16.
    pub max_choices: u32,
    /// Timeout for a request's headers and body to arrive. Default 30 s.
    pub read_timeout: Duration,
    /// Timeout for a client that does not read any part of the response. Default 120 s.
    pub write_timeout: Duration,
    /// Time after a closed connection within which the client may retry and join the running call. Default 10
    /// s: SDKs wait up to 8 s before they try again.
    pub client_grace: Duration,
    /// Timeout of a model call, including queueing. Default 600 s.
    pub call_timeout: Duration,
    /// Time without a call after which a rollout is ended. Default one hour.
    pub rollout_ttl: Duration,
    /// Time for running calls to end when the server stops. Default 5 s.
    pub shutdown_grace: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            max_rollouts: 16_384,
            max_in_flight: 8192,
            max_connections: 16_384,
            max_body_bytes: 16 << 20,
            max_adapter_bytes: 512 << 20,
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
