//! Generation: packed weights and one ragged forward pass for prompts and single tokens.
//!
//! A batch mixes sequences of any number of new tokens: a prompt of thousands, or one token of a
//! running output. Keys and values live in the blocks of a [`KvPool`]; the caller decides which
//! sequence has which blocks.
//!
//! Sequences can have adapters: their products are added to those of the packed weights, so that one pass
//! serves several adapters and none is merged.
//!
//! Invariant: the bits of a row depend only on its own sequence and adapters, not on the batch, its order, or
//! how a prompt was cut into passes. [`Precision::F32`] without adapters also gives the bits of the training
//! pass, so the log-probabilities of a sampled token are the same in engine and trainer.

use crate::config::{ConfigError, ModelConfig};
use crate::decoder::{Decoder, ForwardError, check_index, check_len, checked_values, copy};
use crate::lora::{Group, Lora};
use crate::params::{ParamLayout, TensorMismatch};
use crate::precision::{Matrix, Precision};
use sinew_tensor::attention::{AttentionScratch, AttentionShape};
use sinew_tensor::ops;
use sinew_tensor::paged::{KvPool, PagedBatch, PagedSequence, paged_attention};
use sinew_tensor::{Buffer, Cpu, Mat, MatMut, Scratch};
use sinew_types::{TensorSource, TokenId};
use std::ops::Range;

/// Name of the output projection.
const HEAD: &str = "lm_head.weight";

/// Reasons for which a model for generation could not be built or given new weights.
#[derive(Debug, thiserror::Error)]
pub enum InferModelError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Weights(#[from] TensorMismatch),
}

/// New tokens of some sequences, for one pass.
#[derive(Clone, Copy, Debug)]
pub struct InferBatch<'a> {
    /// Tokens of all sequences, one sequence after the other, `[rows]`.
    pub tokens: &'a [TokenId],
    /// Rows, stored past and physical blocks of each sequence. Row `i` of a sequence stands at
    /// position `past + i`; its keys and values go to that position's slot in the sequence's blocks.
    pub sequences: &'a [PagedSequence<'a>],
    /// Adapters of each sequence, `None` where it has none; empty: no sequence has some. Neighbouring
    /// sequences with the same object are computed together.
    pub adapters: &'a [Option<&'a Lora>],
    /// Rows of `tokens` after which logits are computed, in any order; a row can be named more than
    /// once.
    pub logit_rows: &'a [usize],
}

/// One layer's weights, matrices packed as `[out, in]`.
#[derive(Debug)]
struct Layer {
    attn_norm: Buffer,
    /// `[q + k + v, d]`
    qkv: Matrix,
    /// `[q + k + v]`
    qkv_bias: Option<Buffer>,
    /// `[head_dim]` each.
    qk_norm: Option<(Buffer, Buffer)>,
    /// `[d, q]`
    o: Matrix,
    ffn_norm: Buffer,
    /// `[2 ff, d]`
    gate_up: Matrix,
    /// `[d, ff]`
    down: Matrix,
}

/// A decoder ready to generate: its own packed copy of the weights. Immutable during passes, so several
/// threads can use one, each with its own [`KvPool`] and [`InferScratch`].
#[derive(Debug)]
pub struct InferModel {
    decoder: Decoder,
    layout: ParamLayout,
    /// The layout with a separate output projection, if the embeddings are tied.
    untied: Option<ParamLayout>,
    /// `[vocab, d]`, rows looked up by token.
    embed: Buffer,
    layers: Vec<Layer>,
    final_norm: Buffer,
    /// `[vocab, d]`
    head: Matrix,
}

/// Memory of a pass, kept between passes. It grows with the largest pass and never shrinks.
#[derive(Debug, Default)]
pub struct InferScratch {
    positions: Vec<u32>,
    slots: Vec<u32>,
    rows: Vec<u32>,
    x: Scratch,
    h: Scratch,
    rstd: Scratch,
    qkv: Scratch,
    attention: Scratch,
    gate_up: Scratch,
    last: Scratch,
    logits: Scratch,
    inner: Scratch,
    paged: AttentionScratch,
}

