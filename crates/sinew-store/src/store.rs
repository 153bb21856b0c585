//! The trait that every trace store implements.
//!
//! [`TraceStore`] is implemented by [`crate::MemoryStore`] and [`crate::DiskStore`]; both pass one
//! conformance suite. Everything else in this module is plain data that both use.

use crate::error::StoreError;
use crate::score::{MAX_SCORE_BATCH, ScoreRecord, ScoreRefused};
use serde::{Deserialize, Serialize};
use sinew_types::{EpisodeEnd, EpisodeId, GroupId, TaskId, TokenKind, Trace};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::ops::RangeInclusive;

/// Maximum number of episodes in a page.
pub const MAX_PAGE: usize = 10_000;
/// Maximum number of names in a [`SweepReport`].
const MAX_SWEPT_NAMES: usize = 1_000;

/// Result of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CommitOutcome {
    /// This call stored the record.
    New,
    /// The id was already committed; the first record stays.
    Duplicate,
}

/// Position in a listing: the commit sequence number of the last episode seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cursor(pub u64);

/// Filter of episodes, which are listed in commit order. `None` matches everything.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Filter {
    /// Range of [`EpisodeSummary::draw`]. All ranges of a filter are inclusive.
    pub draws: Option<RangeInclusive<u64>>,
    /// Only episodes trained by these optimizer updates.
    pub updates: Option<RangeInclusive<u64>>,
    /// Only these episodes.
    pub among: Option<BTreeSet<EpisodeId>>,
    /// Only this purpose, such as `train`.
    pub purpose: Option<String>,
    /// Only episodes with this `success`.
    pub success: Option<bool>,
    /// Only episodes of this group.
    pub group: Option<GroupId>,
    /// Only episodes that are, or are not, in a trained batch.
    pub trained: Option<bool>,
    /// Only this task type.
    pub task_kind: Option<String>,
    /// Only episodes of this environment, as [`sinew_types::Trace::environment`] names it.
    pub env: Option<String>,
    /// Only episodes with a score but without success, and episodes that the system failed.
    pub failed: bool,
    /// Only episodes whose range of policy versions overlaps this range.
    pub versions: Option<RangeInclusive<u64>>,
    /// Only episodes with this number of sampled turns.
    pub turns: Option<RangeInclusive<u32>>,
    /// Only episodes whose last turn has this number, from 1.
    pub at_turn: Option<u32>,
    /// Only episodes that ended this way.
    pub end: Option<EndKind>,
    /// Only episodes with a total reward in this range; unscored ones never match.
    pub reward: Option<RangeInclusive<f64>>,
    /// Only episodes that ended before this time, in seconds since 1970.
    pub ended_before: Option<f64>,
    /// Only episodes sampled by versions below this one; episodes without sampled tokens never match.
    pub below_version: Option<u64>,
    /// Only episodes whose environment, by name, has another version than the one given here. Episodes of
    /// unknown version never match.
    pub env_changed: Option<BTreeMap<String, String>>,
    /// Only the first of the matching episodes with equal task, tokens and messages.
    pub unique: bool,
    /// Whether to include episodes that garbage collection removed; they have a summary but no trace.
    pub removed: bool,
    /// Start after this one.
    pub after: Option<Cursor>,
    /// Maximum number of episodes to return, up to [`MAX_PAGE`]; 0 means 100.
    pub limit: usize,
}

impl Filter {
    /// Whether the filter has conditions on [`crate::facets`].
    pub(crate) fn asks_facets(&self) -> bool {
        let named = self.env.is_some() || self.at_turn.is_some() || self.versions.is_some();
        named || self.below_version.is_some() || self.unique || self.env_changed.is_some()
    }

    /// Returns the number of rows of a page.
    pub(crate) fn checked_limit(&self) -> Result<usize, StoreError> {
        match self.limit {
            0 => Ok(100),
            n if n <= MAX_PAGE => Ok(n),
            n => Err(StoreError::Argument {
                field: "limit",
                value: n as u64,
                allowed: format!(
                    "0 to {MAX_PAGE}; the next page begins `after` the last one's end"
                ),
            }),
        }
    }
}

