//! Episodes that are run together, each with its attempts.

use crate::schedule::Draw;
use sinew_types::{EpisodeId, GroupId};
use std::collections::{BTreeMap, HashMap};

/// An episode that was run to its end and stored.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// Of the attempt that ended.
    pub episode: EpisodeId,
    /// The system failed it.
    pub failed: bool,
    /// An earlier session stored it: it was not run now.
    pub stored: bool,
    /// Type of its task, success and total reward, where there is a reward.
    pub outcome: Option<(String, bool, f64)>,
}

/// Why an episode that was run again is left out.
pub(crate) const RUN_AGAIN: &str = "failed, run again";

/// One place of a group, which several attempts may fill in turn.
#[derive(Clone, Debug)]
struct Slot {
    /// The draw without retries; attempts derive their ids and seeds from it.
    first: Draw,
    /// The episode of the last attempt.
    last: EpisodeId,
    /// 0 for the first.
    attempt: u32,
    /// Of the last attempt.
    ended: Option<Ended>,
}

/// Episodes by their place, in the order of their draws.
#[derive(Clone, Debug, Default)]
pub(crate) struct Roster {
    slots: Vec<Slot>,
    /// Episodes that have not ended, with their slots.
    open: HashMap<EpisodeId, usize>,
    /// How often an episode is run again.
    retries: u32,
    pub(crate) dropped: BTreeMap<EpisodeId, String>,
    /// Episodes that were run again, and those of them that went well.
    pub(crate) retried: usize,
    pub(crate) recovered: usize,
}

impl Roster {
    pub(crate) fn new(retries: u32) -> Self {
        Self {
            retries,
            ..Self::default()
        }
    }

    /// Adds episodes that are about to start.
    pub(crate) fn add(&mut self, draws: &[Draw]) {
        for draw in draws {
            self.open.insert(draw.episode.clone(), self.slots.len());
            self.slots.push(Slot {
                first: draw.clone(),
                last: draw.episode.clone(),
                attempt: 0,
                ended: None,
            });
        }
    }

    /// Takes an end in; gives what is to be run in its place. What the system failed is run again as
    /// often as `retries` says, and once more where an earlier session stored the failure, because its
    /// cause may be gone. An episode that is not awaited changes nothing.
    pub(crate) fn ended(&mut self, ended: Ended) -> Option<Draw> {
        let at = self.open.remove(&ended.episode)?;
        let slot = &mut self.slots[at];
        if slot.attempt > 0 {
            self.retried += 1;
            self.recovered += usize::from(!ended.failed);
        }
        if ended.failed && (slot.attempt < self.retries || ended.stored) {
            slot.attempt += 1;
            let next = slot.first.again(slot.attempt);
            slot.last = next.episode.clone();
            self.dropped.insert(ended.episode, RUN_AGAIN.to_owned());
            self.open.insert(next.episode.clone(), at);
            return Some(next);
        }
        slot.ended = Some(ended);
        None
    }

    /// Whether all have ended.
    pub(crate) fn is_complete(&self) -> bool {
        self.open.is_empty()
    }

    /// The last attempts, in the order of the draws.
    pub(crate) fn episodes(&self) -> Vec<EpisodeId> {
        self.slots.iter().map(|s| s.last.clone()).collect()
    }

    /// The same, one inner vector a group.
    pub(crate) fn groups(&self) -> Vec<Vec<EpisodeId>> {
        let mut groups: BTreeMap<&GroupId, Vec<EpisodeId>> = BTreeMap::new();
        for slot in &self.slots {
            let group = groups.entry(&slot.first.group).or_default();
            group.push(slot.last.clone());
        }
        groups.into_values().collect()
    }

    /// What episodes with a reward showed, in the order of the draws.
    pub(crate) fn outcomes(&self) -> impl Iterator<Item = (&str, bool, f64)> {
        let ended = self.slots.iter().filter_map(|s| s.ended.as_ref());
        let outcomes = ended.filter_map(|e| e.outcome.as_ref());
        outcomes.map(|(kind, success, reward)| (kind.as_str(), *success, *reward))
    }
}
