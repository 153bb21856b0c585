//! Tasks of each step, and the ids and seeds of its episodes. All are a pure function of the recipe's seed,
//! so that a resumed run requests the same episodes.

use sinew_env::{Split, Taskset, TasksetError};
use sinew_rollout::EpisodeSpec;
use sinew_types::{EpisodeId, GroupId, mix_seed};

/// Maximum size of a taskset that is shuffled as a list. For larger ones, single entries of a permutation are
/// computed.
const SHUFFLE_UP_TO: usize = 100_000;

/// Returns the index of the `n`-th training task of a run.
fn train_index(seed: u64, len: usize, n: u64) -> usize {
    let (epoch, at) = (n / len as u64, (n % len as u64) as usize);
    permuted(mix_seed(seed ^ 0x7461_736b, epoch), len, at)
}

/// Entry `at` of a permutation of `0..len`, in constant time for many entries.
pub(crate) fn permuted(seed: u64, len: usize, at: usize) -> usize {
    if len > SHUFFLE_UP_TO {
        walked(seed, len as u64, at as u64) as usize
    } else {
        shuffled(seed, len, at)
    }
}

/// Entry `at` of a permutation of `0..len`: a Feistel network permutes the smallest square of a power of two
/// that holds `len`, and results of at least `len` are permuted again (Black and Rogaway 2002, cycle
/// walking). It takes at most 4 steps on average.
fn walked(seed: u64, len: u64, at: u64) -> u64 {
    const ROUNDS: u64 = 6;
    let half = (64 - len.saturating_sub(1).leading_zeros())
        .div_ceil(2)
        .max(1);
    let mask = (1u64 << half) - 1;
    let mut x = at;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..ROUNDS {
            let mixed = left ^ (mix_seed(mix_seed(seed, round), right) & mask);
            (left, right) = (right, mixed);
        }
        x = left << half | right;
        if x < len {
            return x;
        }
    }
}

/// Entry `at` of a permutation of `0..len` (Fisher-Yates from the end).
pub fn shuffled(seed: u64, len: usize, at: usize) -> usize {
    permutation(seed, len)[at]
}

fn permutation(seed: u64, len: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    for i in (1..len).rev() {
        let j = (mix_seed(seed, i as u64) % (i as u64 + 1)) as usize;
        order.swap(i, j);
    }
    order
}

/// An episode to run, as data that is known without reading its task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draw {
    pub episode: EpisodeId,
    pub group: GroupId,
    pub split: Split,
    /// Index of the task in its split.
    pub task: usize,
    /// Number of the draw.
    pub draw: u64,
    pub purpose: String,
    pub seed: u64,
}

impl Draw {
    /// Reads the task of the draw and returns the complete description of the episode.
    ///
    /// # Errors
    /// If the taskset has no such task.
    pub fn spec(&self, taskset: &dyn Taskset) -> Result<EpisodeSpec, TasksetError> {
        Ok(EpisodeSpec {
            episode: self.episode.clone(),
            group: self.group.clone(),
            task: taskset.get(self.split, self.task)?,
            draw: self.draw,
            purpose: self.purpose.clone(),
            seed: self.seed,
        })
    }

    /// Copies this episode for another attempt, after the system failed the previous one. `attempt` counts
    /// from 1.
    pub fn again(&self, attempt: u32) -> Self {
        Self {
            episode: attempt_id(&self.episode, attempt),
            seed: mix_seed(self.seed, u64::from(attempt)),
            ..self.clone()
        }
    }
}

/// Returns the id of another attempt at the episode `first`. `attempt` counts from 1.
pub fn attempt_id(first: &EpisodeId, attempt: u32) -> EpisodeId {
    EpisodeId::new(format!("{first}-r{attempt}"))
}

/// Reads the number of the draw from the id of a training episode.
pub fn draw_of(episode: &EpisodeId) -> Option<u64> {
    let (draw, _) = episode.as_str().strip_prefix('d')?.split_once('-')?;
    draw.parse().ok()
}

/// Indices of the tasks of training step `step` (from 1), of `len` tasks each once an epoch.
pub(crate) fn uniform_tasks(len: usize, seed: u64, step: u64, tasks: usize) -> Vec<usize> {
    let len = len.max(1);
    let first = (step - 1) * tasks as u64;
    (0..tasks as u64)
        .map(|t| train_index(seed, len, first + t))
        .collect()
}

/// Stream of tasks and seeds that replace others.
const REFILL: u64 = 0x7265_6669;

/// Seed of what replaces other groups of a step: apart from all seeds of the plain schedule.
pub(crate) fn refill_seed(seed: u64, step: u64) -> u64 {
    mix_seed(mix_seed(seed ^ REFILL, step), REFILL)
}

/// Up to `tasks` indices of tasks that are not in `used`, as long as there are any, then of any.
pub(crate) fn other_tasks(len: usize, seed: u64, used: &[usize], tasks: usize) -> Vec<usize> {
    let len = len.max(1);
    // Tasks are tried in this order: of a large taskset a sample of it.
    let tries = len.min(used.len() + 8 * tasks + 64);
    let random = |n: usize| (mix_seed(seed, n as u64) % len as u64) as usize;
    let mut order: Vec<usize> = if len > SHUFFLE_UP_TO {
        (0..tries).map(random).collect()
    } else {
        permutation(seed, len)
    };
    // Those that are not used first, each part in its order.
    order.sort_by_key(|index| used.contains(index));
    order.into_iter().cycle().take(tasks).collect()
}

