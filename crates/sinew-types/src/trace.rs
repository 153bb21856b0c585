//! The trace: an episode's token graph.
//!
//! A node holds only the tokens it adds to its parent. A path from the root to a leaf holds the tokens that
//! the model saw, and is a training sample. Branches share their prefix.

use crate::branch::BranchCause;
use crate::engine::{FinishReason, TEMPERATURES};
use crate::format::NodeFormat;
use crate::ids::{EpisodeId, GroupId, PolicyVersion, TaskId, TokenId};
use crate::message::{Message, ToolSpec};
use crate::origin::{Origin, Provenance};
use crate::routes::RouteSpan;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Maximum magnitude of a reward, and of the total of an episode: above it, a difference of rewards divided
/// by a small deviation overflows `f32`.
pub const MAX_REWARD: f64 = 1e30;

/// Whether a number may be a reward: finite, and of a magnitude up to [`MAX_REWARD`].
pub fn is_reward(value: f64) -> bool {
    value.abs() <= MAX_REWARD
}

/// Version of the serialized form. Others are refused: a reader that ignored a field it does not know might
/// train another distribution than the one sampled.
pub const TRACE_FORMAT_VERSION: u32 = 3;

/// Index of a node in [`Trace::nodes`].
pub type NodeId = u32;

/// Parent of a root.
pub const NO_PARENT: NodeId = NodeId::MAX;

/// Origin of a token. Only `Sampled` ones enter a policy loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenKind {
    /// Rendered before the first turn.
    Prompt,
    /// Sampled by the engine from the policy.
    Sampled,
    /// Part of the model's turn, but not sampled (a closing tag after truncation, a turn boundary, a token
    /// without an alternative under the output format).
    Forced,
    /// The environment's answer, rendered.
    Observation,
}

/// `len` tokens from `start` within a node, sampled by one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionSpan {
    /// First token, counted within the node.
    pub start: u32,
    /// Number of tokens, at least 1.
    pub len: u32,
    /// The weights that sampled them.
    pub version: PolicyVersion,
}

impl VersionSpan {
    /// The spans of a node whose `count` tokens are all of one version: one, or none for no tokens.
    pub fn whole(count: usize, version: PolicyVersion) -> Vec<Self> {
        let len = count as u32;
        let span = Self {
            start: 0,
            len,
            version,
        };
        if len == 0 { Vec::new() } else { vec![span] }
    }
}

/// The tokens that one step of the episode added.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// [`NO_PARENT`] for a root; otherwise smaller than the node's own index.
    pub parent: NodeId,
    /// 0 for the prompt, then the number of the turn.
    pub turn: u32,
    /// Origin of its tokens.
    pub kind: TokenKind,
    /// Ids that the node adds to its parent's path.
    pub tokens: Vec<TokenId>,
    /// One for each token of a sampled node, otherwise empty.
    pub logprobs: Vec<f32>,
    /// Sampling temperature. `logprobs` and the training loss use it. 1 for greedy sampling and for nodes
    /// that were not sampled; also the default when absent.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub temperature: f32,
    /// Cover a sampled node's tokens in order without gaps, otherwise empty.
    pub versions: Vec<VersionSpan>,
    /// Output format of a sampled node, if it had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Box<NodeFormat>>,
    /// Experts that the engine reported with a sampled node, of tokens of its path up to its own ones; see
    /// [`Trace::path_routes`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<RouteSpan>,
    /// The messages that the tokens render, if any. A sampled turn is the message that it was read as.
    pub messages: Vec<Message>,
    /// Tools that a prompt shows to the model. Without tools, calls of its turns are a part of their text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<ToolSpec>,
    /// Reason why sampling ended, for sampled nodes.
    pub finish: Option<FinishReason>,
    /// Reward attached to this turn.
    pub process_reward: f64,
    /// Hash of the observation, so that equal states can be found across episodes.
    pub state_hash: Option<u64>,
    /// Cause of the branch that begins with this node; `None` for a node that continues its parent, and for
    /// the first root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch: Option<BranchCause>,
}

