//! Rollouts that agents outside finish, put together to groups: pure, time is an argument.
//!
//! A group is whole once it has its full number of finished rollouts, or once its first one has waited long
//! enough. A rollout that was opened without a group is a group by itself. Unscored and failed rollouts take
//! a place in their group and are dropped, with the reason. A group is given out once.

use sinew_orchestrator::BEHIND;
use sinew_types::{EpisodeEnd, EpisodeId, GroupId, PolicyVersion, Trace};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Prefix of the reasons of rollouts that ended without a score.
pub(crate) const UNSCORED: &str = "unscored: ";

/// Default of [`IntakeConfig::max_waiting`].
pub const MAX_WAITING: usize = 65_536;

/// Rules by which rollouts become groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IntakeConfig {
    /// Rollouts of a whole group.
    pub group_size: usize,
    /// Minimum of scored ones among them that the algorithm can use.
    pub min_group: usize,
    /// Seconds from the first rollout of a group to its end, whole or not.
    pub group_wait_s: f64,
    /// Updates that the oldest sampled token of a rollout may be behind.
    pub max_age: u64,
    /// Maximum number of rollouts that wait to be trained, in whole groups or not, and of groups that are not
    /// whole. Above it the oldest groups are dropped, whole ones first.
    pub max_waiting: usize,
}

/// Facts of a finished rollout that decide about its training.
#[derive(Clone, Debug, PartialEq)]
pub struct FinishedRollout {
    /// Id in the store.
    pub episode: EpisodeId,
    /// Equal for rollouts that are compared; its own id if it was opened without a group.
    pub group: GroupId,
    /// Version of its oldest sampled token.
    pub version: PolicyVersion,
    /// Reason why it cannot be trained.
    pub unfit: Option<String>,
}

impl FinishedRollout {
    /// Reads a stored trace. If `late`, a trace without a reward can be trained: its reward may come from
    /// outside.
    pub fn of(trace: &Trace, late: bool) -> Self {
        let oldest = trace.oldest_version();
        let unfit = match &trace.end {
            EpisodeEnd::Failed { kind, .. } => Some(format!("failed: {kind:?}").to_lowercase()),
            _ if oldest.is_none() => Some("no call of the model gave a token".to_owned()),
            _ if trace.outcome.unscored && !late => Some(match &trace.outcome.unscored_reason {
                Some(reason) => format!("{UNSCORED}{reason}"),
                None => format!("{UNSCORED}no reward was given"),
            }),
            _ => None,
        };
        Self {
            episode: trace.episode.clone(),
            group: trace.group.clone(),
            version: oldest.unwrap_or_default(),
            unfit,
        }
    }

    /// Whether it was opened without a group.
    pub fn is_alone(&self) -> bool {
        self.group.as_str() == self.episode.as_str()
    }
}

/// A group that is not whole yet.
#[derive(Debug)]
struct OpenGroup {
    /// Time at which its first rollout was finished.
    since: f64,
    /// All finished ones, fit or not.
    finished: usize,
    fit: Vec<FinishedRollout>,
}

/// Groups and dropped rollouts that a step is given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IntakeBatch {
    pub groups: Vec<Vec<EpisodeId>>,
    /// Rollouts that are not to be trained, with the reason of each.
    pub dropped: BTreeMap<EpisodeId, String>,
}

/// Finished rollouts on their way to training.
#[derive(Debug)]
pub struct Intake {
    config: IntakeConfig,
    open: BTreeMap<GroupId, OpenGroup>,
    /// Whole groups, in the order in which they became so.
    ready: VecDeque<Vec<FinishedRollout>>,
    waiting: usize,
    dropped: BTreeMap<EpisodeId, String>,
    /// Time of the last event.
    heard: f64,
}

impl Intake {
    /// Starts without rollouts at `now`, in seconds of any clock.
    pub fn new(config: IntakeConfig, now: f64) -> Self {
        Self {
            config,
            open: BTreeMap::new(),
            ready: VecDeque::new(),
            waiting: 0,
            dropped: BTreeMap::new(),
            heard: now,
        }
    }

