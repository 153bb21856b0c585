//! The threads of a desk: started, stopped, and joined.

use super::clerk::{Clerk, ClerkParts, Job, Line, WallClock};
use super::config::{DeskLimits, LimitError, TenantConfig};
use super::flight_orders::FlightOrders;
use super::flights::{FlightParts, Flights, MakeEngine};
use super::folders::Folders;
use super::handle::Desk;
use super::journal::{Journal, OpenError};
use super::orders::Orders;
use super::residents::TrainerSupport;
use super::rules::BaseRules;
use super::trainer::{MakeResidents, Trainer, TrainerLimits};
use super::types::ServedModel;
use crate::batch::BatchLimits;
use sinew_types::{Engine, TokenId};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;

/// Jobs that wait for the clerk; callers wait for a place.
const JOBS: usize = 1024;
/// Most targets of a datum.
const MAX_TARGETS: usize = 1 << 17;

/// Settings of a desk.
#[derive(Clone, Debug)]
pub struct DeskConfig {
    /// Folder of journal and checkpoints, of which this process is the only user.
    pub state: PathBuf,
    /// Limits.
    pub limits: DeskLimits,
    /// Tenants with limits of their own; others have those of all.
    pub tenants: Vec<TenantConfig>,
    /// Names of the base model, with what clients see of it. At least one.
    pub served: Vec<ServedModel>,
    /// Number of token ids of the base model.
    pub vocab: usize,
    /// Tokens that end a sequence, unless a request says otherwise.
    pub stop_ids: Vec<TokenId>,
    /// Models that the trainer makes.
    pub support: TrainerSupport,
    /// Whether the engine takes adapters by name.
    pub samples_adapters: bool,
}

/// Parts that a desk drives.
pub struct DeskParts {
    /// The trainer's models, made on its thread.
    pub residents: MakeResidents,
    /// The engine with the base model.
    pub engine: Arc<dyn Engine>,
    /// Engines for whole models; `None`: they are not sampled.
    pub full_engines: Option<MakeEngine>,
    /// The time.
    pub clock: WallClock,
}

sinew_types::debug_fields!(
    DeskParts as this,
    full_engines = this.full_engines.is_some()
);

/// Milliseconds since 1970 (UTC).
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

/// The system's clock.
pub fn wall_clock() -> WallClock {
    Arc::new(now_ms)
}

/// The threads of a desk. Dropping it stops them as a kill would: what was acknowledged is in the journal.
/// [`Desk::drain`] before it saves the time of a replay.
#[derive(Debug)]
pub struct RunningDesk {
    stop: Arc<AtomicBool>,
    wake: mpsc::Sender<Job>,
    orders: Arc<Orders>,
    flights: Arc<FlightOrders>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for RunningDesk {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.orders.stop();
        self.flights.stop();
        // The clerk looks at the flag after each job; a full queue wakes it, too.
        let (job, _) = super::clerk::job(|_| Ok(()));
        let _ = self.wake.try_send(job);
        for thread in self.threads.drain(..) {
            // A panic was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn start_failed(error: impl std::fmt::Display) -> OpenError {
    OpenError::Start(error.to_string())
}

/// Starts a named thread.
fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, OpenError> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(work).map_err(start_failed)
}

impl Desk {
    /// Opens a desk: reads its journal, makes the trainer's place, and continues with the commands that wait.
    /// Blocks until the trainer is there; must not be called on a thread of an async runtime.
    ///
    /// # Errors
    /// If a limit is out of its range, the folder is in use or damaged, or the trainer cannot be made.
    pub fn open(config: DeskConfig, parts: DeskParts) -> Result<(Self, RunningDesk), OpenError> {
        check(&config)?;
        let journal = Journal::open(&config.state)?;
        Self::open_with(config, parts, journal)
    }

