use proptest::prelude::*;

use super::*;
use crate::attention::tests::random;
use crate::cpu::KernelSet;

mod low_rank;
mod masked;

use masked::MaskTable;

/// Destinations of a plain head's gradient.
fn of_weights(w: Option<&mut [f32]>) -> HeadGrads<'_> {
    HeadGrads { w, low_rank: None }
}

/// Everything in f64: log-probabilities, log-sum-exps and entropies.
struct Exact {
    /// NaN where barred.
    logits: Vec<Vec<f64>>,
    logprob: Vec<f64>,
    lse: Vec<f64>,
    entropy: Vec<f64>,
}

fn exact(input: &LinearLogprob<'_>) -> Exact {
    let dot = |x: &[f32], w: &[f32]| -> f64 {
        x.iter()
            .zip(w)
            .map(|(&a, &b)| f64::from(a) * f64::from(b))
            .sum()
    };
    let mut out = Exact {
        logits: vec![],
        logprob: vec![],
        lse: vec![],
        entropy: vec![],
    };
    let rows = input.x.chunks_exact(input.dim).zip(input.targets);
    for (row, (x, &target)) in rows.enumerate() {
        let z: Vec<f64> = input
            .w
            .chunks_exact(input.dim)
            .map(|w| dot(x, w) / f64::from(input.temperature(row)))
            .collect();
        // Barred tokens are not there at all.
        let allowed = |token: usize| {
            let mask = input.mask(row);
            mask.is_none_or(|mask| masks::allows(mask, token as u32))
        };
        let kept = || z.iter().enumerate().filter(|t| allowed(t.0)).map(|t| *t.1);
        let max = kept().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + kept().map(|z| (z - max).exp()).sum::<f64>().ln();
        out.logprob.push(z[target as usize] - lse);
        out.lse.push(lse);
        out.entropy
            .push(kept().map(|z| (z - lse).exp() * (lse - z)).sum());
        let logit = |(token, &z): (usize, &f64)| if allowed(token) { z } else { f64::NAN };
        out.logits.push(z.iter().enumerate().map(logit).collect());
    }
    out
}

/// Gradients of `sum(logprob d_logprob + entropy d_entropy)`: of `x`, and of `w`.
fn exact_gradient(
    input: &LinearLogprob<'_>,
    d_logprob: &[f32],
    d_entropy: &[f32],
) -> (Vec<f64>, Vec<f64>) {
    let exact = exact(input);
    let (mut dx, mut dw) = (vec![0.0; input.x.len()], vec![0.0; input.w.len()]);
    for (row, &target) in input.targets.iter().enumerate() {
        for (token, z) in exact.logits[row].iter().enumerate() {
            if z.is_nan() {
                continue;
            }
            let log_p = z - exact.lse[row];
            let hit = f64::from(u8::from(token == target as usize));
            let dz = f64::from(d_logprob[row]) * (hit - log_p.exp())
                - f64::from(d_entropy[row]) * log_p.exp() * (log_p + exact.entropy[row]);
            for d in 0..input.dim {
                let (x, w) = (row * input.dim + d, token * input.dim + d);
                let dz = dz / f64::from(input.temperature(row));
                dx[x] += dz * f64::from(input.w[w]);
                dw[w] += dz * f64::from(input.x[x]);
            }
        }
    }
    (dx, dw)
}

#[track_caller]
fn assert_close(what: &str, fast: &[f32], exact: &[f64], tolerance: f64) {
    assert_eq!(fast.len(), exact.len());
    let scale = exact.iter().fold(1.0f64, |m, e| m.max(e.abs()));
    for (i, (f, e)) in fast.iter().zip(exact).enumerate() {
        let error = (f64::from(*f) - e).abs();
        assert!(
            error <= tolerance * scale,
            "{what}[{i}] is {f}, expected {e}"
        );
    }
}

