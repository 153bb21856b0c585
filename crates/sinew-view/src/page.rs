//! An episode as one HTML page that can be mailed: no scripts, nothing from elsewhere. Pure.
//!
//! The page shows the records: messages with tool calls folded, each token with its kind, log-prob and
//! version, rewards, and why the episode ended. All text of models and programs is escaped, and control
//! characters are written out; a policy in the page forbids scripts and requests besides. Only pictures that
//! the trace itself holds are shown. Parts beyond the [`Limits`] are left out and named.
//!
//! | part | shows |
//! |---|---|
//! | notes at the top | why the episode failed, has no reward, or has no text of tokens |
//! | facts | reward, end, task, environment, tokens, time, measurements |
//! | an article a node | messages with what is long folded, and the tokens, folded as a whole |
//! | notes at the end | what was left out |

use crate::report::{end_text, escape, kind_name};
use crate::status::duration;
use crate::token_text::pieces;
use crate::visible::visible;
use sinew_render::Renderer;
use sinew_types::{
    Content, EpisodeEnd, FinishReason, Media, MediaSource, Message, NO_PARENT, Node, Part, Role,
    TokenKind, Trace,
};
use std::collections::BTreeSet;
use std::fmt::Write;

/// Looks of the page; the only style that its policy allows.
const STYLE: &str = include_str!("page.css");
/// Log-probs at which the colour changes: probabilities 0.9, 0.5, 0.2, 0.05, 0.01.
const COLOURS: [f32; 5] = [-0.105, -0.693, -1.609, -2.996, -4.605];
/// Label of each colour in the scale, in their order.
const SHARES: [&str; 6] = ["≥ 0.9", "≥ 0.5", "≥ 0.2", "≥ 0.05", "≥ 0.01", "below"];
/// Kinds of pictures that are shown; an SVG is a separate document.
const PICTURES: [&str; 4] = ["image/png", "image/jpeg", "image/gif", "image/webp"];
/// Bytes of an answer of a tool that is not folded.
const SHORT: usize = 240;

/// Limits of a page; the rest is left out and named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens that are shown one by one.
    pub tokens: usize,
    /// Bytes of text.
    pub text: usize,
    /// Bytes of pictures as encoded in the page.
    pub pictures: usize,
}

impl Default for Limits {
    /// A page of at most about 10 MB, as mail takes it.
    fn default() -> Self {
        Self {
            tokens: 30_000,
            text: 2 << 20,
            pictures: 4 << 20,
        }
    }
}

/// An episode as a page; `renderer` is the tokenizer, or why there is none.
///
/// The same episode gives the same page to the byte: nothing depends on the time or the machine.
pub fn html(trace: &Trace, renderer: Result<&dyn Renderer, &str>, limits: Limits) -> String {
    let mut page = Page {
        out: String::new(),
        renderer,
        left: limits,
        cut: Limits {
            tokens: 0,
            text: 0,
            pictures: 0,
        },
    };
    page.head(trace);
    page.facts(trace);
    for (id, node) in trace.shown_nodes().iter().enumerate() {
        page.node(id, node);
    }
    page.end()
}

/// A note of episodes whose tokens have no known log-probabilities.
const UNKNOWN: &str = "Log-probabilities are unknown: the server reports none, and its tokens are read again from its text.";

/// A page at work.
struct Page<'a> {
    /// Text so far.
    out: String,
    /// The tokenizer, or why there is none.
    renderer: Result<&'a dyn Renderer, &'a str>,
    /// Remaining room.
    left: Limits,
    /// Amounts that were left out.
    cut: Limits,
}

/// Escapes text for a page or an attribute: markup and quotes become entities, so that no text ends an
/// element or an attribute, and control characters for terminals and browsers are written out.
fn safe(text: &str) -> String {
    escape(&visible(text))
        .replace('"', "&quot;")
        .replace('\'', "&#39;")
}

