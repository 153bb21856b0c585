//! Network quota of an episode.

use crate::policy::{Denial, Reason};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// Limits of a session.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Quota {
    /// Requests and tunnels, including refused ones.
    pub requests: u64,
    /// Bytes sent to servers, headers included.
    pub bytes_up: u64,
    /// Bytes received from servers, headers included.
    pub bytes_down: u64,
    /// Body bytes of one request. It is buffered in memory.
    pub request_bytes: u64,
    /// Wall seconds of one request or tunnel.
    pub request_s: f64,
    /// Wall seconds from the start of the session.
    pub session_s: f64,
    /// Concurrent connections. Further ones wait.
    pub connections: u64,
    /// Concurrent look-ups of names, including those whose client has gone. Further ones wait.
    pub lookups: u64,
    /// Bytes held in memory: of all bodies of requests, and of all responses of the modes that record,
    /// replay and cache. What would exceed them waits; a larger response is refused, or not cached.
    pub held_bytes: u64,
}

impl Default for Quota {
    fn default() -> Self {
        Self {
            requests: 1000,
            bytes_up: 16 << 20,
            bytes_down: 256 << 20,
            request_bytes: 4 << 20,
            request_s: 60.0,
            session_s: 3600.0,
            connections: 16,
            lookups: 4,
            held_bytes: 32 << 20,
        }
    }
}

impl Quota {
    /// Checks the limits. The error is field, value and allowed values of the first invalid one.
    pub(crate) fn check(&self) -> Result<(), (&'static str, String, &'static str)> {
        let counts = [
            ("requests", self.requests),
            ("bytes_up", self.bytes_up),
            ("bytes_down", self.bytes_down),
            ("request_bytes", self.request_bytes),
            ("connections", self.connections),
            ("lookups", self.lookups),
        ];
        if let Some((field, value)) = counts.iter().find(|(_, v)| *v == 0) {
            return Err((field, value.to_string(), "at least 1"));
        }
        if self.connections > 1024 {
            return Err(("connections", self.connections.to_string(), "1 to 1024"));
        }
        if self.lookups > 64 {
            return Err(("lookups", self.lookups.to_string(), "1 to 64"));
        }
        if !(self.request_bytes..=1 << 30).contains(&self.held_bytes) {
            return Err((
                "held_bytes",
                self.held_bytes.to_string(),
                "request_bytes to 1073741824",
            ));
        }
        if self.request_bytes > 64 << 20 {
            return Err((
                "request_bytes",
                self.request_bytes.to_string(),
                "at most 67108864, as it is held in memory",
            ));
        }
        for (field, value) in [("request_s", self.request_s), ("session_s", self.session_s)] {
            if !(value > 0.0 && value <= 1e7) {
                return Err((field, value.to_string(), "above 0, at most 1e7 seconds"));
            }
        }
        Ok(())
    }
}

/// Usage of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionUsage {
    /// Requests and tunnels, including refused ones.
    pub requests: u64,
    /// Denied requests and tunnels.
    pub denied: u64,
    /// Bytes sent to servers, headers included.
    pub bytes_up: u64,
    /// Bytes received from servers, headers included.
    pub bytes_down: u64,
}

/// Usage counters of a session and their limits.
#[derive(Debug)]
pub(crate) struct Meter {
    /// Limits of the session.
    quota: Quota,
    /// Requests and tunnels, including refused ones.
    requests: AtomicU64,
    /// Denied requests and tunnels.
    denied: AtomicU64,
    /// Bytes sent to servers.
    up: AtomicU64,
    /// Bytes received from servers.
    down: AtomicU64,
}

impl Meter {
    /// Creates counters at zero.
    pub(crate) fn new(quota: Quota) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            quota,
            requests: zero(),
            denied: zero(),
            up: zero(),
            down: zero(),
        }
    }

    /// Current usage.
    pub(crate) fn used(&self) -> SessionUsage {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        SessionUsage {
            requests: get(&self.requests),
            denied: get(&self.denied),
            bytes_up: get(&self.up),
            bytes_down: get(&self.down),
        }
    }

    /// Counts a denied request.
    pub(crate) fn deny(&self) {
        self.denied.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request at `age_s` seconds after the start of the session.
    pub(crate) fn request(&self, age_s: f64) -> Result<(), Denial> {
        let before = self.requests.fetch_add(1, Ordering::Relaxed);
        if before >= self.quota.requests {
            return Err(used_up("requests", self.quota.requests));
        }
        if age_s > self.quota.session_s {
            let detail = format!("the session's {} s are over", self.quota.session_s);
            return Err(Denial::new(Reason::Quota, detail));
        }
        Ok(())
    }

    /// Counts bytes to a server.
    pub(crate) fn up(&self, bytes: usize) -> Result<(), Denial> {
        let total = self.up.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        within("bytes_up", total, self.quota.bytes_up)
    }

    /// Checks whether `bytes` may be sent to a server, without counting them.
    pub(crate) fn may_up(&self, bytes: u64) -> Result<(), Denial> {
        let total = self.up.load(Ordering::Relaxed).saturating_add(bytes);
        within("bytes_up", total, self.quota.bytes_up)
    }

    /// Checks whether `bytes` may be received from a server, without counting them.
    pub(crate) fn may_down(&self, bytes: u64) -> Result<(), Denial> {
        let total = self.down.load(Ordering::Relaxed).saturating_add(bytes);
        within("bytes_down", total, self.quota.bytes_down)
    }

    /// Counts bytes from a server.
    pub(crate) fn down(&self, bytes: usize) -> Result<(), Denial> {
        let total = self.down.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        within("bytes_down", total, self.quota.bytes_down)
    }
}

fn within(field: &str, total: u64, limit: u64) -> Result<(), Denial> {
    if total <= limit {
        Ok(())
    } else {
        Err(used_up(field, limit))
    }
}

fn used_up(field: &str, limit: u64) -> Denial {
    Denial::new(
        Reason::Quota,
        format!("the episode's quota of {limit} {field} is used up"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_beyond_the_quota_is_refused_and_counted() {
        let meter = Meter::new(Quota {
            requests: 2,
            bytes_up: 10,
            session_s: 5.0,
            ..Quota::default()
        });
        assert!(
            meter.request(0.0).is_ok()
                && meter.request(6.0).is_err()
                && meter.request(0.0).is_err()
        );
        assert!(meter.up(10).is_ok() && meter.up(1).is_err());
        assert_eq!((meter.used().requests, meter.used().bytes_up), (3, 11));
    }
}
