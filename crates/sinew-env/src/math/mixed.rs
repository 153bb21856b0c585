//! Arithmetic and word problems in turn.

use super::arithmetic::Arithmetic;
use super::generated::MathTaskConfig;
use super::word::Word;
use crate::taskset::{Split, Taskset, TasksetError};
use sinew_types::Task;

/// Taskset that alternates arithmetic and word problems.
#[derive(Clone, Debug)]
pub struct Mixed {
    arithmetic: Arithmetic,
    word: Word,
}

impl Mixed {
    /// Creates the taskset. Each kind is half of each split.
    ///
    /// # Errors
    /// [`TasksetError::Config`] for an invalid setting.
    pub fn new(config: MathTaskConfig) -> Result<Self, TasksetError> {
        Ok(Self {
            arithmetic: Arithmetic::new(config.clone())?,
            word: Word::new(config)?,
        })
    }
}

impl Taskset for Mixed {
    fn name(&self) -> &str {
        "mixed"
    }

    fn len(&self, split: Split) -> usize {
        self.word.len(split)
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        // An arithmetic and a word problem share an index of their tasksets, so that both kinds have all
        // levels.
        if index >= self.len(split) {
            return Err(TasksetError::Index {
                taskset: self.name().to_owned(),
                split,
                index,
                len: self.len(split),
            });
        }
        match index % 2 {
            0 => self.arithmetic.get(split, index / 2),
            _ => self.word.get(split, index / 2),
        }
    }
}
