//! The sizes of any decoder of `transformers`, read from its `config.json` and the headers of its weights.
//!
//! [`ModelConfig`] refuses families that this crate does not compute. A [`ModelShape`] accepts all of them,
//! since it only counts: parameters, adapters, cached keys and values. Headers of safetensors, if they are
//! there, count exactly. Otherwise formulas count from the sizes of the configuration; families with parts
//! that these do not name (state-space layers, embeddings of each layer) are then counted too low.

use crate::config::{ConfigError, ModelConfig};
use crate::error::LoadError;
use crate::lora::Projection;
use crate::params::ParamLayout;
use crate::safetensors::{header_shapes, index_bytes};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Largest size that is accepted.
const MAX_SIZE: u64 = 1 << 32;
/// Largest number of layers.
const MAX_LAYERS: u64 = 1 << 16;
/// Parts of a configuration that hold the decoder of a model with several parts.
const NESTED: [&str; 4] = [
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
];
/// Families whose embedding is the output matrix unless the configuration states otherwise.
const TIED: [&str; 4] = ["gemma", "cohere", "gpt2", "bloom"];
/// Families with biases on queries, keys and values, which their configurations do not mention.
const BIASED: [&str; 4] = ["qwen2", "gpt2", "phi", "gpt_neox"];
/// Families whose feed-forward layer has two matrices instead of three.
const UNGATED: [&str; 7] = [
    "gpt2",
    "gpt_neox",
    "opt",
    "phi",
    "falcon",
    "starcoder2",
    "bloom",
];
/// Words in names of tensors that belong to an encoder of images or sounds.
const ENCODERS: [&str; 4] = ["vision", "visual", "audio", "multi_modal"];

/// Linear layers of one form: their number, inputs and outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Linear {
    name: &'static str,
    inputs: u64,
    outputs: u64,
    count: u64,
}

/// Sizes of a decoder. Counts of parameters are numbers, not bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// `model_type` of the decoder.
    pub family: String,
    /// Rows of the embedding.
    pub vocab: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Decoder layers.
    pub layers: u64,
    /// Query heads.
    pub heads: u64,
    /// Key-value heads over which an engine can split its cache; 1 where they share one latent.
    pub kv_heads: u64,
    /// Width of all query heads together.
    pub queries: u64,
    /// Width of all keys together; that of the values is counted alike.
    pub keys: u64,
    /// Numbers that the KV cache holds for a token, all layers together.
    pub cached: u64,
    /// Width of the feed-forward part that one token passes in a layer: dense, or its experts together.
    pub feed_forward: u64,
    /// Experts that one token passes in a layer; 0: the layers are dense.
    pub routed: u64,
    /// Whether the output matrix is the embedding.
    pub tied: bool,
    /// Maximum tokens of a sequence, if the configuration states it.
    pub max_context: Option<u64>,
    /// Whether the weights are quantized, so that they cannot be trained as they are.
    pub quantized: bool,
    /// All parameters, those of encoders included.
    pub parameters: u64,
    /// Parameters of encoders, which are loaded and never trained.
    pub encoders: u64,
    /// Parameters of the largest decoder layer.
    pub layer_parameters: u64,
    /// Whether the numbers are those of the weights' headers instead of formulas.
    pub exact: bool,
    linears: Vec<Linear>,
}

