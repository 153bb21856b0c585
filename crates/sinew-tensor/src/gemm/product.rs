//! How a product is cut into passes, tasks and blocks.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::ops::Range;

use super::pack::{Panels, pack_balanced, pack_panels};
use super::tile::{Operands, Tile, UNROLL};
use super::{PACK_GRAIN, pack_b, panel_rows, panel_width};
use crate::buffer::Scratch;
use crate::device::Device;
use crate::matrix::{Mat, MatMut};
use crate::simd::simd_fn;

/// Steps of the contracted index that a block covers. A panel of `b` with them (96 KiB) comes from L2 or,
/// asked for in time, from L3; longer blocks read and write `c` less often.
const DEPTH_BLOCK: usize = 768;
/// Rows of `a` in a block (384 KiB), which stays in L2 while panels of `b` pass.
const ROW_BLOCK: usize = 128;
/// Rows in a task of its own at least; fewer would read `b` too often.
const ROW_GRAIN: usize = 64;
/// Up to so many rows, `a` is packed once for all tasks, which then share out the columns.
/// Above, tasks pack the blocks of `a` that they use, which never leave their L2.
const SHARED_ROWS: usize = 192;
/// Values of `b` (4 KiB) from its use to where it is asked for, when a single panel of rows reads it.
const STREAM_AHEAD: usize = 1024;
/// Values of `b` (8 MiB) that are packed in one pass, or that all rows meet before the next columns
/// follow: little enough to stay in the last-level cache.
const B_LIMIT: usize = 2 << 20;
/// Values of a shared `a` at most, which bounds scratch.
const A_LIMIT: usize = 4 << 20;
/// Multiply-adds that a task has at least, some 10 us.
const TASK_WORK: usize = 1 << 19;
/// Multiply-adds that a part of a task has at least, some 50 us: packing its rows again takes a tenth of that.
const LAST_WORK: usize = 4 << 20;
/// Fewer rows take as long as so many: reading `b` from memory is what takes the time.
const STREAM_ROWS: usize = 8;
/// Tasks for each thread, so that a thread that gets less CPU time takes fewer.
const TASKS_PER_THREAD: usize = 6;
/// Parts of its columns into which each of the last tasks is cut, so that threads end together; each part packs
/// the same rows of `a` again.
const LAST_PARTS: usize = 4;

thread_local! {
    /// The block of `a` on which this thread works.
    static BLOCK: RefCell<Scratch> = RefCell::new(Scratch::new());
}

