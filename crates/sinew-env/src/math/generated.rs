//! Settings and splits of generated tasksets.

use super::expr::evaluate;
use crate::rng::{Rng, hash64};
use crate::taskset::{Split, TasksetError};
use serde::{Deserialize, Serialize};
use sinew_types::{Task, TaskId};
use std::collections::BTreeMap;

/// One of this many problems belongs to the held-out split.
const HELD_OUT_EVERY: u64 = 8;

/// Maximum draws to find a problem of a split. Each succeeds with probability 1/8 or more.
const MAX_DRAWS: u32 = 1000;

/// Maximum number of tasks in a split.
const MAX_TASKS: usize = 1 << 20;

/// Settings of generated tasks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MathTaskConfig {
    /// Seed. Equal seeds give equal tasks.
    pub seed: u64,
    /// Levels to draw from, 1 to 3, in equal shares.
    pub levels: Vec<u8>,
    /// Tasks of the train split, 1 to 1048576.
    pub train: usize,
    /// Tasks of the held-out split, 1 to 1048576.
    pub held_out: usize,
}

impl Default for MathTaskConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            levels: vec![1, 2],
            train: 8192,
            held_out: 512,
        }
    }
}

impl MathTaskConfig {
    /// Checks the settings. Errors name `taskset`.
    pub(super) fn check(&self, taskset: &str) -> Result<(), TasksetError> {
        let wrong = |field, value: String, allowed: &str| TasksetError::Config {
            taskset: taskset.to_owned(),
            field,
            value,
            allowed: allowed.to_owned(),
        };
        if self.levels.is_empty() || self.levels.iter().any(|l| !(1..=3).contains(l)) {
            let value = format!("{:?}", self.levels);
            return Err(wrong("levels", value, "one or more of 1, 2 and 3"));
        }
        for (field, n) in [("train", self.train), ("held_out", self.held_out)] {
            if !(1..=MAX_TASKS).contains(&n) {
                return Err(wrong(field, n.to_string(), "1 to 1048576"));
            }
        }
        Ok(())
    }

    /// Number of tasks in a split.
    pub(super) fn len(&self, split: Split) -> usize {
        match split {
            Split::Train => self.train,
            Split::HeldOut => self.held_out,
        }
    }
}

/// A generated problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Problem {
    /// Text of the task.
    pub(super) question: String,
    /// Python expression that computes the answer.
    pub(super) solution: String,
    /// The expression without numbers, such as `a*b+c`. Problems of one shape are solved about equally often.
    pub(super) shape: String,
}

/// The shape of an expression with placeholders.
pub(super) fn shape(expression: &str) -> String {
    let marks = |c: &char| matches!(c, '{' | '}' | ' ');
    expression.chars().filter(|c| !marks(c)).collect()
}

/// The split of a question. It depends only on the text, which keeps the splits disjoint for all seeds.
pub(super) fn split_of(question: &str) -> Split {
    if hash64(question.as_bytes()).is_multiple_of(HELD_OUT_EVERY) {
        Split::HeldOut
    } else {
        Split::Train
    }
}

/// Creates the task at an index. Draws problems until one belongs to the split.
pub(super) fn task_at(
    config: &MathTaskConfig,
    taskset: &str,
    split: Split,
    index: usize,
    draw: impl Fn(&mut Rng, u8) -> Problem,
) -> Result<Task, TasksetError> {
    if index >= config.len(split) {
        return Err(TasksetError::Index {
            taskset: taskset.to_owned(),
            split,
            index,
            len: config.len(split),
        });
    }
    let level = config.levels[index % config.levels.len()];
    let label = format!("{taskset}/{level}/{}/{index}", split.as_str());
    let mut rng = Rng::labelled(config.seed, &label);
    let problem = (0..MAX_DRAWS)
        .map(|_| draw(&mut rng, level))
        .find(|problem| split_of(&problem.question) == split);
    let solved = problem.and_then(|p| evaluate(&p.solution).map(|answer| (p, answer)));
    let (problem, answer) = solved.ok_or_else(|| TasksetError::Row {
        taskset: taskset.to_owned(),
        line: index,
        message: format!(
            "no level {level} problem of the {} split was found",
            split.as_str()
        ),
    })?;
    let fingerprint = hash64(problem.question.as_bytes()) & 0xFFFF_FFFF;
    Ok(Task {
        id: TaskId::new(format!(
            "{taskset}/{}/{index}-{fingerprint:08x}",
            split.as_str()
        )),
        kind: format!("{taskset}-{level}/{}", problem.shape),
        preamble: Vec::new(),
        prompt: problem.question,
        data: serde_json::json!({ "answer": answer, "solution": problem.solution }),
        seed: rng.next_u64(),
    })
}

/// Replaces `{name}` placeholders by values.
pub(super) fn fill(text: &str, values: &BTreeMap<&'static str, String>) -> String {
    let mut out = text.to_owned();
    for (name, value) in values {
        out = out.replace(&format!("{{{name}}}"), value);
    }
    out
}

/// Draws the numbers of a problem: `a` and `c` have three digits, `b` two, `k` one. `p` is a multiple of `b`.
/// `l` has four digits and is larger than `a` plus `c`.
pub(super) fn numbers(rng: &mut Rng) -> BTreeMap<&'static str, String> {
    let a = rng.range(112, 989);
    let b = rng.range(12, 98);
    let c = rng.range(112, 989);
    let k = rng.range(3, 9);
    let l = rng.range(2203, 9876);
    [
        ("a", a),
        ("b", b),
        ("c", c),
        ("k", k),
        ("l", l),
        ("p", a * b),
    ]
    .map(|(name, value)| (name, value.to_string()))
    .into()
}
