//! What the model is shown before the task, and the texts of errors.

use serde::{Deserialize, Serialize};
use sinew_types::{Message, Role};

/// Code between `<tool>` and `</tool>` is a call of [`TOOL`].
pub(super) const TAG: &str = "tool";
/// The one tool.
pub(super) const TOOL: &str = "python";

/// What the model reads when it wrote neither a call nor an answer.
pub(super) const NEITHER: &str = "Error: write <tool>expression</tool> or Answer: number";
/// When its turn was cut.
pub(super) const TOO_LONG: &str =
    "Error: too long. Write only <tool>expression</tool> or Answer: number";
/// When a call does not end.
pub(super) const UNCLOSED: &str = "Error: <tool> without </tool>";
/// When a call does not begin.
pub(super) const UNOPENED: &str = "Error: </tool> without <tool>";
/// When there is nothing in a call.
pub(super) const EMPTY: &str = "Error: nothing between <tool> and </tool>";
/// When the model invents what the tool prints.
pub(super) const TRAILING: &str = "Error: stop after </tool> and wait for the output";

/// A solved task, shown as the turns of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkedExample {
    pub question: String,
    /// What goes between the tags.
    pub call: String,
    /// What the tool prints, and the answer.
    pub output: String,
}

/// What stands before the task. Equal for all episodes, so that it is computed once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PromptConfig {
    /// Empty for none; some templates then add their own.
    pub system: String,
    pub examples: Vec<WorkedExample>,
    /// Role of the tool's output: `tool`, or `user` for templates without it.
    pub observation_role: Role,
}

impl Default for PromptConfig {
    /// Chosen by measuring SmolLM2-135M-Instruct at temperature 1, 64 tasks a design: it copies
    /// tags more reliably than fences or JSON, one example is too few, a third costs 70 tokens
    /// and gains nothing. The order of the two examples makes no difference that was measured
    /// beyond noise.
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
    /// The messages of an episode's start.
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

/// A call as the model should write it.
pub(super) fn call_text(code: &str) -> String {
    format!("<{TAG}>{code}</{TAG}>")
}

/// An answer as the model should write it.
pub(super) fn answer_text(value: &str) -> String {
    format!("Answer: {value}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::expr::evaluate;

    #[test]
    fn worked_examples_are_right() {
        for example in PromptConfig::default().examples {
            let value = evaluate(&example.call).unwrap();
            assert_eq!(value.to_string(), example.output);
        }
    }

    #[test]
    fn examples_are_whole_turns_before_the_question() {
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
