//! Episodes: admission, sandboxes, turns and tools.
//!
//! An episode waits for its place, boots, and then turns between generating and a tool until its machine ends
//! it. Its random numbers follow from its seed and their purpose. A place is returned before the trace is
//! written, as in the runner.

use super::World;
use super::clock::{At, Happening};
use super::slab::{EpisodeState, RandomUse};
use crate::agenda::{micros, seconds};
use crate::check::Bug;
use crate::engine::VOCAB;
use sinew_orchestrator::Draw;
use sinew_rollout::{
    EpisodeCommand, EpisodeEvent, EpisodeLimits, EpisodeMachine, LengthEvidence, RunInfo,
};
use sinew_types::{FailureKind, SamplingParams, Timing, TokenId, mix_hash, mix_seed};

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
            let slot = self.episodes.place(draw, self.clock.now);
            self.gate.wait(slot);
        }
        self.begin_some();
    }

    /// Lets those that wait ask to begin.
    pub(super) fn begin_some(&mut self) {
        while self.gate.may_ask() {
            let now_s = self.clock.now_s();
            let Some(slot) = self.gate.first_waiting(&self.episodes, now_s) else {
                return;
            };
            self.episodes[slot].key = Some(self.gate.ask(slot));
            self.measure.inputs += 1;
            self.settle_once();
        }
    }

    /// Lets waiting turns continue if admission allows, and further episodes begin.
    pub(super) fn settle(&mut self) {
        self.settle_once();
        self.begin_some();
    }

    /// Lets waiting turns continue if admission allows.
    fn settle_once(&mut self) {
        let now_s = self.clock.now_s();
        self.measure.inputs += 1;
        for ticket in self.gate.admission.decide(now_s) {
            let Some(slot) = self.gate.take(ticket) else {
                continue;
            };
            match self.episodes[slot].doing {
                EpisodeState::Waits => self.boot(slot),
                EpisodeState::WaitsForTurn => self.generate(slot),
                _ => {}
            }
        }
    }

    /// The next happening of an episode.
    pub(super) fn then(&mut self, slot: u32, delay_s: f64, what: fn(At) -> Happening) {
        let round = self.episodes[slot].round;
        self.clock.after(delay_s, what(At { slot, round }));
    }

    /// Starts the environment of an episode.
    fn boot(&mut self, slot: u32) {
        let now = self.clock.now;
        let episode = &mut self.episodes[slot];
        (episode.doing, episode.began) = (EpisodeState::Boots, now);
        self.start_world(slot);
        let now_s = self.clock.now_s();
        self.gate.began(&self.episodes[slot], now_s);
    }

    /// Starts the environment of an episode on its units.
    pub(super) fn boot_on(&mut self, slot: u32) {
        let key = self.episodes[slot].key_of(RandomUse::Boot, 0);
        let boot_s = self.plan.tools.boot_s.draw(key) + self.plan.hops.until_worker_s();
        let timeout_s = self.plan.rollout.timeout_s;
        self.then(slot, boot_s, Happening::Booted);
        if timeout_s < 86_400.0 {
            self.then(slot, timeout_s, Happening::Deadline);
        }
    }

    /// Handles the end of an environment's start.
    pub(super) fn booted(&mut self, at: At) {
        if !self.episodes.is(at, EpisodeState::Boots) {
            return;
        }
        let (plan, grain) = (self.plan.clone(), self.speed.grain);
        let episode = &mut self.episodes[at.slot];
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
        let trace = episode.spec().empty_trace(&RunInfo::default(), &sampling);
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
        let Some(machine) = &mut self.episodes[slot].machine else {
            return;
        };
        match machine.on_event(event) {
            EpisodeCommand::Generate { max_tokens } => self.ask_turn(slot, max_tokens as usize),
            EpisodeCommand::Step => self.act(slot),
            EpisodeCommand::Score => {
                let outcome = self.episodes[slot].outcome(&self.plan);
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
        let (now, now_s) = (self.clock.now, self.clock.now_s());
        let (plan, grain) = (self.plan.clone(), self.speed.grain);
        let episode = &mut self.episodes[slot];
        let (Some(machine), Some(key)) = (&episode.machine, episode.key) else {
            return;
        };
        let turn = u64::from(machine.turns());
        let common = mix_hash(episode.common(plan.seed), turn);
        let drawn = plan.episode.turn_tokens.draw_shared(
            episode.key_of(RandomUse::Tokens, turn),
            common,
            plan.episode.task_share,
        ) * plan.burst_at(now_s);
        episode.length = ids(drawn, grain).min(most).max(1);
        (episode.doing, episode.phase) = (EpisodeState::WaitsForTurn, now);
        let ticket = self.gate.ask_turn(slot, key, machine.context(), now_s);
        episode.turn = Some(ticket);
        self.measure.inputs += 1;
        self.settle();
    }

    /// A turn is over: its place is returned, and the episode continues.
    pub(super) fn turn_over(&mut self, slot: u32) {
        let (now, now_s) = (self.clock.now, self.clock.now_s());
        let episode = &mut self.episodes[slot];
        episode.request = None;
        episode.generate_s += seconds(now - episode.phase);
        if let (Some(key), Some(ticket)) = (episode.key, episode.turn.take()) {
            self.measure.inputs += 1;
            self.gate.admission.turn_ended(key, ticket, now_s);
        }
    }

    /// A tool runs.
    fn act(&mut self, slot: u32) {
        let now = self.clock.now;
        let episode = &mut self.episodes[slot];
        (episode.doing, episode.phase) = (EpisodeState::Acts, now);
        let turn = u64::from(episode.machine.as_ref().map_or(0, EpisodeMachine::turns));
        let call_s = self
            .plan
            .tools
            .call_s
            .draw(episode.key_of(RandomUse::Call, turn));
        if !std::mem::take(&mut episode.hangs) {
            let hop_s = self.hop_s(slot);
            self.then(slot, call_s + hop_s, Happening::ToolDone);
        }
        self.settle();
    }

    /// A tool answered.
    pub(super) fn tool_done(&mut self, at: At) {
        if !self.episodes.is(at, EpisodeState::Acts) {
            return;
        }
        let now = self.clock.now;
        let (plan, grain) = (self.plan.clone(), self.speed.grain);
        let episode = &mut self.episodes[at.slot];
        episode.tool_s += seconds(now - episode.phase);
        let turn = episode.machine.as_ref().map_or(0, EpisodeMachine::turns);
        if turn >= episode.turns {
            let outcome = episode.outcome(&plan);
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
        let episode = &self.episodes[at.slot];
        if episode.round == at.round && episode.has_sandbox() && episode.machine.is_some() {
            self.cut(at.slot);
            self.event(at.slot, EpisodeEvent::Deadline);
        }
    }

    /// The system fails an episode.
    pub(super) fn fail(&mut self, slot: u32, kind: FailureKind, message: &str) {
        self.cut(slot);
        if self.episodes[slot].machine.is_none() {
            // Its world was not up.
            let spec = self.episodes[slot].spec();
            let trace = spec.empty_trace(&RunInfo::default(), &SamplingParams::default());
            let limits = EpisodeLimits {
                max_turns: 1,
                max_turn_tokens: 1,
                max_context_tokens: 1,
            };
            self.episodes[slot].machine = Some(EpisodeMachine::new(trace, limits, 1.0));
        }
        let message = message.to_owned();
        self.event(slot, EpisodeEvent::Failed { kind, message });
    }

    /// Ends what an episode waits for: its turn, its request.
    pub(super) fn cut(&mut self, slot: u32) {
        let episode = &mut self.episodes[slot];
        let request = episode.request.take();
        let ticket = episode.turn;
        if let Some(ticket) = ticket {
            self.gate.take(ticket);
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
            let episode = &mut self.episodes[slot];
            (episode.doing, episode.key.take())
        };
        self.gate.forget(slot);
        if let Some(key) = key {
            self.gate.admission.ended(key);
        }
        if doing != EpisodeState::Waits {
            let now_s = self.clock.now_s();
            self.gate
                .ended(&self.episodes[slot], LengthEvidence::Longer, now_s);
        }
        self.release_places(slot);
        self.episodes.leave(slot);
        self.settle();
    }

    /// The machine is done: the sandbox goes, the trace becomes durable.
    fn over(&mut self, slot: u32) {
        let (now, now_s) = (self.clock.now, self.clock.now_s());
        let episode = &mut self.episodes[slot];
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
        let took = LengthEvidence::Seconds(timing.total_s);
        self.gate.ended(&self.episodes[slot], took, now_s);
        self.episodes[slot].trace = Some(trace);
        let leaks = self.bug == Some(Bug::LeakSlot) && self.ledger.begun > 5;
        if let Some(key) = key.filter(|_| !leaks) {
            self.measure.inputs += 1;
            self.gate.admission.ended(key);
        }
        let commit_s = self
            .rows
            .scorers
            .commit_s(self.clock.now, self.plan.store.commit_s);
        let to_owner_s = self.units.link(self.episodes[slot].places[0], None).0;
        let taken_s = self.taken_after_s(2.0 * to_owner_s + self.plan.hops.ack_s);
        self.then(slot, taken_s + commit_s, Happening::Stored);
        self.release_places(slot);
        self.settle();
    }
}

impl World {
    /// Seconds until the owner has taken a trace that reaches it after `way_s`: it takes one after the other.
    fn taken_after_s(&mut self, way_s: f64) -> f64 {
        let take_s = self.plan.hops.take_s;
        if take_s == 0.0 {
            return way_s;
        }
        let begins = (self.clock.now + micros(way_s)).max(self.taken_at);
        self.taken_at = begins + micros(take_s);
        seconds(self.taken_at - self.clock.now)
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

    #[test]
    fn lengths_in_ids_are_never_zero() {
        assert_eq!((ids(0.2, 1), ids(1000.0, 64), ids(3.0, 64)), (1, 16, 1));
        assert_eq!(tokens(5, 3), tokens(5, 4)[..3]);
        assert_eq!(micros(seconds(1_234_567)), 1_234_567);
    }
}