    /// Opens a desk on an open journal.
    pub(super) fn open_with(
        config: DeskConfig,
        parts: DeskParts,
        journal: Journal,
    ) -> Result<(Self, RunningDesk), OpenError> {
        let (jobs, arriving) = mpsc::channel(JOBS);
        let mut running = RunningDesk {
            stop: Arc::new(AtomicBool::new(false)),
            wake: jobs.clone(),
            orders: Arc::new(Orders::default()),
            flights: Arc::new(FlightOrders::default()),
            threads: Vec::new(),
        };
        let folders = Folders::new(&config.state);
        let rules = rules(&config, &parts);
        let line = Line::new(jobs.clone());
        let clerk = Clerk::open(ClerkParts {
            journal,
            folders: folders.clone(),
            limits: config.limits.clone(),
            tenants: config.tenants.clone(),
            served: config.served.clone(),
            rules: rules.clone(),
            orders: Arc::clone(&running.orders),
            flights: Arc::clone(&running.flights),
            clock: parts.clock,
            stop: Arc::clone(&running.stop),
        });
        let clerk = clerk.map_err(start_failed)?;
        let limits = trainer_limits(&config.limits, &rules);
        let orders = Arc::clone(&running.orders);
        let trainer = (line.clone(), orders, parts.residents, folders.clone());
        running.threads.push(start_trainer(trainer, limits)?);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .map_err(start_failed)?;
        let thread = spawn("tinker-clerk", move || clerk.run(arriving, &runtime))?;
        running.threads.push(thread);
        let flights = Flights::new(FlightParts {
            line,
            orders: Arc::clone(&running.flights),
            engine: parts.engine,
            make: parts.full_engines,
            folders,
            rules,
            loaded_adapters: config.limits.loaded_adapters,
            full_samplers: config.limits.full_samplers,
        });
        let thread = spawn("tinker-flights", move || flights.run())?;
        running.threads.push(thread);
        Ok((Self::new(jobs, config.served), running))
    }
}

/// Starts the trainer's thread, and waits until it has made its place.
fn start_trainer(
    parts: (Line, Arc<Orders>, MakeResidents, Folders),
    limits: TrainerLimits,
) -> Result<JoinHandle<()>, OpenError> {
    let (ready, made) = sync_channel(1);
    let thread = spawn("tinker-trainer", move || {
        let (line, orders, make, folders) = parts;
        match Trainer::new(line, orders, make, folders, limits) {
            Ok(trainer) => {
                // Nobody waits if the desk was given up.
                let _ = ready.send(Ok(()));
                trainer.run();
            }
            Err(why) => {
                let _ = ready.send(Err(why));
            }
        }
    })?;
    match made.recv() {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(why)) => Err(OpenError::Start(why)),
        Err(_) => Err(OpenError::Start("the trainer panicked".to_owned())),
    }
}

fn rules(config: &DeskConfig, parts: &DeskParts) -> BaseRules {
    let contexts = config.served.iter().map(|model| model.max_context);
    BaseRules {
        vocab: config.vocab,
        context: contexts.min().unwrap_or(0),
        stop_ids: config.stop_ids.clone(),
        support: config.support.clone(),
        samples_adapters: config.samples_adapters,
        samples_full: parts.full_engines.is_some(),
    }
}

fn trainer_limits(limits: &DeskLimits, rules: &BaseRules) -> TrainerLimits {
    TrainerLimits {
        batch: BatchLimits {
            vocab: rules.vocab,
            context: rules.context,
            // A sequence is never divided.
            micro_batch_tokens: limits.micro_batch_tokens.max(rules.context),
            targets: MAX_TARGETS,
        },
        small_state_bytes: limits.small_state_bytes,
        checkpoint_every: limits.checkpoint_every,
        replay_tokens: limits.replay_tokens,
        idle: Duration::from_secs(limits.resident_idle_s),
    }
}

/// Refuses settings under which nothing works.
fn check(config: &DeskConfig) -> Result<(), OpenError> {
    config.limits.validate()?;
    for tenant in &config.tenants {
        if let Some(limits) = &tenant.limits {
            limits.validate(&format!("tenant.{}", tenant.name))?;
        }
    }
    if config.served.is_empty() {
        return Err(OpenError::Limit(LimitError {
            key: "served".to_owned(),
            value: "[]".to_owned(),
            allowed: "at least one name of the base model".to_owned(),
        }));
    }
    Ok(())
}
