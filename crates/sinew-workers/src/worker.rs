//! A worker: leases tickets, runs their episodes, and brings their traces.
//!
//! Two threads: this one leases, starts, waits and acks; [`control`](crate::control) renews and hears orders.
//! A ticket is held from its lease to its ack. A worker that dies holds it until the lease ends; one that
//! drains finishes its episodes within the notice and returns the other tickets at once.

use crate::client::{DeskClient, DeskError};
use crate::control::{Control, ControlParts, Shared};
use crate::follow::Loaded;
use crate::presence::{Presence, WorkerStatus};
use crate::terms::{RunTerms, WorkerReading};
use crate::ticket::{ROLLOUT, Ticket, ran, rollout_consumer};
use sinew_queue::system_clock;
use sinew_rollout::{BatchError, EpisodeOptions, EpisodeParts, Runner};
use sinew_store::queue::{AckedRow, LeaseId, Queue, RowRequest, RowSelection, Sample};
use sinew_store::{MemoryStore, StoreError, TraceStore};
use sinew_types::EpisodeId;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

/// Interval in which a wait for episodes ends, to look at orders and tickets.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longest wait for tickets in one call.
const WAIT: Duration = Duration::from_secs(1);
/// Interval between two attempts at a lease while episodes run.
const LEASE_EVERY: Duration = Duration::from_millis(200);
/// Part of the slots for which one call asks at most, so that workers that start together share tickets.
const LEASE_PART: usize = 4;
/// Traces that wait for their ack; a worker with more leases nothing.
const MAX_UNSENT: usize = 256;
/// Capacity for traces between their end and their ack.
const STORE_BYTES: u64 = 2 << 30;

/// Reasons for which a worker ends badly.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The owner refuses this worker, or gives no answer.
    #[error(transparent)]
    Desk(#[from] DeskError),
    /// The queue of tickets refuses a call.
    #[error("tickets: {0}")]
    Queue(StoreError),
    /// Episodes cannot be kept until their ack.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The system gives no thread.
    #[error("no thread: {0}")]
    Thread(std::io::Error),
    /// The owner does not answer for too long.
    #[error(
        "the owner at {url} has not answered for {seconds} s\n  hint: --patience-s waits longer"
    )]
    Away {
        /// Address of the owner.
        url: String,
        /// Seconds since its last answer.
        seconds: u64,
    },
}

/// Regular end of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerEnd {
    /// It was asked to leave, and holds no ticket.
    Drained,
    /// The run is over.
    RunEnded,
    /// Another owner continues the run: a worker makes its parts anew for it.
    NewOwner,
}

/// Numbers of a worker's episodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct WorkerCounts {
    /// Episodes whose traces the owner has.
    pub finished: u64,
    /// Tickets that were returned before their episodes ended.
    pub returned: u64,
    /// Episodes that were stopped: nobody wants them, or another worker has them.
    pub stopped: u64,
}

/// Parts of a worker.
pub struct WorkerParts {
    /// Name among the workers of the run.
    pub name: String,
    /// The owner's desk.
    pub owner: Arc<DeskClient>,
    /// The owner's queue of tickets. Its calls should give up after a few seconds.
    pub queue: Arc<dyn Queue>,
    /// Facts of the run, as the owner answered.
    pub terms: RunTerms,
    /// Runs episodes.
    pub episode: EpisodeParts,
    /// Options of the run's episodes.
    pub options: EpisodeOptions,
    /// Maximum number of tickets that it holds.
    pub slots: usize,
    /// Weights of the engine; `None`: servers outside, which report their versions.
    pub loaded: Option<Loaded>,
    /// Registration of the worker.
    pub presence: Box<dyn Presence>,
    /// Episodes are its tasks.
    pub runtime: Handle,
    /// Time for episodes to end after the worker was asked to leave.
    pub notice: Duration,
    /// Longest time without an answer of the owner.
    pub patience: Duration,
    /// Whether the worker is asked to leave.
    pub stop: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl std::fmt::Debug for WorkerParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerParts")
            .field("name", &self.name)
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}

