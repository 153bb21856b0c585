//! Panels of bfloat16 in 12 bits a value, without loss.
//!
//! Weights differ little in size: the exponents of trained ones have 2.6 bits of entropy (Zhang et al. 2025,
//! arXiv 2504.11651). The high byte of a bfloat16 is its sign and all of its exponent but the last bit; of
//! its 256 values 16 cover a panel except for about one weight in 10,000. So a value is its low byte and an
//! index of 4 bits into the panel's table of high bytes. A block of values with a high byte that the table
//! lacks keeps all of its high bytes next to the others, so that any weights have their exact bits.
//!
//! Reading weights takes most of the time of a token of one request, so 12 bits instead of 16 take a fifth
//! off the products of `engine.weights = "bf16"`; batch 1 reaches 1.8 times the speed of llama.cpp with it
//! (docs/performance.md).

use std::cmp::Reverse;

use super::block::{BLOCK, Side, TABLE};
use super::tile::{Tile, unroll};
use crate::buffer::{Buffer, Part, SharedMut};
use crate::cpu::Cpu;
use crate::simd::simd_fn;

/// Values of a block at most.
const MOST: usize = BLOCK * 32;

/// Panels of `nr` columns over `k` steps.
#[derive(Debug, Clone)]
pub(super) struct Split {
    nr: usize,
    k: usize,
    /// `[panels, k / BLOCK]` blocks of `3 * nr / 2` words: low bytes of two steps, of two more, then the
    /// indices of the first two in the low halves of bytes and of the others in the high ones. Each 16 bytes
    /// of two steps have 8 values of the first, then 8 of the second, so that instructions that work in parts
    /// of 16 bytes put words together.
    data: Buffer,
    sides: Vec<Side>,
}

impl Split {
    pub(super) fn new(n: usize, k: usize, nr: usize) -> Self {
        let panels = n.div_ceil(nr);
        Self {
            nr,
            k,
            data: Buffer::zeros(panels * k.div_ceil(BLOCK) * nr * 3 / 2),
            sides: vec![Side::default(); panels],
        }
    }

    /// Words of a panel.
    pub(super) fn stride(&self) -> usize {
        self.k.div_ceil(BLOCK) * self.nr * 3 / 2
    }

    /// Memory that a product reads.
    pub(super) fn bytes(&self) -> usize {
        let of = |side: &Side| self.stride() * 4 + TABLE + side.whole.len() * 8 + side.high.len();
        self.sides.iter().map(of).sum()
    }

    /// Fills all panels by `fill(panel, blocks, side)`, on all threads.
    pub(super) fn fill(&mut self, dev: &Cpu, fill: &(dyn Fn(usize, *mut u8, &mut Side) + Sync)) {
        let (stride, panels) = (self.stride(), self.sides.len());
        let (data, sides) = (
            Part(self.data.as_mut_ptr()),
            SharedMut::new(&mut self.sides),
        );
        dev.pool().parallel_for(panels, &|panel| {
            // SAFETY: each task has a separate panel.
            let side = unsafe { &mut sides.range(panel..panel + 1)[0] };
            fill(panel, data.at(panel * stride).cast(), side);
        });
    }

    /// A block of a panel, maybe behind the last, to be asked for ahead.
    pub(super) fn block(&self, panel: usize, block: usize) -> *const f32 {
        let at = panel * self.stride() + block * self.nr * 3 / 2;
        self.data.as_ptr().wrapping_add(at)
    }

    /// Sides of the panels from `panel` on.
    pub(super) fn sides(&self, panel: usize) -> *const Side {
        self.sides[panel..].as_ptr()
    }

    /// Brings `steps` steps from a block on of the panels from `panel` on that make up a group to 32 bits:
    /// panels of [`Tile::NR`] columns at `to`, with space for whole blocks.
    ///
    /// # Safety
    /// Same as for [`Vector`]; the steps exist, and `to` has space for the panels.
    #[inline(always)]
    pub(super) unsafe fn join<V: Tile>(
        &self,
        panel: usize,
        block: usize,
        steps: usize,
        to: *mut f32,
    ) {
        let room = steps.next_multiple_of(BLOCK);
        let sides = &self.sides[panel..self.sides.len().min(panel + V::GROUP)];
        for (i, side) in sides.iter().enumerate() {
            let mut from = self.block(panel + i, block);
            let mut highs = side.from(block);
            // SAFETY: the caller's promise.
            let table = unsafe { side.table::<V>() };
            for b in 0..steps.div_ceil(BLOCK) {
                // SAFETY: the caller's promise.
                unsafe {
                    let high = highs.next(block + b, from.cast(), table, V::SPLIT_NR);
                    let words = V::join(from.cast(), high);
                    unroll!(S < BLOCK, [0 1 2 3], {
                        unroll!(J < 2, [0 1], {
                            if J < V::SPLIT_NR / V::LANES {
                                let col = i * V::SPLIT_NR + J * V::LANES;
                                let step = col / V::NR * room + b * BLOCK + S;
                                let value = V::half(words[S], J);
                                value.store(to.add(step * V::NR + col % V::NR));
                            }
                        });
                    });
                    from = from.add(3 * V::SPLIT_NR / 2);
                }
            }
        }
    }
}

