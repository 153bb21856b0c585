//! Episodes of an OpenEnv server.

use super::form::{ACT, Form};
use super::keys::{GIVES, OpenEnv, RewardOf};
use super::socket::{Socket, SocketError};
use crate::counts::Counts;
use crate::turn::Turn;
use serde_json::{Map, Value, json};
use sinew_bridge::remote::{Server, address, block_on, cut, gone, refused, worker};
use sinew_env::{
    Action, CallError, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture,
    Observation, ResetResult, Score, StepResult, Unscored,
};
use sinew_http::{Method, Url};
use sinew_types::{Message, Outcome, Role, Task, is_reward};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Seeds are below this: environments hand them to generators that take 31 bits.
const SEEDS: u64 = 1 << 31;
/// First and longest wait before a full server is asked again.
const WAITS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// Deadline of a farewell.
const FAREWELL: Duration = Duration::from_secs(2);

/// Factory of episodes of one server.
#[derive(Clone)]
pub struct OpenEnvFactory {
    /// State of all episodes. A clone of the factory serves the same server.
    shared: Arc<Shared>,
}

/// Parts that the environments of a factory share.
struct Shared {
    /// The keys of the recipe, checked.
    keys: OpenEnv,
    /// Address of the server, without the route `/ws`.
    url: Url,
    /// Conversion of turns into actions, from `GET /schema`.
    form: Form,
    /// Name and version that the server gives itself.
    name: String,
    /// Version from `GET /metadata`, or empty; at most 64 characters.
    version: String,
    /// One permit for each session.
    places: Arc<Semaphore>,
    /// Sockets live on its runtime.
    server: Server,
}

sinew_types::debug_fields!(OpenEnvFactory as this, name = this.shared.name);

impl OpenEnvFactory {
    /// Asks the server for its schemas. It blocks the thread.
    ///
    /// # Errors
    /// If the key is missing, the server does not answer, or a key names a field that it does not have.
    pub fn connect(keys: &OpenEnv) -> Result<Self, EnvError> {
        let url = address(&keys.url).map_err(|e| refused("url", &keys.url, e.to_string()))?;
        let server = Server::new(&keys.url, &keys.key_env, keys.timeout_s)?;
        let remote = server.remote.clone();
        let asked = block_on(&server.handle, async move {
            let schema = remote.json::<Value>(Method::GET, "/schema", None).await;
            let about = remote.json::<Value>(Method::GET, "/metadata", None).await;
            (schema, about)
        });
        let (schemas, about) = asked.ok_or_else(gone)?;
        let form = Form::of(&schemas.map_err(worker)?, keys);
        let form = form.map_err(|(field, why)| match field {
            "text_field" => refused(field, &keys.text_field, why),
            "observation_field" => refused(field, &keys.observation_field, why),
            _ => refused(field, &keys.url, why),
        })?;
        let about = about.unwrap_or_default();
        let said = |key: &str| cut(about[key].as_str().unwrap_or_default(), 64);
        Ok(Self {
            shared: Arc::new(Shared {
                places: Arc::new(Semaphore::new(keys.sessions)),
                name: format!("openenv:{}", said("name")),
                version: said("version"),
                keys: keys.clone(),
                url,
                form,
                server,
            }),
        })
    }
}

impl EnvFactory for OpenEnvFactory {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn version(&self) -> &str {
        &self.shared.version
    }

    fn tools(&self) -> BTreeMap<String, String> {
        [(ACT.to_owned(), self.shared.version.clone())].into()
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        Ok(Box::new(OpenEnvEpisode {
            shared: Arc::clone(&self.shared),
            task: task.clone(),
            session: None,
            used: false,
            ended: false,
            rewards: (0.0, 0.0),
            last: Vec::new(),
            counts: Counts::default(),
        }))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: self.shared.keys.sessions > 1,
            deterministic: false,
            gives: GIVES,
            places: Some(self.shared.keys.sessions),
        }
    }

    fn gold(&self, _task: &Task, _turn: usize) -> Result<Option<Action>, EnvError> {
        Ok(None)
    }
}

/// A session of the server with its place.
struct Session {
    /// Held during one exchange. `None` after the end.
    socket: Arc<Mutex<Option<Socket>>>,
    /// Free again when the session is dropped.
    _place: OwnedSemaphorePermit,
}

/// Answer of the server to a reset or a step.
struct ServerAnswer {
    /// Observation as the server sent it; [`Form::seen`] makes the text for the model.
    observation: Value,
    /// Finite; 0 if the server sent none, 1 or 0 for a truth value.
    reward: f64,
    /// The episode has ended on the server.
    done: bool,
}

/// Answer of the server in place of an observation.
enum Refusal {
    /// The action is wrong: the model's error.
    Action(String),
    /// All its sessions are in use.
    Full(String),
    /// Anything else.
    Failed(String),
}

