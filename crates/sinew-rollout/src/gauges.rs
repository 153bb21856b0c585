//! Counters and live episodes of a run, for display.
//!
//! No decision depends on them: a value may lag by a few episodes. A reader blocks episodes only while it
//! copies the list of live ones.

use sinew_types::{EpisodeEnd, EpisodeId, FailureKind, NO_PARENT, TokenKind, Trace};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;
use tokio::time::Instant;

/// Phase of an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The environment starts.
    Boot,
    /// The engine samples a turn.
    Generate,
    /// The environment acts, or the agent program runs.
    Tool,
    /// The environment scores the episode.
    Score,
    /// The episode is between two phases, or waits for admission to generate.
    Wait,
}

impl Phase {
    const COUNT: usize = 5;

    /// Short name for display.
    pub fn name(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Generate => "model",
            Self::Tool => "tool",
            Self::Score => "score",
            Self::Wait => "wait",
        }
    }
}

/// Maximum number of ended phases that wait for a reader; above it, the oldest are dropped.
const MAX_SPANS: usize = 4096;

/// A phase of an episode, after its end.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseSpan {
    /// Id of the episode.
    pub episode: EpisodeId,
    pub phase: Phase,
    /// End of the phase, in seconds since 1970.
    pub ended_unix_s: f64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Maximum number of failures that wait for a reader; above it, the oldest are dropped.
const MAX_FAILURES: usize = 256;
/// Maximum length of a stored failure reason, in bytes.
const MAX_REASON: usize = 2000;

/// An episode that the system failed.
#[derive(Clone, Debug, PartialEq)]
pub struct FailedEpisode {
    /// Id of the episode.
    pub episode: EpisodeId,
    /// The part that failed.
    pub kind: FailureKind,
    /// The reason, cut at 2,000 bytes.
    pub reason: String,
    /// Time of the failure, in seconds since 1970.
    pub ended_unix_s: f64,
}

/// Maximum number of ended episodes that wait for a reader; above it, the oldest are dropped.
const MAX_ENDED: usize = 4096;

/// An ended episode with its results.
#[derive(Clone, Debug, PartialEq)]
pub struct EndedEpisode {
    /// Id of the episode.
    pub episode: EpisodeId,
    /// Total reward; `None` without a score, or if the system failed the episode.
    pub reward: Option<f64>,
    pub success: bool,
    /// For each sampled turn in order: number of context tokens, and number of sampled tokens.
    pub turns: Vec<(usize, usize)>,
}

impl EndedEpisode {
    fn of(trace: &Trace) -> Self {
        // Tokens up to the end of each node; parents come before their children.
        let mut until: Vec<usize> = Vec::with_capacity(trace.nodes.len());
        let mut turns = Vec::new();
        for node in &trace.nodes {
            let before = match node.parent {
                NO_PARENT => 0,
                parent => until.get(parent as usize).copied().unwrap_or(0),
            };
            if node.kind == TokenKind::Sampled {
                turns.push((before, node.tokens.len()));
            }
            until.push(before + node.tokens.len());
        }
        let failed = matches!(trace.end, EpisodeEnd::Failed { .. });
        let reward = trace.score().filter(|_| !failed);
        Self {
            episode: trace.episode.clone(),
            reward,
            success: reward.is_some() && trace.outcome.success,
            turns,
        }
    }
}

/// Counters that the driver updates and views read. They use relaxed atomics, since they are only displayed.
#[derive(Debug, Default)]
pub struct Gauges {
    /// Number of episodes in each phase, indexed by phase number.
    in_phase: [AtomicUsize; Phase::COUNT],
    /// Number of episodes that have started and not ended.
    in_flight: AtomicUsize,
    finished: AtomicU64,
    succeeded: AtomicU64,
    failed: AtomicU64,
    /// Microseconds spent in environments by finished episodes.
    tool_calls_us: AtomicU64,
    /// Episodes in flight.
    live: Mutex<HashMap<EpisodeId, Live>>,
    /// Phases that ended since they were last read.
    spans: Mutex<VecDeque<PhaseSpan>>,
    /// Failed episodes since they were last read.
    failures: Mutex<VecDeque<FailedEpisode>>,
    /// Ended episodes since they were last read.
    ended: Mutex<VecDeque<EndedEpisode>>,
}

