//! One episode as a state machine: events in, commands out, no clock, no I/O.
//!
//! The driver (or a simulator) carries the commands out and feeds back what happened. Every
//! token that the model saw ends up in exactly one node of the trace.

use sinew_env::member_of;
use sinew_types::{
    Component, EpisodeEnd, EpisodeId, FailureKind, FinishReason, GroupId, Limit, Message,
    NO_PARENT, Node, NodeFormat, NodeId, Origin, Outcome, Provenance, SampledToken, SamplingParams,
    TRACE_FORMAT_VERSION, Task, TaskId, Timing, TokenId, TokenKind, ToolSpec, Trace, VersionSpan,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// How the names of rewards begin among the versions of tools.
pub const REWARD: &str = "reward.";

/// Limits of an episode. One that reaches a limit is truncated: it is scored, and counts.
#[derive(Clone, Debug, PartialEq)]
pub struct EpisodeLimits {
    /// Maximum number of model turns.
    pub max_turns: u32,
    /// Maximum number of sampled tokens in one turn.
    pub max_turn_tokens: u32,
    /// Maximum number of tokens in the context, prompt included.
    pub max_context_tokens: u32,
}

/// Identity and purpose of an episode.
#[derive(Clone, Debug, PartialEq)]
pub struct EpisodeSpec {
    /// Unique in the run. An id that the store has is not run again.
    pub episode: EpisodeId,
    /// Episodes of one group are compared with each other.
    pub group: GroupId,
    /// The task, with the data that only its environment reads.
    pub task: Task,
    /// Number of the draw within its purpose.
    pub draw: u64,
    /// `train`, `eval-before`, ...
    pub purpose: String,
    /// Seed of everything the episode draws.
    pub seed: u64,
}

impl EpisodeSpec {
    /// The trace of an episode of `run` in which nothing has happened yet.
    pub fn empty_trace(&self, run: &RunInfo, sampling: &SamplingParams) -> Trace {
        Trace {
            format_version: TRACE_FORMAT_VERSION,
            episode: self.episode.clone(),
            group: self.group.clone(),
            task: self.task.id.clone(),
            task_kind: self.task.kind.clone(),
            origin: Origin {
                run: run.name.clone(),
                draw: self.draw,
                purpose: self.purpose.clone(),
                external: None,
            },
            provenance: Provenance {
                task_seed: Some(self.task.seed),
                seed: Some(self.seed),
                sampling: Some(sampling.into()),
                environment: run.environment(&self.task.id),
                ..run.provenance.clone()
            },
            nodes: Vec::new(),
            outcome: Outcome::default(),
            end: EpisodeEnd::Terminated,
            timing: Timing::default(),
            ignored: std::collections::BTreeMap::new(),
        }
    }
}

/// Facts that all episodes of a run have in common.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunInfo {
    /// Name of the run's folder.
    pub name: String,
    /// Without seeds and sampling, which are the episode's.
    pub provenance: Provenance,
    /// The environments of a mixture, which take the place of the provenance's, by name.
    pub members: BTreeMap<String, Component>,
}

impl RunInfo {
    /// What of environment, tools and rewards has another version than when an episode ran, as far as both
    /// are known. Names of rewards begin with `reward.`.
    pub fn changed_since(&self, trace: &Trace) -> Option<String> {
        let was = &trace.provenance;
        if let (Some(was), Some(now)) = (&was.environment, self.environment(&trace.task))
            && *was != now
        {
            return Some(format!(
                "environment {} {}, now {} {}",
                was.name, was.version, now.name, now.version
            ));
        }
        let (was, now) = (&was.tools, &self.provenance.tools);
        let names = was.keys().chain(now.keys());
        let is_reward = |name: &str| name.starts_with(REWARD);
        let mut changed = names.filter(|name| match (was.get(*name), now.get(*name)) {
            (Some(was), Some(now)) => was != now,
            // An earlier version wrote no rewards down.
            _ => !is_reward(name),
        });
        changed.next().map(|name| match is_reward(name) {
            true => name.clone(),
            false => format!("tool {name}"),
        })
    }

