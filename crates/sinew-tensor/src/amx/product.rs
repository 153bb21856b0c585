//! Blocked products: operands are packed once for all tasks, tasks share out the result.

use std::ops::Range;

use super::model::DEPTH;
use super::pack::{Side, Strip, TILE_WORDS, pack};
use super::tile::{self, Block, SIDE, TILE_BYTES, Tiles, one_row, two_rows};
use crate::buffer::{Part, Scratch};
use crate::matrix::{Mat, MatMut};
use crate::pool::Pool;

/// Rows and columns of the largest block in registers.
const BLOCK: usize = 2 * SIDE;
/// Words of `b` for 32 columns and 32 steps.
const STEP_WORDS: usize = 2 * TILE_WORDS;
/// Steps of a pass over operands: bounds the scratch of long sums.
const PASS_DEPTH: usize = 4096;
/// Words of a packed operand in a pass (16 MiB), which bounds scratch.
const ROOM: usize = 4 << 20;
/// Tiles along the contracted index between a read and a write of `c`: two rows of blocks of `a` with
/// them (64 KiB) stay near the first-level cache.
const BLOCK_STEPS: usize = 32;
/// Bytes of `b` that stay in the second-level cache while blocks of rows pass.
const B_BYTES: usize = 768 << 10;
/// Bytes of `b` that a task reads at most, so that tasks of the same columns share it.
const TASK_B_BYTES: usize = 1 << 20;
/// Blocks of rows in a task at most.
const TASK_ROWS: usize = 8;
/// Multiply-adds that a task has at least.
const TASK_WORK: usize = 1 << 21;
/// Tasks for each thread, so that a thread that gets less CPU time takes fewer.
const TASKS_PER_THREAD: usize = 6;
/// Values that a packing task has at least.
const PACK_GRAIN: usize = 32 << 10;

/// The right operand.
#[derive(Clone, Copy)]
pub(crate) enum Right<'a> {
    /// `[k, n]`, packed as needed.
    Plain(Mat<'a>),
    /// All of it, by [`pack_weights`].
    Packed(&'a [f32]),
}

/// One product `c (+)= a · b` with `a` `[m, k]`, `b` `[k, n]`, `c` `[m, n]`.
pub(crate) struct Product<'a> {
    /// None: only on the calling thread.
    pub(crate) pool: Option<&'a Pool>,
    pub(crate) a: Mat<'a>,
    pub(crate) b: Right<'a>,
    pub(crate) c: MatMut<'a>,
    pub(crate) accumulate: bool,
}

fn parallel_for(pool: Option<&Pool>, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
    match pool {
        Some(pool) => pool.parallel_for(tasks, body),
        None => (0..tasks).for_each(body),
    }
}

/// Only multiply-adds in tiles for `turns` rounds, on the calling thread. Returns the floating-point
/// operations.
///
/// # Safety
/// [`super::support`] has agreed.
pub(crate) unsafe fn spin(turns: usize) -> f64 {
    // SAFETY: by the caller's promise; nothing below calls out.
    let tiles = unsafe { Tiles::load() };
    tile::spin(turns, &tiles)
}

/// Words of packed weights `[n, k]`: two 16-bit values each, whole blocks.
pub(crate) fn packed_len(n: usize, k: usize) -> usize {
    n.div_ceil(BLOCK) * k.div_ceil(DEPTH) * STEP_WORDS
}

/// Packs all of `b` `[k, n]` into `dst`, [`packed_len`] words.
pub(crate) fn pack_weights(pool: Option<&Pool>, b: Mat<'_>, dst: &mut [f32]) {
    assert_eq!(
        dst.len(),
        packed_len(b.cols(), b.rows()),
        "words of packed weights"
    );
    // SAFETY: the length was checked.
    unsafe { pack_right(pool, b, 0..b.cols(), 0..b.rows(), Part(dst.as_mut_ptr())) };
}

