//! Findings of opening a store: repairs, and the parts that cannot be read. Plain data.

use sinew_types::EpisodeId;
use std::path::PathBuf;

/// A stretch of a segment file that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Damage {
    /// The segment file.
    pub path: PathBuf,
    /// First byte, and the one behind the last.
    pub from: u64,
    pub to: u64,
}

/// Repairs that were made while a store was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Records that were in a segment and not in the index.
    pub indexed: u64,
    /// Bytes of an unfinished commit that were cut off the newest segment.
    pub cut_bytes: u64,
    /// Committed episodes that lay in a torn tail and that no batch had trained: unknown now, so
    /// that they can be run and committed again.
    pub torn: Vec<EpisodeId>,
    /// Those of a torn tail that a batch had trained: known as such, but not to be read.
    pub torn_trained: Vec<EpisodeId>,
    /// Files that gc had given up.
    pub removed_segments: u64,
    /// Unreadable ranges of segment files that had been written whole, in the order of the files.
    pub damaged: Vec<Damage>,
    /// Episodes that the index knew and that cannot be read: unknown now, as those of a torn tail.
    pub lost: Vec<EpisodeId>,
    /// Those of them that a batch had trained: known as such, but not to be read.
    pub lost_trained: Vec<EpisodeId>,
    /// Reason for making the index anew, if it was.
    pub index_remade: Option<String>,
}

/// The unreadable part of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    pub damaged: Vec<Damage>,
    /// Episodes that the index lists and that lie there.
    pub episodes: Vec<EpisodeId>,
}

impl Loss {
    /// The loss that opening the store found.
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
        /// Most stretches, and most episodes, that are named.
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
