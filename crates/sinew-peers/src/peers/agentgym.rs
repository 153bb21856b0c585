//! Environments of AgentGym servers.
//!
//! `/create` gives a number that stands for a world until `/close`. Each turn of the model is one action: its
//! text after the last mark `Action:`, or the argument of the tool `act`.

use super::host::{Host, Place, Reach, worker};
use crate::counts::Counts;
use crate::seeds::SeedTasks;
use crate::turn::Turn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sinew_bridge::remote::{MAX_TEXT, address, check_timeouts, cut};
use sinew_env::{
    Action, CallNotation, Capabilities, Env, EnvConfig, EnvError, EnvFactory, EnvFuture, EnvKind,
    KeyError, Needs, Observation, ResetResult, Sandboxes, Score, StepResult, Taskset, TasksetError,
};
use sinew_types::{Given, Gives, Message, Outcome, Role, Task, ToolSpec, is_reward};
use std::sync::Arc;

/// The environment of the registry.
pub static AGENTGYM_KIND: EnvKind = EnvKind::new::<AgentGym>(
    "agentgym",
    "a server of AgentGym, over HTTP",
    Needs {
        sandbox: false,
        alphabet: None,
        rows: true,
        tasks: false,
        reward: false,
    },
);

/// What algorithms can read of the episodes.
const GIVES: Gives = Gives {
    states: Given::No("AgentGym has no states; take a class of yours, with env.type = \"python\""),
    turn_rewards: Given::No("AgentGym's rewards are scores of the episode so far"),
    tool_counts: Given::Yes,
    format_penalty: Given::Yes,
};
/// Texts that servers give in place of the first observation when a reset failed.
const FAILED: [&str; 2] = ["TimeoutError", "Traceback"];

/// Keys of `[env] type = "agentgym"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentGym {
    /// Address of the server, such as `http://127.0.0.1:8000`.
    pub url: String,
    /// Name of the environment variable with the server's key, sent as `Authorization: Bearer`. Empty: no
    /// key.
    #[serde(default)]
    pub key_env: String,
    /// Text of the system message: what the actions are.
    #[serde(default)]
    pub system: String,
    /// Field of `/reset` with the number of the task.
    #[serde(default = "default_field")]
    pub index_field: String,
    /// Tasks for training: the first numbers of the server, of a recipe without rows. Rows have the column
    /// `index`.
    #[serde(default = "default_train")]
    #[schemars(range(min = 1))]
    pub train: usize,
    /// Held-out tasks: the numbers after them.
    #[serde(default = "default_held_out")]
    #[schemars(range(min = 1))]
    pub held_out: usize,
    /// Score of an episode: its last reward, or the sum.
    #[serde(default)]
    pub score: LastOrSum,
    /// Score from which on a task is solved.
    #[serde(default = "default_solved")]
    pub solved_at: f64,
    /// Episodes at once.
    #[serde(default = "default_sessions")]
    #[schemars(range(min = 1, max = 4096))]
    pub sessions: usize,
    /// Deadline of one request, in seconds.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 0.01, max = 86_400.0))]
    pub timeout_s: f64,
    /// Longest wait of an episode for one of `sessions`, in seconds.
    #[serde(default = "default_wait")]
    #[schemars(range(min = 0.01, max = 86_400.0))]
    pub wait_s: f64,
}

/// Which rewards of an episode are its score.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LastOrSum {
    /// That of the last action.
    #[default]
    Last,
    /// All, added.
    Sum,
}

/// Name of the field in the protocol of AgentGym.
fn default_field() -> String {
    "data_idx".into()
}

/// Numbers 0 to 999.
fn default_train() -> usize {
    1000
}

/// The next 100 numbers.
fn default_held_out() -> usize {
    100
}

/// The full score, where scores are 0 to 1.
fn default_solved() -> f64 {
    1.0
}

/// Worlds of the server at once.
fn default_sessions() -> usize {
    16
}

/// Seconds for one request.
fn default_timeout() -> f64 {
    60.0
}

/// Seconds: ten minutes, as episodes of others may take long.
fn default_wait() -> f64 {
    600.0
}

