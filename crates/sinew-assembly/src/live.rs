//! The gateway of a run at a separate address: for services that a recipe drives, and for agents that run
//! already and open rollouts by themselves.
//!
//! | `harness.type` | opens rollouts | finished traces | open rollouts |
//! |---|---|---|---|
//! | `service` | the run, one for each episode, with its outcome to come | committed by the run | end with the process |
//! | `live` | agents, with the control token | committed by the gateway, then trained | in `RUN/journal`, over a restart |
//!
//! With `rollout.place = "workers"` each worker has such a gateway for agents: the run stores a rollout
//! before its agent is answered, and open rollouts end with their worker.
//!
//! Rollouts that are committed with the purpose `live` and are in no update are still to be trained. A
//! resumed run needs no other state. The control token stays in `RUN/control-token`, readable only by its
//! owner, so that agents can use it after a restart.

use crate::Session;
use crate::failure::Failure;
use crate::harness::sampling;
use crate::listen::TlsArgs;
use crate::source::min_group;
use crate::token::read_token;
use clap::Args;
use sinew_gateway::{
    ApiError, Gateway, GatewayConfig, GatewayParts, Journal, JournalOptions, RolloutHooks,
    RolloutSpec, Secret, Server, TrainingHooks,
};
use sinew_orchestrator::RunEvent;
use sinew_pipeline::{LateRewards, RunStore, SampleSource};
use sinew_recipe::{LiveSection, RolloutPlace, RunPlan};
use sinew_rollout::{EpisodeOptions, EpisodeParts};
use sinew_runs::RunDir;
use sinew_sources::{IntakeConfig, LIVE, LiveRollouts, LiveSource, MAX_WAITING};
use sinew_store::{CommitOutcome, StoreError, TraceStore};
use sinew_types::{EpisodeId, Trace};
use sinew_workers::{Desk, DeskClient, LiveAgents, LiveInbox, OwnerTraces};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::watch;

/// Addresses of a run: of its gateway, and of the roles that work for it.
#[derive(Clone, Debug, Default, Args)]
pub struct ServeAt {
    /// Address at which agents outside reach the run's model, as in 127.0.0.1:8080; needed with
    /// harness.type = "live" or "service", refused without
    #[arg(long, value_name = "ADDR")]
    serve: Option<SocketAddr>,
    /// Address at which workers and other roles reach the run, as in 0.0.0.0:9000: they run its episodes,
    /// see docs/workers.md
    #[arg(long, value_name = "ADDR")]
    control: Option<SocketAddr>,
    /// File with the token that opens the control API of --serve, and that every role of --control has;
    /// default: RUN/control-token, which is made
    #[arg(long, value_name = "FILE")]
    control_token_file: Option<PathBuf>,
    /// Address at which agents reach --serve, if it is another one
    #[arg(long, requires = "serve")]
    public_url: Option<String>,
    /// TLS of the run's listeners.
    #[command(flatten)]
    pub tls: TlsArgs,
    /// They are those of a worker, which has only a gateway.
    #[arg(skip)]
    of_worker: bool,
}

impl ServeAt {
    /// The options as they were typed, each after a space; empty without an address.
    pub fn typed(&self) -> String {
        let token = self.control_token_file.as_ref();
        let all = [
            ("serve", self.serve.map(|address| address.to_string())),
            ("control", self.control.map(|address| address.to_string())),
            (
                "control-token-file",
                token.map(|file| file.display().to_string()),
            ),
            ("public-url", self.public_url.clone()),
        ];
        let typed = all
            .into_iter()
            .filter_map(|(name, value)| Some(format!(" --{name} {}", value?)));
        typed.collect::<String>() + &self.tls.typed()
    }

    /// The address, if the harness of a recipe is one that agents outside must find.
    ///
    /// # Errors
    /// If such a harness has no address, or another one has one, which would have no effect.
    pub fn address(&self, recipe: &RunPlan) -> Result<Option<SocketAddr>, Failure> {
        let harness = &recipe.harness;
        let kind = harness.name();
        let owns = !self.of_worker && (self.control.is_some() || recipe.launch.is_some());
        let elsewhere = owns && recipe.rollout.place == RolloutPlace::Workers;
        if let (None, None, Some(file)) = (self.serve, self.control, &self.control_token_file) {
            return Err(Failure::input(format!(
                "--control-token-file {}: it has no effect without --serve or --control; leave it out",
                file.display()
            )));
        }
        match (self.serve, harness.is_served()) {
            // Each worker serves its own gateway.
            (None, true) if owns && (harness.live().is_none() || elsewhere) => Ok(None),
            (Some(at), true) if elsewhere && harness.live().is_some() => {
                Err(Failure::input(format!(
                    "--serve {at}: agents reach the gateways of the workers; leave it out, and give each worker \
                     --serve"
                )))
            }
            (None, true) => Err(Failure::input(format!(
                "harness.type = \"{kind}\": agents outside need an address\n  hint: --serve 127.0.0.1:8080"
            ))),
            (Some(at), false) => Err(Failure::input(format!(
                "--serve {at}: it has no effect with harness.type = \"{kind}\"\n  \
                 hint: [harness] type = \"live\" trains agents that run already, \"service\" drives one"
            ))),
            (at, _) => Ok(at),
        }
    }

