//! Which leading blocks an engine has seen: a bounded memory of hashes.
//!
//! A guess about the engine's prefix cache, not a promise: if it is wrong, a prompt is computed
//! again and nothing else happens. It is cleared when the engine gets other weights.

use sinew_types::{TokenId, mix_hash};
use std::collections::{HashSet, VecDeque};

/// Hashes of a growing text's whole blocks; each covers everything before it.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockHashes {
    /// One for each whole block.
    hashes: Vec<u64>,
    /// Tokens of the block that is not whole yet.
    tail: Vec<TokenId>,
}

impl BlockHashes {
    /// Appends tokens and hashes each block of `block_tokens` that they complete.
    pub(super) fn push(&mut self, tokens: &[TokenId], block_tokens: usize) {
        for &token in tokens {
            self.tail.push(token);
            if self.tail.len() >= block_tokens.max(1) {
                let start = self.hashes.last().copied().unwrap_or(0x5EED);
                let fold = |h, t: TokenId| mix_hash(h, u64::from(t));
                self.hashes.push(self.tail.drain(..).fold(start, fold));
            }
        }
    }

    pub(super) fn hashes(&self) -> &[u64] {
        &self.hashes
    }
}

/// The blocks that an engine probably has in its cache, the oldest forgotten first.
#[derive(Debug, Default)]
pub(super) struct SeenBlocks {
    set: HashSet<u64>,
    order: VecDeque<u64>,
}

impl SeenBlocks {
    /// How many leading blocks it has.
    pub(super) fn matched(&self, hashes: &[u64]) -> usize {
        hashes.iter().take_while(|h| self.set.contains(h)).count()
    }

    /// Adds blocks and forgets the oldest ones beyond `max`.
    pub(super) fn remember(&mut self, hashes: &[u64], max: usize) {
        for &hash in hashes {
            if self.set.insert(hash) {
                self.order.push_back(hash);
            }
        }
        while self.order.len() > max {
            if let Some(old) = self.order.pop_front() {
                self.set.remove(&old);
            }
        }
    }

    pub(super) fn clear(&mut self) {
        self.set.clear();
        self.order.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn only_whole_common_blocks_match(
            common in prop::collection::vec(0..9u32, 0..40),
            a in prop::collection::vec(10..19u32, 0..20),
            b in prop::collection::vec(20..29u32, 0..20),
            block in 1..8usize,
            cut in 0..40usize,
        ) {
            let whole = |parts: &[&[u32]]| {
                let mut hashes = BlockHashes::default();
                parts.iter().for_each(|p| hashes.push(p, block));
                hashes
            };
            let (left, right) = common.split_at(cut.min(common.len()));
            let mut seen = SeenBlocks::default();
            seen.remember(whole(&[left, right, &a]).hashes(), 1000);
            prop_assert_eq!(seen.matched(whole(&[&common, &b]).hashes()), common.len() / block);
        }

        #[test]
        fn memory_is_bounded(hashes in prop::collection::vec(0..1000u64, 0..200), max in 0..20usize) {
            let mut seen = SeenBlocks::default();
            for chunk in hashes.chunks(7) {
                seen.remember(chunk, max);
                prop_assert!(seen.order.len() <= max && seen.set.len() == seen.order.len());
            }
        }
    }
}
