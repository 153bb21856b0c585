//! Snapshots: entries of the work folder, held in memory.

use sinew_sandbox::guest::{Entry, EntryKind};
use sinew_sandbox::{SandboxError, Snapshot};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Entries of a snapshot of this level.
///
/// # Errors
/// [`SandboxError::Request`] for a snapshot of another level.
pub(crate) fn own(snapshot: &Snapshot) -> Result<Arc<Vec<Entry>>, SandboxError> {
    let entries = Arc::clone(&snapshot.handle).downcast::<Vec<Entry>>();
    entries.map_err(|_| SandboxError::Request {
        field: "snapshot",
        value: format!("{} of level {}", snapshot.id, snapshot.level),
        allowed: "one of level container; others are exported and imported".into(),
    })
}

/// Number of the next snapshot of this process.
static SNAPSHOTS: AtomicU64 = AtomicU64::new(1);

/// A snapshot that holds entries in memory. Its size is that of the files' content.
pub(crate) fn keep(entries: Vec<Entry>) -> Snapshot {
    let bytes = entries.iter().map(|entry| match &entry.kind {
        EntryKind::File(content) => content.len() as u64,
        EntryKind::Folder | EntryKind::Link(_) => 0,
    });
    let id = SNAPSHOTS.fetch_add(1, Ordering::Relaxed);
    Snapshot {
        level: "container",
        id,
        stores: [(id, bytes.sum())].into(),
        handle: Arc::new(entries),
    }
}