    /// Adds a finished rollout, which must be in the store.
    pub fn finished(&mut self, rollout: FinishedRollout, now: f64) {
        self.heard = now;
        let (alone, group) = (rollout.is_alone(), rollout.group.clone());
        let entry = self.open.entry(group.clone()).or_insert(OpenGroup {
            since: now,
            finished: 0,
            fit: Vec::new(),
        });
        entry.finished += 1;
        let whole = alone || entry.finished >= self.config.group_size;
        match &rollout.unfit {
            Some(why) => {
                self.dropped.insert(rollout.episode.clone(), why.clone());
            }
            None => {
                self.waiting += 1;
                entry.fit.push(rollout);
            }
        }
        if whole {
            self.close(&group, alone);
        }
        self.bound();
    }

    /// A rollout shows that it is at work: the idle time begins again.
    pub fn heard(&mut self, now: f64) {
        self.heard = self.heard.max(now);
    }

    /// Seconds since anything was heard of.
    pub fn idle_s(&self, now: f64) -> f64 {
        (now - self.heard).max(0.0)
    }

    /// Groups that are whole, after those were ended that have waited long enough.
    pub fn ready(&mut self, now: f64) -> usize {
        let wait = self.config.group_wait_s;
        let late = self.open.iter().filter(|(_, g)| now - g.since >= wait);
        let late: Vec<GroupId> = late.map(|(id, _)| id.clone()).collect();
        for group in late {
            self.close(&group, false);
        }
        self.ready.len()
    }

    /// Rollouts of a whole group.
    pub fn group_size(&self) -> usize {
        self.config.group_size
    }

    /// Rollouts that can be trained and were not given out, in whole groups or not.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Whether as many rollouts as `groups` groups have were dropped, and none can be trained: a step that
    /// reports it is better than a wait without end.
    pub fn is_fruitless(&self, groups: usize) -> bool {
        self.ready.is_empty() && self.dropped.len() >= groups * self.config.group_size
    }

    /// Removes and returns at most `count` groups for weights of `version`, and all rollouts dropped so far.
    /// A group whose name is in `names` (the names of the step) waits: two groups of one name would be read
    /// back as one.
    pub fn take(
        &mut self,
        count: usize,
        version: PolicyVersion,
        names: &mut BTreeSet<GroupId>,
    ) -> IntakeBatch {
        let mut batch = IntakeBatch::default();
        let mut later = VecDeque::new();
        while batch.groups.len() < count
            && let Some(group) = self.ready.pop_front()
        {
            if !names.insert(group[0].group.clone()) {
                later.push_back(group);
                continue;
            }
            self.waiting -= group.len();
            if let Some(group) = self.young(group, version) {
                batch.groups.push(group);
            }
        }
        while let Some(group) = later.pop_back() {
            self.ready.push_front(group);
        }
        batch.dropped = std::mem::take(&mut self.dropped);
        batch
    }

    /// The members of a group that are young enough, if they are enough.
    fn young(
        &mut self,
        group: Vec<FinishedRollout>,
        version: PolicyVersion,
    ) -> Option<Vec<EpisodeId>> {
        let least = self.least(group[0].is_alone());
        let max_age = self.config.max_age;
        let fits = |r: &FinishedRollout| version.0.saturating_sub(r.version.0) <= max_age;
        let (young, old): (Vec<_>, Vec<_>) = group.into_iter().partition(fits);
        for rollout in old {
            let why = format!("{BEHIND}sampled more than {max_age} updates ago");
            self.dropped.insert(rollout.episode, why);
        }
        let young: Vec<EpisodeId> = young.into_iter().map(|r| r.episode).collect();
        if young.len() >= least {
            return Some(young);
        }
        self.drop_all(young, least);
        None
    }

    /// Minimum of a group.
    fn least(&self, alone: bool) -> usize {
        if alone {
            1
        } else {
            self.config.min_group.max(1)
        }
    }

    /// Closes a group. It becomes ready if enough of its rollouts can be compared; otherwise its episodes are
    /// dropped with the reason.
    fn close(&mut self, id: &GroupId, alone: bool) {
        let Some(group) = self.open.remove(id) else {
            return;
        };
        let least = self.least(alone);
        if group.fit.len() >= least {
            self.ready.push_back(group.fit);
            return;
        }
        self.waiting -= group.fit.len();
        self.drop_all(group.fit.into_iter().map(|r| r.episode).collect(), least);
    }

    fn drop_all(&mut self, episodes: Vec<EpisodeId>, least: usize) {
        for episode in episodes {
            let why = format!("group too small: fewer than {least} rollouts of it can be compared");
            self.dropped.insert(episode, why);
        }
    }

