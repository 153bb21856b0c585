//! A queue by its address, or by the folder of its store.

use crate::client::HttpQueue;
use sinew_store::StoreError;
use sinew_store::queue::{DiskQueue, Queue, QueueLimits};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Name of the queue in a store, where no other is given.
pub const QUEUE_NAME: &str = "episodes";

/// Address of a queue, and how to reach it.
#[derive(Clone)]
pub struct Place {
    /// An address that begins with `http://` or `https://`, that of a database without a password, or the
    /// folder of a store.
    pub queue: String,
    /// Name of the queue in its folder or database; a server has only one.
    pub name: String,
    /// Token for a server, or password for a database.
    pub token: Option<String>,
    /// Longest wait for a server that does not answer.
    pub patience: Duration,
    /// Limits for a queue in a folder or a database.
    pub limits: QueueLimits,
}

sinew_types::debug_fields!(Place, queue, name);

impl Place {
    /// Whether it is behind the address of `sinew queue serve`.
    pub fn is_remote(&self) -> bool {
        self.queue.starts_with("http://") || self.queue.starts_with("https://")
    }

    /// Whether it is in a database.
    pub fn is_database(&self) -> bool {
        sinew_types::is_database(&self.queue)
    }
}

/// Opens a queue: a client of a server, a queue in a database, or the file in a folder, which no other
/// process may have open.
///
/// # Errors
/// If an address has no token, a database cannot be reached, or a file cannot be opened.
pub fn open(place: &Place) -> Result<Arc<dyn Queue>, StoreError> {
    if place.is_database() {
        return in_database(place);
    }
    if !place.is_remote() {
        let folder = Path::new(&place.queue);
        let queue = DiskQueue::in_store(folder, &place.name, place.limits, false)?;
        return Ok(Arc::new(queue));
    }
    let Some(token) = &place.token else {
        return Err(StoreError::Remote {
            url: place.queue.clone(),
            reason: "it needs the token of its server: give the file that `sinew queue serve` got as --token-file"
                .into(),
        });
    };
    let queue = HttpQueue::new(&place.queue, token, place.patience)?;
    Ok(Arc::new(queue))
}

#[cfg(feature = "databases")]
fn in_database(place: &Place) -> Result<Arc<dyn Queue>, StoreError> {
    use sinew_database::{Address, DatabaseOptions, open_queue};
    use sinew_store::queue::LeaseClock;
    let address = Address::new(&place.queue, place.token.as_deref())?;
    let usual = DatabaseOptions::default();
    let options = DatabaseOptions {
        patience: place.patience,
        first_patience: usual.first_patience.min(place.patience),
        ..usual
    };
    let queue = open_queue(
        &address,
        &place.name,
        place.limits,
        options,
        LeaseClock::Server,
    )?;
    Ok(Arc::new(queue))
}

#[cfg(not(feature = "databases"))]
fn in_database(place: &Place) -> Result<Arc<dyn Queue>, StoreError> {
    Err(StoreError::Remote {
        url: place.queue.clone(),
        reason: "this program was built without the feature `databases`\n  \
                 hint: cargo build -p sinew --features databases (all of them: --features full)"
            .into(),
    })
}
