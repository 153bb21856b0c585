//! Environments whose class is written in Python.
//!
//! An episode is a session of a worker with an instance of the class. The worker keeps the state of the
//! episode; this side keeps the messages of the last observation and the counts of turns. Tools are called in
//! the notation of the chat template ([`CallNotation::Template`]); each call of a turn gives one message with
//! its id.
//!
//! Errors of the model (unknown tools, wrong arguments, `ToolError`) are observations. Errors of the class
//! and the end of its worker are [`EnvError::Worker`], which fails the episode. Errors of its `reward` leave
//! the episode unscored.

use crate::counts::{Counts, counted};
use crate::error::{CallError, StartError};
use crate::lock::lock;
use crate::session::Session;
use crate::worker::THREADED;
use crate::workers::PythonWorkers;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_dialect::conversation;
use sinew_env::{
    Action, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture, Observation,
    ResetResult, Score, StepResult, Unscored,
};
use sinew_types::{Gives, InputPresence, Message, Outcome, Task, ToolCall, ToolSpec, is_reward};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Parts of a class, as its worker describes them.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct EnvInfo {
    /// Tools with their JSON schemas.
    pub(crate) tools: Vec<ToolSpec>,
    /// Episodes have their own tools: the class has a method `offered`.
    #[serde(default)]
    pub(crate) offered: bool,
    /// The class has a method `state`, so that turns have hashes of the state.
    pub(crate) state: bool,
    /// The class has the methods `snapshot` and `restore`.
    pub(crate) snapshots: bool,
    /// The class has a method `gold`.
    pub(crate) gold: bool,
    /// The class gives tasks.
    pub(crate) tasks: bool,
    /// `tasks` has the parameter `split`.
    pub(crate) splits: bool,
    /// `file:line` of the class.
    pub(crate) place: String,
}

impl EnvInfo {
    /// Episodes have tools.
    fn has_tools(&self) -> bool {
        self.offered || !self.tools.is_empty()
    }

    /// Data of the episodes that algorithms can read. Any turn may have a reward: the class returns it.
    fn gives(&self) -> Gives {
        let counts = counted(self.has_tools());
        Gives {
            states: if self.state {
                InputPresence::Yes
            } else {
                InputPresence::No(
                    "add the method `state(self)` to your class, whose value is equal exactly in equal states",
                )
            },
            turn_rewards: InputPresence::Maybe,
            tool_counts: counts,
            format_penalty: counts,
        }
    }
}

/// Factory of episodes of one Python class. Environments are created at once; their session opens in
/// [`Env::reset`], which waits for a free one.
pub struct PythonEnvFactory {
    shared: Arc<Shared>,
}

/// Parts that the environments of a factory share.
struct Shared {
    workers: PythonWorkers,
    /// Index of the class among the targets of the workers.
    target: usize,
    /// Name of the class, as in the recipe.
    name: String,
    info: EnvInfo,
    /// Gold actions of the task that was requested last: they are requested turn by turn.
    gold: Mutex<Option<(Task, Vec<Action>)>>,
}

sinew_types::debug_fields!(
    PythonEnvFactory as this,
    name = this.shared.name,
    workers = this.shared.workers
);

impl PythonEnvFactory {
    /// Creates a factory of the class that is target `target` of `workers`. `name` is for traces.
    ///
    /// # Errors
    /// If the target is not a class of environments.
    pub fn new(workers: PythonWorkers, target: usize, name: &str) -> Result<Self, StartError> {
        let described = workers.describe(target).clone();
        let info = serde_json::from_value(described).map_err(|e| {
            StartError::Worker(format!("{name} is not described as an environment: {e}"))
        })?;
        Ok(Self {
            shared: Arc::new(Shared {
                workers,
                target,
                name: name.into(),
                info,
                gold: Mutex::new(None),
            }),
        })
    }

    /// True if the class gives tasks itself.
    pub fn has_tasks(&self) -> bool {
        self.shared.info.tasks
    }

    /// Tools of the class, as the model sees them.
    pub fn specs(&self) -> &[ToolSpec] {
        &self.shared.info.tools
    }

    /// Parts of the class.
    pub(crate) fn info(&self) -> &EnvInfo {
        &self.shared.info
    }

