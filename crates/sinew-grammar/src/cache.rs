//! LRU cache of compiled formats. A group of episodes asks for the same format many times;
//! compiling it can take seconds.

use std::collections::HashMap;

/// Maximum number of compiled formats. One can take several megabytes.
const CAPACITY: usize = 64;

/// Compiled formats `T` by format hash.
#[derive(Debug)]
pub(crate) struct Cache<T> {
    /// Time of last use, counted in `uses`, and the format.
    entries: HashMap<String, (u64, T)>,
    /// Number of accesses so far.
    uses: u64,
}

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self {
            entries: HashMap::new(),
            uses: 0,
        }
    }
}

impl<T: Clone> Cache<T> {
    /// Returns a compiled format and marks it as used.
    pub(crate) fn get(&mut self, hash: &str) -> Option<T> {
        self.uses += 1;
        let entry = self.entries.get_mut(hash)?;
        entry.0 = self.uses;
        Some(entry.1.clone())
    }

    /// Adds a format. A full cache evicts the least recently used one, in time linear in its size,
    /// which is small compared with a compilation.
    pub(crate) fn put(&mut self, hash: String, compiled: T) {
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
