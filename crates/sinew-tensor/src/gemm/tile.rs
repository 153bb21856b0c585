//! The innermost kernel: one tile of `c` in registers.

use super::block::{BLOCK, Side};
#[cfg(target_arch = "aarch64")]
use crate::simd::Neon8;
#[cfg(target_arch = "x86_64")]
use crate::simd::{F32x8, F32x16};
use crate::simd::{Lanes8, Vector};

/// Steps in one turn of the innermost loop.
pub(super) const UNROLL: usize = 4;

/// Operands of a tile `c[rows, cols] (+)= a · b` over `depth` steps.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    /// Packed rows of the left matrix: for each of `depth` steps, one value of every row of the tile.
    pub a: *const f32,
    /// Packed columns: `depth` times the [`Tile::NR`] values of one step; or blocks of 12 bits a value (see
    /// [`split`](super::split)).
    pub b: *const f32,
    /// Words from one panel of `b` to the next.
    pub b_stride: usize,
    /// Top left of the tile, row-major with `ldc` values a row.
    pub c: *mut f32,
    /// Values from one row of `c` to the next.
    pub ldc: usize,
    /// Columns of `c` in the (last) panel, at most those of a panel.
    pub cols: usize,
    /// Steps of the contracted index.
    pub depth: usize,
    /// Whether the sum starts from `c`, not from 0.
    pub load_c: bool,
    /// The place in `c` of the next tile.
    pub next_c: *const f32,
    /// The part of `b` for later tiles that this one brings to L2.
    pub ahead: *const f32,
    /// Bytes from one cache line asked for, every [`UNROLL`] steps, to the next.
    pub ahead_step: usize,
    /// Lines asked for at each.
    pub ahead_lines: usize,
    /// Sides of the panels of `b`, if that has 12 bits a value.
    pub sides: *const Side,
    /// First block of those values.
    pub first_block: usize,
}

/// Register tiles of a kernel set.
///
/// Every element of `c` is one chain `c = fma(a[p], b[p], c)` over ascending `p`, whatever the tile's
/// size and place, so its value depends neither on the blocking nor on the other rows.
///
/// A step of `R` rows and `V` vectors loads `R + V` times for `R V` multiply-adds. Ice Lake servers were
/// measured to load little more than once a cycle while they multiply and add twice, so that 9 x 3 (12 loads
/// for 27) runs at the speed of the multiply-adds where 14 x 2 (16 for 28) reaches nine tenths of it.
pub(super) trait Tile: Vector {
    /// Maximum rows of a tile.
    const MR: usize;
    /// Columns of a tile.
    const NR: usize;
    /// Rows at most that take values of 12 bits apart in registers, and the columns of their panels: an even
    /// number of vectors, which those halves of words fill.
    const SPLIT_MR: usize;
    const SPLIT_NR: usize;
    /// Panels of [`Tile::SPLIT_NR`] columns that make up whole panels of [`Tile::NR`].
    const GROUP: usize;

    /// Computes a tile of at least one row and at most [`Tile::MR`].
    ///
    /// # Safety
    /// Same as for [`Vector`]; `x` must describe valid memory.
    unsafe fn tile(rows: usize, x: &Operands);

    /// Computes several full panels for few rows at once, which hides the latency of the
    /// chains and keeps several streams of `b` in flight. Returns how many it did, maybe 0.
    ///
    /// # Safety
    /// Same as for [`Tile::tile`].
    unsafe fn wide(rows: usize, panels: usize, x: &Operands) -> usize;

    /// Computes, for at least one row and at most [`Tile::SPLIT_MR`], one panel of 12 bits a value or several
    /// full ones of `panels`. Returns how many.
    ///
    /// # Safety
    /// Same as for [`Tile::tile`].
    unsafe fn split(rows: usize, panels: usize, x: &Operands) -> usize;
}

/// Runs a block for each constant index below a limit. Loops over the accumulators must be gone
/// before the optimizer decides what lives in registers; it does not unroll loops of this size by then.
macro_rules! unroll {
    ($index:ident < $limit:expr, [$($value:literal)*], $body:block) => {
        $(if $value < $limit {
            const $index: usize = $value;
            $body
        })*
    };
}

/// [`unroll`] for the rows or the vectors of a tile, of which the largest has nine.
macro_rules! each {
    ($index:ident < $limit:expr, $body:block) => {
        unroll!($index < $limit, [0 1 2 3 4 5 6 7 8], $body)
    };
}

#[cfg(target_arch = "x86_64")]
pub(crate) use each;
pub(crate) use unroll;

