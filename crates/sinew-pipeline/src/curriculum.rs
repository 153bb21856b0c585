//! Draws by weight: environments of a mixture, task types by weights, and `[tasks] sampling = "adaptive"`.
//!
//! The training tasks are cut into parts: an environment, or a task type within one. A draw chooses a part by
//! its share, and takes the next task of the part's own order, so that every task of a part is drawn once
//! before one is drawn again. Shares of environments and weights of types are fixed; adaptive sampling moves
//! the shares of types within their environment.

use crate::schedule::{permuted, shuffled, uniform_tasks};
use serde::{Deserialize, Serialize};
use sinew_algo::{AdaptiveConfig, EarlierRewards, Estimates, unit};
use sinew_env::{Split, Taskset, TasksetError};
use sinew_types::mix_seed;
use std::collections::BTreeMap;
use std::ops::Range;

/// Stream of the choices of parts, and of the orders within them.
const CHOICE: u64 = 0x6375_7272;
const ORDER: u64 = 0x6f72_6465;

/// Tasks whose episodes without a group have a baseline of their own; those of others share one.
const MAX_TASK_KEYS: usize = 10_000;

/// How the tasks of one environment are divided.
#[derive(Clone, Debug, PartialEq)]
pub enum ByType {
    /// Not at all: all tasks are one part.
    One,
    /// By task type, each with a weight above 0.
    Weights(BTreeMap<String, f64>),
    /// By task type, with shares that follow what the policy can do.
    Adaptive,
}

/// One environment of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct EnvironmentShare {
    /// Its weight, above 0: its share of the draws is the weight over the sum of all.
    pub weight: f64,
    /// Its training tasks.
    pub tasks: Range<usize>,
    /// Its division.
    pub by_type: ByType,
}

/// Tasks that are drawn together.
#[derive(Debug)]
struct Part {
    /// Name in the curriculum: the task type, or the number of an environment that is not divided.
    name: String,
    /// Index of its environment.
    environment: usize,
    /// Share of all draws; with adaptive types, that of the environment.
    share: f64,
    tasks: Indices,
}

/// Indices of training tasks.
#[derive(Debug)]
enum Indices {
    Range(Range<usize>),
    Listed(Vec<usize>),
}

impl Indices {
    fn len(&self) -> usize {
        match self {
            Self::Range(range) => range.len(),
            Self::Listed(list) => list.len(),
        }
    }

    fn get(&self, at: usize) -> Option<usize> {
        match self {
            Self::Range(range) => range.clone().nth(at),
            Self::Listed(list) => list.get(at).copied(),
        }
    }
}

/// The parts of a run's training tasks, with their shares.
#[derive(Debug)]
pub struct TaskShares(Vec<Part>);

impl TaskShares {
    /// Cuts the training tasks into parts. Task types are read from the tasks, all of them.
    ///
    /// # Errors
    /// For an environment without tasks, a type without a weight, a weight without tasks of its type, and a
    /// task that cannot be read.
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

    /// Probability of each part at the next draw, in order.
    fn probabilities(&self, estimates: &Estimates, adaptive: Option<&AdaptiveConfig>) -> Vec<f64> {
        let mut shares: Vec<f64> = self.0.iter().map(|p| p.share).collect();
        let Some(config) = adaptive else {
            return shares;
        };
        let mut start = 0;
        for parts in self.0.chunk_by(|a, b| a.environment == b.environment) {
            let kinds: Vec<&str> = parts.iter().map(|p| p.name.as_str()).collect();
            let within = estimates.probabilities(config, &kinds);
            for (share, p) in shares[start..].iter_mut().zip(within) {
                *share *= p;
            }
            start += parts.len();
        }
        shares
    }
}

/// Training tasks by type, in the order of their names.
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

/// The type as its environment calls it: in a mixture, types begin with the name of the environment.
/// Elsewhere a `:` is a character like others.
fn own(kind: &str, mixture: bool) -> &str {
    match mixture {
        true => kind.split_once(':').map_or(kind, |(_, own)| own),
        false => kind,
    }
}

/// Whether the tasks are those of a mixture, whose environments have names.
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

