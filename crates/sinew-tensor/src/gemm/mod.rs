//! Matrix products: one blocked algorithm over the register tiles of each kernel set.
//!
//! After Goto & van de Geijn 2008 (doi 10.1145/1356052.1356053) and Van Zee & van de Geijn 2015 (BLIS,
//! doi 10.1145/2764454): operands are packed into panels that the tiles read in order; blocks of `a` stay in
//! the second-level cache while panels of `b` stream past.
//!
//! # Numerics
//! Every element of the result is one chain of fused multiply-adds in ascending order of the
//! contracted index, started from 0 or, when accumulating, from the old value. So it does not depend on
//! threads, blocking, packing or the other rows and columns of the call: a row gives the same bits
//! alone and in any batch, and AVX2 gives the same bits as AVX-512. (Portable kernels round products
//! where the target has no fused instruction.)

mod pack;
mod tile;

use std::cell::RefCell;
use std::ops::Range;

use crate::buffer::{Buffer, Scratch};
use crate::device::{Device, KernelSet};
use crate::matrix::{Mat, MatMut};
use crate::simd::{Lanes8, simd_fn};
use pack::{Panels, pack_balanced, pack_even};
use tile::{Operands, Tile};

/// Steps of the contracted index that a block covers: a block of `a` with them stays in L2.
const DEPTH_BLOCK: usize = 384;
/// Values of a block of `a` (576 KiB): about half of the smallest L2 we care for, 1.25 MiB.
const A_BLOCK: usize = 144 << 10;
/// Values of packed operands at most (16 MiB each for `a` and `b`), which bounds scratch.
const PACK_LIMIT: usize = 4 << 20;
/// Contracted steps per pass when an operand exceeds [`PACK_LIMIT`].
const PASS_DEPTH: usize = 2048;
/// Multiply-adds that a task has at least, some 10 us.
const TASK_WORK: usize = 1 << 19;
/// Values a packing task has at least.
const PACK_GRAIN: usize = 32 << 10;
/// Tasks for each thread, so that a thread that gets less CPU time takes fewer.
const TASKS_PER_THREAD: usize = 6;

thread_local! {
    /// Packed operands of the product that this thread runs.
    static PACKED: RefCell<Scratch> = RefCell::new(Scratch::new());
}

/// Weights `[n, k]` packed for `x · wᵀ`: panels of [`Tile::NR`] rows, transposed, the last padded
/// with zeros. Fit for the kernel set of the device that packed them.
#[derive(Debug, Clone)]
pub struct PackedWeights {
    n: usize,
    k: usize,
    kernels: KernelSet,
    data: Buffer,
}

impl PackedWeights {
    /// Packs row-major `w` `[n, k]`.
    #[must_use]
    pub fn pack(dev: &Device, w: &[f32], n: usize, k: usize) -> Self {
        let nr = panel_width(dev.kernels());
        let data = Buffer::zeros(n.next_multiple_of(nr) * k);
        let mut packed = Self {
            n,
            k,
            kernels: dev.kernels(),
            data,
        };
        packed.repack(dev, w);
        packed
    }

    /// Replaces the weights by row-major `w` of the same shape, without allocating.
    pub fn repack(&mut self, dev: &Device, w: &[f32]) {
        let (n, k) = (self.n, self.k);
        assert_eq!(w.len(), n * k, "weights [{n}, {k}]");
        self.check(dev);
        let b = Mat::new(w, n, k).t();
        // SAFETY: `data` has room for all panels of `[n, k]`.
        unsafe { pack_b(dev, true, b, 0..n, 0..k, self.data.as_mut_ptr()) };
    }

    /// Output features.
    #[must_use]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k
    }

    /// Memory it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.len() * 4
    }

    fn check(&self, dev: &Device) {
        assert_eq!(
            self.kernels,
            dev.kernels(),
            "weights were packed for other kernels"
        );
    }
}

impl Device {
    /// `y (+)= x · wᵀ` with `x` `[m, k]`, `w` `[n, k]`, `y` `[m, n]`.
    pub fn matmul_packed(&self, x: Mat<'_>, w: &PackedWeights, y: MatMut<'_>, accumulate: bool) {
        w.check(self);
        assert_eq!(
            (x.cols(), y.cols()),
            (w.k, w.n),
            "columns of x and y, weights [n, k]"
        );
        PACKED.with_borrow_mut(|scratch| {
            let b = Source::Packed(&w.data);
            Product {
                dev: self,
                parallel: true,
                a: x,
                b,
                c: y,
                accumulate,
            }
            .run(scratch);
        });
    }

    /// `y (+)= x · wᵀ` with `x` `[m, k]`, `w` `[n, k]`, `y` `[m, n]`.
    pub fn matmul_nt(&self, x: Mat<'_>, w: Mat<'_>, y: MatMut<'_>, accumulate: bool) {
        self.gemm(x, w.t(), y, accumulate);
    }

