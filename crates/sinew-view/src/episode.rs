//! Prints one episode with each token's kind, so that a person sees what was trained on.
//!
//! Tokens are decoded node by node, so that a character that two nodes share shows as a replacement mark in
//! both. All text of models and programs is made fit for a terminal first ([`visible`]).
//!
//! Prompt and observation are the environment's texts, and forced tokens close a turn that sampling did not
//! close. Only sampled tokens carry weight in a loss.

use crate::report::{end_text, kind_name};
use crate::visible::visible;
use serde_json::json;
use sinew_render::Renderer;
use sinew_types::{NO_PARENT, Node, Provenance, TokenKind, Trace};
use std::fmt::Write;

/// Form in which an episode is printed. Both off is the form for a pipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShowOptions {
    /// Colours and marks for terminals.
    pub color: bool,
    /// One line for each token with id, log-probability and version.
    pub tokens: bool,
}

/// Escape code of a kind: dim, green, yellow, cyan. Colors are the terminal's own.
fn sgr(kind: TokenKind) -> &'static str {
    match kind {
        TokenKind::Prompt => "\x1b[2m",
        TokenKind::Sampled => "\x1b[32m",
        TokenKind::Forced => "\x1b[33m",
        TokenKind::Observation => "\x1b[36m",
    }
}

/// An episode as text.
pub fn text(trace: &Trace, renderer: &dyn Renderer, options: ShowOptions) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "episode {}  task {} ({})  draw {}  {}\n{}  {}",
        visible(trace.episode.as_str()),
        visible(trace.task.as_str()),
        visible(&trace.task_kind),
        trace.origin.draw,
        visible(&trace.origin.purpose),
        match trace.score() {
            Some(reward) => format!("reward {reward:.3}  success {}", trace.outcome.success),
            None => {
                let reason = trace.outcome.unscored_reason.as_deref();
                format!("no reward: {}", visible(reason.unwrap_or("none was given")))
            }
        },
        visible(&end_text(&trace.end))
    );
    provenance(&mut out, &trace.provenance);
    for (id, node) in trace.shown_nodes().iter().enumerate() {
        header(&mut out, id, node);
        let body = if options.tokens {
            token_lines(node, renderer)
        } else {
            visible(&renderer.decode_with_special(&node.tokens)) + "\n"
        };
        if options.color {
            let _ = writeln!(out, "{}{}\x1b[0m", sgr(node.kind), body.trim_end());
        } else {
            let _ = writeln!(out, "{}", body.trim_end());
        }
    }
    let trained = trace.sampled_tokens();
    let all: usize = trace.nodes.iter().map(|n| n.tokens.len()).sum();
    let _ = writeln!(
        out,
        "\n{trained} of {all} tokens are sampled; only those can enter the loss"
    );
    out
}

/// One line of what is known of how the episode came about.
fn provenance(out: &mut String, p: &Provenance) {
    let seed = |name: &str, seed: Option<u64>| seed.map(|seed| format!("{name} {seed}"));
    let component = p.environment.as_ref();
    let sampling = p.sampling.as_ref().map(|s| {
        format!(
            "temperature {}, top_p {}, top_k {}, min_p {}, max_tokens {}",
            s.temperature, s.top_p, s.top_k, s.min_p, s.max_tokens
        )
    });
    let template = p.chat_template.as_deref();
    let known = [
        component.map(|c| format!("environment {} {}", c.name, c.version)),
        seed("task seed", p.task_seed),
        seed("seed", p.seed),
        sampling,
        template.map(|hash| format!("template {}", hash.get(..12).unwrap_or(hash))),
        p.kernels.as_ref().map(|k| format!("kernels {k}")),
        p.logprobs_unknown
            .then(|| "log-probs unknown: the server reports none".into()),
        p.adapter.as_ref().map(|name| format!("adapter {name}")),
        p.sandbox.as_ref().map(|level| format!("sandbox {level}")),
    ];
    let tools = p
        .tools
        .iter()
        .map(|(name, version)| format!("tool {name} {version}"));
    let known: Vec<String> = known.into_iter().flatten().chain(tools).collect();
    if !known.is_empty() {
        let _ = writeln!(out, "{}", visible(&known.join("  ")));
    }
}