    /// The environment of a task.
    fn environment(&self, task: &TaskId) -> Option<Component> {
        let member = self.members.get(member_of(task));
        member.or(self.provenance.environment.as_ref()).cloned()
    }
}

/// An event of an episode, from engine, environment or clock.
#[derive(Clone, Debug)]
pub enum EpisodeEvent {
    /// The environment is ready; its first messages, rendered.
    Reset {
        prompt: Vec<TokenId>,
        messages: Vec<Message>,
        /// Hash of the state that the first turn acts on.
        state_hash: Option<u64>,
    },
    /// The engine sampled tokens of the current turn.
    Tokens(Vec<SampledToken>),
    /// The turn is complete.
    TurnFinished(FinishReason),
    /// The environment answered and goes on.
    Observed {
        /// Tokens that close the model's turn where sampling did not.
        forced: Vec<TokenId>,
        /// The rendered answer, up to where the model speaks again.
        observation: Vec<TokenId>,
        messages: Vec<Message>,
        process_reward: f64,
        state_hash: Option<u64>,
    },
    /// The environment says that the task is over.
    Done {
        outcome: Outcome,
        process_reward: f64,
    },
    /// A part of the system failed.
    Failed { kind: FailureKind, message: String },
    /// The wall time of what the episode is doing is up: starting, its turns, or its score.
    Deadline,
}

/// The driver's next action.
#[derive(Clone, Debug, PartialEq)]
pub enum EpisodeCommand {
    /// Sample a turn: at most `max_tokens` after the context.
    Generate { max_tokens: u32 },
    /// Let the environment act on [`EpisodeMachine::turn_tokens`].
    Step,
    /// Ask the environment for the score of an episode that a limit ended.
    Score,
    /// The episode is over; [`EpisodeMachine::into_trace`] has it.
    Finish,
    /// Nothing to do until the next event.
    Wait,
}

/// The command that the machine waits for the result of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Booting,
    Generating,
    Stepping,
    Scoring,
    Over,
}

/// The state machine of one episode. It builds the trace as it goes.
#[derive(Debug)]
pub struct EpisodeMachine {
    limits: EpisodeLimits,
    state: State,
    turn: u32,
    /// Shared with the request of the turn that is sampled; the turn's own tokens follow at its end.
    context: Arc<Vec<TokenId>>,
    /// Node that holds the current turn's sampled tokens.
    turn_node: Option<NodeId>,
    /// Of the policy that samples the turns.
    temperature: f32,
    trace: Trace,
}

impl EpisodeMachine {
    /// A machine that waits for [`EpisodeEvent::Reset`] and adds to a trace without nodes. Its turns are
    /// sampled at [`SamplingParams::policy_temperature`](sinew_types::SamplingParams::policy_temperature)
    /// `temperature`.
    pub fn new(trace: Trace, limits: EpisodeLimits, temperature: f32) -> Self {
        Self {
            limits,
            state: State::Booting,
            turn: 0,
            context: Arc::default(),
            turn_node: None,
            temperature,
            trace,
        }
    }

    /// Everything the model has seen and sampled, without the turn that is being sampled.
    pub fn context(&self) -> &[TokenId] {
        &self.context
    }

    /// [`Self::context`] for a request, without a copy. A turn that ends while the engine still holds it
    /// costs one.
    pub fn shared_context(&self) -> Arc<Vec<TokenId>> {
        Arc::clone(&self.context)
    }

    /// The nodes so far.
    pub fn nodes(&self) -> &[Node] {
        &self.trace.nodes
    }

