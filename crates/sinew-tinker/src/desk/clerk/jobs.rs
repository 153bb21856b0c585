//! Jobs for the clerk, and the lines by which they come.

use super::Clerk;
use crate::desk::types::Refusal;
use tokio::sync::{mpsc, oneshot};

/// Sends a reply, after the commit that it depends on.
pub(crate) type Settle = Box<dyn FnOnce(Result<(), Refusal>) + Send>;

/// Work on the clerk's thread, inside of a transaction.
pub(crate) type Job = Box<dyn FnOnce(&mut Clerk) -> Settle + Send>;

/// A job, and the answer that it will give.
pub(crate) fn job<T: Send + 'static>(
    work: impl FnOnce(&mut Clerk) -> Result<T, Refusal> + Send + 'static,
) -> (Job, oneshot::Receiver<Result<T, Refusal>>) {
    let (reply, answer) = oneshot::channel();
    let job: Job = Box::new(move |clerk: &mut Clerk| -> Settle {
        let result = clerk.call(work);
        Box::new(move |written: Result<(), Refusal>| {
            // The caller may have given up.
            let _ = reply.send(written.and(result));
        })
    });
    (job, answer)
}

/// The line of another thread to the clerk. Its calls block, and must not come from an async runtime.
#[derive(Clone)]
pub(crate) struct Line(mpsc::Sender<Job>);

impl Line {
    /// A line over a channel of jobs.
    pub(crate) fn new(jobs: mpsc::Sender<Job>) -> Self {
        Self(jobs)
    }

    /// Asks the clerk, and waits for the answer.
    ///
    /// # Errors
    /// The clerk's, or that it has ended.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Clerk) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let (job, answer) = job(work);
        let sent = self.0.blocking_send(job);
        sent.map_err(|_| Refusal::Draining)?;
        answer.blocking_recv().map_err(|_| Refusal::Draining)?
    }

    /// Reports something that happened. If it cannot be written, the clerk returns to the state of the
    /// journal, in which it did not happen.
    pub(crate) fn report(
        &self,
        work: impl FnOnce(&mut Clerk) -> Result<(), Refusal> + Send + 'static,
    ) {
        let job: Job = Box::new(move |clerk: &mut Clerk| -> Settle {
            if let Err(refusal) = clerk.call(work) {
                clerk.broken = Some(refusal);
            }
            Box::new(|_written: Result<(), Refusal>| {})
        });
        // A clerk that has ended needs no report.
        let _ = self.0.blocking_send(job);
    }
}

impl Clerk {
    /// Does `work` as a part of the transaction. If it fails, its changes of the journal are undone; it
    /// changes the rest of the state only after those.
    pub(crate) fn call<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let effects = self.effects.len();
        self.parts.journal.mark()?;
        let result = work(self);
        let settled = self.parts.journal.settle(result.is_ok());
        if result.is_err() || settled.is_err() {
            self.effects.truncate(effects);
        }
        settled?;
        result
    }
}
