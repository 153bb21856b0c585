//! Episodes: admission, sandboxes, turns and tools.
//!
//! An episode waits for its place, boots, and then turns between generating and a tool until its machine ends
//! it. Its random numbers follow from its seed and their purpose. A place is returned before the trace is
//! written, as in the runner.

use super::{At, Happening, World};
use crate::agenda::{Micros, seconds};
use crate::check::Bug;
use crate::engine::VOCAB;
use sinew_orchestrator::Draw;
use sinew_rollout::{
    EpisodeCommand, EpisodeEvent, EpisodeKey, EpisodeLimits, EpisodeMachine, EpisodeSpec,
    LengthEvidence, Rank, RunInfo, Ticket,
};
use sinew_types::{
    FailureKind, Outcome, SamplingParams, Task, TaskId, Timing, TokenId, Trace, mix_hash, mix_seed,
};

/// State of an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EpisodeState {
    /// The place is free.
    Nothing,
    /// Has not started.
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
enum RandomUse {
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
    /// Key in admission.
    pub(super) key: Option<EpisodeKey>,
    /// Ticket while it has a turn.
    pub(super) turn: Option<Ticket>,
    /// The real machine, while it runs.
    pub(super) machine: Option<EpisodeMachine>,
    /// Trace, until it is durable.
    pub(super) trace: Option<Trace>,
    /// Turns that it will take, and ids of the next one.
    turns: u32,
    pub(super) length: usize,
    /// Number of its running request, and of all it had.
    pub(super) request: Option<u64>,
    /// Requests that it has made.
    pub(super) requests: u32,
    /// Time at which it asked to begin.
    asked: Micros,
    /// Time at which it began.
    began: Micros,
    /// Time at which its present state began.
    phase: Micros,
    /// Seconds of its turns.
    generate_s: f64,
    /// Seconds of its tools.
    tool_s: f64,
    /// Whether the next tool never answers.
    pub(super) hangs: bool,
    /// Prompt's length.
    pub(super) prompt: usize,
}

impl Episode {
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
    fn common(&self, seed: u64) -> u64 {
        mix_hash(mix_seed(seed, 0x7a5c), self.draw.task as u64)
    }

    /// Returns the key of a random number of the episode.
    fn key_of(&self, what: RandomUse, n: u64) -> u64 {
        mix_hash(mix_seed(self.draw.seed, what as u64), n)
    }

    /// Keys of an engine's cache: of its context, and of its prompt.
    pub(super) fn cache_keys(&self, seed: u64, slot: u32) -> (u64, u64) {
        let own = u64::from(slot) << 32 | u64::from(self.round) | 1 << 62;
        (own, self.common(seed) | 1 << 63)
    }
}