/// The right operand.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    /// `[k, n]`, packed as needed.
    Plain(Mat<'a>),
    /// All panels over the whole `k`.
    Packed(&'a [f32]),
    /// The same with 16 bits a value, two in a word.
    Half(&'a [f32]),
}

/// One product with checked shapes.
pub(super) struct Product<'a> {
    pub dev: &'a Device,
    pub parallel: bool,
    pub a: Mat<'a>,
    pub b: Source<'a>,
    pub c: MatMut<'a>,
    pub accumulate: bool,
}

/// A pointer that tasks share; each task touches its own part.
#[derive(Clone, Copy)]
pub(super) struct Part(pub *mut f32);
// SAFETY: see the type; all uses give disjoint parts to the tasks.
unsafe impl Send for Part {}
// SAFETY: as for `Send`.
unsafe impl Sync for Part {}

impl Part {
    /// `self + offset`, out of bounds only if never read.
    pub(super) fn at(self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

impl Product<'_> {
    /// Passes over columns and steps, each small enough for the scratch.
    pub(super) fn run(&self, scratch: &mut Scratch) {
        let (m, k, n) = (self.a.rows(), self.a.cols(), self.c.cols());
        assert_eq!(m, self.c.rows(), "rows of a and c");
        if m == 0 || n == 0 {
            return;
        }
        if k == 0 {
            return self.clear();
        }
        let half = matches!(self.b, Source::Half(_));
        let nr = panel_width(self.dev.kernels(), half);
        let shared = m <= SHARED_ROWS;
        let depth = if shared { k.min(A_LIMIT / m) } else { k };
        let words = if half { nr / 2 } else { nr };
        let (cols, depth, b_room) = match self.b {
            Source::Plain(_) => {
                // Deep passes, since each one reads and writes all of `c`; of equal depth, since one of few
                // steps does that for little.
                let most = (B_LIMIT / n.clamp(nr, 2048)).next_multiple_of(DEPTH_BLOCK);
                let depth = depth.min(k.div_ceil(k.div_ceil(most)));
                let cols = n.min((B_LIMIT / depth).max(nr).next_multiple_of(nr));
                (cols, depth, cols.next_multiple_of(nr) * depth)
            }
            Source::Packed(_) | Source::Half(_) => (n, depth, 0),
        };
        // Multiples of a cache line keep both operands aligned.
        let a_room = if shared {
            (m * depth).next_multiple_of(16)
        } else {
            0
        };
        let packed = Part(scratch.take(a_room + b_room).as_mut_ptr());
        for j in (0..n).step_by(cols) {
            for p in (0..k).step_by(depth) {
                let (cols, steps) = (j..(j + cols).min(n), p..(p + depth).min(k));
                let b = match self.b {
                    Source::Plain(b) => {
                        let to = packed.at(a_room);
                        // SAFETY: the scratch has `b_room` for the panels.
                        unsafe {
                            pack_b(self.dev, self.parallel, b, cols.clone(), steps.clone(), to)
                        };
                        PanelsOfB {
                            data: to,
                            stride: steps.len() * nr,
                            half,
                        }
                    }
                    Source::Packed(data) | Source::Half(data) => PanelsOfB {
                        data: data[p * words..].as_ptr(),
                        stride: k * words,
                        half,
                    },
                };
                self.pass(cols, steps, b, shared.then_some(packed));
            }
        }
    }

    /// The product over no steps: nothing, or zeros.
    fn clear(&self) {
        if !self.accumulate {
            for i in 0..self.c.rows() {
                // SAFETY: row `i` of `c` is valid and ours.
                unsafe {
                    self.c
                        .as_ptr()
                        .add(i * self.c.row_stride())
                        .write_bytes(0, self.c.cols())
                };
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

    /// All rows of `c` in `cols`, over `steps`. `shared` is the place for `a` if tasks share it.
    fn pass(&self, cols: Range<usize>, steps: Range<usize>, b: PanelsOfB, shared: Option<Part>) {
        let (m, depth) = (self.a.rows(), steps.len());
        let panels = Panels::new(m, panel_rows(self.dev.kernels(), b.half));
        let (rs, cs) = (self.a.row_stride(), self.a.col_stride());
        let a = View {
            data: self.a.as_ptr().wrapping_add(steps.start * cs),
            rs,
            cs,
        };
        let job = Job {
            a,
            panels,
            shared: shared.map(|place| self.pack_shared(a, panels, depth, place)),
            b,
            c: self.c.as_ptr().wrapping_add(cols.start),
            ldc: self.c.row_stride(),
            n: cols.len(),
            depth,
            load_c: self.accumulate || steps.start > 0,
        };
        let col_panels = cols.len().div_ceil(panel_width(self.dev.kernels(), b.half));
        let size = (m, cols.len(), depth);
        let grid = Grid::new(self.dev, panels, col_panels, size, shared.is_some());
        self.parallel_for(grid.tasks(), &|task| {
            let (rows, cols) = grid.part(task);
            let room = match job.shared {
                Some(_) => 0,
                None => {
                    (panels.start(rows.end) - panels.start(rows.start)) * DEPTH_BLOCK.min(depth)
                }
            };
            BLOCK.with_borrow_mut(|block| {
                let block = block.take(room).as_mut_ptr();
                // SAFETY: operands and `c` cover the pass, and `block` the rows of the task; tasks
                // compute disjoint parts of `c`.
                unsafe { compute(self.dev, &job, rows, cols, block) };
            });
        });
    }

    /// Packs all rows of `a` at `place` for use by all tasks.
    fn pack_shared(&self, a: View, panels: Panels, depth: usize, place: Part) -> *const f32 {
        let tasks = (self.a.rows() * depth / PACK_GRAIN).clamp(1, panels.count);
        let from = Part(a.data.cast_mut());
        self.parallel_for(tasks, &|task| {
            let cut = |i: usize| i * panels.count / tasks;
            let range = cut(task)..cut(task + 1);
            let to = place.at(panels.start(range.start) * depth);
            // SAFETY: `a` covers the pass and `place` has room for it; panels of tasks are disjoint.
            unsafe { pack_balanced(self.dev, from.at(0), a.rs, a.cs, panels, range, depth, to) };
        });
        place.at(0)
    }
}

/// The left operand from the first step of a pass on.
#[derive(Clone, Copy)]
struct View {
    data: *const f32,
    rs: usize,
    cs: usize,
}

/// Packed panels of `b`, from the first column and step of a pass on.
#[derive(Clone, Copy)]
struct PanelsOfB {
    data: *const f32,
    /// Words from one panel to the next.
    stride: usize,
    /// Whether a word holds two values.
    half: bool,
}

/// What all tasks of a pass share.
struct Job {
    a: View,
    panels: Panels,
    /// All panels of `a`, packed; else each task packs its own.
    shared: Option<*const f32>,
    b: PanelsOfB,
    c: *mut f32,
    ldc: usize,
    n: usize,
    depth: usize,
    load_c: bool,
}
// SAFETY: the pointers are read-only operands, and `c`, of which tasks touch disjoint parts.
unsafe impl Sync for Job {}

/// Number of tasks, from about half of `wanted` to twice as many, that leaves the busiest thread the fewest of
/// `panels`; of equals the nearest to `wanted`, then the one with fewer tasks.
fn even_tasks(panels: usize, wanted: usize, threads: usize) -> usize {
    let tasks = |each: usize| panels.div_ceil(each);
    let sizes = panels.div_ceil(2 * wanted)..=panels.div_ceil(wanted.div_ceil(2));
    let best = sizes.min_by_key(|&each| {
        let busiest = tasks(each).div_ceil(threads) * each;
        (busiest, tasks(each).abs_diff(wanted), Reverse(each))
    });
    best.map_or(wanted, tasks)
}

/// How a pass is cut into tasks: panels of rows by panels of columns.
struct Grid {
    row_panels: usize,
    col_panels: usize,
    row_tasks: usize,
    col_tasks: usize,
    /// Of the last column task so many row tasks, the last ones, are cut into [`LAST_PARTS`].
    cut: usize,
}

impl Grid {
    fn new(
        dev: &Device,
        panels: Panels,
        col_panels: usize,
        (rows, cols, depth): (usize, usize, usize),
        shared: bool,
    ) -> Self {
        let wanted = (dev.threads() * TASKS_PER_THREAD)
            .min(rows.max(STREAM_ROWS) * cols * depth / TASK_WORK)
            .max(1);
        let (row_tasks, col_tasks) = if shared {
            (1, wanted)
        } else {
            // More rows first: each cut of the columns packs all of `a` once more. Where `b` is large,
            // all rows meet a part of it before the next part comes.
            let row_tasks = rows.div_ceil(ROW_BLOCK).max(wanted.min(rows / ROW_GRAIN));
            let row_tasks = row_tasks.next_multiple_of(dev.threads()).min(panels.count);
            let parts = (cols * depth).div_ceil(B_LIMIT);
            (row_tasks, wanted.div_ceil(2 * row_tasks).max(parts))
        };
        let col_tasks = col_tasks.min(col_panels);
        let col_tasks = if shared {
            even_tasks(col_panels, col_tasks, dev.threads())
        } else {
            // Whole panels can leave the last task with few: use the fewest tasks of that size.
            col_panels.div_ceil(col_panels.div_ceil(col_tasks))
        };
        let work = rows * cols * depth / (row_tasks * col_tasks * LAST_PARTS);
        let cuts = !shared && row_tasks > dev.threads() && work >= LAST_WORK;
        Self {
            row_panels: panels.count,
            col_panels,
            row_tasks,
            col_tasks,
            cut: if cuts { dev.threads() } else { 0 },
        }
    }

    fn tasks(&self) -> usize {
        self.row_tasks * self.col_tasks + self.cut * (LAST_PARTS - 1)
    }

    /// Row and column panels of a task. Tasks with the same columns follow each other, so that
    /// threads share the panels of `b` in the last-level cache.
    fn part(&self, task: usize) -> (Range<usize>, Range<usize>) {
        let rows = |i: usize| i * self.row_panels / self.row_tasks;
        let cols = |j: usize| j * self.col_panels / self.col_tasks;
        let whole = self.row_tasks * self.col_tasks - self.cut;
        if task < whole {
            let (i, j) = (task % self.row_tasks, task / self.row_tasks);
            return (rows(i)..rows(i + 1), cols(j)..cols(j + 1));
        }
        let (i, part) = ((task - whole) / LAST_PARTS, (task - whole) % LAST_PARTS);
        let i = self.row_tasks - self.cut + i;
        let (first, last) = (cols(self.col_tasks - 1), self.col_panels);
        let cut = |part: usize| first + part * (last - first) / LAST_PARTS;
        (rows(i)..rows(i + 1), cut(part)..cut(part + 1))
    }
}

simd_fn! {
/// Computes the part of `c` in the given panels. `block` has room for the rows over a block of steps,
/// unless they are packed already.
fn compute<V: Tile>(job: &Job, rows: Range<usize>, cols: Range<usize>, block: *mut f32) {
    if job.b.half {
        compute_with::<V, true>(job, rows, cols, block);
    } else {
        compute_with::<V, false>(job, rows, cols, block);
    }
}
}

/// [`compute`] for values of `b` of 16 or of 32 bits.
#[inline(always)]
unsafe fn compute_with<V: Tile, const HALF: bool>(
    job: &Job,
    rows: Range<usize>,
    cols: Range<usize>,
    block: *mut f32,
) {
    // SAFETY: by the contract of `compute`.
    unsafe {
        let nr = if HALF { V::HALF_NR } else { V::NR };
        let words = if HALF { nr / 2 } else { nr };
        let whole = job.n / nr;
        let top = job.panels.start(rows.start);
        let mut p = 0;
        while p < job.depth {
            let depth = depth_block(job.depth - p);
            if job.shared.is_none() {
                let (rs, cs) = (job.a.rs, job.a.cs);
                let from = job.a.data.add(top * rs + p * cs);
                pack_panels::<V>(from, rs, cs, job.panels, rows.clone(), depth, block);
            }
            let mut j = cols.start;
            while j < cols.end {
                let mut done = 1;
                let b = job.b.data.add(j * job.b.stride + p * words);
                for i in rows.clone() {
                    let start = job.panels.start(i);
                    let count = job.panels.start(i + 1) - start;
                    let a = match job.shared {
                        Some(shared) => shared.add(start * job.depth + p * count),
                        None => block.add((start - top) * depth).cast_const(),
                    };
                    let c = job.c.add(start * job.ldc + j * nr);
                    let mut x = Operands {
                        a,
                        b,
                        b_stride: job.b.stride,
                        c,
                        ldc: job.ldc,
                        cols: nr.min(job.n - j * nr),
                        depth,
                        load_c: job.load_c || p > 0,
                        next_c: c.wrapping_add(count * job.ldc),
                        ahead: b,
                        ahead_step: 0,
                        ahead_lines: 0,
                    };
                    read_ahead(&mut x, i - rows.start, rows.len(), words);
                    // Several panels at once only where there is a single panel of rows: then this loop
                    // has one turn.
                    let panels = cols.end.min(whole).saturating_sub(j);
                    let alone = rows.len() == 1;
                    let wide = if alone {
                        V::wide::<HALF>(count, panels, &x)
                    } else {
                        0
                    };
                    if wide == 0 {
                        V::tile::<HALF>(count, &x);
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

/// Says what tile `i` of `tiles` over one panel of `b` brings to L2, its share: the next panel, or
/// the rest of this one when there is a single tile. A step has `words` words of `b`.
#[inline(always)]
fn read_ahead(x: &mut Operands, i: usize, tiles: usize, words: usize) {
    let turn = UNROLL * words * 4 / tiles;
    let next = match tiles {
        1 => STREAM_AHEAD,
        _ => x.b_stride + i * x.depth / tiles * words,
    };
    x.ahead = x.b.wrapping_add(next);
    (x.ahead_step, x.ahead_lines) = (turn, turn.div_ceil(64));
}

/// The next block of `left` steps: all when they fit, else equal parts near [`DEPTH_BLOCK`].
fn depth_block(left: usize) -> usize {
    left.div_ceil(left.div_ceil(DEPTH_BLOCK))
}

#[cfg(test)]
mod tests {
    use super::{Grid, LAST_PARTS, Panels, even_tasks};
    use crate::device::{Device, KernelSet};

    #[test]
    fn tasks_cover_every_tile_once() {
        let mut cuts = 0;
        for threads in [1, 2, 5] {
            let dev = Device::new(KernelSet::Portable, threads);
            for (rows, cols, depth) in [
                (1024usize, 3072usize, 576usize),
                (1024, 576, 1536),
                (3000, 200, 1000),
                (4000, 4000, 2000),
                (193, 5, 7),
                (32, 960, 576),
            ] {
                let (panels, col_panels) = (Panels::new(rows, 9), cols.div_ceil(48));
                let size = (rows, cols, depth);
                let grid = Grid::new(&dev, panels, col_panels, size, rows < 193);
                let mut seen = vec![0; panels.count * col_panels];
                for task in 0..grid.tasks() {
                    let (rows, cols) = grid.part(task);
                    for tile in rows.flat_map(|i| cols.clone().map(move |j| i * col_panels + j)) {
                        seen[tile] += 1;
                    }
                }
                assert!(seen.iter().all(|&n| n == 1), "{size:?}, {threads} threads");
                assert!(grid.cut == 0 || grid.tasks() > LAST_PARTS * threads);
                cuts += grid.cut;
            }
        }
        assert!(cuts > 0, "some product has its last tasks cut");
    }

    #[test]
    fn threads_get_as_many_panels_each() {
        // The output projections of the packaged model: 18 panels in 9 tasks gave one thread 10.
        assert_eq!(even_tasks(18, 12, 2), 6);
        assert_eq!(even_tasks(18, 5, 2), 6);
        assert_eq!(even_tasks(96, 12, 2), 12);
        assert_eq!(even_tasks(1, 1, 8), 1);
        for panels in 1..200usize {
            for wanted in 1..=panels.min(40) {
                for threads in [1, 2, 3, 8] {
                    let tasks = even_tasks(panels, wanted, threads);
                    assert!((1..=2 * wanted).contains(&tasks) && 3 * tasks >= wanted);
                    let busiest = |tasks: usize| tasks.div_ceil(threads) * panels.div_ceil(tasks);
                    let plain = panels.div_ceil(panels.div_ceil(wanted));
                    assert!(busiest(tasks) <= busiest(plain), "{panels} {wanted}");
                }
            }
        }
    }
}
