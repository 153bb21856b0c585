//! Memory of a training pass: allocated once, reused by every pass that fits.
//!
//! Values per row and layer with [`Keep::All`]: `2 q + 2 kv` (queries, keys, values and attention's
//! output) `+ d` (the residual stream) `+ 2 ff` (gate and up) `+ heads`, and more for models with
//! q/k norms. [`Activations::bytes_per_row`] has the sum.

use crate::config::ModelConfig;
use crate::decoder::{ForwardError, check_index};
use sinew_tensor::attention::{AttentionScratch, TreeLayout};
use sinew_tensor::logprob::{LogprobScratch, Masks};
use sinew_tensor::ops::NOWHERE;
use sinew_tensor::{Buffer, Scratch};
use sinew_types::TokenId;

/// Maximum logits (640 MiB of f32) that a forward pass with gradients keeps, of some of the asked
/// rows; the backward pass computes those of the others again.
const KEPT_LOGITS: usize = 160 << 20;

/// Part of a forward pass that is kept for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Everything: fastest; see [`Activations::bytes_per_row`].
    All,
    /// The input of each layer; the backward pass computes each layer again, a third more work.
    LayerInputs,
    /// Nothing: log-probabilities without gradients. Memory does not grow with the number of
    /// layers.
    Nothing,
}

/// Values of one layer that its backward pass reads in addition to its input. Shapes are those of
/// one row.
#[derive(Debug, Default)]
pub(super) struct LayerActs {
    /// `[q + k + v]`, normalized and rotated.
    pub(super) qkv: Buffer,
    /// `[q + k + v]` before the q/k norms; empty for models without.
    pub(super) qkv_raw: Buffer,
    /// `[heads]` and `[kv_heads]` of those norms.
    pub(super) q_rstd: Buffer,
    pub(super) k_rstd: Buffer,
    /// `[q]`: attention's output.
    pub(super) attended: Buffer,
    /// `[heads]`: logarithm of attention's denominators.
    pub(super) lse: Buffer,
    /// `[d]`: residual stream between attention and feed-forward.
    pub(super) x_mid: Buffer,
    /// `[2 ff]`: before the activation.
    pub(super) gate_up: Buffer,
}

impl LayerActs {
    fn new(c: &ModelConfig, rows: usize) -> Self {
        let normed = if c.qk_norm { rows } else { 0 };
        Self {
            qkv: Buffer::zeros(rows * c.qkv_dim()),
            qkv_raw: Buffer::zeros(normed * c.qkv_dim()),
            q_rstd: Buffer::zeros(normed * c.heads),
            k_rstd: Buffer::zeros(normed * c.kv_heads),
            attended: Buffer::zeros(rows * c.q_dim()),
            lse: Buffer::zeros(rows * c.heads),
            x_mid: Buffer::zeros(rows * c.d_model),
            gate_up: Buffer::zeros(rows * 2 * c.d_ff),
        }
    }

    fn bytes(&self) -> usize {
        let norms = [&self.qkv_raw, &self.q_rstd, &self.k_rstd];
        let others = [
            &self.qkv,
            &self.attended,
            &self.lse,
            &self.x_mid,
            &self.gate_up,
        ];
        let all = norms.into_iter().chain(others);
        all.map(|buffer| size_of_val(&**buffer)).sum()
    }

    fn values_per_row(c: &ModelConfig) -> usize {
        let normed = if c.qk_norm {
            c.qkv_dim() + c.heads + c.kv_heads
        } else {
            0
        };
        c.qkv_dim() + normed + c.q_dim() + c.heads + c.d_model + 2 * c.d_ff
    }
}

