//! Training: golden gradients, shared prefixes, agreement with generation, bad input.

use crate::support::{
    FAMILIES, Tensors, device, devices, relative_error, smollm2, tiny, tiny_golden,
};
use sinew_model::{
    Activations, ForwardError, Grads, InferBatch, InferModel, InferScratch, Keep, OutputGrads,
    Params, Projection, TrainModel, ValueGrads, ValueHead, Weights,
};
use sinew_tensor::Cpu;
use sinew_tensor::attention::{Segment, TreeLayout};
use sinew_tensor::logprob::SoftmaxRow;
use sinew_tensor::paged::{KvPool, PagedSequence};
use sinew_types::TensorSource;

/// A training pass: which rows see which, and what is asked with which gradient.
pub(crate) struct Case {
    pub(crate) tokens: Vec<u32>,
    pub(crate) layout: TreeLayout,
    pub(crate) items: Vec<(u32, u32)>,
    /// Temperatures of the items; empty: 1 for all.
    pub(crate) temperatures: Vec<f32>,
    pub(crate) d_logprob: Vec<f32>,
    pub(crate) d_entropy: Vec<f32>,
}

/// Log-probabilities, entropies and gradients of a case.
pub(crate) struct Outcome {
    pub(crate) logprob: Vec<f32>,
    pub(crate) entropy: Vec<f32>,
    pub(crate) grads: Grads,
}

/// The case in a pass that finishes the rows that are asked for.
pub(crate) fn run(dev: &Cpu, weights: Weights<'_>, case: &Case, keep: Keep) -> Outcome {
    let rows: Vec<u32> = case.items.iter().map(|item| item.0).collect();
    run_for(dev, weights, case, &rows, keep)
}

/// The case in a pass that finishes `rows`.
fn run_for(dev: &Cpu, weights: Weights<'_>, case: &Case, rows: &[u32], keep: Keep) -> Outcome {
    let config = weights.params.config();
    let model = TrainModel::new(config, config.max_context).unwrap();
    run_on(&model, dev, weights, case, rows, keep)
}

pub(crate) fn run_on(
    model: &TrainModel,
    dev: &Cpu,
    weights: Weights<'_>,
    case: &Case,
    rows: &[u32],
    keep: Keep,
) -> Outcome {
    let mut acts = Activations::new(keep);
    let mut grads = match weights.lora {
        Some(lora) => Grads::of_lora(lora.layout()),
        None => Grads::of_params(weights.params.layout()),
    };
    model
        .forward_for(dev, weights, &case.tokens, &case.layout, rows, &mut acts)
        .unwrap();
    let out = model
        .logprobs(
            dev,
            weights,
            &mut acts,
            &case.items,
            &case.temperatures,
            None,
            true,
        )
        .unwrap();
    let (logprob, entropy) = (out.logprob.to_vec(), out.entropy.to_vec());
    let outputs = OutputGrads {
        d_logprob: &case.d_logprob,
        d_entropy: &case.d_entropy,
        values: None,
    };
    model
        .backward(dev, weights, &mut acts, outputs, &mut grads)
        .unwrap();
    Outcome {
        logprob,
        entropy,
        grads,
    }
}

/// Adds the gradients of the log-probabilities of one more pass.
pub(crate) fn add_gradients(
    model: &TrainModel,
    dev: &Cpu,
    weights: Weights<'_>,
    case: &Case,
    acts: &mut Activations,
    grads: &mut Grads,
) {
    let (tokens, temperatures) = (&case.tokens, &case.temperatures);
    let forward = model.forward(dev, weights, tokens, &case.layout, acts);
    forward.unwrap();
    let scored = model.logprobs(dev, weights, acts, &case.items, temperatures, None, false);
    scored.unwrap();
    let outputs = OutputGrads {
        d_logprob: &case.d_logprob,
        ..OutputGrads::default()
    };
    let backward = model.backward(dev, weights, acts, outputs, grads);
    backward.unwrap();
}

