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
mod core;
mod cross;
mod curriculum;
mod dataset;
mod draws;
mod drivers;
mod error;
mod event;
mod files;
mod formats;
mod gold;
mod groups;
mod health;
mod intake;
mod late;
mod learner;
mod ledger;
mod live_feed;
mod live_late;
mod live_source;
mod parallel;
mod pool_client;
mod pool_source;
mod ports;
mod queue_source;
mod record;
mod rollouts;
mod rows;
mod schedule;
mod score;
mod score_records;
mod scoring_models;
mod state;
mod status;

pub use config::PipelineConfig;
pub use core::{
    Command, CoreConfig, CoreState, Ended as EndedEpisode, EvalConfig, EvalSet, Event, Follows,
    Goal, OpenDraws, Overlap, PipelineCore, Roster, RunCounts, Samples as SampleKind, Showed, Stop,
    TaskSampling, UpdateCommit, When, showed,
};
pub use cross::{CrossPolicy, CrossPolicyConfig};
pub use curriculum::{ByType, Curriculum, EnvironmentShare, TaskShares};
pub use dataset::{Dataset, DatasetConfig, DatasetSource};
pub use draws::TaskDraws;
pub use drivers::{Ended, Pipeline, SharedLearner, run};
pub use error::PipelineError;
pub use event::{Bus, CollectProgress, Phase, Recorder, RolloutProgress, RunEvent, TrainProgress};
pub use formats::{FormatCounts, grammars};
pub use gold::{GoldRuns, GoldSource, unused as unused_gold};
pub use groups::{GroupParts, GroupRewards};
pub use health::{Alarm, Health};
pub use intake::{FinishedRollout, Intake, IntakeBatch, IntakeConfig, MAX_WAITING};
pub use late::{After, InboxScores, Late, LateConfig, LateScores, Look, Settled, Shelf, settle};
pub use learner::{EmbeddedLearner, LearnerConfig, PolicyConfig};
pub use live_feed::{LIVE, LiveRollouts};
pub use live_source::LiveSource;
pub use parallel::{COMMAND as WORKER_COMMAND, WorkerGroup, work};
pub use pool_client::PoolClient;
pub use pool_source::{PoolSource, PoolSourceConfig};
pub use ports::{
    Given, GroupScores, Learner, RolloutReading, Rollouts, SampleSource, ScoredGroup,
    StoredEpisode, Waker, Wanted, WeightsTransport,
};
pub use queue_source::{QueueSource, QueueSourceConfig};
pub use record::{
    AdmissionRecord, DIVERGENCE_ALARM, EpisodeStats, EvalRecord, StepRecord, TokenSummary, Totals,
    divergence,
};
pub use rollouts::{EngineRollouts, LONGEST, RolloutParts};
pub use schedule::Draw;
pub use score_records::completed;
pub use scoring_models::{ReferenceWeights, ScoringModels};
pub use sinew_rollout::Waits;
pub use state::{RunStore, Samples, SavedState};
pub use status::{Counted, SampleStatus};
