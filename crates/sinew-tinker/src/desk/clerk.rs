//! The clerk: the one thread that owns the journal. Calls of clients, and results of the trainer and of the
//! engine, are jobs for it.
//!
//! Jobs that arrive together share one transaction. Replies, and orders to the other threads, go out only
//! after its commit: nobody ever sees, or acts on, what a kill could take back. If a commit fails, the clerk
//! reads its state from the journal again, and the trainer forgets what it has in memory.

mod dispatch;
mod jobs;
mod load;
mod ran;
mod records;
mod retrieve;
mod samples;
mod sessions;
mod submit;
mod upkeep;

pub(super) use jobs::{Job, Line, job};
pub(super) use ran::{Done, Live, Ran};
pub(super) use retrieve::Found;
pub(super) use samples::sample_cancelled;

use super::config::{DeskLimits, TenantConfig};
use super::flight_orders::{AdapterSource, FlightOrders, SampleTask};
use super::folders::Folders;
use super::journal::{Journal, ModelRow, SessionRow};
use super::orders::{Orders, Work};
use super::quota::Meter;
use super::rules::BaseRules;
use super::schedule::Schedule;
use super::share::Share;
use super::types::{DeskStatus, ModelId, Refusal, RequestId, ServedModel, SessionId, Tenant};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// Wait for jobs after which the upkeep is looked at.
const TICK: Duration = Duration::from_secs(1);
/// Maximum number of jobs in a transaction.
const MAX_BATCH: usize = 256;
/// Pause after a commit that failed: the disk may be full.
const AFTER_FAILURE: Duration = Duration::from_secs(1);

/// Milliseconds since 1970 (UTC).
pub type WallClock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// A message that goes out after the commit.
#[derive(Debug)]
enum Effect {
    /// Wakes those who wait for a request or a sampling session.
    Ring(String),
    /// A command for the trainer.
    Run(Box<Work>),
    /// The trainer forgets a model.
    Forget(ModelId),
    /// A folder is not needed any more.
    Remove(String),
    /// A request for the engine.
    Sample(Box<SampleTask>),
    /// The engine's request is given up.
    CancelSample(RequestId),
    /// Weights of this folder leave the engine.
    Ground(String),
    /// An adapter at the engine is replaced.
    Publish(AdapterSource),
    /// The trainer writes all states.
    Drain,
}

/// Parts of a clerk.
pub(super) struct ClerkParts {
    pub(super) journal: Journal,
    pub(super) folders: Folders,
    pub(super) limits: DeskLimits,
    pub(super) tenants: Vec<TenantConfig>,
    pub(super) served: Vec<ServedModel>,
    pub(super) rules: BaseRules,
    pub(super) orders: Arc<Orders>,
    pub(super) flights: Arc<FlightOrders>,
    pub(super) clock: WallClock,
    /// Set when the thread has to end at once.
    pub(super) stop: Arc<AtomicBool>,
}

/// State of the clerk's thread. Calls of clients are refused as `Desk` documents it, and all of them if the
/// journal fails.
pub(super) struct Clerk {
    parts: ClerkParts,
    schedule: Schedule,
    share: Share,
    meter: Meter,
    effects: Vec<Effect>,
    /// Those who wait, by request or sampling session.
    bells: BTreeMap<String, Vec<oneshot::Sender<()>>>,
    /// When clients of open sessions were last heard.
    heard: BTreeMap<SessionId, u64>,
    /// When results were retrieved, until the upkeep writes it.
    retrieved: BTreeMap<RequestId, u64>,
    /// Time of the batch, in milliseconds since 1970.
    now: u64,
    /// Number of the last end of a command.
    last_end: u64,
    /// Readings of the journal: orders and results of an earlier one do not count.
    epoch: u64,
    next_upkeep: u64,
    /// A report of the trainer or the engine that could not be written.
    broken: Option<Refusal>,
    drain: Option<oneshot::Sender<Result<(), Refusal>>>,
    /// The result of a drain, after which the thread ends.
    drained: Option<Result<(), String>>,
    status: DeskStatus,
}

