//! The one address of an owner: the registry of roles, tickets, facts of the run and weights.
//!
//! | route | whose |
//! |---|---|
//! | `GET /health` | `{"status": "ok"}`, without a token |
//! | `/queue`, `/queue/wait` | the queue of tickets |
//! | `/run`, `/tickets`, `/weights` | the [`Desk`] |
//! | `/roles` and below | the registry, which the caller gives |

use crate::desk::Desk;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::json;
use sinew_http::server::{self, ConnectionLimits, Endpoint, Guard, Key};
use sinew_queue::QueueRoutes;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Connections with the token: each worker and each role has a few.
const CONNECTIONS: usize = 8192;
/// Time that running calls get when the listener stops.
const GRACE: Duration = Duration::from_secs(5);
/// Time in which workers learn that their run is over.
const NOTICE: Duration = Duration::from_secs(10);
/// Interval of checks whether all of them know it.
const LOOK: Duration = Duration::from_millis(50);

/// Parts of a listener.
pub struct ListenerParts {
    /// Address, with or without TLS. Port 0 takes a free one.
    pub endpoint: Endpoint,
    /// Token of every call but `GET /health`.
    pub token: String,
    /// Routes of the registry of roles, which check the token themselves.
    pub roles: Router,
    /// Desk and queue, if workers run the episodes.
    pub tickets: Option<(Arc<Desk>, QueueRoutes)>,
}

sinew_types::debug_fields!(ListenerParts, endpoint);

/// A listening owner. Dropped at the end of a run, it first lets workers learn of it.
#[derive(Debug)]
pub struct OwnerListener {
    address: SocketAddr,
    scheme: &'static str,
    tickets: Option<(Arc<Desk>, QueueRoutes)>,
    runtime: Handle,
    stop: watch::Sender<bool>,
    task: Option<JoinHandle<()>>,
}

impl OwnerListener {
    /// Listens, and serves from now on. It must not be called on a thread of the runtime.
    ///
    /// # Errors
    /// If the address cannot be taken.
    pub fn start(runtime: &Handle, parts: ListenerParts) -> std::io::Result<Self> {
        let listener = runtime.block_on(parts.endpoint.bind())?;
        let (address, scheme) = (listener.local_addr()?, listener.scheme());
        let healthy = get(async || Json(json!({"status": "ok"})));
        let mut router = parts.roles.route("/health", healthy);
        if let Some((desk, queue)) = &parts.tickets {
            router = router.merge(desk.routes(&parts.token));
            router = router.merge(queue.router());
        }
        let (stop, mut stopped) = watch::channel(false);
        let guard = guard(&parts.token);
        let task = runtime.spawn(async move {
            // An error means that the listener was dropped.
            let stop = async { drop(stopped.wait_for(|stop| *stop).await) };
            let open = server::serve(listener, router, guard, stop).await;
            if !open.close(GRACE).await {
                tracing::warn!("calls of workers were cut when the run stopped");
            }
        });
        Ok(Self {
            address,
            scheme,
            tickets: parts.tickets,
            runtime: runtime.clone(),
            stop,
            task: Some(task),
        })
    }

    /// Address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `https` or `http`.
    pub fn scheme(&self) -> &'static str {
        self.scheme
    }
}

impl Drop for OwnerListener {
    fn drop(&mut self) {
        if let Some((desk, queue)) = &self.tickets {
            let end = Instant::now() + NOTICE;
            while desk.has_ended() && desk.untold() > 0 && Instant::now() < end {
                std::thread::sleep(LOOK);
            }
            queue.end_waits();
        }
        // It is gone if nothing listens, which is what is wanted.
        let _ = self.stop.send(true);
        if let Some(task) = self.task.take() {
            let _ = self.runtime.block_on(task);
        }
    }
}

/// Connections with the token have nearly all places.
fn guard(token: &str) -> Guard {
    let limits = ConnectionLimits {
        with_key: CONNECTIONS,
        // Calls of the queue have their own.
        body_time: None,
        ..ConnectionLimits::default()
    };
    let secret = blake3::hash(token.as_bytes());
    let key = move |parts: &Parts| {
        let given = parts.headers.get(AUTHORIZATION);
        let given = given.and_then(|v| v.to_str().ok()?.strip_prefix("Bearer "));
        let fits = given.is_some_and(|t| blake3::hash(t.trim().as_bytes()) == secret);
        fits.then_some(Key::Operator)
    };
    Guard::new(limits, key)
}
