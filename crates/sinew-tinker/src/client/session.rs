//! A session at a service: its signs of life, and the numbers of what is made in it.

use super::api::{Api, SamplerSource};
use super::error::ClientError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::AbortHandle;

/// Time between two signs of life.
const PERIOD: Duration = Duration::from_secs(10);
/// Time without an answer after which a warning is logged.
const SILENCE: Duration = Duration::from_secs(120);

/// A session. Dropping it ends the signs of life, after which the service ends the session by itself.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) api: Arc<Api>,
    pub(crate) id: String,
    heartbeat: AbortHandle,
    models: AtomicU64,
    samplers: AtomicU64,
}

impl Session {
    /// Opens a session, whose signs of life come from the runtime of the caller.
    pub(crate) async fn open(api: Arc<Api>) -> Result<Self, ClientError> {
        let id = api.create_session().await?;
        let task = tokio::spawn(heartbeats(Arc::clone(&api), id.clone()));
        Ok(Self {
            api,
            id,
            heartbeat: task.abort_handle(),
            models: AtomicU64::new(0),
            samplers: AtomicU64::new(0),
        })
    }

    /// The number of the next model of this session, from 0.
    pub(crate) fn next_model(&self) -> u64 {
        self.models.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes a sampler.
    pub(crate) async fn sampler(&self, of: &SamplerSource) -> Result<String, ClientError> {
        let seq = self.samplers.fetch_add(1, Ordering::Relaxed);
        self.api.create_sampler(&self.id, seq, of).await
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.heartbeat.abort();
    }
}

/// Shows that the owner of a session is alive, until the session ends.
async fn heartbeats(api: Arc<Api>, session: String) {
    let mut answered = Instant::now();
    loop {
        tokio::time::sleep(PERIOD).await;
        match api.heartbeat(&session).await {
            Ok(true) => answered = Instant::now(),
            Ok(false) => {
                tracing::warn!(session, "the Tinker service has ended the session");
                return;
            }
            Err(error) if answered.elapsed() > SILENCE => {
                let seconds = answered.elapsed().as_secs();
                tracing::warn!(session, seconds, %error, "no sign of life reaches the Tinker service");
            }
            Err(_) => {}
        }
    }
}
