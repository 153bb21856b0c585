//! Servers of other projects as environments, and any environment for the clients of other projects
//! (docs/bridges.md).
//!
//! | part | what it does |
//! |---|---|
//! | `openenv/` | episodes of an OpenEnv server, over WebSocket: `[env] type = "openenv"` |
//! | `nemo/` | episodes of resource servers of NeMo Gym, over HTTP: `[env] type = "nemo_gym"` |
//! | `out/` | any environment as a server of OpenEnv or MCP: `sinew env serve --protocol` |
//! | `keys.rs` | defaults and checks of keys that both clients have |
//! | `seeds.rs` | tasks that are seeds alone, of worlds that a server makes |
//!
//! The environments are [`EnvKind`](sinew_env::EnvKind)s, which `sinew-recipe` registers. Requests over HTTP,
//! limits of bodies and the runtime of the clients are those of [`sinew_bridge::remote`]. Sinew's own
//! protocol over HTTP, and MCP servers as environments, are in `sinew-bridge`.
//!
//! Neither side is trusted: a server may answer anything, or nothing, and a client may send anything.
//!
//! Invariants:
//! - Every request and every wait has a deadline. Bodies, texts and sessions are bounded.
//! - A request that has no id in its protocol is sent once. Its episode fails if there is no answer.
//! - A missing score is unscored, never 0.
//! - A session holds one episode at a time, and its place is free again after its end.

mod keys;
mod nemo;
mod openenv;
mod out;
mod seeds;

use sinew_env::{counts, turn};

pub use nemo::{NEMO_KIND, NemoFactory, NemoGym};
pub use openenv::{OPENENV_KIND, OpenEnv, OpenEnvFactory};
pub use out::{McpLines, McpServing, Offer, Worlds, serve_mcp, serve_openenv};
