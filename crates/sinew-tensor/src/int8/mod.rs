//! Matrix products with weights of 8 bits, for generation, where reading the weights takes the time.
//!
//! # Numerics
//! Weights and rows of `x` are cut into groups of [`GROUP`] contracted values; each group of a weight row and
//! of an input row has a separate scale, `max |v| / 127`, and its values are rounded to integers (the 8-bit
//! blocks of Dettmers et al. 2022, arXiv 2110.02861, on both operands). Products of a group are added up
//! exactly, as integers; groups are joined in `f32`, in ascending order:
//! `y = Σ_g fma(Σ_i xq·wq · scale_w, scale_x, ·)`. So a row has the same bits in any batch, on any number of
//! threads and with every kernel, but it is an approximation of the `f32` product: a policy with such weights
//! differs from the trained one.

#[cfg(target_arch = "x86_64")]
mod vnni;

use std::cell::RefCell;

use crate::buffer::{Buffer, Part};
use crate::cpu::Cpu;
use crate::matrix::{Mat, MatMut};

/// Contracted values that share a scale.
pub const GROUP: usize = 64;
/// Output features of a panel: the 32-bit lanes of a 512-bit register.
const LANES: usize = 16;
/// Values that one instruction adds up in a lane.
const QUAD: usize = 4;
/// Bytes of a group of a panel.
const GROUP_BYTES: usize = GROUP * LANES;
/// Largest magnitude of a rounded value.
const MAX: f32 = 127.0;
/// Added to rounded weights, which makes them unsigned as the instruction wants one operand.
const OFFSET: i32 = 128;
/// Bytes of weights that a task reads at least, some 10 us.
const TASK_BYTES: usize = 64 << 10;
/// Tasks for each thread, so that a thread that gets less CPU time takes fewer.
const TASKS_PER_THREAD: usize = 6;
/// Values that a rounding task has at least.
const ROUND_GRAIN: usize = 16 << 10;

thread_local! {
    /// The rounded rows of the product that this thread runs.
    static ROUNDED: RefCell<Rounded> = const { RefCell::new(Rounded::new()) };
}

/// Weights `[n, k]` of 8 bits for `x · wᵀ`, in panels of 16 rows: for each group of a panel the quads of all
/// rows in turn, then the next quads. Padding is 0.
#[derive(Debug, Clone)]
pub struct PackedInt8 {
    n: usize,
    k: usize,
    groups: usize,
    /// `[panels, groups, GROUP / 4, 16, 4]` bytes, each a rounded weight plus 128.
    data: Buffer,
    /// `[panels, groups, 16]`
    scales: Buffer,
}

/// Rows of `x`, rounded.
#[derive(Debug)]
struct Rounded {
    /// `[m, groups * GROUP]`
    values: Vec<i8>,
    /// `[m, groups]`: what the offset of the weights adds to a group's sum, negated.
    start: Vec<i32>,
    /// `[m, groups]`
    scales: Vec<f32>,
}

impl Rounded {
    const fn new() -> Self {
        Self {
            values: Vec::new(),
            start: Vec::new(),
            scales: Vec::new(),
        }
    }
}

/// Input of a kernel for some panels.
#[derive(Clone, Copy)]
struct Job {
    /// Rounded rows, see [`Rounded`].
    values: *const i8,
    start: *const i32,
    row_scales: *const f32,
    m: usize,
    groups: usize,
    /// Weights, see [`PackedInt8`].
    data: *const u8,
    scales: *const f32,
    n: usize,
    /// `[m, n]` with `ldc` values a row.
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
}
// SAFETY: the pointers are read-only operands, and `c`, of which tasks touch disjoint columns.
unsafe impl Sync for Job {}

/// Rounds one group of values; its scale and the sum of the rounded values. A value that is not finite makes
/// the scale not finite, which the product passes on.
fn round_group(values: &[f32], mut put: impl FnMut(usize, i8)) -> (f32, i32) {
    // Magnitudes compare as their bits do, with NaN above all.
    let bits = values.iter().map(|v| v.abs().to_bits()).max();
    let largest = f32::from_bits(bits.unwrap_or(0));
    let inverse = inverse(largest);
    let mut sum = 0;
    for (i, v) in values.iter().enumerate() {
        let q = (v * inverse).round_ties_even() as i8;
        sum += i32::from(q);
        put(i, q);
    }
    (largest / MAX, sum)
}

