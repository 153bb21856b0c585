//! Episodes that earlier sessions left: those in flight, and those that a changed reward scores anew.

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
    /// Keeps the outcomes of episodes that were scored anew, or from outside, with what is committed of the
    /// step: the store has the scores of before, and later ones may come. An update is done again from the
    /// outcomes that it was made of.
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
