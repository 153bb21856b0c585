//! Limits of the server.

use sinew_sandbox::Limits;
use std::time::Duration;

/// Limits and timeouts of the server.
#[derive(Clone, Debug, PartialEq)]
pub struct Bounds {
    /// Default limits of a sandbox.
    pub limits: Limits,
    /// Maximum limits that a client can request.
    pub max_limits: Limits,
    /// Maximum live sandboxes per owner.
    pub sandboxes: usize,
    /// Maximum snapshots per owner.
    pub snapshots: usize,
    /// Default lease.
    pub lease: Duration,
    /// Maximum lease.
    pub max_lease: Duration,
    /// Default wall time of an execution.
    pub timeout: Duration,
    /// Maximum wall time of an execution.
    pub max_timeout: Duration,
    /// Maximum snapshot bytes per owner, including snapshots that its sandboxes started from. Shared data
    /// counts once.
    pub snapshot_bytes: u64,
    /// Maximum bytes of one file, and of an imported archive.
    pub file_bytes: usize,
    /// Maximum bytes of an exported archive.
    pub archive_bytes: u64,
    /// Maximum open connections per owner.
    pub connections: usize,
    /// Maximum open connections without a valid token, over all addresses. A full quota closes the oldest
    /// one of the address that has the most.
    pub unauthenticated: usize,
    /// Maximum open connections without a valid token per address. A full quota closes the oldest one.
    pub unauthenticated_per_address: usize,
    /// Time until a new connection must have sent a valid token.
    pub auth_timeout: Duration,
    /// Time for the headers of each further request, and maximum time in which a client acknowledges none of
    /// the bytes sent to it.
    pub idle_timeout: Duration,
    /// Time for the body of a request.
    pub body_timeout: Duration,
    /// Concurrent file and archive transfers per owner. Further ones wait. A transfer is buffered on disk
    /// (`TMPDIR`). Files are also briefly in memory.
    pub transfers: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            max_limits: Limits {
                cpu_s: 3600.0,
                memory_bytes: 4 << 30,
                processes: 1024,
                output_bytes: 8 << 20,
                work_bytes: 1 << 30,
                open_files: 4096,
            },
            sandboxes: 256,
            snapshots: 256,
            lease: Duration::from_secs(300),
            max_lease: Duration::from_secs(86_400),
            timeout: Duration::from_secs(30),
            max_timeout: Duration::from_secs(86_400),
            snapshot_bytes: 4 << 30,
            file_bytes: 64 << 20,
            archive_bytes: 1 << 30,
            connections: 512,
            unauthenticated: 256,
            unauthenticated_per_address: 64,
            auth_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(300),
            transfers: 4,
        }
    }
}
