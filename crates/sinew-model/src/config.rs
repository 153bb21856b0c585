//! The shape and constants of a decoder, read from `config.json` or from GGUF metadata.
//!
//! All three families are one computation with switches: pre-norm blocks of RMS norm, rotary
//! grouped-query attention and a SwiGLU feed-forward layer, no dropout. A configuration that names
//! anything else (sliding windows, experts, other activations, quantized weights) is refused with
//! the field, the value and the supported ones: a model that is computed differently from its
//! training fails without a symptom.
//!
//! Shapes in this crate use these names: `d` = [`ModelConfig::d_model`], `ff` = `d_ff`, `q` =
//! `heads · head_dim`, `kv` = `kv_heads · head_dim`.

use serde_json::{Map, Value, json};
use sinew_types::TokenId;

/// The decoder families this crate computes. They differ only by biases, q/k norms and the default head size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// No biases, no q/k norms: Llama 2 and 3, SmolLM2 and others of the same class.
    Llama,
    /// Biases on q, k and v: Qwen2 and Qwen2.5.
    Qwen2,
    /// RMS norm of each query and key head before the rotation.
    Qwen3,
}

impl Family {
    const ALL: [Self; 3] = [Self::Llama, Self::Qwen2, Self::Qwen3];
    const SUPPORTED: &'static str = "llama, qwen2, qwen3";

    /// `model_type` of a `config.json` and `general.architecture` of a GGUF.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The family called `name`.
    ///
    /// # Errors
    /// If there is no such family; `source` names the file kind in the message.
    pub(crate) fn parse(name: &str, source: &'static str) -> Result<Self, ConfigError> {
        Self::ALL
            .into_iter()
            .find(|family| family.name() == name)
            .ok_or_else(|| ConfigError::Architecture {
                source_kind: source,
                found: name.to_owned(),
            })
    }

    /// Class name in `architectures` of a `config.json`.
    fn class(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// Scaling of rotary frequencies for long contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as `rope_theta` gives them.
    None,
    /// Llama 3.1: wavelengths above `original_context / low_freq_factor` are stretched by
    /// `factor`, those below `original_context / high_freq_factor` kept, between them blended
    /// (Llama 3 model card, "rope_type": "llama3").
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_context: usize,
    },
    /// One divisor per frequency (`rope_freqs.weight` of a GGUF file), `head_dim / 2` of them.
    Divisors(Vec<f32>),
}

/// Shape and constants of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Decides over biases, q/k norms and the names in files.
    pub family: Family,
    /// Rows of the embedding matrix. The tokenizer can have fewer ids: some models pad the matrix.
    pub vocab: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Number of blocks, 1 to 1024.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head; even, up to 512. Not always `d_model / heads`.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub d_ff: usize,
    /// Base of the rotary frequencies: pair `i` turns by `theta^(-2 i / head_dim)` radians per
    /// position.
    pub rope_theta: f32,
    /// Scaling of these frequencies for long contexts.
    pub rope_scaling: RopeScaling,
    /// Added to the mean square inside each RMS norm. Default in `config.json`: 1e-6.
    pub rms_eps: f32,
    /// Whether the output projection is the embedding matrix.
    pub tied_embeddings: bool,
    /// Whether q, k and v have biases (Qwen2).
    pub qkv_bias: bool,
    /// Whether q and k are RMS-normalized per head before the rotation (Qwen3).
    pub qk_norm: bool,
    /// Maximum tokens of a sequence that the model was trained for.
    pub max_context: usize,
    /// Token that starts a text, if the model has one.
    pub bos_id: Option<TokenId>,
    /// Tokens that end an output; empty if the files name none.
    pub eos_ids: Vec<TokenId>,
}

/// Reasons for which a configuration is not usable.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A family that this crate does not compute.
    #[error(
        "{source_kind}: architecture `{found}` is not supported: supported are {}",
        Family::SUPPORTED
    )]
    Architecture {
        source_kind: &'static str,
        found: String,
    },
    /// A field that has no default is not there.
    #[error("{source_kind}: field `{field}` is missing")]
    Missing {
        source_kind: &'static str,
        field: String,
    },
    /// A field is of the wrong type or out of range.
    #[error("{source_kind}: field `{field}` is {found}, expected {expected}")]
    Field {
        source_kind: &'static str,
        field: String,
        found: String,
        expected: String,
    },
    /// A field has a value that the family allows, but this crate does not compute.
    #[error("{source_kind}: `{field}` = {found} is not supported: {supported}")]
    Unsupported {
        source_kind: &'static str,
        field: String,
        found: String,
        supported: &'static str,
    },
    /// The text is not JSON, or not an object.
    #[error("config.json is not valid JSON: {0}")]
    Json(String),
    /// Sizes that do not fit each other, or that are too large.
    #[error("model shape is impossible: {0}")]
    Shape(String),
}