/// A live episode without its id.
#[derive(Debug)]
struct Live {
    phase: Phase,
    since: Instant,
    deadline: Option<Instant>,
}

/// An episode that has started and not ended.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveEpisode {
    /// Id of the episode.
    pub episode: EpisodeId,
    /// Its current phase.
    pub phase: Phase,
    /// Seconds in that phase.
    pub phase_s: f64,
    /// Seconds until its deadline; `None` without one.
    pub left_s: Option<f64>,
}

/// Leaves the phase when dropped.
#[derive(Debug)]
pub struct PhaseGuard<'a> {
    gauges: &'a Gauges,
    episode: &'a EpisodeId,
    phase: Phase,
    since: Instant,
}

impl Drop for PhaseGuard<'_> {
    fn drop(&mut self) {
        self.gauges.in_phase[self.phase as usize].fetch_sub(1, Ordering::Relaxed);
        self.gauges.left(self);
        self.gauges.set(self.episode, Phase::Wait, None);
    }
}

/// Removes the episode from those in flight when dropped.
#[derive(Debug)]
pub struct FlightGuard<'a> {
    gauges: &'a Gauges,
    episode: &'a EpisodeId,
}

impl Drop for FlightGuard<'_> {
    fn drop(&mut self) {
        self.gauges.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.gauges.live().remove(self.episode);
    }
}

/// A reading of [`Gauges`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GaugesReading {
    /// Number of episodes that have started and not ended.
    pub in_flight: usize,
    /// Number of episodes in [`Phase::Boot`].
    pub booting: usize,
    /// Number of episodes in [`Phase::Generate`].
    pub generating: usize,
    /// Number of episodes in [`Phase::Tool`] or [`Phase::Score`].
    pub in_tool: usize,
    /// Number of episodes that ended since the start of the program.
    pub finished: u64,
    pub succeeded: u64,
    pub failed: u64,
    /// Microseconds that episodes spent in their environments, summed over episodes.
    pub tool_us: u64,
}

