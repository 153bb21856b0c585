//! Fused projections, with their adapters where there are some.

use super::activations::LoraWork;
use super::{Grads, GradsOf, Pass};
use crate::lora::{Adapter, Projection};
use sinew_tensor::{Mat, MatMut, ops};
use std::ops::Range;

/// Projections that share their input and lie side by side in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    Qkv,
    O,
    GateUp,
    Down,
}

/// A group in one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Site {
    pub(super) layer: usize,
    pub(super) group: Group,
}

impl Group {
    /// This group in `layer`.
    pub(super) fn at(self, layer: usize) -> Site {
        Site { layer, group: self }
    }
}

/// A group's matrix `[n, k]` in one layer.
struct Fused {
    weight: Range<usize>,
    bias: Option<Range<usize>>,
    n: usize,
    k: usize,
    /// Projection, first output column, width.
    parts: Vec<(Projection, usize, usize)>,
}

impl Pass<'_> {
    fn fused(&self, Site { layer, group }: Site) -> Fused {
        let c = self.config();
        let ranges = &self.layout().layers[layer];
        let (d, q, kv, ff) = (c.d_model, c.q_dim(), c.kv_dim(), c.d_ff);
        let plain = |weight: &Range<usize>, n, k, parts: &[(Projection, usize, usize)]| Fused {
            weight: weight.clone(),
            bias: None,
            n,
            k,
            parts: parts.to_vec(),
        };
        match group {
            Group::Qkv => Fused {
                bias: ranges.qkv_bias.clone(),
                ..plain(
                    &ranges.qkv,
                    q + 2 * kv,
                    d,
                    &[
                        (Projection::Q, 0, q),
                        (Projection::K, q, kv),
                        (Projection::V, q + kv, kv),
                    ],
                )
            },
            Group::O => plain(&ranges.o, d, q, &[(Projection::O, 0, d)]),
            Group::GateUp => plain(
                &ranges.gate_up,
                2 * ff,
                d,
                &[(Projection::Gate, 0, ff), (Projection::Up, ff, ff)],
            ),
            Group::Down => plain(&ranges.down, d, ff, &[(Projection::Down, 0, d)]),
        }
    }

    /// `y (+)= x Wᵀ + bias + adapters`; `x` `[rows, k]`, `y` `[rows, n]`.
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
        let w = Mat::new(self.values(&fused.weight), n, k);
        dev.matmul_nt(Mat::new(x, rows, k), w, MatMut::new(y, rows, n), accumulate);
        if let Some(bias) = &fused.bias {
            ops::bias_add(dev, self.values(bias), y);
        }
        let Some(lora) = self.weights.lora else {
            return;
        };
        for (projection, column, width) in fused.parts {
            let Some(adapter) = lora.adapter(site.layer, projection) else {
                continue;
            };
            let inner = work.inner.take(rows * adapter.rank);
            self.inner(&adapter, x, inner);
            let y = MatMut::with_ld(&mut y[column..], rows, width, n);
            let b = Mat::new(adapter.b, width, adapter.rank);
            dev.matmul_nt(Mat::new(inner, rows, adapter.rank), b, y, true);
        }
    }

    /// `inner = scale · x Aᵀ`, `[rows, rank]`.
    fn inner(&self, adapter: &Adapter<'_>, x: &[f32], inner: &mut [f32]) {
        let rank = adapter.rank;
        let (rows, k) = (inner.len() / rank, adapter.a.len() / rank);
        let a = Mat::new(adapter.a, rank, k);
        self.dev.matmul_nt(
            Mat::new(x, rows, k),
            a,
            MatMut::new(inner, rows, rank),
            false,
        );
        ops::scale(self.dev, adapter.scale, inner);
    }

    /// Gradients of [`Pass::linear`] from `dy` `[rows, n]`: overwrites `dx` `[rows, k]` (left out
    /// where nobody needs it) and adds to `grads`.
    pub(super) fn linear_backward(
        &self,
        site: Site,
        x: &[f32],
        dy: &[f32],
        dx: Option<&mut [f32]>,
        grads: &mut Grads,
        work: &mut LoraWork,
    ) {
        let fused = self.fused(site);
        let (dev, n, k) = (self.dev, fused.n, fused.k);
        let rows = dy.len() / n;
        let dy_mat = Mat::new(dy, rows, n);
        let mut dx = dx;
        if let Some(dx) = &mut dx {
            let w = Mat::new(self.values(&fused.weight), n, k);
            dev.matmul_nn(dy_mat, w, MatMut::new(dx, rows, k), false);
        }
        if grads.of == GradsOf::Params {
            let dw = MatMut::new(&mut grads.values[fused.weight.clone()], n, k);
            dev.matmul_tn(dy_mat, Mat::new(x, rows, k), dw, true);
            if let Some(bias) = fused.bias {
                ops::bias_backward(dev, dy, &mut grads.values[bias]);
            }
            return;
        }
        let Some(lora) = self.weights.lora else {
            return;
        };
        for (projection, column, width) in fused.parts {
            let Some(adapter) = lora.adapter(site.layer, projection) else {
                continue;
            };
            let dy = Mat::with_ld(&dy[column..], rows, width, n);
            self.adapter_backward(&adapter, x, dy, dx.as_deref_mut(), grads, work);
        }
    }

    /// `dB += dyᵀ inner`, `dA += d_innerᵀ x`, `dx += d_inner A` with `d_inner = scale · dy B`.
    fn adapter_backward(
        &self,
        adapter: &Adapter<'_>,
        x: &[f32],
        dy: Mat<'_>,
        dx: Option<&mut [f32]>,
        grads: &mut Grads,
        work: &mut LoraWork,
    ) {
        let (dev, rank, rows, width) = (self.dev, adapter.rank, dy.rows(), dy.cols());
        let k = adapter.a.len() / rank;
        let inner = work.inner.take(rows * rank);
        self.inner(adapter, x, inner);
        let db = MatMut::new(&mut grads.values[adapter.b_at.clone()], width, rank);
        dev.matmul_tn(dy, Mat::new(inner, rows, rank), db, true);
        let d_inner = work.d_inner.take(rows * rank);
        let b = Mat::new(adapter.b, width, rank);
        dev.matmul_nn(dy, b, MatMut::new(d_inner, rows, rank), false);
        ops::scale(dev, adapter.scale, d_inner);
        let d_inner = Mat::new(d_inner, rows, rank);
        let da = MatMut::new(&mut grads.values[adapter.a_at.clone()], rank, k);
        dev.matmul_tn(d_inner, Mat::new(x, rows, k), da, true);
        if let Some(dx) = dx {
            let a = Mat::new(adapter.a, rank, k);
            dev.matmul_nn(d_inner, a, MatMut::new(dx, rows, k), true);
        }
    }
}
