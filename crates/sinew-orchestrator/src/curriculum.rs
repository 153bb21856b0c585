//! Weighted choice of tasks: environments of a mixture, task types with weights, and `[tasks] sampling =
//! "adaptive"`.
//!
//! The training tasks are divided into parts. A part is an environment, or a task type within an environment.
//! A draw chooses a part by its share, and takes the next task of that part, so that every task of a part is
//! drawn once before any is drawn again. Shares of environments and weights of types are fixed; adaptive
//! sampling changes the shares of types within their environment, or across all environments. With pools,
//! parts are pools of tasks by difficulty, and a draw takes the task of a pool that was drawn the least.

use crate::schedule::{permuted, shuffled, uniform_tasks};
use serde::{Deserialize, Serialize};
use sinew_algo::trust::{Sighting, Sightings};
use sinew_algo::{AdaptiveConfig, Dial, EarlierRewards, Estimates, Pool, Signal, unit};
use sinew_env::{Split, Taskset, TasksetError};
use sinew_types::mix_seed;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Seed constant for the choice of parts and for the orders within them.
const CHOICE: u64 = 0x6375_7272;
const ORDER: u64 = 0x6f72_6465;

/// Maximum number of tasks that have a separate baseline for episodes without a group; all further tasks
/// share one.
const MAX_TASK_KEYS: usize = 10_000;

/// Division of the tasks of one environment.
#[derive(Clone, Debug, PartialEq)]
pub enum ByType {
    /// All tasks are one part.
    One,
    /// The parts are task types, each with a weight above 0.
    Weights(BTreeMap<String, f64>),
    /// The parts are task types, with shares that follow the policy's success.
    Adaptive,
    /// The parts are pools; the measured success of a task decides its pool.
    Pools,
}

/// One environment of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct EnvironmentShare {
    /// Weight, above 0. The environment's share of the draws is its weight divided by the sum of all weights.
    pub weight: f64,
    /// Indices of its training tasks.
    pub tasks: Range<usize>,
    /// Division of its tasks into parts.
    pub by_type: ByType,
}

/// Tasks that are drawn together.
#[derive(Debug)]
struct Part {
    /// Name in the curriculum: the task type, or the number of an undivided environment.
    name: String,
    /// Index of its environment.
    environment: usize,
    /// Share of all draws. With adaptive types, the share of the environment.
    share: f64,
    tasks: Indices,
}

/// Indices of training tasks.
#[derive(Debug)]
enum Indices {
    Range(Range<usize>),
    Listed(Vec<usize>),
    /// The tasks of an environment that are in a pool at present.
    Pool(Range<usize>, Pool),
}

impl Indices {
    fn len(&self) -> usize {
        match self {
            Self::Range(range) | Self::Pool(range, _) => range.len(),
            Self::Listed(list) => list.len(),
        }
    }

    fn get(&self, at: usize) -> Option<usize> {
        match self {
            Self::Range(range) | Self::Pool(range, _) => range.clone().nth(at),
            Self::Listed(list) => list.get(at).copied(),
        }
    }
}

/// The parts of a run's training tasks, with their shares.
#[derive(Debug)]
pub struct TaskShares(Vec<Part>);

