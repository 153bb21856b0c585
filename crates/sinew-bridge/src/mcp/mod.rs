//! Tools of MCP servers, for tasks and rewards of a recipe.
//!
//! ```text
//! keys.rs     the keys of `[env] type = "mcp"`
//! kind.rs     the environment of the registry
//! server.rs   how a server is started or reached
//! client.rs   one session with a server, by `rmcp`
//! env.rs      episodes: one session with each server
//! ```
//!
//! Invariants:
//! - An episode shares no session and no process with another one.
//! - A command runs in a sandbox without a network; its lines, results and waits are bounded.
//! - An error of the model or of a tool is an observation. An error of the server fails the episode.

#[cfg(feature = "mcp")]
mod client;
#[cfg(feature = "mcp")]
mod env;
mod keys;
mod kind;
#[cfg(feature = "mcp")]
mod server;

#[cfg(feature = "mcp")]
pub use env::McpEnvFactory;
pub use keys::{Mcp, McpServer};
pub use kind::MCP_KIND;
