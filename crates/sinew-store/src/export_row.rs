//! Rows of an exported store, their columns, and the trait of their writers.

use crate::facets::Facets;
use crate::store::EpisodeSummary;
use serde::Serialize;
use serde_json::Value;
use sinew_types::{Message, Node, TokenKind, ToolSpec, Trace};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;

/// Format of an exported file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    /// One JSON object a line.
    JsonLines,
    /// Parquet, compressed with zstd; one row group a page.
    Parquet,
    /// An Arrow IPC file; one record batch a page.
    Arrow,
}

impl ExportFormat {
    /// Returns the format for a file's extension; `None` unless it is `.jsonl`, `.parquet` or `.arrow`.
    pub fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "jsonl" => Some(Self::JsonLines),
            "parquet" => Some(Self::Parquet),
            "arrow" => Some(Self::Arrow),
            _ => None,
        }
    }

    /// Whether this build can write the format: Parquet and Arrow need the feature `columns`.
    pub fn is_built(self) -> bool {
        self == Self::JsonLines || cfg!(feature = "columns")
    }
}

/// Row of an episode. A missing value is null: the reward of an unscored episode, or the versions where
/// nothing was sampled.
#[derive(Debug, Serialize)]
pub(crate) struct ExportRow {
    /// Unique in the store.
    pub(crate) episode: String,
    /// Episodes of one group share task and first prompt.
    pub(crate) group: String,
    /// Name of the task.
    pub(crate) task: String,
    #[serde(rename = "type")]
    /// Type of the task.
    pub(crate) kind: String,
    /// Name and version of the environment, as the trace has it.
    pub(crate) environment: String,
    /// Purpose of the episode, such as `train` or `eval-before`.
    pub(crate) purpose: String,
    /// Number of the episode's draw in the run.
    pub(crate) draw: u64,
    /// Total reward: outcome and process rewards.
    pub(crate) reward: Option<f64>,
    /// Success as the reward states it.
    pub(crate) success: Option<bool>,
    /// Named components of the reward, and measurements.
    pub(crate) metrics: BTreeMap<String, f64>,
    /// `terminated`, `truncated` or `failed`.
    pub(crate) end: &'static str,
    /// Lowest and highest policy version of its sampled tokens.
    pub(crate) first_version: Option<u64>,
    pub(crate) last_version: Option<u64>,
    /// Turns of the policy.
    pub(crate) turns: u32,
    /// Tokens that the policy sampled, on all paths.
    pub(crate) sampled_tokens: u64,
    /// Seconds since 1970.
    pub(crate) started_unix_s: f64,
    /// Duration in seconds.
    pub(crate) total_s: f64,
    /// The optimizer update that trained the episode.
    pub(crate) update: Option<u64>,
    /// Number of paths of the episode's tree; messages and tokens are those of the last path.
    pub(crate) paths: u32,
    /// The whole conversation, from the system prompt to the model's last turn, in the format of the chat
    /// completions API. Null if a part of it has tokens but no message, as in rollouts of text completions.
    pub(crate) messages: Option<Vec<Value>>,
    /// Tools in the conversation's prompt, in the same format.
    pub(crate) tools: Vec<Value>,
    #[serde(flatten)]
    pub(crate) tokens: Option<TokenColumns>,
}

/// Tokens of a path; each list has one value per token.
#[derive(Debug, Default, Serialize)]
pub(crate) struct TokenColumns {
    /// Ids in the model's vocabulary.
    pub(crate) tokens: Vec<u32>,
    /// Log-probabilities; null for tokens that the policy did not sample.
    pub(crate) logprobs: Vec<Option<f32>>,
    /// Whether the policy sampled the token.
    pub(crate) mask: Vec<bool>,
    /// Policy version of each token; null for tokens that the policy did not sample.
    pub(crate) versions: Vec<Option<u64>>,
}

