//! Finds the stored episodes that a collection no longer needs, because no later session reads their traces.

use sinew_orchestrator::PipelineError;
use sinew_store::{EpisodeSummary, Filter, MAX_PAGE, TraceStore, summaries};
use sinew_types::GroupId;
use std::collections::{HashMap, HashSet};

/// Groups whose members all ended with a score.
///
/// A session counts these from the index, also if their traces were removed. It requests all members of any
/// other group: a reward may be missing, and a member that the system failed has another attempt.
#[derive(Clone, Debug, Default)]
pub struct ScoredGroups(HashSet<GroupId>);

impl ScoredGroups {
    /// The whole groups of a store, of `size` members each.
    ///
    /// # Errors
    /// Fails if the store does.
    pub fn groups(store: &dyn TraceStore, size: usize) -> Result<Self, PipelineError> {
        // Members that were seen; none once one of them is without a score.
        let mut seen: HashMap<GroupId, Option<usize>> = HashMap::new();
        let filter = Filter {
            removed: true,
            limit: MAX_PAGE,
            ..Filter::default()
        };
        for e in summaries(store, filter) {
            let e = e.map_err(PipelineError::system)?;
            let members = seen.entry(e.group).or_insert(Some(0));
            let scored = e.end != sinew_store::EndKind::Failed && !e.unscored;
            *members = members.filter(|_| scored).map(|n| n + 1);
        }
        let whole = seen
            .into_iter()
            .filter(|(_, n)| n.is_some_and(|n| n >= size));
        Ok(Self(whole.map(|(group, _)| group).collect()))
    }

    /// Whether a collection is done with an episode.
    pub fn is_done_with(&self, e: &EpisodeSummary) -> bool {
        self.0.contains(&e.group)
    }
}
