//! Sleep of a vLLM server that was started with `--enable-sleep-mode`, for a trainer on the same GPUs.
//!
//! | step | endpoint |
//! |---|---|
//! | sleep | `/sleep?level=1`: weights go to host memory; `level=2`: they are discarded |
//! | memory of weights | `/wake_up?tags=weights`, with the next load or with the wake-up |
//! | memory of the KV cache | `/wake_up?tags=kv_cache`, `/resume` |
//!
//! Level 2 needs no host memory, and is right where new weights are loaded before the KV cache wakes: both
//! copies of the weights and the KV cache are then never in memory at once.

use super::VllmBackend;
use crate::asleep::Asleep;
use crate::error::AttemptError;
use serde::Deserialize;

#[derive(Deserialize)]
struct Sleeping {
    is_sleeping: bool,
}

impl VllmBackend {
    /// Gives up the memory of weights and KV cache. Adapters belong to weights that no folder holds, so
    /// those are kept in host memory.
    pub(super) async fn fall_asleep(&self) -> Result<(), AttemptError> {
        let adapters = self.remember(|m| m.adapter.is_some() || !m.named.is_empty());
        let level = if adapters {
            1
        } else {
            self.options.sleep_level
        };
        if level == 2 {
            // The weights are gone until they are loaded anew.
            self.set_label("discarded").await?;
            self.remember(|m| m.held = None);
        }
        // Also if the answer is lost.
        self.remember(|m| m.asleep = Asleep::All);
        let path = format!("/sleep?level={level}");
        let slept = self.command(&path, None, self.http.timeouts.load_s).await;
        if let Err(AttemptError::Unsupported(_)) = slept {
            self.remember(|m| m.asleep = Asleep::No);
        }
        slept
    }

    /// Wakes a server that a session which has ended put to sleep.
    pub(super) async fn wake_if_left_asleep(&self) -> Result<(), AttemptError> {
        if self.remember(|m| m.asleep) == Asleep::No && self.sleeps().await? {
            self.wake_up().await?;
        }
        Ok(())
    }

    /// Whether the server has given up any memory. The metrics of one that has its weights again do not show
    /// that its KV cache is missing.
    async fn sleeps(&self) -> Result<bool, AttemptError> {
        match self.http.get::<Sleeping>("/is_sleeping").await {
            Ok(answer) => Ok(answer.is_sleeping),
            Err(AttemptError::Status { status: 404, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Takes back the memory of weights, if it was given up.
    pub(super) async fn wake_weights(&self) -> Result<(), AttemptError> {
        if self.remember(|m| m.asleep) != Asleep::All {
            return Ok(());
        }
        let load_s = self.http.timeouts.load_s;
        self.command("/wake_up?tags=weights", None, load_s).await?;
        self.remember(|m| m.asleep = Asleep::KvCache);
        Ok(())
    }

    /// Takes back all memory, weights first.
    pub(super) async fn wake_up(&self) -> Result<(), AttemptError> {
        let timeouts = self.http.timeouts;
        match self.remember(|m| m.asleep) {
            Asleep::No => {
                let path = "/wake_up?tags=weights";
                self.command(path, None, timeouts.load_s).await?;
            }
            Asleep::KvCache | Asleep::All => self.wake_weights().await?,
        }
        self.command("/wake_up?tags=kv_cache", None, timeouts.load_s)
            .await?;
        // Requests stand still during a sleep; versions before a pause have nothing to continue.
        match self.command("/resume", None, timeouts.control_s).await {
            Err(AttemptError::Unsupported(_)) => {}
            resumed => resumed?,
        }
        self.remember(|m| m.asleep = Asleep::No);
        Ok(())
    }
}
