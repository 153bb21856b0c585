//! The `Env` trait, the interface of environments.

use crate::reward::{GroupReward, Reward};
use futures::future::BoxFuture;
use serde_json::{Value, json};
use sinew_sandbox::ExecResult;
use sinew_types::{
    Component, Content, FailureKind, Gives, InputPresence, Message, Outcome, Role, Task, ToolCall,
    ToolSpec,
};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

/// An error of the system. Errors of the model are observations.
#[derive(Debug, thiserror::Error)]
pub enum EnvError {
    /// The sandbox failed.
    #[error("sandbox: {0}")]
    Sandbox(String),
    /// The process that runs the environment's code failed: its code raised an error, or it ended or hung.
    #[error("{0}")]
    Worker(String),
    /// The task is invalid or belongs to another environment.
    #[error("task {task}: {message}")]
    Task {
        /// Id of the task.
        task: String,
        /// Reason in words.
        message: String,
    },
    /// A key of the recipe's `[env]` section is invalid.
    #[error("env.{field} = {value}: {allowed}")]
    Config {
        /// Name of the key, without `env.`.
        field: &'static str,
        /// Value as it is printed.
        value: String,
        /// Allowed values in words.
        allowed: String,
    },
    /// The methods were called in the wrong order.
    #[error("environment used out of order: {0}")]
    Order(&'static str),
}

impl EnvError {
    /// Kind of failure for the episode's record.
    pub fn failure_kind(&self) -> FailureKind {
        match self {
            Self::Sandbox(_) => FailureKind::Sandbox,
            Self::Worker(_) | Self::Task { .. } | Self::Config { .. } | Self::Order(_) => {
                FailureKind::Environment
            }
        }
    }
}

/// Future of an environment method.
pub type EnvFuture<'a, T> = BoxFuture<'a, Result<T, EnvError>>;

/// Start of an episode.
#[derive(Clone, Debug, PartialEq)]
pub struct ResetResult {
    /// System prompt, worked examples and the task.
    pub messages: Vec<Message>,
    /// Tools to render with the chat template. Empty if the prompt describes them.
    pub tools: Vec<ToolSpec>,
    /// Notation of tool calls in the model's text.
    pub calls: CallNotation,
    /// Hash of the initial state, to find equal states across episodes.
    pub state_hash: Option<u64>,
}

/// Notation of tool calls in the model's text. The renderer parses them, and the environment receives
/// [`Action::tool_calls`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CallNotation {
    /// Notation of the model's chat template, for the tools of [`ResetResult::tools`].
    #[default]
    Template,
    /// Notation of the environment's own prompt, for models without tool training: text between `<tag>` and
    /// `</tag>` calls `tool` with the argument `code`.
    Tag {
        /// Name between `<` and `>`, without them.
        tag: String,
        /// Name of the tool that is called.
        tool: String,
    },
}

/// A turn of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Action {
    /// Text of the turn without control tokens and without the thoughts in the notation of the model's
    /// template, including calls, unless messages of the model name their recipients. Environments read
    /// [`Action::answer`].
    pub text: String,
    /// Reasoning in the notation of the model's template; `None` if the turn has none.
    pub reasoning: Option<String>,
    /// Parsed calls in order, up to the first invalid one.
    pub tool_calls: Vec<ToolCall>,
    /// Error of the first invalid call.
    pub call_error: Option<CallError>,
    /// True if a limit cut the turn.
    pub truncated: bool,
}

impl Action {
    /// Creates a complete turn of text without calls.
    pub fn say(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            reasoning: None,
            tool_calls: Vec::new(),
            call_error: None,
            truncated: false,
        }
    }

    /// Separates answer, reasoning and calls of the turn, also if the reasoning is in tags that the template
    /// does not have.
    pub fn turn(&self) -> sinew_answer::Turn {
        sinew_answer::Turn::of_parts(self.reasoning.as_deref(), &self.text)
    }

    /// Returns the answer: the text without reasoning. Empty if the reasoning is unfinished.
    pub fn answer(&self) -> String {
        self.turn().answer
    }

    /// Returns the turn as rewards receive it, with separate answer, reasoning and calls.
    pub fn parted(&self) -> Message {
        let turn = self.turn();
        let mut said = self.message();
        said.content = turn.answer.into();
        said.reasoning = turn.reasoning;
        said
    }

    /// The turn as a message of the model.
    pub fn message(&self) -> Message {
        let mut said = Message::new(Role::Assistant, self.text.clone());
        said.reasoning.clone_from(&self.reasoning);
        said.tool_calls.clone_from(&self.tool_calls);
        said
    }
}

