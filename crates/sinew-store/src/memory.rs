//! [`MemoryStore`]: a store in memory, for tests and for runs that keep no data.
//!
//! It follows the same rules as the disk store (duplicates, conflicts, limits, known ids after garbage
//! collection); one conformance suite tests both. Every call locks the whole store.

use crate::error::{StoreError, guard};
use crate::facets::{self, Facets};
use crate::score::{MAX_SCORES, ScoreRecord, ScoreRefused};
use crate::store::{
    self, CommitOutcome, Cursor, EndKind, EpisodeSummary, Filter, GcPolicy, GcReport, MAX_PAGE,
    Page, ScorePage, StoreStats, TraceStore, TrainedBatch,
};
use sinew_types::{EpisodeId, Trace};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::RangeInclusive;
use std::sync::Mutex;

/// Store of traces in memory.
#[derive(Debug)]
pub struct MemoryStore {
    /// Limit on [`Inner::bytes`].
    max_bytes: u64,
    inner: Mutex<Inner>,
}

/// State under the lock.
#[derive(Debug, Default)]
struct Inner {
    /// Episodes in commit order; the cursor of an entry is its index plus one.
    episodes: Vec<Entry>,
    /// Index into `episodes` by id; removed episodes stay known.
    by_id: HashMap<EpisodeId, usize>,
    /// Batches in the order of their first marks.
    batches: Vec<TrainedBatch>,
    /// Number of the newest owner.
    fence: u64,
    /// Scores by sequence number in order of arrival, from 1.
    scores: BTreeMap<u64, ScoreRecord>,
    /// Sequence numbers of the scores of each episode.
    scored: HashMap<EpisodeId, Vec<u64>>,
    /// Sequence number of the newest score.
    newest_score: u64,
    /// Approximate size of the stored traces and scores, by [`size`] and [`SCORE_BYTES`].
    bytes: u64,
}

/// Approximate bytes of a score.
const SCORE_BYTES: u64 = 160;

/// One committed episode.
#[derive(Debug)]
struct Entry {
    /// Summary, which is kept after the trace was removed.
    summary: EpisodeSummary,
    /// The trace; `None` after garbage collection.
    trace: Option<Trace>,
    bytes: u64,
}

impl MemoryStore {
    /// Creates an empty store for at most `max_bytes` (estimated) of tokens, log-probabilities and text.
    pub fn new(max_bytes: u64) -> Self {
        Self {
            max_bytes,
            inner: Mutex::default(),
        }
    }
}

/// Returns the size of a trace in bytes: tokens and log-probabilities exactly, text and overhead estimated.
fn size(trace: &Trace) -> u64 {
    let node = |n: &sinew_types::Node| {
        let text = n.messages.iter().map(|m| m.content.text_len() + 64);
        96 + 4 * (n.tokens.len() + n.logprobs.len()) + text.sum::<usize>()
    };
    512 + trace.nodes.iter().map(node).sum::<usize>() as u64
}

impl Inner {
    /// Whether a record has to be stored; `false` if it exists.
    fn is_new(&self, record: &ScoreRecord) -> Result<bool, ScoreRefused> {
        let episode = || record.episode.clone();
        let Some(&at) = self.by_id.get(&record.episode) else {
            return Err(ScoreRefused::UnknownEpisode { episode: episode() });
        };
        if self.episodes[at].trace.is_none() {
            return Err(ScoreRefused::Collected { episode: episode() });
        }
        let known = self.scores_of(&record.episode);
        if known.contains(&record) {
            return Ok(false);
        }
        if known.len() >= MAX_SCORES {
            return Err(ScoreRefused::TooMany { episode: episode() });
        }
        Ok(true)
    }

    /// Returns the scores of an episode in order of arrival.
    fn scores_of(&self, episode: &EpisodeId) -> Vec<&ScoreRecord> {
        let places = self.scored.get(episode).into_iter().flatten();
        places.filter_map(|seq| self.scores.get(seq)).collect()
    }

