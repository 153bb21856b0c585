//! Sends data over the network: bounded queues, a task each, a few tries for every request.

use crate::config::SignalsError;
use sinew_http::{Client, ClientOptions, Failure, HttpError, Method, Retry, retry};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Requests that wait.
const QUEUE: usize = 256;
/// Time of one try.
const TRY: Duration = Duration::from_secs(10);
/// Tries of one message or request, with pauses of 1 s and 4 s.
pub(crate) const TRIES: Retry = Retry {
    attempts: 3,
    first: Duration::from_secs(1),
    factor: 4,
    longest: Duration::from_secs(4),
};
/// Bytes of a refusal that are read and shown.
const SHOWN: usize = 300;

/// A request: something is posted.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) url: String,
    pub(crate) content_type: &'static str,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

/// Counts of requests by result.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) sent: AtomicU64,
    /// Did not fit into the queue, or failed in every try.
    pub(crate) lost: AtomicU64,
}

impl Counts {
    /// One more was sent or lost.
    pub(crate) fn add(&self, sent: bool) {
        let count = if sent { &self.sent } else { &self.lost };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Sent and lost so far.
    pub(crate) fn read(&self) -> (u64, u64) {
        let of = |n: &AtomicU64| n.load(Ordering::Relaxed);
        (of(&self.sent), of(&self.lost))
    }
}

/// A bounded queue to a task. Items that do not fit are lost and counted.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    queue: mpsc::Sender<T>,
    counts: Arc<Counts>,
}

impl<T> Queue<T> {
    /// Creates a queue with a capacity of `room`.
    pub(crate) fn new(room: usize) -> (Self, mpsc::Receiver<T>, Arc<Counts>) {
        let (queue, receiver) = mpsc::channel(room);
        let counts = Arc::<Counts>::default();
        let of_task = Arc::clone(&counts);
        (Self { queue, counts }, receiver, of_task)
    }

    /// Puts one into the queue, or loses it.
    pub(crate) fn put(&self, what: T) {
        if self.queue.try_send(what).is_err() {
            self.counts.add(false);
        }
    }

    /// Counts of earlier items.
    pub(crate) fn counts(&self) -> Arc<Counts> {
        Arc::clone(&self.counts)
    }
}

/// Sends requests on a runtime until the queue is dropped. The handle ends when the queue is empty then.
///
/// # Errors
/// If the client cannot be made.
pub(crate) fn start(
    runtime: &tokio::runtime::Handle,
) -> Result<(Queue<Request>, JoinHandle<()>), SignalsError> {
    // A redirect of a webhook could carry its key to another place.
    let client = Client::new(ClientOptions {
        deadline: Some(TRY),
        body_max: SHOWN as u64,
        proxy: true,
        ..ClientOptions::default()
    });
    let client = client.map_err(|e| SignalsError::System(e.to_string()))?;
    let (queue, requests, counts) = Queue::new(QUEUE);
    let task = runtime.spawn(work(client, requests, counts));
    Ok((queue, task))
}

/// Sends one request after another, so that a receiver is never met by many at once.
async fn work(client: Client, mut requests: mpsc::Receiver<Request>, counts: Arc<Counts>) {
    while let Some(request) = requests.recv().await {
        let result = retry(TRIES, Some, || once(&client, &request)).await;
        counts.add(result.is_ok());
        if let Err(failure) = result {
            let (host, why) = (host(&request.url), String::from(failure));
            tracing::warn!(host, why, "a signal was not taken");
        }
    }
}

/// The host of an address, to be shown: the path of a webhook is its key, and a login may stand
/// before the host.
fn host(url: &str) -> &str {
    let authority = url.split('/').nth(2).unwrap_or_default();
    authority.rsplit('@').next().unwrap_or_default()
}

/// One try. Statuses below 500, but for 429, are not tried again.
async fn once(client: &Client, request: &Request) -> Result<(), Failure<String>> {
    let mut call = client
        .request(Method::POST, &request.url)
        .body(request.body.clone())
        .header("content-type", request.content_type);
    for (name, value) in &request.headers {
        call = call.header(name, value);
    }
    let answer = client.ask(call).await;
    match answer.and_then(|answer| answer.success(SHOWN)) {
        // The answer to a request that was taken may have any length.
        Ok(_) | Err(HttpError::TooLarge(_)) => Ok(()),
        Err(e) if matches!(e, HttpError::Status { code, .. } if code < 500 && code != 429) => {
            Err(Failure::Lasting(e.to_string()))
        }
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_an_address_are_not_shown() {
        assert_eq!(
            host("https://user:key@example.org:8443/hook/key"),
            "example.org:8443"
        );
        assert_eq!(host("nothing"), "");
    }
}
