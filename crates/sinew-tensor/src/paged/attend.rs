//! The kernel: query rows against tiles of keys, with a running softmax.
//!
//! Each row and head goes through its keys in the same order, whatever the other rows are, which makes
//! results independent of the batch. The largest score is rounded to an integer, so that rescaling is exact,
//! and sums go key by key: results do not depend on tiles either, and have the bits of attention in training
//! ([`crate::attention`]).

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the kernels are pointer arithmetic throughout"
)]

use std::f32::consts::LOG2_E;
use std::ptr;

use super::{Bundle, PANEL_TOKENS, QueryRow};
use crate::attention::kernel::{carve, copy_padded};
use crate::attention::tile::{LOWEST, exp2_below};
use crate::buffer::{Scratch, SharedMut};
use crate::simd::{Vector, simd_fn};

/// Panels of a tile: with three or four query heads, 12 or 16 sums run at once.
const TILE_PANELS: usize = 4;
/// Keys of a tile.
const TILE_KEYS: usize = TILE_PANELS * PANEL_TOKENS;
/// Maximum query heads that go through a tile together.
const MAX_HEADS: usize = 4;

simd_fn! {
    /// Writes the bundle's rows and heads of `out` `[rows, out_width]`.
    ///
    /// # Safety
    /// The blocks of all visible keys exist, and no other task writes the same rows and heads.
    pub(super) fn attend<V>(bundle: &Bundle<'_>, out: SharedMut<'_>, memory: &mut Scratch) {
        run::<V>(bundle, out, memory);
    }
}

/// A tile of up to [`TILE_KEYS`] keys of one row.
struct Tile {
    /// Keys of each panel, `[padded_dim, PANEL_TOKENS]`.
    keys: [*const f32; TILE_PANELS],
    /// Values of each panel, `[PANEL_TOKENS, padded_dim]`.
    values: [*const f32; TILE_PANELS],
    count: usize,
    dim: usize,
    padded: usize,
}

impl Tile {
    /// Keys from `first` on that `row` sees.
    #[inline(always)]
    unsafe fn new(bundle: &Bundle<'_>, row: &QueryRow, first: usize) -> Self {
        let pool = bundle.pool;
        let mut tile = Self {
            keys: [ptr::null(); TILE_PANELS],
            values: [ptr::null(); TILE_PANELS],
            count: TILE_KEYS.min(row.visible - first),
            dim: pool.shape.head_dim(),
            padded: pool.padded_dim,
        };
        let blocks = bundle.sequences[row.sequence].blocks;
        for panel in 0..tile.count.div_ceil(PANEL_TOKENS) {
            let token = first + panel * PANEL_TOKENS;
            let block = blocks[token / pool.block_tokens] as usize;
            let token = token % pool.block_tokens;
            let base = pool.block_at(bundle.layer, bundle.kv_head, block);
            tile.keys[panel] = pool.data.as_ptr().add(base + pool.key_at(token, 0));
            tile.values[panel] = pool.data.as_ptr().add(base + pool.value_at(token, 0));
        }
        // Sums of all panels run at once in the time of one: a missing panel repeats the first, and
        // its scores are not read.
        for panel in tile.panels()..TILE_PANELS {
            tile.keys[panel] = tile.keys[0];
        }
        tile
    }

    fn panels(&self) -> usize {
        self.count.div_ceil(PANEL_TOKENS)
    }
}

/// Running state of some heads of one row, each pointer to the first of them.
#[derive(Clone, Copy)]
struct Heads {
    /// Scaled queries, `[heads, padded_dim]`.
    queries: *const f32,
    /// Outputs so far, `[heads, padded_dim]`.
    sums: *mut f32,
    /// Largest score so far, rounded to an integer, and sum of `2^(score - largest)`, `[heads, 2]`.
    softmax: *mut [f32; 2],
    /// Scores of the tile, `[heads, TILE_KEYS]`.
    scores: *mut f32,
}

