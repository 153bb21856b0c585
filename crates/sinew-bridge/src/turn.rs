//! A turn of the model while its calls are answered one by one, as messages and as the result of a step.

use sinew_env::{Action, Observation, StepResult};
use sinew_types::{Content, Message, Role, ToolCall};

/// What came back for a turn so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Turn {
    /// One message for each call, with its id, in order.
    pub(crate) messages: Vec<Message>,
    /// Sum of the rewards of the calls.
    pub(crate) reward: f64,
    /// The environment ended the episode.
    pub(crate) done: bool,
    /// Number of calls of tools that failed.
    pub(crate) errors: u32,
    /// The notation was wrong, or a call failed.
    pub(crate) error: bool,
}

impl Turn {
    /// Adds the result of a call: an observation, or the text of an error of the model.
    pub(crate) fn called(&mut self, call: &ToolCall, result: Result<String, String>) {
        self.errors += u32::from(result.is_err());
        let mut message = self.message(Role::Tool, result);
        message.tool_call_id = Some(call.id.clone());
        message.name = Some(call.name.clone());
        self.messages.push(message);
    }

    /// Adds what is said to the model outside of calls: an answer to its text, or an error of the notation.
    pub(crate) fn said(&mut self, result: Result<String, String>) {
        let message = self.message(Role::User, result);
        self.messages.push(message);
    }

    /// Adds the error of a call that could not be parsed, if there is one.
    pub(crate) fn notation(&mut self, action: &Action) {
        if let Some(error) = action.call_error.as_ref().filter(|_| !self.done) {
            self.said(Err(error.to_string()));
        }
    }

    fn message(&mut self, role: Role, result: Result<String, String>) -> Message {
        self.error |= result.is_err();
        let text = result.unwrap_or_else(|error| format!("Error: {error}"));
        Message::new(role, text)
    }

    /// The step of a turn that did not end the episode.
    pub(crate) fn step(&self, state_hash: Option<u64>) -> StepResult {
        let texts: Vec<_> = self.messages.iter().map(|m| m.content.text()).collect();
        let mut content = Content::new();
        content.push_text(&texts.join("\n"));
        StepResult {
            observation: Some(Observation {
                content,
                is_error: self.error,
            }),
            process_reward: self.reward,
            done: false,
            outcome: None,
            state_hash,
        }
    }
}

/// The turn as the model said it, for rewards.
pub(crate) fn said(action: &Action) -> Message {
    let mut said = Message::new(Role::Assistant, action.text.clone());
    said.tool_calls.clone_from(&action.tool_calls);
    said
}
