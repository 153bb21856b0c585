//! Tasks: pages and seeds.

use serde_json::json;
use sinew_env::{Rng, Split, Taskset, TasksetError};
use sinew_types::{Task, TaskId};

/// Pages of MiniWoB++, one seed after the other.
#[derive(Clone, Debug)]
pub(crate) struct MiniwobTasks {
    /// Seed of the run.
    seed: u64,
    /// Families, in turn.
    families: Vec<String>,
    /// Number of training tasks.
    train: usize,
    /// Number of held-out tasks.
    held_out: usize,
}

impl MiniwobTasks {
    /// Tasks of some families in turn.
    pub(crate) fn new(seed: u64, families: Vec<String>, train: usize, held_out: usize) -> Self {
        Self {
            seed,
            families,
            train,
            held_out,
        }
    }
}

impl Taskset for MiniwobTasks {
    fn name(&self) -> &str {
        "miniwob"
    }

    fn len(&self, split: Split) -> usize {
        match split {
            Split::Train => self.train,
            Split::HeldOut => self.held_out,
        }
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let family = self.families.get(index % self.families.len().max(1));
        let family = family.filter(|_| index < self.len(split));
        let family = family.ok_or_else(|| TasksetError::Index {
            taskset: "miniwob".into(),
            split,
            index,
            len: self.len(split),
        })?;
        let label = format!("miniwob/{}/{index}", split.as_str());
        // Numbers that JavaScript holds; the last bit says which split it is.
        let drawn = Rng::labelled(self.seed, &label).next_u64() >> 12;
        let seed = drawn & !1 | u64::from(split == Split::HeldOut);
        Ok(Task {
            id: TaskId::new(format!("miniwob-{}-{}-{index}", self.seed, split.as_str())),
            kind: format!("miniwob/{family}"),
            preamble: Vec::new(),
            // The page makes the words of the task.
            prompt: String::new(),
            data: json!({ "site": "miniwob", "family": family }),
            seed,
        })
    }
}
