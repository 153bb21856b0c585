//! Scores stored episodes with the present rewards. No episode runs again, and trained data does not change.

use crate::sample::reward_sample;
use futures::StreamExt;
use serde::Serialize;
use sinew_env::{Reward, RewardSample, Split, Taskset, TasksetError, Unscored};
use sinew_render::Renderer;
use sinew_store::{Score, ScoreRecord, in_force};
use sinew_types::{EpisodeEnd, EpisodeId, Outcome, Task, TaskId, Trace};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// Number of samples that are scored concurrently.
const AT_ONCE: usize = 16;
/// Name of the component that holds the weighted sum.
pub const TOTAL: &str = "total";
/// Record name for whether the task counts as solved: 1 or 0.
const SUCCESS: &str = "success";

/// Finds the tasks with these ids in a taskset. It generates tasks in order until all are found.
///
/// # Errors
/// The first task that cannot be made.
pub fn tasks_of(
    taskset: &dyn Taskset,
    wanted: &BTreeSet<TaskId>,
) -> Result<HashMap<TaskId, Task>, TasksetError> {
    let mut found = HashMap::new();
    for split in [Split::Train, Split::HeldOut] {
        for index in 0..taskset.len(split) {
            if found.len() == wanted.len() {
                return Ok(found);
            }
            let task = taskset.get(split, index)?;
            if wanted.contains(&task.id) {
                found.insert(task.id.clone(), task);
            }
        }
    }
    Ok(found)
}

/// Builds the input of a reward for a stored episode, without measurements of earlier rewards.
fn sample_of(trace: &Trace, task: Task, renderer: &dyn Renderer) -> RewardSample {
    let mut sample = reward_sample(trace, task, renderer);
    sample
        .metrics
        .retain(|name, _| !name.starts_with("reward/"));
    sample
}

/// Adds what a new score does not change: the environment's own metrics, and the answer.
fn complete(outcome: &mut Outcome, sample: RewardSample, answer: Option<String>) {
    for (name, value) in sample.metrics {
        outcome.metrics.entry(name).or_insert(value);
    }
    outcome.answer = answer;
}

/// Scores stored episodes with the present rewards, and returns the outcomes in order. The environment's own
/// metrics stay. An episode without a score within `limit` is unscored.
pub async fn outcomes_of(
    episodes: Vec<(&Trace, Task, Arc<dyn Reward>)>,
    renderer: &dyn Renderer,
    limit: Duration,
) -> Vec<Outcome> {
    let one = |(trace, task, reward): (&Trace, Task, Arc<dyn Reward>)| {
        let sample = sample_of(trace, task, renderer);
        let answer = trace.outcome.answer.clone();
        async move {
            let mut outcome = match tokio::time::timeout(limit, reward.score(&sample)).await {
                Ok(Ok(score)) => score.into_outcome(),
                Ok(Err(unscored)) => unscored.into_outcome(),
                Err(_) => {
                    let why = "the reward gave no score in time when it scored anew";
                    Unscored::new(why).into_outcome()
                }
            };
            complete(&mut outcome, sample, answer);
            outcome
        }
    };
    let all = futures::stream::iter(episodes).map(one);
    all.buffered(AT_ONCE).collect().await
}

/// Old and new scores of one episode.
#[derive(Clone, Debug)]
pub struct EpisodeRescore {
    pub episode: EpisodeId,
    /// Recorded scores by component; [`TOTAL`] is the weighted sum.
    pub old: BTreeMap<String, f64>,
    /// New scores by component; empty without a score.
    pub new: BTreeMap<String, f64>,
    /// Whether the task counts as solved by the new rewards, if they decide this.
    pub success: Option<bool>,
    /// Reason why there is no new score.
    pub unscored: Option<String>,
}

/// Selects the components among metrics, and adds the sum.
fn components(metrics: &BTreeMap<String, f64>, total: f64) -> BTreeMap<String, f64> {
    let parts = metrics.iter().filter_map(|(name, value)| {
        let name = name.strip_prefix("reward/")?;
        (!name.contains('/')).then(|| (name.to_owned(), *value))
    });
    let mut all: BTreeMap<String, f64> = parts.collect();
    all.insert(TOTAL.into(), total);
    all
}