/// Owned inputs of one case.
struct Case {
    x: Vec<f32>,
    w: Vec<f32>,
    targets: Vec<u32>,
    dim: usize,
    temperatures: Vec<f32>,
    masks: Option<MaskTable>,
}

/// Three temperatures by turns.
fn mixed(n: usize) -> Vec<f32> {
    (0..n).map(|row| [0.7, 1.0, 1.2][row % 3]).collect()
}

impl Case {
    /// Logits of standard deviation `spread`.
    fn new(n: usize, vocab: usize, dim: usize, spread: f32, seed: u64) -> Self {
        let mut x = random(n * dim, seed);
        let scale = spread * 3.0 / (dim as f32).sqrt();
        x.iter_mut().for_each(|x| *x *= scale);
        let targets = (0..n)
            .map(|i| (i * 31 + seed as usize) as u32 % vocab as u32)
            .collect();
        Self {
            x,
            w: random(vocab * dim, seed + 1),
            targets,
            dim,
            temperatures: vec![],
            masks: None,
        }
    }

    /// Only the rows of `kept`.
    fn of_rows(&self, kept: impl Fn(usize) -> bool) -> Self {
        let rows: Vec<usize> = (0..self.targets.len()).filter(|&row| kept(row)).collect();
        let x = |&row: &usize| self.x[row * self.dim..(row + 1) * self.dim].to_vec();
        let temperature = |&row: &usize| self.input().temperature(row);
        Self {
            x: rows.iter().flat_map(x).collect(),
            w: self.w.clone(),
            targets: rows.iter().map(|&row| self.targets[row]).collect(),
            dim: self.dim,
            temperatures: rows.iter().map(temperature).collect(),
            masks: self.masks.as_ref().map(|masks| masks.of_rows(&rows)),
        }
    }

    fn input(&self) -> LinearLogprob<'_> {
        LinearLogprob {
            x: &self.x,
            w: &self.w,
            low_rank: None,
            dim: self.dim,
            targets: &self.targets,
            temperatures: &self.temperatures,
            masks: self.masks.as_ref().map(MaskTable::masks),
        }
    }

    fn forward(&self, dev: &Cpu) -> [Vec<f32>; 3] {
        let n = self.targets.len();
        let [mut logprob, mut lse, mut entropy] = [(); 3].map(|()| vec![f32::NAN; n]);
        let out = LogprobOut {
            logprob: &mut logprob,
            lse: &mut lse,
            entropy: Some(&mut entropy),
        };
        linear_logprob_forward(dev, &self.input(), out, &mut LogprobScratch::default());
        [logprob, lse, entropy]
    }

    fn backward(&self, dev: &Cpu, d_logprob: &[f32], d_entropy: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let [_, lse, entropy] = self.forward(dev);
        let grad = LogprobGrad {
            lse: &lse,
            d_logprob,
            entropy: Some((&entropy, d_entropy)),
        };
        let mut dx = vec![f32::NAN; self.x.len()];
        let mut dw = vec![0.5; self.w.len()];
        let scratch = &mut LogprobScratch::default();
        let head = of_weights(Some(&mut dw));
        linear_logprob_backward(dev, &self.input(), grad, &mut dx, head, scratch);
        let mut only_dx = vec![f32::NAN; self.x.len()];
        let head = HeadGrads::default();
        linear_logprob_backward(dev, &self.input(), grad, &mut only_dx, head, scratch);
        assert_eq!(dx, only_dx);
        (dx, dw)
    }

    fn check(&self, seed: u64) {
        let n = self.targets.len();
        let (d_logprob, d_entropy) = (random(n, seed + 2), random(n, seed + 3));
        let exact = exact(&self.input());
        let (dx, mut dw) = exact_gradient(&self.input(), &d_logprob, &d_entropy);
        dw.iter_mut().for_each(|g| *g += 0.5);
        for kernels in KernelSet::available_f32() {
            let dev = Cpu::new(kernels, 2);
            let [logprob, lse, entropy] = self.forward(&dev);
            // Products of 48 terms that nearly cancel are off by 2e-6 about once in 80,000 shapes.
            assert_close("logprob", &logprob, &exact.logprob, 4e-6);
            assert_close("lse", &lse, &exact.lse, 4e-6);
            assert_close("entropy", &entropy, &exact.entropy, 5e-6);
            let (fast_dx, fast_dw) = self.backward(&dev, &d_logprob, &d_entropy);
            assert_close("dx", &fast_dx, &dx, 2e-5);
            assert_close("dw", &fast_dw, &dw, 2e-5);
        }
    }
}

