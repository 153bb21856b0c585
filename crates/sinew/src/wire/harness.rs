//! The harness of a recipe: the built-in loop, or a program whose model server is a gateway.
//!
//! `sinew-rollout` runs programs against the port [`ModelServer`]; here the gateway implements it. The
//! gateway shares engine, admission and request ids with the run, and has no store: traces are committed
//! by the run, with their outcome.

use super::admission::TurnCapacity;
use crate::failure::Failure;
use futures::future::BoxFuture;
use sinew_env::{Split, Taskset};
use sinew_gateway::{
    Gateway, GatewayConfig, GatewayParts, RolloutSpec, SamplingDefaults, Secret, Server,
};
use sinew_levels::containers;
use sinew_recipe::{CommandSection, HarnessLevel, HarnessSection, Level, SandboxPlan};
use sinew_render::Renderer;
use sinew_rollout::{
    Admission, BuiltInLoop, EpisodeOptions, EpisodeParts, EpisodeSpec, Harness, ModelAccess,
    ModelServer, ProgramCommand, ProgramConfig, ProgramError, ProgramHarness, Programs,
};
use sinew_sandbox::{ProcessConfig, ProcessProvider, SandboxProvider};
use sinew_types::{Engine, EpisodeEnd, EpisodeId, Trace};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
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

/// The parts of a run that a gateway for programs shares with it, so that its calls and those of the run
/// wait in one queue.
pub(crate) struct Shared<'a> {
    pub(crate) engine: &'a Arc<dyn Engine>,
    pub(crate) renderer: &'a Arc<dyn Renderer>,
    pub(crate) admission: &'a Arc<Admission>,
    /// Source of request ids.
    pub(crate) requests: &'a Arc<AtomicU64>,
}

/// The harness of a recipe. For a program, a gateway on a free port of the loopback interface and the
/// sandboxes' spawner are started now and end with the harness.
///
/// # Errors
/// If the program or a folder of it is missing, or its sandboxes cannot be started here.
pub(crate) fn build(
    section: &HarnessSection,
    sandbox: &SandboxPlan,
    shared: &Shared<'_>,
    runtime: &Handle,
) -> Result<Arc<dyn Harness>, Failure> {
    let HarnessSection::Command(section) = section else {
        return Ok(Arc::new(BuiltInLoop));
    };
    let config = config(section, sandbox)?;
    let provider = provider(section, &config.command, sandbox)?;
    let server = runtime.block_on(GatewayServer::start(shared))?;
    let programs = Programs::new(config, provider, server.address())?;
    Ok(Arc::new(ProgramHarness::new(programs, Arc::new(server))))
}

/// Checks that the program is there and that its sandbox can be built; the answer is a row of `sinew check`.
pub(crate) fn check(section: &HarnessSection, sandbox: &SandboxPlan) -> Result<String, Failure> {
    let HarnessSection::Command(section) = section else {
        return Ok("built in".into());
    };
    let config = config(section, sandbox)?;
    let provider = provider(section, &config.command, sandbox)?;
    // Nothing connects to it.
    let discard = ([127, 0, 0, 1], 9).into();
    let programs = Programs::new(config, provider, discard)?;
    let runtime = Runtime::new().map_err(Failure::system)?;
    runtime.block_on(programs.check_sandbox())?;
    Ok(format!(
        "{}: in a sandbox ({}) that reaches the gateway and nothing else{}",
        section.command.join(" "),
        section.level,
        if section.preload { ", forked" } else { "" }
    ))
}

/// Starts the program once with the first task and a model that answers nothing.
///
/// # Errors
/// If it ends before it asks the model.
pub(crate) fn asks_model(
    section: &HarnessSection,
    sandbox: &SandboxPlan,
    tasks: &dyn Taskset,
) -> Result<(), Failure> {
    let HarnessSection::Command(section) = section else {
        return Ok(());
    };
    let task = tasks.get(Split::Train, 0).map_err(Failure::system)?;
    let config = config(section, sandbox)?;
    let provider = provider(section, &config.command, sandbox)?;
    let runtime = Runtime::new().map_err(Failure::system)?;
    Ok(runtime.block_on(Programs::asks_model(config, provider, &task))?)
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
    })
}

/// Sandboxes that show the folders of a program, without a pool. In a container, the other keys of
/// `[sandbox]` say how it is started.
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

/// A gateway as the model server of programs.
struct GatewayServer {
    gateway: Gateway,
    /// Listens until it is dropped.
    server: Server,
}

impl GatewayServer {
    async fn start(shared: &Shared<'_>) -> Result<Self, Failure> {
        let config = GatewayConfig {
            format: shared.renderer.turn_format(),
            ..GatewayConfig::default()
        };
        let parts = GatewayParts {
            engine: Arc::clone(shared.engine),
            renderer: Arc::clone(shared.renderer),
            // The run commits traces to its own store, with their outcome.
            store: None,
            requests: Arc::clone(shared.requests),
            capacity: Some(Arc::new(TurnCapacity(Arc::clone(shared.admission)))),
        };
        let gateway = Gateway::new(config, parts);
        // The control API is not used: rollouts are opened from here. Its token is thrown away.
        let token = Secret::random_hex(24).map_err(Failure::system)?;
        let any = ([127, 0, 0, 1], 0).into();
        let server = Server::start(gateway.clone(), any, &token, None).await;
        let server = server.map_err(Failure::system)?;
        Ok(Self { gateway, server })
    }

    fn address(&self) -> SocketAddr {
        self.server.address()
    }
}

impl ModelServer for GatewayServer {
    fn open(
        &self,
        parts: &EpisodeParts,
        options: &EpisodeOptions,
        spec: &EpisodeSpec,
    ) -> Result<ModelAccess, String> {
        let opened = self.gateway.open_rollout(rollout(parts, options, spec));
        let opened = opened.map_err(|e| e.to_string())?;
        Ok(ModelAccess {
            base_url: opened.base_url,
            api_key: opened.api_key,
        })
    }

    fn finish<'a>(
        &'a self,
        episode: &'a EpisodeId,
        end: Option<EpisodeEnd>,
    ) -> BoxFuture<'a, Result<Trace, String>> {
        Box::pin(async move {
            let trace = self.gateway.finish(episode, end).await;
            trace.map_err(|e| e.to_string())
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
        external: None,
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
