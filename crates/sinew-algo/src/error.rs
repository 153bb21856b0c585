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
        /// Name of the key, without `algorithm.`.
        field: &'static str,
        /// Number that was given.
        value: f64,
        /// Allowed numbers in words.
        allowed: &'static str,
    },
    /// An option has no effect on the algorithm.
    #[error("algorithm.{field} has no effect on `{kind}`: {reason}; remove it")]
    NoEffect {
        /// Name of the key, without `algorithm.`.
        field: &'static str,
        /// Algorithm of the recipe.
        kind: AlgorithmKind,
        /// Reason in words.
        reason: &'static str,
    },
    /// Options contradict each other or the run.
    #[error("{reason}")]
    Impossible {
        /// The whole message.
        reason: String,
    },
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
    /// A group has no episodes.
    #[error("group {index} of the batch is empty")]
    EmptyGroup {
        /// Index of the group in the batch, from 0.
        index: usize,
    },
    /// A group has one episode, but the algorithm compares episodes.
    #[error(
        "group {group} holds one episode: it would be its own baseline; \
         give all {expected} episodes of the group, or use `reinforce` or `ppo`"
    )]
    GroupOfOne {
        /// Id of the group.
        group: GroupId,
        /// Number of episodes that the group should have.
        expected: usize,
    },
    /// An episode is in the list of another group.
    #[error("episode {episode} belongs to group {actual}, but was given in group {expected}")]
    MixedGroup {
        /// Id of the episode.
        episode: EpisodeId,
        /// Group that the episode's trace names.
        actual: GroupId,
        /// Group in whose list the episode was.
        expected: GroupId,
    },
    /// A group is in two lists.
    #[error("group {group} was given twice; its episodes must be compared together")]
    SplitGroup {
        /// Id of the group.
        group: GroupId,
    },
    /// An episode occurs twice.
    #[error("episode {episode} is twice in the batch")]
    DuplicateEpisode {
        /// Id of the episode.
        episode: EpisodeId,
    },
    /// A required column has no values for an episode.
    #[error("`{algorithm}` reads {column}, but none were given for episode {episode}")]
    MissingColumn {
        /// Name of the algorithm in recipes.
        algorithm: &'static str,
        /// Name of the column.
        column: &'static str,
        /// Id of the episode.
        episode: EpisodeId,
    },
    /// The length of a column differs from that of its node.
    #[error(
        "{column} of episode {episode}: node {node} has {actual} entries for {expected} tokens"
    )]
    ColumnLength {
        /// Name of the column.
        column: &'static str,
        /// Id of the episode.
        episode: EpisodeId,
        /// Index of the node in the trace.
        node: usize,
        /// Entries that were given for the node.
        actual: usize,
        /// Tokens of the node.
        expected: usize,
    },
    /// A column has a non-finite value.
    #[error("{column} of episode {episode}: node {node} token {index} is {value}")]
    ColumnValue {
        /// Name of the column.
        column: &'static str,
        /// Id of the episode.
        episode: EpisodeId,
        /// Index of the node in the trace.
        node: usize,
        /// Index of the token in the node.
        index: usize,
        /// The value that is not finite.
        value: f32,
    },
    /// The mask of a token that was sampled under a format is missing.
    #[error(
        "episode {episode}: token {index} of node {node} was drawn under a format, \
         but its mask was not given: it cannot be trained"
    )]
    MissingMask {
        /// Id of the episode.
        episode: EpisodeId,
        /// Index of the node in the trace.
        node: NodeId,
        /// Index of the token in the node.
        index: u32,
    },
    /// The batch has no state hash, but the algorithm compares states.
    #[error("`{algorithm}` compares states, but no turn of the batch has a state_hash")]
    NoStates {
        /// Name of the algorithm in recipes.
        algorithm: &'static str,
    },
    /// No episode has a metric that resampling needs.
    #[error(
        "`{algorithm}` chooses among successes by failed tool calls and the format penalty, but no episode \
         of the batch has the metric `{metric}`: take an environment that counts it, or leave resampling out"
    )]
    NoMetric {
        /// Name of the algorithm in recipes.
        algorithm: &'static str,
        /// Name of the metric.
        metric: &'static str,
    },
    /// The number of scores differs from the draft's.
    #[error("scores were given for {actual} {what}, expected {expected}")]
    Scores {
        /// Unit that was counted: rows, or tokens of a row.
        what: &'static str,
        /// Number of scores.
        actual: usize,
        /// Number that the draft has.
        expected: usize,
    },
    /// An invalid row.
    #[error(transparent)]
    Row(#[from] TrainRowError),
}
