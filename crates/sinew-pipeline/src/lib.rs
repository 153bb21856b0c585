//! The training loop as a library: draw tasks, run episodes, make rows, train, publish, keep.
//!
//! Everything that people and tools see of a run goes over one [`Bus`] of typed [`RunEvent`]s. A
//! [`PipelineConfig`] has the settings of the run; recipes, command line and concrete engines are the
//! binary's.
//!
//! Invariants: the draws are a function of the run's seed and the curriculum's state; no episode is lost and
//! none is trained twice; a file that records a run misses no event, and a viewer never holds training up;
//! this crate depends on no recipe and no concrete engine.

mod config;
mod core;
mod cross;
mod curriculum;
mod draws;
mod drivers;
mod error;
mod event;
mod files;
mod formats;
mod groups;
mod health;
mod in_flight;
mod keep;
mod late;
mod learner;
#[cfg(test)]
mod metrics_page_tests;
mod parallel;
mod ports;
mod record;
mod rollouts;
mod rows;
mod schedule;
mod score;
mod score_records;
mod scoring_models;
mod state;
mod status;
mod trust;
mod verdict;

pub use config::PipelineConfig;
pub use core::{
    Command, CoreConfig, CoreState, Decide, Ended as EndedEpisode, EvalConfig, EvalSet, Event,
    Follows, Goal, LateGroups, OpenDraws, Overlap, PipelineCore, Roster, RunCounts,
    Samples as SampleKind, Showed, Stop, TaskSampling, UpdateCommit, When, showed,
};
pub use cross::{CrossPolicy, CrossPolicyConfig};
pub use curriculum::{ByType, Curriculum, EnvironmentShare, TaskShares};
pub use draws::TaskDraws;
pub use drivers::{Ended, Pipeline, SharedLearner, run};
pub use error::PipelineError;
pub use event::{Bus, CollectProgress, Phase, Recorder, RolloutProgress, RunEvent, TrainProgress};
pub use formats::{FormatCounts, grammars, masks};
pub use groups::{GroupParts, GroupRewards};
pub use health::{Alarm, Health};
pub use in_flight::FILE as IN_FLIGHT;
pub use keep::Decided;
pub use late::{After, InboxScores, Late, LateConfig, LateScores, Look, Settled, Shelf, settle};
pub use learner::{EmbeddedLearner, LearnerConfig, PolicyConfig, RowSink};
pub use parallel::{COMMAND as WORKER_COMMAND, WorkerGroup, work};
pub use ports::{
    Earlier as InFlightOf, Given, GroupScores, Learner, RolloutReading, Rollouts, SampleSource,
    ScoredGroup, StoredEpisode, Waker, Wanted, WeightsTransport,
};
pub use record::{
    AdmissionRecord, DIVERGENCE_ALARM, EpisodeStats, EvalRecord, StepRecord, TokenSummary, Totals,
    divergence,
};
pub use rollouts::{BOARD, ChangedParts, EngineRollouts, LONGEST, RolloutParts, TurnSchedule};
pub use rows::{Rows, by_group};
pub use schedule::{Draw, shuffled};
pub use score_records::completed;
pub use scoring_models::{ReferenceWeights, ScoringModels};
pub use sinew_algo::{Interval, Percentiles, Spread};
pub use sinew_rollout::Waits;
pub use state::{RunStore, Samples, SavedState};
pub use status::{BEHIND, Counted, SampleStatus, UNSCORED};
pub use verdict::{Course, FAILING, Judgement, Process, Verdict};
