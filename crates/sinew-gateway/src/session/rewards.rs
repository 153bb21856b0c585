//! Rewards of a session.

use super::types::{MAX_METRIC_NAME, Reward, SessionError};
use crate::limits::SessionLimits;
use sinew_types::{MAX_REWARD, Outcome};

/// The outcome, and what bounds further rewards.
#[derive(Debug)]
pub(super) struct Rewards {
    pub(super) outcome: Outcome,
    /// Bytes of all rewards.
    bytes: u64,
    /// The trace was made: no reward is taken any more.
    pub(super) sealed: bool,
}

impl Rewards {
    /// No reward yet.
    pub(super) fn new() -> Self {
        Self {
            outcome: Outcome {
                unscored: true,
                ..Outcome::default()
            },
            bytes: 0,
            sealed: false,
        }
    }

    /// Refuses a reward that exceeds a limit.
    pub(super) fn check(
        &self,
        reward: &Reward,
        limits: &SessionLimits,
    ) -> Result<(), SessionError> {
        let metrics = reward.metrics.values().copied();
        // NaN is not below the limit.
        let fits = |v: &f64| v.abs() <= MAX_REWARD;
        if let Some(value) = std::iter::once(reward.reward)
            .chain(metrics)
            .find(|v| !fits(v))
        {
            return Err(SessionError::Reward { value });
        }
        if let Some(name) = reward.metrics.keys().find(|n| n.len() > MAX_METRIC_NAME) {
            return Err(SessionError::MetricName { bytes: name.len() });
        }
        let known = &self.outcome.metrics;
        let new = reward.metrics.keys().filter(|n| !known.contains_key(*n));
        let (names, limit) = (known.len() + new.count(), limits.max_metrics);
        if names > limit as usize {
            return Err(SessionError::Metrics { names, limit });
        }
        let (bytes, limit) = (self.bytes + reward.bytes(), limits.max_reward_bytes);
        if bytes > limit {
            Err(SessionError::RewardBytes { bytes, limit })
        } else {
            Ok(())
        }
    }

    /// A reward was refused: the reason of an episode that gets no other reward.
    pub(super) fn refused(&mut self, error: &SessionError) {
        if self.outcome.unscored {
            self.outcome.unscored_reason = Some(format!("a reward was refused: {error}"));
        }
    }

    /// Takes a reward that was checked. One of a turn is in the turn's nodes.
    pub(super) fn take(&mut self, reward: &Reward) {
        if reward.turn.is_none() {
            self.outcome.reward = reward.reward;
        }
        self.bytes += reward.bytes();
        self.outcome.unscored = false;
        self.outcome.unscored_reason = None;
        if let Some(success) = reward.success {
            self.outcome.success = success;
        }
        self.outcome.metrics.extend(reward.metrics.clone());
    }
}