    /// An episode of `task` that has not started.
    pub(crate) fn env(&self, task: &Task) -> PythonEnv {
        PythonEnv::new(&self.shared, json!(task), task.preamble.clone())
    }

    /// All gold actions of a task. It blocks the thread.
    fn gold_actions(&self, task: &Task) -> Result<Vec<Action>, EnvError> {
        let shared = &self.shared;
        let request = json!({"op": "gold", "target": shared.target, "task": task});
        let answer = shared.workers.call_blocking(request, THREADED);
        let mut value = answer.map_err(CallError::into_env)?;
        let actions = value.get_mut("actions").map(Value::take);
        let actions: Vec<GoldAction> = parsed(actions.unwrap_or_default())?;
        Ok(actions.into_iter().map(Action::from).collect())
    }
}

/// An action of the method `gold`.
#[derive(Deserialize)]
struct GoldAction {
    text: String,
    calls: Vec<GoldCall>,
}

#[derive(Deserialize)]
struct GoldCall {
    name: String,
    arguments: Value,
}

impl From<GoldAction> for Action {
    fn from(gold: GoldAction) -> Self {
        let calls = gold.calls.into_iter().enumerate();
        Self {
            tool_calls: calls
                .map(|(i, call)| ToolCall {
                    id: format!("call-{i}"),
                    name: call.name,
                    arguments: call.arguments,
                })
                .collect(),
            ..Action::say(gold.text)
        }
    }
}

/// A value of the worker. The user's code does not choose its form, but the worker is not trusted.
fn parsed<T: serde::de::DeserializeOwned>(value: Value) -> Result<T, EnvError> {
    serde_json::from_value(value).map_err(|e| {
        EnvError::Worker(format!(
            "the answer of a Python worker is not as expected: {e}"
        ))
    })
}

impl EnvFactory for PythonEnvFactory {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn version(&self) -> &str {
        self.shared.workers.version()
    }

    fn tools(&self) -> BTreeMap<String, String> {
        let version = self.version();
        let tools = self.shared.info.tools.iter();
        tools
            .map(|t| (t.name.clone(), version.to_owned()))
            .collect()
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        Ok(Box::new(self.env(task)))
    }

    /// Whether the class is deterministic is not known; `sinew env check` measures it.
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: true,
            deterministic: false,
            gives: self.shared.info.gives(),
            places: Some(self.shared.workers.max_sessions()),
        }
    }

    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        if !self.shared.info.gold {
            return Ok(None);
        }
        let mut kept = lock(&self.shared.gold);
        if kept.as_ref().is_none_or(|(known, _)| known != task) {
            *kept = Some((task.clone(), self.gold_actions(task)?));
        }
        let actions = kept.as_ref().map(|(_, actions)| actions.as_slice());
        Ok(actions.unwrap_or_default().get(turn).cloned())
    }
}

/// Phase of an episode.
enum State {
    New,
    Open(Session),
    /// The class ended the episode, with this outcome.
    Done(Session),
    Closed,
}

/// One episode.
pub(crate) struct PythonEnv {
    shared: Arc<Shared>,
    task: Value,
    /// Messages of the recipe before those of the class.
    preamble: Vec<Message>,
    state: State,
    /// Messages of the last observation: one for each tool call, with its id.
    last: Vec<Message>,
    /// New context of the model, if the last turn replaced the earlier one.
    renewed: Option<Vec<Message>>,
    counts: Counts,
    /// The episode after the last turn, from which another worker can continue.
    saved: Option<String>,
    /// Value of `state()` after the last turn.
    end_state: Option<Value>,
}

#[derive(Deserialize)]
struct OpenedEpisode {
    /// System message, prompt, and the text of `start`.
    #[serde(deserialize_with = "conversation::deserialize")]
    messages: Vec<Message>,
    /// Tools of only this episode.
    #[serde(default)]
    tools: Vec<ToolSpec>,
    /// Hash of `state()`.
    state: Option<u64>,
    /// The episode as text, of a class with `snapshot` and `restore`.
    snapshot: Option<String>,
}

