//! Products of 8-bit values with AVX-512 VNNI: four multiply-adds a lane and instruction.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{GROUP, GROUP_BYTES, Job, LANES, MAX, OFFSET, QUAD, inverse};
use crate::cpu::KernelSet;
use crate::gemm::{each, unroll};

/// Rows of a tile at most.
const MR: usize = 6;
/// Bytes from a read of the weights to where they are requested.
const AHEAD: usize = 4096;

/// Whether this CPU has the instructions and the kernel set may use them.
pub(super) fn available(kernels: KernelSet) -> bool {
    matches!(kernels, KernelSet::Avx512 | KernelSet::Amx) && is_x86_feature_detected!("avx512vnni")
}

/// All 16 lanes at `p`, which needs no alignment. (The plain load has a separate check in builds with debug
/// assertions.)
#[inline(always)]
unsafe fn load(p: *const f32) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_maskz_loadu_ps(!0, p) }
}

/// The 32 bits at `p` in all lanes.
#[inline(always)]
unsafe fn splat(p: *const f32) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_broadcastss_ps(_mm_load_ss(p)) }
}

/// Rounds one row in groups, as [`super::round_row`] does.
///
/// # Safety
/// [`available`] must hold; the slices must have the groups of the row.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
pub(super) unsafe fn round_row(
    row: &[f32],
    values: &mut [i8],
    start: &mut [i32],
    scales: &mut [f32],
) {
    let whole = row.len() / GROUP;
    for g in 0..whole {
        // SAFETY: the group is whole, so its 64 values and their places are in bounds.
        unsafe {
            let from = row.as_ptr().add(g * GROUP);
            let v = [
                load(from),
                load(from.add(LANES)),
                load(from.add(2 * LANES)),
                load(from.add(3 * LANES)),
            ];
            let mut largest = _mm512_setzero_si512();
            for v in v {
                largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(v)));
            }
            let largest = f32::from_bits(_mm512_reduce_max_epu32(largest));
            let by = _mm512_set1_ps(inverse(largest));
            let mut sum = _mm512_setzero_si512();
            for (i, v) in v.into_iter().enumerate() {
                // The processor starts in this mode: to nearest, ties to even.
                let q = _mm512_cvtps_epi32(_mm512_mul_ps(v, by));
                sum = _mm512_add_epi32(sum, q);
                let to = values.as_mut_ptr().add(g * GROUP + i * LANES);
                _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(q));
            }
            start[g] = -OFFSET * _mm512_reduce_add_epi32(sum);
            scales[g] = largest / MAX;
        }
    }
    let at = whole * GROUP;
    super::round_row(
        &row[at..],
        &mut values[at..],
        &mut start[whole..],
        &mut scales[whole..],
    );
}

/// Computes some panels of `c`.
///
/// # Safety
/// [`available`] must hold; `job` must describe valid memory.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
pub(super) unsafe fn compute(job: &Job, panels: Range<usize>) {
    let mut panel = panels.start;
    while panel < panels.end {
        let left = panels.end - panel;
        // Few rows hide latency behind more panels.
        let count = match job.m {
            1 | 2 if left >= 4 => 4,
            _ if left >= 2 => 2,
            _ => 1,
        };
        let tiles = job.m.div_ceil(MR);
        for t in 0..tiles {
            let (top, bottom) = (t * job.m / tiles, (t + 1) * job.m / tiles);
            // SAFETY: the same contract; rows and panels are in bounds.
            unsafe { tile_of(job, top, bottom - top, panel, count) };
        }
        panel += count;
    }
}

/// Picks the tile of the given size.
#[inline(always)]
unsafe fn tile_of(job: &Job, top: usize, rows: usize, panel: usize, count: usize) {
    macro_rules! pick {
        ($($rows:literal x $count:literal,)*) => {
            match (rows, count) {
                // SAFETY: the caller's promise.
                $(($rows, $count) => unsafe { tile::<$rows, $count>(job, top, panel) },)*
                _ => unreachable!("tiles have 1 to {MR} rows and 1, 2 or 4 panels"),
            }
        };
    }
    pick!(
        1 x 4, 2 x 4,
        1 x 2, 2 x 2, 3 x 2, 4 x 2, 5 x 2, 6 x 2,
        1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1,
    );
}

/// `ROWS` rows from `top` by `COLS` panels from `panel`.
///
/// # Safety
/// Same as for [`compute`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
unsafe fn tile<const ROWS: usize, const COLS: usize>(job: &Job, top: usize, panel: usize) {
    let groups = job.groups;
    // SAFETY: all offsets are those of rows, panels and groups of the job.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); COLS]; ROWS];
        for g in 0..groups {
            let mut dots = [[_mm512_setzero_si512(); COLS]; ROWS];
            each!(I < ROWS, {
                let start = splat(job.start.add((top + I) * groups + g).cast());
                each!(J < COLS, {
                    dots[I][J] = _mm512_castps_si512(start);
                });
            });
            let x = job.values.add((top * groups + g) * GROUP);
            let w = job.data.add((panel * groups + g) * GROUP_BYTES);
            for q in 0..GROUP / QUAD {
                let mut cols = [_mm512_setzero_si512(); COLS];
                each!(J < COLS, {
                    let w = w.add(J * groups * GROUP_BYTES + q * LANES * QUAD);
                    cols[J] = _mm512_castps_si512(load(w.cast()));
                    _mm_prefetch::<_MM_HINT_T1>(w.wrapping_add(AHEAD).cast());
                });
                each!(I < ROWS, {
                    let x = splat(x.add(I * groups * GROUP + q * QUAD).cast());
                    each!(J < COLS, {
                        dots[I][J] =
                            _mm512_dpbusd_epi32(dots[I][J], cols[J], _mm512_castps_si512(x));
                    });
                });
            }
            each!(J < COLS, {
                let scale = load(job.scales.add(((panel + J) * groups + g) * LANES));
                each!(I < ROWS, {
                    let row_scale = splat(job.row_scales.add((top + I) * groups + g));
                    let dot = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[I][J]), scale);
                    sums[I][J] = _mm512_fmadd_ps(dot, row_scale, sums[I][J]);
                });
            });
        }
        each!(I < ROWS, {
            each!(J < COLS, {
                let column = (panel + J) * LANES;
                let c = job.c.add((top + I) * job.ldc + column);
                let lanes = LANES.min(job.n - column);
                let mask = ((1u32 << lanes) - 1) as __mmask16;
                let mut sum = sums[I][J];
                if job.accumulate {
                    sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, c), sum);
                }
                _mm512_mask_storeu_ps(c, mask, sum);
            });
        });
    }
}
