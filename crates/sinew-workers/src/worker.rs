//! A worker: leases tickets, runs their episodes, and brings their traces.
//!
//! Two threads: this one leases, starts, waits and acks; [`control`](crate::control) renews and hears orders.
//! A ticket is held from its lease to its ack. A worker that dies holds it until the lease ends; one that
//! drains finishes its episodes within the notice and returns the other tickets at once. Episodes that have
//! not ended by then begin again elsewhere: they are counted, and the registry hears their names.

use crate::client::{DeskClient, DeskError};
use crate::control::{Control, ControlParts, Shared};
use crate::follow::Loaded;
use crate::live::LiveAgents;
use crate::presence::{Presence, WorkerStatus};
use crate::terms::{RunTerms, WorkerReading};
use crate::ticket::{ROLLOUT, Ticket, ran, rollout_consumer};
use crate::worker_weights::WorkerWeights;
use sinew_queue::system_clock;
use sinew_rollout::{BatchError, EpisodeOptions, EpisodeParts, Hops, Runner};
use sinew_store::queue::{AckedRow, LeaseId, Queue, RowRequest, RowSelection, Sample};
use sinew_store::{MemoryStore, StoreError, TraceStore};
use sinew_types::{EpisodeId, WeightsId};
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
/// Part of the slots for which one call asks at most, and the pause until the next call while slots are free,
/// so that workers that start together share tickets.
const LEASE_PART: usize = 4;
const LEASE_PAUSE: Duration = Duration::from_millis(5);
/// Traces that wait for their ack; a worker with more leases nothing.
const MAX_UNSENT: usize = 256;
/// Traces, and their bytes, that one call brings.
const ACK_ROWS: usize = 64;
const ACK_BYTES: usize = 8 << 20;
/// Episodes that a worker names when it leaves before they have ended.
const NAMED: usize = 8;
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
    /// Those of them whose episodes had begun: they begin again on another worker.
    pub interrupted: u64,
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
    /// Weights of the engine.
    pub weights: WorkerWeights,
    /// Agents that open rollouts at the gateway of this worker, if it has one for them.
    pub agents: Option<Arc<dyn LiveAgents>>,
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