impl EnvConfig for AgentGym {
    fn check(&self) -> Result<(), KeyError> {
        let wrong = |key, value: String, reason: &str| {
            let reason = reason.into();
            Err(KeyError { key, value, reason })
        };
        if let Err(why) = address(&self.url) {
            let reason = format!("{why}; allowed: an address such as \"http://127.0.0.1:8000\"");
            return wrong("url", format!("{:?}", self.url), &reason);
        }
        if !(1..=4096).contains(&self.sessions) {
            return wrong("sessions", self.sessions.to_string(), "allowed: 1 to 4096");
        }
        if self.train == 0 || self.held_out == 0 {
            let key = if self.train == 0 { "train" } else { "held_out" };
            return wrong(key, "0".into(), "allowed: 1 or more");
        }
        check_timeouts(&[("timeout_s", self.timeout_s), ("wait_s", self.wait_s)])
    }

    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        let sizes = (self.train, self.held_out);
        Ok(Arc::new(SeedTasks::new("agentgym", "", sizes, seed)))
    }

    fn factory(&self, _sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        Ok(Arc::new(AgentGymFactory::new(self)?))
    }

    fn gives(&self) -> Gives {
        GIVES
    }
}

/// Factory of episodes of one server.
#[derive(Clone)]
pub struct AgentGymFactory {
    /// The server. Its places are shared by all clones.
    host: Arc<Host>,
    /// The keys of the recipe, checked.
    keys: Arc<AgentGym>,
}

impl std::fmt::Debug for AgentGymFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AgentGymFactory")
            .field("url", &self.keys.url)
            .finish_non_exhaustive()
    }
}

impl AgentGymFactory {
    /// A client of the server.
    ///
    /// # Errors
    /// If the key is missing, or the address is none.
    pub fn new(keys: &AgentGym) -> Result<Self, EnvError> {
        let host = Host::new(&Reach {
            url: &keys.url,
            key_env: &keys.key_env,
            timeout_s: keys.timeout_s,
            wait_s: keys.wait_s,
            sessions: keys.sessions,
        })?;
        Ok(Self {
            host: Arc::new(host),
            keys: Arc::new(keys.clone()),
        })
    }
}

impl EnvFactory for AgentGymFactory {
    fn name(&self) -> &str {
        "agentgym"
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        Ok(Box::new(Episode {
            host: Arc::clone(&self.host),
            keys: Arc::clone(&self.keys),
            task: task.clone(),
            world: None,
            used: false,
            rewards: (0.0, 0.0),
            last: Vec::new(),
            counts: Counts::default(),
        }))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: self.keys.sessions > 1,
            deterministic: false,
            gives: GIVES,
            places: Some(self.keys.sessions),
        }
    }

    fn gold(&self, _task: &Task, _turn: usize) -> Result<Option<Action>, EnvError> {
        Ok(None)
    }
}

/// One episode.
struct Episode {
    /// Of the factory.
    host: Arc<Host>,
    /// Of the factory.
    keys: Arc<AgentGym>,
    /// Its column `index` is the number of the task at the server.
    task: Task,
    /// The server's number of the world, and its place.
    world: Option<(Place, Value)>,
    /// It was reset.
    used: bool,
    /// Sum of the rewards, and the last one.
    rewards: (f64, f64),
    /// Messages of the last observation: one for each call, or one for a turn of text.
    last: Vec<Message>,
    /// Calls and errors of the model so far, for the metrics.
    counts: Counts,
}

/// The observation of an answer: an object's, or the answer itself.
fn seen(answer: &Value) -> String {
    let fields = ["observation", "state"];
    let found = fields.iter().find_map(|f| answer.get(*f));
    match found.unwrap_or(answer) {
        Value::String(text) => cut(text, MAX_TEXT),
        other => cut(&other.to_string(), MAX_TEXT),
    }
}

/// The action within a text: what follows the last mark.
fn action_of(text: &str) -> &str {
    text.rsplit_once("Action:").map_or(text, |(_, a)| a).trim()
}

/// The tool for actions.
fn act_tool() -> ToolSpec {
    ToolSpec {
        name: "act".into(),
        description: "Does an action in the environment.".into(),
        parameters: json!({
            "type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"],
        }),
    }
}