/// Reads an answer.
fn read(answer: Value) -> Result<ServerAnswer, Refusal> {
    let data = &answer["data"];
    match answer["type"].as_str() {
        Some("observation") => {
            let reward = match &data["reward"] {
                Value::Null => 0.0,
                Value::Bool(yes) => f64::from(u8::from(*yes)),
                value => value.as_f64().unwrap_or(f64::NAN),
            };
            if !is_reward(reward) {
                return Err(Refusal::Failed("the reward is no number up to 1e30".into()));
            }
            Ok(ServerAnswer {
                observation: data["observation"].clone(),
                reward,
                done: data["done"].as_bool().unwrap_or(false),
            })
        }
        Some("error") => {
            let (code, text) = (data["code"].as_str(), data["message"].as_str());
            let errors = data.get("errors").map(Value::to_string).unwrap_or_default();
            let text = format!("{} {errors}", text.unwrap_or("no reason"));
            let text = cut(text.trim(), 600);
            Err(match code {
                Some("VALIDATION_ERROR") => Refusal::Action(text),
                Some("CAPACITY_REACHED") => Refusal::Full(text),
                code => Refusal::Failed(format!("{text} ({})", code.unwrap_or("no code"))),
            })
        }
        _ => Err(Refusal::Failed(cut(
            &format!("an unknown answer: {answer}"),
            300,
        ))),
    }
}

/// Opens a session and begins an episode. A full server is asked again until the wait is over.
async fn begin(shared: &Shared, reset: &Value) -> Result<(Socket, ServerAnswer), EnvError> {
    let timeout = Duration::from_secs_f64(shared.keys.timeout_s);
    let end = Instant::now() + Duration::from_secs_f64(shared.keys.wait_s);
    let mut wait = WAITS.0;
    loop {
        let opened = Socket::open(&shared.url, shared.server.key.as_deref(), timeout).await;
        let mut socket = opened.map_err(|e| worker(format!("{}: {e}", shared.url)))?;
        let full = match socket.ask(reset, timeout).await {
            // It closes a session that it has no room for.
            Err(SocketError::Closed | SocketError::Lost(_)) => {
                "it closed the session before its first answer".to_owned()
            }
            Err(e) => return Err(worker(format!("reset: {e}"))),
            Ok(answer) => match read(answer) {
                Ok(answered) => return Ok((socket, answered)),
                Err(Refusal::Full(why)) => why,
                Err(Refusal::Action(why) | Refusal::Failed(why)) => {
                    return Err(worker(format!("reset: {why}")));
                }
            },
        };
        if Instant::now() + wait >= end {
            return Err(worker(format!(
                "the server was full for {} s ({full}); lower env.sessions, or raise its max_concurrent_envs",
                shared.keys.wait_s
            )));
        }
        tokio::time::sleep(wait).await;
        wait = (2 * wait).min(WAITS.1);
    }
}

/// One episode.
struct OpenEnvEpisode {
    shared: Arc<Shared>,
    /// Task whose seed, and the columns that `reset_columns` names, are sent with `reset`.
    task: Task,
    /// `None` before `reset` and after `close`.
    session: Option<Session>,
    /// Whether it was reset.
    used: bool,
    /// The server reported that it is done, or the episode was closed. No action is sent after that.
    ended: bool,
    /// Sum of the rewards, and the last one.
    rewards: (f64, f64),
    /// Messages of the last observation.
    last: Vec<Message>,
    /// Calls and errors of the model so far, for the metrics.
    counts: Counts,
}

impl OpenEnvEpisode {
    /// The message that begins the episode.
    fn reset_message(&self) -> Result<Value, EnvError> {
        let mut data = Map::new();
        data.insert("seed".into(), json!(self.task.seed % SEEDS));
        for column in &self.shared.keys.reset_columns {
            let value = self.task.data.get(column).ok_or_else(|| EnvError::Task {
                task: self.task.id.to_string(),
                message: format!("it has no column {column:?}, which env.reset_columns names"),
            })?;
            data.insert(column.clone(), value.clone());
        }
        Ok(json!({"type": "reset", "data": data}))
    }

    /// Waits for a place and for a session of the server, and makes the prompt of the first observation.
    ///
    /// # Errors
    /// [`EnvError::Order`] at the second call; the worker's error if there is no session within `wait_s`.
    async fn open(&mut self) -> Result<ResetResult, EnvError> {
        if std::mem::replace(&mut self.used, true) {
            return Err(EnvError::Order("reset twice: an environment is used once"));
        }
        let shared = Arc::clone(&self.shared);
        let reset = self.reset_message()?;
        let wait = Duration::from_secs_f64(shared.keys.wait_s);
        let places = Arc::clone(&shared.places);
        let opened = self.shared.server.handle.spawn(async move {
            let free = tokio::time::timeout(wait, places.acquire_owned()).await;
            let Ok(Ok(place)) = free else {
                return Err(worker("no session was free in time; raise env.sessions"));
            };
            let (socket, answered) = begin(&shared, &reset).await?;
            Ok((place, socket, answered))
        });
        let (place, socket, answered) = opened.await.map_err(worker)??;
        self.session = Some(Session {
            socket: Arc::new(Mutex::new(Some(socket))),
            _place: place,
        });
        let seen = self.shared.form.seen(&answered.observation);
        let text = match self.task.prompt.as_str() {
            "" => seen,
            prompt => format!("{prompt}\n\n{seen}"),
        };
        let mut messages = self.task.preamble.clone();
        if !self.shared.keys.system.is_empty() && messages.is_empty() {
            messages.push(Message::new(Role::System, self.shared.keys.system.clone()));
        }
        messages.push(Message::new(Role::User, text));
        Ok(ResetResult {
            messages,
            tools: vec![self.shared.form.tool.clone()],
            calls: CallNotation::Template,
            state_hash: None,
        })
    }

