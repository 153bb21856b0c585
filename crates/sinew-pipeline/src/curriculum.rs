//! `[tasks] sampling = "adaptive"`: which tasks a step runs, by what their types still teach.

use crate::schedule::shuffled;
use serde::{Deserialize, Serialize};
use sinew_algo::{AdaptiveConfig, EarlierRewards, Estimates, unit};
use sinew_env::{Split, Taskset, TasksetError};
use sinew_types::mix_seed;
use std::collections::BTreeMap;

/// Tasks that are looked at for their type. Larger tasksets are generated in random order, so that
/// their first tasks are a sample of all of them.
const MAX_TASKS: usize = 20_000;

/// Tasks whose episodes without a group have a baseline of their own; those of others share one.
const MAX_TASK_KEYS: usize = 10_000;

/// Training tasks by type.
#[derive(Debug)]
pub struct TasksByKind(BTreeMap<String, Vec<usize>>);

impl TasksByKind {
    pub fn of(taskset: &dyn Taskset) -> Result<Self, TasksetError> {
        let mut kinds: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for index in 0..taskset.len(Split::Train).min(MAX_TASKS) {
            let task = taskset.get(Split::Train, index)?;
            kinds.entry(task.kind).or_default().push(index);
        }
        Ok(Self(kinds))
    }
}

/// What a run knows of task types; kept in its checkpoints, so that a resumed run draws the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Curriculum {
    estimates: Estimates,
    /// Tasks drawn of each type.
    drawn: BTreeMap<String, u64>,
    /// Rewards of episodes that had no group, by task; of all of them under the empty name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    alone: BTreeMap<String, EarlierRewards>,
}

impl Curriculum {
    /// Indices of the tasks of training step `step` (from 1). Within a type, every task is drawn
    /// once before one is drawn again.
    pub(crate) fn draw(
        &mut self,
        config: &AdaptiveConfig,
        tasks: &TasksByKind,
        seed: u64,
        step: u64,
        count: usize,
    ) -> Vec<usize> {
        let kinds: Vec<&str> = tasks.0.keys().map(String::as_str).collect();
        let seed = mix_seed(seed ^ 0x6375_7272, step);
        let one = |n: u64| {
            let kind = self
                .estimates
                .draw(config, &kinds, unit(mix_seed(seed, n)))?;
            let indices = tasks.0.get(kinds[kind])?;
            let drawn = self.drawn.entry(kinds[kind].to_owned()).or_default();
            let (epoch, at) = (*drawn / indices.len() as u64, *drawn % indices.len() as u64);
            *drawn += 1;
            let order = mix_seed(kind as u64, epoch);
            Some(indices[shuffled(order, indices.len(), at as usize)])
        };
        (0..count as u64).filter_map(one).collect()
    }

    /// Takes in what became of a step: type of task, success and reward of the episodes that have one.
    pub(crate) fn update<'a>(
        &mut self,
        config: &AdaptiveConfig,
        seen: impl IntoIterator<Item = (&'a str, bool, f64)>,
    ) {
        self.estimates.update(config, seen);
    }

    /// Takes in the reward of an episode that had no group, by its task.
    pub(crate) fn reward_alone(&mut self, task: &str, reward: f64) {
        let room = self.alone.len() < MAX_TASK_KEYS || self.alone.contains_key(task);
        for key in [Some(""), Some(task).filter(|_| room)]
            .into_iter()
            .flatten()
        {
            self.alone.entry(key.to_owned()).or_default().add(reward);
        }
    }

    /// What an episode of this task without a group is compared with: earlier ones of the task, or of
    /// all tasks if there were none.
    pub(crate) fn earlier(&self, task: &str) -> Option<EarlierRewards> {
        let known = self.alone.get(task).or_else(|| self.alone.get(""));
        known.copied()
    }

    /// Probability of each type at the next draw.
    pub(crate) fn shares(
        &self,
        config: &AdaptiveConfig,
        tasks: &TasksByKind,
    ) -> BTreeMap<String, f64> {
        let kinds: Vec<&str> = tasks.0.keys().map(String::as_str).collect();
        let shares = self.estimates.probabilities(config, &kinds);
        kinds.iter().map(|k| (*k).to_owned()).zip(shares).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_env::tiny::TinyTaskset;
    use std::collections::BTreeSet;

    #[test]
    fn what_a_run_knows_of_task_types_survives_a_checkpoint_to_the_bit() {
        let (config, mut c) = (AdaptiveConfig::default(), Curriculum::default());
        for n in 0..400u32 {
            let reward = f64::from(n * n % 97) / 97.0;
            let seen = [
                ("near", n % 3 == 0, reward),
                ("far", n % 7 == 0, 1.0 - reward),
            ];
            c.estimates.update(&config, seen);
            let text = serde_json::to_string(&c).unwrap();
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            let back: Curriculum = serde_json::from_value(value).unwrap();
            assert_eq!(back, c, "{text}");
        }
    }

    #[test]
    fn an_episode_alone_is_compared_with_its_task_or_with_all() {
        let mut c = Curriculum::default();
        assert_eq!(c.earlier("a"), None);
        c.reward_alone("a", 1.0);
        c.reward_alone("b", 0.0);
        let mean = |task: &str| c.earlier(task).map(|e| e.mean());
        assert_eq!((mean("a"), mean("b")), (Some(1.0), Some(0.0)));
        assert_eq!(mean("new"), Some(0.5));
        for n in 0..MAX_TASK_KEYS + 5 {
            c.reward_alone(&format!("t{n}"), 0.0);
        }
        assert_eq!(c.alone.len(), MAX_TASK_KEYS);
    }

    #[test]
    fn a_solved_type_is_drawn_less_and_tasks_go_round() {
        let taskset = TinyTaskset::new(0);
        let tasks = TasksByKind::of(&taskset).unwrap();
        let (config, mut c) = (AdaptiveConfig::default(), Curriculum::default());
        assert_eq!(tasks.0.len(), 2);
        let kind = |i: usize| taskset.get(Split::Train, i).unwrap().kind;
        let mut near = Vec::new();
        for step in 1..=40 {
            let mut again = c.clone();
            let drawn = c.draw(&config, &tasks, 3, step, 16);
            assert_eq!(drawn, again.draw(&config, &tasks, 3, step, 16));
            near.push(drawn.iter().filter(|i| kind(**i) == "corridor-1").count());
            // Near goals are always reached, far ones every other time.
            let seen: Vec<_> = drawn
                .iter()
                .enumerate()
                .map(|(n, i)| (kind(*i), kind(*i) == "corridor-1" || n % 2 == 0))
                .collect();
            let seen = seen
                .iter()
                .map(|(k, s)| (k.as_str(), *s, f64::from(u8::from(*s))));
            c.estimates.update(&config, seen);
        }
        // Uniform draws would be 160.
        let later: usize = near[20..].iter().sum();
        assert!(later > 0 && later < 80, "{near:?}");
        let shares = c.shares(&config, &tasks);
        assert!(shares["corridor-2"] > 0.75, "{shares:?}");
        let near = &tasks.0["corridor-1"];
        let mut fresh = Curriculum::default();
        let all = fresh.draw(&config, &tasks, 0, 1, 200);
        let all: Vec<usize> = all.into_iter().filter(|i| near.contains(i)).collect();
        let first: BTreeSet<_> = all[..near.len()].iter().collect();
        assert_eq!(first.len(), near.len(), "once each before any twice");
    }
}
