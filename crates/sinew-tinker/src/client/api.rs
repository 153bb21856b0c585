//! The calls of the protocol that answer at once: settings, models, sessions, samplers, deletions.

use super::error::ClientError;
use super::http::{End, Http, Message};
use super::options::ServiceOptions;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::Duration;

/// Version of the SDK whose protocol this client speaks: a service chooses its settings by it.
const PROTOCOL: &str = "0.38.0";
/// Limit of calls that only look something up.
const LOOK: Duration = Duration::from_secs(60);
/// Limit of a sign of life.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Settings that a service gives its clients; others are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct ClientConfig {
    /// The key has to be exchanged for tokens of minutes.
    pub(crate) pjwt_auth_enabled: bool,
    /// Bodies of `forward_backward` may be compressed.
    pub(crate) proto_compress_fwdbwd: bool,
    /// Maximum datums of one request.
    pub(crate) fwdbwd_max_chunk_len: usize,
    /// Maximum bytes of one request before compression.
    pub(crate) fwdbwd_max_chunk_bytes_count: usize,
}

impl Default for ClientConfig {
    /// The defaults of the SDK.
    fn default() -> Self {
        Self {
            pjwt_auth_enabled: false,
            proto_compress_fwdbwd: false,
            fwdbwd_max_chunk_len: 1024,
            fwdbwd_max_chunk_bytes_count: 5_000_000,
        }
    }
}

/// A base model of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseModel {
    /// Its name.
    #[serde(rename = "model_name")]
    pub name: String,
    /// Maximum tokens of prompt and output together; `None`: the service does not report it.
    #[serde(rename = "max_context_length", default)]
    pub context: Option<usize>,
    /// Whether it can be trained; `None`: the service does not report it.
    #[serde(default)]
    pub trainable: Option<bool>,
    /// Whether it can be sampled; `None`: the service does not report it.
    #[serde(default)]
    pub sampleable: Option<bool>,
}

impl BaseModel {
    /// The model of a name, or the only one that can be trained.
    ///
    /// # Errors
    /// If there is no such model, or `name` is left out and there are several; names all of them.
    pub fn choose<'a>(all: &'a [Self], name: Option<&str>) -> Result<&'a Self, ClientError> {
        let chosen: Vec<&Self> = match name {
            Some(name) => all.iter().filter(|model| model.name == name).collect(),
            None => all
                .iter()
                .filter(|model| model.trainable != Some(false))
                .collect(),
        };
        if let [only] = chosen[..] {
            return Ok(only);
        }
        let named: Vec<&str> = all.iter().map(|model| model.name.as_str()).collect();
        Err(ClientError::Setup(format!(
            "trainer.base_model = {:?}: allowed: a base model of the service: {named:?}",
            name.unwrap_or_default()
        )))
    }
}

#[derive(Deserialize)]
struct Capabilities {
    supported_models: Vec<BaseModel>,
}

#[derive(Deserialize)]
struct NewSession {
    session_id: String,
    #[serde(default)]
    info_message: Option<String>,
    #[serde(default)]
    warning_message: Option<String>,
    #[serde(default)]
    error_message: Option<String>,
}

#[derive(Deserialize)]
struct NewSampler {
    sampling_session_id: String,
}

/// A service with the settings that it gives its clients.
#[derive(Debug)]
pub(crate) struct Api {
    pub(crate) http: Http,
    pub(crate) config: ClientConfig,
    /// Limit of one command.
    pub(crate) timeout: Duration,
    run: String,
}

impl Api {
    /// Asks a service for its settings within `limit`: it may still be starting.
    pub(crate) async fn connect_within(
        options: &ServiceOptions,
        limit: Duration,
    ) -> Result<Self, ClientError> {
        let http = Http::new(options)?;
        let end = End::after(limit);
        let message = Message::json("/api/v1/client/config", &json!({ "sdk_version": PROTOCOL }));
        let config = match http.ask("client/config", &message, end).await {
            // Older services have no settings.
            Err(ClientError::Gone { .. }) => ClientConfig::default(),
            config => config?,
        };
        if config.pjwt_auth_enabled {
            http.exchange_keys(end).await?;
        }
        Ok(Self {
            http,
            config,
            timeout: options.timeout,
            run: options.run.clone(),
        })
    }

    /// The base models.
    pub(crate) async fn models(&self) -> Result<Vec<BaseModel>, ClientError> {
        let call = "get_server_capabilities";
        let message = Message::get("/api/v1/get_server_capabilities");
        let read: Capabilities = self.http.ask(call, &message, End::after(LOOK)).await?;
        Ok(read.supported_models)
    }

