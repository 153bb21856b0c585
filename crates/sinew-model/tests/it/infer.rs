//! Generation: golden logits, independence of the batch, chunks, bad batches, new weights.

use crate::support::{
    FAMILIES, device, devices, golden_dir, relative_error, smollm2, tiny, tiny_golden,
};
use proptest::prelude::*;
use serde::Deserialize;
use sinew_model::{InferBatch, InferModel, InferScratch, Lora, Params, Precision};
use sinew_tensor::Cpu;
use sinew_tensor::paged::{KvPool, PagedSequence};
use std::fs;

const BLOCK: usize = 16;

/// A model with memory for some sequences, each with its own run of blocks.
pub(crate) struct Engine {
    dev: Cpu,
    pub(crate) model: InferModel,
    kv: KvPool,
    scratch: InferScratch,
    tables: Vec<Vec<u32>>,
    past: Vec<usize>,
}

impl Engine {
    fn new(params: &Params, sequences: usize, blocks_each: usize) -> Self {
        Self::on(device(), params, sequences, blocks_each)
    }

    fn on(dev: Cpu, params: &Params, sequences: usize, blocks_each: usize) -> Self {
        Self::with(dev, params, sequences, blocks_each, Precision::F32)
    }

    pub(crate) fn with(
        dev: Cpu,
        params: &Params,
        sequences: usize,
        blocks_each: usize,
        precision: Precision,
    ) -> Self {
        let config = params.config();
        let context = config.max_context;
        let model = InferModel::with_precision(&dev, config, params, context, precision).unwrap();
        let blocks = sequences * blocks_each;
        let kv = KvPool::new(config.layers, model.attention_shape(), BLOCK, blocks).unwrap();
        // Blocks of a sequence are scattered.
        let tables = (0..sequences)
            .map(|s| {
                (0..blocks_each)
                    .map(|b| (b * sequences + s) as u32)
                    .rev()
                    .collect()
            })
            .collect();
        Self {
            dev,
            model,
            kv,
            scratch: InferScratch::new(),
            tables,
            past: vec![0; sequences],
        }
    }

    /// Feeds each sequence its chunk; logits of every row.
    fn step(&mut self, chunks: &[(usize, &[u32])]) -> Vec<f32> {
        self.adapted_step(chunks, &[])
    }

    /// [`Engine::step`] with the adapters of each chunk's sequence.
    pub(crate) fn adapted_step(
        &mut self,
        chunks: &[(usize, &[u32])],
        adapters: &[Option<&Lora>],
    ) -> Vec<f32> {
        let tokens: Vec<u32> = chunks
            .iter()
            .flat_map(|(_, chunk)| chunk.iter().copied())
            .collect();
        let sequences: Vec<_> = chunks
            .iter()
            .map(|&(s, chunk)| PagedSequence {
                blocks: &self.tables[s],
                past: self.past[s],
                rows: chunk.len(),
            })
            .collect();
        let rows: Vec<usize> = (0..tokens.len()).collect();
        let batch = InferBatch {
            tokens: &tokens,
            sequences: &sequences,
            adapters,
            logit_rows: &rows,
        };
        let logits = self
            .model
            .forward(&self.dev, &mut self.kv, &batch, &mut self.scratch);
        let logits = logits.unwrap().to_vec();
        for &(s, chunk) in chunks {
            self.past[s] += chunk.len();
        }
        logits
    }
}

/// Logits of every row of sequences of the given lengths, each computed at once.
pub(crate) fn logits_of(params: &Params, tokens: &[u32], lengths: &[usize]) -> Vec<f32> {
    let mut at = 0;
    let mut rows = |&n: &usize| {
        at += n;
        alone(params, &tokens[at - n..at])
    };
    lengths.iter().flat_map(&mut rows).collect()
}

