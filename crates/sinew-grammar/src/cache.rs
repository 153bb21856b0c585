//! Compiled formats, the ones used last.

use crate::guided::Compiled;
use std::collections::HashMap;

/// Formats kept compiled. Each may take some megabytes.
const KEPT: usize = 64;

/// Compiled formats by their hash.
#[derive(Debug, Default)]
pub(crate) struct Cache {
    entries: HashMap<String, (u64, Compiled)>,
    uses: u64,
}

impl Cache {
    pub(crate) fn get(&mut self, hash: &str) -> Option<Compiled> {
        self.uses += 1;
        let entry = self.entries.get_mut(hash)?;
        entry.0 = self.uses;
        Some(entry.1.clone())
    }

    /// Keeps a format; the one that was not used for longest goes if there is no room.
    pub(crate) fn put(&mut self, hash: String, compiled: Compiled) {
        self.uses += 1;
        if self.entries.len() >= KEPT
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
