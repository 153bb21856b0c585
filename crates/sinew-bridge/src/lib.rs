//! Environments, rewards and tasks of users: in sandboxed Python processes, behind HTTP (`http/`), and tools
//! of MCP servers (`mcp/`). Protocols of other projects are in `sinew-peers`.
//!
//! ```text
//! PythonEnvFactory, PythonReward, PythonRows   what rollouts, scoring and tasks use
//!         |
//!   PythonWorkers                         a bounded pool: sessions, deadlines, restarts
//!         |  frames (JSON after its length) over one TCP connection inside of the sandbox
//!   worker process                        schema.py + rows.py + worker.py + the user's module
//! ```
//!
//! The user's code is not trusted. A worker sees the folder of the module, the packages of the interpreter
//! and nothing else of the host; it has no network except its connection to the host, which it cannot open
//! twice. The host chooses the ids of sessions and calls, so a worker answers only for its own sessions.
//!
//! Sessions of one worker share an interpreter: they are isolated from the host, not from each other. A call
//! that crashes, hangs or takes all processes ends its worker, and the other sessions of that worker fail
//! with the reason. `sessions_per_worker = 1` isolates episodes from each other.
//!
//! Invariants:
//! - Every call ends by its deadline, with a value or a [`CallError`].
//! - An error of the user's code is never a score: it is a failed episode or an unscored sample, with file
//!   and line.
//! - Workers, sessions, calls at once, bytes of a frame and starts of workers are bounded.

mod check;
mod code;
mod env;
mod error;
mod findings;
mod floors;
mod frame;
mod http;
mod images;
mod kind;
mod lock;
mod mcp;
mod plan;
mod reward;
mod rows;
mod runs;
mod runtime;
mod session;
mod target;
mod tasks;
mod worker;
mod workers;
mod worlds;

use sinew_env::{counts, turn};

/// Common parts of `http/` and the clients and servers of other protocols over HTTP: limits, requests, keys,
/// and the runtime of a client. `sinew-peers` is the user.
pub mod remote {
    pub use crate::http::{
        MAX_BODY, MAX_TEXT, NO_JSON, NO_KEY, Remote, RemoteError, ServeKey, Server, address,
        check_address, cut, gone, refused, worker,
    };
    pub use crate::kind::{check_timeouts, refuse_key};
    pub use crate::lock::lock;
    pub use crate::runtime::block_on;
}

pub use check::{CheckReport, EnvCheck, Finding};
pub use code::PythonCode;
pub use env::PythonEnvFactory;
pub use error::{CallError, SetupError, StartError};
pub use frame::{FrameError, FrameReader, MAX_FRAME, encode};
pub use http::{
    CaseOutcome, ConformanceOptions, ConformanceRow, EnvServer, HTTP_KIND, Http, HttpEnvFactory,
    ServeOptions, conformance, serve_env,
};
pub use images::TaskImages;
pub use kind::{KIND, Python};
#[cfg(feature = "mcp")]
pub use mcp::McpEnvFactory;
pub use mcp::{MCP_KIND, Mcp, McpServer};
pub use reward::PythonReward;
pub use rows::{PythonRows, RowLimits};
pub use target::{Target, TargetKind};
pub use tasks::SplitTasks;
pub use workers::{PythonWorkers, WorkersConfig};