fn one() -> f32 {
    1.0
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands references on"
)]
fn is_one(temperature: &f32) -> bool {
    *temperature == 1.0
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands references on"
)]
fn is_false(flag: &bool) -> bool {
    !flag
}

impl Node {
    /// Whether the output format allowed only one token at `index`.
    pub fn forced(&self, index: usize) -> bool {
        self.format.as_ref().is_some_and(|f| f.forced(index))
    }

    /// A node that was not sampled: it has no log-probs, versions or finish reason.
    pub fn given(
        parent: NodeId,
        turn: u32,
        kind: TokenKind,
        tokens: Vec<TokenId>,
        messages: Vec<Message>,
    ) -> Self {
        Self {
            parent,
            turn,
            kind,
            tokens,
            logprobs: Vec::new(),
            temperature: 1.0,
            versions: Vec::new(),
            format: None,
            routes: Vec::new(),
            messages,
            tools: Vec::new(),
            finish: None,
            process_reward: 0.0,
            state_hash: None,
            branch: None,
        }
    }
}

/// A limit that truncated an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Maximum number of turns.
    Turns,
    /// Maximum tokens of the model's context.
    Context,
    /// Maximum time of the episode.
    WallTime,
    /// Maximum tokens of a turn: the last answer ends in the middle.
    TurnTokens,
}

impl Limit {
    /// Name of the limit in a trace.
    pub fn name(self) -> &'static str {
        match self {
            Self::Turns => "turns",
            Self::Context => "context",
            Self::WallTime => "wall_time",
            Self::TurnTokens => "turn_tokens",
        }
    }
}

/// Returns the token limit that cut the last answer of a trace with these nodes, if one did. Such an answer
/// is incomplete, whatever its environment made of it.
pub fn cut(nodes: &[Node]) -> Option<Limit> {
    let last = nodes.iter().rev().find(|n| n.kind == TokenKind::Sampled)?;
    match last.finish.as_ref()? {
        FinishReason::Length => Some(Limit::TurnTokens),
        FinishReason::ContextFull => Some(Limit::Context),
        _ => None,
    }
}

/// The part of the system that failed an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The engine refused or failed a request.
    Engine,
    /// The environment's code or the task's data.
    Environment,
    /// The outside program that drives the turns.
    Harness,
    /// The sandbox of the environment or the agent.
    Sandbox,
    /// Conversion of messages to tokens, or back.
    Render,
    /// The run's store.
    Store,
    /// The episode was stopped from outside.
    Cancelled,
}

/// End of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum EpisodeEnd {
    /// The task ended.
    Terminated,
    /// A limit ended it.
    Truncated {
        /// The limit that was reached.
        limit: Limit,
    },
    /// The system failed it: data about the system, not about the policy.
    Failed {
        /// Part of the system that failed.
        kind: FailureKind,
        /// Error for users.
        message: String,
    },
}

/// The score of an episode.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Reward of the whole episode, without process rewards.
    pub reward: f64,
    /// The task was solved.
    pub success: bool,
    /// Named components and measurements (format, tool calls, errors).
    pub metrics: BTreeMap<String, f64>,
    /// The episode has no reward, neither as a whole nor for a turn: `reward` and `success` have no
    /// meaning.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unscored: bool,
    /// Reason why an unscored episode has no reward, in one line, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unscored_reason: Option<String>,
    /// Text that was scored where the last turn is not it: the final answer of a program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
}

/// Wall time of an episode, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Seconds since 1970 at the start.
    pub started_unix_s: f64,
    /// Time from start to score.
    pub total_s: f64,
    /// Time of waiting for the engine's tokens.
    pub generate_s: f64,
    /// Time inside the environment, tools included.
    pub tool_s: f64,
    /// Time from the request for admission until the episode started. Not part of `total_s`.
    pub queue_s: f64,
}

