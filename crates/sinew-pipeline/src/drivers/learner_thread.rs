//! The learner at work in a separate thread, while episodes continue.
//!
//! One piece of work at a time: rows of groups, or an update on rows. The learner is locked meanwhile; the
//! driver asks nothing of it until the work is done, but when the run is to stop: then it waits for the end
//! of the work, which the learner's own cancellation brings about.

use crate::ports::{Learner, Waker};
use sinew_algo::Algorithm;
use sinew_algo::trust::TrustConfig;
use sinew_grammar::Grammars;
use sinew_orchestrator::{Curriculum, PipelineError, Rows, StepRecord};
use sinew_types::{LossSpec, Trace};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// A learner that one thread at a time works with.
pub type SharedLearner = Arc<Mutex<dyn Learner>>;

/// The learner, once no other thread works with it.
pub(super) fn lock(learner: &SharedLearner) -> MutexGuard<'_, dyn Learner + 'static> {
    // A panic of the learner's thread ends the run; what it left is not used for more than its version.
    learner.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error of the loop itself.
pub(super) fn none_runs() -> PipelineError {
    PipelineError::system("the loop waits for an episode, but none runs")
}

/// Whether a learner's weights are those of a whole step, and of version `live` if one is given. Waits for
/// the end of an update at work.
pub(super) fn is_whole(learner: &SharedLearner, live: Option<u64>) -> bool {
    let held = lock(learner);
    // An update that panicked may have left weights between two steps.
    let own = live.is_none_or(|live| held.version().0 == live);
    own && !learner.is_poisoned() && held.is_whole()
}

/// Task of the learner.
pub(super) enum LearnerTask {
    /// Rows of the groups of a step.
    Score {
        groups: Vec<Vec<Trace>>,
        curriculum: Arc<Curriculum>,
    },
    /// An update on rows, if there are any, with the record of the step.
    Update {
        rows: Option<Box<Rows>>,
        spec: Box<LossSpec>,
        record: Box<StepRecord>,
    },
}

/// Result of a task.
pub(super) enum LearnerResult {
    Scored(Vec<Vec<Trace>>, Box<Rows>),
    Updated(Option<Box<Rows>>, Box<StepRecord>),
}

/// Parts that the learner works with.
#[derive(Clone)]
pub(super) struct LearnerParts {
    pub(super) learner: SharedLearner,
    pub(super) algorithm: Arc<Algorithm>,
    pub(super) grammars: Arc<dyn Grammars>,
    pub(super) trust: Arc<TrustConfig>,
}

impl LearnerParts {
    /// Runs a task on the calling thread.
    pub(super) fn work(&self, task: LearnerTask) -> Result<LearnerResult, PipelineError> {
        let mut learner = lock(&self.learner);
        match task {
            LearnerTask::Score {
                mut groups,
                curriculum,
            } => {
                let rows = crate::score::score(
                    &mut groups,
                    &curriculum,
                    &self.algorithm,
                    &mut *learner,
                    self.grammars.as_ref(),
                    &self.trust,
                )?;
                Ok(LearnerResult::Scored(groups, Box::new(rows)))
            }
            LearnerTask::Update {
                mut rows,
                spec,
                mut record,
            } => {
                if let Some(rows) = rows.as_mut().filter(|r| !r.rows.is_empty()) {
                    learner.update(rows, &spec, &mut record)?;
                }
                Ok(LearnerResult::Updated(rows, record))
            }
        }
    }
}

type LearnerReply = Result<LearnerResult, PipelineError>;

/// Wakes the driver when it goes away: after the result was sent, or after a panic. The channel is closed
/// before, so that the driver sees either.
struct DriverWake {
    sender: Option<SyncSender<LearnerReply>>,
    waker: Waker,
}

impl Drop for DriverWake {
    fn drop(&mut self) {
        drop(self.sender.take());
        (self.waker)();
    }
}

/// The learner's thread, if it works.
#[derive(Default)]
pub(super) struct LearnerThread(Option<Receiver<LearnerReply>>);

impl LearnerThread {
    /// Whether a task is being worked on.
    pub(super) fn is_busy(&self) -> bool {
        self.0.is_some()
    }

    /// Begins a task in a separate thread; `waker` is called at its end.
    pub(super) fn begin(
        &mut self,
        tools: LearnerParts,
        task: LearnerTask,
        waker: Waker,
    ) -> Result<(), PipelineError> {
        let (sender, receiver) = sync_channel(1);
        let started = thread::Builder::new()
            .name("sinew-learner".to_owned())
            .spawn(move || {
                let wakes = DriverWake {
                    sender: Some(sender),
                    waker,
                };
                let worked = tools.work(task);
                // A driver that has gone needs no answer.
                let _ = wakes.sender.as_ref().map(|s| s.send(worked));
            });
        started.map_err(|e| PipelineError::system(format!("learner: its thread: {e}")))?;
        self.0 = Some(receiver);
        Ok(())
    }

    /// The result of the task, if it is done within `wait`; `None` waits as long as it takes.
    pub(super) fn done(
        &mut self,
        wait: Option<Duration>,
    ) -> Result<Option<LearnerResult>, PipelineError> {
        let Some(receiver) = &self.0 else {
            return Ok(None);
        };
        let gone = || PipelineError::system("learner: its thread panicked");
        let received = match wait {
            None => receiver.recv().map_err(|_| gone())?,
            Some(Duration::ZERO) => match receiver.try_recv() {
                Err(TryRecvError::Empty) => return Ok(None),
                received => received.map_err(|_| gone())?,
            },
            Some(wait) => match receiver.recv_timeout(wait) {
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                received => received.map_err(|_| gone())?,
            },
        };
        self.0 = None;
        received.map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver that is woken by a panic must not find "not done yet": nothing would wake it again.
    #[test]
    fn the_channel_is_closed_when_the_driver_is_woken() {
        let (sender, receiver) = sync_channel(1);
        let (seen, closed) = sync_channel(1);
        let receiver = Mutex::new(receiver);
        let wakes = DriverWake {
            sender: Some(sender),
            waker: Arc::new(move || {
                let tried = receiver.lock().unwrap().try_recv();
                seen.send(matches!(tried, Err(TryRecvError::Disconnected)))
                    .unwrap();
            }),
        };
        let thread = thread::spawn(move || {
            let _wakes = wakes;
            panic!("the learner");
        });
        thread.join().unwrap_err();
        assert!(closed.recv().unwrap());
    }
}
