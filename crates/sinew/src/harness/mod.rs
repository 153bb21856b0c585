//! Agents from outside: a program that talks to the gateway drives the turns.
//!
//! Each episode is a rollout of the gateway and a run of the program, in a sandbox whose only
//! reachable address is the gateway. Base URL, key and task arrive by environment variables;
//! the last line that the program prints is its answer, which the environment judges.

mod door;
mod fork_server;
mod program;
mod run;
mod trial;

pub(crate) use trial::starts;

use crate::admission::TurnCapacity;
use crate::failure::Failure;
use fork_server::{ForkServer, tail};
use futures::future::BoxFuture;
use program::Command;
use run::{Ended, RunError, Sandboxes};
use sinew_gateway::{
    Gateway, GatewayConfig, GatewayParts, RolloutSpec, SamplingDefaults, Secret, Server,
};
use sinew_recipe::{CommandSection, HarnessLevel, HarnessSection, Level, SandboxPlan};
use sinew_render::Renderer;
use sinew_rollout::{
    BuiltInLoop, EpisodeOptions, EpisodeParts, EpisodeSpec, Harness, Phase, grade_answer,
};
use sinew_sandbox::{
    Ending, Limits, ProcessConfig, ProcessProvider, SandboxError, SandboxProvider,
};
use sinew_types::{EpisodeEnd, FailureKind, Limit, Role, Task, Timing, Trace};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{Mutex, OnceCell};

/// What an environment measures of the tool that it offers itself.
const OF_THE_TOOL: [&str; 3] = ["tool_calls", "tool_errors", "used_tool"];

/// Largest text of a task: one environment variable may have 128 KiB.
const MAX_TASK_BYTES: usize = 96 << 10;
/// Bytes of output that are kept of a program.
const OUTPUT_BYTES: u64 = 1 << 20;

/// The harness of a recipe.
pub(crate) fn build(
    section: &HarnessSection,
    sandbox: &SandboxPlan,
    renderer: &dyn Renderer,
) -> Result<Arc<dyn Harness>, Failure> {
    let HarnessSection::Command(section) = section else {
        return Ok(Arc::new(BuiltInLoop));
    };
    Ok(Arc::new(CommandHarness {
        command: command(section)?,
        section: section.clone(),
        sandbox: sandbox.clone(),
        config: GatewayConfig {
            format: renderer.turn_format(),
            ..GatewayConfig::default()
        },
        started: OnceCell::new(),
        fork_server: Mutex::new(None),
    }))
}

fn command(section: &CommandSection) -> Result<Command, Failure> {
    Command::resolve(&section.command, &section.mounts, section.image.is_some())
}

/// Checks that the program is there and that its sandbox can be built.
pub(crate) fn check(section: &HarnessSection, sandbox: &SandboxPlan) -> Result<String, Failure> {
    let HarnessSection::Command(section) = section else {
        return Ok("built in".into());
    };
    let command = command(section)?;
    if section.preload && !command.is_python_script() {
        return Err(Failure::input(
            "harness.preload = true: allowed for a command that is a Python interpreter and a script",
        ));
    }
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::system)?;
    runtime.block_on(async {
        let gateway = ([127, 0, 0, 1], 9).into();
        let sandboxes = sandboxes(section, &command, sandbox, gateway)?;
        let (sandbox, _door) = sandboxes
            .acquire(Vec::new())
            .await
            .map_err(Failure::system)?;
        sandbox.destroy().await.map_err(Failure::system)
    })?;
    Ok(format!(
        "{}: in a sandbox ({}) that reaches the gateway and nothing else{}",
        section.command.join(" "),
        section.level,
        if section.preload { ", forked" } else { "" }
    ))
}