/// One episode, from boot to score.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// [`TRACE_FORMAT_VERSION`].
    #[serde(deserialize_with = "this_version")]
    pub format_version: u32,
    /// Identity; a second commit with the same id is recognized.
    pub episode: EpisodeId,
    /// The episodes that it is compared with.
    pub group: GroupId,
    /// The task.
    pub task: TaskId,
    /// Task type, for per-type metrics.
    pub task_kind: String,
    /// The request that it answers.
    pub origin: Origin,
    /// The parts that produced it.
    #[serde(default, skip_serializing_if = "Provenance::is_empty")]
    pub provenance: Provenance,
    /// The token graph: parents before their children.
    pub nodes: Vec<Node>,
    /// The score.
    pub outcome: Outcome,
    /// End of the episode.
    pub end: EpisodeEnd,
    /// Measured times.
    pub timing: Timing,
    /// Fields of an outside agent's requests that had no effect: paths and counts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ignored: BTreeMap<String, u64>,
}

/// Refuses a trace of another format.
fn this_version<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let version = u32::deserialize(from)?;
    match version {
        TRACE_FORMAT_VERSION => Ok(version),
        _ => Err(D::Error::custom(format!(
            "format version {version}, this program reads {TRACE_FORMAT_VERSION}"
        ))),
    }
}

/// A token on a path, with its log-prob, temperature and version.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathToken {
    /// The token.
    pub id: TokenId,
    /// Origin of the token; forced tokens of a sampled node are [`TokenKind::Forced`].
    pub kind: TokenKind,
    /// Node that contains the token.
    pub node: NodeId,
    /// Turn of its node.
    pub turn: u32,
    /// Log-probability of a sampled token; forced tokens within a sampled node have none.
    pub logprob: Option<f32>,
    /// Sampling temperature of its node.
    pub temperature: f32,
    /// The weights that sampled it; none for tokens that were not sampled.
    pub version: Option<PolicyVersion>,
}

/// Invariant that a trace breaks.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TraceError {
    /// A trace of another format version.
    #[error("trace {episode}: format version {actual}, this program reads {expected}")]
    Version {
        /// Id of the trace's episode.
        episode: EpisodeId,
        /// Version of the trace.
        actual: u32,
        /// [`TRACE_FORMAT_VERSION`].
        expected: u32,
    },
    /// A parent that does not precede its child.
    #[error("trace {episode}: node {node} has parent {parent}, expected a smaller index")]
    Parent {
        /// Id of the trace's episode.
        episode: EpisodeId,
        /// Index of the child.
        node: NodeId,
        /// Index of the parent, which is not below `node`.
        parent: NodeId,
    },
    /// A sampled node with another number of log-probabilities than tokens, or another node with any.
    #[error("trace {episode}: node {node} ({kind:?}) has {logprobs} log-probs for {tokens} tokens")]
    Logprobs {
        /// Id of the trace's episode.
        episode: EpisodeId,
        /// Index of the node.
        node: NodeId,
        /// Origin of the node's tokens.
        kind: TokenKind,
        /// Number of log-probabilities.
        logprobs: usize,
        /// Number of tokens.
        tokens: usize,
    },
    /// A log-probability of a sampled token that is not finite, or above 0 by more than rounding (1e-3).
    #[error(
        "trace {episode}: node {node} log-prob {index} is {value}, expected a finite number <= 0"
    )]
    LogprobValue {
        /// Id of the trace's episode.
        episode: EpisodeId,
        /// Index of the node.
        node: NodeId,
        /// Index of the token in the node.
        index: usize,
        /// The log-probability.
        value: f32,
    },
    /// A sampled node with a temperature outside [`TEMPERATURES`], or another node with one that is not 1.
    #[error(
        "trace {episode}: node {node} has temperature {value}, expected {} to {}, and 1 for greedy sampling and \
         what nobody sampled",
        TEMPERATURES.start(),
        TEMPERATURES.end()
    )]
    Temperature {
        /// Id of the trace's episode.
        episode: EpisodeId,
        /// Index of the node.
        node: NodeId,
        /// The temperature.
        value: f32,
    },
    /// Spans of policy versions with a gap, an overlap or a wrong total length.
    #[error("trace {episode}: node {node} has version spans that do not cover its {tokens} tokens")]
    Versions {
        /// Id of the trace's episode.
        episode: EpisodeId,
        /// Index of the node.
        node: NodeId,
        /// Number of tokens of the node.
        tokens: usize,
    },
    /// A record of the node's output format that contradicts its tokens or itself.
    #[error("trace {episode}: node {node}: format.{field} {why}")]
    Format {
        /// Id of the trace's episode.
        episode: EpisodeId,
        /// Index of the node.
        node: NodeId,
        /// Name of the field of the record.
        field: &'static str,
        /// Reason in words, which follows the field's name.
        why: String,
    },
    /// Experts of tokens that the path of their node does not have, or of another size than they tell.
    #[error("trace {episode}: node {node}: routes {why}")]
    Routes {
        /// Id of the trace's episode.
        episode: EpisodeId,
        /// Index of the node.
        node: NodeId,
        /// Reason in words, which follows the field's name.
        why: String,
    },
    /// A reward that is not finite or too large.
    #[error(
        "trace {episode}: {field} is {value:e}, allowed: a finite number of magnitude up to {MAX_REWARD:e}"
    )]
    Reward {
        /// Id of the trace's episode.
        episode: EpisodeId,
        /// `outcome.reward` or `process_reward`.
        field: &'static str,
        /// The reward.
        value: f64,
    },
}

