//! More paths on the gateway's port, behind its control token.

use bytes::Bytes;
use std::fmt;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Requests to mounted paths that are read and answered at the same time; more wait.
pub(crate) const MAX_MOUNTED: usize = 8;

/// A request to a mounted path, from who knows the control token.
#[derive(Clone, Debug)]
pub struct MountRequest {
    pub method: String,
    pub path: String,
    pub query: String,
    /// In lower case, without parameters.
    pub content_type: String,
    pub body: Bytes,
}

/// What it is answered.
#[derive(Clone, Debug)]
pub struct MountResponse {
    pub status: u16,
    pub content_type: &'static str,
    pub body: Vec<u8>,
}

/// What answers the paths that the gateway does not know.
pub trait Mount: Send + Sync + fmt::Debug {
    /// The methods of `path`; `None` if it is not mounted.
    fn methods(&self, path: &str) -> Option<&'static [&'static str]>;

    /// Most bytes of a request's body.
    fn max_body_bytes(&self) -> usize;

    /// Answers. Blocks: it is called on a thread of its own.
    fn answer(&self, request: MountRequest) -> MountResponse;
}

/// A mount and the room for its requests.
#[derive(Clone, Debug)]
pub(crate) struct Mounted {
    pub(crate) mount: Arc<dyn Mount>,
    pub(crate) room: Arc<Semaphore>,
}

impl Mounted {
    pub(crate) fn new(mount: Arc<dyn Mount>) -> Self {
        Self {
            mount,
            room: Arc::new(Semaphore::new(MAX_MOUNTED)),
        }
    }
}