/// Summary of an episode, without its tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpisodeSummary {
    /// Position in the listing; 0 before it is committed.
    pub cursor: Cursor,
    pub episode: EpisodeId,
    /// Group of episodes that are compared with each other.
    pub group: GroupId,
    pub task: TaskId,
    /// Type of the task, by which success is split.
    pub task_kind: String,
    /// Number of the draw within its purpose; for traces of formats 1 and 2, the training step.
    pub draw: u64,
    /// Purpose: `train`, `eval-before` and so on.
    pub purpose: String,
    /// Total reward: outcome and process rewards. It is not a score if `unscored` is set.
    pub reward: f64,
    pub success: bool,
    /// Whether the episode has no score, so that it is neither a success nor a failure.
    #[serde(default)]
    pub unscored: bool,
    pub end: EndKind,
    /// Number of sampled nodes.
    pub turns: u32,
    /// Number of tokens that the policy sampled.
    pub sampled_tokens: u64,
    /// Start in seconds since 1970; NaN if unknown.
    pub started_unix_s: f64,
    /// Wall time in seconds from the start of the environment to the score.
    pub total_s: f64,
    /// The batch that trained it.
    pub trained_in: Option<String>,
    /// The optimizer update of that batch.
    pub update: Option<u64>,
}

impl EpisodeSummary {
    /// Creates the summary of a trace that is about to be committed.
    pub(crate) fn of(trace: &Trace) -> Self {
        let sampled = trace.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
        Self {
            cursor: Cursor::default(),
            episode: trace.episode.clone(),
            group: trace.group.clone(),
            task: trace.task.clone(),
            task_kind: trace.task_kind.clone(),
            draw: trace.origin.draw,
            purpose: trace.origin.purpose.clone(),
            reward: trace.total_reward(),
            success: trace.outcome.success && !trace.outcome.unscored,
            unscored: trace.outcome.unscored,
            end: EndKind::of(&trace.end),
            turns: sampled.count() as u32,
            sampled_tokens: trace.sampled_tokens() as u64,
            started_unix_s: trace.timing.started_unix_s,
            total_s: trace.timing.total_s,
            trained_in: None,
            update: None,
        }
    }
}

/// Kind of an [`EpisodeEnd`], without details.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndKind {
    /// The task ended it.
    Terminated,
    /// A limit ended it.
    Truncated,
    /// The system failed it.
    Failed,
}

impl EndKind {
    pub(crate) fn of(end: &EpisodeEnd) -> Self {
        match end {
            EpisodeEnd::Terminated => Self::Terminated,
            EpisodeEnd::Truncated { .. } => Self::Truncated,
            EpisodeEnd::Failed { .. } => Self::Failed,
        }
    }

    /// `terminated`, `truncated` or `failed`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Terminated => "terminated",
            Self::Truncated => "truncated",
            Self::Failed => "failed",
        }
    }

    /// Returns the number in the index. -1 is an episode of which only a mark is known.
    pub(crate) fn code(self) -> i64 {
        match self {
            Self::Terminated => 0,
            Self::Truncated => 1,
            Self::Failed => 2,
        }
    }

    /// Inverse of `code`.
    pub(crate) fn from_code(code: i64) -> Option<Self> {
        [Self::Terminated, Self::Truncated, Self::Failed]
            .into_iter()
            .find(|k| k.code() == code)
    }
}

/// One page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Page {
    /// Episodes, at most [`Filter::limit`].
    pub episodes: Vec<EpisodeSummary>,
    /// Cursor for the next page, as [`Filter::after`]; `None` on the last page.
    pub next: Option<Cursor>,
}

/// A page of scores in order of arrival.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScorePage {
    pub scores: Vec<ScoreRecord>,
    /// Cursor for the next page. It is valid while the store is open.
    pub end: Cursor,
}

/// One optimizer update: the trained episodes, the left-out ones, and data of the caller.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainedBatch {
    /// Unique name of the update, such as `s00042`.
    pub batch: String,
    /// Number of the update, from 1.
    pub step: u64,
    /// Episodes in the order of the batch.
    pub episodes: Vec<EpisodeId>,
    /// Left-out episodes, with the reason.
    pub dropped: BTreeMap<EpisodeId, String>,
    /// Number of the owner that commits it, from [`TraceStore::take_fence`]; 0 without an owner.
    #[serde(default)]
    pub fence: u64,
    /// Data of the caller, which the store does not interpret.
    pub detail: serde_json::Value,
}

