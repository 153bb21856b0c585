//! The `Reward` port: functions that score finished episodes.
//!
//! A reward sees a [`RewardSample`]: the task and everything that the model said and did, as messages.
//! It does not see tokens, and it runs after the episode, apart from its environment. The environment's
//! own score stays in [`RewardSample::metrics`].
//!
//! A reward that cannot judge a sample returns [`Unscored`] with the reason. Callers never replace it with
//! 0: the sample leaves the loss and the baseline of its group, and the reason is counted.

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use sinew_types::{Message, Outcome, Task, ToolCall};
use std::collections::BTreeMap;

/// Input of a reward: one finished episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RewardSample {
    /// The task. Its columns are the fields of [`Task::data`].
    pub task: Task,
    /// All messages in order: prompt, turns of the model, observations.
    pub messages: Vec<Message>,
    /// Text of the model's last turn, without control tokens. Empty if the model said nothing.
    pub output: String,
    /// Valid tool calls of all turns in order, also of those that failed. Their results are in `messages`.
    pub calls: Vec<ToolCall>,
    /// Measurements of the episode by name, as far as the environment made any.
    pub metrics: BTreeMap<String, f64>,
}

/// Value of a reward for one sample.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The reward. Always finite.
    pub value: f64,
    /// Named components and measurements for metrics, traces and reports. They are not added to `value`.
    pub parts: BTreeMap<String, f64>,
}

impl Score {
    /// Score without parts.
    ///
    /// # Errors
    /// If `value` is infinite or not a number.
    pub fn new(value: f64) -> Result<Self, Unscored> {
        Self::with_parts(value, BTreeMap::new())
    }

    /// Score with parts.
    ///
    /// # Errors
    /// If `value` or a part is infinite or not a number.
    pub fn with_parts(value: f64, parts: BTreeMap<String, f64>) -> Result<Self, Unscored> {
        let bad = |(_, v): &(&str, f64)| !v.is_finite();
        let named = parts.iter().map(|(name, v)| (name.as_str(), *v));
        match std::iter::once(("the reward", value))
            .chain(named)
            .find(bad)
        {
            Some((name, v)) => Err(Unscored::new(format!(
                "{name} is {v}: a finite number is needed"
            ))),
            None => Ok(Self { value, parts }),
        }
    }

    /// True if the task counts as solved: the part `success` is positive, or without that part, `value` is
    /// 1 or more.
    pub fn is_success(&self) -> bool {
        match self.parts.get("success") {
            Some(success) => *success > 0.0,
            None => self.value >= 1.0,
        }
    }

    /// Outcome of an episode with this score alone.
    pub fn into_outcome(self) -> Outcome {
        Outcome {
            reward: self.value,
            success: self.is_success(),
            metrics: self.parts,
            ..Outcome::default()
        }
    }
}

/// Missing score of one sample, which is never replaced with a number.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{reason}")]
pub struct Unscored {
    /// One line for people: an abstention, or an error with its place.
    pub reason: String,
}

impl Unscored {
    /// Maximum characters of a reason: it stands in every trace and counts as a key of metrics.
    pub const MAX_REASON: usize = 300;

    /// Creates a missing score. Of `reason`, the first line up to [`Unscored::MAX_REASON`] is kept.
    pub fn new(reason: impl Into<String>) -> Self {
        let reason: String = reason.into();
        let line = reason.lines().next().unwrap_or_default();
        let reason = line.chars().take(Self::MAX_REASON).collect();
        Self { reason }
    }

    /// Outcome of an episode without a score.
    pub fn into_outcome(self) -> Outcome {
        Outcome {
            unscored: true,
            unscored_reason: Some(self.reason),
            ..Outcome::default()
        }
    }
}

/// A function that scores one sample. Many calls run at once.
pub trait Reward: Send + Sync {
    /// Name in recipes, metrics and reports.
    fn name(&self) -> &str;

    /// Scores one sample. Equal samples should get equal scores.
    fn score<'a>(&'a self, sample: &'a RewardSample) -> BoxFuture<'a, Result<Score, Unscored>>;
}

/// A function that scores all samples of a group together, such as a ranking.
pub trait GroupReward: Send + Sync {
    /// Name in recipes, metrics and reports.
    fn name(&self) -> &str;

    /// Scores the samples of one task. The result has one entry for each sample, in the same order.
    fn score_group<'a>(
        &'a self,
        samples: &'a [RewardSample],
    ) -> BoxFuture<'a, Vec<Result<Score, Unscored>>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_finite_and_know_success() {
        let parts = |v| BTreeMap::from([("success".to_owned(), v)]);
        assert!(Score::new(1.0).unwrap().is_success());
        assert!(!Score::new(0.5).unwrap().is_success());
        assert!(Score::with_parts(0.5, parts(1.0)).unwrap().is_success());
        assert!(!Score::with_parts(2.0, parts(0.0)).unwrap().is_success());
        let error = Score::with_parts(0.5, parts(f64::NAN)).unwrap_err();
        assert!(error.reason.starts_with("success is NaN"), "{error}");
    }

    #[test]
    fn a_missing_score_is_unscored_with_one_line() {
        let outcome = Unscored::new("judge down\nTraceback").into_outcome();
        assert!(outcome.unscored);
        assert_eq!(outcome.unscored_reason.as_deref(), Some("judge down"));
    }
}
