//! The server behind every listener: bounded connections, heads, bodies and waits.
//!
//! | who connects | bound |
//! |---|---|
//! | without a key | few at a time, few of one address, a short time for one request and its answer |
//! | with a key | many of all keys, a part of them of one key, for as long as requests come |
//! | all | a share of the files that the process may open, so that connections never stop its other work |
//! | to a listener with TLS | a short time for the handshake, as a client without a key |
//!
//! At the first two bounds the oldest connection gives up its place; at the third a request is refused.

mod connections;
mod handshake;
mod listener;
mod pages;

pub use listener::{Endpoint, Listener};
pub use pages::is_json;

use axum::Router;
use axum::body::Body;
use axum::http::header::{CONNECTION, RETRY_AFTER};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Request, StatusCode};
use axum::response::{IntoResponse, Response};
use connections::{Connections, Slot};
use futures::StreamExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Least size of the buffer that hyper reads a head with.
const MIN_HEAD_BYTES: usize = 8192;
/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(10);

/// Limits of a server's connections. [`Guard::new`] lowers the numbers to a share of the files that the
/// process may open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Connections without a key.
    pub without_key: usize,
    /// Connections without a key of one address.
    pub without_key_per_address: usize,
    /// Connections of all keys.
    pub with_key: usize,
    /// Connections of one [`Key::Named`].
    pub per_key: usize,
    /// Time in which a new connection must have shown a key, or got its answer.
    pub key_time: Duration,
    /// Time for the handshake of TLS; it is a part of `key_time`.
    pub handshake_time: Duration,
    /// Time for the head of a request, and so between two requests.
    pub head_time: Duration,
    /// Time for the body of a request. `None`: the routes bound it.
    pub body_time: Option<Duration>,
    /// Time in which a client takes something of its answer.
    pub write_time: Duration,
    /// Bytes of a head.
    pub head_bytes: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            without_key: 256,
            without_key_per_address: 64,
            with_key: 1024,
            per_key: 1024,
            key_time: Duration::from_secs(10),
            handshake_time: Duration::from_secs(5),
            head_time: Duration::from_secs(60),
            body_time: Some(Duration::from_secs(300)),
            write_time: Duration::from_secs(60),
            head_bytes: 64 << 10,
        }
    }
}

impl ConnectionLimits {
    /// Lowers the limits for a process that may open `files` files: at most half of the files are for
    /// connections with a key, a quarter of these for one key, and a sixteenth of the files for connections
    /// without a key.
    fn within(mut self, files: usize) -> Self {
        self.with_key = self.with_key.min(files / 2).max(1);
        self.per_key = self.per_key.min((self.with_key / 4).max(1));
        self.without_key = self.without_key.min(files / 16).max(1);
        self.without_key_per_address = self.without_key_per_address.min(self.without_key);
        self
    }
}

/// The valid key that a request has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    /// Key of the operator of the server: all connections with a key may be its own.
    Operator,
    /// One of many, with a name that no other has.
    Named(String),
}

/// Finds the valid key that a request has.
type KeyOf = Arc<dyn Fn(&Parts) -> Option<Key> + Send + Sync>;
/// Changes a request before it is routed.
type Rewrite = Arc<dyn Fn(Request<Body>) -> Request<Body> + Send + Sync>;

/// Rules on who may connect to a server, and for how long.
#[derive(Clone)]
pub struct Guard {
    limits: ConnectionLimits,
    key: KeyOf,
    rewrite: Option<Rewrite>,
    refuse: fn(usize) -> Response,
    pages: bool,
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard")
            .field("limits", &self.limits)
            .field("pages", &self.pages)
            .finish_non_exhaustive()
    }
}

impl Guard {
    /// `key` gives the valid key that a request has. A server without keys gives `None`.
    pub fn new(
        limits: ConnectionLimits,
        key: impl Fn(&Parts) -> Option<Key> + Send + Sync + 'static,
    ) -> Self {
        Self {
            limits: limits.within(open_files()),
            key: Arc::new(key),
            rewrite: None,
            refuse: too_many,
            pages: true,
        }
    }

    /// Refuses requests that web pages of other sites make.
    #[must_use]
    pub fn without_pages(mut self) -> Self {
        self.pages = false;
        self
    }

    /// Changes every request before it is routed.
    #[must_use]
    pub fn rewriting(
        mut self,
        rewrite: impl Fn(Request<Body>) -> Request<Body> + Send + Sync + 'static,
    ) -> Self {
        self.rewrite = Some(Arc::new(rewrite));
        self
    }

    /// Answers a request above the limit of connections in this way.
    #[must_use]
    pub fn refusing(mut self, refuse: fn(usize) -> Response) -> Self {
        self.refuse = refuse;
        self
    }
}