/// Sets the accumulators to the old values of the tile.
#[inline(always)]
unsafe fn load_sums<V: Vector, const ROWS: usize, const COLS: usize>(
    acc: &mut [[V; COLS]; ROWS],
    x: &Operands,
    full: bool,
) {
    // SAFETY: by the contract of `Tile::tile`.
    unsafe {
        if full {
            each!(I < ROWS, {
                each!(J < COLS, {
                    acc[I][J] = V::load(x.c.add(I * x.ldc + J * V::LANES));
                });
            });
        } else {
            each!(I < ROWS, {
                each!(J < COLS, {
                    if x.cols > J * V::LANES {
                        let c = x.c.add(I * x.ldc + J * V::LANES);
                        acc[I][J] = V::load_upto(c, x.cols - J * V::LANES);
                    }
                });
            });
        }
    }
}

/// [`load_sums`] the other way.
#[inline(always)]
unsafe fn store_sums<V: Vector, const ROWS: usize, const COLS: usize>(
    acc: &[[V; COLS]; ROWS],
    x: &Operands,
    full: bool,
) {
    // SAFETY: by the contract of `Tile::tile`.
    unsafe {
        if full {
            each!(I < ROWS, {
                each!(J < COLS, {
                    acc[I][J].store(x.c.add(I * x.ldc + J * V::LANES));
                });
            });
        } else {
            each!(I < ROWS, {
                each!(J < COLS, {
                    if x.cols > J * V::LANES {
                        let c = x.c.add(I * x.ldc + J * V::LANES);
                        acc[I][J].store_upto(c, x.cols - J * V::LANES);
                    }
                });
            });
        }
    }
}

/// `ROWS x COLS` vectors, `COLS / NV` panels of `NV` vectors.
#[inline(always)]
unsafe fn tile<V: Vector, const ROWS: usize, const NV: usize, const COLS: usize>(x: &Operands) {
    // SAFETY: by the contract of `Tile::tile`.
    unsafe {
        let nr = NV * V::LANES;
        let full = x.cols == nr;
        let mut acc = [[V::splat(0.0); COLS]; ROWS];
        if x.load_c {
            load_sums::<V, ROWS, COLS>(&mut acc, x, full);
        }
        let (mut a, mut b, mut ahead) = (x.a, x.b, x.ahead);
        macro_rules! step {
            () => {
                let mut cols = [V::splat(0.0); COLS];
                each!(J < COLS, {
                    let panel = b.add(J / NV * x.b_stride);
                    cols[J] = V::load(panel.add(J % NV * V::LANES));
                });
                each!(I < ROWS, {
                    let a = V::broadcast(a.add(I));
                    each!(J < COLS, {
                        acc[I][J] = a.fma(cols[J], acc[I][J]);
                    });
                });
                a = a.add(ROWS);
                b = b.add(nr);
            };
        }
        let mut next_c = x.next_c;
        for turn in 0..x.depth / UNROLL {
            // A row of the next tile each turn: all at once would take every line fill buffer, and the
            // operands would wait.
            each!(J < NV, {
                V::prefetch(next_c.wrapping_add(J * V::LANES));
            });
            next_c = next_c.wrapping_add(if turn < ROWS { x.ldc } else { 0 });
            // Several panels are several streams, which the hardware reads ahead well on its own.
            if COLS == NV {
                for line in 0..x.ahead_lines {
                    V::prefetch_l2(ahead.wrapping_add(line * 16));
                }
                ahead = ahead.wrapping_byte_add(x.ahead_step);
            }
            step!();
            step!();
            step!();
            step!();
        }
        for _ in 0..x.depth % UNROLL {
            step!();
        }
        store_sums::<V, ROWS, COLS>(&acc, x, full);
    }
}

/// [`tile`] for `b` of 12 bits a value.
#[inline(always)]
unsafe fn split_tile<
    V: Vector,
    const ROWS: usize,
    const NV: usize,
    const COLS: usize,
    const PANELS: usize,
