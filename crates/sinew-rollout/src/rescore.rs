//! Scores of stored episodes by rewards of now: nothing is run again, and nothing that was trained changes.

use crate::sample::reward_sample;
use futures::StreamExt;
use serde::Serialize;
use sinew_env::{Reward, RewardSample, Split, Taskset, TasksetError};
use sinew_render::Renderer;
use sinew_store::{Score, ScoreRecord};
use sinew_types::{EpisodeEnd, EpisodeId, Task, TaskId, Trace};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Samples that are scored at the same time.
const AT_ONCE: usize = 16;
/// Component of the weighted sum.
pub const TOTAL: &str = "total";

/// The tasks of these ids, as far as a taskset has them. Every task is made until all are found.
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

/// What a reward sees of a stored episode, without the measurements that rewards made.
fn sample_of(trace: &Trace, task: Task, renderer: &dyn Renderer) -> RewardSample {
    let mut sample = reward_sample(trace, task, renderer);
    sample
        .metrics
        .retain(|name, _| !name.starts_with("reward/"));
    sample
}

/// The scores of one episode, before and now.
#[derive(Clone, Debug)]
pub struct Rescored {
    pub episode: EpisodeId,
    /// By component; [`TOTAL`] is the weighted sum.
    pub old: BTreeMap<String, f64>,
    /// Empty if there is no score now.
    pub new: BTreeMap<String, f64>,
    /// Reason why there is none.
    pub unscored: Option<String>,
}

/// Components among metrics, with the sum.
fn components(metrics: &BTreeMap<String, f64>, total: f64) -> BTreeMap<String, f64> {
    let parts = metrics.iter().filter_map(|(name, value)| {
        let name = name.strip_prefix("reward/")?;
        (!name.contains('/')).then(|| (name.to_owned(), *value))
    });
    let mut all: BTreeMap<String, f64> = parts.collect();
    all.insert(TOTAL.into(), total);
    all
}

/// Scores episodes with their tasks, in their order. Those that the system failed are left out. `renderer` is
/// that of the model that sampled them.
pub async fn rescore(
    reward: &dyn Reward,
    renderer: &dyn Renderer,
    episodes: Vec<(Trace, Task)>,
) -> Vec<Rescored> {
    let whole = |(trace, _): &(Trace, Task)| !matches!(trace.end, EpisodeEnd::Failed { .. });
    let one = |(trace, task): (Trace, Task)| async move {
        let sample = sample_of(&trace, task, renderer);
        let scored = reward.score(&sample).await;
        let old = match trace.outcome.unscored {
            true => BTreeMap::new(),
            false => components(&trace.outcome.metrics, trace.outcome.reward),
        };
        let (new, unscored) = match scored {
            Ok(score) => (components(&score.parts, score.value), None),
            Err(unscored) => (BTreeMap::new(), Some(unscored.reason)),
        };
        Rescored {
            episode: trace.episode,
            old,
            new,
            unscored,
        }
    };
    let scored = futures::stream::iter(episodes.into_iter().filter(whole)).map(one);
    scored.buffered(AT_ONCE).collect().await
}

impl Rescored {
    /// The records of a source at a time: one of each component, or that there is no sum.
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
                let new = self.new.iter();
                new.map(|(name, value)| record(name, Score::Value(*value)))
                    .collect()
            }
        }
    }
}

/// One component over all episodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ComponentChange {
    pub component: String,
    /// Episodes with a score before, and their mean.
    pub old_episodes: usize,
    pub old_mean: Option<f64>,
    /// Episodes with a score now, and their mean.
    pub new_episodes: usize,
    pub new_mean: Option<f64>,
    /// Episodes with both, which differ.
    pub changed: usize,
}

/// The change of each component, by name.
pub fn changes(rescored: &[Rescored]) -> Vec<ComponentChange> {
    let named = rescored
        .iter()
        .flat_map(|r| r.old.keys().chain(r.new.keys()));
    let names: BTreeSet<&String> = named.collect();
    let mean = |values: &[f64]| {
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let change = |name: &String| {
        let old: Vec<f64> = rescored
            .iter()
            .filter_map(|r| r.old.get(name).copied())
            .collect();
        let new: Vec<f64> = rescored
            .iter()
            .filter_map(|r| r.new.get(name).copied())
            .collect();
        let both = rescored
            .iter()
            .filter_map(|r| r.old.get(name).zip(r.new.get(name)));
        ComponentChange {
            component: name.clone(),
            old_episodes: old.len(),
            old_mean: mean(&old),
            new_episodes: new.len(),
            new_mean: mean(&new),
            changed: both.filter(|(old, new)| old != new).count(),
        }
    };
    names.into_iter().map(change).collect()
}
