//! Events of a running training run, on one bus of typed events.
//!
//! Readers that keep a record ([`Bus::record`]) see every event, in order, before the run continues; an event
//! that one of them cannot write ends the run. Viewers ([`Bus::watch`]) have a bounded queue and lose the
//! events that do not fit into it: they never delay training.

use crate::error::PipelineError;
use crate::record::{EvalRecord, StepRecord};
use crate::verdict::Process;
use serde::Serialize;
use sinew_rollout::{
    AdmissionReading, EndedEpisode, FailedEpisode, GaugesReading, LiveEpisode, PhaseSpan,
};
use sinew_types::Trace;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

/// Number of live episodes that a terminal shows one by one.
pub const LONGEST: usize = 3;

/// Maximum number of live episodes in an event, for readers with more space than a terminal.
pub const BOARD: usize = 512;

/// Current activity of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Loading, before the first command of the core.
    Loading,
    Rollout {
        step: u64,
    },
    Training {
        step: u64,
    },
    /// Waiting for rewards from outside; there is no other work.
    Waiting {
        step: u64,
        groups: usize,
    },
    /// Writing a checkpoint.
    Saving,
    /// Measuring held-out tasks. Contains the purpose of the episodes.
    Evaluating(String),
    /// Collecting episodes without training.
    Collecting,
    /// Finishing the current work after a request to stop.
    Stopping,
    Done,
}

impl Phase {
    /// Returns a description in words.
    pub fn name(&self) -> String {
        match self {
            Self::Loading => "loading the model".into(),
            Self::Rollout { .. } => "rolling out".into(),
            Self::Training { .. } => "training".into(),
            Self::Waiting { groups, .. } => format!("waiting for the rewards of {groups} groups"),
            Self::Saving => "saving a checkpoint".into(),
            Self::Evaluating(purpose) => format!("evaluating ({purpose})"),
            Self::Collecting => "collecting".into(),
            Self::Stopping => "stopping".into(),
            Self::Done => "done".into(),
        }
    }
}

/// State of the running episodes, sent a few times a second.
#[derive(Clone, Debug, Default)]
pub struct RolloutProgress {
    /// Number of episodes in each phase.
    pub gauges: GaugesReading,
    /// KV capacity in use, waiting turns, and the admission limit.
    pub admission: AdmissionReading,
    /// Live episodes, longest in their phase first: up to [`BOARD`](crate::BOARD) of them.
    pub longest: Vec<LiveEpisode>,
    /// Phases of episodes that ended since the previous event.
    pub spans: Vec<PhaseSpan>,
    /// Episodes that the system failed since the previous event, with the reasons.
    pub failures: Vec<FailedEpisode>,
    /// Episodes that ended since the previous event, with their results.
    pub ended: Vec<EndedEpisode>,
    /// Rate at which the engine samples tokens at present, per second.
    pub tokens_per_s: f64,
    /// Number of ended episodes of this phase.
    pub done: usize,
    /// Number of all episodes of this phase.
    pub total: usize,
    /// Seconds of the run, over all sessions.
    pub wall_s: f64,
}

/// Progress of an optimizer step, after each micro-batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct TrainProgress {
    /// Number of finished micro-batches of this update.
    pub micro_batch: usize,
    pub micro_batches: usize,
    /// Number of the update, from 1.
    pub update: u32,
    pub updates: u32,
    pub wall_s: f64,
}

/// Progress of a collection. Numbers cover all sessions unless a field states otherwise.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CollectProgress {
    /// Number of ended episodes.
    pub episodes: u64,
    /// Number of all episodes of the collection.
    pub of: u64,
    /// Number of episodes with a reward.
    pub scored: u64,
    /// Number of episodes without a reward.
    pub unscored: u64,
    /// Number of episodes that the system failed in the last attempt.
    pub failed: u64,
    /// Mean reward of the scored episodes.
    pub reward: Option<f64>,
    /// Share of the scored episodes that succeeded.
    pub success: Option<f64>,
    /// Ended episodes per second in this session.
    pub episodes_per_s: f64,
    /// Estimated seconds until the last episode ends, at the present rate.
    pub left_s: Option<f64>,
}

