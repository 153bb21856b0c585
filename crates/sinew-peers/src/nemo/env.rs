//! Resource servers of NeMo Gym: the tools are routes, and `/verify` scores the whole conversation.
//!
//! A session is a cookie that `/seed_session` sets. A turn without calls ends the episode, as it ends a
//! response in that project. A `GymnasiumServer` of that project has other routes: `/reset` and `/step`. The
//! latter takes each turn, answers its calls, may add a message to the model, rewards the turn, and ends the
//! episode.

use super::host::{Host, Place};
use super::rows::{Output, read, tools};
use crate::counts::Counts;
use crate::keys::check_client;
use crate::turn::Turn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sinew_bridge::remote::{MAX_TEXT, RemoteError, Server, check_timeouts, cut, worker};
use sinew_env::{
    Action, CallError, CallNotation, Capabilities, Env, EnvConfig, EnvError, EnvFactory, EnvFuture,
    EnvKind, KeyError, Needs, Observation, ResetResult, Sandboxes, Score, StepResult, Taskset,
    TasksetError, Unscored,
};
use sinew_types::{Gives, InputPresence, Message, Outcome, Role, Task, ToolCall};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The environment of the registry.
pub static NEMO_KIND: EnvKind = EnvKind::new::<NemoGym>(
    "nemo_gym",
    "a resource server of NeMo Gym, with rows in its form",
    Needs {
        sandbox: false,
        alphabet: None,
        rows: false,
        tasks: false,
        reward: false,
    },
);

/// Data of the episodes that algorithms can read. Rows without tools have no counts.
const GIVES: Gives = Gives {
    states: InputPresence::No(
        "NeMo Gym has no states; take a class of yours, with env.type = \"python\"",
    ),
    turn_rewards: InputPresence::No("NeMo Gym scores whole conversations"),
    tool_counts: InputPresence::Maybe,
    format_penalty: InputPresence::Maybe,
};
/// Fields of `/verify` that are metrics, at most.
const MAX_METRICS: usize = 32;

/// Keys of `[env] type = "nemo_gym"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NemoGym {
    /// Address of the resource server, such as `http://127.0.0.1:8000`.
    pub url: String,
    /// File of rows as JSON lines, such as the `example.jsonl` of a server's folder. One of ten is held out.
    pub rows: String,
    /// Name of the environment variable with the server's key, sent as `Authorization: Bearer`. Empty: no
    /// key.
    #[serde(default)]
    pub key_env: String,
    /// Routes of the server.
    #[serde(default)]
    pub protocol: NemoProtocol,
    /// Score from which on a task is solved.
    #[serde(default = "crate::keys::solved_at")]
    pub solved_at: f64,
    /// Episodes at once.
    #[serde(default = "default_sessions")]
    #[schemars(range(min = 1, max = 4096))]
    pub sessions: usize,
    /// Deadline of one request, in seconds.
    #[serde(default = "crate::keys::timeout_s")]
    #[schemars(range(min = 0.01, max = 86_400.0))]
    pub timeout_s: f64,
    /// Longest wait of an episode for one of `sessions`, in seconds.
    #[serde(default = "crate::keys::wait_s")]
    #[schemars(range(min = 0.01, max = 86_400.0))]
    pub wait_s: f64,
}

/// Routes of a resource server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NemoProtocol {
    /// `/seed_session`, a route for each tool, and `/verify` with the whole conversation.
    #[default]
    Verify,
    /// `/reset` and `/step`, of a `GymnasiumServer`: the score is the sum of the rewards of the steps.
    Gymnasium,
}

/// Episodes at once.
fn default_sessions() -> usize {
    64
}

impl EnvConfig for NemoGym {
    fn check(&self) -> Result<(), KeyError> {
        check_client(&self.url, self.sessions)?;
        check_timeouts(&[("timeout_s", self.timeout_s), ("wait_s", self.wait_s)])
    }

    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        Ok(Arc::new(read(&self.rows, seed)?))
    }

    fn factory(&self, _sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        Ok(Arc::new(NemoFactory::new(self)?))
    }

    fn gives(&self) -> Gives {
        GIVES
    }
}

/// Factory of episodes of one server.
#[derive(Clone)]
pub struct NemoFactory {
    /// The server. Its places are shared by all clones.
    host: Arc<Host>,
    /// The keys of the recipe, checked.
    keys: Arc<NemoGym>,
}

sinew_types::debug_fields!(NemoFactory as this, url = this.keys.url);

impl NemoFactory {
    /// A client of the server.
    ///
    /// # Errors
    /// If the key is missing, or the address is none.
    pub fn new(keys: &NemoGym) -> Result<Self, EnvError> {
        let server = Server::new(&keys.url, &keys.key_env, keys.timeout_s)?;
        let wait = Duration::from_secs_f64(keys.wait_s);
        Ok(Self {
            host: Arc::new(Host::new(server, keys.sessions, wait)),
            keys: Arc::new(keys.clone()),
        })
    }
}