impl TrainedBatch {
    /// Creates a batch without left-out episodes and without an owner.
    pub fn new(batch: &str, step: u64, episodes: &[EpisodeId]) -> Self {
        Self {
            batch: batch.to_owned(),
            step,
            episodes: episodes.to_vec(),
            ..Self::default()
        }
    }
}

/// Counts and sizes of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStats {
    /// Number of readable episodes.
    pub episodes: u64,
    /// Number of successes among the readable episodes; `failed` and `sampled_tokens` count only these, too.
    pub successes: u64,
    pub failed: u64,
    /// Number of episodes that some update trained, readable or not.
    pub trained: u64,
    /// Number of updates.
    pub batches: u64,
    /// Number of episodes that garbage collection removed; their ids stay known.
    pub collected: u64,
    pub sampled_tokens: u64,
    /// Bytes on disk, without the index.
    pub bytes: u64,
}

/// Selection of episodes for garbage collection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GcPolicy {
    /// Episodes trained by an earlier optimizer update than this are removed.
    pub before_update: u64,
    /// Whether untrained episodes are kept; otherwise all of them are removed.
    pub keep_untrained: bool,
}

/// Result of a removal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcReport {
    /// Number of removed traces.
    pub episodes: u64,
    /// Bytes of segment files that became free, minus the bytes of copies.
    pub bytes: u64,
}

/// Selection of objects for [`TraceStore::sweep`].
#[derive(Clone, Copy, Debug)]
pub struct Sweep<'a> {
    /// Only objects that were written before this time, in seconds since 1970.
    pub before_unix_s: f64,
    /// Episodes that count as removed: those that a dry run leaves in the store.
    pub gone: &'a [EpisodeId],
    /// Whether the objects are only listed.
    pub dry_run: bool,
}

/// Objects that no episode refers to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SweepReport {
    pub objects: u64,
    pub bytes: u64,
    /// Names of the first thousand.
    pub names: Vec<String>,
}

impl SweepReport {
    /// Counts an object.
    pub fn add(&mut self, name: String, bytes: u64) {
        self.objects += 1;
        self.bytes += bytes;
        if self.names.len() < MAX_SWEPT_NAMES {
            self.names.push(name);
        }
    }
}

/// Refuses a batch that names an episode twice.
pub(crate) fn check_batch(batch: &str, episodes: &[EpisodeId]) -> Result<(), StoreError> {
    let mut seen = HashSet::new();
    match episodes.iter().find(|e| !seen.insert(*e)) {
        Some(episode) => Err(StoreError::TrainedTwice {
            episode: episode.clone(),
            trained_in: batch.to_owned(),
            batch: batch.to_owned(),
        }),
        None => Ok(()),
    }
}

/// Refuses more scores than a call may contain.
pub(crate) fn check_scores(records: &[ScoreRecord]) -> Result<(), StoreError> {
    if records.len() <= MAX_SCORE_BATCH {
        return Ok(());
    }
    Err(StoreError::Argument {
        field: "scores",
        value: records.len() as u64,
        allowed: format!("up to {MAX_SCORE_BATCH} at a time"),
    })
}

/// Refuses a commit of owner `own` unless `newest` is its number. Without any owner, both are 0.
pub(crate) fn check_fence(own: u64, newest: u64) -> Result<(), StoreError> {
    match own.cmp(&newest) {
        Ordering::Equal => Ok(()),
        Ordering::Less => Err(StoreError::Fenced { own, newest }),
        Ordering::Greater => Err(StoreError::Argument {
            field: "fence",
            value: own,
            allowed: format!("a number that was taken; the newest is {newest}"),
        }),
    }
}

/// Returns the result of committing a batch name again.
pub(crate) fn same_batch(
    known: &TrainedBatch,
    given: &TrainedBatch,
) -> Result<CommitOutcome, StoreError> {
    if known.step == given.step && known.episodes == given.episodes {
        return Ok(CommitOutcome::Duplicate);
    }
    Err(StoreError::BatchConflict {
        batch: known.batch.clone(),
        step: known.step,
    })
}

