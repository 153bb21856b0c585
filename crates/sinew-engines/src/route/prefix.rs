//! Remembers which leading blocks engines have seen, as a bounded set of hashes.
//!
//! It is a guess about the engine's prefix cache, not a promise: if it is wrong, a prompt is computed again
//! and nothing else happens. It is cleared when the engine gets other weights. Blocks lead to their engines,
//! so that the cost of a look does not depend on the number of engines.

use sinew_types::{GOLDEN_GAMMA, SpreadMap, TokenId, mix_hash};
use std::collections::VecDeque;
use std::collections::hash_map::Entry;

/// Hashes of a growing text's whole blocks; each covers everything before it.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockHashes {
    /// One for each whole block.
    hashes: Vec<u64>,
    /// Tokens of the incomplete block: their number, and a polynomial over them.
    open: (usize, u64),
    /// Texts of different seeds have no hash in common.
    seed: u64,
}

impl BlockHashes {
    /// An empty text that an adapter of this name on servers reads; `None`: no adapter.
    pub(super) fn new(adapter: Option<&str>) -> Self {
        let bytes = adapter.into_iter().flat_map(str::bytes);
        Self {
            seed: bytes.fold(0, |seed, byte| mix_hash(seed, u64::from(byte) + 1)),
            ..Self::default()
        }
    }

    /// Appends tokens and hashes each block of `block_tokens` that they complete.
    pub(super) fn push(&mut self, tokens: &[TokenId], block_tokens: usize) {
        let size = block_tokens.max(1);
        let (mut count, mut sum) = self.open;
        self.hashes.reserve((count + tokens.len()) / size);
        for &token in tokens {
            sum = sum.wrapping_mul(GOLDEN_GAMMA) ^ (u64::from(token) + 1);
            count += 1;
            if count >= size {
                let before = self.hashes.last().copied();
                let before = before.unwrap_or(0x5EED ^ self.seed);
                self.hashes.push(mix_hash(before, sum));
                (count, sum) = (0, 0);
            }
        }
        self.open = (count, sum);
    }

    pub(super) fn hashes(&self) -> &[u64] {
        &self.hashes
    }
}

/// Indexes of engines. Most blocks have one holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EngineSet {
    One(usize),
    /// A bit for each engine.
    Many(Vec<u64>),
}

impl EngineSet {
    pub(super) fn contains(&self, engine: usize) -> bool {
        match self {
            Self::One(only) => *only == engine,
            Self::Many(words) => words
                .get(engine / 64)
                .is_some_and(|w| w >> (engine % 64) & 1 == 1),
        }
    }

    /// Returns the engines in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        let (only, words) = match self {
            Self::One(only) => (Some(*only), &[][..]),
            Self::Many(words) => (None, &words[..]),
        };
        let bits = |(at, word): (usize, &u64)| {
            let word = *word;
            (0..64)
                .filter(move |b| word >> b & 1 == 1)
                .map(move |b| at * 64 + b)
        };
        only.into_iter()
            .chain(words.iter().enumerate().flat_map(bits))
    }

    fn is_empty(&self) -> bool {
        matches!(self, Self::Many(words) if words.iter().all(|w| *w == 0))
    }

    /// Adds an engine. Returns false if it was already there.
    fn insert(&mut self, engine: usize) -> bool {
        if self.contains(engine) {
            return false;
        }
        let mut words = match std::mem::replace(self, Self::Many(Vec::new())) {
            Self::Many(words) => words,
            Self::One(only) => {
                let mut words = vec![0; only / 64 + 1];
                words[only / 64] = 1 << (only % 64);
                words
            }
        };
        words.resize(words.len().max(engine / 64 + 1), 0);
        words[engine / 64] |= 1 << (engine % 64);
        *self = Self::Many(words);
        true
    }

    fn remove(&mut self, engine: usize) {
        match self {
            Self::One(only) if *only == engine => *self = Self::Many(Vec::new()),
            Self::One(_) => {}
            Self::Many(words) => {
                if let Some(word) = words.get_mut(engine / 64) {
                    *word &= !(1 << (engine % 64));
                }
            }
        }
    }

    /// Returns the engines that are also in `other`, and those that are not; `None` if all are.
    fn split(&self, other: Option<&Self>) -> Option<(Self, Self)> {
        match (self, other) {
            (_, None) => Some((Self::Many(Vec::new()), self.clone())),
            (Self::One(only), Some(other)) => {
                (!other.contains(*only)).then(|| (Self::Many(Vec::new()), self.clone()))
            }
            (Self::Many(words), Some(other)) => {
                let there = |at: usize| match other {
                    Self::One(only) => u64::from(only / 64 == at) << (only % 64),
                    Self::Many(words) => words.get(at).copied().unwrap_or(0),
                };
                let mut all = words.iter().enumerate();
                if all.all(|(at, w)| w & !there(at) == 0) {
                    return None;
                }
                let both = words.iter().enumerate().map(|(at, w)| w & there(at));
                let rest = words.iter().enumerate().map(|(at, w)| w & !there(at));
                Some((Self::Many(both.collect()), Self::Many(rest.collect())))
            }
        }
    }
}

/// The blocks that engines probably have in their caches; of each engine the oldest are forgotten first.
#[derive(Debug, Default)]
pub(super) struct SeenBlocks {
    holders: SpreadMap<EngineSet>,
    engines: Vec<Memory>,
}