fn sandboxes(
    section: &CommandSection,
    command: &Command,
    sandbox: &SandboxPlan,
    gateway: std::net::SocketAddr,
) -> Result<Sandboxes, Failure> {
    let provider = match section.level {
        HarnessLevel::Container => containers(section, command, sandbox)?,
        HarnessLevel::Process => processes(section, command)?,
    };
    let forks = if section.preload { 64 } else { 1 };
    let limits = Limits {
        // The fork server limits each of its forks; itself it lives long.
        cpu_s: if section.preload { 1e8 } else { section.cpu_s },
        memory_bytes: section.memory_mb() << 20,
        processes: section.processes * forks,
        output_bytes: OUTPUT_BYTES,
        work_bytes: 64 << 20,
        open_files: 4096,
    };
    Ok(Sandboxes {
        provider,
        limits,
        strict: sandbox.strict,
        gateway,
    })
}

fn processes(
    section: &CommandSection,
    command: &Command,
) -> Result<Arc<dyn SandboxProvider>, Failure> {
    let search = std::env::var("PATH").unwrap_or_default();
    let mut config = ProcessConfig::new(&search);
    config.max_live = section.max_live;
    config.acquire_timeout = Duration::from_secs_f64(section.timeout_s);
    config.shows = command.shows.clone();
    let provider =
        ProcessProvider::start(config).map_err(|e| Failure::system(format!("harness: {e}")))?;
    Ok(Arc::new(provider))
}

fn containers(
    section: &CommandSection,
    command: &Command,
    sandbox: &SandboxPlan,
) -> Result<Arc<dyn SandboxProvider>, Failure> {
    let own = SandboxPlan {
        level: Level::Container,
        image: section.image.clone(),
        max_live: section.max_live,
        ..sandbox.clone()
    };
    crate::levels::containers(&own, command.shows.clone())
}

/// What runs once for all episodes.
struct Started {
    gateway: Gateway,
    _server: Server,
    sandboxes: Sandboxes,
}

/// Runs a program for each episode.
struct CommandHarness {
    command: Command,
    section: CommandSection,
    sandbox: SandboxPlan,
    config: GatewayConfig,
    started: OnceCell<Started>,
    fork_server: Mutex<Option<Arc<ForkServer>>>,
}

/// Why an episode has no trace of its own.
type Refusal = (FailureKind, String);

impl Harness for CommandHarness {
    fn name(&self) -> &str {
        "command"
    }

    fn run<'a>(
        &'a self,
        parts: &'a EpisodeParts,
        options: &'a EpisodeOptions,
        spec: &'a EpisodeSpec,
    ) -> BoxFuture<'a, Trace> {
        Box::pin(async move {
            let started = Instant::now();
            match self.episode(parts, options, spec).await {
                Ok(trace) => trace,
                Err((kind, message)) => {
                    let trace = spec.empty_trace(&parts.run, &options.turn_sampling());
                    failed_trace(trace, kind, message, started)
                }
            }
        })
    }
}

impl CommandHarness {
    async fn started(&self, parts: &EpisodeParts) -> Result<&Started, Refusal> {
        self.started
            .get_or_try_init(|| self.start(parts))
            .await
            .map_err(|e| (FailureKind::Harness, e.text().to_owned()))
    }

    async fn start(&self, parts: &EpisodeParts) -> Result<Started, Failure> {
        let gateway = Gateway::new(
            self.config.clone(),
            GatewayParts {
                engine: Arc::clone(&parts.engine),
                renderer: Arc::clone(&parts.renderer),
                // Traces go to the run's store with their outcome, by whoever runs the batch.
                store: None,
                requests: Arc::clone(&parts.requests),
                capacity: Some(Arc::new(TurnCapacity(Arc::clone(&parts.admission)))),
            },
        );
        // Nobody needs the control API: it is called from here. Its token is thrown away.
        let token = Secret::random_hex(24).map_err(Failure::system)?;
        let any = ([127, 0, 0, 1], 0).into();
        let server = Server::start(gateway.clone(), any, &token, None)
            .await
            .map_err(Failure::system)?;
        let at = server.address();
        let sandboxes = sandboxes(&self.section, &self.command, &self.sandbox, at)?;
        Ok(Started {
            gateway,
            _server: server,
            sandboxes,
        })
    }

