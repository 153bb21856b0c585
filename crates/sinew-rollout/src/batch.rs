//! Runs many episodes concurrently, with admission, ownership and durable commits.
//!
//! An episode is reported only after its trace is durable, so that a crash neither loses a trained episode
//! nor runs one twice. Episodes that end at the same time share one fsync.

use crate::admission::READ_EVERY;
use crate::episode::{EpisodeEvent, EpisodeSpec};
use crate::parts::{EpisodeOptions, EpisodeParts};
use sinew_store::{StoreError, TraceStore};
use sinew_types::{EpisodeId, FailureKind, Timing, Trace};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tracing::Instrument;

/// Reason why a batch of episodes stopped.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// The store refused or failed. Episodes that ended meanwhile are not reported.
    #[error("episodes cannot be stored: {0}")]
    Store(#[from] StoreError),
    /// The run was asked to stop. Committed episodes stay; the others are run again later.
    #[error("stopped on request")]
    Cancelled,
}

/// An episode that ended and is durable in the store.
#[derive(Clone, Debug)]
pub struct FinishedEpisode {
    /// Valid trace, with its outcome or the reason of its failure.
    pub trace: Trace,
    /// Whether the store already contained the episode, so that it was not run.
    pub known: bool,
}

/// An episode to run, with its options.
type Job = (EpisodeSpec, Arc<EpisodeOptions>);

/// Runs episodes with at most `max_in_flight` at once, fewer while admission demands it.
#[derive(Debug)]
pub struct Runner {
    parts: EpisodeParts,
    store: Arc<dyn TraceStore>,
    /// Maximum number of concurrent episode tasks; admission may let fewer start.
    max_in_flight: usize,
    waiting: VecDeque<Job>,
    running: JoinSet<Trace>,
    /// The job of each task, which builds the trace if the task panics. A stopped task has no entry.
    owners: HashMap<Id, (Job, AbortHandle)>,
    /// Episodes that the store already contained and that have not been reported.
    known: Vec<FinishedEpisode>,
    /// Ends a wait in [`Runner::ended`].
    wake: Arc<Notify>,
}

impl Runner {
    /// Creates a runner without episodes. `max_in_flight` is at least 1.
    pub fn new(parts: EpisodeParts, store: Arc<dyn TraceStore>, max_in_flight: usize) -> Self {
        Self {
            parts,
            store,
            max_in_flight: max_in_flight.max(1),
            waiting: VecDeque::new(),
            running: JoinSet::new(),
            owners: HashMap::new(),
            known: Vec::new(),
            wake: Arc::default(),
        }
    }

    /// Returns a handle whose `notify_one` ends the present wait in [`Runner::ended`], or the next one.
    pub fn waker(&self) -> Arc<Notify> {
        Arc::clone(&self.wake)
    }

