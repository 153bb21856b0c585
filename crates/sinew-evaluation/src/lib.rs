//! Evaluation of models on benchmarks: definitions, results with intervals, comparisons, reports. It runs no
//! episode and reads no clock: the command line does.
//!
//! A benchmark is a recipe with a description (`benches/*.toml`): rows or an environment, a prompt, a scorer,
//! limits. [`Bench::recipe`] completes it for a model. Episodes become [`Sample`]s, these a [`BenchResult`],
//! and two results a [`Comparison`].
//!
//! | file | holds |
//! |---|---|
//! | `bench` | definitions, and the recipe of one |
//! | `rows` | rows of data sets with the columns that a benchmark derives |
//! | `sample` | the part of an episode that counts |
//! | `result` | means over tasks, pass@k, pass^k, counts, tokens and cost |
//! | `overlap` | n-grams that prompts share with training tasks |
//! | `compare` | the paired test of two results |
//! | `report` | text, Markdown and HTML |
//!
//! # Invariants
//!
//! - A task weighs as much as any other, whatever its number of samples, and is the unit of every interval.
//! - A sample that the system failed or that has no score is in no mean. It is counted apart, and the mean
//!   with 0 in its place is shown as well. A sample that a limit cut is scored as it is, and counted apart.
//! - Results of different tasks or settings are never compared: the refusal names them.

mod bench;
mod compare;
mod overlap;
mod report;
mod result;
mod rows;
mod sample;

pub use bench::{Bench, BenchError, Setup, SetupUser};
pub use compare::{CompareError, Comparison, compare};
pub use overlap::{NGRAM, Overlap, overlap};
pub use report::{comparison_text, html, markdown, text};
pub use result::{
    BenchResult, Counts, Facts, Measures, ServedTokens, TaskSamples, Tokens, UserTokens, summarize,
};
pub use rows::{RowsError, local_files, prepare};
pub use sample::{Sample, SampleEnd};
