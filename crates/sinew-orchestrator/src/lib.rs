//! The decisions of a training run: what is drawn, run again, scored, trained, published, kept and measured.
//!
//! [`PipelineCore`] takes [`Event`]s and returns [`Command`]s; `sinew-pipeline` carries them out, `sinew-sim`
//! does so in virtual time. Everything that people and tools see of a run goes over one [`Bus`] of typed
//! [`RunEvent`]s, and its [`StepRecord`]s are the lines of `metrics.jsonl`.
//!
//! Invariants: the core reads no clock, no network and no model; what is drawn is a function of the run's
//! seed and the curriculum's state; no episode is lost and none is trained twice.

mod core;
mod curriculum;
mod draws;
mod error;
mod event;
pub mod health;
mod keep;
mod late;
mod outcome;
mod record;
mod rows;
mod schedule;
mod score_records;
mod status;
mod verdict;

pub use core::{
    Command, CoreConfig, CoreState, Decide, Ended as EndedEpisode, EvalConfig, EvalSet, Event,
    Follows, Goal, LateGroups, OpenDraws, Overlap, PipelineCore, Roster, RunCounts,
    Samples as SampleKind, Showed, Stop, TaskSampling, UpdateCommit, When, showed,
};
pub use curriculum::{ByType, Curriculum, EnvironmentShare, TaskShares};
pub use draws::TaskDraws;
pub use error::PipelineError;
pub use event::{
    BOARD, Bus, CollectProgress, LONGEST, Phase, Recorder, RolloutProgress, RunEvent, TrainProgress,
};
pub use health::{Alarm, Health};
pub use keep::Decided;
pub use late::{After, LateConfig, Look, Settled, Shelf, settle};
pub use outcome::{RunOutcome, SampleCounts};
pub use record::{
    AdmissionRecord, DIVERGENCE_ALARM, EpisodeStats, EvalRecord, StepRecord, TokenSummary, Totals,
    divergence, joins,
};
pub use rows::{FormatCounts, Rows, by_group};
pub use schedule::{Draw, attempt_id, draw_of, eval_episodes, shuffled, train_groups};
pub use score_records::{Member, completed, keep as keep_scores};
pub use sinew_algo::{Interval, Percentiles, Spread};
pub use sinew_rollout::Waits;
pub use status::{BEHIND, Counted, EQUAL, SUSPICIOUS, SampleStatus, UNSCORED};
pub use verdict::{Course, FAILING, Judgement, Process, Verdict};
