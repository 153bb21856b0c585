//! Small configurations for unit tests.

use crate::config::{Family, ModelConfig, RopeScaling};

/// Two layers of width 64 over a vocabulary of 97.
pub(crate) fn tiny_config(family: Family) -> ModelConfig {
    ModelConfig {
        family,
        vocab: 97,
        d_model: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: if family == Family::Qwen3 { 32 } else { 16 },
        d_ff: 176,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        rms_eps: 1e-5,
        tied_embeddings: family != Family::Qwen3,
        qkv_bias: family == Family::Qwen2,
        qk_norm: family == Family::Qwen3,
        max_context: 256,
        bos_id: None,
        eos_ids: vec![1],
    }
}
