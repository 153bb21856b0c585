//! The parts that HTTP clients and servers of Sinew share: trusted certificates, the client with its limits,
//! its errors and its retries, and the server behind every listener.
//!
//! Invariants:
//! - Trust does not depend on the machine: Mozilla's root certificates are built into the program. Own
//!   authorities come from files that the user names, and never replace them.
//! - Without the features `client` and `server` nothing here opens a connection.
//! - A server's connections never take more than their share of the files that the process may open.

#[cfg(feature = "authority")]
mod authority;
#[cfg(feature = "blocking")]
pub mod blocking;
#[cfg(feature = "client")]
mod client;
#[cfg(feature = "client")]
mod error;
#[cfg(feature = "server")]
mod identity;
#[cfg(feature = "client")]
mod retry;
#[cfg(feature = "server")]
pub mod server;
mod trust;

#[cfg(feature = "authority")]
pub use authority::{HOST_TIME, Issued, OwnCa, own_ca};
#[cfg(feature = "client")]
pub use client::{Answer, Client, ClientOptions, address, bearer, read, retry, retry_after};
#[cfg(feature = "client")]
pub use error::{HttpError, line};
#[cfg(feature = "server")]
pub use identity::TlsIdentity;
#[cfg(feature = "client")]
pub use reqwest::{Method, RequestBuilder, Response, StatusCode, Url, header};
#[cfg(feature = "client")]
pub use retry::{Failure, Retry, may_pass};
pub use trust::{Authorities, TlsError, cause, tls, trust};
