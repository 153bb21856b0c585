//! Rows that an update consumes, tied to its commit.
//!
//! Rows of a queue lie in another place than the run's commits, so that no transaction spans both. The commit
//! decides: it names the rows that the update consumes, with its step, its episodes, the curriculum and the
//! version of the weights. The source makes sure before the commit that the rows are the run's, and stay so
//! while the session is interrupted; after the commit it gives them back as done. If a crash comes between
//! the two, the resumed run gives back the rows of the last commit again, which changes nothing if they
//! were given back already. A crash before the commit leaves the rows with the run, or gives them to another.
//!
//! Only the newest owner of a run gives rows back: the next one gives back those of the last commit.

use super::learner_thread::lock;
use super::sync::{Driver, Pipeline};
use sinew_orchestrator::{PipelineError, UpdateCommit};
use std::time::Instant;

impl Pipeline {
    /// Reports to the source what the last commit of earlier sessions consumed.
    ///
    /// # Errors
    /// If the store or the source cannot be reached.
    pub(super) fn settle_consumed(&mut self) -> Result<(), PipelineError> {
        let Some(source) = &mut self.source else {
            return Ok(());
        };
        match self.store.last_consumed()? {
            Some(consumed) => {
                self.store.check_fence()?;
                source.committed(&consumed)
            }
            None => Ok(()),
        }
    }
}

impl Driver {
    /// Commits an update in one transaction of the store, then gives the consumed rows back to the source.
    pub(super) fn commit(&mut self, commit: UpdateCommit) -> Result<(), PipelineError> {
        let mut made = self.uncommitted.remove(&commit.step).unwrap_or_default();
        if let Some(source) = &mut self.p.source {
            // Otherwise it would hold rows for a step that the store refuses.
            self.p.store.check_fence()?;
            made.consumed = source.consumes(commit.step)?;
        }
        if let Some(groups) = &mut self.awaited.groups {
            groups.settled(commit.trained.iter().chain(commit.dropped.keys()));
        }
        self.sums.count(commit.trained.len(), commit.dropped.len());
        let evals = std::mem::take(&mut self.measurements.uncommitted);
        self.episodes.forget(commit.dropped.keys());
        let version = lock(&self.p.learner).version();
        let consumed = made.consumed.clone();
        let began = Instant::now();
        self.p.store.commit(commit, made, version, evals)?;
        self.waits.disk.committed(began);
        match (&mut self.p.source, consumed) {
            (Some(source), Some(consumed)) => {
                self.p.store.check_fence()?;
                source.committed(&consumed)
            }
            _ => Ok(()),
        }
    }
}
