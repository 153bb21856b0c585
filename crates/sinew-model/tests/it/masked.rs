//! Distributions over allowed tokens: golden values and gradients of PyTorch, and refusals.

use crate::support::{
    Tensors, device, devices, golden_dir, read_tensors, relative_error, tiny, tiny_golden,
};
use sinew_model::{
    Activations, ForwardError, Grads, Keep, OutputGrads, Params, TrainModel, Weights,
};
use sinew_tensor::attention::TreeLayout;
use sinew_tensor::logprob::Masks;

fn reference() -> Tensors {
    read_tensors(&golden_dir().join("llama/masked.safetensors"))
}

/// Items of the golden file, with a bit set for each; an item of a row without a mask has none.
struct Golden {
    tokens: Vec<u32>,
    layout: TreeLayout,
    items: Vec<(u32, u32)>,
    temperatures: Vec<f32>,
    words: usize,
    table: Vec<u32>,
    rows: Vec<u32>,
    d_logprob: Vec<f32>,
    d_entropy: Vec<f32>,
    logprob: Vec<f32>,
    entropy: Vec<f32>,
}

impl Golden {
    fn read() -> Self {
        let (plain, masked) = (tiny_golden("llama"), reference());
        let column = |name: &str| &masked[name].1;
        let tokens: Vec<u32> = plain["tokens"].1.iter().map(|&t| t as u32).collect();
        let lengths: Vec<u32> = plain["lengths"].1.iter().map(|&n| n as u32).collect();
        let vocab = masked["allowed"].1.len() / tokens.len();
        let mut golden = Self {
            layout: TreeLayout::sequences(&lengths).unwrap(),
            items: vec![],
            temperatures: vec![],
            words: vocab.div_ceil(32),
            table: vec![],
            rows: vec![],
            d_logprob: vec![],
            d_entropy: vec![],
            logprob: vec![],
            entropy: vec![],
            tokens,
        };
        for next in 1..golden.tokens.len() {
            if golden.layout.positions()[next] == 0 {
                continue;
            }
            let at = next - 1;
            let mask = golden.mask(&column("allowed")[at * vocab..(at + 1) * vocab]);
            let other = column("other")[at] as u32;
            for (target, weight, logprob, entropy) in [
                (golden.tokens[next], "weight", "logprob", 1.0),
                (other, "other_weight", "other_logprob", 0.0),
            ] {
                golden.items.push((at as u32, target));
                golden.rows.push(mask);
                golden.temperatures.push(column("temperature")[at]);
                golden.d_logprob.push(column(weight)[at]);
                golden
                    .d_entropy
                    .push(entropy * column("entropy_weight")[at]);
                golden.logprob.push(column(logprob)[at]);
                golden.entropy.push(column("entropy")[at]);
            }
        }
        golden
    }

    /// The index of a bit set that is made for a row.
    fn mask(&mut self, allowed: &[f32]) -> u32 {
        if allowed.iter().all(|&a| a == 1.0) {
            return Masks::ALL;
        }
        let start = self.table.len();
        self.table.resize(start + self.words, 0);
        for (token, _) in allowed.iter().enumerate().filter(|a| *a.1 == 1.0) {
            self.table[start + token / 32] |= 1 << (token % 32);
        }
        (start / self.words) as u32
    }

    fn masks(&self) -> Masks<'_> {
        Masks {
            words: self.words,
            table: &self.table,
            rows: &self.rows,
        }
    }
}

#[test]
fn allowed_tokens_give_the_log_probabilities_and_gradients_of_pytorch() {
    let (golden, reference) = (Golden::read(), reference());
    let params = tiny("llama").params;
    let model = TrainModel::new(params.config(), 256).unwrap();
    let weights = Weights::full(&params);
    for dev in devices() {
        for keep in [Keep::All, Keep::LayerInputs] {
            let (mut acts, mut grads) = (Activations::new(keep), Grads::of_params(params.layout()));
            model
                .forward(&dev, weights, &golden.tokens, &golden.layout, &mut acts)
                .unwrap();
            let (items, temperatures) = (&golden.items, &golden.temperatures);
            let masks = Some(golden.masks());
            let out = model
                .logprobs(&dev, weights, &mut acts, items, temperatures, masks, true)
                .unwrap();
            assert!(relative_error(out.logprob, &golden.logprob) < 1e-5);
            assert!(relative_error(out.entropy, &golden.entropy) < 1e-5);
            let outputs = OutputGrads {
                d_logprob: &golden.d_logprob,
                d_entropy: &golden.d_entropy,
                values: None,
            };
            model
                .backward(&dev, weights, &mut acts, outputs, &mut grads)
                .unwrap();
            for entry in params.layout().entries() {
                let expected = &reference[&format!("grad.{}", entry.name)].1;
                let error = relative_error(&grads.values()[entry.range()], expected);
                assert!(error < 2e-5, "{} {}: {error}", dev.kernels(), entry.name);
            }
        }
    }
}