/// What a run knows of task types; kept in its checkpoints, so that a resumed run draws the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Curriculum {
    estimates: Estimates,
    /// Tasks drawn of each part.
    drawn: BTreeMap<String, u64>,
    /// Rewards of episodes that had no group, by task; of all of them under the empty name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    alone: BTreeMap<String, EarlierRewards>,
    /// Tasks whose groups were stopped and that are to be run again; less than those of two steps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    put_off: Vec<usize>,
    /// Tasks drawn with [`Curriculum::draw_uniform`].
    #[serde(skip_serializing_if = "is_zero")]
    drawn_uniform: u64,
    /// Tasks drawn with [`Curriculum::task_of`]: those of draws that no commit names, and the next draw.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    open: BTreeMap<u64, usize>,
    #[serde(skip_serializing_if = "is_zero")]
    next_draw: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Which draws of a run are asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Of the run: orders within parts.
    pub(crate) seed: u64,
    /// Of these draws: choices of parts.
    pub(crate) draw_seed: u64,
    /// From 1.
    pub(crate) step: u64,
    /// Number of draws.
    pub(crate) count: usize,
}

impl Curriculum {
    /// Indices of the tasks of a request. The parts of one request are chosen by systematic sampling: of
    /// `count` draws, each part has its share, rounded down or up, and its share on average.
    pub(crate) fn draw(
        &mut self,
        shares: &TaskShares,
        adaptive: Option<&AdaptiveConfig>,
        request: Request,
    ) -> Vec<usize> {
        let probabilities = shares.probabilities(&self.estimates, adaptive);
        let seed = mix_seed(request.draw_seed ^ CHOICE, request.step);
        let offset = unit(mix_seed(seed, 0));
        let count = request.count;
        let one = |n: usize| {
            // Draws of one part do not follow each other: batches are cut in the order of draws.
            let place = shuffled(mix_seed(seed, 1), count, n) as f64;
            let chosen = choose(&probabilities, (place + offset) / count as f64)?;
            self.next_of(shares, chosen, request.seed)
        };
        (0..count).filter_map(one).collect()
    }

    /// The next task of a part, in the part's own order.
    fn next_of(&mut self, shares: &TaskShares, chosen: usize, seed: u64) -> Option<usize> {
        let part = &shares.0[chosen];
        let drawn = self.drawn.entry(part.name.clone()).or_default();
        let len = part.tasks.len() as u64;
        let (epoch, at) = (*drawn / len, *drawn % len);
        *drawn += 1;
        let order = mix_seed(mix_seed(seed ^ ORDER, chosen as u64), epoch);
        part.tasks.get(permuted(order, len as usize, at as usize))
    }

    /// The task of a draw, where each draw is a group of its own, begun when there is room. Draws take their
    /// tasks in their order, whichever are asked for, so that what is drawn follows from the estimates and
    /// from the draws before alone. Parts follow a Kronecker sequence (multiples of the golden ratio): among
    /// any draws in a row, each part has nearly its share.
    pub(crate) fn task_of(
        &mut self,
        shares: &TaskShares,
        adaptive: &AdaptiveConfig,
        (seed, draw): (u64, u64),
    ) -> usize {
        const RATIO: f64 = 0.618_033_988_749_894_9;
        if self.next_draw <= draw {
            let probabilities = shares.probabilities(&self.estimates, Some(adaptive));
            let offset = unit(mix_seed(seed ^ CHOICE, 0));
            for next in self.next_draw..=draw {
                let at = (offset + next as f64 * RATIO).fract();
                let chosen = choose(&probabilities, at).unwrap_or(0);
                let task = self.next_of(shares, chosen, seed).unwrap_or(0);
                self.open.insert(next, task);
            }
            self.next_draw = draw + 1;
        }
        self.open.get(&draw).copied().unwrap_or(0)
    }

    /// Forgets the tasks of draws that a commit names.
    pub(crate) fn settle(&mut self, draws: impl IntoIterator<Item = u64>) {
        for draw in draws {
            self.open.remove(&draw);
        }
    }

    /// Takes over what another one has drawn; estimates stay.
    pub(crate) fn follow(&mut self, other: &Self) {
        self.drawn.clone_from(&other.drawn);
        self.open.clone_from(&other.open);
        self.next_draw = other.next_draw;
    }

    /// The next tasks, each once an epoch, in an order of the seed's: for steps that draw now more and now
    /// none.
    pub(crate) fn draw_uniform(&mut self, len: usize, seed: u64, count: usize) -> Vec<usize> {
        let first = self.drawn_uniform;
        self.drawn_uniform += count as u64;
        let next = first..self.drawn_uniform;
        next.flat_map(|n| uniform_tasks(len, seed, n + 1, 1))
            .collect()
    }

