//! Heads with a low-rank addition, against the dense head that they are.

use super::*;

const RANK: usize = 3;

/// A case with adapters of its head.
struct Adapted {
    case: Case,
    a: Vec<f32>,
    b: Vec<f32>,
    scale: f32,
    merged: bool,
}

/// Results of both passes.
#[derive(Debug, PartialEq)]
struct Results {
    logprob: Vec<f32>,
    lse: Vec<f32>,
    entropy: Vec<f32>,
    dx: Vec<f32>,
    /// Added to 0.5 each.
    da: Vec<f32>,
    db: Vec<f32>,
}

impl Adapted {
    fn new(n: usize, vocab: usize, dim: usize, seed: u64) -> Self {
        let mut case = Case::new(n, vocab, dim, 2.0, seed);
        case.temperatures = mixed(n);
        Self {
            case,
            a: random(RANK * dim, seed + 10),
            b: random(vocab * RANK, seed + 11),
            scale: 0.4,
            merged: false,
        }
    }

    /// The same case with products that are added, and with sections that are merged.
    fn both(n: usize, vocab: usize, dim: usize, seed: u64) -> [Self; 2] {
        [false, true].map(|merged| Self {
            merged,
            ..Self::new(n, vocab, dim, seed)
        })
    }

    fn input(&self) -> LinearLogprob<'_> {
        let low_rank = LowRank {
            a: &self.a,
            b: &self.b,
            rank: RANK,
            scale: self.scale,
            merged: self.merged,
        };
        LinearLogprob {
            low_rank: Some(low_rank),
            ..self.case.input()
        }
    }

    /// The same with the head `w + scale · b a`, rounded once.
    fn dense(&self) -> Case {
        let dim = self.case.dim;
        let mut dense = self.case.of_rows(|_| true);
        for (token, row) in dense.w.chunks_mut(dim).enumerate() {
            for (d, w) in row.iter_mut().enumerate() {
                let product =
                    |r: usize| f64::from(self.b[token * RANK + r]) * f64::from(self.a[r * dim + d]);
                let sum: f64 = (0..RANK).map(product).sum();
                *w = (f64::from(*w) + f64::from(self.scale) * sum) as f32;
            }
        }
        dense
    }

    fn run(
        &self,
        dev: &Cpu,
        d_logprob: &[f32],
        d_entropy: &[f32],
        scratch: &mut LogprobScratch,
    ) -> Results {
        let (n, input) = (self.case.targets.len(), self.input());
        let [mut logprob, mut lse, mut entropy] = [(); 3].map(|()| vec![f32::NAN; n]);
        let out = LogprobOut {
            logprob: &mut logprob,
            lse: &mut lse,
            entropy: Some(&mut entropy),
        };
        linear_logprob_forward(dev, &input, out, scratch);
        let grad = LogprobGrad {
            lse: &lse,
            d_logprob,
            entropy: Some((&entropy, d_entropy)),
        };
        let mut dx = vec![f32::NAN; self.case.x.len()];
        let (mut da, mut db) = (vec![0.5; self.a.len()], vec![0.5; self.b.len()]);
        let head = HeadGrads {
            w: None,
            low_rank: Some(LowRankGrads {
                a: &mut da,
                b: &mut db,
            }),
        };
        linear_logprob_backward(dev, &input, grad, &mut dx, head, scratch);
        Results {
            logprob,
            lse,
            entropy,
            dx,
            da,
            db,
        }
    }
}

/// With `dW` the gradient of the dense head: `dA = scale · Bᵀ dW`, `dB = scale · dW Aᵀ`, all in f64.
fn exact_adapter_gradient(adapted: &Adapted, dw: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (dim, scale) = (adapted.case.dim, f64::from(adapted.scale));
    let (mut da, mut db) = (vec![0.5; adapted.a.len()], vec![0.5; adapted.b.len()]);
    for (token, row) in dw.chunks(dim).enumerate() {
        for (d, g) in row.iter().enumerate() {
            for r in 0..RANK {
                da[r * dim + d] += scale * g * f64::from(adapted.b[token * RANK + r]);
                db[token * RANK + r] += scale * g * f64::from(adapted.a[r * dim + d]);
            }
        }
    }
    (da, db)
}

