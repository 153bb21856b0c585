//! Estimates the duration of episodes from earlier episodes of the same task and of the same task type.
//!
//! A step ends with its last episode, so a long episode should not start last (longest processing time first;
//! Graham 1969, "Bounds on multiprocessing timing anomalies"). The estimate of a task uses its ended
//! episodes, in this group or in earlier steps, and its running ones, which take at least as long as they
//! have run so far. If a task has neither, one of its episodes starts before all others, so that its siblings
//! can be ordered by its duration.
//!
//! The order decides when an episode starts and which request the engine prefers. It never changes the
//! sampled tokens.

use crate::episode::EpisodeSpec;
use sinew_types::{EpisodeEnd, EpisodeId, TaskId, Trace};
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::time::Instant;

/// Weight of the newest episode in a moving mean: the policy changes, so old durations become less useful.
const NEWEST: f64 = 0.3;
/// Maximum number of past episodes that a mean counts as.
const WEIGHT: u32 = 4;
/// Expected duration of a running episode, as a multiple of its present duration. With a long-tailed
/// distribution, a long episode is expected to run much longer (Pareto distribution with exponent 3).
const SURVIVED: f64 = 1.5;
/// Maximum number of remembered tasks, and of task types. The oldest tasks are forgotten first, unless their
/// episodes run; types above the maximum are not recorded.
const REMEMBERED: usize = 1 << 16;
/// Scale of a request's priority: tenths of a second, up to 28 hours, above the number of the turn.
const PRIORITY: (f64, f64, i32) = (10.0, 1e6, 1 << 10);

/// Order of two requests when capacity is short, if their episodes have the same expected remaining time or
/// it is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TurnOrder {
    /// Requests with fewer earlier turns first, since these have more turns ahead. For a step that ends with
    /// its last episode.
    #[default]
    FewestFirst,
    /// Requests with more earlier turns first, since these end sooner and free their KV capacity. For
    /// training that takes groups as they complete.
    MostFirst,
}

impl TurnOrder {
    /// Priority of a request after `turns` turns, in `0..1024`; a larger value goes first.
    pub(crate) fn priority(self, turns: u32) -> i32 {
        let last = PRIORITY.2 - 1;
        let turns = i32::try_from(turns).unwrap_or(last).min(last);
        match self {
            Self::FewestFirst => last - turns,
            Self::MostFirst => turns,
        }
    }
}

/// A moving mean.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    value: f64,
    seen: u32,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.seen = self.seen.saturating_add(1);
        let share = NEWEST.max(1.0 / f64::from(self.seen));
        self.value += share * (value - self.value);
    }

    fn known(self) -> Option<f64> {
        (self.seen > 0).then_some(self.value)
    }
}

/// Durations of the episodes of one task.
#[derive(Debug, Default)]
struct Siblings {
    ended: Mean,
    /// Start times of the running episodes, in an order of their own: a sum of floats depends on it.
    running: BTreeMap<EpisodeId, f64>,
}

/// Sort key of a waiting episode; the smallest starts first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rank {
    /// Whether an episode of this task has ended or is running.
    known: bool,
    expected_s: f64,
}

impl Eq for Rank {}

impl Ord for Rank {
    fn cmp(&self, other: &Self) -> Ordering {
        let longest = other.expected_s.total_cmp(&self.expected_s);
        self.known.cmp(&other.known).then(longest)
    }
}

impl PartialOrd for Rank {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Duration that the end of an episode shows, for the estimate of others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LengthEvidence {
    /// Duration in seconds.
    Seconds(f64),
    /// The episode was stopped: others take longer than it did.
    Longer,
    /// No information, since the system failed the episode.
    Failed,
}

/// The estimates, as pure state without a clock.
#[derive(Debug, Default)]
pub struct OutlookCore {
    tasks: HashMap<TaskId, Siblings>,
    kinds: HashMap<String, Mean>,
    all: Mean,
    /// Order in which tasks and types were first seen.
    order: VecDeque<TaskId>,
}

impl OutlookCore {
    /// Records that an episode has started.
    pub fn began(&mut self, spec: &EpisodeSpec, now_s: f64) {
        let id = &spec.task.id;
        if !self.tasks.contains_key(id) {
            self.order.push_back(id.clone());
            self.tasks.insert(id.clone(), Siblings::default());
            self.forget();
        }
        if let Some(task) = self.tasks.get_mut(id) {
            task.running.insert(spec.episode.clone(), now_s);
        }
    }

    /// Records that a started episode has ended.
    pub fn ended(&mut self, spec: &EpisodeSpec, took: LengthEvidence, now_s: f64) {
        let Some(task) = self.tasks.get_mut(&spec.task.id) else {
            return;
        };
        let began = task.running.remove(&spec.episode);
        let seconds = match (took, began) {
            (LengthEvidence::Seconds(seconds), _) => seconds,
            // The episode was cut off, so its time is a lower bound: it counts only above the estimate.
            (LengthEvidence::Longer, Some(began)) if now_s - began > task.ended.value => {
                now_s - began
            }
            (LengthEvidence::Longer | LengthEvidence::Failed, _) => return,
        };
        task.ended.add(seconds);
        self.all.add(seconds);
        let kind = &spec.task.kind;
        if self.kinds.len() < REMEMBERED || self.kinds.contains_key(kind) {
            self.kinds.entry(kind.clone()).or_default().add(seconds);
        }
    }