simd_fn! {
/// Encodes a panel of `k` steps from its `words`, which have space for whole blocks.
///
/// # Safety
/// `words` and `to` are valid for the blocks of a panel.
pub(super) fn encode<V: Tile>(words: *mut u32, k: usize, to: *mut u8, side: &mut Side) {
    let (half, bytes) = (V::SPLIT_NR / 2, 2 * V::SPLIT_NR);
    let blocks = k.div_ceil(BLOCK);
    for word in k * half..blocks * BLOCK * half {
        *words.add(word) = *words;
    }
    side.table = frequent(words, k, half);
    side.whole.clear();
    side.high.clear();
    for b in 0..blocks {
        // Two bytes of a word each, little end first.
        let (mut low, mut high) = ([0u16; MOST / 2], [0u16; MOST / 2]);
        for step in 0..BLOCK {
            let (mut lows, mut highs) = ([0u16; MOST / BLOCK / 2], [0u16; MOST / BLOCK / 2]);
            let words = words.add((b * BLOCK + step) * half);
            for (d, (low, high)) in lows.iter_mut().zip(&mut highs).enumerate().take(half) {
                let word = *words.add(d);
                *low = ((word & 0xff | (word >> 8 & 0xff00)) as u16).to_le();
                *high = ((word >> 8 & 0xff | (word >> 16 & 0xff00)) as u16).to_le();
            }
            for d in (0..half).step_by(4) {
                let at = step / 2 * 2 * half + 2 * d + step % 2 * 4;
                low[at..at + 4].copy_from_slice(&lows[d..d + 4]);
                high[at..at + 4].copy_from_slice(&highs[d..d + 4]);
            }
        }
        let low = *low.as_ptr().cast::<[u8; MOST]>();
        let high = *high.as_ptr().cast::<[u8; MOST]>();
        let mut index = [TABLE as u8; MOST];
        for (t, byte) in side.table.into_iter().enumerate() {
            for i in 0..2 * bytes {
                index[i] = if high[i] == byte { t as u8 } else { index[i] };
            }
        }
        let all = index[..2 * bytes].iter().fold(0, |all, i| all | i);
        if all & TABLE as u8 > 0 {
            side.whole.push(b);
            side.high.extend_from_slice(&high[..2 * bytes]);
        }
        let to = to.add(b * 3 * bytes);
        for i in 0..bytes {
            *to.add(i) = low[i];
            *to.add(bytes + i) = low[bytes + i];
            *to.add(2 * bytes + i) = index[i] & 15 | (index[bytes + i] << 4);
        }
    }
    side.whole.push(usize::MAX);
}
}

/// The most frequent high bytes in the steps with an even number; of equally frequent ones the smallest
/// first.
///
/// # Safety
/// `words` is valid for `k` steps of `half` words.
#[inline(always)]
unsafe fn frequent(words: *const u32, k: usize, half: usize) -> [u8; TABLE] {
    // Separate counts for each half of a word: equal bytes that follow each other would wait for one place.
    let mut counts = [[0u32; 256]; 2];
    for p in (0..k).step_by(2) {
        for i in 0..half {
            // SAFETY: the caller's promise.
            let word = unsafe { *words.add(p * half + i) };
            counts[0][(word >> 8 & 0xff) as usize] += 1;
            counts[1][(word >> 24) as usize] += 1;
        }
    }
    let count = |byte: u8| counts[0][usize::from(byte)] + counts[1][usize::from(byte)];
    let mut order: [u8; 256] = std::array::from_fn(|i| i as u8);
    order.sort_by_key(|&byte| Reverse(count(byte)));
    std::array::from_fn(|i| order[i])
}
