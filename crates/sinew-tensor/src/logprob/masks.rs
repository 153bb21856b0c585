//! Distributions over some of the vocabulary's tokens.

use std::ops::Range;

use super::SECTION;

/// Bits of a word.
const BITS: usize = u32::BITS as usize;
/// Words of a section.
pub(super) const SECTION_WORDS: usize = SECTION / BITS;

/// The allowed tokens of each row, as bit sets: bit `v % 32` of word `v / 32` means that token `v` is
/// allowed. Tokens beyond the last word are not.
#[derive(Clone, Copy, Debug)]
pub struct Masks<'a> {
    /// Words of one bit set.
    pub words: usize,
    /// Bit sets one after the other.
    pub table: &'a [u32],
    /// Bit set in `table` for each row, or [`Masks::ALL`].
    pub rows: &'a [u32],
}

impl<'a> Masks<'a> {
    /// Value of [`Masks::rows`] that allows all tokens.
    pub const ALL: u32 = u32::MAX;

    /// The bit set of a row; none: all tokens are allowed.
    pub(super) fn of(&self, row: usize) -> Option<&'a [u32]> {
        match self.rows[row] {
            Self::ALL => None,
            index => Some(&self.table[index as usize * self.words..][..self.words]),
        }
    }

    /// Whether the bit set of `row`, if it has one, is in the table and allows `token`.
    #[must_use]
    pub fn allows(&self, row: usize, token: u32) -> bool {
        let Some(&index) = self.rows.get(row) else {
            return false;
        };
        let start = (index as usize).saturating_mul(self.words);
        index == Self::ALL
            || self
                .table
                .get(start..start.saturating_add(self.words))
                .is_some_and(|mask| allows(mask, token))
    }

    /// # Panics
    /// If a row's bit set is not in the table, or bars its target.
    pub(super) fn check(&self, targets: &[u32]) {
        assert_eq!(
            self.rows.len(),
            targets.len(),
            "masks name one bit set for each row"
        );
        assert!(
            self.words > 0 && self.table.len().is_multiple_of(self.words),
            "the table of masks holds bit sets of {} words",
            self.words
        );
        let masks = self.table.len() / self.words;
        for (row, (&index, &target)) in self.rows.iter().zip(targets).enumerate() {
            assert!(
                index == Self::ALL || (index as usize) < masks,
                "row {row} names mask {index} of {masks}"
            );
            assert!(
                self.of(row).is_none_or(|mask| allows(mask, target)),
                "row {row} asks for token {target}, which its mask bars"
            );
        }
    }
}

/// Whether a bit set has `token`.
pub(super) fn allows(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / BITS)
        .is_some_and(|word| word >> (token as usize % BITS) & 1 == 1)
}

/// Whether only one token below `vocab` is allowed: its probability is 1, whatever the logits are.
pub(super) fn single(mask: &[u32], vocab: usize) -> bool {
    let mut count = 0;
    for start in (0..vocab).step_by(SECTION) {
        let words = section(mask, &(start..(start + SECTION).min(vocab)));
        count += words.iter().map(|word| word.count_ones()).sum::<u32>();
        if count > 1 {
            return false;
        }
    }
    count == 1
}

/// The bits of a section's tokens; those behind the last one are not set.
pub(super) fn section(mask: &[u32], tokens: &Range<usize>) -> [u32; SECTION_WORDS] {
    let first = (tokens.start / BITS).min(mask.len());
    let from = &mask[first..tokens.end.div_ceil(BITS).clamp(first, mask.len())];
    let mut words = [0; SECTION_WORDS];
    words[..from.len()].copy_from_slice(from);
    if !tokens.len().is_multiple_of(BITS) {
        words[tokens.len() / BITS] &= (1 << (tokens.len() % BITS)) - 1;
    }
    words
}

/// Returns the bits of `lanes` tokens (a divisor of 32) from `at` on, which is a multiple of `lanes`.
#[inline(always)]
pub(super) fn bits(words: &[u32; SECTION_WORDS], at: usize, lanes: usize) -> u32 {
    let word = words[at / BITS] >> (at % BITS);
    if lanes == BITS {
        word
    } else {
        word & ((1 << lanes) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_beyond_the_vocabulary_or_the_words_are_not_set() {
        let words = section(&[u32::MAX; 80], &(0..SECTION));
        assert_eq!(words, [u32::MAX; SECTION_WORDS]);
        // 16 words are left of 80; a section of 40 tokens has one and 8 bits.
        let last = section(&[u32::MAX; 80], &(SECTION..2 * SECTION));
        assert_eq!(last.iter().filter(|&&w| w != 0).count(), 16);
        let short = section(&[u32::MAX; 80], &(SECTION..SECTION + 40));
        assert_eq!(&short[..3], [u32::MAX, 0xff, 0]);
        assert_eq!(section(&[1], &(SECTION..2 * SECTION)), [0; SECTION_WORDS]);
        assert_eq!(bits(&short, 32, 16), 0xff);
        assert_eq!(bits(&short, 40, 8), 0);
        assert!(allows(&[0, 2], 33) && !allows(&[0, 2], 32) && !allows(&[0, 2], 64));
    }

    #[test]
    fn one_allowed_token_is_told_from_others() {
        let mut mask = vec![0; 200];
        assert!(!single(&mask, 6400), "none");
        mask[130] = 4;
        assert!(single(&mask, 6400));
        assert!(!single(&mask, 130 * 32), "beyond the vocabulary");
        mask[199] = 1;
        assert!(!single(&mask, 6400));
        assert!(single(&mask, 199 * 32));
    }
}
