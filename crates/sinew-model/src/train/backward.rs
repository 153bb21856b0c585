//! The backward pass: computes the gradients of the weights or adapters from those of log-probabilities,
//! entropies and values.
//!
//! Layers run from the last to the first. The gradient of the residual stream is in one buffer
//! (`dx`) that every layer reads and updates; sums over rows run in a fixed order, so that the same
//! inputs give the same bits.

use super::activations::{Activations, Keep, LayerActs, Leaving, OutputPlaces, Work};
use super::value::{ValueGrads, ValueHead};
use super::{Grads, GradsOf, Pass, TrainModel, Weights};
use crate::decoder::{ForwardError, check_len, copy};
use crate::lora::Group;
use sinew_tensor::attention::{BackwardInput, TreeLayout, tree_attention_backward};
use sinew_tensor::logprob::{HeadGrads, LinearLogprob, LogprobGrad, linear_logprob_backward};
use sinew_tensor::{Mat, MatMut, ops};
use std::ops::Range;

/// Gradients of the loss with respect to a pass's outputs.
#[derive(Debug, Default)]
pub struct OutputGrads<'a> {
    /// Gradient of each item's log-probability, `[items]`; empty if no items were requested.
    pub d_logprob: &'a [f32],
    /// Gradient of each item's entropy, `[items]`; empty if entropy is not a part of the loss.
    pub d_entropy: &'a [f32],
    /// Gradient of the values of the last [`TrainModel::values`], `[rows]`, with the head and its gradients.
    pub values: Option<(&'a ValueHead, &'a [f32], &'a mut ValueGrads)>,
}

impl TrainModel {
    /// Adds the gradients of the last forward pass to `grads`: of all weights, or only of the adapters when
    /// `weights` has some. `weights` must be those of the forward pass. Costs about twice the forward pass,
    /// and three times with [`Keep::LayerInputs`].
    ///
    /// # Errors
    /// If `acts` keeps nothing, a length does not fit, or `grads` are of the wrong kind; then
    /// `grads` are unchanged.
    pub fn backward(
        &self,
        dev: &sinew_tensor::Cpu,
        weights: Weights<'_>,
        acts: &mut Activations,
        outputs: OutputGrads<'_>,
        grads: &mut Grads,
    ) -> Result<(), ForwardError> {
        let pass = self.pass(dev, weights)?;
        let layout = acts.current()?;
        pass.check(acts, &outputs, grads)?;
        grads.hold();
        let (rows, d) = (layout.rows(), pass.config().d_model);
        let left = acts.left(rows);
        acts.work.dx.take(left * d).fill(0.0);
        pass.items_backward(acts, &outputs, left, grads);
        if let Some((head, d_values, head_grads)) = outputs.values {
            head.backward(dev, d_values, &mut acts.values, d, head_grads);
            pass.asked_backward(&mut acts.values, left, &mut acts.work, grads);
        }
        let layers = pass.config().layers;
        for layer in (0..layers).rev() {
            let x = &acts.xs[layer][..rows * d];
            let slot = match acts.keep {
                Keep::All => layer,
                Keep::LayerInputs | Keep::Nothing => 0,
            };
            let leaving = acts.leaving.as_ref().filter(|_| layer + 1 == layers);
            let (saved, work) = (&mut acts.layers[slot], &mut acts.work);
            if acts.keep == Keep::LayerInputs {
                pass.layer(layer, &layout, leaving, x, saved, work);
            }
            let out = leaving.map_or(rows, |l| l.rows.len());
            pass.feed_forward_backward(layer, out, saved, grads, work);
            pass.o_backward(layer, rows, leaving, saved, grads, work);
            pass.attention_backward(layer, &layout, x, saved, grads, work);
        }
        if grads.of == GradsOf::Params {
            let embed = &mut grads.values[pass.layout().embed.clone()];
            ops::embedding_backward(dev, &acts.tokens, acts.work.dx.take(rows * d), d, embed);
        }
        (grads.pending, grads.zero) = (false, false);
        Ok(())
    }
}

