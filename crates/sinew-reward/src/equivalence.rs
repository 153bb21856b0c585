//! `math(COLUMN)`: mathematical equivalence, by a Python package in the workers of functions.
//!
//! The function is a program of this crate. It gets only the output and the expected value. If it is cut off,
//! it compares the expected value with itself: if that ends, the output was the cause, and the value is 0.

use crate::named::expected_text;
use futures::future::BoxFuture;
use serde_json::json;
use sinew_answer::improper;
use sinew_bridge::{PythonReward, Target};
use sinew_env::{Reward, RewardSample, Score, Unscored};
use sinew_types::Task;

const SOURCE: &str = include_str!("equivalence.py");

/// The function as a target of workers.
pub(crate) fn target() -> Target {
    Target::builtin("sinew_math", SOURCE, "math")
}

/// Compares the last expression of an output with a column.
#[derive(Debug)]
pub(crate) struct Equivalence {
    /// Function of [`target`].
    pub(crate) function: PythonReward,
    pub(crate) column: String,
}

impl Equivalence {
    async fn compare(&self, sample: &RewardSample) -> Result<Score, Unscored> {
        let expected = improper(&expected_text(sample, &self.column)?);
        let task = Task {
            preamble: Vec::new(),
            prompt: String::new(),
            data: json!({ "expected": expected }),
            ..sample.task.clone()
        };
        let with = |output: &str| RewardSample {
            output: improper(output),
            ..RewardSample::new(task.clone(), "")
        };
        match self.function.score_within(&with(&sample.output)).await {
            Ok(score) => score,
            Err(why) => match self.function.score_within(&with(&expected)).await {
                Ok(Ok(_)) => Score::new(0.0),
                _ => Err(why),
            },
        }
    }
}

impl Reward for Equivalence {
    fn name(&self) -> &str {
        "math"
    }

    fn score<'a>(&'a self, sample: &'a RewardSample) -> BoxFuture<'a, Result<Score, Unscored>> {
        Box::pin(self.compare(sample))
    }
}
