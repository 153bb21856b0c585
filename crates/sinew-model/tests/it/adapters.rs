//! Adapters that are not merged: generation with several of them in one pass, against dense weights.

use crate::infer::{Engine, logits_of};
use crate::lora::{dense, trained};
use crate::support::{FAMILIES, device, devices, relative_error, tiny, tiny_golden};
use crate::train::{golden_case, logprobs_on, run, run_on};
use sinew_model::{
    Grads, InferBatch, InferModel, InferScratch, Keep, Lora, ModelConfig, Params, Precision,
    Projection, TrainModel, Weights,
};
use sinew_tensor::Cpu;
use sinew_tensor::logprob::SoftmaxRow;
use sinew_tensor::paged::{KvPool, PagedSequence};

const VOCAB: usize = 97;

/// Three adapters with different targets.
fn adapters(model: &ModelConfig) -> [Lora; 3] {
    [
        trained(model, &Projection::ALL, 1),
        trained(model, &[Projection::Q, Projection::Down], 2),
        trained(model, &[Projection::Head], 3),
    ]
}

/// Tokens of sequence `n`.
fn text(n: usize, len: usize) -> Vec<u32> {
    let token = |i: usize| ((i * i * 31 + 17 * i + 5 + 13 * n) % VOCAB) as u32;
    (0..len).map(token).collect()
}

/// Logits of one sequence with its adapters, in one pass.
fn alone(
    dev: &Cpu,
    params: &Params,
    precision: Precision,
    tokens: &[u32],
    lora: Option<&Lora>,
) -> Vec<f32> {
    let mut engine = Engine::with(dev.clone(), params, 1, 4, precision);
    engine.adapted_step(&[(0, tokens)], &[lora])
}

#[test]
fn adapters_give_the_logits_of_dense_weights() {
    for dev in devices() {
        for family in FAMILIES {
            let params = tiny(family).params;
            let loras = adapters(params.config());
            let texts: Vec<Vec<u32>> = (0..4).map(|n| text(n, 20 + 7 * n)).collect();
            let chunks: Vec<_> = texts.iter().map(|t| &t[..]).enumerate().collect();
            let chosen = [Some(&loras[0]), None, Some(&loras[1]), Some(&loras[2])];
            let mut engine = Engine::with(dev.clone(), &params, 4, 4, Precision::F32);
            let found = engine.adapted_step(&chunks, &chosen);
            let mut at = 0;
            for (text, lora) in texts.iter().zip(chosen) {
                let weights = lora.map_or_else(|| params.clone(), |lora| dense(&params, lora));
                let expected = logits_of(&weights, text, &[text.len()]);
                let found = &found[at..at + expected.len()];
                let error = relative_error(found, &expected);
                assert!(error < 1e-5, "{family} {}: {error}", dev.kernels());
                let plain = logits_of(&params, text, &[text.len()]);
                let error = relative_error(&plain, &expected);
                assert_eq!(error > 1e-3, lora.is_some(), "the adapter matters: {error}");
                at += expected.len();
            }
            assert_eq!(at, found.len());
        }
    }
}

