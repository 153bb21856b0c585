//! One episode of any environment, in the form that other protocols need.

use serde_json::{Map, Value, json};
use sinew_bridge::remote::cut;
use sinew_env::{Action, CallNotation, Env, EnvError, EnvFactory, Split, StepResult, Taskset};
use sinew_types::{Message, Outcome, Task, ToolCall, ToolSpec};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Maximum characters of one text for a client. The rest is cut.
const MAX_TEXT: usize = 64 << 10;

/// Environments with their tasks.
#[derive(Clone)]
pub struct Worlds {
    /// Makes the environment of a task.
    pub envs: Arc<dyn EnvFactory>,
    /// Tasks that clients name by their number.
    pub tasks: Arc<dyn Taskset>,
}

sinew_types::debug_fields!(Worlds as this, envs = this.envs.name());

/// Offer of a server: its environments, limits and key.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Environments and tasks.
    pub worlds: Worlds,
    /// Sessions at once, 1 to 100,000.
    pub sessions: usize,
    /// Time after which a session without a message ends.
    pub lease: Duration,
    /// Key that clients must send.
    pub key: String,
}

/// A choice of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pick {
    /// The next training task of all sessions.
    Next,
    /// The training task with this number, counted round.
    Seed(u64),
    /// A task by its place.
    At(Split, usize),
}

/// Begin of an episode.
#[derive(Clone, Debug)]
pub(crate) struct EpisodeStart {
    /// Id of the task.
    pub(crate) task: String,
    /// The whole prompt.
    pub(crate) messages: Vec<Message>,
}

/// Result of an action.
#[derive(Clone, Debug, Default)]
pub(crate) struct ActionResult {
    /// Observation. Empty at the end.
    pub(crate) text: String,
    /// The model made an error.
    pub(crate) error: bool,
    /// Reward of the action; at the end, that of the episode is added. `None`: there is no score.
    pub(crate) reward: Option<f64>,
    /// The episode has ended.
    pub(crate) done: bool,
}

/// Reasons why an action has no result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum PlayError {
    /// The client's error: it may continue.
    #[error("{0}")]
    Client(String),
    /// The environment failed: the episode is over.
    #[error("the environment failed: {0}")]
    Env(String),
}

impl From<EnvError> for PlayError {
    fn from(error: EnvError) -> Self {
        Self::Env(cut(&error.to_string(), 2000))
    }
}

/// Episodes of one session, one after another.
pub(crate) struct Play {
    /// Source of episodes and tasks.
    worlds: Worlds,
    /// Number of the next training task of all sessions.
    next: Arc<AtomicU64>,
    /// The open episode. `None` before the first, and after a failure or an end.
    env: Option<Box<dyn Env>>,
    /// Tools of the episode.
    tools: Vec<ToolSpec>,
    /// Score, once there is one.
    outcome: Option<Outcome>,
    /// The episode is done or scored: no action is taken until the next one begins.
    over: bool,
    /// Actions of the episode.
    pub(crate) steps: u64,
    /// Rewards of its turns so far, added.
    earned: f64,
}

impl Play {
    /// A session without an episode. `next` is shared by all sessions of a server.
    pub(crate) fn new(worlds: Worlds, next: Arc<AtomicU64>) -> Self {
        Self {
            worlds,
            next,
            env: None,
            tools: Vec::new(),
            outcome: None,
            over: false,
            steps: 0,
            earned: 0.0,
        }
    }

    /// The task of a choice.
    fn task(&self, pick: Pick) -> Result<Task, PlayError> {
        let tasks = &self.worlds.tasks;
        let length = |split| tasks.len(split);
        let round = |number: u64| (number % length(Split::Train).max(1) as u64) as usize;
        let (split, index) = match pick {
            Pick::Next => (
                Split::Train,
                round(self.next.fetch_add(1, Ordering::Relaxed)),
            ),
            Pick::Seed(seed) => (Split::Train, round(seed)),
            Pick::At(split, index) => (split, index),
        };
        let task = tasks.get(split, index);
        task.map_err(|e| PlayError::Client(e.to_string()))
    }

    /// Begins an episode. One that is open ends.
    pub(crate) async fn begin(&mut self, pick: Pick) -> Result<EpisodeStart, PlayError> {
        self.close().await;
        let task = self.task(pick)?;
        let mut env = self.worlds.envs.create(&task)?;
        let reset = env.reset().await;
        let reset = match reset {
            Ok(reset) => reset,
            Err(e) => {
                let _ = env.close().await;
                return Err(e.into());
            }
        };
        self.tools = reset.tools;
        if let CallNotation::Tag { tool, .. } = reset.calls {
            self.tools.push(tagged(tool));
        }
        self.env = Some(env);
        (self.outcome, self.over) = (None, false);
        (self.steps, self.earned) = (0, 0.0);
        Ok(EpisodeStart {
            task: task.id.to_string(),
            messages: reset.messages,
        })
    }

