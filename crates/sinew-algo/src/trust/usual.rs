//! Usual values of a run: turns and answers of its episodes, by group and by family (task type).

use super::answers::{Answer, hash};
use super::{prompt, solved, turns};
use serde::{Deserialize, Serialize};
use sinew_types::{GroupId, Trace};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// An episode is too fast if it needs at most a quarter of the median number of turns of others, and the
/// median is at least this value. Below it, a difference of one turn is not meaningful.
const FASTER: u32 = 4;

/// Minimum number of other solved episodes, siblings or of the family, for comparing turns.
const SIBLINGS: usize = 3;
const OTHERS: usize = 8;

/// Divisor: at most one in ten of the others may be as fast.
const AS_FAST: usize = 10;

/// Number of different tasks of a family that one answer must solve before it is suspicious.
const TASKS: usize = 10;
/// Minimum share of such tasks in all tasks of the family that were answered: four in five.
const SHARE: (usize, usize) = (4, 5);

/// Number of episodes that a run remembers per family between its steps.
const REMEMBERED: usize = 256;
/// Number of families that a run remembers; further ones are ignored.
const FAMILIES: usize = 64;

/// Data of one episode for the usual values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// Its task type.
    family: String,
    seen: EpisodeDigest,
}

/// Turns, success, hash of the prompt, hash of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct EpisodeDigest(u32, bool, u64, Option<u64>);

impl Sighting {
    /// Returns the data of a trace.
    pub fn of(trace: &Trace) -> Self {
        let answer = Answer::of(trace).map(|a| a.hash());
        Self {
            family: trace.task_kind.clone(),
            seen: EpisodeDigest(turns(trace), solved(trace), hash(&prompt(trace)), answer),
        }
    }
}

/// The newest episodes of each family of a run, in order, up to a fixed number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Sightings(BTreeMap<String, VecDeque<EpisodeDigest>>);

impl Sightings {
    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds an episode. Only the first 64 families are remembered.
    pub fn add(&mut self, sighting: Sighting) {
        let room = self.0.len() < FAMILIES || self.0.contains_key(&sighting.family);
        if !room {
            return;
        }
        let family = self.0.entry(sighting.family).or_default();
        family.push_back(sighting.seen);
        if family.len() > REMEMBERED {
            family.pop_front();
        }
    }
}

/// Histogram of the turns of solved episodes.
#[derive(Clone, Debug, Default)]
struct Turns(BTreeMap<u32, usize>);

impl Turns {
    fn add(&mut self, turns: u32) {
        *self.0.entry(turns).or_default() += 1;
    }

    /// Returns the number of all episodes, the number of those with at most `turns`, and the median, without
    /// one episode that needs `turns`.
    fn others(&self, turns: u32) -> Option<(usize, usize, u32)> {
        let all = self.0.values().sum::<usize>().checked_sub(1)?;
        let as_fast: usize = self.0.range(..=turns).map(|(_, n)| n).sum();
        let mut before = 0;
        let middle = self.0.iter().find(|&(&t, &n)| {
            before += n - usize::from(t == turns);
            before * 2 > all
        });
        Some((all, as_fast.saturating_sub(1), *middle?.0))
    }

    /// Returns evidence if `turns` are too few.
    fn too_fast(&self, turns: u32, least: usize, whose: &str) -> Option<String> {
        let (all, as_fast, median) = self.others(turns)?;
        let few = median >= FASTER && turns.saturating_mul(FASTER) <= median;
        let rare = all >= least && as_fast * AS_FAST <= all;
        (few && rare).then(|| {
            format!("solved in {turns} turns; the median of {all} solved {whose} is {median}")
        })
    }
}

/// Tasks of a family, by the hashes of their prompts.
#[derive(Clone, Debug, Default)]
struct Family {
    turns: Turns,
    /// All tasks that were answered.
    tried: BTreeSet<u64>,
    /// Tasks that each answer solved, by the hash of the answer.
    won: BTreeMap<u64, BTreeSet<u64>>,
}

/// Usual values of a run.
#[derive(Clone, Debug, Default)]
pub struct Usual {
    families: BTreeMap<String, Family>,
    siblings: BTreeMap<GroupId, Turns>,
}

impl Usual {
    /// Adds episodes of earlier steps.
    pub fn remember(&mut self, earlier: &Sightings) {
        for (name, seen) in &earlier.0 {
            let family = self.families.entry(name.clone()).or_default();
            seen.iter().for_each(|s| family.add(*s));
        }
    }

    /// Adds an episode to its group and its family.
    pub fn add(&mut self, trace: &Trace) {
        let Sighting { family, seen } = Sighting::of(trace);
        if seen.1 {
            let group = self.siblings.entry(trace.group.clone()).or_default();
            group.add(seen.0);
        }
        self.families.entry(family).or_default().add(seen);
    }

    /// Returns evidence if a solved episode was too fast. It is compared with its siblings, which have the
    /// same task, before others.
    pub(super) fn too_fast(&self, trace: &Trace) -> Option<String> {
        let turns = turns(trace);
        let siblings = self.siblings.get(&trace.group);
        let enough = |t: &&Turns| t.others(turns).is_some_and(|(all, ..)| all >= SIBLINGS);
        if let Some(siblings) = siblings.filter(enough) {
            return siblings.too_fast(turns, SIBLINGS, "siblings");
        }
        let family = self.families.get(&trace.task_kind)?;
        family.turns.too_fast(turns, OTHERS, "episodes of its type")
    }

    /// Returns evidence if the answer of a solved episode solves most tasks of the family.
    pub(super) fn one_answer(&self, trace: &Trace, answer: &Answer) -> Option<String> {
        let family = self.families.get(&trace.task_kind)?;
        let won = family.won.get(&answer.hash()).map_or(0, BTreeSet::len);
        let tried = family.tried.len();
        let most = won >= TASKS && won * SHARE.1 >= tried * SHARE.0;
        most.then(|| {
            let shown = answer.shown();
            format!("the answer `{shown}` wins {won} of {tried} different tasks of its type")
        })
    }
}

impl Family {
    fn add(&mut self, EpisodeDigest(turns, solved, prompt, answer): EpisodeDigest) {
        if solved {
            self.turns.add(turns);
        }
        let Some(answer) = answer else { return };
        self.tried.insert(prompt);
        if solved {
            self.won.entry(answer).or_default().insert(prompt);
        }
    }
}
