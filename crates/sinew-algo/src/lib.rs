//! RL algorithms: traces of episodes in, per-token training rows out.
//!
//! An algorithm is a [`Composition`] of reward shaping, an advantage estimator, filters, an aggregation and a
//! loss specification. Presets under [`algorithms`] have the compositions of the literature, one file each. A
//! recipe's [`AlgorithmConfig`] changes parts of a preset. An option without effect and an impossible
//! combination are errors with the reason. [`Algorithm::prepare`] checks the traces of a batch once, and
//! [`Prepared::rows`] converts them to [`sinew_types::TrainRow`]s.
//!
//! Invariants:
//! - Only sampled tokens have weight, each exactly once. Tokens that branches of a trace share are trained on
//!   the first leaf path that contains them.
//! - The weight of an episode in the loss does not depend on its number of rows. Denominators are those of
//!   the whole batch.
//! - [`sinew_types::GroupId`] defines groups, not equal prompts.
//! - A missing reference log-probability or value is an error, never zero. A non-finite number never reaches
//!   a row.
//! - This crate reads no clock, file, environment variable or random number: equal input gives equal rows.

#![warn(missing_docs)]

mod adaptive;
mod aggregate;
mod aim;
pub mod algorithms;
mod audit;
mod batch;
mod check;
mod clusters;
mod composition;
mod config;
mod dialect;
mod draft;
mod earlier;
mod episode;
mod episode_sums;
mod error;
mod filter;
mod kind;
mod measures;
mod path_signals;
mod pipeline;
mod pools;
mod repair;
mod report;
mod stats;
mod strict;
pub mod trust;
mod turn_stages;

pub use adaptive::{AdaptiveConfig, Estimates, Signal, Trials, unit};
pub use aim::Dial;
pub use audit::{TokenCounts, count_tokens};
pub use clusters::{IntervalMethod, Paired, TaskMean};
pub use composition::{
    Advantage, Baseline, Composition, EqualGroups, Filters, Needs, Normalize, Overlong,
    ProcessRewards, Resample, Rewards, RunFacts, Scale, Truncated,
};
pub use config::{AlgorithmConfig, KlConfig, KlPlace, RewardConfig, TeacherConfig};
pub use dialect::Dialect;
pub use draft::{Column, Draft};
pub use earlier::EarlierRewards;
pub use episode::{Columns, EpisodeColumns};
pub use episode_sums::EpisodeSums;
pub use error::{AlgoError, ConfigError};
pub use kind::AlgorithmKind;
pub use measures::{Interval, Percentiles, Spread, difference, pass_at, passes};
pub use pipeline::{Algorithm, Prepared};
pub use pools::Pool;
pub use repair::{GroupRepair, Repair};
pub use report::{AlgoReport, Moments, PreferenceReport, Quarantined, RepairReport};
pub use turn_stages::TurnStages;
