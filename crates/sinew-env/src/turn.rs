//! Collects the results of a turn's calls, as messages and as the result of a step.

use crate::port::{Action, CallError, Observation, StepResult};
use sinew_types::{Content, Message, Role, ToolCall};

/// Results of a turn so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Turn {
    /// One message for each call, with its id, in order.
    pub messages: Vec<Message>,
    /// Sum of the rewards of the calls.
    pub reward: f64,
    /// The environment ended the episode.
    pub done: bool,
    /// Number of calls of tools that failed.
    pub errors: u32,
    /// A tool call failed, or the turn's text was not valid notation for a call.
    pub error: bool,
}

impl Turn {
    /// Adds the result of a call: an observation, or an error of the model.
    pub fn called(&mut self, call: &ToolCall, result: Result<String, CallError>) {
        self.answered(call, result.map(Into::into));
    }

    /// Adds a result like [`Turn::called`], but one that may have images.
    pub fn answered(&mut self, call: &ToolCall, result: Result<Content, CallError>) {
        self.errors += u32::from(result.is_err());
        let mut message = self.message(Role::Tool, result);
        message.tool_call_id = Some(call.id.clone());
        message.name = Some(call.name.clone());
        self.messages.push(message);
    }

    /// Adds a message to the model outside of calls: an answer to its text, or an error of the notation.
    pub fn said(&mut self, result: Result<String, CallError>) {
        let message = self.message(Role::User, result.map(Into::into));
        self.messages.push(message);
    }

    /// Adds the error of a call that could not be parsed, if there is one.
    pub fn notation(&mut self, action: &Action) {
        if let Some(error) = action.call_error.as_ref().filter(|_| !self.done) {
            self.said(Err(error.clone()));
        }
    }

    /// A message with a result, or with the error as the model reads it.
    fn message(&mut self, role: Role, result: Result<Content, CallError>) -> Message {
        self.error |= result.is_err();
        let content = result.unwrap_or_else(|error| format!("Error: {error}").into());
        Message::new(role, content)
    }

    /// Returns the step result of a turn that did not end the episode.
    pub fn step(&self, state_hash: Option<u64>) -> StepResult {
        let mut content = Content::new();
        for (at, message) in self.messages.iter().enumerate() {
            content.push_text(if at == 0 { "" } else { "\n" });
            for part in message.content.parts() {
                content.push(part.clone());
            }
        }
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