/// # Safety
/// `dst` has space for the columns and steps in whole blocks.
unsafe fn pack_right(
    pool: Option<&Pool>,
    b: Mat<'_>,
    cols: Range<usize>,
    steps: Range<usize>,
    dst: Part,
) {
    let blocks = cols.len().div_ceil(BLOCK);
    let words = steps.len().div_ceil(DEPTH) * STEP_WORDS;
    let (step_stride, lane_stride) = (b.row_stride(), b.col_stride());
    let src = Part(
        b.as_ptr()
            .wrapping_add(steps.start * step_stride)
            .cast_mut(),
    );
    let tasks = (cols.len() * steps.len() / PACK_GRAIN).clamp(1, blocks.max(1));
    parallel_for(pool, tasks, &|task| {
        for block in task * blocks / tasks..(task + 1) * blocks / tasks {
            for half in 0..2 {
                let first = (block * BLOCK + half * SIDE).min(cols.len());
                let strip = Strip {
                    src: src.at((cols.start + first) * lane_stride),
                    lane_stride,
                    step_stride,
                    lanes: SIDE.min(cols.len() - first),
                    steps: steps.len(),
                };
                let to = dst.at(block * words + half * TILE_WORDS).cast();
                // SAFETY: the strip lies in `b`, blocks of tasks are disjoint, and the caller gave the space.
                unsafe { pack(&strip, Side::Right, to, STEP_WORDS) };
            }
        }
    });
}

/// # Safety
/// `dst` has space for the rows and steps in whole tiles.
unsafe fn pack_left(
    pool: Option<&Pool>,
    a: Mat<'_>,
    rows: Range<usize>,
    steps: Range<usize>,
    dst: Part,
) {
    let blocks = rows.len().div_ceil(SIDE);
    let words = steps.len().div_ceil(DEPTH) * TILE_WORDS;
    let (lane_stride, step_stride) = (a.row_stride(), a.col_stride());
    let src = Part(
        a.as_ptr()
            .wrapping_add(steps.start * step_stride)
            .cast_mut(),
    );
    let tasks = (rows.len() * steps.len() / PACK_GRAIN).clamp(1, blocks.max(1));
    parallel_for(pool, tasks, &|task| {
        for block in task * blocks / tasks..(task + 1) * blocks / tasks {
            let first = block * SIDE;
            let strip = Strip {
                src: src.at((rows.start + first) * lane_stride),
                lane_stride,
                step_stride,
                lanes: SIDE.min(rows.len() - first),
                steps: steps.len(),
            };
            // SAFETY: the strip lies in `a`, blocks of tasks are disjoint, and the caller gave the space.
            unsafe { pack(&strip, Side::Left, dst.at(block * words).cast(), TILE_WORDS) };
        }
    });
}

