//! The proxy of a run and the sessions of its episodes.

use crate::audit::{Audit, AuditLine};
use crate::authority::Authority;
use crate::body::{Body, Problem, failed, full, refusal};
use crate::config::{EgressConfig, Mode};
use crate::policy::{Ask, Denial, Policy, Reason, Rule};
use crate::quota::{Meter, Quota, Used};
use crate::record::{self, Answer, Recordings};
use crate::request::{Target, absolute_target, check_head, end_to_end};
use crate::scrub::{Scrubber, scrub};
use crate::tunnel;
use crate::upstream::{self, Io, Resolve};
use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt, Limited, StreamBody};
use hyper::body::{Body as _, Frame, Incoming};
use hyper::header::{ACCEPT_ENCODING, CONTENT_LENGTH, HOST, HeaderMap, HeaderValue};
use hyper::http::request::Parts;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

/// Largest head of a request or an answer.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Most headers of a request or an answer.
const MAX_HEADERS: usize = 128;
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
    upstream_tls: Arc<ClientConfig>,
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
            }),
        })
    }

    /// The certificate (PEM) that sandboxes must trust where TLS is intercepted.
    pub fn authority_pem(&self) -> &str {
        self.shared.authority.pem()
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
                let opened = Recordings::open(mode, folder, episode);
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
                audit_broken: AtomicBool::new(false),
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
    mode: Mode,
    pub(crate) quota: Quota,
    pub(crate) meter: Meter,
    audit: Audit,
    audit_broken: AtomicBool,
    recordings: Option<Recordings>,
    started: Instant,
    slots: Arc<Semaphore>,
}

