//! The service over HTTP, at the paths and with the bodies of the Tinker SDK.
//!
//! | group | paths below `/api/v1` |
//! |---|---|
//! | client | `healthz`, `client/config`, `client/dynamic_config`, `get_server_capabilities`, `telemetry`, `auth/apikey/me` |
//! | sessions | `create_session`, `session_heartbeat`, `sessions`, `sessions/search`, `sessions/{id}`, `sessions/{id}/finish` |
//! | training | `create_model`, `get_info`, `unload_model`, `forward`, `forward_backward`, `optim_step` |
//! | weights | `save_weights`, `load_weights`, `save_weights_for_sampler`, `save_weights_external`, `copy_weights`, `weights_info` |
//! | sampling | `create_sampling_session`, `join_sampling_session`, `samplers/{id}`, `asample` |
//! | futures | `retrieve_future`, `retrieve_futures`, `cancel_future` |
//! | records | `training_runs`, `training_runs/{id}`, `checkpoints`, `training_runs/{id}/checkpoints` and what is below, `billing/usage/checkpoints/current` |
//!
//! All but `healthz` and the signed addresses of files need a key. Parts of the SDK's API that are not
//! served answer 422 with the reason; a path that does not exist answers 404 with those that do.
//!
//! The routes hold no state: the [`Desk`] makes a command durable before its future is returned.

mod api;
mod auth;
mod body;
mod client;
mod commands;
mod date;
mod error;
mod external;
mod records;
mod results;
mod routes;
mod sampling;
mod sessions;
mod signer;
mod training;
mod weights;

pub use auth::{KeyError, Keys};

use crate::desk::Desk;
use crate::wire::WireLimits;
use api::Api;
use axum::Router;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use error::ApiError;
use sinew_http::server::{self, ConnectionLimits, Endpoint, Guard, Key};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Time that running requests get when the server stops. Waits for results end at once.
const GRACE: Duration = Duration::from_secs(10);

/// Limits of the service over HTTP. Those of tenants are the desk's.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerLimits {
    /// Bytes of one body, as sent and unpacked. The SDK's requests have at most 5 MB of datums, or one datum.
    pub body_bytes: usize,
    /// Bytes of all bodies that are read at the same time.
    pub bodies_bytes: usize,
    /// Bounds of the contents of bodies.
    pub wire: WireLimits,
    /// Longest wait for a result in one request; then the client asks again. The SDK gives up after 45 s.
    pub poll: Duration,
    /// Bytes of a result up to which it is sent to a client that can wait: larger ones are announced first,
    /// so that the client bounds the bytes of its open answers.
    pub inline_bytes: usize,
    /// Connections of all keys; each client of the SDK opens one for each 50 waits.
    pub connections: usize,
    /// Time for which the address of a file of external weights is valid.
    pub url_time: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            body_bytes: 64 << 20,
            bodies_bytes: 512 << 20,
            wire: WireLimits::default(),
            poll: Duration::from_secs(30),
            inline_bytes: 256 << 10,
            connections: 4096,
            url_time: Duration::from_secs(3600),
        }
    }
}

/// Settings of the server.
#[derive(Clone, Debug)]
pub struct TinkerServerConfig {
    /// Address, with or without TLS. Port 0 takes a free one.
    pub listen: Endpoint,
    /// Keys of the tenants.
    pub keys: Keys,
    /// Limits.
    pub limits: ServerLimits,
    /// Address at which clients reach the server, such as `https://train.example`, for the addresses of files
    /// of external weights; `None`: the listener's scheme and the request's own `Host`.
    pub public_url: Option<String>,
}

/// The service, until it is stopped or dropped.
#[derive(Debug)]
pub struct TinkerServer {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl TinkerServer {
    /// Listens, and serves from now on.
    ///
    /// # Errors
    /// If the address cannot be taken, or the system has no random numbers.
    pub async fn start(desk: Desk, config: TinkerServerConfig) -> std::io::Result<Self> {
        let listener = config.listen.clone().bind().await?;
        let address = listener.local_addr()?;
        let (stop, stopped) = watch::channel(false);
        let api = Api::new(desk, config, stopped.clone())?;
        let guard = guard(&api);
        let router = routes::router(api);
        let mut ending = stopped;
        let task = tokio::spawn(async move {
            // An error means that the server was dropped.
            let stop = async { drop(ending.wait_for(|stop| *stop).await) };
            let open = server::serve(listener, router, guard, stop).await;
            if !open.close(GRACE).await {
                tracing::warn!("requests of Tinker clients were cut when the server stopped");
            }
        });
        Ok(Self {
            address,
            stop,
            task,
        })
    }

    /// Address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends waits for results, lets running requests end, and returns when nothing uses the desk any more.
    /// The desk still runs: [`Desk::drain`] ends it.
    pub async fn stop(mut self) {
        // It is gone if nothing listens, which is what is wanted.
        let _ = self.stop.send(true);
        let _ = (&mut self.task).await;
    }
}

impl Drop for TinkerServer {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        self.task.abort();
    }
}

/// The routes without a listener, for other servers and for tests. Waits for results end when `stopped` is
/// set.
///
/// # Errors
/// If the system has no random numbers.
pub fn router(
    desk: Desk,
    config: TinkerServerConfig,
    stopped: watch::Receiver<bool>,
) -> std::io::Result<Router> {
    Ok(routes::router(Api::new(desk, config, stopped)?))
}

/// Connections count against the tenant of their key.
fn guard(api: &Api) -> Guard {
    let limits = ConnectionLimits {
        with_key: api.limits.connections,
        per_key: api.limits.connections,
        // Bodies have their own bound, and answers wait for results.
        body_time: None,
        ..ConnectionLimits::default()
    };
    let (keys, signer) = (api.keys.clone(), api.signer.clone());
    let key = move |parts: &Parts| {
        let tenant = keys
            .tenant(&parts.headers)
            .map(|tenant| tenant.name.clone());
        let tenant = tenant.or_else(|| signer.tenant(parts.uri.path()));
        tenant.map(Key::Named)
    };
    Guard::new(limits, key).without_pages().refusing(too_many)
}

/// The answer above the number of connections.
fn too_many(limit: usize) -> Response {
    let text = format!("{limit} connections of this key are open, which is the limit: close some");
    ApiError::busy(text, Duration::from_secs(1)).into_response()
}
