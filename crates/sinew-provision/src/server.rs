//! The listening side: connections, and how long each of their parts may take.

use crate::book::{Bounds, Service};
use crate::routes::router;
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use futures::StreamExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
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
    let room = Arc::new(Semaphore::new(service.bounds.connections));
    let router = router(Arc::clone(service));
    let mut stop = std::pin::pin!(stop);
    loop {
        // Without room, new connections wait in the backlog of the socket.
        let next = async {
            let permit = Arc::clone(&room).acquire_owned().await;
            (permit, listener.accept().await)
        };
        tokio::select! {
            (permit, accepted) = next => match accepted {
                Ok((stream, _)) => {
                    let connection =
                        connection(stream, router.clone(), service.bounds.clone(), ended.clone());
                    connections.spawn(async move {
                        connection.await;
                        drop(permit);
                    });
                }
                // Out of descriptors, or the client was faster: go on, but not hotly.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            () = &mut stop => return,
        }
    }
}

/// Serves HTTP/1.1 on a connection to its end.
async fn connection(
    stream: TcpStream,
    router: Router,
    bounds: Bounds,
    mut ended: watch::Receiver<bool>,
) {
    let idle_ms = u32::try_from(bounds.idle.as_millis()).unwrap_or(u32::MAX);
    // The kernel ends a connection whose client takes nothing of what it is sent for so long.
    let bounded = rustix::net::sockopt::set_tcp_user_timeout(&stream, idle_ms);
    if bounded.is_err() || stream.set_nodelay(true).is_err() {
        return;
    }
    let router = TowerToHyperService::new(router);
    let answer = service_fn(move |request: Request<Incoming>| {
        router.call(request.map(|body| in_time(Body::new(body), bounds.body_time)))
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.idle)
        .max_buf_size(MAX_HEAD_BYTES);
    let served = builder.serve_connection(TokioIo::new(stream), answer);
    let mut served = std::pin::pin!(served);
    // A client that breaks off is the client's affair.
    tokio::select! {
        _ = served.as_mut() => return,
        _ = ended.wait_for(|ended| *ended) => served.as_mut().graceful_shutdown(),
    }
    let _ = served.await;
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