    /// `dx (+)= dy · w` with `dy` `[m, n]`, `w` `[n, k]`, `dx` `[m, k]`.
    pub fn matmul_nn(&self, dy: Mat<'_>, w: Mat<'_>, dx: MatMut<'_>, accumulate: bool) {
        self.gemm(dy, w, dx, accumulate);
    }

    /// `dw (+)= dyᵀ · x` with `dy` `[m, n]`, `x` `[m, k]`, `dw` `[n, k]`.
    pub fn matmul_tn(&self, dy: Mat<'_>, x: Mat<'_>, dw: MatMut<'_>, accumulate: bool) {
        self.gemm(dy.t(), x, dw, accumulate);
    }

    /// `c (+)= a · b` with `a` `[m, k]`, `b` `[k, n]`, `c` `[m, n]`, on all threads of the device.
    pub fn gemm(&self, a: Mat<'_>, b: Mat<'_>, c: MatMut<'_>, accumulate: bool) {
        assert_eq!((b.rows(), b.cols()), (a.cols(), c.cols()), "b is [k, n]");
        PACKED.with_borrow_mut(|scratch| {
            let b = Source::Plain(b);
            Product {
                dev: self,
                parallel: true,
                a,
                b,
                c,
                accumulate,
            }
            .run(scratch);
        });
    }
}

/// `c (+)= a · b` on the calling thread alone, for use inside the tasks of a parallel loop.
pub fn gemm_serial(
    dev: &Device,
    a: Mat<'_>,
    b: Mat<'_>,
    c: MatMut<'_>,
    accumulate: bool,
    scratch: &mut Scratch,
) {
    assert_eq!((b.rows(), b.cols()), (a.cols(), c.cols()), "b is [k, n]");
    Product {
        dev,
        parallel: false,
        a,
        b: Source::Plain(b),
        c,
        accumulate,
    }
    .run(scratch);
}

/// [`Device::matmul_packed`] on the calling thread alone.
pub fn matmul_packed_serial(
    dev: &Device,
    x: Mat<'_>,
    w: &PackedWeights,
    y: MatMut<'_>,
    accumulate: bool,
    scratch: &mut Scratch,
) {
    w.check(dev);
    assert_eq!(
        (x.cols(), y.cols()),
        (w.k, w.n),
        "columns of x and y, weights [n, k]"
    );
    Product {
        dev,
        parallel: false,
        a: x,
        b: Source::Packed(&w.data),
        c: y,
        accumulate,
    }
    .run(scratch);
}

/// The right operand.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// `[k, n]`, packed as needed.
    Plain(Mat<'a>),
    /// All panels over the whole `k`.
    Packed(&'a [f32]),
}

/// One product with checked shapes.
struct Product<'a> {
    dev: &'a Device,
    parallel: bool,
    a: Mat<'a>,
    b: Source<'a>,
    c: MatMut<'a>,
    accumulate: bool,
}

/// A pointer that tasks share; each task touches its own part.
#[derive(Clone, Copy)]
struct Part(*mut f32);
// SAFETY: see the type; all uses give disjoint parts to the tasks.
unsafe impl Send for Part {}
// SAFETY: as for `Send`.
unsafe impl Sync for Part {}