impl Page<'_> {
    /// The policy, the looks, and the first notes: why there is no reward, or no text.
    fn head(&mut self, trace: &Trace) {
        let title = safe(trace.episode.as_str());
        let _ = write!(
            self.out,
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
             <style>\n{STYLE}</style>\n</head>\n<body>\n<h1>Episode {title}</h1>\n"
        );
        match &trace.end {
            EpisodeEnd::Failed { .. } => self.note("note bad", &end_text(&trace.end)),
            _ if trace.outcome.unscored => {
                let reason = trace.outcome.unscored_reason.as_deref();
                self.note(
                    "note",
                    &format!("No reward: {}", reason.unwrap_or("none was given")),
                );
            }
            _ => {}
        }
        if trace.provenance.logprobs_unknown {
            self.note("note", UNKNOWN);
        }
        if let Err(why) = self.renderer {
            self.note(
                "note",
                &format!("Tokens have no text, as the tokenizer is not there: {why}"),
            );
        }
    }

    /// A line that stands out.
    fn note(&mut self, class: &str, text: &str) {
        let _ = writeln!(self.out, "<div class=\"{class}\">{}</div>", safe(text));
    }

    /// Facts about the whole episode, and the scale of colours.
    fn facts(&mut self, trace: &Trace) {
        let (p, t) = (&trace.provenance, &trace.timing);
        let all: usize = trace.nodes.iter().map(|n| n.tokens.len()).sum();
        let success = if trace.outcome.success { "yes" } else { "no" };
        let scored = !trace.outcome.unscored;
        let facts = [
            ("reward", trace.score().map(|r| r.to_string())),
            ("success", scored.then(|| success.to_owned())),
            ("ended", Some(end_text(&trace.end))),
            ("task", Some(trace.task.to_string())),
            ("type", Some(trace.task_kind.clone())),
            ("environment", Some(trace.environment().to_owned())),
            ("group", Some(trace.group.to_string())),
            (
                "purpose",
                Some(format!(
                    "{}, draw {}",
                    trace.origin.purpose, trace.origin.draw
                )),
            ),
            (
                "tokens",
                Some(format!("{} sampled of {all}", trace.sampled_tokens())),
            ),
            (
                "time",
                Some(format!(
                    "{}: model {}, tools {}, queued {}",
                    duration(t.total_s),
                    duration(t.generate_s),
                    duration(t.tool_s),
                    duration(t.queue_s)
                )),
            ),
            ("adapter", p.adapter.as_ref().map(ToString::to_string)),
            ("sandbox", p.sandbox.clone()),
            ("seed", p.seed.map(|seed| seed.to_string())),
        ];
        self.out += "<section><dl>\n";
        for (name, value) in facts {
            if let Some(value) = value.filter(|v| !v.is_empty()) {
                let _ = writeln!(self.out, "<dt>{name}</dt><dd>{}</dd>", safe(&value));
            }
        }
        for (name, value) in &trace.outcome.metrics {
            let _ = writeln!(self.out, "<dt>{}</dt><dd>{value}</dd>", safe(name));
        }
        self.out += "</dl>\n<div class=\"scale\">probability of a token";
        for (i, share) in SHARES.iter().enumerate() {
            let _ = write!(self.out, "<span class=\"p{i}\">{share}</span>");
        }
        for kind in [TokenKind::Prompt, TokenKind::Forced, TokenKind::Observation] {
            let name = kind_name(kind);
            let _ = write!(self.out, "<span class=\"k-{name}\">{name}</span>");
        }
        self.out += "</div></section>\n";
    }

    /// A turn or what was given to the model.
    fn node(&mut self, id: usize, node: &Node) {
        let kind = kind_name(node.kind);
        let _ = writeln!(
            self.out,
            "<article class=\"{kind}\" id=\"n{id}\">\n<header><b>{kind}</b>{}</header>",
            about(id, node)
        );
        for message in &node.messages {
            self.message(message);
        }
        self.tokens(node);
        self.out += "</article>\n";
    }

    /// A message: its speaker, reasoning and calls folded, and long answers of tools.
    fn message(&mut self, message: &Message) {
        let role = match (message.role, &message.name) {
            (Role::Tool, Some(name)) => format!("tool {name}"),
            (role, _) => format!("{role:?}").to_lowercase(),
        };
        let _ = writeln!(self.out, "<span class=\"role\">{}</span>", safe(&role));
        if let Some(reasoning) = &message.reasoning {
            self.out += "<details class=\"reasoning\"><summary>reasoning</summary>";
            self.text("said", reasoning);
            self.out += "</details>\n";
        }
        let folded = message.role == Role::Tool && message.content.text_len() > SHORT;
        if folded {
            self.out += "<details class=\"answer\"><summary>answers</summary>";
        }
        let class = if message.role == Role::Tool {
            "said code"
        } else {
            "said"
        };
        self.content(class, &message.content);
        if folded {
            self.out += "</details>\n";
        }
        for call in &message.tool_calls {
            let _ = write!(
                self.out,
                "<details class=\"call\"><summary>calls <b>{}</b></summary>",
                safe(&call.name)
            );
            let arguments = serde_json::to_string_pretty(&call.arguments);
            self.text("said code", &arguments.unwrap_or_default());
            self.out += "</details>\n";
        }
    }

    /// The parts of a message in their order.
    fn content(&mut self, class: &str, content: &Content) {
        for part in content.parts() {
            match part {
                Part::Text { text } => self.text(class, text),
                Part::Image(media) => self.picture(media),
                Part::Audio(media) => self.note("note", &format!("audio {}", named(media))),
            }
        }
    }

    /// A text, as far as it fits into the page. It is cut at the border of a character; what is cut is
    /// counted and named at the end.
    fn text(&mut self, class: &str, text: &str) {
        let shown = text.floor_char_boundary(self.left.text);
        self.left.text -= shown;
        self.cut.text += text.len() - shown;
        let _ = writeln!(
            self.out,
            "<div class=\"{class}\">{}</div>",
            safe(&text[..shown])
        );
    }

    /// A picture of the trace. Others are named, and so is one that does not fit: a page with half of a
    /// picture would be read as what the model saw.
    fn picture(&mut self, media: &Media) {
        let Some(url) = own_picture(media) else {
            self.note("note", &format!("image {}", named(media)));
            return;
        };
        if url.len() > self.left.pictures {
            self.cut.pictures += 1;
            self.note("note", &format!("image of {} bytes, left out", url.len()));
            return;
        }
        self.left.pictures -= url.len();
        let _ = writeln!(
            self.out,
            "<img alt=\"image of the episode\" src=\"{}\">",
            safe(url)
        );
    }

    /// The tokens of a node, folded. Each has what was recorded of it in its title.
    fn tokens(&mut self, node: &Node) {
        let shown = node.tokens.len().min(self.left.tokens);
        self.left.tokens -= shown;
        self.cut.tokens += node.tokens.len() - shown;
        let Ok(renderer) = self.renderer else {
            return;
        };
        if shown == 0 {
            return;
        }
        self.out += "<details class=\"by-token\"><summary>tokens</summary><div class=\"tokens\">";
        for (i, piece) in pieces(&node.tokens[..shown], renderer).iter().enumerate() {
            let forced = node.forced(i) || node.kind == TokenKind::Forced;
            let kind = if forced { TokenKind::Forced } else { node.kind };
            let kind = kind_name(kind);
            let logprob = node.logprobs.get(i);
            let class = match logprob.filter(|_| !forced) {
                Some(logprob) => format!("p{}", colour(*logprob)),
                None => format!("k-{kind}"),
            };
            let _ = write!(self.out, "<span class=\"{class}\" title=\"{kind}");
            if let Some(logprob) = logprob {
                let share = 100.0 * logprob.exp();
                let _ = write!(
                    self.out,
                    ", log-prob {logprob:.4}, probability {share:.1} %"
                );
            }
            let version = node
                .versions
                .iter()
                .find(|s| i < (s.start + s.len) as usize);
            if let Some(span) = version {
                let _ = write!(self.out, ", weights {}", span.version.0);
            }
            let _ = write!(self.out, "\">{}</span>", safe(piece));
        }
        self.out += "</div></details>\n";
    }

    /// Writes the omissions and the end of the page.
    fn end(mut self) -> String {
        let cut = self.cut;
        for (count, what) in [
            (cut.tokens, "tokens"),
            (cut.text, "bytes of text"),
            (cut.pictures, "pictures"),
        ] {
            if count > 0 {
                self.note(
                    "note",
                    &format!("{count} {what} are left out: they do not fit into the page."),
                );
            }
        }
        self.out += "</body>\n</html>\n";
        self.out
    }
}

