//! Progress of episodes in flight, from which the next session resumes them.
//!
//! An episode records each turn when the environment has answered it, and each token when it is sampled. A
//! resumed session replays the actions of the complete turns in a new environment, and compares its
//! observations with the recorded ones. If all are equal, the episode continues after its last token, and no
//! token is sampled again. Otherwise the episode starts again, and its sampled tokens count as lost.
//!
//! This module holds only the state; the training loop writes and reads the files.

use crate::episode::{EpisodeEvent, EpisodeMachine};
use serde::{Deserialize, Serialize};
use sinew_types::{EpisodeId, FinishReason, Node, SampledToken, Timing, TokenId, TokenKind, Trace};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Saved progress of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedEpisode {
    /// Trace with the nodes of all complete turns; a turn is complete with the environment's observation.
    pub trace: Trace,
    /// Sampled tokens of the incomplete turn.
    pub turn: Vec<SampledToken>,
    /// Set once sampling of that turn has ended; the environment has received the turn or is about to.
    pub finish: Option<FinishReason>,
}

/// A complete turn: the sampled tokens and the environment's observation.
pub(crate) struct SavedTurn<'a> {
    pub(crate) sampled: &'a Node,
    pub(crate) forced: &'a [TokenId],
    /// Node of kind `Observation`; of kind `Prompt` if a new context began.
    pub(crate) observation: &'a Node,
}

impl SavedTurn<'_> {
    /// Whether an environment's answer to the turn equals the recorded one.
    pub(crate) fn is_answered_by(&self, answer: &EpisodeEvent) -> bool {
        let (kind, forced, now) = match answer {
            EpisodeEvent::Observed {
                forced,
                observation,
                messages,
                process_reward,
                state_hash,
            } => (
                TokenKind::Observation,
                forced.as_slice(),
                (observation, messages, *process_reward, *state_hash),
            ),
            EpisodeEvent::Renewed {
                prompt,
                messages,
                process_reward,
                state_hash,
                ..
            } => (
                TokenKind::Prompt,
                &[][..],
                (prompt, messages, *process_reward, *state_hash),
            ),
            _ => return false,
        };
        let (seen, reward) = (self.observation, self.sampled.process_reward);
        kind == seen.kind
            && forced == self.forced
            && now == (&seen.tokens, &seen.messages, reward, seen.state_hash)
    }
}

impl SavedEpisode {
    /// An episode without turns, of its trace without nodes.
    fn new(empty: &Trace) -> Self {
        Self {
            trace: empty.clone(),
            turn: Vec::new(),
            finish: None,
        }
    }

    /// Number of sampled tokens so far.
    pub fn sampled_tokens(&self) -> usize {
        self.trace.sampled_tokens() + self.turn.len()
    }

    /// The newest weights version that sampled a token of the episode.
    pub fn newest_version(&self) -> Option<u64> {
        let nodes = self.trace.nodes.iter().flat_map(|n| &n.versions);
        let turn = self.turn.iter().map(|t| t.version.0);
        nodes.map(|s| s.version.0).chain(turn).max()
    }

    /// Returns the prompt and the complete turns; `None` for a trace of another shape, which cannot be
    /// resumed.
    pub(crate) fn turns(&self) -> Option<(&Node, Vec<SavedTurn<'_>>)> {
        let (prompt, mut rest) = self.trace.nodes.split_first()?;
        let mut turns = Vec::new();
        while let [sampled, after @ ..] = rest {
            let (forced, after) = match after {
                [forced, after @ ..] if forced.kind == TokenKind::Forced => {
                    (forced.tokens.as_slice(), after)
                }
                _ => (&[][..], after),
            };
            let [observation, after @ ..] = after else {
                return None;
            };
            let answers = [TokenKind::Observation, TokenKind::Prompt];
            if sampled.kind != TokenKind::Sampled || !answers.contains(&observation.kind) {
                return None;
            }
            turns.push(SavedTurn {
                sampled,
                forced,
                observation,
            });
            rest = after;
        }
        (prompt.kind == TokenKind::Prompt).then_some((prompt, turns))
    }

    /// Whether the progress belongs to the episode that starts with `empty`: same task, seeds, sampling and
    /// versions.
    fn is_of(&self, empty: &Trace) -> bool {
        let head = Trace {
            nodes: Vec::new(),
            timing: Timing::default(),
            ..self.trace.clone()
        };
        head == *empty
    }
}

/// Counts of the episodes that earlier sessions left in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResumedCounts {
    /// Number of episodes that continued.
    pub episodes: usize,
    /// Number of their tokens, which were not sampled again.
    pub tokens: usize,
    /// Number of episodes that started again.
    pub restarted: usize,
    /// Number of their sampled tokens, which were lost.
    pub tokens_lost: usize,
}

