//! A queue in another process, over HTTP.

use crate::wire::{
    self, Answer, CALL_ID, Call, MAX_ANSWER, MAX_PAGE, MAX_REQUEST, MAX_WAIT_MS, MESSAGE_PACK,
};
use bytes::Bytes;
use serde_json::Value;
use sinew_http::blocking::{Client, RequestBuilder, retry};
use sinew_http::header::CONTENT_TYPE;
use sinew_http::{ClientOptions, Failure, HttpError, Method, Retry, may_pass};
use sinew_store::StoreError;
use sinew_store::queue::{
    AckedRow, Consumer, LeaseBatch, LeaseId, NewRow, PutOutcome, Queue, QueueStats, ReturnOutcome,
    RowRequest, RowState, RowView,
};
use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for an answer, beyond that of a wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Pauses between two attempts. Only the patience ends them.
const PAUSES: Retry = Retry::doubling(u32::MAX, Duration::from_millis(50), Duration::from_secs(2));

/// A queue behind an address. A call without an answer is repeated under the same name until it is answered
/// or the patience ends, so a lost answer does not change the queue twice.
pub struct HttpQueue {
    client: Client,
    url: String,
    token: String,
    patience: Duration,
    /// Random, so that calls of two clients have different names.
    session: String,
    next: AtomicU64,
}

sinew_types::debug_fields!(HttpQueue, url, patience);

/// Result of an attempt.
type Attempt<T> = Result<T, Failure<String>>;

impl HttpQueue {
    /// The queue at `url`, such as `http://127.0.0.1:8090`. A server that is away is waited for as long as
    /// `patience`.
    ///
    /// # Errors
    /// If the address is none, or the system has no randomness.
    pub fn new(url: &str, token: &str, patience: Duration) -> Result<Self, StoreError> {
        let remote = |reason: String| StoreError::Remote {
            url: url.to_owned(),
            reason,
        };
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            return Err(remote("allowed: http:// or https:// and a host".into()));
        }
        let client = Client::new(ClientOptions {
            connect: Some(CONNECT_TIMEOUT),
            deadline: Some(ANSWER_TIMEOUT),
            body_max: MAX_ANSWER,
            redirects: 10,
            proxy: true,
            ..ClientOptions::default()
        });
        let client = client.map_err(|e| remote(e.to_string()))?;
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|e| remote(format!("no randomness: {e}")))?;
        Ok(Self {
            client,
            url: url.trim_end_matches('/').to_owned(),
            token: token.to_owned(),
            patience,
            session: format!("{:016x}", u64::from_le_bytes(random)),
            next: AtomicU64::new(0),
        })
    }

    fn remote(&self, reason: impl Into<String>) -> StoreError {
        StoreError::Remote {
            url: self.url.clone(),
            reason: reason.into(),
        }
    }

    /// Repeats `attempt` until it is answered, or refused, or the patience ends.
    fn persist<T>(&self, mut attempt: impl FnMut() -> Attempt<T>) -> Result<T, StoreError> {
        let end = Instant::now() + self.patience;
        let left = |pause: Duration| {
            let left = end.saturating_duration_since(Instant::now());
            (!left.is_zero()).then(|| pause.min(left))
        };
        let mut away = false;
        let named = || {
            let answer = attempt();
            match &answer {
                Err(Failure::Passing(why, _)) if !away => {
                    away = true;
                    tracing::warn!(url = %self.url, %why, "the queue does not answer: the call is repeated");
                }
                Ok(_) if away => tracing::info!(url = %self.url, "the queue answers again"),
                _ => {}
            }
            answer
        };
        retry(PAUSES, left, named).map_err(|failure| match failure {
            Failure::Lasting(why) => self.remote(why),
            Failure::Passing(why, _) => self.remote(format!(
                "{why} (asked for {} s)\n  hint: is `sinew queue serve` running there?",
                self.patience.as_secs()
            )),
        })
    }

    /// Sends a request with the token, and reads the whole answer: its status and its body.
    fn send(&self, request: RequestBuilder) -> Result<(u16, Vec<u8>), HttpError> {
        let answer = self.client.ask(request.bearer_auth(&self.token))?;
        Ok((answer.status.as_u16(), answer.body))
    }

    /// The answer of a call, or the queue's refusal.
    fn call(&self, call: &Call<'_>) -> Result<Answer, StoreError> {
        let body: Bytes = wire::encode(call)
            .map_err(|e| self.remote(e.to_string()))?
            .into();
        if body.len() > MAX_REQUEST {
            return Err(self.remote(format!(
                "a call of {} bytes, allowed: {MAX_REQUEST}; put fewer rows",
                body.len()
            )));
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let id = call.changes().then(|| format!("{}-{number}", self.session));
        let answer = self.persist(|| {
            let request = self
                .client
                .request(Method::POST, &format!("{}/queue", self.url))
                .header(CONTENT_TYPE, MESSAGE_PACK);
            let request = id.iter().fold(request, |r, id| r.header(CALL_ID, id));
            match self.send(request.body(body.clone()))? {
                (200 | 409, answer) => wire::decode(&answer)
                    .map_err(|why| Failure::Lasting(format!("its answer cannot be read: {why}"))),
                (status, answer) => Err(unanswered(status, &answer)),
            }
        })?;
        match answer {
            Answer::Refused(refused) => Err(StoreError::Queue(refused)),
            answer => Ok(answer),
        }
    }

    /// An answer of another kind than that of the call.
    fn mixed_up<T>(&self, answer: &Answer) -> Result<T, StoreError> {
        Err(self.remote(format!("an answer to something else: {answer:.60?}")))
    }

    fn count(&self, call: &Call<'_>) -> Result<usize, StoreError> {
        match self.call(call)? {
            Answer::Count(count) => Ok(count),
            other => self.mixed_up(&other),
        }
    }

    fn settle(&self, call: &Call<'_>) -> Result<ReturnOutcome, StoreError> {
        match self.call(call)? {
            Answer::Settled(settled) => Ok(settled),
            other => self.mixed_up(&other),
        }
    }

    /// One wait at the server, which may end before its time.
    fn wait_once(&self, seen: u64, ms: u64) -> Result<u64, StoreError> {
        let url = format!("{}/queue/wait?seen={seen}&ms={ms}", self.url);
        let limit = ANSWER_TIMEOUT + Duration::from_millis(ms);
        self.persist(|| {
            let request = self.client.request(Method::GET, &url).timeout(limit);
            match self.send(request)? {
                (200, body) => {
                    let value: Value = serde_json::from_slice(&body).unwrap_or_default();
                    let change = value["change"].as_u64();
                    change.ok_or_else(|| Failure::Lasting("its answer names no change".into()))
                }
                (status, body) => Err(unanswered(status, &body)),
            }
        })
    }
}

