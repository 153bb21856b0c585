//! The training loop as a library: draw tasks, run episodes, make rows, train, publish, keep.
//!
//! Everything that people and tools see of a run goes over one [`Bus`] of typed [`RunEvent`]s.
//! A [`PipelineConfig`] says what is to be done; recipes, command line and concrete engines are
//! the binary's.
//!
//! Invariants: what is drawn is a function of the run's seed and the curriculum's state; no
//! episode is lost and none is trained twice; a file that records a run misses no event, and a
//! viewer never holds training up; no recipe and no concrete engine is known here.

mod config;
mod cross;
mod curriculum;
mod dataset;
mod error;
mod event;
mod formats;
mod health;
mod learner;
mod parallel;
mod pool_client;
mod pool_source;
mod record;
mod rows;
mod schedule;
mod scoring_models;

pub use config::{EvalConfig, PipelineConfig, TaskSampling};
pub use cross::{CrossPolicy, CrossPolicyConfig};
pub use curriculum::{Curriculum, TasksByKind};
pub use dataset::{Dataset, DatasetConfig};
pub use error::PipelineError;
pub use event::{Bus, Phase, Recorder, RolloutProgress, RunEvent, TrainProgress};
pub use formats::{FormatCounts, grammars, masks};
pub use health::{Alarm, Health, cause, mostly_failed};
pub use learner::{Learner, LearnerConfig, PolicyConfig};
pub use parallel::{COMMAND as WORKER_COMMAND, WorkerGroup, work};
pub use pool_client::PoolClient;
pub use pool_source::{PoolSource, PoolSourceConfig, Wanted, unusable};
pub use record::*;
pub use rows::{Rows, by_group};
pub use schedule::{
    draws_per_step, eval_episodes, other_tasks, refill_seed, train_groups, uniform_tasks,
};
pub use scoring_models::{ReferenceWeights, ScoringModels};