/// Largest value accepted for any size: keeps every product of two of them inside 64 bits.
const MAX_SIZE: u64 = 1 << 24;
/// Maximum number of layers.
const MAX_LAYERS: usize = 1024;
/// Maximum number of weights, 2^42: far above any model that fits one machine; keeps offsets inside
/// the address space.
const MAX_WEIGHTS: u128 = 1 << 42;

/// Typed access to the fields of a JSON object. `null` counts as absent.
struct Fields<'a> {
    /// Kind of the file, for messages.
    kind: &'static str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Returns a field that exists and is not `null`.
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// The error of a field with another value than `expected`.
    fn bad(&self, field: &str, found: &Value, expected: &str) -> ConfigError {
        ConfigError::Field {
            source_kind: self.kind,
            field: field.to_owned(),
            found: found.to_string(),
            expected: expected.to_owned(),
        }
    }

    /// Returns an integer from 1 to [`MAX_SIZE`], if the field exists.
    fn size(&self, field: &str) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(size @ 1..=MAX_SIZE) => Ok(Some(size as usize)),
            _ => Err(self.bad(field, value, "an integer from 1 to 16777216")),
        }
    }

    /// The value of a field that must be there.
    fn need<T>(&self, field: &str, value: Option<T>) -> Result<T, ConfigError> {
        value.ok_or_else(|| ConfigError::Missing {
            source_kind: self.kind,
            field: field.to_owned(),
        })
    }

    /// Reads like `size`, but the field must be there.
    fn need_size(&self, field: &str) -> Result<usize, ConfigError> {
        self.need(field, self.size(field)?)
    }

    /// Returns a finite number above 0, if the field exists.
    fn positive(&self, field: &str) -> Result<Option<f32>, ConfigError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        match value.as_f64().map(|v| v as f32) {
            Some(v) if v.is_finite() && v > 0.0 => Ok(Some(v)),
            _ => Err(self.bad(field, value, "a positive number")),
        }
    }

    /// Returns a boolean, if the field exists.
    fn flag(&self, field: &str) -> Result<Option<bool>, ConfigError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| self.bad(field, value, "true or false"))
    }

    /// Refuses any value of `field` but those in `allowed`; absent is fine.
    fn only(
        &self,
        field: &str,
        allowed: &[Value],
        supported: &'static str,
    ) -> Result<(), ConfigError> {
        match self.get(field) {
            Some(value) if !allowed.contains(value) => Err(ConfigError::Unsupported {
                source_kind: self.kind,
                field: field.to_owned(),
                found: value.to_string(),
                supported,
            }),
            _ => Ok(()),
        }
    }

    /// A token id or a list of them; empty if it is absent.
    fn ids(&self, field: &str) -> Result<Vec<TokenId>, ConfigError> {
        let Some(value) = self.get(field) else {
            return Ok(Vec::new());
        };
        let one = |v: &Value| {
            let id = v.as_u64().and_then(|id| TokenId::try_from(id).ok());
            id.ok_or_else(|| self.bad(field, value, "a token id or a list of them"))
        };
        match value {
            Value::Array(list) => list.iter().map(one).collect(),
            single => Ok(vec![one(single)?]),
        }
    }
}

const JSON: &str = "config.json";

