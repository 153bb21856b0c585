//! Episodes of earlier sessions: those in flight, and those that a changed reward scores again.

use super::sync::{Driver, Pipeline};
use crate::ports::ResumeCondition;
use sinew_orchestrator::{PipelineError, RunEvent, draw_of};
use sinew_types::Trace;

impl Pipeline {
    /// Lets episodes continue that were in flight when the session before ended. `live` is the version of the
    /// restored weights.
    pub(super) fn resume_episodes(&mut self, live: u64) -> Result<(), PipelineError> {
        let (named, _) = self.store.settled()?;
        let earlier = ResumeCondition {
            known: self.store.known_version(live)?,
            settled: &named.iter().filter_map(draw_of).collect(),
        };
        match self.rollouts.resume(&earlier)? {
            Some(warning) => self.bus.emit(RunEvent::Warning(warning)),
            None => Ok(()),
        }
    }
}

impl Driver {
    /// Stores the outcomes of rescored episodes, and of those scored from outside, with the commit of the
    /// step: the store has earlier scores, and later ones may arrive. A repeated update uses the outcomes
    /// that it was first made from.
    pub(super) fn note_rescored(&mut self, groups: &[Vec<Trace>]) {
        let outside = self.overlaps() && self.awaited.groups.is_some();
        for trace in groups.iter().flatten() {
            let rescored = self.episodes.rescored.remove(&trace.episode);
            self.step.record.rescored += usize::from(rescored);
            if rescored || outside {
                let outcome = trace.outcome.clone();
                self.step.outcomes.insert(trace.episode.clone(), outcome);
            }
        }
    }
}
