//! Group commit: commits that wait for the same lock are written together.
//!
//! Most of a commit's time is spent waiting for the disk. Callers from many threads add their traces to the
//! [`Group`]. The caller that gets the lock of the writer commits all of them in one frame with one fsync,
//! and sets their results. The other callers find their result when they get the lock. A single caller
//! commits only its own traces.

use crate::codec::Encoded;
use crate::error::{StoreError, guard};
use crate::index::Entry;
use crate::segment::{FRAME_HEADER, RECORD_HEADER};
use crate::store::CommitOutcome;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Maximum number of calls that share a frame.
const MAX_TOGETHER: usize = 256;

/// Result of a commit.
type CommitResult = Result<Vec<CommitOutcome>, StoreError>;

/// A call that waits for its commit.
#[derive(Debug)]
pub(crate) struct PendingCommit {
    /// Entries to commit, with their payloads.
    pub(crate) entries: Vec<(Entry, Encoded)>,
    /// Size of a frame that contains only these entries, in bytes.
    bytes: u64,
    ended: Mutex<Option<CommitResult>>,
}

impl PendingCommit {
    /// Sets the result.
    pub(crate) fn end(&self, ended: CommitResult) {
        // A lock that a panic poisoned: the caller finds it so, and fails.
        if let Ok(mut slot) = self.ended.lock() {
            *slot = Some(ended);
        }
    }

    /// Returns the result, once, if the commit has ended.
    pub(crate) fn taken(&self) -> Result<Option<CommitResult>, StoreError> {
        Ok(guard(&self.ended)?.take())
    }
}

/// Waiting calls in order of arrival, at most one per thread.
#[derive(Debug, Default)]
pub(crate) struct Group {
    waiting: Mutex<VecDeque<Arc<PendingCommit>>>,
}

impl Group {
    /// Adds a call to those that wait.
    pub(crate) fn join(
        &self,
        entries: Vec<(Entry, Encoded)>,
    ) -> Result<Arc<PendingCommit>, StoreError> {
        let bytes = frame_bytes(&entries);
        let ticket = Arc::new(PendingCommit {
            entries,
            bytes,
            ended: Mutex::default(),
        });
        guard(&self.waiting)?.push_back(ticket.clone());
        Ok(ticket)
    }

    /// Removes and returns the next calls that fit into `limit` bytes together; at least one, if any waits.
    pub(crate) fn next(&self, limit: u64) -> Result<Vec<Arc<PendingCommit>>, StoreError> {
        let mut waiting = guard(&self.waiting)?;
        let mut bytes = 0;
        let fits = |ticket: &&Arc<PendingCommit>| {
            bytes += ticket.bytes;
            bytes <= limit
        };
        let count = waiting.iter().take(MAX_TOGETHER).take_while(fits).count();
        let count = count.max(1).min(waiting.len());
        Ok(waiting.drain(..count).collect())
    }
}

/// Returns the bytes of a frame with all of these entries.
pub(crate) fn frame_bytes(entries: &[(Entry, Encoded)]) -> u64 {
    let records = entries.iter().map(|e| RECORD_HEADER + e.1.bytes.len());
    (FRAME_HEADER + records.sum::<usize>()) as u64
}
