//! One model call while it runs, as its readers see it: deltas and one result.
//!
//! The call belongs to a separate task (`drive`), not to the connection that asked: a retry can join it, and
//! its tokens are captured even if the client is gone. A call without a reader continues for a while, since
//! clients close a connection before they ask again; then it is aborted.

use sinew_dialect::ApiError;
use sinew_dialect::{AnswerContext, Delta, ModelResponse};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// Time in which an engine must end requests that were aborted.
pub(crate) const ABORT_GRACE: Duration = Duration::from_secs(5);

/// Event for a reader.
#[derive(Debug)]
pub(crate) enum Event {
    /// Part of a stream, at least one delta.
    Deltas(Vec<Delta>),
    /// The result; nothing comes after it.
    Done(Result<Arc<ModelResponse>, ApiError>),
}

#[derive(Debug, Default)]
struct State {
    /// All of them: a reader that joins late reads from the beginning.
    deltas: Vec<Delta>,
    done: Option<Result<Arc<ModelResponse>, ApiError>>,
    /// Subscriptions that are alive.
    readers: usize,
    /// Time since which there is no reader.
    unread_since: Option<Instant>,
    /// No reader came back in time; none may come any more.
    abandoned: bool,
    /// A reader had the result.
    delivered: bool,
}

/// A call that runs, or has just ended.
#[derive(Debug)]
pub(crate) struct RunningCall {
    pub(crate) context: AnswerContext,
    state: Mutex<State>,
    changed: Notify,
    cancel: Notify,
    /// The number of readers became zero, or did not stay so.
    readers_changed: Notify,
    /// The error of its readers if it is cancelled; unset: that it was aborted.
    why: OnceLock<ApiError>,
    pub(crate) begun: Instant,
    /// Time at which the engine got it; until then it waits for capacity.
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

    /// Whether all readers were dropped before its end, and none came back.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.lock().abandoned
    }

    /// Whether no client reads it.
    pub(crate) fn is_unread(&self) -> bool {
        self.lock().unread_since.is_some()
    }

    /// Resolves when it has had no reader for so long.
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

    /// A reader for a repeated request; `None`: it is aborted already. Unless the client marks it as repeated
    /// (`again`), it repeats only a call whose answer nobody got.
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

/// A reader of a call. If the last one is dropped before the end, the generation may continue for a while.
#[derive(Debug)]
pub(crate) struct Subscription {
    call: Arc<RunningCall>,
    /// Deltas that it has read.
    seen: usize,
}

impl Subscription {
    pub(crate) fn new(call: &Arc<RunningCall>) -> Self {
        call.subscribe(&mut call.lock())
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