/// Answer of a worker to a turn.
#[derive(Deserialize)]
struct TurnReply {
    /// Results of calls in order, then an error of the notation. One message of `step` in a turn without
    /// calls.
    results: Vec<ResultMessage>,
    /// Sum of the rewards of the turn's calls.
    reward: f64,
    /// The class ended the episode.
    done: bool,
    /// Score, present exactly if `done`.
    outcome: Option<Value>,
    /// Hash of `state()` after the turn.
    state: Option<u64>,
    /// The episode after the turn as text.
    snapshot: Option<String>,
    /// Messages of a new context.
    #[serde(default)]
    renewed: Option<Vec<Message>>,
}

#[derive(Deserialize)]
struct ResultMessage {
    message: Message,
    /// The model made an error.
    error: bool,
}

/// Maximum number of entries of a score in addition to the reward, and maximum bytes of each name. Every
/// trace contains them, and they are metric names.
const MAX_PARTS: usize = 64;
const MAX_PART_BYTES: usize = 100;

/// A score of a worker.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum WorkerScore {
    /// No score, with the reason.
    Unscored { unscored: String },
    /// A score with its parts. Whether they are finite is checked again on this side.
    Score {
        value: f64,
        #[serde(default)]
        parts: BTreeMap<String, f64>,
    },
}

impl WorkerScore {
    /// The score, checked on this side.
    pub(crate) fn into_result(self) -> Result<Score, Unscored> {
        match self {
            Self::Unscored { unscored } => Err(Unscored::new(unscored)),
            Self::Score { parts, .. } if parts.len() > MAX_PARTS => Err(Unscored::new(format!(
                "{} entries; allowed: {MAX_PARTS}",
                parts.len()
            ))),
            Self::Score { parts, .. } if parts.keys().any(|k| k.len() > MAX_PART_BYTES) => {
                Err(Unscored::new(format!(
                    "the name of an entry is longer than {MAX_PART_BYTES} bytes"
                )))
            }
            Self::Score { value, parts } => Score::with_parts(value, parts),
        }
    }
}

impl PythonEnv {
    /// An episode that has not started.
    fn new(shared: &Arc<Shared>, task: Value, preamble: Vec<Message>) -> Self {
        Self {
            shared: Arc::clone(shared),
            task,
            preamble,
            state: State::New,
            last: Vec::new(),
            renewed: None,
            counts: Counts::default(),
            saved: None,
            end_state: None,
        }
    }

    /// A separate episode that continues from the snapshot of this one. `None` without a snapshot.
    pub(crate) async fn twin(&self) -> Result<Option<Self>, EnvError> {
        let Some(saved) = self.saved.clone() else {
            return Ok(None);
        };
        let mut twin = Self::new(&self.shared, self.task.clone(), self.preamble.clone());
        twin.counts = self.counts;
        twin.resume(saved).await?;
        Ok(Some(twin))
    }

    /// Goes on with a saved episode of the same task, in place of a reset.
    async fn resume(&mut self, saved: String) -> Result<(), EnvError> {
        let (workers, target) = (&self.shared.workers, self.shared.target);
        let opened = workers.open(target, self.task.clone(), Some(saved)).await;
        self.state = State::Open(opened.map_err(CallError::into_env)?.0);
        Ok(())
    }

    /// Begins the episode in a worker.
    async fn open(&mut self) -> Result<ResetResult, EnvError> {
        if !matches!(self.state, State::New) {
            return Err(EnvError::Order("reset twice: an environment is used once"));
        }
        let shared = &self.shared;
        let opened = shared
            .workers
            .open(shared.target, self.task.clone(), None)
            .await;
        let (session, answer) = opened.map_err(CallError::into_env)?;
        self.state = State::Open(session);
        let opened: OpenedEpisode = parsed(answer)?;
        self.saved = opened.snapshot;
        Ok(ResetResult {
            messages: [self.preamble.clone(), opened.messages].concat(),
            tools: [shared.info.tools.clone(), opened.tools].concat(),
            calls: CallNotation::Template,
            state_hash: opened.state,
        })
    }

    /// Calls the session. If its worker has ended, an episode with a snapshot continues in another worker,
    /// since another session may have ended it. That happens once in a call: an episode that ends its workers
    /// itself must not end all of them.
    async fn ask(&mut self, request: Value) -> Result<Value, EnvError> {
        let order = || EnvError::Order("used before reset or after the end");
        let (State::Open(session) | State::Done(session)) = &self.state else {
            return Err(order());
        };
        let answer = session.call(request.clone()).await;
        let (Err(CallError::Lost { .. }), State::Open(_)) = (&answer, &self.state) else {
            return answer.map_err(CallError::into_env);
        };
        let Some(saved) = self.saved.take() else {
            return answer.map_err(CallError::into_env);
        };
        self.resume(saved).await?;
        let State::Open(session) = &self.state else {
            return Err(order());
        };
        session.call(request).await.map_err(CallError::into_env)
    }