impl Product<'_> {
    /// Passes over steps, rows and columns, each small enough for the scratch.
    pub(crate) fn run(&self, scratch: &mut Scratch) {
        let (m, k, n) = (self.a.rows(), self.a.cols(), self.c.cols());
        assert_eq!(m, self.c.rows(), "rows of a and c");
        if let Right::Plain(b) = self.b {
            assert_eq!((b.rows(), b.cols()), (k, n), "b is [k, n]");
        }
        if m == 0 || n == 0 {
            return;
        }
        if k == 0 {
            return self.clear();
        }
        for p in (0..k).step_by(PASS_DEPTH) {
            let steps = p..(p + PASS_DEPTH).min(k);
            let tiles = steps.len().div_ceil(DEPTH);
            // A multiple of a block, which the last chunk need not fill.
            let fit = |words_each: usize| (ROOM / words_each).max(1) * BLOCK;
            let rows_each = fit(2 * tiles * TILE_WORDS).min(m.next_multiple_of(BLOCK));
            let cols_each = match self.b {
                Right::Plain(_) => fit(tiles * STEP_WORDS).min(n.next_multiple_of(BLOCK)),
                Right::Packed(_) => n,
            };
            let a_room = rows_each / SIDE * tiles * TILE_WORDS;
            let b_room = match self.b {
                Right::Plain(_) => cols_each / BLOCK * tiles * STEP_WORDS,
                Right::Packed(_) => 0,
            };
            let room = Part(scratch.take(a_room + b_room).as_mut_ptr());
            for i in (0..m).step_by(rows_each) {
                let rows = i..(i + rows_each).min(m);
                // SAFETY: the scratch has `a_room` words for them.
                unsafe { pack_left(self.pool, self.a, rows.clone(), steps.clone(), room) };
                for j in (0..n).step_by(cols_each) {
                    let cols = j..(j + cols_each).min(n);
                    let b = self.right(cols.clone(), steps.clone(), Part(room.at(a_room)));
                    self.pass(rows.clone(), cols, steps.clone(), room, b);
                }
            }
        }
    }

    /// The columns and steps of `b`, packed.
    fn right(&self, cols: Range<usize>, steps: Range<usize>, room: Part) -> PackedRight {
        match self.b {
            Right::Plain(b) => {
                let tiles = steps.len().div_ceil(DEPTH);
                // SAFETY: the scratch has space for a pass.
                unsafe { pack_right(self.pool, b, cols, steps, room) };
                PackedRight {
                    data: room.0,
                    block_words: tiles * STEP_WORDS,
                }
            }
            Right::Packed(data) => {
                let (k, n) = (self.a.cols(), self.c.cols());
                assert_eq!(data.len(), packed_len(n, k), "words of packed weights");
                PackedRight {
                    data: data.as_ptr().wrapping_add(steps.start / DEPTH * STEP_WORDS),
                    block_words: k.div_ceil(DEPTH) * STEP_WORDS,
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

    fn pass(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        steps: Range<usize>,
        a: Part,
        b: PackedRight,
    ) {
        let ldc = self.c.row_stride();
        let job = Job {
            a: a.0,
            b,
            c: self.c.as_ptr().wrapping_add(rows.start * ldc + cols.start),
            ldc,
            rows: rows.len(),
            cols: cols.len(),
            tiles: steps.len().div_ceil(DEPTH),
            load: self.accumulate || steps.start > 0,
        };
        let threads = self.pool.map_or(1, Pool::threads);
        let (row_tasks, col_tasks) = job.grid(threads);
        let (row_blocks, col_blocks) = (job.rows.div_ceil(BLOCK), job.cols.div_ceil(BLOCK));
        parallel_for(self.pool, row_tasks * col_tasks, &|task| {
            // Tasks with the same columns follow each other: threads share `b` in the last-level cache.
            let (i, j) = (task % row_tasks, task / row_tasks);
            let rows = i * row_blocks / row_tasks..(i + 1) * row_blocks / row_tasks;
            let cols = j * col_blocks / col_tasks..(j + 1) * col_blocks / col_tasks;
            // SAFETY: operands and `c` cover the pass; tasks compute disjoint parts of `c`.
            unsafe { job.compute(rows, cols) };
        });
    }
}

/// Packed columns, from the first column and step of a pass on.
#[derive(Clone, Copy)]
struct PackedRight {
    data: *const f32,
    /// Words from 32 columns to the next.
    block_words: usize,
}

/// Data that all tasks of a pass share.
struct Job {
    a: *const f32,
    b: PackedRight,
    c: *mut f32,
    ldc: usize,
    rows: usize,
    cols: usize,
    /// Tiles along the contracted index.
    tiles: usize,
    load: bool,
}
// SAFETY: the pointers are read-only operands, and `c`, of which tasks touch disjoint parts.
unsafe impl Sync for Job {}

impl Job {
    /// Tasks along rows and columns.
    fn grid(&self, threads: usize) -> (usize, usize) {
        let (row_blocks, col_blocks) = (self.rows.div_ceil(BLOCK), self.cols.div_ceil(BLOCK));
        let work = self.rows.next_multiple_of(SIDE) * self.cols * self.tiles * DEPTH;
        let wanted = (threads * TASKS_PER_THREAD).min(work / TASK_WORK);
        let b_bytes = col_blocks * self.tiles * STEP_WORDS * 4;
        let mut rows = row_blocks.div_ceil(TASK_ROWS);
        let mut cols = b_bytes.div_ceil(TASK_B_BYTES).min(col_blocks);
        if threads == 1 {
            return (rows, cols);
        }
        while rows * cols < wanted {
            if row_blocks >= 4 * rows {
                rows *= 2;
            } else if col_blocks >= 2 * cols {
                cols *= 2;
            } else {
                break;
            }
        }
        (rows, cols)
    }

    /// Computes blocks `rows` by `cols` of `c`.
    ///
    /// # Safety
    /// Operands cover them, and no other task has the same.
    unsafe fn compute(&self, rows: Range<usize>, cols: Range<usize>) {
        // SAFETY: products exist only for devices that have the kernels; no task runs inside another's
        // tiles, since nothing below calls out.
        let tiles = unsafe { Tiles::load() };
        let parts = self.tiles.div_ceil(BLOCK_STEPS);
        for part in 0..parts {
            let steps = part * self.tiles / parts..(part + 1) * self.tiles / parts;
            let chunk = (B_BYTES / (steps.len() * STEP_WORDS * 4)).max(1);
            for first in cols.clone().step_by(chunk) {
                for i in rows.clone() {
                    for j in first..(first + chunk).min(cols.end) {
                        // SAFETY: the caller's promise.
                        unsafe { self.block(i, j, steps.clone(), &tiles) };
                    }
                }
            }
        }
    }

    /// One block over `steps`; at the edges of `c` by way of a copy.
    ///
    /// # Safety
    /// Same as for [`Job::compute`].
    unsafe fn block(&self, i: usize, j: usize, steps: Range<usize>, tiles: &Tiles) {
        let (rows, cols) = (self.rows - i * BLOCK, self.cols - j * BLOCK);
        let (rows, cols) = (rows.min(BLOCK), cols.min(BLOCK));
        let padded_rows = rows.next_multiple_of(SIDE);
        let c = self.c.wrapping_add(i * BLOCK * self.ldc + j * BLOCK);
        let a = self
            .a
            .wrapping_add((2 * i * self.tiles + steps.start) * TILE_WORDS);
        let b = self
            .b
            .data
            .wrapping_add(j * self.b.block_words + steps.start * STEP_WORDS);
        let mut block = Block {
            a: a.cast(),
            a_next: self.tiles * TILE_BYTES,
            b: b.cast(),
            steps: steps.len(),
            c,
            c_stride: self.ldc * 4,
            load: self.load || steps.start > 0,
        };
        let run = if padded_rows == BLOCK {
            two_rows
        } else {
            one_row
        };
        // SAFETY: packed operands have whole tiles; `c` has the block, or `edge` takes its place.
        unsafe {
            if rows == padded_rows && cols == BLOCK {
                return run(&block, tiles);
            }
            let mut edge = Edge([[0.0; BLOCK]; BLOCK]);
            if block.load {
                for (r, row) in edge.0[..rows].iter_mut().enumerate() {
                    std::ptr::copy_nonoverlapping(c.add(r * self.ldc), row.as_mut_ptr(), cols);
                }
            }
            block.c = edge.0.as_mut_ptr().cast();
            block.c_stride = BLOCK * 4;
            run(&block, tiles);
            for (r, row) in edge.0[..rows].iter().enumerate() {
                std::ptr::copy_nonoverlapping(row.as_ptr(), c.add(r * self.ldc), cols);
            }
        }
    }
}

/// A whole block, for edges.
#[repr(align(64))]
struct Edge([[f32; BLOCK]; BLOCK]);
