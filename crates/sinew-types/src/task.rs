//! An immutable problem row.

use crate::ids::TaskId;
use serde::{Deserialize, Serialize};

/// One problem: what an environment needs to build the world of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub id: TaskId,
    /// Task type within the taskset, for per-type metrics and curricula.
    pub kind: String,
    /// Text of the problem.
    pub prompt: String,
    /// What the environment checks the outcome against; its schema is the environment's.
    pub data: serde_json::Value,
    /// Seed of everything random in the episode's world.
    pub seed: u64,
}
