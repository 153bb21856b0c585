//! Fused projections, with their adapters if there are any.
//!
//! Adapters are added to the weights, as in an engine with merged weights, or to the products, as in one with
//! several adapters: training has the bits of the engine that does the same. A pass that merges writes and
//! reads every adapted matrix again, which takes as long as `f32` products of about a hundred rows.

use super::activations::LoraWork;
use super::{Grads, GradsOf, Pass};
use crate::decoder::copy;
use crate::lora::{Group, GroupPlaces, Lora};
use sinew_tensor::{Mat, MatMut, ops};
use std::ops::Range;

/// A group of projections in one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Site {
    layer: usize,
    group: Group,
}

impl Group {
    /// This group in `layer`.
    pub(super) fn at(self, layer: usize) -> Site {
        Site { layer, group: self }
    }
}

/// A site's matrix `[n, k]`.
struct Fused {
    weight: Range<usize>,
    bias: Option<Range<usize>>,
    n: usize,
    k: usize,
}

/// The adapters of a site.
struct Adapters<'a> {
    lora: &'a Lora,
    places: &'a GroupPlaces,
    /// Rank of each.
    rank: usize,
    /// Ranks of all together.
    ranks: usize,
}

impl<'a> Adapters<'a> {
    /// All A, one below the other: `[ranks, k]`.
    fn a(&self, k: usize) -> Mat<'a> {
        Mat::new(&self.lora.values()[self.places.a.clone()], self.ranks, k)
    }
}

impl<'a> Pass<'a> {
    /// Place, bias and shape of a site's matrix.
    fn fused(&self, site: Site) -> Fused {
        let c = self.config();
        let ranges = &self.layout().layers[site.layer];
        let (d, q, ff) = (c.d_model, c.q_dim(), c.d_ff);
        let (weight, n, k) = match site.group {
            Group::Qkv => (&ranges.qkv, c.qkv_dim(), d),
            Group::O => (&ranges.o, d, q),
            Group::GateUp => (&ranges.gate_up, 2 * ff, d),
            Group::Down => (&ranges.down, d, ff),
        };
        let bias = if site.group == Group::Qkv {
            ranges.qkv_bias.clone()
        } else {
            None
        };
        Fused {
            weight: weight.clone(),
            bias,
            n,
            k,
        }
    }