/// Buffers that every layer uses again.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// `[rows, d]`: normalized input of a projection.
    pub(super) h: Scratch,
    /// `[rows]`
    pub(super) rstd: Scratch,
    /// `[rows, ff]`: gated values.
    pub(super) gated: Scratch,
    /// `[rows, d]`: gradient of the residual stream.
    pub(super) dx: Scratch,
    /// `[rows, d]`: gradient of `h`.
    pub(super) dh: Scratch,
    /// `[rows, max(ff, q)]`: gradient of the gated values, or of attention's output.
    pub(super) d_inner: Scratch,
    /// `[rows, max(2 ff, q + k + v)]`
    pub(super) d_outer: Scratch,
    /// `[rows, q + k + v]`, for models with q/k norms.
    pub(super) d_raw: Scratch,
    /// Gradients of norms that are not trained, because adapters are.
    pub(super) unused: Scratch,
    pub(super) lora: LoraWork,
    pub(super) attention: AttentionScratch,
    pub(super) logprob: LogprobScratch,
}

impl Work {
    fn bytes(&self) -> usize {
        let forward = [&self.h, &self.rstd, &self.gated, &self.unused];
        let backward = [
            &self.dx,
            &self.dh,
            &self.d_inner,
            &self.d_outer,
            &self.d_raw,
        ];
        let lora = [&self.lora.inner, &self.lora.d_inner, &self.lora.merged];
        let all = forward.into_iter().chain(backward).chain(lora);
        all.map(Scratch::bytes).sum::<usize>()
            + size_of_val(&*self.lora.scaled)
            + self.attention.bytes()
            + self.logprob.bytes()
    }
}

/// Buffers of adapters.
#[derive(Debug, Default)]
pub(super) struct LoraWork {
    /// `[rows, ranks]` each.
    pub(super) inner: Scratch,
    pub(super) d_inner: Scratch,
    /// A matrix with its adapters, and their scaled B.
    pub(super) merged: Scratch,
    pub(super) scaled: Vec<f32>,
}

/// Rows that leave the last layer, if not all do: those whose outputs are requested. The last layer computes
/// only keys and values of the others, which later rows read.
#[derive(Debug)]
pub(super) struct Leaving {
    /// Ascending, without duplicates.
    pub(super) rows: Vec<u32>,
    /// Place of each row of the pass among them, or [`NOWHERE`].
    pub(super) place: Vec<u32>,
}

impl Leaving {
    /// The rows `asked`, each below `rows`; `None` when they are all, or none.
    pub(super) fn new(asked: &[u32], rows: usize) -> Option<Self> {
        let mut place = vec![NOWHERE; rows];
        asked.iter().for_each(|&row| place[row as usize] = 0);
        let chosen = (0..rows as u32).filter(|&row| place[row as usize] != NOWHERE);
        let chosen: Vec<u32> = chosen.collect();
        for (at, &row) in chosen.iter().enumerate() {
            place[row as usize] = at as u32;
        }
        let some = !chosen.is_empty() && chosen.len() < rows;
        some.then_some(Self {
            rows: chosen,
            place,
        })
    }
}

/// Places in the last hidden states at which outputs are requested, with these states.
#[derive(Debug, Default)]
pub(super) struct OutputPlaces {
    pub(super) places: Vec<u32>,
    /// `[asked, d]` before the last norm.
    pub(super) x: Scratch,
    /// `[asked, d]` after it.
    pub(super) h: Scratch,
    /// `[asked]`
    pub(super) rstd: Scratch,
    /// `[asked, d]` each.
    pub(super) dh: Scratch,
    pub(super) dx: Scratch,
}

impl OutputPlaces {
    fn bytes(&self) -> usize {
        let all = [&self.x, &self.h, &self.rstd, &self.dh, &self.dx];
        all.into_iter().map(Scratch::bytes).sum()
    }
}

/// The items' masks, copied for the backward pass.
#[derive(Debug, Default)]
pub(super) struct KeptMasks {
    /// 0: there are none.
    words: usize,
    table: Vec<u32>,
    rows: Vec<u32>,
}

impl KeptMasks {
    pub(super) fn set(&mut self, masks: Option<Masks<'_>>) {
        self.words = masks.map_or(0, |masks| masks.words);
        self.table.clear();
        self.rows.clear();
        if let Some(masks) = masks {
            self.table.extend_from_slice(masks.table);
            self.rows.extend_from_slice(masks.rows);
        }
    }

