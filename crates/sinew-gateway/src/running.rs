//! One model call while it runs, as its readers see it: deltas and one result.
//!
//! The call belongs to a task of its own (`drive`), not to the connection that asked: a retry can
//! join it, and what was sampled is captured even if the client is gone. When the last reader is
//! dropped, the generation is aborted.

use sinew_dialect::ApiError;
use sinew_dialect::{AnswerContext, Delta, ModelResponse};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Time in which an engine must end requests that were aborted.
pub(crate) const ABORT_GRACE: Duration = Duration::from_secs(5);

/// What a reader gets next.
#[derive(Debug)]
pub(crate) enum Event {
    /// Of a stream, at least one.
    Deltas(Vec<Delta>),
    /// The result; nothing comes after it.
    Done(Result<Arc<ModelResponse>, ApiError>),
}

#[derive(Debug, Default)]
struct State {
    /// All of them: a reader that joins late reads from the beginning.
    deltas: Vec<Delta>,
    done: Option<Result<Arc<ModelResponse>, ApiError>>,
}

/// A call that runs, or has just ended.
#[derive(Debug)]
pub(crate) struct RunningCall {
    pub(crate) context: AnswerContext,
    state: Mutex<State>,
    changed: Notify,
    cancel: Notify,
    /// Subscriptions that are alive.
    readers: AtomicUsize,
    /// All readers were dropped before its end.
    left: AtomicBool,
    /// The error of its readers if it is cancelled; unset: that it was aborted.
    why: OnceLock<ApiError>,
    pub(crate) begun: Instant,
    /// When the engine got it; until then it waits for capacity.
    pub(crate) submitted: OnceLock<Instant>,
    pub(crate) deadline: Instant,
}

impl RunningCall {
    pub(crate) fn new(context: AnswerContext, deadline: Instant) -> Arc<Self> {
        Arc::new(Self {
            context,
            why: OnceLock::new(),
            begun: Instant::now(),
            submitted: OnceLock::new(),
            deadline,
            state: Mutex::default(),
            changed: Notify::new(),
            cancel: Notify::new(),
            readers: AtomicUsize::new(0),
            left: AtomicBool::new(false),
        })
    }

    /// Whether all readers were dropped before its end.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// Resolves when it is to end early.
    pub(crate) async fn cancel_asked(&self) {
        self.cancel.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a delta to the readers of a stream.
    pub(crate) fn push(&self, delta: Delta) {
        if self.context.request.stream {
            self.lock().deltas.push(delta);
            self.changed.notify_waiters();
        }
    }

    /// Hands the result to the readers.
    pub(crate) fn finish(&self, result: Result<Arc<ModelResponse>, ApiError>) {
        self.lock().done = Some(result);
        self.changed.notify_waiters();
    }

    /// Whether it ended well, so that its answer can be repeated.
    pub(crate) fn is_replayable(&self) -> bool {
        matches!(self.lock().done, Some(Ok(_)))
    }

    /// Whether it has ended.
    pub(crate) fn is_done(&self) -> bool {
        self.lock().done.is_some()
    }

    /// Ends it early.
    pub(crate) fn cancel(&self) {
        self.cancel.notify_one();
    }

    /// Ends it early with the error `why`, unless it has ended.
    pub(crate) fn cancel_for(&self, why: ApiError) {
        // The first reason is the one that counts.
        let _ = self.why.set(why);
        self.cancel();
    }

    /// The error of a call that was cancelled.
    pub(crate) fn cancelled(&self) -> ApiError {
        let aborted = || ApiError::conflict("aborted", "the call was aborted");
        self.why.get().cloned().unwrap_or_else(aborted)
    }
}

/// A reader of a call. Dropping the last one before the end aborts the generation.
#[derive(Debug)]
pub(crate) struct Subscription {
    call: Arc<RunningCall>,
    /// Deltas that it has read.
    seen: usize,
}

impl Subscription {
    pub(crate) fn new(call: &Arc<RunningCall>) -> Self {
        call.readers.fetch_add(1, Ordering::AcqRel);
        Self {
            call: Arc::clone(call),
            seen: 0,
        }
    }

    pub(crate) fn context(&self) -> &AnswerContext {
        &self.call.context
    }

    /// Everything new, or the result once all deltas were read.
    pub(crate) async fn next(&mut self) -> Event {
        loop {
            // Made before the look: a change in between wakes it.
            let changed = self.call.changed.notified();
            {
                let state = self.call.lock();
                if state.deltas.len() > self.seen {
                    let new = state.deltas[self.seen..].to_vec();
                    self.seen = state.deltas.len();
                    return Event::Deltas(new);
                }
                if let Some(done) = &state.done {
                    return Event::Done(done.clone());
                }
            }
            changed.await;
        }
    }

    /// The result alone.
    pub(crate) async fn response(&mut self) -> Result<Arc<ModelResponse>, ApiError> {
        loop {
            if let Event::Done(done) = self.next().await {
                return done;
            }
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if self.call.readers.fetch_sub(1, Ordering::AcqRel) == 1 && !self.call.is_done() {
            self.call.left.store(true, Ordering::Release);
            self.call.cancel();
        }
    }
}
