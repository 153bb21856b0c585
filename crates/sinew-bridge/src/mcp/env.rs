//! Episodes with the tools of MCP servers.
//!
//! Each episode has a separate session with every server, so that servers with state are safe. A turn without
//! calls ends the episode; the rewards of the recipe score it. Errors of tools and calls that take too long
//! are observations. A server that ends or breaks the protocol fails the episode.

use super::client::{CallFault, Session};
use super::keys::{GIVES, Mcp};
use super::server::McpTarget;
use crate::counts::Counts;
use crate::error::McpError;
use crate::http::{gone, worker};
use crate::runtime::{OwnRuntime, block_on};
use crate::turn::Turn;
use futures::future::try_join_all;
use serde_json::json;
use sinew_env::{
    Action, CallError, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture,
    Observation, ResetResult, Sandboxes, StepResult,
};
use sinew_sandbox::SandboxSpec;
use sinew_types::{Message, Outcome, Role, Task, ToolCall, ToolSpec};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Factory of episodes with the tools of some servers.
#[derive(Clone)]
pub struct McpEnvFactory {
    shared: Arc<Shared>,
}

/// Parts that the environments of a factory share.
struct Shared {
    /// Servers in the order of the recipe.
    servers: Vec<McpTarget>,
    /// Tools of all servers, in their order.
    tools: Vec<ToolSpec>,
    /// Index of the server of each tool.
    owners: BTreeMap<String, usize>,
    /// Hash of the tools.
    version: String,
    /// One permit for each episode at once.
    places: Arc<Semaphore>,
    /// Number of permits.
    sessions: usize,
    /// Deadline of one call.
    timeout: Duration,
    /// Deadline of the start of a session.
    startup: Duration,
    handle: Handle,
    _runtime: OwnRuntime,
}

impl std::fmt::Debug for McpEnvFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = self.shared.servers.iter().map(McpTarget::shown);
        f.debug_struct("McpEnvFactory")
            .field("servers", &names.collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

impl McpEnvFactory {
    /// Finds the servers, and asks each for its tools in a first session. It blocks the thread.
    ///
    /// # Errors
    /// If a server cannot be started or reached, two tools have one name, or the sandboxes are of another
    /// level than `process`.
    pub fn start(keys: &Mcp, sandboxes: Option<Sandboxes>) -> Result<Self, EnvError> {
        let config = |value: String, allowed: String| EnvError::Config {
            field: "servers",
            value,
            allowed,
        };
        let level = sandboxes.as_ref().map_or("process", |s| s.provider.level());
        let commands = keys.servers.iter().any(|s| !s.command.is_empty());
        if commands && level != "process" {
            return Err(EnvError::Config {
                field: "type",
                value: "\"mcp\"".into(),
                allowed: format!("commands run at sandbox.level = \"process\", not {level:?}"),
            });
        }
        let spec = sandboxes.map_or_else(SandboxSpec::default, |s| s.spec);
        let found = keys.servers.iter().enumerate().map(|(at, server)| {
            let found = McpTarget::find(server, &spec, keys.sessions);
            found.map_err(|e| config(format!("server {}", at + 1), e.to_string()))
        });
        let servers = found.collect::<Result<Vec<_>, _>>()?;
        let runtime = OwnRuntime::start().map_err(worker)?;
        let handle = runtime.handle().ok_or_else(gone)?;
        let startup = Duration::from_secs_f64(keys.startup_timeout_s);
        let asked = block_on(&handle, ask(servers.clone(), startup)).ok_or_else(gone)?;
        let (mut tools, mut owners) = (Vec::new(), BTreeMap::new());
        for (at, specs) in asked.map_err(worker)?.into_iter().enumerate() {
            for tool in specs {
                if owners.insert(tool.name.clone(), at).is_some() {
                    let why = "two tools of the servers have this name".into();
                    return Err(config(format!("{:?}", tool.name), why));
                }
                tools.push(tool);
            }
        }
        let hash = blake3::hash(json!(tools).to_string().as_bytes());
        Ok(Self {
            shared: Arc::new(Shared {
                servers,
                version: hash.to_hex()[..12].to_owned(),
                tools,
                owners,
                places: Arc::new(Semaphore::new(keys.sessions)),
                sessions: keys.sessions,
                timeout: Duration::from_secs_f64(keys.timeout_s),
                startup,
                handle,
                _runtime: runtime,
            }),
        })
    }
}

/// Tools of all servers, by a session of each.
async fn ask(servers: Vec<McpTarget>, limit: Duration) -> Result<Vec<Vec<ToolSpec>>, McpError> {
    let each = servers.iter().map(|server| async move {
        let session = within(limit, Session::open(server)).await?;
        let tools = within(limit, session.tools()).await;
        session.close().await;
        tools
    });
    try_join_all(each).await
}

/// The result of some work, or that it took too long.
async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, McpError>>,
) -> Result<T, McpError> {
    let done = tokio::time::timeout(limit, work).await;
    done.unwrap_or_else(|_| Err(McpError::Late(limit.as_secs_f64())))
}

impl EnvFactory for McpEnvFactory {
    fn name(&self) -> &str {
        "mcp"
    }

    fn version(&self) -> &str {
        &self.shared.version
    }