    /// The address for roles, if the run has one.
    pub fn control(&self) -> Option<SocketAddr> {
        self.control
    }

    /// Whether the file of the token was named.
    pub(crate) fn names_token(&self) -> bool {
        self.control_token_file.is_some()
    }

    /// The same addresses for a worker, which has only a gateway: the token of the run opens its control API.
    #[must_use]
    pub fn of_worker(
        serve: Option<SocketAddr>,
        public_url: Option<String>,
        token_file: &Path,
        tls: TlsArgs,
    ) -> Self {
        Self {
            serve,
            public_url,
            control_token_file: serve.map(|_| token_file.to_owned()),
            tls,
            of_worker: true,
            ..Self::default()
        }
    }

    /// The file with the control token, and the token. The file of a run is made once.
    ///
    /// # Errors
    /// If it cannot be made or read, or is too short to be secret.
    pub(crate) fn token(&self, dir: &RunDir) -> Result<(PathBuf, String), Failure> {
        let given = self.control_token_file.clone();
        let path = given.unwrap_or_else(|| dir.path().join("control-token"));
        if self.control_token_file.is_none() && !path.exists() {
            let token = Secret::random_hex(24).map_err(Failure::system)?;
            let mut options = std::fs::OpenOptions::new();
            let file = options.create_new(true).write(true).mode(0o600).open(&path);
            let written = file.and_then(|mut file| writeln!(file, "{token}"));
            written.map_err(|e| Failure::system(format!("{}: {e}", path.display())))?;
        }
        let token = read_token(&path)?;
        Ok((path, token))
    }

    /// Listens, and returns the address, once connections are taken.
    ///
    /// # Errors
    /// If the address is in use, or the token cannot be read.
    pub(crate) fn start(
        &self,
        session: &Session<'_>,
        gateway: Gateway,
        address: SocketAddr,
    ) -> Result<LiveServer, Failure> {
        let (token_file, token) = self.token(session.dir)?;
        let public = self.public_url.clone();
        let tls = &self.tls;
        let endpoint = tls.endpoint_of_run("--serve", address, session.dir.path())?;
        let scheme = endpoint.scheme();
        let listening = Server::start_with(gateway, endpoint, &token, public, None);
        let server = session.runtime.block_on(listening);
        let server = server.map_err(|e| Failure::input(format!("--serve: {e}")))?;
        let url = self.public_url.clone();
        let url = url.unwrap_or_else(|| format!("{scheme}://{}", server.address()));
        session.bus.emit(RunEvent::Serving { url, token_file })?;
        Ok(LiveServer {
            server: Some(server),
            runtime: session.runtime.clone(),
            interrupted: None,
        })
    }
}

/// Time in which outside agents learn that their run has ended.
const NOTICE: Duration = Duration::from_secs(1);

/// A listening gateway; dropped, it lets running calls end.
pub(crate) struct LiveServer {
    /// Taken out when this value is dropped.
    server: Option<Server>,
    /// Runtime on which calls that still run are awaited.
    runtime: Handle,
    /// Whether the run was interrupted, so that agents should wait for its next session. Left out where
    /// no agent opens rollouts.
    interrupted: Option<watch::Receiver<bool>>,
}

impl LiveServer {
    /// Tells external agents that the run has ended, unless it was interrupted.
    fn with_notice(mut self, interrupted: watch::Receiver<bool>) -> Self {
        self.interrupted = Some(interrupted);
        self
    }
}

impl Drop for LiveServer {
    fn drop(&mut self) {
        let Some(server) = self.server.take() else {
            return;
        };
        match &self.interrupted {
            Some(interrupted) if !*interrupted.borrow() => {
                self.runtime.block_on(server.end(NOTICE));
            }
            _ => {
                self.runtime.block_on(server.stop());
            }
        }
    }
}

