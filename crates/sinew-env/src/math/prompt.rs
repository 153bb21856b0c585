//! Prompt of math tasks, and error messages for the model.

use serde::{Deserialize, Serialize};
use sinew_types::{Message, Role};

/// Tag of tool calls: code between `<tool>` and `</tool>` calls [`TOOL`].
pub(super) const TAG: &str = "tool";
/// Name of the tool.
pub(super) const TOOL: &str = "python";

/// For a turn with neither a call nor an answer.
pub(super) const NEITHER: &str = "Error: write <tool>expression</tool> or Answer: number";
/// For a truncated turn.
pub(super) const TOO_LONG: &str =
    "Error: too long. Write only <tool>expression</tool> or Answer: number";
/// For a call without an end.
pub(super) const UNCLOSED: &str = "Error: <tool> without </tool>";
/// For an end without a call.
pub(super) const UNOPENED: &str = "Error: </tool> without <tool>";
/// For an empty call.
pub(super) const EMPTY: &str = "Error: nothing between <tool> and </tool>";
/// For text after a call, such as an invented output.
pub(super) const TRAILING: &str = "Error: stop after </tool> and wait for the output";

/// A solved task, shown to the model as chat turns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkedExample {
    /// Text of the task.
    pub question: String,
    /// Code between the tags of the call.
    pub call: String,
    /// Output of the tool, which is also the answer.
    pub output: String,
}

/// Messages before the question. They are equal for all episodes, so that their KV cache is shared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PromptConfig {
    /// System prompt. Some chat templates add their own if it is empty.
    pub system: String,
    /// Solved tasks, in order.
    pub examples: Vec<WorkedExample>,
    /// Role of tool output: `tool`, or `user` for templates without that role.
    pub observation_role: Role,
}

impl Default for PromptConfig {
    /// Measured with SmolLM2-135M-Instruct at temperature 1 on 64 tasks per design: the model copies tags
    /// more reliably than fences or JSON. One example is too few. A third one costs 70 tokens without a gain.
    /// The order of the two examples has no effect beyond noise.
    fn default() -> Self {
        let example = |question: &str, call: &str, output: &str| WorkedExample {
            question: question.into(),
            call: call.into(),
            output: output.into(),
        };
        Self {
            system: "Use Python for the math: <tool>...</tool>. Then reply Answer: ...".into(),
            examples: vec![
                example(
                    "A baker makes 132 cakes a day for 14 days and sells 950. How many cakes are left?",
                    "132 * 14 - 950",
                    "898",
                ),
                example("What is 318 * 27 + 145?", "318 * 27 + 145", "8731"),
            ],
            observation_role: Role::Tool,
        }
    }
}

impl PromptConfig {
    /// Returns the initial messages of an episode.
    pub fn messages(&self, question: &str) -> Vec<Message> {
        let mut messages = Vec::with_capacity(2 + 4 * self.examples.len());
        if !self.system.is_empty() {
            messages.push(Message::new(Role::System, self.system.clone()));
        }
        for example in &self.examples {
            messages.extend([
                Message::new(Role::User, example.question.clone()),
                Message::new(Role::Assistant, call_text(&example.call)),
                Message::new(self.observation_role, example.output.clone()),
                Message::new(Role::Assistant, answer_text(&example.output)),
            ]);
        }
        messages.push(Message::new(Role::User, question));
        messages
    }
}

/// Formats a tool call.
pub(super) fn call_text(code: &str) -> String {
    format!("<{TAG}>{code}</{TAG}>")
}

/// Formats an answer.
pub(super) fn answer_text(value: &str) -> String {
    format!("Answer: {value}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::expr::evaluate;

    #[test]
    fn worked_examples_are_correct() {
        for example in PromptConfig::default().examples {
            let value = evaluate(&example.call).unwrap();
            assert_eq!(value.to_string(), example.output);
        }
    }

    #[test]
    fn examples_are_complete_turns_before_the_question() {
        let messages = PromptConfig::default().messages("What is 1 + 1?");
        let roles: Vec<_> = messages.iter().map(|m| m.role).collect();
        use Role::{Assistant, System, Tool, User};
        let example = [User, Assistant, Tool, Assistant];
        assert_eq!(roles[0], System);
        assert_eq!(roles[1..5], example);
        assert_eq!(roles[5..9], example);
        assert_eq!(roles[9..], [User]);
        assert_eq!(messages[4].content, "Answer: 898");
    }
}
