//! One open rollout: its session, its calls and its stored answers.

use crate::journal::{Journal, Receipt, Record};
use crate::running::{ABORT_GRACE, RunningCall, Subscription};
use crate::secret::Secret;
use crate::session::Session;
use sinew_dialect::{Answers, ApiError, ModelResponse};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Number of ended calls of a rollout whose answers can be repeated.
const REPLAYS: usize = 2;

/// Seconds since 1970.
pub(crate) fn unix_s() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0.0, |d| d.as_secs_f64())
}

/// An open rollout.
#[derive(Debug)]
pub(crate) struct Rollout {
    /// Key for its model address.
    key: Secret,
    /// Random id that replaces the key in `traceparent`. It is not derived from the rollout's id or key: the
    /// id is stored with the trace and must not give access to the model, and a trace id that reaches logs
    /// must not reveal the key.
    trace_id: [u8; 16],
    /// Captured calls. The lock is held for microseconds, and longer only while rendering.
    session: Mutex<Session>,
    journal: Option<Arc<Journal>>,
    calls: Mutex<Calls>,
    /// Notified when a call ends.
    idle: Notify,
    pub(crate) answers: Arc<Answers>,
    /// Lock that is held while a call's format is compiled, so that a rollout compiles one format at a time.
    pub(crate) compiling: Arc<tokio::sync::Mutex<()>>,
}

/// The calls that a retried request may join.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    /// Running calls, with the hashes of their requests if they have one.
    pub(crate) running: Vec<(Option<[u8; 32]>, Arc<RunningCall>)>,
    /// Ended calls, the newest last; at most [`REPLAYS`].
    pub(crate) ended: VecDeque<([u8; 32], Arc<RunningCall>)>,
}

impl Rollout {
    /// Creates a rollout with the given `key` and `trace_id`. The journal, if there is one, records its
    /// events.
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

    /// Whether a request with this key may call the rollout's model.
    pub(crate) fn is_opened_by(&self, key: Option<&str>) -> bool {
        key.is_some_and(|key| self.key.matches(key))
    }

    /// Returns the id that replaces the key in `traceparent`.
    pub(crate) fn trace_id(&self) -> [u8; 16] {
        self.trace_id
    }

    /// Returns the name of its key, for lookup tables.
    pub(crate) fn key_name(&self) -> [u8; 16] {
        self.key.name()
    }

    /// Aborts the running calls and waits until their sampled tokens are captured.
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

    /// Appends the session's new entries to the journal, in order.
    ///
    /// # Errors
    /// If the journal refuses an entry. The rollout is then closed, since its entries have a gap.
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

    /// Sends the result of a call to its readers and records its end; its answer can be repeated for a while.
    pub(crate) fn ended(
        &self,
        call: &Arc<RunningCall>,
        result: Result<Arc<ModelResponse>, ApiError>,
    ) {
        let mut calls = self.calls();
        // The lock is held: a client that has the result does not find the call running.
        call.finish(result);
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

    /// Returns a reader of the running or recently ended call that a request with this hash repeats.
    pub(crate) fn repeated(&self, key: [u8; 32], again: bool) -> Option<Subscription> {
        let calls = self.calls();
        let running = calls.running.iter();
        let running = running.filter(|(k, _)| *k == Some(key)).map(|(_, c)| c);
        let ended = calls.ended.iter().rev();
        let ended = ended.filter(|(k, _)| *k == key).map(|(_, c)| c);
        running.chain(ended).find_map(|call| call.join(again))
    }
}
