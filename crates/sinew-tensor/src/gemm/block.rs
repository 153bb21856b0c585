//! High bytes of the blocks of a panel of 12 bits a value ([`split`](super::split)): looked up in the panel's
//! table, or kept whole if the table lacks one.

use crate::simd::Vector;

/// Steps of a block, whose low bytes and indices lie together.
pub(super) const BLOCK: usize = 4;
/// High bytes in a table.
pub(super) const TABLE: usize = 16;

/// Data of a panel in addition to its blocks.
#[derive(Debug, Clone, Default)]
pub(super) struct Side {
    /// The high bytes that the indices stand for.
    pub(super) table: [u8; TABLE],
    /// Blocks with a high byte that the table lacks, in order, and [`usize::MAX`] behind them.
    pub(super) whole: Vec<usize>,
    /// All high bytes of these blocks.
    pub(super) high: Vec<u8>,
}

impl Side {
    /// The table for [`Highs::next`].
    ///
    /// # Safety
    /// Same as for [`Vector`].
    #[inline(always)]
    pub(super) unsafe fn table<V: Vector>(&self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::table(&self.table) }
    }

    /// The whole blocks from `block` on.
    #[inline(always)]
    pub(super) fn from(&self, block: usize) -> Highs {
        let at = match block {
            0 => 0,
            _ => self.whole.partition_point(|&whole| whole < block),
        };
        let each = self.high.len() / (self.whole.len() - 1).max(1);
        Highs {
            whole: self.whole[at..].as_ptr(),
            high: self.high[at * each..].as_ptr(),
        }
    }
}

/// A place among the whole blocks of a panel.
pub(super) struct Highs {
    whole: *const usize,
    high: *const u8,
}

impl Highs {
    /// The high bytes of `block`, which lies at `from`; blocks must be asked for in order.
    ///
    /// # Safety
    /// Same as for [`Vector`]; `from` and `table` are those of the panel of `nr` columns.
    #[inline(always)]
    pub(super) unsafe fn next<V: Vector>(
        &mut self,
        block: usize,
        from: *const u8,
        table: V,
        nr: usize,
    ) -> [V; 2] {
        // SAFETY: the caller's promise; each whole block has `4 * nr` high bytes, and the last entry is not a
        // block.
        unsafe {
            if *self.whole == block {
                let first: *const f32 = self.high.cast();
                self.whole = self.whole.add(1);
                self.high = self.high.add(4 * nr);
                [
                    V::load_upto(first, nr / 2),
                    V::load_upto(first.add(nr / 2), nr / 2),
                ]
            } else {
                V::high_bytes(from, table)
            }
        }
    }
}
