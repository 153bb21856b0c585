//! The form of pushed items: schema version 1. `docs/pool.md` describes
//! it.
//!
//! Unknown fields are refused: a misspelled field would otherwise be lost silently.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sinew_dialect::conversation;
use sinew_types::{
    EpisodeEnd, FinishReason, Message, NO_PARENT, Node, NodeId, TokenId, TokenKind, Trace,
    VersionSpan,
};
use std::collections::BTreeMap;

/// Version of the schema; others are refused.
pub const SCHEMA_VERSION: u64 = 1;

/// The training that a trajectory can be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A policy gradient: needs the ids that were sampled, their log-probabilities and versions.
    Rl,
    /// Imitation. Log-probabilities are the trainer's own.
    Sft,
    /// Preference: the best and the worst of its group. Log-probabilities are the trainer's own.
    Dpo,
}

impl Kind {
    /// Name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rl => "rl",
            Self::Sft => "sft",
            Self::Dpo => "dpo",
        }
    }
}

/// One step's tokens, as they are pushed.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PushedNode {
    /// Index of the node before it; `null` for a root.
    #[serde(default)]
    pub parent: Option<NodeId>,
    /// Prompt, sampled, forced or observation.
    pub kind: TokenKind,
    /// Ids that the node adds, at least one.
    pub tokens: Vec<TokenId>,
    /// Log-probabilities; `null` is a value that is not finite.
    #[serde(default, deserialize_with = "narrowed")]
    pub logprobs: Option<Vec<Option<f32>>>,
    /// Temperature of the sampling and of the log-probabilities; left out: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Version of the weights that sampled all of its tokens.
    #[serde(default)]
    pub version: Option<u64>,
    /// Or the versions of spans of them, which cover the tokens in order.
    #[serde(default)]
    pub versions: Option<Vec<VersionSpan>>,
    /// Left out: the number of sampled nodes up to it.
    #[serde(default)]
    pub turn: Option<u32>,
    /// Messages that the tokens stand for; compared with the decoded tokens.
    #[serde(default, deserialize_with = "conversation::deserialize_some")]
    pub messages: Option<Vec<Message>>,
    /// Reason why the sampling ended.
    #[serde(default)]
    pub finish: Option<FinishReason>,
    /// Reward of the turn, finite; left out: 0.
    #[serde(default)]
    pub process_reward: Option<f64>,
    /// Identity of the environment's state before the turn, for algorithms that compare turns in
    /// equal states.
    #[serde(default)]
    pub state_hash: Option<u64>,
}

/// Numbers that need not fit: one beyond the range is infinite, and is refused with its place.
fn narrowed<'de, D: serde::Deserializer<'de>>(
    from: D,
) -> Result<Option<Vec<Option<f32>>>, D::Error> {
    let wide: Option<Vec<Option<f64>>> = Option::deserialize(from)?;
    Ok(wide.map(|all| all.into_iter().map(|v| v.map(|v| v as f32)).collect()))
}

/// One pushed trajectory: `nodes`, or `messages` if only the text is known.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trajectory {
    /// Left out: made from the contents.
    #[serde(default)]
    pub id: Option<String>,
    /// Name of the task.
    pub task: String,
    /// Left out: `default`.
    #[serde(default)]
    pub task_kind: Option<String>,
    /// Trajectories whose rewards are compared; left out: a separate group.
    #[serde(default)]
    pub group: Option<String>,
    /// Number of trajectories that make the group complete; left out: 1.
    #[serde(default)]
    pub group_size: Option<u32>,
    /// Left out: `rl`.
    #[serde(default)]
    pub kind: Option<Kind>,
    /// Needed by `rl` and `dpo`; left out with `sft`: 1.
    #[serde(default)]
    pub reward: Option<f64>,
    /// Left out: whether the reward is above 0.
    #[serde(default)]
    pub success: Option<bool>,
    /// Named measurements, finite, at most 256.
    #[serde(default)]
    pub metrics: Option<BTreeMap<String, f64>>,
    /// Left out: `{"type": "terminated"}`.
    #[serde(default)]
    pub end: Option<EpisodeEnd>,
    /// Seconds since 1970; left out: now.
    #[serde(default)]
    pub started_unix_s: Option<f64>,
    /// Token by token: a tree, parents first.
    #[serde(default)]
    pub nodes: Option<Vec<PushedNode>>,
    /// Or as a conversation of the chat-completions protocol, where only text is known.
    #[serde(default)]
    pub messages: Option<Value>,
    /// Tools that the conversation's prompt lists.
    #[serde(default)]
    pub tools: Option<Value>,
}