impl Gauges {
    /// Counts an episode as in `phase` until the guard is dropped. `deadline` is for display.
    pub fn enter<'a>(
        &'a self,
        episode: &'a EpisodeId,
        phase: Phase,
        deadline: Option<Instant>,
    ) -> PhaseGuard<'a> {
        self.in_phase[phase as usize].fetch_add(1, Ordering::Relaxed);
        self.set(episode, phase, deadline);
        PhaseGuard {
            gauges: self,
            episode,
            phase,
            since: Instant::now(),
        }
    }

    /// Stores a phase that has ended, for readers that draw or export it.
    fn left(&self, guard: &PhaseGuard<'_>) {
        let span = PhaseSpan {
            episode: guard.episode.clone(),
            phase: guard.phase,
            ended_unix_s: unix_s(),
            seconds: guard.since.elapsed().as_secs_f64(),
        };
        push(&self.spans, span, MAX_SPANS);
    }

    /// Failed episodes since the last call, at most a few hundred, in the order of their ends.
    pub fn take_failures(&self) -> Vec<FailedEpisode> {
        take(&self.failures)
    }

    /// Episodes that ended since the last call, at most a few thousand, in the order of their ends.
    pub fn take_ended(&self) -> Vec<EndedEpisode> {
        take(&self.ended)
    }

    /// Phases that ended since the last call, at most a few thousand, in the order of their ends.
    pub fn take_spans(&self) -> Vec<PhaseSpan> {
        take(&self.spans)
    }

    /// Counts an episode as in flight until the guard is dropped.
    pub fn begin<'a>(&'a self, episode: &'a EpisodeId) -> FlightGuard<'a> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        let live = Live {
            phase: Phase::Wait,
            since: Instant::now(),
            deadline: None,
        };
        self.live().insert(episode.clone(), live);
        FlightGuard {
            gauges: self,
            episode,
        }
    }

    fn live(&self) -> MutexGuard<'_, HashMap<EpisodeId, Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, episode: &EpisodeId, phase: Phase, deadline: Option<Instant>) {
        if let Some(live) = self.live().get_mut(episode) {
            *live = Live {
                phase,
                since: Instant::now(),
                deadline,
            };
        }
    }

    /// Live episodes, at most `most`; those that have been in their phase longest come first.
    pub fn longest(&self, most: usize) -> Vec<LiveEpisode> {
        let now = Instant::now();
        let shown = |(episode, live): (&EpisodeId, &Live)| LiveEpisode {
            episode: episode.clone(),
            phase: live.phase,
            phase_s: now.saturating_duration_since(live.since).as_secs_f64(),
            left_s: live
                .deadline
                .map(|at| at.saturating_duration_since(now).as_secs_f64()),
        };
        let mut all: Vec<LiveEpisode> = self.live().iter().map(shown).collect();
        all.sort_by(|a, b| {
            let longer = b.phase_s.total_cmp(&a.phase_s);
            longer.then_with(|| a.episode.cmp(&b.episode))
        });
        all.truncate(most);
        all
    }

    /// Counts a finished episode. A failed one counts as finished, too.
    pub fn finish(&self, trace: &Trace) {
        self.finished.fetch_add(1, Ordering::Relaxed);
        if trace.outcome.success {
            self.succeeded.fetch_add(1, Ordering::Relaxed);
        }
        if let EpisodeEnd::Failed { kind, message } = &trace.end {
            self.failed.fetch_add(1, Ordering::Relaxed);
            let failed = FailedEpisode {
                episode: trace.episode.clone(),
                kind: *kind,
                reason: message[..message.floor_char_boundary(MAX_REASON)].to_owned(),
                ended_unix_s: unix_s(),
            };
            push(&self.failures, failed, MAX_FAILURES);
        }
        push(&self.ended, EndedEpisode::of(trace), MAX_ENDED);
        let us = (trace.timing.tool_s * 1e6) as u64;
        self.tool_calls_us.fetch_add(us, Ordering::Relaxed);
    }

    /// The current values.
    pub fn read(&self) -> GaugesReading {
        let phase = |p: Phase| self.in_phase[p as usize].load(Ordering::Relaxed);
        GaugesReading {
            in_flight: self.in_flight.load(Ordering::Relaxed),
            booting: phase(Phase::Boot),
            generating: phase(Phase::Generate),
            in_tool: phase(Phase::Tool) + phase(Phase::Score),
            finished: self.finished.load(Ordering::Relaxed),
            succeeded: self.succeeded.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            tool_us: self.tool_calls_us.load(Ordering::Relaxed),
        }
    }
}

/// Seconds since 1970.
pub fn unix_s() -> f64 {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since_1970.map_or(0.0, |d| d.as_secs_f64())
}

/// Empties a list.
fn take<T>(list: &Mutex<VecDeque<T>>) -> Vec<T> {
    let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
    list.drain(..).collect()
}

