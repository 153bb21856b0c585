//! The DevTools protocol over a pipe: JSON messages, each followed by a zero byte.
//!
//! One task reads, one writes. Events reach the listener of their session in the order of the messages,
//! before any later answer: what an event says is known when a later call returns.

use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{ChildStdin, ChildStdout};
use tokio::sync::{mpsc, oneshot, watch};

/// Bytes of one message at most: a screenshot of a large window is below it.
const MAX_MESSAGE: usize = 64 << 20;
/// Messages that wait to be written.
const QUEUE: usize = 1024;

/// Why a call has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallFault {
    /// The browser refused it.
    Refused(String),
    /// No answer came in time.
    Late(&'static str),
    /// The browser is gone.
    Gone,
}

impl std::fmt::Display for CallFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(why) => f.write_str(why),
            Self::Late(method) => write!(f, "the browser did not answer {method} in time"),
            Self::Gone => f.write_str("the browser ended"),
        }
    }
}

/// Takes the events of a session. It must not block.
pub(super) trait Listener: Send + Sync {
    /// Takes one event of the session.
    fn event(&self, method: &str, params: Value);
}

/// A message of the browser: an answer or an event.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Incoming {
    /// Of the call that it answers.
    id: Option<u64>,
    /// Result of a call.
    #[serde(default)]
    result: Value,
    /// Why a call was refused.
    error: Option<Refusal>,
    /// Name of an event.
    method: Option<String>,
    /// Content of an event.
    #[serde(default)]
    params: Value,
    /// Where an event happened.
    session_id: Option<String>,
}

/// Error of a call.
#[derive(Deserialize)]
struct Refusal {
    /// In words.
    message: String,
}

/// Gets the result of a call.
type Waiting = oneshot::Sender<Result<Value, CallFault>>;

/// A connection to one browser.
pub(super) struct Client {
    /// Number of the next call.
    next: AtomicU64,
    /// Calls without an answer, by number.
    waiting: Mutex<HashMap<u64, Waiting>>,
    /// By session.
    listeners: Mutex<HashMap<String, Arc<dyn Listener>>>,
    /// Messages to be written.
    out: mpsc::Sender<Vec<u8>>,
    /// Whether the browser has ended.
    gone: watch::Sender<bool>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

/// The value, whatever a panic left of it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    /// Starts the tasks of a connection, on the runtime of the caller.
    pub(super) fn start(input: ChildStdin, output: ChildStdout) -> Arc<Self> {
        let (out, queue) = mpsc::channel(QUEUE);
        let client = Arc::new(Self {
            next: AtomicU64::new(1),
            waiting: Mutex::default(),
            listeners: Mutex::default(),
            out,
            gone: watch::Sender::new(false),
        });
        tokio::spawn(write(input, queue));
        tokio::spawn(read(Arc::clone(&client), output));
        client
    }

    /// True once the browser has ended.
    pub(super) fn is_gone(&self) -> bool {
        *self.gone.borrow()
    }

    /// Sends the events of a session to a listener.
    pub(super) fn listen(&self, session: &str, listener: Arc<dyn Listener>) {
        lock(&self.listeners).insert(session.to_owned(), listener);
    }

    /// Ends a session's events.
    pub(super) fn forget(&self, session: &str) {
        lock(&self.listeners).remove(session);
    }

    /// Calls a method, of a session or of the browser.
    pub(super) async fn call(
        &self,
        session: Option<&str>,
        method: &'static str,
        params: Value,
        limit: Duration,
    ) -> Result<Value, CallFault> {
        let (id, answer) = self.send(session, method, params).await?;
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(CallFault::Gone),
            Err(_) => {
                lock(&self.waiting).remove(&id);
                Err(CallFault::Late(method))
            }
        }
    }

    /// Sends a call and does not wait for its result. One that finds the queue full is lost.
    pub(super) fn post(&self, session: &str, method: &str, params: &Value) {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let message = json!({"id": id, "method": method, "params": params, "sessionId": session});
        let _ = self.out.try_send(frame(&message));
    }

    /// Queues a call. Returns its number and what its result comes through.
    async fn send(
        &self,
        session: Option<&str>,
        method: &str,
        params: Value,
    ) -> Result<(u64, oneshot::Receiver<Result<Value, CallFault>>), CallFault> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut message = json!({"id": id, "method": method, "params": params});
        if let Some(session) = session {
            message["sessionId"] = session.into();
        }
        let (sender, receiver) = oneshot::channel();
        lock(&self.waiting).insert(id, sender);
        let sent = self.out.send(frame(&message)).await;
        // A browser that ended between the two has no reader that would answer.
        if sent.is_err() || self.is_gone() {
            lock(&self.waiting).remove(&id);
            return Err(CallFault::Gone);
        }
        Ok((id, receiver))
    }

    /// Hands a message to who waits for it.
    fn take(&self, incoming: Incoming) {
        if let Some(id) = incoming.id {
            if let Some(waiting) = lock(&self.waiting).remove(&id) {
                let _ = waiting.send(match incoming.error {
                    None => Ok(incoming.result),
                    Some(refusal) => Err(CallFault::Refused(refusal.message)),
                });
            }
            return;
        }
        let (Some(method), Some(session)) = (incoming.method, incoming.session_id) else {
            return;
        };
        let listener = lock(&self.listeners).get(&session).cloned();
        if let Some(listener) = listener {
            listener.event(&method, incoming.params);
        }
    }

    /// Fails all calls that wait, and tells all sessions.
    fn end(&self) {
        self.gone.send_replace(true);
        lock(&self.waiting).clear();
        for (_, listener) in lock(&self.listeners).drain() {
            listener.event("Inspector.targetCrashed", Value::Null);
        }
    }
}

/// A message with its end.
fn frame(message: &Value) -> Vec<u8> {
    let mut bytes = message.to_string().into_bytes();
    bytes.push(0);
    bytes
}

/// Writes messages until the browser or the client is gone.
async fn write(mut input: ChildStdin, mut queue: mpsc::Receiver<Vec<u8>>) {
    while let Some(message) = queue.recv().await {
        if input.write_all(&message).await.is_err() || input.flush().await.is_err() {
            return;
        }
    }
}

/// Reads messages until the browser ends, or sends what is no message.
async fn read(client: Arc<Client>, mut output: ChildStdout) {
    let (mut buffer, mut searched) = (Vec::new(), 0);
    loop {
        while let Some(end) = buffer[searched..].iter().position(|b| *b == 0) {
            let end = searched + end;
            match serde_json::from_slice(&buffer[..end]) {
                Ok(incoming) => client.take(incoming),
                Err(error) => tracing::warn!(%error, "the browser sent what is no message"),
            }
            buffer.drain(..=end);
            searched = 0;
        }
        searched = buffer.len();
        if buffer.len() > MAX_MESSAGE {
            tracing::warn!(
                max_bytes = MAX_MESSAGE,
                "the browser sent a message that is too long"
            );
            break;
        }
        match output.read_buf(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    client.end();
}
