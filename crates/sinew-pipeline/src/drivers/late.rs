//! Groups whose rewards come from outside, between their last episode and their rows.

use super::learner_thread::lock;
use super::sync::Driver;
use sinew_orchestrator::{
    CollectRequest, Command, Event, Phase, PipelineError, RunEvent, WaitingGroups,
};
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
    pub(super) fn collect_late_rewards(
        &mut self,
        step: u64,
        ids: &[Vec<EpisodeId>],
        wait: bool,
    ) -> Result<Vec<Event>, PipelineError> {
        let groups: Vec<Vec<Trace>> = ids.iter().map(|group| self.take(group)).collect();
        self.begin_step();
        let Some(waiting_groups) = &mut self.waiting_groups else {
            return Err(no_source());
        };
        groups.iter().for_each(|group| waiting_groups.add(group));
        if self.overlaps() {
            return Ok(Vec::new());
        }
        Ok(vec![self.read_late_rewards(step, wait)?])
    }

    /// Groups that wait for rewards.
    pub(super) fn awaited(&self) -> usize {
        self.waiting_groups
            .as_ref()
            .map_or(0, WaitingGroups::waiting)
    }

    /// If training overlaps, checks from time to time for rewards that have arrived, or waits a moment for
    /// some.
    pub(super) fn late_groups(&mut self, wait: bool) -> Result<Vec<Command>, PipelineError> {
        let began = Instant::now();
        if self.awaited() == 0 || (!wait && self.look_due.is_some_and(|due| began < due)) {
            return Ok(Vec::new());
        }
        let event = self.read_late_rewards(self.core.step() + 1, wait)?;
        self.look_due = Some(Instant::now() + LOOK_EVERY.max(began.elapsed() * LOOKS_SHARE));
        Ok(self.on(event))
    }

    /// Takes the scores that came, and gives the groups that can be trained.
    fn read_late_rewards(&mut self, step: u64, wait: bool) -> Result<Event, PipelineError> {
        let overlaps = self.overlaps();
        let (Some(waiting_groups), Some(late)) = (&mut self.waiting_groups, &mut self.p.late)
        else {
            return Err(no_source());
        };
        if wait {
            let groups = waiting_groups.waiting();
            self.p
                .bus
                .emit(RunEvent::Phase(Phase::Waiting { step, groups }))?;
        }
        let store = self.p.store.traces.as_ref();
        late.scores.take(store, wait)?;
        let most = GROUPS_PER_TASK * self.p.config.core.tasks_per_step;
        let request = CollectRequest {
            now_s: late.scores.now_s(),
            // The learner may be at work in its own thread.
            version: if overlaps {
                self.live
            } else {
                lock(&self.p.learner).version().0
            },
            most: if overlaps { usize::MAX } else { most },
            given: (0, 0),
            names: &BTreeSet::new(),
        };
        let found = waiting_groups.collect(store, request)?;
        let waiting = waiting_groups.waiting();
        let alone = found.groups.iter().filter_map(|g| alone(g)).collect();
        if !overlaps {
            let scored = found.groups.iter().flatten();
            let outcomes = scored.map(|t| (t.episode.clone(), t.outcome.clone()));
            self.step.outcomes.extend(outcomes);
            self.step.left_out.extend(found.dropped.clone());
        }
        Ok(Event::LateRewardsCollected {
            groups: self.keep(found.groups),
            dropped: found.dropped,
            alone,
            waiting,
            may_begin: found.may_begin,
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