/// The spec that the real loop would have for the episode.
fn spec(draw: &Draw) -> EpisodeSpec {
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

impl World {
    /// Episodes are to be run.
    pub(super) fn start(&mut self, draws: Vec<Draw>) {
        for draw in draws {
            if self.bug == Some(Bug::Forget) && self.ledger.begun == 7 {
                self.bug = None;
                self.ledger.began(&draw.episode);
                continue;
            }
            self.ledger.began(&draw.episode);
            if let Some(stored) = self.kept.stored.get(&draw.episode) {
                self.recover(draw, stored.clone());
                continue;
            }
            let slot = self.place(draw);
            self.waiting.push_back(slot);
        }
        self.begin_some();
    }

    /// A place in the slab for an episode.
    pub(super) fn place(&mut self, draw: Draw) -> u32 {
        let id = draw.episode.clone();
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.episodes.push(Episode::of(draw.clone(), 0));
                (self.episodes.len() - 1) as u32
            }
        };
        let round = self.episodes[slot as usize].round + 1;
        let mut episode = Episode::of(draw, round);
        episode.asked = self.now;
        episode.doing = EpisodeState::Waits;
        self.episodes[slot as usize] = episode;
        self.by_id.insert(id, slot);
        slot
    }

    /// Lets those that wait ask to begin: one that would not begin yet is the last.
    pub(super) fn begin_some(&mut self) {
        while !self.waiting.is_empty() && self.admission.reading().new == 0 {
            let Some(slot) = self.first_waiting() else {
                return;
            };
            let (key, ticket) = self.admission.ask();
            self.measure.inputs += 1;
            self.episodes[slot as usize].key = Some(key);
            self.tickets.insert(ticket, slot);
            self.settle_once();
        }
    }

    /// The one that begins next.
    fn first_waiting(&mut self) -> Option<u32> {
        if !self.plan.rollout.longest_first {
            return self.waiting.pop_front();
        }
        let now_s = self.now_s();
        // The rank depends only on the task and the time; members of a group follow each other.
        let mut last: Option<(usize, Rank)> = None;
        let mut rank = |slot: u32| {
            let draw = &self.episodes[slot as usize].draw;
            match last {
                Some((task, rank)) if task == draw.task => rank,
                _ => {
                    let rank = self.outlook.rank(&spec(draw), now_s);
                    last = Some((draw.task, rank));
                    rank
                }
            }
        };
        let at = (0..self.waiting.len()).min_by_key(|at| rank(self.waiting[*at]))?;
        self.waiting.remove(at)
    }

    /// Lets waiting turns continue if admission allows, and further episodes begin.
    pub(super) fn settle(&mut self) {
        self.settle_once();
        self.begin_some();
    }

    /// Lets waiting turns continue if admission allows.
    fn settle_once(&mut self) {
        let now_s = self.now_s();
        self.measure.inputs += 1;
        for ticket in self.admission.decide(now_s) {
            let Some(slot) = self.tickets.remove(&ticket) else {
                continue;
            };
            match self.episodes[slot as usize].doing {
                EpisodeState::Waits => self.boot(slot),
                EpisodeState::WaitsForTurn => self.generate(slot),
                _ => {}
            }
        }
    }

    /// The next happening of an episode.
    fn then(&mut self, slot: u32, delay_s: f64, what: fn(At) -> Happening) {
        let round = self.episodes[slot as usize].round;
        self.after(delay_s, what(At { slot, round }));
    }

    /// The episode of a happening, if it is still what it was.
    fn at(&self, at: At, doing: EpisodeState) -> bool {
        let episode = &self.episodes[at.slot as usize];
        episode.round == at.round && episode.doing == doing
    }

    /// Starts the environment of an episode.
    fn boot(&mut self, slot: u32) {
        let now = self.now;
        let episode = &mut self.episodes[slot as usize];
        (episode.doing, episode.began) = (EpisodeState::Boots, now);
        let boot_s = self
            .plan
            .tools
            .boot_s
            .draw(episode.key_of(RandomUse::Boot, 0));
        let timeout_s = self.plan.rollout.timeout_s;
        self.then(slot, boot_s, Happening::Booted);
        if timeout_s < 86_400.0 {
            self.then(slot, timeout_s, Happening::Deadline);
        }
        if self.plan.rollout.longest_first {
            let now_s = self.now_s();
            self.outlook
                .began(&spec(&self.episodes[slot as usize].draw), now_s);
        }
    }

    /// Handles the end of an environment's start.
    pub(super) fn booted(&mut self, at: At) {
        if !self.at(at, EpisodeState::Boots) {
            return;
        }
        let (plan, grain) = (self.plan.clone(), self.speed.grain);
        let episode = &mut self.episodes[at.slot as usize];
        let (share, common) = (plan.episode.task_share, episode.common(plan.seed));
        let turns = &plan.episode.turns;
        let turns = turns.draw_shared(
            episode.key_of(RandomUse::Turns, 0),
            mix_seed(common, 1),
            share,
        );
        episode.turns = turns.round().clamp(1.0, 1e6) as u32;
        let prompt = plan
            .episode
            .prompt_tokens
            .draw(mix_hash(common, RandomUse::Prompt as u64));
        let most = plan.episode.max_context_tokens / grain;
        episode.prompt = ids(prompt, grain).min(most.saturating_sub(1).max(1));
        let limits = EpisodeLimits {
            max_turns: u32::MAX,
            max_turn_tokens: u32::MAX,
            max_context_tokens: most.max(2) as u32,
        };
        let sampling = SamplingParams::default();
        let trace = spec(&episode.draw).empty_trace(&RunInfo::default(), &sampling);
        episode.machine = Some(EpisodeMachine::new(trace, limits, 1.0));
        let prompt = tokens(common, episode.prompt);
        self.event(
            at.slot,
            EpisodeEvent::Reset {
                prompt,
                messages: Vec::new(),
                state_hash: None,
            },
        );
    }

    /// An event of an episode's machine, and what it asks for.
    pub(super) fn event(&mut self, slot: u32, event: EpisodeEvent) {
        self.measure.inputs += 1;
        let Some(machine) = &mut self.episodes[slot as usize].machine else {
            return;
        };
        match machine.on_event(event) {
            EpisodeCommand::Generate { max_tokens } => self.ask_turn(slot, max_tokens as usize),
            EpisodeCommand::Step => self.act(slot),
            EpisodeCommand::Score => {
                let outcome = self.outcome(slot);
                self.event(
                    slot,
                    EpisodeEvent::Done {
                        outcome,
                        process_reward: 0.0,
                    },
                );
            }
            EpisodeCommand::Finish => self.over(slot),
            EpisodeCommand::Wait => {}
        }
    }

    /// It wants to generate.
    fn ask_turn(&mut self, slot: u32, most: usize) {
        let (now, now_s) = (self.now, self.now_s());
        let (plan, grain) = (self.plan.clone(), self.speed.grain);
        let episode = &mut self.episodes[slot as usize];
        let (Some(machine), Some(key)) = (&episode.machine, episode.key) else {
            return;
        };
        let turn = u64::from(machine.turns());
        let common = mix_hash(episode.common(plan.seed), turn);
        let drawn = plan.episode.turn_tokens.draw_shared(
            episode.key_of(RandomUse::Tokens, turn),
            common,
            plan.episode.task_share,
        );
        episode.length = ids(drawn, grain).min(most).max(1);
        (episode.doing, episode.phase) = (EpisodeState::WaitsForTurn, now);
        let ticket = self.admission.ask_turn(key, machine.context(), now_s);
        episode.turn = Some(ticket);
        self.measure.inputs += 1;
        self.tickets.insert(ticket, slot);
        self.settle();
    }

    /// A turn is over: its place is returned, and the episode continues.
    pub(super) fn turn_over(&mut self, slot: u32) {
        let (now, now_s) = (self.now, self.now_s());
        let episode = &mut self.episodes[slot as usize];
        episode.request = None;
        episode.generate_s += seconds(now - episode.phase);
        if let (Some(key), Some(ticket)) = (episode.key, episode.turn.take()) {
            self.measure.inputs += 1;
            self.admission.turn_ended(key, ticket, now_s);
        }
    }

    /// A tool runs.
    fn act(&mut self, slot: u32) {
        let now = self.now;
        let episode = &mut self.episodes[slot as usize];
        (episode.doing, episode.phase) = (EpisodeState::Acts, now);
        let turn = u64::from(episode.machine.as_ref().map_or(0, EpisodeMachine::turns));
        let call_s = self
            .plan
            .tools
            .call_s
            .draw(episode.key_of(RandomUse::Call, turn));
        if !std::mem::take(&mut episode.hangs) {
            self.then(slot, call_s, Happening::ToolDone);
        }
        self.settle();
    }

    /// A tool answered.
    pub(super) fn tool_done(&mut self, at: At) {
        if !self.at(at, EpisodeState::Acts) {
            return;
        }
        let now = self.now;
        let (plan, grain) = (self.plan.clone(), self.speed.grain);
        let episode = &mut self.episodes[at.slot as usize];
        episode.tool_s += seconds(now - episode.phase);
        let turn = episode.machine.as_ref().map_or(0, EpisodeMachine::turns);
        if turn >= episode.turns {
            let outcome = self.outcome(at.slot);
            return self.event(
                at.slot,
                EpisodeEvent::Done {
                    outcome,
                    process_reward: 0.0,
                },
            );
        }
        let key = episode.key_of(RandomUse::Observation, u64::from(turn));
        let observation = tokens(key, ids(plan.episode.observation_tokens.draw(key), grain));
        self.event(
            at.slot,
            EpisodeEvent::Observed {
                forced: Vec::new(),
                observation,
                messages: Vec::new(),
                process_reward: 0.0,
                state_hash: None,
            },
        );
    }

    /// Handles the deadline of an episode.
    pub(super) fn deadline(&mut self, at: At) {
        let episode = &self.episodes[at.slot as usize];
        if episode.round == at.round && episode.has_sandbox() && episode.machine.is_some() {
            self.cut(at.slot);
            self.event(at.slot, EpisodeEvent::Deadline);
        }
    }

    /// The system fails an episode.
    pub(super) fn fail(&mut self, slot: u32, kind: FailureKind, message: &str) {
        self.cut(slot);
        if self.episodes[slot as usize].machine.is_none() {
            // Its world was not up.
            let draw = &self.episodes[slot as usize].draw;
            let trace = spec(draw).empty_trace(&RunInfo::default(), &SamplingParams::default());
            let limits = EpisodeLimits {
                max_turns: 1,
                max_turn_tokens: 1,
                max_context_tokens: 1,
            };
            self.episodes[slot as usize].machine = Some(EpisodeMachine::new(trace, limits, 1.0));
        }
        let message = message.to_owned();
        self.event(slot, EpisodeEvent::Failed { kind, message });
    }

    /// Ends what an episode waits for: its turn, its request.
    pub(super) fn cut(&mut self, slot: u32) {
        let episode = &mut self.episodes[slot as usize];
        let request = episode.request.take();
        let ticket = episode.turn;
        if let Some(ticket) = ticket {
            self.tickets.remove(&ticket);
            self.held.retain(|s| *s != slot);
            self.turn_over(slot);
        }
        if let Some(request) = request {
            self.abort(request);
        }
    }

    /// An episode that is not wanted any more goes, wherever it is.
    pub(super) fn abandon(&mut self, slot: u32) {
        self.cut(slot);
        let (doing, key) = {
            let episode = &mut self.episodes[slot as usize];
            (episode.doing, episode.key.take())
        };
        self.waiting.retain(|s| *s != slot);
        self.tickets.retain(|_, s| *s != slot);
        if let Some(key) = key {
            self.admission.ended(key);
        }
        if self.plan.rollout.longest_first && doing != EpisodeState::Waits {
            let now_s = self.now_s();
            self.outlook.ended(
                &spec(&self.episodes[slot as usize].draw),
                LengthEvidence::Longer,
                now_s,
            );
        }
        self.leave(slot);
        self.settle();
    }

    /// Frees the place of an episode.
    pub(super) fn leave(&mut self, slot: u32) {
        let episode = &mut self.episodes[slot as usize];
        self.by_id.remove(&episode.draw.episode);
        episode.round += 1;
        episode.doing = EpisodeState::Nothing;
        (episode.machine, episode.trace) = (None, None);
        self.free.push(slot);
    }

    /// The machine is done: the sandbox goes, the trace becomes durable.
    fn over(&mut self, slot: u32) {
        let (now, now_s) = (self.now, self.now_s());
        let episode = &mut self.episodes[slot as usize];
        let Some(machine) = episode.machine.take() else {
            return;
        };
        let timing = Timing {
            started_unix_s: seconds(episode.began),
            total_s: seconds(now - episode.began),
            generate_s: episode.generate_s,
            tool_s: episode.tool_s,
            queue_s: seconds(episode.began - episode.asked),
        };
        let trace = machine.into_trace(timing);
        episode.round += 1;
        episode.doing = EpisodeState::Stores;
        let (key, began) = (episode.key.take(), episode.began);
        self.ledger.ended(&trace);
        self.measure.episode(began, now, &trace);
        if self.plan.rollout.longest_first {
            let took = LengthEvidence::Seconds(timing.total_s);
            self.outlook
                .ended(&spec(&self.episodes[slot as usize].draw), took, now_s);
        }
        self.episodes[slot as usize].trace = Some(trace);
        let leaks = self.bug == Some(Bug::LeakSlot) && self.ledger.begun > 5;
        if let Some(key) = key.filter(|_| !leaks) {
            self.measure.inputs += 1;
            self.admission.ended(key);
        }
        let commit_s = self.commit_s();
        self.then(slot, commit_s, Happening::Stored);
        self.settle();
    }

    /// Returns the outcome from the environment: a given share of the groups has no training signal.
    fn outcome(&self, slot: u32) -> Outcome {
        let episode = &self.episodes[slot as usize];
        let group = mix_hash(
            mix_seed(self.plan.seed, RandomUse::NoSignal as u64),
            episode.draw.draw,
        );
        let alike = crate::dist::uniform(group) < self.plan.rollout.no_signal;
        // The first and the second member differ, so that a group has a signal.
        let member = episode.draw.episode.as_str().rsplit("-e").next();
        let member = member.and_then(|m| m.split('-').next()?.parse::<u64>().ok());
        let drawn = mix_seed(episode.key_of(RandomUse::Reward, 0), 0).is_multiple_of(2);
        let success = !alike && member.map_or(drawn, |m| if m < 2 { m == 0 } else { drawn });
        Outcome {
            reward: f64::from(success),
            success,
            ..Outcome::default()
        }
    }

    /// Seed of a request of an episode.
    pub(super) fn sampling_seed(&self, slot: u32) -> u64 {
        let episode = &self.episodes[slot as usize];
        let turn = episode.machine.as_ref().map_or(0, EpisodeMachine::turns);
        episode.key_of(RandomUse::Sampling, u64::from(turn))
    }
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
        }
    }
}

/// Returns the number of simulated ids that represent `tokens`, at least one.
fn ids(tokens: f64, grain: usize) -> usize {
    ((tokens / grain as f64).round() as usize).max(1)
}

fn tokens(key: u64, count: usize) -> Vec<TokenId> {
    (0..count as u64)
        .map(|n| (mix_hash(key, n) % VOCAB) as TokenId)
        .collect()
}

/// Keeps times exact where tests compare them.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::agenda::micros;

    #[test]
    fn lengths_in_ids_are_never_zero() {
        assert_eq!((ids(0.2, 1), ids(1000.0, 64), ids(3.0, 64)), (1, 16, 1));
        assert_eq!(tokens(5, 3), tokens(5, 4)[..3]);
        assert_eq!(micros(seconds(1_234_567)), 1_234_567);
    }
}
