//! Tools of MCP servers, for tasks and rewards of a recipe.
//!
//! ```text
//! kind.rs     the keys of `[env] type = "mcp"`
//! server.rs   how a server is started or reached
//! client.rs   one session with a server, by `rmcp`
//! env.rs      episodes: one session with each server
//! ```

mod client;
mod env;
mod kind;
mod server;

pub use env::McpEnvFactory;
pub use kind::{MCP_KIND, Mcp, McpServer};
