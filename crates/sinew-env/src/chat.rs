//! Environment `chat`: a prompt, one answer of the model, and the rewards of the recipe.
//!
//! It brings no tasks and no score of its own: rows come from `[tasks]`, and a [`Rewarded`](crate::Rewarded)
//! factory around it scores the answer. Alone, every episode is unscored.

use crate::port::{
    Action, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture, Observation,
    ResetResult, StepResult,
};
use crate::registry::{EnvConfig, EnvKind, KeyError, Needs, Sandboxes};
use crate::taskset::{Taskset, TasksetError};
use futures::FutureExt;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_types::{Given, Gives, Message, Outcome, Role, Task};
use std::sync::Arc;

/// The environment of the registry.
pub const KIND: EnvKind = EnvKind::new::<Chat>(
    "chat",
    "one answer to a prompt, with tasks and rewards of the recipe",
    Needs {
        sandbox: false,
        alphabet: None,
        rows: true,
        tasks: true,
        reward: true,
    },
);

/// Way out where an algorithm reads more than one answer.
const ONE_ANSWER: &str = "an episode is one answer without tools; take an environment with turns, such as a class \
     of yours with env.type = \"python\"";

/// It has no keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Chat {}

/// The keys of this environment, which has none.
pub fn config() -> Arc<dyn EnvConfig> {
    Arc::new(Chat {})
}

impl EnvConfig for Chat {
    fn check(&self) -> Result<(), KeyError> {
        Ok(())
    }

    fn taskset(&self, _seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        Err(TasksetError::Config {
            taskset: "chat".into(),
            field: "tasks",
            value: "missing".into(),
            allowed: "a file of rows, such as tasks = \"tasks.jsonl\"".into(),
        })
    }

    fn factory(&self, _sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        Ok(Arc::new(ChatFactory))
    }

    fn gives(&self) -> Gives {
        Gives::all(Given::No(ONE_ANSWER))
    }
}

/// Factory of [`chat`](self) episodes.
#[derive(Clone, Copy, Debug)]
pub struct ChatFactory;

impl EnvFactory for ChatFactory {
    fn name(&self) -> &str {
        "chat"
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        let mut messages = task.preamble.clone();
        messages.push(Message::new(Role::User, task.prompt.clone()));
        Ok(Box::new(ChatEnv { messages }))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: true,
            deterministic: true,
            gives: config().gives(),
            ..Capabilities::default()
        }
    }

    fn gold(&self, _task: &Task, _turn: usize) -> Result<Option<Action>, EnvError> {
        Ok(None)
    }
}

/// One episode: the prompt until it is read, then nothing.
struct ChatEnv {
    messages: Vec<Message>,
}

fn unscored() -> Outcome {
    Outcome {
        unscored: true,
        unscored_reason: Some("env.type = \"chat\" has no score without [reward]".into()),
        ..Outcome::default()
    }
}

impl Env for ChatEnv {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        let messages = std::mem::take(&mut self.messages);
        let reset = ResetResult {
            messages,
            tools: Vec::new(),
            calls: CallNotation::Template,
            state_hash: None,
        };
        futures::future::ready(Ok(reset)).boxed()
    }

    fn step(&mut self, _action: Action) -> EnvFuture<'_, StepResult> {
        let step = StepResult {
            observation: None,
            process_reward: 0.0,
            done: true,
            outcome: Some(unscored()),
            state_hash: None,
        };
        futures::future::ready(Ok(step)).boxed()
    }

    fn format_observation(&self, _observation: &Observation) -> Vec<Message> {
        Vec::new()
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        futures::future::ready(Ok(unscored())).boxed()
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        futures::future::ready(Ok(())).boxed()
    }
}