/// The line above a node: what follows what, how many tokens, which weights sampled them and how sure they
/// were, the reward of the turn, and why sampling ended where it was cut.
fn about(id: usize, node: &Node) -> String {
    let mut words = Vec::new();
    // A node without this note follows the one above it.
    if node.parent != NO_PARENT && node.parent as usize + 1 != id {
        words.push(format!("after node {}", node.parent));
    }
    if let Some(cause) = node.branch {
        words.push(format!("branch: {}", cause.name()));
    }
    words.push(format!("node {id}"));
    if node.turn > 0 {
        words.push(format!("turn {}", node.turn));
    }
    words.push(format!("{} tokens", node.tokens.len()));
    let versions: BTreeSet<u64> = node.versions.iter().map(|s| s.version.0).collect();
    if let (Some(first), Some(last)) = (versions.first(), versions.last()) {
        words.push(if first == last {
            format!("weights {first}")
        } else {
            format!("weights {first} to {last}")
        });
    }
    if !node.logprobs.is_empty() {
        let mean = node.logprobs.iter().sum::<f32>() / node.logprobs.len() as f32;
        words.push(format!("mean log-prob {mean:.3}"));
    }
    if node.temperature != 1.0 {
        words.push(format!("temperature {}", node.temperature));
    }
    if node.process_reward != 0.0 {
        words.push(format!("process reward {:+.3}", node.process_reward));
    }
    let cut = match node.finish {
        Some(FinishReason::Length) => Some("cut at its limit of tokens"),
        Some(FinishReason::ContextFull) => Some("context full"),
        Some(FinishReason::Aborted) => Some("aborted"),
        _ => None,
    };
    words.extend(cut.map(str::to_owned));
    words
        .iter()
        .map(|w| format!("<span>{}</span>", safe(w)))
        .collect()
}

