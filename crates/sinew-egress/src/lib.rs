//! Egress proxy: the only network access of a sandbox. It decides, limits, records and replays requests.
//!
//! A [`Proxy`] belongs to a run and holds its certificate authority. A [`Session`] belongs to one episode and
//! holds its policy, quota, audit log and recordings. Decisions are pure ([`Policy`], [`Host`],
//! [`forbidden`], [`client_hello`]). Sockets, clocks and files are in other modules.
//!
//! Invariants:
//! - A request that no rule allows is denied before its host name is resolved.
//! - A connection uses exactly the addresses that were checked after resolution.
//! - A server receives a request only in the form that the policy has checked, with framing by the proxy.
//! - A credential is never written to a sandbox, an error, an audit line or a recording.
//! - Requests, bytes, connections, wall time and audit lines are limited.
//! - A replayed response has the bytes of the recorded one.

mod address;
mod audit;
mod authority;
mod body;
mod client_hello;
mod config;
mod exchange;
mod host;
mod policy;
mod proxy;
mod quota;
mod record;
mod request;
mod scrub;
#[cfg(test)]
mod small_disk;
mod tunnel;
mod upstream;

pub use address::{Cidr, forbidden};
pub use audit::AuditLine;
pub use authority::Authority;
pub use client_hello::{Hello, client_hello};
pub use config::{ConfigError, CredentialConfig, EgressConfig, Mode, RuleConfig, RuleScheme};
pub use host::{Host, HostError, HostPattern};
pub use policy::{
    Credential, Denial, PathPattern, Policy, Reason, RequestInfo, Rule, Scheme, TunnelMode,
};
pub use proxy::{Proxy, ProxyError, ProxyOptions, Served, Session, environment};
pub use quota::{Quota, Used};
pub use upstream::{Resolve, SystemResolver};
