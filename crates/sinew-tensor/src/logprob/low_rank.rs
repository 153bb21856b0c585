//! Low-rank additions to the weights of a head: adapters of the output projection (LoRA, Hu et al. 2021).
//!
//! The matrix `w + scale · b a` is never whole in memory. Either a section of it is made when its logits are
//! computed, or the logits get the products of `rank` inner values with the rows of `b` added. Both give the
//! logits of the same matrix; each has the bits of an engine that does the same. The products with `a` and
//! `b` multiply `f32` operands, also on AMX, whose rounded operands would lose what training changed by
//! little.

use std::ops::Range;

use crate::buffer::Scratch;
use crate::cpu::Cpu;
use crate::matrix::{Mat, MatMut};
use crate::ops;

/// Addition of `scale · b a` to the weights of a head.
#[derive(Clone, Copy, Debug)]
pub struct LowRank<'a> {
    /// `[rank, dim]`
    pub a: &'a [f32],
    /// `[vocab, rank]`
    pub b: &'a [f32],
    /// Inner width, above 0.
    pub rank: usize,
    /// Factor of the product.
    pub scale: f32,
    /// Whether sections of the sum are made: the logits are those of merged weights, to the bit. Otherwise
    /// the products of both parts are added, which is less work for fewer rows than `rank`.
    pub merged: bool,
}

/// Gradients of a [`LowRank`], which are added to.
#[derive(Debug)]
pub struct LowRankGrads<'a> {
    /// Gradient of `a`, `[rank, dim]`.
    pub a: &'a mut [f32],
    /// Gradient of `b`, `[vocab, rank]`.
    pub b: &'a mut [f32],
}

/// Memory of a block of rows and of a section.
#[derive(Debug, Default)]
pub(super) struct LowRankScratch {
    /// `[rows, rank]` each: inner values, and their gradients.
    pub(super) inner: Scratch,
    pub(super) d_inner: Scratch,
    pub(super) section: SectionScratch,
}

/// Memory of a merged section.
#[derive(Debug, Default)]
pub(super) struct SectionScratch {
    /// `[tokens, dim]`
    weights: Scratch,
    /// `[tokens, rank]`: `scale · b`.
    scaled: Scratch,
}

impl LowRankScratch {
    pub(super) fn bytes(&self) -> usize {
        let section = self.section.weights.bytes() + self.section.scaled.bytes();
        self.inner.bytes() + self.d_inner.bytes() + section
    }
}

/// Rows of the head `w` `[vocab, dim]` that belong to `tokens`, with the addition if it is to be merged.
pub(super) fn section<'s>(
    exact: &Cpu,
    w: &'s [f32],
    dim: usize,
    low_rank: Option<&LowRank<'_>>,
    tokens: &Range<usize>,
    scratch: &'s mut SectionScratch,
) -> Mat<'s> {
    let w = &w[tokens.start * dim..tokens.end * dim];
    match low_rank.filter(|low_rank| low_rank.merged) {
        Some(low_rank) => low_rank.merge(exact, w, tokens, scratch),
        None => Mat::new(w, tokens.len(), dim),
    }
}

impl<'a> LowRank<'a> {
    /// Panics on lengths that do not fit a head `[vocab, dim]`.
    pub(super) fn check(&self, vocab: usize, dim: usize) {
        let Self { a, b, rank, .. } = self;
        assert!(
            *rank > 0 && a.len() == rank * dim && b.len() == vocab * rank,
            "a low-rank addition to [{vocab}, {dim}] has a [{rank}, {dim}] and b [{vocab}, {rank}], found {} \
             and {} values",
            a.len(),
            b.len()
        );
    }

    /// `scale · x aᵀ`, `[rows, rank]`. `exact` multiplies `f32` operands.
    pub(super) fn inner<'s>(
        &self,
        exact: &Cpu,
        x: Mat<'_>,
        scratch: &'s mut Scratch,
    ) -> &'s mut [f32] {
        let inner = scratch.take(x.rows() * self.rank);
        let a = Mat::new(self.a, self.rank, x.cols());
        exact.matmul_nt(x, a, MatMut::new(inner, x.rows(), self.rank), false);
        ops::scale(exact, self.scale, inner);
        inner
    }

    /// `w + scale · b a` for the rows `w` of `tokens`.
    fn merge<'s>(
        &self,
        exact: &Cpu,
        w: &[f32],
        tokens: &Range<usize>,
        scratch: &'s mut SectionScratch,
    ) -> Mat<'s> {
        let (rank, dim) = (self.rank, w.len() / tokens.len());
        let merged = scratch.weights.take(w.len());
        merged.copy_from_slice(w);
        let scaled = scratch.scaled.take(tokens.len() * rank);
        let b = &self.b[tokens.start * rank..tokens.end * rank];
        for (scaled, b) in scaled.iter_mut().zip(b) {
            *scaled = b * self.scale;
        }
        let (b, a) = (
            Mat::new(scaled, tokens.len(), rank),
            Mat::new(self.a, rank, dim),
        );
        exact.matmul_nn(b, a, MatMut::new(merged, tokens.len(), dim), true);
        Mat::new(merged, tokens.len(), dim)
    }

    /// Rows of `b` that belong to `tokens`.
    fn outer(&self, tokens: &Range<usize>) -> Mat<'a> {
        let rows = &self.b[tokens.start * self.rank..tokens.end * self.rank];
        Mat::new(rows, tokens.len(), self.rank)
    }

    /// `y += inner bᵀ`, the logits of `tokens`.
    pub(super) fn add(&self, exact: &Cpu, inner: &[f32], tokens: &Range<usize>, y: MatMut<'_>) {
        let inner = Mat::new(inner, y.rows(), self.rank);
        exact.matmul_nt(inner, self.outer(tokens), y, true);
    }

    /// From the gradients of a section's logits: those of the inner values, which the first section
    /// overwrites, and those of `b`.
    pub(super) fn section_backward(
        &self,
        exact: &Cpu,
        d_logits: Mat<'_>,
        tokens: &Range<usize>,
        inner: &[f32],
        d_inner: &mut [f32],
        db: Option<&mut [f32]>,
    ) {
        let (rows, rank) = (d_logits.rows(), self.rank);
        let to = MatMut::new(d_inner, rows, rank);
        exact.matmul_nn(d_logits, self.outer(tokens), to, tokens.start > 0);
        if let Some(db) = db {
            let db = &mut db[tokens.start * rank..tokens.end * rank];
            let to = MatMut::new(db, tokens.len(), rank);
            exact.matmul_tn(d_logits, Mat::new(inner, rows, rank), to, true);
        }
    }

    /// From the gradients of the inner values, all sections together: adds to those of the hidden states,
    /// unless merged sections did, and of `a`.
    pub(super) fn rows_backward(
        &self,
        exact: &Cpu,
        x: Mat<'_>,
        d_inner: &mut [f32],
        dx: &mut [f32],
        da: Option<&mut [f32]>,
    ) {
        let (rows, dim, rank) = (x.rows(), x.cols(), self.rank);
        ops::scale(exact, self.scale, d_inner);
        let d_inner = Mat::new(d_inner, rows, rank);
        if !self.merged {
            let a = Mat::new(self.a, rank, dim);
            exact.matmul_nn(d_inner, a, MatMut::new(dx, rows, dim), true);
        }
        if let Some(da) = da {
            exact.matmul_tn(d_inner, x, MatMut::new(da, rank, dim), true);
        }
    }
}
