//! Environment `chat`: a prompt, one answer of the model, and the rewards of the recipe.
//!
//! It has no tasks and no score: rows come from `[tasks]`, and a [`Rewarded`](crate::Rewarded) factory around
//! it scores the answer. Otherwise every episode is unscored. The gold policy answers with a column of the
//! row.

use crate::port::{
    Action, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture, Observation,
    ResetResult, StepResult,
};
use crate::registry::{EnvConfig, EnvKind, KeyError, Needs, Sandboxes};
use crate::taskset::{Taskset, TasksetError};
use futures::FutureExt;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sinew_types::{Gives, InputPresence, Message, Outcome, Role, Task};
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

/// Remedy in the message for algorithms that need more than one turn.
const ONE_ANSWER: &str = "an episode is one answer without tools; take an environment with turns, such as a class \
     of yours with env.type = \"python\"";

/// The keys of this environment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Chat {
    /// Column of the task with a right answer: a text, a number or a truth value. With it there is a gold
    /// policy, which `sinew check` plays and `data.type = "gold"` imitates. Empty: none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(extend("default" = ""))]
    gold: String,
}

/// The keys of this environment with their defaults.
pub fn config() -> Arc<dyn EnvConfig> {
    Arc::new(Chat::default())
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
        let gold = (!self.gold.is_empty()).then(|| self.gold.clone());
        Ok(Arc::new(ChatFactory { gold }))
    }

    fn gives(&self) -> Gives {
        Gives::all(InputPresence::No(ONE_ANSWER))
    }
}

/// Factory of [`chat`](self) episodes.
#[derive(Clone, Debug, Default)]
pub struct ChatFactory {
    /// Column of a right answer.
    gold: Option<String>,
}

impl ChatFactory {
    /// Returns the right answer of a task in the form of a model's output.
    fn answer(&self, task: &Task) -> Result<Option<String>, EnvError> {
        let Some(column) = &self.gold else {
            return Ok(None);
        };
        let broken = |found: &str| EnvError::Task {
            task: task.id.to_string(),
            message: format!(
                "env.gold = {column:?}: {found}, allowed: a column with a text, a number or a truth value"
            ),
        };
        match task.data.get(column) {
            Some(Value::String(text)) if text.trim().is_empty() => Err(broken("its text is empty")),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(value @ (Value::Number(_) | Value::Bool(_))) => Ok(Some(value.to_string())),
            Some(other) => Err(broken(&format!("it is {other}"))),
            None => Err(broken("the row has no such column")),
        }
    }
}

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

    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        match turn {
            0 => Ok(self.answer(task)?.map(Action::say)),
            _ => Ok(None),
        }
    }
}

/// Environment of one episode. It holds the prompt until `reset` returns it.
struct ChatEnv {
    messages: Vec<Message>,
}

/// Returns an unscored outcome, which a reward of the recipe completes.
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use sinew_types::TaskId;

    fn task(data: Value) -> Task {
        Task {
            id: TaskId::new("t/1"),
            kind: "t".into(),
            prompt: "2 + 3?".into(),
            data,
            ..Task::default()
        }
    }

    #[test]
    fn the_gold_policy_says_the_column_once() {
        let factory = ChatFactory {
            gold: Some("answer".into()),
        };
        for (value, said) in [(json!("5"), "5"), (json!(5), "5"), (json!(true), "true")] {
            let task = task(json!({ "answer": value }));
            assert_eq!(factory.gold(&task, 0).unwrap(), Some(Action::say(said)));
            assert_eq!(factory.gold(&task, 1).unwrap(), None);
        }
        let none = ChatFactory::default();
        assert_eq!(none.gold(&task(json!({})), 0).unwrap(), None);
    }

    #[test]
    fn a_column_that_is_no_answer_is_named() {
        let factory = ChatFactory {
            gold: Some("answer".into()),
        };
        for (data, why) in [
            (json!({ "other": 1 }), "no such column"),
            (json!({ "answer": " " }), "empty"),
            (json!({ "answer": ["5"] }), "it is [\"5\"]"),
            (json!(null), "no such column"),
        ] {
            let said = factory.gold(&task(data), 0).unwrap_err().to_string();
            assert!(
                said.contains("env.gold = \"answer\"") && said.contains(why),
                "{said}"
            );
        }
    }
}
