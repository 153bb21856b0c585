//! The `Reward` trait: functions that score finished episodes.
//!
//! A reward receives a [`RewardSample`]: the task and all texts and calls of the model, as messages. It does
//! not receive tokens. It runs after the episode, separately from its environment. The environment's own
//! score stays in [`RewardSample::metrics`].
//!
//! A reward that cannot judge a sample returns [`Unscored`] with the reason. Callers never replace it with
//! 0: the sample leaves the loss and the baseline of its group, and the reason is counted.

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sinew_answer::Turn;
use sinew_types::{MAX_REWARD, Message, Outcome, Task, ToolCall};
use std::collections::BTreeMap;

/// Reason of an outcome that only lacks the rewards of its group.
pub const GROUP_PENDING: &str = "waits for the rewards of its group";

/// Whether an outcome only lacks the rewards of its group.
pub fn waits_for_group(outcome: &Outcome) -> bool {
    outcome.unscored && outcome.unscored_reason.as_deref() == Some(GROUP_PENDING)
}

/// Adds the group's score to an outcome. An outcome that does not wait for it stays unchanged. A missing
/// score makes the outcome unscored, with its reason.
pub fn with_group(outcome: &Outcome, score: Result<Score, Unscored>) -> Outcome {
    let mut whole = outcome.clone();
    if !waits_for_group(outcome) {
        return whole;
    }
    match score {
        Err(missing) => whole.unscored_reason = Some(missing.reason),
        Ok(score) => {
            (whole.unscored, whole.unscored_reason) = (false, None);
            whole.reward += score.value;
            whole.success &= score.is_success();
            let parts = score.parts.into_iter().filter(|(p, _)| p != "success");
            whole.metrics.extend(parts);
            let success = f64::from(u8::from(whole.success));
            whole.metrics.insert("success".into(), success);
        }
    }
    whole
}

/// Input of a reward: one finished episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RewardSample {
    /// The task. Its columns are the fields of [`Task::data`].
    pub task: Task,
    /// All messages in order: prompt, turns of the model, observations.
    pub messages: Vec<Message>,
    /// The answer: text of the model's last turn, without control tokens and thoughts. Empty if the model
    /// wrote nothing, or did not finish its thought.
    pub output: String,
    /// Reasoning of that turn; `None` without any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Tag around the reasoning, such as `think`.
    #[serde(skip)]
    pub tag: Option<&'static str>,
    /// Whether a limit cut that turn.
    #[serde(default)]
    pub truncated: bool,
    /// Valid tool calls of all turns in order, also of those that failed. Their results are in `messages`.
    pub calls: Vec<ToolCall>,
    /// Measurements of the episode by name, as far as the environment made any.
    pub metrics: BTreeMap<String, f64>,
    /// Final state of the environment, if it shows one: see [`crate::Env::end_state`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<Value>,
}

impl RewardSample {
    /// Creates a sample with one turn of the model, without messages, calls and measurements. The reasoning
    /// is not part of the output.
    pub fn new(task: Task, said: impl Into<String>) -> Self {
        let mut sample = Self {
            task,
            messages: Vec::new(),
            output: String::new(),
            reasoning: None,
            tag: None,
            truncated: false,
            calls: Vec::new(),
            metrics: BTreeMap::new(),
            state: None,
        };
        sample.said(Turn::split(&said.into(), false));
        sample
    }

    /// Sets the last turn.
    pub fn said(&mut self, turn: Turn) {
        (self.output, self.reasoning, self.tag) = (turn.answer, turn.reasoning, turn.tag);
    }

    /// Returns the last turn with its reasoning.
    pub fn turn(&self) -> Turn {
        Turn {
            reasoning: self.reasoning.clone(),
            answer: self.output.clone(),
            tag: self.tag,
            finished: self.reasoning.is_none() || !self.output.is_empty(),
        }
    }
}