/// A line above a node: its place in the tree, turn, kind and number of tokens; of sampled ones the mean
/// log-probability, the temperature if it is not 1, and the weights that drew them.
fn header(out: &mut String, id: usize, node: &Node) {
    let parent = match node.parent {
        NO_PARENT => "root".to_string(),
        parent => format!("after {parent}"),
    };
    let _ = write!(
        out,
        "\n-- node {id} ({parent})  turn {}  {}  {} tokens",
        node.turn,
        kind_name(node.kind),
        node.tokens.len()
    );
    if let (Some(first), Some(last)) = (node.versions.first(), node.versions.last()) {
        if !node.logprobs.is_empty() {
            let mean = node.logprobs.iter().sum::<f32>() / node.logprobs.len() as f32;
            let _ = write!(out, "  mean log-prob {mean:.3}");
        }
        if node.temperature != 1.0 {
            let _ = write!(out, " at temperature {}", node.temperature);
        }
        let _ = write!(out, "  weights {}", first.version);
        if last.version != first.version {
            let _ = write!(out, "..{}", last.version);
        }
    }
    if node.process_reward != 0.0 {
        let _ = write!(out, "  process reward {:+.3}", node.process_reward);
    }
    if let Some(cause) = node.branch {
        let _ = write!(out, "  branch: {}", cause.name());
    }
    out.push('\n');
}

/// One line a token: id, text in quotes with escapes, log-probability in nats, version of the weights.
fn token_lines(node: &Node, renderer: &dyn Renderer) -> String {
    let mut out = String::new();
    for (i, &id) in node.tokens.iter().enumerate() {
        let piece = renderer.decode_with_special(&[id]);
        let _ = write!(out, "{id:>7}  {}", visible(&format!("{piece:?}")));
        if let Some(logprob) = node.logprobs.get(i) {
            let version = node
                .versions
                .iter()
                .find(|s| i < (s.start + s.len) as usize)
                .map_or(String::new(), |s| s.version.to_string());
            let _ = write!(out, "  {logprob:.4}  {version}");
        }
        out.push('\n');
    }
    out
}

/// An episode as JSON, with the text of each node in addition to its tokens.
pub fn json(trace: &Trace, renderer: &dyn Renderer) -> Result<String, serde_json::Error> {
    let mut value = serde_json::to_value(trace)?;
    let texts: Vec<String> = trace
        .nodes
        .iter()
        .map(|n| renderer.decode_with_special(&n.tokens))
        .collect();
    if let Some(nodes) = value["nodes"].as_array_mut() {
        for (node, text) in nodes.iter_mut().zip(texts) {
            node["text"] = json!(text);
        }
    }
    serde_json::to_string(&value)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An episode without nodes.
    pub(crate) fn trace() -> Trace {
        traced(false)
    }

    fn traced(unscored: bool) -> Trace {
        let value = json!({
            "format_version": sinew_types::TRACE_FORMAT_VERSION, "episode": "e", "group": "g", "task": "t", "task_kind": "k",
            "origin": {"draw": 0, "purpose": "train"}, "end": {"type": "terminated"},
            "outcome": {"reward": 0.0, "success": false, "metrics": {}, "unscored": unscored},
            "timing": {"started_unix_s": 0.0, "total_s": 0.0, "generate_s": 0.0, "tool_s": 0.0, "queue_s": 0.0},
            "nodes": [],
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_missing_reward_is_not_shown_as_zero() {
        let renderer = sinew_render::byte_renderer().unwrap();
        let shown = |unscored| {
            let mut trace = traced(unscored);
            trace.provenance.adapter = Some(sinew_types::AdapterName::new("a").unwrap());
            let options = ShowOptions {
                color: false,
                tokens: false,
            };
            text(&trace, &renderer, options)
        };
        assert!(shown(false).contains("reward 0.000  success false"));
        assert!(shown(true).contains("no reward: none was given"));
        assert!(shown(true).contains("adapter a\n"));
    }

    #[test]
    fn an_episode_cannot_speak_to_the_terminal() {
        let renderer = sinew_render::byte_renderer().unwrap();
        let evil = "ok\x1b]0;title\x07\x1b[2J\r\u{202e}";
        let tokens = renderer.encode_text(evil).unwrap();
        let value = json!({
            "format_version": sinew_types::TRACE_FORMAT_VERSION, "episode": evil, "group": "g", "task": evil, "task_kind": evil,
            "origin": {"draw": 0, "purpose": "train"}, "end": {"type": "failed", "kind": "harness", "message": evil},
            "outcome": {"reward": 0.0, "success": false, "metrics": {}},
            "timing": {"started_unix_s": 0.0, "total_s": 0.0, "generate_s": 0.0, "tool_s": 0.0, "queue_s": 0.0},
            "nodes": [{"parent": NO_PARENT, "kind": "prompt", "turn": 0, "tokens": tokens, "logprobs": [],
                "versions": [], "messages": [], "process_reward": 0.0}],
        });
        let trace: Trace = serde_json::from_value(value).unwrap();
        for tokens in [false, true] {
            let options = ShowOptions {
                color: false,
                tokens,
            };
            let shown = text(&trace, &renderer, options);
            let obeyed = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
            assert!(!shown.contains(obeyed), "{shown:?}");
            assert!(shown.contains("\\u{1b}"), "{shown:?}");
        }
    }
}
