//! LoRA adapters of an SGLang server, by name: no pause, and no request ends.
//!
//! A request names the adapter as `lora_path`, so the version of its tokens is the one in that name. Where
//! the run's weights are an adapter, the server's own weights stay those that it was started with. Adapters
//! that requests of their own name are applied to whatever weights the server has; those are verified as
//! always.

use super::SglangBackend;
use crate::attempt::Attempt;
use crate::backend::{NamedAdapter, ServedWeights, Weights};
use crate::error::AttemptError;
use serde_json::json;
use sinew_types::{EngineError, WeightsId};
use std::collections::BTreeSet;
use std::path::Path;

/// Flags of a server that loads adapters.
const START: &str = "start SGLang with --enable-lora, --max-lora-rank of at least the adapter's rank \
    (train.lora.rank) and --lora-target-modules, and let it see the folder under the same path";

/// An adapter that was loaded.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    name: String,
    id: WeightsId,
    /// Whether the server lists its adapters; older ones do not.
    listed: bool,
}

impl SglangBackend {
    /// Loads an adapter under its name. One that the server lists already, since an answer was lost, is not
    /// an error.
    pub(super) async fn load_adapter(
        &self,
        weights: &Weights,
        name: &str,
        folder: &Path,
    ) -> Result<(), AttemptError> {
        let base = self.weights().await?;
        if base != ServedWeights::Unlabelled {
            let why = format!("adapters: its own weights were replaced ({base}), start it anew");
            return Err(AttemptError::Unsupported(why));
        }
        let listed = self.put_adapter(name, folder).await?;
        let loaded = Loaded {
            name: name.to_owned(),
            id: weights.id,
            listed,
        };
        self.remember(|m| m.adapter = Some(loaded));
        Ok(())
    }

    /// Loads an adapter that requests name. One of this name that was not loaded here is of an engine that
    /// has ended, and may have other values.
    pub(super) async fn load_named(&self, adapter: &NamedAdapter) -> Result<(), AttemptError> {
        let (name, folder) = (adapter.server_name.as_str(), adapter.folder()?);
        let known = self.remember(|m| m.named.contains_key(name));
        if !known && self.http.lists(name).await? {
            self.unload_adapter(name).await?;
        }
        let listed = self.put_adapter(name, folder).await?;
        self.remember(|m| m.named.insert(name.to_owned(), listed));
        Ok(())
    }

    /// Those of the named adapters that the server still has. One that it does not list is believed to be
    /// there until a request misses it.
    pub(super) async fn named_there(&self) -> Result<BTreeSet<String>, AttemptError> {
        if self.remember(|m| m.named.values().any(|listed| *listed)) {
            let found = self.http.models().await?;
            self.remember(|m| {
                m.named
                    .retain(|name, listed| !*listed || found.contains(name));
            });
        }
        Ok(self.remember(|m| m.named.keys().cloned().collect()))
    }

    /// Has the server read an adapter under a name; returns whether it lists it. One that it lists already,
    /// since an answer was lost, is not an error.
    async fn put_adapter(&self, name: &str, folder: &Path) -> Result<bool, AttemptError> {
        self.wake_weights().await?;
        let path = "/load_lora_adapter";
        let body = json!({ "lora_name": name, "lora_path": folder.to_string_lossy() });
        let load_s = self.http.timeouts.load_s;
        let loaded = self.command(path, &body, load_s).await;
        let listed = self.http.lists(name).await?;
        match loaded {
            Err(AttemptError::Unsupported(why) | AttemptError::Status { body: why, .. })
                if !listed =>
            {
                Err(AttemptError::Unsupported(format!("{why}; {START}")))
            }
            Err(error) if !listed => Err(error),
            _ => Ok(listed),
        }
    }

    /// The weights that requests are sampled by, where `base` are the server's own: those of the newest
    /// adapter, if any was loaded. A server that was started anew has none; one that lists no adapters
    /// shows it with the first request.
    pub(super) async fn served(&self, base: ServedWeights) -> Result<ServedWeights, AttemptError> {
        let Some(adapter) = self.remember(|m| m.adapter.clone()) else {
            return Ok(base);
        };
        if base != ServedWeights::Unlabelled {
            return Ok(ServedWeights::Foreign(base.to_string()));
        }
        if adapter.listed && !self.http.lists(&adapter.name).await? {
            self.forget(&adapter.name);
            return Ok(base);
        }
        Ok(ServedWeights::Version(adapter.id))
    }

    /// The server has lost an adapter; a newer one may have been loaded meanwhile.
    fn forget(&self, name: &str) {
        self.remember(|m| {
            m.adapter.take_if(|adapter| adapter.name == name);
            m.named.remove(name);
        });
    }

    /// Removes an adapter; one that is not there counts as removed.
    pub(super) async fn unload_adapter(&self, name: &str) -> Result<(), AttemptError> {
        let (path, body) = ("/unload_lora_adapter", json!({ "lora_name": name }));
        let control_s = self.http.timeouts.control_s;
        match self.command(path, &body, control_s).await {
            Err(AttemptError::Unsupported(_)) if !self.http.lists(name).await? => {}
            other => other?,
        }
        self.remember(|m| m.named.remove(name));
        Ok(())
    }

    /// A server without the adapter that was asked for has other weights than it had: it was started anew.
    pub(super) fn missing(&self, attempt: &Attempt, error: AttemptError) -> AttemptError {
        let Some(name) = &attempt.adapter else {
            return error;
        };
        let absent = match &error {
            AttemptError::Status { status: 404, .. } => true,
            AttemptError::Refused(EngineError::Failed(why)) => {
                why.contains(name.as_str()) || (why.contains("LoRA") && why.contains("not loaded"))
            }
            _ => false,
        };
        if !absent {
            return error;
        }
        self.forget(name);
        AttemptError::Version {
            expected: attempt.weights,
            found: format!("no adapter {name}"),
        }
    }
}
