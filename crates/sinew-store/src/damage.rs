//! Results of opening a store, as plain data: repairs, and unreadable parts.

use sinew_types::EpisodeId;
use std::path::PathBuf;

/// An unreadable byte range of a segment file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Damage {
    /// The segment file.
    pub path: PathBuf,
    /// Offset of its first byte.
    pub from: u64,
    /// Offset after its last byte.
    pub to: u64,
}

/// Repairs made while a store was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Number of records that were in a segment but not in the index.
    pub indexed: u64,
    /// Number of bytes of an unfinished commit that were cut off the newest segment.
    pub cut_bytes: u64,
    /// Committed episodes in a torn tail that no batch had trained. They are unknown now, so that they can be
    /// run and committed again.
    pub torn: Vec<EpisodeId>,
    /// Episodes in a torn tail that a batch had trained. They stay known as trained, but cannot be read.
    pub torn_trained: Vec<EpisodeId>,
    /// Number of removed files that garbage collection had marked as dead.
    pub removed_segments: u64,
    /// Unreadable ranges of segment files outside the torn tail, in the order of the files.
    pub damaged: Vec<Damage>,
    /// Indexed episodes that cannot be read. They are unknown now, like those of a torn tail.
    pub lost: Vec<EpisodeId>,
    /// Unreadable episodes that a batch had trained. They stay known as trained, but cannot be read.
    pub lost_trained: Vec<EpisodeId>,
    /// Reason for rebuilding the index; `None` if it was not rebuilt.
    pub index_remade: Option<String>,
}

/// Unreadable part of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    pub damaged: Vec<Damage>,
    /// Indexed episodes in the unreadable ranges.
    pub episodes: Vec<EpisodeId>,
}

impl Loss {
    /// Returns the loss that was found while opening a store.
    pub(crate) fn of(recovery: &Recovery) -> Self {
        let both = recovery.lost.iter().chain(&recovery.lost_trained);
        Self {
            damaged: recovery.damaged.clone(),
            episodes: both.cloned().collect(),
        }
    }
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        /// Maximum number of ranges, and of episodes, that a message lists.
        const NAMED: usize = 4;
        let stretches = self.damaged.iter().take(NAMED).map(|d| {
            let (path, from, to) = (d.path.display(), d.from, d.to);
            format!("{path} bytes {from} to {to}")
        });
        let stretches: Vec<String> = stretches.collect();
        write!(f, "{}", stretches.join(", "))?;
        let more = self.damaged.len().saturating_sub(NAMED);
        if more > 0 {
            write!(f, " and {more} more stretches")?;
        }
        write!(f, " cannot be read")?;
        if !self.episodes.is_empty() {
            let named = self.episodes.iter().take(NAMED).map(|e| e.as_str());
            let named: Vec<&str> = named.collect();
            let count = self.episodes.len();
            let dots = if count > NAMED { ", ..." } else { "" };
            write!(
                f,
                "; {count} known episodes lie there: {}{dots}",
                named.join(", ")
            )?;
        }
        write!(
            f,
            "; everything else can be read, and nothing was changed; put the files back from a copy, or go on \
             without what cannot be read with --accept-loss"
        )
    }
}
