//! Episodes in, per-token training signal out.
//!
//! An algorithm is a [`Composition`]: reward shaping, an advantage estimator, filters, an
//! aggregation and a loss specification. Presets under [`algorithms`] name the compositions of
//! the literature, one file each; a recipe's [`AlgorithmConfig`] changes parts of a preset, and
//! what has no effect or cannot work is refused with the reason. [`Algorithm::rows`] turns the
//! traces of a batch into [`sinew_types::TrainRow`]s.
//!
//! Invariants:
//! - Only sampled tokens get weight, each exactly once: tokens that branches of a trace share
//!   train on the first leaf path that holds them.
//! - An episode's weight in the loss does not depend on how many rows it makes; denominators
//!   are those of the whole batch.
//! - Groups are what [`sinew_types::GroupId`] says, never what looks alike.
//! - Nothing missing is taken for zero: a reference log-probability or value that an algorithm
//!   reads and nobody gave is an error, and what is not finite never reaches a row.
//! - Nothing here reads a clock, files, the environment or random numbers: equal input gives
//!   equal rows.

mod adaptive;
mod aggregate;
pub mod algorithms;
mod audit;
mod batch;
mod check;
mod composition;
mod config;
mod dialect;
mod draft;
mod episode;
mod filter;
mod kind;
mod pipeline;
mod repair;
mod report;
mod stats;
mod strict;

pub use adaptive::{AdaptiveConfig, Estimates, Signal, Trials, unit};
pub use audit::{TokenCounts, count_tokens};
pub use composition::{
    Advantage, Baseline, Composition, EqualGroups, Filters, Needs, Normalize, Overlong,
    ProcessRewards, Resample, Rewards, RunFacts, Scale, Truncated,
};
pub use config::{AlgorithmConfig, ConfigError, KlConfig, KlPlace, RewardConfig, TeacherConfig};
pub use dialect::Dialect;
pub use draft::{Column, Draft};
pub use episode::{Columns, EpisodeColumns};
pub use kind::AlgorithmKind;
pub use pipeline::{AlgoError, Algorithm};
pub use repair::{GroupRepair, Repair};
pub use report::{AlgoReport, Moments, PreferenceReport, Quarantined, RepairReport};
