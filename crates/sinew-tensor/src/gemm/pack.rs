//! Packing: copies operands into the order in which the tiles read them, so that a tile reads
//! memory in one stream.

use std::ops::Range;

use crate::simd::{Vector, simd_fn};

/// Steps between a read of the source and the request for its cache lines. Rows of the source are
/// short and far apart, which hardware prefetchers do not follow.
const AHEAD: usize = 12;

/// Number of steps that one panel packs before the next one does. The source lines of these steps stay in L1
/// for the neighbouring panels.
const STRIP: usize = 16;

/// Rows of `a` (or columns of `b`) `0..len` split into panels of nearly equal size: `len % count`
/// panels of one more than the others. Equal sizes keep the tiles of short matrices large.
#[derive(Debug, Clone, Copy)]
pub(super) struct Panels {
    pub(super) count: usize,
    /// Rows of a small panel; the first `more` have one row more.
    each: usize,
    more: usize,
}

impl Panels {
    /// The fewest panels of at most `max` rows, for `len > 0` rows.
    pub(super) fn new(len: usize, max: usize) -> Self {
        let count = len.div_ceil(max);
        Self {
            count,
            each: len / count,
            more: len % count,
        }
    }

    /// Start of panel `i <= count`; the start of panel `count` is the end.
    #[inline(always)]
    pub(super) fn start(&self, i: usize) -> usize {
        i * self.each + i.min(self.more)
    }
}

simd_fn! {
/// Packs panels of `width` rows: `dst[(r / width) * depth * width + p * width + r % width] = src(r, p)`
/// for `r` in `0..rows`, `p` in `0..depth`; the rows that the last panel lacks become 0.
pub(super) fn pack_even<V>(
    src: *const f32,
    row_stride: usize,
    col_stride: usize,
    rows: usize,
    depth: usize,
    width: usize,
    dst: *mut f32,
) {
    let full = rows / width;
    if row_stride == 1 && col_stride != 1 {
        for p in 0..depth {
            ask::<V>(src.wrapping_add((p + AHEAD) * col_stride), full * width);
            for i in 0..full {
                let from = src.add(i * width + p * col_stride);
                copy::<V>(from, width, dst.add((i * depth + p) * width));
            }
        }
    } else {
        for i in 0..full {
            let from = src.add(i * width * row_stride);
            panel::<V>(from, row_stride, col_stride, width, depth, width, dst.add(i * depth * width));
        }
    }
    if full * width < rows {
        let from = src.add(full * width * row_stride);
        let (rows, to) = (rows - full * width, dst.add(full * depth * width));
        panel::<V>(from, row_stride, col_stride, rows, depth, width, to);
    }
}
}

simd_fn! {
/// [`pack_panels`] for a whole thread.
pub(super) fn pack_balanced<V>(
    src: *const f32,
    row_stride: usize,
    col_stride: usize,
    panels: Panels,
    range: Range<usize>,
    depth: usize,
    dst: *mut f32,
) {
    let src = src.add(panels.start(range.start) * row_stride);
    pack_panels::<V>(src, row_stride, col_stride, panels, range, depth, dst);
}
}

/// Packs panels of nearly equal size, `range` of `panels`, one after the other. `src` and `dst` are
/// those of the first panel.
///
/// # Safety
/// Same as for [`Vector`]; `src` and `dst` must cover the panels.
#[inline(always)]
pub(super) unsafe fn pack_panels<V: Vector>(
    src: *const f32,
    row_stride: usize,
    col_stride: usize,
    panels: Panels,
    range: Range<usize>,
    depth: usize,
    dst: *mut f32,
) {
    let top = panels.start(range.start);
    // SAFETY: the caller's promise.
    unsafe {
        if row_stride == 1 && col_stride != 1 {
            let strips = (0..depth).step_by(STRIP);
            for steps in strips.map(|p| p..depth.min(p + STRIP)) {
                for i in range.clone() {
                    let from = src.wrapping_add(panels.start(i) - top);
                    let to = dst.add((panels.start(i) - top) * depth);
                    strip::<V>(from, col_stride, panels, i, depth, steps.clone(), to);
                }
            }
        } else {
            for i in range {
                let start = panels.start(i);
                let rows = panels.start(i + 1) - start;
                let from = src.add((start - top) * row_stride);
                panel::<V>(
                    from,
                    row_stride,
                    col_stride,
                    rows,
                    depth,
                    rows,
                    dst.add((start - top) * depth),
                );
            }
        }
    }
}

/// `steps` of panel `i`, of which `src` and `dst` are the first values; `src` has a step's rows side by side.
#[inline(always)]
unsafe fn strip<V: Vector>(
    src: *const f32,
    col_stride: usize,
    panels: Panels,
    i: usize,
    depth: usize,
    steps: Range<usize>,
    dst: *mut f32,
) {
    let (start, rows) = (panels.start(i), panels.start(i + 1) - panels.start(i));
    // A whole vector can be read where there are so many rows, and written where the values after it are
    // written later.
    let readable = rows <= V::LANES && start + V::LANES <= panels.start(panels.count);
    let last = if readable {
        (depth + 1).saturating_sub(V::LANES.div_ceil(rows))
    } else {
        0
    };
    let whole = last.clamp(steps.start, steps.end);
    // SAFETY: the caller's promise, and the above.
    unsafe {
        for p in steps.start..whole {
            let from = src.wrapping_add(p * col_stride);
            V::prefetch(from.wrapping_add(STRIP * col_stride));
            V::load(from).store(dst.add(p * rows));
        }
        for p in whole..steps.end {
            copy::<V>(src.add(p * col_stride), rows, dst.add(p * rows));
        }
    }
}

/// Asks for the cache lines of `len` values.
#[inline(always)]
unsafe fn ask<V: Vector>(src: *const f32, len: usize) {
    let mut r = 0;
    while r < len {
        // SAFETY: as for `Vector`.
        unsafe { V::prefetch(src.wrapping_add(r)) };
        r += 16;
    }
}

#[inline(always)]
unsafe fn copy<V: Vector>(src: *const f32, len: usize, dst: *mut f32) {
    let mut r = 0;
    while r < len {
        // SAFETY: both are valid for `len` values.
        unsafe { V::load_upto(src.add(r), len - r).store_upto(dst.add(r), len - r) };
        r += V::LANES;
    }
}

/// `dst[p * width + r] = src[r * row_stride + p * col_stride]`, 0 for `r` in `rows..width`.
#[inline(always)]
unsafe fn panel<V: Vector>(
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
                    for i in r..rows.min(r + V::LANES) {
                        V::prefetch(src.wrapping_add(i * row_stride + p + 4 * 16));
                    }
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
                copy::<V>(src.add(p * col_stride), rows, dst.add(p * width));
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
