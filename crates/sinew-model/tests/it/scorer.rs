//! Reward models: golden scores, and folders that are not reward models.
//!
//! The golden scores are those of `transformers` in double precision, for the same weights
//! (`make_scorer.py`).

use safetensors::tensor::{Dtype, TensorView, serialize};
use sinew_model::{ModelFiles, Scorer, check_scorer};
use sinew_tensor::{Cpu, KernelSet};
use std::collections::BTreeMap;
use std::path::Path;

const D: usize = 16;
const FF: usize = 24;
const VOCAB: usize = 40;

/// Width of a head of Qwen3, which is not `D / heads`.
const QWEN3_HEAD: usize = 8;

/// Decoders that differ around their queries and keys.
#[derive(Clone, Copy, PartialEq)]
enum Family {
    /// Queries and keys as they are projected.
    Llama,
    /// Projections with biases.
    Qwen2,
    /// Norms over each head, whose width is free.
    Qwen3,
}

/// Values of a tensor: a formula of its name and the place.
fn values(name: &str, shape: &[usize]) -> Vec<u8> {
    let seed = name.bytes().map(u32::from).sum::<u32>() % 97;
    let (base, scale) = if name.contains("norm") {
        (1.0, 0.1)
    } else {
        (0.0, 0.4)
    };
    let n: usize = shape.iter().product();
    let value = |i: usize| (base + scale * (0.37 * i as f64 + f64::from(seed)).sin()) as f32;
    (0..n).flat_map(|i| value(i).to_le_bytes()).collect()
}

/// Tensors of a decoder of two layers with the head `[labels, D]`.
fn tensors(family: Family, labels: usize) -> BTreeMap<String, Vec<usize>> {
    let head = match family {
        Family::Qwen3 => QWEN3_HEAD,
        _ => D / 4,
    };
    let (queries, keys) = (4 * head, 2 * head);
    let mut all = BTreeMap::from([
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, D]),
        ("model.norm.weight".to_owned(), vec![D]),
        ("score.weight".to_owned(), vec![labels, D]),
    ]);
    for layer in 0..2 {
        for (name, shape) in [
            ("input_layernorm.weight", vec![D]),
            ("post_attention_layernorm.weight", vec![D]),
            ("self_attn.q_proj.weight", vec![queries, D]),
            ("self_attn.k_proj.weight", vec![keys, D]),
            ("self_attn.v_proj.weight", vec![keys, D]),
            ("self_attn.o_proj.weight", vec![D, queries]),
            ("mlp.gate_proj.weight", vec![FF, D]),
            ("mlp.up_proj.weight", vec![FF, D]),
            ("mlp.down_proj.weight", vec![D, FF]),
        ] {
            all.insert(format!("model.layers.{layer}.{name}"), shape);
        }
        let more = match family {
            Family::Llama => Vec::new(),
            Family::Qwen2 => vec![
                ("q_proj.bias", queries),
                ("k_proj.bias", keys),
                ("v_proj.bias", keys),
            ],
            Family::Qwen3 => vec![("q_norm.weight", head), ("k_norm.weight", head)],
        };
        for (name, len) in more {
            all.insert(format!("model.layers.{layer}.self_attn.{name}"), vec![len]);
        }
    }
    all
}

fn write(dir: &Path, family: Family, tensors: &BTreeMap<String, Vec<usize>>) -> ModelFiles {
    let (class, kind) = match family {
        Family::Llama => ("LlamaForSequenceClassification", "llama"),
        Family::Qwen2 => ("Qwen2ForSequenceClassification", "qwen2"),
        Family::Qwen3 => ("Qwen3ForSequenceClassification", "qwen3"),
    };
    let head = tensors["model.layers.0.self_attn.q_proj.weight"][0] / 4;
    let config = format!(
        r#"{{"architectures": ["{class}"], "model_type": "{kind}", "vocab_size": {VOCAB}, "hidden_size": {D},
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": {FF},
        "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": false,
        "num_labels": 1, "eos_token_id": 0, "head_dim": {head}}}"#
    );
    std::fs::write(dir.join("config.json"), config).unwrap();
    let data: BTreeMap<&String, Vec<u8>> = tensors.iter().map(|(n, s)| (n, values(n, s))).collect();
    let views = tensors.iter().map(|(name, shape)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), &data[name]).unwrap();
        (name.clone(), view)
    });
    let bytes = serialize(views, None).unwrap();
    std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
    ModelFiles::Dir(dir.to_owned())
}

