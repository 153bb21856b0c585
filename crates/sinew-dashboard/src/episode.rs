//! An episode for a page: its messages, and each token with what was recorded of it.
//!
//! Only recorded things are shown: kind, log-prob, version, temperature, process reward. Pure.

use serde::Serialize;
use serde_json::{Value, json};
use sinew_render::Renderer;
use sinew_types::{EpisodeEnd, NO_PARENT, Node, TokenKind, Trace};
use sinew_view::pieces;

/// Tokens of an episode that a page gets at most; what follows is left out and counted.
const MAX_TOKENS: usize = 100_000;

/// A node of the tree.
#[derive(Debug, Serialize)]
struct NodeView<'a> {
    /// Its place in the trace.
    id: usize,
    /// `None` of a root.
    parent: Option<u32>,
    turn: u32,
    kind: TokenKind,
    temperature: f32,
    process_reward: f64,
    finish: Option<Value>,
    /// What its tokens render.
    messages: &'a [sinew_types::Message],
    /// Number of its tokens.
    count: usize,
    /// Text of each token; `None` without the tokenizer.
    pieces: Option<Vec<String>>,
    /// Of each token; empty where it was not sampled.
    logprobs: &'a [f32],
    /// First token, number of tokens, version.
    versions: Vec<(u32, u32, u64)>,
    /// Tokens to which the output format left no choice.
    forced: Vec<usize>,
}

/// An episode as JSON for a page; `renderer` is the tokenizer, or why there is none.
pub(crate) fn view(trace: &Trace, waits: bool, renderer: Result<&dyn Renderer, &str>) -> Value {
    let mut left = MAX_TOKENS;
    let nodes: Vec<Value> = trace
        .nodes
        .iter()
        .enumerate()
        .map(|(id, node)| {
            let shown = node.tokens.len().min(left);
            left -= shown;
            json!(node_view(id, node, shown, renderer.ok()))
        })
        .collect();
    let all: usize = trace.nodes.iter().map(|n| n.tokens.len()).sum();
    json!({
        "episode": trace.episode,
        "group": trace.group,
        "task": trace.task,
        "task_kind": trace.task_kind,
        "env": trace.environment(),
        "origin": trace.origin,
        "provenance": trace.provenance,
        "outcome": trace.outcome,
        "reward": trace.score(),
        "waits": waits,
        "end": trace.end,
        "end_text": end_text(&trace.end),
        "timing": trace.timing,
        "ignored": trace.ignored,
        "leaves": trace.leaves(),
        "tokens": all,
        "cut": all - (MAX_TOKENS - left),
        "sampled": trace.sampled_tokens(),
        "no_text": renderer.err(),
        "nodes": nodes,
    })
}

/// A node with its first `shown` tokens.
fn node_view<'a>(
    id: usize,
    node: &'a Node,
    shown: usize,
    renderer: Option<&dyn Renderer>,
) -> NodeView<'a> {
    let tokens = &node.tokens[..shown];
    NodeView {
        id,
        parent: (node.parent != NO_PARENT).then_some(node.parent),
        turn: node.turn,
        kind: node.kind,
        temperature: node.temperature,
        process_reward: node.process_reward,
        finish: node.finish.as_ref().map(|f| json!(f)),
        messages: &node.messages,
        count: node.tokens.len(),
        pieces: renderer.map(|r| pieces(tokens, r)),
        logprobs: &node.logprobs[..shown.min(node.logprobs.len())],
        versions: node
            .versions
            .iter()
            .map(|s| (s.start, s.len, s.version.0))
            .collect(),
        forced: (0..shown).filter(|i| node.forced(*i)).collect(),
    }
}

/// How an episode ended, in words.
pub(crate) fn end_text(end: &EpisodeEnd) -> String {
    match end {
        EpisodeEnd::Terminated => "the task ended".into(),
        EpisodeEnd::Truncated { limit } => {
            format!("cut by the limit {}", limit.name())
        }
        EpisodeEnd::Failed { kind, message } => {
            format!("{} failed: {message}", format!("{kind:?}").to_lowercase())
        }
    }
}