/// Store of finished episodes. Calls block and may be made from any thread.
pub trait TraceStore: Send + Sync + fmt::Debug {
    /// Stores all of `traces` or, on an error, none. They are durable when the call returns, with one fsync
    /// for the whole batch. The call is idempotent by episode id.
    fn commit_batch(&self, traces: &[Trace]) -> Result<Vec<CommitOutcome>, StoreError>;

    /// Stores one trace; see [`TraceStore::commit_batch`].
    fn commit(&self, trace: &Trace) -> Result<CommitOutcome, StoreError> {
        let committed = self.commit_batch(std::slice::from_ref(trace))?;
        Ok(committed
            .first()
            .copied()
            .unwrap_or(CommitOutcome::Duplicate))
    }

    /// Returns the trace of an episode; `None` if it is unknown or was removed.
    fn get(&self, episode: &EpisodeId) -> Result<Option<Trace>, StoreError>;

    /// Episodes in commit order.
    fn list(&self, filter: &Filter) -> Result<Page, StoreError>;

    /// Records an update in one transaction. The record is durable before the call returns. The call is
    /// idempotent by the batch's name. It is refused if an episode that it trained is unknown or was trained
    /// in another batch. `again` replaces the earlier record of that name.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] if a newer owner than [`TrainedBatch::fence`] exists, even if the same record
    /// is stored. Episodes of an older owner are accepted: they are valid data.
    fn commit_update(
        &self,
        update: &TrainedBatch,
        again: bool,
    ) -> Result<CommitOutcome, StoreError>;

    /// Makes the caller the owner of the store: returns a number that is one above the newest, and that no
    /// other caller gets. It is durable before the call returns. The first number is 1. See [`crate::own`].
    fn take_fence(&self) -> Result<u64, StoreError>;

    /// The newest number that was taken; 0 if there is none.
    fn newest_fence(&self) -> Result<u64, StoreError>;

    /// All trained batches, in the order in which they were marked.
    fn trained_batches(&self) -> Result<Vec<TrainedBatch>, StoreError>;

    /// Returns the batches of an update; there are several if their marks differ.
    fn batches_of(&self, step: u64) -> Result<Vec<TrainedBatch>, StoreError> {
        let mut batches = self.trained_batches()?;
        batches.retain(|batch| batch.step == step);
        Ok(batches)
    }

    /// Counts and sizes of the store.
    fn stats(&self) -> Result<StoreStats, StoreError>;

    /// Seconds that callers have waited for writes to become durable, summed over all callers since the store
    /// was opened; 0 for a store in memory.
    fn waited_s(&self) -> f64 {
        0.0
    }

    /// Stores scores of readable episodes. They are durable when the call returns, with one fsync for all of
    /// them. Each score is accepted or refused separately; a record that equals a stored one in all fields is
    /// a duplicate. The limit is [`crate::MAX_SCORE_BATCH`] per call.
    fn put_scores(
        &self,
        records: &[ScoreRecord],
    ) -> Result<Vec<Result<CommitOutcome, ScoreRefused>>, StoreError>;

    /// Returns all scores of an episode in order of arrival; see [`crate::in_force`].
    fn scores(&self, episode: &EpisodeId) -> Result<Vec<ScoreRecord>, StoreError>;

    /// Returns up to `limit` (at most [`MAX_PAGE`]) scores that arrived after `after`.
    fn scores_after(&self, after: Cursor, limit: usize) -> Result<ScorePage, StoreError>;

    /// Returns the episodes whose [`sinew_types::Origin::external`] equals `external`, in commit order, at
    /// most `limit`.
    fn named(&self, external: &str, limit: usize) -> Result<Vec<EpisodeId>, StoreError>;

    /// Removes traces with their scores. Their ids stay known, so that none is committed or trained again.
    /// Unknown and removed episodes are skipped.
    fn remove(&self, episodes: &[EpisodeId]) -> Result<GcReport, StoreError>;

    /// Removes the episodes that a policy selects, like [`TraceStore::remove`].
    fn gc(&self, policy: GcPolicy) -> Result<GcReport, StoreError>;

    /// Deletes objects of the store, such as files of a bucket, that no readable episode refers to. A store
    /// that keeps all bytes itself has none. A call that was cut short is taken up by another.
    fn sweep(&self, _sweep: &Sweep<'_>) -> Result<SweepReport, StoreError> {
        Ok(SweepReport::default())
    }
}
