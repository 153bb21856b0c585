//! Environments behind HTTP (docs/environment-protocol.md): the client, a server, and a conformance suite.
//!
//! ```text
//! client.rs       episodes of a server as environments        (`[env] type = "http"`)
//! serve.rs        any environment as a server                 (`sinew env serve`)
//! conformance.rs  whether a server keeps the protocol         (`sinew env test`)
//! remote.rs       requests with a key, repeats and deadlines
//! server.rs       a server with its key, and the runtime of its clients
//! protocol.rs     bodies and limits
//! keys.rs         keys of the recipe
//! kind.rs         the environment of the registry
//! ```
//!
//! An episode goes through these steps: a place (a permit of the declared capacity) -> `POST /episodes` with
//! an id of the client -> a call of the server for each tool call -> `POST .../score` -> `DELETE`. A lease
//! ends episodes whose client is gone.
//!
//! Invariants:
//! - A request can be repeated: ids of episodes and calls make the second one give the first one's answer.
//! - An episode that the server lost is never silently begun again: it fails.
//! - A missing score is unscored, never 0.
//! - Both sides bound bodies, texts, episodes, requests and waits.

mod client;
mod conformance;
mod keys;
mod kind;
mod protocol;
mod remote;
mod serve;
mod server;

pub use protocol::{MAX_BODY, MAX_TEXT, cut};
#[cfg(feature = "mcp")]
pub(crate) use remote::client;
pub use remote::{Remote, RemoteError, address};

pub use self::client::HttpEnvFactory;
pub use conformance::{CaseOutcome, ConformanceOptions, ConformanceRow, conformance};
pub use keys::Http;
pub use kind::{HTTP_KIND, check_address};
pub use serve::{EnvServer, NO_JSON, NO_KEY, ServeKey, ServeOptions, serve_env};
pub use server::{Server, gone, refused, worker};