#[test]
fn the_formula_agrees_with_finite_differences() {
    let mut case = Case::new(3, 7, 4, 1.0, 1);
    case.temperatures = mixed(3);
    let (d_logprob, d_entropy) = (random(3, 2), random(3, 3));
    let loss = |case: &Case| {
        let exact = exact(&case.input());
        let parts = |values: &[f64], d: &[f32]| -> f64 {
            values.iter().zip(d).map(|(v, &d)| v * f64::from(d)).sum()
        };
        parts(&exact.logprob, &d_logprob) + parts(&exact.entropy, &d_entropy)
    };
    let (dx, dw) = exact_gradient(&case.input(), &d_logprob, &d_entropy);
    let step = 1.0 / 1024.0;
    for i in 0..dx.len() + dw.len() {
        let mut at = |step: f32| {
            let value = if i < dx.len() {
                &mut case.x[i]
            } else {
                &mut case.w[i - dx.len()]
            };
            let kept = *value;
            *value += step;
            let moved = f64::from(*value);
            let loss = loss(&case);
            let value = if i < dx.len() {
                &mut case.x[i]
            } else {
                &mut case.w[i - dx.len()]
            };
            *value = kept;
            (loss, moved)
        };
        let ((high, right), (low, left)) = (at(step), at(-step));
        let numeric = (high - low) / (right - left);
        let g = if i < dx.len() {
            dx[i]
        } else {
            dw[i - dx.len()]
        };
        assert!(
            (numeric - g).abs() < 1e-5,
            "gradient {i} is {g}, differences give {numeric}"
        );
    }
}

#[test]
fn a_large_vocabulary_agrees_with_f64() {
    let case = Case::new(5, 49_152, 64, 4.0, 8);
    let exact = exact(&case.input());
    for kernels in KernelSet::available_f32() {
        let [logprob, lse, entropy] = case.forward(&Cpu::new(kernels, 2));
        assert_close("logprob", &logprob, &exact.logprob, 1e-6);
        assert_close("lse", &lse, &exact.lse, 1e-6);
        assert_close("entropy", &entropy, &exact.entropy, 1e-6);
    }
}

#[test]
fn long_hidden_states_stay_within_tolerance() {
    let case = Case::new(2, 300, 4096, 4.0, 8);
    let exact = exact(&case.input());
    let [logprob, ..] = case.forward(&Cpu::new(KernelSet::detect_f32(), 1));
    for (f, e) in logprob.iter().zip(&exact.logprob) {
        assert!((f64::from(*f) - e).abs() < 1e-5, "{f} and {e}");
    }
}

#[test]
fn a_row_does_not_depend_on_others_or_on_threads() {
    let mut case = Case::new(101, 700, 33, 3.0, 5);
    case.temperatures = mixed(101);
    for kernels in KernelSet::available_f32() {
        let all = case.forward(&Cpu::new(kernels, 1));
        assert_eq!(all, case.forward(&Cpu::new(kernels, 3)));
        for row in [0, 50, 100] {
            let alone = case.of_rows(|other| other == row);
            let alone = alone.forward(&Cpu::new(kernels, 2));
            assert_eq!(alone.map(|v| v[0]), [all[0][row], all[1][row], all[2][row]]);
        }
        let (d_logprob, d_entropy) = (random(101, 1), random(101, 2));
        let one = case.backward(&Cpu::new(kernels, 1), &d_logprob, &d_entropy);
        assert_eq!(
            one,
            case.backward(&Cpu::new(kernels, 3), &d_logprob, &d_entropy)
        );
    }
}

