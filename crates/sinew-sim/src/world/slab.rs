//! Episodes of the simulation, and their places.
//!
//! Random numbers of an episode follow from its seed and their purpose.

use super::clock::At;
use crate::agenda::Micros;
use crate::plan::Plan;
use sinew_orchestrator::Draw;
use sinew_rollout::{EpisodeKey, EpisodeMachine, EpisodeSpec, Ticket};
use sinew_types::{EpisodeId, Outcome, Task, TaskId, Trace, mix_hash, mix_seed};
use std::collections::HashMap;
use std::ops::{Index, IndexMut};

/// State of an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EpisodeState {
    /// Its place is free.
    Nothing,
    /// Has not begun.
    Waits,
    Boots,
    WaitsForTurn,
    Generates,
    Acts,
    /// The episode is over and becomes durable.
    Stores,
    /// Durable; waits for its score.
    Scores,
}

/// Purpose of a random number.
#[derive(Clone, Copy)]
pub(super) enum RandomUse {
    Turns,
    Prompt,
    Tokens,
    Observation,
    Boot,
    Call,
    Reward,
    NoSignal,
    Sampling,
}

/// An episode of the simulation.
#[derive(Debug)]
pub(super) struct Episode {
    /// Draw of the core.
    pub(super) draw: Draw,
    pub(super) doing: EpisodeState,
    /// Number of its stay in this place.
    pub(super) round: u32,
    /// Its name in admission.
    pub(super) key: Option<EpisodeKey>,
    /// Its ticket while it has a turn.
    pub(super) turn: Option<Ticket>,
    /// The real machine, while it runs.
    pub(super) machine: Option<EpisodeMachine>,
    /// Its trace, until it is durable.
    pub(super) trace: Option<Trace>,
    /// Turns that it will take, and ids of the next one.
    pub(super) turns: u32,
    pub(super) length: usize,
    /// Number of its running request, and of all it had.
    pub(super) request: Option<u64>,
    /// Requests that it has made.
    pub(super) requests: u32,
    /// Time at which it asked to begin.
    pub(super) asked: Micros,
    /// Time at which it began.
    pub(super) began: Micros,
    /// Time at which its present state began.
    pub(super) phase: Micros,
    /// Seconds of its turns.
    pub(super) generate_s: f64,
    /// Seconds of its tools.
    pub(super) tool_s: f64,
    /// Its next tool never answers.
    pub(super) hangs: bool,
    /// Prompt's length.
    pub(super) prompt: usize,
    /// Units that hold it: a rollout worker and a sandbox host, where there are such roles.
    pub(super) places: [Option<u32>; 2],
    /// The unit whose engine sampled last, where engines are units.
    pub(super) engine: Option<u32>,
}

impl Episode {
    /// A new episode in a place.
    fn of(draw: Draw, round: u32) -> Self {
        Self {
            draw,
            doing: EpisodeState::Nothing,
            round,
            key: None,
            turn: None,
            machine: None,
            trace: None,
            turns: 1,
            length: 1,
            request: None,
            requests: 0,
            asked: 0,
            began: 0,
            phase: 0,
            generate_s: 0.0,
            tool_s: 0.0,
            hangs: false,
            prompt: 1,
            places: [None; 2],
            engine: None,
        }
    }

    /// Whether it has a sandbox: from the end of its wait to its own end.
    pub(super) fn has_sandbox(&self) -> bool {
        matches!(
            self.doing,
            EpisodeState::Boots
                | EpisodeState::WaitsForTurn
                | EpisodeState::Generates
                | EpisodeState::Acts
        )
    }

    /// Seed of what its task decides.
    pub(super) fn common(&self, seed: u64) -> u64 {
        mix_hash(mix_seed(seed, 0x7a5c), self.draw.task as u64)
    }

    /// Its key.
    pub(super) fn key_of(&self, what: RandomUse, n: u64) -> u64 {
        mix_hash(mix_seed(self.draw.seed, what as u64), n)
    }

    /// Keys of an engine's cache: of its context, and of its prompt.
    pub(super) fn cache_keys(&self, seed: u64, slot: u32) -> (u64, u64) {
        let own = u64::from(slot) << 32 | u64::from(self.round) | 1 << 62;
        (own, self.common(seed) | 1 << 63)
    }

    /// The spec that the real loop would have for the episode.
    pub(super) fn spec(&self) -> EpisodeSpec {
        let draw = &self.draw;
        EpisodeSpec {
            episode: draw.episode.clone(),
            group: draw.group.clone(),
            task: Task {
                id: TaskId::new(draw.task.to_string()),
                kind: "k".into(),
                preamble: Vec::new(),
                prompt: String::new(),
                data: serde_json::Value::Null,
                seed: 0,
            },
            draw: draw.draw,
            purpose: draw.purpose.clone(),
            seed: draw.seed,
        }
    }

