//! Which episodes of a step are left out because of a flag that the recipe names.
//!
//! What is usual is known from the step itself and from the last episodes of the steps before, which the
//! curriculum keeps. So it follows from the commits: an update that is done again leaves the same ones out.

use sinew_algo::trust::{Sighting, Sightings, Suspicion, TrustConfig, Usual, suspicions};
use sinew_types::{EpisodeId, Trace};
use std::collections::BTreeMap;

/// The episodes to leave out, each with the first of its flags that the recipe names, and what the step adds
/// to what is usual. Without a flag to leave out nothing is looked at.
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