/// The packed sequences of the golden file.
pub(crate) fn golden_case(golden: &Tensors) -> Case {
    let column = |name: &str| &golden[name].1;
    let tokens: Vec<u32> = column("tokens").iter().map(|&t| t as u32).collect();
    let lengths: Vec<u32> = column("lengths").iter().map(|&n| n as u32).collect();
    let layout = TreeLayout::sequences(&lengths).unwrap();
    let mut case = Case {
        layout,
        items: Vec::new(),
        temperatures: Vec::new(),
        d_logprob: Vec::new(),
        d_entropy: Vec::new(),
        tokens,
    };
    for row in 1..case.tokens.len() {
        if case.layout.positions()[row] > 0 {
            case.items.push((row as u32 - 1, case.tokens[row]));
            case.d_logprob.push(column("weight")[row - 1]);
            case.d_entropy.push(column("entropy_weight")[row - 1]);
        }
    }
    case
}

#[test]
fn tiny_models_give_the_gradients_of_pytorch() {
    for dev in devices() {
        for family in FAMILIES {
            for keep in [Keep::All, Keep::LayerInputs] {
                println!("{}", check_golden(&dev, family, keep));
            }
        }
    }
}

/// Log-probabilities, entropies and the gradient of every tensor, within 2e-5 of its largest value; returns
/// the worst one.
fn check_golden(dev: &Cpu, family: &str, keep: Keep) -> String {
    let golden = tiny_golden(family);
    let params = tiny(family).params;
    let case = golden_case(&golden);
    let what = format!("{family} {keep:?} {}", dev.kernels());
    let outcome = run(dev, Weights::full(&params), &case, keep);
    let asked = |name: &str| -> Vec<f32> {
        let rows = case.items.iter().map(|item| item.0 as usize);
        rows.map(|row| golden[name].1[row]).collect()
    };
    let logprob = relative_error(&outcome.logprob, &asked("logprob"));
    let entropy = relative_error(&outcome.entropy, &asked("entropy"));
    assert!(
        logprob < 1e-5 && entropy < 1e-5,
        "{what}: {logprob} {entropy}"
    );
    let mut worst = (0.0, "");
    for entry in params.layout().entries() {
        let expected = &golden[&format!("grad.{}", entry.name)].1;
        let error = relative_error(&outcome.grads.values()[entry.range()], expected);
        assert!(error < 2e-5, "{what} {}: {error}", entry.name);
        if error > worst.0 {
            worst = (error, &entry.name);
        }
    }
    format!("{what}: worst gradient {:.1e} ({})", worst.0, worst.1)
}

fn by_turns(n: usize) -> Vec<f32> {
    [0.7, 1.0, 1.2].into_iter().cycle().take(n).collect()
}

/// Three answers to one prompt, two of which share a start, and an unrelated sequence.
pub(crate) fn tree_case() -> (Case, Case) {
    let prompt: Vec<u32> = (0..21).map(|i| (i * 7 + 3) % 97).collect();
    let start: Vec<u32> = (0..5).map(|i| (i * 11 + 2) % 97).collect();
    let tails: [Vec<u32>; 3] = [
        vec![5, 6, 7, 8, 9, 10],
        vec![50, 51, 52],
        (0..17).map(|i| (i * 5) % 97).collect(),
    ];
    let other: Vec<u32> = (0..9).map(|i| (i * 13) % 97).collect();
    let lens = [
        prompt.len(),
        start.len(),
        tails[0].len(),
        tails[1].len(),
        tails[2].len(),
        9,
    ];
    let parents = [None, Some(0), Some(1), Some(1), Some(0), None];
    let mut segments: Vec<Segment> = Vec::new();
    let mut row = 0;
    for (&len, parent) in lens.iter().zip(parents) {
        let after = |p: u32| segments[p as usize].position + segments[p as usize].len;
        let position = parent.map_or(0, after);
        segments.push(Segment {
            start: row,
            len: len as u32,
            position,
            parent,
        });
        row += len as u32;
    }
    let tokens = [&prompt[..], &start, &tails[0], &tails[1], &tails[2], &other].concat();
    let tree = TreeLayout::new(segments).unwrap();
    let sequences = [
        [&prompt[..], &start, &tails[0]].concat(),
        [&prompt[..], &start, &tails[1]].concat(),
        [&prompt[..], &tails[2]].concat(),
        other.clone(),
    ];
    let lens: Vec<u32> = sequences.iter().map(|s| s.len() as u32).collect();
    let plain = TreeLayout::sequences(&lens).unwrap();
    // The tokens after the prompt are asked about; the shared start counts for both its answers.
    let weight = |i: usize| ((i * 37 + 11) % 19) as f32 / 19.0 - 0.4;
    let (mut shared, mut alone) = (Vec::new(), Vec::new());
    let first_of = [0, lens[0], lens[0] + lens[1], lens[0] + lens[1] + lens[2]];
    let mut key = 0;
    for (sequence, (tokens, &first)) in sequences.iter().zip(&first_of).enumerate() {
        let from = if sequence == 3 { 1 } else { prompt.len() };
        for (t, &token) in tokens.iter().enumerate().skip(from) {
            let row = tree_row(sequence, t - 1);
            shared.push(((row as u32, token), weight(key)));
            alone.push(((first + t as u32 - 1, token), weight(key)));
            key += 1;
        }
    }
    let case = |tokens, layout, asked: Vec<((u32, u32), f32)>| Case {
        tokens,
        layout,
        items: asked.iter().map(|a| a.0).collect(),
        temperatures: by_turns(asked.len()),
        d_logprob: asked.iter().map(|a| a.1).collect(),
        d_entropy: asked.iter().map(|a| 0.3 * a.1 * a.1).collect(),
    };
    (
        case(tokens, tree, shared),
        case(sequences.concat(), plain, alone),
    )
}

