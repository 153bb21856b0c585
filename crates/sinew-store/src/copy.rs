//! Copies a store into another one: from a folder into a database, and back.
//!
//! Every step may be repeated: what the target has already is a duplicate. A copy that was cut short is taken
//! up where it ended, by the same call. At the end both stores are read and compared.

use crate::backend::prepare;
use crate::error::StoreError;
use crate::store::{Cursor, EndKind, EpisodeSummary, Filter, MAX_PAGE, TraceStore, TrainedBatch};
use crate::summaries::summaries;
use serde::Serialize;
use sinew_types::{
    EpisodeEnd, EpisodeId, FailureKind, Limit, NO_PARENT, Node, Origin, Outcome, Provenance,
    TRACE_FORMAT_VERSION, Timing, TokenKind, Trace,
};
use std::collections::{BTreeMap, BTreeSet};

/// Traces that are read and committed at once.
const CHUNK: usize = 64;
/// Scores of one call.
const SCORES: usize = 2_000;
/// Owners that a target may be behind.
const MAX_OWNERS: u64 = 100_000;

/// Part of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyPhase {
    Episodes,
    Scores,
    Updates,
    /// Both stores are read and compared.
    Check,
}

/// Progress of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CopyProgress {
    pub phase: CopyPhase,
    /// Records that are done in this phase.
    pub done: u64,
    /// Records of this phase; 0 if they are not counted before.
    pub total: u64,
}

/// Contents of both stores after a copy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CopyReport {
    /// Episodes with a trace, and those that are only known.
    pub episodes: u64,
    pub removed: u64,
    pub scores: u64,
    pub updates: u64,
    /// Number of the newest owner.
    pub fence: u64,
    /// Episodes that this call has brought.
    pub copied: u64,
    /// BLAKE3 of everything in order.
    pub checksum: String,
}

/// Errors of a copy. What was copied before stays, and another call continues.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The target belongs to another run.
    #[error(
        "the target has {what} that the source does not have; copy into a store that is empty or holds an \
         earlier part of this copy"
    )]
    OtherData { what: String },
    /// The stores differ after the copy.
    #[error(
        "after the copy the stores differ: {from} in the source, {to} in the target; is another process \
         writing one of them?"
    )]
    Differs { from: String, to: String },
}

/// Copies everything that `to` lacks, and compares the stores. Of removed episodes the numbers of turns and
/// tokens are not copied.
///
/// # Errors
/// [`CopyError`].
pub fn copy(
    from: &dyn TraceStore,
    to: &dyn TraceStore,
    tell: &mut dyn FnMut(CopyProgress),
) -> Result<CopyReport, CopyError> {
    check_target(from, to)?;
    let copied = episodes(from, to, tell)?;
    scores(from, to, tell)?;
    updates(from, to, tell)?;
    let (source, target) = (report(from, tell)?, report(to, tell)?);
    if source != target {
        return Err(CopyError::Differs {
            from: format!("{source:?}"),
            to: format!("{target:?}"),
        });
    }
    Ok(CopyReport { copied, ..target })
}

/// All episodes, removed ones too.
fn every() -> Filter {
    Filter {
        removed: true,
        limit: MAX_PAGE,
        ..Filter::default()
    }
}

/// Those of some episodes that a store knows.
fn known(store: &dyn TraceStore, ids: &[EpisodeId]) -> Result<BTreeSet<EpisodeId>, StoreError> {
    let filter = Filter {
        among: Some(ids.iter().cloned().collect()),
        ..every()
    };
    summaries(store, filter)
        .map(|s| s.map(|s| s.episode))
        .collect()
}