/// Error of the model in its tool calls.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The start of a call without its end.
    #[error("a call is opened and not closed")]
    Unclosed,
    /// The end of a call without its start.
    #[error("a call is closed and was not opened")]
    Unopened,
    /// A call without content.
    #[error("a call is empty")]
    Empty,
    /// Text or another call after a call.
    #[error("text follows a call instead of the turn's end")]
    Trailing,
    /// A call with invalid content.
    #[error("{0}")]
    Invalid(String),
    /// A call that failed, or text where a call is expected. The model reads the reason.
    #[error("{0}")]
    Failed(String),
}

/// Response of the environment to a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// Content of limited length.
    pub content: Content,
    /// True if the action was malformed or failed.
    pub is_error: bool,
}

/// Result of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    /// Observation for the model. `None` when the episode is done.
    pub observation: Option<Observation>,
    /// Reward of this turn.
    pub process_reward: f64,
    /// True when the task has ended.
    pub done: bool,
    /// Score of the episode, present exactly if `done`.
    pub outcome: Option<Outcome>,
    /// Hash of the state after the step.
    pub state_hash: Option<u64>,
}

/// Environment of one episode. Each observation has a hash of the state ([`ResetResult::state_hash`],
/// [`StepResult::state_hash`]), so that turns in equal states can be compared across episodes.
pub trait Env: Send {
    /// Starts the episode. Called once, before all other methods.
    fn reset(&mut self) -> EnvFuture<'_, ResetResult>;

    /// Applies a turn of the model. Not called after `done`.
    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult>;

    /// Converts an observation to chat messages.
    fn format_observation(&self, observation: &Observation) -> Vec<Message>;

    /// New context of the model, if the last step replaced the earlier one: system message and observation.
    /// `None`: the observation follows the present context.
    fn renewed(&self) -> Option<Vec<Message>> {
        None
    }

    /// Place in which an agent program can work on the task, between `reset` and the `step` with its answer.
    /// `None`: programs have sandboxes of their own. An observation of that `step` is the program's next
    /// task.
    fn host(&mut self) -> Option<&mut dyn ProgramHost> {
        None
    }

    /// Receives all messages of an episode that an external program played, between `reset` and the `step`
    /// with its answer. Rewards read them; an environment scores only the answer.
    fn played(&mut self, messages: Vec<Message>) {
        drop(messages);
    }

    /// Score of an episode that a limit ended before `done`.
    fn score(&mut self) -> EnvFuture<'_, Outcome>;

    /// State of the environment at the end, for rewards of the recipe; requested after the outcome. `None`:
    /// the environment has no state to show.
    fn end_state(&self) -> Option<&serde_json::Value> {
        None
    }

    /// Releases all resources. Called once, after all other methods, also after errors.
    fn close(&mut self) -> EnvFuture<'_, ()>;
}

/// An agent program that runs in the world of an episode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostedProgram {
    /// Program and arguments, with paths of that world.
    pub argv: Vec<String>,
    /// Environment variables, after those of the world.
    pub env: Vec<(String, String)>,
    /// Wall time after which it is killed; that of the task may be shorter.
    pub deadline: Duration,
}

/// An MCP server of a task. An agent program starts or reaches it in the world of its episode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum McpServer {
    /// A program that speaks over its standard input and output.
    Stdio {
        /// Program.
        command: String,
        /// Arguments.
        args: Vec<String>,
    },
    /// An address with server-sent events.
    Sse {
        /// Address.
        url: String,
    },
    /// An address with streamable HTTP.
    Http {
        /// Address.
        url: String,
    },
}

impl McpServer {
    /// All transports.
    pub const TRANSPORTS: &'static [&'static str] = &["stdio", "sse", "http"];

    /// The transport, one of [`McpServer::TRANSPORTS`].
    pub fn transport(&self) -> &'static str {
        match self {
            Self::Stdio { .. } => "stdio",
            Self::Sse { .. } => "sse",
            Self::Http { .. } => "http",
        }
    }

    /// The server as most clients write it below `mcpServers`.
    pub fn to_json(&self) -> Value {
        let transport = self.transport();
        match self {
            Self::Stdio { command, args } => {
                json!({ "type": transport, "command": command, "args": args })
            }
            Self::Sse { url } | Self::Http { url } => json!({ "type": transport, "url": url }),
        }
    }
}

/// World of an episode in which agent programs can run.
pub trait ProgramHost: Send {
    /// MCP servers of the task by name. The program starts or reaches them by itself.
    fn mcp_servers(&self) -> BTreeMap<String, McpServer> {
        BTreeMap::new()
    }

    /// Listens on `127.0.0.1:port` of the world; connections are accepted outside.
    fn listen_inside(&mut self, port: u16) -> EnvFuture<'_, TcpListener>;

    /// Runs a program to its end.
    fn run(&mut self, program: HostedProgram) -> EnvFuture<'_, ExecResult>;
}

