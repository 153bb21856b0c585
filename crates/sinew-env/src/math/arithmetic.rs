//! Generated arithmetic expressions.

use super::generated::{MathTaskConfig, Problem, fill, numbers, shape, task_at};
use crate::rng::Rng;
use crate::taskset::{Split, Taskset, TasksetError};
use sinew_types::Task;

/// Questions for an expression `{e}`.
const QUESTIONS: [&str; 4] = [
    "What is {e}?",
    "Compute {e}.",
    "Calculate {e}.",
    "Find {e}.",
];

/// Expressions by level. [`numbers`] describes the placeholders.
const EXPRESSIONS: [&[&str]; 3] = [
    &[
        "{a} * {b}",
        "{b} * {a}",
        "{a} * {b} + {c}",
        "{a} * {b} - {c}",
    ],
    &[
        "({a} + {c}) * {b}",
        "{c} + {a} * {b}",
        "{a} * {b} + {c} * {k}",
        "({l} - {a}) * {b}",
        "{l} * {b} - {c}",
        "{p} / {b} + {c}",
    ],
    &[
        "({a} + {c}) * ({b} + {k})",
        "({l} - {a}) * ({b} - {k})",
        "{a} * {b} * {k} - {l}",
        "{l} * {b} + {a} * {c}",
        "{p} / {b} * {c} + {l}",
    ],
];

/// Taskset of arithmetic with three- and four-digit numbers.
#[derive(Clone, Debug)]
pub struct Arithmetic {
    config: MathTaskConfig,
}

impl Arithmetic {
    /// Creates the taskset.
    ///
    /// # Errors
    /// [`TasksetError::Config`] for an invalid setting.
    pub fn new(config: MathTaskConfig) -> Result<Self, TasksetError> {
        config.check("arithmetic")?;
        Ok(Self { config })
    }
}

/// Draws a problem of a level.
fn draw(rng: &mut Rng, level: u8) -> Problem {
    let expressions = EXPRESSIONS[usize::from(level.clamp(1, 3)) - 1];
    let values = numbers(rng);
    let expression: &str = rng.pick::<&str>(expressions);
    let solution = fill(expression, &values);
    let question = rng.pick(&QUESTIONS).replace("{e}", &solution);
    Problem {
        question,
        solution,
        shape: shape(expression),
    }
}

impl Taskset for Arithmetic {
    fn name(&self) -> &str {
        "arithmetic"
    }

    fn len(&self, split: Split) -> usize {
        self.config.len(split)
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        task_at(&self.config, self.name(), split, index, draw)
    }
}
