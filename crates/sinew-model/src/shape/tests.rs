//! Counts of published models, nested configurations, headers that win over formulas, and hostile sizes.

use super::*;
use crate::config::Family;
use crate::testing::tiny_config;

fn shape(value: Value) -> ModelShape {
    ModelShape::from_json(&value.to_string()).unwrap()
}

fn qwen3_moe() -> Value {
    json!({
        "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": false,
    })
}

/// Parameters as the model cards state them, in millions.
#[test]
fn published_models_are_counted() {
    let dense = |family: &str, sizes: [u64; 6], tied: bool| {
        let [vocab, hidden, layers, heads, kv_heads, width] = sizes;
        shape(json!({
            "model_type": family, "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": width,
            "tie_word_embeddings": tied, "max_position_embeddings": 32_768,
        }))
    };
    let millions = |shape: &ModelShape| shape.parameters / 1_000_000;
    let half = dense("qwen2", [151_936, 896, 24, 14, 2, 4864], true);
    assert_eq!((millions(&half), half.exact), (494, false));
    let llama = dense("llama", [128_256, 4096, 32, 32, 8, 14_336], false);
    assert_eq!((millions(&llama), llama.max_context), (8030, Some(32_768)));
    let large = dense("qwen2", [152_064, 5120, 64, 40, 8, 27_648], false);
    assert_eq!(millions(&large), 32_763);
    let mixture = shape(qwen3_moe());
    assert_eq!((millions(&mixture), mixture.routed), (30_532, 8));
    assert_eq!(mixture.feed_forward, 8 * 768);
    // Keys and values of a token: 2 x 48 layers x 4 heads x 128.
    assert_eq!(mixture.cached, 49_152);
    assert_eq!(mixture.layer_parameters / 1_000_000, 623);
}

#[test]
fn latent_attention_and_first_dense_layers_are_counted() {
    let lite = shape(json!({
        "model_type": "deepseek_v2", "vocab_size": 102_400, "hidden_size": 2048, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10_944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": null, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": false,
    }));
    assert_eq!(lite.parameters / 1_000_000, 15_706);
    assert_eq!(lite.cached, 27 * 576);
}

#[test]
fn a_decoder_among_other_parts_is_found() {
    let text = json!({
        "model_type": "gemma3", "vision_config": { "hidden_size": 1152 },
        "text_config": {
            "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 2560,
            "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "intermediate_size": 10_240,
        },
    });
    let gemma = shape(text);
    assert_eq!((gemma.family.as_str(), gemma.tied), ("gemma3_text", true));
    assert_eq!(gemma.parameters / 1_000_000, 3880);
    let hybrid = shape(json!({
        "model_type": "qwen3_5_text", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
        "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_num_value_heads": 4, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    }));
    assert_eq!(
        hybrid.cached,
        2 * 2 * 2 * 16,
        "two layers of eight cache keys"
    );
}

#[test]
fn adapters_follow_their_targets() {
    let text = json!({
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    });
    let small = shape(text);
    let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
    assert_eq!(
        small.adapter_parameters(8, &names(&["q_proj"])),
        2 * 8 * 128
    );
    let all = 2 * 8 * (128 + 96 + 96 + 128 + 3 * 192);
    assert_eq!(small.adapter_parameters(8, &[]), all);
    assert_eq!(small.adapter_parameters(8, &names(&["qkv_proj"])), all);
    let head = 8 * (small.hidden + small.vocab);
    assert_eq!(small.adapter_parameters(8, &names(&["lm_head"])), head);
    let both = names(&["q_proj", "lm_head"]);
    assert_eq!(small.adapter_parameters(8, &both), 2 * 8 * 128 + head);
    // Fused experts take none: the four projections of attention are left.
    let mixture = shape(qwen3_moe());
    let attention = 48 * 32 * (2 * (2048 + 4096) + 2 * (2048 + 512));
    assert_eq!(mixture.adapter_parameters(32, &[]), attention);
}

/// A folder of this crate's own: formulas, layout and headers count alike.
#[test]
fn headers_of_weights_win_over_formulas() {
    let config = tiny_config(Family::Qwen3);
    let layout = ParamLayout::new(&config);
    let exact: usize = layout.entries().iter().map(|entry| entry.len()).sum();
    assert_eq!(ModelShape::from(&config).parameters, exact as u64);
    let dir = tempfile::tempdir().unwrap();
    let params = crate::Params::random(&config, 1);
    crate::save_pretrained(dir.path(), &params, crate::SaveDtype::Bf16, &[]).unwrap();
    let read = ModelShape::read(dir.path()).unwrap();
    assert_eq!((read.parameters, read.exact), (exact as u64, true));
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let formula = ModelShape::read(&dir.path().join("config.json")).unwrap();
    assert!(!formula.exact);
    let gap = formula.parameters.abs_diff(exact as u64);
    assert!(gap * 50 < exact as u64, "{} {exact}", formula.parameters);
    let index =
        json!({ "metadata": { "total_size": 2 * exact }, "weight_map": { "a": "b.safetensors" } });
    let index_path = dir.path().join("model.safetensors.index.json");
    std::fs::write(index_path, index.to_string()).unwrap();
    let indexed = ModelShape::read(dir.path()).unwrap();
    assert_eq!((indexed.parameters, indexed.exact), (exact as u64, true));
}

#[test]
fn tensors_that_training_does_not_load_are_left_out() {
    let mut small = shape(json!({
        "model_type": "x", "vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 1,
        "num_attention_heads": 1, "tie_word_embeddings": true,
    }));
    let tensors = [
        ("model.embed_tokens.weight", vec![10, 4]),
        ("lm_head.weight", vec![10, 4]),
        ("model.layers.0.mlp.up_proj.weight", vec![16, 4]),
        ("model.layers.1.drafts.weight", vec![999, 4]),
        ("mtp.layers.0.weight", vec![999, 4]),
        ("model.visual.blocks.0.weight", vec![7]),
    ];
    let tensors = tensors.map(|(name, sizes)| (name.to_owned(), sizes));
    small.count_tensors(&tensors[..4]);
    assert_eq!((small.parameters, small.encoders), (40 + 64, 0));
    small.count_tensors(&tensors);
    assert_eq!((small.parameters, small.encoders), (40 + 64 + 7, 7));
    assert_eq!(small.layer_parameters, 64);
}

#[test]
fn hostile_configurations_are_refused() {
    let text = |changes: Value| {
        let mut value = qwen3_moe();
        for (key, change) in changes.as_object().unwrap() {
            value[key] = change.clone();
        }
        value.to_string()
    };
    for changes in [
        json!({ "hidden_size": 4_294_967_296_u64, "vocab_size": 4_294_967_296_u64 }),
        json!({ "num_hidden_layers": 4_294_967_295_u64 }),
        json!({ "num_experts": 4_294_967_295_u64, "moe_intermediate_size": 4_294_967_295_u64 }),
        json!({ "head_dim": 4_294_967_295_u64, "num_attention_heads": 4_294_967_295_u64 }),
        json!({ "hidden_size": -1 }),
        json!({ "vocab_size": "many" }),
        json!({ "num_hidden_layers": null }),
    ] {
        let refused = ModelShape::from_json(&text(changes.clone()));
        assert!(refused.is_err(), "{changes}");
    }
    assert!(ModelShape::from_json("[]").is_err() && ModelShape::from_json("{").is_err());
    assert!(!shape(qwen3_moe()).quantized);
    let quantized = text(json!({ "quantization_config": { "quant_method": "mxfp4" } }));
    assert!(ModelShape::from_json(&quantized).unwrap().quantized);
}