impl ExportRow {
    /// Builds the row of an episode, with its tokens if requested.
    pub(crate) fn of(summary: &EpisodeSummary, trace: &Trace, tokens: bool) -> Self {
        let leaves = trace.leaves();
        let last = leaves.last().copied();
        let path = last.map(|leaf| trace.path(leaf)).unwrap_or_default();
        let nodes = path.iter().filter_map(|id| trace.nodes.get(*id as usize));
        let nodes: Vec<&Node> = nodes.collect();
        let facets = Facets::of(trace);
        let scored = !summary.unscored;
        Self {
            episode: summary.episode.0.clone(),
            group: summary.group.0.clone(),
            task: summary.task.0.clone(),
            kind: summary.task_kind.clone(),
            environment: facets.env,
            purpose: summary.purpose.clone(),
            draw: summary.draw,
            reward: scored.then_some(summary.reward),
            success: scored.then_some(summary.success),
            metrics: trace.outcome.metrics.clone(),
            end: summary.end.name(),
            first_version: facets.versions.map(|v| v.0),
            last_version: facets.versions.map(|v| v.1),
            turns: summary.turns,
            sampled_tokens: summary.sampled_tokens,
            started_unix_s: summary.started_unix_s,
            total_s: summary.total_s,
            update: summary.update,
            paths: leaves.len() as u32,
            messages: conversation(&nodes),
            tools: nodes
                .iter()
                .flat_map(|n| &n.tools)
                .map(ToolSpec::to_chat)
                .collect(),
            tokens: tokens.then(|| last.map_or_else(TokenColumns::default, |l| columns(trace, l))),
        }
    }

    /// Approximate bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        let values = self.messages.iter().flatten().chain(&self.tools);
        let tokens = self.tokens.as_ref().map_or(0, |t| t.tokens.len() * 32);
        values.map(value_bytes).sum::<usize>() + tokens + 512
    }
}

/// Approximate bytes of a value in memory.
fn value_bytes(value: &Value) -> usize {
    let inner: usize = match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(value_bytes).sum(),
        Value::Object(map) => map.iter().map(|(key, v)| key.len() + value_bytes(v)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    inner + 64
}

/// Returns the messages of a path; `None` if a node has tokens without a message. Forced tokens need no
/// message, since they only close a turn.
fn conversation(nodes: &[&Node]) -> Option<Vec<Value>> {
    let mute =
        |n: &&&Node| n.messages.is_empty() && !n.tokens.is_empty() && n.kind != TokenKind::Forced;
    if nodes.iter().find(mute).is_some() {
        return None;
    }
    // A prompt without tools teaches a separate notation: the text of a turn holds its calls.
    let shows_tools = nodes.iter().any(|n| !n.tools.is_empty());
    let written = |node: &&Node| -> Vec<Value> {
        let in_text = node.kind == TokenKind::Sampled && !shows_tools;
        let message = |m: &Message| {
            if in_text && !m.content.is_empty() {
                Message {
                    tool_calls: Vec::new(),
                    ..m.clone()
                }
                .to_chat()
            } else {
                m.to_chat()
            }
        };
        node.messages.iter().map(message).collect()
    };
    Some(nodes.iter().flat_map(written).collect())
}

/// Returns the tokens of the path to a leaf.
fn columns(trace: &Trace, leaf: sinew_types::NodeId) -> TokenColumns {
    let mut columns = TokenColumns::default();
    for token in trace.path_tokens(leaf) {
        columns.tokens.push(token.id);
        columns.logprobs.push(token.logprob);
        columns.mask.push(token.kind == TokenKind::Sampled);
        columns.versions.push(token.version.map(|v| v.0));
    }
    columns
}

/// Writer of exported rows.
pub(crate) trait RowWriter {
    /// Writes a page of rows.
    fn write(&mut self, rows: &[ExportRow]) -> io::Result<()>;

    /// Finishes the file and returns it.
    fn finish(self: Box<Self>) -> io::Result<File>;
}
