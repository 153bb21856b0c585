//! The forward pass: hidden states of all rows, then log-probabilities of the asked tokens.

use super::activations::{Activations, Keep, LayerActs, Leaving, OutputPlaces, Work};
use super::{Pass, TrainModel, Weights};
use crate::decoder::{ForwardError, check_index, check_len, copy};
use crate::lora::Group;
use sinew_tensor::attention::{TreeLayout, tree_attention_forward};
use sinew_tensor::logprob::{LinearLogprob, LogprobOut, Masks, linear_logprob_forward};
use sinew_tensor::{Mat, MatMut, ops};
use sinew_types::TokenId;

/// Results of [`TrainModel::logprobs`], `[items]` each, in nats.
#[derive(Clone, Copy, Debug)]
pub struct Logprobs<'a> {
    /// Natural logarithm of each target's probability.
    pub logprob: &'a [f32],
    /// Entropy of each item's whole distribution; empty when it was not asked for.
    pub entropy: &'a [f32],
}

impl TrainModel {
    /// Computes the hidden states of `tokens` `[layout.rows()]`, which [`TrainModel::logprobs`] and
    /// [`TrainModel::values`] read. `acts` keeps the part of it that its [`Keep`] names.
    ///
    /// # Errors
    /// If tokens or positions do not exist, or the weights are of another decoder.
    pub fn forward(
        &self,
        dev: &sinew_tensor::Cpu,
        weights: Weights<'_>,
        tokens: &[TokenId],
        layout: &TreeLayout,
        acts: &mut Activations,
    ) -> Result<(), ForwardError> {
        let all: Vec<u32> = (0..layout.rows() as u32).collect();
        self.forward_for(dev, weights, tokens, layout, &all, acts)
    }

    /// [`TrainModel::forward`] if outputs are requested only at the rows `asked` (in any order, repeated or
    /// not): the last layer computes only keys and values of the others. Outputs and gradients are those of
    /// the whole pass; only sums over rows in the gradient of the last layer's second norm are grouped
    /// differently.
    pub fn forward_for(
        &self,
        dev: &sinew_tensor::Cpu,
        weights: Weights<'_>,
        tokens: &[TokenId],
        layout: &TreeLayout,
        asked: &[u32],
        acts: &mut Activations,
    ) -> Result<(), ForwardError> {
        let pass = self.pass(dev, weights)?;
        acts.layout = None;
        acts.items.places.clear();
        acts.values.places.clear();
        let rows = layout.rows();
        check_len("tokens", tokens.len(), rows)?;
        if rows == 0 {
            return Err(ForwardError::State("a pass needs at least one row"));
        }
        self.decoder.check_tokens(tokens)?;
        self.decoder.check_positions(layout.positions())?;
        for &row in asked {
            check_index("row that is asked for", row as usize, rows)?;
        }
        let c = pass.config();
        acts.reserve(c, rows);
        acts.leaving = Leaving::new(asked, rows);
        let all = rows * c.d_model;
        let embed = pass.values(&pass.layout().embed);
        ops::embedding(dev, embed, c.d_model, tokens, &mut acts.xs[0][..all]);
        for layer in 0..c.layers {
            let (input, output) = match acts.keep {
                Keep::Nothing => (0, 0),
                Keep::All | Keep::LayerInputs => (layer, layer + 1),
            };
            let slot = if acts.keep == Keep::All { layer } else { 0 };
            let leaving = acts.leaving.as_ref().filter(|_| layer + 1 == c.layers);
            let out = leaving.map_or(rows, |l| l.rows.len()) * c.d_model;
            let (saved, x) = (&mut acts.layers[slot], &acts.xs[input][..all]);
            pass.layer(layer, layout, leaving, x, saved, &mut acts.work);
            pass.down(layer, saved, &mut acts.xs[output][..out], &mut acts.work);
        }
        acts.tokens.clear();
        acts.tokens.extend_from_slice(tokens);
        acts.layout = Some(layout.clone());
        Ok(())
    }

