//! Generation and training at once: episodes run while the learner works in a separate thread.
//!
//! The loop is the same as in turns, but it waits for episodes, scores of groups and the learner together.
//! New weights, commits and checkpoints are made here, while no update is computed; episodes continue
//! meanwhile.

use super::late::alone;
use super::learner_thread::{LearnerParts, LearnerResult, LearnerTask, is_whole, none_runs};
use super::sync::Driver;
use sinew_orchestrator::{Command, Event, PipelineError, Rows, WaitingGroups};
use sinew_rollout::{Hops, TrainerActivity, WaitTimes};
use sinew_types::{EpisodeId, GroupId, Trace};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// Interval between two readings of groups that are being scored or wait for rewards, while the learner works
/// and no episode runs.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The oldest weights that sampled a token of these episodes.
pub(super) fn oldest<'a>(traces: impl IntoIterator<Item = &'a Trace>) -> Option<u64> {
    let versions = traces.into_iter().filter_map(Trace::oldest_version);
    versions.map(|v| v.0).min()
}

impl Driver {
    /// Attributes the time since the last reading, and sets the trainer's activity from now on; `None`
    /// keeps it.
    pub(super) fn note_waits(&mut self, trainer: Option<TrainerActivity>) {
        let now_s = self.p.started.elapsed().as_secs_f64();
        let reading = self.p.rollouts.reading();
        let running = self.episodes.is_running();
        self.waits.look(now_s, &reading, running, trainer);
    }

    /// Ends the intervals of a step, or of the run.
    pub(super) fn take_waits(&mut self) -> WaitTimes {
        self.note_waits(None);
        self.waits.take(self.p.store.traces.waited_s())
    }

    /// Calls between owner and workers since the last take.
    pub(super) fn take_hops(&mut self) -> Hops {
        let now = self.p.rollouts.reading().hops;
        now.since(&std::mem::replace(&mut self.hops, now))
    }

    /// Rows by how many updates the oldest token of their episode is behind the weights that are trained.
    pub(super) fn staleness(&self, rows: &Rows, groups: &[Vec<Trace>]) -> BTreeMap<u64, usize> {
        let mut behind = HashMap::new();
        for trace in groups.iter().flatten() {
            let updates = oldest([trace]).map(|oldest| self.live.saturating_sub(oldest));
            behind.insert(&trace.episode, updates.unwrap_or(0));
        }
        let mut counts = BTreeMap::new();
        for updates in rows.rows.iter().filter_map(|r| behind.get(&r.episode)) {
            *counts.entry(*updates).or_default() += 1;
        }
        counts
    }

    /// Whether generation and training overlap.
    pub(super) fn overlaps(&self) -> bool {
        self.p.config.core.overlap.is_some()
    }

    pub(super) fn tools(&self) -> LearnerParts {
        LearnerParts {
            learner: self.p.learner.clone(),
            algorithm: self.p.algorithm.clone(),
            grammars: self.p.grammars.clone(),
            trust: self.p.config.trust.clone(),
        }
    }

    /// Runs a task of the learner. If training overlaps, it runs on a separate thread and no event follows
    /// yet.
    pub(super) fn work(&mut self, task: LearnerTask) -> Result<Vec<Event>, PipelineError> {
        self.note_waits(Some(TrainerActivity::Works));
        if !self.overlaps() {
            let worked = self.tools().work(task)?;
            return Ok(vec![self.worked(worked)?]);
        }
        let (tools, waker) = (self.tools(), self.p.rollouts.waker());
        self.learner_thread.begin(tools, task, waker)?;
        Ok(Vec::new())
    }

    fn worked(&mut self, worked: LearnerResult) -> Result<Event, PipelineError> {
        // New weights may wait for episodes.
        self.note_waits(Some(match (&worked, self.overlaps()) {
            (LearnerResult::Updated(..), true) => TrainerActivity::WaitsForGroups,
            _ => TrainerActivity::Other,
        }));
        match worked {
            LearnerResult::Scored(groups, rows) => self.rows_made(groups, *rows),
            LearnerResult::Updated(rows, record) => {
                (self.step.rows, self.step.record) = (rows.map(|r| *r), *record);
                Ok(self.updated())
            }
        }
    }

    /// Sets the start of a step if training overlaps: its episodes have run since groups were taken for the
    /// step before.
    pub(super) fn since_last_score(&mut self) {
        if !self.overlaps() {
            return;
        }
        let now = (Instant::now(), self.p.rollouts.reading());
        if let Some((taken, before)) = self.taken.replace(now) {
            (self.step.started, self.step.before) = (Some(taken), before);
        }
    }

    /// Reports whether a group has a training signal, and how old it is. The episodes are kept in memory.
    pub(super) fn inspect_group(
        &mut self,
        group: GroupId,
        episodes: &[EpisodeId],
        held: Vec<EpisodeId>,
    ) -> Result<Event, PipelineError> {
        let stored = self.p.store.attempts(held)?;
        let groups = vec![self.episodes.take(episodes)];
        let spent = self.p.algorithm.spent(&groups);
        let spent = spent.map_err(PipelineError::system)?;
        let event = Event::GroupInspected {
            signal: spent.is_empty(),
            oldest: oldest(&groups[0]),
            group,
            stored,
            alone: if self.awaited.groups.is_some() {
                alone(&groups[0])
            } else {
                None
            },
        };
        self.episodes.keep(groups);
        Ok(event)
    }

    /// Waits until something happened, whatever.
    pub(super) fn wait_for_any(&mut self) -> Result<Vec<Command>, PipelineError> {
        loop {
            if let Some(worked) = self.learner_thread.done(Some(Duration::ZERO))? {
                let event = self.worked(worked)?;
                return Ok(self.on(event));
            }
            let mut commands = self.scored_groups(false)?;
            commands.extend(self.late_groups(false)?);
            if !commands.is_empty() {
                return Ok(commands);
            }
            if self.episodes.is_running() {
                let before = self.episodes.ended();
                let commands = self.wait_episodes()?;
                self.note_waits(None);
                if self.episodes.ended() > before {
                    return Ok(commands);
                }
                // Otherwise the learner was done, or a look at groups is due.
                let waits = self.learner_thread.is_busy() || self.episodes.scoring > 0;
                if !waits && !self.p.rollouts.is_running() {
                    return Err(none_runs());
                }
                continue;
            }
            let looks = self.episodes.scoring > 0 || self.awaited.count() > 0;
            let worked = match (self.learner_thread.is_busy(), looks) {
                (false, false) => return Err(none_runs()),
                (false, true) if self.episodes.scoring > 0 => return self.scored_groups(true),
                (false, true) => return self.late_groups(true),
                (true, false) => self.learner_thread.done(None)?,
                (true, true) => self.learner_thread.done(Some(LOOK_EVERY))?,
            };
            if let Some(worked) = worked {
                let event = self.worked(worked)?;
                return Ok(self.on(event));
            }
        }
    }

    /// Whether the weights are those of the core's step: no update was started that is not in use.
    pub(super) fn is_whole(&self) -> bool {
        is_whole(&self.p.learner, self.overlaps().then_some(self.live))
    }

    /// Training episodes that ended and wait for their update; another session resumes with them.
    pub(super) fn waiting(&self) -> Result<BTreeSet<EpisodeId>, PipelineError> {
        if self.overlaps() {
            return self.p.store.open_episodes();
        }
        let waiting = self
            .awaited
            .groups
            .iter()
            .flat_map(WaitingGroups::episodes)
            .cloned();
        let outside = self.p.source.iter().flat_map(|s| s.waiting_episodes());
        Ok(waiting.chain(outside).collect())
    }
}
