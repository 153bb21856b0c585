//! Ended episodes as rows of a queue, a group at a time.

use sinew_store::queue::{NewRow, PutOutcome, Queue, QueueError, episode_row, put_within};
use sinew_store::{Filter, MAX_PAGE, StoreError, TraceStore, summaries};
use sinew_types::{EpisodeEnd, EpisodeId, Trace};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Rows of one page when the queue is listed.
const PAGE: usize = 10_000;
/// Interval of checks whether to stop, while a full queue is waited for.
const LOOK: Duration = Duration::from_secs(1);

/// Result of putting a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedOutcome {
    /// This number of rows was added to the queue.
    New(usize),
    /// The queue already had it, or it has no episode that can be trained.
    Known,
    /// It was not added, because the producer has to stop.
    Stopped,
}

/// A producer of a queue.
#[derive(Debug)]
pub struct Feed {
    queue: Arc<dyn Queue>,
    source: String,
    /// Episodes without a reward wait for a scorer; else they are put with the reason that they have none.
    apart: bool,
    /// Keys of this producer that the queue has.
    known: BTreeSet<String>,
}

impl Feed {
    /// A producer with a name, in which its keys are unique. The rows that the queue has of it are listed
    /// once, so that a producer that resumes puts only the missing ones.
    ///
    /// # Errors
    /// If the queue cannot be read.
    pub fn new(queue: Arc<dyn Queue>, source: &str, apart: bool) -> Result<Self, StoreError> {
        let own = format!("{source}:");
        let (mut known, mut after) = (BTreeSet::new(), None);
        loop {
            let page = queue.rows(after, PAGE)?;
            after = page.last().map(|row| row.seq);
            let keys = page.iter().map(|row| &row.key);
            known.extend(keys.filter(|key| key.starts_with(&own)).cloned());
            if page.len() < PAGE {
                break;
            }
        }
        Ok(Self {
            queue,
            source: source.to_owned(),
            apart,
            known,
        })
    }

    /// Rows of this producer that the queue has.
    pub fn known(&self) -> usize {
        self.known.len()
    }

    /// Puts the episodes of an ended group, all or none, as soon as they fit. Episodes that the system failed
    /// are left out, since they are not trained. If the queue has any row of the group, it already has the
    /// whole group.
    ///
    /// # Errors
    /// If an episode cannot be encoded, is too large for the queue, or the queue cannot be reached.
    pub fn put(
        &mut self,
        group: &[Trace],
        stop: &dyn Fn() -> bool,
    ) -> Result<FeedOutcome, StoreError> {
        let whole = |t: &&Trace| !matches!(t.end, EpisodeEnd::Failed { .. });
        let traces: Vec<&Trace> = group.iter().filter(whole).collect();
        let size = u32::try_from(traces.len()).unwrap_or(u32::MAX);
        let rows = traces.into_iter().map(|trace| self.row(trace, size));
        let rows: Result<Vec<NewRow>, _> = rows.collect();
        self.put_rows(rows?, stop)
    }

    /// Puts an ended episode of a group with a given size. An episode that the system failed is put too,
    /// since its group would otherwise never be complete.
    ///
    /// # Errors
    /// If the queue cannot be reached or refuses the row.
    pub fn put_one(
        &mut self,
        trace: &Trace,
        group_size: u32,
        stop: &dyn Fn() -> bool,
    ) -> Result<FeedOutcome, StoreError> {
        let row = self.row(trace, group_size)?;
        self.put_rows(vec![row], stop)
    }

    /// Puts the episodes of a store that are missing, one by one; how many. Rows that are done and were
    /// forgotten are older than those that are known, and are not put again.
    ///
    /// # Errors
    /// If the queue cannot be reached or refuses a row, or the store cannot be read.
    pub fn restore(
        &mut self,
        store: &dyn TraceStore,
        group_size: u32,
        stop: &dyn Fn() -> bool,
    ) -> Result<usize, StoreError> {
        let (mut missing, mut met) = (Vec::new(), self.known.is_empty());
        let filter = Filter {
            limit: MAX_PAGE,
            ..Filter::default()
        };
        for summary in summaries(store, filter) {
            let episode = summary?.episode;
            let known = self.known.contains(&self.key(&episode));
            met |= known;
            missing.extend((met && !known).then_some(episode));
        }
        let mut put = 0;
        for episode in missing {
            let Some(trace) = store.get(&episode)? else {
                continue;
            };
            match self.put_one(&trace, group_size, stop)? {
                FeedOutcome::New(new) => put += new,
                FeedOutcome::Known => {}
                FeedOutcome::Stopped => break,
            }
        }
        Ok(put)
    }

    fn key(&self, episode: &EpisodeId) -> String {
        format!("{}:{episode}", self.source)
    }

    fn row(&self, trace: &Trace, group_size: u32) -> Result<NewRow, StoreError> {
        let scored = !(self.apart && trace.outcome.unscored);
        episode_row(&self.source, trace, group_size, scored)
    }

    /// Puts rows as soon as they fit, unless one of them is known.
    fn put_rows(
        &mut self,
        rows: Vec<NewRow>,
        stop: &dyn Fn() -> bool,
    ) -> Result<FeedOutcome, StoreError> {
        if rows.is_empty() || rows.iter().any(|row| self.known.contains(&row.key)) {
            return Ok(FeedOutcome::Known);
        }
        let mut waits = false;
        loop {
            match put_within(self.queue.as_ref(), &rows, LOOK) {
                Err(StoreError::Queue(QueueError::Full { .. })) if stop() => {
                    return Ok(FeedOutcome::Stopped);
                }
                Err(StoreError::Queue(error @ QueueError::Full { .. })) => {
                    if !std::mem::replace(&mut waits, true) {
                        tracing::warn!(%error, "episodes wait for room in the queue");
                    }
                }
                put => {
                    let new = put?.iter().filter(|p| **p == PutOutcome::New).count();
                    self.known.extend(rows.into_iter().map(|row| row.key));
                    return Ok(FeedOutcome::New(new));
                }
            }
        }
    }
}
