//! The `Env` port.

use futures::future::BoxFuture;
use sinew_types::{Content, FailureKind, Message, Outcome, Task, ToolCall, ToolSpec};
use std::collections::BTreeMap;

/// Why an environment could not go on. Never the model's doing: that is an observation.
#[derive(Debug, thiserror::Error)]
pub enum EnvError {
    #[error("sandbox: {0}")]
    Sandbox(String),
    #[error("task {task}: {message}")]
    Task { task: String, message: String },
    #[error("env.{field} = {value}: {allowed}")]
    Config {
        field: &'static str,
        value: String,
        allowed: String,
    },
    #[error("environment used out of order: {0}")]
    Order(&'static str),
}

impl EnvError {
    /// The part of the system that the episode died of.
    pub fn failure_kind(&self) -> FailureKind {
        match self {
            Self::Sandbox(_) => FailureKind::Sandbox,
            Self::Task { .. } | Self::Config { .. } | Self::Order(_) => FailureKind::Environment,
        }
    }
}

/// What an environment's methods return.
pub type EnvFuture<'a, T> = BoxFuture<'a, Result<T, EnvError>>;

/// How an episode starts.
#[derive(Clone, Debug, PartialEq)]
pub struct ResetResult {
    /// System prompt, worked examples and the task itself.
    pub messages: Vec<Message>,
    /// Tools to render through the chat template, if the environment wants that.
    pub tools: Vec<ToolSpec>,
    /// How the turns write calls.
    pub calls: CallNotation,
    /// Hash of the first state, so that equal states can be found across episodes.
    pub state_hash: Option<u64>,
}

/// How the turns of an environment's episodes write tool calls. Reading them is not the environment's part:
/// it receives [`Action::tool_calls`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CallNotation {
    /// As the model's chat template does, for the tools of [`ResetResult::tools`].
    #[default]
    Template,
    /// As the environment's own prompt teaches it: text between `<tag>` and `</tag>` is a call of `tool` with the
    /// argument `code`. For models that were not trained on tool calls.
    Tag { tag: String, tool: String },
}

/// What the model did in a turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Action {
    /// The turn's text without control tokens, calls included.
    pub text: String,
    /// The calls in it, in order, up to the first that cannot be read.
    pub tool_calls: Vec<ToolCall>,
    /// What is wrong with the calls.
    pub call_error: Option<CallError>,
    /// A limit cut the turn before the model ended it.
    pub truncated: bool,
}

impl Action {
    /// A whole turn of text without calls.
    pub fn say(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            tool_calls: Vec::new(),
            call_error: None,
            truncated: false,
        }
    }
}

/// What is wrong with the calls of a turn.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    #[error("a call is opened and not closed")]
    Unclosed,
    #[error("a call is closed and was not opened")]
    Unopened,
    #[error("a call is empty")]
    Empty,
    #[error("text follows a call instead of the turn's end")]
    Trailing,
    #[error("{0}")]
    Invalid(String),
}

/// What came back, before it is put into messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// What the world said, bounded.
    pub content: Content,
    /// The action was not understood or went wrong.
    pub is_error: bool,
}

/// What a step led to.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    /// What the model gets to see; `None` once the episode is done.
    pub observation: Option<Observation>,
    /// Reward attached to this turn.
    pub process_reward: f64,
    /// The task ended: solved, failed or given up.
    pub done: bool,
    /// The score; present exactly if `done`.
    pub outcome: Option<Outcome>,
    /// Hash of the state after the step.
    pub state_hash: Option<u64>,
}

/// The world of one episode. What it is in is told with each observation, as a hash
/// ([`ResetResult::state_hash`], [`StepResult::state_hash`]): turns that acted on equal states are
/// found across episodes, and a state cannot be asked for that no turn acts on.
pub trait Env: Send {
    /// Builds the world. Called once, first.
    fn reset(&mut self) -> EnvFuture<'_, ResetResult>;

    /// Lets the world act on a turn. Not called after `done`.
    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult>;