    pub(super) fn get(&self) -> Option<Masks<'_>> {
        (self.words > 0).then_some(Masks {
            words: self.words,
            table: &self.table,
            rows: &self.rows,
        })
    }
}

/// State and memory of the last forward pass. One serves one pass at a time; `logprobs`, `values`
/// and `backward` refer to the forward pass before them.
#[derive(Debug)]
pub struct Activations {
    pub(super) keep: Keep,
    /// Decoder that the buffers are for, and rows that fit into them.
    config: Option<ModelConfig>,
    capacity: usize,
    pub(super) tokens: Vec<TokenId>,
    pub(super) layout: Option<TreeLayout>,
    /// `None`: all rows leave the last layer.
    pub(super) leaving: Option<Leaving>,
    /// Input of each layer and of the last norm, `[rows, d]`; only one with [`Keep::Nothing`].
    pub(super) xs: Vec<Buffer>,
    /// Activations of each layer with [`Keep::All`], else of one.
    pub(super) layers: Vec<LayerActs>,
    pub(super) work: Work,
    pub(super) items: OutputPlaces,
    pub(super) targets: Vec<TokenId>,
    /// Temperature of each item; empty: 1 for all.
    pub(super) temperatures: Vec<f32>,
    pub(super) masks: KeptMasks,
    pub(super) logprob: Vec<f32>,
    pub(super) lse: Vec<f32>,
    /// Entropy of each item, in nats; empty if it was not asked for.
    pub(super) entropy: Vec<f32>,
    pub(super) values: OutputPlaces,
}

impl Activations {
    /// Activations without memory yet: they grow with the largest pass.
    pub fn new(keep: Keep) -> Self {
        let logits = match keep {
            Keep::All | Keep::LayerInputs => KEPT_LOGITS,
            Keep::Nothing => 0,
        };
        let work = Work {
            logprob: LogprobScratch::keeping(logits),
            ..Work::default()
        };
        Self {
            keep,
            config: None,
            capacity: 0,
            tokens: Vec::new(),
            layout: None,
            leaving: None,
            xs: Vec::new(),
            layers: Vec::new(),
            work,
            items: OutputPlaces::default(),
            targets: Vec::new(),
            temperatures: Vec::new(),
            masks: KeptMasks::default(),
            logprob: Vec::new(),
            lse: Vec::new(),
            entropy: Vec::new(),
            values: OutputPlaces::default(),
        }
    }

    /// Part of a pass that they keep.
    pub fn keep(&self) -> Keep {
        self.keep
    }

    /// Bytes of all buffers; lists of one value a row are left out. The system provides the memory of large
    /// buffers when it is first written.
    pub fn bytes(&self) -> usize {
        let layers: usize = self.layers.iter().map(LayerActs::bytes).sum();
        let inputs: usize = self.xs.iter().map(|x| size_of_val(&**x)).sum();
        layers + inputs + self.work.bytes() + self.items.bytes() + self.values.bytes()
    }

    /// Bytes that a row of a pass takes, working buffers included, output projection (at most 640 MiB of
    /// logits) left out.
    pub fn bytes_per_row(config: &ModelConfig, keep: Keep) -> usize {
        let c = config;
        let layer = LayerActs::values_per_row(c);
        let (layers, inputs, backward) = match keep {
            Keep::All => (c.layers, c.layers + 1, true),
            Keep::LayerInputs => (1, c.layers + 1, true),
            Keep::Nothing => (1, 1, false),
        };
        let forward = c.d_model + c.d_ff;
        let d_raw = if c.qk_norm { c.qkv_dim() } else { 0 };
        let back = 2 * c.d_model + c.d_ff.max(c.q_dim()) + (2 * c.d_ff).max(c.qkv_dim()) + d_raw;
        let work = forward + if backward { back } else { 0 };
        (layers * layer + inputs * c.d_model + work) * size_of::<f32>()
    }

