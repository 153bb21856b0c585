//! Trusted certificates, and errors of connections in one line.

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{CertificateError, ClientConfig, InvalidMessage, RootCertStore};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::{fmt, io};

/// Reason why certificates or keys cannot be used. Its text never has a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsError {
    /// A file cannot be read or written.
    File {
        /// The file.
        path: PathBuf,
        /// Reason, in words.
        why: String,
    },
    /// A text is not the PEM that it must be.
    Pem {
        /// `certificate` or `key`.
        what: &'static str,
        /// Reason, in words.
        why: String,
    },
    /// Certificate and key do not belong together, or are of an unknown kind.
    Identity(String),
    /// A name that no certificate can have.
    Host {
        /// The name.
        name: String,
        /// Reason, in words.
        why: String,
    },
    /// A key or a certificate could not be made.
    Make(String),
    /// This process trusts other authorities already.
    Trusted,
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, why } => write!(f, "{}: {why}", path.display()),
            Self::Pem { what, why } => write!(
                f,
                "no {what} can be read: {why}; allowed: PEM, with lines -----BEGIN ...-----"
            ),
            Self::Identity(why) => write!(f, "certificate and key cannot be used together: {why}"),
            Self::Host { name, why } => write!(
                f,
                "{name:?} cannot be in a certificate: {why}; allowed: a name of a host or an IP address"
            ),
            Self::Make(why) => write!(f, "no certificate can be made: {why}"),
            Self::Trusted => f.write_str("this process trusts other authorities already"),
        }
    }
}

impl Error for TlsError {}

/// Reads a small file of certificates or keys.
pub(crate) fn file(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|e| failed(path, &e))
}

/// The error of a file.
pub(crate) fn failed(path: &Path, error: &io::Error) -> TlsError {
    TlsError::File {
        path: path.to_owned(),
        why: error.to_string(),
    }
}

/// All certificates of a PEM text, at least one.
pub(crate) fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |why: String| TlsError::Pem {
        what: "certificate",
        why,
    };
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let read = read.map_err(|e| wrong(e.to_string()))?;
    if read.is_empty() {
        return Err(wrong("there is none".to_owned()));
    }
    Ok(read)
}

/// Certificates of authorities that a client trusts in addition to Mozilla's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authorities(Arc<[CertificateDer<'static>]>);

impl Authorities {
    /// The authorities of a PEM text, at least one.
    ///
    /// # Errors
    /// [`TlsError::Pem`] if a part of it is no certificate of an authority.
    pub fn from_pem(pem: &[u8]) -> Result<Self, TlsError> {
        let all = certificates(pem)?;
        let mut checked = RootCertStore::empty();
        for certificate in &all {
            checked
                .add(certificate.clone())
                .map_err(|e| TlsError::Pem {
                    what: "certificate",
                    why: e.to_string(),
                })?;
        }
        Ok(Self(all.into()))
    }

    /// The authorities of a PEM file.
    ///
    /// # Errors
    /// [`TlsError::File`] if it cannot be read, and those of [`Authorities::from_pem`].
    pub fn from_file(path: &Path) -> Result<Self, TlsError> {
        Self::from_pem(&file(path)?)
    }
}

/// Authorities that this process trusts in addition to Mozilla's.
static OWN: OnceLock<Authorities> = OnceLock::new();

/// Makes clients of this process trust these authorities in addition to Mozilla's, from now on. A repeated
/// call with the same ones has no effect.
///
/// # Errors
/// [`TlsError::Trusted`] if others are trusted already: clients that exist would not learn of these.
pub fn trust(authorities: Authorities) -> Result<(), TlsError> {
    let trusted = OWN.get_or_init(|| authorities.clone());
    if *trusted == authorities {
        Ok(())
    } else {
        Err(TlsError::Trusted)
    }
}

/// TLS settings that trust Mozilla's root certificates and the authorities of [`trust`], without a
/// certificate of the client. Machines without a certificate store work, too.
pub fn tls() -> ClientConfig {
    config(OWN.get())
}

/// TLS settings of a client with its own authorities; `None`: those of [`trust`].
#[cfg(feature = "client")]
pub(crate) fn tls_of(own: Option<&Authorities>) -> ClientConfig {
    config(own.or_else(|| OWN.get()))
}

fn config(own: Option<&Authorities>) -> ClientConfig {
    let mut roots = RootCertStore::from_iter(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    // Each was checked when it was read.
    roots.add_parsable_certificates(own.into_iter().flat_map(|own| own.0.iter().cloned()));
    ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth()
}

/// The innermost reason of an error: the outer ones of an HTTP client repeat the address. What TLS refuses
/// is said with what to do.
pub fn cause(error: &(dyn Error + 'static)) -> String {
    if let Some(why) = tls_error(error).and_then(advice) {
        return why;
    }
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// The error of TLS inside another one.
fn tls_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<rustls::Error>() {
            return Some(found);
        }
        // The source of such an error skips the error that it holds.
        let held = error
            .downcast_ref::<io::Error>()
            .and_then(|e| e.get_ref())
            .map(|held| held as &(dyn Error + 'static));
        next = held.or_else(|| error.source());
    }
    None
}

/// Words for errors that a setting can mend.
fn advice(error: &rustls::Error) -> Option<String> {
    let what = match error {
        rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "the server there does not speak TLS: use http://, or start it with --tls-cert or --tls-own"
        }
        rustls::Error::InvalidCertificate(why) => match why {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                "no authority that this process trusts signed the certificate of the server: give the ca.pem of \
                 its authority with --tls-ca FILE, or SINEW_TLS_CA"
            }
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "the certificate of the server has expired, or the clock of this host is wrong"
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "the certificate of the server is not valid yet, or the clock of this host is wrong"
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                "the certificate of the server is for other names than the one of this address: make one with \
                 this name (--tls-host)"
            }
            _ => return None,
        },
        _ => return None,
    };
    Some(what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_authority_is_refused_with_the_reason() {
        let refused = |pem: &str| {
            let error = Authorities::from_pem(pem.as_bytes()).unwrap_err();
            error.to_string()
        };
        assert!(refused("").contains("there is none"));
        assert!(refused("-----BEGIN CERTIFICATE-----\nAAAA\n").contains("PEM"));
        let short = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert!(refused(short).contains("certificate"));
        let missing = Authorities::from_file(Path::new("missing.pem")).unwrap_err();
        assert!(missing.to_string().starts_with("missing.pem: "));
    }

    #[test]
    fn errors_of_tls_say_what_to_do() {
        let held = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let outer = io::Error::other(io::Error::new(io::ErrorKind::InvalidData, held));
        assert!(cause(&outer).contains("--tls-ca"));
        let plain = io::Error::other("it is gone");
        assert_eq!(cause(&plain), "it is gone");
    }
}