    async fn episode(
        &self,
        parts: &EpisodeParts,
        options: &EpisodeOptions,
        spec: &EpisodeSpec,
    ) -> Result<Trace, Refusal> {
        let harness = |e: &dyn std::fmt::Display| (FailureKind::Harness, e.to_string());
        if spec.task.prompt.len() > MAX_TASK_BYTES {
            return Err(harness(&format!(
                "the task has {} bytes, a program takes {MAX_TASK_BYTES}",
                spec.task.prompt.len()
            )));
        }
        let started = self.started(parts).await?;
        let gateway = &started.gateway;
        let access = gateway
            .open_rollout(rollout_spec(parts, options, spec))
            .map_err(|e| harness(&e))?;
        let mut env = variables(&access.base_url, &access.api_key, &spec.task);
        env.extend(self.section.env.clone());
        let limit = Duration::from_secs_f64(self.section.timeout_s).min(options.timeout);
        let ended = {
            let deadline = Some(tokio::time::Instant::now() + limit);
            let _in_phase = parts.gauges.enter(&spec.episode, Phase::Tool, deadline);
            self.run_program(&started.sandboxes, env, limit).await
        };
        let cut = matches!(&ended, Ok(e) if e.ending == Ending::Timeout);
        let end = cut.then_some(EpisodeEnd::Truncated {
            limit: Limit::WallTime,
        });
        let trace = gateway.finish(&access.id, end).await;
        let mut trace = trace.map_err(|e| harness(&e))?;
        let ended = match ended {
            Ok(ended) => ended,
            Err(RunError::Sandbox(e)) => return Err((sandbox_kind(&e), e.to_string())),
            Err(e) => return Err(harness(&e)),
        };
        if let Some(why) = failure(&ended, &trace) {
            trace.end = EpisodeEnd::Failed {
                kind: FailureKind::Harness,
                message: why,
            };
            return Ok(trace);
        }
        let within = options.score_timeout;
        self.grade(parts, spec, within, &mut trace, &ended).await;
        Ok(trace)
    }

    async fn run_program(
        &self,
        sandboxes: &Sandboxes,
        env: Vec<(String, String)>,
        limit: Duration,
    ) -> Result<Ended, RunError> {
        if !self.section.preload {
            return sandboxes.run(&self.command, env, limit).await;
        }
        let server = {
            let mut slot = self.fork_server.lock().await;
            match slot.as_ref().filter(|s| s.is_alive()) {
                Some(server) => Arc::clone(server),
                None => {
                    let server = Arc::new(ForkServer::start(sandboxes, &self.command).await?);
                    *slot = Some(Arc::clone(&server));
                    server
                }
            }
        };
        server.run(env, self.section.cpu_s, limit).await
    }

    /// The environment's outcome, beside what the gateway measured.
    async fn grade(
        &self,
        parts: &EpisodeParts,
        spec: &EpisodeSpec,
        within: Duration,
        trace: &mut Trace,
        ended: &Ended,
    ) {
        let answer = answer(&ended.stdout, trace);
        let deadline = Some(tokio::time::Instant::now() + within);
        let _in_phase = parts.gauges.enter(&spec.episode, Phase::Score, deadline);
        let graded = grade_answer(parts.envs.as_ref(), &spec.task, &answer);
        match tokio::time::timeout(within, graded).await {
            Ok(Ok(outcome)) => {
                let measured = std::mem::take(&mut trace.outcome.metrics);
                trace.outcome = outcome;
                // It saw the answer alone: what it says of its own tool is not of the program's.
                let metrics = &mut trace.outcome.metrics;
                metrics.retain(|name, _| !OF_THE_TOOL.contains(&name.as_str()));
                trace.outcome.metrics.extend(measured);
            }
            Ok(Err(e)) => {
                trace.end = EpisodeEnd::Failed {
                    kind: e.failure_kind(),
                    message: e.to_string(),
                };
            }
            Err(_) => {
                trace.end = EpisodeEnd::Failed {
                    kind: FailureKind::Environment,
                    message: "the environment did not judge the answer in time".into(),
                };
            }
        }
    }
}

