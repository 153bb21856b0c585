//! Environments of OpenEnv servers (docs/bridges.md): one socket is one session, and one episode.
//!
//! ```text
//! keys.rs    the keys of `[env] type = "openenv"`
//! kind.rs    the environment of the registry, and its tasks: seeds
//! socket.rs  messages over WebSocket, one at a time
//! form.rs    actions and observations, from the server's schemas
//! env.rs     episodes
//! ```
//!
//! Invariants:
//! - A socket has one request at a time: answers of this protocol carry no id.
//! - A server that closes before its first answer is full. The episode waits for the time of its key
//!   `wait_s`.
//! - A refusal of an action by the server is an observation. A lost socket fails the episode: its session is
//!   gone.

mod env;
mod form;
mod keys;
mod kind;
mod socket;

pub use env::OpenEnvFactory;
pub use keys::OpenEnv;
pub use kind::OPENENV_KIND;
