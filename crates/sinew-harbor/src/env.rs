//! The environment of a task: a shell for the model, or a host of an agent program, then the verifier.
//!
//! A use of the place continues if a caller stops waiting (at a deadline of the rollout), so that the score
//! of an episode that a limit ended finds the place as its last command left it.

use crate::folder::{Base, SOLVE_SCRIPT, Step, TaskFolder};
use crate::place::{Command, Place};
use crate::progress::{Next, Progress};
use crate::servers;
use crate::shell::{Shell, TOOL, text_of};
use crate::stages::{World, begin, broken, failed, start};
use crate::trajectory::document;
use crate::verify::{Verified, leave, verify};
use futures::future::BoxFuture;
use serde_json::{Value, json};
use sinew_env::counts::Counts;
use sinew_env::turn::Turn;
use sinew_env::{
    Action, CallError, Capabilities, Env, EnvError, EnvFactory, EnvFuture, HostedProgram,
    McpServer, Observation, ProgramHost, ResetResult, StepResult,
};
use sinew_sandbox::{EntryKind, ExecResult, folder::write_folder, next_of_owner};
use sinew_types::{Gives, InputPresence, Message, Outcome, Role, Task};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Version of the tool. It changes if equal commands are run or shown differently.
const VERSION: &str = "1";

/// Home of agent programs: their settings stay out of the folder that is judged.
const AGENT_HOME: &str = "/var/tmp/agent-home";

/// Maximum number of files that the end state lists.
const MAX_LISTED: usize = 100;

/// Settings of a factory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) shell: Shell,
    /// Calls after which the verifier runs; 0: the model ends the episode.
    pub(crate) end_after_calls: u32,
    /// Folder on the host for artifacts; `None`: they are counted, and not kept.
    pub(crate) artifacts: Option<PathBuf>,
}

/// Data of the episodes that algorithms can read.
pub(crate) const GIVES: Gives = Gives {
    states: InputPresence::No("a container has no hash of its state"),
    turn_rewards: InputPresence::No("the verifier runs once, after the agent"),
    tool_counts: InputPresence::Yes,
    format_penalty: InputPresence::Yes,
};

/// Factory of episodes.
#[derive(Clone)]
pub struct HarborFactory {
    pub(crate) world: Arc<World>,
    pub(crate) settings: Arc<Settings>,
}

impl std::fmt::Debug for HarborFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HarborFactory")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// The folder of a task.
pub(crate) fn folder_of(task: &Task) -> Result<TaskFolder, EnvError> {
    let wrong = |message: String| EnvError::Task {
        task: task.id.to_string(),
        message,
    };
    let folder = task.data.get("folder").and_then(Value::as_str);
    let folder =
        folder.ok_or_else(|| wrong("it has no `folder`: it is no task of harbor".into()))?;
    TaskFolder::read(Path::new(folder)).map_err(|e| wrong(e.to_string()))
}

impl EnvFactory for HarborFactory {
    fn name(&self) -> &str {
        "harbor"
    }

    fn tools(&self) -> BTreeMap<String, String> {
        [(TOOL.to_owned(), VERSION.to_owned())].into()
    }

    fn create(&self, task: &Task) -> Result<Box<dyn Env>, EnvError> {
        let folder = folder_of(task)?;
        let progress = Progress::new(folder.steps.len(), folder.manifest.strategy);
        Ok(Box::new(HarborEnv {
            world: Arc::clone(&self.world),
            settings: Arc::clone(&self.settings),
            name: task.id.as_str().to_owned(),
            task: Arc::new(folder),
            progress,
            place: None,
            work: None,
            until: Instant::now(),
            late: false,
            calls: 0,
            counts: Counts::default(),
            said: None,
            last: Vec::new(),
            spent_s: 0.0,
            end_state: None,
        }))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            concurrent: true,
            deterministic: false,
            gives: GIVES,
            places: None,
        }
    }

    fn hosts_programs(&self, task: &Task) -> bool {
        let machines = self.world.sandboxes.machines.is_some();
        machines && folder_of(task).is_ok_and(|folder| folder.base != Base::Empty)
    }

    /// The lines of `solve.sh` in one call, then the end of each step, where they need no other file of
    /// the solution.
    fn gold(&self, task: &Task, turn: usize) -> Result<Option<Action>, EnvError> {
        let folder = folder_of(task)?;
        let mut lines = Vec::new();
        for step in &folder.steps {
            match lines_of(step) {
                Some(script) => lines.push(script),
                None => return Ok(None),
            }
        }
        let ends = self.settings.end_after_calls != 1;
        let turns = if ends { 2 } else { 1 };
        let Some(script) = lines.get(turn / turns) else {
            return Ok(None);
        };
        Ok(Some(match turn % turns {
            0 => self.settings.shell.call(script),
            _ => Action::say("Done."),
        }))
    }
}

