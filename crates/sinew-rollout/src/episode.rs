//! One episode as a state machine: events in, commands out, without clock and I/O.
//!
//! The driver (or a simulator) executes the commands and reports their results as events. Every token that
//! the model saw is in exactly one node of the trace.

use sinew_env::member_of;
use sinew_types::{
    BranchCause, Component, EpisodeEnd, EpisodeId, FailureKind, FinishReason, GroupId, Limit,
    Message, NO_PARENT, Node, NodeFormat, NodeId, Origin, Outcome, Provenance, RouteSpan,
    SampledToken, SamplingParams, TRACE_FORMAT_VERSION, Task, TaskId, Timing, TokenId, TokenKind,
    ToolSpec, Trace, VersionSpan,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Prefix of the names of rewards among the versions of tools.
pub const REWARD: &str = "reward.";

/// Limits of an episode. An episode that reaches a limit, or whose last answer is cut by a token limit, is
/// truncated. It is still scored; the algorithm decides whether it is trained.
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
    /// Id, unique in the run. An episode whose id the store contains is not run again.
    pub episode: EpisodeId,
    /// Episodes of one group are compared with each other.
    pub group: GroupId,
    /// The task, including data that only the environment reads.
    pub task: Task,
    /// Number of the draw within its purpose.
    pub draw: u64,
    /// Purpose: `train`, `eval-before`, ...
    pub purpose: String,
    /// Seed of all random choices of the episode.
    pub seed: u64,
}

impl EpisodeSpec {
    /// Creates an empty trace for this episode of `run`.
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

/// Data that all episodes of a run share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunInfo {
    /// Name of the run's folder.
    pub name: String,
    /// Versions of the system's parts. Seeds and sampling are excluded, since they belong to the episode.
    pub provenance: Provenance,
    /// Environments of a mixture, by name. They replace the environment in `provenance`.
    pub members: BTreeMap<String, Component>,
}

impl RunInfo {
    /// Describes a part (environment, tool or reward) whose version differs from the one that ran an episode;
    /// `None` without a difference. An environment is compared only if both versions are known. Names of
    /// rewards begin with `reward.`.
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
        let mut changed = names.filter(|name| was.get(*name) != now.get(*name));
        changed.next().map(|name| {
            if name.starts_with(REWARD) {
                name.clone()
            } else {
                format!("tool {name}")
            }
        })
    }

    /// Returns the environment of a task.
    fn environment(&self, task: &TaskId) -> Option<Component> {
        let member = self.members.get(member_of(task));
        member.or(self.provenance.environment.as_ref()).cloned()
    }
}

/// An event of an episode from the engine, the environment or the clock.
#[derive(Clone, Debug)]
pub enum EpisodeEvent {
    /// The environment is ready. Contains its first messages as rendered tokens.
    Reset {
        prompt: Vec<TokenId>,
        messages: Vec<Message>,
        /// Hash of the environment state before the first turn.
        state_hash: Option<u64>,
    },
    /// The engine sampled tokens of the current turn.
    Tokens(Vec<SampledToken>),
    /// The turn is complete.
    TurnFinished(FinishReason),
    /// The environment returned an observation, and the episode continues.
    Observed {
        /// Tokens that close the model's turn, if sampling did not.
        forced: Vec<TokenId>,
        /// The rendered observation, up to the start of the next model turn.
        observation: Vec<TokenId>,
        messages: Vec<Message>,
        process_reward: f64,
        state_hash: Option<u64>,
    },
    /// The environment returned an observation, and a new context starts.
    Renewed {
        /// Reason for the new context.
        cause: BranchCause,
        /// The new context as a rendered prompt.
        prompt: Vec<TokenId>,
        messages: Vec<Message>,
        process_reward: f64,
        state_hash: Option<u64>,
    },
    /// The environment ended the episode.
    Done {
        outcome: Outcome,
        process_reward: f64,
    },
    /// A part of the system failed.
    Failed { kind: FailureKind, message: String },
    /// The time limit of the present phase (start, turns or score) has passed.
    Deadline,
}

impl EpisodeEvent {
    /// The failure of a part of the system.
    pub(crate) fn failed(kind: FailureKind, why: impl std::fmt::Display) -> Self {
        let message = why.to_string();
        Self::Failed { kind, message }
    }
}