const SEQUENCES: [&[u32]; 3] = [&[3, 1, 4, 1, 5, 9, 2, 6], &[39], &[0, 7, 7, 20, 11]];

const GOLDEN: [(Family, [f64; 3]); 3] = [
    (Family::Llama, [-0.079826, -0.421687, -0.782607]),
    (Family::Qwen2, [-0.046842, -0.433063, -0.566327]),
    (Family::Qwen3, [0.432698, 0.250223, 0.08885]),
];

#[test]
fn scores_are_those_of_transformers() {
    for (family, golden) in GOLDEN {
        let dir = tempfile::tempdir().unwrap();
        let files = write(dir.path(), family, &tensors(family, 1));
        assert_eq!(check_scorer(&files).unwrap().d_model, D);
        let mut scorer = Scorer::load(&files).unwrap();
        let dev = Cpu::new(KernelSet::detect_f32(), 2);
        let sequences: Vec<Vec<u32>> = SEQUENCES.iter().map(|s| s.to_vec()).collect();
        let scores = scorer.scores(&dev, &sequences).unwrap();
        for (score, golden) in scores.iter().zip(golden) {
            assert!(
                (f64::from(*score) - golden).abs() < 2e-5,
                "{scores:?}, expected {golden}"
            );
        }
        // Each has the same bits in a separate batch.
        for (one, score) in sequences.iter().zip(&scores) {
            let alone = scorer.scores(&dev, std::slice::from_ref(one)).unwrap();
            assert_eq!(alone[0].to_bits(), score.to_bits());
        }
        assert!(scorer.scores(&dev, &[]).unwrap().is_empty());
        assert!(scorer.scores(&dev, &[vec![]]).is_err());
        assert!(scorer.scores(&dev, &[vec![VOCAB as u32]]).is_err());
        assert!(scorer.scores(&dev, &[vec![1; 65]]).is_err());
    }
}

#[test]
fn what_is_no_reward_model_is_refused_with_what_is_missing() {
    type Shapes = BTreeMap<String, Vec<usize>>;
    let refused = |change: &dyn Fn(&mut Shapes)| {
        let dir = tempfile::tempdir().unwrap();
        let mut all = tensors(Family::Llama, 1);
        change(&mut all);
        let files = write(dir.path(), Family::Llama, &all);
        let why = check_scorer(&files).unwrap_err().to_string();
        assert_eq!(Scorer::load(&files).unwrap_err().to_string(), why);
        why
    };
    let without_head = refused(&|t| {
        t.remove("score.weight");
    });
    assert!(
        without_head.contains("there is no `score.weight`: it has no head"),
        "{without_head}"
    );
    let language_model = refused(&|t| {
        t.remove("score.weight");
        t.insert("lm_head.weight".into(), vec![VOCAB, D]);
    });
    assert!(
        language_model.contains("it is a language model"),
        "{language_model}"
    );
    let labels = refused(&|t| {
        t.insert("score.weight".into(), vec![3, D]);
    });
    assert!(labels.contains("3 labels"), "{labels}");
    let shape = refused(&|t| {
        t.insert("score.weight".into(), vec![D]);
    });
    assert!(shape.contains("expected [1, 16]"), "{shape}");
    let missing = refused(&|t| {
        t.remove("model.norm.weight");
    });
    assert!(missing.contains("model.norm.weight"), "{missing}");
    let gguf = check_scorer(&ModelFiles::Gguf("m.gguf".into()))
        .unwrap_err()
        .to_string();
    assert!(gguf.contains("no scalar head"), "{gguf}");
}
