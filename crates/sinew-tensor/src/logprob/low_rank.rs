//! Low-rank additions to the weights of a head: adapters of the output projection (LoRA, Hu et al. 2021).
//!
//! The matrix `w + scale · b a` is never computed: the logits of a section get the products of `rank` inner
//! values with the section's rows of `b` added. All these products multiply `f32` operands, also on AMX,
//! whose rounded operands would lose what training changed by little.

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
}

/// Gradients of a [`LowRank`], which are added to.
#[derive(Debug)]
pub struct LowRankGrads<'a> {
    /// Gradient of `a`, `[rank, dim]`.
    pub a: &'a mut [f32],
    /// Gradient of `b`, `[vocab, rank]`.
    pub b: &'a mut [f32],
}

/// Memory of a block of rows.
#[derive(Debug, Default)]
pub(super) struct LowRankScratch {
    /// `[rows, rank]` each: inner values, and their gradients.
    pub(super) inner: Scratch,
    pub(super) d_inner: Scratch,
}

impl LowRankScratch {
    pub(super) fn bytes(&self) -> usize {
        self.inner.bytes() + self.d_inner.bytes()
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

    /// From the gradients of the inner values, all sections together: adds to those of the hidden states and
    /// of `a`.
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
        let a = Mat::new(self.a, rank, dim);
        exact.matmul_nn(d_inner, a, MatMut::new(dx, rows, dim), true);
        if let Some(da) = da {
            exact.matmul_tn(d_inner, x, MatMut::new(da, rank, dim), true);
        }
    }
}
