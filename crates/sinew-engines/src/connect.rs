//! Chooses the client for an address.
//!
//! An address with a kind (`vllm+http://…`) needs no request, so the server need not be up. A server without
//! a kind is asked once, at `/v1/models`, whose `owned_by` names the program.

use crate::backend::Backend;
use crate::check::LogprobMode;
use crate::config::{ConfigError, ServerConfig};
use crate::error::AttemptError;
use crate::http::Http;
use crate::openai::{OpenaiBackend, TextCodec};
use crate::sglang::{SglangBackend, SglangOptions};
use crate::vllm::{VllmBackend, VllmOptions};
use serde_json::{Map, Value, json};
use sinew_types::Fidelity;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The kinds of servers that there are clients for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// vLLM: token-exact, loads weights from a folder.
    Vllm,
    /// SGLang: token-exact, loads weights from a folder.
    Sglang,
    /// Any server with `/v1/completions`.
    Openai,
}

impl EngineKind {
    /// The name that recipes and URLs use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Openai => "openai",
        }
    }

    /// Whether tokens of such a server may be trained on; for recipes that are checked before
    /// anything is started.
    pub fn fidelity(self) -> Fidelity {
        match self {
            Self::Vllm | Self::Sglang => Fidelity::TokenExact,
            Self::Openai => crate::openai::fidelity(),
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for EngineKind {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let all = [Self::Vllm, Self::Sglang, Self::Openai];
        let found = all.into_iter().find(|k| k.name() == text);
        found.ok_or_else(|| ConfigError::Value {
            name: "type",
            value: text.to_owned(),
            allowed: "vllm, sglang or openai".to_owned(),
        })
    }
}

/// Splits `vllm+http://host:8000` into kind and address; without a kind, `None` and the whole text.
///
/// # Errors
/// If the text before the `+` names no kind.
pub fn split_url(text: &str) -> Result<(Option<EngineKind>, &str), ConfigError> {
    match text.split_once("+http") {
        Some((kind, _)) => Ok((Some(kind.parse()?), &text[kind.len() + 1..])),
        None => Ok((None, text)),
    }
}

/// Options of a client in addition to the address. Those of other kinds are ignored.
#[derive(Clone, Default)]
pub struct ConnectOptions {
    /// `None` asks the server what it is.
    pub kind: Option<EngineKind>,
    /// Options for vLLM.
    pub vllm: VllmOptions,
    /// Options for SGLang.
    pub sglang: SglangOptions,
    /// Text to ids and back, for servers that support only text.
    pub codec: Option<Arc<dyn TextCodec>>,
    /// Distinguishes this process from others that use the server.
    pub session: u64,
}

sinew_types::debug_fields!(ConnectOptions, kind, vllm, sglang);

impl ConnectOptions {
    /// Sets the distribution of the server's log-probabilities for every kind; `None` keeps each
    /// kind's own default.
    #[must_use]
    pub fn logprobs(mut self, mode: Option<LogprobMode>) -> Self {
        if let Some(mode) = mode {
            self.vllm.logprobs = mode;
            self.sglang.logprobs = mode;
        }
        self
    }
}

/// Reasons for which there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address or an option is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The kind of the server was not given and could not be found.
    #[error("{url} does not say what it is: {error}; name it, as in `vllm+{url}`")]
    Unknown {
        /// Address without a kind.
        url: String,
        /// Failure of the call that asks for the kind.
        error: AttemptError,
    },
}

/// Builds the client for a server. The server need not be up if its kind is given. Otherwise this blocks
/// until the server answers, at most `control_s`.
///
/// # Errors
/// If the address cannot be one, or the server does not answer what it is.
///
/// # Panics
/// If no kind is given and the caller's thread runs an async runtime.
pub fn connect(
    server: ServerConfig,
    options: &ConnectOptions,
) -> Result<Arc<dyn Backend>, ConnectError> {
    let kind = match options.kind {
        Some(kind) => (kind, false),
        None => ask(&server)?,
    };
    Ok(match kind {
        (EngineKind::Vllm, _) => Arc::new(VllmBackend::new(server, options.vllm)?),
        (EngineKind::Sglang, _) => {
            Arc::new(SglangBackend::new(server, options.sglang, options.session)?)
        }
        (EngineKind::Openai, true) => {
            // It truncates the distribution by default.
            let extra = [("top_k", json!(0)), ("min_p", json!(0))];
            let extra = extra.map(|(k, v)| (k.to_owned(), v));
            let backend = OpenaiBackend::new(server, None)?;
            Arc::new(backend.with_extra(Map::from_iter(extra)))
        }
        (EngineKind::Openai, false) => Arc::new(OpenaiBackend::new(server, options.codec.clone())?),
    })
}

/// The kind of a running server, and whether it is a llama.cpp, which returns ids.
fn ask(server: &ServerConfig) -> Result<(EngineKind, bool), ConnectError> {
    let http = Http::new(&server.url, server.api_key.as_deref(), server.timeouts)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| ConfigError::Thread(e.to_string()))?;
    let found = runtime.block_on(async {
        let models: Value = http.get("/v1/models").await?;
        let owner = models["data"][0]["owned_by"].as_str().unwrap_or_default();
        Ok::<_, AttemptError>(match owner {
            "vllm" => (EngineKind::Vllm, false),
            "sglang" => (EngineKind::Sglang, false),
            "llamacpp" => (EngineKind::Openai, true),
            _ => (EngineKind::Openai, false),
        })
    });
    found.map_err(|error| ConnectError::Unknown {
        url: server.url.clone(),
        error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_may_stand_before_the_address() {
        let split = |text: &'static str| split_url(text).map_err(|e| e.to_string());
        assert_eq!(split("http://a:1"), Ok((None, "http://a:1")));
        assert_eq!(
            split("vllm+https://a"),
            Ok((Some(EngineKind::Vllm), "https://a"))
        );
        let error = split("tgi+http://a").unwrap_err();
        assert!(error.contains("`tgi`") || error.contains("tgi"), "{error}");
        assert!(error.contains("vllm, sglang or openai"), "{error}");
    }

    #[test]
    fn only_token_ids_may_be_trained_on() {
        assert_eq!(EngineKind::Vllm.fidelity(), Fidelity::TokenExact);
        assert_eq!(EngineKind::Sglang.fidelity(), Fidelity::TokenExact);
        assert_ne!(EngineKind::Openai.fidelity(), Fidelity::TokenExact);
    }
}
