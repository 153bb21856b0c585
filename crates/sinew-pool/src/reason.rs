//! Reasons why a trajectory is not trained on.
//!
//! Programs match [`Reason::code`]; `docs/pool.md` lists the codes. The text of each reason states the
//! necessary change.

use serde::{Deserialize, Serialize};
use sinew_types::{NodeId, TEMPERATURES, TokenId};

/// Reason why a trajectory is in quarantine. Its JSON is an object with the `code` and the fields, and the
/// text in addition as `message`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "code", rename_all = "snake_case")]
pub enum Reason {
    /// The item is not of the schema.
    #[error("not a trajectory of schema version 1: {detail}")]
    Schema { detail: String },
    /// A size above a limit of the configuration.
    #[error("{field} is {value}, the limit is {limit}")]
    TooLarge {
        field: String,
        value: u64,
        limit: u64,
    },
    /// Ids of another tokenizer have other meanings.
    #[error(
        "it was tokenized by {given:?}, this server's tokenizer is {expected}: GET /pool tells it"
    )]
    Tokenizer {
        given: Option<String>,
        expected: String,
    },
    /// Sampled from another model than the pool's.
    #[error("it was sampled from model {given:?}, this pool takes those of {expected}")]
    Model {
        given: Option<String>,
        expected: String,
    },
    /// The id is known with other contents.
    #[error("id {id:?} is known with other contents; give each trajectory an id of its own")]
    IdConflict { id: String },
    /// No node of the model's own.
    #[error("nothing in it was sampled: there is nothing to learn from")]
    NothingSampled,
    /// A parent that does not come before its node.
    #[error("node {node} has parent {parent}, expected a smaller index, or null for a root")]
    Parent { node: NodeId, parent: NodeId },
    /// A sampled or forced node without a node before it.
    #[error(
        "node {node} is a root and {kind}: its first token follows nothing, so that nothing can have sampled it"
    )]
    Root { node: NodeId, kind: String },
    /// A node without tokens.
    #[error("node {node} has no tokens")]
    EmptyNode { node: NodeId },
    /// An id outside the vocabulary.
    #[error("node {node} token {index} is {id}, the vocabulary has {vocab}")]
    UnknownToken {
        node: NodeId,
        index: u32,
        id: TokenId,
        vocab: u32,
    },
    /// Kind `rl` without log-probabilities.
    #[error(
        "node {node} was sampled and has no log-probabilities: it cannot be corrected for the \
         policy that sampled it; push it as kind sft or dpo, or with what the engine reported"
    )]
    LogprobsMissing { node: NodeId },
    /// Not one log-probability for each token.
    #[error("node {node} has {logprobs} log-probabilities for {tokens} tokens")]
    LogprobCount {
        node: NodeId,
        logprobs: u32,
        tokens: u32,
    },
    /// Facts of sampling at a node that was not sampled.
    #[error(
        "node {node} ({kind}) was not sampled, but has log-probabilities, a temperature or versions"
    )]
    NotSampled { node: NodeId, kind: String },
    /// A log-probability that is not finite, or above 0.
    #[error("node {node} log-probability {index} is {value}, expected a finite number <= 0")]
    LogprobValue {
        node: NodeId,
        index: u32,
        /// Value as text: JSON cannot represent infinite values and NaN.
        value: String,
    },
    /// A temperature out of range.
    #[error(
        "node {node} has temperature {value}, expected that of its log-probabilities, {} to {}; greedy sampling \
         is 1",
        TEMPERATURES.start(),
        TEMPERATURES.end()
    )]
    Temperature {
        node: NodeId,
        /// Value as text: JSON cannot represent infinite values and NaN.
        value: String,
    },
    /// Versions that are missing, or do not cover the tokens.
    #[error("node {node}: {detail}")]
    Versions { node: NodeId, detail: String },
    /// A number that is infinite, not a number, or too large.
    #[error("{field} is {value}, expected a finite number of magnitude up to 1e30")]
    NotFinite { field: String, value: String },
    /// No reward, for a kind that compares rewards.
    #[error("reward is missing: kind {kind} compares rewards")]
    RewardMissing { kind: String },
    /// Kind `rl` without token ids.
    #[error(
        "only its text is known, not the ids that were sampled: tokenizing it again would train \
         other tokens than the policy's; push ids and log-probabilities, or push it as kind sft or dpo"
    )]
    TextOnly,
    /// Text that cannot be rendered with the model's template.
    #[error("its messages cannot be rendered: {detail}")]
    Render { detail: String },
    /// Tokens and messages of a node contradict each other.
    #[error("node {node}: its tokens say {tokens:?}, its messages {messages:?}")]
    MessagesDiffer {
        node: NodeId,
        tokens: String,
        messages: String,
    },
    /// The engine gives a token another log-probability.
    #[error(
        "node {node} token {index}: the engine gives it log-probability {engine}, it was pushed \
         with {pushed}; the bound is {bound}"
    )]
    LogprobGap {
        node: NodeId,
        index: u32,
        engine: f32,
        pushed: f32,
        bound: f32,
    },
    /// A filter of the configuration.
    #[error("filter of task type {task_kind:?}: {rule} is {value}, allowed: {allowed}")]
    Filtered {
        task_kind: String,
        rule: String,
        value: String,
        allowed: String,
    },
    /// Too old for the trainer at the time of its lease.
    #[error(
        "a token of its group was sampled by version {version}, {behind} behind the trainer's; allowed: {allowed}"
    )]
    Stale {
        version: u64,
        behind: u64,
        allowed: u64,
    },
    /// The group did not become complete in time.
    #[error("group {group:?} has {have} of {group_size} trajectories and no more came in time")]
    GroupIncomplete {
        group: String,
        have: u32,
        group_size: u32,
    },
    /// Leased too often without an acknowledgement: it perhaps crashes its trainers.
    #[error("it was given out {attempts} times and never acknowledged")]
    Undeliverable { attempts: u32 },
    /// A trainer refused it.
    #[error("a trainer was given its group and cannot use it: {detail}")]
    Unusable { detail: String },
    /// Spans that do not form a trajectory.
    #[error("spans: {detail}")]
    Spans { detail: String },
}

impl Reason {
    /// The code for programs, in snake case.
    pub fn code(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        value["code"].as_str().unwrap_or("unknown").to_owned()
    }
}