/// Works until the worker is asked to leave, the run is over, or another owner has it. `report` gets the
/// counts whenever they changed.
///
/// # Errors
/// If the owner refuses this worker, or does not answer for too long.
pub fn work(
    parts: WorkerParts,
    report: &mut dyn FnMut(WorkerCounts),
) -> Result<(WorkerEnd, WorkerCounts), WorkerError> {
    parts
        .queue
        .join(&rollout_consumer())
        .map_err(WorkerError::Queue)?;
    let store = Arc::new(MemoryStore::new(STORE_BYTES));
    let traces: Arc<dyn TraceStore> = Arc::<MemoryStore>::clone(&store);
    let runner = Runner::new(parts.episode.clone(), traces, parts.slots);
    let (wake, shared) = (runner.waker(), Arc::<Shared>::default());
    let _ticks = Ticks::start(&parts.runtime, Arc::clone(&wake));
    let control = ControlParts {
        name: parts.name.clone(),
        owner: Arc::clone(&parts.owner),
        queue: Arc::clone(&parts.queue),
        lease_ms: parts.terms.lease_ms,
        presence: parts.presence,
        wake: Box::new(move || wake.notify_one()),
    };
    let control = Control::start(control, Arc::clone(&shared)).map_err(WorkerError::Thread)?;
    let mut worker = Worker {
        name: parts.name,
        owner: parts.owner,
        queue: parts.queue,
        terms: parts.terms,
        episode: parts.episode,
        options: parts.options,
        slots: parts.slots.max(1),
        loaded: parts.loaded,
        runtime: parts.runtime,
        notice: parts.notice,
        patience: parts.patience,
        stop: parts.stop,
        runner,
        store,
        shared,
        waiting: VecDeque::new(),
        running: HashMap::new(),
        unsent: VecDeque::new(),
        counts: WorkerCounts::default(),
        leased: None,
        leaves: None,
        busy: Instant::now(),
        cancel: watch::channel(false),
    };
    let mut reported = WorkerCounts::default();
    let end = loop {
        match worker.turn() {
            Ok(None) => {}
            Ok(Some(end)) => break Ok(end),
            Err(error) => break Err(error),
        }
        if worker.counts != reported {
            reported = worker.counts;
            report(reported);
        }
    };
    let counts = worker.counts;
    drop((control, worker));
    Ok((end?, counts))
}

/// Ends waits for episodes from time to time.
struct Ticks(JoinHandle<()>);

impl Ticks {
    fn start(runtime: &Handle, wake: Arc<Notify>) -> Self {
        Self(runtime.spawn(async move {
            loop {
                tokio::time::sleep(LOOK_EVERY).await;
                wake.notify_one();
            }
        }))
    }
}

impl Drop for Ticks {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A trace that the owner does not have yet.
struct Unsent {
    lease: LeaseId,
    row: AckedRow,
    episode: EpisodeId,
}

/// A worker at work.
struct Worker {
    name: String,
    owner: Arc<DeskClient>,
    queue: Arc<dyn Queue>,
    terms: RunTerms,
    episode: EpisodeParts,
    options: EpisodeOptions,
    slots: usize,
    loaded: Option<Loaded>,
    runtime: Handle,
    notice: Duration,
    patience: Duration,
    stop: Arc<dyn Fn() -> bool + Send + Sync>,
    runner: Runner,
    /// Traces between their end and their ack.
    store: Arc<MemoryStore>,
    /// Leases, orders, and what is reported.
    shared: Arc<Shared>,
    /// Leased tickets that wait for weights.
    waiting: VecDeque<Ticket>,
    /// Keys of tickets whose episodes run.
    running: HashMap<EpisodeId, String>,
    unsent: VecDeque<Unsent>,
    counts: WorkerCounts,
    /// Time of the last attempt at a lease.
    leased: Option<Instant>,
    /// Time at which it was asked to leave.
    leaves: Option<Instant>,
    /// Last time with an episode.
    busy: Instant,
    /// Never turns true: episodes are stopped one by one.
    cancel: (watch::Sender<bool>, watch::Receiver<bool>),
}

impl Worker {
    /// One round: orders, traces, tickets, then a short wait.
    fn turn(&mut self) -> Result<Option<WorkerEnd>, WorkerError> {
        if let Some(end) = self.obey()? {
            self.abandon();
            return Ok(Some(end));
        }
        self.send()?;
        if self.leaves.is_some_and(|since| self.may_leave(since)) {
            self.abandon();
            return Ok(Some(WorkerEnd::Drained));
        }
        self.lease()?;
        self.start()?;
        self.describe();
        self.wait()?;
        Ok(None)
    }

    /// Carries out what owner and registry want.
    fn obey(&mut self) -> Result<Option<WorkerEnd>, WorkerError> {
        let (orders, lost, drain, away) = {
            let mut state = self.shared.state();
            if let Some(refused) = state.refused.take() {
                return Err(refused.into());
            }
            let lost = std::mem::take(&mut state.lost);
            (state.orders.clone(), lost, state.drain, state.away)
        };
        if let Some(away) = away.map(|since| since.elapsed())
            && away > self.patience
        {
            return Err(WorkerError::Away {
                url: self.owner.url().to_owned(),
                seconds: away.as_secs(),
            });
        }
        let known = orders.is_some();
        let orders = orders.unwrap_or_default();
        let same = (&orders.id, orders.fence) == (&self.terms.id, self.terms.fence);
        if known && !same {
            return Ok(Some(WorkerEnd::NewOwner));
        }
        if orders.ended {
            return Ok(Some(WorkerEnd::RunEnded));
        }
        let unwanted = orders.cancelled.into_iter().chain(lost);
        self.drop_tickets(&unwanted.collect::<Vec<_>>());
        if (drain || (self.stop)()) && self.leaves.is_none() {
            self.leaves = Some(Instant::now());
            let waiting: Vec<Ticket> = self.waiting.drain(..).collect();
            self.give_back(waiting.iter().map(Ticket::key).collect());
        }
        Ok(None)
    }

