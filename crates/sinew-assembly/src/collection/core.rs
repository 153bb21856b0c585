//! Decides which episodes of a collection run, and counts their ends: events in, draws out.
//!
//! Groups begin in the order of their draws. A group that an earlier session stored whole is counted from the
//! index and never read. All members of any other group are requested. The port returns those that the store
//! has, so that a reward that is missing is requested again and a member that the system failed has another
//! attempt.

use sinew_orchestrator::{
    CollectProgress, Draw, EpisodeResult, EpisodeSlots, SlotActions, TaskDraws, TaskOutcome,
};
use sinew_types::{EpisodeId, GroupId};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Groups that are drawn at once. Draws by weight depend on it.
const BLOCK: usize = 64;

/// Settings of a collection of episodes.
#[derive(Debug)]
pub struct CollectConfig {
    /// Seed of the recipe.
    pub seed: u64,
    /// The last group has fewer members if this is not a multiple of their number.
    pub episodes: u64,
    /// Episodes of one task that may be compared.
    pub group_size: usize,
    /// Number of further attempts of an episode that the system failed.
    pub retries: u32,
    /// Maximum number of episodes that have begun, or wait for the score of their group.
    pub room: usize,
}

/// Facts about an episode that the store returns without reading its trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KnownEpisode {
    /// The system failed it.
    pub failed: bool,
    /// Success and reward, where it has them.
    pub outcome: Option<(bool, f64)>,
}

/// Decides what is run next.
#[derive(Debug)]
pub struct Collector {
    config: CollectConfig,
    draws: TaskDraws,
    /// Blocks drawn so far.
    blocks: u64,
    /// Groups that were drawn and have not started.
    drawn: VecDeque<Vec<Draw>>,
    /// Episodes that have begun or were there.
    begun: u64,
    /// Episodes of earlier sessions that were not met yet.
    known: HashMap<EpisodeId, KnownEpisode>,
    open: HashMap<GroupId, EpisodeSlots>,
    /// Groups of the attempts that run.
    owners: HashMap<EpisodeId, GroupId>,
    /// Episodes of `open`.
    members: usize,
    /// Progress counts over all sessions.
    counts: CollectProgress,
    sums: (f64, u64),
    now: u64,
}

impl Collector {
    /// Goes on from what the store has.
    pub fn new(
        config: CollectConfig,
        draws: TaskDraws,
        known: HashMap<EpisodeId, KnownEpisode>,
    ) -> Self {
        let counts = CollectProgress {
            of: config.episodes,
            ..CollectProgress::default()
        };
        Self {
            config,
            draws,
            blocks: 0,
            drawn: VecDeque::new(),
            begun: 0,
            known,
            open: HashMap::new(),
            owners: HashMap::new(),
            members: 0,
            counts,
            sums: (0.0, 0),
            now: 0,
        }
    }

    /// The episodes to begin now: whole groups, as long as there is room. Groups that are in the store with
    /// all their rewards only count.
    pub fn begin(&mut self) -> Vec<Draw> {
        let mut begin = Vec::new();
        while self.members < self.config.room && self.begun < self.config.episodes {
            let group = self.next_group();
            self.begun += group.len() as u64;
            if let Some(ends) = self.stored(&group) {
                ends.into_iter().for_each(|known| self.count(known));
                continue;
            }
            let Some(first) = group.first() else {
                continue;
            };
            let mut slots = EpisodeSlots::new(self.config.retries);
            slots.add(&group);
            for draw in &group {
                self.owners
                    .insert(draw.episode.clone(), first.group.clone());
            }
            self.open.insert(first.group.clone(), slots);
            self.members += group.len();
            begin.extend(group);
        }
        begin
    }

    /// The next group in the order of the draws, cut where the collection ends.
    fn next_group(&mut self) -> Vec<Draw> {
        if self.drawn.is_empty() {
            self.blocks += 1;
            let (seed, group_size) = (self.config.seed, self.config.group_size);
            let groups = self.draws.groups(seed, self.blocks, BLOCK, group_size);
            self.drawn.extend(groups);
        }
        let mut group = self.drawn.pop_front().unwrap_or_default();
        let left = self.config.episodes - self.begun;
        group.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        group
    }