    /// Outcome from the environment: groups have a signal, except for a share of them.
    pub(super) fn outcome(&self, plan: &Plan) -> Outcome {
        let group = mix_hash(
            mix_seed(plan.seed, RandomUse::NoSignal as u64),
            self.draw.draw,
        );
        let alike = crate::dist::uniform(group) < plan.rollout.no_signal;
        // The first and the second member differ, so that a group has a signal.
        let member = self.draw.episode.as_str().rsplit("-e").next();
        let member = member.and_then(|m| m.split('-').next()?.parse::<u64>().ok());
        let drawn = mix_seed(self.key_of(RandomUse::Reward, 0), 0).is_multiple_of(2);
        let success = !alike && member.map_or(drawn, |m| if m < 2 { m == 0 } else { drawn });
        Outcome {
            reward: f64::from(success),
            success,
            ..Outcome::default()
        }
    }

    /// Seed of its request.
    pub(super) fn sampling_seed(&self) -> u64 {
        let turn = self.machine.as_ref().map_or(0, EpisodeMachine::turns);
        self.key_of(RandomUse::Sampling, u64::from(turn))
    }
}

/// Places of episodes, reused.
#[derive(Debug, Default)]
pub(super) struct Slab {
    places: Vec<Episode>,
    /// Places without an episode.
    free: Vec<u32>,
    /// The place of each episode that has not left.
    by_id: HashMap<EpisodeId, u32>,
}

impl Slab {
    /// A place for an episode that asks to begin at `now`.
    pub(super) fn place(&mut self, draw: Draw, now: Micros) -> u32 {
        let id = draw.episode.clone();
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.places.push(Episode::of(draw.clone(), 0));
                (self.places.len() - 1) as u32
            }
        };
        let round = self[slot].round + 1;
        let mut episode = Episode::of(draw, round);
        episode.asked = now;
        episode.doing = EpisodeState::Waits;
        self[slot] = episode;
        self.by_id.insert(id, slot);
        slot
    }

    /// A place becomes free.
    pub(super) fn leave(&mut self, slot: u32) {
        let episode = &mut self.places[slot as usize];
        self.by_id.remove(&episode.draw.episode);
        episode.round += 1;
        episode.doing = EpisodeState::Nothing;
        (episode.machine, episode.trace) = (None, None);
        self.free.push(slot);
    }

    /// All places become free.
    pub(super) fn leave_all(&mut self) {
        for slot in 0..self.places.len() as u32 {
            if self[slot].doing != EpisodeState::Nothing {
                self.leave(slot);
            }
        }
        self.by_id.clear();
    }

    /// Whether the episode of a happening is still what it was.
    pub(super) fn is(&self, at: At, doing: EpisodeState) -> bool {
        let episode = &self[at.slot];
        episode.round == at.round && episode.doing == doing
    }

    /// The place of an episode that has not left.
    pub(super) fn find(&self, id: &EpisodeId) -> Option<u32> {
        self.by_id.get(id).copied()
    }

    /// Whether every episode has left.
    pub(super) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Episodes that have not left.
    pub(super) fn ids(&self) -> impl Iterator<Item = &EpisodeId> {
        self.by_id.keys()
    }

    /// The place of a live episode, by a fault's number.
    pub(super) fn victim(&self, target: u64) -> Option<u32> {
        let live: Vec<u32> = self.with_sandbox().collect();
        let count = live.len().max(1) as u64;
        live.get((target % count) as usize).copied()
    }

    /// Places of episodes that a unit holds.
    pub(super) fn held_by(&self, unit: u32) -> Vec<u32> {
        let held = |slot: &u32| self[*slot].places.contains(&Some(unit));
        self.with_sandbox().filter(held).collect()
    }

    /// Places of episodes that have a sandbox.
    pub(super) fn with_sandbox(&self) -> impl Iterator<Item = u32> {
        let places = (0..).zip(&self.places);
        places.filter_map(|(slot, e)| e.has_sandbox().then_some(slot))
    }
}

impl Index<u32> for Slab {
    type Output = Episode;

    fn index(&self, slot: u32) -> &Episode {
        &self.places[slot as usize]
    }
}

impl IndexMut<u32> for Slab {
    fn index_mut(&mut self, slot: u32) -> &mut Episode {
        &mut self.places[slot as usize]
    }
}
