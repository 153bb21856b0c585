//! Prompt of math tasks, and error messages for the model.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sinew_types::{Message, Role, ToolCall, ToolSpec};

/// Tag of tool calls: code between `<tool>` and `</tool>` calls [`TOOL`].
pub(super) const TAG: &str = "tool";
/// Name of the tool.
pub(super) const TOOL: &str = "python";

/// Notation of tool calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Calls {
    /// Code between `<tool>` and `</tool>`, which the prompt teaches: for models without tool training.
    #[default]
    Tag,
    /// The format of the model's chat template, which shows the tool to the model.
    Template,
}

/// A mistake in a turn that is neither a call nor an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mistake {
    /// Neither a call nor an answer.
    Neither,
    /// A limit cut the turn.
    TooLong,
    /// A call without an end.
    Unclosed,
    /// The end of a call without its start.
    Unopened,
    /// A call without code.
    Empty,
    /// Text after a call, such as an invented output, or a second call.
    Trailing,
}

impl Mistake {
    /// The message for the model. It is short: small models copy what they read.
    pub(super) fn text(self, calls: Calls) -> &'static str {
        match (self, calls) {
            (Self::Neither, Calls::Tag) => "Error: write <tool>expression</tool> or Answer: number",
            (Self::Neither, Calls::Template) => "Error: call python or write Answer: number",
            (Self::TooLong, Calls::Tag) => {
                "Error: too long. Write only <tool>expression</tool> or Answer: number"
            }
            (Self::TooLong, Calls::Template) => {
                "Error: too long. Only call python or write Answer: number"
            }
            (Self::Unclosed, Calls::Tag) => "Error: <tool> without </tool>",
            (Self::Unclosed, Calls::Template) => "Error: the call has no end",
            (Self::Unopened, Calls::Tag) => "Error: </tool> without <tool>",
            (Self::Unopened, Calls::Template) => "Error: the end of a call without its start",
            (Self::Empty, Calls::Tag) => "Error: nothing between <tool> and </tool>",
            (Self::Empty, Calls::Template) => "Error: the call has no code",
            (Self::Trailing, Calls::Tag) => "Error: stop after </tool> and wait for the output",
            (Self::Trailing, Calls::Template) => {
                "Error: stop after one call and wait for the output"
            }
        }
    }
}

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
    /// Notation of tool calls, in the examples and in the model's turns.
    pub calls: Calls,
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
            calls: Calls::Tag,
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
    /// The default prompt with a notation of calls. The system message does not describe the format of the
    /// chat template: the template does.
    pub fn with_calls(calls: Calls) -> Self {
        let default = Self::default();
        match calls {
            Calls::Tag => default,
            Calls::Template => Self {
                system: "Use python for the math. Then reply Answer: ...".into(),
                calls,
                ..default
            },
        }
    }

    /// Tools for the chat template; none where the prompt teaches the notation.
    pub fn tools(&self) -> Vec<ToolSpec> {
        match self.calls {
            Calls::Tag => Vec::new(),
            Calls::Template => vec![ToolSpec {
                name: TOOL.into(),
                description:
                    "Runs Python code and returns its output, or the value of its last expression."
                        .into(),
                parameters: json!({
                    "type": "object",
                    "properties": { "code": { "type": "string", "description": "Python code" } },
                    "required": ["code"],
                }),
            }],
        }
    }

    /// Returns the initial messages of an episode.
    pub fn messages(&self, question: &str) -> Vec<Message> {
        let mut messages = Vec::with_capacity(2 + 4 * self.examples.len());
        if !self.system.is_empty() {
            messages.push(Message::new(Role::System, self.system.clone()));
        }
        for example in &self.examples {
            messages.extend([
                Message::new(Role::User, example.question.clone()),
                self.call(&example.call),
                Message::new(self.observation_role, example.output.clone()),
                Message::new(Role::Assistant, answer_text(&example.output)),
            ]);
        }
        messages.push(Message::new(Role::User, question));
        messages
    }

    /// A message of the model that calls the tool.
    fn call(&self, code: &str) -> Message {
        match self.calls {
            Calls::Tag => Message::new(Role::Assistant, call_text(code)),
            Calls::Template => Message {
                tool_calls: vec![tool_call(code)],
                ..Message::new(Role::Assistant, "")
            },
        }
    }
}

/// A call of the tool.
pub(super) fn tool_call(code: &str) -> ToolCall {
    ToolCall {
        id: "call-0".into(),
        name: TOOL.into(),
        arguments: json!({ "code": code }),
    }
}

/// Formats a tool call between tags.
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

    #[test]
    fn the_template_shows_the_tool_and_the_calls_of_the_examples() {
        assert!(PromptConfig::default().tools().is_empty());
        let prompt = PromptConfig::with_calls(Calls::Template);
        assert_eq!(prompt.tools()[0].name, TOOL);
        let messages = prompt.messages("What is 1 + 1?");
        assert!(!messages.iter().any(|m| m.content.text().contains(TAG)));
        let called: Vec<_> = messages.iter().flat_map(|m| &m.tool_calls).collect();
        assert_eq!(called.len(), 2);
        assert_eq!(called[0].arguments["code"], "132 * 14 - 950");
    }
}