    /// The trace so far.
    pub(crate) fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Takes up the whole turns of an episode that a machine like this one had begun, in place of
    /// [`EpisodeEvent::Reset`]: the environment has seen them again. Gives the command for the next turn.
    pub fn restore(&mut self, nodes: Vec<Node>) -> EpisodeCommand {
        let tokens = nodes.iter().flat_map(|n| n.tokens.iter().copied());
        self.context = Arc::new(tokens.collect());
        self.turn = nodes.last().map_or(0, |n| n.turn);
        self.trace.nodes = nodes;
        self.next_turn()
    }

    /// Keeps the tools that the prompt shows.
    pub(crate) fn offered(&mut self, tools: &[ToolSpec]) {
        if let Some(prompt) = self.trace.nodes.first_mut() {
            prompt.tools = tools.to_vec();
        }
    }

    /// Keeps a turn as a message: its calls cannot be read from its tokens without the tools, and its text
    /// not without the tokenizer.
    pub(crate) fn said(&mut self, message: Message) {
        if let Some(id) = self.turn_node {
            self.trace.nodes[id as usize].messages = vec![message];
        }
    }

    /// What the model sampled in the current turn, so far.
    pub fn turn_tokens(&self) -> &[TokenId] {
        let node = self.turn_node.map(|id| &self.trace.nodes[id as usize]);
        node.map_or(&[], |n| &n.tokens)
    }

    /// Model turns begun so far.
    pub fn turns(&self) -> u32 {
        self.turn
    }

    /// No more events are expected.
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// The finished trace with its timing.
    pub fn into_trace(mut self, timing: Timing) -> Trace {
        self.trace.timing = timing;
        self.trace
    }

    /// Takes one event and gives the next command. Events that come after the end are ignored:
    /// an abort races with the last tokens.
    pub fn on_event(&mut self, event: EpisodeEvent) -> EpisodeCommand {
        match (self.state, event) {
            (State::Over, _) => EpisodeCommand::Wait,
            (_, EpisodeEvent::Failed { kind, message }) => {
                self.end(EpisodeEnd::Failed { kind, message })
            }
            (
                State::Scoring,
                EpisodeEvent::Done {
                    outcome,
                    process_reward,
                },
            ) => {
                self.score(outcome, process_reward);
                self.state = State::Over;
                EpisodeCommand::Finish
            }
            (State::Scoring, EpisodeEvent::Deadline) => self.end(EpisodeEnd::Failed {
                kind: FailureKind::Environment,
                message: "the environment gave no score in time".into(),
            }),
            // No turn was lost: that is the system's failure, not the policy's.
            (State::Booting, EpisodeEvent::Deadline) => self.end(EpisodeEnd::Failed {
                kind: FailureKind::Environment,
                message: "the episode's world was not up in time".into(),
            }),
            (_, EpisodeEvent::Deadline) => self.truncate(Limit::WallTime),
            (
                State::Booting,
                EpisodeEvent::Reset {
                    prompt,
                    messages,
                    state_hash,
                },
            ) => {
                let node = self.push(TokenKind::Prompt, prompt, messages);
                self.trace.nodes[node as usize].state_hash = state_hash;
                self.next_turn()
            }
            (State::Generating, EpisodeEvent::Tokens(tokens)) => {
                self.sampled(&tokens);
                EpisodeCommand::Wait
            }
            (State::Generating, EpisodeEvent::TurnFinished(reason)) => self.turn_finished(reason),
            (State::Stepping, event @ EpisodeEvent::Observed { .. }) => self.observed(event),
            (
                State::Stepping,
                EpisodeEvent::Done {
                    outcome,
                    process_reward,
                },
            ) => {
                self.score(outcome, process_reward);
                self.end(EpisodeEnd::Terminated)
            }
            (state, event) => self.end(EpisodeEnd::Failed {
                kind: FailureKind::Environment,
                message: format!("event {event:?} is not expected while {state:?}"),
            }),
        }
    }