impl InferScratch {
    /// Empty scratch; grows with the first passes.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Fills and packs tensors of a source in the order of the layout.
struct Loader<'a> {
    dev: &'a Cpu,
    source: &'a dyn TensorSource,
    staging: Scratch,
}

impl Loader<'_> {
    fn layer(layer: usize, part: &str) -> String {
        format!("model.layers.{layer}.{part}")
    }

    fn vector(&self, name: &str, out: &mut [f32]) {
        copy(self.dev, &checked_values(self.source, name), out);
    }

    /// Joins tensors one below the other, in `staging`.
    fn joined(&mut self, names: &[String]) -> &[f32] {
        let parts: Vec<_> = names
            .iter()
            .map(|name| checked_values(self.source, name))
            .collect();
        let mut at = 0;
        let staging = self.staging.take(parts.iter().map(|part| part.len()).sum());
        for part in parts {
            copy(self.dev, &part, &mut staging[at..at + part.len()]);
            at += part.len();
        }
        staging
    }

    fn matrix(&mut self, names: &[String], packed: &mut Matrix) {
        let dev = self.dev;
        match names {
            [name] => packed.repack(dev, &checked_values(self.source, name)),
            _ => packed.repack(dev, self.joined(names)),
        }
    }

    /// Packs all weights of a layer from the source.
    fn fill(&mut self, layer: &mut Layer, index: usize) {
        let name = |part: &str| Self::layer(index, part);
        let names = |parts: &[&str]| parts.iter().map(|part| name(part)).collect::<Vec<_>>();
        self.vector(&name("input_layernorm.weight"), &mut layer.attn_norm);
        self.vector(
            &name("post_attention_layernorm.weight"),
            &mut layer.ffn_norm,
        );
        let qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
        let of = |kind: &str| qkv.map(|part| name(&format!("{part}.{kind}")));
        self.matrix(&of("weight"), &mut layer.qkv);
        if let Some(bias) = &mut layer.qkv_bias {
            bias.copy_from_slice(self.joined(&of("bias")));
        }
        if let Some((q, k)) = &mut layer.qk_norm {
            self.vector(&name("self_attn.q_norm.weight"), q);
            self.vector(&name("self_attn.k_norm.weight"), k);
        }
        self.matrix(&names(&["self_attn.o_proj.weight"]), &mut layer.o);
        let gate_up = names(&["mlp.gate_proj.weight", "mlp.up_proj.weight"]);
        self.matrix(&gate_up, &mut layer.gate_up);
        self.matrix(&names(&["mlp.down_proj.weight"]), &mut layer.down);
    }
}

impl Layer {
    fn zeros(dev: &Cpu, c: &ModelConfig, precision: Precision, zeros: &[f32]) -> Self {
        let packed = |n: usize, k: usize| Matrix::pack(dev, precision, &zeros[..n * k], n, k);
        Self {
            attn_norm: Buffer::zeros(c.d_model),
            qkv: packed(c.qkv_dim(), c.d_model),
            qkv_bias: c.qkv_bias.then(|| Buffer::zeros(c.qkv_dim())),
            qk_norm: c
                .qk_norm
                .then(|| (Buffer::zeros(c.head_dim), Buffer::zeros(c.head_dim))),
            o: packed(c.d_model, c.q_dim()),
            ffn_norm: Buffer::zeros(c.d_model),
            gate_up: packed(2 * c.d_ff, c.d_model),
            down: packed(c.d_model, c.d_ff),
        }
    }
}

impl InferModel {
    /// Packs the weights of `source` in f32, for sequences of at most `context` tokens (and at most
    /// the model's own context).
    ///
    /// # Errors
    /// If the configuration is impossible, or [`InferModel::repack`] refuses the tensors.
    pub fn new(
        dev: &Cpu,
        config: &ModelConfig,
        source: &dyn TensorSource,
        context: usize,
    ) -> Result<Self, InferModelError> {
        Self::with_precision(dev, config, source, context, Precision::F32)
    }

