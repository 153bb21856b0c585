//! Environments behind HTTP (docs/environment-protocol.md): the client, a server, and a conformance suite.
//!
//! ```text
//! client.rs       episodes of a server as environments        (`[env] type = "http"`)
//! serve.rs        any environment as a server                 (`sinew env serve`)
//! conformance.rs  whether a server keeps the protocol         (`sinew env test`)
//! remote.rs       requests with a key, repeats and deadlines
//! protocol.rs     bodies and limits
//! ```

mod client;
mod conformance;
mod kind;
mod protocol;
mod remote;
mod serve;

pub(crate) use protocol::cut;
pub(crate) use remote::{address, client};

pub use self::client::HttpEnvFactory;
pub use conformance::{CaseOutcome, ConformanceOptions, ConformanceRow, conformance};
pub use kind::{HTTP_KIND, Http};
pub use serve::{EnvServer, ServeOptions, serve_env};
