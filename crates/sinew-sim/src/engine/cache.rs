//! Prefix cache of an engine: contexts that remain after their attempts. The least recently used go first.
//!
//! A context is found by its owner, not by its tokens: two episodes share only the part of their task.

use sinew_types::{SpreadMap, finalize64};
use std::collections::VecDeque;

/// Stale uses may be as many as the valid ones plus this number.
const SLACK: usize = 64;

/// Lengths by whose context it is.
#[derive(Debug, Default)]
pub(super) struct Cache {
    /// Length and number of the last use of each context, by its spread key.
    kept: SpreadMap<(usize, u64)>,
    /// Uses in their order: the number and the spread key. One whose number is not the last of its context
    /// is out of date.
    order: VecDeque<(u64, u64)>,
    /// Number of all ids.
    total: usize,
    /// Number of the last use.
    stamp: u64,
}

impl Cache {
    /// Ids that it has of a context.
    pub(super) fn len_of(&self, key: u64) -> usize {
        self.kept.get(&finalize64(key)).map_or(0, |(len, _)| *len)
    }

    /// Forgets a context.
    pub(super) fn remove(&mut self, key: u64) {
        if let Some((len, _)) = self.kept.remove(&finalize64(key)) {
            self.total -= len;
        }
    }

    /// Keeps something.
    pub(super) fn put(&mut self, key: u64, len: usize) {
        self.stamp += 1;
        self.total += len;
        let key = finalize64(key);
        if let Some((before, _)) = self.kept.insert(key, (len, self.stamp)) {
            self.total -= before;
        }
        self.order.push_back((self.stamp, key));
        if self.order.len() > 2 * self.kept.len() + SLACK {
            let kept = &self.kept;
            self.order
                .retain(|(stamp, key)| kept.get(key).is_some_and(|(_, last)| last == stamp));
        }
    }

    /// Lets contexts go until they fit into `room`.
    pub(super) fn shrink(&mut self, room: usize) {
        while self.total > room {
            let Some((stamp, key)) = self.order.pop_front() else {
                return;
            };
            let found = self.kept.get(&key).copied();
            if let Some((len, _)) = found.filter(|(_, last)| *last == stamp) {
                self.kept.remove(&key);
                self.total -= len;
            }
        }
    }

    /// Forgets all.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::SplitMix64;

    /// The order is that of a list sorted by use.
    #[test]
    fn the_least_recently_used_contexts_go_first() {
        let mut draws = SplitMix64::new(5);
        let (mut cache, mut list) = (Cache::default(), Vec::<(u64, usize)>::new());
        let mut longest = 0;
        for _ in 0..20_000 {
            let (key, len) = (draws.next_u64() % 40, (draws.next_u64() % 9 + 1) as usize);
            match draws.next_u64() % 20 {
                0 => {
                    cache.remove(key);
                    list.retain(|(k, _)| *k != key);
                }
                1 => {
                    let room = (draws.next_u64() % 150) as usize;
                    cache.shrink(room);
                    while list.iter().map(|(_, len)| len).sum::<usize>() > room {
                        list.remove(0);
                    }
                }
                _ => {
                    cache.put(key, len);
                    list.retain(|(k, _)| *k != key);
                    list.push((key, len));
                }
            }
            let sum: usize = list.iter().map(|(_, len)| len).sum();
            assert_eq!((cache.total, cache.kept.len()), (sum, list.len()));
            assert!(list.iter().all(|(key, len)| cache.len_of(*key) == *len));
            longest = longest.max(cache.order.len());
        }
        assert!(longest <= 2 * 40 + SLACK + 1, "{longest}");
    }
}
