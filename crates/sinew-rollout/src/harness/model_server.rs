//! Trait of the server that serves the model to external agents and captures the sampled tokens.

use super::error::ModelServerError;
use crate::episode::EpisodeSpec;
use crate::parts::{EpisodeOptions, EpisodeParts};
use futures::future::BoxFuture;
use serde::Deserialize;
use serde_json::Value;
use sinew_types::{EpisodeEnd, EpisodeId, Trace};
use std::collections::BTreeMap;

/// Serves the run's engine to programs over HTTP, and captures every token of their calls. The gateway
/// implements it.
pub trait ModelServer: Send + Sync {
    /// Opens a rollout for an episode, with the episode's sampling and limits.
    ///
    /// # Errors
    /// If it has too many rollouts, or one of this episode.
    fn open(
        &self,
        parts: &EpisodeParts,
        options: &EpisodeOptions,
        spec: &EpisodeSpec,
    ) -> Result<ModelAccess, ModelServerError>;

    /// Records the score that the agent of an open episode reports for itself.
    ///
    /// # Errors
    /// Fails if the rollout is not open, a reward is not a number, or a call has no output.
    fn score(&self, episode: &EpisodeId, report: &AgentReport) -> Result<(), ModelServerError>;

    /// Ends the calls of an episode and returns their trace. With `end: None` the server decides how the
    /// episode ended: by a limit that it enforced, or otherwise because the task ended.
    ///
    /// # Errors
    /// If the rollout is unknown, or its tokens cannot be proven to be the sampled ones.
    fn finish<'a>(
        &'a self,
        episode: &'a EpisodeId,
        end: Option<EpisodeEnd>,
    ) -> BoxFuture<'a, Result<Trace, ModelServerError>>;
}

/// Address and credentials with which a program reaches its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelAccess {
    /// Base URL of the OpenAI-compatible API; ends in `/v1`.
    pub base_url: String,
    /// Key that gives access to the rollout of this episode only.
    pub api_key: String,
    /// Base URL that is shared by all rollouts, so that only the key identifies the rollout; ends in `/v1`.
    pub shared_url: String,
    /// W3C trace context that stands for the key.
    pub traceparent: String,
}

/// Score that an agent reports for itself, as JSON: `{"reward": 1.0, "success": true, "rewards": [0, 0.5],
/// "metrics": {}}`. Every field is optional; unknown fields are ignored.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct AgentReport {
    /// Reward of the whole episode.
    pub reward: Option<f64>,
    /// Whether the task was solved.
    pub success: Option<bool>,
    /// Rewards of the model calls in order; `null` means none for this call.
    pub rewards: Vec<Option<f64>>,
    /// Named measurements.
    pub metrics: BTreeMap<String, f64>,
}

impl AgentReport {
    /// Reads the report from a JSON object.
    ///
    /// # Errors
    /// Fails with the fault of the report, in one line.
    pub fn of(value: &Value) -> Result<Self, ModelServerError> {
        Ok(Self::deserialize(value)?)
    }

    /// Whether the report contains any reward.
    pub fn is_scored(&self) -> bool {
        self.reward.is_some() || self.rewards.iter().any(Option::is_some)
    }
}