impl ResumedCounts {
    /// Whether there was no such episode.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Counts an episode that continued or started again.
    fn count(&mut self, saved: &SavedEpisode, goes_on: bool) {
        let tokens = saved.sampled_tokens();
        if goes_on {
            self.episodes += 1;
            self.tokens += tokens;
        } else {
            self.restarted += 1;
            self.tokens_lost += tokens;
        }
    }

    /// Adds other counts.
    pub fn add(&mut self, other: &Self) {
        self.episodes += other.episodes;
        self.tokens += other.tokens;
        self.restarted += other.restarted;
        self.tokens_lost += other.tokens_lost;
    }

    /// Returns the difference to the counts `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            episodes: self.episodes.saturating_sub(before.episodes),
            tokens: self.tokens.saturating_sub(before.tokens),
            restarted: self.restarted.saturating_sub(before.restarted),
            tokens_lost: self.tokens_lost.saturating_sub(before.tokens_lost),
        }
    }
}

/// Shared progress of one episode.
pub(crate) type Log = Arc<Mutex<SavedEpisode>>;

#[derive(Debug, Default)]
struct State {
    /// Running episodes, and those whose end has not been stored.
    running: HashMap<EpisodeId, Log>,
    /// Episodes of earlier sessions that have not been started again.
    saved: HashMap<EpisodeId, SavedEpisode>,
    resumed: ResumedCounts,
}

/// All episodes in flight of a run.
#[derive(Debug, Default)]
pub struct InFlight(Mutex<State>);

/// Locks the value. It stays consistent if a thread panics, since every change is a single operation.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl InFlight {
    /// Adds episodes of an earlier session; they continue when they are started.
    pub fn give(&self, saved: Vec<SavedEpisode>) {
        let saved = saved.into_iter().map(|s| (s.trace.episode.clone(), s));
        lock(&self.0).saved.extend(saved);
    }

    /// Starts an episode, given its trace without nodes. Returns the progress that an earlier session saved,
    /// if any.
    pub(crate) fn begin(&self, empty: &Trace) -> (Log, Option<SavedEpisode>) {
        let mut state = lock(&self.0);
        let same = match state.saved.remove(&empty.episode) {
            Some(other) if !other.is_of(empty) => {
                state.resumed.count(&other, false);
                None
            }
            same => same,
        };
        // The log keeps the saved progress until the episode has gone through its turns again.
        let progress = same.clone().unwrap_or_else(|| SavedEpisode::new(empty));
        let log = Arc::new(Mutex::new(progress));
        state
            .running
            .insert(empty.episode.clone(), Arc::clone(&log));
        (log, same)
    }

    /// Counts a saved episode as continued or as started again.
    pub(crate) fn went_on(&self, saved: &SavedEpisode, goes_on: bool) {
        lock(&self.0).resumed.count(saved, goes_on);
    }

    /// Counts episodes of an earlier session that cannot be resumed.
    pub fn lost(&self, saved: &[SavedEpisode]) {
        saved.iter().for_each(|saved| self.went_on(saved, false));
    }

    /// Removes an episode that ended, was stopped, or is in the store.
    pub(crate) fn forget(&self, episode: &EpisodeId) {
        let mut state = lock(&self.0);
        state.running.remove(episode);
        state.saved.remove(episode);
    }

    /// All episodes in flight that have sampled tokens, in the order of their ids.
    pub fn read(&self) -> Vec<SavedEpisode> {
        let state = lock(&self.0);
        let running = state.running.values().map(|log| lock(log).clone());
        let all = running.chain(state.saved.values().cloned());
        let mut all: Vec<_> = all.filter(|s| s.sampled_tokens() > 0).collect();
        all.sort_by(|a, b| a.trace.episode.cmp(&b.trace.episode));
        all
    }

    /// Returns the counts of episodes of earlier sessions.
    pub fn resumed(&self) -> ResumedCounts {
        lock(&self.0).resumed
    }
}

/// Records the nodes of complete turns, and the times so far.
pub(crate) fn turned(log: &Log, machine: &EpisodeMachine, timing: Timing) {
    let mut saved = lock(log);
    let known = saved.trace.nodes.len();
    let nodes = machine.nodes();
    saved
        .trace
        .nodes
        .extend_from_slice(&nodes[known.min(nodes.len())..]);
    saved.trace.timing = timing;
    saved.turn.clear();
    saved.finish = None;
}

/// Records tokens of the incomplete turn.
pub(crate) fn sampled(log: &Log, tokens: &[SampledToken]) {
    lock(log).turn.extend_from_slice(tokens);
}

/// Records that sampling of the turn has ended.
pub(crate) fn finished(log: &Log, reason: &FinishReason) {
    lock(log).finish = Some(reason.clone());
}

/// Discards all turns: the episode starts again with `empty`.
pub(crate) fn cleared(log: &Log, empty: &Trace) {
    *lock(log) = SavedEpisode::new(empty);
}
