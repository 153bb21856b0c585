//! The configuration in a GGUF's metadata. Keys are `ARCHITECTURE.field`.

use super::{GgufMetadata, KIND};
use crate::config::{ConfigError, Family, ModelConfig, RopeScaling};

impl ModelConfig {
    /// Reads the metadata of a GGUF. `has_output`: the file has a tensor `output.weight` (else the embeddings
    /// are tied); `rope_divisors`: the values of `rope_freqs.weight`, if present, which contain the Llama 3
    /// scaling as one divisor per frequency.
    ///
    /// # Errors
    /// If a key is missing or out of range, or the model is one that this crate does not compute
    /// (experts, other rope scaling, keys and values of different widths).
    pub fn from_gguf(
        meta: &GgufMetadata,
        has_output: bool,
        rope_divisors: Option<Vec<f32>>,
    ) -> Result<Self, ConfigError> {
        let arch = meta.need_str("general.architecture")?;
        let family = Family::parse(arch, KIND)?;
        let key = |field: &str| format!("{arch}.{field}");
        refuse_unsupported_gguf(meta, arch)?;
        let heads = meta.need_size(&key("attention.head_count"))?;
        let d_model = meta.need_size(&key("embedding_length"))?;
        let head_dim = meta
            .size(&key("attention.key_length"))?
            .unwrap_or(d_model / heads);
        for field in ["attention.value_length", "rope.dimension_count"] {
            if meta.size(&key(field))?.is_some_and(|size| size != head_dim) {
                let found = meta.size(&key(field))?.unwrap_or(0);
                return Err(ConfigError::Unsupported {
                    source_kind: KIND,
                    field: key(field),
                    found: format!("{found} with heads of {head_dim}"),
                    supported: "keys, values and rotation of one size",
                });
            }
        }
        let vocab = match meta.size(&key("vocab_size"))? {
            Some(vocab) => vocab,
            None => meta.tokens()?.len(),
        };
        let config = Self {
            family,
            vocab,
            d_model,
            layers: meta.need_size(&key("block_count"))?,
            heads,
            kv_heads: meta.size(&key("attention.head_count_kv"))?.unwrap_or(heads),
            head_dim,
            d_ff: meta.need_size(&key("feed_forward_length"))?,
            rope_theta: meta.positive(&key("rope.freq_base"))?.unwrap_or(10_000.0),
            rope_scaling: rope_divisors.map_or(RopeScaling::None, RopeScaling::Divisors),
            rms_eps: meta.need_positive(&key("attention.layer_norm_rms_epsilon"))?,
            tied_embeddings: !has_output,
            qkv_bias: family == Family::Qwen2,
            qk_norm: family == Family::Qwen3,
            max_context: meta.need_size(&key("context_length"))?,
            bos_id: meta.token_id("bos")?,
            eos_ids: meta
                .token_id("eos")?
                .into_iter()
                .chain(meta.token_id("eot")?)
                .fold(Vec::new(), |mut ids, id| {
                    if !ids.contains(&id) {
                        ids.push(id);
                    }
                    ids
                }),
        };
        config.checked()
    }
}

/// Refuses metadata that would need another computation.
fn refuse_unsupported_gguf(meta: &GgufMetadata, arch: &str) -> Result<(), ConfigError> {
    let refuse = |field: String, found: String, supported| {
        Err(ConfigError::Unsupported {
            source_kind: KIND,
            field,
            found,
            supported,
        })
    };
    let experts = format!("{arch}.expert_count");
    if let Some(count) = meta.uint(&experts)?.filter(|count| *count > 0) {
        return refuse(experts, count.to_string(), "mixtures of experts are not");
    }
    let scaling = format!("{arch}.rope.scaling.type");
    match meta.str(&scaling)? {
        Some(kind) if kind != "none" => refuse(
            scaling,
            format!("`{kind}`"),
            "`none`, or a tensor `rope_freqs.weight`",
        ),
        _ => Ok(()),
    }
}