impl TaskShares {
    /// Divides the training tasks into parts. It reads the type of every task.
    ///
    /// # Errors
    /// Fails for an environment without tasks, a type without a weight, a weight without tasks of its type,
    /// and a task that cannot be read.
    pub fn of(
        taskset: &dyn Taskset,
        environments: &[EnvironmentShare],
    ) -> Result<Self, TasksetError> {
        let total: f64 = environments.iter().map(|e| e.weight).sum();
        let mut parts = Vec::new();
        for (environment, e) in environments.iter().enumerate() {
            let share = e.weight / total;
            if e.tasks.is_empty() {
                let reason = "an environment with tasks to train on";
                return Err(refused(
                    taskset,
                    "weight",
                    e.weight.to_string(),
                    reason.into(),
                ));
            }
            let part = |name: String, share, tasks| Part {
                name,
                environment,
                share,
                tasks,
            };
            match &e.by_type {
                ByType::One => {
                    let tasks = Indices::Range(e.tasks.clone());
                    parts.push(part(format!("#{environment}"), share, tasks));
                }
                ByType::Pools => {
                    check_pools(taskset, e.tasks.len())?;
                    for pool in Pool::ALL {
                        let name = format!("#{environment}/{}", pool.name());
                        parts.push(part(name, share, Indices::Pool(e.tasks.clone(), pool)));
                    }
                }
                ByType::Adaptive => {
                    for (kind, tasks) in types(taskset, &e.tasks)? {
                        parts.push(part(kind, share, Indices::Listed(tasks)));
                    }
                }
                ByType::Weights(weights) => {
                    let found = types(taskset, &e.tasks)?;
                    check_weights(taskset, weights, &found)?;
                    let (total, mixture): (f64, _) = (weights.values().sum(), is_mixture(taskset));
                    for (kind, tasks) in found {
                        let share = share * weights[own(&kind, mixture)] / total;
                        parts.push(part(kind, share, Indices::Listed(tasks)));
                    }
                }
            }
        }
        Ok(Self(parts))
    }

    /// Returns the probability of each part in the next draw, in order.
    fn probabilities(&self, known: &Curriculum, adaptive: Option<&AdaptiveConfig>) -> Vec<f64> {
        let mut shares: Vec<f64> = self.0.iter().map(|p| p.share).collect();
        let Some(config) = adaptive else {
            return shares;
        };
        let mut start = 0;
        for parts in self
            .0
            .chunk_by(|a, b| config.across || a.environment == b.environment)
        {
            let within = known.within(config, parts);
            for (share, p) in shares[start..].iter_mut().zip(within) {
                *share *= p;
            }
            start += parts.len();
        }
        if config.across {
            let total: f64 = shares.iter().sum();
            shares
                .iter_mut()
                .for_each(|s| *s /= total.max(f64::MIN_POSITIVE));
        }
        shares
    }
}

/// Ranks the parts of an environment from the easiest, by their names; numbers in names are compared by
/// value.
fn levels(parts: &[Part]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_cached_key(|i| natural(&parts[*i].name));
    order
}

/// Splits a name into texts and the numbers that follow them, for sorting.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut parts = vec![(String::new(), 0u64)];
    let mut in_number = false;
    for c in name.chars() {
        let digit = c.to_digit(10);
        if digit.is_none() && in_number {
            parts.push((String::new(), 0));
        }
        in_number = digit.is_some();
        if let Some((text, number)) = parts.last_mut() {
            match digit {
                Some(d) => *number = number.saturating_mul(10).saturating_add(d.into()),
                None => text.push(c),
            }
        }
    }
    parts
}

/// Refuses pools if there are more tasks than a run keeps ratings for.
fn check_pools(taskset: &dyn Taskset, tasks: usize) -> Result<(), TasksetError> {
    let allowed = format!(
        "at most {MAX_TASK_KEYS} training tasks with tasks.signal = \"pools\", which keeps numbers of each"
    );
    if tasks <= MAX_TASK_KEYS {
        Ok(())
    } else {
        Err(refused(
            taskset,
            "signal",
            format!("pools of {tasks} tasks"),
            allowed,
        ))
    }
}

/// Groups the training tasks by type, in the order of the type names.
fn types(
    taskset: &dyn Taskset,
    tasks: &Range<usize>,
) -> Result<BTreeMap<String, Vec<usize>>, TasksetError> {
    let mut found: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for index in tasks.clone() {
        let kind = taskset.kind(Split::Train, index)?;
        found.entry(kind).or_default().push(index);
    }
    Ok(found)
}

/// Returns a task type without the name of its environment, which is its prefix in a mixture. Elsewhere, `:`
/// has no special meaning.
fn own(kind: &str, mixture: bool) -> &str {
    if mixture {
        kind.split_once(':').map_or(kind, |(_, own)| own)
    } else {
        kind
    }
}

