//! Counter-based random numbers: a draw is a function of only (seed, position), so no request's stream
//! depends on other requests, on batching or on preemption.
//!
//! A device of another kind computes the same numbers: Philox4x32-10 with the position as counter
//! and the seed as key, both as two 32-bit words, low word first.

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const ROUNDS: usize = 10;
    const MULTIPLIER: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    for _ in 0..ROUNDS {
        let a = MULTIPLIER[0] * u64::from(counter[0]);
        let b = MULTIPLIER[1] * u64::from(counter[2]);
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// The uniform number in [0, 1) that decides the token at `position` of a sequence (prompt
/// tokens count), with 53 random bits.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let counter = [position as u32, (position >> 32) as u32, 0, 0];
    let out = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(out[1]) << 32 | u64::from(out[0])) >> 11;
    bits as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with Random123 (kat_vectors, philox4x32 10 rounds).
    #[test]
    fn known_answers() {
        assert_eq!(
            philox4x32([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_is_uniform_over_positions_and_seeds() {
        for stream in 0..2u64 {
            let draws = (0..20_000u64).map(|i| {
                if stream == 0 {
                    uniform(7, i)
                } else {
                    uniform(i, 7)
                }
            });
            let mut bins = [0u32; 20];
            for u in draws {
                assert!((0.0..1.0).contains(&u));
                bins[(u * 20.0) as usize] += 1;
            }
            // 1000 expected in each, standard deviation 31.
            assert!(bins.iter().all(|&n| (850..1150).contains(&n)), "{bins:?}");
        }
    }
}