/// The driver's next action.
#[derive(Clone, Debug, PartialEq)]
pub enum EpisodeCommand {
    /// Sample a turn of at most `max_tokens` after the context.
    Generate { max_tokens: u32 },
    /// Let the environment act on [`EpisodeMachine::turn_tokens`].
    Step,
    /// Ask the environment to score an episode that a limit ended.
    Score,
    /// Finish: the episode is over, and [`EpisodeMachine::into_trace`] returns the trace.
    Finish,
    /// Wait for the next event.
    Wait,
}

/// State of the machine, named after the activity whose result it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Booting,
    Generating,
    Stepping,
    Scoring,
    Over,
}

/// State machine of one episode. It builds the trace while the episode runs.
#[derive(Debug)]
pub struct EpisodeMachine {
    limits: EpisodeLimits,
    state: State,
    turn: u32,
    /// Tokens of the context, shared with the engine's request. The tokens of the present turn are appended
    /// at its end.
    context: Arc<Vec<TokenId>>,
    /// Node that holds the current turn's sampled tokens.
    turn_node: Option<NodeId>,
    /// Sampling temperature of the policy, recorded with the tokens.
    temperature: f32,
    trace: Trace,
}

impl EpisodeMachine {
    /// Creates a machine that waits for [`EpisodeEvent::Reset`]. `trace` has no nodes yet. `temperature` is
    /// the [`SamplingParams::policy_temperature`](sinew_types::SamplingParams::policy_temperature) at which
    /// the turns are sampled.
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

    /// Returns the context of the model: all tokens since the context last began, without the turn that is
    /// being sampled.
    pub fn context(&self) -> &[TokenId] {
        &self.context
    }

    /// Returns [`Self::context`] for a request, without a copy. If the engine still holds it at the end of
    /// the turn, appending copies it then.
    pub fn shared_context(&self) -> Arc<Vec<TokenId>> {
        Arc::clone(&self.context)
    }

    /// Nodes of the trace so far.
    pub fn nodes(&self) -> &[Node] {
        &self.trace.nodes
    }

    /// The trace so far.
    pub(crate) fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Restores the complete turns of an episode that was started earlier, instead of handling
    /// [`EpisodeEvent::Reset`]. The environment must have replayed them. Returns the command for the next
    /// turn.
    pub fn restore(&mut self, nodes: Vec<Node>) -> EpisodeCommand {
        let root = nodes.iter().rposition(|n| n.parent == NO_PARENT);
        let seen = &nodes[root.unwrap_or(0)..];
        let tokens = seen.iter().flat_map(|n| n.tokens.iter().copied());
        self.context = Arc::new(tokens.collect());
        self.turn = nodes.last().map_or(0, |n| n.turn);
        self.trace.nodes = nodes;
        self.next_turn()
    }

    /// Records the tools that the prompt shows.
    pub(crate) fn offered(&mut self, tools: &[ToolSpec]) {
        if let Some(prompt) = self.trace.nodes.first_mut() {
            prompt.tools = tools.to_vec();
        }
    }

    /// Records a turn as a message. It cannot be rebuilt from the trace: parsing its calls needs the tools,
    /// and decoding its text needs the tokenizer.
    pub(crate) fn said(&mut self, message: Message) {
        if let Some(id) = self.turn_node {
            self.trace.nodes[id as usize].messages = vec![message];
        }
    }

    /// Records the experts that the engine has reported with the present turn.
    pub(crate) fn routed(&mut self, span: RouteSpan) {
        if let Some(id) = self.turn_node {
            self.trace.nodes[id as usize].routes.push(span);
        }
    }

    /// Position up to which the experts of all tokens since the context began are recorded.
    pub(crate) fn routes_known(&self) -> u32 {
        let nodes = &self.trace.nodes;
        let root = nodes.iter().rposition(|n| n.parent == NO_PARENT);
        RouteSpan::known(nodes[root.unwrap_or(0)..].iter().flat_map(|n| &n.routes))
    }

    /// Tokens that the model has sampled in the present turn.
    pub fn turn_tokens(&self) -> &[TokenId] {
        let node = self.turn_node.map(|id| &self.trace.nodes[id as usize]);
        node.map_or(&[], |n| &n.tokens)
    }

    /// Number of model turns started so far.
    pub fn turns(&self) -> u32 {
        self.turn
    }

    /// Whether the episode has ended, so that no more events are expected.
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// Returns the finished trace with its timing.
    pub fn into_trace(mut self, timing: Timing) -> Trace {
        self.trace.timing = timing;
        self.trace
    }

