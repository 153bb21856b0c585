//! Groups whose rewards come from outside, between their last episode and their rows.

use super::sync::Driver;
use super::work::lock;
use crate::core::Event;
use crate::error::PipelineError;
use crate::event::{Phase, RunEvent};
use crate::late::Look;
use sinew_types::{EpisodeId, Trace};
use std::collections::BTreeSet;

/// Groups of a step at most, as multiples of those that it runs: its own, and as many from before.
const GROUPS_PER_TASK: usize = 2;

impl Driver {
    /// Lets groups wait, takes the scores that came, and gives the groups that can be trained.
    pub(super) fn settle(
        &mut self,
        step: u64,
        ids: &[Vec<EpisodeId>],
        wait: bool,
    ) -> Result<Event, PipelineError> {
        let groups: Vec<Vec<Trace>> = ids.iter().map(|group| self.take(group)).collect();
        self.begin_step();
        let (Some(shelf), Some(late)) = (&mut self.shelf, &mut self.p.late) else {
            return Err(PipelineError::system("no source of late rewards was given"));
        };
        groups.iter().for_each(|group| shelf.add(group));
        if wait {
            let groups = shelf.waiting();
            self.p
                .bus
                .emit(RunEvent::Phase(Phase::Waiting { step, groups }))?;
        }
        let store = self.p.store.traces.as_ref();
        late.scores.take(store, wait)?;
        let most = GROUPS_PER_TASK * self.p.config.core.tasks_per_step;
        let look = Look {
            now_s: late.scores.now_s(),
            version: lock(&self.p.learner).version().0,
            most,
            given: (0, 0),
            names: &BTreeSet::new(),
        };
        let found = shelf.look(store, look)?;
        let waiting = shelf.waiting();
        let scored = found.groups.iter().flatten();
        let alone = found.groups.iter().filter(|g| g.len() == 1).flatten();
        let alone = alone.filter_map(|t| Some((t.task.as_str().to_owned(), t.score()?)));
        let alone = alone.collect();
        let outcomes = scored.map(|t| (t.episode.clone(), t.outcome.clone()));
        self.step.outcomes.extend(outcomes);
        self.step.left_out.extend(found.dropped.clone());
        Ok(Event::Settled {
            groups: self.keep(found.groups),
            dropped: found.dropped,
            alone,
            waiting,
            room: found.room,
        })
    }
}