impl EnvFactory for NemoFactory {
    fn name(&self) -> &str {
        "nemo_gym"
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        Ok(Box::new(Episode {
            host: Arc::clone(&self.host),
            keys: Arc::clone(&self.keys),
            task: task.clone(),
            place: None,
            used: false,
            output: Output::default(),
            steps: Steps::default(),
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

/// Steps of a `GymnasiumServer` so far.
#[derive(Default)]
struct Steps {
    /// Sum of the rewards.
    reward: f64,
    /// Numbers of the last `info`.
    info: Value,
    /// The server wants to hear of the end of a session.
    closes: bool,
}

/// One episode.
struct Episode {
    host: Arc<Host>,
    keys: Arc<NemoGym>,
    /// Task whose data is the row, which `/seed_session` and `/verify` receive completely.
    task: Task,
    /// The session of the server, from `reset` to `close`.
    place: Option<Place>,
    /// Whether it was reset.
    used: bool,
    /// The conversation, as `/verify` reads it.
    output: Output,
    /// Rewards and results of the steps of a `GymnasiumServer`.
    steps: Steps,
    /// Messages of the last observation: one for each call.
    last: Vec<Message>,
    /// Calls and errors of the model so far, for the metrics.
    counts: Counts,
}

impl Episode {
    /// Waits for a place, and begins a session of the server with the row.
    ///
    /// # Errors
    /// [`EnvError::Order`] at the second call; the worker's error if the server refuses the row.
    async fn open(&mut self) -> Result<ResetResult, EnvError> {
        if std::mem::replace(&mut self.used, true) {
            return Err(EnvError::Order("reset twice: an environment is used once"));
        }
        let place = self.host.place().await?;
        let mut prompt = self.task.prompt.clone();
        match self.keys.protocol {
            NemoProtocol::Verify => {
                let seeded = place.post("/seed_session", self.task.data.clone()).await;
                seeded.map_err(|e| worker(seeding(&e)))?;
            }
            NemoProtocol::Gymnasium => {
                let reset = place.post("/reset", self.task.data.clone()).await;
                let reset = reset.map_err(worker)?;
                self.steps.closes = reset["info"]["supports_explicit_close"] == true;
                if let Some(seen) = reset["observation"].as_str().filter(|s| !s.is_empty()) {
                    prompt = format!("{prompt}\n\n{}", cut(seen, MAX_TEXT));
                }
            }
        }
        self.place = Some(place);
        let mut messages = self.task.preamble.clone();
        messages.push(Message::new(Role::User, prompt));
        Ok(ResetResult {
            messages,
            tools: tools(&self.task.data),
            calls: CallNotation::Template,
            state_hash: None,
        })
    }

    /// One call of a tool. The server's refusal is an error of the model.
    async fn call(&self, call: &ToolCall) -> Result<Result<String, CallError>, EnvError> {
        let Some(place) = &self.place else {
            return Err(EnvError::Order("step before reset or after the end"));
        };
        // Other routes of the server are not the model's to call.
        if !tools(&self.task.data).iter().any(|t| t.name == call.name) {
            let why = format!("there is no tool {}", call.name);
            return Ok(Err(CallError::Failed(why)));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if !call.name.chars().all(plain) || !call.arguments.is_object() {
            let why = "the arguments of a call are an object";
            return Ok(Err(CallError::Failed(why.into())));
        }
        let path = format!("/{}", call.name);
        match place.post(&path, call.arguments.clone()).await {
            Ok(Value::String(text)) => Ok(Ok(cut(&text, MAX_TEXT))),
            Ok(value) => Ok(Ok(cut(&value.to_string(), MAX_TEXT))),
            Err(RemoteError::Refused { status, text, .. }) if status < 500 => {
                Ok(Err(CallError::Failed(text)))
            }
            Err(e) => Err(worker(e)),
        }
    }

    /// Sends a turn to a `GymnasiumServer`, and takes its answer. The order of the messages is that of the
    /// project's own agent: results of calls, then the observation.
    async fn stepped(&mut self, action: &Action, turn: &mut Turn) -> Result<(), EnvError> {
        let Some(place) = &self.place else {
            return Err(EnvError::Order("step before reset or after the end"));
        };
        let mut said = Output::default();
        said.said(&action.text);
        action.tool_calls.iter().for_each(|call| said.asked(call));
        let answer = place.post("/step", said.verify(&self.task.data)).await;
        let mut answer = answer.map_err(worker)?;
        let reward = answer["reward"].as_f64().filter(|r| r.is_finite());
        let reward = reward.ok_or_else(|| worker("POST /step has no number as `reward`"))?;
        (turn.reward, turn.done) = (
            reward,
            answer["terminated"] == true || answer["truncated"] == true,
        );
        self.steps.reward += reward;
        self.steps.info = answer["info"].take();
        let outputs = self.steps.info["tool_outputs"].as_array();
        for call in &action.tool_calls {
            let of_call = |o: &&Value| o["call_id"] == call.id.as_str();
            let output = outputs.and_then(|all| all.iter().find(of_call));
            let text = output.map_or("", |o| o["output"].as_str().unwrap_or_default());
            turn.called(call, Ok(cut(text, MAX_TEXT)));
        }
        match answer["observation"].as_str().filter(|s| !s.is_empty()) {
            Some(seen) => turn.said(Ok(cut(seen, MAX_TEXT))),
            None if action.tool_calls.is_empty() && !turn.done => {
                return Err(worker("POST /step has neither an observation nor an end"));
            }
            None => {}
        }
        Ok(())
    }

    /// Acts like [`Episode::act`], for a `GymnasiumServer`.
    async fn act_by_step(&mut self, action: Action) -> Result<StepResult, EnvError> {
        let mut turn = Turn::default();
        match action.call_error {
            None => self.stepped(&action, &mut turn).await?,
            Some(_) => turn.notation(&action),
        }
        self.counts.turn(&action, turn.errors);
        let step = self.end_turn(turn).await?;
        // The rewards of the turns are the score.
        Ok(StepResult {
            process_reward: 0.0,
            ..step
        })
    }

    /// Answers the calls of a turn in order. A turn without calls ends the episode, and is scored.
    async fn act(&mut self, action: Action) -> Result<StepResult, EnvError> {
        if self.keys.protocol == NemoProtocol::Gymnasium {
            return self.act_by_step(action).await;
        }
        let mut turn = Turn::default();
        self.output.said(&action.answer());
        for call in &action.tool_calls {
            let result = self.call(call).await?;
            let shown = result.clone().unwrap_or_else(|e| e.to_string());
            self.output.called(call, &shown);
            turn.called(call, result);
        }
        turn.notation(&action);
        turn.done = action.tool_calls.is_empty() && action.call_error.is_none();
        self.counts.turn(&action, turn.errors);
        self.end_turn(turn).await
    }

    /// The result of a turn, with the score of an episode that it ends.
    async fn end_turn(&mut self, turn: Turn) -> Result<StepResult, EnvError> {
        let mut step = turn.step(None);
        if turn.done {
            step = StepResult {
                observation: None,
                done: true,
                outcome: Some(self.outcome().await?),
                ..step
            };
        }
        self.last = turn.messages;
        Ok(step)
    }

    /// The score by the server.
    async fn outcome(&self) -> Result<Outcome, EnvError> {
        let Some(place) = &self.place else {
            return Err(EnvError::Order("score before reset or after the end"));
        };
        let verified = match self.keys.protocol {
            NemoProtocol::Verify => {
                let body = self.output.verify(&self.task.data);
                place.post("/verify", body).await
            }
            NemoProtocol::Gymnasium => {
                let mut answer = json!({"reward": self.steps.reward});
                for (name, value) in self.steps.info.as_object().into_iter().flatten() {
                    answer
                        .as_object_mut()
                        .map(|a| a.entry(name).or_insert(value.clone()));
                }
                Ok(answer)
            }
        };
        let scored = verified
            .map_err(|e| Unscored::new(e.to_string()))
            .and_then(|answer| score(&answer, self.keys.solved_at));
        let mut outcome = scored.map_or_else(Unscored::into_outcome, Score::into_outcome);
        if !tools(&self.task.data).is_empty() {
            self.counts.add_to(&mut outcome);
        }
        Ok(outcome)
    }
}

/// Reason why a session did not begin.
fn seeding(error: &RemoteError) -> String {
    match error {
        RemoteError::Refused { status: 404, .. } => {
            format!("{error}; a GymnasiumServer has /reset and /step: env.protocol = \"gymnasium\"")
        }
        _ => error.to_string(),
    }
}

/// The score of an answer of `/verify`: its other numbers are metrics.
fn score(answer: &Value, solved_at: f64) -> Result<Score, Unscored> {
    let Some(reward) = answer["reward"].as_f64() else {
        return Err(Unscored::new("POST /verify has no number as `reward`"));
    };
    let fields = answer.as_object().into_iter().flatten();
    let metric = |(name, value): (&String, &Value)| {
        let number = match value {
            Value::Bool(yes) => f64::from(u8::from(*yes)),
            other => other.as_f64()?,
        };
        (name != "reward").then(|| (cut(name, 100), number))
    };
    let mut parts: BTreeMap<String, f64> = fields.filter_map(metric).take(MAX_METRICS).collect();
    let solved = f64::from(u8::from(reward >= solved_at));
    parts.insert("success".into(), solved);
    Score::with_parts(reward, parts)
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
        Box::pin(self.outcome())
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async move {
            let Some(place) = self.place.take().filter(|_| self.steps.closes) else {
                return Ok(());
            };
            let closed = place.post("/close", json!({})).await;
            closed.map(|_| ()).map_err(worker)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_reward_is_unscored_and_numbers_are_metrics() {
        let made = score(&json!({"reward": 0.5, "exact": true, "text": "x"}), 0.5).unwrap();
        assert!(made.is_success());
        assert_eq!(made.parts["exact"], 1.0);
        for answer in [json!({}), json!({"reward": null}), json!({"reward": "1"})] {
            assert!(score(&answer, 1.0).is_err(), "{answer}");
        }
    }
}