impl ModelShape {
    /// Reads the text of any `config.json`; parameters are counted by formulas.
    ///
    /// # Errors
    /// If it is not JSON, a size is missing or out of range, or the counts do not fit 64 bits.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| ConfigError::Json(error.to_string()))?;
        let Value::Object(top) = &value else {
            let text = "expected an object at the top".to_owned();
            return Err(ConfigError::Json(text));
        };
        Fields::of(top).shape()
    }

    /// Reads a folder with a `config.json`, or that file. Parameters are counted exactly if the folder has
    /// all weights or an index with their bytes.
    ///
    /// # Errors
    /// If the configuration cannot be read. Missing or damaged weights are no error: the formulas count.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        let (folder, file) = if path.is_dir() {
            (path, path.join("config.json"))
        } else {
            (path.parent().unwrap_or(Path::new(".")), path.to_owned())
        };
        let text = crate::load::read_text(&file)?;
        let mut shape = Self::from_json(&text).map_err(LoadError::config(&file))?;
        if !shape.quantized {
            shape.count_weights(folder, &text);
        }
        Ok(shape)
    }

    /// Parameters outside of the layers: embedding, output matrix and the last norm.
    pub fn root_parameters(&self) -> u64 {
        let matrices = if self.tied { 1 } else { 2 };
        matrices * self.vocab * self.hidden + self.hidden
    }

    /// Parameters of adapters of `rank` on the linear layers named in `targets`, all of them but the output
    /// matrix if it is empty: `rank x (inputs + outputs)` for each. Fused experts take none. A name that is
    /// not known counts as all layers.
    pub fn adapter_parameters(&self, rank: u64, targets: &[String]) -> u64 {
        let head = Projection::Head.name();
        let known = |name: &String| name == head || self.linears.iter().any(|l| l.name == name);
        let all = !targets.iter().all(known) || targets.is_empty();
        let chosen = |l: &&Linear| all || targets.iter().any(|name| name == l.name);
        let sides = |l: &Linear| l.count * (l.inputs + l.outputs);
        let has_head = targets.iter().any(|name| name == head);
        let head = if has_head {
            self.hidden + self.vocab
        } else {
            0
        };
        rank * (self.linears.iter().filter(chosen).map(sides).sum::<u64>() + head)
    }

    /// Replaces the counts of formulas by those of the weights of a folder, if they can be read.
    fn count_weights(&mut self, folder: &Path, config: &str) {
        if let Ok(tensors) = header_shapes(folder) {
            self.count_tensors(&tensors);
        } else if let Some(bytes) = index_bytes(folder) {
            let wide = config.contains("\"float32\"");
            self.parameters = bytes / if wide { 4 } else { 2 };
            self.exact = true;
        }
    }

    /// Counts tensors by name. Those of layers beyond the last one (drafts) are not loaded for training.
    fn count_tensors(&mut self, tensors: &[(String, Vec<usize>)]) {
        let mut layers = vec![0_u64; self.layers as usize];
        let (mut all, mut encoders, mut has_head) = (0_u64, 0_u64, false);
        for (name, shape) in tensors {
            let sizes = shape.iter().map(|size| *size as u64);
            let count = sizes.fold(1, u64::saturating_mul);
            if ENCODERS.iter().any(|word| name.contains(word)) {
                encoders = encoders.saturating_add(count);
                all = all.saturating_add(count);
                continue;
            }
            if name.starts_with("mtp.") {
                continue;
            }
            match layer_of(name) {
                Some(layer) if layer >= layers.len() => continue,
                Some(layer) => layers[layer] = layers[layer].saturating_add(count),
                None => has_head |= name.ends_with("lm_head.weight"),
            }
            all = all.saturating_add(count);
        }
        if self.tied && has_head {
            // A copy of the embedding, which is loaded once.
            all -= (self.vocab * self.hidden).min(all);
        }
        let largest = layers.iter().copied().max().unwrap_or(0);
        if all > 0 && largest > 0 {
            (self.parameters, self.encoders, self.layer_parameters) = (all, encoders, largest);
            self.exact = true;
        }
    }
}

/// The number of the layer in a tensor's name: `layers.N.`, `h.N.` or `blocks.N.`.
fn layer_of(name: &str) -> Option<usize> {
    let mut parts = name.split('.');
    parts.find(|part| ["layers", "h", "blocks"].contains(part))?;
    parts.next()?.parse().ok()
}

