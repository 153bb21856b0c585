//! Suspicious rewards: signs that an episode got its reward without solving its task.
//!
//! [`suspicions`] is a pure function of a trace and of the usual values in its run ([`Usual`]). It reads
//! texts, calls of tools and outcomes, never tokens, and compares an episode with its siblings and with its
//! family (the episodes of its task type). A flag is a reason to look, not a proof. Each has its evidence.
//!
//! | flag | sign |
//! |---|---|
//! | [`Flag::SolvedTooFast`] | solved in a quarter of the turns that others need |
//! | [`Flag::GraderTouched`] | a call names a file of the grader, or writes what loads into its tests |
//! | [`Flag::OutputForged`] | a call prints a verdict of tests, or ends the process before they report |
//! | [`Flag::AnswerInPrompt`] | the prompt states the answer that won |
//! | [`Flag::OneAnswer`] | one text is the right answer of most tasks of a family |
//!
//! Invariants: equal traces in equal company have equal flags; texts are read up to a limit; an episode that
//! is not solved has only flags of its calls.

mod answers;
mod calls;
mod usual;

pub use usual::{Sighting, Sightings, Usual};

use crate::trust::answers::Answer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_types::{EpisodeEnd, Role, TokenKind, Trace};
use std::collections::BTreeSet;
use std::fmt;

/// Maximum number of bytes that are read of one text.
const MAX_TEXT: usize = 1 << 20;

/// Maximum number of characters of an excerpt in evidence.
const EXCERPT: usize = 120;

/// A sign that an episode may have got its reward without solving its task.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Flag {
    /// Solved in a quarter of the turns that its siblings, or the other episodes of its task type, need.
    SolvedTooFast,
    /// A tool call names a file of the grader, or writes a file that is loaded into its tests.
    GraderTouched,
    /// A tool call prints a verdict of tests, or ends their process before they report.
    OutputForged,
    /// The prompt states the answer that won.
    AnswerInPrompt,
    /// One text is the right answer of most tasks of a type.
    OneAnswer,
}

impl Flag {
    /// All flags, in the order of the documentation.
    pub const ALL: [Self; 5] = [
        Self::SolvedTooFast,
        Self::GraderTouched,
        Self::OutputForged,
        Self::AnswerInPrompt,
        Self::OneAnswer,
    ];

    /// Name in recipes and listings.
    pub fn name(self) -> &'static str {
        match self {
            Self::SolvedTooFast => "solved_too_fast",
            Self::GraderTouched => "grader_touched",
            Self::OutputForged => "output_forged",
            Self::AnswerInPrompt => "answer_in_prompt",
            Self::OneAnswer => "one_answer",
        }
    }
}

impl fmt::Display for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A flag of an episode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Suspicion {
    /// Kind of the sign.
    pub flag: Flag,
    /// Evidence, in one line.
    pub evidence: String,
}

impl fmt::Display for Suspicion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.flag, self.evidence)
    }
}

/// Handling of suspicious rewards in a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustConfig {
    /// Episodes with one of these flags are not trained.
    pub exclude: BTreeSet<Flag>,
    /// Parts of paths that belong to the grader, in addition to those that are known.
    pub protected: Vec<String>,
}

impl TrustConfig {
    /// Whether suspicious episodes are left out of training.
    pub fn excludes(&self) -> bool {
        !self.exclude.is_empty()
    }
}

/// Returns the flags of an episode, each once, in the order of [`Flag::ALL`]. `usual` includes the episode
/// itself.
pub fn suspicions(trace: &Trace, usual: &Usual, protected: &[String]) -> Vec<Suspicion> {
    let calls = calls::seen(trace, protected);
    let answer = Answer::of(trace).filter(|_| solved(trace));
    let fast = solved(trace).then(|| usual.too_fast(trace)).flatten();
    let stated = answer.as_ref().and_then(|a| answers::stated(trace, a));
    let one = answer.as_ref().and_then(|a| usual.one_answer(trace, a));
    let found = [
        (Flag::SolvedTooFast, fast),
        (Flag::GraderTouched, calls.touched),
        (Flag::OutputForged, calls.forged),
        (Flag::AnswerInPrompt, stated),
        (Flag::OneAnswer, one),
    ];
    let found = found.into_iter();
    found
        .filter_map(|(flag, evidence)| Some((flag, evidence?)))
        .map(|(flag, evidence)| Suspicion { flag, evidence })
        .collect()
}

/// Whether an episode succeeded. A failed or unscored episode has not.
fn solved(trace: &Trace) -> bool {
    let failed = matches!(trace.end, EpisodeEnd::Failed { .. });
    trace.outcome.success && !trace.outcome.unscored && !failed
}

/// Number of turns of the model.
fn turns(trace: &Trace) -> u32 {
    let sampled = trace.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
    let turns: BTreeSet<u32> = sampled.map(|n| n.turn).collect();
    u32::try_from(turns.len()).unwrap_or(u32::MAX)
}

/// Returns the first texts of an episode: those before the model's first turn, without example turns.
fn prompt(trace: &Trace) -> String {
    let given = trace
        .nodes
        .iter()
        .filter(|n| n.kind == TokenKind::Prompt)
        .flat_map(|n| &n.messages)
        .filter(|m| m.role != Role::Assistant);
    let mut text = String::new();
    for message in given {
        text.push_str(&message.content.text());
        text.push('\n');
    }
    clip(&text, MAX_TEXT).to_owned()
}

/// Returns the start of a text, at most `most` bytes.
fn clip(text: &str, most: usize) -> &str {
    let mut end = most.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Shortens a text to one line of evidence.
fn excerpt(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() > EXCERPT {
        line.chars().take(EXCERPT).chain(['…']).collect()
    } else {
        line
    }
}
