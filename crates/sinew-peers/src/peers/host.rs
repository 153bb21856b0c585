//! A server with places: how many episodes it takes at once, and requests that are sent once.

use reqwest::Method;
use serde_json::Value;
use sinew_bridge::remote::{OwnRuntime, Remote, RemoteError, spawn};
use sinew_env::EnvError;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};

/// An error that fails the episode.
pub(super) fn worker(error: impl std::fmt::Display) -> EnvError {
    EnvError::Worker(error.to_string())
}

/// A server of another project.
pub(super) struct Host {
    /// Sends requests with the key of the server.
    remote: Remote,
    /// One permit for each episode.
    places: Arc<Semaphore>,
    /// Longest wait for a place.
    wait: Duration,
    /// Of the runtime below.
    pub(super) handle: Handle,
    /// Requests live as long as the server is used, whatever the runtime of a caller does.
    _runtime: OwnRuntime,
}

/// Where a server is, and its limits.
pub(super) struct Reach<'a> {
    /// Address, of HTTP or HTTPS.
    pub(super) url: &'a str,
    /// Name of the variable with the key. Empty: no key.
    pub(super) key_env: &'a str,
    /// Deadline of one request, in seconds.
    pub(super) timeout_s: f64,
    /// Longest wait for a place, in seconds.
    pub(super) wait_s: f64,
    /// Number of places.
    pub(super) sessions: usize,
}

impl Host {
    /// A client of the server. Nothing is sent.
    pub(super) fn new(reach: &Reach<'_>) -> Result<Self, EnvError> {
        let config = |field, value: &str, allowed: String| EnvError::Config {
            field,
            value: format!("{value:?}"),
            allowed,
        };
        let key = match reach.key_env {
            "" => None,
            name => Some(std::env::var(name).map_err(|_| {
                let why = format!("the environment variable is not set: export {name}=...");
                config("key_env", name, why)
            })?),
        };
        let timeout = Duration::from_secs_f64(reach.timeout_s);
        let remote = Remote::new(reach.url, key.as_deref(), timeout);
        let runtime = OwnRuntime::start().map_err(worker)?;
        let gone = || worker("the runtime of the client is gone");
        Ok(Self {
            remote: remote.map_err(|e| config("url", reach.url, e))?,
            places: Arc::new(Semaphore::new(reach.sessions)),
            wait: Duration::from_secs_f64(reach.wait_s),
            handle: runtime.handle().ok_or_else(gone)?,
            _runtime: runtime,
        })
    }

    /// Waits for a place.
    pub(super) async fn place(self: &Arc<Self>) -> Result<Place, EnvError> {
        let free = Arc::clone(&self.places).acquire_owned();
        let wait = self.wait;
        let free = spawn(&self.handle, tokio::time::timeout(wait, free)).await;
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
    /// Sends a request once. It goes on if the caller stops waiting.
    pub(super) async fn post(&self, path: &str, body: Value) -> Result<Value, RemoteError> {
        let (place, path) = (self.clone(), path.to_owned());
        let sent = spawn(&self.host.handle, async move {
            let mut cookies = place.cookies.lock().await;
            let remote = &place.host.remote;
            remote
                .once_with((Method::POST, &path), Some(&body), &mut cookies)
                .await
        });
        sent.await.unwrap_or_else(|e| {
            Err(RemoteError::Protocol {
                what: "the client".into(),
                why: e.to_string(),
            })
        })
    }

    /// Sends a last request in the background.
    pub(super) fn post_later(self, path: &'static str, body: Value) {
        let handle = self.host.handle.clone();
        handle.spawn(async move {
            // No one waits for it: the episode is over.
            let _ = self.post(path, body).await;
        });
    }
}
