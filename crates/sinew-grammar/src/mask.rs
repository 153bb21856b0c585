//! Set of allowed tokens.

use sinew_types::TokenId;

/// Bit set of allowed tokens. Bit `v % 32` of word `v / 32` is set if token `v` is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    words: Vec<u32>,
    /// Number of set bits.
    allowed: u32,
    hash: u64,
}

impl Mask {
    /// Creates a mask of `columns` tokens from its words. Missing words forbid their tokens. Bits past
    /// `columns` are cleared.
    pub fn new(mut words: Vec<u32>, columns: usize) -> Self {
        words.resize(columns.div_ceil(32), 0);
        if let Some(last) = words.last_mut()
            && !columns.is_multiple_of(32)
        {
            *last &= (1 << (columns % 32)) - 1;
        }
        let allowed = words.iter().map(|w| w.count_ones()).sum();
        let mut hasher = blake3::Hasher::new();
        let mut bytes = [0; 4096];
        for chunk in words.chunks(bytes.len() / 4) {
            for (to, word) in bytes.chunks_exact_mut(4).zip(chunk) {
                to.copy_from_slice(&word.to_le_bytes());
            }
            hasher.update(&bytes[..chunk.len() * 4]);
        }
        let mut hash = [0; 8];
        hash.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        Self {
            words,
            allowed,
            hash: u64::from_le_bytes(hash),
        }
    }

    /// Creates a mask that allows `tokens`. Ids past `columns` are ignored.
    pub fn of(tokens: impl IntoIterator<Item = TokenId>, columns: usize) -> Self {
        let mut words = vec![0u32; columns.div_ceil(32)];
        for token in tokens {
            if let Some(word) = words.get_mut(token as usize / 32) {
                *word |= 1 << (token % 32);
            }
        }
        Self::new(words, columns)
    }

    /// The words of the bit set, `columns / 32` rounded up.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Number of allowed tokens.
    pub fn allowed(&self) -> u32 {
        self.allowed
    }

    /// First 8 bytes of the BLAKE3 hash over the little-endian words.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// True if `token` is allowed.
    pub fn allows(&self, token: TokenId) -> bool {
        let word = self.words.get(token as usize / 32);
        word.is_some_and(|w| w >> (token % 32) & 1 == 1)
    }

    /// The allowed token, if there is exactly one.
    pub fn only(&self) -> Option<TokenId> {
        if self.allowed != 1 {
            return None;
        }
        let index = self.words.iter().position(|&w| w != 0)?;
        Some(index as u32 * 32 + self.words[index].trailing_zeros())
    }

    /// The allowed tokens in ascending order.
    pub fn tokens(&self) -> impl Iterator<Item = TokenId> + '_ {
        self.words.iter().zip(0u32..).flat_map(|(&word, index)| {
            let mut left = word;
            std::iter::from_fn(move || {
                (left != 0).then(|| {
                    let bit = left.trailing_zeros();
                    left &= left - 1;
                    index * 32 + bit
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_contain_their_tokens() {
        for columns in [1, 31, 32, 33, 100] {
            let all: Vec<u32> = (0..columns as u32).collect();
            let mask = Mask::new(vec![u32::MAX; 9], columns);
            assert_eq!(mask.tokens().collect::<Vec<_>>(), all);
            assert_eq!(mask.allowed() as usize, columns);
            assert_eq!(mask, Mask::of(all, columns));
            assert!(!mask.allows(columns as u32));
            let last = columns as u32 - 1;
            assert_eq!(Mask::of([last], columns).only(), Some(last));
        }
        let (a, b) = (Mask::of([3, 40], 64), Mask::of([3, 41], 64));
        assert_ne!(a.hash(), b.hash());
        assert_eq!(a.only(), None);
    }
}