/// Whether the taskset is a mixture of named environments.
fn is_mixture(taskset: &dyn Taskset) -> bool {
    taskset.members().iter().any(|(name, _)| !name.is_empty())
}

fn check_weights(
    taskset: &dyn Taskset,
    weights: &BTreeMap<String, f64>,
    found: &BTreeMap<String, Vec<usize>>,
) -> Result<(), TasksetError> {
    let mixture = is_mixture(taskset);
    let names: Vec<&str> = found.keys().map(|kind| own(kind, mixture)).collect();
    let all = || {
        format!(
            "a weight for each type of the training tasks: {}",
            names.join(", ")
        )
    };
    let shown = |name: &str, what: &str| format!("{what} `{name}`");
    if let Some(name) = weights.keys().find(|w| !names.contains(&w.as_str())) {
        let value = shown(name, "a weight of the unknown type");
        return Err(refused(taskset, "weights", value, all()));
    }
    match names.iter().find(|name| !weights.contains_key(**name)) {
        Some(name) => {
            let value = shown(name, "without the type");
            Err(refused(taskset, "weights", value, all()))
        }
        None => Ok(()),
    }
}

fn refused(
    taskset: &dyn Taskset,
    field: &'static str,
    value: String,
    allowed: String,
) -> TasksetError {
    TasksetError::Config {
        taskset: taskset.name().to_owned(),
        field,
        value,
        allowed,
    }
}

/// State of task sampling: draws, success estimates and earlier rewards. Checkpoints contain it, so that a
/// resumed run draws the same tasks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Curriculum {
    estimates: Estimates,
    /// Number of tasks drawn of each part.
    drawn: BTreeMap<String, u64>,
    /// Rewards of episodes without a group, by task; the empty name holds those of all tasks.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    alone: BTreeMap<String, EarlierRewards>,
    /// Postponed tasks, whose groups were stopped and are to be run again; fewer than two steps need.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    put_off: Vec<usize>,
    /// Tasks drawn with [`Curriculum::draw_uniform`].
    #[serde(skip_serializing_if = "is_zero")]
    drawn_uniform: u64,
    /// Tasks of draws that no commit names, chosen by [`Curriculum::task_of`], and the number of the next
    /// draw.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    open: BTreeMap<u64, usize>,
    #[serde(skip_serializing_if = "is_zero")]
    next_draw: u64,
    /// Difficulty dial of each environment, for the signal `aim`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    dials: BTreeMap<usize, Dial>,
    /// Ratings of the tasks that were drawn, for the signal `pools`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    rated: BTreeMap<usize, TaskRating>,
    /// Statistics of usual turns and answers, if suspicious episodes are left out.
    #[serde(skip_serializing_if = "Sightings::is_empty")]
    sightings: Sightings,
}

/// Rating of a task: number of draws, and the successes and episodes of its last group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct TaskRating(u32, u32, u32);

/// Result of an episode, as the curriculum needs it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CurriculumSample {
    /// Index of the task in its split.
    pub(crate) task: usize,
    /// Type of the task.
    pub(crate) kind: String,
    pub(crate) success: bool,
    pub(crate) reward: f64,
}

/// Combines the episodes of each task into one outcome: type, whether the rewards differ, and mean reward. A
/// task with only one episode is skipped, since there is nothing to compare.
fn groups(seen: &[CurriculumSample]) -> Vec<(&str, bool, f64)> {
    let mut by_task: BTreeMap<usize, Vec<&CurriculumSample>> = BTreeMap::new();
    for one in seen {
        by_task.entry(one.task).or_default().push(one);
    }
    let mut outcomes = Vec::with_capacity(by_task.len());
    for group in by_task.values().filter(|group| group.len() > 1) {
        let first = group[0];
        let mixed = group.iter().any(|s| s.reward != first.reward);
        let mean = group.iter().map(|s| s.reward).sum::<f64>() / group.len() as f64;
        outcomes.push((first.kind.as_str(), mixed, mean));
    }
    outcomes
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// A request for several draws.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrawRequest {
    /// Seed of the run; it decides the order of tasks within a part.
    pub(crate) seed: u64,
    /// Seed of these draws; it decides the choice of parts.
    pub(crate) draw_seed: u64,
    /// Number of the step, from 1.
    pub(crate) step: u64,
    /// Number of draws.
    pub(crate) count: usize,
}

