//! Certificate authority of a run. It signs a certificate for every host whose TLS the proxy terminates.
//! Only sandboxes trust it. Its key never leaves the process.

use crate::host::Host;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio_rustls::rustls::{self, ServerConfig, crypto::CryptoProvider, pki_types::PrivateKeyDer};

/// Maximum number of cached certificates. A full cache is cleared.
const MAX_LEAVES: usize = 1024;

/// Reasons for which the TLS of a host cannot be terminated.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeafError {
    #[error("certificate for {0}: {1}")]
    Certificate(Host, rcgen::Error),
    #[error("TLS for {0}: {1}")]
    Tls(Host, rustls::Error),
}

/// Certificate authority with a cache of host certificates.
pub struct Authority {
    /// Key and certificate that sign host certificates.
    issuer: Issuer<'static, KeyPair>,
    /// Certificate of the authority.
    pem: String,
    /// Cryptography for the TLS servers of the proxy.
    provider: Arc<CryptoProvider>,
    /// TLS settings by host.
    leaves: Mutex<HashMap<Host, Arc<ServerConfig>>>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// Generates a key and its certificate.
    ///
    /// # Errors
    /// Returns an error if the system has no random numbers.
    pub fn new(provider: Arc<CryptoProvider>) -> Result<Self, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name("Sinew sandbox egress");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        Ok(Self {
            issuer: Issuer::new(params, key),
            pem,
            provider,
            leaves: Mutex::default(),
        })
    }

    /// Certificate (PEM) that sandboxes must trust.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// TLS settings for one host. HTTP/1.1 only: an HTTP/2 client may use one connection for several hosts.
    pub(crate) fn server(&self, host: &Host) -> Result<Arc<ServerConfig>, LeafError> {
        let lock = || self.leaves.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(config) = lock().get(host) {
            return Ok(Arc::clone(config));
        }
        let config = Arc::new(self.leaf(host)?);
        let mut leaves = lock();
        if leaves.len() >= MAX_LEAVES {
            leaves.clear();
        }
        leaves.insert(host.clone(), Arc::clone(&config));
        Ok(config)
    }

    /// Signs a certificate for one host.
    fn leaf(&self, host: &Host) -> Result<ServerConfig, LeafError> {
        let failed = |error| LeafError::Certificate(host.clone(), error);
        let mut params = CertificateParams::default();
        params.distinguished_name = name("Sinew sandbox egress leaf");
        params.subject_alt_names = vec![match host {
            Host::Name(n) => SanType::DnsName(n.as_str().try_into().map_err(failed)?),
            Host::Address(a) => SanType::IpAddress(*a),
        }];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(failed)?;
        let private = PrivateKeyDer::Pkcs8(key.serialize_der().into());
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()
            .and_then(|b| {
                b.with_no_client_auth()
                    .with_single_cert(vec![certificate.der().clone()], private)
            })
            .map_err(|error| LeafError::Tls(host.clone(), error))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}