/// The commands of a step's solution; `None`: it has other files, or none.
fn lines_of(step: &Step) -> Option<String> {
    let folder = step.solution.as_ref()?;
    let names = std::fs::read_dir(folder).ok()?;
    let names = names.flatten().map(|entry| entry.file_name());
    if !names.into_iter().all(|name| name == SOLVE_SCRIPT) {
        return None;
    }
    let text = std::fs::read_to_string(folder.join(SOLVE_SCRIPT)).ok()?;
    let first = text
        .lines()
        .next()
        .is_some_and(|line| line.starts_with("#!"));
    let lines: Vec<&str> = text.lines().skip(usize::from(first)).collect();
    let script = lines.join("\n").trim().to_owned();
    let own = script.contains("/solution") || script.contains("$0");
    (!script.is_empty() && !own).then_some(script)
}

/// The end of work on the place.
enum Done {
    Ready(Result<(), EnvError>),
    Ran(Result<ExecResult, EnvError>),
    Verified(Result<Verified, EnvError>),
}

/// Work that owns the place until it ends.
type Work = BoxFuture<'static, (Option<Place>, Done)>;

/// Environment of one episode.
struct HarborEnv {
    world: Arc<World>,
    settings: Arc<Settings>,
    /// Id of the task.
    name: String,
    task: Arc<TaskFolder>,
    progress: Progress,
    /// Absent before the start, during work, and after the end.
    place: Option<Place>,
    work: Option<Work>,
    /// End of the present agent's time.
    until: Instant,
    /// The time of an agent was over.
    late: bool,
    calls: u32,
    counts: Counts,
    /// All messages of the episode, for its verifier. `None` in a place without the folder for them, and
    /// where a program plays, whose messages the model server has.
    said: Option<Vec<Message>>,
    /// Messages of the last observation.
    last: Vec<Message>,
    /// Seconds of verifiers.
    spent_s: f64,
    end_state: Option<Value>,
}

impl HarborEnv {
    /// The present step.
    fn present(&self) -> &Step {
        // The index is below the number of steps, and there is at least one.
        &self.task.steps[self.progress.at()]
    }

    /// Waits for work that a caller left. Its result belongs to nobody but a verifier's.
    async fn settle(&mut self) -> Result<(), EnvError> {
        match self.finish().await {
            Some(Done::Verified(verified)) => self.record(verified?, true).map(|_| ()),
            Some(Done::Ready(ready)) => ready,
            Some(Done::Ran(_)) | None => Ok(()),
        }
    }

    /// Waits for the present work.
    async fn finish(&mut self) -> Option<Done> {
        let (place, done) = self.work.as_mut()?.await;
        self.work = None;
        self.place = place;
        Some(done)
    }

    /// Takes the place for work.
    fn take(&mut self) -> Result<Place, EnvError> {
        let order = EnvError::Order("step before reset or after the end");
        self.place.take().ok_or(order)
    }

    /// Starts the place and the first step.
    async fn open(&mut self) -> Result<(), EnvError> {
        let (world, task) = (Arc::clone(&self.world), Arc::clone(&self.task));
        self.work = Some(Box::pin(async move {
            let mut place = match start(&world, &task).await {
                Ok(place) => place,
                Err(e) => return (None, Done::Ready(Err(e))),
            };
            let ready = begin(&mut place, &task.steps[0]).await;
            (Some(place), Done::Ready(ready))
        }));
        self.settle().await?;
        self.until = Instant::now() + self.world.agent_time(self.present());
        Ok(())
    }

