//! Places for episodes that run together. Several attempts may fill a place in turn.

use crate::curriculum::CurriculumSample;
use crate::schedule::Draw;
use sinew_env::waits_for_group;
use sinew_types::{EpisodeEnd, EpisodeId, GroupId, Trace};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// An episode that was run to its end and stored.
#[derive(Clone, Debug, PartialEq)]
pub struct EpisodeResult {
    /// Id of the attempt that ended.
    pub episode: EpisodeId,
    /// Whether the system, not the policy, failed the episode.
    pub failed: bool,
    /// Whether an earlier session stored the episode, so that it was not run now.
    pub stored: bool,
    /// Type of the task, success and total reward; `None` without a reward.
    pub outcome: Option<TaskOutcome>,
    /// Whether the reward still needs the score of the whole group.
    pub waits_for_group: bool,
    /// Name of a part of the system whose version has changed since the episode ran. Such an episode is not
    /// trained but run again.
    pub changed: Option<String>,
}

/// Type of the task, success and total reward of an episode with a reward.
pub type TaskOutcome = (String, bool, f64);

/// Reads task type, success and total reward from a trace; `None` without a reward.
pub fn task_outcome(trace: &Trace) -> Option<TaskOutcome> {
    let failed = matches!(trace.end, EpisodeEnd::Failed { .. });
    (!failed && trace.score().is_some()).then(|| {
        let kind = trace.task_kind.clone();
        (kind, trace.outcome.success, trace.total_reward())
    })
}

impl EpisodeResult {
    /// Builds the result from a trace. `stored`: an earlier session stored it.
    pub fn of(trace: &Trace, stored: bool) -> Self {
        let failed = matches!(trace.end, EpisodeEnd::Failed { .. });
        Self {
            episode: trace.episode.clone(),
            failed,
            stored,
            waits_for_group: !failed && waits_for_group(&trace.outcome),
            changed: None,
            outcome: task_outcome(trace),
        }
    }
}

/// Actions that follow from the end of an episode.
#[derive(Debug, Default)]
pub struct SlotActions {
    /// Next attempt for the place of the ended episode.
    pub again: Option<Draw>,
    /// Last attempts of a group to score: all of its episodes have ended, and some wait for the group's
    /// score.
    pub group: Option<Vec<Draw>>,
    /// A group to inspect: its first episodes have ended, and the others are held back until these show a
    /// training signal.
    pub decide: Option<GroupProbe>,
    /// Held-back episodes to start, since the first ones cannot decide the group.
    pub more: Vec<Draw>,
}

/// The first episodes of a group; their rewards decide whether the others start.
#[derive(Debug)]
pub struct GroupProbe {
    /// The group.
    pub group: GroupId,
    /// The last attempts of the first episodes.
    pub episodes: Vec<EpisodeId>,
    /// The held-back episodes, if an earlier session may have run them.
    pub held: Vec<EpisodeId>,
}

/// Groups that a step stopped.
#[derive(Debug, Default)]
pub(crate) struct DroppedGroups {
    /// Their episodes that have not ended.
    pub(crate) open: Vec<EpisodeId>,
    /// The task of each group.
    pub(crate) tasks: Vec<usize>,
}

/// Reason in the record of an episode that was run again.
pub(crate) const RUN_AGAIN: &str = "failed, run again";

/// Prefix of the reason for stored episodes that were run with other versions of the system's parts.
pub(crate) const CHANGED: &str = "changed, run again: ";

/// Reason for a stored episode that is left out because the first ones decided its group.
pub(crate) const DECIDED: &str = "not needed: the first ones of the group decide it";

/// One place of a group. Several attempts may fill it in turn.
#[derive(Clone, Debug)]
struct Slot {
    /// The draw without retries; attempts derive their ids and seeds from it.
    first: Draw,
    /// The episode of the last attempt.
    last: EpisodeId,
    /// Number of the last attempt; 0 is the first.
    attempt: u32,
    /// End of the last attempt.
    ended: Option<EpisodeResult>,
    /// Whether the episode is held back until the first ones of its group have ended.
    held: bool,
    /// Whether an earlier session stored an attempt.
    stored: bool,
}

