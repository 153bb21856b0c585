//! Reads a whole listing, page by page, as one iterator.

use crate::error::StoreError;
use crate::store::{EpisodeSummary, Filter, TraceStore};

/// Returns the summaries of all episodes that `filter` selects, in the order of [`TraceStore::list`]. At most
/// [`Filter::limit`] of them are in memory. The iterator ends after the first error.
pub fn summaries(
    store: &dyn TraceStore,
    mut filter: Filter,
) -> impl Iterator<Item = Result<EpisodeSummary, StoreError>> {
    let mut page = Vec::new().into_iter();
    let mut more = true;
    std::iter::from_fn(move || {
        loop {
            if let Some(summary) = page.next() {
                return Some(Ok(summary));
            }
            if !std::mem::take(&mut more) {
                return None;
            }
            match store.list(&filter) {
                Ok(found) => {
                    more = found.next.is_some();
                    filter.after = found.next;
                    page = found.episodes.into_iter();
                }
                Err(e) => return Some(Err(e)),
            }
        }
    })
}