/// An event of a run.
#[derive(Clone, Debug)]
pub enum RunEvent {
    /// Description of the run, in words.
    Described(String),
    /// Records of the earlier sessions of a resumed run, up to its checkpoint.
    Resumed {
        steps: Arc<Vec<StepRecord>>,
        evals: Arc<Vec<EvalRecord>>,
    },
    /// A server offers the run's model to agents outside.
    Serving {
        /// Address without a path.
        url: String,
        /// Path of the file with the token that authorizes new rollouts.
        token_file: std::path::PathBuf,
    },
    /// Workers and other roles reach the run.
    Controlled {
        /// Address without a path.
        url: String,
        /// Path of the file with the token of every role.
        token_file: std::path::PathBuf,
    },
    /// The run enters another phase.
    Phase(Phase),
    /// Sent about four times a second while episodes run.
    Rollout(Box<RolloutProgress>),
    /// Sent every few seconds during a collection, and at its end.
    Collected(CollectProgress),
    /// Sent after each micro-batch.
    Train(TrainProgress),
    /// Episodes that have been in one phase for a long time.
    Longest(Vec<LiveEpisode>),
    /// A problem that does not stop the run.
    Warning(String),
    /// A step is done. It is committed too, unless the health of the run is in doubt.
    Step(Arc<StepRecord>),
    /// A held-out measurement.
    Measured {
        record: Box<EvalRecord>,
        episodes: Arc<Vec<Trace>>,
        /// Whether an earlier session made and recorded the measurement.
        again: bool,
    },
    /// The source has no more groups to train on.
    SourceDry { step: u64, why: String },
    /// The last event: the way in which the process of the run ends, and the reason if the run did not finish
    /// its work.
    Ended {
        process: Process,
        why: Option<String>,
    },
}

/// A reader that receives every event of a run, in order.
pub trait Recorder: Send {
    /// # Errors
    /// Fails if the event cannot be written; the run then ends.
    fn record(&mut self, event: &RunEvent) -> Result<(), PipelineError>;
}

#[derive(Default)]
struct Readers {
    recorders: Vec<Box<dyn Recorder>>,
    viewers: Vec<SyncSender<Arc<RunEvent>>>,
}

/// Event bus. Clones share one bus.
#[derive(Clone, Default)]
pub struct Bus {
    readers: Arc<Mutex<Readers>>,
    lost: Arc<AtomicU64>,
}

impl std::fmt::Debug for Bus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bus").field("lost", &self.lost()).finish()
    }
}

impl Bus {
    /// Adds a recorder that receives every event from now on.
    pub fn record(&self, recorder: Box<dyn Recorder>) {
        self.lock().recorders.push(recorder);
    }

    /// Adds a recorder that receives each event before the others.
    pub fn record_first(&self, recorder: Box<dyn Recorder>) {
        self.lock().recorders.insert(0, recorder);
    }

    /// Adds a viewer whose queue holds at most `capacity` events.
    pub fn watch(&self, capacity: usize) -> Receiver<Arc<RunEvent>> {
        let (sender, receiver) = sync_channel(capacity);
        self.lock().viewers.push(sender);
        receiver
    }

    /// Number of events that did not fit into the queue of a viewer.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Sends an event to every reader.
    ///
    /// # Errors
    /// Fails with the error of a recorder. The other readers still receive the event.
    pub fn emit(&self, event: RunEvent) -> Result<(), PipelineError> {
        let mut readers = self.lock();
        let mut result = Ok(());
        for recorder in &mut readers.recorders {
            result = result.and(recorder.record(&event));
        }
        let event = Arc::new(event);
        readers.viewers.retain(|viewer| {
            let sent = viewer.try_send(Arc::clone(&event));
            if matches!(sent, Err(TrySendError::Full(_))) {
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
            !matches!(sent, Err(TrySendError::Disconnected(_)))
        });
        result
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Readers> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Count(Arc<AtomicU64>, u64);

    impl Recorder for Count {
        fn record(&mut self, _: &RunEvent) -> Result<(), PipelineError> {
            let seen = self.0.fetch_add(1, Ordering::Relaxed) + 1;
            if seen == self.1 {
                Err(PipelineError::system("the disk is full"))
            } else {
                Ok(())
            }
        }
    }

    #[test]
    fn a_viewer_that_does_not_look_loses_events_and_a_recorder_loses_none() {
        let bus = Bus::default();
        let seen = Arc::new(AtomicU64::new(0));
        bus.record(Box::new(Count(Arc::clone(&seen), 0)));
        let (slow, gone) = (bus.watch(8), bus.watch(8));
        drop(gone);
        for n in 0..100 {
            bus.emit(RunEvent::Warning(n.to_string())).unwrap();
        }
        assert_eq!(seen.load(Ordering::Relaxed), 100);
        assert_eq!((slow.try_iter().count(), bus.lost()), (8, 92));
    }

    #[test]
    fn what_cannot_be_recorded_is_an_error_and_the_others_have_it() {
        let bus = Bus::default();
        let others = Arc::new(AtomicU64::new(0));
        bus.record(Box::new(Count(Arc::default(), 2)));
        bus.record(Box::new(Count(Arc::clone(&others), 0)));
        let viewer = bus.watch(4);
        bus.emit(RunEvent::Phase(Phase::Loading)).unwrap();
        let failed = bus.emit(RunEvent::Phase(Phase::Done));
        assert_eq!(
            failed,
            Err(PipelineError::System("the disk is full".into()))
        );
        assert_eq!(others.load(Ordering::Relaxed), 2);
        assert_eq!(viewer.try_iter().count(), 2);
    }
}
