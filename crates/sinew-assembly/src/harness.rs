//! The harness of a recipe: the built-in loop, or a program whose model server is a gateway.
//!
//! `sinew-rollout` runs programs against the port [`ModelServer`]; here the gateway implements it. The
//! gateway shares engine, admission and request ids with the run, and has no store: traces are committed
//! by the run, with their outcome.

use crate::Session;
use crate::admission::TurnCapacity;
use crate::failure::Failure;
use crate::levels::containers;
use futures::future::BoxFuture;
use sinew_env::{Split, Taskset};
use sinew_gateway::{
    Credentials, Gateway, GatewayConfig, GatewayParts, Reward, RolloutSpec, SamplingDefaults,
    Secret, Server, SessionLimits,
};
use sinew_infer::{FakeConfig, FakeEngine, FakeModel};
use sinew_recipe::{
    AGENTS_INSIDE, CommandSection, HarnessLevel, HarnessSection, Level, RolloutPlan, RunPlan,
    SandboxPlan, ScoredBy, ServiceSection,
};
use sinew_rollout::{
    AgentReport, BuiltInLoop, EpisodeOptions, EpisodeParts, EpisodeSpec, Harness, ModelAccess,
    ModelServer, ModelServerError, ProgramCommand, ProgramConfig, ProgramError, ProgramHarness,
    Programs, ServiceConfig, ServiceHarness,
};
use sinew_sandbox::{ProcessConfig, ProcessProvider, SandboxProvider};
use sinew_types::{EpisodeEnd, EpisodeId, Trace};
use std::any::Any;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::{Handle, Runtime};

impl From<ProgramError> for Failure {
    fn from(e: ProgramError) -> Self {
        match e {
            ProgramError::Invalid { .. } => Self::input(format!("harness.{e}")),
            ProgramError::Missing { .. } => Self::outside(format!("harness.{e}")),
            ProgramError::Sandbox(_) | ProgramError::Failed(_) => Self::system(e),
        }
    }
}

/// The harness of a recipe. If it runs a program, a gateway on a free port of the loopback interface and the
/// sandboxes' spawner are started now and end with the harness.
///
/// # Errors
/// If the program or a folder of it is missing, or its sandboxes cannot be started here.
pub(crate) fn build(
    recipe: &RunPlan,
    parts: &EpisodeParts,
    session: &Session<'_>,
) -> Result<Arc<dyn Harness>, Failure> {
    let sandbox = &recipe.sandbox;
    let served = session.serve.address(recipe)?;
    let section = match (&recipe.harness, served) {
        (HarnessSection::Service(section), Some(at)) => {
            let gateway = gateway(parts);
            let server = session.serve.start(session, gateway.clone(), at)?;
            let trusted = !recipe.harness.is_graded();
            let model = GatewayModel::new(gateway, trusted, Box::new(server));
            let harness = ServiceHarness::new(service(section), Arc::new(model));
            return Ok(Arc::new(harness.map_err(Failure::system)?));
        }
        (HarnessSection::Service(_), None) => {
            return Err(Failure::input(
                "harness.type = \"service\": the service reaches the model at an address\n  hint: --serve \
                 127.0.0.1:8080, here or on each worker",
            ));
        }
        (harness, _) => match program(harness)? {
            Some(section) => told(section, &recipe.rollout),
            // Live agents drive themselves.
            None => return Ok(Arc::new(BuiltInLoop)),
        },
    };
    program_harness(&section, sandbox, parts, &session.runtime)
}

/// The harness of a program, with a separate gateway in front of the engine of `parts`.
///
/// # Errors
/// Fails as the harness of a recipe does.
pub fn program_harness(
    section: &CommandSection,
    sandbox: &SandboxPlan,
    parts: &EpisodeParts,
    runtime: &Handle,
) -> Result<Arc<dyn Harness>, Failure> {
    let config = config(section, sandbox)?;
    let provider = provider(section, &config.command, sandbox)?;
    let trusted = section.scored_by == ScoredBy::Agent;
    let gateway = gateway(parts);
    let server = listening(&gateway, runtime)?;
    let programs = Programs::new(config, provider, server.address())?;
    let model = GatewayModel::new(gateway, trusted, Box::new(server));
    Ok(Arc::new(ProgramHarness::new(programs, Arc::new(model))))
}

/// The folder in which `sinew setup agents` installs coding agents.
pub fn agents_folder() -> PathBuf {
    crate::resolve_env().cache_dir.join("agents")
}

