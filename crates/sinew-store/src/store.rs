//! The port that every trace store implements.
//!
//! [`TraceStore`] is implemented by [`crate::MemoryStore`] and [`crate::DiskStore`]; both pass one
//! conformance suite. Everything else here is plain data that both share.

use crate::error::StoreError;
use crate::score::{MAX_SCORE_BATCH, ScoreRecord, ScoreRefused};
use serde::{Deserialize, Serialize};
use sinew_types::{EpisodeEnd, EpisodeId, GroupId, TaskId, TokenKind, Trace};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::ops::RangeInclusive;

/// Most episodes that one page lists.
pub const MAX_PAGE: usize = 10_000;

/// Whether a commit changed anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CommitOutcome {
    /// It was stored by this call.
    New,
    /// The id was committed before; what was stored first stays.
    Duplicate,
}

/// Position in a listing: the commit sequence number of the last episode seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cursor(pub u64);

/// Filter of episodes, which are listed in commit order. `None` matches everything.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Filter {
    /// [`EpisodeSummary::draw`] within this range; the other ranges are inclusive, too.
    pub draws: Option<RangeInclusive<u64>>,
    /// Trained by one of these optimizer updates.
    pub updates: Option<RangeInclusive<u64>>,
    /// One of these.
    pub among: Option<BTreeSet<EpisodeId>>,
    /// Exactly this purpose, such as `train`.
    pub purpose: Option<String>,
    /// Only episodes with this `success` of their outcome.
    pub success: Option<bool>,
    /// Episodes of this group.
    pub group: Option<GroupId>,
    /// Only episodes that are, or are not, in a trained batch.
    pub trained: Option<bool>,
    /// Exactly this task type.
    pub task_kind: Option<String>,
    /// Only episodes of this environment, as [`sinew_types::Trace::environment`] names it.
    pub env: Option<String>,
    /// Only episodes with a score but without success, and those that the system failed.
    pub failed: bool,
    /// Some token was sampled by one of these policy versions, or by versions around them.
    pub versions: Option<RangeInclusive<u64>>,
    /// Number of sampled turns.
    pub turns: Option<RangeInclusive<u32>>,
    /// Number of the turn that was its last, from 1: where it failed, if it did.
    pub at_turn: Option<u32>,
    /// Only episodes that ended this way.
    pub end: Option<EndKind>,
    /// Least and most total reward, of episodes with a score.
    pub reward: Option<RangeInclusive<f64>>,
    /// Ended before this time, in seconds since 1970.
    pub ended_before: Option<f64>,
    /// Only episodes sampled by versions below this one; episodes without sampled tokens do not fit.
    pub below_version: Option<u64>,
    /// Only episodes of one of these environments, by name, in another version than the one given here.
    /// Episodes of unknown version do not match.
    pub env_changed: Option<BTreeMap<String, String>>,
    /// Only the first of matching episodes with equal task, tokens and messages.
    pub unique: bool,
    /// Also what gc removed: it has a listing, and no trace.
    pub removed: bool,
    /// Start after this one.
    pub after: Option<Cursor>,
    /// Most episodes to return, up to [`MAX_PAGE`]; 0 means 100.
    pub limit: usize,
}

impl Filter {
    /// Whether it asks for what [`crate::facets`] have.
    pub(crate) fn asks_facets(&self) -> bool {
        let named = self.env.is_some() || self.at_turn.is_some() || self.versions.is_some();
        named || self.below_version.is_some() || self.unique || self.env_changed.is_some()
    }

    /// The number of rows of a page.
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

/// An episode without its tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpisodeSummary {
    /// Its place in the listing; 0 before it is committed.
    pub cursor: Cursor,
    pub episode: EpisodeId,
    /// Its episodes are compared.
    pub group: GroupId,
    pub task: TaskId,
    /// Type of the task, by which success is split.
    pub task_kind: String,
    /// Number of the draw within its purpose; of traces of formats 1 and 2 the training step.
    pub draw: u64,
    /// `train`, `eval-before` and so on.
    pub purpose: String,
    /// Total: outcome and process rewards; no score, but 0, if it is `unscored`.
    pub reward: f64,
    pub success: bool,
    /// It has no score: neither a success nor a failure.
    #[serde(default)]
    pub unscored: bool,
    pub end: EndKind,
    /// Sampled nodes.
    pub turns: u32,
    /// Tokens that the policy drew.
    pub sampled_tokens: u64,
    /// Seconds since 1970; NaN if it is not known.
    pub started_unix_s: f64,
    /// Wall time from the start of its environment to its score.
    pub total_s: f64,
    /// The batch that trained it.
    pub trained_in: Option<String>,
    /// The optimizer update of that batch.
    pub update: Option<u64>,
}

impl EpisodeSummary {
    /// The summary of a trace that is about to be committed.
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

/// [`EpisodeEnd`] without its details.
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

    /// The number in the index. -1 is an episode of which only a mark is known.
    pub(crate) fn code(self) -> i64 {
        match self {
            Self::Terminated => 0,
            Self::Truncated => 1,
            Self::Failed => 2,
        }
    }

    /// The inverse of `code`.
    pub(crate) fn from_code(code: i64) -> Option<Self> {
        [Self::Terminated, Self::Truncated, Self::Failed]
            .into_iter()
            .find(|k| k.code() == code)
    }
}