/// Scores episodes with the rewards of their tasks, in order. Episodes that the system failed are left out.
/// `renderer` belongs to the model that sampled them.
pub async fn rescore<'a>(
    renderer: &dyn Renderer,
    episodes: Vec<(Trace, Task, &'a dyn Reward)>,
) -> Vec<EpisodeRescore> {
    let whole =
        |(trace, ..): &(Trace, Task, &dyn Reward)| !matches!(trace.end, EpisodeEnd::Failed { .. });
    let one = |(trace, task, reward): (Trace, Task, &'a dyn Reward)| async move {
        let sample = sample_of(&trace, task, renderer);
        let scored = reward.score(&sample).await;
        let old = if trace.outcome.unscored {
            BTreeMap::new()
        } else {
            components(&trace.outcome.metrics, trace.outcome.reward)
        };
        let (new, success, unscored) = match scored {
            Ok(score) => {
                let success = score.parts.get(SUCCESS).map(|v| *v > 0.0);
                (components(&score.parts, score.value), success, None)
            }
            Err(unscored) => (BTreeMap::new(), None, Some(unscored.reason)),
        };
        EpisodeRescore {
            episode: trace.episode,
            old,
            new,
            success,
            unscored,
        }
    };
    let scored = futures::stream::iter(episodes.into_iter().filter(whole)).map(one);
    scored.buffered(AT_ONCE).collect().await
}

/// Scores episodes that ended without a score, and returns outcomes in order, or the reason where there is
/// none. Metrics of the environment stay. `renderer` belongs to the model that sampled the episodes.
pub async fn outcomes<'a>(
    renderer: &dyn Renderer,
    episodes: Vec<(Trace, Task, &'a dyn Reward)>,
) -> Vec<Result<Outcome, Unscored>> {
    let one = |(trace, task, reward): (Trace, Task, &'a dyn Reward)| async move {
        let sample = sample_of(&trace, task, renderer);
        let mut outcome = reward.score(&sample).await?.into_outcome();
        complete(&mut outcome, sample, trace.outcome.answer);
        Ok::<_, Unscored>(outcome)
    };
    let scored = futures::stream::iter(episodes).map(one);
    scored.buffered(AT_ONCE).collect().await
}

impl EpisodeRescore {
    /// Returns the store records of a source at a time: one for each component and one for the success, or
    /// one that states why the sum is missing. [`rescored`] reads them.
    pub fn records(&self, source: &str, at_us: u64) -> Vec<ScoreRecord> {
        let record = |name: &str, score| ScoreRecord {
            episode: self.episode.clone(),
            name: name.to_owned(),
            source: source.to_owned(),
            at_us,
            score,
        };
        match &self.unscored {
            Some(reason) => vec![record(TOTAL, Score::Unscored(reason.clone()))],
            None => {
                let new = self.new.iter().map(|(name, value)| (name.as_str(), *value));
                let success = self.success.map(|s| (SUCCESS, f64::from(u8::from(s))));
                new.chain(success)
                    .map(|(name, value)| record(name, Score::Value(value)))
                    .collect()
            }
        }
    }
}

/// Returns the outcome of a stored episode with the scores of one source in place of its own reward. Without
/// a sum from that source, the episode is unscored. If no record states whether the task is solved, a
/// positive sum counts as solved.
pub fn rescored(own: &Outcome, records: &[ScoreRecord], source: &str) -> Outcome {
    let newest = in_force(records);
    let total = newest.get(&(TOTAL, source)).copied();
    let value = match total.map(|t| &t.score) {
        Some(Score::Value(value)) => Ok(*value),
        Some(Score::Unscored(reason)) => Err(reason.clone()),
        None => Err(format!("no score of the source {source:?}")),
    };
    let mut outcome = Outcome {
        reward: *value.as_ref().unwrap_or(&0.0),
        success: value.as_ref().is_ok_and(|v| *v > 0.0),
        unscored: value.is_err(),
        unscored_reason: value.err(),
        ..own.clone()
    };
    outcome.metrics.retain(|n, _| !n.starts_with("reward/"));
    if outcome.unscored {
        return outcome;
    }
    // Components of an earlier call are not those of this sum.
    let same_call =
        |r: &ScoreRecord| r.source == source && total.is_some_and(|t| t.at_us == r.at_us);
    for (&(name, _), record) in newest.iter().filter(|(_, r)| same_call(r)) {
        match (&record.score, name) {
            (Score::Value(v), SUCCESS) => outcome.success = *v > 0.0,
            (Score::Value(v), name) if name != TOTAL => {
                outcome.metrics.insert(format!("reward/{name}"), *v);
            }
            _ => {}
        }
    }
    outcome
}

