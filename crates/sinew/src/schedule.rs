//! Which tasks a step runs, and the ids and seeds of its episodes: a pure function of the
//! recipe's seed, so that a resumed run asks for the same episodes.

use sinew_env::{Split, Taskset, TasksetError};
use sinew_rollout::{EpisodeSpec, mix_seed};
use sinew_types::{EpisodeId, GroupId};

/// Tasksets up to this size are shuffled anew in each epoch; larger ones are generated in
/// random order anyway.
const SHUFFLE_UP_TO: usize = 100_000;

/// Index of the `n`-th training task of a run.
fn train_index(seed: u64, len: usize, n: u64) -> usize {
    let (epoch, at) = (n / len as u64, (n % len as u64) as usize);
    if len > SHUFFLE_UP_TO {
        return at;
    }
    shuffled(mix_seed(seed ^ 0x7461_736b, epoch), len, at)
}

/// Entry `at` of a permutation of `0..len` (Fisher-Yates from the end).
pub(crate) fn shuffled(seed: u64, len: usize, at: usize) -> usize {
    let mut order: Vec<usize> = (0..len).collect();
    for i in (1..len).rev() {
        let j = (mix_seed(seed, i as u64) % (i as u64 + 1)) as usize;
        order.swap(i, j);
    }
    order[at]
}

/// Indices of the tasks of training step `step` (from 1), each task once an epoch.
pub(crate) fn uniform_tasks(
    taskset: &dyn Taskset,
    seed: u64,
    step: u64,
    tasks: usize,
) -> Vec<usize> {
    let len = taskset.len(Split::Train).max(1);
    let first = (step - 1) * tasks as u64;
    (0..tasks as u64)
        .map(|t| train_index(seed, len, first + t))
        .collect()
}

/// The episodes of training step `step` (from 1) on the tasks at `indices`, one inner vector a group.
pub(crate) fn train_groups(
    taskset: &dyn Taskset,
    seed: u64,
    step: u64,
    indices: &[usize],
    group_size: usize,
) -> Result<Vec<Vec<EpisodeSpec>>, TasksetError> {
    let tasks = indices.len() as u64;
    indices
        .iter()
        .zip(0..)
        .map(|(&index, t)| {
            let n = (step - 1) * tasks + t;
            let task = taskset.get(Split::Train, index)?;
            let group = format!("s{step:05}-g{t:03}");
            Ok((0..group_size)
                .map(|k| EpisodeSpec {
                    episode: EpisodeId::new(format!("{group}-e{k:03}")),
                    group: GroupId::new(group.clone()),
                    task: task.clone(),
                    step,
                    purpose: "train".into(),
                    seed: mix_seed(mix_seed(seed, n), k as u64),
                })
                .collect())
        })
        .collect()
}

/// `episodes` episodes for each of the first `tasks` held-out tasks. Seeds do not depend on `purpose`,
/// so that before and after differ by the weights alone.
pub(crate) fn eval_episodes(
    taskset: &dyn Taskset,
    seed: u64,
    purpose: &str,
    step: u64,
    tasks: usize,
    episodes: usize,
) -> Result<Vec<EpisodeSpec>, TasksetError> {
    (0..tasks.min(taskset.len(Split::HeldOut)) * episodes)
        .map(|i| {
            let id = format!("{purpose}-{i:04}");
            Ok(EpisodeSpec {
                episode: EpisodeId::new(id.clone()),
                group: GroupId::new(id),
                task: taskset.get(Split::HeldOut, i / episodes)?,
                step,
                purpose: purpose.into(),
                seed: mix_seed(seed ^ 0x6576_616c, i as u64),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
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
}