    /// [`InferModel::new`] with matrices of another precision. Embeddings that are looked up,
    /// norms, biases and attention stay `f32`.
    pub fn with_precision(
        dev: &Cpu,
        config: &ModelConfig,
        source: &dyn TensorSource,
        context: usize,
        precision: Precision,
    ) -> Result<Self, InferModelError> {
        let decoder = Decoder::new(config, context)?;
        let layout = ParamLayout::new(config);
        let untied = config.tied_embeddings.then(|| {
            ParamLayout::new(&ModelConfig {
                tied_embeddings: false,
                ..config.clone()
            })
        });
        check(&layout, untied.as_ref(), source)?;
        let c = config;
        let widest = [
            c.vocab * c.d_model,
            c.qkv_dim() * c.d_model,
            2 * c.d_ff * c.d_model,
        ];
        let zeros = Buffer::zeros(widest.into_iter().max().unwrap_or(0));
        let mut model = Self {
            embed: Buffer::zeros(c.vocab * c.d_model),
            layers: (0..c.layers)
                .map(|_| Layer::zeros(dev, c, precision, &zeros))
                .collect(),
            final_norm: Buffer::zeros(c.d_model),
            head: {
                let zeros = &zeros[..c.vocab * c.d_model];
                Matrix::pack(dev, precision, zeros, c.vocab, c.d_model)
            },
            decoder,
            layout,
            untied,
        };
        model.repack(dev, source)?;
        Ok(model)
    }

    /// Replaces all weights, in place. A source for a model with tied embeddings may have a separate output
    /// projection, as weights with a merged adapter on it do.
    ///
    /// # Errors
    /// If the tensors of `source` are not those of the configuration; then the weights are unchanged.
    pub fn repack(&mut self, dev: &Cpu, source: &dyn TensorSource) -> Result<(), TensorMismatch> {
        check(&self.layout, self.untied.as_ref(), source)?;
        let mut loader = Loader {
            dev,
            source,
            staging: Scratch::new(),
        };
        loader.vector("model.embed_tokens.weight", &mut self.embed);
        for (index, layer) in self.layers.iter_mut().enumerate() {
            loader.fill(layer, index);
        }
        loader.vector("model.norm.weight", &mut self.final_norm);
        let head = match source.info(HEAD) {
            Some(_) => HEAD,
            None => "model.embed_tokens.weight",
        };
        loader.matrix(&[head.to_owned()], &mut self.head);
        Ok(())
    }

    /// Bytes of packed matrices that a pass over one token reads: the lower bound of its memory
    /// traffic.
    pub fn matrix_bytes(&self) -> usize {
        let of = |l: &Layer| l.qkv.bytes() + l.o.bytes() + l.gate_up.bytes() + l.down.bytes();
        self.layers.iter().map(of).sum::<usize>() + self.head.bytes()
    }

    /// The decoder's shape and constants.
    pub fn config(&self) -> &ModelConfig {
        &self.decoder.config
    }

    /// Heads, for a [`KvPool`].
    pub fn attention_shape(&self) -> AttentionShape {
        self.decoder.shape
    }

    /// Maximum tokens of a sequence.
    pub fn context(&self) -> usize {
        self.decoder.context
    }