    /// Removes the traces that `may_go` selects, with their scores.
    fn remove(&mut self, may_go: impl Fn(&EpisodeSummary) -> bool) -> GcReport {
        let mut report = GcReport::default();
        let mut gone = HashSet::new();
        for entry in &mut self.episodes {
            if may_go(&entry.summary) && entry.trace.take().is_some() {
                report.episodes += 1;
                report.bytes += entry.bytes;
                gone.insert(entry.summary.episode.clone());
            }
        }
        let before = self.scores.len();
        self.scores.retain(|_, s| !gone.contains(&s.episode));
        self.scored.retain(|episode, _| !gone.contains(episode));
        report.bytes += SCORE_BYTES * (before - self.scores.len()) as u64;
        self.bytes -= report.bytes;
        report
    }
}

impl TraceStore for MemoryStore {
    fn commit_batch(&self, traces: &[Trace]) -> Result<Vec<CommitOutcome>, StoreError> {
        for trace in traces {
            trace.validate()?;
            crate::sqlite_int::signed("draw", trace.origin.draw)?;
        }
        let mut inner = guard(&self.inner)?;
        let new = |t: &&Trace| !inner.by_id.contains_key(&t.episode);
        let needed = traces.iter().filter(new).map(size).sum::<u64>();
        if inner.bytes + needed > self.max_bytes {
            return Err(StoreError::Full {
                used: inner.bytes,
                needed,
                limit: self.max_bytes,
            });
        }
        let mut out = Vec::with_capacity(traces.len());
        for trace in traces {
            if inner.by_id.contains_key(&trace.episode) {
                out.push(CommitOutcome::Duplicate);
                continue;
            }
            let index = inner.episodes.len();
            inner.by_id.insert(trace.episode.clone(), index);
            inner.bytes += size(trace);
            inner.episodes.push(Entry {
                summary: EpisodeSummary {
                    cursor: Cursor(index as u64 + 1),
                    ..EpisodeSummary::of(trace)
                },
                trace: Some(trace.clone()),
                bytes: size(trace),
            });
            out.push(CommitOutcome::New);
        }
        Ok(out)
    }

    fn get(&self, episode: &EpisodeId) -> Result<Option<Trace>, StoreError> {
        let inner = guard(&self.inner)?;
        let found = inner.by_id.get(episode).map(|&i| &inner.episodes[i]);
        Ok(found.and_then(|e| e.trace.clone()))
    }

    fn list(&self, filter: &Filter) -> Result<Page, StoreError> {
        let limit = filter.checked_limit()?;
        let inner = guard(&self.inner)?;
        let from = filter.after.unwrap_or_default();
        // The choice of the first match must not depend on where the page begins.
        let whole = Filter {
            after: None,
            ..filter.clone()
        };
        let mut seen = HashSet::new();
        let mut first = |e: &&Entry| {
            let content = e.trace.as_ref().map(facets::content);
            !filter.unique || content.is_some_and(|content| seen.insert(content))
        };
        let matches = |e: &&Entry| {
            (filter.removed || e.trace.is_some())
                && fits_row(&whole, &e.summary)
                && fits_facets(filter, e.trace.as_ref())
                && first(e)
                && e.summary.cursor > from
        };
        let found = inner.episodes.iter().filter(matches).take(limit + 1);
        let mut episodes: Vec<EpisodeSummary> = found.map(|e| e.summary.clone()).collect();
        let more = episodes.len() > limit;
        episodes.truncate(limit);
        Ok(Page {
            next: episodes.last().filter(|_| more).map(|e| e.cursor),
            episodes,
        })
    }