    /// Stops the episodes of tickets that are not wanted here.
    fn drop_tickets(&mut self, keys: &[String]) {
        let held = |key: &&String| self.shared.state().held.contains_key(*key);
        let keys: Vec<&String> = keys.iter().filter(held).collect();
        if keys.is_empty() {
            return;
        }
        let named = |key: &String| keys.contains(&key);
        self.waiting.retain(|ticket| !named(&ticket.key()));
        self.unsent.retain(|unsent| !named(&unsent.row.key));
        let running = self.running.iter().filter(|(_, key)| named(key));
        let episodes: Vec<EpisodeId> = running.map(|(episode, _)| episode.clone()).collect();
        self.runner.stop(&episodes);
        for episode in &episodes {
            self.running.remove(episode);
        }
        self.counts.stopped += keys.len() as u64;
        let mut state = self.shared.state();
        for key in keys {
            state.held.remove(key);
        }
    }

    /// Brings traces to the owner. While it does not answer they are kept.
    fn send(&mut self) -> Result<(), WorkerError> {
        while let Some(unsent) = self.unsent.front() {
            let row = std::slice::from_ref(&unsent.row);
            match self.queue.ack(ROLLOUT, unsent.lease, row) {
                Ok(settled) => {
                    // A ticket that another worker has counts there.
                    self.counts.finished += settled.changed as u64;
                    self.counts.stopped += settled.lost.len() as u64;
                }
                Err(error) => return passing(error),
            }
            self.shared.state().held.remove(&unsent.row.key);
            let sent = std::slice::from_ref(&unsent.episode);
            self.store.remove(sent).map_err(BatchError::from)?;
            self.unsent.pop_front();
        }
        Ok(())
    }

    /// Whether a worker that leaves since a time may go now.
    fn may_leave(&self, since: Instant) -> bool {
        let idle = self.running.is_empty() && self.unsent.is_empty();
        idle || since.elapsed() >= self.notice
    }

    /// Leases tickets for free slots.
    fn lease(&mut self) -> Result<(), WorkerError> {
        let held = self.waiting.len() + self.running.len();
        let free = self.slots.saturating_sub(held);
        let paused = self.shared.state().orders.as_ref().is_none_or(|o| o.paused);
        let soon = self.leased.is_some_and(|at| at.elapsed() < LEASE_EVERY);
        let full = self.unsent.len() >= MAX_UNSENT;
        if free == 0 || paused || full || self.leaves.is_some() || (soon && held > 0) {
            return Ok(());
        }
        let rows = free.min(self.slots.div_ceil(LEASE_PART));
        self.leased = Some(Instant::now());
        let ask = RowRequest {
            consumer: ROLLOUT.into(),
            holder: self.name.clone(),
            ttl_ms: self.terms.lease_ms,
            take: RowSelection::Sample(Sample::rows(rows)),
        };
        let batch = match self.queue.lease(&ask, system_clock()()) {
            Ok(batch) => batch,
            Err(error) => return passing(error),
        };
        let Some(lease) = batch.lease else {
            return Ok(());
        };
        if batch.rows.len() == rows {
            // There may be more.
            self.leased = None;
        }
        for row in batch.rows {
            match Ticket::of_row(&row) {
                Ok(ticket) => {
                    self.shared.state().held.insert(row.key, lease);
                    self.waiting.push_back(ticket);
                }
                Err(error) => {
                    tracing::error!(row = %row.key, %error, "a row is no ticket");
                    let why = error.to_string();
                    let failed = self.queue.fail(ROLLOUT, lease, &[row.key], &why);
                    failed.map(drop).or_else(passing)?;
                }
            }
        }
        Ok(())
    }

    /// Starts the episodes of tickets whose weights are here.
    fn start(&mut self) -> Result<(), WorkerError> {
        let weights = self.loaded.as_ref().map(Loaded::get);
        let of_servers = self.episode.engine.status().version.0;
        let ready = |ticket: &Ticket| match weights {
            Some(loaded) => loaded.is_some_and(|id| ticket.allows(&id)),
            None => of_servers >= ticket.version,
        };
        let all: Vec<Ticket> = self.waiting.drain(..).collect();
        let (begin, wait): (Vec<_>, Vec<_>) = all.into_iter().partition(ready);
        self.waiting.extend(wait);
        let _runtime = self.runtime.enter();
        for ticket in begin {
            let options = Arc::new(ticket.options(&self.options));
            self.runner.start(vec![ticket.spec()], &options)?;
            let key = ticket.key();
            self.running.insert(ticket.episode, key);
        }
        Ok(())
    }