    /// Returns the expected seconds of an episode of the task, and whether the estimate uses episodes of the
    /// task itself.
    pub fn rank(&self, spec: &EpisodeSpec, now_s: f64) -> Rank {
        let kind = self.kinds.get(&spec.task.kind).and_then(|k| k.known());
        let usual = kind.or(self.all.known()).unwrap_or(0.0);
        let Some(task) = self.tasks.get(&spec.task.id) else {
            return Rank {
                known: false,
                expected_s: usual,
            };
        };
        let mean = task.ended.known().unwrap_or(usual);
        let weight = f64::from(task.ended.seen.clamp(1, WEIGHT));
        let running = task.running.values();
        let running = running.map(|began| (SURVIVED * (now_s - began)).max(mean));
        let sum = mean * weight + running.sum::<f64>();
        Rank {
            known: task.ended.seen > 0 || !task.running.is_empty(),
            expected_s: sum / (weight + task.running.len() as f64),
        }
    }

    /// Expected remaining seconds of a running episode.
    pub fn remaining(&self, spec: &EpisodeSpec, now_s: f64) -> f64 {
        let task = self.tasks.get(&spec.task.id);
        let began = task.and_then(|t| t.running.get(&spec.episode));
        let elapsed = began.map_or(0.0, |began| now_s - began);
        (self.rank(spec, now_s).expected_s - elapsed).max(0.0)
    }

    /// Forgets the oldest tasks, except those with running episodes.
    fn forget(&mut self) {
        for _ in 0..self.order.len() {
            if self.tasks.len() <= REMEMBERED {
                return;
            }
            let Some(oldest) = self.order.pop_front() else {
                return;
            };
            if self
                .tasks
                .get(&oldest)
                .is_some_and(|t| t.running.is_empty())
            {
                drop(self.tasks.remove(&oldest))
            } else {
                self.order.push_back(oldest)
            }
        }
    }
}

/// The estimates of a run, shared by its episodes.
#[derive(Debug)]
pub struct Outlook {
    origin: Instant,
    core: Mutex<OutlookCore>,
}

impl Default for Outlook {
    fn default() -> Self {
        Self {
            origin: Instant::now(),
            core: Mutex::default(),
        }
    }
}

impl Outlook {
    /// Records that an episode has started; dropping the guard records its end.
    pub(crate) fn begin(self: &Arc<Self>, spec: &EpisodeSpec) -> RunningEpisode {
        let now_s = self.now_s();
        self.lock().began(spec, now_s);
        RunningEpisode {
            outlook: Arc::clone(self),
            spec: spec.clone(),
            took: LengthEvidence::Longer,
        }
    }

    /// Returns the index of the waiting episode that starts first.
    pub(crate) fn first<'a>(
        &self,
        waiting: impl Iterator<Item = (usize, &'a EpisodeSpec)>,
    ) -> Option<usize> {
        let (now_s, core) = (self.now_s(), self.lock());
        let first = waiting.min_by_key(|(_, spec)| core.rank(spec, now_s));
        first.map(|(at, _)| at)
    }

    /// Priority of a request, larger for an episode with a longer expected remaining time. Equal ones are
    /// ordered by `order` and the number of turns before the request.
    pub(crate) fn priority(&self, spec: &EpisodeSpec, order: TurnOrder, turns: u32) -> i32 {
        let (per_second, most, step) = PRIORITY;
        let remaining = self.lock().remaining(spec, self.now_s());
        let steps = (remaining * per_second).min(most) as i32;
        steps * step + order.priority(turns)
    }

    fn now_s(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }

