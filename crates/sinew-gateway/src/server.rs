//! HTTP server of a gateway: connections, their limits, and shutdown.
//!
//! [`sinew_http::server`] serves and limits connections. A separate task runs each call, so that the call
//! outlives its connection. To stop, the server first refuses new calls, waits for running ones, aborts the
//! rest, and closes connections last, so that every client gets an answer.

use crate::gateway::Gateway;
use crate::paths::plain_path;
use crate::routes::{Service, addressed, keyed, router, too_many_connections};
use crate::secret::Secret;
use axum::Router;
use axum::response::Response;
use sinew_http::server::{self, ConnectionLimits, Endpoint, Guard, Listener};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Time for sending the last answers after all calls have ended.
const FLUSH: Duration = Duration::from_secs(5);

/// Reasons why a gateway cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("cannot listen on {address}: {source}")]
    Listen {
        address: SocketAddr,
        source: std::io::Error,
    },
}

/// A listening gateway. Dropping it stops it at once; [`Server::stop`] lets requests finish.
#[derive(Debug)]
pub struct Server {
    gateway: Gateway,
    address: SocketAddr,
    stop: watch::Sender<bool>,
    task: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on `address`; port 0 selects a free port. `control_token` is the token of the control API.
    /// `public_url` is the URL at which agents reach this server, if it differs from its address.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub async fn start(
        gateway: Gateway,
        address: SocketAddr,
        control_token: &str,
        public_url: Option<String>,
    ) -> Result<Self, ServeError> {
        Self::start_with(gateway, address.into(), control_token, public_url, None).await
    }

    /// Like [`Server::start`], with TLS where the endpoint has it, and with more routes that need the control
    /// token. These limit their request bodies themselves.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub async fn start_with(
        gateway: Gateway,
        endpoint: Endpoint,
        control_token: &str,
        public_url: Option<String>,
        more: Option<Router>,
    ) -> Result<Self, ServeError> {
        let address = endpoint.address;
        let failed = |source| ServeError::Listen { address, source };
        let listener = endpoint.bind().await.map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let scheme = listener.scheme();
        let url = public_url.unwrap_or_else(|| format!("{scheme}://{bound}"));
        gateway.set_public_url(url.trim_end_matches('/').to_owned());
        let service = Service {
            gateway: gateway.clone(),
            control: Secret::new(control_token),
        };
        let router = router(service.clone(), more);
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(run(listener, gateway.clone(), service, router, stopped));
        Ok(Self {
            gateway,
            address: bound,
            stop,
            task: Some(task),
        })
    }

    /// Address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops the server: new calls are refused; running ones may continue for
    /// [`ServerLimits::shutdown_grace`](crate::ServerLimits::shutdown_grace) and are then aborted. Returns
    /// the number of aborted calls.
    pub async fn stop(self) -> usize {
        self.stop_within(std::future::pending()).await
    }

    /// Stops like [`Server::stop`], at the end of a run. During `notice` the server still answers new
    /// rollouts and calls with status 410, so that agents end and do not wait for another session. Running
    /// calls are aborted after it.
    pub async fn end(self, notice: Duration) -> usize {
        self.gateway.end();
        tokio::time::sleep(notice).await;
        self.stop_within(std::future::ready(())).await
    }

    /// Stops like [`Server::stop`], but aborts running calls as soon as `enough` resolves.
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

/// Serves until `stopped` is true, and ends unused rollouts.
async fn run(
    listener: Listener,
    gateway: Gateway,
    service: Service,
    router: Router,
    mut stopped: watch::Receiver<bool>,
) {
    let sweep = async {
        let mut ticks = tokio::time::interval(gateway.sweep_every());
        loop {
            ticks.tick().await;
            gateway.sweep().await;
        }
    };
    // An error means that the server was dropped.
    let stop = async { drop(stopped.wait_for(|stopped| *stopped).await) };
    let serving = server::serve(listener, router, guard(service), stop);
    let open = tokio::select! {
        open = serving => open,
        () = sweep => return,
    };
    if !open.close(FLUSH).await {
        tracing::warn!("answers were not taken when the gateway stopped");
    }
}

/// Assigns connections to the rollout of their key; connections with the control token may use all places.
fn guard(service: Service) -> Guard {
    let limits = service.gateway.config().server;
    let connections = ConnectionLimits {
        with_key: limits.max_connections,
        per_key: limits.max_connections,
        key_time: limits.read_timeout,
        head_time: limits.read_timeout,
        // Each route bounds its body.
        body_time: None,
        write_time: limits.write_timeout,
        head_bytes: limits.max_head_bytes,
        ..ConnectionLimits::default()
    };
    let gateway = service.gateway.clone();
    Guard::new(connections, move |parts| service.key(parts))
        .rewriting(move |request| addressed(&gateway, keyed(plain_path(request))))
        .refusing(too_many)
}

/// Builds the answer for a connection above the limit.
fn too_many(limit: usize) -> Response {
    let text = format!("{limit} connections are open, which is the limit: close some");
    too_many_connections(text)
}