    /// Runs a command of the agent. `None`: its time is over.
    async fn carry_out(&mut self, command: Command) -> Result<Option<ExecResult>, EnvError> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left < Duration::from_millis(1) {
            self.late = true;
            return Ok(None);
        }
        let cut = left < command.deadline;
        let command = Command {
            deadline: command.deadline.min(left),
            user: self.present().agent.user.clone(),
            ..command
        };
        let mut place = self.take()?;
        self.work = Some(Box::pin(async move {
            let done = place.run(command).await.map_err(broken);
            (Some(place), Done::Ran(done))
        }));
        let Some(Done::Ran(done)) = self.finish().await else {
            return Err(EnvError::Order("other work in the place"));
        };
        let done = done?;
        self.late |= cut && done.ending == sinew_sandbox::Ending::Timeout;
        Ok(Some(done))
    }

    /// The result of a call as the model reads it.
    async fn call(&mut self, arguments: &Value) -> Result<Result<String, CallError>, EnvError> {
        let script = match self.settings.shell.script(arguments) {
            Ok(script) => script,
            Err(e) => return Ok(Err(e)),
        };
        self.calls += 1;
        let timeout = self.settings.shell.timeout;
        let done = self.carry_out(self.settings.shell.command(&script)).await?;
        let chars = self.settings.shell.output_chars;
        match done {
            None => Ok(Err(CallError::Failed(
                "the time for the task is over".into(),
            ))),
            Some(done) => text_of(&done, timeout, chars),
        }
    }

    /// Adds messages to those of the episode.
    fn note(&mut self, messages: &[Message]) {
        if let Some(said) = &mut self.said {
            said.extend_from_slice(messages);
        }
    }

    /// Handles a turn of the model.
    async fn act(&mut self, action: Action) -> Result<StepResult, EnvError> {
        self.settle().await?;
        if self.progress.is_over() {
            return Err(EnvError::Order("step after the end"));
        }
        let mut turn = Turn::default();
        for call in &action.tool_calls {
            let result = match call.name.as_str() {
                TOOL => self.call(&call.arguments).await?,
                other => {
                    let why = format!("there is no tool {other:?}; there is: {TOOL}");
                    Err(CallError::Failed(why))
                }
            };
            turn.called(call, result);
        }
        turn.notation(&action);
        self.counts.turn(&action, turn.errors);
        self.note(&[action.message()]);
        self.note(&turn.messages);
        let silent = action.tool_calls.is_empty() && action.call_error.is_none();
        let calls = self.settings.end_after_calls;
        let ends = (silent && !action.truncated) || (calls > 0 && self.calls >= calls) || self.late;
        if ends {
            return self.judge(turn).await;
        }
        if silent {
            let why = "the turn was cut at its limit; write less";
            turn.said(Err(CallError::Failed(why.into())));
            self.note(&turn.messages);
        }
        self.last.clone_from(&turn.messages);
        Ok(turn.step(None))
    }

    /// Verifies the present step.
    async fn judged(&mut self, cut: bool) -> Result<Next, EnvError> {
        if self.place.is_some() {
            let (world, task) = (Arc::clone(&self.world), Arc::clone(&self.task));
            let at = self.progress.at();
            let said = self.said.as_deref().and_then(document);
            let mut place = self.take()?;
            self.work = Some(Box::pin(async move {
                let step = &task.steps[at];
                let left = match said {
                    Some(document) => leave(&mut place, document).await,
                    None => Ok(()),
                };
                let verified = match left {
                    Ok(()) => verify(&world, &task, step, &mut place).await,
                    Err(e) => Err(e),
                };
                (Some(place), Done::Verified(verified))
            }));
        }
        match self.finish().await {
            Some(Done::Verified(verified)) => self.record(verified?, cut),
            _ => Err(EnvError::Order("score without a place")),
        }
    }

    /// Records what a verifier found.
    fn record(&mut self, verified: Verified, cut: bool) -> Result<Next, EnvError> {
        self.spent_s += verified.seconds;
        let files = &verified.artifacts;
        let bytes = |kind: &EntryKind| match kind {
            EntryKind::File(bytes) => Some(bytes.len()),
            _ => None,
        };
        let listed = files
            .iter()
            .filter_map(|f| Some((&f.path, bytes(&f.kind)?)));
        let listed = listed.take(MAX_LISTED).map(|(path, bytes)| {
            let path = path.to_string_lossy();
            json!({ "path": path, "bytes": bytes })
        });
        self.end_state = Some(json!({
            "rewards": verified.rewards.as_ref().ok(),
            "output": verified.output,
            "artifacts": listed.collect::<Vec<_>>(),
            "artifacts_missing": verified.artifacts_missing,
        }));
        if let Some(folder) = &self.settings.artifacts
            && !files.is_empty()
        {
            let owner = next_of_owner().unwrap_or_else(|| self.name.replace('/', "-"));
            let to = folder.join(format!("{owner}.{}", self.progress.at()));
            write_folder(&to, files)
                .map_err(|e| failed(format!("env.artifacts: {}: {e}", to.display())))?;
        }
        let least = self.present().min_reward.clone();
        Ok(self
            .progress
            .verified(verified.rewards, least.as_ref(), cut))
    }

    /// Verifies the present step, and gives the next instruction or the end.
    async fn judge(&mut self, mut turn: Turn) -> Result<StepResult, EnvError> {
        match self.judged(self.late).await? {
            Next::Over => Ok(StepResult {
                observation: None,
                process_reward: 0.0,
                done: true,
                outcome: Some(self.outcome()),
                state_hash: None,
            }),
            Next::Step(at) => {
                let task = Arc::clone(&self.task);
                let mut place = self.take()?;
                self.work = Some(Box::pin(async move {
                    let ready = begin(&mut place, &task.steps[at]).await;
                    (Some(place), Done::Ready(ready))
                }));
                self.settle().await?;
                self.until = Instant::now() + self.world.agent_time(self.present());
                self.calls = 0;
                let next = self.present().instruction.clone();
                self.note(&[Message::new(Role::User, next.clone())]);
                turn.said(Ok(next));
                self.last.clone_from(&turn.messages);
                Ok(turn.step(None))
            }
        }
    }

    /// Score and metrics.
    fn outcome(&self) -> Outcome {
        let mut outcome = match self.progress.score() {
            Ok(score) => score.into_outcome(),
            Err(unscored) => unscored.into_outcome(),
        };
        let metrics = &mut outcome.metrics;
        if !outcome.unscored {
            let success = f64::from(u8::from(outcome.success));
            metrics.entry("success".to_owned()).or_insert(success);
        }
        for (name, value) in [
            ("verifier_s", self.spent_s),
            ("steps_done", self.progress.done() as f64),
            ("agent_timeout", f64::from(u8::from(self.late))),
        ] {
            metrics.entry(name.to_owned()).or_insert(value);
        }
        self.counts.add_to(&mut outcome);
        outcome
    }
}

