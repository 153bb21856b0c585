//! Divides a product into passes, tasks and blocks.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::ops::Range;

use super::block::BLOCK;
use super::pack::{Panels, pack_balanced, pack_panels};
use super::split::Split;
use super::tile::{Operands, Tile, UNROLL};
use super::{PACK_GRAIN, Sizes, pack_b};
use crate::buffer::{Part, Scratch};
use crate::cpu::Cpu;
use crate::matrix::{Mat, MatMut};
use crate::simd::simd_fn;

/// Steps of the contracted index that a block covers. A panel of `b` with them (96 KiB) comes from L2 or,
/// asked for in time, from L3; longer blocks read and write `c` less often.
const DEPTH_BLOCK: usize = 768;
/// Rows of `a` in a block (384 KiB), which stays in L2 while panels of `b` pass.
const ROW_BLOCK: usize = 128;
/// Minimum rows of a separate task; fewer would read `b` too often.
const ROW_GRAIN: usize = 64;
/// Maximum number of rows for which `a` is packed once for all tasks, which then share out the columns. With
/// more rows, tasks pack the blocks of `a` that they use, which never leave their L2.
const SHARED_ROWS: usize = 192;
/// Values of `b` (4 KiB) from its use to where it is requested, when a single panel of rows reads it.
const STREAM_AHEAD: usize = 1024;
/// Values of `b` (8 MiB) that are packed in one pass, or that all rows meet before the next columns
/// follow: little enough to stay in the last-level cache.
const B_LIMIT: usize = 2 << 20;
/// Values of a shared `a` at most, which bounds scratch.
const A_LIMIT: usize = 4 << 20;
/// Multiply-adds that a task has at least, some 10 us.
const TASK_WORK: usize = 1 << 19;
/// Multiply-adds that a part of a task has at least, some 50 us: packing its rows again takes a tenth of
/// that.
const LAST_WORK: usize = 4 << 20;
/// Minimum number of rows in the estimate of work: fewer rows take the same time, since reading `b` from
/// memory dominates.
const STREAM_ROWS: usize = 8;
/// Tasks for each thread, so that a thread that gets less CPU time takes fewer.
const TASKS_PER_THREAD: usize = 6;
/// Parts of its columns into which each of the last tasks is cut, so that threads end together; each part
/// packs the same rows of `a` again.
const LAST_PARTS: usize = 4;

/// Panels of rows up to which each takes values of 12 bits apart in registers.
const FEW: usize = 2;

thread_local! {
    /// The block of `a` on which this thread works.
    static SPACE: RefCell<Scratch> = RefCell::new(Scratch::new());
}