/// The source of `harness.type = "live"`: a gateway in front of the run's engine, whose finished rollouts
/// are committed to the run's store and trained. `None` with another harness.
///
/// Sampling and limits are those of `[rollout]`, whatever clients ask for: the policy that learns must be the
/// one that acted. Calls that come while the weights change continue between two tokens. The source takes
/// `late`, if there is one: groups wait in it for the rewards from outside.
///
/// # Errors
/// If the journal or the store cannot be read, or the address is in use.
pub(crate) fn source(
    recipe: &RunPlan,
    session: &Session<'_>,
    parts: &EpisodeParts,
    options: &EpisodeOptions,
    store: &RunStore,
    late: &mut Option<LateRewards>,
) -> Result<Option<Box<dyn SampleSource>>, Failure> {
    let Some(section) = recipe.harness.live() else {
        return Ok(None);
    };
    let Some(address) = session.serve.address(recipe)? else {
        return Ok(None);
    };
    let live = Arc::new(rollouts(recipe, section, store, late.is_some())?);
    let (opened, finished) = (Arc::clone(&live), Arc::clone(&live));
    let hooks = TrainingHooks {
        run: spec(recipe, parts, options),
        on_open: Box::new(move || opened.opened()),
        on_finish: Box::new(move |trace| finished.finished(trace)),
    };
    let journal = Arc::new(journal(session.dir)?);
    let traces = Arc::clone(&store.traces);
    let gateway = gateway(parts, traces, Some(journal), Arc::new(hooks));
    gateway
        .recover()
        .map_err(|e| Failure::system(format!("journal of rollouts: {e}")))?;
    let server = session.serve.start(session, gateway, address)?;
    let idle = Duration::from_secs_f64(section.idle_s);
    let server = server.with_notice(session.cancel.clone());
    let source = LiveSource::new(live, idle, session.cancel.clone(), Box::new(server));
    Ok(Some(match late.take() {
        Some(late) => Box::new(source.with_late(late)),
        None => Box::new(source),
    }))
}

/// Rollouts that finished and are not trained yet. `late`: their rewards may come from outside.
fn rollouts(
    recipe: &RunPlan,
    section: &LiveSection,
    store: &RunStore,
    late: bool,
) -> Result<LiveRollouts, Failure> {
    let config = IntakeConfig {
        group_size: recipe.rollout.group_size,
        min_group: min_group(recipe).min(recipe.rollout.group_size),
        group_wait_s: section.group_wait_s,
        // Rollouts that wait for a reward have a separate limit: reward.late.max_staleness.
        max_age: if late { u64::MAX } else { section.max_age },
        max_waiting: MAX_WAITING,
    };
    Ok(LiveRollouts::open(config, store.traces.as_ref(), late)?)
}

/// Facts and limits of every rollout of a run, whatever its agent asks for.
fn spec(recipe: &RunPlan, parts: &EpisodeParts, options: &EpisodeOptions) -> RolloutSpec {
    RolloutSpec {
        run: parts.run.name.clone(),
        purpose: LIVE.into(),
        provenance: parts.run.provenance.clone(),
        seed: recipe.seed,
        sampling: sampling(options),
        max_turns: Some(options.limits.max_turns),
        max_context_tokens: Some(options.limits.max_context_tokens),
        thinking: Some(options.thinking),
        ..RolloutSpec::default()
    }
}

/// A gateway in front of the engine of a run, for agents that open rollouts.
fn gateway(
    parts: &EpisodeParts,
    traces: Arc<dyn TraceStore>,
    journal: Option<Arc<Journal>>,
    hooks: Arc<dyn RolloutHooks>,
) -> Gateway {
    let config = GatewayConfig {
        format: parts.renderer.turn_format(),
        session: crate::harness::unbounded(),
        journal,
        ..GatewayConfig::default()
    };
    let shared = GatewayParts {
        engine: Arc::clone(&parts.engine),
        renderer: Arc::clone(&parts.renderer),
        store: Some(traces),
        requests: Arc::clone(&parts.requests),
        // Agents pace themselves; the engine's own queue holds calls back.
        capacity: None,
        hooks: Some(hooks),
    };
    Gateway::new(config, shared)
}

/// The source of `harness.type = "live"` whose gateways are those of the run's workers. `None` with another
/// harness.
pub(crate) fn source_of_workers(
    recipe: &RunPlan,
    session: &Session<'_>,
    store: &RunStore,
    desk: &Desk,
) -> Result<Option<Box<dyn SampleSource>>, Failure> {
    let Some(section) = recipe.harness.live() else {
        return Ok(None);
    };
    let live = Arc::new(rollouts(recipe, section, store, false)?);
    desk.receive(Arc::new(Inbox {
        live: Arc::clone(&live),
        traces: Arc::clone(&store.traces),
    }));
    let idle = Duration::from_secs_f64(section.idle_s);
    let source = LiveSource::new(live, idle, session.cancel.clone(), Box::new(()));
    Ok(Some(Box::new(source)))
}

