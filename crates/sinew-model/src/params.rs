//! All weights of a decoder in one flat f32 buffer, by the names of the Hugging Face layout.
//!
//! Order in memory: embeddings, then for each layer
//! `input_layernorm, q, k, v, (biases q, k, v), (q_norm, k_norm), o, post_attention_layernorm, gate,
//! up, down`, then the final norm and the output projection unless it is tied. q, k, v (and gate,
//! up) lie side by side, so that one product computes them. Each such group starts at a multiple of
//! 16 values; the padding between groups is zero and stays zero under any update by gradients.

use crate::config::ModelConfig;
use sinew_tensor::buffer::Buffer;
use sinew_types::{TensorSource, TensorView};
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Values in a 64-byte line; groups of tensors start on one.
const ALIGN_VALUES: usize = 16;

/// Name, shape and place of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamEntry {
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

    /// Its values in the flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
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

/// Where every tensor of a decoder lies.
#[derive(Clone, Debug)]
pub struct ParamLayout {
    config: ModelConfig,
    entries: Vec<ParamEntry>,
    index: HashMap<String, usize>,
    total: usize,
    pub(crate) embed: Range<usize>,
    pub(crate) layers: Vec<LayerRanges>,
    pub(crate) final_norm: Range<usize>,
    /// `None`: the embeddings serve as output projection.
    pub(crate) lm_head: Option<Range<usize>>,
}

/// Lays tensors one after the other.
#[derive(Default)]
struct Builder {
    entries: Vec<ParamEntry>,
    total: usize,
}

impl Builder {
    /// Places tensors side by side, from an aligned offset on; their common range.
    fn group<const N: usize>(&mut self, tensors: [(String, Vec<usize>); N]) -> Range<usize> {
        let start = self.total.next_multiple_of(ALIGN_VALUES);
        let mut offset = start;
        for (name, shape) in tensors {
            let entry = ParamEntry {
                name,
                shape,
                offset,
            };
            offset += entry.len();
            self.entries.push(entry);
        }
        self.total = offset;
        start..offset
    }

    fn layer(&mut self, c: &ModelConfig, layer: usize) -> LayerRanges {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let (d, q, kv, ff) = (c.d_model, c.q_dim(), c.kv_dim(), c.d_ff);
        LayerRanges {
            attn_norm: self.group([(name("input_layernorm.weight"), vec![d])]),
            qkv: self.group([
                (name("self_attn.q_proj.weight"), vec![q, d]),
                (name("self_attn.k_proj.weight"), vec![kv, d]),
                (name("self_attn.v_proj.weight"), vec![kv, d]),
            ]),
            qkv_bias: c.qkv_bias.then(|| {
                self.group([
                    (name("self_attn.q_proj.bias"), vec![q]),
                    (name("self_attn.k_proj.bias"), vec![kv]),
                    (name("self_attn.v_proj.bias"), vec![kv]),
                ])
            }),
            qk_norm: c.qk_norm.then(|| {
                (
                    self.group([(name("self_attn.q_norm.weight"), vec![c.head_dim])]),
                    self.group([(name("self_attn.k_norm.weight"), vec![c.head_dim])]),
                )
            }),
            o: self.group([(name("self_attn.o_proj.weight"), vec![d, q])]),
            ffn_norm: self.group([(name("post_attention_layernorm.weight"), vec![d])]),
            gate_up: self.group([
                (name("mlp.gate_proj.weight"), vec![ff, d]),
                (name("mlp.up_proj.weight"), vec![ff, d]),
            ]),
            down: self.group([(name("mlp.down_proj.weight"), vec![d, ff])]),
        }
    }
}

impl ParamLayout {
    /// The layout of a decoder.
    pub fn new(config: &ModelConfig) -> Self {
        let c = config;
        let mut builder = Builder::default();
        let matrix = vec![c.vocab, c.d_model];
        let embed = builder.group([("model.embed_tokens.weight".to_owned(), matrix.clone())]);
        let layers = (0..c.layers).map(|layer| builder.layer(c, layer)).collect();
        let final_norm = builder.group([("model.norm.weight".to_owned(), vec![c.d_model])]);
        let lm_head =
            (!c.tied_embeddings).then(|| builder.group([("lm_head.weight".to_owned(), matrix)]));
        let index = builder
            .entries
            .iter()
            .enumerate()
            .map(|(i, e)| (e.name.clone(), i))
            .collect();
        Self {
            config: c.clone(),
            index,
            total: builder.total.next_multiple_of(ALIGN_VALUES),
            entries: builder.entries,
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
        self.total
    }

    /// Number of weights, padding left out.
    pub fn weights(&self) -> usize {
        self.entries.iter().map(ParamEntry::len).sum()
    }

    /// The output projection: its own tensor, or the embeddings.
    pub(crate) fn head(&self) -> Range<usize> {
        self.lm_head.clone().unwrap_or_else(|| self.embed.clone())
    }

    /// Compares a set of named tensors with this layout.
    pub fn compare<'a>(
        &self,
        found: impl Iterator<Item = (&'a str, &'a [usize])>,
    ) -> Result<(), TensorMismatch> {
        let mut mismatch = TensorMismatch::default();
        let mut missing: BTreeSet<&str> = self.entries.iter().map(|e| e.name.as_str()).collect();
        for (name, shape) in found {
            match self.entry(name) {
                None => mismatch.unexpected.push(name.to_owned()),
                Some(entry) => {
                    missing.remove(name);
                    if entry.shape != shape {
                        mismatch.misshaped.push((
                            name.to_owned(),
                            shape.to_vec(),
                            entry.shape.clone(),
                        ));
                    }
                }
            }
        }
        mismatch.missing = missing.into_iter().map(str::to_owned).collect();
        if mismatch == TensorMismatch::default() {
            Ok(())
        } else {
            Err(mismatch)
        }
    }
}