impl Curriculum {
    /// Draws the tasks of a request and returns their indices. Parts are chosen by systematic sampling: of
    /// `count` draws, each part gets its expected number, rounded down or up.
    pub(crate) fn draw(
        &mut self,
        shares: &TaskShares,
        adaptive: Option<&AdaptiveConfig>,
        request: DrawRequest,
    ) -> Vec<usize> {
        let probabilities = shares.probabilities(self, adaptive);
        let seed = mix_seed(request.draw_seed ^ CHOICE, request.step);
        let offset = unit(mix_seed(seed, 0));
        let count = request.count;
        let one = |n: usize| {
            // Draws of one part do not follow each other: batches are cut in the order of draws.
            let place = shuffled(mix_seed(seed, 1), count, n) as f64;
            let chosen = choose(&probabilities, (place + offset) / count as f64)?;
            self.next_of(shares, chosen, request.seed, adaptive)
        };
        (0..count).filter_map(one).collect()
    }

    /// Returns the next task of a part.
    fn next_of(
        &mut self,
        shares: &TaskShares,
        chosen: usize,
        seed: u64,
        adaptive: Option<&AdaptiveConfig>,
    ) -> Option<usize> {
        let part = &shares.0[chosen];
        if let (Indices::Pool(tasks, pool), Some(config)) = (&part.tasks, adaptive) {
            return self.next_in(config, tasks.clone(), *pool, seed);
        }
        let drawn = self.drawn.entry(part.name.clone()).or_default();
        let len = part.tasks.len() as u64;
        let (epoch, at) = (*drawn / len, *drawn % len);
        *drawn += 1;
        let order = mix_seed(mix_seed(seed ^ ORDER, chosen as u64), epoch);
        part.tasks.get(permuted(order, len as usize, at as usize))
    }

    /// Returns the task of one draw, for groups that start whenever there is room. Tasks are always chosen in
    /// the order of the draws, so that the task depends only on the estimates and on earlier draws. Parts
    /// follow a Kronecker sequence (multiples of the golden ratio): in any range of consecutive draws, each
    /// part has nearly its share.
    pub(crate) fn task_of(
        &mut self,
        shares: &TaskShares,
        adaptive: &AdaptiveConfig,
        seed: u64,
        draw: u64,
    ) -> usize {
        const RATIO: f64 = 0.618_033_988_749_894_9;
        if self.next_draw <= draw {
            let probabilities = shares.probabilities(self, Some(adaptive));
            let offset = unit(mix_seed(seed ^ CHOICE, 0));
            for next in self.next_draw..=draw {
                let at = (offset + next as f64 * RATIO).fract();
                let chosen = choose(&probabilities, at).unwrap_or(0);
                let task = self
                    .next_of(shares, chosen, seed, Some(adaptive))
                    .unwrap_or(0);
                self.open.insert(next, task);
            }
            self.next_draw = draw + 1;
        }
        self.open.get(&draw).copied().unwrap_or(0)
    }

    /// Forgets the tasks of draws that a commit names.
    pub fn settle(&mut self, draws: impl IntoIterator<Item = u64>) {
        for draw in draws {
            self.open.remove(&draw);
        }
    }

