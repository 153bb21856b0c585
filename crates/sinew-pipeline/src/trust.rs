//! Finds the episodes of a step that are left out because of a flag that the recipe names.
//!
//! The usual values come from the step itself and from the last episodes of the steps before, which the
//! curriculum keeps. So they follow from the commits: an update that is done again leaves the same episodes
//! out.

use sinew_algo::trust::{Sighting, Sightings, Suspicion, TrustConfig, Usual, suspicions};
use sinew_types::{EpisodeId, Trace};
use std::collections::BTreeMap;

/// Returns the episodes to leave out, each with the first of its flags that the recipe names, and the step's
/// contribution to the usual values. If the recipe names no flag, nothing is checked.
pub(crate) fn look(
    config: &TrustConfig,
    groups: &[Vec<Trace>],
    earlier: &Sightings,
) -> (BTreeMap<EpisodeId, Suspicion>, Vec<Sighting>) {
    if !config.excludes() {
        return (BTreeMap::new(), Vec::new());
    }
    let mut usual = Usual::default();
    usual.remember(earlier);
    groups.iter().flatten().for_each(|t| usual.add(t));
    let flagged = groups.iter().flatten().filter_map(|trace| {
        let mut found = suspicions(trace, &usual, &config.protected).into_iter();
        let first = found.find(|s| config.exclude.contains(&s.flag))?;
        Some((trace.episode.clone(), first))
    });
    let sightings = groups.iter().flatten().map(Sighting::of);
    (flagged.collect(), sightings.collect())
}