    fn commit_update(
        &self,
        update: &TrainedBatch,
        again: bool,
    ) -> Result<CommitOutcome, StoreError> {
        crate::sqlite_int::signed("step", update.step)?;
        store::check_batch(&update.batch, &update.episodes)?;
        let mut inner = guard(&self.inner)?;
        store::check_fence(update.fence, inner.fence)?;
        let known = inner.batches.iter().position(|b| b.batch == update.batch);
        if let Some(at) = known.filter(|_| !again) {
            return store::same_batch(&inner.batches[at], update);
        }
        let mut found = Vec::new();
        for episode in &update.episodes {
            let unknown = || StoreError::UnknownEpisode {
                episode: episode.clone(),
            };
            let &i = inner.by_id.get(episode).ok_or_else(unknown)?;
            let trained_in = inner.episodes[i].summary.trained_in.as_ref();
            if let Some(trained_in) = trained_in.filter(|b| **b != update.batch) {
                return Err(StoreError::TrainedTwice {
                    episode: episode.clone(),
                    trained_in: trained_in.clone(),
                    batch: update.batch.clone(),
                });
            }
            found.push(i);
        }
        for entry in inner.episodes.iter_mut().filter(|_| known.is_some()) {
            let trained_in = &mut entry.summary.trained_in;
            if trained_in.as_ref() == Some(&update.batch) {
                *trained_in = None;
                entry.summary.update = None;
            }
        }
        for i in found {
            let summary = &mut inner.episodes[i].summary;
            summary.trained_in = Some(update.batch.clone());
            summary.update = Some(update.step);
        }
        match known {
            Some(at) => inner.batches[at] = update.clone(),
            None => inner.batches.push(update.clone()),
        }
        Ok(CommitOutcome::New)
    }

    fn take_fence(&self) -> Result<u64, StoreError> {
        let mut inner = guard(&self.inner)?;
        inner.fence += 1;
        Ok(inner.fence)
    }

    fn newest_fence(&self) -> Result<u64, StoreError> {
        Ok(guard(&self.inner)?.fence)
    }

    fn trained_batches(&self) -> Result<Vec<TrainedBatch>, StoreError> {
        Ok(guard(&self.inner)?.batches.clone())
    }

    fn stats(&self) -> Result<StoreStats, StoreError> {
        let inner = guard(&self.inner)?;
        let mut stats = StoreStats {
            batches: inner.batches.len() as u64,
            bytes: inner.bytes,
            ..StoreStats::default()
        };
        for entry in &inner.episodes {
            let s = &entry.summary;
            stats.trained += u64::from(s.trained_in.is_some());
            if entry.trace.is_none() {
                stats.collected += 1;
                continue;
            }
            stats.episodes += 1;
            stats.successes += u64::from(s.success);
            stats.failed += u64::from(s.end == EndKind::Failed);
            stats.sampled_tokens += s.sampled_tokens;
        }
        Ok(stats)
    }

    fn put_scores(
        &self,
        records: &[ScoreRecord],
    ) -> Result<Vec<Result<CommitOutcome, ScoreRefused>>, StoreError> {
        store::check_scores(records)?;
        let mut inner = guard(&self.inner)?;
        let needed = SCORE_BYTES * records.len() as u64;
        if inner.bytes + needed > self.max_bytes {
            return Err(StoreError::Full {
                used: inner.bytes,
                needed,
                limit: self.max_bytes,
            });
        }
        let mut out = Vec::with_capacity(records.len());
        for record in records {
            let checked = record.checked();
            let taken = checked.and_then(|r| inner.is_new(&r).map(|new| (r, new)));
            out.push(taken.map(|(record, new)| {
                if !new {
                    return CommitOutcome::Duplicate;
                }
                inner.newest_score += 1;
                inner.bytes += SCORE_BYTES;
                let seq = inner.newest_score;
                let places = inner.scored.entry(record.episode.clone());
                places.or_default().push(seq);
                inner.scores.insert(seq, record);
                CommitOutcome::New
            }));
        }
        Ok(out)
    }

    fn scores(&self, episode: &EpisodeId) -> Result<Vec<ScoreRecord>, StoreError> {
        let inner = guard(&self.inner)?;
        Ok(inner.scores_of(episode).into_iter().cloned().collect())
    }

