//! Egress proxy: the only network access of a sandbox. It decides, limits, records and replays requests.
//!
//! A [`Proxy`] belongs to a run and holds its certificate authority. A [`Session`] belongs to one episode and
//! holds its policy, quota, audit log and recordings. Decisions are pure ([`Policy`], [`Host`],
//! [`forbidden`], [`client_hello`]). Sockets, clocks and files are in other modules.
//!
//! | part | files |
//! |---|---|
//! | sessions, listeners, state of a connection | `proxy`, `connection` |
//! | one request; one tunnel | `exchange`, `tunnel` |
//! | decisions | `policy`, `host`, `address`, `request`, `client_hello` |
//! | connections to servers, certificates for sandboxes | `upstream`, `authority` |
//! | limits, audit log, recordings, credentials | `quota`, `audit`, `record`, `scrub` |
//!
//! Invariants:
//! - A request that no rule allows is denied before its host name is resolved.
//! - A connection uses exactly the addresses that were checked after resolution.
//! - A server receives a request only in the form that the policy has checked, with framing by the proxy.
//! - A credential is never written to a sandbox, an error, an audit line or a recording.
//! - Requests, bytes, connections, wall time and audit lines are limited.
//! - A replayed response has the bytes of the recorded one.

mod address;
#[cfg(feature = "proxy")]
mod audit;
#[cfg(feature = "proxy")]
mod authority;
#[cfg(feature = "proxy")]
mod body;
#[cfg(feature = "proxy")]
mod client_hello;
mod config;
#[cfg(feature = "proxy")]
mod connection;
mod error;
#[cfg(feature = "proxy")]
mod exchange;
mod host;
mod policy;
#[cfg(feature = "proxy")]
mod proxy;
#[cfg_attr(
    not(feature = "proxy"),
    expect(dead_code, reason = "only the proxy counts")
)]
mod quota;
#[cfg(feature = "proxy")]
mod record;
#[cfg(feature = "proxy")]
mod request;
#[cfg(feature = "proxy")]
mod scrub;
#[cfg(all(test, feature = "proxy"))]
mod small_disk;
#[cfg(feature = "proxy")]
mod tunnel;
#[cfg(feature = "proxy")]
mod upstream;

pub use address::{Cidr, forbidden};
#[cfg(feature = "proxy")]
pub use audit::{AuditLine, not_recorded};
#[cfg(feature = "proxy")]
pub use authority::Authority;
#[cfg(feature = "proxy")]
pub use client_hello::{Hello, client_hello};
pub use config::{ConfigError, CredentialConfig, EgressConfig, Mode, RuleConfig, RuleScheme};
pub use error::PatternError;
pub use host::{Host, HostError, HostPattern};
pub use policy::{
    Credential, Denial, PathPattern, Policy, Reason, RequestInfo, Rule, Scheme, TunnelMode,
};
#[cfg(feature = "proxy")]
pub use proxy::{Proxy, ProxyError, ProxyOptions, Session, SessionListener, environment};
pub use quota::{Quota, SessionUsage};
#[cfg(feature = "proxy")]
pub use record::begin_empty;
#[cfg(feature = "proxy")]
pub use upstream::{Resolve, SystemResolver};
