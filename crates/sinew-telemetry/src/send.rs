//! Sends data over the network: bounded queues, a task each, a few tries for every request.

use reqwest::Client;
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
/// Pauses between tries; with the first there is one try more than pauses.
pub(crate) const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(4)];
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

/// Reason why a request did not succeed.
#[derive(Clone, Debug)]
struct SendError {
    /// Reason, in one line.
    why: String,
    /// Status of the server's answer, if there was one.
    status: Option<u16>,
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
    /// A queue with room for so many.
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
) -> Result<(Queue<Request>, JoinHandle<()>), String> {
    // A redirect of a webhook could carry its key to another place.
    let client = Client::builder()
        .tls_backend_preconfigured(sinew_http::tls())
        .redirect(reqwest::redirect::Policy::none())
        .timeout(TRY)
        .build()
        .map_err(|e| sinew_http::cause(&e))?;
    let (queue, requests, counts) = Queue::new(QUEUE);
    let task = runtime.spawn(work(client, requests, counts));
    Ok((queue, task))
}

/// Sends one request after another, so that a receiver is never met by many at once.
async fn work(client: Client, mut requests: mpsc::Receiver<Request>, counts: Arc<Counts>) {
    while let Some(request) = requests.recv().await {
        let result = tries(&client, &request).await;
        if let Err(refused) = &result {
            let host = host(&request.url);
            tracing::warn!(host, why = refused.why, "a signal was not taken");
        }
        counts.add(result.is_ok());
    }
}

/// The host of an address, to be shown: the path of a webhook is its key, and a login may stand
/// before the host.
fn host(url: &str) -> &str {
    let authority = url.split('/').nth(2).unwrap_or_default();
    authority.rsplit('@').next().unwrap_or_default()
}

/// Sends a request, again where another try may help.
///
/// # Errors
/// The error of the last try.
async fn tries(client: &Client, request: &Request) -> Result<(), SendError> {
    let mut result = once(client, request).await;
    for pause in PAUSES {
        let again = |r: &SendError| r.status.is_none_or(|s| s >= 500 || s == 429);
        if !result.as_ref().is_err_and(again) {
            break;
        }
        tokio::time::sleep(pause).await;
        result = once(client, request).await;
    }
    result
}

/// One try.
async fn once(client: &Client, request: &Request) -> Result<(), SendError> {
    let broken = |e: reqwest::Error| SendError {
        why: sinew_http::cause(&e),
        status: None,
    };
    let mut call = client
        .post(&request.url)
        .body(request.body.clone())
        .header("content-type", request.content_type);
    for (name, value) in &request.headers {
        call = call.header(name, value);
    }
    let mut answer = call.send().await.map_err(broken)?;
    let status = answer.status();
    let mut said = Vec::new();
    while said.len() < SHOWN
        && let Some(part) = answer.chunk().await.map_err(broken)?
    {
        said.extend_from_slice(&part[..part.len().min(SHOWN - said.len())]);
    }
    if status.is_success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&said).replace(['\r', '\n'], " ");
    Err(SendError {
        why: format!("status {status}: {said}"),
        status: Some(status.as_u16()),
    })
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