/// A trajectory with the fields of its batch, before it is checked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pushed {
    /// The trajectory's JSON text, kept as it came so that it can be checked again.
    pub raw: String,
    /// Hash of the tokenizer that made its ids.
    pub tokenizer: Option<String>,
    /// Name of the model that sampled it.
    pub model: Option<String>,
    /// Name of the sender; empty if none was given.
    pub source: String,
}

impl Pushed {
    /// Converts a finished rollout of the pool's gateway, in groups of `group_size`. A rollout without a
    /// reward goes to quarantine, like other trajectories without one.
    pub fn of_rollout(trace: &Trace, group_size: u32, tokenizer: &str) -> Self {
        let nodes = trace.nodes.iter().map(PushedNode::of);
        let group = trace.group.as_str();
        let trajectory = Trajectory {
            id: Some(trace.episode.0.clone()),
            task: trace.task.as_str().to_owned(),
            task_kind: Some(trace.task_kind.clone()),
            group: (group != "none").then(|| group.to_owned()),
            group_size: (group != "none").then_some(group_size),
            kind: Some(Kind::Rl),
            reward: (!trace.outcome.unscored).then_some(trace.outcome.reward),
            success: Some(trace.outcome.success),
            metrics: Some(trace.outcome.metrics.clone()),
            end: Some(trace.end.clone()),
            started_unix_s: Some(trace.timing.started_unix_s),
            nodes: Some(nodes.collect()),
            messages: None,
            tools: None,
        };
        Self {
            // Its maps have texts as keys, so that it is always JSON.
            raw: serde_json::to_string(&trajectory).unwrap_or_default(),
            tokenizer: Some(tokenizer.to_owned()),
            model: None,
            source: "gateway".to_owned(),
        }
    }
}

impl PushedNode {
    /// A node of a captured trace.
    fn of(node: &Node) -> Self {
        let sampled = node.kind == TokenKind::Sampled;
        Self {
            parent: (node.parent != NO_PARENT).then_some(node.parent),
            kind: node.kind,
            tokens: node.tokens.clone(),
            logprobs: sampled.then(|| node.logprobs.iter().map(|l| Some(*l)).collect()),
            temperature: sampled.then_some(node.temperature),
            version: None,
            versions: sampled.then(|| node.versions.clone()),
            turn: Some(node.turn),
            messages: None,
            finish: node.finish.clone(),
            process_reward: Some(node.process_reward),
            state_hash: node.state_hash,
        }
    }
}

/// A batch of the JSON form.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    /// [`SCHEMA_VERSION`].
    pub version: u64,
    /// Hash of the tokenizer, see [`crate::tokenizer_hash`].
    #[serde(default)]
    pub tokenizer: Option<String>,
    /// Name of the model.
    #[serde(default)]
    pub model: Option<String>,
    /// Name of the sender.
    #[serde(default)]
    pub source: Option<String>,
    /// The items, each checked by itself: one wrong item does not refuse the others.
    pub trajectories: Vec<Value>,
}

impl Batch {
    /// Returns its trajectories, each with the fields of the batch.
    pub fn pushed(self) -> Vec<Pushed> {
        let source = self.source.unwrap_or_default();
        let one = |value: Value| Pushed {
            raw: value.to_string(),
            tokenizer: self.tokenizer.clone(),
            model: self.model.clone(),
            source: source.clone(),
        };
        self.trajectories.into_iter().map(one).collect()
    }
}