/// The failure that a status other than those of an answer stands for.
fn unanswered(status: u16, body: &[u8]) -> Failure<String> {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let said = value["error"]["message"].as_str().unwrap_or_default();
    let text = format!("{status}: {said}");
    if may_pass(status) {
        Failure::Passing(text, None)
    } else {
        Failure::Lasting(text)
    }
}

impl Queue for HttpQueue {
    fn put(&self, rows: &[NewRow]) -> Result<Vec<PutOutcome>, StoreError> {
        match self.call(&Call::Put(rows.into()))? {
            Answer::Put(put) => Ok(put),
            other => self.mixed_up(&other),
        }
    }

    fn fill(&self, rows: &[AckedRow]) -> Result<usize, StoreError> {
        self.count(&Call::Fill(rows.into()))
    }

    fn join(&self, consumer: &Consumer) -> Result<(), StoreError> {
        match self.call(&Call::Join(Cow::Borrowed(consumer)))? {
            Answer::Done => Ok(()),
            other => self.mixed_up(&other),
        }
    }

    fn lease(&self, ask: &RowRequest, _: u64) -> Result<LeaseBatch, StoreError> {
        match self.call(&Call::Lease(Cow::Borrowed(ask)))? {
            Answer::Loan(loan) => Ok(loan),
            other => self.mixed_up(&other),
        }
    }

    fn ack(
        &self,
        consumer: &str,
        lease: LeaseId,
        rows: &[AckedRow],
    ) -> Result<ReturnOutcome, StoreError> {
        self.settle(&Call::Ack(consumer.into(), lease, rows.into()))
    }

    fn release(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
    ) -> Result<ReturnOutcome, StoreError> {
        self.settle(&Call::Release(consumer.into(), lease, keys.into()))
    }

    fn fail(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
        reason: &str,
    ) -> Result<ReturnOutcome, StoreError> {
        let (consumer, reason) = (consumer.into(), reason.into());
        self.settle(&Call::Fail(consumer, lease, keys.into(), reason))
    }

    fn renew(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
        ttl_ms: u64,
        _: u64,
    ) -> Result<ReturnOutcome, StoreError> {
        self.settle(&Call::Renew(consumer.into(), lease, keys.into(), ttl_ms))
    }

    fn revive(&self, consumer: &str, keys: &[String]) -> Result<usize, StoreError> {
        self.count(&Call::Revive(consumer.into(), keys.into()))
    }

    fn remove(&self, keys: &[String]) -> Result<usize, StoreError> {
        self.count(&Call::Remove(keys.into()))
    }

    fn sweep(&self, keep: usize, _: u64) -> Result<usize, StoreError> {
        self.count(&Call::Sweep(keep))
    }

    fn read(&self, key: &str, field: &str) -> Result<Option<Bytes>, StoreError> {
        match self.call(&Call::Read(key.into(), field.into()))? {
            Answer::Value(value) => Ok(value.map(|field| field.value)),
            other => self.mixed_up(&other),
        }
    }

    fn state(&self, consumer: &str, key: &str) -> Result<Option<RowState>, StoreError> {
        match self.call(&Call::State(consumer.into(), key.into()))? {
            Answer::State(state) => Ok(state),
            other => self.mixed_up(&other),
        }
    }

    /// Pages of the server are put together.
    fn rows(&self, after: Option<u64>, limit: usize) -> Result<Vec<RowView>, StoreError> {
        let (mut rows, mut after): (Vec<RowView>, _) = (Vec::new(), after);
        loop {
            let wanted = (limit - rows.len()).min(MAX_PAGE);
            let page = match self.call(&Call::Rows(after, wanted))? {
                Answer::Rows(page) => page,
                other => return self.mixed_up(&other),
            };
            let full = page.len() == wanted;
            rows.extend(page);
            after = rows.last().map(|row| row.seq).or(after);
            if !full || rows.len() == limit {
                return Ok(rows);
            }
        }
    }

    fn stats(&self) -> Result<QueueStats, StoreError> {
        match self.call(&Call::Stats)? {
            Answer::Stats(stats) => Ok(stats),
            other => self.mixed_up(&other),
        }
    }

    fn wait(&self, seen: u64, at_most: Duration) -> Result<u64, StoreError> {
        let end = Instant::now() + at_most;
        loop {
            let left = end.saturating_duration_since(Instant::now()).as_millis() as u64;
            let now = self.wait_once(seen, left.min(MAX_WAIT_MS))?;
            if now != seen || left <= MAX_WAIT_MS {
                return Ok(now);
            }
        }
    }
}