/// Factor of values before they are rounded: 0 if the quotient would not be finite.
fn inverse(largest: f32) -> f32 {
    let inverse = MAX / largest;
    if inverse.is_finite() { inverse } else { 0.0 }
}

impl PackedInt8 {
    /// Rounds and packs row-major `w` `[n, k]`.
    #[must_use]
    pub fn pack(dev: &Cpu, w: &[f32], n: usize, k: usize) -> Self {
        let (panels, groups) = (n.div_ceil(LANES), k.div_ceil(GROUP));
        let mut packed = Self {
            n,
            k,
            groups,
            data: Buffer::zeros(panels * groups * GROUP_BYTES / 4),
            scales: Buffer::zeros(panels * groups * LANES),
        };
        packed.repack(dev, w);
        packed
    }

    /// Replaces the weights by row-major `w` of the same shape, without allocating.
    pub fn repack(&mut self, dev: &Cpu, w: &[f32]) {
        let (n, k, groups) = (self.n, self.k, self.groups);
        assert_eq!(w.len(), n * k, "weights [{n}, {k}]");
        let data = Part(self.data.as_mut_ptr().cast::<u8>());
        let scales = Part(self.scales.as_mut_ptr());
        dev.pool().parallel_for(n.div_ceil(LANES), &|panel| {
            let bytes = groups * GROUP_BYTES;
            // SAFETY: both buffers have space for all panels, and this one is only this task's.
            let (data, scales) = unsafe {
                (
                    std::slice::from_raw_parts_mut(data.at(panel * bytes), bytes),
                    std::slice::from_raw_parts_mut(
                        scales.at(panel * groups * LANES),
                        groups * LANES,
                    ),
                )
            };
            data.fill(OFFSET as u8);
            for lane in 0..LANES.min(n - panel * LANES) {
                let row = (panel * LANES + lane) * k;
                for (g, values) in w[row..row + k].chunks(GROUP).enumerate() {
                    let (scale, _) = round_group(values, |i, q| {
                        let quad = g * GROUP / QUAD + i / QUAD;
                        let at = (quad * LANES + lane) * QUAD + i % QUAD;
                        data[at] = (i32::from(q) + OFFSET) as u8;
                    });
                    scales[g * LANES + lane] = scale;
                }
            }
        });
    }

    /// Memory it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        4 * (self.data.len() + self.scales.len())
    }
}

impl Cpu {
    /// Whether [`Cpu::matmul_int8`] runs on instructions made for it. It gives the same bits where not,
    /// but slower than `f32`.
    #[must_use]
    pub fn has_fast_int8(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return vnni::available(self.kernels());
        #[cfg(not(target_arch = "x86_64"))]
        return false;
    }

    /// `y (+)= x · wᵀ` with `x` `[m, k]`, `w` `[n, k]`, `y` `[m, n]`, both operands rounded to 8 bits.
    pub fn matmul_int8(&self, x: Mat<'_>, w: &PackedInt8, y: MatMut<'_>, accumulate: bool) {
        assert_eq!(
            (x.rows(), x.cols(), y.cols()),
            (y.rows(), w.k, w.n),
            "rows and columns of x and y, weights [n, k]"
        );
        assert_eq!(x.col_stride(), 1, "column stride of x");
        if x.rows() == 0 || w.n == 0 {
            return;
        }
        ROUNDED.with_borrow_mut(|rounded| {
            self.round_rows(x, w.groups, rounded);
            let job = Job {
                values: rounded.values.as_ptr(),
                start: rounded.start.as_ptr(),
                row_scales: rounded.scales.as_ptr(),
                m: x.rows(),
                groups: w.groups,
                data: w.data.as_ptr().cast(),
                scales: w.scales.as_ptr(),
                n: w.n,
                c: y.as_ptr(),
                ldc: y.row_stride(),
                accumulate,
            };
            self.run_int8(&job);
        });
    }

