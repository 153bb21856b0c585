//! The listening side: connections, their limits, the end.
//!
//! One task accepts, one task serves each connection, and one task drives each call, which outlives its
//! connection. Stopping refuses new calls first, waits for running ones, cuts the rest, and closes
//! connections last, so that every client gets an answer.

use crate::gateway::Gateway;
use crate::routes::{Service, addressed, plain_path, router};
use crate::secret::Secret;
use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};

/// Minimum of the buffer that hyper reads a head with.
const MIN_HEAD_BYTES: usize = 8192;

/// Time to hand out the last answers once no call runs.
const FLUSH: Duration = Duration::from_secs(5);

/// Why a gateway does not listen.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("cannot listen on {address}: {source}")]
    Listen {
        address: SocketAddr,
        source: std::io::Error,
    },
}

/// A listening gateway. Dropping it stops it at once; [`Server::stop`] lets requests end.
#[derive(Debug)]
pub struct Server {
    gateway: Gateway,
    address: SocketAddr,
    stop: watch::Sender<bool>,
    task: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on `address`, port 0 for any free one. `control_token` opens the control API.
    /// `public_url` is where agents find this server, if that is not its address.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub async fn start(
        gateway: Gateway,
        address: SocketAddr,
        control_token: &str,
        public_url: Option<String>,
    ) -> Result<Self, ServeError> {
        Self::start_with(gateway, address, control_token, public_url, None).await
    }

    /// As [`Server::start`], with more routes behind the control token. They bound their own
    /// bodies.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub async fn start_with(
        gateway: Gateway,
        address: SocketAddr,
        control_token: &str,
        public_url: Option<String>,
        more: Option<Router>,
    ) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let url = public_url.unwrap_or_else(|| format!("http://{bound}"));
        gateway.set_public_url(url.trim_end_matches('/').to_owned());
        let service = Service {
            gateway: gateway.clone(),
            control: Secret::new(control_token),
        };
        let router = router(service, more);
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(accept(listener, gateway.clone(), router, stopped));
        Ok(Self {
            gateway,
            address: bound,
            stop,
            task: Some(task),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends: new calls are refused, running ones get the time of
    /// [`ServerLimits::shutdown_grace`](crate::ServerLimits::shutdown_grace), and are cut then.
    /// Gives the number of those.
    pub async fn stop(self) -> usize {
        self.stop_within(std::future::pending()).await
    }

    /// As [`Server::stop`], at the end of a run. For `notice` it still answers: new rollouts and calls get
    /// status 410, so that agents end and do not wait for another session. Then running calls are cut.
    pub async fn end(self, notice: Duration) -> usize {
        self.gateway.end();
        tokio::time::sleep(notice).await;
        self.stop_within(std::future::ready(())).await
    }

    /// As [`Server::stop`]; once `enough` is there, running calls get no more time.
    pub async fn stop_within(mut self, enough: impl Future<Output = ()>) -> usize {
        self.gateway.drain();
        let grace = self.gateway.config().server.shutdown_grace;
        tokio::select! {
            () = self.gateway.caller().drained(grace) => {}
            () = enough => {}
        }
        let cut = self.gateway.cut().await;
        // The task may have ended by itself.
        let _ = self.stop.send(true);
        if let Some(task) = self.task.take() {
            let _ = task.await;
        }
        cut
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

async fn accept(
    listener: TcpListener,
    gateway: Gateway,
    router: Router,
    mut stopped: watch::Receiver<bool>,
) {
    let limits = gateway.config().server;
    let places = Arc::new(Semaphore::new(limits.max_connections));
    let mut sweep = tokio::time::interval(gateway.sweep_every());
    let mut connections = JoinSet::new();
    loop {
        // Above the limit, new connections wait in the backlog of the socket.
        let next = async {
            let permit = Arc::clone(&places).acquire_owned().await;
            (permit, listener.accept().await)
        };
        tokio::select! {
            (permit, accepted) = next => match accepted {
                Ok((stream, _)) => {
                    let connection = serve(stream, gateway.clone(), router.clone(), stopped.clone());
                    connections.spawn(async move {
                        connection.await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    // Out of file descriptors, or the client was faster: go on, but not hotly.
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                }
            },
            _ = sweep.tick() => gateway.sweep().await,
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            _ = stopped.changed() => break,
        }
    }
    drop(listener);
    let drained = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(FLUSH, drained).await.is_err() {
        tracing::warn!("answers were not taken when the gateway stopped");
    }
    connections.shutdown().await;
}

async fn serve(
    stream: TcpStream,
    gateway: Gateway,
    router: Router,
    mut stopped: watch::Receiver<bool>,
) {
    let limits = gateway.config().server;
    // The kernel ends a connection whose client takes nothing for so long, which would else hold
    // its place for ever.
    let wait_ms = u32::try_from(limits.write_timeout.as_millis()).unwrap_or(u32::MAX);
    if let Err(error) = rustix::net::sockopt::set_tcp_user_timeout(&stream, wait_ms) {
        tracing::warn!(%error, "a connection cannot be bounded in time");
        return;
    }
    // Small events must not wait for more of them.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY");
    }
    let router = TowerToHyperService::new(router);
    let answer = service_fn(move |request| router.call(addressed(&gateway, plain_path(request))));
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.read_timeout)
        .max_buf_size(limits.max_head_bytes.max(MIN_HEAD_BYTES));
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), answer));
    tokio::select! {
        result = connection.as_mut() => {
            if let Err(error) = result {
                tracing::debug!(%error, "a connection ended early");
            }
            return;
        }
        _ = stopped.changed() => connection.as_mut().graceful_shutdown(),
    }
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a connection ended early");
    }
}
