//! The proxy of a run and the sessions of its episodes.

use crate::audit::{Audit, AuditLine};
use crate::authority::Authority;
use crate::body::{Problem, failed_with};
use crate::config::{EgressConfig, Mode};
use crate::exchange::answer;
use crate::policy::Policy;
use crate::quota::{Meter, Quota, Used};
use crate::record::{Recordings, Room};
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

/// Largest head of a request or an answer.
pub(crate) const MAX_HEAD_BYTES: usize = 64 << 10;
/// Most headers of a request or an answer.
pub(crate) const MAX_HEADERS: usize = 128;
/// Lines of audit beyond the quota of requests.
const SPARE_LINES: u64 = 64;

/// How a proxy runs.
#[derive(Debug)]
pub struct ProxyOptions {
    /// Finds addresses.
    pub resolver: Arc<dyn Resolve>,
    /// Certificates (PEM) that servers may chain to, beside Mozilla's.
    pub extra_roots_pem: String,
}

/// Why a proxy or a session cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// Keys or certificates.
    #[error("egress TLS: {0}")]
    Tls(String),
    /// Files or sockets.
    #[error("egress {what}: {source}")]
    Io {
        /// What was done.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// The configuration.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
}

fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> ProxyError {
    move |source| ProxyError::Io {
        what: what.into(),
        source,
    }
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) authority: Authority,
    pub(crate) resolver: Arc<dyn Resolve>,
    pub(crate) upstream_tls: Arc<ClientConfig>,
    rooms: Mutex<HashMap<PathBuf, Arc<Room>>>,
}

/// Lives as long as a run; makes the sessions of episodes.
#[derive(Clone, Debug)]
pub struct Proxy {
    shared: Arc<Shared>,
}

impl Proxy {
    /// A proxy with a certificate authority of its own.
    ///
    /// # Errors
    /// [`ProxyError::Tls`] if a certificate cannot be read or made.
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
                rooms: Mutex::default(),
            }),
        })
    }

    /// The certificate (PEM) that sandboxes must trust where TLS is intercepted.
    pub fn authority_pem(&self) -> &str {
        self.shared.authority.pem()
    }

    /// The room in a folder, which all sessions share; the first bound that is named holds.
    fn room(&self, folder: &Path, most: u64) -> std::io::Result<Arc<Room>> {
        let rooms = &self.shared.rooms;
        let mut rooms = rooms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(room) = rooms.get(folder) {
            return Ok(Arc::clone(room));
        }
        let room = Arc::new(Room::of(folder, most)?);
        rooms.insert(folder.into(), Arc::clone(&room));
        Ok(room)
    }

    /// A session for one episode. `audit` is the file of its log, created anew.
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
                let room = self.room(folder, config.folder_bytes);
                let opened = room.and_then(|room| Recordings::open(mode, folder, episode, room));
                Some(opened.map_err(io_error(format!("recordings of {episode}")))?)
            }
        };
        let audit = Audit::create(audit, quota.requests.saturating_add(SPARE_LINES))
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

/// Environment variables that send the programs of a sandbox to the proxy on its loopback
/// address. `bundle` is the path, inside, of the certificates to trust.
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

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    pub(crate) policy: Policy,
    pub(crate) mode: Mode,
    pub(crate) quota: Quota,
    pub(crate) meter: Meter,
    audit: Audit,
    pub(crate) recordings: Option<Recordings>,
    started: Instant,
    slots: Arc<Semaphore>,
}

impl Inner {
    /// Counts a request; nothing happens that cannot be logged.
    pub(crate) fn begin(&self) -> Result<(), Problem> {
        let unlogged = |e| failed_with("the audit log cannot be written", e);
        self.audit.check().map_err(unlogged)?;
        Ok(self.meter.request(self.started.elapsed().as_secs_f64())?)
    }
}

/// The proxy of one episode.
#[derive(Clone, Debug)]
pub struct Session {
    inner: Arc<Inner>,
}

/// A listener that a session serves; dropping it ends all its connections.
#[derive(Debug)]
pub struct Served {
    accept: tokio::task::JoinHandle<()>,
    tasks: Arc<Tasks>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.accept.abort();
        let mut set = self.tasks.0.lock().unwrap_or_else(PoisonError::into_inner);
        set.abort_all();
    }
}

/// What runs for the connections of a listener; ends with it.
#[derive(Debug, Default)]
pub(crate) struct Tasks(Mutex<JoinSet<()>>);

impl Tasks {
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut set = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while set.try_join_next().is_some() {}
        set.spawn(task);
    }
}

impl Session {
    /// Serves all that connects to a listener: the one on a sandbox's loopback address. Must be
    /// called within a tokio runtime.
    ///
    /// # Errors
    /// If the listener cannot be used.
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
                    // Out of descriptors, or a connection that is gone already.
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                };
                let via = Via {
                    session: Arc::clone(&inner),
                    tasks: Arc::clone(&own),
                    tunnel: None,
                    _permit: Arc::new(permit),
                };
                own.spawn(serve_stream(via, stream));
            }
        });
        Ok(Served { accept, tasks })
    }

    /// What the episode has used so far.
    pub fn used(&self) -> Used {
        self.inner.meter.used()
    }
}

/// How a request came in.
#[derive(Clone, Debug)]
pub(crate) struct Via {
    pub(crate) session: Arc<Inner>,
    pub(crate) tasks: Arc<Tasks>,
    /// Inside of an intercepted tunnel: where it leads.
    pub(crate) tunnel: Option<Target>,
    /// The connection's slot, kept while anything of it lives.
    pub(crate) _permit: Arc<tokio::sync::OwnedSemaphorePermit>,
}

/// Serves HTTP/1.1 on a stream to its end.
pub(crate) async fn serve_stream(via: Via, stream: impl Io + 'static) {
    let wait = Duration::from_secs_f64(via.session.quota.request_s.min(30.0));
    let service = service_fn(move |request| {
        let via = via.clone();
        async move { Ok::<_, Infallible>(answer(via, request).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(wait)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD_BYTES)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    // A client that breaks off is the client's affair; what it asked is in the log.
    let _ = served.await;
}

/// The audit line of one request; written when the last part of the answer is through.
#[derive(Debug)]
pub(crate) struct Note {
    session: Arc<Inner>,
    began: Instant,
    pub(crate) line: AuditLine,
}

impl Note {
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

    pub(crate) fn allowed(&mut self, decision: &str) {
        self.line.decision = decision.into();
        self.line.reason = None;
    }

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

impl Drop for Note {
    fn drop(&mut self) {
        self.line.wall_s = self.began.elapsed().as_secs_f64();
        // The next request is refused if this cannot be made good.
        let _ = self.session.audit.write(std::mem::take(&mut self.line));
    }
}