impl ModelConfig {
    /// Reads the text of a `config.json` as `transformers` writes it (versions 4 and 5).
    ///
    /// Defaults of absent fields: `num_key_value_heads` = heads, `head_dim` = 128 for Qwen3 and
    /// `hidden_size / heads` elsewhere, `rms_norm_eps` = 1e-6, `rope_theta` = 10,000, embeddings
    /// not tied.
    ///
    /// # Errors
    /// If a field is missing, out of range, or asks for a computation that this crate does not
    /// have.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| ConfigError::Json(error.to_string()))?;
        let Value::Object(map) = &value else {
            return Err(ConfigError::Json(
                "expected an object at the top".to_owned(),
            ));
        };
        let fields = Fields { kind: JSON, map };
        let model_type = fields.need("model_type", fields.get("model_type"))?;
        let name = model_type
            .as_str()
            .ok_or_else(|| fields.bad("model_type", model_type, "a string"))?;
        let family = Family::parse(name, JSON)?;
        refuse_unsupported(&fields, family)?;
        let heads = fields.need_size("num_attention_heads")?;
        let d_model = fields.need_size("hidden_size")?;
        let head_dim = match (fields.size("head_dim")?, family) {
            (Some(head_dim), _) => head_dim,
            (None, Family::Qwen3) => 128, // the default of the published configuration class
            (None, _) => d_model / heads,
        };
        let (rope_theta, rope_scaling) = rope_from_json(&fields)?;
        let config = Self {
            family,
            vocab: fields.need_size("vocab_size")?,
            d_model,
            layers: fields.need_size("num_hidden_layers")?,
            heads,
            kv_heads: fields.size("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            d_ff: fields.need_size("intermediate_size")?,
            rope_theta,
            rope_scaling,
            rms_eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6),
            tied_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias: family == Family::Qwen2,
            qk_norm: family == Family::Qwen3,
            max_context: fields.need_size("max_position_embeddings")?,
            bos_id: fields.ids("bos_token_id")?.first().copied(),
            eos_ids: fields.ids("eos_token_id")?,
        };
        config.checked()
    }

    /// Adds the end tokens of a `generation_config.json`, which often names more of them than
    /// `config.json`.
    ///
    /// # Errors
    /// If the text is not JSON, or `eos_token_id` holds no ids.
    pub fn add_generation_config(&mut self, text: &str) -> Result<(), ConfigError> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| ConfigError::Json(error.to_string()))?;
        let Value::Object(map) = &value else {
            return Ok(());
        };
        let fields = Fields {
            kind: "generation_config.json",
            map,
        };
        for id in fields.ids("eos_token_id")? {
            if !self.eos_ids.contains(&id) {
                self.eos_ids.push(id);
            }
        }
        Ok(())
    }

    /// The `config.json` from which `transformers` builds the same model. `dtype` is the name of
    /// the stored number type (`float32`, `bfloat16`).
    ///
    /// # Errors
    /// If the config has the rope divisors of a GGUF, which a `config.json` cannot express.
    pub fn to_json(&self, dtype: &str) -> Result<String, ConfigError> {
        let mut value = json!({
            "architectures": [self.family.class()],
            "model_type": self.family.name(),
            "torch_dtype": dtype,
            "vocab_size": self.vocab,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.d_ff,
            "hidden_act": "silu",
            "rms_norm_eps": f64_of(self.rms_eps),
            "rope_theta": f64_of(self.rope_theta),
            "tie_word_embeddings": self.tied_embeddings,
            "max_position_embeddings": self.max_context,
            "bos_token_id": self.bos_id,
        });
        value["eos_token_id"] = match self.eos_ids[..] {
            [] => Value::Null,
            [id] => json!(id),
            ref ids => json!(ids),
        };
        if self.family != Family::Qwen2 {
            value["attention_bias"] = json!(false);
        }
        value["rope_scaling"] = match &self.rope_scaling {
            RopeScaling::None => Value::Null,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                json!({
                    "rope_type": "llama3",
                    "factor": f64_of(*factor),
                    "low_freq_factor": f64_of(*low_freq_factor),
                    "high_freq_factor": f64_of(*high_freq_factor),
                    "original_max_position_embeddings": original_context,
                })
            }
            RopeScaling::Divisors(_) => {
                return Err(ConfigError::Unsupported {
                    source_kind: JSON,
                    field: "rope_scaling".to_owned(),
                    found: "the rope divisors of a GGUF".to_owned(),
                    supported: "config.json can express `llama3` scaling alone: load the model \
                                from its original safetensors to save it",
                });
            }
        };
        serde_json::to_string_pretty(&value).map_err(|error| ConfigError::Json(error.to_string()))
    }

    /// Width of the query rows: `heads · head_dim`.
    pub fn q_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of the key rows, and of the value rows: `kv_heads · head_dim`.
    pub fn kv_dim(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of the fused projection: queries, keys, values.
    pub fn qkv_dim(&self) -> usize {
        self.q_dim() + 2 * self.kv_dim()
    }

    /// Angular frequency of each rotated pair, `head_dim / 2` of them, in radians per position.
    pub fn rope_frequencies(&self) -> Vec<f32> {
        let half = self.head_dim / 2;
        (0..half)
            .map(|i| {
                let exponent = (2 * i) as f32 / self.head_dim as f32;
                let frequency = 1.0 / self.rope_theta.powf(exponent);
                self.rope_scaling.apply(i, frequency)
            })
            .collect()
    }

    /// Refuses shapes that the operators cannot compute: heads that do not divide, odd or wide
    /// heads, zero sizes, more weights than fit, special tokens outside the vocabulary. Never
    /// overflows on any sizes.
    pub fn checked(self) -> Result<Self, ConfigError> {
        let fail = |text: String| Err(ConfigError::Shape(text));
        if self.heads == 0 || self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return fail(format!(
                "{} heads over {} kv heads",
                self.heads, self.kv_heads
            ));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) || self.head_dim > 512 {
            return fail(format!(
                "head_dim is {}, expected an even number up to 512",
                self.head_dim
            ));
        }
        for (name, size) in [
            ("vocabulary", self.vocab),
            ("d_model", self.d_model),
            ("layers", self.layers),
            ("d_ff", self.d_ff),
            ("max_context", self.max_context),
        ] {
            if size == 0 {
                return fail(format!("{name} is 0"));
            }
        }
        if self.layers > MAX_LAYERS {
            return fail(format!("{} layers, the limit is {MAX_LAYERS}", self.layers));
        }
        // Sizes of a recipe are any numbers; what they add up to is bounded here, and nothing of it is
        // computed in fewer bits before.
        let wide = |sizes: &[usize]| {
            let sizes = sizes.iter().map(|&size| size as u128);
            sizes.fold(1u128, u128::saturating_mul)
        };
        let q = wide(&[self.heads, self.head_dim]);
        let qkv = q.saturating_add(wide(&[2, self.kv_heads, self.head_dim]));
        let per_layer = qkv
            .saturating_mul(2)
            .saturating_add(wide(&[3, self.d_ff]))
            .saturating_mul(self.d_model as u128);
        let weights = wide(&[2, self.vocab, self.d_model])
            .saturating_add(per_layer.saturating_mul(self.layers as u128));
        if weights > MAX_WEIGHTS {
            return fail(format!(
                "some {weights} weights, the limit is {MAX_WEIGHTS}"
            ));
        }
        if let RopeScaling::Divisors(divisors) = &self.rope_scaling {
            let usable = divisors.iter().all(|d| d.is_finite() && *d > 0.0);
            if divisors.len() != self.head_dim / 2 || !usable {
                return fail(format!(
                    "{} rope divisors for heads of {}",
                    divisors.len(),
                    self.head_dim
                ));
            }
        }
        match self
            .eos_ids
            .iter()
            .chain(&self.bos_id)
            .find(|id| **id as usize >= self.vocab)
        {
            Some(id) => fail(format!(
                "special token {id} is outside the vocabulary of {}",
                self.vocab
            )),
            None => Ok(self),
        }
    }
}

