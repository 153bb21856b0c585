//! Common parts of the worker pools: sessions, and the bound of starts.

use crate::error::CallError;
use crate::lock::lock;
use crate::worker::{RefusedCall, THREADED, Worker};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Starts of workers within [`WINDOW`], in addition to one of each. A pool that needs more waits.
const MAX_RESTARTS: usize = 32;
/// Time over which starts are counted.
const WINDOW: Duration = Duration::from_secs(60);

/// Times of the last starts: code that kills each worker must not take the time of the host for ever.
pub(crate) struct StartTimes {
    times: Mutex<VecDeque<Instant>>,
    /// Starts within [`WINDOW`].
    most: usize,
}

impl StartTimes {
    /// Creates the limit for a pool of `workers` workers.
    pub(crate) fn new(workers: usize) -> Self {
        Self {
            times: Mutex::default(),
            most: workers + MAX_RESTARTS,
        }
    }

    /// Waits until a worker may start, at most so long.
    ///
    /// # Errors
    /// [`CallError::Busy`] after that.
    pub(crate) async fn wait(&self, at_most: Duration) -> Result<(), CallError> {
        let give_up = Instant::now() + at_most;
        loop {
            let wait = {
                let mut times = lock(&self.times);
                while times.front().is_some_and(|s| s.elapsed() >= WINDOW) {
                    times.pop_front();
                }
                if times.len() < self.most {
                    times.push_back(Instant::now());
                    return Ok(());
                }
                let oldest = times.front().map(Instant::elapsed).unwrap_or_default();
                WINDOW.saturating_sub(oldest)
            };
            if Instant::now() + wait > give_up {
                return Err(CallError::Busy(format!(
                    "workers ended {} times within {} s; look for what crashes or hangs in the code",
                    MAX_RESTARTS,
                    WINDOW.as_secs()
                )));
            }
            tokio::time::sleep(wait).await;
        }
    }
}

/// The error of a call after the end of the pool.
pub(crate) fn gone() -> CallError {
    CallError::Lost {
        reason: "the pool of workers is gone".into(),
    }
}

/// One session of a worker. Dropping it closes the session in the background.
pub(crate) struct Session {
    id: u64,
    worker: Arc<Worker>,
    handle: Handle,
    /// Deadline of one call.
    timeout: Duration,
    /// Kept until the worker has closed the session. `None` after that.
    seat: Option<Box<dyn Send + Sync>>,
}

impl Session {
    /// A session of a worker that holds a seat of its pool.
    pub(crate) fn new(
        id: u64,
        worker: Arc<Worker>,
        handle: Handle,
        timeout: Duration,
        seat: Box<dyn Send + Sync>,
    ) -> Self {
        Self {
            id,
            worker,
            handle,
            timeout,
            seat: Some(seat),
        }
    }

    /// Calls the session.
    pub(crate) async fn call(&self, mut request: Value) -> Result<Value, CallError> {
        request["session"] = self.id.into();
        let (worker, timeout) = (Arc::clone(&self.worker), self.timeout);
        let called = self.handle.spawn(async move {
            let called = worker.call(request, THREADED, timeout).await;
            called.map_err(RefusedCall::into_error)
        });
        called.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Closes the session. The seat is free when the worker has answered.
    pub(crate) async fn close(mut self) -> Result<Value, CallError> {
        let seat = self.seat.take();
        let closed = self.call(json!({"op": "close"})).await;
        self.worker.retire();
        drop(seat);
        closed
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(seat) = self.seat.take() else {
            return;
        };
        let (worker, id, timeout) = (Arc::clone(&self.worker), self.id, self.timeout);
        self.handle.spawn(async move {
            // An error of closing has no one to report to: the session is over.
            let close = json!({"op": "close", "session": id});
            let _ = worker.call(close, THREADED, timeout).await;
            worker.retire();
            drop(seat);
        });
    }
}
