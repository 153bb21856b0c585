//! HTTP API for sandboxes: create, run, stream, files, snapshot, fork, destroy. `docs/sandbox-http.md`
//! describes the routes.
//!
//! [`Service`] holds the live sandboxes and snapshots, [`router`] exposes it over HTTP, [`serve`] listens.
//!
//! Invariants:
//! - Only `/v1/health` is available without a valid token. An owner sees only its own sandboxes.
//! - Every sandbox and snapshot has a lease. It is destroyed within a second after its lease ends, so that a
//!   vanished client leaks nothing.
//! - An execution is killed when its client disconnects.
//! - The server has an upper bound for every number that a client can choose.
//! - A connection that neither sends nor receives is closed. Connections without a valid token never use the
//!   quota of those with one.

mod api;
mod auth;
mod bounds;
pub mod client;
#[cfg(feature = "egress")]
mod egress_proxy;
mod error;
mod exec;
#[cfg(test)]
mod leases;
mod registry;
mod roots;
mod routes;
mod server;
mod status;
mod terminal;
mod transfer;

pub use api::{CreateRequest, ExecBody, ForkRequest, LimitsRequest, SandboxView, TerminalBody};
pub use auth::{Token, TokenError, Tokens};
#[cfg(feature = "egress")]
pub use egress_proxy::{EgressProxy, EgressStartError, WithEgress};
pub use error::{ApiError, EgressError};
pub use registry::{Bounds, Egress, Service};
pub use routes::router;
pub use server::{ServeError, serve};