#[test]
fn low_rank_additions_are_those_of_a_dense_head() {
    let shapes = [(5, 7, 4), (70, 2300, 24), (9, 97, 65), (0, 10, 8)];
    let cases = shapes.map(|(n, vocab, dim)| Adapted::both(n, vocab, dim, 5));
    for adapted in cases.into_iter().flatten() {
        let n = adapted.case.targets.len();
        let dense = adapted.dense();
        let (d_logprob, d_entropy) = (random(n, 2), random(n, 3));
        let expected = exact(&dense.input());
        let (dx, dw) = exact_gradient(&dense.input(), &d_logprob, &d_entropy);
        let (da, db) = exact_adapter_gradient(&adapted, &dw);
        for kernels in KernelSet::available_f32() {
            let dev = Cpu::new(kernels, 2);
            let scratch = &mut LogprobScratch::default();
            let found = adapted.run(&dev, &d_logprob, &d_entropy, scratch);
            assert_close("logprob", &found.logprob, &expected.logprob, 5e-6);
            assert_close("lse", &found.lse, &expected.lse, 5e-6);
            assert_close("entropy", &found.entropy, &expected.entropy, 1e-5);
            assert_close("dx", &found.dx, &dx, 5e-5);
            assert_close("da", &found.da, &da, 5e-5);
            assert_close("db", &found.db, &db, 5e-5);
        }
        // The addition matters.
        let plain = exact(&adapted.case.input());
        let moved = |(a, b): (&f64, &f64)| (a - b).abs() > 1e-3;
        let mut pairs = plain.logprob.iter().zip(&expected.logprob);
        assert!(n == 0 || pairs.any(moved));
    }
}

/// Both gradients of the head, and none of them, change nothing in the gradient of the rows.
#[test]
fn gradients_of_the_head_are_computed_on_demand() {
    for adapted in Adapted::both(40, 2100, 16, 8) {
        let (d_logprob, d_entropy) = (random(40, 2), random(40, 3));
        let dev = Cpu::new(KernelSet::detect_f32(), 2);
        let scratch = &mut LogprobScratch::default();
        let all = adapted.run(&dev, &d_logprob, &d_entropy, scratch);
        let grad = LogprobGrad {
            lse: &all.lse,
            d_logprob: &d_logprob,
            entropy: Some((&all.entropy, &d_entropy)),
        };
        let (mut dx, mut dw) = (vec![f32::NAN; 40 * 16], vec![0.0; 2100 * 16]);
        let (input, none) = (adapted.input(), HeadGrads::default());
        linear_logprob_backward(&dev, &input, grad, &mut dx, none, scratch);
        assert_eq!(dx, all.dx);
        let head = of_weights(Some(&mut dw));
        linear_logprob_backward(&dev, &input, grad, &mut dx, head, scratch);
        assert_eq!(dx, all.dx);
        let (_, expected) = exact_gradient(&adapted.dense().input(), &d_logprob, &d_entropy);
        assert_close("dw", &dw, &expected, 5e-5);
    }
}

/// Neither other rows, nor threads, nor kept logits change a bit of a row; gradients of the addition are sums
/// over rows, and do not depend on threads and kept logits either.
#[test]
fn rows_with_a_low_rank_addition_do_not_depend_on_others() {
    let (n, dim) = (90, 33);
    let (d_logprob, d_entropy) = (random(n, 2), random(n, 3));
    let run = |adapted: &Adapted, dev: &Cpu, scratch: &mut LogprobScratch| {
        let n = adapted.case.targets.len();
        adapted.run(dev, &d_logprob[..n], &d_entropy[..n], scratch)
    };
    let sets = KernelSet::available_f32().into_iter();
    for (kernels, adapted) in sets.flat_map(|k| Adapted::both(n, 2300, dim, 6).map(|a| (k, a))) {
        let (one, three) = (Cpu::new(kernels, 1), Cpu::new(kernels, 3));
        let all = run(&adapted, &one, &mut LogprobScratch::default());
        assert_eq!(all, run(&adapted, &three, &mut LogprobScratch::default()));
        for values in [30 * 2300, usize::MAX] {
            let mut keeping = LogprobScratch::keeping(values);
            assert_eq!(all, run(&adapted, &three, &mut keeping), "{values} kept");
            assert!(keeping.bytes() > 4 * 2300 * 20, "{}", keeping.bytes());
        }
        let first = Adapted {
            case: adapted.case.of_rows(|row| row == 0),
            ..adapted
        };
        let alone = run(&first, &three, &mut LogprobScratch::default());
        assert_eq!(alone.logprob[0], all.logprob[0]);
        assert_eq!(alone.lse[0], all.lse[0]);
        assert_eq!(alone.entropy[0], all.entropy[0]);
        assert_eq!(alone.dx, all.dx[..dim]);
    }
}

