//! Commits that wait for the same lock, and go to the medium together.
//!
//! A commit waits longest for the medium. Callers from many threads join their traces to the [`Group`]; the
//! one that gets the lock of the writer takes all of them, writes one frame with one synchronization, and
//! ends their tickets. The others find theirs ended when they get the lock. A single caller commits only its
//! own traces.

use crate::codec::Encoded;
use crate::error::{StoreError, guard};
use crate::index::Entry;
use crate::segment::{FRAME_HEADER, RECORD_HEADER};
use crate::store::CommitOutcome;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Most commits that share a frame.
const MAX_TOGETHER: usize = 256;

/// Result of a commit.
type CommitResult = Result<Vec<CommitOutcome>, StoreError>;

/// One call that commits.
#[derive(Debug)]
pub(crate) struct PendingCommit {
    /// Entries to commit, with their payloads.
    pub(crate) entries: Vec<(Entry, Encoded)>,
    /// Bytes of a frame of it.
    bytes: u64,
    ended: Mutex<Option<CommitResult>>,
}

impl PendingCommit {
    /// Says what became of it.
    pub(crate) fn end(&self, ended: CommitResult) {
        // A lock that a panic poisoned: the caller finds it so, and fails.
        if let Ok(mut slot) = self.ended.lock() {
            *slot = Some(ended);
        }
    }

    /// Takes the result, once, if the commit has ended.
    pub(crate) fn taken(&self) -> Result<Option<CommitResult>, StoreError> {
        Ok(guard(&self.ended)?.take())
    }
}

/// Calls that wait, in the order in which they came: one for each thread at most.
#[derive(Debug, Default)]
pub(crate) struct Group {
    waiting: Mutex<VecDeque<Arc<PendingCommit>>>,
}

impl Group {
    /// Joins the calls that wait.
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

    /// The calls whose turn it is, together within `limit` bytes; at least one, if any waits.
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

/// Bytes of a frame with all of these.
pub(crate) fn frame_bytes(entries: &[(Entry, Encoded)]) -> u64 {
    let records = entries.iter().map(|e| RECORD_HEADER + e.1.bytes.len());
    (FRAME_HEADER + records.sum::<usize>()) as u64
}
