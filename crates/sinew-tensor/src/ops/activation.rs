//! SwiGLU (Shazeer 2020, arXiv 2002.05202): `silu(gate) * up` with `silu(g) = g / (1 + e^-g)`.
//!
//! Gate and up are two halves of one row, as one fused product writes them.

use super::row_grain;
use crate::buffer::SharedMut;
use crate::cpu::Cpu;
use crate::simd::{sigmoid, simd_fn};

/// Number of rows of `2 ff` values.
fn rows(gate_up: &[f32], ff: usize) -> usize {
    assert!(
        gate_up.len().is_multiple_of(2 * ff.max(1)),
        "{} values are no rows of 2 x {ff}",
        gate_up.len()
    );
    gate_up.len() / (2 * ff.max(1))
}

/// `out[i, j] = silu(gate_up[i, j]) * gate_up[i, ff + j]`; `gate_up`: `[m, 2 ff]`, `out`: `[m,
/// ff]`.
///
/// # Panics
/// If the lengths are not those of whole rows.
pub fn swiglu(dev: &Cpu, gate_up: &[f32], ff: usize, out: &mut [f32]) {
    let m = rows(gate_up, ff);
    assert_eq!(out.len(), m * ff, "out [{m}, {ff}]");
    let out = SharedMut::new(out);
    dev.pool().parallel_ranges(m, row_grain(2 * ff), &|rows| {
        for i in rows {
            // SAFETY: only this task touches row `i`.
            let out = unsafe { out.range(i * ff..(i + 1) * ff) };
            // SAFETY: the slices have the lengths 2 ff and ff.
            unsafe { forward_row(dev, &gate_up[i * 2 * ff..(i + 1) * 2 * ff], out) };
        }
    });
}

simd_fn! {
fn forward_row<V>(gate_up: &[f32], out: &mut [f32]) {
    let ff = out.len();
    let (gate, up, out) = (gate_up.as_ptr(), gate_up.as_ptr().add(ff), out.as_mut_ptr());
    let mut j = 0;
    while j < ff {
        let left = ff - j;
        let g = V::load_upto(gate.add(j), left);
        g.mul(sigmoid(g)).mul(V::load_upto(up.add(j), left)).store_upto(out.add(j), left);
        j += V::LANES;
    }
}
}

/// Gradient of [`swiglu`]: overwrites `dgate_up` `[m, 2 ff]` from `gate_up` and `dout` `[m, ff]`.
/// `gate_up` is the input of the forward pass; the output is not needed.
///
/// # Panics
/// If the lengths are not those of whole rows.
pub fn swiglu_backward(dev: &Cpu, gate_up: &[f32], dout: &[f32], ff: usize, dgate_up: &mut [f32]) {
    let m = rows(gate_up, ff);
    assert_eq!(dout.len(), m * ff, "dout [{m}, {ff}]");
    assert_eq!(dgate_up.len(), gate_up.len(), "dgate_up [{m}, 2 x {ff}]");
    let dgate_up = SharedMut::new(dgate_up);
    dev.pool().parallel_ranges(m, row_grain(2 * ff), &|rows| {
        for i in rows {
            let row = i * 2 * ff..(i + 1) * 2 * ff;
            // SAFETY: only this task touches row `i`.
            let dgate_up = unsafe { dgate_up.range(row.clone()) };
            // SAFETY: the slices have the lengths 2 ff, ff and 2 ff.
            unsafe { backward_row(dev, &gate_up[row], &dout[i * ff..(i + 1) * ff], dgate_up) };
        }
    });
}

simd_fn! {
/// Computes `dg = dout u s (1 + g (1 - s))` and `du = dout g s`, where `s = sigmoid(g)`.
fn backward_row<V>(gate_up: &[f32], dout: &[f32], dgate_up: &mut [f32]) {
    let ff = dout.len();
    let (gate, up, dout) = (gate_up.as_ptr(), gate_up.as_ptr().add(ff), dout.as_ptr());
    let (dgate, dup) = (dgate_up.as_mut_ptr(), dgate_up.as_mut_ptr().add(ff));
    let one = V::splat(1.0);
    let mut j = 0;
    while j < ff {
        let left = ff - j;
        let (g, u) = (V::load_upto(gate.add(j), left), V::load_upto(up.add(j), left));
        let s = sigmoid(g);
        let ds = V::load_upto(dout.add(j), left).mul(s);
        ds.mul(g).store_upto(dup.add(j), left);
        ds.mul(u).mul(g.fma(one.sub(s), one)).store_upto(dgate.add(j), left);
        j += V::LANES;
    }
}
}
