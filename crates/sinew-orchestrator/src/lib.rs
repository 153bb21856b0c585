//! The decisions of a training run: which tasks are drawn, which episodes are run again, scored and trained,
//! and when weights are published, saved and measured.
//!
//! [`PipelineCore`] takes [`Event`]s and returns [`Command`]s. `sinew-pipeline` carries out the commands, and
//! `sinew-sim` does the same in virtual time. All output about a run goes over one [`Bus`] of typed
//! [`RunEvent`]s; the [`StepRecord`]s among them are the lines of `metrics.jsonl`.
//!
//! Invariants: the core reads no clock, no network and no model; the drawn tasks are a function of the run's
//! seed and the curriculum's state; no episode is lost, and none is trained twice.

mod core;
mod curriculum;
mod error;
mod event;
mod gain;
pub mod health;
mod late;
mod outcome;
mod record;
mod retention;
mod rows;
mod schedule;
mod score_records;
mod status;
mod task_draws;
mod verdict;

pub use core::{
    Command, CoreConfig, CoreState, EpisodeResult, EpisodeSlots, EvalConfig, EvalSet, EvalTime,
    Event, Goal, GroupProbe, LateGroups, OpenDraws, Overlap, PipelineCore, RunCounts, SampleKind,
    SlotActions, StopReason, TaskOutcome, TaskSampling, UpdateCommit, task_outcome,
};
pub use curriculum::{ByType, Curriculum, EnvironmentShare, TaskShares};
pub use error::PipelineError;
pub use event::{
    BOARD, Bus, CollectProgress, LONGEST, Phase, Recorder, RolloutProgress, RunEvent, TrainProgress,
};
pub use gain::{HeldOutGain, HeldOutScores};
pub use health::{Alarm, Health};
pub use late::{CollectRequest, CollectedGroups, LateConfig, StaleGroups, WaitingGroups, settle};
pub use outcome::{RunOutcome, SampleCounts};
pub use record::{
    AdmissionRecord, DIVERGENCE_ALARM, EpisodeStats, EvalRecord, StepRecord, TokenSummary, Totals,
    branches, divergence, joins,
};
pub use retention::CommittedEpisodes;
pub use rows::{FormatCounts, Rows, by_group};
pub use schedule::{Draw, attempt_id, draw_of, eval_episodes, shuffled, train_groups};
pub use score_records::{Member, completed, keep as keep_scores};
pub use sinew_algo::{Interval, Percentiles, Spread};
pub use sinew_rollout::WaitTimes;
pub use status::{BEHIND, EQUAL, SUSPICIOUS, SampleCount, SampleStatus, UNSCORED};
pub use task_draws::TaskDraws;
pub use verdict::{FAILING, Judgement, Process, Verdict, VerdictInput};