#[test]
fn tiny_models_give_the_logits_of_transformers() {
    for (dev, family) in devices()
        .into_iter()
        .flat_map(|d| FAMILIES.map(|f| (d.clone(), f)))
    {
        let golden = tiny_golden(family);
        let tokens: Vec<u32> = golden["tokens"].1.iter().map(|&t| t as u32).collect();
        let lengths: Vec<usize> = golden["lengths"].1.iter().map(|&n| n as usize).collect();
        let kernels = dev.kernels();
        let mut engine = Engine::on(dev, &tiny(family).params, lengths.len(), 2);
        let mut at = 0;
        let chunks: Vec<_> = lengths
            .iter()
            .enumerate()
            .map(|(s, &n)| {
                at += n;
                (s, &tokens[at - n..at])
            })
            .collect();
        let logits = engine.step(&chunks);
        let error = relative_error(&logits, &golden["logits"].1);
        assert!(error < 1e-5, "{family} {kernels}: {error}");
    }
}

/// Wide enough that products are cut into blocks: prompts at once, in pieces and token by token, separately
/// and with others, give the same bits on every kind of kernel.
#[test]
fn rows_of_wide_models_do_not_depend_on_their_batch() {
    let mut config = tiny("llama").params.config().clone();
    (config.d_model, config.d_ff, config.layers, config.vocab) = (704, 1500, 1, 300);
    (config.heads, config.kv_heads, config.head_dim) = (11, 1, 64);
    let mut params = Params::random(&config, 5);
    params.values_mut().iter_mut().for_each(|v| *v *= 3.0);
    let text: Vec<u32> = (0..70).map(|i| (i * i * 7 + i) % 300).collect();
    let other: Vec<u32> = (0..33).map(|i| (i * 11 + 5) % 300).collect();
    for dev in devices() {
        let kernels = dev.kernels();
        let whole = Engine::on(dev.clone(), &params, 1, 5).step(&[(0, &text)]);
        let mut engine = Engine::on(dev, &params, 2, 5);
        let mut found = engine.step(&[(0, &text[..37]), (1, &other)]);
        found.truncate(37 * 300);
        found.extend(engine.step(&[(0, &text[37..60])]));
        for token in text[60..].chunks(1) {
            found.extend_from_slice(&engine.step(&[(0, token)]));
        }
        let differs = whole
            .iter()
            .zip(&found)
            .position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!((found.len(), differs), (whole.len(), None), "{kernels}");
    }
}

/// Rounded results are near the logits of f32, the nearer the more bits, and still have the same bits in any
/// batch.
#[test]
fn rounded_models_are_near_and_do_not_depend_on_the_batch() {
    let mut config = tiny("llama").params.config().clone();
    (config.d_model, config.d_ff, config.layers, config.vocab) = (192, 500, 2, 300);
    (config.heads, config.kv_heads, config.head_dim) = (3, 1, 64);
    let params = Params::random(&config, 5);
    let text: Vec<u32> = (0..70).map(|i| (i * i * 7 + i) % 300).collect();
    let other: Vec<u32> = (0..33).map(|i| (i * 11 + 5) % 300).collect();
    let kinds = [
        (Precision::Bf16, 1e-4..4e-3, 1.9),
        (Precision::Int8, 4e-3..0.03, 3.0),
    ];
    for (dev, (precision, near, smaller)) in devices()
        .into_iter()
        .flat_map(|dev| kinds.clone().map(|kind| (dev.clone(), kind)))
    {
        let rounded = |n, blocks| Engine::with(dev.clone(), &params, n, blocks, precision);
        let exact = Engine::on(dev.clone(), &params, 1, 5).step(&[(0, &text)]);
        let whole = rounded(1, 5).step(&[(0, &text)]);
        let error = relative_error(&whole, &exact);
        assert!(
            near.contains(&error),
            "{} {precision:?}: {error}",
            dev.kernels()
        );
        let mut engine = rounded(2, 5);
        let mut found = engine.step(&[(0, &text[..37]), (1, &other)]);
        found.truncate(37 * 300);
        for token in text[37..].chunks(1) {
            found.extend_from_slice(&engine.step(&[(0, token)]));
        }
        assert_eq!(found, whole);
        let bytes = engine.model.matrix_bytes() as f64;
        let full = Engine::new(&params, 1, 1).model.matrix_bytes() as f64;
        assert!(smaller * bytes < full, "{bytes} of {full} bytes");
    }
}

