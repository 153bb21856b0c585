//! Weights of a vLLM server: labels, loads from a folder, checksums.
//!
//! A load of full weights, with the endpoints of the development mode of vLLM 0.32:
//!
//! | step | endpoint |
//! |---|---|
//! | freeze requests, or end them | `/pause?mode=keep`, `/pause?mode=abort` |
//! | label: nothing is sampled by unverified weights | `/update_weight_version` `loading-v13-9f3c12ab` |
//! | load | `/collective_rpc` `reload_weights` |
//! | drop the KV of other weights | `/reset_prefix_cache`, with `reset_running_requests=true` if requests are kept |
//! | compare with the other replicas | `/weight_checker` `checksum` |
//! | label | `/weight_info`, `/update_weight_version` `v13-9f3c12ab` |
//! | continue, verify | `/resume`, `/weight_info` |
//!
//! A server that sleeps takes back the memory of its weights first, and is neither stopped nor continued.
//!
//! `/finish_weight_update` sets a label too, but only ends a session of a transfer engine, which a load from
//! a folder does not have.

use super::VllmBackend;
use crate::asleep::Asleep;
use crate::backend::{Backend, ServedWeights, Weights};
use crate::error::AttemptError;
use crate::sums::WeightSums;
use crate::swap::same_label;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_types::{EngineError, WeightsId};
use std::path::Path;

#[derive(Deserialize)]
struct WeightInfo {
    weight_version: String,
}

#[derive(Deserialize)]
struct Checksums {
    checksums: WeightSums,
}

/// The answer of some versions to `/reset_prefix_cache`; others answer nothing.
#[derive(Default, Deserialize)]
struct Reset {
    success: Option<bool>,
}

