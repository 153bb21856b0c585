//! Chains of runs: the stages of a recipe one after the other, each from the weights of the last.
//!
//! The chain's folder has the folder of a run for each stage, so that everything that reads runs reads them.
//! The chain itself keeps little:
//!
//! | file | content |
//! |---|---|
//! | `chain.toml` | the effective recipe of all stages |
//! | `chain.json` | the stages that ended, each with what it left to the next |
//! | `report.html` | all stages in one table and one curve |
//! | `lock` | held by the process that trains |
//! | `NAME/` | the run of the stage NAME |
//!
//! # Invariants
//!
//! - A stage has ended once `chain.json` names it, and not before: one file that is replaced by a rename. A
//!   process that dies at any other instant leaves a stage that can be resumed, or one that has not begun.
//! - A stage begins with exactly the weights that the one before ended with: their BLAKE3 is in `chain.json`,
//!   and is computed again from the weights that the next stage loads.
//! - A stage that ended does not change any more once a later one has begun.
//!
//! Tests implement the port [`Stages`] in a few lines instead of a trainer.

mod drive;
mod folder;
mod report;

pub use drive::{HandedWeights, StageStart, Stages, drive, last_line};
pub use folder::{
    ChainDir, ChainError, StageEnd, check_alone, holds_chain, last_stage, run_folder,
};
pub use report::{table, write_report};
