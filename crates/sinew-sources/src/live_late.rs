//! Live rollouts whose rewards come from outside, perhaps a day after their end.
//!
//! ```text
//! finished -> a whole group -> waits -> its scores are in the store -> a step
//!                                    -> its time is up, or too many wait -> left out, with the reason
//! ```
//!
//! A group that waits is its rollouts in the store, which no update names: all of this can be made again
//! after a restart.

use crate::live_feed::{Feed, note, read};
use sinew_orchestrator::{CollectRequest, CollectedGroups, PipelineError, WaitingGroups};
use sinew_pipeline::{GroupRequest, LateRewards, SourceGroups};
use sinew_types::{EpisodeId, GroupId};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Interval between two checks for scores.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Maximum rollouts that a step leaves out: it ends with what it has then.
const MAX_DROPPED: usize = 65_536;

/// Groups between their last rollout and their rewards.
pub(crate) struct LateGroups {
    late: LateRewards,
    groups: WaitingGroups,
}

/// Groups of a step so far.
#[derive(Default)]
struct StepGroups {
    given: SourceGroups,
    /// Names of its groups, each once: the store would return two groups of one name as one.
    names: BTreeSet<GroupId>,
    /// Groups of it that are further behind the policy than allowed.
    old: usize,
    /// More groups are ready, whose names it has already.
    held: usize,
}

impl LateGroups {
    pub(crate) fn new(late: LateRewards) -> Self {
        let groups = WaitingGroups::new(late.config.clone());
        Self { late, groups }
    }

    /// Groups that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.groups.waiting()
    }

    /// Their episodes.
    pub(crate) fn episodes(&self) -> Vec<EpisodeId> {
        self.groups.episodes().cloned().collect()
    }

    /// Returns the groups of a step: waits until enough groups have their rewards, or agents are silent and
    /// no reward is awaited.
    ///
    /// # Errors
    /// Fails if the store does, or if the run is to stop.
    pub(crate) fn groups(
        &mut self,
        feed: &Feed,
        wanted: &mut GroupRequest<'_>,
    ) -> Result<SourceGroups, PipelineError> {
        let mut step = StepGroups::default();
        let total = wanted.groups * feed.group_size();
        loop {
            self.add_whole(feed, wanted, &mut step)?;
            self.take_ready(wanted, &mut step)?;
            if self.is_over(feed, wanted.groups, &step) {
                return Ok(step.given);
            }
            let there: usize = step.given.groups.iter().map(Vec::len).sum();
            (wanted.tick)(there.min(total), total);
            let looked = Instant::now();
            while looked.elapsed() < LOOK_EVERY {
                feed.pause()?;
            }
        }
    }

    /// Whole groups begin to wait.
    fn add_whole(
        &mut self,
        feed: &Feed,
        wanted: &GroupRequest<'_>,
        step: &mut StepGroups,
    ) -> Result<(), PipelineError> {
        let batch = feed.drained(wanted.learner.version());
        note(&mut step.given, batch.dropped);
        for group in batch.groups {
            self.groups.add_another(&read(wanted.store, &group)?);
        }
        Ok(())
    }

    /// Takes the scores that came, and the groups that are ready with them.
    fn take_ready(
        &mut self,
        wanted: &GroupRequest<'_>,
        step: &mut StepGroups,
    ) -> Result<(), PipelineError> {
        self.late.scores.take(wanted.store, false)?;
        let fresh = step.given.groups.len() - step.old;
        let request = CollectRequest {
            now_s: self.late.scores.now_s(),
            version: wanted.learner.version().0,
            most: wanted.groups - step.given.groups.len(),
            given: (fresh, step.old),
            names: &step.names,
        };
        let mut found = self.groups.collect(wanted.store, request)?;
        self.groups.bound(&mut found);
        let CollectedGroups {
            groups,
            dropped,
            old,
            held,
            may_begin: _,
        } = found;
        let given = groups.iter().flatten().map(|t| &t.episode);
        self.groups.settled(given.chain(dropped.keys()));
        let outcomes = groups.iter().flatten();
        let outcomes = outcomes.map(|t| (t.episode.clone(), t.outcome.clone()));
        step.given.outcomes.extend(outcomes);
        step.given.left_out.extend(dropped.clone());
        step.given.dropped.extend(dropped);
        let names = groups.iter().filter_map(|g| g.first());
        step.names.extend(names.map(|t| t.group.clone()));
        step.given.groups.extend(groups);
        step.old += old;
        step.held = held;
        Ok(())
    }

    /// Whether a step continues with what it has.
    fn is_over(&self, feed: &Feed, wanted: usize, step: &StepGroups) -> bool {
        let (groups, dropped) = (step.given.groups.len(), step.given.dropped.len());
        let missing = wanted.saturating_sub(groups);
        // A step that reports why nothing is trained is better than a wait without end.
        let fruitless = groups == 0 && dropped >= self.late.config.max_waiting;
        let clash = groups > 0 && step.held >= missing;
        // Groups that are ready but were not given are too old or share a name with another: the next step
        // takes them.
        let silent = feed.is_idle() && self.groups.pending() == 0;
        missing == 0 || clash || fruitless || silent || dropped >= MAX_DROPPED
    }
}
