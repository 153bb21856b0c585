//! The difference between two sets of weights, without loss.
//!
//! The bytes of a tensor are combined with those of its base by XOR. The result is 0 where a number did not
//! change; a small change leaves sign, exponent and first digits 0. The first bytes of all numbers are stored
//! together, then the second ones, so that zstd finds long runs of zeros. Applying it reverses these steps;
//! the result is equal bit for bit.

/// zstd's fastest usual level: what is left of a difference is zeros and random digits.
const LEVEL: i32 = 1;

/// The bytes of `new` that `base` does not have. Both have numbers of `width` bytes.
///
/// # Errors
/// If the compressor fails.
pub(super) fn encode(base: &[u8], new: &[u8], width: usize) -> std::io::Result<Vec<u8>> {
    let count = new.len() / width;
    let mut planes = vec![0; new.len()];
    for (index, (b, n)) in base.iter().zip(new).enumerate() {
        planes[index % width * count + index / width] = b ^ n;
    }
    zstd::bulk::compress(&planes, LEVEL)
}

/// Changes `base` to the bytes that [`encode`] received as `new`. Returns false if the difference belongs to
/// another tensor.
pub(super) fn apply(base: &mut [u8], delta: &[u8], width: usize) -> bool {
    let Ok(planes) = zstd::bulk::decompress(delta, base.len()) else {
        return false;
    };
    if planes.len() != base.len() {
        return false;
    }
    let count = base.len() / width;
    for (index, byte) in base.iter_mut().enumerate() {
        *byte ^= planes[index % width * count + index / width];
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the bytes: infinities and NaN with a payload are none of its business.
        #[test]
        fn it_is_without_loss(
            pairs in proptest::collection::vec((any::<u32>(), any::<u32>()), 0..300),
            wide in any::<bool>(),
        ) {
            let width = if wide { 4 } else { 2 };
            let bytes = |of: fn(&(u32, u32)) -> u32| -> Vec<u8> {
                pairs.iter().flat_map(|p| of(p).to_le_bytes()).collect()
            };
            let (base, new) = (bytes(|p| p.0), bytes(|p| p.1));
            let delta = encode(&base, &new, width).unwrap();
            let mut applied = base;
            prop_assert!(apply(&mut applied, &delta, width));
            prop_assert_eq!(applied, new);
        }
    }

    #[test]
    fn small_steps_are_small() {
        let base: Vec<f32> = (0..10_000)
            .map(|i| (i as f32 * 0.37).sin() * 0.05)
            .collect();
        let step = |(i, w): (usize, &f32)| w + 1e-6 * (i as f32).cos();
        let new: Vec<f32> = base.iter().enumerate().map(step).collect();
        let bytes = |w: &[f32]| -> Vec<u8> { w.iter().flat_map(|v| v.to_le_bytes()).collect() };
        let delta = encode(&bytes(&base), &bytes(&new), 4).unwrap();
        assert!(delta.len() < 20_000, "{} of 40000 bytes", delta.len());
    }

    #[test]
    fn the_difference_of_another_tensor_is_refused() {
        let delta = encode(&[1, 2, 3, 4], &[4, 3, 2, 1], 4).unwrap();
        assert!(!apply(&mut [0; 8], &delta, 4));
        assert!(!apply(&mut [0; 2], &delta, 2));
        assert!(!apply(&mut [0; 4], b"no frame", 4));
    }
}