/// Appends to a list of at most `most` entries; the oldest entry is dropped if it is full.
fn push<T>(list: &Mutex<VecDeque<T>>, entry: T, most: usize) {
    let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
    if list.len() == most {
        list.pop_front();
    }
    list.push_back(entry);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Moves the start of the episode's phase so many seconds back.
    fn earlier(gauges: &Gauges, episode: &EpisodeId, seconds: u64) {
        let mut live = gauges.live();
        let live = live.get_mut(episode).unwrap();
        live.since -= Duration::from_secs(seconds);
    }

    #[test]
    fn episodes_that_are_longest_in_a_phase_come_first_with_their_deadline() {
        let gauges = Gauges::default();
        let ids = ["a", "b", "c"].map(EpisodeId::new);
        let guards = ids.each_ref().map(|id| gauges.begin(id));
        let deadline = Instant::now() + Duration::from_secs(1000);
        let tool = gauges.enter(&ids[1], Phase::Tool, Some(deadline));
        let model = gauges.enter(&ids[0], Phase::Generate, None);
        for (id, seconds) in ids.iter().zip([100, 200, 300]) {
            earlier(&gauges, id, seconds);
        }
        let told = |most| -> Vec<_> {
            let hundreds = |s: f64| (s / 100.0).round() as u32;
            let longest = gauges.longest(most).into_iter();
            let told = longest.map(|l| {
                let left = l.left_s.map(hundreds);
                (l.episode.to_string(), l.phase, hundreds(l.phase_s), left)
            });
            told.collect()
        };
        let c = ("c".to_owned(), Phase::Wait, 3, None);
        let b = ("b".to_owned(), Phase::Tool, 2, Some(10));
        let a = ("a".to_owned(), Phase::Generate, 1, None);
        assert_eq!(told(9), [c.clone(), b.clone(), a]);
        assert_eq!(told(2), [c, b]);
        assert_eq!((gauges.read().generating, gauges.read().in_tool), (1, 1));
        // An episode between two phases waits.
        drop((tool, model));
        assert_eq!(told(2)[1].1, Phase::Wait);
        assert_eq!((gauges.read().generating, gauges.read().in_tool), (0, 0));
        drop(guards);
        assert_eq!(told(9), []);
        assert_eq!(gauges.read().in_flight, 0);
        let spans = gauges.take_spans();
        let phases: Vec<Phase> = spans.iter().map(|s| s.phase).collect();
        assert_eq!(phases, [Phase::Tool, Phase::Generate]);
        assert!(
            spans
                .iter()
                .all(|s| s.seconds >= 0.0 && s.ended_unix_s > 0.0)
        );
        assert_eq!(gauges.take_spans(), []);
    }

    #[test]
    fn failures_are_told_once_and_bounded() {
        let spec = crate::EpisodeSpec {
            episode: EpisodeId::new("e"),
            group: sinew_types::GroupId::new("g"),
            task: sinew_types::Task {
                id: sinew_types::TaskId::new("t"),
                kind: "k".into(),
                ..sinew_types::Task::default()
            },
            draw: 1,
            purpose: "train".into(),
            seed: 7,
        };
        let sampling = sinew_types::SamplingParams::default();
        let mut trace = spec.empty_trace(&crate::RunInfo::default(), &sampling);
        let gauges = Gauges::default();
        trace.outcome.reward = 0.5;
        let given =
            |parent, kind, n| sinew_types::Node::given(parent, 0, kind, vec![1; n], Vec::new());
        trace.nodes = vec![
            given(NO_PARENT, TokenKind::Prompt, 10),
            given(0, TokenKind::Sampled, 3),
            given(1, TokenKind::Observation, 4),
            given(2, TokenKind::Sampled, 2),
            // A branch from the first turn.
            given(1, TokenKind::Sampled, 5),
        ];
        gauges.finish(&trace);
        assert_eq!(gauges.take_failures(), []);
        let ended = gauges.take_ended();
        assert_eq!(ended[0].turns, [(10, 3), (17, 2), (13, 5)]);
        assert_eq!((ended[0].reward, ended.len()), (Some(0.5), 1));
        trace.end = EpisodeEnd::Failed {
            kind: FailureKind::Sandbox,
            message: "é".repeat(MAX_REASON),
        };
        for _ in 0..MAX_FAILURES + 5 {
            gauges.finish(&trace);
        }
        let told = gauges.take_failures();
        assert_eq!(
            (told.len(), told[0].reason.len()),
            (MAX_FAILURES, MAX_REASON)
        );
        assert_eq!(
            (told[0].kind, gauges.take_failures()),
            (FailureKind::Sandbox, vec![])
        );
    }

    #[test]
    fn spans_that_are_not_taken_are_bounded() {
        let gauges = Gauges::default();
        let id = EpisodeId::new("a");
        for _ in 0..MAX_SPANS + 10 {
            drop(gauges.enter(&id, Phase::Tool, None));
        }
        assert_eq!(gauges.take_spans().len(), MAX_SPANS);
    }
}
