//! Listings of episodes with the outcomes that count: those of the traces, and scores that came later.
//!
//! The command line and the dashboard list episodes through here, so that a filter means the same in both.

use sinew_algo::trust::{Suspicion, Usual, suspicions};
use sinew_orchestrator::{LateConfig, settle};
use sinew_store::{Cursor, EndKind, EpisodeSummary, Filter, StoreError, StoreReader};
use sinew_types::{EpisodeId, Trace};
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Outcome of an episode whose reward has not come yet.
pub const WAITS: &str = "waits for its reward";

/// Rows that a query reads at least, where conditions are met here.
const SCANNED: usize = 1000;

/// An episode of a listing with the outcome that counts, and whether it waits for its reward.
pub type Row = (EpisodeSummary, bool);

/// An episode of a listing with its flags.
pub type Flagged = (Row, Vec<Suspicion>);

/// Reasons why there is no listing.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// A filter that the store refuses.
    #[error("{0}")]
    Filter(StoreError),
    /// The store cannot be read.
    #[error("{0}")]
    Store(StoreError),
}

/// The outcomes that count of a run's stored episodes, with the scores of groups and from outside.
#[derive(Debug)]
pub struct Outcomes<'a> {
    store: &'a StoreReader,
    /// Config of rewards from outside, if the recipe waits for some.
    late: Option<LateConfig>,
    /// Episodes that updates left out, with the reason; read when the first is requested.
    left_out: OnceCell<BTreeMap<EpisodeId, String>>,
}

impl<'a> Outcomes<'a> {
    /// Creates the outcomes of a store; `late` comes from the run's recipe.
    pub fn new(store: &'a StoreReader, late: Option<LateConfig>) -> Self {
        Self {
            store,
            late,
            left_out: OnceCell::new(),
        }
    }