    /// Computes the new tokens, stores their keys and values in `kv`, and gives the logits of
    /// `batch.logit_rows`, `[logit_rows, vocab]`, not divided by any temperature. A row's results
    /// do not depend on other sequences in the batch or their adapters, bit for bit.
    ///
    /// # Errors
    /// If tokens, positions, blocks or rows do not exist, or adapters are of another decoder; then nothing
    /// was computed and `kv` is unchanged. Two sequences that share a block which one of them writes are
    /// not detected.
    pub fn forward<'s>(
        &self,
        dev: &Cpu,
        kv: &mut KvPool,
        batch: &InferBatch<'_>,
        scratch: &'s mut InferScratch,
    ) -> Result<&'s [f32], ForwardError> {
        self.check(kv, batch, scratch)?;
        let c = &self.decoder.config;
        let (rows, d) = (batch.tokens.len(), c.d_model);
        // A row can be named more than once.
        let most = rows.max(batch.logit_rows.len());
        let s = scratch;
        let (adapted, asked_adapted) = adapted_rows(batch);
        let x = s.x.take(rows * d);
        ops::embedding(dev, &self.embed, d, batch.tokens, x);
        let mut pass = Pass {
            dev,
            decoder: &self.decoder,
            rows,
            positions: &s.positions,
            slots: &s.slots,
            paged: PagedBatch::new(batch.sequences.to_vec()),
            h: s.h.take(most * d),
            rstd: s.rstd.take(most),
            qkv: s.qkv.take(rows * c.qkv_dim()),
            attention: s.attention.take(most * c.q_dim().max(c.d_ff)),
            gate_up: s.gate_up.take(most * 2 * c.d_ff),
            adapters: Adapters {
                rows: adapted,
                asked: asked_adapted,
                inner: &mut s.inner,
            },
            scratch: &mut s.paged,
        };
        let asked = batch.logit_rows.len();
        let last = s.last.take(asked * d);
        let top = self.layers.len() - 1;
        for (index, layer) in self.layers.iter().enumerate() {
            pass.keys_and_values(layer, index, kv, x);
            if index < top {
                pass.attend(layer, index, kv, x);
                pass.feed_forward(layer, index, x);
            } else {
                // After its keys and values, the last layer matters only for rows whose logits are asked.
                pass.only(&s.rows, x, last);
                pass.attend(layer, index, kv, last);
                pass.feed_forward(layer, index, last);
            }
        }
        ops::rms_norm_in_place(
            dev,
            MatMut::new(last, asked, d),
            &self.final_norm,
            c.rms_eps,
        );
        let logits = s.logits.take(asked * c.vocab);
        let y = MatMut::new(logits, asked, c.vocab);
        self.head.product(dev, Mat::new(last, asked, d), y, false);
        pass.adapters.add(dev, Site::Head, last, logits, asked);
        Ok(logits)
    }

    /// Checks everything that could go out of bounds later, and derives positions and slots.
    fn check(
        &self,
        kv: &KvPool,
        batch: &InferBatch<'_>,
        scratch: &mut InferScratch,
    ) -> Result<(), ForwardError> {
        let c = &self.decoder.config;
        if kv.layers() != c.layers || kv.shape() != self.decoder.shape {
            return Err(ForwardError::KvShape {
                found: format!("{} layers of {:?}", kv.layers(), kv.shape()),
                expected: format!("{} layers of {:?}", c.layers, self.decoder.shape),
            });
        }
        let rows = batch.tokens.len();
        check_len(
            "rows of all sequences",
            batch.sequences.iter().map(|s| s.rows).sum(),
            rows,
        )?;
        self.decoder.check_tokens(batch.tokens)?;
        if !batch.adapters.is_empty() {
            let (found, expected) = (batch.adapters.len(), batch.sequences.len());
            check_len("adapters, one for each sequence", found, expected)?;
        }
        let mut loras = batch.adapters.iter().flatten();
        if loras.any(|lora| lora.model() != c) {
            return Err(ForwardError::State("adapters are those of another decoder"));
        }
        let block_tokens = kv.block_tokens();
        scratch.positions.clear();
        scratch.slots.clear();
        for sequence in batch.sequences {
            let end = sequence.past.saturating_add(sequence.rows);
            if end > self.decoder.context {
                let row = scratch.positions.len();
                let context = self.decoder.context;
                return Err(ForwardError::Position {
                    row,
                    position: end - 1,
                    context,
                });
            }
            let needed = end.div_ceil(block_tokens);
            check_index("logical block", needed, sequence.blocks.len() + 1)?;
            for &block in &sequence.blocks[..needed] {
                check_index("physical block", block as usize, kv.blocks())?;
            }
            for position in sequence.past..end {
                let block = sequence.blocks[position / block_tokens];
                scratch.positions.push(position as u32);
                scratch
                    .slots
                    .push(block * block_tokens as u32 + (position % block_tokens) as u32);
            }
        }
        scratch.rows.clear();
        for &row in batch.logit_rows {
            check_index("logit row", row, rows)?;
            scratch.rows.push(row as u32);
        }
        Ok(())
    }
}

