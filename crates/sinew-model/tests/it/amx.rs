//! Whole models with AMX kernels, emulated and on hardware: near PyTorch in f32 within stated bounds, the
//! same bits in any batch and on any number of threads, and sampler and trainer in agreement.

use crate::adapters::agree_with_added_adapters;
use crate::support::{FAMILIES, relative_error, tiny, tiny_golden};
use crate::train::{
    agree_with_adapters, engine_logprobs, golden_case, run, temperatures, trainer_logprobs,
    tree_case,
};
use sinew_amx_emulator::On;
use sinew_model::{
    InferBatch, InferModel, InferScratch, Keep, Lora, LoraConfig, Params, Precision, Projection,
    Weights, merge_lora,
};
use sinew_tensor::Cpu;
use sinew_tensor::paged::{KvPool, PagedSequence};

/// Largest difference of log-probabilities, in nats, to those of PyTorch in f32. Operands are rounded to 8
/// bits.
const LOGPROB_BOUND: f32 = 0.05;
/// Largest difference of each tensor's gradient, relative to its largest value. (PyTorch's own bfloat16
/// autocast differs from f32 by 0.008 to 0.018 in the norm for a model of this depth.)
const GRADIENT_BOUND: f64 = 0.06;
sinew_amx_emulator::on_both!(
    tiny_models_are_near_pytorch_in_f32,
    engine_and_trainer_agree_on_logprobs,
    passes_are_reproducible_to_the_bit,
    prompts_give_the_same_bits_whole_and_token_by_token,
    adapters_are_merged_in_f32,
    weights_of_16_bits_go_through_tiles_at_many_rows,
);

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |m, (a, b)| match (a - b).abs() {
        d if d.is_nan() => f32::INFINITY,
        d => d.max(m),
    })
}

fn tiny_models_are_near_pytorch_in_f32(on: On) {
    let Some(dev) = on.device(2) else { return };
    for family in FAMILIES {
        let golden = tiny_golden(family);
        let params = tiny(family).params;
        let case = golden_case(&golden);
        let outcome = run(&dev, Weights::full(&params), &case, Keep::All);
        let expected: Vec<f32> = case
            .items
            .iter()
            .map(|item| golden["logprob"].1[item.0 as usize])
            .collect();
        let logprob = largest_difference(&outcome.logprob, &expected);
        let gradients = params.layout().entries().iter().map(|entry| {
            let expected = &golden[&format!("grad.{}", entry.name)].1;
            let error = relative_error(&outcome.grads.values()[entry.range()], expected);
            (error, entry.name.as_str())
        });
        let worst = gradients.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
        eprintln!(
            "{family}: log-probabilities {logprob:.1e}, gradients {:.1e} ({})",
            worst.0, worst.1
        );
        assert!(logprob < LOGPROB_BOUND, "{family}: {logprob}");
        assert!(worst.0 < GRADIENT_BOUND, "{family}: {worst:?}");
        assert!(worst.0 > 1e-4, "{family}: these are not rounded products");
    }
}

fn engine_and_trainer_agree_on_logprobs(on: On) {
    let Some(dev) = on.device(2) else { return };
    agree_with_adapters(&dev);
    agree_with_added_adapters(&dev);
    for family in FAMILIES {
        let params = tiny(family).params;
        let tokens: Vec<u32> = (0..60u32).map(|i| (i * i * 31 + 17 * i + 5) % 97).collect();
        for temperatures in temperatures(59) {
            let engine = engine_logprobs(&dev, &params, &tokens, &temperatures);
            let trainer = trainer_logprobs(&dev, Weights::full(&params), &tokens, &temperatures);
            assert_eq!(engine, trainer, "{family}");
        }
    }
}

