//! Groups that wait for rewards from outside while other groups run and are trained.
//!
//! ```text
//! episodes end -> waits, and takes no place -> rewards are there -> weighed -> an update
//!                                           -> its time is up, or it is too old -> left out, and replaced
//! ```
//!
//! The state of a waiting group is its episodes in the store, which no commit names. A resumed session starts
//! the draw again, finds these episodes, and waits again. The driver checks whether the rewards have arrived
//! or the time limit has passed; an update takes groups that are at most `reward.late.max_staleness` behind.

use super::super::messages::Command;
use super::super::{PipelineCore, Stage};
use super::{AsyncGroups, Overlap, weigh};
use crate::schedule::draw_of;
use sinew_types::{EpisodeId, GroupId};
use std::collections::BTreeMap;

impl AsyncGroups {
    /// True once `max_waiting` groups were left out since the last update. The update then uses the groups
    /// that are complete, so that a run that receives no rewards reports this in each step and ends.
    pub(super) fn is_fruitless(&self, overlap: &Overlap) -> bool {
        overlap
            .late
            .is_some_and(|late| self.given_up >= late.max_waiting)
    }

    /// Returns those of `groups` that waited. Their rewards have arrived, or their time is up and a part of
    /// them has. Each comes with its episodes that are still in the store.
    fn answered(&mut self, groups: Vec<Vec<EpisodeId>>) -> Vec<(GroupId, Vec<EpisodeId>)> {
        let known = |episodes: Vec<EpisodeId>| {
            let draw = draw_of(episodes.first()?)?;
            let waited = self.waiting.remove(&draw);
            let slots = self.open.get(&draw).filter(|_| waited)?;
            Some((slots.first_group()?.clone(), episodes))
        };
        groups.into_iter().filter_map(known).collect()
    }

    /// Records episodes that are left out. A group is given up when all of its episodes are left out.
    fn unanswered(&mut self, episodes: BTreeMap<EpisodeId, String>) {
        for (episode, reason) in episodes {
            let draw = draw_of(&episode).filter(|draw| self.waiting.contains(draw));
            let Some(draw) = draw else { continue };
            let Some(slots) = self.open.get_mut(&draw) else {
                continue;
            };
            // The episode is settled with its group, in one commit: a draw is settled as a whole.
            slots.dropped.insert(episode, reason);
            let left = slots.episodes();
            if left.iter().all(|e| slots.dropped.contains_key(e)) {
                self.give_up(draw);
            }
        }
    }

    fn give_up(&mut self, draw: u64) {
        self.waiting.remove(&draw);
        if let Some(slots) = self.open.remove(&draw) {
            slots.first_group().map(|group| self.groups.remove(group));
            self.dropped.extend(slots.dropped);
            self.given_up += 1;
        }
    }
}

impl PipelineCore {
    /// Returns the next command for a group whose episodes have all ended and are scored.
    pub(super) fn async_whole(&mut self, whole: (GroupId, Vec<EpisodeId>)) -> Command {
        let late = self.config.overlap.and_then(|o| o.late);
        let (Some(_), Some(ahead)) = (late, &mut self.ahead) else {
            return weigh(whole);
        };
        let (group, episodes) = whole;
        ahead.waiting.extend(ahead.groups.get(&group));
        Command::CollectLateRewards {
            step: self.state.step + 1,
            groups: vec![episodes],
            wait: false,
        }
    }

    /// Handles the driver's report about rewards from outside: the groups that have them, and the episodes
    /// that will not get them.
    pub(in crate::core) fn async_settled(
        &mut self,
        groups: Vec<Vec<EpisodeId>>,
        dropped: BTreeMap<EpisodeId, String>,
        now: f64,
    ) -> Vec<Command> {
        let out_of_time = self.config.max_wall_s.is_some_and(|limit| now >= limit);
        if out_of_time && matches!(self.stage, Stage::Collecting) {
            // Groups that wait stay in the store.
            return self.end();
        }
        let Some(ahead) = &mut self.ahead else {
            return Vec::new();
        };
        ahead.unanswered(dropped);
        let answered = ahead.answered(groups);
        let mut commands: Vec<Command> = answered.into_iter().map(weigh).collect();
        commands.extend(self.admit());
        commands.extend(self.take_groups());
        commands
    }
}
