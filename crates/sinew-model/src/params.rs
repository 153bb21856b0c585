//! All weights of a decoder in one flat f32 buffer, by the names of the Hugging Face layout.
//!
//! Order in memory: embeddings, then for each layer `input_layernorm, q, k, v, (biases q, k, v),
//! (q_norm, k_norm), o, post_attention_layernorm, gate, up, down`, then the final norm and the
//! output projection unless it is tied. q, k, v (and gate, up) lie side by side, so that one
//! product computes them. Each such group starts at a multiple of 16 values; the padding between
//! groups is zero and stays zero under any update by gradients.
//!
//! One flat buffer makes gradients, moments, all-reduce and checkpoints loops over one slice.

use crate::config::ModelConfig;
use sinew_tensor::buffer::Buffer;
use sinew_types::{SplitMix64, TensorSource, TensorView};
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Values in a 64-byte line; groups of tensors start on one.
const ALIGN_VALUES: usize = 16;

/// Name, shape and place of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamEntry {
    /// Name in the Hugging Face layout, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Row-major; matrices are `[out, in]`.
    pub shape: Vec<usize>,
    /// First value in the flat buffer.
    pub offset: usize,
}

impl ParamEntry {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Range of the tensor's values in the flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }
}

/// Tensors side by side in one flat buffer, ascending, some zeros of padding between them.
#[derive(Clone, Debug, Default)]
pub struct TensorTable {
    entries: Vec<ParamEntry>,
    index: HashMap<String, usize>,
    total: usize,
}

impl TensorTable {
    /// Places tensors side by side, from an aligned offset on; their common range.
    pub(crate) fn group(
        &mut self,
        tensors: impl IntoIterator<Item = (String, Vec<usize>)>,
    ) -> Range<usize> {
        let start = self.total.next_multiple_of(ALIGN_VALUES);
        let mut offset = start;
        for (name, shape) in tensors {
            let entry = ParamEntry {
                name: name.clone(),
                shape,
                offset,
            };
            offset += entry.len();
            self.index.insert(name, self.entries.len());
            self.entries.push(entry);
        }
        self.total = offset;
        start..offset
    }

    /// Every tensor in memory order.
    pub fn entries(&self) -> &[ParamEntry] {
        &self.entries
    }

    /// The tensor called `name`.
    pub fn entry(&self, name: &str) -> Option<&ParamEntry> {
        self.index.get(name).map(|&i| &self.entries[i])
    }

    /// Length of the flat buffer, padding included.
    pub fn total(&self) -> usize {
        self.total.next_multiple_of(ALIGN_VALUES)
    }

    /// Number of weights, padding left out.
    pub fn weights(&self) -> usize {
        self.entries.iter().map(ParamEntry::len).sum()
    }

    /// Every tensor with its part of `values` `[total]`.
    ///
    /// # Panics
    /// If `values` has another length.
    pub fn split_mut<'a>(&'a self, values: &'a mut [f32]) -> Vec<(&'a ParamEntry, &'a mut [f32])> {
        assert_eq!(values.len(), self.total(), "values of the whole buffer");
        let (mut rest, mut at) = (values, 0);
        let mut parts = Vec::with_capacity(self.entries.len());
        for entry in &self.entries {
            let (_, tail) = rest.split_at_mut(entry.offset - at);
            let (part, tail) = tail.split_at_mut(entry.len());
            parts.push((entry, part));
            (rest, at) = (tail, entry.offset + entry.len());
        }
        parts
    }

    /// Compares a set of named tensors with this table.
    ///
    /// # Errors
    /// All tensors that are missing, left over or mis-shaped, not only the first.
    pub fn compare<'a>(
        &self,
        found: impl Iterator<Item = (&'a str, &'a [usize])>,
    ) -> Result<(), TensorMismatch> {
        let mut mismatch = TensorMismatch::default();
        let mut missing: BTreeSet<&str> = self.entries.iter().map(|e| e.name.as_str()).collect();
        for (name, shape) in found {
            let Some(entry) = self.entry(name) else {
                mismatch.unexpected.push(name.to_owned());
                continue;
            };
            missing.remove(name);
            if entry.shape != shape {
                let shapes = (name.to_owned(), shape.to_vec(), entry.shape.clone());
                mismatch.misshaped.push(shapes);
            }
        }
        mismatch.missing = missing.into_iter().map(str::to_owned).collect();
        if mismatch == TensorMismatch::default() {
            Ok(())
        } else {
            Err(mismatch)
        }
    }

    /// Compares names and shapes of `source` with this table. Any element type is right: all are read as
    /// `f32`.
    pub(crate) fn check(&self, source: &dyn TensorSource) -> Result<(), TensorMismatch> {
        let names = source.names();
        let shape = |name: &String| Some(source.info(name)?.shape);
        let found = names.iter().filter_map(|n| Some((n.as_str(), shape(n)?)));
        self.compare(found)
    }

    /// Copies every tensor of `source` into `values`; on `Err` nothing changed.
    pub(crate) fn copy(
        &self,
        source: &dyn TensorSource,
        values: &mut [f32],
    ) -> Result<(), TensorMismatch> {
        self.check(source)?;
        for (entry, part) in self.split_mut(values) {
            if let Some(view) = source.tensor(&entry.name) {
                part.copy_from_slice(&view.into_f32());
            }
        }
        Ok(())
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.entries
            .iter()
            .map(|entry| entry.name.clone())
            .collect()
    }

    pub(crate) fn view<'a>(&'a self, name: &str, values: &'a [f32]) -> Option<TensorView<'a>> {
        let entry = self.entry(name)?;
        TensorView::f32(&entry.shape, &values[entry.range()]).ok()
    }
}

