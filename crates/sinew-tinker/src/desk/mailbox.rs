//! A mailbox: state that other threads change without blocking, and from which its owner takes orders.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The mailbox.
#[derive(Debug, Default)]
pub(super) struct Mailbox<S> {
    state: Mutex<S>,
    bell: Condvar,
}

impl<S> Mailbox<S> {
    /// Locks the state. A panic never leaves it between two states.
    fn lock(&self) -> MutexGuard<'_, S> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and wakes the owner.
    pub(super) fn change(&self, change: impl FnOnce(&mut S)) {
        change(&mut self.lock());
        self.bell.notify_all();
    }

    /// The order that `take` finds, waiting up to `wait` for one.
    pub(super) fn next<O>(
        &self,
        wait: Duration,
        mut take: impl FnMut(&mut S) -> Option<O>,
    ) -> Option<O> {
        let mut found = None;
        let waited = self.bell.wait_timeout_while(self.lock(), wait, |state| {
            found = take(state);
            found.is_none()
        });
        drop(waited);
        found
    }
}
