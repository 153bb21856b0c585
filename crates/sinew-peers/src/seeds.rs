//! Tasks that are only seeds and numbers, for worlds that a server makes. The column `index` counts on from
//! training to held-out tasks.

use serde_json::json;
use sinew_env::{Split, Taskset, TasksetError};
use sinew_types::{Task, TaskId, mix_seed};

/// Seeds of both splits, which differ.
#[derive(Clone, Debug)]
pub(crate) struct SeedTasks {
    /// Name of the tasks and begin of their ids.
    name: &'static str,
    /// Text of every task, before the world's messages. May be empty.
    prompt: String,
    /// Number of training tasks.
    train: usize,
    /// Number of held-out tasks.
    held_out: usize,
    /// Seed of the run, mixed with the place of each task.
    seed: u64,
}

impl SeedTasks {
    /// `sizes` are the numbers of training and held-out tasks.
    pub(crate) fn new(
        name: &'static str,
        prompt: &str,
        train: usize,
        held_out: usize,
        seed: u64,
    ) -> Self {
        Self {
            name,
            prompt: prompt.to_owned(),
            train,
            held_out,
            seed,
        }
    }
}

impl Taskset for SeedTasks {
    fn name(&self) -> &str {
        self.name
    }

    fn len(&self, split: Split) -> usize {
        match split {
            Split::Train => self.train,
            Split::HeldOut => self.held_out,
        }
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let len = self.len(split);
        if index >= len {
            return Err(TasksetError::Index {
                taskset: self.name.into(),
                split,
                index,
                len,
            });
        }
        // Held-out places follow those of training, so that no seed is in both.
        let place = match split {
            Split::Train => index,
            Split::HeldOut => self.train + index,
        };
        Ok(Task {
            id: TaskId::new(format!("{}/{}/{index}", self.name, split.as_str())),
            kind: self.name.into(),
            preamble: Vec::new(),
            prompt: self.prompt.clone(),
            data: json!({"index": place}),
            seed: mix_seed(self.seed, place as u64),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn seeds_of_both_splits_differ_and_come_back() {
        let tasks = SeedTasks::new("x", "Go.", 40, 10, 7);
        let seeds = |split: Split| {
            let all = (0..tasks.len(split)).map(|i| tasks.get(split, i).unwrap().seed);
            all.collect::<BTreeSet<u64>>()
        };
        let (train, held_out) = (seeds(Split::Train), seeds(Split::HeldOut));
        assert_eq!((train.len(), held_out.len()), (40, 10));
        assert!(train.is_disjoint(&held_out));
        assert_eq!(seeds(Split::Train), train);
        assert!(tasks.get(Split::HeldOut, 10).is_err());
    }
}