/// A number of connections that takes no more than a part of the files that the process may open.
pub fn at_most_part_of_files(connections: usize, part: usize) -> usize {
    connections.min(open_files() / part).max(1)
}

/// Files that the process may open.
fn open_files() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

/// The answer to a request above the limit of connections.
fn too_many(limit: usize) -> Response {
    let text = format!("{limit} connections are open, which is the limit: close some");
    let mut response = (StatusCode::TOO_MANY_REQUESTS, text).into_response();
    let second = HeaderValue::from_static("1");
    response.headers_mut().insert(RETRY_AFTER, second);
    response
}

/// Place of a request's connection. Work that continues after an upgrade keeps it, so that its connection
/// stays counted.
#[derive(Clone, Debug)]
pub struct Place(#[expect(dead_code, reason = "held, not read")] Arc<Mutex<Slot>>);

/// Connections that are still open. Dropping it closes them at once.
#[derive(Debug)]
pub struct Open {
    tasks: JoinSet<()>,
    ending: watch::Sender<bool>,
}

impl Open {
    /// Lets requests that run end within `grace`, and closes all connections. True: all ended by themselves.
    pub async fn close(mut self, grace: Duration) -> bool {
        self.ending.send_replace(true);
        let drained = async { while self.tasks.join_next().await.is_some() {} };
        let ended = tokio::time::timeout(grace, drained).await.is_ok();
        self.tasks.shutdown().await;
        ended
    }
}

/// Serves until `stop` resolves, and keeps the connections that are open then. Each of these gets the answer
/// to its running request, and no other.
pub async fn serve(
    listener: impl Into<Listener>,
    router: Router,
    guard: Guard,
    stop: impl Future<Output = ()>,
) -> Open {
    let Listener { tcp: listener, tls } = listener.into();
    let (ending, ended) = watch::channel(false);
    let mut tasks = JoinSet::new();
    let shared = Shared {
        connections: Connections::new(&guard.limits),
        loopback: listener.local_addr().is_ok_and(|a| a.ip().is_loopback()),
        tls: tls.map(|identity| identity.config()),
        guard: Arc::new(guard),
        router,
        ended,
    };
    {
        let mut stop = std::pin::pin!(stop);
        // Kept while other branches run: it may hold a connection that waits for a place.
        let mut next = std::pin::pin!(accept(&listener, &shared.connections));
        loop {
            tokio::select! {
                (stream, slot, has_key) = &mut next => {
                    tasks.spawn(connection(stream, shared.clone(), slot, has_key));
                    next.set(accept(&listener, &shared.connections));
                }
                Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
                () = &mut stop => break,
            }
        }
    }
    drop(listener);
    ending.send_replace(true);
    Open { tasks, ending }
}

/// The next connection that has a place.
async fn accept(
    listener: &TcpListener,
    connections: &Connections,
) -> (TcpStream, Slot, watch::Receiver<bool>) {
    let mut failed = false;
    let (stream, address) = loop {
        match listener.accept().await {
            Ok(accepted) => break accepted,
            // No file is free, or the client was faster. The pause avoids a busy loop.
            Err(error) => {
                if !failed {
                    tracing::warn!(%error, "a connection was not accepted");
                }
                failed = true;
                tokio::time::sleep(PAUSE).await;
            }
        }
    };
    loop {
        match connections.add(address.ip(), Instant::now()) {
            Ok((slot, has_key)) => return (stream, slot, has_key),
            // A place may become free before.
            Err(wait) => tokio::time::sleep(wait.min(PAUSE)).await,
        }
    }
}

/// State that all connections of a server share.
#[derive(Clone)]
struct Shared {
    connections: Connections,
    /// Only this machine reaches the listener.
    loopback: bool,
    /// Settings of TLS; `None`: plain HTTP.
    tls: Option<Arc<rustls::ServerConfig>>,
    guard: Arc<Guard>,
    router: Router,
    /// True when the server is stopping.
    ended: watch::Receiver<bool>,
}

/// Serves one connection, after its handshake where the listener has TLS. `has_key` is described at
/// [`Connections::add`].
async fn connection(
    stream: TcpStream,
    shared: Shared,
    slot: Slot,
    mut has_key: watch::Receiver<bool>,
) {
    let limits = &shared.guard.limits;
    let wait_ms = u32::try_from(limits.write_time.as_millis()).unwrap_or(u32::MAX);
    // The kernel closes the connection if the client acknowledges nothing for this time.
    let bounded = rustix::net::sockopt::set_tcp_user_timeout(&stream, wait_ms);
    if bounded.is_err() || stream.set_nodelay(true).is_err() {
        return;
    }
    let began = tokio::time::Instant::now();
    let key_until = began + limits.key_time;
    let Some(tls) = shared.tls.clone() else {
        return exchange(stream, shared, slot, has_key, key_until).await;
    };
    let until = key_until.min(began + limits.handshake_time);
    let mut ended = shared.ended.clone();
    // Nobody can have shown a key yet: the first wait ends only when another connection takes the place.
    let shaken = tokio::select! {
        stream = handshake::shaken(tls, stream, until) => stream,
        _ = has_key.wait_for(|has_key| *has_key) => None,
        _ = ended.wait_for(|ended| *ended) => None,
    };
    if let Some(stream) = shaken {
        exchange(stream, shared, slot, has_key, key_until).await;
    }
}

/// Serves the HTTP/1.1 of one connection, which must have shown a key until a moment, or got its answer.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    shared: Shared,
    slot: Slot,
    mut has_key: watch::Receiver<bool>,
    key_until: tokio::time::Instant,
) {
    let limits = shared.guard.limits.clone();
    let mut ended = shared.ended.clone();
    let now_has_key = has_key.clone();
    let router = TowerToHyperService::new(shared.router.clone());
    let slot = Arc::new(Mutex::new(slot));
    let answer = service_fn(move |request: Request<Incoming>| {
        let admitted = admit(&shared, &slot, request);
        let router = router.clone();
        async move {
            match admitted {
                Ok((request, true)) => router.call(request).await,
                // A connection without a key serves one request only, which frees its place.
                Ok((request, false)) => router.call(request).await.map(closing),
                Err(refused) => Ok(closing(*refused)),
            }
        }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time)
        .max_buf_size(limits.head_bytes.max(MIN_HEAD_BYTES));
    let served = builder.serve_connection(TokioIo::new(stream), answer);
    let mut served = std::pin::pin!(served.with_upgrades());
    // Resolves for a connection without a key after its time, or when another one takes its place.
    let expired = async {
        let known = has_key.wait_for(|has_key| *has_key);
        let known = matches!(tokio::time::timeout_at(key_until, known).await, Ok(Ok(_)));
        if known {
            std::future::pending::<()>().await;
        }
    };
    // Errors of a client that disconnects are ignored.
    tokio::select! {
        _ = served.as_mut() => return,
        () = expired => return,
        _ = ended.wait_for(|ended| *ended) => served.as_mut().graceful_shutdown(),
    }
    if *now_has_key.borrow() {
        let _ = served.await;
    } else {
        let _ = tokio::time::timeout(limits.key_time, served).await;
    }
}

/// Returns a request for routing, and whether its connection has a key.
///
/// # Errors
/// The answer to a request that is not routed.
fn admit(
    shared: &Shared,
    slot: &Arc<Mutex<Slot>>,
    request: Request<Incoming>,
) -> Result<(Request<Body>, bool), Box<Response>> {
    let guard = &shared.guard;
    let (mut parts, body) = request.into_parts();
    if !guard.pages
        && let Some(why) = pages::foreign(&parts.headers, shared.loopback)
    {
        return Err(Box::new((StatusCode::FORBIDDEN, why).into_response()));
    }
    let has_key = {
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if !slot.has_key()
            && let Some(key) = (guard.key)(&parts)
        {
            let taken = slot.take_key(key);
            taken.map_err(|limit| Box::new((guard.refuse)(limit)))?;
        }
        slot.has_key()
    };
    parts.extensions.insert(Place(Arc::clone(slot)));
    let body = match guard.limits.body_time {
        Some(time) => with_timeout(Body::new(body), time),
        None => Body::new(body),
    };
    let request = Request::from_parts(parts, body);
    let request = match &guard.rewrite {
        Some(rewrite) => rewrite(request),
        None => request,
    };
    Ok((request, has_key))
}

/// Marks the connection to be closed after this response.
fn closing(mut answer: Response) -> Response {
    let close = HeaderValue::from_static("close");
    answer.headers_mut().insert(CONNECTION, close);
    answer
}

/// Wraps a body so that it fails if it is not complete after `time`.
fn with_timeout(body: Body, time: Duration) -> Body {
    let until = tokio::time::Instant::now() + time;
    let chunks = futures::stream::unfold(body.into_data_stream(), move |mut body| async move {
        let chunk = match tokio::time::timeout_at(until, body.next()).await {
            Ok(chunk) => chunk?.map_err(io::Error::other),
            Err(_) => Err(io::Error::other("the body did not arrive in time")),
        };
        Some((chunk, body))
    });
    Body::from_stream(chunks)
}
