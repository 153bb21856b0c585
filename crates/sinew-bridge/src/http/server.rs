//! Access to a server of environments: its address, its key, and a runtime for requests.

use super::remote::Remote;
use crate::runtime::OwnRuntime;
use sinew_env::EnvError;
use std::time::Duration;
use tokio::runtime::Handle;

/// An error that fails the episode.
pub fn worker(error: impl std::fmt::Display) -> EnvError {
    EnvError::Worker(error.to_string())
}

/// The refusal of a key of the recipe.
pub fn refused(field: &'static str, value: &str, allowed: impl Into<String>) -> EnvError {
    EnvError::Config {
        field,
        value: format!("{value:?}"),
        allowed: allowed.into(),
    }
}

/// The error for requests after the end of the runtime.
pub fn gone() -> EnvError {
    worker("the runtime of the client is gone")
}

/// A server, and the runtime on which its clients send requests.
pub struct Server {
    /// Sends requests with the key of the server.
    pub remote: Remote,
    /// The key. `None`: none is sent.
    pub key: Option<String>,
    /// Spawns tasks on the runtime.
    pub handle: Handle,
    /// Requests live as long as the server is used, whatever the runtime of a caller does.
    _runtime: OwnRuntime,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key is left out.
        f.debug_tuple("Server").field(&self.remote).finish()
    }
}

impl Server {
    /// A client of the server at `url`. Nothing is sent. `key_env` names the variable with the key; empty: no
    /// key.
    ///
    /// # Errors
    /// If the variable is not set, or `url` is not an address of HTTP or HTTPS.
    pub fn new(url: &str, key_env: &str, timeout_s: f64) -> Result<Self, EnvError> {
        let key = std::env::var(key_env).ok().filter(|k| !k.is_empty());
        if key.is_none() && !key_env.is_empty() {
            let why = format!("the environment variable is not set: export {key_env}=...");
            return Err(refused("key_env", key_env, why));
        }
        let timeout = Duration::from_secs_f64(timeout_s);
        let remote = Remote::new(url, key.as_deref(), timeout);
        let runtime = OwnRuntime::start().map_err(worker)?;
        Ok(Self {
            remote: remote.map_err(|e| refused("url", url, e.to_string()))?,
            key,
            handle: runtime.handle().ok_or_else(gone)?,
            _runtime: runtime,
        })
    }
}