    /// Handles one event and returns the next command. Events after the end are ignored, since an abort races
    /// with the last tokens.
    pub fn on_event(&mut self, event: EpisodeEvent) -> EpisodeCommand {
        match (self.state, event) {
            (State::Over, _) => EpisodeCommand::Wait,
            (_, EpisodeEvent::Failed { kind, message }) => self.fail(kind, message),
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
            (State::Scoring, EpisodeEvent::Deadline) => self.fail(
                FailureKind::Environment,
                "the environment gave no score in time".into(),
            ),
            // No turn was lost: that is the system's failure, not the policy's.
            (State::Booting, EpisodeEvent::Deadline) => self.fail(
                FailureKind::Environment,
                "the episode's world was not up in time".into(),
            ),
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
            (
                State::Stepping,
                event @ (EpisodeEvent::Observed { .. } | EpisodeEvent::Renewed { .. }),
            ) => self.observed(event),
            (
                State::Stepping,
                EpisodeEvent::Done {
                    outcome,
                    process_reward,
                },
            ) => {
                self.score(outcome, process_reward);
                self.end(match self.cut() {
                    Some(limit) => EpisodeEnd::Truncated { limit },
                    None => EpisodeEnd::Terminated,
                })
            }
            (state, event) => self.fail(
                FailureKind::Environment,
                format!("event {event:?} is not expected while {state:?}"),
            ),
        }
    }

    fn push(&mut self, kind: TokenKind, tokens: Vec<TokenId>, messages: Vec<Message>) -> NodeId {
        // A context that begins anew is a separate chain.
        let parent = match (self.trace.nodes.len(), self.context.is_empty()) {
            (0, _) | (_, true) => NO_PARENT,
            (n, false) => (n - 1) as NodeId,
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
            return self.fail(FailureKind::Cancelled, "generation was aborted".into());
        }
        self.close_turn();
        self.state = State::Stepping;
        EpisodeCommand::Step
    }

    /// Appends the sampled tokens of the turn to the context. This happens at the end of the turn: until then
    /// the engine shares the context, and appending would copy it.
    fn close_turn(&mut self) {
        if let (State::Generating, Some(id)) = (self.state, self.turn_node) {
            let tokens = &self.trace.nodes[id as usize].tokens;
            Arc::make_mut(&mut self.context).extend_from_slice(tokens);
        }
    }

    fn observed(&mut self, event: EpisodeEvent) -> EpisodeCommand {
        let (process_reward, state_hash) = match &event {
            EpisodeEvent::Observed {
                process_reward,
                state_hash,
                ..
            }
            | EpisodeEvent::Renewed {
                process_reward,
                state_hash,
                ..
            } => (*process_reward, *state_hash),
            _ => return EpisodeCommand::Wait,
        };
        self.reward_turn(process_reward);
        if self.turn >= self.limits.max_turns {
            return self.truncate(Limit::Turns);
        }
        let node = match event {
            EpisodeEvent::Renewed {
                cause,
                prompt,
                messages,
                ..
            } => {
                self.context = Arc::default();
                let node = self.push(TokenKind::Prompt, prompt, messages);
                self.trace.nodes[node as usize].branch = Some(cause);
                node
            }
            EpisodeEvent::Observed {
                forced,
                observation,
                messages,
                ..
            } => {
                if !forced.is_empty() {
                    self.push(TokenKind::Forced, forced, Vec::new());
                }
                self.push(TokenKind::Observation, observation, messages)
            }
            _ => return EpisodeCommand::Wait,
        };
        self.trace.nodes[node as usize].state_hash = state_hash;
        self.next_turn()
    }

    /// Returns the limit that cut the last answer, if there was one. It is the context limit if that left
    /// fewer tokens than the limit of a turn.
    fn cut(&self) -> Option<Limit> {
        let limit = self.trace.cut()?;
        let room = self.turn_tokens().len() < self.limits.max_turn_tokens as usize;
        Some(if room { Limit::Context } else { limit })
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

    fn fail(&mut self, kind: FailureKind, message: String) -> EpisodeCommand {
        self.end(EpisodeEnd::Failed { kind, message })
    }

    fn end(&mut self, end: EpisodeEnd) -> EpisodeCommand {
        self.close_turn();
        self.trace.end = end;
        self.state = State::Over;
        EpisodeCommand::Finish
    }
}

#[cfg(test)]
mod tests;