impl Episode {
    /// Waits for a place, creates a world and resets it to the task.
    ///
    /// # Errors
    /// [`EnvError::Order`] at the second call, [`EnvError::Task`] without the column `index`, else the
    /// worker's error, also for the texts of a reset that failed.
    async fn open(&mut self) -> Result<ResetResult, EnvError> {
        if std::mem::replace(&mut self.used, true) {
            return Err(EnvError::Order("reset twice: an environment is used once"));
        }
        let index = self.task.data.get("index").cloned();
        let index = index.ok_or_else(|| EnvError::Task {
            task: self.task.id.to_string(),
            message: "it has no column `index`, the number of the task at the server".into(),
        })?;
        let place = self.host.place().await?;
        let created = place.post("/create", json!({})).await.map_err(worker)?;
        let id = created.get("id").unwrap_or(&created).clone();
        if !id.is_u64() && !id.is_string() {
            return Err(worker(format!("POST /create gave no id: {created}")));
        }
        self.world = Some((place.clone(), id.clone()));
        let body = json!({"id": id, self.keys.index_field.as_str(): index});
        let reset = place.post("/reset", body).await.map_err(worker)?;
        let first = seen(&reset);
        if let Some(failed) = FAILED.iter().find(|f| first.starts_with(**f)) {
            return Err(worker(format!(
                "POST /reset failed on the server: {failed}"
            )));
        }
        let text = match self.task.prompt.as_str() {
            "" => first,
            prompt => format!("{prompt}\n\n{first}"),
        };
        let mut messages = self.task.preamble.clone();
        if messages.is_empty() && !self.keys.system.is_empty() {
            messages.push(Message::new(Role::System, self.keys.system.clone()));
        }
        messages.push(Message::new(Role::User, text));
        Ok(ResetResult {
            messages,
            tools: vec![act_tool()],
            calls: CallNotation::Template,
            state_hash: None,
        })
    }

    /// One action.
    async fn send(&mut self, action: &str, turn: &mut Turn) -> Result<String, EnvError> {
        let Some((place, id)) = &self.world else {
            return Err(EnvError::Order("step before reset or after the end"));
        };
        let body = json!({"id": id, "action": action});
        let answer = place.post("/step", body).await.map_err(worker)?;
        let reward = match &answer["reward"] {
            Value::Null => 0.0,
            value => value.as_f64().unwrap_or(f64::NAN),
        };
        if !is_reward(reward) {
            return Err(worker("POST /step: the reward is no number up to 1e30"));
        }
        self.rewards = (self.rewards.0 + reward, reward);
        turn.done = answer["done"].as_bool().unwrap_or(false);
        Ok(seen(&answer))
    }

    /// Sends the calls of a turn in order, until one ends the episode; without calls, the action in the text.
    async fn act(&mut self, action: Action) -> Result<StepResult, EnvError> {
        let mut turn = Turn::default();
        for call in &action.tool_calls {
            let result = match call.arguments["action"].as_str() {
                Some(text) if call.name == "act" => Ok(self.send(text, &mut turn).await?),
                _ => Err("there is one tool, act, with the argument action, a text".into()),
            };
            turn.called(call, result);
            if turn.done {
                break;
            }
        }
        turn.notation(&action);
        if action.tool_calls.is_empty() && action.call_error.is_none() {
            let result = self.send(action_of(&action.answer()), &mut turn).await?;
            turn.said(Ok(result));
        }
        self.counts.turn(&action, turn.errors);
        let mut step = turn.step(None);
        if turn.done {
            step = StepResult {
                observation: None,
                done: true,
                outcome: Some(self.outcome()),
                ..step
            };
        }
        self.last = turn.messages;
        Ok(step)
    }

    /// The score of the rewards so far, with `success` from `solved_at`.
    fn outcome(&self) -> Outcome {
        let value = match self.keys.score {
            LastOrSum::Last => self.rewards.1,
            LastOrSum::Sum => self.rewards.0,
        };
        let solved = f64::from(u8::from(value >= self.keys.solved_at));
        let mut outcome = match Score::with_parts(value, [("success".to_owned(), solved)].into()) {
            Ok(score) => score.into_outcome(),
            Err(unscored) => unscored.into_outcome(),
        };
        self.counts.add_to(&mut outcome);
        outcome
    }
}

impl Drop for Episode {
    fn drop(&mut self) {
        // Worlds of these servers live until they are closed.
        if let Some((place, id)) = self.world.take() {
            place.post_later("/close", json!({"id": id}));
        }
    }
}

impl Env for Episode {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        Box::pin(self.open())
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        Box::pin(self.act(action))
    }

    fn format_observation(&self, _observation: &Observation) -> Vec<Message> {
        self.last.clone()
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        Box::pin(async move { Ok(self.outcome()) })
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async move {
            if let Some((place, id)) = self.world.take() {
                // Some servers have no such route: their worlds live on by their own choice.
                let closed = place.post("/close", json!({"id": id})).await;
                if let Err(e) = closed {
                    tracing::debug!(error = %e, "an episode did not close");
                }
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_action_follows_the_last_mark() {
        for (text, action) in [
            ("go north", "go north"),
            ("Thought: hm\nAction: go north ", "go north"),
            ("Action: look\nAction:\ntake key", "take key"),
        ] {
            assert_eq!(action_of(text), action);
        }
    }
}
