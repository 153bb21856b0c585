//! Environments of servers that speak the HTTP protocols of other projects (docs/bridges.md).
//!
//! ```text
//! host.rs      a server with places, and requests that are sent once
//! agentgym.rs  AgentGym: `/create`, `/reset`, `/step`, `/close`
//! nemo.rs      resource servers of NeMo Gym: `/seed_session`, a route per tool, `/verify`
//! nemo_rows.rs rows of NeMo Gym as tasks, and a conversation as its verifiers read it
//! ```
//!
//! Invariants:
//! - These protocols have no ids of requests: a request is sent once. One without an answer fails the
//!   episode.
//! - A missing score is unscored, never 0.

mod agentgym;
mod host;
mod nemo;
mod nemo_rows;

pub use agentgym::{AGENTGYM_KIND, AgentGym, AgentGymFactory};
pub use nemo::{NEMO_KIND, NemoFactory, NemoGym};
