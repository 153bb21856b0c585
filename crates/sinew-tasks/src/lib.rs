//! Users' tasks: rows of JSON lines, CSV, Parquet, a folder or code, as a [`Taskset`](sinew_env::Taskset).
//!
//! A row is a table of named columns. A Jinja template turns it into the prompt, a filter selects rows, and
//! the held-out split is a part chosen by the hash of the prompt, or separate rows.
//!
//! A row goes through these steps: [`read_rows`] (files, with the line of each row) → filter → template →
//! split → [`TableTaskset`]. All rows are read and rendered when a run starts, so that a bad row is an error
//! with its file and line before anything is trained.
//!
//! Invariants:
//! - Equal files and settings give equal tasks with equal ids, in the order of the rows.
//! - The splits share no prompt: equal prompts fall into one split, and rows of the training split that are
//!   also in the held-out file are left out and counted.
//! - No row is skipped silently: a row becomes a task, is counted ([`TableSummary`]), or is an error.
//! - Sizes are limited while files are read: [`MAX_ROW_BYTES`], [`MAX_ROWS`], [`MAX_BYTES`].

mod error;
mod folder;
#[cfg(feature = "parquet")]
mod parquet_rows;
mod row;
mod rows;
mod table;
mod template;

pub use error::TasksError;
pub use folder::read_rows;
pub use row::{MAX_BYTES, MAX_ROW_BYTES, MAX_ROWS, Row};
pub use table::{Example, Source, Splits, TableConfig, TableSummary, TableTaskset};
pub use template::{DerivedColumns, PromptTemplate};
