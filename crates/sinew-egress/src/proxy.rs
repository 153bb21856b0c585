//! Egress proxy of a run, and the sessions of its episodes.

use crate::audit::Audit;
use crate::authority::Authority;
use crate::config::{EgressConfig, Mode};
use crate::connection::{Connection, Inner, Shared, Tasks};
use crate::exchange::serve_stream;
use crate::policy::Policy;
use crate::quota::{Meter, SessionUsage};
use crate::record::{FolderQuota, Recordings};
use crate::upstream::{Names, Resolve};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

/// Audit lines beyond the quota of requests.
const EXTRA_AUDIT_LINES: u64 = 64;

/// Settings of a proxy.
#[derive(Debug)]
pub struct ProxyOptions {
    /// Resolver of host names.
    pub resolver: Arc<dyn Resolve>,
    /// Root certificates (PEM) to trust for servers, in addition to Mozilla's.
    pub extra_roots_pem: String,
}

/// Reason why a proxy or a session cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// A key or certificate is invalid.
    #[error("egress TLS: {0}")]
    Tls(String),
    /// A file or socket failed.
    #[error("egress {what}: {source}")]
    Io {
        /// The failed operation.
        what: String,
        /// The error of the system.
        source: io::Error,
    },
}

/// Adds the failed operation to an I/O error.
fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> ProxyError {
    move |source| ProxyError::Io {
        what: what.into(),
        source,
    }
}

/// Egress proxy of a run. Creates the sessions of episodes.
#[derive(Clone, Debug)]
pub struct Proxy {
    /// State shared with all sessions.
    shared: Arc<Shared>,
}

impl Proxy {
    /// Creates a proxy with a new certificate authority.
    ///
    /// # Errors
    /// [`ProxyError::Tls`] if a certificate cannot be read or created.
    pub fn new(options: ProxyOptions) -> Result<Self, ProxyError> {
        let provider = Arc::new(ring::default_provider());
        let tls = |e: &dyn std::fmt::Display| ProxyError::Tls(e.to_string());
        let mut roots = RootCertStore::from_iter(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
        for certificate in CertificateDer::pem_slice_iter(options.extra_roots_pem.as_bytes()) {
            roots
                .add(certificate.map_err(|e| tls(&e))?)
                .map_err(|e| tls(&e))?;
        }
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|e| tls(&e))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            shared: Arc::new(Shared {
                authority: Authority::new(provider).map_err(|e| tls(&e))?,
                resolver: options.resolver,
                upstream_tls: Arc::new(config),
                folder_quotas: Mutex::default(),
            }),
        })
    }

    /// Certificate (PEM) that sandboxes must trust where TLS is intercepted.
    pub fn authority_pem(&self) -> &str {
        self.shared.authority.pem()
    }

    /// Returns the quota of a folder, which all sessions share. The maximum of the first call applies.
    fn folder_quota(&self, folder: &Path, max: u64) -> std::io::Result<Arc<FolderQuota>> {
        let quotas = &self.shared.folder_quotas;
        let mut quotas = quotas.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(quota) = quotas.get(folder) {
            return Ok(Arc::clone(quota));
        }
        let quota = Arc::new(FolderQuota::of(folder, max)?);
        quotas.insert(folder.into(), Arc::clone(&quota));
        Ok(quota)
    }

    /// Creates a session for one episode. `audit` is the path of a new audit log.
    ///
    /// # Errors
    /// [`ProxyError::Io`] if recordings or the log cannot be opened.
    pub fn session(
        &self,
        episode: &str,
        policy: Policy,
        config: &EgressConfig,
        audit: Option<&Path>,
    ) -> Result<Session, ProxyError> {
        let quota = config.quota;
        let recordings = match (config.mode, &config.folder) {
            (Mode::Live, _) | (_, None) => None,
            (mode, Some(folder)) => {
                let quota = self.folder_quota(folder, config.folder_bytes);
                let opened = quota.and_then(|quota| Recordings::open(mode, folder, episode, quota));
                Some(opened.map_err(io_error(format!("recordings of {episode}")))?)
            }
        };
        let audit = Audit::create(audit, quota.requests.saturating_add(EXTRA_AUDIT_LINES))
            .map_err(io_error("audit log"))?;
        Ok(Session {
            inner: Arc::new(Inner {
                shared: Arc::clone(&self.shared),
                policy,
                mode: config.mode,
                quota,
                meter: Meter::new(quota),
                audit,
                recordings,
                started: Instant::now(),
                slots: Arc::new(Semaphore::new(quota.connections as usize)),
                names: Names {
                    resolver: Arc::clone(&self.shared.resolver),
                    places: Arc::new(Semaphore::new(quota.lookups as usize)),
                },
                held_up: Arc::new(Semaphore::new(quota.held_bytes as usize)),
                held_down: Arc::new(Semaphore::new(quota.held_bytes as usize)),
            }),
        })
    }
}

