//! Why a trajectory is not trained on.

use serde::{Deserialize, Serialize};
use sinew_types::{NodeId, TEMPERATURES, TokenId};

/// Why a trajectory is in quarantine. Over the wire: an object with the `code` and the fields, and
/// the text in addition as `message`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "code", rename_all = "snake_case")]
pub enum Reason {
    #[error("not a trajectory of schema version 1: {detail}")]
    Schema { detail: String },
    #[error("{field} is {value}, the limit is {limit}")]
    TooLarge {
        field: String,
        value: u64,
        limit: u64,
    },
    #[error(
        "it was tokenized by {given:?}, this server's tokenizer is {expected}: GET /pool tells it"
    )]
    Tokenizer {
        given: Option<String>,
        expected: String,
    },
    #[error("it was sampled from model {given:?}, this pool takes those of {expected}")]
    Model {
        given: Option<String>,
        expected: String,
    },
    #[error("id {id:?} is known with other contents; give each trajectory an id of its own")]
    IdConflict { id: String },
    #[error("nothing in it was sampled: there is nothing to learn from")]
    NothingSampled,
    #[error("node {node} has parent {parent}, expected a smaller index, or null for a root")]
    Parent { node: NodeId, parent: NodeId },
    #[error(
        "node {node} is a root and {kind}: its first token follows nothing, so that nothing can have sampled it"
    )]
    Root { node: NodeId, kind: String },
    #[error("node {node} has no tokens")]
    EmptyNode { node: NodeId },
    #[error("node {node} token {index} is {id}, the vocabulary has {vocab}")]
    UnknownToken {
        node: NodeId,
        index: u32,
        id: TokenId,
        vocab: u32,
    },
    #[error(
        "node {node} was sampled and has no log-probabilities: it cannot be corrected for the \
         policy that sampled it; push it as kind sft or dpo, or with what the engine reported"
    )]
    LogprobsMissing { node: NodeId },
    #[error("node {node} has {logprobs} log-probabilities for {tokens} tokens")]
    LogprobCount {
        node: NodeId,
        logprobs: u32,
        tokens: u32,
    },
    #[error(
        "node {node} ({kind}) was not sampled, but has log-probabilities, a temperature or versions"
    )]
    NotSampled { node: NodeId, kind: String },
    #[error("node {node} log-probability {index} is {value}, expected a finite number <= 0")]
    LogprobValue {
        node: NodeId,
        index: u32,
        /// As text: JSON has no word for what is not finite.
        value: String,
    },
    #[error(
        "node {node} has temperature {value}, expected that of its log-probabilities, {} to {}; greedy sampling \
         is 1",
        TEMPERATURES.start(),
        TEMPERATURES.end()
    )]
    Temperature {
        node: NodeId,
        /// As text: JSON has no word for what is not finite.
        value: String,
    },
    #[error("node {node}: {detail}")]
    Versions { node: NodeId, detail: String },
    #[error("{field} is {value}, expected a finite number")]
    NotFinite { field: String, value: String },
    #[error("reward is missing: kind {kind} compares rewards")]
    RewardMissing { kind: String },
    #[error(
        "only its text is known, not the ids that were sampled: tokenizing it again would train \
         other tokens than the policy's; push ids and log-probabilities, or push it as kind sft or dpo"
    )]
    TextOnly,
    #[error("its messages cannot be rendered: {detail}")]
    Render { detail: String },
    #[error("node {node}: its tokens say {tokens:?}, its messages {messages:?}")]
    MessagesDiffer {
        node: NodeId,
        tokens: String,
        messages: String,
    },
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
    #[error("filter of task type {task_kind:?}: {rule} is {value}, allowed: {allowed}")]
    Filtered {
        task_kind: String,
        rule: String,
        value: String,
        allowed: String,
    },
    #[error(
        "a token of its group was sampled by version {version}, {behind} behind the trainer's; allowed: {allowed}"
    )]
    Stale {
        version: u64,
        behind: u64,
        allowed: u64,
    },
    #[error("group {group:?} has {have} of {group_size} trajectories and no more came in time")]
    GroupIncomplete {
        group: String,
        have: u32,
        group_size: u32,
    },
    #[error("it was given out {attempts} times and never acknowledged")]
    Undeliverable { attempts: u32 },
    #[error("a trainer was given its group and cannot use it: {detail}")]
    Unusable { detail: String },
    #[error("spans: {detail}")]
    Spans { detail: String },
}

impl Reason {
    /// The word that programs match.
    pub fn code(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        value["code"].as_str().unwrap_or("unknown").to_owned()
    }
}