/// Row in the tree of token `t` of a sequence of [`tree_case`].
fn tree_row(sequence: usize, t: usize) -> usize {
    match (sequence, t) {
        (3, t) => 52 + t,
        (_, 0..21) => t,
        (2, t) => 35 + t - 21,
        (_, 21..26) => t,
        (0, t) => 26 + t - 26,
        (_, t) => 32 + t - 26,
    }
}

#[test]
fn shared_prefixes_change_neither_logprobs_nor_gradients() {
    let dev = device();
    for family in FAMILIES {
        let params = tiny(family).params;
        let (tree, plain) = tree_case();
        assert!(tree.tokens.len() + 40 < plain.tokens.len());
        let shared = run(&dev, Weights::full(&params), &tree, Keep::All);
        let alone = run(&dev, Weights::full(&params), &plain, Keep::All);
        assert_eq!(shared.logprob, alone.logprob, "{family}");
        assert_eq!(shared.entropy, alone.entropy, "{family}");
        for entry in params.layout().entries() {
            let part = |outcome: &Outcome| outcome.grads.values()[entry.range()].to_vec();
            let error = relative_error(&part(&shared), &part(&alone));
            assert!(error < 2e-5, "{family} {}: {error}", entry.name);
        }
    }
}

/// A pass that mixes temperatures adds to the gradients the sum of the passes of one temperature each.
#[test]
fn mixed_temperatures_give_the_sum_of_their_gradients() {
    let dev = device();
    for family in FAMILIES {
        let params = tiny(family).params;
        let weights = Weights::full(&params);
        let (tree, _) = tree_case();
        let mixed = run(&dev, weights, &tree, Keep::All);
        let mut sum = vec![0.0f32; mixed.grads.values().len()];
        for temperature in [0.7, 1.0, 1.2] {
            let mut part = tree_case().0;
            for (i, &t) in tree.temperatures.iter().enumerate() {
                if t != temperature {
                    (part.d_logprob[i], part.d_entropy[i]) = (0.0, 0.0);
                }
            }
            part.temperatures = vec![temperature; tree.items.len()];
            let part = run(&dev, weights, &part, Keep::All);
            let values = part.grads.values();
            sum.iter_mut().zip(values).for_each(|(s, v)| *s += v);
        }
        for entry in params.layout().entries() {
            let error = relative_error(&mixed.grads.values()[entry.range()], &sum[entry.range()]);
            assert!(error < 1e-5, "{family} {}: {error}", entry.name);
        }
    }
}

