//! The training loop as a library: draw tasks, run episodes, make rows, train, publish, keep.
//!
//! Everything that people and tools see of a run goes over one `Bus` of typed `RunEvent`s. A
//! [`PipelineConfig`] has the settings of the run; recipes, command line and concrete engines are the
//! binary's.
//!
//! Invariants: the draws are a function of the run's seed and the curriculum's state; no episode is lost and
//! none is trained twice; a file that records a run misses no event, and a viewer never holds training up;
//! this crate depends on no recipe and no concrete engine.

mod config;
mod cross_policy;
mod drivers;
mod embedded_policy;
mod files;
mod formats;
mod groups;
mod in_flight;
mod late;
mod learner;
mod metrics_file;
#[cfg(test)]
mod metrics_page_tests;
mod parallel;
mod ports;
mod rollouts;
mod score;
mod scoring_models;
mod state;
mod stored;
mod trainer_error;
mod trust;

pub use config::PipelineConfig;
pub use cross_policy::{CrossPolicy, CrossPolicyConfig};
pub use drivers::{Pipeline, SharedLearner, run};
pub use embedded_policy::PolicyConfig;
pub use formats::{grammars, masks};
pub use groups::{GroupParts, GroupRewards};
pub use in_flight::FILE as IN_FLIGHT;
pub use late::{InboxScores, LateRewards, LateScores};
pub use learner::{LearnerConfig, PolicyLearner, RowSink};
pub use parallel::{COMMAND as WORKER_COMMAND, WorkerGroup, work};
pub use ports::{
    GroupRequest, GroupScores, Learner, ResumeCondition, RolloutReading, Rollouts, SampleSource,
    ScoredGroup, SourceGroups, StoredEpisode, Waker, WeightsTransport,
};
pub use rollouts::{EngineRollouts, RolloutParts, TurnSchedule};
pub use scoring_models::{FrozenModel, Reference, ScoringModels};
pub use state::{RunStore, SavedState};
pub use stored::{ChangedParts, StoredEpisodes, StoredParts};
