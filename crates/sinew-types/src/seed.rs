//! Seeds: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
//!
//! A run is repeated from its seed only, so these numbers must not change between versions.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// The increment of SplitMix64: 2^64 divided by the golden ratio, odd.
pub const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finalizer of SplitMix64: a bijection in which each input bit changes about half of the output.
pub const fn finalize64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The seed of the `index`-th part of what `seed` decides: output `index` of SplitMix64 from `seed`.
pub const fn mix_seed(seed: u64, index: u64) -> u64 {
    finalize64(
        seed.wrapping_add(index.wrapping_mul(GOLDEN_GAMMA))
            .wrapping_add(GOLDEN_GAMMA),
    )
}

/// Extends a hash by one word. The order of the words counts.
pub const fn mix_hash(hash: u64, word: u64) -> u64 {
    finalize64((hash ^ word.wrapping_mul(GOLDEN_GAMMA)).wrapping_add(GOLDEN_GAMMA))
}

/// Map whose keys are already uniformly distributed hashes, so that they are not hashed again.
pub type SpreadMap<V> = HashMap<u64, V, BuildHasherDefault<Spread>>;

/// The hasher of a [`SpreadMap`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = mix_hash(self.0, u64::from(*byte));
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// The generator: a stream of 64-bit numbers from a seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// The stream of `seed`; equal seeds give equal streams.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next number.
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN_GAMMA);
        finalize64(self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_published_generator() {
        let mut stream = SplitMix64::new(1_234_567);
        let drawn = [stream.next_u64(), stream.next_u64()];
        assert_eq!(
            drawn,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]
        );
        assert_eq!(drawn, [0, 1].map(|i| mix_seed(1_234_567, i)));
    }

    #[test]
    fn the_order_of_words_counts() {
        let hash = |words: [u64; 2]| words.into_iter().fold(7, mix_hash);
        assert_ne!(hash([1, 2]), hash([2, 1]));
    }
}