/// A pass that finishes only the asked rows gives the same result, to the bit; gradients too, except for one
/// sum over rows that is grouped by their number.
#[test]
fn rows_that_nothing_is_asked_of_change_nothing() {
    let dev = device();
    for family in FAMILIES {
        let params = tiny(family).params;
        let (mut case, _) = tree_case();
        // Only one answer, so that most rows are not asked.
        case.items.truncate(9);
        case.temperatures.truncate(9);
        case.d_logprob.truncate(9);
        case.d_entropy.truncate(9);
        let lora = crate::lora::trained(params.config(), &Projection::ALL, 1);
        let all: Vec<u32> = (0..case.tokens.len() as u32).collect();
        let regrouped = format!("{}.post_attention_layernorm", params.config().layers - 1);
        for keep in [Keep::All, Keep::LayerInputs] {
            let weights = Weights::full(&params);
            let whole = run_for(&dev, weights, &case, &all, keep);
            let part = run(&dev, weights, &case, keep);
            assert_eq!(part.logprob, whole.logprob, "{family} {keep:?}");
            assert_eq!(part.entropy, whole.entropy, "{family} {keep:?}");
            for entry in params.layout().entries() {
                let of = |outcome: &Outcome| outcome.grads.values()[entry.range()].to_vec();
                if entry.name.contains(&regrouped) {
                    let error = relative_error(&of(&part), &of(&whole));
                    assert!(error < 1e-6, "{family} {}: {error}", entry.name);
                } else {
                    assert_eq!(of(&part), of(&whole), "{family} {}", entry.name);
                }
            }
            let lora = Some(&lora);
            let weights = Weights { lora, ..weights };
            let whole = run_for(&dev, weights, &case, &all, keep);
            let part = run(&dev, weights, &case, keep);
            assert_eq!(part.logprob, whole.logprob, "{family} {keep:?}");
            assert_eq!(part.grads.values(), whole.grads.values(), "{family}");
        }
    }
}

#[test]
fn rows_that_were_not_named_cannot_be_asked() {
    let dev = device();
    let params = tiny("llama").params;
    let (case, _) = tree_case();
    let (weights, config) = (Weights::full(&params), params.config());
    let model = TrainModel::new(config, config.max_context).unwrap();
    let mut acts = Activations::new(Keep::Nothing);
    let forward = |rows: &[u32], acts: &mut Activations| {
        model.forward_for(&dev, weights, &case.tokens, &case.layout, rows, acts)
    };
    let error = forward(&[3, 1000], &mut acts).unwrap_err();
    assert!(error.to_string().contains("1000"), "{error}");
    forward(&[5, 2, 5], &mut acts).unwrap();
    let asked = model.logprobs(
        &dev,
        weights,
        &mut acts,
        &[(2, 1), (5, 7), (2, 9)],
        &[],
        None,
        false,
    );
    assert_eq!(asked.unwrap().logprob.len(), 3);
    let error = model.logprobs(&dev, weights, &mut acts, &[(3, 1)], &[], None, false);
    assert_eq!(error.unwrap_err(), ForwardError::Unfinished { row: 3 });
    let error = model.top(&dev, weights, &mut acts, &[4], &[], None, 2);
    assert_eq!(error.unwrap_err(), ForwardError::Unfinished { row: 4 });
}

/// Log-probability of every token but the first, each at its temperature, as the engine computes it.
pub(crate) fn engine_logprobs(
    dev: &Cpu,
    params: &Params,
    tokens: &[u32],
    temperatures: &[f32],
) -> Vec<f32> {
    let config = params.config();
    let model = InferModel::new(dev, config, params, tokens.len()).unwrap();
    let blocks: Vec<u32> = (0..tokens.len().div_ceil(16) as u32).collect();
    let mut kv = KvPool::new(config.layers, model.attention_shape(), 16, blocks.len()).unwrap();
    let mut scratch = InferScratch::new();
    let mut found = Vec::new();
    let mut past = 0;
    // A prompt in two chunks, then token by token.
    let half = tokens.len() / 2;
    let mut chunks = vec![&tokens[..half / 3], &tokens[half / 3..half]];
    chunks.extend(tokens[half..].chunks(1));
    for chunk in chunks {
        let sequences = [PagedSequence {
            blocks: &blocks,
            past,
            rows: chunk.len(),
        }];
        let rows: Vec<usize> = (0..chunk.len()).collect();
        let batch = InferBatch {
            tokens: chunk,
            sequences: &sequences,
            adapters: &[],
            logit_rows: &rows,
        };
        let logits = model.forward(dev, &mut kv, &batch, &mut scratch).unwrap();
        for (i, row) in logits.chunks(config.vocab).enumerate() {
            let Some(&next) = tokens.get(past + i + 1) else {
                continue;
            };
            let softmax = SoftmaxRow::new(dev, row, temperatures[past + i], None);
            found.push(softmax.logprob(row[next as usize]));
        }
        past += chunk.len();
    }
    found
}