/// Places of one layer's groups in the flat buffer.
#[derive(Clone, Debug, Default)]
pub(crate) struct LayerRanges {
    /// `[d]`
    pub(crate) attn_norm: Range<usize>,
    /// `[q + k + v, d]`
    pub(crate) qkv: Range<usize>,
    /// `[q + k + v]`
    pub(crate) qkv_bias: Option<Range<usize>>,
    /// `[head_dim]` each.
    pub(crate) qk_norm: Option<(Range<usize>, Range<usize>)>,
    /// `[d, q]`
    pub(crate) o: Range<usize>,
    /// `[d]`
    pub(crate) ffn_norm: Range<usize>,
    /// `[2 ff, d]`: gate rows, then up rows.
    pub(crate) gate_up: Range<usize>,
    /// `[d, ff]`
    pub(crate) down: Range<usize>,
}

/// Layout of a decoder's tensors. Two configurations of equal shape have equal layouts.
#[derive(Clone, Debug)]
pub struct ParamLayout {
    config: ModelConfig,
    table: TensorTable,
    pub(crate) embed: Range<usize>,
    pub(crate) layers: Vec<LayerRanges>,
    pub(crate) final_norm: Range<usize>,
    /// `None`: the embeddings serve as output projection.
    pub(crate) lm_head: Option<Range<usize>>,
}

/// Places the tensors of one layer.
fn layer_ranges(table: &mut TensorTable, c: &ModelConfig, layer: usize) -> LayerRanges {
    let name = |part: &str| format!("model.layers.{layer}.{part}");
    let (d, q, kv, ff) = (c.d_model, c.q_dim(), c.kv_dim(), c.d_ff);
    LayerRanges {
        attn_norm: table.group([(name("input_layernorm.weight"), vec![d])]),
        qkv: table.group([
            (name("self_attn.q_proj.weight"), vec![q, d]),
            (name("self_attn.k_proj.weight"), vec![kv, d]),
            (name("self_attn.v_proj.weight"), vec![kv, d]),
        ]),
        qkv_bias: c.qkv_bias.then(|| {
            table.group([
                (name("self_attn.q_proj.bias"), vec![q]),
                (name("self_attn.k_proj.bias"), vec![kv]),
                (name("self_attn.v_proj.bias"), vec![kv]),
            ])
        }),
        qk_norm: c.qk_norm.then(|| {
            (
                table.group([(name("self_attn.q_norm.weight"), vec![c.head_dim])]),
                table.group([(name("self_attn.k_norm.weight"), vec![c.head_dim])]),
            )
        }),
        o: table.group([(name("self_attn.o_proj.weight"), vec![d, q])]),
        ffn_norm: table.group([(name("post_attention_layernorm.weight"), vec![d])]),
        gate_up: table.group([
            (name("mlp.gate_proj.weight"), vec![ff, d]),
            (name("mlp.up_proj.weight"), vec![ff, d]),
        ]),
        down: table.group([(name("mlp.down_proj.weight"), vec![d, ff])]),
    }
}