impl Inner {
    /// Counts a request; nothing happens that cannot be logged.
    pub(crate) fn begin(&self) -> Result<(), Problem> {
        if self.audit_broken.load(Ordering::Relaxed) {
            return Err(failed("the audit log cannot be written"));
        }
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
            Problem::Failed(_) => {
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
        if self
            .session
            .audit
            .write(std::mem::take(&mut self.line))
            .is_err()
        {
            self.session.audit_broken.store(true, Ordering::Relaxed);
        }
    }
}

async fn answer(via: Via, request: Request<Incoming>) -> Response<Body> {
    if request.method() == Method::CONNECT {
        return tunnel::connect(via, request);
    }
    let session = Arc::clone(&via.session);
    let url = match &via.tunnel {
        Some(t) => format!("{}://{}{}", t.scheme, t.authority(), request.uri()),
        None => request.uri().to_string(),
    };
    let mut note = Note::new(&session, request.method().as_str(), url);
    match forward(&via, request, &mut note).await {
        Ok((head, rest)) => finish(head, rest, note),
        Err(problem) => {
            note.problem(&problem);
            let response = refusal(&problem);
            note.line.status = Some(response.status().as_u16());
            response
        }
    }
}

/// An answer on its way: its head, and a body that is there or still comes.
enum Rest {
    Whole(Bytes),
    Coming(Coming),
}

struct Head {
    status: StatusCode,
    headers: HeaderMap,
}

/// A judged request, ready to be sent.
struct Outgoing {
    target: Target,
    method: Method,
    path: String,
    url: String,
    headers: HeaderMap,
    body: Bytes,
    deadline: tokio::time::Instant,
}

async fn forward(
    via: &Via,
    request: Request<Incoming>,
    note: &mut Note,
) -> Result<(Head, Rest), Problem> {
    let session = &via.session;
    session.begin()?;
    let deadline = tokio::time::Instant::now() + Duration::from_secs_f64(session.quota.request_s);
    let (parts, body) = request.into_parts();
    let target = match &via.tunnel {
        Some(target) => target.clone(),
        None => absolute_target(&parts.uri)?,
    };
    check_head(&parts, &target, via.tunnel.is_some())?;
    let ask = Ask {
        scheme: target.scheme,
        host: &target.host,
        port: target.port,
        method: parts.method.as_str(),
        path: parts.uri.path(),
    };
    let rule = session.policy.request(&ask)?;
    let body = read_body(session, body, deadline).await?;
    note.line.bytes_up = body.len() as u64;
    let outgoing = outgoing(parts, target, body, deadline);
    let Some(recordings) = &session.recordings else {
        let (head, coming) = send(via, rule, outgoing, note).await?;
        return Ok((head, Rest::Coming(coming)));
    };
    let (answer, decision) = recorded(via, rule, outgoing, recordings, note).await?;
    note.allowed(decision);
    let head = Head {
        status: StatusCode::from_u16(answer.status).map_err(failed)?,
        headers: answer.headers,
    };
    note.line.bytes_down = answer.body.len() as u64;
    Ok((head, Rest::Whole(answer.body)))
}

/// A request's body, whole and bounded.
async fn read_body(
    session: &Inner,
    body: Incoming,
    deadline: tokio::time::Instant,
) -> Result<Bytes, Problem> {
    let most = session.quota.request_bytes;
    let too_long = || {
        Denial::new(
            Reason::Quota,
            format!("the request's body is longer than {most} bytes"),
        )
    };
    if body.size_hint().lower() > most {
        return Err(too_long().into());
    }
    let read = tokio::time::timeout_at(deadline, Limited::new(body, most as usize).collect()).await;
    let read = read.map_err(|_| failed("the request's body did not arrive in time"))?;
    let bytes = read.map_err(
        |e| match e.downcast_ref::<http_body_util::LengthLimitError>() {
            Some(_) => too_long().into(),
            None => failed(format!("the request's body broke off: {e}")),
        },
    )?;
    let bytes = bytes.to_bytes();
    session.meter.up(bytes.len())?;
    Ok(bytes)
}

fn outgoing(parts: Parts, target: Target, body: Bytes, deadline: tokio::time::Instant) -> Outgoing {
    let path = parts
        .uri
        .path_and_query()
        .map_or("/", |p| p.as_str())
        .to_string();
    let mut headers = parts.headers;
    end_to_end(&mut headers);
    headers.remove(CONTENT_LENGTH);
    headers.remove(HOST);
    Outgoing {
        url: format!("{}://{}{path}", target.scheme, target.authority()),
        target,
        method: parts.method,
        path,
        headers,
        body,
        deadline,
    }
}

/// From the recordings, or from the network into them.
async fn recorded(
    via: &Via,
    rule: &Rule,
    mut outgoing: Outgoing,
    recordings: &Recordings,
    note: &mut Note,
) -> Result<(Answer, &'static str), Problem> {
    let mode = via.session.mode;
    // What is not there at the moment cannot be what is recorded.
    outgoing.headers.remove("if-none-match");
    outgoing.headers.remove("if-modified-since");
    let (method, url) = (outgoing.method.to_string(), outgoing.url.clone());
    let key = record::key(mode, &method, &url, &outgoing.headers, &outgoing.body);
    let ordinal = recordings.ordinal(&key);
    if let Some(answer) = recordings
        .find(&key, ordinal)
        .map_err(|e| failed(format!("recordings: {e}")))?
    {
        via.session.meter.down(answer.body.len())?;
        return Ok((answer, "replayed"));
    }
    if mode == Mode::Replay {
        let detail = format!(
            "no recorded answer to request {} of {method} {url}",
            ordinal + 1
        );
        return Err(Denial::new(Reason::NotRecorded, detail).into());
    }
    let request_headers = outgoing.headers.clone();
    let answer = match fetch(via, rule, outgoing, note).await {
        Ok(answer) => answer,
        // A quota or a cut must not be repeated as if a server had said it.
        Err(problem) if mode == Mode::Cache => return Err(problem),
        Err(problem) => as_answer(problem, note).await?,
    };
    if mode == Mode::Record
        || record::shareable(
            &method,
            &request_headers,
            &answer,
            rule.credential.is_some(),
        )
    {
        let kept = recordings.keep(&key, ordinal, &answer);
        kept.map_err(|e| failed(format!("recordings: {e}")))?;
    }
    Ok((answer, "allowed"))
}

/// A failure of the network as the answer that a replay gives again.
async fn as_answer(problem: Problem, note: &mut Note) -> Result<Answer, Problem> {
    if matches!(&problem, Problem::Denied(d) if d.reason == Reason::Quota) {
        return Err(problem);
    }
    note.line.detail = Some(problem.to_string());
    let (parts, body) = refusal(&problem).into_parts();
    let body = body.collect().await.map_err(failed)?.to_bytes();
    Ok(Answer {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body,
    })
}

/// The whole answer of a server.
async fn fetch(
    via: &Via,
    rule: &Rule,
    outgoing: Outgoing,
    note: &mut Note,
) -> Result<Answer, Problem> {
    let empty = outgoing.method == Method::HEAD;
    let (head, mut coming) = send(via, rule, outgoing, note).await?;
    let mut body = Vec::new();
    while let Some(piece) = coming.next().await {
        body.extend_from_slice(&piece?);
    }
    let mut headers = head.headers;
    if !empty {
        headers.remove(CONTENT_LENGTH);
    }
    Ok(Answer {
        status: head.status.as_u16(),
        headers,
        body: body.into(),
    })
}

/// Sends a judged request and waits for the head of the answer.
async fn send(
    via: &Via,
    rule: &Rule,
    outgoing: Outgoing,
    note: &mut Note,
) -> Result<(Head, Coming), Problem> {
    let session = &via.session;
    let deadline = outgoing.deadline;
    let Outgoing {
        target,
        method,
        path,
        mut headers,
        body,
        ..
    } = outgoing;
    let authority = HeaderValue::from_str(&target.authority()).map_err(failed)?;
    headers.insert(HOST, authority);
    if let Some(credential) = &rule.credential {
        // Only text in the open can be searched for the secret.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let name =
            hyper::header::HeaderName::from_bytes(credential.header.as_bytes()).map_err(failed)?;
        let mut value = HeaderValue::from_str(&credential.value).map_err(failed)?;
        value.set_sensitive(true);
        headers.insert(name, value);
        note.line.credential = Some(credential.name.clone());
    }
    let secret = rule.credential.as_ref().map(|c| c.secret.clone());
    let uri: Uri = path.parse().map_err(failed)?;
    let mut request = Request::new(full(body));
    *request.method_mut() = method;
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    let exchange = async {
        let (stream, address) = upstream::open(
            session.shared.resolver.as_ref(),
            &session.shared.upstream_tls,
            rule,
            &target,
        )
        .await?;
        let mut builder = hyper::client::conn::http1::Builder::new();
        builder
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_HEAD_BYTES);
        let (mut sender, connection) = builder
            .handshake(TokioIo::new(stream))
            .await
            .map_err(failed)?;
        via.tasks.spawn(async move {
            let _ = tokio::time::timeout_at(deadline, connection).await;
        });
        let response = sender
            .send_request(request)
            .await
            .map_err(|e| failed(format!("{}: {e}", target.host)))?;
        Ok::<_, Problem>((response, address))
    };
    let exchanged = tokio::time::timeout_at(deadline, exchange).await;
    let (response, address): (Response<Incoming>, SocketAddr) =
        exchanged.map_err(|_| failed(format!("{} gave no answer in time", target.host)))??;
    note.allowed("allowed");
    note.line.address = Some(address.to_string());
    let (parts, incoming) = response.into_parts();
    let head = answer_head(parts.status, parts.headers, secret.as_deref())?;
    let coming = Coming {
        body: Some(incoming),
        scrubber: secret.as_deref().map(Scrubber::new),
        session: Arc::clone(session),
        deadline,
    };
    Ok((head, coming))
}

