//! Any environment as servers of others' protocols: `sinew env serve` (docs/bridges.md).
//!
//! ```text
//! play.rs      one episode: a task by its number, actions, what came back, a score
//! openenv.rs   sessions over WebSocket, as OpenEnv's clients speak (`--protocol openenv`)
//! mcp.rs       messages of MCP: tools, the prompt, the score
//! mcp_http.rs  MCP over streamable HTTP and standard input         (`--protocol mcp`)
//! ```
//!
//! Invariants:
//! - A session holds one episode at a time, and no other session can reach it.
//! - Sessions, bodies, texts and idle time are bounded. A session without a message for the length of a lease
//!   ends.
//! - An error of the client or of the model is an answer; the session continues.

mod mcp;
mod mcp_http;
mod openenv;
mod play;

pub use mcp_http::{McpLines, McpServing, serve_mcp};
pub use openenv::serve_openenv;
pub use play::{Offer, Worlds};

use std::time::Duration;

/// Connections in addition to two for each session.
const SPARE: usize = 64;
/// Time for requests that run when a server stops.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// Connections of clients with the key.
fn clients(offer: &Offer) -> usize {
    2 * offer.sessions + SPARE
}
