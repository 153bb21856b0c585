//! Weights of an SGLang server: labels, loads from a folder, checksums.
//!
//! A load of full weights, with the endpoints of SGLang 0.5.23:
//!
//! | step | endpoint |
//! |---|---|
//! | put requests back into the queue, if they are kept | `/pause_generation` `retract` |
//! | label: nothing is sampled by unverified weights | `/update_weight_version` `loading-v13-9f3c12ab` |
//! | load, drop the KV of other weights | `/update_weights_from_disk`, which ends requests that are not kept |
//! | compare with the other replicas | `/weights_checker` `checksum` |
//! | label | with the load, or `/model_info`, `/update_weight_version` `v13-9f3c12ab` |
//! | continue, verify | `/continue_generation`, `/model_info` |
//!
//! A server that sleeps takes back the memory of its weights first.

use super::SglangBackend;
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
struct ModelInfo {
    weight_version: Option<String>,
}

#[derive(Deserialize)]
struct Outcome {
    success: bool,
    #[serde(default)]
    message: String,
}

#[derive(Deserialize)]
struct Checksums {
    #[serde(default)]
    ranks: Vec<RankSums>,
}

/// Sums of one process of the server.
#[derive(Deserialize)]
struct RankSums {
    #[serde(default)]
    checksums: WeightSums,
}

impl SglangBackend {
    /// The label of the server's weights. Versions below 0.5 have the path `/get_model_info` instead.
    async fn label_text(&self) -> Result<String, AttemptError> {
        let info: ModelInfo = match self.http.get("/model_info").await {
            Err(AttemptError::Status { status: 404, .. }) => {
                self.http.get("/get_model_info").await?
            }
            other => other?,
        };
        Ok(info.weight_version.unwrap_or_default())
    }

    pub(super) async fn weights(&self) -> Result<ServedWeights, AttemptError> {
        Ok(ServedWeights::from_label(&self.label_text().await?))
    }

    pub(super) async fn verify(&self, id: WeightsId) -> Result<(), AttemptError> {
        self.weights().await?.verify(id)
    }

    /// Sends a command. An answer with `success: false` and a refused command mean that the server
    /// cannot do it.
    pub(super) async fn command(
        &self,
        path: &str,
        body: &Value,
        limit_s: f64,
    ) -> Result<(), AttemptError> {
        let answer = self.http.post(path, Some(body), limit_s).await;
        match answer {
            Ok(bytes) => match serde_json::from_slice::<Outcome>(&bytes) {
                Ok(Outcome {
                    success: false,
                    message,
                }) => Err(AttemptError::Unsupported(format!("POST {path}: {message}"))),
                // Some commands answer with text.
                _ => Ok(()),
            },
            Err(AttemptError::Refused(EngineError::Failed(why))) => {
                Err(AttemptError::Unsupported(format!("POST {path}: {why}")))
            }
            Err(error) => Err(error),
        }
    }

    /// Labels the server's weights; running requests continue.
    pub(super) async fn set_label(&self, label: &str) -> Result<(), AttemptError> {
        let body = json!({ "new_version": label, "abort_all_requests": false });
        let control_s = self.http.timeouts.control_s;
        self.command("/update_weight_version", &body, control_s)
            .await
    }

    /// Loads weights from a folder. Requests are kept if each of their tokens will be named, and ended
    /// otherwise. A server that dies in between is never taken for one of the version.
    pub(super) async fn swap(&self, weights: &Weights, folder: &Path) -> Result<(), AttemptError> {
        self.swaps.begin();
        let swapped = self.swap_paused(weights, folder).await;
        self.swaps.end();
        swapped?;
        self.verify(weights.id).await
    }

    async fn swap_paused(&self, weights: &Weights, folder: &Path) -> Result<(), AttemptError> {
        if self.remember(|m| m.asleep) != Asleep::No {
            // Nothing runs, and nothing may run before its KV cache wakes.
            self.wake_weights().await?;
            return self.reload(weights, folder, false).await;
        }
        let control_s = self.http.timeouts.control_s;
        let keeps = self.keeps_attempts();
        self.remember(|m| m.asked_to_keep = keeps);
        if !keeps {
            return self.reload(weights, folder, false).await;
        }
        let pause = json!({ "mode": "retract" });
        let loaded = match self.command("/pause_generation", &pause, control_s).await {
            Ok(()) => self.reload(weights, folder, true).await,
            Err(AttemptError::Unsupported(_) | AttemptError::Status { status: 404, .. }) => {
                self.remember(|m| m.ends_requests = true);
                return self.reload(weights, folder, false).await;
            }
            Err(error) => Err(error),
        };
        // It must not stay paused for its other users, and may be paused if the answer was lost.
        let path = "/continue_generation";
        let resumed = self.command(path, &json!({}), control_s).await;
        loaded.and(resumed)
    }

    /// Loads weights, compares and labels them.
    async fn reload(
        &self,
        weights: &Weights,
        folder: &Path,
        kept: bool,
    ) -> Result<(), AttemptError> {
        let (label, load_s) = (weights.id.to_string(), self.http.timeouts.load_s);
        let loading = format!("loading-{label}");
        // Whatever happens from here on, nothing is sampled by unverified weights.
        self.set_label(&loading).await?;
        let compared = weights.sums.is_some();
        let body = json!({
            "model_path": folder.to_string_lossy(),
            "abort_all_requests": !kept,
            "flush_cache": true,
            "weight_version": if compared { &loading } else { &label },
        });
        self.command("/update_weights_from_disk", &body, load_s)
            .await?;
        if compared {
            self.compare_sums(weights).await?;
            same_label(&self.label_text().await?, &loading)?;
            self.set_label(&label).await?;
        }
        self.swaps.loaded(weights.id);
        Ok(())
    }

    /// Compares the weights in memory with those of the other replicas, if there are any and the server
    /// reports sums. Weights that differ get a label that no router samples from.
    async fn compare_sums(&self, weights: &Weights) -> Result<(), AttemptError> {
        let Some(replicas) = &weights.sums else {
            return Ok(());
        };
        let (path, body) = ("/weights_checker", json!({ "action": "checksum" }));
        let load_s = self.http.timeouts.load_s;
        let answer = match self.http.post(path, Some(&body), load_s).await {
            // Versions before the checker, or before its sums.
            Err(AttemptError::Status { status: 404, .. } | AttemptError::Refused(_)) => {
                return Ok(());
            }
            answer => answer?,
        };
        let all: Checksums = serde_json::from_slice(&answer)
            .map_err(|e| AttemptError::Protocol(format!("{path}: {e}")))?;
        let mut sums = WeightSums::new();
        for (rank, own) in all.ranks.into_iter().enumerate() {
            let named = own.checksums.into_iter();
            sums.extend(named.map(|(name, sum)| (format!("rank{rank}:{name}"), sum)));
        }
        if sums.is_empty() {
            return Ok(());
        }
        let compared = replicas.compare(self.http.name(), sums);
        if compared.is_err() {
            self.set_label(&format!("quarantined-{}", weights.id))
                .await?;
        }
        compared
    }
}
