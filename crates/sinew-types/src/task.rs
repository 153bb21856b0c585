//! An immutable problem row.

use crate::ids::TaskId;
use crate::message::Message;
use serde::{Deserialize, Serialize};

/// One problem: what an environment needs to build the world of an episode.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Identity within the taskset; equal ids are equal tasks.
    pub id: TaskId,
    /// Task type within the taskset, for per-type metrics and curricula.
    pub kind: String,
    /// Messages before the prompt: a system prompt, worked examples, or a dialogue that the prompt continues.
    /// Environments that write their own messages leave it empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub preamble: Vec<Message>,
    /// Text of the problem: the last message of the user before the model's first turn.
    pub prompt: String,
    /// Input of the environment, such as the expected answer; the environment defines its schema.
    pub data: serde_json::Value,
    /// Seed of everything random in the episode's world.
    pub seed: u64,
}
