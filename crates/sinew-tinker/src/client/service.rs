//! A service for threads that may block: a runtime with one session.

use super::api::{Api, BaseModel, SamplerSource};
use super::error::ClientError;
use super::future::{GroupError, Job, Payload};
use super::http::Message;
use super::options::ServiceOptions;
use super::session::Session;
use serde_json::json;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// Time that the end of a model waits for the service.
const UNLOAD: Duration = Duration::from_secs(3);

/// One session at a service. Its calls are those of [`Api`] with the same names. They block, and must not
/// come from a thread of an async runtime.
#[derive(Debug)]
pub(crate) struct Service {
    session: Session,
    // Dropped last: the session's task runs on it.
    runtime: Background,
}

/// A runtime that is left behind when it is dropped, so that it may be dropped anywhere.
#[derive(Debug)]
struct Background(Option<Runtime>);

impl Background {
    fn new() -> Result<Self, ClientError> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("sinew-tinker")
            .enable_all()
            .build();
        let runtime = runtime.map_err(|e| ClientError::Setup(format!("async runtime: {e}")))?;
        Ok(Self(Some(runtime)))
    }

    fn block<T>(
        &self,
        work: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        match &self.0 {
            Some(runtime) => runtime.block_on(work),
            None => Err(ClientError::Setup("the client has ended".to_owned())),
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl Service {
    /// Opens a session.
    ///
    /// # Errors
    /// If the service does not answer within the limit of a command, or refuses the key.
    pub(crate) fn open(options: &ServiceOptions) -> Result<Self, ClientError> {
        Self::open_within(options, options.timeout)
    }

    /// Opens a session with a service that must answer within `limit`.
    pub(crate) fn open_within(
        options: &ServiceOptions,
        limit: Duration,
    ) -> Result<Self, ClientError> {
        let runtime = Background::new()?;
        let session = runtime.block(async {
            let api = Api::connect_within(options, limit).await?;
            Session::open(Arc::new(api)).await
        })?;
        Ok(Self { session, runtime })
    }

    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    pub(crate) fn api(&self) -> &Api {
        &self.session.api
    }

    /// The base model of a name, or the only one that can be trained.
    pub(crate) fn base_model(&self, name: Option<&str>) -> Result<BaseModel, ClientError> {
        self.runtime.block(self.api().base_model(name))
    }

    /// The base models.
    pub(crate) fn models(&self) -> Result<Vec<BaseModel>, ClientError> {
        self.runtime.block(self.api().models())
    }

    /// Makes a sampler, and returns the id of its sampling session.
    pub(crate) fn sampler(&self, of: &SamplerSource) -> Result<String, ClientError> {
        self.runtime.block(self.session.sampler(of))
    }

    /// Deletes a checkpoint.
    pub(crate) fn delete(&self, path: &str) -> Result<(), ClientError> {
        self.runtime.block(self.api().delete(path))
    }

    /// Asks the service to free a model, which takes no further commands; its checkpoints stay. A service
    /// that does not answer frees it with the session. It may be called on any thread.
    pub(crate) fn unload(&self, model: &str) {
        let Some(runtime) = &self.runtime.0 else {
            return;
        };
        let (api, model) = (Arc::clone(&self.session.api), model.to_owned());
        let (to, ended) = sync_channel(1);
        runtime.spawn(async move {
            let body = json!({ "type": "unload_model", "model_id": model });
            let message = Message::json("/api/v1/unload_model", &body);
            if let Err(error) = api.http.send(&message, UNLOAD).await {
                tracing::debug!(model, %error, "a model of the Tinker service was not unloaded");
            }
            // The owner may have stopped waiting.
            let _ = to.send(());
        });
        // A timeout is logged by the task.
        let _ = ended.recv_timeout(UNLOAD);
    }

    /// Submits a command and waits for its result.
    pub(crate) fn run(&self, job: &Job) -> Result<Payload, ClientError> {
        self.runtime.block(self.api().run(job))
    }

    /// Submits commands with consecutive numbers, and waits for all results.
    pub(crate) fn run_group(&self, jobs: &[Job]) -> Result<Vec<Payload>, GroupError> {
        let result = self
            .runtime
            .block(async { Ok(self.api().run_group(jobs).await) });
        result.unwrap_or_else(|error| {
            Err(GroupError {
                error,
                is_taken: false,
            })
        })
    }
}

/// The base models of a service that must answer within `limit`. It must not be called on a thread of an
/// async runtime.
///
/// # Errors
/// If the service does not answer, or refuses the key.
pub fn base_models(
    options: &ServiceOptions,
    limit: Duration,
) -> Result<Vec<BaseModel>, ClientError> {
    let runtime = Background::new()?;
    runtime.block(async {
        let api = Api::connect_within(options, limit).await?;
        api.models().await
    })
}
