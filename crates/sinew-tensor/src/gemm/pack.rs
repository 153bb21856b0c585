//! Packing: operands in the order in which the tiles read them.

use crate::simd::simd_fn;

/// Steps that are packed panel after panel before the next steps follow, so that a row of the
/// source is read in one go where it runs across the panels.
const STEPS: usize = 128;

/// Rows of `a` (or columns of `b`) `0..len` split into panels of nearly equal size: `len % count`
/// panels of one more than the others. Equal sizes keep the tiles of short matrices large.
#[derive(Debug, Clone, Copy)]
pub(super) struct Panels {
    len: usize,
    pub(super) count: usize,
}

impl Panels {
    /// The fewest panels of at most `max`.
    pub(super) fn new(len: usize, max: usize) -> Self {
        Self {
            len,
            count: len.div_ceil(max),
        }
    }

    /// Start of panel `i <= count`; the start of panel `count` is the end.
    pub(super) fn start(&self, i: usize) -> usize {
        if self.count == 0 {
            return 0;
        }
        let (each, more) = (self.len / self.count, self.len % self.count);
        i * each + i.min(more)
    }
}

simd_fn! {
/// Packs panels of `width` rows: `dst[(r / width) * depth * width + p * width + r % width] = src(r, p)`
/// for `r` in `0..rows`, `p` in `0..depth`; the rows that the last panel lacks become 0.
pub(super) fn pack_even<V>(
    src: *const f32, row_stride: usize, col_stride: usize, rows: usize, depth: usize, width: usize, dst: *mut f32,
) {
    let mut p = 0;
    while p < depth {
        let steps = STEPS.min(depth - p);
        let mut r = 0;
        while r < rows {
            let from = src.add(r * row_stride + p * col_stride);
            panel::<V>(from, row_stride, col_stride, width.min(rows - r), steps, width, dst.add(r * depth + p * width));
            r += width;
        }
        p += steps;
    }
}
}

simd_fn! {
/// Packs panels of nearly equal size, `first..last` of `panels`; panel `i` goes to
/// `dst + start(i) * depth`. `src` and `dst` are those of panel 0.
pub(super) fn pack_balanced<V>(
    src: *const f32, row_stride: usize, col_stride: usize, panels: Panels, first: usize, last: usize, depth: usize, dst: *mut f32,
) {
    let mut p = 0;
    while p < depth {
        let steps = STEPS.min(depth - p);
        for i in first..last {
            let start = panels.start(i);
            let rows = panels.start(i + 1) - start;
            let from = src.add(start * row_stride + p * col_stride);
            panel::<V>(from, row_stride, col_stride, rows, steps, rows, dst.add(start * depth + p * rows));
        }
        p += steps;
    }
}
}

/// `dst[p * width + r] = src[r * row_stride + p * col_stride]`, 0 for `r` in `rows..width`.
#[inline(always)]
unsafe fn panel<V: crate::simd::Vector>(
    src: *const f32,
    row_stride: usize,
    col_stride: usize,
    rows: usize,
    depth: usize,
    width: usize,
    dst: *mut f32,
) {
    // SAFETY: the callers pass memory that covers the panel.
    unsafe {
        let mut p = 0;
        if col_stride == 1 {
            while p + V::LANES <= depth {
                let mut r = 0;
                while r < rows {
                    let from = src.add(r * row_stride + p);
                    V::transpose(
                        from,
                        row_stride,
                        (rows - r).min(V::LANES),
                        dst.add(p * width + r),
                        width,
                    );
                    r += V::LANES;
                }
                p += V::LANES;
            }
        } else if row_stride == 1 {
            while p < depth {
                let mut r = 0;
                while r < rows {
                    let v = V::load_upto(src.add(p * col_stride + r), rows - r);
                    v.store_upto(dst.add(p * width + r), rows - r);
                    r += V::LANES;
                }
                p += 1;
            }
        }
        while p < depth {
            for r in 0..rows {
                *dst.add(p * width + r) = *src.add(r * row_stride + p * col_stride);
            }
            p += 1;
        }
        if rows < width {
            for p in 0..depth {
                for r in rows..width {
                    *dst.add(p * width + r) = 0.0;
                }
            }
        }
    }
}
