//! The only way out of a sandbox: a proxy outside of it that decides, limits, records and replays.
//!
//! A [`Proxy`] lives as long as a run and holds its certificate authority; a [`Session`] belongs
//! to one episode and holds its policy, its quota, its audit log and its recordings. The decisions
//! are a pure core ([`Policy`], [`Host`], [`forbidden`], [`client_hello`]); sockets, clocks and
//! files are at the rim.
//!
//! Invariants: what no rule allows is denied, before any name is resolved; a connection goes to
//! exactly the addresses that were checked after resolution; a request reaches a server only in
//! the form that the policy has judged, with framing of the proxy's own; a credential is never
//! written to a sandbox, an error, an audit line or a recording; everything is bounded (requests,
//! bytes, connections, wall time, lines of audit); a replayed answer has the bytes of the recorded one.

mod address;
mod audit;
mod authority;
mod body;
mod config;
mod exchange;
mod hello;
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
pub use config::{ConfigError, CredentialConfig, EgressConfig, Mode, RuleConfig, RuleScheme};
pub use hello::{Hello, client_hello};
pub use host::{Host, HostError, HostPattern};
pub use policy::{Ask, Credential, Denial, PathPattern, Policy, Reason, Rule, Scheme, Way};
pub use proxy::{Proxy, ProxyError, ProxyOptions, Served, Session, environment};
pub use quota::{Quota, Used};
pub use upstream::{Resolve, SystemResolver};
