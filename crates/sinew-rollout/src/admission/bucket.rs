//! Token bucket: accounts for the KV capacity of an engine.
//!
//! The episodes together hold Σ tokens − shared tokens + reserve · episodes (the rule of ThunderAgent, whose
//! reserve is 100). Shared tokens are exact here: contexts are compared block by block from their first token
//! on, as a prefix cache does.

use sinew_types::{GOLDEN_GAMMA, SpreadMap, TokenId};
use std::collections::hash_map::Entry;

/// Tokens in a block, the usual block size of prefix caches.
pub(super) const BLOCK_TOKENS: usize = 16;

/// A context that the bucket counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HeldContext {
    /// Hash of each full block, including all blocks before it.
    blocks: Vec<u64>,
    /// Number of all its tokens.
    tokens: usize,
    /// Number of leading blocks that the bucket already counts before the context is added, see
    /// [`Bucket::follow`].
    kept: usize,
}

impl HeldContext {
    pub(super) fn of(context: &[TokenId]) -> Self {
        let mut hash = 0;
        let chunks = context.chunks_exact(BLOCK_TOKENS);
        let blocks = chunks.map(|chunk| {
            hash = chunk.iter().fold(hash, |h, &id| mix(h, id));
            hash
        });
        Self {
            blocks: blocks.collect(),
            tokens: context.len(),
            kept: 0,
        }
    }

    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Capacity for the tokens after the last full block: one block, or 0 if there are none. No other context
    /// shares it.
    fn tail(&self) -> usize {
        (self.tokens - self.blocks.len() * BLOCK_TOKENS).min(1) * BLOCK_TOKENS
    }
}

/// One step of a hash over token ids: a multiplication and a rotation. It only has to find equal prefixes; a
/// collision makes an estimate wrong, and nothing else.
fn mix(hash: u64, id: TokenId) -> u64 {
    (hash ^ (u64::from(id) + 1))
        .wrapping_mul(GOLDEN_GAMMA)
        .rotate_left(29)
}

/// Blocks in use, each with the number of contexts that hold it.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    holders: SpreadMap<u32>,
    tails: usize,
    count: usize,
    reserve: usize,
}

impl Bucket {
    /// Creates a bucket that adds `reserve` tokens to each context for its expected growth.
    pub(super) fn new(reserve: usize) -> Self {
        Self {
            reserve,
            ..Self::default()
        }
    }

    /// Tokens in use: each shared block counts once, and reserves are included.
    pub(super) fn used(&self) -> usize {
        self.holders.len() * BLOCK_TOKENS + self.tails + self.count * self.reserve
    }

    /// Returns the number of tokens by which [`Bucket::add`] would increase [`Bucket::used`].
    pub(super) fn cost(&self, held: &HeldContext) -> usize {
        let new = |hash: &&u64| !self.holders.contains_key(*hash);
        let blocks = held.blocks[held.kept..].iter().filter(new).count();
        blocks * BLOCK_TOKENS + held.tail() + self.reserve
    }

    pub(super) fn add(&mut self, held: &HeldContext) {
        for &hash in &held.blocks[held.kept..] {
            *self.holders.entry(hash).or_default() += 1;
        }
        self.tails += held.tail();
        self.count += 1;
    }

    /// Removes a context, which must have been added.
    pub(super) fn remove(&mut self, held: &HeldContext) {
        self.release(&held.blocks);
        self.tails -= held.tail();
        self.count -= 1;
    }

    /// Removes `before`, which `held` replaces. Blocks at the start of both stay counted, since most of a
    /// context comes from the turn before. Afterwards `held` must be added or given up.
    pub(super) fn follow(&mut self, before: &HeldContext, held: &mut HeldContext) {
        let both = before.blocks.iter().zip(&held.blocks);
        held.kept = both.take_while(|(a, b)| a == b).count();
        self.release(&before.blocks[held.kept..]);
        self.tails -= before.tail();
        self.count -= 1;
    }

    /// Removes the blocks that [`Bucket::follow`] kept.
    pub(super) fn give_up(&mut self, held: &mut HeldContext) {
        let kept = std::mem::take(&mut held.kept);
        self.release(&held.blocks[..kept]);
    }

    fn release(&mut self, blocks: &[u64]) {
        for &hash in blocks {
            if let Entry::Occupied(mut holders) = self.holders.entry(hash) {
                *holders.get_mut() -= 1;
                if *holders.get() == 0 {
                    holders.remove();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_shared_beginning_is_counted_once() {
        let context = |own: TokenId| {
            let mut ids: Vec<TokenId> = (0..40).collect();
            ids.extend([own; 10]);
            ids
        };
        let (a, b) = (HeldContext::of(&context(7)), HeldContext::of(&context(8)));
        let mut bucket = Bucket::new(100);
        assert_eq!(bucket.cost(&a), 64 + 100);
        bucket.add(&a);
        assert_eq!(bucket.used(), 164);
        // Two blocks of 16 are the same; the third differs at its ninth token.
        assert_eq!(bucket.cost(&b), 32 + 100);
        bucket.add(&b);
        assert_eq!(bucket.used(), 296);
        bucket.remove(&a);
        assert_eq!(bucket.used(), 164);
        bucket.remove(&b);
        assert_eq!(bucket.used(), 0);
    }

    proptest! {
        /// The cost of a next context equals that after a removal of the context before it.
        #[test]
        fn one_that_follows_another_is_counted_as_one_that_is_new(
            contexts in prop::collection::vec(prop::collection::vec(0..2u32, 0..60), 3),
            gives_up: bool,
        ) {
            let [other, before, next] = &contexts[..] else { unreachable!() };
            let [other, before, mut next] = [other, before, next].map(|tokens| HeldContext::of(tokens));
            let mut buckets = [Bucket::new(7), Bucket::new(7)];
            for bucket in &mut buckets {
                bucket.add(&other);
                bucket.add(&before);
            }
            let [slow, fast] = &mut buckets;
            slow.remove(&before);
            let needed = slow.used() + slow.cost(&next);
            fast.follow(&before, &mut next);
            prop_assert_eq!(fast.used() + fast.cost(&next), needed);
            if gives_up {
                fast.give_up(&mut next);
                prop_assert_eq!(fast.used(), slow.used());
            }
            slow.add(&HeldContext { kept: 0, ..next.clone() });
            fast.add(&next);
            prop_assert_eq!((fast.used(), fast.used()), (needed, slow.used()));
            prop_assert_eq!(&fast.holders, &slow.holders);
        }
    }

    #[test]
    fn the_same_block_elsewhere_is_another_one() {
        let block = [3; BLOCK_TOKENS];
        let once = HeldContext::of(&block);
        let twice = HeldContext::of(&[block, block].concat());
        let mut bucket = Bucket::new(0);
        bucket.add(&once);
        assert_eq!(bucket.cost(&twice), BLOCK_TOKENS);
        assert_eq!(twice.tokens(), 2 * BLOCK_TOKENS);
    }
}