impl ParamLayout {
    /// The layout of a decoder.
    pub fn new(config: &ModelConfig) -> Self {
        let c = config;
        let mut table = TensorTable::default();
        let matrix = vec![c.vocab, c.d_model];
        let embed = table.group([("model.embed_tokens.weight".to_owned(), matrix.clone())]);
        let layers = (0..c.layers)
            .map(|layer| layer_ranges(&mut table, c, layer))
            .collect();
        let final_norm = table.group([("model.norm.weight".to_owned(), vec![c.d_model])]);
        let lm_head =
            (!c.tied_embeddings).then(|| table.group([("lm_head.weight".to_owned(), matrix)]));
        Self {
            config: c.clone(),
            table,
            embed,
            layers,
            final_norm,
            lm_head,
        }
    }

    /// The decoder that this is the layout of.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The output projection: its own tensor, or the embeddings.
    pub(crate) fn head(&self) -> Range<usize> {
        self.lm_head.clone().unwrap_or_else(|| self.embed.clone())
    }
}

impl Deref for ParamLayout {
    type Target = TensorTable;
    fn deref(&self) -> &TensorTable {
        &self.table
    }
}

/// Differences between a set of tensors and the set that a configuration needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorMismatch {
    /// Names that are needed and not there.
    pub missing: Vec<String>,
    /// Names that exist but are not needed.
    pub unexpected: Vec<String>,
    /// Name, shape found, shape expected.
    pub misshaped: Vec<(String, Vec<usize>, Vec<usize>)>,
}