impl Trace {
    /// Returns the name of the environment. Episodes of external systems have none; their task type is used
    /// instead.
    pub fn environment(&self) -> &str {
        let named = self.provenance.environment.as_ref();
        named.map_or(self.task_kind.as_str(), |c| c.name.as_str())
    }

    /// Name of the environment of a mixture that it belongs to: it begins the id of the task, before a `:`.
    pub fn member(&self) -> Option<&str> {
        let name = self.provenance.environment.as_ref()?.name.as_str();
        let rest = self.task.0.strip_prefix(name)?;
        rest.starts_with(':').then_some(name)
    }

    /// Checks every invariant of the format; a store refuses what fails.
    pub fn validate(&self) -> Result<(), TraceError> {
        let episode = || self.episode.clone();
        if self.format_version != TRACE_FORMAT_VERSION {
            return Err(TraceError::Version {
                episode: episode(),
                actual: self.format_version,
                expected: TRACE_FORMAT_VERSION,
            });
        }
        let reward = |field, value| {
            if is_reward(value) {
                Ok(())
            } else {
                Err(TraceError::Reward {
                    episode: episode(),
                    field,
                    value,
                })
            }
        };
        reward("outcome.reward", self.outcome.reward)?;
        for (index, node) in self.nodes.iter().enumerate() {
            self.validate_node(index as NodeId, node)?;
        }
        // Named last: a reward of a turn that is out of bounds is the cause.
        reward("the total reward", self.total_reward())
    }

    fn validate_node(&self, index: NodeId, node: &Node) -> Result<(), TraceError> {
        let episode = || self.episode.clone();
        if node.parent != NO_PARENT && node.parent >= index {
            return Err(TraceError::Parent {
                episode: episode(),
                node: index,
                parent: node.parent,
            });
        }
        if !is_reward(node.process_reward) {
            return Err(TraceError::Reward {
                episode: episode(),
                field: "process_reward",
                value: node.process_reward,
            });
        }
        let sampled = node.kind == TokenKind::Sampled;
        let expected = if sampled { node.tokens.len() } else { 0 };
        if node.logprobs.len() != expected {
            return Err(TraceError::Logprobs {
                episode: episode(),
                node: index,
                kind: node.kind,
                logprobs: node.logprobs.len(),
                tokens: node.tokens.len(),
            });
        }
        // Rounding of a log-softmax can leave a probability of one a little above it.
        let bad = |v: &f32| !v.is_finite() || *v > 1e-3;
        if let Some(i) = node.logprobs.iter().position(bad) {
            return Err(TraceError::LogprobValue {
                episode: episode(),
                node: index,
                index: i,
                value: node.logprobs[i],
            });
        }
        let fits = if sampled {
            TEMPERATURES.contains(&node.temperature)
        } else {
            node.temperature == 1.0
        };
        if !fits {
            return Err(TraceError::Temperature {
                episode: episode(),
                node: index,
                value: node.temperature,
            });
        }
        let mut next = 0u32;
        let contiguous = node.versions.iter().all(|span| {
            let fits = span.start == next && span.len > 0;
            next = next.saturating_add(span.len);
            fits
        });
        if !contiguous || next as usize != expected {
            return Err(TraceError::Versions {
                episode: episode(),
                node: index,
                tokens: node.tokens.len(),
            });
        }
        self.validate_format(index, node)?;
        self.validate_routes(index, node)
    }