    /// Natural log-probability (and, with `entropy`, entropy) of each item `(row, target)` of the
    /// last forward pass: of `target` as the token that follows row `row`. Rows can repeat.
    /// `temperatures` `[items]`, above 0, divide the logits of each item; empty: 1 for all. The
    /// distribution of an item with a mask is the softmax over the tokens that it allows, its
    /// target among them.
    ///
    /// Logits are computed in pieces and never stored as a whole `[items, vocab]`.
    ///
    /// # Errors
    /// If there was no forward pass, a row or target does not exist, a temperature is not above 0,
    /// or a mask bars its target.
    #[expect(clippy::too_many_arguments, reason = "a pass, and what it asks")]
    pub fn logprobs<'a>(
        &self,
        dev: &sinew_tensor::Cpu,
        weights: Weights<'_>,
        acts: &'a mut Activations,
        items: &[(u32, TokenId)],
        temperatures: &[f32],
        masks: Option<Masks<'_>>,
        entropy: bool,
    ) -> Result<Logprobs<'a>, ForwardError> {
        let pass = self.pass(dev, weights)?;
        let rows = acts.current()?.rows();
        let vocab = pass.config().vocab;
        check_temperatures(temperatures, items.len())?;
        acts.items.places.clear();
        let mut places = Vec::with_capacity(items.len());
        for &(row, target) in items {
            places.push(acts.place("item's row", row, rows)?);
            check_index("item's target", target as usize, vocab)?;
        }
        if let Some(masks) = &masks {
            check_masks(masks, items)?;
        }
        acts.masks.set(masks);
        acts.targets.clear();
        acts.targets.extend(items.iter().map(|item| item.1));
        acts.temperatures.clear();
        acts.temperatures.extend_from_slice(temperatures);
        let left = acts.left(rows);
        pass.ask(places, acts.xs.last(), left, &mut acts.items);
        let n = items.len();
        acts.logprob.resize(n, 0.0);
        acts.lse.resize(n, 0.0);
        acts.entropy.resize(if entropy { n } else { 0 }, 0.0);
        let input = LinearLogprob {
            x: acts.items.h.take(n * pass.config().d_model),
            w: pass.values(&pass.layout().head()),
            low_rank: pass.head_adapter(),
            dim: pass.config().d_model,
            targets: &acts.targets,
            temperatures: &acts.temperatures,
            masks: acts.masks.get(),
        };
        let out = LogprobOut {
            logprob: &mut acts.logprob,
            lse: &mut acts.lse,
            entropy: entropy.then_some(&mut acts.entropy[..]),
        };
        linear_logprob_forward(dev, &input, out, &mut acts.work.logprob);
        Ok(Logprobs {
            logprob: &acts.logprob,
            entropy: &acts.entropy,
        })
    }
}

/// Whether `temperatures` can divide the logits of `items` items.
pub(super) fn check_temperatures(temperatures: &[f32], items: usize) -> Result<(), ForwardError> {
    if !temperatures.is_empty() {
        check_len("temperatures", temperatures.len(), items)?;
    }
    let bad = |t: &f32| !(t.is_finite() && *t > 0.0);
    match temperatures.iter().position(bad) {
        None => Ok(()),
        Some(item) => Err(ForwardError::Temperature {
            item,
            found: temperatures[item].to_string(),
        }),
    }
}

/// Whether each item names a bit set of the table that allows its target.
fn check_masks(masks: &Masks<'_>, items: &[(u32, TokenId)]) -> Result<(), ForwardError> {
    check_len("rows of masks", masks.rows.len(), items.len())?;
    if masks.words == 0 || !masks.table.len().is_multiple_of(masks.words) {
        return Err(ForwardError::State(
            "the table of masks holds whole bit sets, of at least one word",
        ));
    }
    for (item, &(_, target)) in items.iter().enumerate() {
        if !masks.allows(item, target) {
            return Err(ForwardError::Barred { item, target });
        }
    }
    Ok(())
}