pub(crate) fn trainer_logprobs(
    dev: &Cpu,
    weights: Weights<'_>,
    tokens: &[u32],
    temperatures: &[f32],
) -> Vec<f32> {
    let model = TrainModel::new(weights.params.config(), tokens.len()).unwrap();
    logprobs_on(&model, dev, weights, tokens, temperatures)
}

pub(crate) fn logprobs_on(
    model: &TrainModel,
    dev: &Cpu,
    weights: Weights<'_>,
    tokens: &[u32],
    temperatures: &[f32],
) -> Vec<f32> {
    let layout = TreeLayout::sequences(&[tokens.len() as u32]).unwrap();
    let mut acts = Activations::new(Keep::Nothing);
    model
        .forward(dev, weights, tokens, &layout, &mut acts)
        .unwrap();
    let items: Vec<_> = (1..tokens.len())
        .map(|t| (t as u32 - 1, tokens[t]))
        .collect();
    model
        .logprobs(dev, weights, &mut acts, &items, temperatures, None, false)
        .unwrap()
        .logprob
        .to_vec()
}

/// Temperatures of `n` tokens: all 0.7, 1 and 1.2, then by turns.
pub(crate) fn temperatures(n: usize) -> impl Iterator<Item = Vec<f32>> {
    const ALL: [f32; 3] = [0.7, 1.0, 1.2];
    let same = ALL.into_iter().map(move |t| vec![t; n]);
    same.chain([by_turns(n)])
}

/// Engine (paged, chunked, token by token) and trainer have the same bits.
fn agree_on_logprobs(name: &str, params: &Params, devices: &[Cpu]) {
    let vocab = params.config().vocab as u32;
    let tokens: Vec<u32> = (0..90u32)
        .map(|i| (i * i * 31 + 17 * i + 5) % vocab)
        .collect();
    for dev in devices {
        for temperatures in temperatures(89) {
            let kernels = dev.kernels();
            let engine = engine_logprobs(dev, params, &tokens, &temperatures);
            let trainer = trainer_logprobs(dev, Weights::full(params), &tokens, &temperatures);
            assert_eq!(engine.len(), 89);
            assert_eq!(engine, trainer, "{name}, {kernels}");
        }
    }
}

#[test]
fn engine_and_trainer_agree_on_logprobs() {
    for family in FAMILIES {
        agree_on_logprobs(family, &tiny(family).params, &devices());
    }
}

#[test]
fn smollm2_engine_and_trainer_agree_on_logprobs() {
    agree_on_logprobs("smollm2", &smollm2().params, &[device()]);
}

/// An engine with adapters merged into its weights and a trainer that has them apart.
pub(crate) fn agree_with_adapters(dev: &Cpu) {
    for family in FAMILIES {
        let params = tiny(family).params;
        for targets in [&Projection::ALL[..], &[Projection::Q, Projection::Down]] {
            let lora = crate::lora::trained(params.config(), targets, 1);
            let merged = lora.merged(dev, &params).unwrap();
            let tokens: Vec<u32> = (0..60u32).map(|i| (i * i * 31 + 17 * i + 5) % 97).collect();
            let ones = vec![1.0; 59];
            let weights = Weights {
                lora: Some(&lora),
                ..Weights::full(&params)
            };
            let trainer = trainer_logprobs(dev, weights, &tokens, &ones);
            let engine = engine_logprobs(dev, &merged, &tokens, &ones);
            assert_eq!(engine, trainer, "{family}, {}", dev.kernels());
            assert_ne!(engine, engine_logprobs(dev, &params, &tokens, &ones));
        }
    }
}

#[test]
fn engine_and_trainer_agree_with_adapters() {
    devices().iter().for_each(agree_with_adapters);
}

