//! A server with places: its number of episodes at once, and requests that are sent once.

use serde_json::Value;
use sinew_bridge::remote::{RemoteError, Server, worker};
use sinew_env::EnvError;
use sinew_http::Method;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};

/// A resource server.
pub(super) struct Host {
    /// Sends requests.
    server: Server,
    /// One permit for each episode.
    places: Arc<Semaphore>,
    /// Longest wait for a place.
    wait: Duration,
}

impl Host {
    /// A server that takes `sessions` episodes at once. Nothing is sent.
    pub(super) fn new(server: Server, sessions: usize, wait: Duration) -> Self {
        Self {
            server,
            places: Arc::new(Semaphore::new(sessions)),
            wait,
        }
    }

    /// Waits for a place.
    pub(super) async fn place(self: &Arc<Self>) -> Result<Place, EnvError> {
        let free = Arc::clone(&self.places).acquire_owned();
        let wait = self.wait;
        let free = tokio::time::timeout(wait, free);
        let free = self.server.handle.spawn(free).await;
        let Ok(Ok(Ok(permit))) = free else {
            return Err(worker(format!(
                "no place of env.sessions was free within {} s; raise env.sessions or env.wait_s",
                wait.as_secs_f64()
            )));
        };
        Ok(Place {
            host: Arc::clone(self),
            cookies: Arc::default(),
            _permit: Arc::new(permit),
        })
    }
}

/// A place of a server with the cookies of its session.
#[derive(Clone)]
pub(super) struct Place {
    /// The server.
    host: Arc<Host>,
    /// Locked during one request: requests of one place run one after another.
    cookies: Arc<Mutex<BTreeMap<String, String>>>,
    /// The place is free again when its last clone is dropped, after a last request.
    _permit: Arc<OwnedSemaphorePermit>,
}

impl Place {
    /// Sends a request once. It continues if the caller stops waiting.
    pub(super) async fn post(&self, path: &str, body: Value) -> Result<Value, RemoteError> {
        let (place, path) = (self.clone(), path.to_owned());
        let sent = self.host.server.handle.spawn(async move {
            let mut cookies = place.cookies.lock().await;
            let remote = &place.host.server.remote;
            remote
                .once_with(Method::POST, &path, Some(&body), &mut cookies)
                .await
        });
        sent.await.unwrap_or_else(|e| {
            Err(RemoteError::Protocol {
                what: "the client".into(),
                why: e.to_string(),
            })
        })
    }
}