    fn scores_after(&self, after: Cursor, limit: usize) -> Result<ScorePage, StoreError> {
        let inner = guard(&self.inner)?;
        let later = inner.scores.range(after.0.saturating_add(1)..);
        let mut page = ScorePage {
            scores: Vec::new(),
            end: after,
        };
        for (seq, score) in later.take(limit.clamp(1, MAX_PAGE)) {
            page.scores.push(score.clone());
            page.end = Cursor(*seq);
        }
        Ok(page)
    }

    fn named(&self, external: &str, limit: usize) -> Result<Vec<EpisodeId>, StoreError> {
        let inner = guard(&self.inner)?;
        let traces = inner.episodes.iter().filter_map(|e| e.trace.as_ref());
        let named = traces.filter(|t| t.origin.external.as_deref() == Some(external));
        let ids = named.map(|t| t.episode.clone());
        Ok(ids.take(limit.clamp(1, MAX_PAGE)).collect())
    }

    fn remove(&self, episodes: &[EpisodeId]) -> Result<GcReport, StoreError> {
        let named: HashSet<&EpisodeId> = episodes.iter().collect();
        Ok(guard(&self.inner)?.remove(|s| named.contains(&s.episode)))
    }

    fn gc(&self, policy: GcPolicy) -> Result<GcReport, StoreError> {
        let may_go = |s: &EpisodeSummary| match s.update {
            Some(update) => update < policy.before_update,
            None => !policy.keep_untrained,
        };
        Ok(guard(&self.inner)?.remove(may_go))
    }
}

/// Whether an episode matches the filter's conditions on facets. A removed trace has no facets.
fn fits_facets(filter: &Filter, trace: Option<&Trace>) -> bool {
    if !filter.asks_facets() {
        return true;
    }
    let Some(trace) = trace else { return false };
    let facets = Facets::of(trace);
    let overlaps = |asked: &RangeInclusive<u64>| {
        let within = |(first, last)| last >= *asked.start() && first <= *asked.end();
        facets.versions.is_some_and(within)
    };
    let below = |version: u64| facets.versions.is_some_and(|(_, last)| last < version);
    let changed = |now: &BTreeMap<String, String>| {
        let known = now.get(&facets.env).zip(facets.env_version.as_ref());
        known.is_some_and(|(now, then)| now != then)
    };
    filter.env.as_ref().is_none_or(|env| *env == facets.env)
        && filter.at_turn.is_none_or(|turn| turn == facets.last_turn)
        && filter.versions.as_ref().is_none_or(overlaps)
        && filter.below_version.is_none_or(below)
        && filter.env_changed.as_ref().is_none_or(changed)
}

/// Whether an episode matches the filter's conditions on its row.
fn fits_row(filter: &Filter, s: &EpisodeSummary) -> bool {
    let updates = filter.updates.as_ref();
    let reward = filter.reward.as_ref();
    let ended = s.started_unix_s + s.total_s;
    s.cursor > filter.after.unwrap_or_default()
        && filter.task_kind.as_ref().is_none_or(|k| *k == s.task_kind)
        && filter.turns.as_ref().is_none_or(|r| r.contains(&s.turns))
        && (!filter.failed || s.end == EndKind::Failed || (!s.success && !s.unscored))
        && filter.draws.as_ref().is_none_or(|r| r.contains(&s.draw))
        && updates.is_none_or(|r| s.update.is_some_and(|u| r.contains(&u)))
        && filter
            .among
            .as_ref()
            .is_none_or(|ids| ids.contains(&s.episode))
        && filter.purpose.as_ref().is_none_or(|p| *p == s.purpose)
        && filter.success.is_none_or(|v| v == s.success && !s.unscored)
        && filter.group.as_ref().is_none_or(|g| *g == s.group)
        && filter.trained.is_none_or(|t| t == s.trained_in.is_some())
        && filter.end.is_none_or(|e| e == s.end)
        && reward.is_none_or(|r| !s.unscored && r.contains(&s.reward))
        && filter.ended_before.is_none_or(|time| ended < time)
}