impl VllmBackend {
    /// The label of the server's weights, or, on a server without labels, the version that was
    /// loaded here.
    pub(super) async fn weights(&self) -> Result<ServedWeights, AttemptError> {
        match self.http.get::<WeightInfo>("/weight_info").await {
            Ok(info) => {
                self.remember(|m| m.unlabelled = false);
                Ok(ServedWeights::from_label(&info.weight_version))
            }
            Err(AttemptError::Status { status: 404, .. }) => Ok(self.remember(|m| {
                m.unlabelled = true;
                let held = m.held.map(ServedWeights::Version);
                held.unwrap_or(ServedWeights::Unlabelled)
            })),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn verify(&self, id: WeightsId) -> Result<(), AttemptError> {
        self.weights().await?.verify(id)
    }

    /// Sends a command whose answer has nothing to read.
    pub(super) async fn command(
        &self,
        path: &str,
        body: Option<Value>,
        limit_s: f64,
    ) -> Result<(), AttemptError> {
        match self.http.post(path, body.as_ref(), limit_s).await {
            Ok(_) => Ok(()),
            Err(AttemptError::Status { status: 404, .. }) => Err(AttemptError::Unsupported(
                format!("POST {path}; start vLLM with VLLM_SERVER_DEV_MODE=1"),
            )),
            Err(AttemptError::Refused(EngineError::Failed(why))) => {
                Err(AttemptError::Unsupported(why))
            }
            Err(error) => Err(error),
        }
    }

    /// Labels the server's weights. Does nothing for a server without labels.
    pub(super) async fn set_label(&self, label: &str) -> Result<(), AttemptError> {
        let control_s = self.http.timeouts.control_s;
        let body = json!({ "new_version": label });
        match self
            .command("/update_weight_version", Some(body), control_s)
            .await
        {
            // Versions before the label: what we hold ourselves is all that there is.
            Err(AttemptError::Unsupported(_)) if self.remember(|m| m.unlabelled) => Ok(()),
            other => other,
        }
    }

    /// Loads weights from a folder; requests are frozen meanwhile if each of their tokens will be named, and
    /// ended otherwise. The server continues after an error, too: it has other users.
    pub(super) async fn swap(&self, weights: &Weights, folder: &Path) -> Result<(), AttemptError> {
        self.look().await?;
        self.wake_if_left_asleep().await?;
        let asleep = self.remember(|m| m.asleep);
        self.swaps.begin();
        let swapped = match asleep {
            Asleep::No => self.swap_paused(weights, folder).await,
            // Nothing runs, and nothing may run before its KV cache wakes.
            Asleep::KvCache | Asleep::All => self.swap_asleep(weights, folder).await,
        };
        self.swaps.end();
        swapped?;
        self.remember(|m| m.held = Some(weights.id));
        self.verify(weights.id).await
    }

    async fn swap_asleep(&self, weights: &Weights, folder: &Path) -> Result<(), AttemptError> {
        self.wake_weights().await?;
        self.reload(weights, folder, false).await
    }

    async fn swap_paused(&self, weights: &Weights, folder: &Path) -> Result<(), AttemptError> {
        let loaded = match self.pause().await {
            Ok(kept) => self.reload(weights, folder, kept).await,
            Err(error) => Err(error),
        };
        // It must not stay paused for its other users, and may be paused if the answer was lost.
        let resumed = self
            .command("/resume", None, self.http.timeouts.control_s)
            .await;
        loaded.and(resumed)
    }

    /// Stops the server. Returns whether its requests are kept; a version that cannot do this is asked once.
    async fn pause(&self) -> Result<bool, AttemptError> {
        let load_s = self.http.timeouts.load_s;
        let keeps = self.keeps_attempts();
        self.remember(|m| m.asked_to_keep = keeps);
        if keeps {
            match self.command("/pause?mode=keep", None, load_s).await {
                Err(AttemptError::Unsupported(_)) => self.remember(|m| m.ends_requests = true),
                paused => return paused.map(|()| true),
            }
        }
        self.command("/pause?mode=abort", None, load_s).await?;
        Ok(false)
    }

    /// Loads weights into the stopped server, compares and labels them.
    async fn reload(
        &self,
        weights: &Weights,
        folder: &Path,
        kept: bool,
    ) -> Result<(), AttemptError> {
        let (id, load_s) = (weights.id, self.http.timeouts.load_s);
        let loading = format!("loading-{id}");
        self.remember(|m| m.held = None);
        // Whatever happens from here on, nothing is sampled by unverified weights.
        self.set_label(&loading).await?;
        let reload = json!({
            "method": "reload_weights",
            "kwargs": { "weights_path": folder.to_string_lossy() },
        });
        self.command("/collective_rpc", Some(reload), load_s)
            .await?;
        self.drop_caches(kept).await?;
        self.compare_sums(weights).await?;
        self.check_label(&loading).await?;
        self.set_label(&id.to_string()).await?;
        self.swaps.loaded(id);
        Ok(())
    }

    /// Empties the prefix cache. Requests that are kept compute their KV again with the new weights.
    async fn drop_caches(&self, kept: bool) -> Result<(), AttemptError> {
        let control_s = self.http.timeouts.control_s;
        if !kept {
            return self.command("/reset_prefix_cache", None, control_s).await;
        }
        let path = "/reset_prefix_cache?reset_running_requests=true";
        let answer = self.http.post(path, None, control_s).await?;
        let reset: Reset = serde_json::from_slice(&answer).unwrap_or_default();
        match reset.success {
            Some(false) => Err(AttemptError::Unsupported(
                "dropping the KV of requests that run".to_owned(),
            )),
            _ => Ok(()),
        }
    }

    /// Compares the weights in memory with those of the other replicas, if there are any and the server
    /// reports sums. Weights that differ get a label that no router samples from.
    async fn compare_sums(&self, weights: &Weights) -> Result<(), AttemptError> {
        let Some(replicas) = &weights.sums else {
            return Ok(());
        };
        let (path, body) = ("/weight_checker", json!({ "action": "checksum" }));
        let load_s = self.http.timeouts.load_s;
        let answer = match self.http.post(path, Some(&body), load_s).await {
            // Versions before the checker.
            Err(AttemptError::Status { status: 404, .. }) => return Ok(()),
            answer => answer?,
        };
        let sums: Checksums = serde_json::from_slice(&answer)
            .map_err(|e| AttemptError::Protocol(format!("{path}: {e}")))?;
        let compared = replicas.compare(self.http.name(), sums.checksums);
        if compared.is_err() {
            self.set_label(&format!("quarantined-{}", weights.id))
                .await?;
        }
        compared
    }

    /// Checks that the server has still the label that it was given, if it has labels.
    async fn check_label(&self, label: &str) -> Result<(), AttemptError> {
        if self.remember(|m| m.unlabelled) {
            return Ok(());
        }
        let found: WeightInfo = self.http.get("/weight_info").await?;
        same_label(&found.weight_version, label)
    }
}
