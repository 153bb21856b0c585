//! Episodes of the session: those that run, as numbers, and those that ended, until something is made of
//! them.

use crate::ports::{ScoredGroup, StoredEpisode};
use sinew_orchestrator::{
    Bus, Draw, EpisodeResult, Event, LONGEST, PipelineError, RolloutProgress, RunEvent,
    task_outcome,
};
use sinew_rollout::LiveEpisode;
use sinew_types::{EpisodeId, Trace};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// Time in one phase after which an episode is reported, and between two reports.
const LONG: Duration = Duration::from_secs(30);

/// Episodes of the phase, or of the session if training overlaps.
#[derive(Default)]
pub(super) struct Episodes {
    /// Episodes that ended and that nothing was made of yet.
    traces: HashMap<EpisodeId, Trace>,
    /// Number of ended episodes, and number of all.
    ended: usize,
    all: usize,
    /// Groups that are being scored.
    pub(super) scoring: usize,
    /// Episodes whose outcome is not the stored one.
    pub(super) rescored: HashSet<EpisodeId>,
    /// Time of the last report of long episodes.
    reminded: Option<Instant>,
}

impl Episodes {
    /// Notes that so many more were begun.
    pub(super) fn began(&mut self, count: usize) {
        self.all += count;
    }

    /// Whether some were begun that have not ended.
    pub(super) fn is_running(&self) -> bool {
        self.ended < self.all
    }

    /// Number of ended episodes.
    pub(super) fn ended(&self) -> usize {
        self.ended
    }

    /// Takes an episode that ended in, and returns what the core needs of it.
    pub(super) fn add(&mut self, stored: StoredEpisode) -> EpisodeResult {
        let StoredEpisode {
            trace,
            known,
            changed,
            rescored,
        } = stored;
        self.ended += 1;
        if rescored {
            self.rescored.insert(trace.episode.clone());
        }
        let ended = EpisodeResult {
            changed,
            ..EpisodeResult::of(&trace, known)
        };
        self.traces.insert(trace.episode.clone(), trace);
        ended
    }

    /// Keeps episodes until something is made of them; gives their ids.
    pub(super) fn keep(&mut self, groups: Vec<Vec<Trace>>) -> Vec<Vec<EpisodeId>> {
        let mut keep = |trace: Trace| {
            let episode = trace.episode.clone();
            self.traces.insert(episode.clone(), trace);
            episode
        };
        let ids = groups
            .into_iter()
            .map(|g| g.into_iter().map(&mut keep).collect());
        ids.collect()
    }

    /// Takes episodes that ended, in this order.
    pub(super) fn take(&mut self, episodes: &[EpisodeId]) -> Vec<Trace> {
        let taken = episodes.iter().filter_map(|e| self.traces.remove(e));
        taken.collect()
    }

    /// Takes groups of episodes that ended, in this order.
    pub(super) fn take_groups(&mut self, groups: &[Vec<EpisodeId>]) -> Vec<Vec<Trace>> {
        groups.iter().map(|group| self.take(group)).collect()
    }

    /// Drops episodes that nothing is made of.
    pub(super) fn forget<'a>(&mut self, episodes: impl Iterator<Item = &'a EpisodeId>) {
        episodes.for_each(|e| drop(self.traces.remove(e)));
    }

    /// Ends the phase: drops all episodes, and counts anew.
    pub(super) fn end_phase(&mut self) {
        self.traces.clear();
        (self.ended, self.all) = (0, 0);
    }

    /// Copies of the members of a group that ended.
    pub(super) fn members(&self, members: Vec<Draw>) -> Vec<(Draw, Trace)> {
        let traced = |draw: Draw| {
            let trace = self.traces.get(&draw.episode)?.clone();
            Some((draw, trace))
        };
        members.into_iter().filter_map(traced).collect()
    }

    /// Takes the outcomes of a group that was scored in.
    pub(super) fn add_scores(&mut self, scored: ScoredGroup) -> Event {
        let ScoredGroup { group, outcomes } = scored;
        self.scoring = self.scoring.saturating_sub(1);
        for (episode, outcome) in outcomes {
            if let Some(trace) = self.traces.get_mut(&episode) {
                trace.outcome = outcome;
            }
        }
        let members = self.traces.values().filter(|t| t.group == group);
        let outcomes = members
            .filter_map(|t| Some((t.episode.clone(), task_outcome(t)?)))
            .collect();
        Event::GroupScored { group, outcomes }
    }

    /// Reports the progress while episodes run, and now and then those that stay in one phase. The session
    /// started at `started`, and earlier ones took `earlier_s` seconds.
    pub(super) fn report(
        &mut self,
        bus: &Bus,
        mut seen: RolloutProgress,
        (started, earlier_s): (Instant, f64),
    ) -> Result<(), PipelineError> {
        (seen.done, seen.total) = (self.ended, self.all);
        seen.wall_s = earlier_s + started.elapsed().as_secs_f64();
        // The time of a phase that has a limit is worth a line from its half on: a first step of a slow
        // engine is none.
        let near = |l: &LiveEpisode| l.left_s.is_none_or(|left_s| left_s < l.phase_s);
        let long = seen
            .longest
            .iter()
            .any(|l| l.phase_s >= LONG.as_secs_f64() && near(l));
        let longest = (long && self.reminded.is_none_or(|at| at.elapsed() >= LONG)).then(|| {
            self.reminded = Some(Instant::now());
            seen.longest.iter().take(LONGEST).cloned().collect()
        });
        bus.emit(RunEvent::Rollout(Box::new(seen)))?;
        longest.map_or(Ok(()), |longest| bus.emit(RunEvent::Longest(longest)))
    }
}