    /// No invariant spans a panic while the lock is held, so a poisoned lock is usable.
    fn lock(&self) -> MutexGuard<'_, OutlookCore> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running episode, until it is dropped.
#[derive(Debug)]
pub(crate) struct RunningEpisode {
    outlook: Arc<Outlook>,
    spec: EpisodeSpec,
    took: LengthEvidence,
}

impl RunningEpisode {
    /// Records the end of the episode. An episode that is dropped without this was stopped.
    pub(crate) fn ended(mut self, trace: &Trace) {
        self.took = match trace.end {
            EpisodeEnd::Failed { .. } => LengthEvidence::Failed,
            _ => LengthEvidence::Seconds(trace.timing.total_s),
        };
    }
}

impl Drop for RunningEpisode {
    fn drop(&mut self) {
        let now_s = self.outlook.now_s();
        self.outlook.lock().ended(&self.spec, self.took, now_s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{GroupId, Task};

    fn spec(task: &str, episode: usize) -> EpisodeSpec {
        EpisodeSpec {
            episode: EpisodeId::new(format!("{task}-{episode}")),
            group: GroupId::new(task),
            task: Task {
                id: TaskId::new(task),
                kind: "k".into(),
                ..Task::default()
            },
            draw: 0,
            purpose: "train".into(),
            seed: 0,
        }
    }

    /// One of each task first, then the siblings of those that take long, ended or not.
    #[test]
    fn siblings_follow_by_what_the_first_one_shows() {
        let mut core = OutlookCore::default();
        for (task, seconds) in [("short", Some(1.0)), ("long", Some(9.0)), ("runs", None)] {
            core.began(&spec(task, 0), 0.0);
            if let Some(seconds) = seconds {
                core.ended(&spec(task, 0), LengthEvidence::Seconds(seconds), 0.0);
            }
        }
        let order = |now: f64| {
            let mut tasks = ["short", "long", "runs", "new"];
            tasks.sort_by_key(|task| core.rank(&spec(task, 1), now));
            tasks
        };
        assert_eq!(order(2.0), ["new", "long", "runs", "short"]);
        assert_eq!(order(30.0), ["new", "runs", "long", "short"]);
    }

    /// The order of waiting episodes is a function of the events, down to the last bit of a sum.
    #[test]
    fn equal_histories_give_equal_ranks() {
        let rank = || {
            let mut core = OutlookCore::default();
            for episode in 0..16 {
                core.began(&spec("t", episode), 0.1 * episode as f64);
            }
            core.rank(&spec("t", 16), 7.3)
        };
        let first = rank();
        assert!((0..100).all(|_| rank() == first));
    }

    #[test]
    fn a_failure_says_nothing_and_a_policy_that_changes_is_followed() {
        let mut core = OutlookCore::default();
        let one = spec("t", 0);
        for seconds in [Some(10.0), None, Some(1.0), Some(1.0), Some(1.0), Some(1.0)] {
            core.began(&one, 0.0);
            core.ended(
                &one,
                seconds.map_or(LengthEvidence::Failed, LengthEvidence::Seconds),
                99.0,
            );
        }
        let expected = core.rank(&one, 0.0).expected_s;
        // An episode that was stopped sooner than usual is no evidence, one that was stopped later is.
        core.began(&one, 0.0);
        core.ended(&one, LengthEvidence::Longer, 0.5);
        assert_eq!(core.rank(&one, 0.0).expected_s, expected);
        let mut stopped = OutlookCore::default();
        stopped.began(&one, 0.0);
        stopped.ended(&one, LengthEvidence::Longer, 7.0);
        assert_eq!(stopped.rank(&one, 0.0).expected_s, 7.0);
        assert!((1.0..4.0).contains(&expected), "{expected}");
        assert_eq!(core.rank(&spec("other", 0), 0.0).expected_s, expected);
        core.began(&one, 5.0);
        assert!(core.remaining(&one, 5.5) < core.remaining(&one, 5.0));
        assert_eq!(core.remaining(&one, 500.0), 0.0);
    }

    #[test]
    fn the_expected_rest_counts_before_the_turns() {
        let (most, fewest) = (TurnOrder::MostFirst, TurnOrder::FewestFirst);
        for turns in [0, 1, 7, 2000] {
            assert!(most.priority(turns) <= most.priority(turns + 1));
            assert!(fewest.priority(turns) >= fewest.priority(turns + 1));
        }
        assert_eq!(
            (most.priority(u32::MAX), fewest.priority(u32::MAX)),
            (1023, 0)
        );
        let outlook = Outlook::default();
        let (long, short) = (spec("long", 0), spec("short", 0));
        let took = [(&long, 90.0), (&short, 10.0)];
        for (spec, seconds) in took {
            outlook.lock().began(spec, 0.0);
            outlook
                .lock()
                .ended(spec, LengthEvidence::Seconds(seconds), 0.0);
        }
        for (order, turns) in [(most, [0, 9]), (fewest, [9, 0])] {
            let of = |spec, turns| outlook.priority(spec, order, turns);
            assert!(of(&long, turns[0]) > of(&short, turns[1]));
            assert!(of(&long, turns[1]) > of(&long, turns[0]));
        }
    }

    #[test]
    fn tasks_that_run_are_not_forgotten() {
        let mut core = OutlookCore::default();
        core.began(&spec("runs", 0), 0.0);
        for n in 0..REMEMBERED + 10 {
            let one = spec(&format!("t{n}"), 0);
            core.began(&one, 0.0);
            core.ended(&one, LengthEvidence::Seconds(1.0), 0.0);
        }
        assert_eq!(core.tasks.len(), REMEMBERED);
        assert_eq!(core.order.len(), REMEMBERED);
        assert!(core.rank(&spec("runs", 1), 50.0).expected_s > 20.0);
        assert!(!core.rank(&spec("t0", 1), 0.0).known);
    }
}