/// The right operand.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    /// `[k, n]`, packed as needed.
    Plain(Mat<'a>),
    /// All panels over the whole `k`.
    Packed(&'a [f32]),
    /// All panels over the whole `k`, with 12 bits per value.
    Split(&'a Split),
}

/// One product with checked shapes.
pub(super) struct Product<'a> {
    /// Kernels and threads.
    pub dev: &'a Cpu,
    /// Left operand, `[m, k]`.
    pub a: Mat<'a>,
    /// Right operand, `[k, n]`, as a view or packed.
    pub b: Source<'a>,
    /// Result, `[m, n]`.
    pub c: MatMut<'a>,
    /// Whether the product is added to `c`, or overwrites it.
    pub accumulate: bool,
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
        let nr = Sizes::of(self.dev.kernels()).cols;
        let shared = m <= SHARED_ROWS;
        let depth = if shared {
            k.min(A_LIMIT / m / BLOCK * BLOCK)
        } else {
            k
        };
        let (cols, depth, b_room) = match self.b {
            Source::Plain(_) => {
                // Deep passes, since each one reads and writes all of `c`; of equal depth, since one of few
                // steps does that for little.
                let most = (B_LIMIT / n.clamp(nr, 2048)).next_multiple_of(DEPTH_BLOCK);
                let depth = depth.min(k.div_ceil(k.div_ceil(most)));
                let cols = n.min((B_LIMIT / depth).max(nr).next_multiple_of(nr));
                (cols, depth, cols.next_multiple_of(nr) * depth)
            }
            Source::Packed(_) | Source::Split(_) => (n, depth, 0),
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
                        unsafe { pack_b(self.dev, b, cols.clone(), steps.clone(), to) };
                        PanelsOfB::Wide {
                            data: to,
                            stride: steps.len() * nr,
                        }
                    }
                    Source::Packed(data) => PanelsOfB::Wide {
                        data: data[p * nr..].as_ptr(),
                        stride: k * nr,
                    },
                    Source::Split(split) => PanelsOfB::Split(SplitPart {
                        split,
                        first: p / BLOCK,
                    }),
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

    /// All rows of `c` in `cols`, over `steps`. `shared` is the place for `a` if tasks share it.
    fn pass(
        &self,
        cols: Range<usize>,
        steps: Range<usize>,
        b: PanelsOfB<'_>,
        shared: Option<Part>,
    ) {
        let (m, depth) = (self.a.rows(), steps.len());
        let sizes = Sizes::of(self.dev.kernels());
        let (mr, nr) = match b {
            PanelsOfB::Split(..) if m <= FEW * sizes.split_rows => {
                (sizes.split_rows, sizes.split_cols)
            }
            PanelsOfB::Split(..) => (sizes.rows, sizes.split_cols * sizes.group),
            PanelsOfB::Wide { .. } => (sizes.rows, sizes.cols),
        };
        let panels = Panels::new(m, mr);
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
        let col_panels = cols.len().div_ceil(nr);
        let size = PassSize {
            rows: m,
            cols: cols.len(),
            depth,
        };
        let grid = Grid::new(self.dev, panels, col_panels, size, shared.is_some());
        let joined = match b {
            PanelsOfB::Split(..) if m > FEW * sizes.split_rows => joined_len(depth, nr),
            _ => 0,
        };
        self.dev.pool().parallel_for(grid.tasks(), &|task| {
            let (rows, cols) = grid.part(task);
            let room = match job.shared {
                Some(_) => 0,
                None => {
                    (panels.start(rows.end) - panels.start(rows.start)) * DEPTH_BLOCK.min(depth)
                }
            };
            SPACE.with_borrow_mut(|block| {
                let block = block.take(joined + room).as_mut_ptr();
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
        self.dev.pool().parallel_for(tasks, &|task| {
            let cut = |i: usize| i * panels.count / tasks;
            let range = cut(task)..cut(task + 1);
            let to = place.at(panels.start(range.start) * depth);
            // SAFETY: `a` covers the pass and `place` has space for it; panels of tasks are disjoint.
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

/// Packed panels of `b`.
#[derive(Clone, Copy)]
enum PanelsOfB<'a> {
    /// Panels of `f32` from the first column and step of a pass on, `stride` words from one panel to the
    /// next.
    Wide { data: *const f32, stride: usize },
    /// Panels of 12 bits a value.
    Split(SplitPart<'a>),
}

/// Panels of 12 bits a value: all columns from block `first` on.
#[derive(Clone, Copy)]
struct SplitPart<'a> {
    split: &'a Split,
    first: usize,
}

/// Data that all tasks of a pass share.
struct Job<'a> {
    a: View,
    panels: Panels,
    /// All panels of `a`, packed; else each task packs its own.
    shared: Option<*const f32>,
    b: PanelsOfB<'a>,
    c: *mut f32,
    ldc: usize,
    n: usize,
    depth: usize,
    load_c: bool,
}
// SAFETY: the pointers are read-only operands, and `c`, of which tasks touch disjoint parts.
unsafe impl Sync for Job<'_> {}

/// Number of tasks, from about half of `wanted` to twice as many, that leaves the busiest thread the fewest
/// of `panels`; of equals the nearest to `wanted`, then the one with fewer tasks.
fn even_tasks(panels: usize, wanted: usize, threads: usize) -> usize {
    let tasks = |each: usize| panels.div_ceil(each);
    let sizes = panels.div_ceil(2 * wanted)..=panels.div_ceil(wanted.div_ceil(2));
    let best = sizes.min_by_key(|&each| {
        let busiest = tasks(each).div_ceil(threads) * each;
        (busiest, tasks(each).abs_diff(wanted), Reverse(each))
    });
    best.map_or(wanted, tasks)
}

/// Rows and columns of the part of `c` that a pass computes, and the steps of the pass.
#[derive(Clone, Copy, Debug)]
struct PassSize {
    rows: usize,
    cols: usize,
    depth: usize,
}

/// Tasks of a pass: panels of rows by panels of columns.
struct Grid {
    row_panels: usize,
    col_panels: usize,
    row_tasks: usize,
    col_tasks: usize,
    /// Number of row tasks, the last ones of the last column task, that are cut into [`LAST_PARTS`].
    cut: usize,
}

impl Grid {
    fn new(dev: &Cpu, panels: Panels, col_panels: usize, size: PassSize, shared: bool) -> Self {
        let PassSize { rows, cols, depth } = size;
        let wanted = (dev.threads() * TASKS_PER_THREAD)
            .min(rows.max(STREAM_ROWS) * cols * depth / TASK_WORK)
            .max(1);
        let (row_tasks, col_tasks) = if shared {
            (1, wanted)
        } else {
            // More rows first: each cut of the columns packs all of `a` once more. All rows meet a part of a
            // large `b` before the next part comes.
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

/// Steps of some rows of `a`, packed panel after panel.
#[derive(Clone, Copy)]
struct Left {
    data: *const f32,
    /// The first row and the first step of the pass that are in it.
    top: usize,
    first: usize,
    /// Steps that it has.
    depth: usize,
}

impl Job<'_> {
    /// Rows in `rows` over `steps`, which are packed at `block` unless they are already.
    ///
    /// # Safety
    /// Same as for [`Vector`](crate::simd::Vector); `block` has space for them.
    #[inline(always)]
    unsafe fn left<V: Tile>(
        &self,
        rows: &Range<usize>,
        steps: Range<usize>,
        block: *mut f32,
    ) -> Left {
        if let Some(data) = self.shared {
            return Left {
                data,
                top: 0,
                first: 0,
                depth: self.depth,
            };
        }
        let (top, first, depth) = (self.panels.start(rows.start), steps.start, steps.len());
        let (rs, cs) = (self.a.rs, self.a.cs);
        // SAFETY: the caller's promise.
        unsafe {
            let from = self.a.data.add(top * rs + first * cs);
            pack_panels::<V>(from, rs, cs, self.panels, rows.clone(), depth, block);
        }
        let data = block.cast_const();
        Left {
            data,
            top,
            first,
            depth,
        }
    }

    /// The tile of row panel `i` from column `col` on, over `steps` of the pass, which `left` has. Nothing of
    /// `b` yet.
    #[inline(always)]
    fn tile(&self, left: Left, i: usize, col: usize, steps: &Range<usize>) -> (usize, Operands) {
        let start = self.panels.start(i);
        let count = self.panels.start(i + 1) - start;
        let c = self.c.wrapping_add(start * self.ldc + col);
        let x = Operands {
            a: left
                .data
                .wrapping_add((start - left.top) * left.depth + (steps.start - left.first) * count),
            b: std::ptr::null(),
            b_stride: 0,
            c,
            ldc: self.ldc,
            cols: self.n - col,
            depth: steps.len(),
            load_c: self.load_c || steps.start > 0,
            next_c: c.wrapping_add(count * self.ldc),
            ahead: c,
            ahead_step: 0,
            ahead_lines: 0,
            sides: std::ptr::null(),
            first_block: 0,
        };
        (count, x)
    }
}

simd_fn! {
/// Computes the part of `c` in the given panels. `block` has space for the rows over a block of steps,
/// unless they are packed already, behind what [`compute_group`] needs.
fn compute<V: Tile>(job: &Job<'_>, rows: Range<usize>, cols: Range<usize>, block: *mut f32) {
    let joined = block;
    let block = match job.b {
        PanelsOfB::Split(..) => block.wrapping_add(joined_len(job.depth, V::SPLIT_NR * V::GROUP)),
        PanelsOfB::Wide { .. } => block,
    };
    let few = job.panels.start(job.panels.count) <= FEW * V::SPLIT_MR;
    let mut p = 0;
    while p < job.depth {
        let depth = depth_block(job.depth - p);
        let steps = p..p + depth;
        let left = job.left::<V>(&rows, steps.clone(), block);
        let mut j = cols.start;
        while j < cols.end {
            j += match job.b {
                PanelsOfB::Wide { data, stride } => {
                    compute_wide::<V>(job, left, &rows, j..cols.end, &steps, data, stride)
                }
                PanelsOfB::Split(b) if few => {
                    compute_few::<V>(job, left, &rows, j..cols.end, &steps, b)
                }
                PanelsOfB::Split(b) => {
                    compute_group::<V>(job, left, &rows, j, &steps, b, joined);
                    1
                }
            };
        }
        p += depth;
    }
}
}

/// Computes the first of `cols`, or some of the first for few rows, over `steps`. Returns how many.
///
/// # Safety
/// Same as for `compute`.
#[inline(always)]
unsafe fn compute_wide<V: Tile>(
    job: &Job<'_>,
    left: Left,
    rows: &Range<usize>,
    cols: Range<usize>,
    steps: &Range<usize>,
    data: *const f32,
    stride: usize,
) -> usize {
    let (j, whole) = (cols.start, job.n / V::NR);
    let mut done = 1;
    for i in rows.clone() {
        let (count, mut x) = job.tile(left, i, j * V::NR, steps);
        x.b = data.wrapping_add(j * stride + steps.start * V::NR);
        (x.b_stride, x.cols) = (stride, x.cols.min(V::NR));
        read_ahead(&mut x, i - rows.start, rows.len(), UNROLL * V::NR);
        // Several panels at once only where there is a single panel of rows: then this loop
        // has one turn.
        let panels = cols.end.min(whole).saturating_sub(j);
        // SAFETY: the caller's promise.
        unsafe {
            let wide = match rows.len() {
                1 => V::wide(count, panels, &x),
                _ => 0,
            };
            if wide == 0 {
                V::tile(count, &x);
            } else {
                done = wide;
            }
        }
    }
    done
}

/// [`compute_wide`] for 12 bits a value and so few rows that these are taken apart in registers.
///
/// # Safety
/// Same as for `compute`.
#[inline(always)]
unsafe fn compute_few<V: Tile>(
    job: &Job<'_>,
    left: Left,
    rows: &Range<usize>,
    cols: Range<usize>,
    steps: &Range<usize>,
    b: SplitPart<'_>,
) -> usize {
    let (j, split) = (cols.start, b.split);
    let first = b.first + steps.start / BLOCK;
    let mut done = 1;
    for i in rows.clone() {
        let (count, mut x) = job.tile(left, i, j * V::SPLIT_NR, steps);
        let panels = match rows.len() {
            1 => cols.end.min(job.n / V::SPLIT_NR).saturating_sub(j),
            _ => 1,
        };
        (x.b, x.b_stride) = (split.block(j, first), split.stride());
        x.cols = x.cols.min(V::SPLIT_NR);
        (x.sides, x.first_block) = (split.sides(j), first);
        if panels <= 1 || count > 1 {
            // More panels are more streams, which the hardware reads ahead well on its own.
            let words = BLOCK * V::SPLIT_NR * 3 / 8;
            read_ahead(&mut x, i - rows.start, rows.len(), words);
        }
        // SAFETY: the caller's promise.
        done = unsafe { V::split(count, panels, &x) };
    }
    done
}

/// Computes group `group` of panels of 12 bits a value, which is brought to 32 bits at `joined`, as panels
/// for all rows. It stays in the second cache level; parts of it that stay in the first were slower, for
/// their many tiles.
///
/// # Safety
/// Same as for `compute`; `joined` has space for the group.
#[inline(always)]
unsafe fn compute_group<V: Tile>(
    job: &Job<'_>,
    left: Left,
    rows: &Range<usize>,
    group: usize,
    steps: &Range<usize>,
    b: SplitPart<'_>,
    joined: *mut f32,
) {
    let (split, depth) = (b.split, steps.len());
    let (nr, first) = (V::SPLIT_NR * V::GROUP, b.first + steps.start / BLOCK);
    let panels = nr / V::NR;
    let tiles = rows.len() * panels;
    // SAFETY: the caller's promise.
    unsafe { split.join::<V>(group * V::GROUP, first, depth, joined) };
    for i in rows.clone() {
        for panel in 0..panels {
            let col = group * nr + panel * V::NR;
            if col >= job.n {
                break;
            }
            let (count, mut x) = job.tile(left, i, col, steps);
            x.b = joined.wrapping_add(panel * depth.next_multiple_of(BLOCK) * V::NR);
            x.cols = x.cols.min(V::NR);
            // The panels of the next group, shared out to the tiles.
            let tile = (i - rows.start) * panels + panel;
            let (stream, part) = (tile % V::GROUP, tile / V::GROUP);
            let parts = (tiles - stream).div_ceil(V::GROUP);
            let next = split.block((group + 1) * V::GROUP + stream, first);
            x.ahead_step = BLOCK * V::SPLIT_NR * 3 / 2 / parts;
            x.ahead = next.wrapping_byte_add(part * x.ahead_step * (depth / UNROLL));
            x.ahead_lines = x.ahead_step.div_ceil(64);
            // SAFETY: the caller's promise.
            unsafe { V::tile(count, &x) };
        }
    }
}

/// Sets the share of the next data that tile `i` of `tiles` over one panel of `b` prefetches to L2: the next
/// panel, or the rest of this one if there is a single tile. [`UNROLL`] steps have `words` words of `b`.
#[inline(always)]
fn read_ahead(x: &mut Operands, i: usize, tiles: usize, words: usize) {
    let turn = words * 4 / tiles;
    let next = match tiles {
        1 => STREAM_AHEAD,
        _ => x.b_stride + i * x.depth / tiles * words / UNROLL,
    };
    x.ahead = x.b.wrapping_add(next);
    (x.ahead_step, x.ahead_lines) = (turn, turn.div_ceil(64));
}

/// Values of a group of panels of 12 bits a value with `cols` columns that is brought to 32 bits, over a
/// block of steps.
fn joined_len(depth: usize, cols: usize) -> usize {
    depth.next_multiple_of(BLOCK).min(DEPTH_BLOCK) * cols
}

/// The next block of `left` steps: all when they fit, else nearly equal parts of whole [`BLOCK`]s, at most
/// [`DEPTH_BLOCK`].
fn depth_block(left: usize) -> usize {
    let parts = left.div_ceil(DEPTH_BLOCK);
    left.div_ceil(parts).next_multiple_of(BLOCK).min(left)
}

#[cfg(test)]
mod tests {
    use super::{Grid, LAST_PARTS, Panels, PassSize, even_tasks};
    use crate::cpu::{Cpu, KernelSet};

    #[test]
    fn tasks_cover_every_tile_once() {
        let mut cuts = 0;
        for threads in [1, 2, 5] {
            let dev = Cpu::new(KernelSet::Portable, threads);
            for (rows, cols, depth) in [
                (1024usize, 3072usize, 576usize),
                (1024, 576, 1536),
                (3000, 200, 1000),
                (4000, 4000, 2000),
                (193, 5, 7),
                (32, 960, 576),
            ] {
                let (panels, col_panels) = (Panels::new(rows, 9), cols.div_ceil(48));
                let size = PassSize { rows, cols, depth };
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