    fn validate_routes(&self, index: NodeId, node: &Node) -> Result<(), TraceError> {
        if node.routes.is_empty() {
            return Ok(());
        }
        let wrong = |why: String| {
            Err(TraceError::Routes {
                episode: self.episode.clone(),
                node: index,
                why,
            })
        };
        if node.kind != TokenKind::Sampled {
            return wrong(format!("are set on a node of kind {:?}", node.kind));
        }
        let path = self.path(index).into_iter();
        let tokens: usize = path.map(|id| self.nodes[id as usize].tokens.len()).sum();
        for span in &node.routes {
            if let Err(why) = span.validate() {
                return wrong(why);
            }
            if span.end() as usize > tokens {
                let end = span.end();
                return wrong(format!("end at token {end}, its path has {tokens}"));
            }
        }
        Ok(())
    }

    fn validate_format(&self, index: NodeId, node: &Node) -> Result<(), TraceError> {
        let Some(format) = &node.format else {
            return Ok(());
        };
        let wrong = |field, why: String| {
            Err(TraceError::Format {
                episode: self.episode.clone(),
                node: index,
                field,
                why,
            })
        };
        if node.kind != TokenKind::Sampled {
            return wrong("law", format!("is set on a node of kind {:?}", node.kind));
        }
        let expected = if format.masked() {
            node.tokens.len()
        } else {
            0
        };
        let columns = [
            ("allowed", format.allowed.len()),
            ("masks", format.masks.len()),
            ("log_mass", format.log_mass.len()),
        ];
        if let Some((field, actual)) = columns.into_iter().find(|c| c.1 != expected) {
            return wrong(field, format!("has {actual} entries, expected {expected}"));
        }
        if let Some(i) = format.allowed.iter().position(|&n| n == 0) {
            return wrong("allowed", format!("[{i}] is 0: a token was drawn"));
        }
        let bad = |m: &f32| !m.is_finite() || *m > 1e-3;
        if let Some(i) = format.log_mass.iter().position(bad) {
            let why = format!("[{i}] is {}, expected <= 0", format.log_mass[i]);
            return wrong("log_mass", why);
        }
        let forced = |i: &usize| format.forced(*i) && node.logprobs[*i] != 0.0;
        if let Some(i) = (0..expected).find(forced) {
            let why = format!("[{i}] is 1 but the log-prob is {}", node.logprobs[i]);
            return wrong("allowed", why);
        }
        Ok(())
    }

    /// Nodes without children, in order.
    pub fn leaves(&self) -> Vec<NodeId> {
        let mut has_child = vec![false; self.nodes.len()];
        for node in &self.nodes {
            if node.parent != NO_PARENT {
                has_child[node.parent as usize] = true;
            }
        }
        (0..self.nodes.len() as NodeId)
            .filter(|&i| !has_child[i as usize])
            .collect()
    }

    /// Number of branches by cause.
    pub fn branches(&self) -> BTreeMap<BranchCause, u32> {
        let mut counts = BTreeMap::new();
        for cause in self.nodes.iter().filter_map(|n| n.branch) {
            *counts.entry(cause).or_default() += 1;
        }
        counts
    }

    /// The limit of tokens that cut the last answer, if one did.
    pub fn cut(&self) -> Option<Limit> {
        cut(&self.nodes)
    }