/// All rows and heads of a bundle, tile by tile: a tile's keys stay in cache for all rows that see
/// it.
#[inline(always)]
unsafe fn run<V: Vector>(bundle: &Bundle<'_>, out: SharedMut<'_>, memory: &mut Scratch) {
    let shape = bundle.pool.shape;
    let (dim, padded, group) = (shape.head_dim(), bundle.pool.padded_dim, shape.group());
    let (count, len) = (bundle.rows.len(), group * padded);
    let mut softmax = vec![[LOWEST, 0.0]; count * group];
    let mut rest = memory.take(2 * count * len + MAX_HEADS * TILE_KEYS);
    let queries = carve(&mut rest, count * len);
    let sums = carve(&mut rest, count * len);
    sums.fill(0.0);
    let scale = LOG2_E / (dim as f32).sqrt();
    let first_head = bundle.kv_head * group;
    for (to, row) in queries.chunks_exact_mut(len).zip(bundle.rows) {
        for (h, to) in to.chunks_exact_mut(padded).enumerate() {
            let at = shape.query_at(row.row, first_head + h);
            copy_padded(to, &bundle.qkv[at..at + dim]);
            to.iter_mut().for_each(|q| *q *= scale);
        }
    }
    let longest = bundle.rows.iter().map(|r| r.visible).max().unwrap_or(0);
    for first in (0..longest).step_by(TILE_KEYS) {
        for (i, row) in bundle.rows.iter().enumerate() {
            if row.visible > first {
                let tile = Tile::new(bundle, row, first);
                let heads = Heads {
                    queries: queries.as_ptr().add(i * len),
                    sums: sums.as_mut_ptr().add(i * len),
                    softmax: softmax.as_mut_ptr().add(i * group),
                    scores: rest.as_mut_ptr(),
                };
                add_tile::<V>(&tile, heads, group);
            }
        }
    }
    for (i, row) in bundle.rows.iter().enumerate() {
        for h in 0..group {
            let at = row.out * shape.out_width() + (first_head + h) * dim;
            let from = &sums[i * len + h * padded..][..dim];
            let total = softmax[i * group + h][1];
            for (o, s) in out.range(at..at + dim).iter_mut().zip(from) {
                *o = s / total;
            }
        }
    }
}

/// Adds a tile to all heads of a row, some at a time.
#[inline(always)]
unsafe fn add_tile<V: Vector>(tile: &Tile, all: Heads, group: usize) {
    let most = if group.is_multiple_of(3) {
        3
    } else {
        MAX_HEADS
    };
    let mut h = 0;
    while h < group {
        let heads = Heads {
            queries: all.queries.add(h * tile.padded),
            sums: all.sums.add(h * tile.padded),
            softmax: all.softmax.add(h),
            scores: all.scores,
        };
        match most.min(group - h) {
            1 => add_heads::<V, 1>(tile, heads),
            2 => add_heads::<V, 2>(tile, heads),
            3 => add_heads::<V, 3>(tile, heads),
            _ => add_heads::<V, 4>(tile, heads),
        }
        h += most;
    }
}

/// Adds a tile to `G` heads: scores, weights, weighted values.
#[inline(always)]
unsafe fn add_heads<V: Vector, const G: usize>(tile: &Tile, heads: Heads) {
    if V::LANES == PANEL_TOKENS {
        dots::<V, G, TILE_PANELS>(tile, heads, tile.keys, 0);
    } else {
        for panel in 0..tile.panels() {
            let keys = tile.keys[panel];
            let halves = [keys, keys.add(V::LANES)];
            dots::<V, G, 2>(tile, heads, halves, panel * PANEL_TOKENS);
        }
    }
    for g in 0..G {
        softmax_head::<V>(tile, heads, g);
    }
    let mut d = 0;
    while d < tile.padded {
        // The first columns come with the sum of the weights.
        if V::LANES < PANEL_TOKENS {
            weigh_from::<V, G, 2>(tile, heads, d);
            d += 2 * V::LANES;
        } else if tile.padded - d >= 4 * V::LANES {
            weigh_from::<V, G, 4>(tile, heads, d);
            d += 4 * V::LANES;
        } else {
            weigh_from::<V, G, 1>(tile, heads, d);
            d += V::LANES;
        }
    }
}

#[inline(always)]
unsafe fn weigh_from<V: Vector, const G: usize, const N: usize>(
    tile: &Tile,
    heads: Heads,
    d: usize,
) {
    if d == 0 {
        weigh::<V, G, N, true>(tile, heads, d);
    } else {
        weigh::<V, G, N, false>(tile, heads, d);
    }
}

