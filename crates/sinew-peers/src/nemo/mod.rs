//! Environments of NeMo Gym's resource servers, over HTTP (docs/bridges.md).
//!
//! | part | what it does |
//! |---|---|
//! | `host` | a server with places, and requests that are sent once |
//! | `env` | episodes: `/seed_session`, a route per tool, `/verify` |
//! | `rows` | rows as tasks, and a conversation as the verifiers read it |
//!
//! Invariants:
//! - The protocol has no ids of requests: a request is sent once. One without an answer fails the episode.
//! - A missing score is unscored, never 0.

mod env;
mod host;
mod rows;

pub use env::{NEMO_KIND, NemoFactory, NemoGym};
