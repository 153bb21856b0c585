//! Rollouts that agents finished at a gateway, between the gateway's threads and the training loop.

use crate::intake::{FinishedRollout, Intake, IntakeBatch, IntakeConfig, UNSCORED};
use sinew_orchestrator::{BEHIND, PipelineError};
use sinew_pipeline::SourceGroups;
use sinew_store::{Filter, TraceStore, summaries};
use sinew_types::{EpisodeId, GroupId, PolicyVersion, Trace};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Purpose of rollouts that agents open and finish by themselves.
pub const LIVE: &str = "live";

/// Interval between two reports of the number of available rollouts.
const TELL_EVERY: Duration = Duration::from_millis(250);

/// Interval between two checks whether the run is to stop.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Finished rollouts as a gateway reports them; shared by its threads and the source.
#[derive(Debug)]
pub struct LiveRollouts {
    intake: Mutex<Intake>,
    changed: Condvar,
    started: Instant,
    /// Episodes that were in the store when the session began. A gateway may report some of them again.
    known: BTreeSet<EpisodeId>,
    /// A rollout without a reward may get one from outside.
    late: bool,
}

impl LiveRollouts {
    /// Loads the rollouts of earlier sessions that no update has trained or dropped. If `late`, rollouts
    /// without a reward may get one from outside ([`LiveSource::with_late`](crate::LiveSource::with_late)).
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn open(
        config: IntakeConfig,
        store: &dyn TraceStore,
        late: bool,
    ) -> Result<Self, PipelineError> {
        let mut intake = Intake::new(config, 0.0);
        let known = stored(store, |trace| {
            intake.finished(FinishedRollout::of(trace, late), 0.0);
        })?;
        Ok(Self {
            late,
            intake: Mutex::new(intake),
            changed: Condvar::new(),
            started: Instant::now(),
            known,
        })
    }

    /// Adds a finished rollout, which is in the store.
    pub fn finished(&self, trace: &Trace) {
        if self.known.contains(&trace.episode) {
            return;
        }
        let now = self.now();
        let finished = FinishedRollout::of(trace, self.late);
        self.lock().finished(finished, now);
        self.changed.notify_all();
    }

    /// A rollout was opened: agents are at work.
    pub fn opened(&self) {
        let now = self.now();
        self.lock().heard(now);
    }

    /// Whether nothing was heard of for so long.
    fn idles(&self, idle: Duration) -> bool {
        let now = self.now();
        self.lock().idle_s(now) >= idle.as_secs_f64()
    }

    fn now(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    fn lock(&self) -> MutexGuard<'_, Intake> {
        self.intake.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ids of all stored live rollouts. Those that are in no update are shown to `untrained`, one at a time, in
/// the order in which they were stored.
fn stored(
    store: &dyn TraceStore,
    mut untrained: impl FnMut(&Trace),
) -> Result<BTreeSet<EpisodeId>, PipelineError> {
    let batches = store.trained_batches().map_err(PipelineError::system)?;
    let done: BTreeSet<EpisodeId> = batches
        .into_iter()
        .flat_map(|b| b.episodes.into_iter().chain(b.dropped.into_keys()))
        .collect();
    let filter = Filter {
        purpose: Some(LIVE.into()),
        limit: 1000,
        ..Filter::default()
    };
    let mut known = BTreeSet::new();
    for e in summaries(store, filter) {
        let episode = e.map_err(PipelineError::system)?.episode;
        if !done.contains(&episode) {
            let trace = store.get(&episode).map_err(PipelineError::system)?;
            trace.iter().for_each(&mut untrained);
        }
        known.insert(episode);
    }
    Ok(known)
}

/// Rollouts that finish at a gateway, with the wait of a training step for them.
pub(crate) struct Feed {
    rollouts: Arc<LiveRollouts>,
    /// Time without anything from agents after which a run ends.
    idle: Duration,
    /// Turning true ends a wait.
    cancel: watch::Receiver<bool>,
}

impl Feed {
    pub(crate) fn new(
        rollouts: Arc<LiveRollouts>,
        idle: Duration,
        cancel: watch::Receiver<bool>,
    ) -> Self {
        Self {
            rollouts,
            idle,
            cancel,
        }
    }

    /// Time without anything from agents after which a run ends.
    pub(crate) fn idle(&self) -> Duration {
        self.idle
    }

    /// Waits until a step has its groups; false if agents were idle for too long before.
    ///
    /// # Errors
    /// If the run is to stop.
    pub(crate) fn wait(
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

    /// Whole groups up to `count`, without the `names` that a step has already; theirs are added.
    pub(crate) fn take(
        &self,
        count: usize,
        version: PolicyVersion,
        names: &mut BTreeSet<GroupId>,
    ) -> IntakeBatch {
        self.rollouts.lock().take(count, version, names)
    }

    /// All whole groups, and the rollouts that can never be trained.
    pub(crate) fn drained(&self, version: PolicyVersion) -> IntakeBatch {
        let mut intake = self.rollouts.lock();
        intake.ready(self.rollouts.now());
        let mut all = IntakeBatch::default();
        loop {
            // A name that comes again is for another round.
            let batch = intake.take(usize::MAX, version, &mut BTreeSet::new());
            all.dropped.extend(batch.dropped);
            if batch.groups.is_empty() {
                return all;
            }
            all.groups.extend(batch.groups);
        }
    }

    /// Waits a moment for rollouts that finish.
    ///
    /// # Errors
    /// If the run is to stop.
    pub(crate) fn pause(&self) -> Result<(), PipelineError> {
        if *self.cancel.borrow() {
            return Err(PipelineError::Interrupted);
        }
        let intake = self.rollouts.lock();
        drop(self.rollouts.changed.wait_timeout(intake, LOOK_EVERY));
        Ok(())
    }

    /// Whether agents were silent for so long that the run ends.
    pub(crate) fn is_idle(&self) -> bool {
        self.rollouts.idles(self.idle)
    }

    /// Rollouts of a whole group.
    pub(crate) fn group_size(&self) -> usize {
        self.rollouts.lock().group_size()
    }
}

/// Reads the traces of a group.
pub(crate) fn read(
    store: &dyn TraceStore,
    group: &[EpisodeId],
) -> Result<Vec<Trace>, PipelineError> {
    let read = |episode: &EpisodeId| {
        let stored = store.get(episode).map_err(PipelineError::system)?;
        let lost = || PipelineError::system(format!("the store lost the rollout {episode}"));
        stored.ok_or_else(lost)
    };
    group.iter().map(read).collect()
}

/// Adds rollouts that are not trained; those without a score, and those that are too old, are counted with
/// their first cause.
pub(crate) fn note(given: &mut SourceGroups, dropped: BTreeMap<EpisodeId, String>) {
    let counted = |why: &str| why.starts_with(UNSCORED) || why.starts_with(BEHIND);
    let left_out = dropped.iter().filter(|(_, why)| counted(why));
    given
        .left_out
        .extend(left_out.map(|(e, why)| (e.clone(), why.clone())));
    given.dropped.extend(dropped);
}