/// Shows a coding agent the folder with its packages.
fn with_packages(mut section: CommandSection) -> Result<CommandSection, Failure> {
    let Some(agent) = section.agent else {
        return Ok(section);
    };
    let folder = section.mounts.entry(AGENTS_INSIDE.into());
    let folder = folder.or_insert_with(agents_folder);
    match agent.missing(folder) {
        None => Ok(section),
        Some(program) => Err(Failure::outside(format!(
            "harness.agent = {:?}: {} {} is not installed: no {}\n  hint: `sinew setup agents {}` installs it; \
             harness.folder names another folder with agents",
            agent.name,
            agent.title,
            agent.version,
            program.display(),
            agent.name
        ))),
    }
}

/// Tells a coding agent the limits of its model, so that it shortens its conversation before it is refused.
fn told(mut section: CommandSection, limits: &RolloutPlan) -> CommandSection {
    if section.agent.is_some() {
        for (name, limit) in [
            ("SINEW_CONTEXT_TOKENS", limits.max_context_tokens),
            ("SINEW_TURN_TOKENS", limits.max_turn_tokens),
        ] {
            let value = || limit.to_string();
            section.env.entry(name.into()).or_insert_with(value);
        }
    }
    section
}

/// The program that is run for each episode. The file of a function must be there: a word of a command that
/// names no file is an argument.
fn program(harness: &HarnessSection) -> Result<Option<CommandSection>, Failure> {
    if let HarnessSection::Function(section) = harness {
        let (file, _) = section.parts().unwrap_or_default();
        if !std::path::Path::new(file).is_file() {
            return Err(Failure::outside(format!(
                "harness.function = {:?}: no such file: {file}\n  hint: paths are relative to the current folder",
                section.function
            )));
        }
    }
    harness.program().map(with_packages).transpose()
}

/// Folders of the host that a program needs where it runs: path on the host, and path inside.
pub(crate) fn shows(harness: &HarnessSection) -> Result<Vec<(PathBuf, PathBuf)>, Failure> {
    let Some(section) = program(harness)? else {
        return Ok(Vec::new());
    };
    let in_image = section.image.is_some();
    let command = ProgramCommand::resolve(&section.command, &section.mounts, in_image)?;
    Ok(command.shows)
}

/// The service of a recipe, and how it is asked: what is data in the recipe is data here, too.
fn service(section: &ServiceSection) -> ServiceConfig {
    ServiceConfig {
        url: section.url.clone(),
        body: section.body.clone().into_iter().collect(),
        output: section.output.clone(),
        timeout: Duration::from_secs_f64(section.timeout_s),
        agent_scores: section.scored_by == ScoredBy::Agent,
    }
}

/// Checks that the program exists and that its sandbox can be built. The result is a row of `sinew check`.
pub fn check(section: &HarnessSection, sandbox: &SandboxPlan) -> Result<String, Failure> {
    let section = match section {
        HarnessSection::BuiltIn {} => return Ok("built in".into()),
        HarnessSection::Service(s) => return Ok(format!("tasks are posted to {}", s.url)),
        HarnessSection::Live(_) => return Ok("agents open rollouts at --serve".into()),
        harness => program(harness)?.ok_or_else(|| Failure::system("no program"))?,
    };
    let config = config(&section, sandbox)?;
    let provider = provider(&section, &config.command, sandbox)?;
    // Nothing connects to it.
    let discard = ([127, 0, 0, 1], 9).into();
    let programs = Programs::new(config, provider, discard)?;
    let runtime = Runtime::new().map_err(Failure::system)?;
    runtime.block_on(programs.check_sandbox())?;
    let command = match section.agent {
        Some(agent) => format!("{} {}", agent.title, agent.version),
        None => section.command.join(" "),
    };
    Ok(format!(
        "{command}: in a sandbox ({}) that reaches the gateway and nothing else{}",
        section.level,
        if section.preload { ", forked" } else { "" }
    ))
}

/// Starts the program once with the first task, and the recipe's gateway in front of a model that returns one
/// token.
///
/// # Errors
/// If it ends before it asks the model, or the gateway refuses what it asks.
pub fn asks_model(recipe: &RunPlan, tasks: &dyn Taskset) -> Result<(), Failure> {
    let Some(section) = program(&recipe.harness)? else {
        return Ok(());
    };
    let task = tasks.get(Split::Train, 0).map_err(Failure::system)?;
    let section = told(section, &recipe.rollout);
    let config = config(&section, &recipe.sandbox)?;
    let provider = provider(&section, &config.command, &recipe.sandbox)?;
    let runtime = Runtime::new().map_err(Failure::system)?;
    let gateway = silent_gateway(recipe)?;
    let server = listening(&gateway, runtime.handle())?;
    let opened = gateway.open_rollout(RolloutSpec::default());
    let access = access(opened.map_err(Failure::system)?);
    let programs = Programs::new(config, provider, server.address())?;
    let asked = programs.asks_model(&access, &task, gateway.first_answer());
    Ok(runtime.block_on(asked)?)
}