/// Compares a source with the layout, or with that of a separate output projection if it has one.
fn check(
    layout: &ParamLayout,
    untied: Option<&ParamLayout>,
    source: &dyn TensorSource,
) -> Result<(), TensorMismatch> {
    match untied {
        Some(untied) if source.info(HEAD).is_some() => untied.check(source),
        _ => layout.check(source),
    }
}

/// Consecutive rows with the same adapters.
#[derive(Debug)]
struct AdaptedRows<'a> {
    rows: Range<usize>,
    lora: &'a Lora,
}

/// The rows with adapters, of all new tokens and of those whose logits are asked.
fn adapted_rows<'a>(batch: &InferBatch<'a>) -> (Vec<AdaptedRows<'a>>, Vec<AdaptedRows<'a>>) {
    if batch.adapters.iter().all(Option::is_none) {
        return (Vec::new(), Vec::new());
    }
    let pairs = batch.sequences.iter().zip(batch.adapters);
    let of_rows: Vec<Option<&Lora>> = pairs
        .flat_map(|(sequence, lora)| std::iter::repeat_n(*lora, sequence.rows))
        .collect();
    let asked = batch.logit_rows.iter().map(|&row| of_rows[row]);
    (joined(of_rows.iter().copied()), joined(asked))
}

/// Joins neighbouring rows with the same adapters, and leaves out those without.
fn joined<'a>(rows: impl Iterator<Item = Option<&'a Lora>>) -> Vec<AdaptedRows<'a>> {
    let mut found: Vec<AdaptedRows<'a>> = Vec::new();
    for (row, lora) in rows.enumerate() {
        let Some(lora) = lora else { continue };
        match found.last_mut() {
            Some(last) if last.rows.end == row && std::ptr::eq(last.lora, lora) => {
                last.rows.end = row + 1;
            }
            _ => found.push(AdaptedRows {
                rows: row..row + 1,
                lora,
            }),
        }
    }
    found
}

/// A packed matrix next to which adapters can stand.
#[derive(Clone, Copy, Debug)]
enum Site {
    Layer(usize, Group),
    Head,
}

/// The adapters of a pass.
struct Adapters<'a> {
    /// Rows of the residual stream with adapters.
    rows: Vec<AdaptedRows<'a>>,
    /// The same for the rows that leave the last layer.
    asked: Vec<AdaptedRows<'a>>,
    /// Working memory.
    inner: &'a mut Scratch,
}

impl Adapters<'_> {
    /// Adds the products of the adapters of a site to `y` `[rows, n]`, from its inputs `x` `[rows, k]`.
    fn add(&mut self, dev: &Cpu, site: Site, x: &[f32], y: &mut [f32], rows: usize) {
        for AdaptedRows { rows: own, lora } in &self.rows {
            let layout = lora.layout();
            let places = match site {
                Site::Layer(layer, group) => layout.group(layer, group),
                Site::Head => layout.head(),
            };
            let Some(places) = places else { continue };
            let (k, n) = (x.len() / rows, y.len() / rows);
            let x = Mat::new(&x[own.start * k..own.end * k], own.len(), k);
            let y = &mut y[own.start * n..own.end * n];
            lora.add_products(dev, places, x, y, self.inner);
        }
    }
}

/// The buffers of one pass.
struct Pass<'a> {
    dev: &'a Cpu,
    decoder: &'a Decoder,
    /// Rows of the residual stream.
    rows: usize,
    positions: &'a [u32],
    slots: &'a [u32],
    paged: PagedBatch<'a>,
    /// `[rows, d]`
    h: &'a mut [f32],
    /// `[rows]`
    rstd: &'a mut [f32],
    /// `[rows, q + k + v]`
    qkv: &'a mut [f32],
    /// `[rows, max(q, ff)]`: attention's output, then the gated values.
    attention: &'a mut [f32],
    /// `[rows, 2 ff]`
    gate_up: &'a mut [f32],
    adapters: Adapters<'a>,
    scratch: &'a mut AttentionScratch,
}

