//! Reward models: the thread, passes over several samples, and samples that cannot be scored.

use crate::support::sample;
use futures::future::join_all;
use sinew_env::Reward;
use sinew_judge::{RewardModel, RewardModelError};
use sinew_model::{ModelFiles, Scorer};
use sinew_render::byte_renderer;
use sinew_tensor::{Cpu, KernelSet};
use std::path::Path;
use std::sync::Arc;

const D: usize = 16;

/// A Llama of one layer with a scalar head, for bytes, with a context of 64 tokens.
fn write(dir: &Path, vocab: usize) {
    let config = format!(
        r#"{{"model_type": "llama", "vocab_size": {vocab}, "hidden_size": {D}, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": {D}, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "eos_token_id": 0}}"#
    );
    std::fs::write(dir.join("config.json"), config).unwrap();
    let (layer, square) = ("model.layers.0", vec![D, D]);
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, D]),
        ("model.norm.weight".to_owned(), vec![D]),
        ("score.weight".to_owned(), vec![1, D]),
        (format!("{layer}.input_layernorm.weight"), vec![D]),
        (format!("{layer}.post_attention_layernorm.weight"), vec![D]),
    ];
    for name in [
        "self_attn.q",
        "self_attn.k",
        "self_attn.v",
        "self_attn.o",
        "mlp.gate",
        "mlp.up",
        "mlp.down",
    ] {
        tensors.push((format!("{layer}.{name}_proj.weight"), square.clone()));
    }
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in tensors {
        let start = data.len();
        for i in 0..shape.iter().product::<usize>() {
            data.extend((0.5 * (0.37 * (i + start) as f32).sin()).to_le_bytes());
        }
        let place = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name, place);
    }
    let header = serde_json::Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    let bytes = [&length[..], header.as_bytes(), &data].concat();
    std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
}

#[tokio::test]
async fn samples_are_scored_together_as_they_are_alone() {
    let (dir, renderer) = (tempfile::tempdir().unwrap(), byte_renderer().unwrap());
    write(dir.path(), sinew_render::Renderer::vocab_size(&renderer));
    let files = ModelFiles::Dir(dir.path().to_owned());
    let dev = Cpu::new(KernelSet::detect_f32(), 2);
    let samples: Vec<_> = ["no", "yes", "", "yes"].iter().map(|o| sample(o)).collect();
    let mut scorer = Scorer::load(&files).unwrap();
    let tokens = samples
        .iter()
        .map(|s| renderer.render_whole(&s.messages).unwrap());
    let expected: Vec<f64> = tokens
        .map(|t| f64::from(scorer.scores(&dev, &[t]).unwrap()[0]))
        .collect();
    let render = move |m: &[_]| renderer.render_whole(m).map_err(RewardModelError::from);
    let load = move || Ok((scorer, dev));
    let model = RewardModel::new("rm".into(), Arc::new(render), Box::new(load)).unwrap();
    let scores = join_all(samples.iter().map(|s| model.score(s))).await;
    let values: Vec<f64> = scores.into_iter().map(|s| s.unwrap().value).collect();
    assert_eq!(values, expected);
    assert!(values[0] != values[1] && values[1] == values[3]);
    let long = model.score(&sample(&"x".repeat(100))).await.unwrap_err();
    assert!(
        long.reason
            .contains("the context of the reward model is 64"),
        "{long}"
    );
    assert_eq!(model.score(&samples[0]).await.unwrap().value, expected[0]);
}

#[tokio::test]
async fn a_model_that_cannot_be_loaded_scores_nothing() {
    let gone = || std::io::Error::other("the disk is gone");
    let load = move || Err(RewardModelError::Thread(gone()));
    let render = |_: &[_]| Ok(vec![1]);
    let model = RewardModel::new("rm".into(), Arc::new(render), Box::new(load)).unwrap();
    for _ in 0..2 {
        let error = model.score(&sample("x")).await.unwrap_err();
        assert_eq!(error.reason, "the disk is gone");
    }
}