    /// Sends an action. A refused one is an error of the model.
    async fn send(&mut self, action: Value) -> Result<Result<ServerAnswer, CallError>, EnvError> {
        let Some(session) = &self.session else {
            return Err(EnvError::Order("step before reset or after the end"));
        };
        let socket = Arc::clone(&session.socket);
        let timeout = Duration::from_secs_f64(self.shared.keys.timeout_s);
        let asked = self.shared.server.handle.spawn(async move {
            let mut socket = socket.lock().await;
            let Some(open) = socket.as_mut() else {
                return Err(SocketError::Closed);
            };
            let message = json!({"type": "step", "data": action});
            let answer = open.ask(&message, timeout).await;
            if answer.is_err() {
                // A late answer would be taken for that of the next action.
                *socket = None;
            }
            answer
        });
        let answer = asked.await.map_err(worker)?;
        let answer = answer.map_err(|e| worker(format!("step: {e}: the session is gone")))?;
        match read(answer) {
            Ok(answered) => Ok(Ok(answered)),
            Err(Refusal::Action(why)) => Ok(Err(CallError::Failed(why))),
            Err(Refusal::Full(why) | Refusal::Failed(why)) => Err(worker(format!("step: {why}"))),
        }
    }

    /// Takes the answer to an action into the turn.
    fn taken(&mut self, answered: ServerAnswer, turn: &mut Turn) -> String {
        turn.reward += answered.reward;
        turn.done |= answered.done;
        self.rewards = (self.rewards.0 + answered.reward, answered.reward);
        self.shared.form.seen(&answered.observation)
    }

    /// Sends the calls of a turn in order, until one ends the episode; without calls, the text.
    ///
    /// # Errors
    /// [`EnvError::Order`] after the end; the worker's error if the session is lost.
    async fn act(&mut self, action: Action) -> Result<StepResult, EnvError> {
        if self.ended {
            return Err(EnvError::Order("step before reset or after the end"));
        }
        let mut turn = Turn::default();
        for call in &action.tool_calls {
            let result = if call.name == ACT && call.arguments.is_object() {
                self.send(call.arguments.clone()).await?
            } else {
                Err(CallError::Failed(format!(
                    "there is one tool, {ACT}, with an object of arguments"
                )))
            };
            let result = result.map(|answered| self.taken(answered, &mut turn));
            turn.called(call, result);
            if turn.done {
                break;
            }
        }
        turn.notation(&action);
        if action.tool_calls.is_empty() && action.call_error.is_none() {
            let result = match self.shared.form.said(&action.answer()) {
                Ok(data) => self.send(data).await?,
                Err(why) => Err(why),
            };
            let result = result.map(|answered| self.taken(answered, &mut turn));
            turn.said(result);
        }
        self.counts.turn(&action, turn.errors);
        let mut step = turn.step(None);
        // The rewards of the turns are the score: a turn keeps its own for credit.
        if turn.done {
            self.ended = true;
            step = StepResult {
                observation: None,
                done: true,
                outcome: Some(self.outcome()),
                ..step
            };
        }
        step.process_reward = 0.0;
        self.last = turn.messages;
        Ok(step)
    }

    /// The score of the rewards so far.
    fn outcome(&self) -> Outcome {
        let value = match self.shared.keys.score {
            RewardOf::Sum => self.rewards.0,
            RewardOf::Last => self.rewards.1,
        };
        let solved = f64::from(u8::from(value >= self.shared.keys.solved_at));
        let scored = Score::with_parts(value, [("success".to_owned(), solved)].into());
        let mut outcome = scored.map_or_else(Unscored::into_outcome, Score::into_outcome);
        self.counts.add_to(&mut outcome);
        outcome
    }
}

impl Drop for OpenEnvEpisode {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            self.shared.server.handle.spawn(end(session));
        }
    }
}

/// Ends a session. Its place is free after that.
async fn end(session: Session) {
    if let Some(socket) = session.socket.lock().await.take() {
        socket.close(FAREWELL).await;
    }
}

impl Env for OpenEnvEpisode {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        Box::pin(self.open())
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        Box::pin(self.act(action))
    }

    /// One message for each call of the last turn. `observation` is the last one.
    fn format_observation(&self, _observation: &Observation) -> Vec<Message> {
        self.last.clone()
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        Box::pin(async move { Ok(self.outcome()) })
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async move {
            self.ended = true;
            if let Some(session) = self.session.take() {
                let ended = self.shared.server.handle.spawn(end(session)).await;
                ended.map_err(worker)?;
            }
            Ok(())
        })
    }
}