fn answer_head(
    status: StatusCode,
    mut headers: HeaderMap,
    secret: Option<&str>,
) -> Result<Head, Problem> {
    if status.is_informational() {
        return Err(failed(format!(
            "the server answered {status} to a request that asked for no upgrade"
        )));
    }
    end_to_end(&mut headers);
    headers.remove("alt-svc");
    if let Some(secret) = secret {
        if headers
            .get("content-encoding")
            .is_some_and(|e| e != "identity")
        {
            return Err(failed(
                "the server encoded its answer although it was asked not to: it cannot be searched",
            ));
        }
        for value in headers.values_mut() {
            if let (clean, true) = scrub(value.as_bytes(), secret) {
                *value = HeaderValue::from_bytes(&clean).map_err(failed)?;
            }
        }
    }
    Ok(Head { status, headers })
}

/// The rest of an answer, counted and searched.
struct Coming {
    body: Option<Incoming>,
    scrubber: Option<Scrubber>,
    session: Arc<Inner>,
    deadline: tokio::time::Instant,
}

impl Coming {
    async fn next(&mut self) -> Option<Result<Bytes, Problem>> {
        let body = self.body.as_mut()?;
        loop {
            let frame = match tokio::time::timeout_at(self.deadline, body.frame()).await {
                Err(_) => return Some(Err(failed("the answer did not end in time"))),
                Ok(Some(Err(e))) => return Some(Err(failed(format!("the answer broke off: {e}")))),
                Ok(Some(Ok(frame))) => frame,
                Ok(None) => {
                    self.body = None;
                    let held = self.scrubber.as_mut()?.finish();
                    return (!held.is_empty()).then(|| Ok(held.into()));
                }
            };
            // Trailers are dropped.
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if let Err(denial) = self.session.meter.down(data.len()) {
                return Some(Err(denial.into()));
            }
            let out = match &mut self.scrubber {
                None => data,
                Some(scrubber) => scrubber.push(&data).into(),
            };
            if !out.is_empty() {
                return Some(Ok(out));
            }
        }
    }
}

/// The answer as the sandbox gets it.
fn finish(head: Head, rest: Rest, mut note: Note) -> Response<Body> {
    note.line.status = Some(head.status.as_u16());
    let body = match rest {
        Rest::Whole(bytes) => full(bytes),
        Rest::Coming(coming) => {
            let pieces = stream::unfold(Some((coming, note)), |state| async {
                let (mut coming, mut note) = state?;
                match coming.next().await? {
                    Ok(bytes) => {
                        note.line.bytes_down += bytes.len() as u64;
                        Some((Ok(Frame::data(bytes)), Some((coming, note))))
                    }
                    Err(problem) => {
                        note.problem(&problem);
                        Some((Err(io::Error::other(problem.to_string())), None))
                    }
                }
            });
            StreamBody::new(Box::pin(pieces)).boxed()
        }
    };
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    response
}
