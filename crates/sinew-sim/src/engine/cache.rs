//! Which contexts an engine still has after their attempts: the least recently used go first.
//!
//! A context is found by whose it is, not by its tokens: two episodes share what their task gives them.

use std::collections::{BTreeMap, HashMap};

/// Lengths by whose context it is.
#[derive(Debug, Default)]
pub(super) struct Cache {
    /// What is durable.
    kept: HashMap<u64, (usize, u64)>,
    /// By their last use.
    order: BTreeMap<u64, u64>,
    /// Ids of all of them.
    total: usize,
    /// Number of the last use.
    stamp: u64,
}

impl Cache {
    /// Ids that it has of a context.
    pub(super) fn len_of(&self, key: u64) -> usize {
        self.kept.get(&key).map_or(0, |(len, _)| *len)
    }

    /// Forgets a context.
    pub(super) fn remove(&mut self, key: u64) {
        if let Some((len, stamp)) = self.kept.remove(&key) {
            self.total -= len;
            self.order.remove(&stamp);
        }
    }

    /// Keeps something.
    pub(super) fn put(&mut self, key: u64, len: usize) {
        self.remove(key);
        self.stamp += 1;
        self.total += len;
        self.kept.insert(key, (len, self.stamp));
        self.order.insert(self.stamp, key);
    }

    /// Lets contexts go until they fit into `room`.
    pub(super) fn shrink(&mut self, room: usize) {
        while self.total > room {
            let Some((_, key)) = self.order.pop_first() else {
                return;
            };
            if let Some((len, _)) = self.kept.remove(&key) {
                self.total -= len;
            }
        }
    }

    /// Forgets all.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