    /// The adapters of a site, if it has some.
    fn adapters(&self, site: Site) -> Option<Adapters<'a>> {
        let lora = self.weights.lora?;
        let places = lora.layout().group(site.layer, site.group)?;
        let rank = lora.config().rank;
        Some(Adapters {
            lora,
            places,
            rank,
            ranks: rank * places.parts.len(),
        })
    }

    /// `y (+)= x (W + adapters)ᵀ + bias`; `x` `[rows, k]`, `y` `[rows, n]`, overwritten or, with
    /// `accumulate`, added to.
    pub(super) fn linear(
        &self,
        site: Site,
        x: &[f32],
        y: &mut [f32],
        accumulate: bool,
        work: &mut LoraWork,
    ) {
        let fused = self.fused(site);
        let (dev, n, k) = (self.dev, fused.n, fused.k);
        let rows = x.len() / k;
        let w = Mat::new(self.weight(site, &fused, work), n, k);
        let (x, to) = (Mat::new(x, rows, k), MatMut::new(y, rows, n));
        dev.matmul_nt(x, w, to, accumulate);
        if let Some(Adapters { lora, places, .. }) = self.adapters(site).filter(|_| !self.merges) {
            lora.add_products(dev, places, x, y, &mut work.inner);
        }
        if let Some(bias) = &fused.bias {
            ops::bias_add(dev, self.values(bias), y);
        }
    }

    /// The matrix of a site, `[n, k]`, with its adapters if they are merged.
    fn weight<'w>(&'w self, site: Site, fused: &Fused, work: &'w mut LoraWork) -> &'w [f32] {
        let own = self.values(&fused.weight);
        let adapters = self.adapters(site).filter(|_| self.merges);
        let Some(Adapters { lora, places, .. }) = adapters else {
            return own;
        };
        let merged = work.merged.take(own.len());
        copy(self.dev, own, merged);
        for (index, part) in places.parts.iter().enumerate() {
            let rows = part.column * fused.k..(part.column + part.width) * fused.k;
            lora.merge_part(self.dev, places, index, &mut merged[rows], &mut work.scaled);
        }
        merged
    }

    /// `inner = scale · x Aᵀ` of all adapters side by side, `[rows, ranks]`.
    fn inner(&self, adapters: &Adapters<'_>, x: &[f32], inner: &mut [f32]) {
        let rows = inner.len() / adapters.ranks;
        let k = x.len() / rows;
        let y = MatMut::new(inner, rows, adapters.ranks);
        self.dev
            .matmul_nt(Mat::new(x, rows, k), adapters.a(k), y, false);
        ops::scale(self.dev, adapters.lora.scale(), inner);
    }

    /// Gradients of [`Pass::linear`] from `dy` `[rows, n]`: overwrites `dx` `[rows, k]` (left out
    /// where it is not needed) and adds to `grads`.
    pub(super) fn linear_backward(
        &self,
        site: Site,
        x: &[f32],
        dy: &[f32],
        mut dx: Option<&mut [f32]>,
        grads: &mut Grads,
        work: &mut LoraWork,
    ) {
        let fused = self.fused(site);
        let (dev, n, k) = (self.dev, fused.n, fused.k);
        let rows = dy.len() / n;
        let dy_mat = Mat::new(dy, rows, n);
        if let Some(dx) = dx.as_deref_mut() {
            let w = Mat::new(self.weight(site, &fused, work), n, k);
            dev.matmul_nn(dy_mat, w, MatMut::new(dx, rows, k), false);
        }
        if grads.of == GradsOf::Params {
            let dw = MatMut::new(&mut grads.values[fused.weight.clone()], n, k);
            dev.matmul_tn(dy_mat, Mat::new(x, rows, k), dw, !grads.pending);
            if let Some(bias) = fused.bias {
                ops::bias_backward(dev, dy, &mut grads.values[bias]);
            }
        } else if let Some(adapters) = self.adapters(site) {
            let dx = dx.filter(|_| !self.merges);
            self.adapters_backward(&adapters, x, dy, dx, grads, work);
        }
    }

    /// `dB += dyᵀ inner`, `dA += d_innerᵀ x` with `d_inner = scale · dy B`; and, for adapters that are not
    /// merged, `dx += d_inner A`.
    fn adapters_backward(
        &self,
        adapters: &Adapters<'_>,
        x: &[f32],
        dy: &[f32],
        dx: Option<&mut [f32]>,
        grads: &mut Grads,
        work: &mut LoraWork,
    ) {
        let (dev, rank, ranks) = (self.dev, adapters.rank, adapters.ranks);
        let k = adapters.places.a.len() / ranks;
        let rows = x.len() / k;
        let n = dy.len() / rows;
        let inner = work.inner.take(rows * ranks);
        self.inner(adapters, x, inner);
        let d_inner = work.d_inner.take(rows * ranks);
        for (i, part) in adapters.places.parts.iter().enumerate() {
            let dy = Mat::with_ld(&dy[part.column..], rows, part.width, n);
            let inner = Mat::with_ld(&inner[i * rank..], rows, rank, ranks);
            let db = MatMut::new(&mut grads.values[part.b.clone()], part.width, rank);
            dev.matmul_tn(dy, inner, db, true);
            let b = Mat::new(&adapters.lora.values()[part.b.clone()], part.width, rank);
            let d_inner = MatMut::with_ld(&mut d_inner[i * rank..], rows, rank, ranks);
            dev.matmul_nn(dy, b, d_inner, false);
        }
        ops::scale(dev, adapters.lora.scale(), d_inner);
        let d_inner = Mat::new(d_inner, rows, ranks);
        if let Some(dx) = dx {
            let to = MatMut::new(dx, rows, k);
            dev.with_f32_products()
                .matmul_nn(d_inner, adapters.a(k), to, true);
        }
        let da = MatMut::new(&mut grads.values[adapters.places.a.clone()], ranks, k);
        dev.matmul_tn(d_inner, Mat::new(x, rows, k), da, true);
    }
}