    /// Makes space for `rows` rows; nothing is allocated if they fit already.
    pub(super) fn reserve(&mut self, c: &ModelConfig, rows: usize) {
        let layers = if self.keep == Keep::All { c.layers } else { 1 };
        let inputs = if self.keep == Keep::Nothing {
            1
        } else {
            c.layers + 1
        };
        if self.config.as_ref() == Some(c) && rows <= self.capacity {
            return;
        }
        self.config = Some(c.clone());
        // Somewhat more than asked, so that slowly growing passes do not take memory each time.
        self.capacity = rows + rows / 8;
        // The old memory goes before the new is taken.
        self.layers = Vec::new();
        self.xs = Vec::new();
        self.layers = (0..layers)
            .map(|_| LayerActs::new(c, self.capacity))
            .collect();
        self.xs = (0..inputs)
            .map(|_| Buffer::zeros(self.capacity * c.d_model))
            .collect();
    }

    /// Layout of the last forward pass.
    ///
    /// # Errors
    /// If there was none.
    pub(super) fn current(&self) -> Result<TreeLayout, ForwardError> {
        self.layout
            .clone()
            .ok_or(ForwardError::State("no forward pass was made"))
    }

    /// Rows of the last hidden states.
    pub(super) fn left(&self, rows: usize) -> usize {
        self.leaving.as_ref().map_or(rows, |l| l.rows.len())
    }

    /// The place of `row` of the last pass in the last hidden states.
    pub(super) fn place(
        &self,
        what: &'static str,
        row: u32,
        rows: usize,
    ) -> Result<u32, ForwardError> {
        check_index(what, row as usize, rows)?;
        match &self.leaving {
            None => Ok(row),
            Some(leaving) => match leaving.place[row as usize] {
                NOWHERE => Err(ForwardError::Unfinished { row: row as usize }),
                place => Ok(place),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Family;
    use crate::testing::tiny_config;

    #[test]
    fn the_announced_memory_is_what_is_taken() {
        for family in [Family::Llama, Family::Qwen3] {
            let config = tiny_config(family);
            for keep in [Keep::All, Keep::LayerInputs, Keep::Nothing] {
                let mut acts = Activations::new(keep);
                acts.reserve(&config, 80);
                let layer = |l: &LayerActs| {
                    let wide = [
                        &l.qkv,
                        &l.qkv_raw,
                        &l.q_rstd,
                        &l.k_rstd,
                        &l.attended,
                        &l.lse,
                    ];
                    let last = [&l.x_mid, &l.gate_up];
                    wide.into_iter()
                        .chain(last)
                        .map(|buffer| buffer.len())
                        .sum::<usize>()
                };
                let taken = acts.layers.iter().map(layer).sum::<usize>()
                    + acts.xs.iter().map(|x| x.len()).sum::<usize>();
                let work = Activations::bytes_per_row(&config, keep) - 4 * taken / 90;
                let (d, ff, qkv) = (config.d_model, config.d_ff, config.qkv_dim());
                let backward = 3 * d + 2 * ff + (2 * ff).max(qkv);
                let raw = if config.qk_norm { qkv } else { 0 };
                let expected = if keep == Keep::Nothing {
                    d + ff
                } else {
                    backward + raw
                };
                assert_eq!(work, 4 * expected, "{family:?} {keep:?}");
                let before = acts.xs[0].as_ptr();
                acts.reserve(&config, 90);
                assert_eq!(
                    acts.xs[0].as_ptr(),
                    before,
                    "memory is kept while it suffices"
                );
                assert_eq!(acts.bytes(), 4 * taken);
                let mut wider = config.clone();
                wider.d_ff *= 2;
                acts.reserve(&wider, 10);
                let gate_up = acts.layers[0].gate_up.len();
                assert_eq!(gate_up, 11 * 4 * config.d_ff, "another decoder");
            }
        }
    }
}
