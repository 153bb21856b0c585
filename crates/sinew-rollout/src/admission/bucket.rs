//! The token bucket on an engine's KV capacity.
//!
//! What episodes hold is Σ tokens − shared tokens + reserve · episodes (ThunderAgent's rule, whose
//! reserve is 100). Shared tokens are exact here: contexts are compared block by block from their
//! first token on, as a prefix cache does.

use sinew_types::{GOLDEN_GAMMA, TokenId};
use std::collections::HashMap;

/// Tokens of a block: what usual engines share.
pub(super) const BLOCK_TOKENS: usize = 16;

/// A context as the bucket sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    /// Hash of each whole block and all before it.
    blocks: Vec<u64>,
    /// All its tokens.
    tokens: usize,
}

impl Held {
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
        }
    }

    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Room of the tokens after the last whole block: one that nobody shares.
    fn tail(&self) -> usize {
        (self.tokens - self.blocks.len() * BLOCK_TOKENS).min(1) * BLOCK_TOKENS
    }
}

/// One step of a hash over ids: a multiplication and a rotation, as equal prefixes are looked for
/// and nobody gains by a collision but a wrong estimate.
fn mix(hash: u64, id: TokenId) -> u64 {
    (hash ^ (u64::from(id) + 1))
        .wrapping_mul(GOLDEN_GAMMA)
        .rotate_left(29)
}

/// Who holds which blocks.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    holders: HashMap<u64, u32>,
    tails: usize,
    count: usize,
    reserve: usize,
}

impl Bucket {
    /// A bucket that adds `reserve` tokens to each context, for what it is about to grow.
    pub(super) fn new(reserve: usize) -> Self {
        Self {
            reserve,
            ..Self::default()
        }
    }

    /// Tokens that are held, each shared block once, reserves included.
    pub(super) fn used(&self) -> usize {
        self.holders.len() * BLOCK_TOKENS + self.tails + self.count * self.reserve
    }

    /// What [`Bucket::add`] would add to [`Bucket::used`].
    pub(super) fn cost(&self, held: &Held) -> usize {
        let new = |hash: &&u64| !self.holders.contains_key(*hash);
        let blocks = held.blocks.iter().filter(new).count();
        blocks * BLOCK_TOKENS + held.tail() + self.reserve
    }

    pub(super) fn add(&mut self, held: &Held) {
        for &hash in &held.blocks {
            *self.holders.entry(hash).or_default() += 1;
        }
        self.tails += held.tail();
        self.count += 1;
    }

    /// `held` must have been added.
    pub(super) fn remove(&mut self, held: &Held) {
        for hash in &held.blocks {
            if let Some(holders) = self.holders.get_mut(hash) {
                *holders -= 1;
                if *holders == 0 {
                    self.holders.remove(hash);
                }
            }
        }
        self.tails -= held.tail();
        self.count -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_beginning_is_counted_once() {
        let context = |own: TokenId| {
            let mut ids: Vec<TokenId> = (0..40).collect();
            ids.extend([own; 10]);
            ids
        };
        let (a, b) = (Held::of(&context(7)), Held::of(&context(8)));
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

    #[test]
    fn the_same_block_elsewhere_is_another_one() {
        let block = [3; BLOCK_TOKENS];
        let once = Held::of(&block);
        let twice = Held::of(&[block, block].concat());
        let mut bucket = Bucket::new(0);
        bucket.add(&once);
        assert_eq!(bucket.cost(&twice), BLOCK_TOKENS);
        assert_eq!(twice.tokens(), 2 * BLOCK_TOKENS);
    }
}
