//! Final answers, and prompts that state them.

use super::{MAX_TEXT, clip, excerpt, prompt};
use sinew_types::{TokenKind, Trace, mix_hash};
use std::collections::BTreeSet;

/// Maximum length of an answer that is searched, in bytes. Longer ones are texts or programs.
const MAX_ANSWER: usize = 2_000;

/// Lower-case words that precede a stated answer.
const STATES: [&str; 7] = [
    "answer",
    "solution",
    "expected",
    "expected output",
    "ground truth",
    "gold",
    "target",
];

/// The normalized answer of an episode that answers once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Answer(String);

impl Answer {
    /// Returns the final answer: that of a program, or the text of the last turn if all turns before it
    /// called tools. Environments whose turns are moves have no answer.
    pub(super) fn of(trace: &Trace) -> Option<Self> {
        if let Some(answer) = &trace.outcome.answer {
            return Self::plain(answer);
        }
        let mut said = trace.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
        let mut last = said.next_back()?.messages.iter();
        let text = last.rfind(|m| m.tool_calls.is_empty())?.content.text();
        let moves = said.any(|n| n.messages.iter().all(|m| m.tool_calls.is_empty()));
        if moves {
            None
        } else {
            Self::plain(final_line(&text))
        }
    }

    fn plain(text: &str) -> Option<Self> {
        let text = clip(text, MAX_TEXT).to_lowercase();
        let text = text.trim_matches(|c: char| c.is_whitespace() || MARKS.contains(&c));
        let words: Vec<&str> = text.split_whitespace().collect();
        (!words.is_empty()).then(|| Self(words.join(" ")))
    }

    /// Formats the answer as evidence.
    pub(super) fn shown(&self) -> String {
        excerpt(&self.0)
    }

    /// Returns a hash of the answer.
    pub(super) fn hash(&self) -> u64 {
        hash(&self.0)
    }
}

/// Characters around an answer that are not part of it.
const MARKS: [char; 8] = ['.', '*', '`', '"', '\'', '$', '(', ')'];

/// The text after the last `answer:`, or the whole text.
fn final_line(text: &str) -> &str {
    const MARK: &str = "answer:";
    let lower = text.to_ascii_lowercase();
    match lower.rfind(MARK) {
        Some(at) => text[at + MARK.len()..].lines().next().unwrap_or_default(),
        None => text,
    }
}

/// Hashes a text. The hash is the same in every version of the program.
pub(super) fn hash(text: &str) -> u64 {
    let words = text.as_bytes().chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    words.fold(text.len() as u64, mix_hash)
}

/// Returns evidence if the prompt states exactly this answer. If a prompt states several answers, they are
/// examples and do not count.
pub(super) fn stated(trace: &Trace, answer: &Answer) -> Option<String> {
    if answer.0.len() > MAX_ANSWER {
        return None;
    }
    let prompt = prompt(trace).to_lowercase();
    let found: BTreeSet<Answer> = STATES
        .iter()
        .flat_map(|word| {
            prompt
                .match_indices(word)
                .map(|(at, w)| &prompt[at + w.len()..])
        })
        .filter_map(value)
        .collect();
    let only = found.len() == 1 && found.contains(answer);
    only.then(|| format!("the prompt states the answer `{}`", answer.shown()))
}

/// The value in `: VALUE`, `= VALUE` or `is VALUE`, to the end of its line.
fn value(after: &str) -> Option<Answer> {
    let line = after.lines().next().unwrap_or_default().trim_start();
    let line = line.trim_start_matches(|c| MARKS.contains(&c));
    let said = [":", "=", "is "]
        .iter()
        .find_map(|s| line.strip_prefix(s))?;
    // The answer of a sentence ends with it.
    let end = said.find(". ").unwrap_or(said.len());
    Answer::plain(said[..end].trim_start_matches("is "))
}
