//! LRU cache of compiled formats.

use crate::guided::Compiled;
use std::collections::HashMap;

/// Maximum number of compiled formats. One may take several megabytes.
const CAPACITY: usize = 64;

/// Compiled formats by format hash.
#[derive(Debug, Default)]
pub(crate) struct Cache {
    /// Time of last use, counted in `uses`, and the format.
    entries: HashMap<String, (u64, Compiled)>,
    /// Number of accesses so far.
    uses: u64,
}

impl Cache {
    /// Returns a compiled format and marks it as used.
    pub(crate) fn get(&mut self, hash: &str) -> Option<Compiled> {
        self.uses += 1;
        let entry = self.entries.get_mut(hash)?;
        entry.0 = self.uses;
        Some(entry.1.clone())
    }

    /// Adds a format. A full cache evicts the least recently used one.
    pub(crate) fn put(&mut self, hash: String, compiled: Compiled) {
        self.uses += 1;
        if self.entries.len() >= CAPACITY
            && let Some(oldest) = self.entries.iter().min_by_key(|(_, e)| e.0)
        {
            let oldest = oldest.0.clone();
            self.entries.remove(&oldest);
        }
        self.entries.insert(hash, (self.uses, compiled));
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}