    /// Adds episodes in their order, and starts those that fit. Episodes that the store already contains are
    /// read from there.
    ///
    /// # Panics
    /// Panics outside an async runtime: its tasks are the episodes.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn start(
        &mut self,
        specs: Vec<EpisodeSpec>,
        options: &Arc<EpisodeOptions>,
    ) -> Result<(), BatchError> {
        for spec in specs {
            match self.store.get(&spec.episode)? {
                Some(trace) => {
                    self.forget(&spec.episode);
                    self.known.push(FinishedEpisode { trace, known: true });
                }
                None => self.waiting.push_back((spec, Arc::clone(options))),
            }
        }
        self.fill();
        Ok(())
    }

    /// Stops episodes: waiting ones do not start, and running ones are aborted. None of them is reported or
    /// stored afterwards.
    pub fn stop(&mut self, episodes: &[EpisodeId]) {
        let gone: HashSet<&EpisodeId> = episodes.iter().collect();
        self.waiting
            .retain(|(spec, _)| !gone.contains(&spec.episode));
        self.known.retain(|f| !gone.contains(&f.trace.episode));
        episodes.iter().for_each(|episode| self.forget(episode));
        self.owners.retain(|_, (job, handle)| {
            let stops = gone.contains(&job.0.episode);
            if stops {
                handle.abort();
            }
            !stops
        });
    }

    /// Whether any episode runs, waits to start, or has not been reported.
    pub fn is_running(&self) -> bool {
        !(self.running.is_empty() && self.waiting.is_empty() && self.known.is_empty())
    }

    /// Waits until some episodes have ended, and returns them once they are durable in the store. Returns
    /// none if no episode is left or the waker was called. If `cancel` becomes true, all episodes stop:
    /// committed ones stay, and the others are run again later.
    ///
    /// # Errors
    /// If episodes cannot be stored, or on request.
    pub async fn ended(
        &mut self,
        cancel: &mut watch::Receiver<bool>,
    ) -> Result<Vec<FinishedEpisode>, BatchError> {
        if !self.known.is_empty() {
            return Ok(std::mem::take(&mut self.known));
        }
        let mut looks = tokio::time::interval(READ_EVERY);
        let begun = self.parts.admission.begun();
        let first = loop {
            self.fill();
            if self.running.is_empty() {
                return Ok(Vec::new());
            }
            tokio::select! {
                finished = self.running.join_next_with_id() => {
                    // The end of a stopped episode does not end the wait.
                    let trace = finished.and_then(|f| self.trace_of(f));
                    if trace.is_some() {
                        break trace;
                    }
                }
                _ = looks.tick() => self.parts.admission.look(),
                () = begun.notified(), if self.parts.outlook.is_some() => {}
                () = self.wake.notified() => return Ok(Vec::new()),
                () = stopped(cancel) => {
                    self.running.shutdown().await;
                    return Err(BatchError::Cancelled);
                }
            }
        };
        // Episodes that finished meanwhile share one synchronization of the disk.
        let mut traces: Vec<Trace> = first.into_iter().collect();
        while let Some(another) = self.running.try_join_next_with_id() {
            traces.extend(self.trace_of(another));
        }
        // The others continue while the disk is waited for.
        self.fill();
        let traces = commit(&self.store, traces).await?;
        let new = |trace| FinishedEpisode {
            trace,
            known: false,
        };
        Ok(traces.into_iter().map(new).collect())
    }

    /// Returns the trace of an ended task; `None` if the task was stopped.
    fn trace_of(&mut self, result: Result<(Id, Trace), JoinError>) -> Option<Trace> {
        let (id, result) = match result {
            Ok((id, trace)) => (id, Ok(trace)),
            Err(e) => (e.id(), Err(e.to_string())),
        };
        let ((spec, options), _) = self.owners.remove(&id)?;
        let trace = result.unwrap_or_else(|e| panicked(&self.parts, &spec, &options, e));
        self.parts.gauges.finish(&trace);
        self.forget(&spec.episode);
        Some(trace)
    }

    /// Removes an episode from the record of episodes in flight.
    fn forget(&self, episode: &EpisodeId) {
        let in_flight = self.parts.in_flight.iter();
        in_flight.for_each(|all| all.forget(episode));
    }

    /// Starts waiting episodes, up to `max_in_flight`. If the longest episodes start first, at most one waits
    /// for admission, and the others are chosen when there is room.
    fn fill(&mut self) {
        while self.running.len() < self.max_in_flight
            && let Some((spec, options)) = self.next()
        {
            let (parts, job) = (self.parts.clone(), (spec.clone(), Arc::clone(&options)));
            let begun = self.parts.outlook.as_ref().map(|o| o.begin(&spec));
            let asked = parts.admission.ask(&spec.episode);
            let span = tracing::debug_span!("episode", id = %spec.episode, task = %spec.task.id);
            let episode = async move {
                let place = asked.granted().await;
                let _in_flight = parts.gauges.begin(&spec.episode);
                let mut trace = parts.harness.run(&parts, &options, &spec).await;
                trace.timing.queue_s = place.waited.as_secs_f64();
                trace.bound_rewards();
                begun.into_iter().for_each(|b| b.ended(&trace));
                trace
            };
            let handle = self.running.spawn(episode.instrument(span));
            self.owners.insert(handle.id(), (job, handle));
        }
    }

    /// Returns the job to start next.
    fn next(&mut self) -> Option<Job> {
        let Some(outlook) = &self.parts.outlook else {
            return self.waiting.pop_front();
        };
        if self.parts.admission.is_full() {
            return None;
        }
        // Episodes of one group follow each other and have one rank.
        let group = |at: usize| self.waiting.get(at).map(|(spec, _)| &spec.group);
        let firsts = self.waiting.iter().enumerate();
        let firsts =
            firsts.filter(|&(at, (spec, _))| at == 0 || group(at - 1) != Some(&spec.group));
        let first = outlook.first(firsts.map(|(at, (spec, _))| (at, spec)))?;
        self.waiting.remove(first)
    }
}

/// Waits until the batch is cancelled. It does not hold the value of `wait_for`, because that would block
/// senders, and an episode that is being stopped may be one of them.
async fn stopped(cancel: &mut watch::Receiver<bool>) {
    let _ = cancel.wait_for(|&stop| stop).await;
}

/// Builds the trace of an episode whose task panicked. It has no nodes, since the data of the task cannot be
/// trusted.
fn panicked(
    parts: &EpisodeParts,
    spec: &EpisodeSpec,
    options: &EpisodeOptions,
    message: String,
) -> Trace {
    let mut machine = options.machine(spec, &parts.run);
    machine.on_event(EpisodeEvent::failed(FailureKind::Cancelled, message));
    machine.into_trace(Timing::default())
}

/// Commits traces in one batch, on a thread that may block.
async fn commit(store: &Arc<dyn TraceStore>, traces: Vec<Trace>) -> Result<Vec<Trace>, StoreError> {
    let store = Arc::clone(store);
    let committed = tokio::task::spawn_blocking(move || {
        store.commit_batch(&traces)?;
        Ok(traces)
    });
    committed.await.unwrap_or_else(|e| {
        Err(StoreError::Io {
            path: "commit task".into(),
            source: std::io::Error::other(e),
        })
    })
}

#[cfg(test)]
mod tests;