/// Other sequences, their adapters and order, and the cut into passes change no bit, with every storage of
/// the base weights; and no adapters are no adapters.
#[test]
fn rows_do_not_depend_on_the_adapters_of_others() {
    let kinds = Precision::ALL;
    for (dev, precision) in devices()
        .into_iter()
        .flat_map(|dev| kinds.map(|kind| (dev.clone(), kind)))
    {
        let params = tiny("qwen2").params;
        let loras = adapters(params.config());
        let [a, b, c] = loras.each_ref().map(Some);
        // Neighbours with the same adapters, the same ones apart, and none.
        let chosen = [a, a, None, b, a, c, c];
        let texts: Vec<Vec<u32>> = (0..7).map(|n| text(n, 15 + 5 * n)).collect();
        let expected: Vec<Vec<f32>> = texts
            .iter()
            .zip(chosen)
            .map(|(text, lora)| alone(&dev, &params, precision, text, lora))
            .collect();
        for reversed in [false, true] {
            let mut order: Vec<usize> = (0..7).collect();
            if reversed {
                order.reverse();
            }
            let mut engine = Engine::with(dev.clone(), &params, 7, 4, precision);
            let mut found = vec![Vec::new(); 7];
            // Chunks of 1 to 6 tokens, so that prompts and single tokens share passes.
            let mut at = [0; 7];
            while order.iter().any(|&s| at[s] < texts[s].len()) {
                let open = order.iter().copied().filter(|&s| at[s] < texts[s].len());
                let open: Vec<usize> = open.collect();
                let end = |s: usize| (at[s] + 1 + (at[s] + 3 * s) % 6).min(texts[s].len());
                let chunks: Vec<_> = open
                    .iter()
                    .map(|&s| (s, &texts[s][at[s]..end(s)]))
                    .collect();
                let own: Vec<_> = open.iter().map(|&s| chosen[s]).collect();
                let logits = engine.adapted_step(&chunks, &own);
                let mut rows = logits.chunks(VOCAB);
                for (s, chunk) in chunks {
                    found[s].extend(rows.by_ref().take(chunk.len()).flatten().copied());
                    at[s] += chunk.len();
                }
            }
            assert_eq!(found, expected, "{} {precision:?}", dev.kernels());
        }
        let plain = Engine::with(dev.clone(), &params, 1, 4, precision)
            .adapted_step(&[(0, &texts[2])], &[]);
        assert_eq!(plain, expected[2]);
    }
}

/// Rows whose logits are asked in any order, more than once, or not at all have the adapters of their
/// sequence.
#[test]
fn asked_rows_have_the_adapters_of_their_sequence() {
    let dev = device();
    let params = tiny("llama").params;
    let loras = adapters(params.config());
    let (first, second) = (text(0, 9), text(1, 6));
    let model = InferModel::new(&dev, params.config(), &params, 64).unwrap();
    let mut kv = KvPool::new(params.config().layers, model.attention_shape(), 16, 2).unwrap();
    let sequence = |block: &'static [u32], rows: usize| PagedSequence {
        blocks: block,
        past: 0,
        rows,
    };
    let asked = [14, 3, 3, 9, 0, 8];
    let batch = InferBatch {
        tokens: &[&first[..], &second].concat(),
        sequences: &[sequence(&[0], 9), sequence(&[1], 6)],
        adapters: &[Some(&loras[0]), Some(&loras[2])],
        logit_rows: &asked,
    };
    let mut scratch = InferScratch::new();
    let found = model.forward(&dev, &mut kv, &batch, &mut scratch).unwrap();
    let all = [
        alone(&dev, &params, Precision::F32, &first, Some(&loras[0])),
        alone(&dev, &params, Precision::F32, &second, Some(&loras[2])),
    ]
    .concat();
    for (found, row) in found.chunks(VOCAB).zip(asked) {
        assert_eq!(found, &all[row * VOCAB..][..VOCAB], "row {row}");
    }
}

/// An engine that adds adapters and a trainer that adds them have the same bits.
pub(crate) fn agree_with_added_adapters(dev: &Cpu) {
    for family in FAMILIES {
        let params = tiny(family).params;
        let tokens = text(2, 50);
        let model = TrainModel::new(params.config(), 50).unwrap();
        let model = model.adding_adapters();
        for lora in adapters(params.config()) {
            let weights = Weights {
                params: &params,
                lora: Some(&lora),
            };
            let trainer = logprobs_on(&model, dev, weights, &tokens, &[0.8; 49]);
            let logits = alone(dev, &params, Precision::F32, &tokens, Some(&lora));
            let logprob = |(row, &next): (&[f32], &u32)| {
                SoftmaxRow::new(dev, row, 0.8, None).logprob(row[next as usize])
            };
            let rows = logits.chunks(VOCAB).zip(&tokens[1..]);
            let engine: Vec<f32> = rows.map(logprob).collect();
            assert_eq!(engine, trainer, "{family}, {}", dev.kernels());
        }
    }
}