impl Clerk {
    /// A clerk with the state of its journal.
    pub(super) fn open(parts: ClerkParts) -> Result<Self, Refusal> {
        let limits = &parts.limits;
        let mut clerk = Self {
            schedule: Schedule::new(limits.quantum_tokens, parts.rules.support.switches),
            share: Share::new(limits.engine_sequences as u64),
            meter: Meter::new(limits, &parts.tenants),
            effects: Vec::new(),
            bells: BTreeMap::new(),
            heard: BTreeMap::new(),
            retrieved: BTreeMap::new(),
            now: (parts.clock)(),
            last_end: 0,
            epoch: 0,
            next_upkeep: 0,
            broken: None,
            drain: None,
            drained: None,
            status: DeskStatus::default(),
            parts,
        };
        clerk.load()?;
        clerk.sweep()?;
        Ok(clerk)
    }

    /// Carries out jobs until the thread has to end.
    pub(super) fn run(mut self, mut jobs: mpsc::Receiver<Job>, runtime: &tokio::runtime::Runtime) {
        while !self.is_over() {
            let wait = async { tokio::time::timeout(TICK, jobs.recv()).await };
            let mut batch = Vec::new();
            match runtime.block_on(wait) {
                Ok(Some(job)) => batch.push(job),
                Ok(None) => break,
                Err(_) => {}
            }
            while batch.len() < MAX_BATCH {
                match jobs.try_recv() {
                    Ok(job) => batch.push(job),
                    Err(_) => break,
                }
            }
            if !self.is_over() {
                self.batch(batch);
            }
        }
        self.parts.orders.stop();
        self.parts.flights.stop();
        // Those who wait see the end, rather than a wait without one.
        jobs.close();
        if let Some(reply) = self.drain.take() {
            let result = self.drained.take().unwrap_or_else(|| Err("cut".to_owned()));
            let _ = reply.send(result.map_err(Refusal::Failed));
        }
    }

    fn is_over(&self) -> bool {
        self.drained.is_some() || self.parts.stop.load(Ordering::Relaxed)
    }

    /// One transaction: jobs, upkeep, and what may begin now.
    fn batch(&mut self, jobs: Vec<Job>) {
        self.now = (self.parts.clock)();
        if let Err(error) = self.parts.journal.begin() {
            self.recover(&Refusal::from(error));
            return;
        }
        let mut settles = Vec::with_capacity(jobs.len());
        for job in jobs {
            settles.push(job(self));
        }
        let done = match self.broken.take() {
            Some(refusal) => Err(refusal),
            None => self.upkeep_if_due().and_then(|()| self.pump()),
        };
        let written = done.and_then(|()| self.parts.journal.commit().map_err(Refusal::from));
        #[cfg(test)]
        if self.dies() {
            return;
        }
        if let Err(refusal) = &written {
            self.recover(refusal);
        } else {
            self.send_effects();
        }
        for settle in settles {
            settle(written.clone());
        }
    }

    /// Whether a test has the process die here, with or without the last commit.
    #[cfg(test)]
    fn dies(&mut self) -> bool {
        let death = self.parts.journal.death.as_ref();
        let dies = death.is_some_and(|death| death.is_dead());
        if dies {
            self.parts.stop.store(true, Ordering::Relaxed);
        }
        dies
    }

    /// Returns to the state of the journal, after something could not be written.
    fn recover(&mut self, refusal: &Refusal) {
        tracing::error!(error = %refusal, "the journal was not written");
        self.effects.clear();
        self.parts.orders.forget_all();
        self.parts.flights.forget_all();
        let deadline = Instant::now() + AFTER_FAILURE;
        self.parts.journal.undo();
        loop {
            while Instant::now() < deadline && !self.is_over() {
                std::thread::sleep(Duration::from_millis(20));
            }
            match self.load() {
                Ok(()) => return,
                Err(_) if self.is_over() => return,
                Err(error) => {
                    tracing::error!(%error, "the journal cannot be read");
                    std::thread::sleep(AFTER_FAILURE);
                }
            }
        }
    }

    fn send_effects(&mut self) {
        for effect in std::mem::take(&mut self.effects) {
            match effect {
                Effect::Ring(name) => {
                    for bell in self.bells.remove(&name).unwrap_or_default() {
                        // Those who gave up are gone.
                        let _ = bell.send(());
                    }
                }
                Effect::Run(work) => self.parts.orders.run(work),
                Effect::Forget(model) => self.parts.orders.forget(model),
                Effect::Remove(folder) => self.parts.folders.remove(&folder),
                Effect::Sample(task) => self.parts.flights.start(task),
                Effect::CancelSample(request) => self.parts.flights.cancel(request),
                Effect::Ground(folder) => self.parts.flights.ground(folder),
                Effect::Publish(adapter) => self.parts.flights.publish(adapter),
                Effect::Drain => self.parts.orders.drain(),
            }
        }
    }