impl Part {
    /// `self + offset`, out of bounds only if never read.
    fn at(self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

impl Product<'_> {
    /// Passes over `n`, `k` and `m`, each small enough for the scratch.
    fn run(&self, scratch: &mut Scratch) {
        let (m, k, n) = (self.a.rows(), self.a.cols(), self.c.cols());
        assert_eq!(m, self.c.rows(), "rows of a and c");
        if m == 0 || n == 0 {
            return;
        }
        if k == 0 {
            return self.clear();
        }
        let plain = matches!(self.b, Source::Plain(_));
        let small = m * k <= PACK_LIMIT && (!plain || n * k <= PACK_LIMIT);
        let depth = if small { k } else { k.min(PASS_DEPTH) };
        let nr = panel_width(self.dev.kernels());
        let rows = m.min(PACK_LIMIT / depth.max(1)).max(1);
        let cols = if plain {
            n.min((PACK_LIMIT / depth / nr).max(1) * nr)
        } else {
            n
        };
        let b_room = if plain {
            cols.next_multiple_of(nr) * depth
        } else {
            0
        };
        // A cache line between the two operands keeps both aligned.
        let packed = scratch.take((rows * depth).next_multiple_of(16) + b_room);
        let packed_a = Part(packed.as_mut_ptr());
        let packed_b = Part(packed_a.at((rows * depth).next_multiple_of(16)));
        for j in (0..n).step_by(cols) {
            let cols = j..(j + cols).min(n);
            for p in (0..k).step_by(depth) {
                let steps = p..(p + depth).min(k);
                let b = match self.b {
                    Source::Plain(b) => {
                        // SAFETY: the scratch has room for the panels.
                        unsafe {
                            pack_b(
                                self.dev,
                                self.parallel,
                                b,
                                cols.clone(),
                                steps.clone(),
                                packed_b.0,
                            )
                        };
                        PanelsOfB {
                            data: packed_b.0,
                            stride: steps.len() * nr,
                        }
                    }
                    Source::Packed(data) => PanelsOfB {
                        data: data[p * nr..].as_ptr(),
                        stride: k * nr,
                    },
                };
                for i in (0..m).step_by(rows) {
                    self.block(
                        i..(i + rows).min(m),
                        cols.clone(),
                        steps.clone(),
                        packed_a,
                        b,
                    );
                }
            }
        }
    }

    /// The product over no steps: nothing, or zeros.
    fn clear(&self) {
        if !self.accumulate {
            for i in 0..self.c.rows() {
                // SAFETY: row `i` of `c` is valid and ours.
                unsafe {
                    let row = self.c.as_ptr().add(i * self.c.row_stride());
                    row.write_bytes(0, self.c.cols());
                }
            }
        }
    }

    fn parallel_for(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        if self.parallel {
            self.dev.pool().parallel_for(tasks, body);
        } else {
            (0..tasks).for_each(body);
        }
    }

    /// Packs the rows of `a` and computes their block of `c`.
    fn block(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        steps: Range<usize>,
        packed: Part,
        b: PanelsOfB,
    ) {
        let depth = steps.len();
        let panels = Panels::new(rows.len(), panel_rows(self.dev.kernels()));
        let (rs, cs) = (self.a.row_stride(), self.a.col_stride());
        let from = Part(
            self.a
                .as_ptr()
                .wrapping_add(rows.start * rs + steps.start * cs)
                .cast_mut(),
        );
        let pack_tasks = (rows.len() * depth / PACK_GRAIN).clamp(1, panels.count);
        self.parallel_for(pack_tasks, &|task| {
            let (first, last) = (
                task * panels.count / pack_tasks,
                (task + 1) * panels.count / pack_tasks,
            );
            // SAFETY: `a` covers the block and the scratch has room for it; panels of tasks are disjoint.
            unsafe {
                pack_balanced(
                    self.dev,
                    from.at(0),
                    rs,
                    cs,
                    panels,
                    first,
                    last,
                    depth,
                    packed.at(0),
                )
            };
        });

        let grid = Grid::new(self.dev, panels, rows.len(), cols.len(), depth);
        let c = Part(
            self.c
                .as_ptr()
                .wrapping_add(rows.start * self.c.row_stride() + cols.start),
        );
        let packed = packed.at(0).cast_const();
        let load_c = self.accumulate || steps.start > 0;
        let job = Job {
            depth,
            packed,
            b,
            c: c.0,
            ldc: self.c.row_stride(),
            n: cols.len(),
            load_c,
            panels,
        };
        self.parallel_for(grid.row_tasks * grid.col_tasks, &|task| {
            let (rows, cols) = grid.part(task);
            // SAFETY: packed operands and `c` cover the block; tasks compute disjoint parts of `c`.
            unsafe { compute(self.dev, &job, rows, cols) };
        });
    }
}

/// Packed panels of `b`, from the first column and step of a block on.
#[derive(Clone, Copy)]
struct PanelsOfB {
    data: *const f32,
    /// Values from one panel to the next.
    stride: usize,
}

/// What all tasks of a block share.
#[derive(Clone, Copy)]
struct Job {
    depth: usize,
    packed: *const f32,
    b: PanelsOfB,
    c: *mut f32,
    ldc: usize,
    n: usize,
    load_c: bool,
    panels: Panels,
}
// SAFETY: the pointers are read-only operands, and `c`, of which tasks touch disjoint parts.
unsafe impl Sync for Job {}

/// How a block is cut into tasks: panels of rows by panels of columns.
struct Grid {
    row_panels: usize,
    col_panels: usize,
    row_tasks: usize,
    col_tasks: usize,
}

impl Grid {
    fn new(dev: &Device, panels: Panels, rows: usize, cols: usize, depth: usize) -> Self {
        let col_panels = cols.div_ceil(panel_width(dev.kernels()));
        // Rows: as many as keep the block of `a` in L2.
        let row_tasks = (rows * depth.min(DEPTH_BLOCK))
            .div_ceil(A_BLOCK)
            .clamp(1, panels.count);
        let wanted = (dev.threads() * TASKS_PER_THREAD)
            .min(rows * cols * depth / TASK_WORK)
            .max(1);
        let col_tasks = wanted.div_ceil(row_tasks).min(col_panels);
        // Whole panels can leave the last task with few: use the fewest tasks of that size.
        let col_tasks = col_panels.div_ceil(col_panels.div_ceil(col_tasks));
        Self {
            row_panels: panels.count,
            col_panels,
            row_tasks,
            col_tasks,
        }
    }

