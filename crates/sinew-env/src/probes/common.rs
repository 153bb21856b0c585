//! What the probes share: tasks by seed, split and index, fields of answers, scores.

use crate::registry::KeyError;
use crate::rng::hash64;
use crate::taskset::{Split, Taskset, TasksetError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_types::{Outcome, Task, TaskId};
use std::sync::Arc;

/// Most tasks of a split.
const MAX_TASKS: usize = 1_000_000;

/// One task in so many belongs to the held-out split, by the hash of what it asks about.
const HELD_OUT: u64 = 5;

/// Draws until one belongs to a split. The chance that none does is below 1e-9.
const TRIES: u64 = 100;

/// Whether something that a task asks about belongs to a split.
fn belongs(asked: &str, split: Split) -> bool {
    hash64(asked.as_bytes()).is_multiple_of(HELD_OUT) == (split == Split::HeldOut)
}

/// Tasks of a generator: the draw of a seed, with what it asks about.
struct Generated {
    /// That of the environment.
    name: &'static str,
    /// Of the run.
    seed: u64,
    /// Of the training split and of the held-out one.
    sizes: [usize; 2],
    /// Makes a task of a seed.
    draw: fn(seed: u64) -> Drawn,
}

/// A task that a generator drew.
pub(super) struct Drawn {
    /// It decides to which split the task belongs.
    pub(super) asked: String,
    /// The type of the task.
    pub(super) kind: &'static str,
    /// What the model reads first.
    pub(super) prompt: String,
    /// What is right; the model never sees it.
    pub(super) data: serde_json::Value,
}

impl Taskset for Generated {
    fn name(&self) -> &str {
        self.name
    }

    fn len(&self, split: Split) -> usize {
        match split {
            Split::Train => self.sizes[0],
            Split::HeldOut => self.sizes[1],
        }
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let len = self.len(split);
        if index >= len {
            return Err(TasksetError::Index {
                taskset: self.name.to_owned(),
                split,
                index,
                len,
            });
        }
        let name = format!("{}/{}/{index}", self.name, split.as_str());
        let seed = hash64(name.as_bytes()) ^ self.seed;
        let tries = (0..TRIES).map(|n| (self.draw)(seed.wrapping_add(n)));
        let mut fitting = tries.filter(|d| belongs(&d.asked, split));
        let drawn = fitting.next().unwrap_or_else(|| (self.draw)(seed));
        Ok(Task {
            id: TaskId::new(name),
            kind: drawn.kind.to_owned(),
            preamble: Vec::new(),
            prompt: drawn.prompt,
            data: drawn.data,
            seed,
        })
    }
}

/// Keys of a probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Sizes {
    /// Number of training tasks.
    #[schemars(range(min = 1, max = 1_000_000))]
    train: usize,
    /// Number of held-out tasks.
    #[schemars(range(min = 1, max = 1_000_000))]
    held_out: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            train: 10_000,
            held_out: 200,
        }
    }
}

impl Sizes {
    pub(super) fn check(&self) -> Result<(), KeyError> {
        let sizes = [("train", self.train), ("held_out", self.held_out)];
        let mut wrong = sizes
            .into_iter()
            .filter(|(_, n)| !(1..=MAX_TASKS).contains(n));
        match wrong.next() {
            Some((key, value)) => Err(KeyError {
                key,
                value: value.to_string(),
                reason: format!("allowed: 1 to {MAX_TASKS}"),
            }),
            None => Ok(()),
        }
    }

    /// Tasks of the generator `draw`.
    pub(super) fn tasks(
        &self,
        name: &'static str,
        seed: u64,
        draw: fn(seed: u64) -> Drawn,
    ) -> Arc<dyn Taskset> {
        Arc::new(Generated {
            name,
            seed,
            sizes: [self.train, self.held_out],
            draw,
        })
    }
}

/// What follows the last `KEY:` of a text, to the end of its line.
pub(super) fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let mut lines = text.lines().rev();
    let rest = lines.find_map(|line| {
        let line = line.trim_start_matches(|c: char| c.is_whitespace() || c == '*');
        let rest = line.strip_prefix(key)?.trim_start_matches('*');
        rest.strip_prefix([':', '：'])
    })?;
    Some(rest.trim_matches(|c: char| c.is_whitespace() || matches!(c, '*' | '.' | '`')))
}

/// A score of 1 or 0 with metrics. There is nothing between them: a habit that wins a part of the tasks
/// would be taught by a part of a reward.
pub(super) fn outcome<const N: usize>(success: bool, metrics: [(&str, f64); N]) -> Outcome {
    Outcome {
        reward: flag(success),
        success,
        metrics: metrics.map(|(name, value)| (name.to_owned(), value)).into(),
        ..Outcome::default()
    }
}

/// A truth value as a metric.
pub(super) fn flag(b: bool) -> f64 {
    f64::from(u8::from(b))
}