/// How a set of tensors differs from what a configuration asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorMismatch {
    pub missing: Vec<String>,
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

/// The weights of a decoder.
#[derive(Clone, Debug)]
pub struct Params {
    layout: Arc<ParamLayout>,
    values: Buffer,
}

impl Params {
    /// All zeros: to be filled.
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
                Normal::new(seed, i as u64).fill(values, deviation);
            }
        }
        params
    }

    /// A copy of every tensor of `source`, which must have exactly those of `config`.
    pub fn from_source(
        config: &ModelConfig,
        source: &dyn TensorSource,
    ) -> Result<Self, TensorMismatch> {
        let mut params = Self::zeros(config);
        params.copy_from(source)?;
        Ok(params)
    }

    /// Overwrites all weights with those of `source`; on `Err` nothing changed.
    pub fn copy_from(&mut self, source: &dyn TensorSource) -> Result<(), TensorMismatch> {
        check_source(&self.layout, source)?;
        for entry in self.layout.entries() {
            if let Some(view) = source.tensor(&entry.name) {
                self.values[entry.range()].copy_from_slice(view.data);
            }
        }
        Ok(())
    }

    /// The decoder that these are the weights of.
    pub fn config(&self) -> &ModelConfig {
        self.layout.config()
    }

    /// Where the tensors lie.
    pub fn layout(&self) -> &Arc<ParamLayout> {
        &self.layout
    }

    /// All values, padding included: `[layout.total()]`.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// All values for an update in place. Padding must stay 0.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// The values of one tensor.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        let range = self.layout.entry(name)?.range();
        Some(&mut self.values[range])
    }
}

impl TensorSource for Params {
    fn names(&self) -> Vec<String> {
        self.layout
            .entries()
            .iter()
            .map(|entry| entry.name.clone())
            .collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let entry = self.layout.entry(name)?;
        Some(TensorView {
            shape: &entry.shape,
            data: &self.values[entry.range()],
        })
    }
}

/// Checks names, shapes and lengths of `source` against `layout`.
pub(crate) fn check_source(
    layout: &ParamLayout,
    source: &dyn TensorSource,
) -> Result<(), TensorMismatch> {
    let names = source.names();
    let views = names
        .iter()
        .filter_map(|name| Some((name.as_str(), source.tensor(name)?.shape)));
    layout.compare(views)?;
    let short = |name: &&String| {
        source
            .tensor(name)
            .is_some_and(|v| v.data.len() != v.shape.iter().product::<usize>())
    };
    match names.iter().find(short) {
        None => Ok(()),
        Some(name) => Err(TensorMismatch {
            misshaped: source
                .tensor(name)
                .map(|v| (name.clone(), vec![v.data.len()], v.shape.to_vec()))
                .into_iter()
                .collect(),
            ..TensorMismatch::default()
        }),
    }
}

/// Normal deviates by Box-Muller over SplitMix64 (Steele et al. 2014), a stream for each tensor.
pub(crate) struct Normal(u64);

impl Normal {
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut normal = Self(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        normal.next();
        normal
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1].
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn fill(&mut self, out: &mut [f32], deviation: f32) {
        for pair in out.chunks_mut(2) {
            let radius = (-2.0 * self.unit().ln()).sqrt();
            let (sin, cos) = (2.0 * std::f64::consts::PI * self.unit()).sin_cos();
            for (value, part) in pair.iter_mut().zip([cos, sin]) {
                *value = (radius * part) as f32 * deviation;
            }
        }
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
        let embed = a.tensor("model.embed_tokens.weight").unwrap().data;
        let variance = embed.iter().map(|v| f64::from(v * v)).sum::<f64>() / embed.len() as f64;
        assert!(
            (variance.sqrt() - 0.02).abs() < 0.001,
            "{}",
            variance.sqrt()
        );
        let norm = a.tensor("model.norm.weight").unwrap().data;
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
        let error = Params::from_source(&small, &llama).unwrap_err();
        assert!(
            error.to_string().contains("mlp.down_proj.weight is ["),
            "{error}"
        );
    }
}
