//! Models of known shape with random weights: speed does not depend on the values.

use sinew_model::{Family, ModelConfig, RopeScaling};

/// A decoder of the Llama family with heads of 64 numbers.
fn llama(vocab: usize, d_model: usize, layers: usize, kv_heads: usize, d_ff: usize) -> ModelConfig {
    ModelConfig {
        family: Family::Llama,
        vocab,
        d_model,
        layers,
        heads: d_model / 64,
        kv_heads,
        head_dim: 64,
        d_ff,
        rope_theta: 100_000.0,
        rope_scaling: RopeScaling::None,
        rms_eps: 1e-5,
        tied_embeddings: true,
        qkv_bias: false,
        qk_norm: false,
        max_context: 8192,
        bos_id: None,
        eos_ids: Vec::new(),
    }
}

/// SmolLM2-135M.
pub(super) fn smollm2() -> ModelConfig {
    llama(49152, 576, 30, 3, 1536)
}

/// Small enough that a scheduler's counts cost nothing.
pub(super) fn tiny() -> ModelConfig {
    llama(1024, 64, 1, 1, 64)
}

/// One million to half a billion weights; the last has the shape of Qwen2.5-0.5B.
pub(super) fn scale() -> [(&'static str, ModelConfig); 5] {
    let mut qwen = llama(151_936, 896, 24, 2, 4864);
    qwen.family = Family::Qwen2;
    qwen.qkv_bias = true;
    [
        ("1M", llama(1024, 128, 4, 1, 384)),
        ("10M", llama(4096, 320, 7, 1, 960)),
        ("50M", llama(16384, 512, 12, 2, 1536)),
        ("135M", smollm2()),
        ("500M", qwen),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_model::ParamLayout;

    #[test]
    fn shapes_have_the_sizes_of_their_names() {
        let weights = |c: &ModelConfig| ParamLayout::new(c).weights() as f64 / 1e6;
        for ((name, config), expected) in scale().iter().zip([1.0, 10.0, 50.0, 134.5, 494.0]) {
            let found = weights(config);
            assert!((found / expected - 1.0).abs() < 0.15, "{name}: {found} M");
        }
    }
}