/// Rounding to bfloat16 moves the packaged model's log-probabilities by little, and its best tokens not
/// where they are clear.
#[test]
fn smollm2_in_bf16_stays_near_f32() {
    let text = fs::read_to_string(golden_dir().join("smollm2.json")).unwrap();
    let golden: Golden = serde_json::from_str(&text).unwrap();
    let params = &smollm2().params;
    let cases = golden.cases.len();
    let mut exact = Engine::new(params, cases, 12);
    let mut rounded = Engine::with(device(), params, cases, 12, Precision::Bf16);
    let log_probs = |row: &[f32]| {
        let lse = row.iter().map(|&v| f64::from(v).exp()).sum::<f64>().ln();
        row.iter().map(|&v| f64::from(v) - lse).collect::<Vec<_>>()
    };
    let best = |row: &[f64]| {
        (0..row.len())
            .max_by(|&a, &b| row[a].total_cmp(&row[b]))
            .unwrap()
    };
    let (mut gaps, mut clear) = (Vec::new(), 0);
    for (sequence, case) in golden.cases.iter().enumerate() {
        let (a, b) = (
            exact.step(&[(sequence, &case.tokens)]),
            rounded.step(&[(sequence, &case.tokens)]),
        );
        for (a, b) in a.chunks(49152).zip(b.chunks(49152)) {
            let (a, b) = (log_probs(a), log_probs(b));
            let first = best(&a);
            let second = a.iter().enumerate().filter(|(i, _)| *i != first);
            let second = second.map(|(_, v)| *v).fold(f64::MIN, f64::max);
            gaps.push((a[first] - b[first]).abs());
            if a[first] - second > 0.25 {
                clear += 1;
                assert_eq!(best(&b), first, "{:?}", case.prompt);
            }
        }
    }
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    let largest = gaps.iter().fold(0.0f64, |m, &g| m.max(g));
    println!(
        "gaps of {} best tokens: mean {mean:.1e}, largest {largest:.1e}, {clear} clear",
        gaps.len()
    );
    assert!(
        mean > 1e-5 && mean < 0.02 && largest < 0.2,
        "mean {mean}, largest {largest}"
    );
    assert!(2 * clear > gaps.len(), "{clear} of {}", gaps.len());
}

/// Logits of one sequence, computed separately in one pass.
fn alone(params: &Params, tokens: &[u32]) -> Vec<f32> {
    Engine::new(params, 1, tokens.len().div_ceil(BLOCK)).step(&[(0, tokens)])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Chunks of any size, together with other sequences: the same bits.
    #[test]
    fn rows_do_not_depend_on_their_batch(
        family in 0usize..3,
        sequences in prop::collection::vec(prop::collection::vec(0u32..97, 1..40), 1..5),
        sizes in prop::collection::vec(1usize..20, 12),
    ) {
        let params = tiny(FAMILIES[family]).params;
        let mut engine = Engine::new(&params, sequences.len(), 3);
        let mut found = vec![Vec::new(); sequences.len()];
        let mut size = sizes.iter().cycle();
        while engine.past.iter().zip(&sequences).any(|(&past, s)| past < s.len()) {
            let chunks: Vec<(usize, &[u32])> = sequences
                .iter()
                .enumerate()
                .filter(|(s, tokens)| engine.past[*s] < tokens.len())
                .map(|(s, tokens)| {
                    let past = engine.past[s];
                    (s, &tokens[past..(past + size.next().unwrap()).min(tokens.len())])
                })
                .collect();
            let logits = engine.step(&chunks);
            let mut at = 0;
            for (s, chunk) in chunks {
                found[s].extend_from_slice(&logits[at * 97..(at + chunk.len()) * 97]);
                at += chunk.len();
            }
        }
        for (tokens, found) in sequences.iter().zip(found) {
            prop_assert_eq!(alone(&params, tokens), found);
        }
    }
}

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt: String,
    tokens: Vec<u32>,
    at: Vec<At>,
}

#[derive(Deserialize)]
struct At {
    position: usize,
    lse: f64,
    ids: Vec<usize>,
    logits: Vec<f32>,
}