    fn run_int8(&self, job: &Job) {
        let panels = job.n.div_ceil(LANES);
        let bytes = panels * job.groups * GROUP_BYTES * job.m.div_ceil(8);
        let tasks = (bytes / TASK_BYTES)
            .clamp(1, self.threads() * TASKS_PER_THREAD)
            .min(panels);
        let fast = self.has_fast_int8();
        // Whole pairs of panels, which is what the kernels take at once.
        let pairs = panels.div_ceil(2);
        self.pool().parallel_for(tasks, &|task| {
            let cut = |i: usize| (2 * (i * pairs / tasks)).min(panels);
            let range = cut(task)..cut(task + 1);
            #[cfg(target_arch = "x86_64")]
            if fast {
                // SAFETY: `job` describes the operands of checked shapes, the CPU has the
                // instructions, and tasks have disjoint panels.
                return unsafe { vnni::compute(job, range) };
            }
            let _ = fast;
            // SAFETY: as before.
            unsafe { compute(job, range) };
        });
    }

    /// Rounds all rows of `x`.
    fn round_rows(&self, x: Mat<'_>, groups: usize, out: &mut Rounded) {
        let (m, k, padded) = (x.rows(), x.cols(), groups * GROUP);
        out.values.clear();
        out.values.resize(m * padded, 0);
        out.start.clear();
        out.start.resize(m * groups, 0);
        out.scales.clear();
        out.scales.resize(m * groups, 0.0);
        let (values, start) = (Part(out.values.as_mut_ptr()), Part(out.start.as_mut_ptr()));
        let scales = Part(out.scales.as_mut_ptr());
        let fast = self.has_fast_int8();
        let grain = (ROUND_GRAIN / k.max(1)).max(1);
        self.pool().parallel_ranges(m, grain, &|rows| {
            for i in rows {
                // SAFETY: row `i` is in bounds of `x` and of the three vectors, and only this task's.
                unsafe {
                    let row = std::slice::from_raw_parts(x.as_ptr().add(i * x.row_stride()), k);
                    let values = std::slice::from_raw_parts_mut(values.at(i * padded), padded);
                    let start = std::slice::from_raw_parts_mut(start.at(i * groups), groups);
                    let scales = std::slice::from_raw_parts_mut(scales.at(i * groups), groups);
                    #[cfg(target_arch = "x86_64")]
                    if fast {
                        vnni::round_row(row, values, start, scales);
                        continue;
                    }
                    let _ = fast;
                    round_row(row, values, start, scales);
                }
            }
        });
    }
}

fn round_row(row: &[f32], values: &mut [i8], start: &mut [i32], scales: &mut [f32]) {
    for (g, group) in row.chunks(GROUP).enumerate() {
        let (scale, sum) = round_group(group, |i, q| values[g * GROUP + i] = q);
        start[g] = -OFFSET * sum;
        scales[g] = scale;
    }
}

/// Computes some panels of `c` with plain integers.
///
/// # Safety
/// `job` must describe valid memory.
unsafe fn compute(job: &Job, panels: std::ops::Range<usize>) {
    let groups = job.groups;
    for panel in panels {
        let lanes = LANES.min(job.n - panel * LANES);
        for i in 0..job.m {
            let mut sums = [0.0f32; LANES];
            for g in 0..groups {
                // SAFETY: row, panel and group are in bounds.
                let (x, w, scales, start, row_scale) = unsafe {
                    let at = panel * groups + g;
                    (
                        std::slice::from_raw_parts(job.values.add((i * groups + g) * GROUP), GROUP),
                        std::slice::from_raw_parts(job.data.add(at * GROUP_BYTES), GROUP_BYTES),
                        std::slice::from_raw_parts(job.scales.add(at * LANES), LANES),
                        *job.start.add(i * groups + g),
                        *job.row_scales.add(i * groups + g),
                    )
                };
                let mut dots = [start; LANES];
                for (quad, x) in w.chunks_exact(LANES * QUAD).zip(x.chunks_exact(QUAD)) {
                    for (dot, w) in dots.iter_mut().zip(quad.chunks_exact(QUAD)) {
                        for (&w, &x) in w.iter().zip(x) {
                            *dot += i32::from(w) * i32::from(x);
                        }
                    }
                }
                for lane in 0..LANES {
                    let dot = dots[lane] as f32 * scales[lane];
                    sums[lane] = dot.mul_add(row_scale, sums[lane]);
                }
            }
            for (lane, sum) in sums.into_iter().enumerate().take(lanes) {
                // SAFETY: row and column are in bounds, and only this task's.
                unsafe {
                    let c = job.c.add(i * job.ldc + panel * LANES + lane);
                    *c = if job.accumulate { *c + sum } else { sum };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