/// Blocks that an engine was given, oldest first, and how many of them are forgotten.
#[derive(Debug, Default)]
struct Memory {
    order: VecDeque<u64>,
    forgotten: u64,
}

impl SeenBlocks {
    /// Engines by how many leading blocks they have, the most first; those that have none are left out.
    pub(super) fn matched(&self, hashes: &[u64]) -> Vec<(usize, EngineSet)> {
        let mut found = Vec::new();
        let Some(mut all) = hashes.first().and_then(|h| self.holders.get(h)).cloned() else {
            return found;
        };
        for (depth, hash) in hashes.iter().enumerate().skip(1) {
            if let Some((kept, dropped)) = all.split(self.holders.get(hash)) {
                found.push((depth, dropped));
                all = kept;
                if all.is_empty() {
                    break;
                }
            }
        }
        if !all.is_empty() {
            found.push((hashes.len(), all));
        }
        found.reverse();
        found
    }

    /// Adds blocks of an engine and forgets its oldest ones beyond `max`.
    pub(super) fn remember(&mut self, engine: usize, hashes: &[u64], max: usize) {
        if self.engines.len() <= engine {
            self.engines.resize_with(engine + 1, Memory::default);
        }
        let order = &mut self.engines[engine].order;
        for &hash in hashes {
            let new = match self.holders.entry(hash) {
                Entry::Occupied(mut there) => there.get_mut().insert(engine),
                Entry::Vacant(place) => {
                    place.insert(EngineSet::One(engine));
                    true
                }
            };
            if new {
                order.push_back(hash);
            }
        }
        while self.engines[engine].order.len() > max {
            self.forget_oldest(engine);
        }
    }

    /// Forgets all blocks of an engine.
    pub(super) fn clear(&mut self, engine: usize) {
        while self.forget_oldest(engine) {}
    }

    /// Forgets all blocks of all engines, without a look for each.
    pub(super) fn clear_all(&mut self) {
        self.holders.clear();
        for memory in &mut self.engines {
            memory.forgotten += memory.order.len() as u64;
            memory.order.clear();
        }
    }

    /// Number of an engine's blocks that were forgotten here so far. While it is unchanged, all blocks that
    /// were added for the engine since then are still remembered.
    pub(super) fn forgotten(&self, engine: usize) -> u64 {
        self.engines.get(engine).map_or(0, |e| e.forgotten)
    }

    /// Whether there was one to forget.
    fn forget_oldest(&mut self, engine: usize) -> bool {
        let Some(memory) = self.engines.get_mut(engine) else {
            return false;
        };
        let Some(hash) = memory.order.pop_front() else {
            return false;
        };
        memory.forgotten += 1;
        if let Entry::Occupied(mut there) = self.holders.entry(hash) {
            there.get_mut().remove(engine);
            if there.get().is_empty() {
                there.remove();
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

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
            seen.remember(3, whole(&[left, right, &a]).hashes(), 1000);
            let found = seen.matched(whole(&[&common, &b]).hashes());
            let depth = common.len() / block;
            let expected = (depth > 0).then_some((depth, EngineSet::One(3)));
            prop_assert_eq!(found, Vec::from_iter(expected));
        }

        /// The same by a set for each engine.
        #[test]
        fn engines_are_those_of_separate_memories(
            steps in prop::collection::vec((0..130usize, 0..12u64, 0..10usize, 0..20usize), 1..60),
            asked in prop::collection::vec(0..12u64, 0..10),
        ) {
            let mut seen = SeenBlocks::default();
            let mut alone: BTreeMap<usize, VecDeque<u64>> = BTreeMap::new();
            for (engine, first, count, what) in steps {
                let own = alone.entry(engine).or_default();
                if what == 0 {
                    seen.clear(engine);
                    own.clear();
                    continue;
                }
                if what == 1 {
                    let before = (seen.forgotten(engine), own.len() as u64);
                    seen.clear_all();
                    prop_assert_eq!(seen.forgotten(engine), before.0 + before.1);
                    alone.clear();
                    continue;
                }
                let hashes: Vec<u64> = (first..).take(count).collect();
                seen.remember(engine, &hashes, 8);
                for hash in hashes {
                    if !own.contains(&hash) {
                        own.push_back(hash);
                    }
                }
                own.drain(..own.len().saturating_sub(8));
            }
            let depth = |own: &VecDeque<u64>| asked.iter().take_while(|h| own.contains(h)).count();
            let expected: BTreeMap<usize, usize> =
                alone.iter().map(|(e, own)| (*e, depth(own))).filter(|(_, d)| *d > 0).collect();
            let found = seen.matched(&asked);
            prop_assert!(found.windows(2).all(|w| w[0].0 > w[1].0));
            let found = found.iter().flat_map(|(d, engines)| engines.iter().map(|e| (e, *d)));
            prop_assert_eq!(found.collect::<BTreeMap<_, _>>(), expected);
        }

        #[test]
        fn memory_is_bounded(hashes in prop::collection::vec(0..1000u64, 0..200), max in 0..20usize) {
            let mut seen = SeenBlocks::default();
            for chunk in hashes.chunks(7) {
                seen.remember(0, chunk, max);
                let held = seen.engines[0].order.len();
                prop_assert!(held <= max && seen.holders.len() == held);
            }
        }
    }
}
