//! What the generated tasksets share: configuration, splits, and the mixture of them.

use super::arithmetic::Arithmetic;
use super::expr::evaluate;
use super::word::Word;
use crate::rng::{Rng, hash64};
use crate::taskset::{Split, Taskset, TasksetError};
use serde::{Deserialize, Serialize};
use sinew_types::{Task, TaskId};
use std::collections::BTreeMap;

/// One problem in this many belongs to the held-out split.
const HELD_OUT_EVERY: u64 = 8;

/// Draws before a split is said to be unreachable; each hits with probability 1/8 or more.
const MAX_DRAWS: u32 = 1000;

/// Largest split that may be asked for.
const MAX_TASKS: usize = 1 << 20;

/// Which problems are generated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MathTaskConfig {
    /// Equal seeds give equal tasks.
    pub seed: u64,
    /// Difficulties to draw from, 1 to 3, in equal parts.
    pub levels: Vec<u8>,
    pub train: usize,
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

    pub(super) fn len(&self, split: Split) -> usize {
        match split {
            Split::Train => self.train,
            Split::HeldOut => self.held_out,
        }
    }
}

/// A problem before it belongs to a split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) question: String,
    /// The expression that a perfect policy gives to Python.
    pub(super) solution: String,
}

/// The split that a question belongs to, whatever seed or index it was drawn for: this is what
/// keeps the splits disjoint.
pub(super) fn split_of(question: &str) -> Split {
    if hash64(question.as_bytes()).is_multiple_of(HELD_OUT_EVERY) {
        Split::HeldOut
    } else {
        Split::Train
    }
}

/// The task at an index: problems are drawn until one belongs to the split.
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
        kind: format!("{taskset}-{level}"),
        prompt: problem.question,
        data: serde_json::json!({ "answer": answer, "solution": problem.solution }),
        seed: rng.next_u64(),
    })
}

/// Puts values into a text with `{name}` placeholders.
pub(super) fn fill(text: &str, values: &BTreeMap<&'static str, String>) -> String {
    let mut out = text.to_owned();
    for (name, value) in values {
        out = out.replace(&format!("{{{name}}}"), value);
    }
    out
}

/// The numbers of one problem: `a` and `c` have three digits, `b` two, `k` one; `p` is a
/// multiple of `b`, and `l` has four digits and is larger than `a` and `c` together.
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

/// Arithmetic and word problems in turns.
#[derive(Clone, Debug)]
pub struct Mixed {
    arithmetic: Arithmetic,
    word: Word,
}

impl Mixed {
    /// Half of each split is arithmetic, half are word problems.
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
        // Pairs of an arithmetic and a word problem, so that both kinds see every level.
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