/// Environment variables that make the programs of a sandbox use the proxy on the loopback address. `bundle`
/// is the path, inside the sandbox, of the certificates to trust.
pub fn environment(port: u16, bundle: Option<&str>) -> Vec<(String, String)> {
    let proxy = format!("http://127.0.0.1:{port}");
    let proxies = ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"];
    let trusts = [
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "NODE_EXTRA_CA_CERTS",
        "PIP_CERT",
        "GIT_SSL_CAINFO",
    ];
    let proxies = proxies.iter().map(|n| ((*n).to_string(), proxy.clone()));
    let trusts = trusts
        .iter()
        .filter_map(|n| Some(((*n).to_string(), bundle?.to_string())));
    proxies.chain(trusts).collect()
}

/// Proxy session of one episode.
#[derive(Clone, Debug)]
pub struct Session {
    /// State shared with all connections.
    inner: Arc<Inner>,
}

/// A listener of a session. Dropping it closes all its connections.
#[derive(Debug)]
pub struct SessionListener {
    /// Task that accepts connections.
    accept: tokio::task::JoinHandle<()>,
    /// Tasks of the connections.
    tasks: Arc<Tasks>,
}

impl Drop for SessionListener {
    fn drop(&mut self) {
        self.accept.abort();
        self.tasks.abort();
    }
}

impl Session {
    /// Serves all connections of a listener, normally one on a sandbox's loopback address. Requires a Tokio
    /// runtime.
    ///
    /// # Errors
    /// Returns an error if the listener cannot be used.
    pub fn serve(&self, listener: std::net::TcpListener) -> Result<SessionListener, ProxyError> {
        listener
            .set_nonblocking(true)
            .map_err(io_error("listener"))?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(io_error("listener"))?;
        let tasks = Arc::new(Tasks::default());
        let (inner, own) = (Arc::clone(&self.inner), Arc::clone(&tasks));
        let accept = tokio::spawn(async move {
            loop {
                let Ok(permit) = Arc::clone(&inner.slots).acquire_owned().await else {
                    return;
                };
                let Ok((stream, _)) = listener.accept().await else {
                    // File descriptors are exhausted, or the client has disconnected.
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                };
                // The kernel closes a connection whose client takes nothing for so long.
                let wait_ms = (inner.quota.request_s * 1000.0) as u32;
                if rustix::net::sockopt::set_tcp_user_timeout(&stream, wait_ms).is_err() {
                    continue;
                }
                let connection = Connection {
                    session: Arc::clone(&inner),
                    tasks: Arc::clone(&own),
                    tunnel: None,
                    _permit: Arc::new(permit),
                };
                own.spawn(serve_stream(connection, stream));
            }
        });
        Ok(SessionListener { accept, tasks })
    }

    /// Usage of the episode so far.
    pub fn used(&self) -> SessionUsage {
        self.inner.meter.used()
    }
}