#[test]
fn engine_and_trainer_agree_with_added_adapters() {
    devices().iter().for_each(agree_with_added_adapters);
}

/// Training that adds the products of adapters gives the log-probabilities and gradients of training that
/// merges them.
#[test]
fn added_adapters_have_the_gradients_of_merged_ones() {
    let dev = device();
    for family in FAMILIES {
        let params = tiny(family).params;
        let case = golden_case(&tiny_golden(family));
        let lora = trained(params.config(), &Projection::ALL, 5);
        let weights = Weights {
            params: &params,
            lora: Some(&lora),
        };
        let model = TrainModel::new(params.config(), 256).unwrap();
        let model = model.adding_adapters();
        let rows: Vec<u32> = case.items.iter().map(|item| item.0).collect();
        for keep in [Keep::All, Keep::LayerInputs] {
            let merged = run(&dev, weights, &case, keep);
            let added = run_on(&model, &dev, weights, &case, &rows, keep);
            for (found, expected) in [
                (&added.logprob, &merged.logprob),
                (&added.entropy, &merged.entropy),
            ] {
                let error = relative_error(found, expected);
                assert!(error < 1e-5, "{family} {keep:?}: {error}");
            }
            for entry in lora.layout().table().entries() {
                let of = |grads: &Grads| grads.values()[entry.range()].to_vec();
                let error = relative_error(&of(&added.grads), &of(&merged.grads));
                assert!(error < 5e-5, "{family} {}: {error}", entry.name);
            }
        }
    }
}

/// Weights with a separate output projection are loaded where the embeddings are tied, and tied ones again
/// after them.
#[test]
fn tied_models_take_a_separate_output_projection() {
    let dev = device();
    let params = tiny("llama").params;
    assert!(params.config().tied_embeddings);
    let lora = trained(params.config(), &Projection::ALL, 4);
    let merged = lora.merged(&dev, &params).unwrap();
    let tokens = text(3, 30);
    let mut engine = Engine::with(dev.clone(), &params, 3, 2, Precision::F32);
    let tied = engine.adapted_step(&[(0, &tokens)], &[]);
    engine.model.repack(&dev, &merged).unwrap();
    let separate = engine.adapted_step(&[(1, &tokens)], &[]);
    assert_eq!(separate, logits_of(&merged, &tokens, &[30]));
    assert_ne!(separate, tied);
    engine.model.repack(&dev, &params).unwrap();
    assert_eq!(engine.adapted_step(&[(2, &tokens)], &[]), tied);
    // Untied models need theirs.
    let untied = InferModel::new(&dev, merged.config(), &params, 64).unwrap_err();
    assert!(
        untied.to_string().contains("1 missing (lm_head.weight)"),
        "{untied}"
    );
}

#[test]
fn adapters_of_other_decoders_and_numbers_are_refused() {
    let dev = device();
    let params = tiny("llama").params;
    let own = trained(params.config(), &[Projection::Q], 1);
    let foreign = trained(tiny("qwen3").params.config(), &[Projection::Q], 1);
    let model = InferModel::new(&dev, params.config(), &params, 64).unwrap();
    let mut kv = KvPool::new(params.config().layers, model.attention_shape(), 16, 1).unwrap();
    let mut refused = |adapters: &[Option<&Lora>]| {
        let batch = InferBatch {
            tokens: &[5],
            sequences: &[PagedSequence {
                blocks: &[0],
                past: 0,
                rows: 1,
            }],
            adapters,
            logit_rows: &[0],
        };
        let mut scratch = InferScratch::new();
        let logits = model.forward(&dev, &mut kv, &batch, &mut scratch);
        logits.map(<[f32]>::len).map_err(|error| error.to_string())
    };
    let two = refused(&[None, Some(&own)]).unwrap_err();
    assert!(
        two.contains("one for each sequence: 2, expected 1"),
        "{two}"
    );
    let other = refused(&[Some(&foreign)]).unwrap_err();
    assert!(
        other.contains("adapters are those of another decoder"),
        "{other}"
    );
    assert_eq!(refused(&[Some(&own)]), Ok(VOCAB));
}