    /// Sends a turn to the worker, and converts its answer.
    async fn act(&mut self, action: Action) -> Result<StepResult, EnvError> {
        if !matches!(self.state, State::Open(_)) {
            return Err(EnvError::Order("step before reset or after the end"));
        }
        let said = action.turn();
        let turn = json!({
            "text": said.answer,
            "reasoning": said.reasoning,
            "calls": action.tool_calls,
            "call_error": action.call_error.as_ref().map(ToString::to_string),
        });
        let request = json!({"op": "step", "turn": turn});
        let mut stepped: TurnReply = parsed(self.ask(request).await?)?;
        self.saved = stepped.snapshot.take();
        let renewed = stepped.renewed.take();
        self.renewed = renewed.map(|messages| [self.preamble.clone(), messages].concat());
        if !is_reward(stepped.reward) {
            return Err(EnvError::Worker(
                "the reward of a turn is beyond 1e30".into(),
            ));
        }
        self.count(&action, &stepped);
        if stepped.done {
            if let State::Open(session) = std::mem::replace(&mut self.state, State::Closed) {
                self.state = State::Done(session);
            }
            let outcome = self.outcome(stepped.outcome.unwrap_or_default())?;
            return Ok(StepResult {
                observation: None,
                process_reward: stepped.reward,
                done: true,
                outcome: Some(outcome),
                state_hash: None,
            });
        }
        let mut observation = Observation {
            content: sinew_types::Content::new(),
            is_error: false,
        };
        self.last.clear();
        for result in stepped.results {
            if !self.last.is_empty() {
                observation.content.push_text("\n");
            }
            observation
                .content
                .push_text(&result.message.content.text());
            observation.is_error |= result.error;
            self.last.push(result.message);
        }
        Ok(StepResult {
            observation: Some(observation),
            process_reward: stepped.reward,
            done: false,
            outcome: None,
            state_hash: stepped.state,
        })
    }

    /// Adds a turn to the counts.
    fn count(&mut self, action: &Action, stepped: &TurnReply) {
        let failed = |r: &&ResultMessage| r.error && r.message.tool_call_id.is_some();
        let errors = stepped.results.iter().filter(failed).count() as u32;
        self.counts.turn(action, errors);
    }

    /// Outcome of a score, with the metrics of tools.
    fn outcome(&mut self, mut score: Value) -> Result<Outcome, EnvError> {
        let state = score.get_mut("state").map(Value::take);
        self.end_state = state.filter(|state| !state.is_null());
        let scored: WorkerScore = parsed(score)?;
        let scored = scored.into_result();
        let mut outcome = scored.map_or_else(Unscored::into_outcome, Score::into_outcome);
        if self.shared.info.has_tools() {
            self.counts.add_to(&mut outcome);
        }
        if !outcome.unscored {
            let success = f64::from(u8::from(outcome.success));
            outcome
                .metrics
                .entry("success".to_owned())
                .or_insert(success);
        }
        Ok(outcome)
    }
}

impl Env for PythonEnv {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        Box::pin(self.open())
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        Box::pin(self.act(action))
    }

    /// One message for each tool call of the last turn. `observation` is the last one.
    fn format_observation(&self, _observation: &Observation) -> Vec<Message> {
        self.last.clone()
    }

    fn renewed(&self) -> Option<Vec<Message>> {
        self.renewed.clone()
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        Box::pin(async move {
            let answer = self.ask(json!({"op": "score"})).await?;
            self.outcome(answer)
        })
    }

    fn end_state(&self) -> Option<&Value> {
        self.end_state.as_ref()
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async move {
            match std::mem::replace(&mut self.state, State::Closed) {
                State::Open(session) | State::Done(session) => {
                    session.close().await.map_err(CallError::into_env)?;
                    Ok(())
                }
                State::New | State::Closed => Ok(()),
            }
        })
    }
}