    /// Drops the oldest groups while too many rollouts wait.
    fn bound(&mut self) {
        let most = self.config.max_waiting;
        while self.waiting > most
            && let Some(group) = self.ready.pop_front()
        {
            self.drop_waiting(group);
        }
        if self.waiting <= most && self.open.len() <= most {
            return;
        }
        // More than is needed, so that the next ones need no search.
        let room = most - most / 8;
        let mut order: Vec<(f64, GroupId)> = self
            .open
            .iter()
            .map(|(id, g)| (g.since, id.clone()))
            .collect();
        order.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
        for (_, id) in order {
            if self.waiting <= room && self.open.len() <= room {
                return;
            }
            if let Some(group) = self.open.remove(&id) {
                self.drop_waiting(group.fit);
            }
        }
    }

    /// Rollouts for which there is no room.
    fn drop_waiting(&mut self, group: Vec<FinishedRollout>) {
        self.waiting -= group.len();
        let most = self.config.max_waiting;
        let why = format!("more than {most} rollouts waited to be trained");
        let dropped = group.into_iter().map(|r| (r.episode, why.clone()));
        self.dropped.extend(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CONFIG: IntakeConfig = IntakeConfig {
        group_size: 3,
        min_group: 2,
        group_wait_s: 10.0,
        max_age: 2,
        max_waiting: 1_000,
    };

    fn rollout(id: &str, group: &str, version: u64) -> FinishedRollout {
        FinishedRollout {
            episode: EpisodeId::new(id),
            group: GroupId::new(group),
            version: PolicyVersion(version),
            unfit: None,
        }
    }

    fn unscored(id: &str, group: &str) -> FinishedRollout {
        FinishedRollout {
            unfit: Some("unscored: no reward was given".into()),
            ..rollout(id, group, 0)
        }
    }

    fn ids(ids: &[&str]) -> Vec<EpisodeId> {
        ids.iter().map(|id| EpisodeId::new(*id)).collect()
    }

    #[test]
    fn a_group_is_given_once_when_all_of_it_is_finished() {
        let mut intake = Intake::new(CONFIG, 0.0);
        intake.finished(rollout("a", "g", 0), 1.0);
        intake.finished(unscored("b", "g"), 2.0);
        assert_eq!(intake.ready(3.0), 0);
        intake.finished(rollout("c", "g", 0), 3.0);
        assert_eq!(intake.ready(3.0), 1);
        let batch = intake.take(5, PolicyVersion(0), &mut BTreeSet::new());
        assert_eq!(batch.groups, [ids(&["a", "c"])]);
        assert!(batch.dropped[&EpisodeId::new("b")].starts_with("unscored"));
        assert_eq!(
            intake.take(5, PolicyVersion(0), &mut BTreeSet::new()),
            IntakeBatch::default()
        );
    }

    #[test]
    fn a_group_that_waits_too_long_goes_on_with_what_it_has() {
        let mut intake = Intake::new(CONFIG, 0.0);
        intake.finished(rollout("a", "g", 0), 1.0);
        intake.finished(rollout("b", "g", 0), 9.0);
        intake.finished(rollout("c", "small", 0), 2.0);
        assert_eq!(intake.ready(10.9), 0);
        assert_eq!(intake.ready(12.0), 1);
        let batch = intake.take(5, PolicyVersion(0), &mut BTreeSet::new());
        assert_eq!(batch.groups, [ids(&["a", "b"])]);
        assert!(batch.dropped[&EpisodeId::new("c")].starts_with("group too small"));
    }

    #[test]
    fn a_rollout_that_was_opened_alone_is_a_group() {
        let mut intake = Intake::new(CONFIG, 0.0);
        intake.finished(rollout("a", "a", 0), 1.0);
        assert_eq!(intake.ready(1.0), 1);
        assert_eq!(
            intake
                .take(1, PolicyVersion(1), &mut BTreeSet::new())
                .groups,
            [ids(&["a"])]
        );
        intake.finished(unscored("b", "b"), 1.0);
        assert_eq!(intake.ready(1.0), 0);
        assert_eq!(
            intake
                .take(1, PolicyVersion(1), &mut BTreeSet::new())
                .dropped
                .len(),
            1
        );
    }

    #[test]
    fn what_is_too_old_is_dropped_and_may_take_its_group_along() {
        let mut intake = Intake::new(CONFIG, 0.0);
        for (id, group, version) in [
            ("a", "g", 1),
            ("b", "g", 3),
            ("c", "g", 4),
            ("d", "h", 1),
            ("e", "h", 1),
            ("f", "h", 4),
        ] {
            intake.finished(rollout(id, group, version), 0.0);
        }
        let batch = intake.take(2, PolicyVersion(4), &mut BTreeSet::new());
        assert_eq!(batch.groups, [ids(&["b", "c"])]);
        let why = |id: &str| batch.dropped[&EpisodeId::new(id)].clone();
        assert!(why("a").starts_with("too old") && why("d").starts_with("too old"));
        assert!(why("f").starts_with("group too small"));
    }

    #[test]
    fn groups_that_never_become_whole_are_bounded_too() {
        let config = IntakeConfig {
            max_waiting: 16,
            ..CONFIG
        };
        let mut intake = Intake::new(config, 0.0);
        for n in 0..200 {
            let (id, group) = (format!("e{n:03}"), format!("g{n:03}"));
            // Every second one cannot be trained: its group is open all the same.
            match n % 2 {
                0 => intake.finished(rollout(&id, &group, 0), f64::from(n) / 100.0),
                _ => intake.finished(unscored(&id, &group), f64::from(n) / 100.0),
            }
            assert!(intake.waiting() <= 16 && intake.open.len() <= 16);
        }
        let dropped = intake
            .take(1, PolicyVersion(0), &mut BTreeSet::new())
            .dropped;
        assert_eq!(dropped.len() + intake.waiting(), 200);
        let why = &dropped[&EpisodeId::new("e000")];
        assert_eq!(why, "more than 16 rollouts waited to be trained");
        // A rollout of a group that was dropped begins a new one; whole groups go first.
        for id in ["x", "y", "z"] {
            intake.finished(rollout(id, "whole", 0), 9.0);
        }
        assert_eq!(intake.ready(9.0), 1);
    }

    #[test]
    fn two_groups_of_one_name_go_to_two_steps() {
        let mut intake = Intake::new(CONFIG, 0.0);
        for id in ["a", "b", "c", "d", "e", "f"] {
            intake.finished(rollout(id, "g", 0), 0.0);
        }
        intake.finished(rollout("x", "x", 0), 0.0);
        let first = intake
            .take(2, PolicyVersion(0), &mut BTreeSet::new())
            .groups;
        assert_eq!(first, [ids(&["a", "b", "c"]), ids(&["x"])]);
        assert_eq!(
            intake
                .take(2, PolicyVersion(0), &mut BTreeSet::new())
                .groups,
            [ids(&["d", "e", "f"])]
        );
    }

    proptest! {
        /// Every rollout comes out exactly once, in a group or as dropped.
        #[test]
        fn nothing_is_lost_or_given_twice(
            events in prop::collection::vec((0u8..6, 0u64..6, any::<bool>(), 0u8..4), 1..80),
        ) {
            let mut intake = Intake::new(CONFIG, 0.0);
            let (mut seen, mut now) = (Vec::new(), 0.0);
            let mut out = |batch: IntakeBatch| {
                seen.extend(batch.groups.into_iter().flatten());
                seen.extend(batch.dropped.into_keys());
            };
            for (n, (group, version, fit, take)) in events.iter().enumerate() {
                now += 1.5;
                let id = format!("e{n}");
                let group = if *group == 0 { id.clone() } else { format!("g{group}") };
                let mut finished = rollout(&id, &group, *version);
                finished.unfit = (!fit).then(|| "unscored".to_owned());
                intake.finished(finished, now);
                if *take == 0 {
                    intake.ready(now);
                    out(intake.take(2, PolicyVersion(*version), &mut BTreeSet::new()));
                }
            }
            while intake.ready(now + 100.0) > 0 {
                out(intake.take(3, PolicyVersion(5), &mut BTreeSet::new()));
            }
            out(intake.take(3, PolicyVersion(5), &mut BTreeSet::new()));
            out(intake.take(3, PolicyVersion(5), &mut BTreeSet::new()));
            let count = seen.len();
            seen.sort();
            seen.dedup();
            prop_assert_eq!((seen.len(), count), (events.len(), events.len()));
        }
    }
}