    /// Returns the task of a pool that was drawn least often; the seed decides between equals.
    fn next_in(
        &mut self,
        config: &AdaptiveConfig,
        tasks: Range<usize>,
        pool: Pool,
        seed: u64,
    ) -> Option<usize> {
        let order = |task: usize, drawn: u32| {
            let round = mix_seed(seed ^ ORDER, u64::from(drawn));
            (drawn, mix_seed(round, task as u64))
        };
        let in_pool = tasks.filter(|task| self.pool_of(config, *task) == pool);
        let drawn = |task: usize| self.rated.get(&task).map_or(0, |r| r.0);
        let next = in_pool.min_by_key(|task| order(*task, drawn(*task)))?;
        self.rated.entry(next).or_default().0 += 1;
        Some(next)
    }

    fn pool_of(&self, config: &AdaptiveConfig, task: usize) -> Pool {
        let TaskRating(_, successes, trials) = self.rated.get(&task).copied().unwrap_or_default();
        Pool::of(config, successes, trials)
    }

    /// Returns the shares of parts that compete with each other, those of one environment or of all; they sum
    /// to 1.
    fn within(&self, config: &AdaptiveConfig, parts: &[Part]) -> Vec<f64> {
        match (config.signal, parts.first().map(|p| &p.tasks)) {
            (Signal::Pools, Some(Indices::Pool(tasks, _))) => {
                let mut sizes = [0, tasks.len(), 0];
                for (task, _) in self.rated.range(tasks.clone()) {
                    let pool = self.pool_of(config, *task);
                    if pool != Pool::Normal {
                        sizes[1] -= 1;
                        sizes[if pool == Pool::Hard { 0 } else { 2 }] += 1;
                    }
                }
                Pool::shares(config, sizes).to_vec()
            }
            (Signal::Aim, _) => {
                let dial = parts.first().and_then(|p| self.dials.get(&p.environment));
                let by_level = dial.copied().unwrap_or_default();
                let by_level = by_level.probabilities(config, parts.len());
                let mut shares = vec![0.0; parts.len()];
                for (place, p) in levels(parts).into_iter().zip(by_level) {
                    shares[place] = p;
                }
                shares
            }
            _ => {
                let kinds: Vec<&str> = parts.iter().map(|p| p.name.as_str()).collect();
                self.estimates.probabilities(config, &kinds)
            }
        }
    }

    /// Updates the state with the results of a step.
    pub(crate) fn learn(
        &mut self,
        shares: &TaskShares,
        config: &AdaptiveConfig,
        seen: &[CurriculumSample],
    ) {
        match config.signal {
            Signal::Mixed => self.update(config, groups(seen)),
            _ => {
                let outcomes = seen.iter().map(|s| (s.kind.as_str(), s.success, s.reward));
                self.update(config, outcomes);
            }
        }
        match config.signal {
            Signal::Aim => self.turn_dials(shares, config, seen),
            Signal::Pools => {
                let mut groups: BTreeMap<usize, (u32, u32)> = BTreeMap::new();
                for one in seen {
                    let group = groups.entry(one.task).or_default();
                    *group = (group.0 + u32::from(one.success), group.1 + 1);
                }
                for (task, (successes, trials)) in groups {
                    let rated = self.rated.entry(task).or_default();
                    (rated.1, rated.2) = (successes, trials);
                }
            }
            Signal::Success | Signal::Reward | Signal::Mixed | Signal::Progress => {}
        }
    }

    /// Updates the difficulty dial of each environment by the success at the levels that it aims at.
    fn turn_dials(
        &mut self,
        shares: &TaskShares,
        config: &AdaptiveConfig,
        seen: &[CurriculumSample],
    ) {
        for parts in shares.0.chunk_by(|a, b| a.environment == b.environment) {
            let Some(first) = parts.first() else { continue };
            let dial = self.dials.entry(first.environment).or_default();
            let order = levels(parts);
            let aimed: BTreeSet<&str> = order
                .iter()
                .enumerate()
                .filter(|(level, _)| dial.aims_at(*level, parts.len()))
                .map(|(_, place)| parts[*place].name.as_str())
                .collect();
            let tried: Vec<bool> = seen
                .iter()
                .filter(|s| aimed.contains(s.kind.as_str()))
                .map(|s| s.success)
                .collect();
            if !tried.is_empty() {
                let solved = tried.iter().filter(|s| **s).count();
                dial.turn(config, solved as f64 / tried.len() as f64, parts.len());
            }
        }
    }

