//! Limits of a sandbox, and the protections around it.

use serde::{Deserialize, Serialize};

/// Resource limits of a sandbox.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// CPU time of one execution, in seconds.
    pub cpu_s: f64,
    /// Memory of everything in the sandbox together, files in its folders included.
    pub memory_bytes: u64,
    /// Processes and threads at once.
    pub processes: u64,
    /// Captured bytes of standard output and of standard error, each.
    pub output_bytes: u64,
    /// Bytes of files in the work folder and in `/tmp` together.
    pub work_bytes: u64,
    /// Open files of one process.
    pub open_files: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            cpu_s: 4.0,
            memory_bytes: 256 << 20,
            processes: 16,
            output_bytes: 64 << 10,
            work_bytes: 16 << 20,
            // Node.js does not start with 64.
            open_files: 1024,
        }
    }
}

/// Network of a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Network {
    /// None: not even a loopback interface that is up.
    #[default]
    None,
    /// A separate loopback interface, on which `Sandbox::listen_inside` can place a listener of the host's;
    /// TCP sockets can be made, no route leads anywhere else.
    Loopback,
}

/// One protection and whether it is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protection {
    /// Short name: `network`, `seccomp`, `memory`, ...
    pub name: String,
    /// Whether it is in force on this host.
    pub enforced: bool,
    /// Mechanism, or the reason why it is not in force.
    pub how: String,
}