    /// Takes the ends of a group that an earlier session stored whole, if nothing is left to do for it. A
    /// member without a reward may wait for that of its group, as its trace shows.
    fn stored(&mut self, group: &[Draw]) -> Option<Vec<KnownEpisode>> {
        let last = |draw: &Draw| self.known.get(&draw.episode).copied();
        let ends: Option<Vec<KnownEpisode>> = group
            .iter()
            .map(|draw| last(draw).filter(|known| known.outcome.is_some()))
            .collect();
        for draw in group {
            self.known.remove(&draw.episode);
        }
        ends
    }

    /// Records the end of an episode. Returns the attempt to run or the group to score next.
    pub fn ended(&mut self, ended: EpisodeResult) -> SlotActions {
        let Some(group) = self.owners.remove(&ended.episode) else {
            return SlotActions::default();
        };
        let Some(slots) = self.open.get_mut(&group) else {
            return SlotActions::default();
        };
        let follows = slots.ended(ended);
        if let Some(again) = &follows.again {
            self.owners.insert(again.episode.clone(), group.clone());
        }
        self.close(&group);
        follows
    }

    /// Handles the score of a group.
    pub fn scored(&mut self, group: &GroupId, outcomes: BTreeMap<EpisodeId, TaskOutcome>) {
        if let Some(slots) = self.open.get_mut(group) {
            slots.scored(group, outcomes);
        }
        self.close(group);
    }

    /// Counts a group and forgets it, if nothing of it is awaited.
    fn close(&mut self, group: &GroupId) {
        if !self.open.get(group).is_some_and(EpisodeSlots::is_complete) {
            return;
        }
        let Some(slots) = self.open.remove(group) else {
            return;
        };
        for ended in slots.ends() {
            self.members -= 1;
            self.now += u64::from(!ended.stored);
            let outcome = ended.outcome.as_ref();
            self.count(KnownEpisode {
                failed: ended.failed,
                outcome: outcome.map(|(_, success, reward)| (*success, *reward)),
            });
        }
    }

    fn count(&mut self, known: KnownEpisode) {
        let counts = &mut self.counts;
        counts.episodes += 1;
        match known.outcome {
            Some((success, reward)) => {
                counts.scored += 1;
                self.sums.0 += reward;
                self.sums.1 += u64::from(success);
            }
            None if known.failed => counts.failed += 1,
            None => counts.unscored += 1,
        }
    }

    /// Whether a group is open.
    pub fn is_open(&self, group: &GroupId) -> bool {
        self.open.contains_key(group)
    }

    /// Whether all episodes have ended.
    pub fn is_done(&self) -> bool {
        self.begun >= self.config.episodes && self.open.is_empty()
    }

    /// Returns the progress `elapsed_s` seconds after this session began.
    pub fn progress(&self, elapsed_s: f64) -> CollectProgress {
        let mean = |sum: f64| (self.counts.scored > 0).then(|| sum / self.counts.scored as f64);
        let rate = self.now as f64 / elapsed_s.max(1e-9);
        let left = (self.counts.of - self.counts.episodes) as f64;
        CollectProgress {
            reward: mean(self.sums.0),
            success: mean(self.sums.1 as f64),
            episodes_per_s: rate,
            left_s: (self.now > 0).then(|| left / rate),
            ..self.counts.clone()
        }
    }

