//! Origin of an episode: the request for it, and the parts that produced it.

use crate::adapter::AdapterName;
use crate::engine::SamplingParams;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The request that an episode answers.
///
/// An episode belongs to no training step when it runs: only the commit of an update shows that it trained
/// the episode.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Origin {
    /// Name of the run; empty where there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub run: String,
    /// Number of the draw within its purpose: the task that was drawn, and the group of its episodes.
    pub draw: u64,
    /// Purpose of the episode: `train`, `eval-before` and others.
    pub purpose: String,
    /// Name of the episode in an outside system (a trace id, the number of a ticket), by which a later score
    /// may name it. At most [`MAX_EXTERNAL`] bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub external: Option<String>,
}

/// Bytes that an external id may have.
pub const MAX_EXTERNAL: usize = 256;

/// The parts that produced an episode, as far as they are known. Unknown facts are absent, not made up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Provenance {
    /// Seed of the task's world. Together with [`Trace::task`](crate::Trace::task) it identifies the task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_seed: Option<u64>,
    /// Seed of everything that the episode draws.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// The environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<Component>,
    /// Sampling parameters of its turns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling: Option<Sampling>,
    /// BLAKE3 of the chat template's text and of its variables, if there are any, hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Variables that the chat template was given.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub template: BTreeMap<String, serde_json::Value>,
    /// Versions of the tools by name, and of the rewards as `reward.NAME`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tools: BTreeMap<String, String>,
    /// Kernel set of an embedded engine. Log-probabilities are equal bit for bit only within one set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernels: Option<String>,
    /// The server reports no log-probabilities: each of its sampled tokens has a 0 in the place of one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub logprobs_unknown: bool,
    /// Adapter that sampled its turns, whose versions its tokens carry; `None`: the engine's own weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterName>,
    /// Isolation level of the sandboxes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
}

impl Provenance {
    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A part of the system with its version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Component {
    /// Name of the part.
    pub name: String,
    /// Version as the part reports it.
    pub version: String,
}

/// Sampling of an episode's turns: [`SamplingParams`] without the fields that differ between turns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sampling {
    /// Same as [`SamplingParams::temperature`].
    pub temperature: f32,
    /// Same as [`SamplingParams::top_p`].
    pub top_p: f32,
    /// Same as [`SamplingParams::top_k`].
    pub top_k: u32,
    /// Same as [`SamplingParams::min_p`].
    pub min_p: f32,
    /// Maximum of sampled tokens in a turn.
    pub max_tokens: u32,
}

impl From<&SamplingParams> for Sampling {
    fn from(params: &SamplingParams) -> Self {
        Self {
            temperature: params.temperature,
            top_p: params.top_p,
            top_k: params.top_k,
            min_p: params.min_p,
            max_tokens: params.max_tokens,
        }
    }
}