impl Pass<'_> {
    /// Refuses gradients that do not fit the forward pass.
    fn check(
        &self,
        acts: &Activations,
        outputs: &OutputGrads<'_>,
        grads: &Grads,
    ) -> Result<(), ForwardError> {
        if acts.keep == Keep::Nothing {
            return Err(ForwardError::State(
                "activations that keep nothing have no backward pass",
            ));
        }
        let (of, total) = match self.weights.lora {
            Some(lora) => (GradsOf::Lora, lora.layout().table().total()),
            None => (GradsOf::Params, self.layout().total()),
        };
        if grads.of != of {
            return Err(ForwardError::State(
                "gradients are to be of the adapters when there are some, else of the weights",
            ));
        }
        check_len("values of gradients", grads.total, total)?;
        let items = acts.items.places.len();
        check_len("d_logprob", outputs.d_logprob.len(), items)?;
        if !outputs.d_entropy.is_empty() {
            check_len("d_entropy", outputs.d_entropy.len(), acts.entropy.len())?;
        }
        if let Some((head, d_values, head_grads)) = &outputs.values {
            check_len("d_values", d_values.len(), acts.values.places.len())?;
            check_len(
                "weights of the value head",
                head.len(),
                self.config().d_model + 1,
            )?;
            check_len("gradients of the value head", head_grads.len(), head.len())?;
        }
        Ok(())
    }

    /// Goes from log-probabilities and entropies through output projection and last norm.
    fn items_backward(
        &self,
        acts: &mut Activations,
        outputs: &OutputGrads<'_>,
        left: usize,
        grads: &mut Grads,
    ) {
        let n = acts.items.places.len();
        if n == 0 {
            return;
        }
        let d = self.config().d_model;
        let head = self.layout().head();
        let input = LinearLogprob {
            x: acts.items.h.take(n * d),
            w: self.values(&head),
            low_rank: self.head_adapter(),
            dim: d,
            targets: &acts.targets,
            temperatures: &acts.temperatures,
            masks: acts.masks.get(),
        };
        let entropy =
            (!outputs.d_entropy.is_empty()).then_some((&acts.entropy[..], outputs.d_entropy));
        let grad = LogprobGrad {
            lse: &acts.lse,
            d_logprob: outputs.d_logprob,
            entropy,
        };
        let places = self.weights.lora.and_then(|lora| lora.layout().head());
        let head = match grads.of {
            GradsOf::Params => HeadGrads {
                w: Some(&mut grads.values[head]),
                low_rank: None,
            },
            GradsOf::Lora => HeadGrads {
                w: None,
                low_rank: places.map(|places| places.single_grads(&mut grads.values)),
            },
        };
        let dh = acts.items.dh.take(n * d);
        linear_logprob_backward(self.dev, &input, grad, dh, head, &mut acts.work.logprob);
        self.asked_backward(&mut acts.items, left, &mut acts.work, grads);
    }

    /// Goes from `asked.dh` through the last norm into `work.dx`.
    fn asked_backward(
        &self,
        asked: &mut OutputPlaces,
        left: usize,
        work: &mut Work,
        grads: &mut Grads,
    ) {
        let d = self.config().d_model;
        let n = asked.places.len();
        let norm = self.layout().final_norm.clone();
        let x = Mat::new(asked.x.take(n * d), n, d);
        let dy = Mat::new(asked.dh.take(n * d), n, d);
        let dx = MatMut::new(asked.dx.take(n * d), n, d);
        let rstd = asked.rstd.take(n);
        let (w, dw) = (
            self.values(&norm),
            norm_grads(grads, &mut work.unused, norm, d),
        );
        ops::rms_norm_backward(self.dev, x, w, rstd, dy, dx, dw, false);
        let dx = asked.dx.take(n * d);
        // Adds each asked place's gradient to it, in order: places may repeat.
        ops::embedding_backward(self.dev, &asked.places, dx, d, work.dx.take(left * d));
    }

    /// Feed-forward half of a layer: reads and updates `work.dx`.
    fn feed_forward_backward(
        &self,
        layer: usize,
        rows: usize,
        saved: &LayerActs,
        grads: &mut Grads,
        work: &mut Work,
    ) {
        let c = self.config();
        let (dev, d, ff) = (self.dev, c.d_model, c.d_ff);
        let ranges = &self.layout().layers[layer];
        let gate_up = &saved.gate_up[..rows * 2 * ff];
        let gated = work.gated.take(rows * ff);
        ops::swiglu(dev, gate_up, ff, gated);
        let (dx, d_gated) = (work.dx.take(rows * d), work.d_inner.take(rows * ff));
        let lora = &mut work.lora;
        self.linear_backward(Group::Down.at(layer), gated, dx, Some(d_gated), grads, lora);
        let d_gate_up = work.d_outer.take(rows * 2 * ff);
        ops::swiglu_backward(dev, gate_up, work.d_inner.take(rows * ff), ff, d_gate_up);
        let x_mid = &saved.x_mid[..rows * d];
        self.norm(x_mid, self.values(&ranges.ffn_norm), work);
        let (h, dh) = (work.h.take(rows * d), work.dh.take(rows * d));
        let d_gate_up = work.d_outer.take(rows * 2 * ff);
        let lora = &mut work.lora;
        self.linear_backward(Group::GateUp.at(layer), h, d_gate_up, Some(dh), grads, lora);
        self.norm_backward(x_mid, &ranges.ffn_norm, grads, work);
    }

    /// `work.dx +=` gradient of `norm(x)` from `work.dh`, with the `work.rstd` of [`Pass::norm`].
    fn norm_backward(&self, x: &[f32], norm: &Range<usize>, grads: &mut Grads, work: &mut Work) {
        let d = self.config().d_model;
        let rows = x.len() / d;
        let dw = norm_grads(grads, &mut work.unused, norm.clone(), d);
        let dy = Mat::new(work.dh.take(rows * d), rows, d);
        let dx = MatMut::new(work.dx.take(rows * d), rows, d);
        let (x, rstd) = (Mat::new(x, rows, d), work.rstd.take(rows));
        ops::rms_norm_backward(self.dev, x, self.values(norm), rstd, dy, dx, dw, true);
    }

    /// Output projection of attention: reads `work.dx`, writes the gradient of attention's output to
    /// `work.d_inner`, both of all rows in the end.
    fn o_backward(
        &self,
        layer: usize,
        rows: usize,
        leaving: Option<&Leaving>,
        saved: &LayerActs,
        grads: &mut Grads,
        work: &mut Work,
    ) {
        let (dev, d, q) = (self.dev, self.config().d_model, self.config().q_dim());
        let (site, lora) = (Group::O.at(layer), &mut work.lora);
        let Some(leaving) = leaving else {
            let attended = &saved.attended[..rows * q];
            let (dx, d_out) = (work.dx.take(rows * d), work.d_inner.take(rows * q));
            return self.linear_backward(site, attended, dx, Some(d_out), grads, lora);
        };
        let left = leaving.rows.len();
        let attended = work.gated.take(left * q);
        ops::embedding(dev, &saved.attended, q, &leaving.rows, attended);
        let (dx, d_out) = (work.dx.take(left * d), work.d_outer.take(left * q));
        self.linear_backward(site, attended, dx, Some(d_out), grads, lora);
        let to = work.d_inner.take(rows * q);
        ops::spread(dev, work.d_outer.take(left * q), q, &leaving.place, to);
        let to = work.dh.take(rows * d);
        ops::spread(dev, work.dx.take(left * d), d, &leaving.place, to);
        std::mem::swap(&mut work.dx, &mut work.dh);
    }

    /// Attention half of a layer except for [`Pass::o_backward`]: reads and updates `work.dx`.
    fn attention_backward(
        &self,
        layer: usize,
        layout: &TreeLayout,
        x: &[f32],
        saved: &LayerActs,
        grads: &mut Grads,
        work: &mut Work,
    ) {
        let c = self.config();
        let (dev, rows, d, width) = (self.dev, layout.rows(), c.d_model, c.qkv_dim());
        let ranges = &self.layout().layers[layer];
        let input = BackwardInput {
            qkv: &saved.qkv[..rows * width],
            out: &saved.attended[..rows * c.q_dim()],
            lse: &saved.lse[..rows * c.heads],
            d_out: work.d_inner.take(rows * c.q_dim()),
        };
        let d_qkv = work.d_outer.take(rows * width);
        let shape = &self.decoder.shape;
        tree_attention_backward(dev, layout, shape, input, d_qkv, &mut work.attention);
        let rotated = MatMut::with_ld(d_qkv, rows, c.q_dim() + c.kv_dim(), width);
        ops::rope_backward(dev, rotated, layout.positions(), &self.decoder.rope);
        self.qk_norm_backward(layer, rows, saved, grads, work);
        self.norm(x, self.values(&ranges.attn_norm), work);
        let (h, dh) = (work.h.take(rows * d), work.dh.take(rows * d));
        let d_qkv = work.d_outer.take(rows * width);
        // Only embeddings are below the first layer: adapters have nothing to learn there.
        let needed = layer > 0 || grads.of == GradsOf::Params;
        let lora = &mut work.lora;
        self.linear_backward(
            Group::Qkv.at(layer),
            h,
            d_qkv,
            needed.then_some(dh),
            grads,
            lora,
        );
        if needed {
            self.norm_backward(x, &ranges.attn_norm, grads, work);
        }
    }

    /// The q/k norms, where the model has them: in place on `work.d_outer`.
    fn qk_norm_backward(
        &self,
        layer: usize,
        rows: usize,
        saved: &LayerActs,
        grads: &mut Grads,
        work: &mut Work,
    ) {
        let c = self.config();
        let width = c.qkv_dim();
        let Some((q_norm, k_norm)) = &self.layout().layers[layer].qk_norm else {
            return;
        };
        let raw = &saved.qkv_raw[..rows * width];
        let dy = work.d_raw.take(rows * width);
        let dx = work.d_outer.take(rows * width);
        copy(self.dev, dx, dy);
        for (norm, rstd, heads, column) in [
            (q_norm, &saved.q_rstd[..rows * c.heads], c.heads, 0),
            (
                k_norm,
                &saved.k_rstd[..rows * c.kv_heads],
                c.kv_heads,
                c.q_dim(),
            ),
        ] {
            let cols = heads * c.head_dim;
            let x = Mat::with_ld(&raw[column..], rows, cols, width);
            let dy = Mat::with_ld(&dy[column..], rows, cols, width);
            let dx = MatMut::with_ld(&mut dx[column..], rows, cols, width);
            let dw = norm_grads(grads, &mut work.unused, norm.clone(), c.head_dim);
            ops::rms_norm_backward(self.dev, x, self.values(norm), rstd, dy, dx, dw, false);
        }
    }
}

/// Destination of a norm's gradient: working memory, if only adapters are trained.
fn norm_grads<'a>(
    grads: &'a mut Grads,
    unused: &'a mut sinew_tensor::Scratch,
    norm: Range<usize>,
    len: usize,
) -> &'a mut [f32] {
    match grads.of {
        GradsOf::Params => &mut grads.values[norm],
        GradsOf::Lora => unused.take(len),
    }
}