    /// An episode is open.
    pub(crate) fn is_open(&self) -> bool {
        self.env.is_some()
    }

    /// Tools of the episode.
    pub(crate) fn tools(&self) -> &[ToolSpec] {
        &self.tools
    }

    /// A turn with one call of a tool.
    pub(crate) async fn call(
        &mut self,
        name: &str,
        arguments: Value,
    ) -> Result<ActionResult, PlayError> {
        let mut action = Action::say("");
        action.tool_calls.push(ToolCall {
            id: format!("call-{}", self.steps),
            name: name.to_owned(),
            arguments,
        });
        self.act(action).await
    }

    /// A turn of text.
    pub(crate) async fn say(&mut self, text: &str) -> Result<ActionResult, PlayError> {
        self.act(Action::say(text)).await
    }

    /// One turn of the episode. An environment that fails is closed.
    ///
    /// # Errors
    /// [`PlayError::Client`] if no episode is open, or it is over.
    async fn act(&mut self, action: Action) -> Result<ActionResult, PlayError> {
        let Some(env) = &mut self.env else {
            return Err(PlayError::Client("no episode is open: reset first".into()));
        };
        if self.over {
            return Err(PlayError::Client(
                "the episode is over: reset for the next one".into(),
            ));
        }
        self.steps += 1;
        let stepped = env.step(action).await;
        let step = match stepped {
            Ok(step) => step,
            Err(e) => {
                self.close().await;
                return Err(e.into());
            }
        };
        Ok(self.taken(step))
    }

    /// The client's view of a turn. The outcome at the end is kept for [`Play::scored`].
    fn taken(&mut self, step: StepResult) -> ActionResult {
        self.earned += step.process_reward;
        let mut acted = ActionResult {
            reward: Some(step.process_reward),
            done: step.done,
            ..ActionResult::default()
        };
        if let Some(seen) = step.observation {
            acted.text = cut(&seen.content.text(), MAX_TEXT);
            acted.error = seen.is_error;
        }
        if step.done {
            let outcome = step.outcome.unwrap_or_default();
            acted.reward = (!outcome.unscored).then_some(step.process_reward + outcome.reward);
            (self.over, self.outcome) = (true, Some(outcome));
        }
        acted
    }

    /// The score of the episode, also of one that has not ended.
    pub(crate) async fn score(&mut self) -> Result<Value, PlayError> {
        if self.outcome.is_none() {
            let Some(env) = &mut self.env else {
                return Err(PlayError::Client("no episode is open".into()));
            };
            self.outcome = Some(env.score().await?);
            self.over = true;
        }
        Ok(self.scored())
    }

    /// Score of the episode so far, as JSON.
    pub(crate) fn scored(&self) -> Value {
        score(self.outcome.as_ref(), self.earned)
    }

    /// Ends the episode. Errors of its end change nothing: it is over.
    pub(crate) async fn close(&mut self) {
        if let Some(mut env) = self.env.take()
            && let Err(e) = env.close().await
        {
            tracing::debug!(error = %e, "an episode did not close");
        }
    }
}

/// A tool that models call in the notation of the environment's own prompt.
fn tagged(name: String) -> ToolSpec {
    ToolSpec {
        name,
        description: "Runs code, as the prompt describes.".into(),
        parameters: json!({
            "type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"],
        }),
    }
}

/// A score as JSON: the reward of the whole episode with that of its turns, `earned`, whether the task is
/// solved, and the metrics; or why there is none.
fn score(outcome: Option<&Outcome>, earned: f64) -> Value {
    let Some(outcome) = outcome else {
        return Value::Null;
    };
    let mut fields = Map::new();
    if outcome.unscored {
        let why = outcome.unscored_reason.as_deref();
        fields.insert("unscored".into(), json!(why.unwrap_or("no reason")));
    } else {
        fields.insert("reward".into(), json!(earned + outcome.reward));
        fields.insert("success".into(), json!(outcome.success));
    }
    fields.insert("metrics".into(), json!(outcome.metrics));
    Value::Object(fields)
}

/// The messages of a prompt as one text, for clients that take one.
pub(crate) fn whole_text(messages: &[Message]) -> String {
    let texts: Vec<_> = messages.iter().map(|m| m.content.text()).collect();
    cut(&texts.join("\n\n"), MAX_TEXT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_has_the_rewards_of_the_turns() {
        let outcome = Outcome {
            success: true,
            ..Outcome::default()
        };
        let made = score(Some(&outcome), 0.75);
        assert_eq!(
            (&made["reward"], &made["success"]),
            (&json!(0.75), &json!(true))
        );
    }
}