/// A decoder of this crate, whose layout counts exactly.
impl From<&ModelConfig> for ModelShape {
    fn from(config: &ModelConfig) -> Self {
        let c = config;
        let value = json!({
            "model_type": c.family.name(),
            "vocab_size": c.vocab,
            "hidden_size": c.d_model,
            "num_hidden_layers": c.layers,
            "num_attention_heads": c.heads,
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "intermediate_size": c.d_ff,
            "tie_word_embeddings": c.tied_embeddings,
            "max_position_embeddings": c.max_context,
        });
        let empty = Map::new();
        let fields = Fields::of(value.as_object().unwrap_or(&empty));
        let mut shape = fields.count(Sizes {
            vocab: c.vocab as u64,
            hidden: c.d_model as u64,
            layers: c.layers as u64,
            heads: c.heads as u64,
            kv_heads: c.kv_heads as u64,
            head_dim: c.head_dim as u64,
        });
        let layout = ParamLayout::new(config);
        let tensors: Vec<(String, Vec<usize>)> = layout
            .entries()
            .iter()
            .map(|entry| (entry.name.clone(), entry.shape.clone()))
            .collect();
        shape.count_tensors(&tensors);
        shape
    }
}

/// Sizes that every configuration has.
#[derive(Clone, Copy)]
struct Sizes {
    vocab: u64,
    hidden: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
}

/// The fields of a decoder, and those of the whole model around it.
struct Fields<'a> {
    own: &'a Map<String, Value>,
    top: &'a Map<String, Value>,
    family: &'a str,
}

/// Parameters of one layer's parts.
struct Parts {
    attention: u64,
    /// Attention of linear cost, which some layers have instead.
    linear_attention: u64,
    dense: u64,
    mixture: u64,
    norms: u64,
}

impl<'a> Fields<'a> {
    /// Finds the decoder in a configuration.
    fn of(top: &'a Map<String, Value>) -> Self {
        let mut own = top;
        while !own.contains_key("hidden_size") {
            let nested = NESTED.iter().find_map(|name| own.get(*name)?.as_object());
            let Some(inner) = nested else { break };
            own = inner;
        }
        let kind = |map: &'a Map<String, Value>| map.get("model_type").and_then(Value::as_str);
        let family = kind(own).or_else(|| kind(top)).unwrap_or("unknown");
        Self { own, top, family }
    }

    /// Whether the family's name begins with one of these.
    fn is_one_of(&self, families: &[&str]) -> bool {
        families.iter().any(|f| self.family.starts_with(f))
    }