>(
    x: &Operands,
) {
    // SAFETY: by the contract of `Tile::split`.
    unsafe {
        let nr = NV * V::LANES;
        let full = x.cols == nr;
        let mut acc = [[V::splat(0.0); COLS]; ROWS];
        if x.load_c {
            load_sums::<V, ROWS, COLS>(&mut acc, x, full);
        }
        let (mut a, mut b, mut ahead) = (x.a, x.b, x.ahead);
        let sides: [&Side; PANELS] = std::array::from_fn(|i| &*x.sides.add(i));
        let mut highs = sides.map(|side| side.from(x.first_block));
        let mut tables = [V::splat(0.0); PANELS];
        each!(P < PANELS, {
            tables[P] = sides[P].table();
        });
        for block in 0..x.depth.div_ceil(BLOCK) {
            let steps = x.depth - block * BLOCK;
            let mut words = [[V::splat(0.0); BLOCK]; PANELS];
            each!(P < PANELS, {
                let from = b.add(P * x.b_stride).cast();
                let high = highs[P].next(x.first_block + block, from, tables[P], nr);
                words[P] = V::join(from, high);
            });
            for line in 0..x.ahead_lines {
                V::prefetch_l2(ahead.wrapping_add(line * 16));
            }
            ahead = ahead.wrapping_byte_add(x.ahead_step);
            unroll!(S < BLOCK, [0 1 2 3], {
                if S < steps {
                    let mut cols = [V::splat(0.0); COLS];
                    each!(J < COLS, {
                        cols[J] = words[J / NV][S].half(J % NV);
                    });
                    each!(I < ROWS, {
                        let a = V::broadcast(a.add(I));
                        each!(J < COLS, {
                            acc[I][J] = a.fma(cols[J], acc[I][J]);
                        });
                    });
                    a = a.add(ROWS);
                }
            });
            b = b.add(3 * nr / 2);
        }
        store_sums::<V, ROWS, COLS>(&acc, x, full);
    }
}

/// Sizes are rows by vectors, `wide` lists the panels done at once for few rows.
macro_rules! tiles {
    ($vector:ty,
     $mr:literal x $nv:literal, rows [$($rows:literal)*], wide [$($few:literal => $panels:literal,)*],
     split $split_mr:literal x $split_nv:literal, group $group:literal, rows [$($split_rows:literal)*],
     wide [$($split_few:literal => $split_panels:literal,)*]) => {
        impl Tile for $vector {
            const MR: usize = $mr;
            const NR: usize = $nv * <$vector as Vector>::LANES;
            const SPLIT_MR: usize = $split_mr;
            const SPLIT_NR: usize = $split_nv * <$vector as Vector>::LANES;
            const GROUP: usize = $group;

            #[inline(always)]
            unsafe fn tile(rows: usize, x: &Operands) {
                // SAFETY: the same contract.
                unsafe {
                    match rows {
                        $($rows => tile::<Self, $rows, $nv, $nv>(x),)*
                        _ => unreachable!("a tile has at least one row and few"),
                    }
                }
            }

            #[inline(always)]
            unsafe fn wide(rows: usize, panels: usize, x: &Operands) -> usize {
                match rows {
                    $($few if panels >= $panels => {
                        // SAFETY: the same contract.
                        unsafe { tile::<Self, $few, $nv, { $nv * $panels }>(x) };
                        $panels
                    })*
                    _ => 0,
                }
            }

            #[inline(always)]
            unsafe fn split(rows: usize, panels: usize, x: &Operands) -> usize {
                // SAFETY: the same contract.
                unsafe {
                    match rows {
                        $($split_few if panels >= $split_panels => {
                            const COLS: usize = $split_nv * $split_panels;
                            split_tile::<Self, $split_few, $split_nv, COLS, $split_panels>(x);
                            return $split_panels;
                        })*
                        $($split_rows => split_tile::<Self, $split_rows, $split_nv, $split_nv, 1>(x),)*
                        _ => unreachable!("a tile has at least one row and few"),
                    }
                    1
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
tiles!(F32x16,
    9 x 3, rows [1 2 3 4 5 6 7 8 9], wide [1 => 3, 1 => 2, 2 => 2, 3 => 2,],
    split 8 x 2, group 3, rows [1 2 3 4 5 6 7 8], wide [1 => 4, 1 => 3, 1 => 2, 2 => 2, 3 => 2,]);
#[cfg(target_arch = "x86_64")]
tiles!(F32x8,
    6 x 2, rows [1 2 3 4 5 6], wide [1 => 4, 1 => 3, 1 => 2, 2 => 2,],
    split 4 x 2, group 1, rows [1 2 3 4], wide [1 => 2,]);
// The sums take 24 of 32 registers with four lanes, a step of `b` four.
#[cfg(target_arch = "aarch64")]
tiles!(Neon8,
    6 x 2, rows [1 2 3 4 5 6], wide [1 => 3, 1 => 2, 2 => 2,],
    split 4 x 1, group 2, rows [1 2 3 4], wide [1 => 4, 1 => 3, 1 => 2, 2 => 2,]);
tiles!(Lanes8,
    4 x 1, rows [1 2 3 4], wide [1 => 2,],
    split 4 x 1, group 1, rows [1 2 3 4], wide [1 => 2,]);
