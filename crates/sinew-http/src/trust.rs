//! Trusted certificates, and errors of connections in one line.

use rustls::{ClientConfig, RootCertStore};
use std::error::Error;

/// TLS settings that trust Mozilla's root certificates, without a certificate of the client. Machines
/// without a certificate store work, too.
pub fn tls() -> ClientConfig {
    let roots = RootCertStore::from_iter(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth()
}

/// The innermost reason of an error: the outer ones of an HTTP client repeat the address.
pub fn cause(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
