//! An episode for a page: its messages, and each token with its records.
//!
//! Only recorded things are shown: kind, log-prob, version, temperature, process reward. Pure.

use serde::Serialize;
use serde_json::{Value, json};
use sinew_render::Renderer;
use sinew_types::{BranchCause, EpisodeEnd, Message, NO_PARENT, Node, TokenId, TokenKind, Trace};
use sinew_view::pieces;

/// Tokens of an episode that a page gets at most; what follows is left out and counted.
const MAX_TOKENS: usize = 100_000;

/// A node of the tree.
#[derive(Debug, Serialize)]
struct NodeView<'a> {
    /// Index of the node in the trace.
    id: usize,
    /// `None` of a root.
    parent: Option<u32>,
    /// Cause of the branch that begins with it.
    branch: Option<&'static str>,
    turn: u32,
    kind: TokenKind,
    temperature: f32,
    process_reward: f64,
    finish: Option<Value>,
    /// The text of its tokens; arguments of calls are text, whose numbers a page does not round.
    messages: Vec<Value>,
    /// Number of its tokens.
    count: usize,
    /// Tokens as numbers, by which nodes are compared.
    ids: &'a [TokenId],
    /// Text of each token; `None` without the tokenizer.
    pieces: Option<Vec<String>>,
    /// Log-probability of each token; empty if they were not sampled.
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
        .shown_nodes()
        .iter()
        .enumerate()
        .map(|(id, node)| {
            let shown = node.tokens.len().min(left);
            left -= shown;
            json!(node_view(id, node, shown, renderer.ok()))
        })
        .collect();
    let all: usize = trace.nodes.iter().map(|n| n.tokens.len()).sum();
    // An episode that the system failed has no score, whatever its outcome.
    let failed = matches!(trace.end, EpisodeEnd::Failed { .. });
    json!({
        "episode": trace.episode,
        "group": trace.group,
        "task": trace.task,
        "task_kind": trace.task_kind,
        "env": trace.environment(),
        "origin": trace.origin,
        "provenance": trace.provenance,
        "outcome": trace.outcome,
        "reward": trace.score().filter(|_| !failed),
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
        branch: node.branch.map(BranchCause::name),
        turn: node.turn,
        kind: node.kind,
        temperature: node.temperature,
        process_reward: node.process_reward,
        finish: node.finish.as_ref().map(|f| json!(f)),
        messages: node.messages.iter().map(message).collect(),
        count: node.tokens.len(),
        ids: tokens,
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

/// Characters around a text that was found.
const AROUND: usize = 60;

/// The place where an episode holds a text, in upper or lower case: in messages, in reasoning, in calls of
/// tools, or in what the model wrote. `None` where it does not.
pub(crate) fn found(trace: &Trace, text: &str, renderer: Option<&dyn Renderer>) -> Option<String> {
    let wanted = text.to_lowercase();
    trace.nodes.iter().find_map(|node| {
        let said = node.messages.iter().flat_map(said_in);
        let written = renderer.filter(|_| node.messages.is_empty());
        let written = written.map(|r| r.decode_with_special(&node.tokens));
        said.chain(written).find_map(|said| around(&said, &wanted))
    })
}

/// The texts of a message.
fn said_in(message: &Message) -> Vec<String> {
    let calls = message.tool_calls.iter();
    let calls = calls.map(|call| format!("{} {}", call.name, call.arguments));
    let reasoning = message.reasoning.iter().cloned();
    let content = std::iter::once(message.content.to_string());
    content.chain(reasoning).chain(calls).collect()
}

/// A part of a text with the place where it has `wanted`, which is in lower case.
fn around(text: &str, wanted: &str) -> Option<String> {
    let lower = text.to_lowercase();
    let before = lower[..lower.find(wanted)?].chars().count();
    let from = before.saturating_sub(AROUND);
    let length = before - from + wanted.chars().count() + AROUND;
    let part: String = text.chars().skip(from).take(length).collect();
    let cut = |is: bool| if is { "…" } else { "" };
    let end = text.chars().count() > from + length;
    Some(format!("{}{part}{}", cut(from > 0), cut(end)))
}

/// A message with the arguments of its calls as text.
fn message(message: &Message) -> Value {
    let mut value = json!(message);
    let calls = value["tool_calls"].as_array_mut().into_iter().flatten();
    for (call, own) in calls.zip(&message.tool_calls) {
        let text = serde_json::to_string_pretty(&own.arguments).unwrap_or_default();
        call["arguments"] = text.into();
    }
    value
}

/// End of an episode, in words.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_found_in_any_case_with_what_stands_around_it() {
        let text = format!("{}the ANSWER is 7{}", "a ".repeat(100), " z".repeat(100));
        let place = around(&text, "answer").unwrap();
        assert!(place.starts_with('…') && place.ends_with('…'), "{place}");
        assert!(place.contains("the ANSWER is 7"), "{place}");
        assert_eq!(around("short", "short").unwrap(), "short");
        assert_eq!(around("short", "long"), None);
    }
}
