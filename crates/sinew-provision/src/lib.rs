//! Sandboxes over HTTP, for agents outside of Sinew: create, run, stream, files, snapshot, fork,
//! destroy. `docs/sandbox.md` describes the routes.
//!
//! [`Service`] is the book of live sandboxes; [`router`] puts it behind HTTP; [`serve`] listens.
//!
//! Invariants: who has no token gets nothing but `/v1/health`; an owner sees only what is its
//! own; every sandbox and snapshot has a lease, and what nobody renews is destroyed within a
//! second of its end, so that a client that vanishes leaks nothing; an execution whose client
//! goes away is killed; every number that a client can choose has an upper bound of the server's;
//! a connection that neither sends nor takes anything is ended; those without a token never take the
//! places of those with one.

mod api;
mod auth;
mod book;
mod bounds;
mod error;
mod exec;
mod routes;
mod server;
mod strangers;
mod transfer;

pub use api::{CreateRequest, ExecBody, ForkRequest, LimitsRequest, SandboxView};
pub use auth::{Token, TokenError, Tokens};
pub use book::{Bounds, Egress, Service};
pub use error::ApiError;
pub use routes::router;
pub use server::{ServeError, serve};