sinew_types::debug_fields!(WorkerParts, name, slots);

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
        fence: parts.terms.fence,
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
        weights: parts.weights,
        agents: parts.agents,
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
        more: false,
        seen: None,
        hops: Hops::default(),
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
    weights: WorkerWeights,
    agents: Option<Arc<dyn LiveAgents>>,
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
    /// The last lease was as large as asked for, and slots are free: there may be more tickets.
    more: bool,
    /// Weights of the engine when tickets were last started.
    seen: Option<WeightsId>,
    /// Calls for tickets, and with traces.
    hops: Hops,
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
            self.abandon(end);
            return Ok(Some(end));
        }
        self.send()?;
        if self.leaves.is_some_and(|since| self.may_leave(since)) {
            self.abandon(WorkerEnd::Drained);
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
            self.shared.state().leaving = true;
            self.agents.iter().for_each(|agents| agents.leave());
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
        while let Some(first) = self.unsent.front() {
            let lease = first.lease;
            let rows = together(&self.unsent);
            let began = Instant::now();
            match self.queue.ack(ROLLOUT, lease, &rows) {
                Ok(settled) => {
                    // A ticket that another worker has counts there.
                    self.counts.finished += settled.changed as u64;
                    self.counts.stopped += settled.lost.len() as u64;
                }
                Err(error) => return passing(error),
            }
            self.hops
                .ack
                .call(rows.len(), began.elapsed().as_secs_f64());
            let sent: Vec<Unsent> = self.unsent.drain(..rows.len()).collect();
            let mut state = self.shared.state();
            for unsent in &sent {
                state.held.remove(&unsent.row.key);
            }
            drop(state);
            let episodes: Vec<EpisodeId> = sent.into_iter().map(|unsent| unsent.episode).collect();
            self.store.remove(&episodes).map_err(BatchError::from)?;
        }
        Ok(())
    }

    /// Whether a worker that leaves since a time may go now.
    fn may_leave(&self, since: Instant) -> bool {
        let idle = self.running.is_empty() && self.unsent.is_empty() && self.open() == 0;
        idle || since.elapsed() >= self.notice
    }

    /// Rollouts of agents that are open.
    fn open(&self) -> usize {
        self.agents.as_ref().map_or(0, |agents| agents.open(0).0)
    }

    /// Leases tickets for free slots.
    fn lease(&mut self) -> Result<(), WorkerError> {
        self.more = false;
        let held = self.waiting.len() + self.running.len();
        let free = self.slots.saturating_sub(held);
        let paused = self.shared.state().orders.as_ref().is_none_or(|o| o.paused);
        let soon = self.leased.is_some_and(|at| at.elapsed() < LEASE_EVERY);
        let full = self.unsent.len() >= MAX_UNSENT;
        let barred = paused || full || self.leaves.is_some() || (soon && held > 0);
        if free == 0 || barred || !self.weights.are_there() {
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
        let began = Instant::now();
        let batch = match self.queue.lease(&ask, system_clock()()) {
            Ok(batch) => batch,
            Err(error) => return passing(error),
        };
        let Some(lease) = batch.lease else {
            return Ok(());
        };
        let took_s = began.elapsed().as_secs_f64();
        self.hops.lease.call(batch.rows.len(), took_s);
        if batch.rows.len() == rows {
            self.leased = None;
            self.more = rows < free;
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
        self.seen = self.weights.followed().and_then(Loaded::get);
        if self.waiting.is_empty() {
            return Ok(());
        }
        let (weights, engine) = (&self.weights, self.episode.engine.as_ref());
        let ready = |ticket: &Ticket| weights.allow(engine, ticket);
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
        let busy = self.running.len() + self.unsent.len() + self.open();
        if busy > 0 {
            self.busy = Instant::now();
        }
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let weights = self.weights.followed().map(Loaded::hop);
        let weights = weights.unwrap_or_default();
        let mut state = self.shared.state();
        let report = state.reports;
        let hops = Hops {
            weights,
            report,
            ..self.hops
        };
        state.reading = WorkerReading {
            engine_busy_s: engine.busy_s,
            sandbox_s: parts.sandbox_wait.seconds(),
            sampled_tokens: engine.sampled_tokens,
            preemptions: engine.preemptions,
            interrupted: self.counts.interrupted,
            opened: self.agents.as_ref().map_or(0, |agents| agents.opened()),
            in_flight: gauges.in_flight,
            booting: gauges.booting,
            generating: gauges.generating,
            in_tool: gauges.in_tool,
            hops,
        };
        state.status = WorkerStatus {
            version: self.weights.version(parts.engine.as_ref()),
            checksum: self.weights.checksum(),
            busy: count(busy),
            queued: count(self.waiting.len()),
            idle_s: self.busy.elapsed().as_secs_f64(),
            cause: self.weights.cause(),
        };
    }

    /// Waits a moment for episodes, or for tickets where none runs.
    fn wait(&mut self) -> Result<(), WorkerError> {
        if self.more {
            std::thread::sleep(LEASE_PAUSE);
            return Ok(());
        }
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
            match self.weights.followed() {
                Some(loaded) => loaded.wait_for_other(self.seen, LOOK_EVERY),
                None => std::thread::sleep(LOOK_EVERY),
            }
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
        let paused = self.shared.state().orders.as_ref().is_none_or(|o| o.paused);
        if paused || !self.weights.are_there() {
            LOOK_EVERY
        } else {
            Duration::ZERO
        }
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

    /// Stops all episodes, and returns all tickets. Those of a worker that leaves begin again elsewhere.
    fn abandon(&mut self, end: WorkerEnd) {
        let mut episodes: Vec<EpisodeId> = self.running.drain().map(|(e, _)| e).collect();
        self.runner.stop(&episodes);
        let agents = self.agents.as_ref().map(|agents| agents.open(NAMED));
        let (open, named) = agents.unwrap_or_default();
        let count = episodes.len() + open;
        if end == WorkerEnd::Drained && count > 0 {
            self.counts.interrupted += count as u64;
            episodes.extend(named);
            let why = interrupted(count, &episodes);
            tracing::warn!(why, "the worker leaves");
            let mut state = self.shared.state();
            state.reading.interrupted = self.counts.interrupted;
            state.status.cause = Some(why);
            state.last_words = true;
        }
        self.waiting.clear();
        self.unsent.clear();
        let held: Vec<String> = self.shared.state().held.keys().cloned().collect();
        self.give_back(held);
    }
}

/// The rows at the front of a queue that one call may bring: of one lease, and not too large. At least one.
fn together(unsent: &VecDeque<Unsent>) -> Vec<AckedRow> {
    let Some(first) = unsent.front() else {
        return Vec::new();
    };
    let mut bytes = 0;
    let fits = |unsent: &&Unsent| {
        let own: usize = unsent.row.fields.iter().map(|f| f.value.len()).sum();
        bytes += own;
        unsent.lease == first.lease && (bytes == own || bytes <= ACK_BYTES)
    };
    let rows = unsent.iter().take(ACK_ROWS).take_while(fits);
    rows.map(|unsent| unsent.row.clone()).collect()
}

/// Episodes and rollouts of agents that had not ended when their worker left: some of them by name.
fn interrupted(count: usize, named: &[EpisodeId]) -> String {
    let mut names: Vec<&str> = named.iter().map(EpisodeId::as_str).collect();
    names.sort_unstable();
    names.truncate(NAMED);
    let more = count.saturating_sub(names.len());
    let names = names.join(", ");
    let more = match more {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{count} episodes had not ended and begin again on other workers: {names}{more}")
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

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_store::queue::Field;

    fn unsent(lease: u64, key: usize, bytes: usize) -> Unsent {
        let mut row = AckedRow::of(key.to_string());
        row.fields.push(Field::new("trace", vec![0_u8; bytes]));
        Unsent {
            lease: LeaseId(lease),
            row,
            episode: EpisodeId::new(key.to_string()),
        }
    }

    #[test]
    fn one_call_brings_traces_of_one_lease_up_to_its_limits() {
        let calls = |rows: &[(u64, usize)]| {
            let each = rows.iter().enumerate();
            let mut left: VecDeque<Unsent> = each
                .map(|(key, (lease, bytes))| unsent(*lease, key, *bytes))
                .collect();
            let mut calls = Vec::new();
            while !left.is_empty() {
                let rows = together(&left);
                calls.push(rows.len());
                left.drain(..rows.len());
            }
            calls
        };
        assert_eq!(calls(&[(1, 10), (1, 10), (2, 10), (1, 10)]), [2, 1, 1]);
        assert_eq!(calls(&[(1, 1); 2 * ACK_ROWS + 1]), [ACK_ROWS, ACK_ROWS, 1]);
        // A trace that is too large for a call with others has its own.
        let large = ACK_BYTES + 1;
        assert_eq!(
            calls(&[(1, large), (1, 1), (1, large), (1, large)]),
            [1, 1, 1, 1]
        );
        assert!(calls(&[]).is_empty());
    }

    #[test]
    fn interrupted_episodes_are_counted_and_named_within_a_bound() {
        let episodes = |count: usize| -> Vec<EpisodeId> {
            let ids = (0..count).rev();
            ids.map(|n| EpisodeId::new(format!("e{n:02}"))).collect()
        };
        let few = interrupted(2, &episodes(2));
        assert!(
            few.starts_with("2 episodes") && few.ends_with(": e00, e01"),
            "{few}"
        );
        let many = interrupted(NAMED + 3, &episodes(NAMED + 3));
        assert!(
            many.starts_with("11 episodes") && many.ends_with("e07 and 3 more"),
            "{many}"
        );
    }
}
