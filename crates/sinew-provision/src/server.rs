//! HTTP server: accepts connections and enforces their timeouts.

use crate::connections::{Connections, Slot};
use crate::error::ApiError;
use crate::registry::Service;
use crate::routes::router;
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request, header};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Maximum bytes of a request's headers.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Time for open responses after all sandboxes were destroyed.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Failure of the listener.
#[derive(Debug, thiserror::Error)]
#[error("serve sandboxes: {0}")]
pub struct ServeError(#[from] io::Error);

/// Serves until `stop` resolves, then destroys every sandbox and snapshot.
///
/// # Errors
/// [`ServeError`] if the listener fails.
pub async fn serve(
    listener: TcpListener,
    service: Arc<Service>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let sweep = {
        let service = Arc::clone(&service);
        tokio::spawn(async move { service.sweep().await })
    };
    let (ending, ended) = watch::channel(false);
    let mut connections = JoinSet::new();
    accept(&listener, &service, stop, &ended, &mut connections).await;
    drop(listener);
    // Destroying the sandboxes ends the requests that are still running.
    ending.send_replace(true);
    service.close().await;
    let drained = async { while connections.join_next().await.is_some() {} };
    // Connections whose clients do not read their responses in time are closed.
    let _ = tokio::time::timeout(SHUTDOWN_GRACE, drained).await;
    connections.shutdown().await;
    sweep.abort();
    // A request may have created a sandbox since the first call.
    service.close().await;
    Ok(())
}

/// Accepts connections until `stop` resolves. Each one runs as a task of `connections`.
async fn accept(
    listener: &TcpListener,
    service: &Arc<Service>,
    stop: impl Future<Output = ()>,
    ended: &watch::Receiver<bool>,
    connections: &mut JoinSet<()>,
) {
    let all = Connections::new(&service.bounds);
    let shared = Shared {
        router: router(Arc::clone(service)),
        service: Arc::clone(service),
        ended: ended.clone(),
    };
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, address)) => {
                    let (slot, authenticated) = all.add(address.ip());
                    let shared = shared.clone();
                    connections.spawn(connection(stream, shared, slot, authenticated));
                }
                // Out of file descriptors, or the client has disconnected. The pause avoids a busy
                // loop.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            () = &mut stop => return,
        }
    }
}

/// State shared by all connections.
#[derive(Clone)]
struct Shared {
    /// Routes of the API.
    router: Router,
    /// Sandboxes and snapshots.
    service: Arc<Service>,
    /// True when the server is stopping.
    ended: watch::Receiver<bool>,
}

/// Serves one HTTP/1.1 connection. `authenticated` is described at [`Connections::add`].
async fn connection(
    stream: TcpStream,
    shared: Shared,
    slot: Slot,
    mut authenticated: watch::Receiver<bool>,
) {
    let Shared {
        router,
        service,
        mut ended,
    } = shared;
    let bounds = service.bounds.clone();
    let idle_ms = u32::try_from(bounds.idle_timeout.as_millis()).unwrap_or(u32::MAX);
    // The kernel closes the connection if the client acknowledges no data for this time.
    let bounded = rustix::net::sockopt::set_tcp_user_timeout(&stream, idle_ms);
    if bounded.is_err() || stream.set_nodelay(true).is_err() {
        return;
    }
    let router = TowerToHyperService::new(router);
    let slot = Arc::new(Mutex::new(slot));
    let answer = service_fn(move |request: Request<Incoming>| {
        let admitted = admit(&service, &slot, &request);
        let request = request.map(|body| with_timeout(Body::new(body), bounds.body_timeout));
        let answer = router.call(request);
        async move {
            match admitted {
                Ok(true) => answer.await,
                // Without a token each request needs a new connection, which frees the slot.
                Ok(false) => answer.await.map(closing),
                Err(refused) => Ok(closing(refused.into_response())),
            }
        }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.idle_timeout)
        .max_buf_size(MAX_HEAD_BYTES);
    let served = builder.serve_connection(TokioIo::new(stream), answer);
    let mut served = std::pin::pin!(served);
    let now_authenticated = authenticated.clone();
    // Resolves for an unauthenticated connection after its timeout or eviction.
    let expired = async {
        let known = authenticated.wait_for(|authenticated| *authenticated);
        let known = matches!(
            tokio::time::timeout(bounds.auth_timeout, known).await,
            Ok(Ok(_))
        );
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
    let authenticated = *now_authenticated.borrow();
    if authenticated {
        let _ = served.await;
    }
}

/// Returns true if the request has a valid token, and moves its connection to the owner's quota.
fn admit(
    service: &Service,
    slot: &Mutex<Slot>,
    request: &Request<Incoming>,
) -> Result<bool, ApiError> {
    let header = request.headers().get(header::AUTHORIZATION);
    let header = header.and_then(|h| h.to_str().ok());
    let Some(owner) = service.tokens.owner(header) else {
        return Ok(false);
    };
    let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
    slot.authenticate(owner)
        .map_err(|limit| ApiError::TooMany {
            what: "connections",
            live: limit,
            limit,
        })?;
    Ok(true)
}

/// Marks the connection to be closed after this response.
fn closing(mut answer: Response) -> Response {
    let close = HeaderValue::from_static("close");
    answer.headers_mut().insert(header::CONNECTION, close);
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
