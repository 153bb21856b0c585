//! Where an episode comes from: what asked for it, and what produced it.

use crate::engine::SamplingParams;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What asked for an episode.
///
/// An episode belongs to no training step when it runs: which update trained it is known from that update's
/// commit alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Origin {
    /// Name of the run; empty where there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub run: String,
    /// Number of the draw within its purpose: the task that was drawn, and the group of its episodes. Of
    /// traces of formats 1 and 2: the training step.
    pub draw: u64,
    /// `train`, `eval-before`, ... : what the episode was run for.
    pub purpose: String,
}

/// What produced an episode, as far as it is known. Nothing is made up: what is not known is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Provenance {
    /// Seed of the task's world. With [`Trace::task`](crate::Trace::task) it names the task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_seed: Option<u64>,
    /// Seed of everything that the episode draws.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<Component>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling: Option<Sampling>,
    /// BLAKE3 of the chat template's text, hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Versions of the tools, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tools: BTreeMap<String, String>,
    /// Kernel set of an embedded engine: log-probabilities are equal to the bit only within one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernels: Option<String>,
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
    pub name: String,
    pub version: String,
}

/// How an episode's turns were sampled: [`SamplingParams`] without what differs between turns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sampling {
    pub temperature: f32,
    pub top_p: f32,
    pub top_k: u32,
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