    /// The first of these fields that is set. A list counts as its largest number.
    fn size(&self, names: &[&'static str]) -> Result<Option<u64>, ConfigError> {
        let set = |name: &&&str| self.own.get(**name).is_some_and(|v| !v.is_null());
        let Some(name) = names.iter().find(set) else {
            return Ok(None);
        };
        let found = &self.own[*name];
        let largest = match found {
            Value::Array(list) => list.iter().filter_map(Value::as_u64).max(),
            value => value.as_u64(),
        };
        match largest.filter(|size| *size <= MAX_SIZE) {
            Some(size) => Ok(Some(size)),
            None => Err(ConfigError::Field {
                source_kind: "config.json",
                field: (*name).to_owned(),
                found: found.to_string(),
                expected: "a whole number up to 4294967296".to_owned(),
            }),
        }
    }

    /// A size that must be there, 1 or more.
    fn need(&self, names: &[&'static str]) -> Result<u64, ConfigError> {
        let size = self.size(names)?.filter(|size| *size > 0);
        size.ok_or_else(|| ConfigError::Missing {
            source_kind: "config.json",
            field: names[0].to_owned(),
        })
    }

    /// A size, or 0 where it is not set or cannot be read.
    fn optional(&self, names: &[&'static str]) -> u64 {
        self.size(names).ok().flatten().unwrap_or(0)
    }

    fn flag(&self, name: &str) -> Option<bool> {
        let value = self.own.get(name).or_else(|| self.top.get(name));
        value.and_then(Value::as_bool)
    }

    /// Reads the sizes, and counts if no count can overflow.
    fn shape(&self) -> Result<ModelShape, ConfigError> {
        let heads = self.need(&["num_attention_heads", "n_head", "n_heads"])?;
        let hidden = self.need(&["hidden_size", "n_embd", "d_model"])?;
        let head_dim = self.size(&["head_dim", "kv_channels"])?;
        let kv_heads = self.size(&["num_key_value_heads", "num_kv_heads"])?;
        let sizes = Sizes {
            vocab: self.need(&["vocab_size"])?,
            hidden,
            layers: self.need(&["num_hidden_layers", "n_layer", "num_layers"])?,
            heads,
            kv_heads: kv_heads.unwrap_or(heads).max(1),
            head_dim: head_dim.unwrap_or(hidden / heads).max(1),
        };
        self.bounded(sizes)?;
        Ok(self.count(sizes))
    }

    /// Refuses sizes with which a count could leave 64 bits.
    fn bounded(&self, s: Sizes) -> Result<(), ConfigError> {
        let head = s.head_dim.max(self.optional(&["v_head_dim"]));
        let head =
            head.max(self.optional(&["qk_nope_head_dim"]) + self.optional(&["qk_rope_head_dim"]));
        let linear = [
            ("linear_num_key_heads", "linear_key_head_dim"),
            ("linear_num_value_heads", "linear_value_head_dim"),
        ];
        let linear =
            linear.map(|(n, width)| self.optional(&[n]).saturating_mul(self.optional(&[width])));
        let wide = [
            s.hidden,
            self.feed_forward(s.hidden),
            self.expert_width(s.hidden),
            self.optional(&[
                "shared_expert_intermediate_size",
                "shared_intermediate_size",
            ]),
            self.optional(&["q_lora_rank"]),
            self.optional(&["kv_lora_rank"]),
            s.heads.max(s.kv_heads).saturating_mul(head),
            linear[0].max(linear[1]),
        ];
        let widest = u128::from(wide.into_iter().max().unwrap_or(0));
        let experts = self.experts()?.max(self.routed());
        let experts = u128::from(experts.max(self.optional(&["n_shared_experts"])));
        let layer = widest
            .saturating_mul(widest)
            .saturating_mul(64)
            .saturating_mul(experts);
        let ends = 2 * u128::from(s.vocab) * u128::from(s.hidden);
        let all = layer
            .saturating_mul(u128::from(s.layers))
            .saturating_add(ends);
        if all < 1 << 62 && s.layers <= MAX_LAYERS {
            return Ok(());
        }
        let text = format!(
            "{} layers of width {} are too many weights",
            s.layers, s.hidden
        );
        Err(ConfigError::Shape(text))
    }

    /// Width of the dense feed-forward layer; left out, four times the residual stream.
    fn feed_forward(&self, hidden: u64) -> u64 {
        let names = ["intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"];
        match self.optional(&names) {
            0 => hidden.saturating_mul(4),
            width => width,
        }
    }

    /// Experts of a layer; 0: dense.
    fn experts(&self) -> Result<u64, ConfigError> {
        let names = [
            "num_local_experts",
            "num_experts",
            "n_routed_experts",
            "moe_num_experts",
        ];
        Ok(self.size(&names)?.unwrap_or(0))
    }
}

impl Fields<'_> {
    /// Counts by formulas. Sizes are bounded, so that nothing overflows.
    fn count(&self, s: Sizes) -> ModelShape {
        let mut linears = Vec::new();
        let (mixtures, linear_layers) = (self.mixture_layers(s.layers), self.linear_layers(s));
        let experts = self.experts().unwrap_or(0);
        let parts = Parts {
            attention: self.attention(s, s.layers - linear_layers, &mut linears),
            linear_attention: self.linear_attention(s, linear_layers, &mut linears),
            dense: self.dense(s, s.layers - mixtures, &mut linears),
            mixture: self.mixture(s, mixtures, &mut linears),
            norms: s.hidden
                * if self.is_one_of(&["gemma2", "gemma3"]) {
                    4
                } else {
                    2
                },
        };
        let tied = self.flag("tie_word_embeddings");
        let tied = tied.unwrap_or_else(|| self.is_one_of(&TIED));
        let matrices = if tied { 1 } else { 2 };
        let parameters = matrices * s.vocab * s.hidden
            + s.hidden
            + s.layers * parts.norms
            + (s.layers - linear_layers) * parts.attention
            + linear_layers * parts.linear_attention
            + (s.layers - mixtures) * parts.dense
            + mixtures * parts.mixture;
        let active = self.active(s.hidden, mixtures);
        ModelShape {
            family: self.family.to_owned(),
            vocab: s.vocab,
            hidden: s.hidden,
            layers: s.layers,
            heads: s.heads,
            // A latent is not split over heads.
            kv_heads: match self.optional(&["kv_lora_rank"]) {
                0 => s.kv_heads,
                _ => 1,
            },
            queries: s.heads * s.head_dim,
            keys: s.kv_heads * s.head_dim,
            cached: (s.layers - linear_layers) * self.cached(s),
            feed_forward: active,
            routed: if experts > 0 { self.routed() } else { 0 },
            tied,
            max_context: self
                .size(&["max_position_embeddings", "n_positions"])
                .ok()
                .flatten(),
            quantized: [self.own, self.top]
                .iter()
                .any(|map| map.get("quantization_config").is_some_and(|v| !v.is_null())),
            parameters,
            encoders: 0,
            layer_parameters: parts.largest(linear_layers, mixtures, s.layers),
            exact: false,
            linears,
        }
    }

    /// Layers whose feed-forward part has experts.
    fn mixture_layers(&self, layers: u64) -> u64 {
        if self.experts().unwrap_or(0) == 0 {
            return 0;
        }
        let dense = self.optional(&["first_k_dense_replace"]);
        let named = self.own.get("mlp_only_layers").and_then(Value::as_array);
        let dense = dense.max(named.map_or(0, |list| list.len() as u64));
        let step = self.optional(&["decoder_sparse_step", "interleave_moe_layer_step"]);
        layers.saturating_sub(dense) / step.max(1)
    }

    /// Layers with attention of linear cost (Qwen3-Next, Qwen3.5), which cache no keys.
    fn linear_layers(&self, s: Sizes) -> u64 {
        if let Some(list) = self.own.get("layer_types").and_then(Value::as_array) {
            let linear = |kind: &&Value| kind.as_str() == Some("linear_attention");
            return (list.iter().filter(linear).count() as u64).min(s.layers);
        }
        match self.optional(&["full_attention_interval"]) {
            0 => 0,
            interval => s.layers - s.layers / interval,
        }
    }

    /// Numbers that a layer caches for a token: keys and values, or the latent of DeepSeek.
    fn cached(&self, s: Sizes) -> u64 {
        match self.optional(&["kv_lora_rank"]) {
            0 => 2 * s.kv_heads * s.head_dim,
            latent => latent + self.optional(&["qk_rope_head_dim"]),
        }
    }

    fn routed(&self) -> u64 {
        let names = [
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_topk",
            "top_k_experts",
        ];
        self.optional(&names).max(1)
    }

    /// Width of one expert.
    fn expert_width(&self, hidden: u64) -> u64 {
        match self.optional(&["moe_intermediate_size", "expert_ffn_hidden_size"]) {
            0 => self.feed_forward(hidden),
            width => width,
        }
    }

    /// Width of the experts that every token passes.
    fn shared_width(&self, hidden: u64) -> u64 {
        let names = [
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
        ];
        match self.optional(&names) {
            0 => self.optional(&["n_shared_experts"]) * self.expert_width(hidden),
            width => width,
        }
    }

    /// Width that one token passes in a layer.
    fn active(&self, hidden: u64, mixtures: u64) -> u64 {
        match mixtures {
            0 => self.feed_forward(hidden),
            _ => self.routed() * self.expert_width(hidden) + self.shared_width(hidden),
        }
    }

    /// Projections of a layer's attention, with heads or with DeepSeek's latent.
    fn attention(&self, s: Sizes, count: u64, linears: &mut Vec<Linear>) -> u64 {
        let (d, q, kv) = (s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim);
        let latent = self.optional(&["kv_lora_rank"]);
        if latent > 0 {
            return self.latent_attention(s, latent, linears);
        }
        let gated = if self.flag("attn_output_gate") == Some(true) {
            2 * q
        } else {
            q
        };
        let projections = [
            ("q_proj", d, gated),
            ("k_proj", d, kv),
            ("v_proj", d, kv),
            ("o_proj", q, d),
        ];
        let biased = self.flag("attention_bias").unwrap_or(false) || self.is_one_of(&BIASED);
        let biases = if biased { q + 2 * kv } else { 0 };
        add(linears, count, &projections) + biases
    }

    /// Attention with compressed keys and values: `q_lora_rank`, `kv_lora_rank`.
    fn latent_attention(&self, s: Sizes, latent: u64, linears: &mut Vec<Linear>) -> u64 {
        let rope = self.optional(&["qk_rope_head_dim"]);
        let plain = self.optional(&["qk_nope_head_dim"]);
        let value = self.optional(&["v_head_dim"]);
        let (d, queries) = (s.hidden, s.heads * (plain + rope));
        let mut projections = match self.optional(&["q_lora_rank"]) {
            0 => vec![("q_proj", d, queries)],
            rank => vec![("q_a_proj", d, rank), ("q_b_proj", rank, queries)],
        };
        projections.extend([
            ("kv_a_proj_with_mqa", d, latent + rope),
            ("kv_b_proj", latent, s.heads * (plain + value)),
            ("o_proj", s.heads * value, d),
        ]);
        add(linears, s.layers, &projections)
    }

    /// Gated delta nets of Qwen3-Next and Qwen3.5.
    fn linear_attention(&self, s: Sizes, count: u64, linears: &mut Vec<Linear>) -> u64 {
        if count == 0 {
            return 0;
        }
        let keys =
            self.optional(&["linear_num_key_heads"]) * self.optional(&["linear_key_head_dim"]);
        let heads = self.optional(&["linear_num_value_heads"]);
        let values = heads * self.optional(&["linear_value_head_dim"]);
        let convolution = self.optional(&["linear_conv_kernel_dim"]) * (2 * keys + values);
        let projections = [
            ("in_proj_qkvz", s.hidden, 2 * keys + 2 * values),
            ("in_proj_ba", s.hidden, 2 * heads),
            ("out_proj", values, s.hidden),
        ];
        add(linears, count, &projections) + convolution + 2 * heads
    }

    /// The dense feed-forward part.
    fn dense(&self, s: Sizes, count: u64, linears: &mut Vec<Linear>) -> u64 {
        let (d, width) = (s.hidden, self.feed_forward(s.hidden));
        let matrices = [
            ("up_proj", d, width),
            ("down_proj", width, d),
            ("gate_proj", d, width),
        ];
        let used = if self.is_one_of(&UNGATED) { 2 } else { 3 };
        add(linears, count, &matrices[..used])
    }

    /// Router, experts and shared experts. The experts are one tensor, and so take no adapters.
    fn mixture(&self, s: Sizes, count: u64, linears: &mut Vec<Linear>) -> u64 {
        let (d, experts) = (s.hidden, self.experts().unwrap_or(0));
        let shared = self.shared_width(d);
        let matrices = [
            ("gate_proj", d, shared),
            ("up_proj", d, shared),
            ("down_proj", shared, d),
        ];
        let used = if shared > 0 && count > 0 { 3 } else { 0 };
        experts * (d + 3 * d * self.expert_width(d)) + add(linears, count, &matrices[..used])
    }
}

/// Adds linear layers of which each of `count` layers has one, and returns their parameters in one layer.
fn add(linears: &mut Vec<Linear>, count: u64, forms: &[(&'static str, u64, u64)]) -> u64 {
    linears.extend(forms.iter().map(|&(name, inputs, outputs)| Linear {
        name,
        inputs,
        outputs,
        count,
    }));
    forms
        .iter()
        .map(|(_, inputs, outputs)| inputs * outputs)
        .sum()
}

impl Parts {
    /// Parameters of the largest layer that exists.
    fn largest(&self, linear_layers: u64, mixtures: u64, layers: u64) -> u64 {
        let attention = match linear_layers {
            0 => self.attention,
            all if all == layers => self.linear_attention,
            _ => self.attention.max(self.linear_attention),
        };
        let feed_forward = match mixtures {
            0 => self.dense,
            all if all == layers => self.mixture,
            _ => self.dense.max(self.mixture),
        };
        attention + feed_forward + self.norms
    }
}

#[cfg(test)]
mod tests;