impl fmt::Display for TensorMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 6;
        f.write_str("weights do not fit the configuration:")?;
        let shapes = self
            .misshaped
            .iter()
            .map(|(name, found, expected)| format!("{name} is {found:?}, expected {expected:?}"));
        let lists = [
            ("missing", self.missing.clone()),
            ("unexpected", self.unexpected.clone()),
            ("mis-shaped", shapes.collect()),
        ];
        for (what, list) in lists {
            if !list.is_empty() {
                write!(
                    f,
                    " {} {what} ({}",
                    list.len(),
                    list[..list.len().min(SHOWN)].join(", ")
                )?;
                f.write_str(if list.len() > SHOWN { ", ...)" } else { ")" })?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for TensorMismatch {}

/// The weights of a decoder: the f32 master copy that the trainer updates and the engine packs.
#[derive(Clone, Debug)]
pub struct Params {
    layout: Arc<ParamLayout>,
    values: Buffer,
}

impl Params {
    /// Weights that are all zero, to be filled. Allocates 4 bytes a weight.
    pub fn zeros(config: &ModelConfig) -> Self {
        let layout = Arc::new(ParamLayout::new(config));
        let values = Buffer::zeros(layout.total());
        Self { layout, values }
    }

    /// Fresh weights to train from: matrices normal with deviation 0.02, those that write to the
    /// residual stream divided by `sqrt(2 layers)` (Radford et al. 2019), norms 1, biases 0.
    /// The same seed gives the same weights on every machine.
    pub fn random(config: &ModelConfig, seed: u64) -> Self {
        let mut params = Self::zeros(config);
        let layout = Arc::clone(&params.layout);
        let residual = 0.02 / (2.0 * config.layers as f32).sqrt();
        for (i, entry) in layout.entries().iter().enumerate() {
            let values = &mut params.values[entry.range()];
            let name = &entry.name;
            if name.ends_with("norm.weight") {
                values.fill(1.0);
            } else if !name.ends_with(".bias") {
                let writes = name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
                let deviation = if writes { residual } else { 0.02 };
                Random::new(seed, i as u64).fill_normal(values, deviation);
            }
        }
        params
    }

    /// Overwrites all weights with those of `source`, of any element type.
    ///
    /// # Errors
    /// If the tensors are not those of the layout; then nothing changed.
    pub fn copy_from(&mut self, source: &dyn TensorSource) -> Result<(), TensorMismatch> {
        self.layout.copy(source, &mut self.values)
    }

    /// The decoder that these are the weights of.
    pub fn config(&self) -> &ModelConfig {
        self.layout.config()
    }

    /// Layout of the tensors.
    pub fn layout(&self) -> &Arc<ParamLayout> {
        &self.layout
    }

    /// All values, padding included: `[layout.total()]`.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// All values for an update in place. Padding must stay 0: checksums and norms run over the
    /// whole buffer.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Every tensor with its values.
    pub fn tensors_mut(&mut self) -> Vec<(&ParamEntry, &mut [f32])> {
        self.layout.split_mut(&mut self.values)
    }

    /// The values of one tensor.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        let range = self.layout.entry(name)?.range();
        Some(&mut self.values[range])
    }
}

impl TensorSource for Params {
    fn names(&self) -> Vec<String> {
        self.layout.names()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.layout.view(name, &self.values)
    }
}

/// Random numbers, a stream for each tensor.
pub(crate) struct Random(SplitMix64);

impl Random {
    /// A separate stream for each `stream` of a seed.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut random = SplitMix64::new(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        random.next_u64();
        Self(random)
    }

    /// Uniform in (0, 1].
    fn unit(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Normal deviates (Box and Muller 1958).
    pub(crate) fn fill_normal(&mut self, out: &mut [f32], deviation: f32) {
        for pair in out.chunks_mut(2) {
            let radius = (-2.0 * self.unit().ln()).sqrt();
            let (sin, cos) = (2.0 * std::f64::consts::PI * self.unit()).sin_cos();
            for (value, part) in pair.iter_mut().zip([cos, sin]) {
                *value = (radius * part) as f32 * deviation;
            }
        }
    }

    /// Uniform in (-bound, bound].
    pub(crate) fn fill_uniform(&mut self, out: &mut [f32], bound: f32) {
        out.iter_mut()
            .for_each(|value| *value = (2.0 * self.unit() - 1.0) as f32 * bound);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tiny_config;

    #[test]
    fn groups_are_adjacent_and_aligned() {
        let layout = ParamLayout::new(&tiny_config(crate::Family::Qwen2));
        let at = |name: &str| {
            layout
                .entry(&format!("model.layers.1.{name}"))
                .unwrap()
                .range()
        };
        assert_eq!(
            at("self_attn.q_proj.weight").end,
            at("self_attn.k_proj.weight").start
        );
        assert_eq!(
            at("self_attn.k_proj.weight").end,
            at("self_attn.v_proj.weight").start
        );
        assert_eq!(
            at("self_attn.q_proj.bias").end,
            at("self_attn.k_proj.bias").start
        );
        assert_eq!(
            at("mlp.gate_proj.weight").end,
            at("mlp.up_proj.weight").start
        );
        assert!(
            layout
                .layers
                .iter()
                .all(|l| l.qkv.start % 16 == 0 && l.down.start % 16 == 0)
        );
        assert!(layout.total() >= layout.weights());
    }

    #[test]
    fn random_weights_repeat_and_have_the_asked_deviation() {
        let config = tiny_config(crate::Family::Llama);
        let (a, b) = (Params::random(&config, 7), Params::random(&config, 7));
        assert_eq!(a.values(), b.values());
        assert_ne!(a.values(), Params::random(&config, 8).values());
        let embed = a.tensor("model.embed_tokens.weight").unwrap().into_f32();
        let variance = embed.iter().map(|v| f64::from(v * v)).sum::<f64>() / embed.len() as f64;
        assert!(
            (variance.sqrt() - 0.02).abs() < 0.001,
            "{}",
            variance.sqrt()
        );
        let norm = a.tensor("model.norm.weight").unwrap().into_f32();
        assert!(norm.iter().all(|&v| v == 1.0));
    }

    #[test]
    fn mismatches_are_named_and_change_nothing() {
        let llama = Params::random(&tiny_config(crate::Family::Llama), 1);
        let mut qwen = Params::random(&tiny_config(crate::Family::Qwen2), 2);
        let before = qwen.values().to_vec();
        let error = qwen.copy_from(&llama).unwrap_err();
        assert!(
            error
                .missing
                .contains(&"model.layers.0.self_attn.q_proj.bias".to_owned())
        );
        assert!(error.to_string().contains("q_proj.bias"), "{error}");
        assert_eq!(qwen.values(), before);
        let mut small = tiny_config(crate::Family::Llama);
        small.d_ff /= 2;
        let error = Params::zeros(&small).copy_from(&llama).unwrap_err();
        assert!(
            error.to_string().contains("mlp.down_proj.weight is ["),
            "{error}"
        );
    }
}
