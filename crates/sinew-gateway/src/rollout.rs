//! One open rollout: its session, its calls and the answers that it stored.

use crate::journal::{Journal, Receipt, Record};
use crate::running::{ABORT_GRACE, RunningCall, Subscription};
use crate::secret::Secret;
use crate::session::Session;
use sinew_dialect::Answers;
use sinew_dialect::ApiError;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Ended calls of a rollout whose answers can be repeated.
const REPLAYS: usize = 2;

/// Seconds since 1970.
pub(crate) fn unix_s() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0.0, |d| d.as_secs_f64())
}

/// A live rollout.
#[derive(Debug)]
pub(crate) struct Rollout {
    /// Opens its model address.
    key: Secret,
    /// Stands for the key in `traceparent`. It is random, as what is stored must not open anything.
    trace_id: [u8; 16],
    /// Captured calls. The lock is held for microseconds, except while rendering.
    session: Mutex<Session>,
    journal: Option<Arc<Journal>>,
    calls: Mutex<Calls>,
    /// A call ended.
    idle: Notify,
    pub(crate) answers: Arc<Answers>,
    /// Held by the call whose format is compiled: a rollout compiles one at a time.
    pub(crate) compiling: Arc<tokio::sync::Mutex<()>>,
}

/// The calls that a retry may join.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    /// Running calls with the keys of their requests, if they have one.
    pub(crate) running: Vec<(Option<[u8; 32]>, Arc<RunningCall>)>,
    /// The newest last, at most [`REPLAYS`].
    pub(crate) ended: VecDeque<([u8; 32], Arc<RunningCall>)>,
}

impl Rollout {
    /// A rollout that `key` and `trace_id` open. The journal, if there is one, records its events.
    pub(crate) fn new(
        key: Secret,
        trace_id: [u8; 16],
        mut session: Session,
        answers: Answers,
        journal: Option<Arc<Journal>>,
    ) -> Arc<Self> {
        if journal.is_some() {
            session.keep_entries();
        }
        Arc::new(Self {
            key,
            trace_id,
            session: Mutex::new(session),
            journal,
            calls: Mutex::default(),
            idle: Notify::new(),
            answers: Arc::new(answers),
            compiling: Arc::default(),
        })
    }

    /// Whether a request with this key may call its model.
    pub(crate) fn is_opened_by(&self, key: Option<&str>) -> bool {
        key.is_some_and(|key| self.key.matches(key))
    }

    /// Names the rollout in `traceparent`.
    pub(crate) fn trace_id(&self) -> [u8; 16] {
        self.trace_id
    }

    /// Names its key in a table.
    pub(crate) fn key_name(&self) -> [u8; 16] {
        self.key.name()
    }

    /// Aborts the running calls and waits until what they sampled is captured.
    pub(crate) async fn end_calls(&self) {
        let deadline = Instant::now() + ABORT_GRACE * 2;
        loop {
            let idle = self.idle.notified();
            let running = self.running();
            if running.is_empty() {
                return;
            }
            running.iter().for_each(|call| call.cancel());
            if tokio::time::timeout_at(deadline, idle).await.is_err() {
                return;
            }
        }
    }

    /// The running calls.
    pub(crate) fn running(&self) -> Vec<Arc<RunningCall>> {
        let calls = self.calls();
        let running = calls.running.iter();
        running.map(|(_, call)| Arc::clone(call)).collect()
    }

    pub(crate) fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands what happened since the last time to the journal, in its order.
    ///
    /// # Errors
    /// If the journal takes no more; the rollout is closed then, as its entries have a gap.
    pub(crate) fn record(&self, session: &mut Session) -> Result<Option<Receipt>, ApiError> {
        let Some(journal) = &self.journal else {
            return Ok(None);
        };
        let entries = session.take_entries();
        if entries.is_empty() {
            return Ok(None);
        }
        let appended = journal.append(session.id(), Record::Entries { entries });
        if appended.is_err() {
            session.close();
        }
        appended.map(Some)
    }

    pub(crate) fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call has ended: its answer may be repeated for a while.
    pub(crate) fn ended(&self, call: &Arc<RunningCall>) {
        let mut calls = self.calls();
        let mut running = calls.running.iter();
        let found = running.position(|(_, running)| Arc::ptr_eq(running, call));
        if let Some((Some(key), call)) = found.map(|i| calls.running.swap_remove(i))
            && call.is_replayable()
        {
            calls.ended.push_back((key, call));
            if calls.ended.len() > REPLAYS {
                calls.ended.pop_front();
            }
        }
        drop(calls);
        self.idle.notify_waiters();
    }

    /// A reader of the call that the request of this key repeats, running or just ended.
    pub(crate) fn repeated(&self, key: [u8; 32], again: bool) -> Option<Subscription> {
        let calls = self.calls();
        let running = calls.running.iter();
        let running = running.filter(|(k, _)| *k == Some(key)).map(|(_, c)| c);
        let ended = calls.ended.iter().rev();
        let ended = ended.filter(|(k, _)| *k == key).map(|(_, c)| c);
        running.chain(ended).find_map(|call| call.join(again))
    }
}