/// Scores of a pass without gradients, which the reference and proximal policies make, and of ranked tokens.
#[test]
fn rankings_are_over_allowed_tokens_alone() {
    let golden = Golden::read();
    let params = tiny("llama").params;
    let dev = device();
    let (acts, scored) = scores(&golden, &params);
    let mut acts = acts;
    let model = TrainModel::new(params.config(), 256).unwrap();
    let rows: Vec<u32> = golden.items.iter().map(|item| item.0).collect();
    let (weights, masks) = (Weights::full(&params), Some(golden.masks()));
    let ranked = model
        .top(
            &dev,
            weights,
            &mut acts,
            &rows,
            &golden.temperatures,
            masks,
            97,
        )
        .unwrap();
    for (i, top) in ranked.iter().enumerate() {
        let masks = golden.masks();
        let allowed = (0..97).filter(|&id| masks.allows(i, id)).count();
        assert_eq!(top.len(), allowed);
        assert!(top.iter().all(|t| masks.allows(i, t.id)));
        let sum: f64 = top.iter().map(|t| f64::from(t.logprob).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{sum}");
        let own = top.iter().find(|t| t.id == golden.items[i].1).unwrap();
        assert!((own.logprob - scored[i]).abs() < 1e-5);
    }
}

fn scores(golden: &Golden, params: &Params) -> (Activations, Vec<f32>) {
    let model = TrainModel::new(params.config(), 256).unwrap();
    let (dev, weights) = (device(), Weights::full(params));
    let mut acts = Activations::new(Keep::Nothing);
    model
        .forward(&dev, weights, &golden.tokens, &golden.layout, &mut acts)
        .unwrap();
    let (items, masks) = (&golden.items, Some(golden.masks()));
    let out = model
        .logprobs(
            &dev,
            weights,
            &mut acts,
            items,
            &golden.temperatures,
            masks,
            false,
        )
        .unwrap();
    let logprob = out.logprob.to_vec();
    (acts, logprob)
}

#[test]
fn masks_that_bar_a_target_or_do_not_fit_are_refused() {
    let mut golden = Golden::read();
    let params = tiny("llama").params;
    let (mut acts, _) = scores(&golden, &params);
    let model = TrainModel::new(params.config(), 256).unwrap();
    let (dev, weights) = (device(), Weights::full(&params));
    let mut ask = |golden: &Golden| {
        let (items, masks) = (&golden.items, Some(golden.masks()));
        model
            .logprobs(
                &dev,
                weights,
                &mut acts,
                items,
                &golden.temperatures,
                masks,
                false,
            )
            .unwrap_err()
    };
    let item = golden
        .rows
        .iter()
        .position(|&row| row != Masks::ALL)
        .unwrap();
    let (row, target) = (golden.rows[item] as usize, golden.items[item].1);
    let word = row * golden.words + target as usize / 32;
    golden.table[word] ^= 1 << (target % 32);
    let error = ask(&golden);
    assert!(
        matches!(error, ForwardError::Barred { item: i, target: t } if (i, t) == (item, target)),
        "{error}"
    );
    golden.table[word] ^= 1 << (target % 32);
    golden.rows[item] = 1 << 20;
    assert!(matches!(ask(&golden), ForwardError::Barred { .. }));
    golden.rows.pop();
    assert!(matches!(ask(&golden), ForwardError::Length { .. }));
    golden.rows.push(Masks::ALL);
    golden.table.push(0);
    assert!(matches!(ask(&golden), ForwardError::State(_)));
}
