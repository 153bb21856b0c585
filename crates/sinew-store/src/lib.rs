//! Durable store of traces, and the queue between producers and consumers of episodes.
//!
//! [`TraceStore`] stores finished episodes, their later scores, and the batches that trained them.
//! [`MemoryStore`] is the reference that the others are tested against. [`DiskStore`] appends to segment
//! files and indexes them in SQLite. [`StoreReader`] reads a store while another process writes it.
//! [`queue::Queue`] hands rows to named consumers with leases and acknowledgements: in memory, in an SQLite
//! file, in another process, or in a server over a log. [`backend`] has the parts that stores of other crates
//! are made of.
//!
//! Invariants:
//! - An acknowledged `commit` survives a crash at any instant; a batch is visible whole or not at all.
//! - An episode is committed once and trained in one batch, however often either is tried.
//! - Only the newest owner of a store commits updates ([`TraceStore::take_fence`]), even if two processes
//!   write one folder. Episodes of any owner are kept.
//! - The segment files are the truth about traces, scores and marks: a damaged index is made anew from them.
//!   Rows of queues and the number of the newest owner lie in separate files.
//! - Nothing that can be read is cut off or forgotten; unreadable parts are given up only if the caller
//!   accepts the loss.
//! - Every read is checked against its checksum.
//! - Every file, batch, page and queue has a limit; time is an argument.

pub mod backend;
mod checksums;
mod codec;
#[cfg(feature = "columns")]
mod columns;
mod copy;
mod damage;
mod disk;
mod error;
mod export;
mod export_row;
mod facets;
mod fence;
mod gc;
mod group;
mod import;
mod index;
mod ledger;
mod listing;
mod memory;
mod packed;
mod private;
mod quarantine;
pub mod queue;
mod reader;
mod recover;
mod remake;
mod rows;
mod scan;
mod schema;
mod score;
mod segment;
mod sqlite_int;
mod store;
mod summaries;

pub use copy::{CopyError, CopyPhase, CopyProgress, CopyReport, copy};
pub use damage::{Damage, Loss, Recovery};
pub use disk::{DiskStore, StoreOptions};
pub use error::{RecordError, StoreError};
pub use export::{ExportedRows, export};
pub use export_row::ExportFormat;
pub use fence::own;
pub use import::{BadRow, IMPORT_SOURCE, ImportReport, Inbox, import_file, import_scores};
pub use memory::MemoryStore;
pub use private::{private_dir, private_file};
pub use reader::StoreReader;
pub use score::{
    MAX_SCORE_BATCH, MAX_SCORE_NAME, MAX_SCORE_REASON, MAX_SCORES, Score, ScoreRecord,
    ScoreRefused, ScoreRule, ScoreTerm, in_force,
};
pub use store::{
    CommitOutcome, Cursor, EndKind, EpisodeSummary, Filter, GcPolicy, GcReport, MAX_PAGE, Page,
    ScorePage, StoreStats, Sweep, SweepReport, TraceStore, TrainedBatch,
};
pub use summaries::summaries;