    /// Keeps tasks to run them later.
    pub(crate) fn put_off(&mut self, tasks: Vec<usize>) {
        self.put_off.extend(tasks);
    }

    /// The first `count` tasks that were put off, once there are so many.
    pub(crate) fn take_put_off(&mut self, count: usize) -> Option<Vec<usize>> {
        (self.put_off.len() >= count).then(|| self.put_off.drain(..count).collect())
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
        shares: &TaskShares,
    ) -> BTreeMap<String, f64> {
        let names = shares.0.iter().map(|p| p.name.clone());
        let probabilities = shares.probabilities(&self.estimates, Some(config));
        names.zip(probabilities).collect()
    }
}

/// The part whose interval holds `at`, in `[0, 1)`.
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
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sinew_env::MixtureTasks;
    use sinew_env::tiny::TinyTaskset;
    use std::collections::BTreeSet;
    use std::sync::Arc;

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

    fn request(step: u64, count: usize) -> Request {
        Request {
            seed: 3,
            draw_seed: 3,
            step,
            count,
        }
    }

    fn all_of(taskset: &dyn Taskset, by_type: ByType) -> TaskShares {
        let environment = EnvironmentShare {
            weight: 1.0,
            tasks: 0..taskset.len(Split::Train),
            by_type,
        };
        TaskShares::of(taskset, &[environment]).unwrap()
    }

    #[test]
    fn a_solved_type_is_drawn_less_and_tasks_go_round() {
        let taskset = TinyTaskset::new(0);
        let tasks = all_of(&taskset, ByType::Adaptive);
        let (config, mut c) = (AdaptiveConfig::default(), Curriculum::default());
        assert_eq!(tasks.0.len(), 2);
        let kind = |i: usize| taskset.get(Split::Train, i).unwrap().kind;
        let mut near = Vec::new();
        for step in 1..=40 {
            let mut again = c.clone();
            let drawn = c.draw(&tasks, Some(&config), request(step, 16));
            assert_eq!(drawn, again.draw(&tasks, Some(&config), request(step, 16)));
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
        let near: Vec<usize> = (0..taskset.len(Split::Train))
            .filter(|i| kind(*i) == "corridor-1")
            .collect();
        let mut fresh = Curriculum::default();
        let all = fresh.draw(&tasks, Some(&config), request(1, 200));
        let all: Vec<usize> = all.into_iter().filter(|i| near.contains(i)).collect();
        let first: BTreeSet<_> = all[..near.len()].iter().collect();
        assert_eq!(first.len(), near.len(), "once each before any twice");
    }

    #[test]
    fn types_are_drawn_by_their_weights_and_each_must_have_one() {
        let taskset = TinyTaskset::new(0);
        let weights = |near: &[(&str, f64)]| {
            let weights = near.iter().map(|(k, w)| ((*k).to_owned(), *w));
            ByType::Weights(weights.collect())
        };
        let tasks = all_of(
            &taskset,
            weights(&[("corridor-1", 3.0), ("corridor-2", 1.0)]),
        );
        let drawn = Curriculum::default().draw(&tasks, None, request(1, 16));
        let near = drawn
            .iter()
            .filter(|i| taskset.kind(Split::Train, **i).unwrap() == "corridor-1");
        assert_eq!(near.count(), 12);
        for (typed, part) in [
            (vec![("corridor-1", 1.0)], "without the type `corridor-2`"),
            (
                vec![("corridor-1", 1.0), ("corridor-2", 1.0), ("far", 1.0)],
                "unknown type `far`",
            ),
        ] {
            let environment = EnvironmentShare {
                weight: 1.0,
                tasks: 0..taskset.len(Split::Train),
                by_type: weights(&typed),
            };
            let e = TaskShares::of(&taskset, &[environment]).unwrap_err();
            let e = e.to_string();
            assert!(
                e.contains(part) && e.contains("corridor-1, corridor-2"),
                "{e}"
            );
        }
    }

    /// Tiny tasks whose types have a `:`, as columns of rows may.
    struct Colons(TinyTaskset);

    impl Taskset for Colons {
        fn name(&self) -> &str {
            "colons"
        }

        fn len(&self, split: Split) -> usize {
            self.0.len(split)
        }

        fn get(&self, split: Split, index: usize) -> Result<sinew_types::Task, TasksetError> {
            self.0.get(split, index)
        }

        fn kind(&self, split: Split, index: usize) -> Result<String, TasksetError> {
            Ok(format!("far:{}", self.0.kind(split, index)?))
        }
    }

    #[test]
    fn a_colon_in_a_type_names_no_environment_outside_of_a_mixture() {
        let taskset = Colons(TinyTaskset::new(0));
        let of = |taskset: &dyn Taskset, kinds: [&str; 2]| {
            let weights = kinds.map(|kind| (kind.to_owned(), 1.0));
            let environment = EnvironmentShare {
                weight: 1.0,
                tasks: 0..taskset.len(Split::Train),
                by_type: ByType::Weights(weights.into()),
            };
            TaskShares::of(taskset, &[environment]).map_err(|e| e.to_string())
        };
        let own = ["far:corridor-1", "far:corridor-2"];
        assert!(of(&taskset, own).is_ok());
        let e = of(&taskset, ["corridor-1", "corridor-2"]).unwrap_err();
        assert!(e.contains("unknown type `corridor-1`"), "{e}");
        let member: Arc<dyn Taskset> = Arc::new(taskset);
        let mixture = MixtureTasks::new(vec![("a".to_owned(), member)]).unwrap();
        assert!(of(&mixture, own).is_ok());
    }

    /// Two tiny worlds with their shares.
    fn mixture(weights: [f64; 2]) -> (MixtureTasks, TaskShares) {
        let member = |name: &str| {
            let tasks: Arc<dyn Taskset> = Arc::new(TinyTaskset::new(0));
            (name.to_owned(), tasks)
        };
        let tasks = MixtureTasks::new(vec![member("a"), member("b")]).unwrap();
        let shares: Vec<EnvironmentShare> = tasks
            .members()
            .into_iter()
            .zip(weights)
            .map(|((_, tasks), weight)| EnvironmentShare {
                weight,
                tasks,
                by_type: ByType::One,
            })
            .collect();
        let shares = TaskShares::of(&tasks, &shares).unwrap();
        (tasks, shares)
    }

    proptest! {
        /// Draws are a function of seed, step and state; each step has each environment's share, rounded.
        #[test]
        fn environments_are_drawn_by_their_weights(
            weights in prop::array::uniform2(0.01f64..100.0),
            (seed, count) in (any::<u64>(), 1usize..40),
        ) {
            let (tasks, shares) = mixture(weights);
            let len = tasks.len(Split::Train);
            let (mut one, mut other) = (Curriculum::default(), Curriculum::default());
            for step in 1..20 {
                let request = Request { seed, draw_seed: seed, step, count };
                let drawn = one.draw(&shares, None, request);
                prop_assert_eq!(&drawn, &other.draw(&shares, None, request));
                prop_assert_eq!(drawn.len(), count);
                let first = drawn.iter().filter(|i| **i < len / 2).count() as f64;
                let expected = count as f64 * weights[0] / (weights[0] + weights[1]);
                prop_assert!((first - expected).abs() < 1.0 + 1e-6, "{first} of {expected}");
            }
            prop_assert_eq!(one, other);
        }
    }

    #[test]
    fn adaptive_types_leave_the_shares_of_environments_as_they_are() {
        let (tasks, _) = mixture([3.0, 1.0]);
        let environments: Vec<EnvironmentShare> = tasks
            .members()
            .into_iter()
            .zip([3.0, 1.0])
            .map(|((_, tasks), weight)| EnvironmentShare {
                weight,
                tasks,
                by_type: ByType::Adaptive,
            })
            .collect();
        let shares = TaskShares::of(&tasks, &environments).unwrap();
        let (config, mut c) = (AdaptiveConfig::default(), Curriculum::default());
        for _ in 0..10 {
            let solved = (0..8).map(|_| ("a:corridor-1", true, 1.0));
            let hard = (0..8).map(|n| ("a:corridor-2", n % 2 == 0, f64::from(n % 2)));
            c.update(&config, solved.chain(hard));
        }
        let p = c.shares(&config, &shares);
        assert!(
            (p["a:corridor-1"] + p["a:corridor-2"] - 0.75).abs() < 1e-12,
            "{p:?}"
        );
        assert!(p["a:corridor-2"] > 2.0 * p["a:corridor-1"], "{p:?}");
        assert!(
            (p["b:corridor-1"] - p["b:corridor-2"]).abs() < 1e-12,
            "{p:?}"
        );
    }
}