impl Pass<'_> {
    /// Everything of a layer but its last projection: attention, residual, gate and up; from the output of
    /// attention on for the rows that are `leaving` it.
    pub(super) fn layer(
        &self,
        layer: usize,
        layout: &TreeLayout,
        leaving: Option<&Leaving>,
        x: &[f32],
        saved: &mut LayerActs,
        work: &mut Work,
    ) {
        let c = self.config();
        let (d, q) = (c.d_model, c.q_dim());
        let rows = leaving.map_or(layout.rows(), |l| l.rows.len());
        let ranges = &self.layout().layers[layer];
        self.norm(x, self.values(&ranges.attn_norm), work);
        self.qkv(layer, layout, saved, work);
        let x_mid = &mut saved.x_mid[..rows * d];
        let (attended, x) = match leaving {
            None => (&saved.attended[..rows * q], x),
            Some(leaving) => {
                let (attended, kept) = (work.gated.take(rows * q), work.h.take(rows * d));
                ops::embedding(self.dev, &saved.attended, q, &leaving.rows, attended);
                ops::embedding(self.dev, x, d, &leaving.rows, kept);
                (&*attended, &*kept)
            }
        };
        // Products add to the residual stream as those of generation do: the same order of sums, the same
        // bits.
        copy(self.dev, x, x_mid);
        self.linear(Group::O.at(layer), attended, x_mid, true, &mut work.lora);
        self.norm(x_mid, self.values(&ranges.ffn_norm), work);
        let gate_up = &mut saved.gate_up[..rows * 2 * c.d_ff];
        let h = work.h.take(rows * d);
        self.linear(Group::GateUp.at(layer), h, gate_up, false, &mut work.lora);
    }

    /// Queries, keys, values and attention over them, from `work.h`.
    fn qkv(&self, layer: usize, layout: &TreeLayout, saved: &mut LayerActs, work: &mut Work) {
        let c = self.config();
        let (dev, rows, width) = (self.dev, layout.rows(), c.qkv_dim());
        let (q, kv) = (c.q_dim(), c.kv_dim());
        let qkv = &mut saved.qkv[..rows * width];
        let h = work.h.take(rows * c.d_model);
        self.linear(Group::Qkv.at(layer), h, qkv, false, &mut work.lora);
        if let Some((q_norm, k_norm)) = &self.layout().layers[layer].qk_norm {
            let raw = &mut saved.qkv_raw[..rows * width];
            copy(dev, qkv, raw);
            let (from, to) = (
                Mat::with_ld(raw, rows, q, width),
                MatMut::with_ld(qkv, rows, q, width),
            );
            let rstd = &mut saved.q_rstd[..rows * c.heads];
            ops::rms_norm(dev, from, self.values(q_norm), c.rms_eps, to, rstd);
            let from = Mat::with_ld(&raw[q..], rows, kv, width);
            let to = MatMut::with_ld(&mut qkv[q..], rows, kv, width);
            let rstd = &mut saved.k_rstd[..rows * c.kv_heads];
            ops::rms_norm(dev, from, self.values(k_norm), c.rms_eps, to, rstd);
        }
        let rotated = MatMut::with_ld(qkv, rows, q + kv, width);
        ops::rope(dev, rotated, layout.positions(), &self.decoder.rope);
        let out = &mut saved.attended[..rows * q];
        let lse = &mut saved.lse[..rows * c.heads];
        let shape = &self.decoder.shape;
        tree_attention_forward(dev, layout, shape, qkv, out, lse, &mut work.attention);
    }

    /// `x_out = x_mid + down(silu(gate) · up)`.
    fn down(&self, layer: usize, saved: &LayerActs, x_out: &mut [f32], work: &mut Work) {
        let c = self.config();
        let rows = x_out.len() / c.d_model;
        let gated = work.gated.take(rows * c.d_ff);
        ops::swiglu(self.dev, &saved.gate_up[..rows * 2 * c.d_ff], c.d_ff, gated);
        copy(self.dev, &saved.x_mid[..rows * c.d_model], x_out);
        self.linear(Group::Down.at(layer), gated, x_out, true, &mut work.lora);
    }

    /// `work.h = norm(x)`, with `work.rstd`.
    pub(super) fn norm(&self, x: &[f32], w: &[f32], work: &mut Work) {
        let d = w.len();
        let rows = x.len() / d;
        let to = MatMut::new(work.h.take(rows * d), rows, d);
        let (eps, rstd) = (self.config().rms_eps, work.rstd.take(rows));
        ops::rms_norm(self.dev, Mat::new(x, rows, d), w, eps, to, rstd);
    }

    /// Gathers the last hidden states, of which there are `left`, at `places` and applies the last norm to
    /// them.
    pub(super) fn ask(
        &self,
        places: Vec<u32>,
        last: Option<&sinew_tensor::Buffer>,
        left: usize,
        asked: &mut OutputPlaces,
    ) {
        let c = self.config();
        let d = c.d_model;
        asked.places = places;
        let n = asked.places.len();
        let x = asked.x.take(n * d);
        if let Some(last) = last {
            ops::embedding(self.dev, &last[..left * d], d, &asked.places, x);
        }
        let to = MatMut::new(asked.h.take(n * d), n, d);
        let (w, rstd) = (self.values(&self.layout().final_norm), asked.rstd.take(n));
        ops::rms_norm(self.dev, Mat::new(x, n, d), w, c.rms_eps, to, rstd);
    }
}