    fn tools(&self) -> BTreeMap<String, String> {
        let names = self.shared.tools.iter().map(|t| t.name.clone());
        names
            .map(|name| (name, self.shared.version.clone()))
            .collect()
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        let mut messages = task.preamble.clone();
        messages.push(Message::new(Role::User, task.prompt.clone()));
        Ok(Box::new(McpEnv {
            shared: Arc::clone(&self.shared),
            messages,
            sessions: None,
            last: Vec::new(),
            counts: Counts::default(),
        }))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: self.shared.sessions > 1,
            places: Some(self.shared.sessions),
            gives: GIVES,
            ..Capabilities::default()
        }
    }

    fn gold(&self, _task: &Task, _turn: usize) -> Result<Option<Action>, EnvError> {
        Ok(None)
    }
}

/// Sessions of an episode, one with each server, and its place.
struct Sessions {
    all: Vec<Session>,
    _permit: OwnedSemaphorePermit,
}

/// One episode.
struct McpEnv {
    shared: Arc<Shared>,
    /// The prompt, until it is read.
    messages: Vec<Message>,
    sessions: Option<Sessions>,
    /// Messages of the last observation: one for each call, with its id.
    last: Vec<Message>,
    counts: Counts,
}

/// Opens a session with each server, once there is a place.
async fn sessions(shared: Arc<Shared>) -> Result<Sessions, McpError> {
    let free = Arc::clone(&shared.places).acquire_owned();
    let Ok(Ok(permit)) = tokio::time::timeout(shared.startup, free).await else {
        return Err(McpError::InUse(shared.sessions));
    };
    let opened = try_join_all(shared.servers.iter().map(Session::open));
    Ok(Sessions {
        all: within(shared.startup, opened).await?,
        _permit: permit,
    })
}

/// Answers the calls of a turn in order. It returns the sessions, also if the episode fails.
async fn answer(
    shared: Arc<Shared>,
    mut sessions: Sessions,
    calls: Vec<ToolCall>,
) -> (Sessions, Result<Turn, McpError>) {
    let mut turn = Turn::default();
    for call in &calls {
        let Some(owner) = shared.owners.get(&call.name) else {
            let known: Vec<_> = shared.tools.iter().map(|t| t.name.as_str()).collect();
            let why = format!(
                "there is no tool {}; the tools are: {}",
                call.name,
                known.join(", ")
            );
            turn.called(call, Err(CallError::Failed(why)));
            continue;
        };
        match sessions.all[*owner].call(call, shared.timeout).await {
            Ok(text) => turn.called(call, Ok(text)),
            Err(CallFault::Tool(text)) => turn.called(call, Err(CallError::Failed(text))),
            Err(CallFault::Server(why)) => return (sessions, Err(why)),
        }
    }
    (sessions, Ok(turn))
}

impl McpEnv {
    /// Opens the sessions of the episode.
    async fn open(&mut self) -> Result<ResetResult, EnvError> {
        if self.sessions.is_some() || self.messages.is_empty() {
            return Err(EnvError::Order("reset twice: an environment is used once"));
        }
        let messages = std::mem::take(&mut self.messages);
        let opened = sessions(Arc::clone(&self.shared));
        let opened = self.shared.handle.spawn(opened).await;
        let opened = opened.map_err(worker)?.map_err(worker)?;
        self.sessions = Some(opened);
        Ok(ResetResult {
            messages,
            tools: self.shared.tools.clone(),
            calls: CallNotation::Template,
            state_hash: None,
        })
    }

    /// Answers a turn. A turn without calls is the answer of the model.
    async fn act(&mut self, action: Action) -> Result<StepResult, EnvError> {
        let Some(sessions) = self.sessions.take() else {
            return Err(EnvError::Order("step before reset or after the end"));
        };
        let work = answer(
            Arc::clone(&self.shared),
            sessions,
            action.tool_calls.clone(),
        );
        let (sessions, turn) = self.shared.handle.spawn(work).await.map_err(worker)?;
        self.sessions = Some(sessions);
        let mut turn = turn.map_err(worker)?;
        turn.notation(&action);
        self.counts.turn(&action, turn.errors);
        let step = if turn.messages.is_empty() {
            // A turn without calls is the answer.
            StepResult {
                observation: None,
                process_reward: 0.0,
                done: true,
                outcome: Some(self.outcome()),
                state_hash: None,
            }
        } else {
            turn.step(None)
        };
        self.last = turn.messages;
        Ok(step)
    }

    /// No score, with the counts of calls: the rewards of the recipe score the episode.
    fn outcome(&self) -> Outcome {
        let mut outcome = Outcome {
            unscored: true,
            unscored_reason: Some("env.type = \"mcp\" has no score without [reward]".into()),
            ..Outcome::default()
        };
        self.counts.add_to(&mut outcome);
        outcome
    }
}

impl Env for McpEnv {
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
        Box::pin(std::future::ready(Ok(self.outcome())))
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async move {
            if let Some(sessions) = self.sessions.take() {
                let ended = self.shared.handle.spawn(async move {
                    futures::future::join_all(sessions.all.into_iter().map(Session::close)).await;
                });
                ended.await.map_err(worker)?;
            }
            Ok(())
        })
    }
}
