//! Agents that run already as a source: rollouts that they finish at a gateway are trained at once.
//!
//! A gateway commits each finished rollout to the store of the run, with the purpose [`LIVE`], before it
//! reports it here. Rollouts in the store that no commit of an update names are still to be trained. A
//! resumed session begins with them, so that a crash loses no rollout and trains none twice.
//!
//! If rewards come from outside, whole groups wait for them in memory (`live_late.rs`).

use crate::live_feed::{Feed, LiveRollouts, note, read};
use crate::live_late::LateGroups;
use sinew_orchestrator::PipelineError;
use sinew_pipeline::{GroupRequest, LateRewards, SampleSource, SourceGroups};
use sinew_types::EpisodeId;
use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Groups of live rollouts for each step, as soon as there are enough of them.
pub struct LiveSource {
    feed: Feed,
    /// Groups that wait for rewards, where some come from outside.
    late: Option<LateGroups>,
    /// The gateway, which stops when the run has ended.
    _server: Box<dyn Any + Send>,
}

sinew_types::debug_fields!(LiveSource as this, idle = this.feed.idle());

impl LiveSource {
    /// Trains on `rollouts`, which `server` fills while it lives.
    pub fn new(
        rollouts: Arc<LiveRollouts>,
        idle: Duration,
        cancel: watch::Receiver<bool>,
        server: Box<dyn Any + Send>,
    ) -> Self {
        Self {
            feed: Feed::new(rollouts, idle, cancel),
            late: None,
            _server: server,
        }
    }

    /// Returns the source with groups that wait for rewards from outside.
    pub fn with_late(self, late: LateRewards) -> Self {
        Self {
            late: Some(LateGroups::new(late)),
            ..self
        }
    }
}

impl SampleSource for LiveSource {
    fn groups(&mut self, mut wanted: GroupRequest<'_>) -> Result<SourceGroups, PipelineError> {
        let Some(mut late) = self.late.take() else {
            return self.whole_groups(wanted);
        };
        let given = late.groups(&self.feed, &mut wanted);
        self.late = Some(late);
        given
    }

    fn waiting_groups(&self) -> usize {
        self.late.as_ref().map_or(0, LateGroups::waiting)
    }

    fn waiting_episodes(&self) -> Vec<EpisodeId> {
        self.late.as_ref().map_or(Vec::new(), LateGroups::episodes)
    }

    fn why_dry(&self) -> String {
        format!(
            "no agent finished a group of rollouts in {} s (harness.idle_s)",
            self.feed.idle().as_secs_f64()
        )
    }
}

impl LiveSource {
    /// Groups that have their rewards when they are whole.
    fn whole_groups(&mut self, wanted: GroupRequest<'_>) -> Result<SourceGroups, PipelineError> {
        let mut given = SourceGroups::default();
        let mut names = BTreeSet::new();
        loop {
            let missing = wanted.groups - given.groups.len();
            if !self.feed.wait(missing, &mut *wanted.tick)? {
                return Ok(given);
            }
            let version = wanted.learner.version();
            let batch = self.feed.take(missing, version, &mut names);
            // The ready groups share names with groups of this step: the next step takes them.
            let again = batch.groups.is_empty() && batch.dropped.is_empty();
            note(&mut given, batch.dropped);
            for group in batch.groups {
                given.groups.push(read(wanted.store, &group)?);
            }
            let fruitless = given.groups.is_empty() && !given.dropped.is_empty();
            let enough = given.groups.len() >= wanted.groups;
            if enough || fruitless || again || self.feed.is_idle() {
                return Ok(given);
            }
        }
    }
}

#[cfg(test)]
mod tests;
