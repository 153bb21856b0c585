//! Episodes that are run together, each with its attempts.

use crate::schedule::Draw;
use sinew_env::waits_for_group;
use sinew_types::{EpisodeEnd, EpisodeId, GroupId, Trace};
use std::collections::{BTreeMap, BTreeSet, HashMap};

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
    pub outcome: Option<Showed>,
    /// Its reward is not complete: its group has to be scored.
    pub waits_for_group: bool,
}

/// What an episode with a reward showed: type of its task, success and total reward.
pub type Showed = (String, bool, f64);

/// What a trace shows; `None` without a reward.
pub fn showed(trace: &Trace) -> Option<Showed> {
    let failed = matches!(trace.end, EpisodeEnd::Failed { .. });
    (!failed && trace.score().is_some()).then(|| {
        let kind = trace.task_kind.clone();
        (kind, trace.outcome.success, trace.total_reward())
    })
}

impl Ended {
    /// The end of a trace; `stored` by an earlier session.
    pub fn of(trace: &Trace, stored: bool) -> Self {
        let failed = matches!(trace.end, EpisodeEnd::Failed { .. });
        Self {
            episode: trace.episode.clone(),
            failed,
            stored,
            waits_for_group: !failed && waits_for_group(&trace.outcome),
            outcome: showed(trace),
        }
    }
}

/// What follows from the end of an episode.
#[derive(Debug, Default)]
pub struct Follows {
    /// To be run in its place.
    pub again: Option<Draw>,
    /// A group whose members have all ended and some of which wait for its score: their last attempts.
    pub group: Option<Vec<Draw>>,
}

/// Groups that were not kept.
#[derive(Debug, Default)]
pub(crate) struct Stopped {
    /// Their episodes that have not ended.
    pub(crate) open: Vec<EpisodeId>,
    /// The task of each.
    pub(crate) tasks: Vec<usize>,
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
pub struct Roster {
    slots: Vec<Slot>,
    /// Episodes that have not ended, with their slots.
    open: HashMap<EpisodeId, usize>,
    /// Groups whose score is awaited.
    scoring: BTreeSet<GroupId>,
    /// Ends that wait for the score of their group: without any, no group has to be looked at.
    waits: usize,
    /// How often an episode is run again.
    retries: u32,
    /// The last end was found in the store: more of them, and of their further attempts, may follow.
    pub(crate) recovers: bool,
    pub(crate) dropped: BTreeMap<EpisodeId, String>,
    /// Episodes that were run again, and those of them that went well.
    pub(crate) retried: usize,
    pub(crate) recovered: usize,
}

impl Roster {
    /// Without episodes; what the system fails is run again as often as `retries` says.
    pub fn new(retries: u32) -> Self {
        Self {
            retries,
            ..Self::default()
        }
    }

    /// Adds episodes that are about to start.
    pub fn add(&mut self, draws: &[Draw]) {
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

    /// Takes an end in; gives what follows. What the system failed is run again as often as `retries`
    /// says, and once more where an earlier session stored the failure, because its cause may be gone. An
    /// episode that is not awaited changes nothing.
    pub fn ended(&mut self, ended: Ended) -> Follows {
        let Some(at) = self.open.remove(&ended.episode) else {
            return Follows::default();
        };
        let group = self.slots[at].first.group.clone();
        match self.taken(at, ended) {
            Some(again) => Follows {
                again: Some(again),
                group: None,
            },
            None => Follows {
                again: None,
                group: self.due_score(&group),
            },
        }
    }

    /// Fills a slot, or gives its next attempt.
    fn taken(&mut self, at: usize, ended: Ended) -> Option<Draw> {
        self.recovers = ended.stored;
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
        self.waits += usize::from(ended.waits_for_group);
        slot.ended = Some(ended);
        None
    }

    /// The last attempts of a group whose score is needed now.
    fn due_score(&mut self, group: &GroupId) -> Option<Vec<Draw>> {
        // Steps have thousands of episodes, and most have their whole reward when they end.
        if self.waits == 0 {
            return None;
        }
        let members = || self.slots.iter().filter(|s| s.first.group == *group);
        let all = members().all(|s| s.ended.is_some());
        let mut ended = members().filter_map(|s| s.ended.as_ref());
        if !all || !ended.any(|e| e.waits_for_group) {
            return None;
        }
        let last = |slot: &Slot| Draw {
            episode: slot.last.clone(),
            ..slot.first.clone()
        };
        let group_draws = members().map(last).collect();
        self.scoring.insert(group.clone());
        Some(group_draws)
    }

    /// Takes the score of a group in. A group that is not awaited changes nothing.
    pub fn scored(&mut self, group: &GroupId, mut showed: BTreeMap<EpisodeId, Showed>) {
        if !self.scoring.remove(group) {
            return;
        }
        for slot in self.slots.iter_mut().filter(|s| s.first.group == *group) {
            let Some(ended) = &mut slot.ended else {
                continue;
            };
            ended.outcome = showed.remove(&ended.episode);
            self.waits -= usize::from(ended.waits_for_group);
            ended.waits_for_group = false;
        }
    }

    /// The group of the first draw: the only one where each group has a roster of its own.
    pub(crate) fn first_group(&self) -> Option<&GroupId> {
        self.slots.first().map(|slot| &slot.first.group)
    }

    /// Groups whose members have all ended and are scored, and that the system did not fail as a whole, in
    /// the order of the draws.
    pub(crate) fn complete_groups(&self) -> Vec<GroupId> {
        let mut groups: BTreeMap<&GroupId, (bool, bool)> = BTreeMap::new();
        for slot in &self.slots {
            let (complete, sampled) = groups.entry(&slot.first.group).or_insert((true, false));
            *complete &= slot.ended.is_some();
            *sampled |= slot.ended.as_ref().is_some_and(|e| !e.failed);
        }
        let whole = groups
            .into_iter()
            .filter(|(_, (complete, sampled))| *complete && *sampled);
        let scored = whole.filter(|(group, _)| !self.scoring.contains(*group));
        scored.map(|(group, _)| group.clone()).collect()
    }

    /// Keeps these groups alone, which are complete; the episodes of all others are left out.
    pub(crate) fn keep(&mut self, groups: &[GroupId], reason: &str) -> Stopped {
        let mut stopped = Stopped::default();
        let (kept, others) = std::mem::take(&mut self.slots)
            .into_iter()
            .partition(|slot| groups.contains(&slot.first.group));
        self.slots = kept;
        let ends = self.slots.iter().filter_map(|s| s.ended.as_ref());
        self.waits = ends.filter(|e| e.waits_for_group).count();
        let others: Vec<Slot> = others;
        for (n, slot) in others.iter().enumerate() {
            if n == 0 || others[n - 1].first.group != slot.first.group {
                stopped.tasks.push(slot.first.task);
            }
            if slot.ended.is_none() {
                stopped.open.push(slot.last.clone());
            }
            self.dropped.insert(slot.last.clone(), reason.to_owned());
        }
        self.open.clear();
        self.scoring.clear();
        stopped
    }

    /// Whether all have ended, and all groups that have to be scored are.
    pub fn is_complete(&self) -> bool {
        self.open.is_empty() && self.scoring.is_empty()
    }

    /// The ends of those that have ended, of the last attempts.
    pub fn ends(&self) -> impl Iterator<Item = &Ended> {
        self.slots.iter().filter_map(|s| s.ended.as_ref())
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
        let outcomes = self.ends().filter_map(|e| e.outcome.as_ref());
        outcomes.map(|(kind, success, reward)| (kind.as_str(), *success, *reward))
    }
}