/// The places of all episodes, in the order of their draws.
#[derive(Clone, Debug, Default)]
pub struct EpisodeSlots {
    slots: Vec<Slot>,
    /// Episodes that have not ended, each with the index of its place.
    open: HashMap<EpisodeId, usize>,
    /// Groups that are being scored.
    scoring: BTreeSet<GroupId>,
    /// Number of ended episodes that wait for the score of their group. While it is 0, no group needs a
    /// check.
    waits: usize,
    /// Maximum number of further attempts of an episode.
    retries: u32,
    /// Whether the last result came from the store: more stored results, also of further attempts, may
    /// follow.
    pub(crate) recovers: bool,
    pub(crate) dropped: BTreeMap<EpisodeId, String>,
    /// Number of ended further attempts.
    pub(crate) retried: usize,
    /// Number of these attempts that the system did not fail.
    pub(crate) recovered: usize,
    /// Number of episodes that were never started, because the first ones had decided their group.
    pub(crate) not_begun: usize,
}

impl EpisodeSlots {
    /// Creates an empty set. An episode that the system fails is run again up to `retries` times.
    pub fn new(retries: u32) -> Self {
        Self {
            retries,
            ..Self::default()
        }
    }

    /// Adds episodes that are about to start.
    pub fn add(&mut self, draws: &[Draw]) {
        self.add_first(draws, None);
    }

    /// Adds episodes of complete groups. Returns those that start: all, or the `first` ones of each group.
    pub(crate) fn add_first(&mut self, draws: &[Draw], first: Option<usize>) -> Vec<Draw> {
        let (mut started, mut place) = (Vec::with_capacity(draws.len()), 0);
        for (n, draw) in draws.iter().enumerate() {
            place = if n > 0 && draws[n - 1].group == draw.group {
                place + 1
            } else {
                0
            };
            let held = first.is_some_and(|first| place >= first);
            if !held {
                self.open.insert(draw.episode.clone(), self.slots.len());
                started.push(draw.clone());
            }
            self.slots.push(Slot {
                first: draw.clone(),
                last: draw.episode.clone(),
                attempt: 0,
                ended: None,
                held,
                stored: false,
            });
        }
        started
    }

    /// Whether episodes of a group are held back until its first ones have ended.
    pub(crate) fn holds(&self, group: &GroupId) -> bool {
        self.slots.iter().any(|s| s.held && s.first.group == *group)
    }

    /// Starts the held-back episodes of a group.
    pub(crate) fn release(&mut self, group: &GroupId) -> Vec<Draw> {
        let mut released = Vec::new();
        for (at, slot) in self.slots.iter_mut().enumerate() {
            if slot.held && slot.first.group == *group {
                slot.held = false;
                self.open.insert(slot.last.clone(), at);
                released.push(slot.first.clone());
            }
        }
        released
    }

    /// Gives up the held-back episodes, so that the first ones are the whole group. Those that an earlier
    /// session stored are left out: there, the first ones had decided otherwise.
    pub(crate) fn cut(&mut self, group: &GroupId, stored: Vec<EpisodeId>) {
        let stored = stored.into_iter().map(|e| (e, DECIDED.to_owned()));
        self.dropped.extend(stored);
        let before = self.slots.len();
        self.slots.retain(|s| !(s.held && s.first.group == *group));
        self.not_begun += before - self.slots.len();
        let slots = self.slots.iter().enumerate();
        let open = slots.filter(|(_, s)| s.ended.is_none() && !s.held);
        self.open = open.map(|(at, s)| (s.last.clone(), at)).collect();
    }

    /// Handles the end of an episode and returns the actions that follow. An episode that the system failed
    /// is run again up to `retries` times, and once more if an earlier session stored the failure, because
    /// its cause may be gone. The end of an unknown episode has no effect.
    pub fn ended(&mut self, ended: EpisodeResult) -> SlotActions {
        let Some(at) = self.open.remove(&ended.episode) else {
            return SlotActions::default();
        };
        let group = self.slots[at].first.group.clone();
        match self.taken(at, ended) {
            Some(again) => SlotActions {
                again: Some(again),
                ..SlotActions::default()
            },
            None if self.holds(&group) => self.due_decision(&group),
            None => SlotActions {
                group: self.due_score(&group),
                ..SlotActions::default()
            },
        }
    }