impl Pass<'_> {
    /// `h = norm(x)`
    fn norm(&mut self, x: &[f32], w: &[f32]) {
        let (rows, d) = (self.rows, self.decoder.config.d_model);
        let (from, to) = (Mat::new(x, rows, d), MatMut::new(self.h, rows, d));
        let (eps, rstd) = (self.decoder.config.rms_eps, &mut self.rstd[..rows]);
        ops::rms_norm(self.dev, from, w, eps, to, rstd);
    }

    /// Queries, keys and values of `norm(x)`; stores keys and values.
    fn keys_and_values(&mut self, layer: &Layer, index: usize, kv: &mut KvPool, x: &[f32]) {
        let c = &self.decoder.config;
        let (dev, rows, d, width) = (self.dev, self.rows, c.d_model, c.qkv_dim());
        self.norm(x, &layer.attn_norm);
        let (h, qkv) = (&self.h[..rows * d], &mut self.qkv[..rows * width]);
        let y = MatMut::new(qkv, rows, width);
        layer.qkv.product(dev, Mat::new(h, rows, d), y, false);
        let site = Site::Layer(index, Group::Qkv);
        self.adapters.add(dev, site, h, qkv, rows);
        if let Some(bias) = &layer.qkv_bias {
            ops::bias_add(dev, bias, self.qkv);
        }
        let (q, kv_dim) = (c.q_dim(), c.kv_dim());
        if let Some((q_norm, k_norm)) = &layer.qk_norm {
            let queries = MatMut::with_ld(self.qkv, rows, q, width);
            ops::rms_norm_in_place(dev, queries, q_norm, c.rms_eps);
            let keys = MatMut::with_ld(from_column(self.qkv, q), rows, kv_dim, width);
            ops::rms_norm_in_place(dev, keys, k_norm, c.rms_eps);
        }
        let rotated = MatMut::with_ld(self.qkv, rows, q + kv_dim, width);
        ops::rope(dev, rotated, self.positions, &self.decoder.rope);
        kv.write(dev, index, self.qkv, self.slots);
    }

    /// Keeps only `rows` of the residual stream `x`, in `kept`: the rest of the pass computes no
    /// others.
    fn only(&mut self, rows: &[u32], x: &[f32], kept: &mut [f32]) {
        ops::embedding(self.dev, x, self.decoder.config.d_model, rows, kept);
        self.paged = self.paged.only(rows);
        self.rows = rows.len();
        self.adapters.rows = std::mem::take(&mut self.adapters.asked);
    }

    /// `x += attention`
    fn attend(&mut self, layer: &Layer, index: usize, kv: &KvPool, x: &mut [f32]) {
        let c = &self.decoder.config;
        let (dev, rows, d, q) = (self.dev, self.rows, c.d_model, c.q_dim());
        let out = &mut self.attention[..rows * q];
        paged_attention(dev, kv, index, &self.paged, self.qkv, out, self.scratch);
        let y = MatMut::new(x, rows, d);
        layer.o.product(dev, Mat::new(out, rows, q), y, true);
        let site = Site::Layer(index, Group::O);
        self.adapters.add(dev, site, out, x, rows);
    }

    /// `x += feed_forward(norm(x))`
    fn feed_forward(&mut self, layer: &Layer, index: usize, x: &mut [f32]) {
        let c = &self.decoder.config;
        let (dev, rows, d, ff) = (self.dev, self.rows, c.d_model, c.d_ff);
        self.norm(x, &layer.ffn_norm);
        let (h, gate_up) = (&self.h[..rows * d], &mut self.gate_up[..rows * 2 * ff]);
        let y = MatMut::new(gate_up, rows, 2 * ff);
        layer.gate_up.product(dev, Mat::new(h, rows, d), y, false);
        let site = Site::Layer(index, Group::GateUp);
        self.adapters.add(dev, site, h, gate_up, rows);
        let gated = &mut self.attention[..rows * ff];
        ops::swiglu(dev, gate_up, ff, gated);
        let y = MatMut::new(x, rows, d);
        layer.down.product(dev, Mat::new(gated, rows, ff), y, true);
        let site = Site::Layer(index, Group::Down);
        self.adapters.add(dev, site, gated, x, rows);
    }
}

/// The part from column `at` of the first row on; empty when there are no rows.
pub(crate) fn from_column(values: &mut [f32], at: usize) -> &mut [f32] {
    let at = at.min(values.len());
    &mut values[at..]
}