/// The colour of a sampled token: 0 for a probability of at least 0.9, 5 for one below 0.01.
fn colour(logprob: f32) -> usize {
    let above = |limit: &f32| logprob >= *limit;
    COLOURS.iter().position(above).unwrap_or(COLOURS.len())
}

/// Source of a medium, cut to a line.
fn named(media: &Media) -> String {
    media.source.to_string().chars().take(200).collect()
}

/// Returns the address of a picture that the trace itself contains: base64 of a type that browsers draw
/// without executing any part of it.
fn own_picture(media: &Media) -> Option<&str> {
    let MediaSource::Url(url) = &media.source else {
        return None;
    };
    let (kind, data) = url.strip_prefix("data:")?.split_once(";base64,")?;
    let base64 = |b: u8| b.is_ascii_alphanumeric() || b"+/=".contains(&b);
    (PICTURES.contains(&kind) && data.bytes().all(base64)).then_some(url)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn trace(text: &str, renderer: &dyn Renderer, parts: serde_json::Value) -> Trace {
        let tokens = renderer.encode_text(text).unwrap();
        let logprobs = vec![-0.5; tokens.len()];
        let value = json!({
            "format_version": sinew_types::TRACE_FORMAT_VERSION, "episode": text, "group": "g", "task": text, "task_kind": text,
            "origin": {"draw": 0, "purpose": "train"}, "end": {"type": "failed", "kind": "harness", "message": text},
            "outcome": {"reward": 0.0, "success": false, "metrics": {text: 1.0}},
            "timing": {"started_unix_s": 0.0, "total_s": 0.0, "generate_s": 0.0, "tool_s": 0.0, "queue_s": 0.0},
            "nodes": [{"parent": NO_PARENT, "kind": "sampled", "turn": 1, "tokens": tokens, "logprobs": logprobs,
                "versions": [{"start": 0, "len": tokens.len(), "version": 3}], "process_reward": 0.0,
                "messages": [{"role": "tool", "name": text, "content": parts, "reasoning": text,
                    "tool_calls": [{"id": "1", "name": text, "arguments": {text: text}}]}]}],
        });
        serde_json::from_value(value).unwrap()
    }

    /// Tags of the page, without their quoted attributes.
    fn tags(page: &str) -> BTreeSet<String> {
        let body = page.split_once("</style>").unwrap().1;
        let tags = body
            .split('<')
            .skip(1)
            .map(|t| t.split(['>', ' ']).next().unwrap().to_owned());
        tags.collect()
    }

    #[test]
    fn unknown_log_probabilities_are_no_certainty() {
        let renderer = sinew_render::byte_renderer().unwrap();
        let mut trace = trace("0123", &renderer, json!("x"));
        trace.provenance.logprobs_unknown = true;
        trace.nodes[0].logprobs.fill(0.0);
        let page = html(&trace, Ok(&renderer), Limits::default());
        assert!(page.contains(UNKNOWN), "{page}");
        let options = crate::episode::ShowOptions {
            tokens: true,
            color: false,
        };
        let text = crate::episode::text(&trace, &renderer, options);
        assert!(text.contains("log-probs unknown"), "{text}");
        for shown in [page, text] {
            assert!(
                !shown.contains("log-prob 0.000") && !shown.contains("100.0 %"),
                "{shown}"
            );
        }
    }

    #[test]
    fn what_does_not_fit_is_named_and_pictures_of_elsewhere_are_not_loaded() {
        let renderer = sinew_render::byte_renderer().unwrap();
        let picture = format!("data:image/png;base64,{}", "A".repeat(100));
        let parts = json!([
            {"type": "text", "text": "x".repeat(500)},
            {"type": "image", "source": {"url": picture}}, {"type": "image", "source": {"url": picture}},
            {"type": "image", "source": {"url": "https://example.org/a.png"}},
            {"type": "image", "source": {"url": "data:image/svg+xml;base64,AAAA"}},
            {"type": "image", "source": {"url": "data:image/png;base64,A\" onerror=\"1"}},
        ]);
        let trace = trace("0123456789", &renderer, parts);
        let limits = Limits {
            tokens: 4,
            text: 400,
            pictures: 150,
        };
        let page = html(&trace, Ok(&renderer), limits);
        assert_eq!(page.matches("<img ").count(), 1, "{page}");
        assert!(page.contains("image https://example.org/a.png"), "{page}");
        for left_out in ["6 tokens are", "bytes of text are", "1 pictures are"] {
            assert!(page.contains(left_out), "{left_out} not in\n{page}");
        }
        assert_eq!(
            page.matches("log-prob -0.5000, probability 60.7 %, weights 3")
                .count(),
            4
        );
        let whole = html(&trace, Ok(&renderer), Limits::default());
        assert!(!whole.contains("left out"), "{whole}");
        assert_eq!(whole.matches("<img ").count(), 2);
        let blind = html(&trace, Err("no file <x>"), limits);
        assert!(blind.contains("no file &lt;x&gt;") && !blind.contains("class=\"tokens\""));
    }

    proptest! {
        #[test]
        fn text_never_becomes_markup(text in "[<>&\"'a-z/=!\\- \u{202e}\u{7}\n]{1,60}") {
            let renderer = sinew_render::byte_renderer().unwrap();
            let page = html(&trace(&text, &renderer, json!(text)), Ok(&renderer), Limits::default());
            let plain = html(&trace("a", &renderer, json!("a")), Ok(&renderer), Limits::default());
            prop_assert_eq!(tags(&page), tags(&plain));
            let obeyed = page.contains(['\u{202e}', '\u{7}']);
            prop_assert!(!obeyed);
        }
    }
}