    /// Copies the draws of another curriculum; the own estimates stay.
    pub(crate) fn follow(&mut self, other: &Self) {
        for (task, drawn) in &other.rated {
            self.rated.entry(*task).or_default().0 = drawn.0;
        }
        self.drawn.clone_from(&other.drawn);
        self.open.clone_from(&other.open);
        self.next_draw = other.next_draw;
    }

    /// Returns the next tasks, each once per epoch, in an order that follows from the seed. For steps that
    /// draw a varying number of tasks, also none.
    pub(crate) fn draw_uniform(&mut self, len: usize, seed: u64, count: usize) -> Vec<usize> {
        let first = self.drawn_uniform;
        self.drawn_uniform += count as u64;
        let next = first..self.drawn_uniform;
        next.flat_map(|n| uniform_tasks(len, seed, n + 1, 1))
            .collect()
    }

    /// Stores postponed tasks.
    pub(crate) fn put_off(&mut self, tasks: Vec<usize>) {
        self.put_off.extend(tasks);
    }

    /// Removes and returns the first `count` postponed tasks, once there are that many.
    pub(crate) fn take_put_off(&mut self, count: usize) -> Option<Vec<usize>> {
        (self.put_off.len() >= count).then(|| self.put_off.drain(..count).collect())
    }

    /// Updates the estimates with a step: task type, success and reward of the episodes that have a reward.
    pub(crate) fn update<'a>(
        &mut self,
        config: &AdaptiveConfig,
        seen: impl IntoIterator<Item = (&'a str, bool, f64)>,
    ) {
        self.estimates.update(config, seen);
    }

    /// Adds the reward of an episode without a group, by its task.
    pub(crate) fn reward_alone(&mut self, task: &str, reward: f64) {
        let room = self.alone.len() < MAX_TASK_KEYS || self.alone.contains_key(task);
        for key in [Some(""), Some(task).filter(|_| room)]
            .into_iter()
            .flatten()
        {
            self.alone.entry(key.to_owned()).or_default().add(reward);
        }
    }

    /// Returns earlier rewards as the baseline for an episode without a group: those of its task, or of all
    /// tasks if the task has none.
    pub fn earlier(&self, task: &str) -> Option<EarlierRewards> {
        let known = self.alone.get(task).or_else(|| self.alone.get(""));
        known.copied()
    }

    /// Statistics of the turns and answers of earlier steps.
    pub fn sightings(&self) -> &Sightings {
        &self.sightings
    }

    /// Adds the turns and answers of a step to the statistics.
    pub(crate) fn saw(&mut self, sightings: Vec<Sighting>) {
        sightings.into_iter().for_each(|s| self.sightings.add(s));
    }

    /// Returns the probability of each task type in the next draw.
    pub(crate) fn shares(
        &self,
        config: &AdaptiveConfig,
        shares: &TaskShares,
    ) -> BTreeMap<String, f64> {
        let names = shares.0.iter().map(|p| p.name.clone());
        let probabilities = shares.probabilities(self, Some(config));
        names.zip(probabilities).collect()
    }
}

/// Returns the index of the part whose interval of cumulated probability contains `at`, in `[0, 1)`.
fn choose(probabilities: &[f64], at: f64) -> Option<usize> {
    let mut below = 0.0;
    for (i, p) in probabilities.iter().enumerate() {
        below += p;
        if at < below {
            return Some(i);
        }
    }
    // The sum may be slightly below 1 because of rounding.
    probabilities.iter().rposition(|p| *p > 0.0)
}

#[cfg(test)]
#[path = "curriculum_tests.rs"]
mod tests;