/// Forward, backward and shared prefixes have the same bits whatever the number of threads, and again.
fn passes_are_reproducible_to_the_bit(on: On) {
    let params = tiny("qwen3").params;
    let (tree, _) = tree_case();
    let outcome = |threads: usize| {
        on.device(threads).map(|dev| {
            let outcome = run(&dev, Weights::full(&params), &tree, Keep::LayerInputs);
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            (bits(&outcome.logprob), bits(outcome.grads.values()))
        })
    };
    let first = outcome(1);
    for threads in [1, 2, 3] {
        assert_eq!(outcome(threads), first, "{threads} threads");
    }
}

/// Logits of every token of a text that comes in chunks.
fn logits(dev: &Cpu, params: &Params, chunks: &[&[u32]]) -> Vec<u32> {
    let config = params.config();
    let tokens: usize = chunks.iter().map(|chunk| chunk.len()).sum();
    let model = InferModel::new(dev, config, params, tokens).unwrap();
    let blocks: Vec<u32> = (0..tokens.div_ceil(16) as u32).collect();
    let mut kv = KvPool::new(config.layers, model.attention_shape(), 16, blocks.len()).unwrap();
    let mut scratch = InferScratch::new();
    let (mut past, mut found) = (0, Vec::new());
    for chunk in chunks {
        let sequences = [PagedSequence {
            blocks: &blocks,
            past,
            rows: chunk.len(),
        }];
        let batch = InferBatch {
            tokens: chunk,
            sequences: &sequences,
            adapters: &[],
            logit_rows: &(0..chunk.len()).collect::<Vec<_>>(),
        };
        let logits = model.forward(dev, &mut kv, &batch, &mut scratch).unwrap();
        found.extend(logits.iter().map(|z| z.to_bits()));
        past += chunk.len();
    }
    found
}

fn prompts_give_the_same_bits_whole_and_token_by_token(on: On) {
    let Some(dev) = on.device(2) else { return };
    let mut config = tiny("llama").params.config().clone();
    (config.d_model, config.d_ff, config.layers, config.vocab) = (176, 300, 1, 300);
    (config.heads, config.kv_heads, config.head_dim) = (11, 1, 16);
    let params = Params::random(&config, 5);
    let text: Vec<u32> = (0..45).map(|i| (i * i * 7 + i) % 300).collect();
    let whole = logits(&dev, &params, &[&text]);
    let mut chunks = vec![&text[..33]];
    chunks.extend(text[33..].chunks(1));
    assert_eq!(logits(&dev, &params, &chunks), whole);
}

/// Adapters are merged without rounding, so that small changes are not lost before the weights are packed.
fn adapters_are_merged_in_f32(on: On) {
    let Some(dev) = on.device(1) else { return };
    let params = tiny("llama").params;
    let config = LoraConfig {
        rank: 4,
        alpha: 8.0,
        targets: vec![Projection::Q, Projection::Down],
    };
    let mut lora = Lora::random(&config, params.config(), 3).unwrap();
    for (i, v) in lora.values_mut().iter_mut().enumerate() {
        *v = (i % 13) as f32 * 1e-3 - 0.006;
    }
    let merged = |dev: &Cpu| {
        let mut merged = params.clone();
        merge_lora(dev, &params, &lora, &mut merged).unwrap();
        merged.values().to_vec()
    };
    assert_eq!(merged(&dev), merged(&dev.with_f32_products()));
}

/// Weights of 16 bits go through tiles at many rows, which hold them in 16 bits anyway.
fn weights_of_16_bits_go_through_tiles_at_many_rows(on: On) {
    let Some(dev) = on.device(1) else { return };
    let suited = |precision: Precision, rows: usize| precision.suited(dev.kernels(), rows);
    assert_eq!(suited(Precision::Bf16, 128), Precision::F32);
    assert_eq!(suited(Precision::Bf16, 1), Precision::Bf16);
    assert_eq!(suited(Precision::Int8, 128), Precision::Int8);
    assert_eq!(suited(Precision::F32, 1), Precision::F32);
    let exact = dev.with_f32_products().kernels();
    assert_eq!(Precision::Bf16.suited(exact, 128), Precision::Bf16);
}