#[test]
fn memory_is_reused_and_gradients_add_up() {
    let dev = device();
    let params = tiny("qwen3").params;
    let model = TrainModel::new(params.config(), 256).unwrap();
    let weights = Weights::full(&params);
    let (tree, plain) = tree_case();
    let mut acts = Activations::new(Keep::All);
    let mut grads = Grads::of_params(params.layout());
    // Large, small, large again through the same memory.
    for case in [&plain, &tree, &plain] {
        add_gradients(&model, &dev, weights, case, &mut acts, &mut grads);
    }
    let mut once = tree_case().1;
    once.d_entropy.clear();
    let single = run(&dev, weights, &once, Keep::All);
    for entry in params.layout().entries() {
        let tripled: Vec<f32> = single.grads.values()[entry.range()]
            .iter()
            .map(|g| 3.0 * g)
            .collect();
        let error = relative_error(&grads.values()[entry.range()], &tripled);
        assert!(error < 2e-5, "{}: {error}", entry.name);
    }
    grads.zero();
    assert!(grads.values().iter().all(|&g| g == 0.0));
}

/// Nothing of earlier passes is left, whether a backward pass follows or not.
#[test]
fn restarted_gradients_are_those_of_new_ones() {
    let dev = device();
    let params = tiny("qwen3").params;
    let model = TrainModel::new(params.config(), 256).unwrap();
    let weights = Weights::full(&params);
    let case = tree_case().1;
    let mut acts = Activations::new(Keep::All);
    let mut grads = Grads::of_params(params.layout());
    let mut pass =
        |grads: &mut Grads| add_gradients(&model, &dev, weights, &case, &mut acts, grads);
    pass(&mut grads);
    let first = grads.values().to_vec();
    assert!(first.iter().any(|&g| g != 0.0));
    grads.restart(&dev);
    pass(&mut grads);
    assert_eq!(grads.values(), first);
    pass(&mut grads);
    assert_ne!(grads.values(), first);
    grads.restart(&dev);
    grads.settle(&dev);
    assert!(grads.values_mut().iter().all(|&g| g == 0.0));
}

#[test]
#[should_panic(expected = "a backward pass or `settle` comes first")]
fn restarted_gradients_are_not_read() {
    let params = tiny("qwen3").params;
    let mut grads = Grads::of_params(params.layout());
    grads.restart(&device());
    grads.values();
}

#[test]
fn value_heads_have_the_gradients_of_finite_differences() {
    let dev = device();
    let params = tiny("llama").params;
    let (case, _) = tree_case();
    let rows = [0u32, 30, 30, 60];
    let d_values = [0.7f32, -0.3, 0.9, 0.4];
    let mut head = ValueHead::random(params.config().d_model, 3);
    head.values_mut().iter_mut().for_each(|v| *v *= 20.0);
    let model = TrainModel::new(params.config(), 256).unwrap();
    let mut acts = Activations::new(Keep::All);
    let mut loss = |params: &Params, head: &ValueHead| -> f64 {
        let weights = Weights::full(params);
        model
            .forward(&dev, weights, &case.tokens, &case.layout, &mut acts)
            .unwrap();
        let mut out = [0.0; 4];
        model
            .values(&dev, weights, &mut acts, head, &rows, &mut out)
            .unwrap();
        out.iter()
            .zip(d_values)
            .map(|(v, d)| f64::from(*v) * f64::from(d))
            .sum()
    };
    loss(&params, &head);
    let weights = Weights::full(&params);
    let mut acts = Activations::new(Keep::All);
    model
        .forward(&dev, weights, &case.tokens, &case.layout, &mut acts)
        .unwrap();
    model
        .values(&dev, weights, &mut acts, &head, &rows, &mut [0.0; 4])
        .unwrap();
    let mut grads = Grads::of_params(params.layout());
    let mut head_grads = ValueGrads::of(&head);
    let outputs = OutputGrads {
        values: Some((&head, &d_values, &mut head_grads)),
        ..OutputGrads::default()
    };
    model
        .backward(&dev, weights, &mut acts, outputs, &mut grads)
        .unwrap();
    let step = 1e-2f32;
    let check = |what: &str, found: f32, up: f64, down: f64| {
        let expected = (up - down) / f64::from(2.0 * step);
        let error = (f64::from(found) - expected).abs();
        assert!(
            error < 2e-2 * expected.abs().max(0.05),
            "{what}: {found}, expected {expected}"
        );
    };
    for i in [0, 17, 48] {
        let mut moved = head.clone();
        moved.values_mut()[i] += step;
        let up = loss(&params, &moved);
        moved.values_mut()[i] -= 2.0 * step;
        check("head", head_grads.values()[i], up, loss(&params, &moved));
    }
    for name in ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"] {
        let at = params.layout().entry(name).unwrap().offset + 5;
        let mut moved = params.clone();
        moved.values_mut()[at] += step;
        let up = loss(&moved, &head);
        moved.values_mut()[at] -= 2.0 * step;
        check(name, grads.values()[at], up, loss(&moved, &head));
    }
}