/// Refuses a target with episodes or updates that the source lacks.
fn check_target(from: &dyn TraceStore, to: &dyn TraceStore) -> Result<(), CopyError> {
    let there: Result<Vec<EpisodeId>, _> = summaries(to, every())
        .map(|s| s.map(|s| s.episode))
        .collect();
    for chunk in there?.chunks(MAX_PAGE) {
        let both = known(from, chunk)?;
        if let Some(other) = chunk.iter().find(|id| !both.contains(id)) {
            return Err(CopyError::OtherData {
                what: format!("episode {other}"),
            });
        }
    }
    let own: BTreeMap<String, TrainedBatch> = from
        .trained_batches()?
        .into_iter()
        .map(|b| (b.batch.clone(), b))
        .collect();
    for batch in to.trained_batches()? {
        if own.get(&batch.batch) != Some(&batch) {
            return Err(CopyError::OtherData {
                what: format!("update {}", batch.batch),
            });
        }
    }
    let (fence, newest) = (to.newest_fence()?, from.newest_fence()?);
    if fence > newest {
        return Err(CopyError::OtherData {
            what: format!("owner {fence}"),
        });
    }
    Ok(())
}

/// Copies the episodes in their order; how many the target lacked.
fn episodes(
    from: &dyn TraceStore,
    to: &dyn TraceStore,
    tell: &mut dyn FnMut(CopyProgress),
) -> Result<u64, CopyError> {
    let stats = from.stats()?;
    let total = stats.episodes + stats.collected;
    let (mut done, mut copied) = (0, 0);
    let mut chunk = Vec::with_capacity(CHUNK);
    for summary in summaries(from, every()) {
        chunk.push(summary?);
        if chunk.len() == CHUNK {
            copied += commit_missing(from, to, &chunk)?;
            done += chunk.len() as u64;
            chunk.clear();
            tell(CopyProgress {
                phase: CopyPhase::Episodes,
                done,
                total,
            });
        }
    }
    copied += commit_missing(from, to, &chunk)?;
    tell(CopyProgress {
        phase: CopyPhase::Episodes,
        done: done + chunk.len() as u64,
        total,
    });
    Ok(copied)
}

/// Commits those episodes of a chunk that the target lacks.
fn commit_missing(
    from: &dyn TraceStore,
    to: &dyn TraceStore,
    chunk: &[EpisodeSummary],
) -> Result<u64, CopyError> {
    let ids: Vec<EpisodeId> = chunk.iter().map(|s| s.episode.clone()).collect();
    let there = known(to, &ids)?;
    let (mut traces, mut gone) = (Vec::new(), Vec::new());
    for summary in chunk {
        let trace = from.get(&summary.episode)?;
        if trace.is_none() {
            // Removed again if an earlier copy ended between the two.
            gone.push(summary.episode.clone());
        }
        if !there.contains(&summary.episode) {
            traces.push(trace.unwrap_or_else(|| placeholder(summary)));
        }
    }
    if !traces.is_empty() {
        to.commit_batch(&traces)?;
    }
    if !gone.is_empty() {
        to.remove(&gone)?;
    }
    Ok(traces.len() as u64)
}

/// A trace with the row of a removed episode, to be removed at once.
fn placeholder(summary: &EpisodeSummary) -> Trace {
    let prompt = Node::given(NO_PARENT, 0, TokenKind::Prompt, Vec::new(), Vec::new());
    Trace {
        format_version: TRACE_FORMAT_VERSION,
        episode: summary.episode.clone(),
        group: summary.group.clone(),
        task: summary.task.clone(),
        task_kind: summary.task_kind.clone(),
        origin: Origin {
            draw: summary.draw,
            purpose: summary.purpose.clone(),
            ..Origin::default()
        },
        provenance: Provenance::default(),
        nodes: vec![prompt],
        outcome: Outcome {
            reward: summary.reward,
            success: summary.success,
            unscored: summary.unscored,
            ..Outcome::default()
        },
        end: match summary.end {
            EndKind::Terminated => EpisodeEnd::Terminated,
            EndKind::Truncated => EpisodeEnd::Truncated {
                limit: Limit::Turns,
            },
            EndKind::Failed => EpisodeEnd::Failed {
                kind: FailureKind::Engine,
                message: String::new(),
            },
        },
        timing: Timing {
            started_unix_s: summary.started_unix_s,
            total_s: summary.total_s,
            ..Timing::default()
        },
        ignored: BTreeMap::new(),
    }
}