/// Value of a reward for one sample.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The reward. Always finite.
    pub value: f64,
    /// Named components and measurements for metrics, traces and reports. They are not added to `value`.
    pub parts: BTreeMap<String, f64>,
    /// Whether rewards of the group must still be added; until then the episode has no reward.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub waits_for_group: bool,
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
    /// If `value` or a part is infinite or not a number, or beyond [`MAX_REWARD`].
    pub fn with_parts(value: f64, parts: BTreeMap<String, f64>) -> Result<Self, Unscored> {
        // NaN is not below the limit.
        let fits = |v: f64| v.abs() <= MAX_REWARD;
        let bad = |(_, v): &(&str, f64)| !fits(*v);
        let named = parts.iter().map(|(name, v)| (name.as_str(), *v));
        match std::iter::once(("the reward", value))
            .chain(named)
            .find(bad)
        {
            Some((name, v)) => Err(Unscored::new(format!(
                "{name} is {v:e}: a finite number of magnitude up to {MAX_REWARD:e} is needed"
            ))),
            None => Ok(Self {
                value,
                parts,
                waits_for_group: false,
            }),
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

    /// Outcome of an episode with only this score.
    pub fn into_outcome(self) -> Outcome {
        Outcome {
            reward: self.value,
            success: self.is_success(),
            unscored: self.waits_for_group,
            unscored_reason: self.waits_for_group.then(|| GROUP_PENDING.to_owned()),
            metrics: self.parts,
            ..Outcome::default()
        }
    }
}

/// Missing score of one sample, which is never replaced with a number.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{reason}")]
pub struct Unscored {
    /// Reason in one line: an abstention, or an error with its location.
    pub reason: String,
}

impl Unscored {
    /// Maximum number of characters of a reason, since every trace contains it and it is used as a metric
    /// key.
    pub const MAX_REASON: usize = 300;

    /// Creates a missing score. The first line of `reason`, up to [`Unscored::MAX_REASON`], is kept.
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

    /// Whether the value is a penalty, such as for length, and not a measure of success.
    fn is_penalty(&self) -> bool {
        false
    }

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

/// Compares two samples of one task: a function, or a judge.
pub trait Preference: Send + Sync {
    /// Name in recipes, metrics and reports.
    fn name(&self) -> &str;

    /// Returns the probability that `a` is better than `b`, 0 to 1. Callers ask in both orders, since an
    /// answer may be biased towards the first or second position.
    fn prefer<'a>(
        &'a self,
        a: &'a RewardSample,
        b: &'a RewardSample,
    ) -> BoxFuture<'a, Result<f64, Unscored>>;
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
    fn a_group_completes_the_outcomes_that_wait_for_it() {
        let own = Score {
            waits_for_group: true,
            ..Score::with_parts(0.5, [("success".to_owned(), 1.0)].into()).unwrap()
        };
        let waits = own.into_outcome();
        assert!(waits.unscored && waits_for_group(&waits));
        let whole = with_group(&waits, Score::new(1.5));
        assert_eq!(
            (whole.reward, whole.success, whole.unscored),
            (2.0, true, false)
        );
        // A second score changes nothing.
        assert_eq!(with_group(&whole, Score::new(9.0)), whole);
        let missing = with_group(&waits, Err(Unscored::new("rank: no idea")));
        assert!(missing.unscored && !waits_for_group(&missing));
        assert_eq!(missing.unscored_reason.as_deref(), Some("rank: no idea"));
        let low = with_group(&waits, Score::new(0.25));
        assert_eq!(
            (low.reward, low.success, low.metrics["success"]),
            (0.75, false, 0.0)
        );
    }

    #[test]
    fn a_missing_score_is_unscored_with_one_line() {
        let outcome = Unscored::new("judge down\nTraceback").into_outcome();
        assert!(outcome.unscored);
        assert_eq!(outcome.unscored_reason.as_deref(), Some("judge down"));
    }
}