    /// Sets what the second thread reports.
    fn describe(&mut self) {
        let parts = &self.episode;
        let (engine, gauges) = (parts.engine.status(), parts.gauges.read());
        let busy = self.running.len() + self.unsent.len();
        if busy > 0 {
            self.busy = Instant::now();
        }
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let mut state = self.shared.state();
        state.reading = WorkerReading {
            engine_busy_s: engine.busy_s,
            sandbox_s: parts.sandbox_wait.seconds(),
            sampled_tokens: engine.sampled_tokens,
            preemptions: engine.preemptions,
            in_flight: gauges.in_flight,
            booting: gauges.booting,
            generating: gauges.generating,
            in_tool: gauges.in_tool,
        };
        let version = match &self.loaded {
            Some(loaded) => loaded.get().map(|id| id.version.0),
            None => Some(engine.version.0),
        };
        state.status = WorkerStatus {
            version,
            busy: count(busy),
            queued: count(self.waiting.len()),
            idle_s: self.busy.elapsed().as_secs_f64(),
            cause: self.loaded.as_ref().and_then(Loaded::cause),
        };
    }

    /// Waits a moment for episodes, or for tickets where none runs.
    fn wait(&mut self) -> Result<(), WorkerError> {
        if self.runner.is_running() {
            let ended = self.runner.ended(&mut self.cancel.1);
            let ended = self.runtime.block_on(ended)?;
            if !ended.is_empty() {
                // Their slots are free: tickets are asked for at once.
                self.leased = None;
            }
            for finished in ended {
                let episode = finished.trace.episode.clone();
                let held = self.running.remove(&episode).and_then(|key| {
                    let lease = self.shared.state().held.get(&key).copied();
                    lease.map(|lease| (key, lease))
                });
                let Some((key, lease)) = held else {
                    self.store.remove(&[episode]).map_err(BatchError::from)?;
                    continue;
                };
                let row = ran(&key, &finished.trace).map_err(WorkerError::Queue)?;
                self.unsent.push_back(Unsent {
                    lease,
                    row,
                    episode,
                });
            }
            return Ok(());
        }
        if !self.waiting.is_empty() || !self.unsent.is_empty() || self.leaves.is_some() {
            std::thread::sleep(LOOK_EVERY);
            return Ok(());
        }
        // A look in between would miss no ticket: the next round asks before it waits again.
        let seen = self.queue.wait(0, Duration::ZERO);
        let waited = seen.and_then(|seen| {
            let open = self.queue.stats()?.of(ROLLOUT).ready;
            match open {
                0 => self.queue.wait(seen, WAIT),
                _ => Ok(seen),
            }
        });
        match waited {
            Ok(_) => {
                std::thread::sleep(self.idle_pause());
                Ok(())
            }
            Err(error) => {
                std::thread::sleep(LOOK_EVERY);
                passing(error)
            }
        }
    }

    /// Pause of a worker without episodes: none if it may lease, so that tickets begin at once.
    fn idle_pause(&self) -> Duration {
        let state = self.shared.state();
        let paused = state.orders.as_ref().is_none_or(|o| o.paused);
        if paused { LOOK_EVERY } else { Duration::ZERO }
    }

    /// Returns tickets whose episodes have not ended.
    fn give_back(&mut self, keys: Vec<String>) {
        let mut by_lease: BTreeMap<LeaseId, Vec<String>> = BTreeMap::new();
        {
            let mut state = self.shared.state();
            for key in keys {
                if let Some(lease) = state.held.remove(&key) {
                    by_lease.entry(lease).or_default().push(key);
                }
            }
        }
        for (lease, keys) in by_lease {
            self.counts.returned += keys.len() as u64;
            if let Err(error) = self.queue.release(ROLLOUT, lease, &keys) {
                // They come back when their lease ends.
                tracing::warn!(%error, "tickets were not returned");
            }
        }
    }

    /// Stops all episodes, and returns all tickets.
    fn abandon(&mut self) {
        let episodes: Vec<EpisodeId> = self.running.drain().map(|(episode, _)| episode).collect();
        self.runner.stop(&episodes);
        self.waiting.clear();
        self.unsent.clear();
        let held: Vec<String> = self.shared.state().held.keys().cloned().collect();
        self.give_back(held);
    }
}

/// An error of the queue's server: one that may pass is logged, since the call is made again.
fn passing(error: StoreError) -> Result<(), WorkerError> {
    match error {
        StoreError::Remote { .. } => {
            tracing::warn!(%error, "the owner's queue does not answer");
            Ok(())
        }
        other => Err(WorkerError::Queue(other)),
    }
}
