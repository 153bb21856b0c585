//! Notation of a model's turns: how it writes tool calls and reasoning.
//!
//! The notation is found in the chat template ([`TurnFormat::of_template`]); a recipe can replace the format
//! of calls for a model that was trained on another one.

use crate::calls::marks;
use crate::tool_call::ToolCallFormat;

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

    /// Detects the format from a chat template and its generation prompt.
    pub fn of_template(source: &str, generation_prompt: &str) -> Self {
        let pair = [("<think>", "</think>"), ("[THINK]", "[/THINK]")]
            .into_iter()
            .find(|(_, close)| source.contains(close));
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

    /// True if a control token is a marker of calls or reasoning, such as `[TOOL_CALLS]`. The parser needs
    /// its text.
    pub fn is_mark(&self, token: &str) -> bool {
        let reasoning = self
            .reasoning
            .as_ref()
            .is_some_and(|r| token == r.open || token == r.close);
        let inner = [
            "<｜tool▁sep｜>",
            "[ARGS]",
            "[CALL_ID]",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ];
        let calls = self.calls.as_ref().is_some_and(|format| {
            let marks = marks(format);
            inner.contains(&token)
                || marks.open.iter().any(|m| m == token)
                || marks.wrapper.iter().any(|m| m == token)
                || marks.stray.iter().any(|(_, close)| close == token)
        });
        reasoning || calls
    }
}
