//! Sleep of an SGLang server that was started with `--enable-memory-saver`, for a trainer on the same GPUs.
//!
//! | step | endpoint |
//! |---|---|
//! | sleep | `/flush_cache`, `/release_memory_occupation` with the tags `kv_cache` and `weights` |
//! | memory of weights | `/resume_memory_occupation` `weights`, with the next load or with the wake-up |
//! | memory of the KV cache | `/resume_memory_occupation` `kv_cache` |
//!
//! Released weights are lost, unless the server keeps a copy in host memory, so they are always loaded anew.

use super::SglangBackend;
use crate::asleep::Asleep;
use crate::error::AttemptError;
use serde_json::json;
use std::time::{Duration, Instant};

/// Pause between two attempts to empty the cache, which a server refuses while requests end.
const AGAIN: Duration = Duration::from_millis(50);

impl SglangBackend {
    /// Gives up the memory of weights and KV cache. Adapters belong to weights that no folder holds, so
    /// those are kept, and only the KV cache is given up.
    pub(super) async fn fall_asleep(&self) -> Result<(), AttemptError> {
        let timeouts = self.http.timeouts;
        let end = Instant::now() + Duration::from_secs_f64(timeouts.control_s);
        while let Err(error) = self
            .http
            .post("/flush_cache", None, timeouts.control_s)
            .await
        {
            if Instant::now() >= end {
                return Err(error);
            }
            tokio::time::sleep(AGAIN).await;
        }
        let (asleep, tags) = if self.remember(|m| m.adapter.is_some() || !m.named.is_empty()) {
            (Asleep::KvCache, json!(["kv_cache"]))
        } else {
            // The weights are gone until they are loaded anew.
            self.set_label("released").await?;
            (Asleep::All, json!(["kv_cache", "weights"]))
        };
        // Also if the answer is lost.
        self.remember(|m| m.asleep = asleep);
        let body = json!({ "tags": tags });
        let path = "/release_memory_occupation";
        self.command(path, &body, timeouts.load_s).await
    }

    /// Takes back the memory of weights, if it was given up.
    pub(super) async fn wake_weights(&self) -> Result<(), AttemptError> {
        if self.remember(|m| m.asleep) != Asleep::All {
            return Ok(());
        }
        self.resume("weights").await?;
        self.remember(|m| m.asleep = Asleep::KvCache);
        Ok(())
    }

    /// Takes back all memory, weights first.
    pub(super) async fn wake_up(&self) -> Result<(), AttemptError> {
        self.wake_weights().await?;
        if self.remember(|m| m.asleep) == Asleep::KvCache {
            self.resume("kv_cache").await?;
            self.remember(|m| m.asleep = Asleep::No);
        }
        Ok(())
    }

    async fn resume(&self, tag: &str) -> Result<(), AttemptError> {
        let (path, body) = ("/resume_memory_occupation", json!({ "tags": [tag] }));
        self.command(path, &body, self.http.timeouts.load_s).await
    }
}
