//! Episodes that workers run: the port of rollouts over a queue of tickets.
//!
//! The loop decides as ever which episodes run, which are stopped and how old they may be. Here a started
//! episode becomes a ticket, and a trace that comes back is checked, stored, and only then acked: an owner
//! that dies in between finds the row again.

use crate::core::{MAX_REFUSALS, TicketCore};
use crate::desk::Desk;
use crate::ticket::{OWNER, ROLLOUT, Ticket, owner_consumer, rollout_consumer, trace_of};
use sinew_env::Taskset;
use sinew_orchestrator::{Draw, PipelineError, RolloutProgress};
use sinew_pipeline::{
    ResumeCondition, RolloutReading, Rollouts, StoredEpisode, StoredEpisodes, TurnSchedule, Waker,
};
use sinew_queue::Clock;
use sinew_rollout::{
    AdmissionReading, EpisodeOptions, EpisodeSpec, FinishedEpisode, Gauges, GaugesReading, Hops,
    ResumedCounts, RunInfo,
};
use sinew_store::StoreError;
use sinew_store::queue::{
    AckedRow, LeaseBatch, NewRow, Queue, QueueError, RowRequest, RowSelection, RowState, Sample,
};
use sinew_types::{EpisodeEnd, EpisodeId, FailureKind, Trace, WeightsId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::watch;

/// Interval between two readings of the episodes that run.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Longest wait in one call, after which a waker and the signal to stop are looked at.
const SLICE: Duration = Duration::from_millis(20);
/// Traces that are taken at a time.
const TAKE: usize = 64;
/// Lease of the owner on traces; it takes a moment.
const TAKE_MS: u64 = 60_000;
/// Rows of one page when the queue is listed.
const PAGE: usize = 10_000;
/// Longest time without any worker while tickets wait.
const WORKER_PATIENCE: Duration = Duration::from_secs(600);
/// Interval of warnings that no worker is there.
const REMIND_EVERY: Duration = Duration::from_secs(30);

/// Parts of rollouts that workers run.
pub struct RemoteParts {
    /// Queue of the tickets, which only this process and its listener use.
    pub queue: Arc<dyn Queue>,
    /// Clock of the queue's leases.
    pub clock: Clock,
    /// Desk at which workers hear of weights and of stopped tickets.
    pub desk: Arc<Desk>,
    /// Judges stored episodes, and has the store.
    pub stored: StoredEpisodes,
    /// Tasks of the draws.
    pub taskset: Arc<dyn Taskset>,
    /// Options of the run's episodes.
    pub options: EpisodeOptions,
    /// Growth of the turns of training episodes.
    pub turns: Option<TurnSchedule>,
    /// Facts of the run, for the traces of episodes that no worker could end.
    pub run: Arc<RunInfo>,
    /// Maximum number of tickets that are out.
    pub max_out: usize,
    /// Hears now and then how many episodes wait for a worker.
    pub waiting: Box<dyn Fn(usize)>,
}

sinew_types::debug_fields!(RemoteParts, desk, max_out);

/// Runs episodes on workers.
pub struct RemoteRollouts {
    parts: RemoteParts,
    runtime: Handle,
    core: TicketCore,
    /// Episodes that the store has, and those that no worker could end; not given yet.
    ready: Vec<FinishedEpisode>,
    gauges: Gauges,
    wake: Arc<AtomicBool>,
    /// Turning true ends a wait.
    cancel: watch::Receiver<bool>,
    looked: Instant,
    /// Calls of the owner to its own queue.
    hops: Hops,
    /// Sampled tokens of all workers at the last look.
    tokens: u64,
    reminded: Option<Instant>,
}

sinew_types::debug_fields!(RemoteRollouts, parts);

fn failed(e: impl std::fmt::Display) -> PipelineError {
    PipelineError::system(format!("tickets: {e}"))
}

impl RemoteRollouts {
    /// Registers the consumers of the queue. `cancel` turning true ends a wait.
    ///
    /// # Errors
    /// If the queue cannot be written.
    pub fn new(
        parts: RemoteParts,
        runtime: Handle,
        cancel: watch::Receiver<bool>,
    ) -> Result<Self, PipelineError> {
        for consumer in [rollout_consumer(), owner_consumer()] {
            parts.queue.join(&consumer).map_err(failed)?;
        }
        let fence = parts.desk.terms().fence;
        Ok(Self {
            core: TicketCore::new(fence, parts.max_out),
            parts,
            runtime,
            ready: Vec::new(),
            gauges: Gauges::default(),
            wake: Arc::default(),
            cancel,
            looked: Instant::now(),
            hops: Hops::default(),
            tokens: 0,
            reminded: None,
        })
    }

    /// The weights that the loop uses now.
    fn weights(&self) -> Result<WeightsId, PipelineError> {
        let published = self.parts.desk.published();
        published.ok_or_else(|| failed("no weights are published yet"))
    }

    fn ticket(&self, spec: EpisodeSpec, temperature: Option<f32>, weights: &WeightsId) -> Ticket {
        let most = self.parts.options.limits.max_turns;
        let stages = self.parts.turns.as_ref();
        let stages = stages.filter(|_| temperature.is_none());
        Ticket {
            fence: 0,
            number: 0,
            refusals: 0,
            max_turns: stages.map_or(most, |s| s.turns(spec.draw).min(most)),
            episode: spec.episode,
            group: spec.group,
            draw: spec.draw,
            purpose: spec.purpose,
            seed: spec.seed,
            task: spec.task,
            temperature,
            version: weights.version.0,
            lineage: weights.lineage.to_string(),
        }
    }

    /// Puts tickets that may be out. A full queue takes them later.
    fn put(&mut self) -> Result<(), PipelineError> {
        let due = self.core.due();
        if due.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        let rows: Result<Vec<NewRow>, StoreError> = due.iter().map(Ticket::row).collect();
        let put = self.parts.queue.put(&rows.map_err(failed)?);
        let put_s = began.elapsed().as_secs_f64();
        match put {
            Err(StoreError::Queue(QueueError::Full { .. })) => {
                self.core.put_back(due);
                Ok(())
            }
            put => {
                put.map_err(failed)?;
                self.hops.put.call(due.len(), put_s);
                Ok(())
            }
        }
    }

    /// Removes the rows of cancelled tickets that no worker holds, and names the others at the desk.
    fn clear(&mut self) -> Result<(), PipelineError> {
        for key in self.core.cancelled().clone() {
            match self.parts.queue.remove(std::slice::from_ref(&key)) {
                Ok(_) | Err(StoreError::Queue(QueueError::UnknownRow { .. })) => {
                    self.core.removed(&key);
                }
                Err(StoreError::Queue(QueueError::NotReady { .. })) => {}
                Err(e) => return Err(failed(e)),
            }
        }
        self.parts.desk.cancel(self.core.cancelled().clone());
        Ok(())
    }

    /// Leases rows with traces.
    fn lease(&self) -> Result<LeaseBatch, PipelineError> {
        let ask = RowRequest {
            consumer: OWNER.into(),
            holder: OWNER.into(),
            ttl_ms: TAKE_MS,
            take: RowSelection::Sample(Sample::rows(TAKE)),
        };
        let now_ms = (self.parts.clock)();
        self.parts.queue.lease(&ask, now_ms).map_err(failed)
    }

    /// Takes traces that came, and returns those that are wanted. They are durable, and their rows are done.
    fn take(&mut self) -> Result<Vec<FinishedEpisode>, PipelineError> {
        let began = Instant::now();
        let batch = self.lease()?;
        let Some(lease) = batch.lease else {
            return Ok(Vec::new());
        };
        let newest = self.parts.desk.published().map_or(0, |id| id.version.0);
        let (mut traces, mut acks) = (Vec::new(), Vec::new());
        for row in batch.rows {
            let ticket = self.core.arrived(&row.key);
            acks.push(AckedRow::of(row.key.clone()));
            let Some(ticket) = ticket else { continue };
            let checked = trace_of(&row).map_err(|e| e.to_string()).and_then(|trace| {
                let checked = ticket.check(&trace, newest);
                checked.map(|()| trace).map_err(|e| e.to_string())
            });
            match checked {
                Ok(trace) => traces.push(trace),
                Err(why) => self.refuse(ticket, &why, &mut traces),
            }
        }
        self.commit(&traces)?;
        let acked = self.parts.queue.ack(OWNER, lease, &acks);
        acked.map_err(failed)?;
        let took_s = began.elapsed().as_secs_f64();
        self.hops.take.call(acks.len(), took_s);
        Ok(traces.into_iter().map(|t| self.ended_now(t)).collect())
    }

    /// Stores traces; those that are known already change nothing.
    fn commit(&self, traces: &[Trace]) -> Result<(), PipelineError> {
        if traces.is_empty() {
            return Ok(());
        }
        let store = self.parts.stored.store();
        store
            .commit_batch(traces)
            .map(drop)
            .map_err(PipelineError::system)
    }

    /// Issues an episode again whose trace cannot be used, or ends it as failed.
    fn refuse(&mut self, ticket: Ticket, why: &str, traces: &mut Vec<Trace>) {
        tracing::warn!(episode = %ticket.episode, why, "a worker's trace was refused");
        if let Some(ticket) = self.core.refused(ticket) {
            let why = format!("{MAX_REFUSALS} traces of workers were refused; the last: {why}");
            traces.push(self.failure(&ticket, why));
        }
    }

    /// The trace of an episode that no worker could end.
    fn failure(&self, ticket: &Ticket, message: String) -> Trace {
        let options = ticket.options(&self.parts.options);
        let spec = ticket.spec();
        let mut trace = spec.empty_trace(&self.parts.run, &options.turn_sampling());
        trace.end = EpisodeEnd::Failed {
            kind: FailureKind::Cancelled,
            message,
        };
        trace
    }

    fn ended_now(&self, trace: Trace) -> FinishedEpisode {
        self.gauges.finish(&trace);
        FinishedEpisode {
            trace,
            known: false,
        }
    }

    /// Ends the episodes of tickets that were delivered too often: each of their workers died or lost its
    /// lease.
    fn give_up(&mut self) -> Result<Vec<FinishedEpisode>, PipelineError> {
        let queue = Arc::clone(&self.parts.queue);
        if queue.stats().map_err(failed)?.of(ROLLOUT).dead == 0 {
            return Ok(Vec::new());
        }
        let mut traces = Vec::new();
        for key in self.core.out().cloned().collect::<Vec<_>>() {
            let state = queue.state(ROLLOUT, &key).map_err(failed)?;
            if let Some(RowState::Dead { reason }) = state
                && let Some(ticket) = self.core.given_up(&key)
            {
                traces.push(self.failure(&ticket, format!("no worker ended it: {reason}")));
            }
        }
        self.commit(&traces)?;
        Ok(traces.into_iter().map(|t| self.ended_now(t)).collect())
    }

    /// State of all workers, for views.
    fn look(&mut self) -> RolloutProgress {
        let (load, _) = self.parts.desk.load();
        let elapsed_s = self.looked.elapsed().as_secs_f64().max(1e-3);
        let new = load.sampled_tokens.saturating_sub(self.tokens);
        (self.looked, self.tokens) = (Instant::now(), load.sampled_tokens);
        let own = self.gauges.read();
        RolloutProgress {
            gauges: GaugesReading {
                in_flight: load.in_flight,
                booting: load.booting,
                generating: load.generating,
                in_tool: load.in_tool,
                ..own
            },
            failures: self.gauges.take_failures(),
            ended: self.gauges.take_ended(),
            tokens_per_s: new as f64 / elapsed_s,
            ..RolloutProgress::default()
        }
    }

    /// Warns while tickets wait and no worker is there, and ends the run when that lasts too long.
    fn check_workers(&mut self) -> Result<(), PipelineError> {
        let silent = Duration::from_secs_f64(self.parts.desk.silent_s());
        if !self.core.is_running() || silent < REMIND_EVERY {
            self.reminded = None;
            return Ok(());
        }
        if silent >= WORKER_PATIENCE {
            let (waiting, out) = self.core.counts();
            return Err(failed(format!(
                "{} episodes wait, and no worker has asked for one for {} s\n  hint: start `sinew worker \
                 --role rollout --owner URL --token-file FILE`; without --control the run samples in this process",
                waiting + out,
                silent.as_secs()
            )));
        }
        if self.reminded.is_none_or(|at| at.elapsed() >= REMIND_EVERY) {
            self.reminded = Some(Instant::now());
            tracing::warn!(
                seconds = silent.as_secs(),
                "tickets wait, and no worker is there"
            );
        }
        Ok(())
    }

    /// One look for ended episodes.
    fn round(&mut self) -> Result<Vec<FinishedEpisode>, PipelineError> {
        if !self.ready.is_empty() {
            return Ok(std::mem::take(&mut self.ready));
        }
        self.put()?;
        let mut ended = self.take()?;
        if ended.is_empty() {
            ended = self.give_up()?;
        }
        Ok(ended)
    }

    /// Commits the traces that workers brought while no owner was there, if weights that are known sampled
    /// them, and forgets all other rows of earlier owners.
    fn adopt(&mut self, known: u64) -> Result<usize, PipelineError> {
        let mut adopted = 0;
        loop {
            let batch = self.lease()?;
            let Some(lease) = batch.lease else { break };
            let mut traces = Vec::new();
            for row in &batch.rows {
                let sampled = |t: &Trace| t.newest_version().map_or(0, |v| v.0);
                traces.extend(trace_of(row).ok().filter(|t| sampled(t) <= known));
            }
            adopted += traces.len();
            self.commit(&traces)?;
            let acks: Vec<AckedRow> = batch
                .rows
                .into_iter()
                .map(|r| AckedRow::of(r.key))
                .collect();
            let acked = self.parts.queue.ack(OWNER, lease, &acks);
            acked.map_err(failed)?;
        }
        let mut after = None;
        loop {
            let page = self.parts.queue.rows(after, PAGE).map_err(failed)?;
            after = page.last().map(|row| row.seq);
            let full = page.len() == PAGE;
            let open = page.into_iter().filter(|row| !row.done);
            let foreign: Vec<String> = open.map(|row| row.key).collect();
            for key in foreign {
                if self.core.is_foreign(&key) {
                    self.core.disown(key);
                }
            }
            if !full {
                break;
            }
        }
        self.clear()?;
        Ok(adopted)
    }
}

impl Rollouts for RemoteRollouts {
    fn start(&mut self, draws: &[Draw], temperature: Option<f32>) -> Result<(), PipelineError> {
        let weights = self.weights()?;
        let taskset = self.parts.taskset.as_ref();
        let specs: Result<Vec<_>, _> = draws.iter().map(|d| d.spec(taskset)).collect();
        let specs = specs.map_err(PipelineError::system)?;
        if temperature.is_none() {
            self.parts.stored.begin(&specs)?;
        }
        for spec in specs {
            let stored = self.parts.stored.store().get(&spec.episode);
            match stored.map_err(PipelineError::system)? {
                Some(trace) => self.ready.push(FinishedEpisode { trace, known: true }),
                None => {
                    let ticket = self.ticket(spec, temperature, &weights);
                    self.core.start(ticket);
                }
            }
        }
        self.put()
    }

    fn stop(&mut self, episodes: &[EpisodeId]) {
        self.ready.retain(|f| !episodes.contains(&f.trace.episode));
        self.core.cancel(episodes);
        if let Err(error) = self.clear() {
            // The next look clears them.
            tracing::warn!(%error, "stopped tickets are still in the queue");
        }
    }

    fn resume(&mut self, earlier: &ResumeCondition<'_>) -> Result<Option<String>, PipelineError> {
        let adopted = self.adopt(earlier.known)?;
        if adopted > 0 {
            tracing::info!(
                adopted,
                "episodes of workers that ended while no owner was there"
            );
        }
        Ok(None)
    }

    fn ended(
        &mut self,
        tick: &mut dyn FnMut(RolloutProgress),
    ) -> Result<Vec<StoredEpisode>, PipelineError> {
        let queue = Arc::clone(&self.parts.queue);
        let ended = loop {
            let seen = queue.wait(0, Duration::ZERO).map_err(failed)?;
            if self.looked.elapsed() >= LOOK_EVERY {
                self.clear()?;
                self.parts.desk.warn_of_silent();
                self.check_workers()?;
                let ready = queue.stats().map_err(failed)?.of(ROLLOUT).ready;
                (self.parts.waiting)(ready + self.core.counts().0);
                tick(self.look());
            }
            let ended = self.round()?;
            if !ended.is_empty() || !self.is_running() {
                break ended;
            }
            if self.wake.swap(false, Ordering::Relaxed) {
                break Vec::new();
            }
            if *self.cancel.borrow() {
                self.parts.desk.pause(true);
                return Err(PipelineError::Interrupted);
            }
            queue.wait(seen, SLICE).map_err(failed)?;
        };
        if !self.is_running() {
            // Nobody looks again before the next episodes begin, which may be never.
            tick(self.look());
        }
        self.parts.stored.ended(&self.runtime, ended)
    }

    fn is_running(&self) -> bool {
        !self.ready.is_empty() || self.core.is_running()
    }

    fn reading(&self) -> RolloutReading {
        let (load, _) = self.parts.desk.load();
        RolloutReading {
            engine_busy_s: load.engine_busy_s,
            sandbox_s: load.sandbox_s,
            preemptions: load.preemptions,
            admission: AdmissionReading::default(),
            resumed: ResumedCounts::default(),
            hops: Hops {
                put: self.hops.put,
                take: self.hops.take,
                ..load.hops
            },
        }
    }

    fn waker(&self) -> Waker {
        let wake = Arc::clone(&self.wake);
        Arc::new(move || wake.store(true, Ordering::Relaxed))
    }
}