    fn push(&mut self, kind: TokenKind, tokens: Vec<TokenId>, messages: Vec<Message>) -> NodeId {
        let parent = match self.trace.nodes.len() {
            0 => NO_PARENT,
            n => (n - 1) as NodeId,
        };
        // The node of a turn begins empty, while the engine shares the context.
        if !tokens.is_empty() {
            Arc::make_mut(&mut self.context).extend_from_slice(&tokens);
        }
        self.trace
            .nodes
            .push(Node::given(parent, self.turn, kind, tokens, messages));
        (self.trace.nodes.len() - 1) as NodeId
    }

    fn next_turn(&mut self) -> EpisodeCommand {
        let left = self
            .limits
            .max_context_tokens
            .saturating_sub(self.context.len() as u32);
        if left == 0 {
            return self.truncate(Limit::Context);
        }
        if self.turn >= self.limits.max_turns {
            return self.truncate(Limit::Turns);
        }
        self.turn += 1;
        self.turn_node = None;
        self.state = State::Generating;
        EpisodeCommand::Generate {
            max_tokens: left.min(self.limits.max_turn_tokens),
        }
    }

    fn sampled(&mut self, tokens: &[SampledToken]) {
        let id = match self.turn_node {
            Some(id) => id,
            None => {
                let id = self.push(TokenKind::Sampled, Vec::new(), Vec::new());
                self.trace.nodes[id as usize].temperature = self.temperature;
                self.turn_node = Some(id);
                id
            }
        };
        let node = &mut self.trace.nodes[id as usize];
        node.tokens.reserve(tokens.len());
        node.logprobs.reserve(tokens.len());
        for token in tokens {
            let at = node.tokens.len() as u32;
            node.tokens.push(token.id);
            node.logprobs.push(token.logprob);
            NodeFormat::push(&mut node.format, token);
            match node.versions.last_mut() {
                Some(span) if span.version == token.version => span.len += 1,
                _ => node.versions.push(VersionSpan {
                    start: at,
                    len: 1,
                    version: token.version,
                }),
            }
        }
    }

    fn turn_finished(&mut self, reason: FinishReason) -> EpisodeCommand {
        let aborted = reason == FinishReason::Aborted;
        if let Some(id) = self.turn_node {
            self.trace.nodes[id as usize].finish = Some(reason);
        }
        if aborted {
            return self.end(EpisodeEnd::Failed {
                kind: FailureKind::Cancelled,
                message: "generation was aborted".into(),
            });
        }
        self.close_turn();
        self.state = State::Stepping;
        EpisodeCommand::Step
    }

    /// Adds the sampled tokens of the turn to the context. Not while it is sampled: the engine shares the
    /// context until then, and appending would copy it.
    fn close_turn(&mut self) {
        if let (State::Generating, Some(id)) = (self.state, self.turn_node) {
            let tokens = &self.trace.nodes[id as usize].tokens;
            Arc::make_mut(&mut self.context).extend_from_slice(tokens);
        }
    }

    fn observed(&mut self, event: EpisodeEvent) -> EpisodeCommand {
        let EpisodeEvent::Observed {
            forced,
            observation,
            messages,
            process_reward,
            state_hash,
        } = event
        else {
            return EpisodeCommand::Wait;
        };
        self.reward_turn(process_reward);
        if self.turn >= self.limits.max_turns {
            return self.truncate(Limit::Turns);
        }
        if !forced.is_empty() {
            self.push(TokenKind::Forced, forced, Vec::new());
        }
        let node = self.push(TokenKind::Observation, observation, messages);
        self.trace.nodes[node as usize].state_hash = state_hash;
        self.next_turn()
    }

    fn reward_turn(&mut self, process_reward: f64) {
        if let Some(id) = self.turn_node {
            self.trace.nodes[id as usize].process_reward += process_reward;
        }
    }

    fn score(&mut self, outcome: Outcome, process_reward: f64) {
        self.reward_turn(process_reward);
        self.trace.outcome = outcome;
    }

