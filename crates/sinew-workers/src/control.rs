//! The second thread of a worker: it reports, renews leases and hears orders, whatever episodes do.

use crate::client::{DeskClient, DeskError};
use crate::presence::{Presence, PresenceOrder, WorkerStatus};
use crate::terms::{TicketOrders, WorkerReading, WorkerReport};
use crate::ticket::ROLLOUT;
use sinew_queue::system_clock;
use sinew_rollout::Hop;
use sinew_store::queue::{LeaseId, Queue};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of reports.
const REPORT_EVERY: Duration = Duration::from_millis(500);

/// State that both threads of a worker share.
#[derive(Debug, Default)]
pub(crate) struct ControlState {
    /// Leases by the keys of their tickets.
    pub(crate) held: BTreeMap<String, LeaseId>,
    /// Keys whose leases went to others.
    pub(crate) lost: BTreeSet<String>,
    /// The last orders of the owner.
    pub(crate) orders: Option<TicketOrders>,
    /// The registry wants the worker to leave.
    pub(crate) drain: bool,
    /// Time since which the owner does not answer.
    pub(crate) away: Option<Instant>,
    /// The owner refuses this worker.
    pub(crate) refused: Option<DeskError>,
    /// State of the worker, for reports.
    pub(crate) reading: WorkerReading,
    pub(crate) status: WorkerStatus,
    /// Reports that were answered.
    pub(crate) reports: Hop,
    /// The worker takes no more tickets.
    pub(crate) leaving: bool,
    /// Reading and status hold what owner and registry must hear before the worker is gone.
    pub(crate) last_words: bool,
    stop: bool,
}

impl ControlState {
    /// Whether the owner of this generation answered the last report.
    fn is_of(&self, fence: u64) -> bool {
        let own = self
            .orders
            .as_ref()
            .is_none_or(|orders| orders.fence == fence);
        own && self.away.is_none()
    }
}

/// The shared state, and what wakes the second thread at its end.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    state: Mutex<ControlState>,
    ended: Condvar,
}

impl Shared {
    /// Every change leaves the state whole, so a poisoned lock is usable.
    pub(crate) fn state(&self) -> MutexGuard<'_, ControlState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Parts of the second thread.
pub(crate) struct ControlParts {
    pub(crate) name: String,
    pub(crate) owner: Arc<DeskClient>,
    pub(crate) queue: Arc<dyn Queue>,
    /// Generation of the owner for which the worker made its parts.
    pub(crate) fence: u64,
    pub(crate) lease_ms: u64,
    pub(crate) presence: Box<dyn Presence>,
    /// Ends a wait of the first thread.
    pub(crate) wake: Box<dyn Fn() + Send>,
}

/// The running second thread. Dropping it ends the registration and the thread.
pub(crate) struct Control {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    pub(crate) fn start(parts: ControlParts, shared: Arc<Shared>) -> std::io::Result<Self> {
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("worker-control".into());
        let thread = thread.spawn(move || run(parts, &theirs))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.shared.state().stop = true;
        self.shared.ended.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of it was reported where it happened.
            let _ = thread.join();
        }
    }
}

fn run(mut parts: ControlParts, shared: &Shared) {
    let renew_every = Duration::from_millis((parts.lease_ms / 3).max(1));
    let (mut renewed, mut beaten) = (Instant::now(), None::<Instant>);
    let mut told = false;
    loop {
        report(&parts, shared);
        if renewed.elapsed() >= renew_every {
            renewed = Instant::now();
            renew(&parts, shared);
        }
        // A registration at a newer owner waits until the parts are made for it: it would end by its lease.
        let due = beaten.is_none_or(|at| at.elapsed() >= parts.presence.every());
        if due && shared.state().is_of(parts.fence) {
            beaten = Some(Instant::now());
            let status = shared.state().status.clone();
            let order = parts.presence.beat(&status);
            shared.state().drain |= order == PresenceOrder::Drain;
        }
        // Another worker may be started in its place while its episodes end.
        if !told && shared.state().leaving {
            told = true;
            parts.presence.drain();
        }
        (parts.wake)();
        let state = shared.state();
        let waited =
            shared
                .ended
                .wait_timeout_while(state, REPORT_EVERY.min(renew_every), |state| !state.stop);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.stop {
            break;
        }
    }
    let status = {
        let state = shared.state();
        state.last_words.then(|| state.status.clone())
    };
    if let Some(status) = status {
        report(&parts, shared);
        parts.presence.beat(&status);
    }
    // A newer owner that saw this worker leave would start another one in its place.
    if shared.state().is_of(parts.fence) {
        parts.presence.leave();
    }
}

/// Sends a report, and notes the orders.
fn report(parts: &ControlParts, shared: &Shared) {
    let report = WorkerReport {
        worker: parts.name.clone(),
        reading: shared.state().reading,
    };
    let began = Instant::now();
    let orders = parts.owner.report(&report);
    let mut state = shared.state();
    match orders {
        Ok(orders) => {
            state.reports.call(1, began.elapsed().as_secs_f64());
            state.orders = Some(orders);
            if let Some(since) = state.away.take() {
                let seconds = since.elapsed().as_secs();
                tracing::info!(seconds, "the owner answers again");
            }
        }
        Err(error) if error.may_pass() => {
            if state.away.is_none() {
                state.away = Some(Instant::now());
                tracing::warn!(%error, "episodes go on without the owner");
            }
        }
        Err(error) => state.refused = Some(error),
    }
}

/// Renews all leases. Those that went to others are noted; a queue that does not answer changes nothing.
fn renew(parts: &ControlParts, shared: &Shared) {
    let mut by_lease: BTreeMap<LeaseId, Vec<String>> = BTreeMap::new();
    for (key, lease) in &shared.state().held {
        by_lease.entry(*lease).or_default().push(key.clone());
    }
    let now_ms = system_clock()();
    for (lease, keys) in by_lease {
        match parts
            .queue
            .renew(ROLLOUT, lease, &keys, parts.lease_ms, now_ms)
        {
            Ok(outcome) => shared.state().lost.extend(outcome.lost),
            Err(error) => tracing::warn!(%error, "leases on tickets were not renewed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_owner_of_the_parts_has_the_registration() {
        let orders = |fence| {
            Some(TicketOrders {
                fence,
                ..TicketOrders::default()
            })
        };
        let mut state = ControlState::default();
        assert!(state.is_of(1));
        state.orders = orders(1);
        assert!(state.is_of(1));
        state.orders = orders(2);
        assert!(!state.is_of(1));
        state.orders = orders(1);
        state.away = Some(Instant::now());
        assert!(!state.is_of(1));
    }
}