#[test]
fn rows_without_gradient_are_left_out() {
    let case = Case::new(60, 90, 16, 2.0, 3);
    let dev = Cpu::new(KernelSet::detect_f32(), 2);
    let zeros = vec![0.0; 60];
    let mut d_logprob = zeros.clone();
    let (dx, dw) = case.backward(&dev, &d_logprob, &zeros);
    assert!(dx.iter().all(|&d| d == 0.0) && dw.iter().all(|&d| d == 0.5));
    d_logprob[17] = 1.5;
    let (dx, dw) = case.backward(&dev, &d_logprob, &zeros);
    let (exact_dx, mut exact_dw) = exact_gradient(&case.input(), &d_logprob, &zeros);
    exact_dw.iter_mut().for_each(|g| *g += 0.5);
    assert_close("dx", &dx, &exact_dx, 1e-5);
    assert_close("dw", &dw, &exact_dw, 1e-5);
    assert!(dx[..17 * 16].iter().all(|&d| d == 0.0));
}

#[test]
fn several_sections_and_no_rows_work() {
    // Several blocks of rows and two sections.
    let mut case = Case::new(4400, 2100, 8, 1.0, 4);
    case.temperatures = mixed(4400);
    let (d_logprob, d_entropy) = (random(4400, 1), random(4400, 2));
    let dev = Cpu::new(KernelSet::detect_f32(), 2);
    let (dx, dw) = case.backward(&dev, &d_logprob, &d_entropy);
    let (exact_dx, mut exact_dw) = exact_gradient(&case.input(), &d_logprob, &d_entropy);
    exact_dw.iter_mut().for_each(|g| *g += 0.5);
    assert_close("dx", &dx, &exact_dx, 1e-5);
    assert_close("dw", &dw, &exact_dw, 1e-5);
    Case::new(0, 10, 8, 1.0, 4).check(1);
}

/// Logits that are kept change no bit, whether all rows have them, some or none, and are not taken for
/// those of another pass.
#[test]
fn kept_logits_change_nothing() {
    let (n, vocab) = (130, 2500);
    let mut case = Case::new(n, vocab, 24, 2.0, 6);
    case.temperatures = mixed(n);
    let other = Case::new(n, vocab, 24, 2.0, 60);
    let dev = Cpu::new(KernelSet::detect_f32(), 2);
    let mut d_logprob = random(n, 2);
    let d_entropy = vec![0.0; n];
    for sparse in [false, true] {
        if sparse {
            d_logprob[20..].fill(0.0);
        }
        let expected = case.backward(&dev, &d_logprob, &d_entropy);
        for values in [0, 70 * vocab, n * vocab] {
            let mut scratch = LogprobScratch::keeping(values);
            let [mut logprob, mut lse] = [(); 2].map(|()| vec![0.0; n]);
            let mut forward = |case: &Case, scratch: &mut LogprobScratch| {
                let out = LogprobOut {
                    logprob: &mut logprob,
                    lse: &mut lse,
                    entropy: None,
                };
                linear_logprob_forward(&dev, &case.input(), out, scratch);
                lse.clone()
            };
            let lse = forward(&case, &mut scratch);
            let grad = LogprobGrad {
                lse: &lse,
                d_logprob: &d_logprob,
                entropy: None,
            };
            let backward = |scratch: &mut LogprobScratch| {
                let (mut dx, mut dw) = (vec![f32::NAN; n * 24], vec![0.5; vocab * 24]);
                let (input, head) = (case.input(), of_weights(Some(&mut dw)));
                linear_logprob_backward(&dev, &input, grad, &mut dx, head, scratch);
                (dx, dw)
            };
            assert_eq!(backward(&mut scratch), expected, "{values} kept");
            assert_eq!(backward(&mut scratch), expected, "used twice");
            forward(&other, &mut scratch);
            assert_eq!(backward(&mut scratch), expected, "of another pass");
        }
    }
}