    /// Episodes that ended in this session.
    pub fn now(&self) -> u64 {
        self.now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_orchestrator::TaskSampling;
    use std::collections::BTreeSet;

    fn collector(episodes: u64, room: usize, known: HashMap<EpisodeId, KnownEpisode>) -> Collector {
        let config = CollectConfig {
            seed: 3,
            episodes,
            group_size: 4,
            retries: 1,
            room,
        };
        Collector::new(config, TaskDraws::new(TaskSampling::Uniform, 10), known)
    }

    fn end(draw: &Draw, reward: Option<f64>) -> EpisodeResult {
        EpisodeResult {
            episode: draw.episode.clone(),
            failed: reward.is_none(),
            stored: false,
            outcome: reward.map(|r| (String::new(), r > 0.5, r)),
            waits_for_group: false,
            changed: None,
        }
    }

    /// Runs all to the end, one episode a time, and gives those that were run.
    fn run(mut c: Collector, reward: f64) -> (BTreeSet<EpisodeId>, CollectProgress) {
        let (mut waiting, mut ran) = (VecDeque::new(), BTreeSet::new());
        loop {
            waiting.extend(c.begin());
            let Some(draw) = waiting.pop_front() else {
                assert!(c.is_done());
                return (ran, c.progress(1.0));
            };
            assert!(ran.insert(draw.episode.clone()), "{draw:?} ran twice");
            let follows = c.ended(end(&draw, Some(reward)));
            assert!(follows.again.is_none() && follows.group.is_none());
        }
    }

    #[test]
    fn as_many_episodes_run_as_were_asked_for_and_the_room_is_kept() {
        let (ran, progress) = run(collector(1001, 9, HashMap::new()), 0.25);
        assert_eq!(ran.len(), 1001);
        assert_eq!(
            (progress.episodes, progress.scored, progress.failed),
            (1001, 1001, 0)
        );
        assert_eq!((progress.reward, progress.success), (Some(0.25), Some(0.0)));
        let mut c = collector(1001, 9, HashMap::new());
        // Whole groups of four: one more episode than fits keeps a group together.
        assert_eq!(c.begin().len(), 12);
        assert!(c.begin().is_empty());
    }

    #[test]
    fn a_session_runs_what_the_others_did_not_and_more_begin_with_the_same() {
        let (all, _) = run(collector(300, 50, HashMap::new()), 1.0);
        let stored = KnownEpisode {
            failed: false,
            outcome: Some((true, 1.0)),
        };
        // A kill leaves any part of it: here every third, so that no group is whole, or the first 100.
        let thirds = all.iter().step_by(3).map(|e| (e.clone(), stored));
        let (rest, progress) = run(collector(300, 50, thirds.collect()), 1.0);
        assert_eq!(rest, all, "the groups are asked for as a whole");
        assert_eq!(progress.episodes, 300);
        let first = all.iter().take(100).map(|e| (e.clone(), stored));
        let known: HashMap<_, _> = first.collect();
        let (rest, progress) = run(collector(300, 50, known.clone()), 0.0);
        assert_eq!((rest.len(), progress.episodes), (200, 300));
        assert!(rest.iter().all(|e| !known.contains_key(e)));
        assert_eq!(progress.success, Some(100.0 / 300.0));
        let (more, _) = run(collector(500, 50, HashMap::new()), 1.0);
        assert!(all.is_subset(&more));
    }

    #[test]
    fn a_failed_episode_is_run_again_and_counts_once() {
        let mut c = collector(4, 4, HashMap::new());
        let draws = c.begin();
        let again = c.ended(end(&draws[0], None)).again.unwrap();
        assert!(again.episode.as_str().ends_with("-r1"));
        assert!(c.ended(end(&again, None)).again.is_none());
        for draw in &draws[1..] {
            assert!(!c.is_done());
            c.ended(end(draw, Some(1.0)));
        }
        let progress = c.progress(2.0);
        assert!(c.is_done());
        assert_eq!(
            (progress.episodes, progress.failed, progress.scored),
            (4, 1, 3)
        );
        assert_eq!(progress.episodes_per_s, 2.0);
    }

    #[test]
    fn a_group_stays_open_until_it_is_scored() {
        let mut c = collector(8, 4, HashMap::new());
        let draws = c.begin();
        let mut follows = SlotActions::default();
        for draw in &draws {
            follows = c.ended(EpisodeResult {
                waits_for_group: true,
                changed: None,
                failed: false,
                outcome: None,
                ..end(draw, None)
            });
        }
        assert_eq!(follows.group.unwrap().len(), 4);
        let group = draws[0].group.clone();
        assert!(c.is_open(&group) && c.begin().is_empty());
        let outcomes = draws[..3]
            .iter()
            .map(|d| (d.episode.clone(), (String::new(), true, 1.0)));
        c.scored(&group, outcomes.collect());
        assert_eq!((c.begin().len(), c.progress(1.0).unscored), (4, 1));
    }
}
