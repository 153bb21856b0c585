//! Egress proxy of a run, and the sessions of its episodes.

use crate::audit::{Audit, AuditLine};
use crate::authority::Authority;
use crate::body::{Problem, failed_with};
use crate::config::{EgressConfig, Mode};
use crate::exchange::respond;
use crate::policy::Policy;
use crate::quota::{Meter, Quota, Used};
use crate::record::{FolderQuota, Recordings};
use crate::request::Target;
use crate::upstream::{Io, Resolve};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

/// Maximum bytes of the headers of a request or response.
pub(crate) const MAX_HEAD_BYTES: usize = 64 << 10;
/// Maximum number of headers of a request or response.
pub(crate) const MAX_HEADERS: usize = 128;
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
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
}

/// Adds the failed operation to an I/O error.
fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> ProxyError {
    move |source| ProxyError::Io {
        what: what.into(),
        source,
    }
}

/// State shared by all sessions.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Signs the certificates of intercepted hosts.
    pub(crate) authority: Authority,
    /// Resolver of host names.
    pub(crate) resolver: Arc<dyn Resolve>,
    /// TLS settings for connections to servers.
    pub(crate) upstream_tls: Arc<ClientConfig>,
    /// Quotas by folder of recordings.
    folder_quotas: Mutex<HashMap<PathBuf, Arc<FolderQuota>>>,
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

/// State of a session.
#[derive(Debug)]
pub(crate) struct Inner {
    /// State of the proxy.
    pub(crate) shared: Arc<Shared>,
    /// Rules of the session.
    pub(crate) policy: Policy,
    /// Source of responses.
    pub(crate) mode: Mode,
    /// Limits of the session.
    pub(crate) quota: Quota,
    /// Usage of the session.
    pub(crate) meter: Meter,
    /// Audit log of the session.
    audit: Audit,
    /// Recordings, except in live mode.
    pub(crate) recordings: Option<Recordings>,
    /// Start of the session.
    started: Instant,
    /// Free connections.
    slots: Arc<Semaphore>,
}

impl Inner {
    /// Counts a request. Fails if the audit log cannot be written.
    pub(crate) fn begin(&self) -> Result<(), Problem> {
        let unlogged = |e| failed_with("the audit log cannot be written", e);
        self.audit.check().map_err(unlogged)?;
        Ok(self.meter.request(self.started.elapsed().as_secs_f64())?)
    }
}

/// Proxy session of one episode.
#[derive(Clone, Debug)]
pub struct Session {
    /// State shared with all connections.
    inner: Arc<Inner>,
}

/// A listener of a session. Dropping it closes all its connections.
#[derive(Debug)]
pub struct Served {
    /// Task that accepts connections.
    accept: tokio::task::JoinHandle<()>,
    /// Tasks of the connections.
    tasks: Arc<Tasks>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.accept.abort();
        let mut set = self.tasks.0.lock().unwrap_or_else(PoisonError::into_inner);
        set.abort_all();
    }
}

/// Tasks of a listener's connections. Dropping it aborts them.
#[derive(Debug, Default)]
pub(crate) struct Tasks(Mutex<JoinSet<()>>);

impl Tasks {
    /// Starts a task and removes finished ones.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut set = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while set.try_join_next().is_some() {}
        set.spawn(task);
    }
}

impl Session {
    /// Serves all connections of a listener, normally one on a sandbox's loopback address. Requires a Tokio
    /// runtime.
    ///
    /// # Errors
    /// Returns an error if the listener cannot be used.
    pub fn serve(&self, listener: std::net::TcpListener) -> Result<Served, ProxyError> {
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
                    // Out of file descriptors, or the client has disconnected.
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                };
                let connection = Connection {
                    session: Arc::clone(&inner),
                    tasks: Arc::clone(&own),
                    tunnel: None,
                    _permit: Arc::new(permit),
                };
                own.spawn(serve_stream(connection, stream));
            }
        });
        Ok(Served { accept, tasks })
    }

    /// Usage of the episode so far.
    pub fn used(&self) -> Used {
        self.inner.meter.used()
    }
}

/// Context of the requests of one connection.
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    /// Session that serves the connection.
    pub(crate) session: Arc<Inner>,
    /// Tasks of the listener.
    pub(crate) tasks: Arc<Tasks>,
    /// Target of the intercepted tunnel that contains the requests.
    pub(crate) tunnel: Option<Target>,
    /// Connection slot, held until all tasks of the connection have ended.
    pub(crate) _permit: Arc<tokio::sync::OwnedSemaphorePermit>,
}

/// Serves HTTP/1.1 on a stream until it ends.
pub(crate) async fn serve_stream(connection: Connection, stream: impl Io + 'static) {
    let wait = Duration::from_secs_f64(connection.session.quota.request_s.min(30.0));
    let service = service_fn(move |request| {
        let connection = connection.clone();
        async move { Ok::<_, Infallible>(respond(connection, request).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(wait)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD_BYTES)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    // Errors of a client that disconnects are ignored. Its requests are in the log.
    let _ = served.await;
}

/// Audit line of one request. It is written on drop, after the last part of the response.
#[derive(Debug)]
pub(crate) struct AuditEntry {
    /// Session whose log gets the line.
    session: Arc<Inner>,
    /// Start of the request.
    began: Instant,
    /// The line so far.
    pub(crate) line: AuditLine,
}

impl AuditEntry {
    /// Starts a line. Its decision is `failed` (`aborted`) until it is changed.
    pub(crate) fn new(session: &Arc<Inner>, method: &str, url: String) -> Self {
        Self {
            session: Arc::clone(session),
            began: Instant::now(),
            line: AuditLine {
                at_s: session.started.elapsed().as_secs_f64(),
                decision: "failed".into(),
                reason: Some("aborted".into()),
                method: method.into(),
                url,
                ..AuditLine::default()
            },
        }
    }

    /// Sets the decision of a successful request: `allowed` or `replayed`.
    pub(crate) fn allowed(&mut self, decision: &str) {
        self.line.decision = decision.into();
        self.line.reason = None;
    }

    /// Sets decision, reason and detail of a failed request.
    pub(crate) fn problem(&mut self, problem: &Problem) {
        let reason = match problem {
            Problem::Denied(d) => {
                self.session.meter.deny();
                self.line.decision = "denied".into();
                d.reason.name()
            }
            Problem::Failed { .. } => {
                self.line.decision = "failed".into();
                "failed"
            }
        };
        self.line.reason = Some(reason.into());
        self.line.detail = Some(problem.to_string());
    }
}

impl Drop for AuditEntry {
    fn drop(&mut self) {
        self.line.wall_s = self.began.elapsed().as_secs_f64();
        // A failure is counted, and the next request is refused if it persists.
        let _ = self.session.audit.write(std::mem::take(&mut self.line));
    }
}