/// Rollouts that workers bring.
struct Inbox {
    live: Arc<LiveRollouts>,
    traces: Arc<dyn TraceStore>,
}

impl LiveInbox for Inbox {
    fn opened(&self) {
        self.live.opened();
    }

    fn finished(&self, trace: &Trace) -> Result<(), StoreError> {
        if self.traces.commit(trace)? == CommitOutcome::Duplicate {
            // An answer was lost, or an agent gave a name that is taken.
            let stored = self.traces.get(&trace.episode)?;
            if stored.is_none_or(|stored| stored.nodes != trace.nodes) {
                return Err(StoreError::Row {
                    key: trace.episode.to_string(),
                    reason: "a finished rollout has this id: choose another one".to_owned(),
                });
            }
        }
        if trace.origin.purpose == LIVE {
            self.live.finished(trace);
        }
        Ok(())
    }
}

/// The gateway of a worker for agents; dropped, it stops.
pub(crate) struct WorkerGateway {
    agents: Arc<GatewayAgents>,
    /// Says whether the run is over when the gateway stops.
    interrupted: watch::Sender<bool>,
    /// Listens until it is dropped. Only dropping it uses it.
    _server: LiveServer,
}

impl WorkerGateway {
    /// The agents at it.
    pub(crate) fn agents(&self) -> Arc<dyn LiveAgents> {
        Arc::<GatewayAgents>::clone(&self.agents)
    }

    /// The run is over: agents that ask during the stop hear that they need not wait for it.
    pub(crate) fn run_is_over(&self) {
        self.interrupted.send_replace(false);
    }
}

/// Starts the gateway of a worker for agents, whose rollouts the owner stores. `None` with another harness.
///
/// # Errors
/// If the worker has no address for agents, or the address is in use.
pub(crate) fn on_worker(
    recipe: &RunPlan,
    session: &Session<'_>,
    parts: &EpisodeParts,
    options: &EpisodeOptions,
    owner: &Arc<DeskClient>,
) -> Result<Option<WorkerGateway>, Failure> {
    if recipe.harness.live().is_none() {
        return Ok(None);
    }
    let Some(address) = session.serve.address(recipe)? else {
        return Ok(None);
    };
    let opened = Arc::<AtomicU64>::default();
    let leaves = Arc::<AtomicBool>::default();
    let counted = Arc::clone(&opened);
    let hooks = WorkerHooks {
        training: TrainingHooks {
            run: spec(recipe, parts, options),
            on_open: Box::new(move || {
                counted.fetch_add(1, Ordering::Relaxed);
            }),
            // The owner has it already.
            on_finish: Box::new(|_| {}),
        },
        leaves: Arc::clone(&leaves),
    };
    let traces = Arc::new(OwnerTraces::new(Arc::clone(owner)));
    let gateway = gateway(parts, traces, None, Arc::new(hooks));
    let server = session.serve.start(session, gateway.clone(), address)?;
    let (interrupted, seen) = watch::channel(true);
    Ok(Some(WorkerGateway {
        agents: Arc::new(GatewayAgents {
            gateway,
            opened,
            leaves,
        }),
        interrupted,
        _server: server.with_notice(seen),
    }))
}

/// Hooks of a worker's gateway: one that leaves opens no more rollouts, and ends those that are open.
struct WorkerHooks {
    training: TrainingHooks,
    leaves: Arc<AtomicBool>,
}

impl RolloutHooks for WorkerHooks {
    fn opening(&self, spec: &mut RolloutSpec) -> Result<(), ApiError> {
        if self.leaves.load(Ordering::Relaxed) {
            let why = "this worker leaves: open the rollout at another one";
            return Err(ApiError::overloaded("leaving", why));
        }
        self.training.opening(spec)
    }

    fn finished(&self, trace: &Trace) {
        self.training.finished(trace);
    }
}

/// Agents at the gateway of a worker.
struct GatewayAgents {
    gateway: Gateway,
    opened: Arc<AtomicU64>,
    leaves: Arc<AtomicBool>,
}

impl LiveAgents for GatewayAgents {
    fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    fn open(&self, most: usize) -> (usize, Vec<EpisodeId>) {
        let live = self.gateway.live(most);
        let named = live.rollouts.into_iter().map(|rollout| rollout.id);
        (live.total, named.collect())
    }

    fn leave(&self) {
        self.leaves.store(true, Ordering::Relaxed);
    }
}

/// Journal in which open rollouts outlive the process.
fn journal(dir: &RunDir) -> Result<Journal, Failure> {
    let journal = Journal::open(&dir.path().join("journal"), JournalOptions::default());
    journal.map_err(|e| Failure::input(format!("journal of rollouts: {e}")))
}
