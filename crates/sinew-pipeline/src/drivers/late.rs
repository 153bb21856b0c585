//! Groups whose rewards come from outside, between their last episode and their rows.

use super::sync::Driver;
use super::work::lock;
use sinew_orchestrator::{Command, Event, Look, Phase, PipelineError, RunEvent, Shelf};
use sinew_types::{EpisodeId, Trace};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Groups of a step at most, as multiples of those that it runs: its own, and as many from before.
const GROUPS_PER_TASK: usize = 2;

/// Interval between two readings while episodes run or the learner works.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Part of the time that looks may take: a look reads the scores of all groups that wait.
const LOOKS_SHARE: u32 = 20;

impl Driver {
    /// Lets groups wait. If generation and training take turns, it also takes the scores that came, and gives
    /// the groups that can be trained.
    pub(super) fn settle(
        &mut self,
        step: u64,
        ids: &[Vec<EpisodeId>],
        wait: bool,
    ) -> Result<Vec<Event>, PipelineError> {
        let groups: Vec<Vec<Trace>> = ids.iter().map(|group| self.take(group)).collect();
        self.begin_step();
        let Some(shelf) = &mut self.shelf else {
            return Err(no_source());
        };
        groups.iter().for_each(|group| shelf.add(group));
        if self.overlaps() {
            return Ok(Vec::new());
        }
        Ok(vec![self.look_at_shelf(step, wait)?])
    }

    /// Groups that wait for rewards.
    pub(super) fn awaited(&self) -> usize {
        self.shelf.as_ref().map_or(0, Shelf::waiting)
    }

    /// If training overlaps, takes in the rewards that came, now and then, or waits a moment for some.
    pub(super) fn late_groups(&mut self, wait: bool) -> Result<Vec<Command>, PipelineError> {
        let began = Instant::now();
        if self.awaited() == 0 || (!wait && self.look_due.is_some_and(|due| began < due)) {
            return Ok(Vec::new());
        }
        let event = self.look_at_shelf(self.core.step() + 1, wait)?;
        self.look_due = Some(Instant::now() + LOOK_EVERY.max(began.elapsed() * LOOKS_SHARE));
        Ok(self.on(event))
    }

    /// Takes the scores that came, and gives the groups that can be trained.
    fn look_at_shelf(&mut self, step: u64, wait: bool) -> Result<Event, PipelineError> {
        let overlaps = self.overlaps();
        let (Some(shelf), Some(late)) = (&mut self.shelf, &mut self.p.late) else {
            return Err(no_source());
        };
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
            // The learner may be at work in its own thread.
            version: match overlaps {
                true => self.live,
                false => lock(&self.p.learner).version().0,
            },
            most: if overlaps { usize::MAX } else { most },
            given: (0, 0),
            names: &BTreeSet::new(),
        };
        let found = shelf.look(store, look)?;
        let waiting = shelf.waiting();
        let alone = found.groups.iter().filter_map(|g| alone(g)).collect();
        if !overlaps {
            let scored = found.groups.iter().flatten();
            let outcomes = scored.map(|t| (t.episode.clone(), t.outcome.clone()));
            self.step.outcomes.extend(outcomes);
            self.step.left_out.extend(found.dropped.clone());
        }
        Ok(Event::Settled {
            groups: self.keep(found.groups),
            dropped: found.dropped,
            alone,
            waiting,
            room: found.room,
        })
    }
}

/// Task and reward of an episode that is a group by itself.
pub(super) fn alone(group: &[Trace]) -> Option<(String, f64)> {
    let [trace] = group else { return None };
    Some((trace.task.as_str().to_owned(), trace.score()?))
}

fn no_source() -> PipelineError {
    PipelineError::system("no source of late rewards was given")
}