/// The packaged model against `transformers` on the same file, log-probabilities within 1e-3.
#[test]
fn smollm2_gives_the_logits_of_transformers() {
    let text = fs::read_to_string(golden_dir().join("smollm2.json")).unwrap();
    let golden: Golden = serde_json::from_str(&text).unwrap();
    let mut engine = Engine::new(&smollm2().params, golden.cases.len(), 12);
    let mut worst = 0.0f64;
    for (sequence, case) in golden.cases.iter().enumerate() {
        let logits = engine.step(&[(sequence, &case.tokens)]);
        for at in &case.at {
            let row = &logits[at.position * 49152..(at.position + 1) * 49152];
            let sum: f64 = row.iter().map(|&v| f64::from(v).exp()).sum();
            for (&id, &expected) in at.ids.iter().zip(&at.logits) {
                let difference = f64::from(row[id]) - sum.ln() - (f64::from(expected) - at.lse);
                worst = worst.max(difference.abs());
            }
            let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]));
            assert_eq!(
                best,
                Some(at.ids[0]),
                "{:?} at {}",
                case.prompt,
                at.position
            );
        }
    }
    println!("largest difference of a log-probability: {worst:.2e}");
    assert!(worst < 1e-3, "{worst}");
}

#[test]
fn new_weights_replace_the_old_ones() {
    let (first, second) = (tiny("llama").params, {
        let mut params = tiny("llama").params;
        params.values_mut().iter_mut().for_each(|v| *v *= 1.5);
        params
    });
    let tokens = [5, 6, 7, 8, 9];
    let mut engine = Engine::new(&first, 1, 1);
    let before = engine.step(&[(0, &tokens)]);
    engine.model.repack(&engine.dev, &second).unwrap();
    engine.past[0] = 0;
    let after = engine.step(&[(0, &tokens)]);
    assert_ne!(before, after);
    assert_eq!(after, alone(&second, &tokens));
    let refused = engine
        .model
        .repack(&engine.dev, &tiny("qwen2").params)
        .unwrap_err();
    assert!(refused.to_string().contains("q_proj.bias"), "{refused}");
    engine.past[0] = 0;
    assert_eq!(engine.step(&[(0, &tokens)]), after);
}

#[test]
fn bad_batches_are_refused() {
    let params = tiny("llama").params;
    let engine = &mut Engine::new(&params, 2, 2);
    let blocks: &[u32] = &[0, 1];
    let mut message = |tokens: &[u32], sequences: &[PagedSequence<'_>], logit_rows: &[usize]| {
        let batch = InferBatch {
            tokens,
            sequences,
            adapters: &[],
            logit_rows,
        };
        let result = engine
            .model
            .forward(&engine.dev, &mut engine.kv, &batch, &mut engine.scratch);
        result.map(<[f32]>::len).map_err(|error| error.to_string())
    };
    let one = |past, rows| [PagedSequence { blocks, past, rows }];
    let wrong = |result: Result<usize, String>, part: &str| {
        let text = result.unwrap_err();
        assert!(text.contains(part), "{text}");
    };
    wrong(message(&[97], &one(0, 1), &[]), "token 97 of row 0");
    wrong(
        message(&[1, 2], &one(0, 1), &[]),
        "rows of all sequences: 1, expected 2",
    );
    wrong(message(&[1], &one(32, 1), &[]), "logical block");
    wrong(
        message(&[1], &one(256, 1), &[]),
        "position 256: the model's context is 256",
    );
    wrong(message(&[1], &one(usize::MAX, 1), &[]), "context");
    wrong(
        message(&[1], &one(0, 1), &[1]),
        "logit row 1 does not exist",
    );
    let far = [PagedSequence {
        blocks: &[9],
        past: 0,
        rows: 1,
    }];
    wrong(
        message(&[1], &far, &[]),
        "physical block 9 does not exist: there are 4",
    );
    assert_eq!(message(&[], &[], &[]), Ok(0));
    assert_eq!(message(&[1], &one(0, 1), &[0, 0, 0]), Ok(3 * 97));
}