/// Draws that each step reserves: its tasks, and those that may replace them in `refill` rounds. So the
/// number of a draw is a function of its step and place, whatever was replaced before.
pub(crate) fn draws_per_step(tasks: usize, refill: u32) -> u64 {
    tasks as u64 * (1 + u64::from(refill))
}

/// The episodes of training step `step` (from 1) on the tasks at `indices`, one inner vector a group. Groups
/// from `first` on replace others and have separate seeds.
pub fn train_groups(
    seed: u64,
    step: u64,
    (first, indices): (u64, &[usize]),
    group_size: usize,
    draws_per_step: u64,
) -> Vec<Vec<Draw>> {
    let tasks = indices.len() as u64;
    let (seed, before) = match first {
        0 => (seed, (step - 1) * tasks),
        _ => (refill_seed(seed, step), 0),
    };
    let groups = indices.iter().zip(first..);
    let group = |(&task, t): (&usize, u64)| {
        let n = before + t;
        let draw = (step - 1) * draws_per_step + t;
        let group = format!("d{draw:08}");
        let episode = |k: usize| Draw {
            episode: EpisodeId::new(format!("{group}-e{k}")),
            group: GroupId::new(group.clone()),
            split: Split::Train,
            task,
            draw,
            purpose: "train".into(),
            seed: mix_seed(mix_seed(seed, n), k as u64),
        };
        (0..group_size).map(episode).collect()
    };
    groups.map(group).collect()
}

/// `episodes` episodes for each of the first `tasks` held-out tasks. Seeds do not depend on `purpose`, so
/// that before and after differ only by the weights. Ids begin with `ids`.
pub fn eval_episodes(
    seed: u64,
    (ids, purpose): (&str, &str),
    tasks: usize,
    episodes: usize,
) -> Vec<Draw> {
    let draw = |i: usize| {
        let id = format!("{ids}-{i:04}");
        Draw {
            episode: EpisodeId::new(id.clone()),
            group: GroupId::new(id),
            split: Split::HeldOut,
            task: i / episodes,
            draw: i as u64,
            purpose: purpose.into(),
            seed: mix_seed(seed ^ 0x6576_616c, i as u64),
        }
    };
    (0..tasks * episodes).map(draw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_env::tiny::TinyTaskset;
    use std::collections::BTreeSet;

    #[test]
    fn an_epoch_visits_each_task_once_in_an_order_of_its_own() {
        let epoch =
            |e: u64| -> Vec<usize> { (0..150).map(|n| train_index(3, 150, e * 150 + n)).collect() };
        let all: BTreeSet<usize> = epoch(0).into_iter().collect();
        assert_eq!(all.len(), 150);
        assert_ne!(epoch(0), epoch(1));
        assert_eq!(epoch(1), epoch(1));
    }

    #[test]
    fn large_tasksets_are_permuted_entry_by_entry() {
        for len in [1, 2, 3, 7, 64, 65, 1000, 4097] {
            let all = |seed| (0..len).map(move |at| walked(seed, len, at));
            let seen: BTreeSet<u64> = all(5).collect();
            assert_eq!(seen, (0..len).collect(), "{len}");
            assert!(all(5).eq(all(5)));
        }
        let order = |seed| (0..1000).map(move |at| walked(seed, 1000, at));
        assert!(order(1).ne(order(2)));
        // Neighbours are not kept together.
        let steps = order(1).zip(order(1).skip(1));
        assert!(steps.filter(|(a, b)| a.abs_diff(*b) < 10).count() < 60);
        let (many, first) = (1 << 20, 200_000);
        let one = permuted(3, many, first);
        assert!(one < many && one == permuted(3, many, first));
    }

    #[test]
    fn what_replaces_a_group_is_another_task_while_there_is_one() {
        let taskset = TinyTaskset::new(0);
        let all = taskset.len(Split::Train);
        let used: Vec<usize> = (0..5).collect();
        let others = other_tasks(all, 3, &used, all);
        assert_eq!(others, other_tasks(all, 3, &used, all));
        let fresh: BTreeSet<_> = others[..all - 5].iter().collect();
        assert_eq!(fresh.len(), all - 5);
        assert!(fresh.iter().all(|i| !used.contains(i)));
        assert_eq!(other_tasks(all, 3, &used, 3 * all).len(), 3 * all);
    }

    /// No two episodes of a run draw from one seed: not within a group, a step or a refill, not across
    /// steps, and not in training and measurement.
    #[test]
    fn seeds_and_ids_are_each_their_own() {
        let len = TinyTaskset::new(0).len(Split::Train);
        for (seed, tasks, size) in [(0, 1, 2), (1, 4, 3), (7, 8, 4), (u64::MAX, 3, 5)] {
            let mut specs = eval_episodes(seed, ("e", "eval-before"), 4, 3);
            for step in 1..9 {
                let plain = uniform_tasks(len, seed, step, tasks);
                let other = other_tasks(len, refill_seed(seed, step), &plain, tasks);
                for batch in [(0, &plain[..]), (tasks as u64, &other[..])] {
                    let groups = train_groups(seed, step, batch, size, draws_per_step(tasks, 1));
                    specs.extend(groups.into_iter().flatten());
                }
            }
            let seeds: BTreeSet<_> = specs.iter().map(|s| s.seed).collect();
            let ids: BTreeSet<_> = specs.iter().map(|s| &s.episode).collect();
            assert_eq!((seeds.len(), ids.len()), (specs.len(), specs.len()));
            let trained = specs.iter().filter(|s| s.purpose == "train");
            let draws: BTreeSet<_> = trained.map(|s| (s.draw, s.task)).collect();
            assert_eq!(draws.len(), 8 * 2 * tasks, "a draw is one task");
        }
    }
}
