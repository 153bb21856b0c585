//! Wraps an environment to add one message: a user's text in the middle of a forked episode.
//!
//! The message follows the environment's messages before one turn of the model: the first messages for turn
//! 1, else the observation of the turn before. Turns are counted from 1. The environment itself does not
//! receive it: state, rewards and the end stay the same.
//!
//! If the episode has no such turn, it stays unchanged.

use crate::port::{
    Action, Capabilities, Env, EnvError, EnvFactory, EnvFuture, Observation, ProgramHost,
    ResetResult, StepResult,
};
use crate::reward::{GroupReward, Reward};
use futures::FutureExt;
use sinew_types::{Component, Message, Outcome, Role, Task};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Environments that add a message of the user before one turn of the model.
pub struct UserMessageEnvs {
    /// Factory of the inner environments.
    inner: Arc<dyn EnvFactory>,
    /// Number of the turn that sees it first, from 1.
    turn: u32,
    /// Text of the message.
    text: String,
}

sinew_types::debug_fields!(
    UserMessageEnvs as this,
    inner = this.inner.name(),
    turn = this.turn
);

impl UserMessageEnvs {
    /// Wraps `inner`, and adds `text` before turn `turn`, counted from 1.
    pub fn new(inner: Arc<dyn EnvFactory>, turn: u32, text: impl Into<String>) -> Self {
        Self {
            inner,
            turn,
            text: text.into(),
        }
    }
}

impl EnvFactory for UserMessageEnvs {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn version(&self) -> &str {
        self.inner.version()
    }

    fn members(&self) -> BTreeMap<String, Component> {
        self.inner.members()
    }

    fn tools(&self) -> BTreeMap<String, String> {
        self.inner.tools()
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        Ok(Box::new(UserMessageEnv {
            inner: self.inner.create(task)?,
            next: 1,
            turn: self.turn,
            message: Message::new(Role::User, self.text.clone()),
        }))
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn hosts_programs(&self, task: &Task) -> bool {
        self.inner.hosts_programs(task)
    }

    fn reward(&self, task: &Task) -> Option<Arc<dyn Reward>> {
        self.inner.reward(task)
    }

    fn group_reward(&self, task: &Task) -> Option<Arc<dyn GroupReward>> {
        self.inner.group_reward(task)
    }

    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        self.inner.gold(task, turn)
    }
}

/// The environment of one episode, with the message.
struct UserMessageEnv {
    /// The wrapped environment.
    inner: Box<dyn Env>,
    /// Number of the next turn.
    next: u32,
    /// Number of the turn that sees the message first, from 1.
    turn: u32,
    /// Message of the user.
    message: Message,
}

impl Env for UserMessageEnv {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        let said = (self.turn == 1).then(|| self.message.clone());
        let reset = self.inner.reset();
        async move {
            let mut reset = reset.await?;
            reset.messages.extend(said);
            Ok(reset)
        }
        .boxed()
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        self.next += 1;
        self.inner.step(action)
    }

    fn format_observation(&self, observation: &Observation) -> Vec<Message> {
        let mut messages = self.inner.format_observation(observation);
        messages.extend((self.next == self.turn).then(|| self.message.clone()));
        messages
    }

    fn renewed(&self) -> Option<Vec<Message>> {
        let mut messages = self.inner.renewed()?;
        messages.extend((self.next == self.turn).then(|| self.message.clone()));
        Some(messages)
    }

    fn host(&mut self) -> Option<&mut dyn ProgramHost> {
        self.inner.host()
    }

    fn played(&mut self, messages: Vec<Message>) {
        self.inner.played(messages);
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        self.inner.score()
    }

    fn end_state(&self) -> Option<&serde_json::Value> {
        self.inner.end_state()
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        self.inner.close()
    }
}
