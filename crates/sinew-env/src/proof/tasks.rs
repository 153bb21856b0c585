//! Tasks: theorems of a seed. The hash of a theorem says which split it is in.

use super::statements::{Statement, draw};
use crate::rng::{Rng, hash64};
use crate::taskset::{Split, Taskset, TasksetError};
use serde_json::json;
use sinew_types::{Task, TaskId};

/// One of so many theorems is held out.
const HELD_OUT: u64 = 5;
/// Draws until a theorem of a split is found. Each misses with 4 of 5 at most.
const DRAWS: usize = 2000;

/// Theorems of some levels in turn.
#[derive(Clone, Debug)]
pub struct ProofTasks {
    /// Seed of the run.
    seed: u64,
    /// Levels, in turn.
    levels: Vec<u8>,
    /// Number of training tasks.
    train: usize,
    /// Number of held-out tasks.
    held_out: usize,
}

impl ProofTasks {
    /// Tasks of some levels.
    pub fn new(seed: u64, levels: Vec<u8>, train: usize, held_out: usize) -> Self {
        Self {
            seed,
            levels,
            train,
            held_out,
        }
    }
}

/// The split of a theorem, whatever the seed of the tasks.
fn split_of(statement: &Statement) -> Split {
    let problem = format!("{}{}", statement.given, statement.theorem);
    match hash64(problem.as_bytes()) % HELD_OUT {
        0 => Split::HeldOut,
        _ => Split::Train,
    }
}

/// The theorem in words.
fn prompt(statement: &Statement) -> String {
    let mut out = String::new();
    for part in [&statement.imports, &statement.given] {
        if !part.is_empty() {
            out.push_str(part.trim_end());
            out.push('\n');
        }
    }
    format!("{out}Theorem goal : {}.", statement.theorem)
}

impl Taskset for ProofTasks {
    fn name(&self) -> &str {
        "coq"
    }

    fn len(&self, split: Split) -> usize {
        match split {
            Split::Train => self.train,
            Split::HeldOut => self.held_out,
        }
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let missing = || TasksetError::Index {
            taskset: "coq".into(),
            split,
            index,
            len: self.len(split),
        };
        let level = self.levels.get(index % self.levels.len().max(1)).copied();
        let level = level
            .filter(|_| index < self.len(split))
            .ok_or_else(missing)?;
        let label = format!("coq/{}/{index}", split.as_str());
        let mut rng = Rng::labelled(self.seed, &label);
        let mut drawn = std::iter::repeat_with(|| draw(level, &mut rng)).take(DRAWS);
        let statement = drawn.find(|s| split_of(s) == split).ok_or_else(missing)?;
        Ok(Task {
            id: TaskId::new(format!("coq-{}-{}-{index}", self.seed, split.as_str())),
            kind: format!("coq/{level}"),
            preamble: Vec::new(),
            prompt: prompt(&statement),
            data: json!({ "level": level, "statement": statement }),
            seed: hash64(label.as_bytes()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_splits_share_no_theorem_whatever_the_seeds() {
        let levels = vec![1, 2, 3, 4];
        let (a, b) = (
            ProofTasks::new(1, levels.clone(), 100, 100),
            ProofTasks::new(2, levels, 100, 100),
        );
        for i in 0..100 {
            let held_out = a.get(Split::HeldOut, i).unwrap();
            assert!((0..100).all(|k| b.get(Split::Train, k).unwrap().prompt != held_out.prompt));
            assert_eq!(held_out, a.get(Split::HeldOut, i).unwrap());
        }
        assert!(a.get(Split::Train, 100).is_err());
    }
}