    /// The nodes as people see them: without log-probabilities where none are known.
    pub fn shown_nodes(&self) -> Cow<'_, [Node]> {
        if !self.provenance.logprobs_unknown {
            return Cow::Borrowed(&self.nodes);
        }
        let mut nodes = self.nodes.clone();
        nodes.iter_mut().for_each(|node| node.logprobs.clear());
        Cow::Owned(nodes)
    }

    /// Node ids from the root to `leaf`.
    pub fn path(&self, leaf: NodeId) -> Vec<NodeId> {
        let mut path = Vec::new();
        let mut at = leaf;
        while at != NO_PARENT {
            path.push(at);
            at = self.nodes[at as usize].parent;
        }
        path.reverse();
        path
    }

    /// Recorded experts of the tokens from the root to `leaf`, by position: see [`RouteSpan::joined`].
    pub fn path_routes(&self, leaf: NodeId) -> Vec<RouteSpan> {
        let path = self.path(leaf);
        RouteSpan::joined(path.iter().flat_map(|&id| &self.nodes[id as usize].routes))
    }

    /// The tokens from the root to `leaf`: what the model saw, in order.
    pub fn path_tokens(&self, leaf: NodeId) -> Vec<PathToken> {
        let mut out = Vec::new();
        for id in self.path(leaf) {
            let node = &self.nodes[id as usize];
            let mut spans = node.versions.iter().peekable();
            for (i, &token) in node.tokens.iter().enumerate() {
                while spans
                    .peek()
                    .is_some_and(|s| (s.start + s.len) as usize <= i)
                {
                    spans.next();
                }
                let forced = node.forced(i);
                out.push(PathToken {
                    id: token,
                    kind: if forced { TokenKind::Forced } else { node.kind },
                    node: id,
                    turn: node.turn,
                    logprob: node.logprobs.get(i).copied().filter(|_| !forced),
                    temperature: node.temperature,
                    version: spans.peek().map(|s| s.version).filter(|_| !forced),
                });
            }
        }
        out
    }

    /// Number of sampled tokens in all nodes, without forced tokens.
    pub fn sampled_tokens(&self) -> usize {
        let sampled = self.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
        sampled
            .map(|n| (0..n.tokens.len()).filter(|&i| !n.forced(i)).count())
            .sum()
    }

    /// Oldest version that sampled a token.
    pub fn oldest_version(&self) -> Option<PolicyVersion> {
        self.nodes
            .iter()
            .flat_map(|n| &n.versions)
            .map(|s| s.version)
            .min()
    }

    /// Newest version that sampled a token.
    pub fn newest_version(&self) -> Option<PolicyVersion> {
        self.nodes
            .iter()
            .flat_map(|n| &n.versions)
            .map(|s| s.version)
            .max()
    }

    /// Outcome plus process rewards; 0 if it has no reward, see [`Trace::score`].
    pub fn total_reward(&self) -> f64 {
        self.outcome.reward + self.nodes.iter().map(|n| n.process_reward).sum::<f64>()
    }

    /// Removes the score of an episode if one of its rewards, or their total, is not a number or exceeds
    /// [`MAX_REWARD`], and records the reason. Metrics of that kind are removed. So the values of agents,
    /// environments and servers are bounded before they are stored.
    pub fn bound_rewards(&mut self) {
        let fits = is_reward;
        let turns = self.nodes.iter().map(|n| n.process_reward);
        let all = std::iter::once(self.outcome.reward).chain(turns);
        let found = all.chain([self.total_reward()]).find(|v| !fits(*v));
        self.outcome.metrics.retain(|_, value| fits(*value));
        let Some(value) = found else { return };
        for node in &mut self.nodes {
            node.process_reward = Some(node.process_reward)
                .filter(|v| fits(*v))
                .unwrap_or(0.0);
        }
        self.outcome.reward = 0.0;
        self.outcome.success = false;
        self.outcome.unscored = true;
        let why = format!("a reward is {value:e}, allowed: magnitudes up to {MAX_REWARD:e}");
        self.outcome.unscored_reason = Some(why);
    }

    /// Returns the total reward, if there is one.
    pub fn score(&self) -> Option<f64> {
        (!self.outcome.unscored).then(|| self.total_reward())
    }
}

#[cfg(test)]
mod tests;
