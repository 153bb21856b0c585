//! Agents that run already as a source: what they finish at a gateway is trained at once.
//!
//! A gateway commits each finished rollout to the store of the run, with the purpose [`LIVE`], before it
//! reports it here. What is in the store and in no commit of an update is what is still to be trained: a
//! session that goes on begins with it, so that a crash loses no rollout and trains none twice.

use crate::error::PipelineError;
use crate::intake::{FinishedRollout, Intake, IntakeConfig};
use crate::ports::{Given, SampleSource, Wanted};
use sinew_store::{Filter, TraceStore};
use sinew_types::{EpisodeId, Trace};
use std::any::Any;
use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Purpose of rollouts that agents open and finish by themselves.
pub const LIVE: &str = "live";

/// Between two reports of how many rollouts are there.
const TELL_EVERY: Duration = Duration::from_millis(250);

/// Between two looks whether the run is to stop.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Finished rollouts as a gateway reports them; shared by its threads and the source.
#[derive(Debug)]
pub struct LiveRollouts {
    intake: Mutex<Intake>,
    changed: Condvar,
    started: Instant,
    /// What the store had when the session began: a gateway may report some of it once more.
    known: BTreeSet<EpisodeId>,
}

impl LiveRollouts {
    /// What the store has of earlier sessions and no update has trained or dropped.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn open(config: IntakeConfig, store: &dyn TraceStore) -> Result<Self, PipelineError> {
        let (known, untrained) = stored(store)?;
        let mut intake = Intake::new(config, 0.0);
        for trace in &untrained {
            intake.finished(FinishedRollout::of(trace), 0.0);
        }
        Ok(Self {
            intake: Mutex::new(intake),
            changed: Condvar::new(),
            started: Instant::now(),
            known,
        })
    }

    /// Takes in a rollout that is finished and in the store.
    pub fn finished(&self, trace: &Trace) {
        if self.known.contains(&trace.episode) {
            return;
        }
        let now = self.now();
        self.lock().finished(FinishedRollout::of(trace), now);
        self.changed.notify_all();
    }

    /// A rollout was opened: agents are at work.
    pub fn opened(&self) {
        let now = self.now();
        self.lock().heard(now);
    }

    fn now(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    fn lock(&self) -> MutexGuard<'_, Intake> {
        self.intake.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ids of all stored live rollouts, and those that are in no update, in the order in which they were stored.
fn stored(store: &dyn TraceStore) -> Result<(BTreeSet<EpisodeId>, Vec<Trace>), PipelineError> {
    let batches = store.trained_batches().map_err(PipelineError::system)?;
    let done: BTreeSet<EpisodeId> = batches
        .into_iter()
        .flat_map(|b| b.episodes.into_iter().chain(b.dropped.into_keys()))
        .collect();
    let mut filter = Filter {
        purpose: Some(LIVE.into()),
        limit: 1000,
        ..Filter::default()
    };
    let (mut known, mut traces) = (BTreeSet::new(), Vec::new());
    loop {
        let page = store.list(&filter).map_err(PipelineError::system)?;
        for episode in page.episodes {
            if !done.contains(&episode.episode) {
                let trace = store.get(&episode.episode);
                traces.extend(trace.map_err(PipelineError::system)?);
            }
            known.insert(episode.episode);
        }
        match page.next {
            Some(next) => filter.after = Some(next),
            None => return Ok((known, traces)),
        }
    }
}

/// Groups of live rollouts for each step, as soon as there are enough of them.
pub struct LiveSource {
    rollouts: Arc<LiveRollouts>,
    /// Time without anything from agents after which a run ends.
    idle: Duration,
    /// Turning true ends a wait.
    cancel: watch::Receiver<bool>,
    /// The gateway, which stops when the run has ended.
    _server: Box<dyn Any + Send>,
}

impl std::fmt::Debug for LiveSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveSource")
            .field("idle", &self.idle)
            .finish_non_exhaustive()
    }
}

impl LiveSource {
    /// Trains on `rollouts`, which `server` fills while it lives.
    pub fn new(
        rollouts: Arc<LiveRollouts>,
        idle: Duration,
        cancel: watch::Receiver<bool>,
        server: Box<dyn Any + Send>,
    ) -> Self {
        Self {
            rollouts,
            idle,
            cancel,
            _server: server,
        }
    }

    /// Waits until a step has its groups; false if agents were idle for too long before.
    fn wait(
        &self,
        groups: usize,
        tick: &mut dyn FnMut(usize, usize),
    ) -> Result<bool, PipelineError> {
        let mut intake = self.rollouts.lock();
        let (total, mut told) = (groups * intake.group_size(), Instant::now());
        loop {
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                let waiting = intake.waiting().min(total);
                // A recorder may be slow, and agents need the intake.
                drop(intake);
                tick(waiting, total);
                intake = self.rollouts.lock();
            }
            let now = self.rollouts.now();
            if intake.ready(now) >= groups || intake.is_fruitless(groups) {
                return Ok(true);
            }
            if *self.cancel.borrow() {
                return Err(PipelineError::Interrupted);
            }
            if intake.idle_s(now) >= self.idle.as_secs_f64() {
                return Ok(intake.ready(now) > 0);
            }
            let waited = self.rollouts.changed.wait_timeout(intake, LOOK_EVERY);
            intake = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl SampleSource for LiveSource {
    fn groups(&mut self, wanted: Wanted<'_>) -> Result<Given, PipelineError> {
        let mut given = Given::default();
        let mut names = BTreeSet::new();
        loop {
            let missing = wanted.groups - given.groups.len();
            if !self.wait(missing, &mut *wanted.tick)? {
                return Ok(given);
            }
            let version = wanted.learner.version();
            let batch = self.rollouts.lock().take(missing, version, &mut names);
            // What is ready has names of this step: it is for the next one.
            let again = batch.groups.is_empty() && batch.dropped.is_empty();
            given.dropped.extend(batch.dropped);
            for group in batch.groups {
                let mut traces = Vec::with_capacity(group.len());
                for episode in group {
                    let stored = wanted.store.get(&episode).map_err(PipelineError::system)?;
                    traces.push(stored.ok_or_else(|| {
                        PipelineError::system(format!("the store lost the rollout {episode}"))
                    })?);
                }
                given.groups.push(traces);
            }
            let fruitless = given.groups.is_empty() && !given.dropped.is_empty();
            let enough = given.groups.len() >= wanted.groups;
            if enough || fruitless || again || self.rollouts.idles(self.idle) {
                return Ok(given);
            }
        }
    }

    fn why_dry(&self) -> String {
        format!(
            "no agent finished a group of rollouts in {} s (harness.idle_s)",
            self.idle.as_secs_f64()
        )
    }
}

impl LiveRollouts {
    /// Whether nothing was heard of for so long.
    fn idles(&self, idle: Duration) -> bool {
        let now = self.now();
        self.lock().idle_s(now) >= idle.as_secs_f64()
    }
}