#[test]
#[should_panic(expected = "row 1 asks for token 7 of 7")]
fn targets_beyond_the_vocabulary_are_refused() {
    let mut case = Case::new(2, 7, 4, 1.0, 1);
    case.targets[1] = 7;
    case.forward(&Cpu::new(KernelSet::Portable, 1));
}

/// Ones spelled out give the bits of none at all.
#[test]
fn temperature_one_is_the_plain_model() {
    let plain = Case::new(70, 2300, 24, 2.0, 9);
    let mut ones = Case::new(70, 2300, 24, 2.0, 9);
    ones.temperatures = vec![1.0; 70];
    let (d_logprob, d_entropy) = (random(70, 2), random(70, 3));
    for kernels in KernelSet::available_f32() {
        let dev = Cpu::new(kernels, 2);
        assert_eq!(plain.forward(&dev), ones.forward(&dev));
        let backward = |case: &Case| case.backward(&dev, &d_logprob, &d_entropy);
        assert_eq!(backward(&plain), backward(&ones));
    }
}

/// The gradient of a batch that mixes temperatures is the sum of those of its parts, each of one temperature.
#[test]
fn mixed_temperatures_are_the_sum_of_their_parts() {
    let n = 120;
    let mut case = Case::new(n, 2300, 24, 2.0, 10);
    case.temperatures = mixed(n);
    let (d_logprob, d_entropy) = (random(n, 2), random(n, 3));
    for kernels in KernelSet::available_f32() {
        let dev = Cpu::new(kernels, 2);
        let (dx, dw) = case.backward(&dev, &d_logprob, &d_entropy);
        let mut sum = vec![0.5f64; dw.len()];
        for (part, temperature) in [0.7, 1.0, 1.2].into_iter().enumerate() {
            let of = |values: &[f32]| -> Vec<f32> {
                values.iter().copied().skip(part).step_by(3).collect()
            };
            let rows = case.of_rows(|row| row % 3 == part);
            assert_eq!(rows.temperatures, vec![temperature; n / 3]);
            let (part_dx, part_dw) = rows.backward(&dev, &of(&d_logprob), &of(&d_entropy));
            let whole: Vec<&[f32]> = dx.chunks(24).skip(part).step_by(3).collect();
            assert_eq!(part_dx, whole.concat(), "rows at {temperature}");
            for (sum, part) in sum.iter_mut().zip(part_dw) {
                *sum += f64::from(part) - 0.5;
            }
        }
        assert_close("dw", &dw, &sum, 1e-6);
    }
}

#[test]
#[should_panic(expected = "temperature of row 1 is 0: it has to be above 0 and finite")]
fn temperature_zero_is_refused() {
    let case = Case {
        temperatures: vec![1.0, 0.0],
        ..Case::new(2, 7, 4, 1.0, 1)
    };
    case.forward(&Cpu::new(KernelSet::Portable, 1));
}

#[test]
#[should_panic(expected = "temperatures holds 1 values, the input asks for 2")]
fn temperatures_of_other_rows_are_refused() {
    let case = Case {
        temperatures: vec![1.0],
        ..Case::new(2, 7, 4, 1.0, 1)
    };
    case.forward(&Cpu::new(KernelSet::Portable, 1));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_shape_agrees_with_f64(
        n in 0usize..120,
        vocab in 1usize..400,
        dim in prop::sample::select(vec![1usize, 5, 16, 24, 32, 48]),
        temperatures in prop::collection::vec(0.5f32..2.0, 120),
        seed in 1u64..1000,
    ) {
        let temperatures = temperatures[..n].to_vec();
        let case = Case { temperatures, ..Case::new(n, vocab, dim, 3.0, seed) };
        case.check(seed);
    }
}
