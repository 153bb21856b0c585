//! LoRA adapters of a vLLM server, by name: no pause, and no request ends.
//!
//! A request names the adapter as its model, so the version of its tokens is the one in that name. Where the
//! run's weights are an adapter, the server's own weights stay those that it was started with. Adapters that
//! requests of their own name are applied to whatever weights the server has; those are verified as always.

use super::VllmBackend;
use crate::attempt::Attempt;
use crate::backend::{NamedAdapter, ServedWeights, Weights};
use crate::error::AttemptError;
use serde_json::json;
use sinew_types::EngineError;
use std::collections::BTreeSet;
use std::path::Path;

/// Flags of a server that loads adapters.
const START: &str = "start vLLM with --enable-lora, --max-lora-rank of at least the adapter's rank \
    (train.lora.rank) and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and let it see the folder under the same path";

impl VllmBackend {
    /// Loads an adapter under its name and verifies that the server lists it. One that it has already,
    /// since an answer was lost, is not an error.
    pub(super) async fn load_adapter(
        &self,
        weights: &Weights,
        name: &str,
        folder: &Path,
    ) -> Result<(), AttemptError> {
        // The memory must be of this process.
        self.look().await?;
        let base = self.weights().await?;
        if base != ServedWeights::Unlabelled {
            let why = format!("adapters: its own weights were replaced ({base}), start it anew");
            return Err(AttemptError::Unsupported(why));
        }
        self.put_adapter(name, folder).await?;
        self.remember(|m| m.adapter = Some((name.to_owned(), weights.id)));
        Ok(())
    }

    /// Loads an adapter that requests name, and verifies that the server lists it. One of this name that was
    /// not loaded here is of an engine that has ended, and may have other values.
    pub(super) async fn load_named(&self, adapter: &NamedAdapter) -> Result<(), AttemptError> {
        let (name, folder) = (adapter.server_name.as_str(), adapter.folder()?);
        // The memory must be of this process.
        self.look().await?;
        if !self.remember(|m| m.named.contains(name)) && self.http.lists(name).await? {
            self.unload_adapter(name).await?;
        }
        self.put_adapter(name, folder).await?;
        self.remember(|m| m.named.insert(name.to_owned()));
        Ok(())
    }

    /// Those of the named adapters that the server still lists.
    pub(super) async fn named_there(&self) -> Result<BTreeSet<String>, AttemptError> {
        let mut named = self.remember(|m| m.named.clone());
        if !named.is_empty() {
            let listed = self.http.models().await?;
            named.retain(|name| listed.contains(name));
        }
        Ok(named)
    }

    /// Has the server read an adapter under a name, and verifies that it lists it.
    async fn put_adapter(&self, name: &str, folder: &Path) -> Result<(), AttemptError> {
        self.wake_if_left_asleep().await?;
        self.wake_weights().await?;
        let path = "/v1/load_lora_adapter";
        let body = json!({ "lora_name": name, "lora_path": folder.to_string_lossy() });
        let load_s = self.http.timeouts.load_s;
        let loaded = self.http.post(path, Some(&body), load_s).await;
        if let Err(error) = loaded
            && !self.http.lists(name).await?
        {
            return Err(match error {
                AttemptError::Refused(EngineError::Failed(why))
                | AttemptError::Status { body: why, .. } => {
                    AttemptError::Unsupported(format!("POST {path}: {why}; {START}"))
                }
                error => error,
            });
        }
        if !self.http.lists(name).await? {
            let why = format!("POST {path}: it does not list the adapter {name} afterwards");
            return Err(AttemptError::Protocol(why));
        }
        Ok(())
    }

    /// The weights that requests are sampled by: those of the newest adapter, if any was loaded. A server
    /// that was started anew has none, and one whose own weights were replaced has no right one.
    pub(super) async fn served(&self) -> Result<ServedWeights, AttemptError> {
        let base = self.weights().await?;
        let Some((name, id)) = self.remember(|m| m.adapter.clone()) else {
            return Ok(base);
        };
        if base != ServedWeights::Unlabelled {
            return Ok(ServedWeights::Foreign(base.to_string()));
        }
        let there = self.http.lists(&name).await?;
        let known = there.then_some(ServedWeights::Version(id));
        Ok(known.unwrap_or(ServedWeights::Unlabelled))
    }

    /// Removes an adapter; one that is not there counts as removed.
    pub(super) async fn unload_adapter(&self, name: &str) -> Result<(), AttemptError> {
        let (path, body) = ("/v1/unload_lora_adapter", json!({ "lora_name": name }));
        let control_s = self.http.timeouts.control_s;
        match self.http.post(path, Some(&body), control_s).await {
            Ok(_) | Err(AttemptError::Status { status: 404, .. }) => {
                self.remember(|m| m.named.remove(name));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

/// A server without the adapter that was asked for has other weights than it had: it was started anew.
pub(super) fn missing(attempt: &Attempt, error: AttemptError) -> AttemptError {
    match (&attempt.adapter, error) {
        (Some(name), AttemptError::Status { status: 404, .. }) => AttemptError::Version {
            expected: attempt.weights,
            found: format!("no adapter {name}"),
        },
        (_, error) => error,
    }
}