    fn truncate(&mut self, limit: Limit) -> EpisodeCommand {
        self.close_turn();
        self.trace.end = EpisodeEnd::Truncated { limit };
        self.state = State::Scoring;
        EpisodeCommand::Score
    }

    fn end(&mut self, end: EpisodeEnd) -> EpisodeCommand {
        self.close_turn();
        self.trace.end = end;
        self.state = State::Over;
        EpisodeCommand::Finish
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_part_is_named_as_far_as_both_are_known() {
        let versions = |list: &[(&str, &str)]| {
            let list = list.iter();
            list.map(|(name, version)| ((*name).to_owned(), (*version).to_owned()))
                .collect::<BTreeMap<_, _>>()
        };
        let info = |environment: Option<&str>, tools: &[(&str, &str)]| RunInfo {
            provenance: Provenance {
                environment: environment.map(|version| Component {
                    name: "shop".into(),
                    version: version.into(),
                }),
                tools: versions(tools),
                ..Provenance::default()
            },
            ..RunInfo::default()
        };
        let was = info(Some("1"), &[("buy", "1"), ("reward.f.py:f", "aa")]);
        let trace = spec().empty_trace(&was, &SamplingParams::default());
        let now = |environment, tools| info(environment, tools).changed_since(&trace);
        let same = [("buy", "1"), ("reward.f.py:f", "aa")];
        assert_eq!(now(Some("1"), &same), None);
        assert_eq!(now(None, &same), None);
        let changed = now(Some("2"), &same).unwrap();
        assert_eq!(changed, "environment shop 1, now shop 2");
        assert_eq!(now(Some("1"), &same[1..]).unwrap(), "tool buy");
        let other = [("buy", "2"), ("reward.f.py:f", "aa")];
        assert_eq!(now(Some("1"), &other).unwrap(), "tool buy");
        let other = [("buy", "1"), ("reward.f.py:f", "bb")];
        assert_eq!(now(Some("1"), &other).unwrap(), "reward.f.py:f");
        // An earlier version wrote no rewards down.
        assert_eq!(now(Some("1"), &same[..1]), None);
    }
    use proptest::prelude::*;
    use sinew_types::PolicyVersion;

    fn spec() -> EpisodeSpec {
        EpisodeSpec {
            episode: EpisodeId::new("e"),
            group: GroupId::new("g"),
            task: Task {
                id: TaskId::new("t"),
                kind: "k".into(),
                preamble: Vec::new(),
                prompt: String::new(),
                data: serde_json::Value::Null,
                seed: 0,
            },
            draw: 1,
            purpose: "train".into(),
            seed: 7,
        }
    }

    fn machine(max_turns: u32, max_context_tokens: u32) -> EpisodeMachine {
        let limits = EpisodeLimits {
            max_turns,
            max_turn_tokens: 8,
            max_context_tokens,
        };
        let trace = spec().empty_trace(&RunInfo::default(), &SamplingParams::default());
        EpisodeMachine::new(trace, limits, 0.7)
    }

    #[test]
    fn a_trace_names_the_environment_of_its_task() {
        let component = |name: &str| Component {
            name: name.into(),
            version: "1".into(),
        };
        let mut run = RunInfo::default();
        run.provenance.environment = Some(component("all"));
        run.members.insert("web".into(), component("web"));
        let mut spec = spec();
        for (task, environment) in [("web:rows/train/0", "web"), ("rows/train/0", "all")] {
            spec.task.id = TaskId::new(task);
            let trace = spec.empty_trace(&run, &SamplingParams::default());
            assert_eq!(trace.environment(), environment);
        }
        let unknown = spec.empty_trace(&RunInfo::default(), &SamplingParams::default());
        assert_eq!(unknown.environment(), "k");
    }

    fn token(id: TokenId, version: u64) -> SampledToken {
        SampledToken {
            id,
            logprob: -0.25,
            version: PolicyVersion(version),
            top: Vec::new(),
            choice: None,
        }
    }

    fn observed(observation: &[TokenId]) -> EpisodeEvent {
        EpisodeEvent::Observed {
            forced: Vec::new(),
            observation: observation.to_vec(),
            messages: Vec::new(),
            process_reward: 0.1,
            state_hash: None,
        }
    }

    #[test]
    fn two_turns_leave_a_valid_trace() {
        let mut m = machine(3, 100);
        let prompt = EpisodeEvent::Reset {
            prompt: vec![1, 2],
            messages: Vec::new(),
            state_hash: Some(17),
        };
        assert_eq!(
            m.on_event(prompt),
            EpisodeCommand::Generate { max_tokens: 8 }
        );
        m.on_event(EpisodeEvent::Tokens(vec![token(3, 4)]));
        m.on_event(EpisodeEvent::Tokens(vec![token(4, 5)]));
        let step = m.on_event(EpisodeEvent::TurnFinished(FinishReason::Length));
        assert_eq!(step, EpisodeCommand::Step);
        assert_eq!(m.turn_tokens(), [3, 4]);
        let go_on = m.on_event(observed(&[9]));
        assert_eq!(go_on, EpisodeCommand::Generate { max_tokens: 8 });
        m.on_event(EpisodeEvent::Tokens(vec![token(5, 5)]));
        m.on_event(EpisodeEvent::TurnFinished(FinishReason::StopId { id: 5 }));
        let outcome = Outcome {
            reward: 1.0,
            success: true,
            ..Outcome::default()
        };
        let done = EpisodeEvent::Done {
            outcome,
            process_reward: 0.0,
        };
        assert_eq!(m.on_event(done), EpisodeCommand::Finish);
        let context = m.context().to_vec();
        let trace = m.into_trace(Timing::default());
        trace.validate().unwrap();
        let leaf = trace.leaves()[0];
        let ids: Vec<_> = trace.path_tokens(leaf).iter().map(|t| t.id).collect();
        assert_eq!(ids, context);
        assert_eq!(ids, [1, 2, 3, 4, 9, 5]);
        assert_eq!(trace.nodes[0].state_hash, Some(17));
        let temperatures: Vec<_> = trace.nodes.iter().map(|n| n.temperature).collect();
        assert_eq!(temperatures, [1.0, 0.7, 1.0, 0.7]);
        assert_eq!(trace.nodes[1].versions.len(), 2);
        assert!((trace.total_reward() - 1.1).abs() < 1e-12);
        assert_eq!(trace.end, EpisodeEnd::Terminated);
    }

    #[test]
    fn a_world_that_does_not_start_and_a_score_that_does_not_come_are_failures() {
        let environment_failed = |m: EpisodeMachine| {
            let trace = m.into_trace(Timing::default());
            trace.validate().unwrap();
            let kind = FailureKind::Environment;
            matches!(trace.end, EpisodeEnd::Failed { kind: k, .. } if k == kind)
        };
        let mut never_up = machine(1, 100);
        let end = never_up.on_event(EpisodeEvent::Deadline);
        assert_eq!(end, EpisodeCommand::Finish);
        assert!(environment_failed(never_up));

        let mut m = machine(1, 100);
        m.on_event(EpisodeEvent::Reset {
            prompt: vec![1],
            messages: Vec::new(),
            state_hash: None,
        });
        assert_eq!(m.on_event(EpisodeEvent::Deadline), EpisodeCommand::Score);
        assert_eq!(m.on_event(EpisodeEvent::Deadline), EpisodeCommand::Finish);
        assert!(environment_failed(m));
    }

    #[test]
    fn limits_truncate_and_are_scored() {
        let mut m = machine(1, 100);
        m.on_event(EpisodeEvent::Reset {
            prompt: vec![1],
            messages: Vec::new(),
            state_hash: None,
        });
        m.on_event(EpisodeEvent::TurnFinished(FinishReason::Length));
        assert_eq!(m.on_event(observed(&[9])), EpisodeCommand::Score);
        let done = EpisodeEvent::Done {
            outcome: Outcome::default(),
            process_reward: 0.0,
        };
        assert_eq!(m.on_event(done), EpisodeCommand::Finish);
        let end = m.into_trace(Timing::default()).end;
        assert_eq!(
            end,
            EpisodeEnd::Truncated {
                limit: Limit::Turns
            }
        );
    }

    #[test]
    fn a_full_context_truncates_instead_of_sampling_nothing() {
        let mut m = machine(3, 2);
        let prompt = EpisodeEvent::Reset {
            prompt: vec![1, 2],
            messages: Vec::new(),
            state_hash: Some(17),
        };
        assert_eq!(m.on_event(prompt), EpisodeCommand::Score);
    }

    /// A long episode moves its context only where the buffer grows, by doubling, and never for a request.
    #[test]
    fn requests_share_the_context() {
        let (turns, per_turn) = (200, 8);
        let mut m = machine(turns, 100_000);
        m.on_event(EpisodeEvent::Reset {
            prompt: vec![1, 2],
            messages: Vec::new(),
            state_hash: None,
        });
        let mut buffers = std::collections::BTreeSet::new();
        for turn in 0..turns {
            // The engine holds the prompt while it samples, and drops it before the last event.
            let held = m.shared_context();
            assert_eq!(held.as_ptr(), m.context().as_ptr());
            buffers.insert(held.as_ptr() as usize);
            let tokens = (0..per_turn).map(|i| token(turn * per_turn + i, 1));
            m.on_event(EpisodeEvent::Tokens(tokens.collect()));
            assert_eq!(
                held.as_ptr(),
                m.context().as_ptr(),
                "nothing was copied meanwhile"
            );
            drop(held);
            m.on_event(EpisodeEvent::TurnFinished(FinishReason::Length));
            m.on_event(observed(&[9, 9]));
        }
        let length = m.context().len();
        assert_eq!(
            length,
            2 + (turns * per_turn) as usize + 2 * (turns as usize - 1)
        );
        let doublings = length.ilog2() as usize + 1;
        assert!(buffers.len() <= doublings, "{} buffers", buffers.len());
    }

    proptest! {
        /// Whatever comes in whatever order, the trace stays valid and spells the context.
        #[test]
        fn any_order_of_events_keeps_the_invariants(kinds in prop::collection::vec(0u8..7, 0..40)) {
            let mut m = machine(4, 60);
            for (i, kind) in kinds.iter().enumerate() {
                let id = i as TokenId;
                let event = match kind {
                    0 => EpisodeEvent::Reset { prompt: vec![id, id], messages: Vec::new(), state_hash: None },
                    1 => EpisodeEvent::Tokens(vec![token(id, u64::from(id / 3))]),
                    2 => EpisodeEvent::TurnFinished(FinishReason::Length),
                    3 => observed(&[id, id]),
                    4 => EpisodeEvent::Done { outcome: Outcome::default(), process_reward: 0.0 },
                    5 => EpisodeEvent::Deadline,
                    _ => EpisodeEvent::Tokens(vec![token(id, 1), token(id, 2)]),
                };
                m.on_event(event);
            }
            // A turn that is being sampled is not in the context yet.
            m.on_event(EpisodeEvent::Deadline);
            let context = m.context().to_vec();
            let trace = m.into_trace(Timing::default());
            prop_assert!(trace.validate().is_ok());
            let spelled: Vec<_> = match trace.leaves().last() {
                Some(&leaf) => trace.path_tokens(leaf).iter().map(|t| t.id).collect(),
                None => Vec::new(),
            };
            prop_assert_eq!(spelled, context);
        }
    }
}