fn scores(
    from: &dyn TraceStore,
    to: &dyn TraceStore,
    tell: &mut dyn FnMut(CopyProgress),
) -> Result<(), CopyError> {
    let (mut after, mut done) = (Cursor::default(), 0);
    loop {
        let page = from.scores_after(after, SCORES)?;
        if page.scores.is_empty() {
            return Ok(());
        }
        if let Some(refused) = to
            .put_scores(&page.scores)?
            .into_iter()
            .find_map(Result::err)
        {
            return Err(CopyError::Differs {
                from: "a score".into(),
                to: refused.to_string(),
            });
        }
        done += page.scores.len() as u64;
        after = page.end;
        tell(CopyProgress {
            phase: CopyPhase::Scores,
            done,
            total: 0,
        });
    }
}

/// Commits the updates in the order of their owners. The target's owners are numbered like the source's.
fn updates(
    from: &dyn TraceStore,
    to: &dyn TraceStore,
    tell: &mut dyn FnMut(CopyProgress),
) -> Result<(), CopyError> {
    let mut updates = from.trained_batches()?;
    updates.sort_by_key(|b| b.fence);
    let there: BTreeSet<String> = to.trained_batches()?.into_iter().map(|b| b.batch).collect();
    let total = updates.len() as u64;
    for (done, update) in updates.iter().enumerate() {
        if !there.contains(&update.batch) {
            own_until(to, update.fence)?;
            to.commit_update(update, false)?;
        }
        tell(CopyProgress {
            phase: CopyPhase::Updates,
            done: done as u64 + 1,
            total,
        });
    }
    own_until(to, from.newest_fence()?)?;
    Ok(())
}

/// Takes numbers of owners until the newest one is `fence`.
fn own_until(store: &dyn TraceStore, fence: u64) -> Result<(), StoreError> {
    let mut newest = store.newest_fence()?;
    if fence.saturating_sub(newest) > MAX_OWNERS {
        return Err(StoreError::Argument {
            field: "fence",
            value: fence,
            allowed: format!("at most {MAX_OWNERS} above the target's, {newest}"),
        });
    }
    while newest < fence {
        newest = store.take_fence()?;
    }
    Ok(())
}

/// Reads a whole store.
fn report(
    store: &dyn TraceStore,
    tell: &mut dyn FnMut(CopyProgress),
) -> Result<CopyReport, CopyError> {
    let stats = store.stats()?;
    let total = stats.episodes + stats.collected;
    let mut report = CopyReport {
        fence: store.newest_fence()?,
        ..CopyReport::default()
    };
    let mut hash = blake3::Hasher::new();
    for summary in summaries(store, every()) {
        let mut summary = summary?;
        summary.cursor = Cursor::default();
        match store.get(&summary.episode)? {
            Some(trace) => {
                hash.update(&prepare(&trace, u32::MAX)?.payload);
                report.episodes += 1;
            }
            None => {
                (summary.turns, summary.sampled_tokens) = (0, 0);
                report.removed += 1;
            }
        }
        put(&mut hash, &summary);
        let done = report.episodes + report.removed;
        if done.is_multiple_of(CHUNK as u64) || done == total {
            tell(CopyProgress {
                phase: CopyPhase::Check,
                done,
                total,
            });
        }
    }
    let mut after = Cursor::default();
    loop {
        let page = store.scores_after(after, SCORES)?;
        if page.scores.is_empty() {
            break;
        }
        report.scores += page.scores.len() as u64;
        page.scores.iter().for_each(|score| put(&mut hash, score));
        after = page.end;
    }
    let mut updates = store.trained_batches()?;
    updates.sort_by(|a, b| a.batch.cmp(&b.batch));
    report.updates = updates.len() as u64;
    updates.iter().for_each(|update| put(&mut hash, update));
    report.checksum = hash.finalize().to_hex().to_string();
    Ok(report)
}

/// Adds a record to a checksum. NaN and infinities are null.
fn put<T: Serialize>(hash: &mut blake3::Hasher, record: &T) {
    let bytes = serde_json::to_vec(record).unwrap_or_default();
    hash.update(&(bytes.len() as u64).to_le_bytes());
    hash.update(&bytes);
}