/// Properties of the environments of a factory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether any number of environments can exist at the same time.
    pub concurrent: bool,
    /// Whether equal actions on equal tasks give equal observations, rewards and states.
    pub deterministic: bool,
    /// Data of the episodes that algorithms can read, as far as it is known before one runs. If
    /// [`Gives::states`] is set, equal values of [`StepResult::state_hash`] mean equal states.
    pub gives: Gives,
    /// Maximum number of environments at the same time, 1 or more, which limits the running episodes. `None`:
    /// no limit.
    pub places: Option<usize>,
}

impl Capabilities {
    /// True if every turn that does not end an episode has a hash of its state.
    pub fn states(&self) -> bool {
        self.gives.states == InputPresence::Yes
    }
}

/// Factory of environments.
pub trait EnvFactory: Send + Sync {
    /// Name in recipes.
    fn name(&self) -> &str;

    /// Version of the environment for traces. It changes if equal actions may lead to other observations or
    /// rewards.
    fn version(&self) -> &str {
        "1"
    }

    /// Components of a mixture's environments by name, for traces. Empty for a single environment.
    fn members(&self) -> BTreeMap<String, Component> {
        BTreeMap::new()
    }

    /// Versions of the tools by name, for traces.
    fn tools(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    /// Creates an environment for one episode of `task`. It must be fast: slow work belongs in
    /// [`Env::reset`].
    ///
    /// # Errors
    /// [`EnvError::Task`] if the task belongs to another environment.
    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError>;

    /// Properties of the environments. Default: none.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Whether environments of a task have a place for agent programs ([`Env::host`]).
    fn hosts_programs(&self, task: &Task) -> bool {
        let _ = task;
        false
    }

    /// Reward of the whole group of a task, which completes outcomes that wait for it
    /// ([`waits_for_group`](crate::waits_for_group)). `None`: outcomes are complete when episodes end.
    fn group_reward(&self, task: &Task) -> Option<Arc<dyn GroupReward>> {
        let _ = task;
        None
    }

    /// Reward that scores an episode of a task from its sample alone, so that a stored episode can be scored
    /// again. `None`: scoring needs a running environment.
    fn reward(&self, task: &Task) -> Option<Arc<dyn Reward>> {
        let _ = task;
        None
    }

    /// Action of the gold policy in `turn` (from 0), which proves that the task is solvable. `None` after its
    /// last action, and for turn 0 if there is no gold policy.
    ///
    /// # Errors
    /// [`EnvError::Task`] if the task belongs to another environment.
    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError>;
}

/// Validates tasks without a model. The gold policy must succeed on every task, and the environments must
/// have their declared [`Capabilities`]. If there is no gold policy, an episode must start. Returns the total
/// number of turns.
///
/// # Errors
/// The first invalid task, with the reason.
pub async fn validate(factory: &dyn EnvFactory, tasks: &[Task]) -> Result<usize, EnvError> {
    let capabilities = factory.capabilities();
    let mut all = 0;
    for task in tasks {
        let broken = |message: String| EnvError::Task {
            task: task.id.to_string(),
            message,
        };
        if factory.gold(task, 0)?.is_none() {
            start(factory, task).await?;
            continue;
        }
        let played = gold_states(factory, task).await?;
        let ((outcome, turns), states) = &played;
        if !outcome.success || !outcome.reward.is_finite() {
            let reward = outcome.reward;
            return Err(broken(format!(
                "its solution fails after {turns} turns with reward {reward}"
            )));
        }
        // The last turn leaves no state to act on.
        if capabilities.states() && states.iter().take(*turns).any(Option::is_none) {
            return Err(broken("a state has no hash, though it should".into()));
        }
        if capabilities.deterministic {
            let again = gold_states(factory, task).await?;
            if again != played {
                let turn = again.1.iter().zip(states).position(|(a, b)| a != b);
                let place =
                    turn.map_or("in the score".into(), |t| format!("before turn {}", t + 1));
                return Err(broken(format!("the same actions led elsewhere {place}")));
            }
        }
        all += *turns;
    }
    Ok(all)
}

/// Starts an episode and ends it at once.
async fn start(factory: &dyn EnvFactory, task: &Task) -> Result<(), EnvError> {
    let mut env = factory.create(task)?;
    let started = env.reset().await;
    env.close().await?;
    started.map(|_| ())
}

/// Runs the gold policy in a new environment of `task`. Returns the score and the number of turns.
///
/// # Errors
/// Any error of the environment.
pub async fn gold_run(factory: &dyn EnvFactory, task: &Task) -> Result<(Outcome, usize), EnvError> {
    let (played, _) = gold_states(factory, task).await?;
    Ok(played)
}

/// Hash of a state, if the environment has states.
type State = Option<u64>;

/// Plays like [`gold_run`], and also returns the states before each turn.
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

/// Runs the gold policy in `env`. Appends the states to `states`.
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
