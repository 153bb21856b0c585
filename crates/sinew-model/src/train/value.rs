//! A critic's output: one number from the last hidden state of a row.
//!
//! The head is linear and computed in f32 with every kernel set: tiles of bfloat16 would round its
//! one output.

use super::activations::{Activations, OutputPlaces};
use super::{TrainModel, Weights};
use crate::decoder::{ForwardError, check_len};
use crate::params::Random;
use sinew_tensor::{Buffer, Cpu, Mat, MatMut};

/// `value = w · h + b` with `h` the normalized last hidden state, `[d]`. Stored as `[w, b]`, `[d +
/// 1]`.
#[derive(Clone, Debug)]
pub struct ValueHead {
    values: Buffer,
}

/// Gradients of a [`ValueHead`], `[d + 1]`.
#[derive(Clone, Debug)]
pub struct ValueGrads {
    values: Buffer,
}

impl ValueHead {
    /// A head for hidden states of width `d_model`: `w` normal with deviation `1 / (d + 1)`, so that the
    /// first values are small; `b` zero.
    pub fn random(d_model: usize, seed: u64) -> Self {
        let mut values = Buffer::zeros(d_model + 1);
        Random::new(seed, 0).fill_normal(&mut values[..d_model], 1.0 / (d_model + 1) as f32);
        Self { values }
    }

    /// All weights zero, to be filled.
    pub(crate) fn zeros(d_model: usize) -> Self {
        Self {
            values: Buffer::zeros(d_model + 1),
        }
    }

    /// Number of values.
    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    /// `w` and `b`, `[d + 1]`.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// `w` and `b` for an update in place.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Adds to `grads` and writes `asked.dh`, from the gradients of the values.
    pub(super) fn backward(
        &self,
        dev: &Cpu,
        d_values: &[f32],
        asked: &mut OutputPlaces,
        d: usize,
        grads: &mut ValueGrads,
    ) {
        let dev = dev.with_f32_products();
        let n = d_values.len();
        let dy = Mat::new(d_values, n, 1);
        let h = Mat::new(asked.h.take(n * d), n, d);
        dev.matmul_tn(dy, h, MatMut::new(&mut grads.values[..d], 1, d), true);
        grads.values[d] += d_values.iter().sum::<f32>();
        let w = Mat::new(&self.values[..d], 1, d);
        dev.matmul_nn(dy, w, MatMut::new(asked.dh.take(n * d), n, d), false);
    }
}

impl ValueGrads {
    /// Zeros for a head.
    pub fn of(head: &ValueHead) -> Self {
        Self {
            values: Buffer::zeros(head.len()),
        }
    }

    /// Number of values.
    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    /// Sets all to 0.
    pub fn zero(&mut self) {
        self.values.fill(0.0);
    }

    /// All values.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// All values, for scaling in place.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
}

impl TrainModel {
    /// The values of `rows` of the last forward pass into `out` `[rows]`. Rows may repeat.
    pub fn values(
        &self,
        dev: &Cpu,
        weights: Weights<'_>,
        acts: &mut Activations,
        head: &ValueHead,
        rows: &[u32],
        out: &mut [f32],
    ) -> Result<(), ForwardError> {
        let pass = self.pass(dev, weights)?;
        let all_rows = acts.current()?.rows();
        let (n, d) = (rows.len(), self.decoder.config.d_model);
        check_len("values", out.len(), n)?;
        check_len("weights of the value head", head.len(), d + 1)?;
        let place = |&row: &u32| acts.place("row of a value", row, all_rows);
        let places = rows.iter().map(place).collect::<Result<Vec<_>, _>>()?;
        let left = acts.left(all_rows);
        pass.ask(places, acts.xs.last(), left, &mut acts.values);
        out.fill(head.values[d]);
        let h = Mat::new(acts.values.h.take(n * d), n, d);
        let w = Mat::new(&head.values[..d], 1, d);
        // One output: too little work for tiles, which would round it.
        let dev = dev.with_f32_products();
        dev.matmul_nt(h, w, MatMut::new(out, n, 1), true);
        Ok(())
    }
}
