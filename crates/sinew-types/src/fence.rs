//! Fences: which process owns a run.
//!
//! A file lock keeps two processes on one host apart. Behind a partition, or on a file system that several
//! hosts share, an old owner may continue while a new one has started. Therefore each owner takes a number
//! from the run's store when it starts, one above the newest, and acts only while no higher number was taken.
//! The store refuses a commit of an older owner by itself. Other acts (a checkpoint's `LATEST`, published
//! weights, acknowledged rows) ask for the newest number directly before they take effect. Such an act of an
//! old owner can still take effect if the new number is taken between the question and the act.

use std::sync::Arc;

/// Reads the newest number that any owner has taken; the error is a reason for display.
pub type NewestFence = Arc<dyn Fn() -> Result<u64, String> + Send + Sync>;

/// Number of an owner, with the way to learn whether a newer one exists. The default is the fence of a caller
/// without a store: its number is 0, and it allows everything.
#[derive(Clone, Default)]
pub struct Fence {
    number: u64,
    run: Arc<str>,
    newest: Option<NewestFence>,
}

/// Reasons for which an owner may not act.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FenceError {
    /// A newer owner exists.
    #[error(
        "{run}: owner {newest} has taken over this run, and this process is owner {own}: it may not commit, \
         publish or save any more; let owner {newest} continue, or resume the run after that one has ended"
    )]
    Fenced {
        /// Folder of the run.
        run: String,
        /// Number of this process.
        own: u64,
        /// Number of the newest owner.
        newest: u64,
    },
    /// The store of the run does not answer.
    #[error("{run}: cannot check whether owner {own}, this process, still owns this run: {reason}")]
    Unknown {
        /// Folder of the run.
        run: String,
        /// Number of this process.
        own: u64,
        /// Error of the store.
        reason: String,
    },
}

impl Fence {
    /// Creates the fence of owner `number` of the run in the folder `run`. `newest` reads from its store.
    pub fn new(number: u64, run: impl Into<Arc<str>>, newest: NewestFence) -> Self {
        Self {
            number,
            run: run.into(),
            newest: Some(newest),
        }
    }

    /// Number of this owner; 0 without a store.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether this owner may act now.
    ///
    /// # Errors
    /// If a higher number was taken, or the store does not answer.
    pub fn check(&self) -> Result<(), FenceError> {
        let Some(newest) = &self.newest else {
            return Ok(());
        };
        match newest() {
            Ok(newest) if newest > self.number => Err(self.fenced(newest)),
            Ok(_) => Ok(()),
            Err(reason) => Err(FenceError::Unknown {
                run: self.run.to_string(),
                own: self.number,
                reason,
            }),
        }
    }

    /// The error after `newest` was taken.
    pub fn fenced(&self, newest: u64) -> FenceError {
        FenceError::Fenced {
            run: self.run.to_string(),
            own: self.number,
            newest,
        }
    }
}

crate::debug_fields!(Fence, number, run);

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn an_owner_acts_until_a_higher_number_is_taken() {
        let newest = Arc::new(AtomicU64::new(2));
        let read = Arc::clone(&newest);
        let fence = Fence::new(
            2,
            "runs/a",
            Arc::new(move || Ok::<_, String>(read.load(Ordering::SeqCst))),
        );
        assert_eq!((fence.check(), fence.number()), (Ok(()), 2));
        newest.store(3, Ordering::SeqCst);
        let error = fence.check().unwrap_err();
        assert_eq!(error, fence.fenced(3));
        let text = error.to_string();
        for part in ["runs/a", "owner 2", "owner 3"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_store_that_does_not_answer_allows_nothing() {
        let fence = Fence::new(1, "runs/a", Arc::new(|| Err::<u64, _>("gone".to_owned())));
        let text = fence.check().unwrap_err().to_string();
        assert!(text.contains("runs/a") && text.contains("gone"), "{text}");
    }

    #[test]
    fn without_a_store_everything_is_allowed() {
        assert_eq!(Fence::default().check(), Ok(()));
        assert_eq!(Fence::default().number(), 0);
    }
}
