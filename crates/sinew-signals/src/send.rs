//! What leaves over the network: a bounded queue, a task, a few tries each.

use reqwest::Client;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

/// Requests that wait.
const QUEUE: usize = 256;
/// Time of one try.
const TRY: Duration = Duration::from_secs(10);
/// Pauses between tries; with the first there is one try more than pauses.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(4)];

/// A request.
#[derive(Clone, Debug)]
pub(crate) struct Post {
    pub(crate) url: String,
    pub(crate) content_type: &'static str,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

/// The queue.
#[derive(Clone, Debug)]
pub(crate) struct Sender {
    queue: mpsc::Sender<Post>,
    counts: Arc<Counts>,
}

/// What became of requests.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) sent: AtomicU64,
    /// Did not fit into the queue, or failed in every try.
    pub(crate) lost: AtomicU64,
}

impl Sender {
    /// Sends on a runtime until every sender is dropped. The handle ends when the queue is empty then.
    ///
    /// # Errors
    /// If the client cannot be made.
    pub(crate) fn start(
        runtime: &tokio::runtime::Handle,
    ) -> Result<(Self, tokio::task::JoinHandle<()>), String> {
        // A redirect of a webhook could carry its key to another place.
        let client = Client::builder()
            .tls_backend_preconfigured(sinew_http::tls())
            .redirect(reqwest::redirect::Policy::none())
            .timeout(TRY)
            .build()
            .map_err(|e| sinew_http::cause(&e))?;
        let (queue, posts) = mpsc::channel(QUEUE);
        let counts = Arc::<Counts>::default();
        let task = runtime.spawn(work(client, posts, Arc::clone(&counts)));
        Ok((Self { queue, counts }, task))
    }

    /// Puts a request into the queue, or loses it.
    pub(crate) fn post(&self, post: Post) {
        if self.queue.try_send(post).is_err() {
            self.counts.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Sent and lost so far.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let of = |n: &AtomicU64| n.load(Ordering::Relaxed);
        (of(&self.counts.sent), of(&self.counts.lost))
    }
}

/// Sends one request after another, so that a receiver is never met by many at once.
async fn work(client: Client, mut posts: mpsc::Receiver<Post>, counts: Arc<Counts>) {
    while let Some(post) = posts.recv().await {
        let mut result = once(&client, &post).await;
        for pause in PAUSES {
            if !matches!(result, Err((_, true))) {
                break;
            }
            tokio::time::sleep(pause).await;
            result = once(&client, &post).await;
        }
        match result {
            Ok(()) => counts.sent.fetch_add(1, Ordering::Relaxed),
            Err((why, _)) => {
                // The path of a webhook is its key.
                let host = post.url.split('/').nth(2).unwrap_or_default();
                tracing::warn!(host, why, "a signal was not taken");
                counts.lost.fetch_add(1, Ordering::Relaxed)
            }
        };
    }
}

/// One try. An error says whether another may help.
async fn once(client: &Client, post: &Post) -> Result<(), (String, bool)> {
    let mut request = client.post(&post.url).body(post.body.clone());
    request = request.header("content-type", post.content_type);
    for (name, value) in &post.headers {
        request = request.header(name, value);
    }
    let answer = request.send().await;
    let answer = answer.map_err(|e| (sinew_http::cause(&e), true))?;
    let status = answer.status();
    match status.is_success() {
        true => Ok(()),
        false => {
            let again = status.is_server_error() || status.as_u16() == 429;
            Err((format!("status {status}"), again))
        }
    }
}