/// Fresh adapters, whose B is zero, give the bits of the plain head; their A has no gradient yet.
#[test]
fn an_addition_of_zero_gives_the_bits_of_none() {
    for mut adapted in Adapted::both(50, 2200, 24, 7) {
        adapted.b.fill(0.0);
        let (d_logprob, d_entropy) = (random(50, 2), random(50, 3));
        for kernels in KernelSet::available_f32() {
            let dev = Cpu::new(kernels, 2);
            let plain = adapted.case.forward(&dev);
            let scratch = &mut LogprobScratch::default();
            let found = adapted.run(&dev, &d_logprob, &d_entropy, scratch);
            assert_eq!([found.logprob, found.lse, found.entropy], plain);
            assert!(found.da.iter().all(|&g| g == 0.5));
            assert!(found.db.iter().any(|&g| g != 0.5));
        }
    }
}

/// Logits in memory, as engines make them, have the bits of the fused head: with products that are added, and
/// with weights that were merged as a whole.
#[test]
fn logits_of_adapted_engines_have_the_bits_of_the_fused_head() {
    let (n, vocab, dim) = (11, 4601, 40);
    let zeros = vec![0.0; n];
    let sets = KernelSet::available_f32().into_iter();
    for (kernels, adapted) in sets.flat_map(|k| Adapted::both(n, vocab, dim, 9).map(|a| (k, a))) {
        let dev = Cpu::new(kernels, 2);
        let scratch = &mut LogprobScratch::default();
        let fused = adapted.run(&dev, &zeros, &zeros, scratch);
        let (x, mut w) = (Mat::new(&adapted.case.x, n, dim), adapted.case.w.clone());
        let (mut logits, mut inner) = (vec![0.0; n * vocab], vec![0.0; n * RANK]);
        let a = Mat::new(&adapted.a, RANK, dim);
        if adapted.merged {
            let scaled: Vec<f32> = adapted.b.iter().map(|b| b * adapted.scale).collect();
            let scaled = Mat::new(&scaled, vocab, RANK);
            dev.matmul_nn(scaled, a, MatMut::new(&mut w, vocab, dim), true);
        }
        let y = MatMut::new(&mut logits, n, vocab);
        dev.matmul_nt(x, Mat::new(&w, vocab, dim), y, false);
        if !adapted.merged {
            dev.matmul_nt(x, a, MatMut::new(&mut inner, n, RANK), false);
            inner.iter_mut().for_each(|v| *v *= adapted.scale);
            let inner = Mat::new(&inner, n, RANK);
            let b = Mat::new(&adapted.b, vocab, RANK);
            dev.matmul_nt(inner, b, MatMut::new(&mut logits, n, vocab), true);
        }
        let mut again = vec![f32::NAN; n * vocab];
        let low_rank = adapted.input().low_rank;
        head_logits(&dev, x, &adapted.case.w, low_rank, &mut again, scratch);
        assert_eq!(again, logits);
        for (row, logits) in logits.chunks(vocab).enumerate() {
            let softmax = SoftmaxRow::new(&dev, logits, adapted.case.temperatures[row], None);
            let target = adapted.case.targets[row] as usize;
            assert_eq!(softmax.logprob(logits[target]), fused.logprob[row]);
            assert_eq!(softmax.lse(), fused.lse[row]);
        }
    }
}

#[test]
#[should_panic(
    expected = "a low-rank addition to [7, 4] has a [3, 4] and b [7, 3], found 12 and 18 values"
)]
fn additions_of_another_shape_are_refused() {
    let mut adapted = Adapted::new(2, 7, 4, 1);
    adapted.b.truncate(18);
    let dev = Cpu::new(KernelSet::Portable, 1);
    adapted.run(&dev, &[0.0; 2], &[0.0; 2], &mut LogprobScratch::default());
}

#[test]
#[should_panic(expected = "gradients of a low-rank addition need one in the input")]
fn gradients_of_no_addition_are_refused() {
    let case = Case::new(1, 7, 4, 1.0, 1);
    let dev = Cpu::new(KernelSet::Portable, 1);
    let (mut da, mut db) = (vec![0.0; 12], vec![0.0; 21]);
    let head = HeadGrads {
        w: None,
        low_rank: Some(LowRankGrads {
            a: &mut da,
            b: &mut db,
        }),
    };
    let [_, lse, _] = case.forward(&dev);
    let grad = LogprobGrad {
        lse: &lse,
        d_logprob: &[1.0],
        entropy: None,
    };
    let scratch = &mut LogprobScratch::default();
    linear_logprob_backward(&dev, &case.input(), grad, &mut [0.0; 4], head, scratch);
}
