//! Folders that people see: the project that `sinew init` writes, and the folder of a run.
//!
//! [`init()`] writes the files of a [`ProjectKind`]; [`init_from`] those for rows that are there, as
//! [`propose`] understands them, in the [`Sizes`] that they need. A [`RunDir`] is held by one process at a
//! time; it keeps the recipe that ran and refuses to resume with another one.
//!
//! Invariants:
//! - A file of the user is never overwritten.
//! - A reader of a run's folder sees the old or the new content of a file, never a part.

pub mod chain;
mod copy;
mod init;
mod pinned_inputs;
mod place;
mod propose;
mod run_dir;
mod sizes;
mod token_signals;

pub use copy::{checkpoint_of, copy_before};
pub use init::{InitError, ProjectKind, draft, init, init_from};
pub use pinned_inputs::{PinnedInputs, PinnedWeights};
pub use place::wrong_folder;
pub use propose::{Proposal, ProposeError, answers_of, propose};
pub use run_dir::{
    COLLECTION, EVALUATION, Resume, RunDir, RunDirError, RunEnd, holds_run, in_use, is_collection,
    keeps_episodes, process_of, recipe, store_id_path, store_path, summary, write_atomic,
};
pub use sizes::{RecipeMeasures, Sizes, parameters_in_name, sizes};
pub use token_signals::{TokenSignal, TokenSignals, token_signals};