    /// Has a caller woken at the end of a request, or of any of a sampling session.
    fn wait_for(&mut self, name: &str, bell: oneshot::Sender<()>) {
        let bells = self.bells.entry(name.to_owned()).or_default();
        bells.retain(|bell| !bell.is_closed());
        bells.push(bell);
    }

    /// Refuses new commands while the desk ends.
    fn check_open(&self) -> Result<(), Refusal> {
        if self.drain.is_some() {
            return Err(Refusal::Draining);
        }
        Ok(())
    }

    /// Refuses what would fill the disk.
    fn check_disk(&self, more: u64) -> Result<(), Refusal> {
        let (used, allowed) = (self.status.disk_bytes + more, self.parts.limits.disk_bytes);
        if used <= allowed {
            return Ok(());
        }
        Err(Refusal::Quota {
            limit: "limits.disk_bytes",
            tenant: "all".to_owned(),
            used,
            allowed,
            advice: "delete checkpoints, or ask the operator to raise the limit".to_owned(),
            retry_after: None,
        })
    }

    /// A session of a tenant.
    fn own_session(&self, tenant: &Tenant, session: &SessionId) -> Result<SessionRow, Refusal> {
        let row = self.parts.journal.session(session)?;
        let own = row.filter(|row| row.tenant == tenant.name);
        own.ok_or_else(|| Refusal::not_found("session", session))
    }

    /// A session of a tenant that takes commands.
    fn open_session(&self, tenant: &Tenant, session: &SessionId) -> Result<SessionRow, Refusal> {
        let row = self.own_session(tenant, session)?;
        let Some(finish) = &row.finish else {
            return Ok(row);
        };
        let why = match &finish.reason {
            Some(_) => "its client ended it; create another",
            None => "its client was silent for too long; create another",
        };
        Err(Refusal::gone("session", session, why))
    }

    /// A model of a tenant.
    fn own_model(&self, tenant: &Tenant, model: &ModelId) -> Result<ModelRow, Refusal> {
        let row = self.parts.journal.model(model)?;
        let own = row.filter(|row| row.tenant == tenant.name);
        own.ok_or_else(|| Refusal::not_found("model", model))
    }

    /// The row of a model that the journal has.
    fn model_row(&self, model: &ModelId) -> Result<ModelRow, Refusal> {
        let row = self.parts.journal.model(model)?;
        row.ok_or_else(|| Refusal::Failed(format!("{model} has no row")))
    }

    /// The end of a time to live that begins now.
    fn expiry(&self, ttl_s: Option<u64>) -> Option<u64> {
        ttl_s.map(|ttl_s| self.now + ttl_s.saturating_mul(1000))
    }

    /// The base model of a name.
    fn served(&self, name: &str) -> Result<&ServedModel, Refusal> {
        let found = self.parts.served.iter().find(|model| model.name == name);
        found.ok_or_else(|| {
            let names = self.parts.served.iter().map(|model| model.name.as_str());
            let allowed = format!("one of {}", names.collect::<Vec<_>>().join(", "));
            Refusal::invalid("base_model", format!("{name:?}"), allowed)
        })
    }

    /// Notes that the client of a session lives.
    fn hear(&mut self, session: &SessionId) {
        if let Some(heard) = self.heard.get_mut(session) {
            *heard = self.now;
        }
    }

    /// Notes what the trainer's memory holds.
    pub(super) fn set_memory(&mut self, models: u64, bytes: u64) {
        (self.status.resident, self.status.trainer_bytes) = (models, bytes);
    }

    /// Numbers for health pages and metrics.
    pub(super) fn status(&self) -> DeskStatus {
        DeskStatus {
            queued: (self.schedule.waiting() + self.share.waiting()) as u64,
            sampling: self.share.flying() as u64,
            draining: self.drain.is_some(),
            ..self.status.clone()
        }
    }

    /// Takes no more commands, and has the states written once the one that runs has ended.
    pub(super) fn drain(&mut self, reply: oneshot::Sender<Result<(), Refusal>>) {
        self.drain = Some(reply);
        self.effects.push(Effect::Drain);
    }

    /// All states are written, or cannot be.
    pub(super) fn drained(&mut self, result: Result<(), String>) -> Result<(), Refusal> {
        self.drained = Some(result);
        Ok(())
    }
}