/// Scores of `N` vectors of keys, the first of them key `at` of the tile.
#[inline(always)]
unsafe fn dots<V: Vector, const G: usize, const N: usize>(
    tile: &Tile,
    heads: Heads,
    keys: [*const f32; N],
    at: usize,
) {
    // Counted loops and wrapping arithmetic, as in the products of training.
    let mut sum = [[V::splat(0.0); N]; G];
    let mut d = 0;
    while d < tile.dim {
        let mut key = [V::splat(0.0); N];
        let mut n = 0;
        while n < N {
            key[n] = V::load(keys[n].wrapping_add(d * PANEL_TOKENS));
            n += 1;
        }
        let mut g = 0;
        while g < G {
            let query = V::broadcast(heads.queries.wrapping_add(g * tile.padded + d));
            let mut n = 0;
            while n < N {
                sum[g][n] = query.fma(key[n], sum[g][n]);
                n += 1;
            }
            g += 1;
        }
        d += 1;
    }
    let mut g = 0;
    while g < G {
        let mut n = 0;
        while n < N {
            let to = heads.scores.wrapping_add(g * TILE_KEYS + at + n * V::LANES);
            sum[g][n].store(to);
            n += 1;
        }
        g += 1;
    }
}

/// Turns the scores of head `g` into `2^(score - largest)`; where the largest rises, scales down the
/// sums so far. [`weigh`] adds them up.
#[inline(always)]
unsafe fn softmax_head<V: Vector>(tile: &Tile, heads: Heads, g: usize) {
    let scores = heads.scores.add(g * TILE_KEYS);
    let end = tile.panels() * PANEL_TOKENS;
    for key in tile.count..end {
        *scores.add(key) = f32::NEG_INFINITY;
    }
    let state = &mut *heads.softmax.add(g);
    let mut max = V::splat(state[0]);
    for at in (0..end).step_by(V::LANES) {
        max = max.max(V::load(scores.add(at)));
    }
    let largest = first_lane(V::splat(max.max_lane()).round());
    if largest > state[0] {
        let shrink = exp2_below(V::splat(state[0]), V::splat(largest));
        state[0] = largest;
        state[1] *= first_lane(shrink);
        let sums = heads.sums.add(g * tile.padded);
        for d in (0..tile.padded).step_by(V::LANES) {
            V::load(sums.add(d)).mul(shrink).store(sums.add(d));
        }
    }
    for at in (0..end).step_by(V::LANES) {
        let p = exp2_below(V::load(scores.add(at)), V::splat(state[0]));
        p.store(scores.add(at));
    }
}

/// The value of the first lane.
#[inline(always)]
unsafe fn first_lane<V: Vector>(v: V) -> f32 {
    let mut lanes = [0.0; 16];
    v.store(lanes.as_mut_ptr());
    lanes[0]
}

/// Adds the tile's values, weighted, to `N` vectors of the sums from value `d` on; with `TOTAL` also the
/// weights to the sums of weights, key by key as training does: together with the other sums that takes no
/// additional time.
#[inline(always)]
unsafe fn weigh<V: Vector, const G: usize, const N: usize, const TOTAL: bool>(
    tile: &Tile,
    heads: Heads,
    d: usize,
) {
    let at = |g: usize, n: usize| heads.sums.wrapping_add(g * tile.padded + d + n * V::LANES);
    let mut sum = [[V::splat(0.0); N]; G];
    let mut total = [V::splat(0.0); G];
    let mut g = 0;
    while g < G {
        let mut n = 0;
        while n < N {
            sum[g][n] = V::load(at(g, n));
            n += 1;
        }
        if TOTAL {
            total[g] = V::splat((*heads.softmax.wrapping_add(g))[1]);
        }
        g += 1;
    }
    let mut key = 0;
    while key < tile.count {
        let panel = tile.values[key / PANEL_TOKENS];
        let row = panel.wrapping_add(key % PANEL_TOKENS * tile.padded + d);
        let mut value = [V::splat(0.0); N];
        let mut n = 0;
        while n < N {
            value[n] = V::load(row.wrapping_add(n * V::LANES));
            n += 1;
        }
        let mut g = 0;
        while g < G {
            let weight = V::broadcast(heads.scores.wrapping_add(g * TILE_KEYS + key));
            let mut n = 0;
            while n < N {
                sum[g][n] = weight.fma(value[n], sum[g][n]);
                n += 1;
            }
            if TOTAL {
                total[g] = total[g].add(weight);
            }
            g += 1;
        }
        key += 1;
    }
    let mut g = 0;
    while g < G {
        let mut n = 0;
        while n < N {
            sum[g][n].store(at(g, n));
            n += 1;
        }
        if TOTAL {
            (*heads.softmax.wrapping_add(g))[1] = first_lane(total[g]);
        }
        g += 1;
    }
}
