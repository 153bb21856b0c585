//! Builds the input of rewards for an ended episode from its trace.
//!
//! While an episode runs, its environment builds this input. Later, for the rewards of a group or for
//! rescoring, it is built from the store: from the messages of the nodes, and the text of sampled turns.

use crate::action::said;
use sinew_answer::Turn;
use sinew_env::RewardSample;
use sinew_render::Renderer;
use sinew_types::{EpisodeEnd, NO_PARENT, Node, NodeId, Role, Task, TokenKind, Trace};

/// Builds the sample of a stored episode of `task`. `renderer` belongs to the model that sampled it.
///
/// The messages are those of the path to the last sampled turn. The answer is the one that was scored, else
/// the last turn of the model.
pub fn reward_sample(trace: &Trace, task: Task, renderer: &dyn Renderer) -> RewardSample {
    let mut messages = Vec::new();
    for node in path(trace) {
        messages.extend_from_slice(&node.messages);
        if node.kind == TokenKind::Sampled && node.messages.is_empty() {
            messages.push(said(renderer, &node.tokens).parted());
        }
    }
    let said = messages.iter().filter(|m| m.role == Role::Assistant);
    let last = said.clone().next_back();
    let turn = match (&trace.outcome.answer, last) {
        (Some(answer), _) => Turn::split(answer, false),
        (None, Some(m)) => Turn::of_parts(m.reasoning.as_deref(), &m.content.text()),
        (None, None) => Turn::default(),
    };
    let mut sample = RewardSample {
        calls: said.flat_map(|m| m.tool_calls.clone()).collect(),
        metrics: trace.outcome.metrics.clone(),
        truncated: matches!(trace.end, EpisodeEnd::Truncated { .. }),
        ..RewardSample::new(task, "")
    };
    sample.said(turn);
    RewardSample { messages, ..sample }
}

/// Nodes from the root to the last sampled one, or to the last one if nothing was sampled.
fn path(trace: &Trace) -> Vec<&Node> {
    let sampled = |n: &Node| n.kind == TokenKind::Sampled;
    let last = trace.nodes.iter().rposition(sampled);
    let last = last.or_else(|| trace.nodes.len().checked_sub(1));
    let mut at = last.map_or(NO_PARENT, |i| i as NodeId);
    let mut path = Vec::new();
    while let Some(node) = trace.nodes.get(at as usize) {
        path.push(node);
        // Parents of valid traces stand before their children.
        at = if node.parent < at {
            node.parent
        } else {
            NO_PARENT
        };
    }
    path.reverse();
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EpisodeSpec, RunInfo};
    use serde_json::json;
    use sinew_render::TinyRenderer;
    use sinew_types::{EpisodeId, GroupId, Message, SamplingParams, TaskId, ToolCall};

    fn task() -> Task {
        Task {
            id: TaskId::new("t"),
            kind: "k".into(),
            prompt: "ab".into(),
            data: json!({"answer": 1}),
            ..Task::default()
        }
    }

    fn trace(renderer: &TinyRenderer) -> Trace {
        let spec = EpisodeSpec {
            episode: EpisodeId::new("e"),
            group: GroupId::new("g"),
            task: task(),
            draw: 1,
            purpose: "train".into(),
            seed: 7,
        };
        let mut trace = spec.empty_trace(&RunInfo::default(), &SamplingParams::default());
        let node = |parent, kind, text: &str, messages| {
            let tokens = renderer.encode_text(text).unwrap();
            Node::given(parent, 0, kind, tokens, messages)
        };
        let mut called = Message::new(Role::Assistant, "b");
        called.tool_calls.push(ToolCall {
            id: "c".into(),
            name: "look".into(),
            arguments: json!({}),
        });
        let asked = vec![Message::new(Role::User, "ab")];
        let seen = vec![Message::new(Role::Tool, "c")];
        trace.nodes = vec![
            node(NO_PARENT, TokenKind::Prompt, "ab", asked),
            node(0, TokenKind::Sampled, "b", vec![called]),
            // A branch that was given up.
            node(0, TokenKind::Sampled, "c", Vec::new()),
            node(1, TokenKind::Observation, "c", seen),
            node(3, TokenKind::Sampled, "ba", Vec::new()),
            node(4, TokenKind::Observation, "c", Vec::new()),
        ];
        trace
    }

    #[test]
    fn the_sample_is_the_path_to_the_last_turn() {
        let renderer = TinyRenderer::new("abc");
        let mut trace = trace(&renderer);
        trace.outcome.metrics.insert("m".into(), 2.0);
        let sample = reward_sample(&trace, task(), &renderer);
        let texts: Vec<_> = sample.messages.iter().map(|m| m.content.text()).collect();
        assert_eq!(texts, ["ab", "b", "c", "ba"]);
        assert_eq!(sample.output, "ba");
        assert_eq!((sample.calls.len(), sample.metrics["m"]), (1, 2.0));
        trace.outcome.answer = Some("42".into());
        assert_eq!(reward_sample(&trace, task(), &renderer).output, "42");
    }

    #[test]
    fn a_trace_without_turns_has_an_empty_output() {
        let renderer = TinyRenderer::new("abc");
        let mut trace = trace(&renderer);
        trace.nodes.truncate(1);
        let sample = reward_sample(&trace, task(), &renderer);
        assert_eq!((sample.output.as_str(), sample.messages.len()), ("", 1));
        trace.nodes.clear();
        assert!(reward_sample(&trace, task(), &renderer).messages.is_empty());
        // A trace that is not valid ends.
        trace.nodes = vec![Node::given(0, 0, TokenKind::Prompt, vec![1], Vec::new())];
        assert!(reward_sample(&trace, task(), &renderer).messages.is_empty());
    }
}
