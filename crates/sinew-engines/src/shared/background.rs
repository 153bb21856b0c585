//! Publishes weights during the training: one thread, and one place for the version that waits.

use super::publish::{PublishedVersion, SharedWeights};
use crate::folder::FolderError;
use sinew_types::{PolicyVersion, TensorSource};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Weights that wait, and whether more may come.
#[derive(Default)]
struct Slot {
    next: Option<(PolicyVersion, Arc<dyn TensorSource>)>,
    closed: bool,
}

/// State that the trainer and the thread share.
#[derive(Default)]
struct Shared {
    slot: Mutex<Slot>,
    changed: Condvar,
}

impl Shared {
    fn slot(&self) -> MutexGuard<'_, Slot> {
        // Both sides only move values in and out.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hears of every version: published, or the reason why not.
pub type PublishObserver = Box<dyn Fn(PolicyVersion, Result<PublishedVersion, FolderError>) + Send>;

/// Publishes versions of the weights on a separate thread, while training continues. A version that still
/// waits when the next one arrives is skipped. Dropping the publisher first publishes the waiting version.
pub struct Publisher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

sinew_types::debug_fields!(Publisher);

impl Publisher {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system gives none.
    pub fn start(mut weights: SharedWeights, heard: PublishObserver) -> std::io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let theirs = Arc::clone(&shared);
        let work = move || {
            loop {
                let mut slot = theirs.slot();
                let (version, tensors) = loop {
                    if let Some(next) = slot.next.take() {
                        break next;
                    }
                    if slot.closed {
                        return;
                    }
                    let woken = theirs.changed.wait(slot);
                    slot = woken.unwrap_or_else(PoisonError::into_inner);
                };
                drop(slot);
                heard(version, weights.publish(version, &*tensors));
            }
        };
        let thread = std::thread::Builder::new().name("weights".into());
        Ok(Self {
            shared,
            thread: Some(thread.spawn(work)?),
        })
    }

    /// Publishes this version as soon as the one before is done; does not wait.
    pub fn offer(&self, version: PolicyVersion, weights: Arc<dyn TensorSource>) {
        self.shared.slot().next = Some((version, weights));
        self.shared.changed.notify_one();
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.shared.slot().closed = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of it was reported where it happened.
            let _ = thread.join();
        }
    }
}
