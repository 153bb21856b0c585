//! State that the handlers of requests share.

use crate::access::Token;
use crate::runs::Runs;
use std::sync::Arc;
use tokio::sync::{Semaphore, broadcast};

/// Changes that wait for a page.
const QUEUE: usize = 64;
/// Pages that listen at a time.
const LISTENERS: usize = 64;

/// The listeners to changes.
#[derive(Clone, Debug)]
pub(crate) struct Changes {
    /// Every page has its own place in the queue.
    pub(crate) sender: broadcast::Sender<String>,
    /// Places for pages.
    pub(crate) places: Arc<Semaphore>,
}

impl Default for Changes {
    fn default() -> Self {
        Self {
            sender: broadcast::channel(QUEUE).0,
            places: Arc::new(Semaphore::new(LISTENERS)),
        }
    }
}

/// State that handlers share.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    /// Runs that are shown.
    pub(crate) runs: Arc<Runs>,
    /// Places for work on files.
    pub(crate) places: Arc<Semaphore>,
    /// The listeners to changes.
    pub(crate) changes: Changes,
    /// Opens it.
    pub(crate) token: Token,
    /// Port, for the name of the cookie.
    pub(crate) port: u16,
}
