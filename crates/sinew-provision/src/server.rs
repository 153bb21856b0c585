//! The listening side: connections, and how long each of their parts may take.

use crate::book::Service;
use crate::error::ApiError;
use crate::routes::router;
use crate::strangers::{Connections, Place};
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

/// Largest head of a request.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// How long connections have to end once every sandbox is gone.
const GRACE: Duration = Duration::from_secs(5);

/// The listener failed.
#[derive(Debug, thiserror::Error)]
#[error("serve sandboxes: {0}")]
pub struct ServeError(#[from] io::Error);

/// Serves until `stop` resolves, then destroys every sandbox.
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
    // Destroying the sandboxes is what ends the requests that are still running.
    ending.send_replace(true);
    service.close().await;
    let drained = async { while connections.join_next().await.is_some() {} };
    // Who does not take its answer by then is cut.
    let _ = tokio::time::timeout(GRACE, drained).await;
    connections.shutdown().await;
    sweep.abort();
    // A sandbox may have been on its way.
    service.close().await;
    Ok(())
}

async fn accept(
    listener: &TcpListener,
    service: &Arc<Service>,
    stop: impl Future<Output = ()>,
    ended: &watch::Receiver<bool>,
    connections: &mut JoinSet<()>,
) {
    let all = Connections::new(&service.bounds);
    let door = Door {
        router: router(Arc::clone(service)),
        service: Arc::clone(service),
        ended: ended.clone(),
    };
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, address)) => {
                    let (place, standing) = all.enter(address.ip());
                    connections.spawn(connection(stream, door.clone(), place, standing));
                }
                // Out of descriptors, or the client was faster: go on, but not hotly.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            () = &mut stop => return,
        }
    }
}

/// What every connection needs.
#[derive(Clone)]
struct Door {
    router: Router,
    service: Arc<Service>,
    ended: watch::Receiver<bool>,
}

/// Serves HTTP/1.1 on a connection to its end.
async fn connection(
    stream: TcpStream,
    door: Door,
    place: Place,
    mut standing: watch::Receiver<bool>,
) {
    let Door {
        router,
        service,
        mut ended,
    } = door;
    let bounds = service.bounds.clone();
    let idle_ms = u32::try_from(bounds.idle.as_millis()).unwrap_or(u32::MAX);
    // The kernel ends a connection whose client takes nothing of what it is sent for so long.
    let bounded = rustix::net::sockopt::set_tcp_user_timeout(&stream, idle_ms);
    if bounded.is_err() || stream.set_nodelay(true).is_err() {
        return;
    }
    let router = TowerToHyperService::new(router);
    let place = Arc::new(Mutex::new(place));
    let answer = service_fn(move |request: Request<Incoming>| {
        let known = admit(&service, &place, &request);
        let request = request.map(|body| in_time(Body::new(body), bounds.body_time));
        let answer = router.call(request);
        async move {
            match known {
                Ok(true) => answer.await,
                // It has to come again, and to make room for others meanwhile.
                Ok(false) => answer.await.map(closing),
                Err(refused) => Ok(closing(refused.into_response())),
            }
        }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.idle)
        .max_buf_size(MAX_HEAD_BYTES);
    let served = builder.serve_connection(TokioIo::new(stream), answer);
    let mut served = std::pin::pin!(served);
    let standing_now = standing.clone();
    // Over for a stranger whose time or place is.
    let over = async {
        let known = standing.wait_for(|known| *known);
        let known = matches!(
            tokio::time::timeout(bounds.head_time, known).await,
            Ok(Ok(_))
        );
        if known {
            std::future::pending::<()>().await;
        }
    };
    // A client that breaks off is the client's affair.
    tokio::select! {
        _ = served.as_mut() => return,
        () = over => return,
        _ = ended.wait_for(|ended| *ended) => served.as_mut().graceful_shutdown(),
    }
    let stranger = !*standing_now.borrow();
    if !stranger {
        let _ = served.await;
    }
}

/// Whether a request has a valid token; then its connection is its owner's.
fn admit(
    service: &Service,
    place: &Mutex<Place>,
    request: &Request<Incoming>,
) -> Result<bool, ApiError> {
    let header = request.headers().get(header::AUTHORIZATION);
    let header = header.and_then(|h| h.to_str().ok());
    let Some(owner) = service.tokens.owner(header) else {
        return Ok(false);
    };
    let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
    place.belong_to(owner).map_err(|limit| ApiError::TooMany {
        what: "connections",
        live: limit,
        limit,
    })?;
    Ok(true)
}

/// An answer after which the connection ends.
fn closing(mut answer: Response) -> Response {
    let close = HeaderValue::from_static("close");
    answer.headers_mut().insert(header::CONNECTION, close);
    answer
}

/// A body that fails where it is not whole in time.
fn in_time(body: Body, time: Duration) -> Body {
    let until = tokio::time::Instant::now() + time;
    let pieces = futures::stream::unfold(body.into_data_stream(), move |mut body| async move {
        let piece = match tokio::time::timeout_at(until, body.next()).await {
            Ok(piece) => piece?.map_err(io::Error::other),
            Err(_) => Err(io::Error::other("the body did not arrive in time")),
        };
        Some((piece, body))
    });
    Body::from_stream(pieces)
}