    /// Row and column panels of a task. Tasks with the same columns follow each other, so that
    /// threads share the panels of `b` in the last-level cache.
    fn part(&self, task: usize) -> (Range<usize>, Range<usize>) {
        let (i, j) = (task % self.row_tasks, task / self.row_tasks);
        let cut = |at: usize, len: usize, parts: usize| at * len / parts;
        (
            cut(i, self.row_panels, self.row_tasks)..cut(i + 1, self.row_panels, self.row_tasks),
            cut(j, self.col_panels, self.col_tasks)..cut(j + 1, self.col_panels, self.col_tasks),
        )
    }
}

simd_fn! {
/// Computes the part of `c` in the given panels.
fn compute<V: Tile>(job: &Job, rows: Range<usize>, cols: Range<usize>) {
    let nr = V::NR;
    let mut p = 0;
    while p < job.depth {
        let depth = depth_block(job.depth - p);
        let mut j = cols.start;
        while j < cols.end {
            let whole = job.n / nr;
            let mut done = 1;
            for i in rows.clone() {
                let start = job.panels.start(i);
                let count = job.panels.start(i + 1) - start;
                let x = Operands {
                    a: job.packed.add(start * job.depth + p * count),
                    b: job.b.data.add(j * job.b.stride + p * nr),
                    b_stride: job.b.stride,
                    c: job.c.add(start * job.ldc + j * nr),
                    ldc: job.ldc,
                    cols: nr.min(job.n - j * nr),
                    depth,
                    load_c: job.load_c || p > 0,
                };
                // Several panels at once only where there is a single panel of rows: then this loop has one turn.
                let wide = if rows.len() == 1 { V::wide(count, cols.end.min(whole).saturating_sub(j), &x) } else { 0 };
                if wide == 0 {
                    V::tile(count, &x);
                } else {
                    done = wide;
                }
            }
            j += done;
        }
        p += depth;
    }
}
}

/// The next block of `left` steps: all when they fit, else equal parts near [`DEPTH_BLOCK`].
fn depth_block(left: usize) -> usize {
    left.div_ceil(left.div_ceil(DEPTH_BLOCK))
}

/// Columns of a panel of `b`.
fn panel_width(kernels: KernelSet) -> usize {
    match kernels {
        #[cfg(target_arch = "x86_64")]
        KernelSet::Avx512 => crate::simd::F32x16::NR,
        #[cfg(target_arch = "x86_64")]
        KernelSet::Avx2 => crate::simd::F32x8::NR,
        _ => Lanes8::NR,
    }
}

/// Rows of a panel of `a` at most.
fn panel_rows(kernels: KernelSet) -> usize {
    match kernels {
        #[cfg(target_arch = "x86_64")]
        KernelSet::Avx512 => crate::simd::F32x16::MR,
        #[cfg(target_arch = "x86_64")]
        KernelSet::Avx2 => crate::simd::F32x8::MR,
        _ => Lanes8::MR,
    }
}

/// Packs `cols` and `steps` of `b` `[k, n]` into panels at `dst`.
///
/// # Safety
/// `dst` must have room for `cols.len()` rounded up to whole panels times `steps.len()` values.
unsafe fn pack_b(
    dev: &Device,
    parallel: bool,
    b: Mat<'_>,
    cols: Range<usize>,
    steps: Range<usize>,
    dst: *mut f32,
) {
    let nr = panel_width(dev.kernels());
    let (rs, cs) = (b.row_stride(), b.col_stride());
    let depth = steps.len();
    let from = Part(
        b.as_ptr()
            .wrapping_add(cols.start * cs + steps.start * rs)
            .cast_mut(),
    );
    let dst = Part(dst);
    let panels = cols.len().div_ceil(nr);
    let tasks = (cols.len() * depth / PACK_GRAIN).clamp(1, panels.max(1));
    let body = |task: usize| {
        let (first, last) = (task * panels / tasks, (task + 1) * panels / tasks);
        let rows = (last * nr).min(cols.len()) - first * nr;
        // SAFETY: `b` covers the block, the caller promises the room, panels of tasks are disjoint.
        unsafe {
            pack_even(
                dev,
                from.at(first * nr * cs),
                cs,
                rs,
                rows,
                depth,
                nr,
                dst.at(first * nr * depth),
            )
        };
    };
    if parallel {
        dev.pool().parallel_for(tasks, &body);
    } else {
        (0..tasks).for_each(body);
    }
}
