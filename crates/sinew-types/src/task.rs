//! An immutable problem row.

use crate::ids::TaskId;
use serde::{Deserialize, Serialize};

/// One problem: what an environment needs to build the world of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Identity within the taskset; equal ids are equal tasks.
    pub id: TaskId,
    /// Task type within the taskset, for per-type metrics and curricula.
    pub kind: String,
    /// Text of the problem.
    pub prompt: String,
    /// Input of the environment, such as the expected answer; the environment defines its schema.
    pub data: serde_json::Value,
    /// Seed of everything random in the episode's world.
    pub seed: u64,
}
