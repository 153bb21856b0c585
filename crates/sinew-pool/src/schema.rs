//! What is pushed: schema version 1, the same in JSON and Arrow. `docs/pool.md` describes it.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sinew_types::{
    EpisodeEnd, FinishReason, Message, NodeId, TokenId, TokenKind, ToolSpec, VersionSpan,
};
use std::collections::BTreeMap;

/// Version of the schema; others are refused.
pub const SCHEMA_VERSION: u64 = 1;

/// What a trajectory may be trained for.
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
    /// Its name in JSON.
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
    pub kind: TokenKind,
    pub tokens: Vec<TokenId>,
    /// `null` stands for a value that is not finite.
    #[serde(default, deserialize_with = "narrowed")]
    pub logprobs: Option<Vec<Option<f32>>>,
    /// At which its tokens were sampled and their log-probabilities are; left out: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Version of the weights that sampled all of its tokens.
    #[serde(default)]
    pub version: Option<u64>,
    /// Or of spans of them.
    #[serde(default)]
    pub versions: Option<Vec<VersionSpan>>,
    /// Left out: the number of sampled nodes up to it.
    #[serde(default)]
    pub turn: Option<u32>,
    #[serde(default)]
    pub messages: Option<Vec<Message>>,
    #[serde(default)]
    pub finish: Option<FinishReason>,
    #[serde(default)]
    pub process_reward: Option<f64>,
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

/// One trajectory, as it is pushed: `nodes`, or `messages` where only text is known.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trajectory {
    /// Left out: made from the contents.
    #[serde(default)]
    pub id: Option<String>,
    pub task: String,
    /// Left out: `default`.
    #[serde(default)]
    pub task_kind: Option<String>,
    /// Trajectories whose rewards are compared; left out: a group of its own.
    #[serde(default)]
    pub group: Option<String>,
    /// How many make the group whole; left out: 1.
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
    #[serde(default)]
    pub metrics: Option<BTreeMap<String, f64>>,
    /// Left out: `{"type": "terminated"}`.
    #[serde(default)]
    pub end: Option<EpisodeEnd>,
    #[serde(default)]
    pub started_unix_s: Option<f64>,
    #[serde(default)]
    pub nodes: Option<Vec<PushedNode>>,
    #[serde(default)]
    pub messages: Option<Vec<Message>>,
    #[serde(default)]
    pub tools: Option<Vec<ToolSpec>>,
}

/// A trajectory with what its batch says of it, before it is checked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pushed {
    /// The trajectory's JSON text, kept as it came so that it can be checked again.
    pub raw: String,
    pub tokenizer: Option<String>,
    pub model: Option<String>,
    pub source: String,
}

/// A batch of the JSON form.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    pub version: u64,
    #[serde(default)]
    pub tokenizer: Option<String>,
    #[serde(default)]
    pub model: Option<String>,
    #[serde(default)]
    pub source: Option<String>,
    pub trajectories: Vec<Value>,
}

impl Batch {
    /// Its trajectories, each with what the batch says of it.
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
