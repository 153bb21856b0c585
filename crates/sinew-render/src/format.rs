//! Notation of a model's turns: how it writes tool calls and reasoning.
//!
//! The notation is found in the chat template ([`TurnFormat::of_template`]); a recipe can replace the format
//! of calls for a model that was trained on another one.

use crate::calls::marks;
use crate::marked::{GLM, HY3};
use crate::notations;
use crate::tool_call::ToolCallFormat;

/// Start and end of reasoning, by family.
const THOUGHTS: [(&str, &str); 7] = [
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    // Seed-OSS, Cohere, Gemma 4, MiniMax M3, Apertus.
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<mm:think>", "</mm:think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
];

/// Reasoning of gpt-oss is a message of its own: its end begins the next one.
const HARMONY_THOUGHT: (&str, &str) = (
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
);

/// Muse writes its reasoning as a separate message, too.
const MUSE_THOUGHT: (&str, &str) = (" to=self<|message|>", "<|eom|><|start|>assistant");

/// Reasoning of Apriel 1.6, which the generation prompt begins with a sentence.
const APRIEL_THOUGHT: (&str, &str) = ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]");

/// Reasoning of families whose templates do not show it, or put its marks together.
fn own_thought(source: &str) -> Option<(&'static str, &'static str)> {
    let (sentence, end) = APRIEL_THOUGHT;
    match ToolCallFormat::of_template(source) {
        _ if source.contains(HARMONY_THOUGHT.0) => Some(HARMONY_THOUGHT),
        Some(ToolCallFormat::Muse) => Some(MUSE_THOUGHT),
        Some(ToolCallFormat::Hy3) => Some(("<think:opensource>", "</think:opensource>")),
        Some(ToolCallFormat::KimiK3) => Some(("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
        _ if source.contains(sentence) && source.contains(end) => Some(APRIEL_THOUGHT),
        _ => None,
    }
}

/// Tokens at the end of a turn that the template of a family does not show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TurnEnds {
    /// Tokens that end a generation.
    pub(crate) stops: &'static [&'static str],
    /// Tokens that close a turn in the history, in place of the one that ended its generation.
    pub(crate) closes: &'static [&'static str],
    /// Tokens that follow the content of a turn, and end no generation.
    pub(crate) inner: &'static [&'static str],
}

impl TurnEnds {
    /// Those of the family of a template.
    pub(crate) fn of_template(source: &str) -> Self {
        match ToolCallFormat::of_template(source) {
            // `<|end|>` ends every message, thinking among them.
            Some(ToolCallFormat::Harmony) => Self {
                stops: &["<|return|>", "<|call|>"],
                closes: &["<|end|>"],
                inner: &[],
            },
            // The model stops where a result begins.
            Some(ToolCallFormat::Gemma) => Self {
                stops: &["<|tool_response>"],
                ..Self::default()
            },
            // Results follow the calls in the same turn.
            Some(ToolCallFormat::Apertus) => Self {
                stops: &["<|tools_suffix|>"],
                ..Self::default()
            },
            // A turn with calls ends by another token than one without.
            Some(ToolCallFormat::Llama3) if source.contains("<|eom_id|>") => Self {
                stops: &["<|eom_id|>"],
                ..Self::default()
            },
            // `<|message_sep|>` also stands between the text and the call of GigaChat 3.
            Some(ToolCallFormat::GigaChat) if !source.contains("<|function_call|>") => Self {
                closes: &["<|message_sep|>"],
                ..Self::default()
            },
            // The content is an element of the turn.
            Some(ToolCallFormat::KimiK3) => Self {
                stops: &["<|end_of_msg|>"],
                closes: &[],
                inner: &["<|close|>"],
            },
            _ => Self::default(),
        }
    }
}

/// Markers of reasoning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reasoning {
    /// Start marker.
    pub open: String,
    /// End marker.
    pub close: String,
    /// True if the generation prompt ends with the start marker, so that the turn starts with reasoning.
    pub opened_by_prompt: bool,
}

/// Notation of turns of a model family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TurnFormat {
    /// Format of calls. `None`: the turn has no calls.
    pub calls: Option<ToolCallFormat>,
    /// Markers of reasoning. `None`: the turn has no reasoning.
    pub reasoning: Option<Reasoning>,
}

impl TurnFormat {
    /// A format with calls and without reasoning.
    pub fn of_calls(format: ToolCallFormat) -> Self {
        Self {
            calls: Some(format),
            reasoning: None,
        }
    }

    /// The format of a turn that makes no calls. A notation that also frames text is kept: without it, the
    /// headers of messages would be a part of the text.
    #[must_use]
    pub fn without_calls(self) -> Self {
        let frames = |format: &ToolCallFormat| {
            matches!(
                format,
                ToolCallFormat::Harmony
                    | ToolCallFormat::Functionary
                    | ToolCallFormat::KimiK3
                    | ToolCallFormat::Muse
            )
        };
        Self {
            calls: self.calls.filter(frames),
            ..self
        }
    }

    /// Detects the format from a chat template and its generation prompt.
    pub fn of_template(source: &str, generation_prompt: &str) -> Self {
        let pair = own_thought(source).or_else(|| {
            let mut pairs = THOUGHTS.into_iter();
            pairs.find(|(_, close)| source.contains(close))
        });
        let reasoning = pair.map(|(open, close)| Reasoning {
            open: open.into(),
            close: close.into(),
            opened_by_prompt: generation_prompt
                .rfind(open)
                .is_some_and(|at| !generation_prompt[at..].contains(close)),
        });
        Self {
            calls: ToolCallFormat::of_template(source),
            reasoning,
        }
    }

    /// True if a control token is a marker of calls or reasoning, or a part of one, such as `[TOOL_CALLS]`.
    /// The parser needs its text.
    pub fn is_mark(&self, token: &str) -> bool {
        let reasoning = self
            .reasoning
            .as_ref()
            .is_some_and(|r| r.open.contains(token) || r.close.contains(token));
        let inner = ["<｜tool▁sep｜>", "[ARGS]", "[CALL_ID]"];
        let pairs = [GLM, HY3];
        let mut pairs = pairs
            .iter()
            .flat_map(|t| [t.name_end, t.key, t.key_end, t.value, t.value_end]);
        let calls = self.calls.as_ref().is_some_and(|format| {
            let marks = marks(format);
            let closing = marks.stray.iter().map(|(_, close)| close);
            let mut all = marks.open.iter().chain(&marks.wrapper).chain(closing);
            inner.contains(&token)
                || pairs.any(|mark| mark == token)
                || notations::INNER.contains(&token)
                || all.any(|mark| mark.contains(token))
        });
        reasoning || calls
    }
}
