//! Reasons for which a text is not a part of a rule, or a host has no certificate.

use crate::host::Host;
use tokio_rustls::rustls;

/// A text that is not a part of a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    #[error("{0:?} is no range of addresses; allowed: 10.0.0.0/8, ::1/128, 192.0.2.1")]
    Range(String),
    #[error("path {0:?}; allowed: /v1/models, or /v1/* for all that begin so")]
    Path(String),
}

/// Reasons for which the TLS of a host cannot be terminated.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeafError {
    #[error("certificate for {host}: {error}")]
    Certificate { host: Host, error: rcgen::Error },
    #[error("TLS for {host}: {error}")]
    Tls { host: Host, error: rustls::Error },
}