    /// Returns the actions once the first episodes of a group have ended. If one of them has no reward,
    /// because the system failed it or its reward depends on the whole group, the others start.
    fn due_decision(&mut self, group: &GroupId) -> SlotActions {
        let members = self.slots.iter().filter(|s| s.first.group == *group);
        let first: Vec<&Slot> = members.filter(|s| !s.held).collect();
        if first.iter().any(|s| s.ended.is_none()) {
            return SlotActions::default();
        }
        let scored = |e: &EpisodeResult| e.outcome.is_some() && !e.failed && !e.waits_for_group;
        if first.iter().all(|s| s.ended.as_ref().is_some_and(scored)) {
            let episodes = first.iter().map(|s| s.last.clone()).collect();
            let known = first.iter().any(|s| s.stored);
            let members = self.slots.iter().filter(|s| s.first.group == *group);
            let held = members.filter(|s| s.held && known);
            let decide = GroupProbe {
                group: group.clone(),
                episodes,
                held: held.map(|s| s.last.clone()).collect(),
            };
            return SlotActions {
                decide: Some(decide),
                ..SlotActions::default()
            };
        }
        SlotActions {
            more: self.release(group),
            ..SlotActions::default()
        }
    }

    /// Fills a place with a result, or returns its next attempt.
    fn taken(&mut self, at: usize, ended: EpisodeResult) -> Option<Draw> {
        self.recovers = ended.stored;
        let slot = &mut self.slots[at];
        slot.stored |= ended.stored;
        if slot.attempt > 0 {
            self.retried += 1;
            self.recovered += usize::from(!ended.failed);
        }
        let failed = ended.failed && (slot.attempt < self.retries || ended.stored);
        if failed || ended.changed.is_some() {
            slot.attempt += 1;
            let next = slot.first.again(slot.attempt);
            slot.last = next.episode.clone();
            let why = ended.changed.map(|what| format!("{CHANGED}{what}"));
            let why = why.unwrap_or_else(|| RUN_AGAIN.to_owned());
            self.dropped.insert(ended.episode, why);
            self.open.insert(next.episode.clone(), at);
            return Some(next);
        }
        self.waits += usize::from(ended.waits_for_group);
        slot.ended = Some(ended);
        None
    }

    /// Returns the last attempts of a group if its score is needed now, and marks the group as being scored.
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

    /// Handles the score of a group. The score of a group that is not being scored has no effect.
    pub fn scored(&mut self, group: &GroupId, mut outcomes: BTreeMap<EpisodeId, TaskOutcome>) {
        if !self.scoring.remove(group) {
            return;
        }
        for slot in self.slots.iter_mut().filter(|s| s.first.group == *group) {
            let Some(ended) = &mut slot.ended else {
                continue;
            };
            ended.outcome = outcomes.remove(&ended.episode);
            self.waits -= usize::from(ended.waits_for_group);
            ended.waits_for_group = false;
        }
    }

    /// Returns the group of the first draw. Used where each set of places holds only one group.
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

    /// Keeps only the named groups, which are complete; the episodes of all others are left out with
    /// `reason`.
    pub(crate) fn keep(&mut self, groups: &[GroupId], reason: &str) -> DroppedGroups {
        let mut stopped = DroppedGroups::default();
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

    /// Whether all episodes have ended and all groups that need a score have one.
    pub fn is_complete(&self) -> bool {
        let held = self.slots.iter().any(|s| s.held);
        self.open.is_empty() && self.scoring.is_empty() && !held
    }

    /// Results of the last attempts that have ended.
    pub fn ends(&self) -> impl Iterator<Item = &EpisodeResult> {
        self.slots.iter().filter_map(|s| s.ended.as_ref())
    }

    /// The last attempts, in the order of the draws.
    pub(crate) fn episodes(&self) -> Vec<EpisodeId> {
        self.slots.iter().map(|s| s.last.clone()).collect()
    }

    /// The last attempts in the order of the draws, one inner vector per group.
    pub(crate) fn groups(&self) -> Vec<Vec<EpisodeId>> {
        let mut groups: BTreeMap<&GroupId, Vec<EpisodeId>> = BTreeMap::new();
        for slot in &self.slots {
            let group = groups.entry(&slot.first.group).or_default();
            group.push(slot.last.clone());
        }
        groups.into_values().collect()
    }

    /// Outcomes of the episodes with a reward, in the order of the draws.
    pub(crate) fn outcomes(&self) -> impl Iterator<Item = CurriculumSample> {
        self.slots.iter().filter_map(|slot| {
            let (kind, success, reward) = slot.ended.as_ref()?.outcome.clone()?;
            Some(CurriculumSample {
                task: slot.first.task,
                kind,
                success,
                reward,
            })
        })
    }
}
