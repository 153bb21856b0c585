//! Events of a run at work: one bus of typed events.
//!
//! Readers that keep a record ([`Bus::record`]) see every event, in order, before the run continues; an event
//! that one of them cannot write ends the run. Viewers ([`Bus::watch`]) have a bounded queue and lose the
//! events that do not fit into it: they never hold training up.

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

/// Live episodes that a terminal shows one by one.
pub const LONGEST: usize = 3;

/// Live episodes that an event carries, for readers with more room than a terminal.
pub const BOARD: usize = 512;

/// Current activity of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The first command of the core has not come yet.
    Loading,
    Rollout {
        step: u64,
    },
    Training {
        step: u64,
    },
    /// Rewards from outside are waited for; nothing else can be done.
    Waiting {
        step: u64,
        groups: usize,
    },
    /// A checkpoint is written.
    Saving,
    /// Measures held-out tasks; holds the purpose of the episodes.
    Evaluating(String),
    /// Episodes are run for their own sake: nothing is trained.
    Collecting,
    /// It was asked to stop and finishes what it is at.
    Stopping,
    Done,
}

impl Phase {
    /// Description in words.
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

/// Episodes in flight, a few times a second.
#[derive(Clone, Debug, Default)]
pub struct RolloutProgress {
    /// Episodes by what they do.
    pub gauges: GaugesReading,
    /// Held KV capacity, waiting turns, the limit.
    pub admission: AdmissionReading,
    /// Live episodes, longest in their phase first: up to [`BOARD`](crate::BOARD) of them.
    pub longest: Vec<LiveEpisode>,
    /// Phases of episodes that ended since the last look.
    pub spans: Vec<PhaseSpan>,
    /// Episodes that the system failed since the last look, with the reasons.
    pub failures: Vec<FailedEpisode>,
    /// Episodes that ended since the last look, with what they came to.
    pub ended: Vec<EndedEpisode>,
    /// Tokens a second that the engine samples now.
    pub tokens_per_s: f64,
    /// Episodes of this phase that have ended, of how many.
    pub done: usize,
    pub total: usize,
    /// Seconds of the run, over all sessions.
    pub wall_s: f64,
}

/// An optimizer step at work, after each micro-batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct TrainProgress {
    /// Done so far in this update.
    pub micro_batch: usize,
    pub micro_batches: usize,
    /// Number of the update, from 1.
    pub update: u32,
    pub updates: u32,
    pub wall_s: f64,
}

/// Episodes of a collection, over all sessions unless a field states otherwise.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CollectProgress {
    /// Number of ended episodes, and number of all.
    pub episodes: u64,
    pub of: u64,
    /// Episodes with a reward, without one, and failed by the system in the last attempt.
    pub scored: u64,
    pub unscored: u64,
    pub failed: u64,
    /// Mean over those with a reward.
    pub reward: Option<f64>,
    pub success: Option<f64>,
    /// Rate of this session.
    pub episodes_per_s: f64,
    /// Seconds until the last one ends, if it continues like this.
    pub left_s: Option<f64>,
}

/// One thing that happened in a run.
#[derive(Clone, Debug)]
pub enum RunEvent {
    /// Description of the run, in words.
    Described(String),
    /// Records of the earlier sessions of a resumed run, up to its checkpoint.
    Resumed {
        steps: Arc<Vec<StepRecord>>,
        evals: Arc<Vec<EvalRecord>>,
    },
    /// The run's model is served to agents outside.
    Serving {
        /// Address without a path.
        url: String,
        /// The file with the token that opens rollouts.
        token_file: std::path::PathBuf,
    },
    /// Another phase begins.
    Phase(Phase),
    /// Sent about four times a second while episodes run.
    Rollout(Box<RolloutProgress>),
    /// Every few seconds while a collection runs, and at its end.
    Collected(CollectProgress),
    /// Sent after each micro-batch.
    Train(TrainProgress),
    /// Episodes that have been in one phase for long.
    Longest(Vec<LiveEpisode>),
    /// Something is wrong, and the run continues.
    Warning(String),
    /// A step is done and, if it is not in doubt, committed.
    Step(Arc<StepRecord>),
    /// A held-out measurement.
    Measured {
        record: Box<EvalRecord>,
        episodes: Arc<Vec<Trace>>,
        /// An earlier session measured and recorded it.
        again: bool,
    },
    /// The source has nothing more to train on.
    SourceDry { step: u64, why: String },
    /// The last event: how the process of the run ends, and why, unless it did what it was to do.
    Ended {
        process: Process,
        why: Option<String>,
    },
}

/// Sees every event of a run, in order.
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

/// Bus for events; clones are one bus.
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
    /// Adds a reader that misses nothing from here on.
    pub fn record(&self, recorder: Box<dyn Recorder>) {
        self.lock().recorders.push(recorder);
    }

    /// Adds a reader that has each event before the others.
    pub fn record_first(&self, recorder: Box<dyn Recorder>) {
        self.lock().recorders.insert(0, recorder);
    }

    /// Adds a viewer with a queue of so many events.
    pub fn watch(&self, capacity: usize) -> Receiver<Arc<RunEvent>> {
        let (sender, receiver) = sync_channel(capacity);
        self.lock().viewers.push(sender);
        receiver
    }

    /// Events that did not fit into the queue of a viewer.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Gives an event to every reader.
    ///
    /// # Errors
    /// Fails with the error of a recorder. The other readers have the event all the same.
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