/// Change of one component over all episodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ComponentChange {
    pub component: String,
    /// Number of episodes with an old score.
    pub old_episodes: usize,
    pub old_mean: Option<f64>,
    /// Number of episodes with a new score.
    pub new_episodes: usize,
    pub new_mean: Option<f64>,
    /// Number of episodes whose old and new scores differ.
    pub changed: usize,
}

/// Number and sum of the scores of one component.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    episodes: usize,
    sum: f64,
}

impl Sum {
    fn add(&mut self, score: Option<&f64>) {
        self.episodes += usize::from(score.is_some());
        self.sum += score.unwrap_or(&0.0);
    }

    fn mean(self) -> Option<f64> {
        (self.episodes > 0).then(|| self.sum / self.episodes as f64)
    }
}

/// Changes of the scores over many episodes. It keeps only sums.
#[derive(Clone, Debug, Default)]
pub struct ScoreChanges {
    /// Old sum, new sum, and number of differences, by component.
    components: BTreeMap<String, (Sum, Sum, usize)>,
    /// Episodes that were added.
    pub episodes: usize,
    /// Number of episodes without a new score.
    pub unscored: usize,
    /// Reason of the first unscored episode.
    pub first: Option<String>,
}

impl ScoreChanges {
    /// Adds an episode.
    pub fn add(&mut self, rescored: &EpisodeRescore) {
        self.episodes += 1;
        self.unscored += usize::from(rescored.unscored.is_some());
        if self.first.is_none() {
            self.first.clone_from(&rescored.unscored);
        }
        let names: BTreeSet<_> = rescored.old.keys().chain(rescored.new.keys()).collect();
        for name in names {
            let (old, new) = (rescored.old.get(name), rescored.new.get(name));
            let of = self.components.entry(name.clone()).or_default();
            of.0.add(old);
            of.1.add(new);
            of.2 += usize::from(old.zip(new).is_some_and(|(old, new)| old != new));
        }
    }

    /// The change of each component, by name.
    pub fn components(&self) -> impl Iterator<Item = ComponentChange> {
        let all = self.components.iter();
        all.map(|(name, (old, new, changed))| ComponentChange {
            component: name.clone(),
            old_episodes: old.episodes,
            old_mean: old.mean(),
            new_episodes: new.episodes,
            new_mean: new.mean(),
            changed: *changed,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(at_us: u64, unscored: Option<&str>, values: &[(&str, f64)]) -> Vec<ScoreRecord> {
        let rescored = EpisodeRescore {
            episode: EpisodeId::new("e"),
            old: BTreeMap::new(),
            new: values.iter().map(|(n, v)| ((*n).into(), *v)).collect(),
            success: Some(false),
            unscored: unscored.map(Into::into),
        };
        rescored.records("rescore", at_us)
    }

    fn own() -> Outcome {
        let metrics = [("reward/exact", 1.0), ("seconds", 2.0)];
        Outcome {
            reward: 1.0,
            success: true,
            metrics: metrics.map(|(n, v)| (n.to_owned(), v)).into(),
            ..Outcome::default()
        }
    }

    #[test]
    fn the_newest_call_of_a_source_takes_the_place_of_the_reward() {
        let mut records = scores(1, None, &[(TOTAL, 0.25), ("style", 0.5)]);
        records.extend(scores(2, None, &[(TOTAL, 0.75), ("length", -0.5)]));
        let outcome = rescored(&own(), &records, "rescore");
        assert_eq!((outcome.reward, outcome.success), (0.75, false));
        let metrics: Vec<_> = outcome.metrics.into_iter().collect();
        let expected = [("reward/length", -0.5), ("seconds", 2.0)];
        assert_eq!(metrics, expected.map(|(n, v)| (n.to_owned(), v)));
    }

    #[test]
    fn without_a_score_of_the_source_there_is_none() {
        let mut records = scores(1, None, &[(TOTAL, 0.25)]);
        let outcome = rescored(&own(), &records, "other");
        assert!(outcome.unscored && !outcome.success && outcome.reward == 0.0);
        assert!(outcome.unscored_reason.unwrap().contains("\"other\""));
        records.extend(scores(2, Some("no number"), &[]));
        let outcome = rescored(&own(), &records, "rescore");
        assert_eq!(outcome.unscored_reason.as_deref(), Some("no number"));
    }
}