    /// Sets the outcome of a trace to the one that counts. Returns whether the trace waits for its reward.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn settle(&self, trace: &mut Trace) -> Result<bool, ListError> {
        let records = self.store.scores(&trace.episode);
        let records = records.map_err(ListError::Store)?;
        if !settle(trace, &records, self.late.as_ref()) {
            return Ok(false);
        }
        let reason = self.left_out()?.get(&trace.episode);
        let waits = reason.is_none();
        let reason = reason.map_or(WAITS, String::as_str);
        trace.outcome.unscored_reason = Some(reason.to_owned());
        Ok(waits)
    }

    /// A row of a listing. The trace is read where its outcome that counts may differ from that of the index.
    fn listed(&self, e: &EpisodeSummary) -> Result<Row, ListError> {
        let mut e = e.clone();
        if !e.unscored && self.late.is_none() {
            return Ok((e, false));
        }
        let Some(mut trace) = self.store.get(&e.episode).map_err(ListError::Store)? else {
            return Ok((e, false));
        };
        let waits = self.settle(&mut trace)?;
        e.unscored = trace.outcome.unscored;
        e.reward = trace.total_reward();
        e.success = trace.outcome.success && !e.unscored;
        Ok((e, waits))
    }

    /// A page of a listing by the outcomes that count, and the cursor of its last row if more follow.
    /// Conditions on the outcome are met here: the index has only the outcomes of traces.
    ///
    /// # Errors
    /// If the store cannot be read or refuses the filter.
    pub fn page(&self, filter: &Filter) -> Result<(Vec<Row>, Option<Cursor>), ListError> {
        let mut wider = Filter {
            success: None,
            failed: false,
            reward: None,
            ..filter.clone()
        };
        let all = wider == *filter;
        if !all {
            // Few may fit: fewer queries read more rows each.
            wider.limit = wider.limit.max(SCANNED);
        }
        let mut rows: Vec<Row> = Vec::new();
        loop {
            let page = self.store.list(&wider).map_err(ListError::Filter)?;
            for e in &page.episodes {
                let (e, waits) = self.listed(e)?;
                if !fits(&e, filter) {
                    continue;
                }
                if rows.len() == filter.limit {
                    let last = rows.last().map(|(e, _)| e.cursor);
                    return Ok((rows, last));
                }
                rows.push((e, waits));
            }
            match page.next {
                Some(next) if !all => wider.after = Some(next),
                next => return Ok((rows, next)),
            }
        }
    }

    /// The suspicious episodes among those of a filter, each with its flags, in the order of the store, and
    /// the cursor of the last row if more follow. An episode is compared with all of the run: every trace is
    /// read.
    ///
    /// # Errors
    /// If the store cannot be read or refuses the filter.
    pub fn suspicious(
        &self,
        filter: &Filter,
        protected: &[String],
    ) -> Result<(Vec<Flagged>, Option<Cursor>), ListError> {
        let mut usual = Usual::default();
        let all = Filter::default();
        self.each(&all, &mut |_, trace| {
            usual.add(trace);
            Ok(true)
        })?;
        let (mut rows, mut more): (Vec<Flagged>, bool) = (Vec::new(), false);
        self.each(filter, &mut |e, trace| {
            let found = suspicions(trace, &usual, protected);
            if found.is_empty() {
                return Ok(true);
            }
            more = rows.len() == filter.limit;
            if !more {
                rows.push((self.listed(e)?, found));
            }
            Ok(!more)
        })?;
        let last = rows.last().filter(|_| more).map(|((e, _), _)| e.cursor);
        Ok((rows, last))
    }

    /// Calls `look` for every trace of a filter, with the outcome that counts, until it returns false.
    fn each(
        &self,
        filter: &Filter,
        look: &mut dyn FnMut(&EpisodeSummary, &Trace) -> Result<bool, ListError>,
    ) -> Result<(), ListError> {
        let mut page = Filter {
            limit: SCANNED,
            ..filter.clone()
        };
        loop {
            let (rows, next) = self.page(&page)?;
            for (e, _) in &rows {
                let trace = self.store.get(&e.episode).map_err(ListError::Store)?;
                let Some(mut trace) = trace else { continue };
                self.settle(&mut trace)?;
                if !look(e, &trace)? {
                    return Ok(());
                }
            }
            match next {
                Some(next) => page.after = Some(next),
                None => return Ok(()),
            }
        }
    }

    fn left_out(&self) -> Result<&BTreeMap<EpisodeId, String>, ListError> {
        if let Some(known) = self.left_out.get() {
            return Ok(known);
        }
        let batches = self.store.trained_batches().map_err(ListError::Store)?;
        let all = batches.into_iter().flat_map(|b| b.dropped).collect();
        Ok(self.left_out.get_or_init(|| all))
    }
}

/// Whether an episode meets the conditions of a filter on its outcome. One without a score is neither a
/// success nor a failure, and is within no range.
fn fits(e: &EpisodeSummary, filter: &Filter) -> bool {
    let success = |wanted: bool| !e.unscored && e.success == wanted;
    let failed = success(false) || e.end == EndKind::Failed;
    let range = filter.reward.as_ref();
    filter.success.is_none_or(success)
        && (failed || !filter.failed)
        && range.is_none_or(|range| !e.unscored && range.contains(&e.reward))
}

/// A text that is not a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    #[error("allowed: a number such as 3, or a range such as 2..5")]
    Number,
    #[error("the first number is above the last")]
    Order,
}

/// A number, or a range such as `2..5`, both ends included.
///
/// # Errors
/// If the text is neither, or the range is empty.
pub fn range<T: FromStr + Copy + PartialOrd>(text: &str) -> Result<RangeInclusive<T>, RangeError> {
    let number = |text: &str| text.parse::<T>().map_err(|_| RangeError::Number);
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    let (first, last) = (number(first)?, number(last)?);
    if first <= last {
        Ok(first..=last)
    } else {
        Err(RangeError::Order)
    }
}