impl RopeScaling {
    /// The frequency of pair `index` after scaling, in radians per position.
    fn apply(&self, index: usize, frequency: f32) -> f32 {
        match self {
            Self::None => frequency,
            Self::Divisors(divisors) => frequency / divisors[index],
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                let wavelength = 2.0 * std::f32::consts::PI / frequency;
                let context = *original_context as f32;
                if wavelength > context / low_freq_factor {
                    frequency / factor
                } else if wavelength < context / high_freq_factor {
                    frequency
                } else {
                    let keep = (context / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    (1.0 - keep) * frequency / factor + keep * frequency
                }
            }
        }
    }
}

/// The shortest decimal that reads back as `value`: 1e-5 and not 9.99999974e-6.
fn f64_of(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// Refuses values of a `config.json` that would need another computation.
fn refuse_unsupported(fields: &Fields<'_>, family: Family) -> Result<(), ConfigError> {
    fields.only(
        "hidden_act",
        &[json!("silu")],
        "the activation must be `silu`",
    )?;
    fields.only(
        "mlp_bias",
        &[json!(false)],
        "feed-forward layers have no bias",
    )?;
    fields.only(
        "use_sliding_window",
        &[json!(false)],
        "attention must see the whole context",
    )?;
    fields.only(
        "partial_rotary_factor",
        &[json!(1.0), json!(1)],
        "whole heads are rotated",
    )?;
    if family != Family::Qwen2 {
        fields.only(
            "attention_bias",
            &[json!(false)],
            "only qwen2 has attention biases",
        )?;
    }
    fields.only(
        "quantization_config",
        &[],
        "load weights stored as F32, F16 or BF16, or a GGUF",
    )?;
    let Some(Value::Array(kinds)) = fields.get("layer_types") else {
        return Ok(());
    };
    match kinds.iter().find(|kind| **kind != json!("full_attention")) {
        Some(kind) => Err(ConfigError::Unsupported {
            source_kind: JSON,
            field: "layer_types".to_owned(),
            found: kind.to_string(),
            supported: "every layer must be `full_attention`",
        }),
        None => Ok(()),
    }
}

/// Base and scaling from `rope_theta` + `rope_scaling` (transformers 4) or `rope_parameters` (5).
fn rope_from_json(fields: &Fields<'_>) -> Result<(f32, RopeScaling), ConfigError> {
    let old = fields.get("rope_scaling");
    let Some(value) = fields.get("rope_parameters").or(old) else {
        return Ok((
            fields.positive("rope_theta")?.unwrap_or(10_000.0),
            RopeScaling::None,
        ));
    };
    let Value::Object(map) = value else {
        return Err(fields.bad("rope_scaling", value, "an object or null"));
    };
    if let Some((layers, value)) = map.iter().find(|(_, value)| value.is_object()) {
        return Err(ConfigError::Unsupported {
            source_kind: JSON,
            field: format!("rope_parameters.{layers}"),
            found: value.to_string(),
            supported: "all layers must be rotated alike, by one `rope_parameters`",
        });
    }
    let rope = Fields { kind: JSON, map };
    let theta = match rope.positive("rope_theta")? {
        Some(theta) => theta,
        None => fields.positive("rope_theta")?.unwrap_or(10_000.0),
    };
    rope.only(
        "partial_rotary_factor",
        &[json!(1.0), json!(1)],
        "whole heads are rotated",
    )?;
    let kind = rope
        .get("rope_type")
        .or(rope.get("type"))
        .and_then(Value::as_str);
    let scaling = match kind {
        None | Some("default") => RopeScaling::None,
        Some("llama3") => {
            let need = |name: &str| rope.need(name, rope.positive(name)?);
            let (low, high) = (need("low_freq_factor")?, need("high_freq_factor")?);
            if high <= low {
                return Err(ConfigError::Shape(format!(
                    "rope high_freq_factor {high} is not above low_freq_factor {low}"
                )));
            }
            RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: rope.need_size("original_max_position_embeddings")?,
            }
        }
        Some(other) => {
            return Err(ConfigError::Unsupported {
                source_kind: JSON,
                field: "rope_type".to_owned(),
                found: format!("`{other}`"),
                supported: "supported are `default` and `llama3`",
            });
        }
    };
    Ok((theta, scaling))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes come from recipes and files: the largest there are must be refused, not overflow.
    #[test]
    fn no_size_is_too_large_to_be_refused() {
        let config = ModelConfig {
            family: Family::Llama,
            vocab: 8,
            d_model: 8,
            layers: 1,
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            d_ff: 8,
            rope_theta: 1e4,
            rope_scaling: RopeScaling::None,
            rms_eps: 1e-5,
            tied_embeddings: true,
            qkv_bias: false,
            qk_norm: false,
            max_context: 8,
            bos_id: None,
            eos_ids: Vec::new(),
        };
        config.clone().checked().unwrap();
        let changes: [fn(&mut ModelConfig); 6] = [
            |c| c.vocab = usize::MAX,
            |c| c.d_model = usize::MAX,
            |c| c.layers = usize::MAX,
            |c| c.heads = usize::MAX,
            |c| c.head_dim = usize::MAX,
            |c| c.d_ff = usize::MAX,
        ];
        for change in changes {
            let mut large = config.clone();
            change(&mut large);
            large.checked().unwrap_err();
        }
        let mut both = config;
        (both.heads, both.kv_heads) = (usize::MAX, usize::MAX);
        both.checked().unwrap_err();
    }
}