/// One page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Page {
    /// Page of at most [`Filter::limit`] episodes.
    pub episodes: Vec<EpisodeSummary>,
    /// Give this as [`Filter::after`] for the next page; `None`: there is none.
    pub next: Option<Cursor>,
}

/// Scores in the order in which they came.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScorePage {
    pub scores: Vec<ScoreRecord>,
    /// Give this for the next page. It holds as long as the store is open.
    pub end: Cursor,
}

/// One optimizer update: what it trained, what it left out, and what the caller ties to it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainedBatch {
    /// Unique name of the update, such as `s00042`.
    pub batch: String,
    /// Number of the update, from 1.
    pub step: u64,
    /// Episodes in the order of the batch.
    pub episodes: Vec<EpisodeId>,
    /// Left out, with the reason.
    pub dropped: BTreeMap<EpisodeId, String>,
    /// Not looked at.
    pub detail: serde_json::Value,
}

impl TrainedBatch {
    /// A batch that left nothing out.
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
    /// Episodes that can be read.
    pub episodes: u64,
    /// Successes among the readable episodes; `failed` and `sampled_tokens` count those, too.
    pub successes: u64,
    pub failed: u64,
    /// Episodes that some update trained, whether or not they can still be read.
    pub trained: u64,
    /// Updates.
    pub batches: u64,
    /// Episodes that gc removed; their ids stay known.
    pub collected: u64,
    pub sampled_tokens: u64,
    /// Bytes on the medium, without the index.
    pub bytes: u64,
}

/// Episodes that gc may remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GcPolicy {
    /// Episodes that an earlier optimizer update trained go.
    pub before_update: u64,
    /// Episodes that no update trained stay; otherwise all of them go.
    pub keep_untrained: bool,
}

/// Counts of removed things.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcReport {
    /// Traces that were removed.
    pub episodes: u64,
    /// Bytes of segment files that became free, less those of copies.
    pub bytes: u64,
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

/// Refuses more scores than a call may bring.
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

/// Result of a second commit of a batch.
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

/// Keeps finished episodes. Calls block and may be made from any thread.
pub trait TraceStore: Send + Sync + fmt::Debug {
    /// Stores all of `traces` or, on an error, none. Durable before it returns, with one
    /// synchronization for the whole batch. Idempotent by episode id.
    fn commit_batch(&self, traces: &[Trace]) -> Result<Vec<CommitOutcome>, StoreError>;

    /// Stores one trace; see [`TraceStore::commit_batch`].
    fn commit(&self, trace: &Trace) -> Result<CommitOutcome, StoreError> {
        let committed = self.commit_batch(std::slice::from_ref(trace))?;
        Ok(committed
            .first()
            .copied()
            .unwrap_or(CommitOutcome::Duplicate))
    }

    /// The trace of an episode; `None` if it never was or gc removed it.
    fn get(&self, episode: &EpisodeId) -> Result<Option<Trace>, StoreError>;

    /// Episodes in commit order.
    fn list(&self, filter: &Filter) -> Result<Page, StoreError>;

    /// Records an update in one transaction. The record is durable before the call returns. The call is
    /// idempotent by the batch's name. It is refused if an episode that it trained is unknown or was trained
    /// in another batch. `again` replaces the earlier record of that name.
    fn commit_update(
        &self,
        update: &TrainedBatch,
        again: bool,
    ) -> Result<CommitOutcome, StoreError>;

    /// All trained batches, in the order in which they were marked.
    fn trained_batches(&self) -> Result<Vec<TrainedBatch>, StoreError>;

    /// Counts and sizes of the store.
    fn stats(&self) -> Result<StoreStats, StoreError>;

    /// Seconds that callers have waited for writes to become durable, summed over all callers since the store
    /// was opened; 0 for a store in memory.
    fn waited_s(&self) -> f64 {
        0.0
    }

    /// Stores scores of episodes that can be read. They are durable before the call returns, with one
    /// synchronization for all of them. Each is accepted or refused separately; a record that is already
    /// stored, to the last field, is a duplicate. The limit is [`crate::MAX_SCORE_BATCH`] per call.
    fn put_scores(
        &self,
        records: &[ScoreRecord],
    ) -> Result<Vec<Result<CommitOutcome, ScoreRefused>>, StoreError>;

    /// All scores of an episode, in the order in which they came; see [`crate::in_force`].
    fn scores(&self, episode: &EpisodeId) -> Result<Vec<ScoreRecord>, StoreError>;

    /// Up to `limit` (at most [`MAX_PAGE`]) scores that came after `after`.
    fn scores_after(&self, after: Cursor, limit: usize) -> Result<ScorePage, StoreError>;

    /// Episodes whose [`sinew_types::Origin::external`] is this, in commit order, at most `limit`.
    fn named(&self, external: &str, limit: usize) -> Result<Vec<EpisodeId>, StoreError>;

    /// Removes traces with their scores. Their ids stay known, so that none is committed or trained again.
    /// Unknown and removed episodes are skipped.
    fn remove(&self, episodes: &[EpisodeId]) -> Result<GcReport, StoreError>;

    /// Removes what a policy names, as [`TraceStore::remove`] does.
    fn gc(&self, policy: GcPolicy) -> Result<GcReport, StoreError>;
}