impl Env for HarborEnv {
    fn reset(&mut self) -> EnvFuture<'_, ResetResult> {
        Box::pin(async move {
            self.open().await?;
            let place = self.place.as_ref();
            let workdir = place.map(|p| p.layout.workdir.clone()).unwrap_or_default();
            let shell = &self.settings.shell;
            let skills = self.task.manifest.environment.skills_dir.as_deref();
            let mut messages = shell.messages(&workdir, skills);
            messages.extend(shell.prior(&self.task.prior));
            messages.push(Message::new(Role::User, self.present().instruction.clone()));
            let tools = shell.tools();
            let calls = shell.notation();
            let rooted = self.place.as_ref().is_some_and(|place| place.rooted);
            self.said = rooted.then(|| messages.clone());
            Ok(ResetResult {
                messages,
                tools,
                calls,
                state_hash: None,
            })
        })
    }

    fn step(&mut self, action: Action) -> EnvFuture<'_, StepResult> {
        Box::pin(self.act(action))
    }

    /// One message for each call of the last turn, and the next instruction. `observation` is the last one.
    fn format_observation(&self, _observation: &Observation) -> Vec<Message> {
        self.last.clone()
    }

    fn host(&mut self) -> Option<&mut dyn ProgramHost> {
        let rooted = self.place.as_ref().is_some_and(|place| place.rooted);
        rooted.then_some(self as &mut dyn ProgramHost)
    }

    fn score(&mut self) -> EnvFuture<'_, Outcome> {
        Box::pin(async move {
            self.settle().await?;
            if !self.progress.is_over() {
                self.judged(true).await?;
            }
            Ok(self.outcome())
        })
    }

    fn end_state(&self) -> Option<&Value> {
        self.end_state.as_ref()
    }

    fn close(&mut self) -> EnvFuture<'_, ()> {
        Box::pin(async move {
            // Work that is dropped drops the place, which destroys it.
            self.work = None;
            match self.place.take() {
                Some(place) => place.sandbox.destroy().await.map_err(broken),
                None => Ok(()),
            }
        })
    }
}

impl ProgramHost for HarborEnv {
    fn mcp_servers(&self) -> BTreeMap<String, McpServer> {
        let servers = self.task.manifest.environment.mcp_servers.iter();
        let servers = servers.map(|(name, one)| (name.clone(), one.server.clone()));
        servers.collect()
    }

    fn listen_inside(&mut self, port: u16) -> EnvFuture<'_, TcpListener> {
        Box::pin(async move {
            match &mut self.place {
                Some(place) => place.sandbox.listen_inside(port).await.map_err(broken),
                None => Err(EnvError::Order("a program without a place")),
            }
        })
    }

    fn run(&mut self, program: HostedProgram) -> EnvFuture<'_, ExecResult> {
        Box::pin(async move {
            let mut env = vec![("SINEW_AGENT_HOME".to_owned(), AGENT_HOME.to_owned())];
            env.extend(program.env);
            let home = Command::shell(format!("mkdir -p {AGENT_HOME}"), Duration::from_secs(60));
            self.carry_out(home).await?;
            self.said = None;
            let command = Command {
                argv: servers::after_check(&self.task.manifest.environment, program.argv),
                env,
                user: None,
                deadline: program.deadline,
            };
            let over = EnvError::Order("a program after the end of its time");
            self.carry_out(command).await?.ok_or(over)
        })
    }
}
