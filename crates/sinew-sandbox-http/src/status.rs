//! State of the server, for clients that choose between several: room, levels, images, price.

use crate::error::ApiError;
use crate::registry::Service;
use serde::{Deserialize, Serialize};
use sinew_sandbox::{Protection, SandboxError};
use std::sync::atomic::Ordering;

/// A level that a server offers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LevelOffer {
    /// Name of the level.
    pub(crate) level: String,
    /// Protections in force at this level.
    pub(crate) protections: Vec<Protection>,
}

/// Answer to `GET /v1/status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Sandboxes that the owner of the token can create now.
    pub(crate) free: usize,
    /// Maximum number of them.
    pub(crate) limit: usize,
    /// No sandbox is created any more: the server is about to end.
    pub(crate) draining: bool,
    /// Price of the host for an hour, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) price_per_hour: Option<f64>,
    /// Levels that work now, the default first.
    pub(crate) levels: Vec<LevelOffer>,
    /// Names of images that lie unpacked on the host.
    pub(crate) images: Vec<String>,
}

impl Service {
    /// Sets the price of this host for an hour, in any currency that all hosts of a client share.
    #[must_use]
    pub fn with_price(mut self, per_hour: Option<f64>) -> Self {
        self.price_per_hour = per_hour;
        self
    }

    /// Creates no further sandbox. Those that live go on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// # Errors
    /// If the server is about to end.
    pub(crate) fn check_open(&self) -> Result<(), ApiError> {
        if self.draining.load(Ordering::Acquire) {
            let reason = "this server is about to end".to_owned();
            let level = self
                .roots
                .levels()
                .next()
                .map_or("", |p| p.level())
                .to_owned();
            return Err(SandboxError::NoRoom { level, reason }.into());
        }
        Ok(())
    }

    /// State of the server for an owner.
    pub(crate) fn status(&self, owner: &str) -> Status {
        let limit = self.bounds.sandboxes;
        let (own, all) = self.counts(owner);
        let works = self.roots.levels().filter(|p| p.health().is_ok());
        Status {
            free: limit.saturating_sub(own.max(all)),
            limit,
            draining: self.draining.load(Ordering::Acquire),
            price_per_hour: self.price_per_hour,
            levels: works
                .map(|p| LevelOffer {
                    level: p.level().to_owned(),
                    protections: p.protections().to_vec(),
                })
                .collect(),
            images: self.roots.images().map(str::to_owned).collect(),
        }
    }
}
