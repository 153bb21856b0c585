//! Certificate and key of a server.

use crate::trust::{TlsError, certificates, file};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The certificate of a server with its key, ready for connections.
#[derive(Clone)]
pub struct TlsIdentity {
    config: Arc<ServerConfig>,
}

impl fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsIdentity").finish_non_exhaustive()
    }
}

impl TlsIdentity {
    /// The identity of two PEM files: the certificate with those between it and its authority, and the key.
    ///
    /// # Errors
    /// If a file cannot be read or is no PEM, or certificate and key do not belong together.
    pub fn from_files(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        Self::from_pem(&file(certificate)?, &file(key)?)
    }

    /// Same as [`TlsIdentity::from_files`], from texts.
    ///
    /// # Errors
    /// Those of [`TlsIdentity::from_files`], but for files.
    pub fn from_pem(certificate: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let chain = certificates(certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|e| TlsError::Pem {
            what: "key",
            why: e.to_string(),
        })?;
        let config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(chain, key);
        let mut config = config.map_err(|e| TlsError::Identity(e.to_string()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            config: Arc::new(config),
        })
    }

    /// Settings of connections.
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }
}