/// A gateway as a run of the recipe has it, whose model ends each turn at once.
fn silent_gateway(recipe: &RunPlan) -> Result<Gateway, Failure> {
    let renderer = crate::renderer(&recipe.model, &recipe.env)?;
    let (vocab, stop) = (renderer.vocab_size(), renderer.stop_ids().first().copied());
    // The run measures the requests of an agent; this check does not.
    let context = 1 << 20;
    let config = FakeConfig {
        model: FakeModel {
            vocab,
            seed: 0,
            end: None,
        },
        context,
        script: Some(Arc::new(move |_| Some(stop.into_iter().collect()))),
        ..FakeConfig::default()
    };
    let engine = FakeEngine::threaded(config, crate::clock()).map_err(Failure::system)?;
    let config = GatewayConfig {
        format: renderer.turn_format(),
        session: SessionLimits {
            max_context_tokens: context as u32,
            ..SessionLimits::default()
        },
        ..GatewayConfig::default()
    };
    let parts = GatewayParts {
        engine: Arc::new(engine),
        renderer,
        store: None,
        requests: Arc::default(),
        capacity: None,
        hooks: None,
    };
    Ok(Gateway::new(config, parts))
}

/// The environment variables that describe a rollout to a program.
fn access(opened: Credentials) -> ModelAccess {
    ModelAccess {
        base_url: opened.base_url,
        api_key: opened.api_key,
        shared_url: opened.shared_url,
        traceparent: opened.traceparent,
    }
}

/// The program and its limits, with paths as they are inside of a sandbox.
fn config(section: &CommandSection, sandbox: &SandboxPlan) -> Result<ProgramConfig, Failure> {
    let in_image = section.image.is_some();
    Ok(ProgramConfig {
        command: ProgramCommand::resolve(&section.command, &section.mounts, in_image)?,
        env: section.env.clone(),
        timeout: Duration::from_secs_f64(section.timeout_s),
        cpu_s: section.cpu_s,
        memory_bytes: section.memory_mb() << 20,
        processes: section.processes,
        preload: section.preload,
        strict: sandbox.strict,
        agent_scores: section.scored_by == ScoredBy::Agent,
        agent: section.agent,
    })
}

/// Sandboxes that show the folders of a program, without a pool. If they are containers, the other keys of
/// `[sandbox]` define how they are started.
fn provider(
    section: &CommandSection,
    command: &ProgramCommand,
    sandbox: &SandboxPlan,
) -> Result<Arc<dyn SandboxProvider>, Failure> {
    match section.level {
        HarnessLevel::Process => {
            let search = std::env::var("PATH").unwrap_or_default();
            let mut config = ProcessConfig::new(&search);
            config.max_live = section.max_programs;
            config.acquire_timeout = Duration::from_secs_f64(section.timeout_s);
            config.shows = command.shows.clone();
            let provider = ProcessProvider::start(config);
            let provider = provider.map_err(|e| Failure::system(format!("harness: {e}")))?;
            Ok(Arc::new(provider))
        }
        HarnessLevel::Container => {
            let own = SandboxPlan {
                level: Level::Container,
                image: section.image.clone(),
                max_sandboxes: section.max_programs,
                ..sandbox.clone()
            };
            Ok(containers(&own, command.shows.clone())?)
        }
    }
}

/// A gateway that shares engine, admission and request ids with the run.
fn gateway(parts: &EpisodeParts) -> Gateway {
    let config = GatewayConfig {
        format: parts.renderer.turn_format(),
        session: unbounded(),
        ..GatewayConfig::default()
    };
    let shared = GatewayParts {
        engine: Arc::clone(&parts.engine),
        renderer: Arc::clone(&parts.renderer),
        // The run commits traces to its own store, with their outcome.
        store: None,
        requests: Arc::clone(&parts.requests),
        capacity: Some(Arc::new(TurnCapacity(Arc::clone(&parts.admission)))),
        hooks: None,
    };
    Gateway::new(config, shared)
}