#[test]
fn bad_passes_are_refused() {
    let dev = device();
    let params = tiny("llama").params;
    let other = tiny("qwen2").params;
    let model = TrainModel::new(params.config(), 20).unwrap();
    let weights = Weights::full(&params);
    let layout = TreeLayout::sequences(&[4, 3]).unwrap();
    let tokens = [1, 2, 3, 4, 5, 6, 7];
    let mut acts = Activations::new(Keep::Nothing);
    let mut grads = Grads::of_params(params.layout());
    let says = |result: Result<(), sinew_model::ForwardError>, part: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
    };
    let logprobs = |acts: &mut Activations, items: &[(u32, u32)]| {
        model
            .logprobs(&dev, weights, acts, items, &[], None, false)
            .map(|_| ())
    };
    says(logprobs(&mut acts, &[]), "no forward pass");
    let wrong = model.forward(&dev, Weights::full(&other), &tokens, &layout, &mut acts);
    says(wrong, "those of another decoder");
    says(
        model.forward(&dev, weights, &tokens[1..], &layout, &mut acts),
        "tokens: 6, expected 7",
    );
    says(
        model.forward(&dev, weights, &[200; 7], &layout, &mut acts),
        "token 200 of row 0",
    );
    let long = TreeLayout::sequences(&[21]).unwrap();
    says(
        model.forward(&dev, weights, &[1; 21], &long, &mut acts),
        "position 20: the model's context is 20",
    );
    let none = TreeLayout::sequences(&[]).unwrap();
    says(
        model.forward(&dev, weights, &[], &none, &mut acts),
        "at least one row",
    );
    model
        .forward(&dev, weights, &tokens, &layout, &mut acts)
        .unwrap();
    says(
        logprobs(&mut acts, &[(7, 0)]),
        "item's row 7 does not exist: there are 7",
    );
    says(logprobs(&mut acts, &[(0, 97)]), "item's target 97");
    logprobs(&mut acts, &[(0, 1)]).unwrap();
    let mut backward = |acts: &mut Activations, d_logprob: &[f32]| {
        let outputs = OutputGrads {
            d_logprob,
            ..OutputGrads::default()
        };
        model.backward(&dev, weights, acts, outputs, &mut grads)
    };
    says(backward(&mut acts, &[1.0]), "keep nothing");
    let mut acts = Activations::new(Keep::All);
    says(backward(&mut acts, &[]), "no forward pass");
    model
        .forward(&dev, weights, &tokens, &layout, &mut acts)
        .unwrap();
    logprobs(&mut acts, &[(0, 1)]).unwrap();
    says(backward(&mut acts, &[1.0, 2.0]), "d_logprob: 2, expected 1");
    assert_eq!(backward(&mut acts, &[1.0]), Ok(()));
    assert_eq!(params.names().len(), params.layout().entries().len());
}

#[test]
fn temperatures_that_logits_cannot_be_divided_by_are_refused() {
    let dev = device();
    let params = tiny("llama").params;
    let model = TrainModel::new(params.config(), 20).unwrap();
    let weights = Weights::full(&params);
    let layout = TreeLayout::sequences(&[4]).unwrap();
    let mut acts = Activations::new(Keep::Nothing);
    model
        .forward(&dev, weights, &[1, 2, 3, 4], &layout, &mut acts)
        .unwrap();
    for (temperatures, why) in [
        (&[1.0, 0.0][..], "temperature of item 1 is 0"),
        (&[f32::NAN, 1.0], "temperature of item 0 is NaN"),
        (&[1.0], "temperatures: 1, expected 2"),
    ] {
        let items = [(0, 1), (1, 2)];
        let scored = model.logprobs(&dev, weights, &mut acts, &items, temperatures, None, false);
        let text = scored.map(|_| ()).unwrap_err().to_string();
        assert!(text.contains(why), "{text}");
        let ranked = model.top(&dev, weights, &mut acts, &[0, 1], temperatures, None, 1);
        let text = ranked.map(|_| ()).unwrap_err().to_string();
        assert!(text.contains(why), "{text}");
    }
}
