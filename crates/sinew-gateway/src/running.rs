//! A running model call as its readers see it: deltas and one result.
//!
//! The call belongs to a separate task (`drive`) and not to the connection of the request: a retry can join
//! it, and its tokens are captured even if the client disconnects. A call without a reader continues for a
//! while, since clients close a connection before they retry; then it is aborted.

use sinew_dialect::{AnswerContext, ApiError, Delta, ModelResponse};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// Maximum time for an engine to end aborted requests.
pub(crate) const ABORT_GRACE: Duration = Duration::from_secs(5);

/// Event for a reader.
#[derive(Debug)]
pub(crate) enum Event {
    /// New deltas of a stream, at least one.
    Deltas(Vec<Delta>),
    /// The result; no event follows it.
    Done(Result<Arc<ModelResponse>, ApiError>),
}

#[derive(Debug, Default)]
struct State {
    /// All deltas, so that a reader that joins late starts from the beginning.
    deltas: Vec<Delta>,
    done: Option<Result<Arc<ModelResponse>, ApiError>>,
    /// Number of live subscriptions.
    readers: usize,
    /// Time at which the last reader left.
    unread_since: Option<Instant>,
    /// Whether the call is aborted because no reader came back in time; no reader may join it.
    abandoned: bool,
    /// Whether a reader has received the result.
    delivered: bool,
}

/// A call that is running or has recently ended.
#[derive(Debug)]
pub(crate) struct RunningCall {
    pub(crate) context: AnswerContext,
    state: Mutex<State>,
    changed: Notify,
    cancel: Notify,
    /// Notified when the number of readers becomes zero or grows from zero.
    readers_changed: Notify,
    /// Error for the readers if the call is cancelled; if unset, the error is that the call was aborted.
    why: OnceLock<ApiError>,
    pub(crate) begun: Instant,
    /// Time at which the engine received the call; before that, the call waits for capacity.
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
            readers_changed: Notify::new(),
        })
    }

    /// Whether all readers left before the end and none came back.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.lock().abandoned
    }

    /// Whether no client reads it.
    pub(crate) fn is_unread(&self) -> bool {
        self.lock().unread_since.is_some()
    }

    /// Resolves when the call has had no reader for `grace`.
    pub(crate) async fn abandoned(&self, grace: Duration) {
        loop {
            // Made before the look: a change in between wakes it.
            let changed = self.readers_changed.notified();
            let unread_since = self.lock().unread_since;
            let Some(since) = unread_since else {
                changed.await;
                continue;
            };
            tokio::select! {
                () = changed => {}
                () = sleep_until(since + grace) => {
                    let mut state = self.lock();
                    if state.unread_since == Some(since) {
                        state.abandoned = true;
                        return;
                    }
                }
            }
        }
    }

    /// Returns a reader for a repeated request; `None` if the call is being aborted. Without the client's
    /// mark of a retry (`again`), only a call can be joined that no client reads and whose answer no client
    /// received.
    pub(crate) fn join(self: &Arc<Self>, again: bool) -> Option<Subscription> {
        let mut state = self.lock();
        let unread = state.readers == 0 && !state.delivered;
        if state.abandoned || !(again || unread) {
            return None;
        }
        Some(self.subscribe(&mut state))
    }

    /// Adds a reader.
    fn subscribe(self: &Arc<Self>, state: &mut State) -> Subscription {
        state.readers += 1;
        state.unread_since = None;
        self.readers_changed.notify_waiters();
        Subscription {
            call: Arc::clone(self),
            seen: 0,
        }
    }

    /// Resolves when the call is cancelled.
    pub(crate) async fn cancel_asked(&self) {
        self.cancel.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a delta to the readers of a stream.
    pub(crate) fn push(&self, delta: Delta) {
        if self.context.request.stream {
            self.lock().deltas.push(delta);
            self.changed.notify_waiters();
        }
    }

    /// Sends the result to the readers.
    pub(crate) fn finish(&self, result: Result<Arc<ModelResponse>, ApiError>) {
        self.lock().done = Some(result);
        self.changed.notify_waiters();
    }

    /// Whether the call succeeded, so that its answer can be repeated.
    pub(crate) fn is_replayable(&self) -> bool {
        matches!(self.lock().done, Some(Ok(_)))
    }

    /// Cancels the call.
    pub(crate) fn cancel(&self) {
        self.cancel.notify_one();
    }

    /// Cancels the call with the error `why`, unless it has ended.
    pub(crate) fn cancel_for(&self, why: ApiError) {
        // The first reason is the one that counts.
        let _ = self.why.set(why);
        self.cancel();
    }

    /// Returns the error of a cancelled call.
    pub(crate) fn cancelled(&self) -> ApiError {
        let aborted = || ApiError::conflict("aborted", "the call was aborted");
        self.why.get().cloned().unwrap_or_else(aborted)
    }
}

/// A reader of a call. If the last one is dropped before the end, the call continues for the grace time.
#[derive(Debug)]
pub(crate) struct Subscription {
    call: Arc<RunningCall>,
    /// Number of deltas that it has read.
    seen: usize,
}

impl Subscription {
    pub(crate) fn new(call: &Arc<RunningCall>) -> Self {
        call.subscribe(&mut call.lock())
    }

    pub(crate) fn context(&self) -> &AnswerContext {
        &self.call.context
    }

    /// Returns all new deltas, or the result after all deltas were read.
    pub(crate) async fn next(&mut self) -> Event {
        loop {
            // Made before the look: a change in between wakes it.
            let changed = self.call.changed.notified();
            {
                let mut state = self.call.lock();
                if state.deltas.len() > self.seen {
                    let new = state.deltas[self.seen..].to_vec();
                    self.seen = state.deltas.len();
                    return Event::Deltas(new);
                }
                if let Some(done) = state.done.clone() {
                    state.delivered = true;
                    return Event::Done(done);
                }
            }
            changed.await;
        }
    }

    /// Waits for the result, without deltas.
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
        let mut state = self.call.lock();
        state.readers -= 1;
        if state.readers == 0 {
            state.unread_since = Some(Instant::now());
            self.call.readers_changed.notify_waiters();
        }
    }
}
