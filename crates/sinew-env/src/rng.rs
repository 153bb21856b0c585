//! Seeded numbers that stay the same across versions and platforms.

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// A generator for one purpose: equal seed and label give equal numbers, different labels
    /// unrelated ones.
    pub(crate) fn labelled(seed: u64, label: &str) -> Self {
        Self(hash64(label.as_bytes()) ^ mix(seed))
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Uniform in `0..n`; the bias of the modulus is below 2^-32 for the small `n` used here.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        debug_assert!(n > 0, "empty range");
        (self.next_u64() % n.max(1) as u64) as usize
    }

    /// Uniform in `low..=high`.
    pub(crate) fn range(&mut self, low: i64, high: i64) -> i64 {
        debug_assert!(low <= high, "empty range");
        low + self.below((high - low + 1) as usize) as i64
    }

    pub(crate) fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// FNV-1a, finished so that all bits depend on all bytes. Part of split membership and state
/// hashes: must not change.
pub(crate) fn hash64(bytes: &[u8]) -> u64 {
    let fnv = bytes.iter().fold(0xCBF2_9CE4_8422_2325u64, |h, &b| {
        (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    mix(fnv)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_published_generator() {
        let mut rng = Rng(1234567);
        assert_eq!(rng.next_u64(), 6457827717110365317);
        assert_eq!(rng.next_u64(), 3203168211198807973);
    }

    #[test]
    fn ranges_are_inclusive() {
        let mut rng = Rng::labelled(1, "x");
        let seen: std::collections::BTreeSet<_> = (0..200).map(|_| rng.range(-1, 1)).collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [-1, 0, 1]);
    }
}
