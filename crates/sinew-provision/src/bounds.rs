//! What the server grants.

use sinew_sandbox::Limits;
use std::time::Duration;

/// What the server grants.
#[derive(Clone, Debug, PartialEq)]
pub struct Bounds {
    /// Bounds of a sandbox where the client names none.
    pub limits: Limits,
    /// Largest bounds that a client may name.
    pub most: Limits,
    /// Live sandboxes of one owner.
    pub sandboxes: usize,
    /// Snapshots of one owner.
    pub snapshots: usize,
    /// Lease where the client names none.
    pub lease: Duration,
    /// Longest lease.
    pub longest_lease: Duration,
    /// Wall time of an execution where the client names none.
    pub timeout: Duration,
    /// Longest wall time of an execution.
    pub longest_timeout: Duration,
    /// Bytes that snapshots of one owner keep, and snapshots that its sandboxes started from; what
    /// several share counts once.
    pub snapshot_bytes: u64,
    /// Bytes of one file, and of an imported archive.
    pub file_bytes: usize,
    /// Bytes of an exported archive.
    pub archive_bytes: u64,
    /// Open connections of one owner.
    pub connections: usize,
    /// Open connections that have shown no valid token, of all addresses; the oldest makes room.
    pub strangers: usize,
    /// Those of one address.
    pub strangers_per_address: usize,
    /// Time in which a new connection must show a valid token.
    pub head_time: Duration,
    /// Time for the head of each further request to arrive, and in which a client takes something of
    /// what it is sent.
    pub idle: Duration,
    /// Time for the body of a request to arrive.
    pub body_time: Duration,
    /// Files and archives that one owner sends and fetches at once; more wait. On their way they are
    /// on disk (`TMPDIR`), files for a moment in memory, too.
    pub transfers: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            most: Limits {
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
            longest_lease: Duration::from_secs(86_400),
            timeout: Duration::from_secs(30),
            longest_timeout: Duration::from_secs(3600),
            snapshot_bytes: 4 << 30,
            file_bytes: 64 << 20,
            archive_bytes: 1 << 30,
            connections: 512,
            strangers: 256,
            strangers_per_address: 64,
            head_time: Duration::from_secs(10),
            idle: Duration::from_secs(60),
            body_time: Duration::from_secs(300),
            transfers: 4,
        }
    }
}
