//! Decides which sandboxes get new namespaces and a new interpreter, and when.

use super::Spawner;
use nix::poll::PollTimeout;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Pause after an execution before the next interpreter is made ready: a sandbox that is used
/// once is destroyed meanwhile, and the caller gets the processor first.
const PAUSE: Duration = Duration::from_millis(3);

/// Sandboxes by the time from which on they are made ready, the first at the front.
#[derive(Debug, Default)]
pub(super) struct Warming(VecDeque<(Instant, u64)>);

impl Warming {
    /// Adds a sandbox, due after the pause.
    pub(super) fn later(&mut self, id: u64) {
        self.0.push_back((Instant::now() + PAUSE, id));
    }

    /// Adds a sandbox, due as soon as nothing else is to be done, after those that wait already.
    pub(super) fn soon(&mut self, id: u64) {
        self.0.push_back((Instant::now(), id));
    }

    /// The one that is due, or the time until one is; neither if there is none.
    fn next(&mut self) -> Result<u64, PollTimeout> {
        let &(due, id) = self.0.front().ok_or(PollTimeout::NONE)?;
        let left = due.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            let left = left + Duration::from_millis(1);
            return Err(PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
        }
        self.0.pop_front();
        Ok(id)
    }
}

impl Spawner {
    /// Whether another sandbox may have namespaces and an interpreter waiting.
    pub(super) fn more_may_wait(&self) -> bool {
        let waiting = self.live.values().filter(|l| l.init.is_some()).count();
        waiting < self.host.max_waiting
    }

    /// Makes an interpreter ready that is due; the time until the next is. One at a time: an init and
    /// a fork of the zygote write a notice each, on a pipe that has to be read in between, or they
    /// and this process wait for each other.
    pub(super) fn warm_due(&mut self) -> PollTimeout {
        let id = match self.warming.next() {
            Ok(id) => id,
            Err(timeout) => return timeout,
        };
        let more = self.zygote.is_some() && self.more_may_wait();
        if more && self.live.get(&id).is_some_and(|live| live.wants_warm()) {
            // If this fails, the next execution makes its own.
            let _ = self.start_init(id).and_then(|()| self.warm_up(id));
        }
        PollTimeout::ZERO
    }
}