/// A gateway on a free port of the loopback interface. Its control API is not used: rollouts are opened from
/// here, and its token is thrown away.
fn listening(gateway: &Gateway, runtime: &Handle) -> Result<Server, Failure> {
    let token = Secret::random_hex(24).map_err(Failure::system)?;
    let server = Server::start(gateway.clone(), ([127, 0, 0, 1], 0).into(), &token, None);
    runtime.block_on(server).map_err(Failure::system)
}

/// Limits of a gateway whose rollouts are opened with those of the recipe.
pub(crate) fn unbounded() -> SessionLimits {
    SessionLimits {
        max_turns: u32::MAX,
        max_context_tokens: u32::MAX,
        ..SessionLimits::default()
    }
}

/// A gateway as the model server of programs and services.
///
/// Each episode is a rollout that is opened, scored and finished from here. The agent has only its key, which
/// opens the model, and may report its own reward only if the recipe trusts it.
struct GatewayModel {
    gateway: Gateway,
    /// Agents are trusted with their own scores.
    trusted: bool,
    /// Listens until it is dropped. Only dropping it uses it.
    _server: Mutex<Box<dyn Any + Send>>,
}

impl GatewayModel {
    /// `trusted`: agents may report their own rewards. `server` listens for as long as this value lives.
    fn new(gateway: Gateway, trusted: bool, server: Box<dyn Any + Send>) -> Self {
        Self {
            gateway,
            trusted,
            _server: Mutex::new(server),
        }
    }
}

impl ModelServer for GatewayModel {
    /// Opens the rollout of an episode. The agent gets its address and a key that opens only this rollout.
    fn open(
        &self,
        parts: &EpisodeParts,
        options: &EpisodeOptions,
        spec: &EpisodeSpec,
    ) -> Result<ModelAccess, ModelServerError> {
        let spec = RolloutSpec {
            agent_scores: self.trusted,
            ..rollout(parts, options, spec)
        };
        let opened = self.gateway.open_rollout(spec);
        Ok(access(opened.map_err(ModelServerError::refused)?))
    }

    /// Records what an agent reported: the reward of the episode, then those of turns, counted from 1. A turn
    /// that is refused leaves the reward of the episode, and never a 0 in its place.
    fn score(&self, episode: &EpisodeId, report: &AgentReport) -> Result<(), ModelServerError> {
        let of_turns = report.rewards.iter().zip(1..);
        let of_turns = of_turns.filter_map(|(reward, turn)| Some(((*reward)?, Some(turn))));
        let whole = report.reward.map(|reward| (reward, None));
        for (reward, turn) in whole.into_iter().chain(of_turns) {
            let reward = Reward {
                reward,
                success: report.success,
                metrics: report.metrics.clone(),
                turn,
            };
            let scored = self.gateway.reward(episode, &reward);
            scored.map_err(ModelServerError::refused)?;
        }
        Ok(())
    }

    /// Closes the rollout and gives its trace, which the run commits with its outcome.
    fn finish<'a>(
        &'a self,
        episode: &'a EpisodeId,
        end: Option<EpisodeEnd>,
    ) -> BoxFuture<'a, Result<Trace, ModelServerError>> {
        Box::pin(async move {
            let trace = self.gateway.finish(episode, end).await;
            trace.map_err(ModelServerError::refused)
        })
    }
}

/// The rollout of an episode: its identity and seed, and sampling that a program cannot change.
fn rollout(parts: &EpisodeParts, options: &EpisodeOptions, spec: &EpisodeSpec) -> RolloutSpec {
    let trace = spec.empty_trace(&parts.run, &options.turn_sampling());
    RolloutSpec {
        id: Some(spec.episode.clone()),
        group: spec.group.clone(),
        task: spec.task.id.clone(),
        task_kind: spec.task.kind.clone(),
        run: trace.origin.run,
        draw: trace.origin.draw,
        purpose: trace.origin.purpose,
        adapter: trace.provenance.adapter.clone(),
        external: None,
        provenance: trace.provenance,
        seed: spec.seed,
        sampling: sampling(options),
        max_turns: Some(options.limits.max_turns),
        max_context_tokens: Some(options.limits.max_context_tokens),
        agent_scores: false,
        thinking: Some(options.thinking),
    }
}

/// Sampling that no agent can change: the policy that learns must be the one that acted.
pub(crate) fn sampling(options: &EpisodeOptions) -> SamplingDefaults {
    SamplingDefaults {
        temperature: Some(options.sampling.temperature),
        top_p: Some(options.sampling.top_p),
        top_k: Some(options.sampling.top_k),
        min_p: Some(options.sampling.min_p),
        max_tokens: Some(options.limits.max_turn_tokens),
        pinned: true,
        routes: options.sampling.routes_from.is_some(),
    }
}
