//! Errors of recipes and of batches. A recipe's error names the key and the allowed values; a
//! batch's error names the group or the episode.

use crate::kind::AlgorithmKind;
use sinew_types::{EpisodeId, GroupId, NodeId, TrainRowError};

/// Reason why an algorithm cannot run as configured.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A number is out of range.
    #[error("algorithm.{field} is {value}, allowed: {allowed}")]
    Range {
        field: &'static str,
        value: f64,
        allowed: &'static str,
    },
    /// An option has no effect on the algorithm.
    #[error("algorithm.{field} has no effect on `{kind}`: {reason}; remove it")]
    NoEffect {
        field: &'static str,
        kind: AlgorithmKind,
        reason: &'static str,
    },
    /// Options contradict each other or the run.
    #[error("{reason}")]
    Impossible { reason: String },
}

impl ConfigError {
    pub(crate) fn impossible(reason: String) -> Self {
        Self::Impossible { reason }
    }
}

/// Reason why a batch cannot be converted. These are errors of the caller. Unusable episodes are not errors:
/// they are quarantined and counted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AlgoError {
    /// A group without episodes.
    #[error("group {index} of the batch is empty")]
    EmptyGroup { index: usize },
    /// A group with one episode, for an algorithm that compares episodes.
    #[error(
        "group {group} holds one episode: it would be its own baseline; \
         give all {expected} episodes of the group, or use `reinforce` or `ppo`"
    )]
    GroupOfOne { group: GroupId, expected: usize },
    /// An episode in another group's list.
    #[error("episode {episode} belongs to group {actual}, but was given in group {expected}")]
    MixedGroup {
        episode: EpisodeId,
        actual: GroupId,
        expected: GroupId,
    },
    /// A group in two lists.
    #[error("group {group} was given twice; its episodes must be compared together")]
    SplitGroup { group: GroupId },
    /// An episode that occurs twice.
    #[error("episode {episode} is twice in the batch")]
    DuplicateEpisode { episode: EpisodeId },
    /// A required column without values for an episode.
    #[error("`{algorithm}` reads {column}, but none were given for episode {episode}")]
    MissingColumn {
        algorithm: &'static str,
        column: &'static str,
        episode: EpisodeId,
    },
    /// A column whose length differs from the node's.
    #[error(
        "{column} of episode {episode}: node {node} has {actual} entries for {expected} tokens"
    )]
    ColumnLength {
        column: &'static str,
        episode: EpisodeId,
        node: usize,
        actual: usize,
        expected: usize,
    },
    /// A column with a non-finite value.
    #[error("{column} of episode {episode}: node {node} token {index} is {value}")]
    ColumnValue {
        column: &'static str,
        episode: EpisodeId,
        node: usize,
        index: usize,
        value: f32,
    },
    /// A token sampled under a format, without its mask.
    #[error(
        "episode {episode}: token {index} of node {node} was drawn under a format, \
         but its mask was not given: it cannot be trained"
    )]
    MissingMask {
        episode: EpisodeId,
        node: NodeId,
        index: u32,
    },
    /// No state hash in the batch, for an algorithm that compares states.
    #[error("`{algorithm}` compares states, but no turn of the batch has a state_hash")]
    NoStates { algorithm: &'static str },
    /// No episode with a metric that resampling needs.
    #[error(
        "`{algorithm}` chooses among successes by failed tool calls and the format penalty, but no episode \
         of the batch has the metric `{metric}`: take an environment that counts it, or leave resampling out"
    )]
    NoMetric {
        algorithm: &'static str,
        metric: &'static str,
    },
    /// Scores whose length differs from the draft's.
    #[error("scores were given for {actual} {what}, expected {expected}")]
    Scores {
        what: &'static str,
        actual: usize,
        expected: usize,
    },
    /// An invalid row.
    #[error(transparent)]
    Row(#[from] TrainRowError),
}