    /// The base model of a name, or the only one that can be trained.
    pub(crate) async fn base_model(&self, name: Option<&str>) -> Result<BaseModel, ClientError> {
        let all = self.models().await?;
        BaseModel::choose(&all, name).cloned()
    }

    /// Opens a session and returns its id.
    pub(crate) async fn create_session(&self) -> Result<String, ClientError> {
        let call = "create_session";
        let body = json!({
            "type": call,
            "tags": ["sinew"],
            "user_metadata": { "run": self.run },
            "sdk_version": PROTOCOL,
        });
        let message = Message::json("/api/v1/create_session", &body);
        let new: NewSession = self.http.ask(call, &message, End::after(LOOK)).await?;
        let session = new.session_id;
        if let Some(text) = new.info_message {
            tracing::info!(session, "{text}");
        }
        for text in [new.warning_message, new.error_message]
            .into_iter()
            .flatten()
        {
            tracing::warn!(session, "{text}");
        }
        Ok(session)
    }

    /// Shows that the owner of a session is alive; `false`: the session has ended.
    ///
    /// # Errors
    /// If the service does not answer; nothing is sent again.
    pub(crate) async fn heartbeat(&self, session: &str) -> Result<bool, ClientError> {
        let call = "session_heartbeat";
        let body = json!({ "type": call, "session_id": session });
        let message = Message::json("/api/v1/session_heartbeat", &body);
        match self.once(call, &message).await {
            Ok(()) => Ok(true),
            Err(ClientError::Gone { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sends a sign of life or a question for one, and nothing again.
    async fn once(&self, call: &'static str, message: &Message) -> Result<(), ClientError> {
        let answer = match self.http.send(message, HEARTBEAT).await {
            Ok(answer) => answer,
            Err(error) => {
                let why = self.http.fault(call, error)?;
                return Err(ClientError::Connection { call, why });
            }
        };
        if answer.status.is_success() {
            return Ok(());
        }
        let text = super::http::said(&answer);
        Err(ClientError::of_status(call, answer.status.as_u16(), text))
    }

    /// Makes the sampling session number `seq` of a session, and returns its id: of a path, or of the base
    /// model of a name.
    pub(crate) async fn create_sampler(
        &self,
        session: &str,
        seq: u64,
        of: &SamplerSource,
    ) -> Result<String, ClientError> {
        let call = "create_sampling_session";
        let mut body = json!({
            "type": call,
            "session_id": session,
            "sampling_session_seq_id": seq,
        });
        match of {
            SamplerSource::Path(path) => body["model_path"] = json!(path),
            SamplerSource::Base(name) => body["base_model"] = json!(name),
        }
        let message = Message::json("/api/v1/create_sampling_session", &body);
        let new: NewSampler = self.http.ask(call, &message, End::after(LOOK)).await?;
        Ok(new.sampling_session_id)
    }

    /// Deletes a checkpoint, `tinker://MODEL_ID/weights/NAME`. One that is gone counts as deleted.
    pub(crate) async fn delete(&self, path: &str) -> Result<(), ClientError> {
        let call = "delete_checkpoint";
        let parts = path.strip_prefix("tinker://");
        let Some((model, name)) = parts.and_then(|parts| parts.split_once('/')) else {
            return Err(ClientError::unreadable(
                call,
                format!("{path:?} is not a path"),
            ));
        };
        let message = Message::delete(format!("/api/v1/training_runs/{model}/checkpoints/{name}"));
        match self.http.call(call, &message, End::after(LOOK)).await {
            Ok(_) | Err(ClientError::Gone { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Asks the service to end a request early. The request may have ended.
    pub(crate) async fn cancel(&self, request: &str) {
        let message = Message::json("/api/v1/cancel_future", &json!({ "request_id": request }));
        if let Err(error) = self.http.send(&message, HEARTBEAT).await {
            tracing::debug!(request, %error, "a request was not cancelled");
        }
    }

    /// Whether the service answers.
    ///
    /// # Errors
    /// The reason why it does not.
    pub(crate) async fn health(&self) -> Result<(), ClientError> {
        let message = Message::get("/api/v1/healthz");
        match self.once("healthz", &message).await {
            // Older services do not have it.
            Err(ClientError::Gone { status: 404, .. }) => Ok(()),
            result => result,
        }
    }

    /// The labels that the service shows with models and checkpoints.
    pub(crate) fn labels(&self) -> Value {
        json!({ "run": self.run })
    }
}

/// The weights of a sampler.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SamplerSource {
    /// A checkpoint, `tinker://MODEL_ID/sampler_weights/NAME`.
    Path(String),
    /// A base model by its name.
    Base(String),
}
