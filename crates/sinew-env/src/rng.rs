//! Seeded random numbers that are equal on all platforms and in all versions.

use sinew_types::{SplitMix64, finalize64};

/// Random number generator of a task.
#[derive(Clone, Debug)]
pub struct Rng(SplitMix64);

impl Rng {
    /// Creates a generator for one purpose. Equal seeds and labels give equal numbers. Different labels give
    /// independent ones.
    pub fn labelled(seed: u64, label: &str) -> Self {
        Self(SplitMix64::new(hash64(label.as_bytes()) ^ finalize64(seed)))
    }

    /// A uniform 64-bit number.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Uniform in `0..n`. The modulo bias is below 2^-32 for the small `n` used here.
    pub fn below(&mut self, n: usize) -> usize {
        debug_assert!(n > 0, "empty range");
        (self.next_u64() % n.max(1) as u64) as usize
    }

    /// Uniform in `low..=high`.
    pub fn range(&mut self, low: i64, high: i64) -> i64 {
        debug_assert!(low <= high, "empty range");
        low + self.below((high - low + 1) as usize) as i64
    }

    /// A uniform element of `items`, which must not be empty.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

/// FNV-1a hash with a finalizer, so that all bits depend on all bytes. Split membership and state hashes
/// depend on it: it must not change.
pub fn hash64(bytes: &[u8]) -> u64 {
    let fnv = bytes.iter().fold(0xCBF2_9CE4_8422_2325u64, |h, &b| {
        (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    finalize64(fnv)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_inclusive() {
        let mut rng = Rng::labelled(1, "x");
        let seen: std::collections::BTreeSet<_> = (0..200).map(|_| rng.range(-1, 1)).collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [-1, 0, 1]);
    }
}