fn sandbox_kind(e: &SandboxError) -> FailureKind {
    match e {
        SandboxError::Request { .. } => FailureKind::Harness,
        _ => FailureKind::Sandbox,
    }
}

fn rollout_spec(parts: &EpisodeParts, options: &EpisodeOptions, spec: &EpisodeSpec) -> RolloutSpec {
    let trace = spec.empty_trace(&parts.run, &options.turn_sampling());
    RolloutSpec {
        id: Some(spec.episode.clone()),
        group: spec.group.clone(),
        task: spec.task.id.clone(),
        task_kind: spec.task.kind.clone(),
        run: trace.origin.run,
        draw: trace.origin.draw,
        purpose: trace.origin.purpose,
        provenance: trace.provenance,
        seed: spec.seed,
        sampling: SamplingDefaults {
            temperature: Some(options.sampling.temperature),
            top_p: Some(options.sampling.top_p),
            top_k: Some(options.sampling.top_k),
            min_p: Some(options.sampling.min_p),
            max_tokens: Some(options.limits.max_turn_tokens),
            // The policy that learns must be the one that acted.
            pinned: true,
        },
        max_turns: Some(options.limits.max_turns),
        max_context_tokens: Some(options.limits.max_context_tokens),
    }
}

/// What the program finds in its environment.
fn variables(base_url: &str, api_key: &str, task: &Task) -> Vec<(String, String)> {
    let origin = base_url.strip_suffix("/v1").unwrap_or(base_url);
    [
        ("OPENAI_BASE_URL", base_url),
        ("OPENAI_API_KEY", api_key),
        ("ANTHROPIC_BASE_URL", origin),
        ("ANTHROPIC_API_KEY", api_key),
        ("SINEW_TASK", &task.prompt),
        ("SINEW_TASK_ID", task.id.as_str()),
        ("SINEW_TASK_KIND", &task.kind),
        ("PYTHONDONTWRITEBYTECODE", "1"),
        ("PYTHONUNBUFFERED", "1"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into()
}

/// Why an episode counts as failed, if it does. A program that gave up because a limit of its
/// rollout refused it was cut, not failed.
fn failure(ended: &Ended, trace: &Trace) -> Option<String> {
    let cut = matches!(trace.end, EpisodeEnd::Truncated { .. });
    let why = match ended.ending {
        Ending::Exited { code: 0 } | Ending::Timeout => None,
        _ if cut => None,
        Ending::Exited { code } => Some(format!("exit code {code}")),
        other => Some(other.to_string()),
    };
    let sampled = trace.sampled_tokens() > 0;
    match why {
        Some(why) => Some(format!(
            "the program ended badly ({why}): {}",
            tail(&ended.stderr)
        )),
        None if !sampled => Some(format!(
            "the program ended without an answer of the model ({}): {}",
            ended.ending,
            tail(&ended.stderr)
        )),
        None => None,
    }
}

/// The last line that the program printed, else what the model said last.
fn answer(stdout: &str, trace: &Trace) -> String {
    let mut lines = stdout.lines().map(str::trim);
    if let Some(line) = lines.rfind(|l| !l.is_empty()) {
        return line.to_owned();
    }
    let said = trace
        .nodes
        .iter()
        .rev()
        .flat_map(|n| n.messages.iter().rev());
    said.filter(|m| m.role == Role::Assistant)
        .map(|m| m.content.text().into_owned())
        .next()
        .unwrap_or_default()
}

fn failed_trace(trace: Trace, kind: FailureKind, message: String, started: Instant) -> Trace {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let total_s = started.elapsed().as_secs_f64();
    Trace {
        end: EpisodeEnd::Failed { kind, message },
        timing: Timing {
            started_unix_s: now.map_or(0.0, |d| d.as_secs_f64()) - total_s,
            total_s,
            ..Timing::default()
        },
        ..trace
    }
}

#[cfg(test)]
mod tests;