    /// The messages that show an observation to the model.
    fn format_observation(&self, observation: &Observation) -> Vec<Message>;

    /// The score of an episode that a limit ended before the task did.
    fn score(&mut self) -> EnvFuture<'_, Outcome>;

    /// Frees what the world holds. Called once, last, whatever happened before.
    fn close(&mut self) -> EnvFuture<'_, ()>;
}

/// What an environment can do beyond being played once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Any number of them may live at once.
    pub concurrent: bool,
    /// Equal actions on equal tasks give equal observations, rewards and states.
    pub deterministic: bool,
    /// [`StepResult::state_hash`] tells equal states apart from others: step-level advantages
    /// can be taken among them.
    pub states: bool,
}

/// Makes the environment of a task.
pub trait EnvFactory: Send + Sync {
    /// Name by which recipes select it.
    fn name(&self) -> &str;

    /// Changes when equal actions may lead to other observations or rewards. Written into every trace.
    fn version(&self) -> &str {
        "1"
    }

    /// Versions of the tools that its environments call, by name. Written into every trace.
    fn tools(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    /// A fresh environment for one episode of `task`. Cheap; what costs time happens in
    /// [`Env::reset`].
    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError>;

    /// What its environments can do; nothing unless it says so.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// What a perfect policy does in `turn` (from 0), to prove that the task can be solved;
    /// `None` when it has nothing more to do. An error for tasks of other environments.
    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError>;
}

/// Proves a taskset without a model: the gold policy must get a success on each of the tasks,
/// and an environment that says it is deterministic or has states must keep its word. Gives the
/// number of turns.
///
/// # Errors
/// The first task that does not keep to it, with the reason.
pub async fn validate(factory: &dyn EnvFactory, tasks: &[Task]) -> Result<usize, EnvError> {
    let capabilities = factory.capabilities();
    let mut all = 0;
    for task in tasks {
        let broken = |message: String| EnvError::Task {
            task: task.id.to_string(),
            message,
        };
        let played = gold_states(factory, task).await?;
        let ((outcome, turns), states) = &played;
        if !outcome.success || !outcome.reward.is_finite() {
            let reward = outcome.reward;
            return Err(broken(format!(
                "its solution fails after {turns} turns with reward {reward}"
            )));
        }
        // The last turn ends the task: there is no state after it to act on.
        if capabilities.states && states.iter().take(*turns).any(Option::is_none) {
            return Err(broken("a state has no hash, though it should".into()));
        }
        if capabilities.deterministic && gold_states(factory, task).await? != played {
            return Err(broken("the same actions led elsewhere".into()));
        }
        all += *turns;
    }
    Ok(all)
}

/// Plays the gold policy through a fresh environment of `task`: every task must give the full
/// reward. Tells the score, and the turns it took.
pub async fn gold_run(factory: &dyn EnvFactory, task: &Task) -> Result<(Outcome, usize), EnvError> {
    let (played, _) = gold_states(factory, task).await?;
    Ok(played)
}

/// The hash of a state, if it has one.
type State = Option<u64>;

/// As [`gold_run`], with the states that it acted on.
async fn gold_states(
    factory: &dyn EnvFactory,
    task: &Task,
) -> Result<((Outcome, usize), Vec<State>), EnvError> {
    let mut env = factory.create(task)?;
    let mut states = Vec::new();
    let played = play_gold(factory, task, env.as_mut(), &mut states).await;
    let closed = env.close().await;
    let result = played?;
    closed.map(|()| (result, states))
}

async fn play_gold(
    factory: &dyn EnvFactory,
    task: &Task,
    env: &mut dyn Env,
    states: &mut Vec<State>,
) -> Result<(Outcome, usize), EnvError> {
    states.push(env.reset().await?.state_hash);
    let mut turn = 0;
    while let Some(action) = factory.gold(task, turn)? {
        turn += 1;
        let step = env.step(action).await?;
        if let Some(outcome) = step.outcome {
            return Ok((outcome, turn));
        }
        states.push(step.state_hash);
    }
    Ok((env.score().await?, turn))
}
