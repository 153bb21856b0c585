//! Distributions over only the allowed tokens, against f64 and against rows without a mask.

use super::*;

/// Bit sets and which row has which.
#[derive(Clone, Debug)]
pub(super) struct MaskTable {
    words: usize,
    table: Vec<u32>,
    rows: Vec<u32>,
}

impl MaskTable {
    /// No mask for `rows` rows of a vocabulary.
    fn none(rows: usize, vocab: usize) -> Self {
        Self {
            words: vocab.div_ceil(32),
            table: vec![],
            rows: vec![Masks::ALL; rows],
        }
    }

    /// Gives `row` a separate mask that allows `tokens`.
    fn allow(&mut self, row: usize, tokens: impl IntoIterator<Item = u32>) {
        self.rows[row] = (self.table.len() / self.words) as u32;
        let start = self.table.len();
        self.table.resize(start + self.words, 0);
        for token in tokens {
            self.table[start + token as usize / 32] |= 1 << (token % 32);
        }
    }

    pub(super) fn masks(&self) -> Masks<'_> {
        Masks {
            words: self.words,
            table: &self.table,
            rows: &self.rows,
        }
    }

    pub(super) fn of_rows(&self, rows: &[usize]) -> Self {
        Self {
            rows: rows.iter().map(|&row| self.rows[row]).collect(),
            ..self.clone()
        }
    }
}

/// `count` tokens of a vocabulary, spread over it, `target` among them.
fn some(vocab: usize, count: usize, target: u32, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..vocab as u32).filter(|&t| t != target).collect();
    let draws = random(vocab, seed);
    for i in (1..order.len()).rev() {
        let j = ((draws[i] + 1.0) / 2.0 * i as f32) as usize;
        order.swap(i, j.min(i));
    }
    order.truncate(count - 1);
    order.push(target);
    order
}

/// A case whose row `i` may be `counts[i]` tokens; 0: no mask.
fn masked(counts: &[usize], vocab: usize, dim: usize, seed: u64) -> Case {
    let mut case = Case::new(counts.len(), vocab, dim, 3.0, seed);
    let mut masks = MaskTable::none(counts.len(), vocab);
    for (row, &count) in counts.iter().enumerate().filter(|c| *c.1 > 0) {
        masks.allow(
            row,
            some(vocab, count, case.targets[row], seed + row as u64),
        );
    }
    case.masks = Some(masks);
    case.temperatures = mixed(counts.len());
    case
}

#[test]
fn any_number_of_allowed_tokens_agrees_with_f64() {
    let counts = [1, 2, 31, 32, 33, 49_151, 49_152, 0];
    let case = masked(&counts, 49_152, 24, 3);
    case.check(5);
    let n = counts.len();
    let (d_logprob, d_entropy) = (random(n, 7), random(n, 8));
    for kernels in KernelSet::available_f32() {
        let dev = Cpu::new(kernels, 2);
        let [logprob, _, entropy] = case.forward(&dev);
        assert_eq!((logprob[0], entropy[0]), (0.0, 0.0), "{kernels}: no choice");
        for (row, &count) in counts.iter().enumerate() {
            let alone = case.of_rows(|other| other == row);
            let of = |values: &[f32]| vec![values[row]];
            let (dx, dw) = alone.backward(&dev, &of(&d_logprob), &of(&d_entropy));
            let allowed = |token: usize| {
                let mask = case.masks.as_ref().unwrap().masks().of(row);
                mask.is_none_or(|mask| masks::allows(mask, token as u32))
            };
            // Gradients of `w` come on top of 0.5.
            let touched = dw.chunks(24).enumerate().filter(|(token, dw)| {
                let some = dw.iter().any(|&d| d != 0.5);
                assert!(
                    !some || allowed(*token),
                    "{kernels}: token {token} is barred"
                );
                some
            });
            let touched = touched.count();
            match count {
                1 => assert!(touched == 0 && dx.iter().all(|&d| d == 0.0), "{kernels}"),
                2..=33 => assert_eq!(touched, count, "{kernels}"),
                _ => assert!(touched > 33, "{kernels}"),
            }
        }
    }
}

/// The probabilities of all allowed tokens add up to 1.
#[test]
fn allowed_tokens_share_the_whole_probability() {
    for count in [1usize, 2, 31, 32, 33, 49_151, 49_152] {
        let case = masked(&[count], 49_152, 8, 11);
        let exact = exact(&case.input());
        let row = &exact.logits[0];
        let allowed: Vec<f32> = row
            .iter()
            .filter(|z| !z.is_nan())
            .map(|&z| z as f32)
            .collect();
        assert_eq!(allowed.len(), count);
        for kernels in KernelSet::available_f32() {
            let [_, lse, _] = case.forward(&Cpu::new(kernels, 2));
            let sum: f64 = allowed
                .iter()
                .map(|z| (f64::from(*z) - f64::from(lse[0])).exp())
                .sum();
            assert!(
                (sum - 1.0).abs() < 2e-5,
                "{kernels}: {count} tokens have {sum}"
            );
        }
    }
}

#[test]
fn a_mask_that_allows_all_changes_no_bit() {
    let n = 70;
    let mut plain = Case::new(n, 4600, 24, 2.0, 9);
    plain.temperatures = mixed(n);
    let mut all = Case::new(n, 4600, 24, 2.0, 9);
    all.temperatures = mixed(n);
    let mut masks = MaskTable::none(n, 4600);
    (0..n).for_each(|row| masks.allow(row, 0..4600));
    all.masks = Some(masks);
    let (d_logprob, d_entropy) = (random(n, 2), random(n, 3));
    for kernels in KernelSet::available_f32() {
        let dev = Cpu::new(kernels, 2);
        assert_eq!(plain.forward(&dev), all.forward(&dev), "{kernels}");
        let backward = |case: &Case| case.backward(&dev, &d_logprob, &d_entropy);
        assert_eq!(backward(&plain), backward(&all), "{kernels}");
    }
}

/// Whole sections and whole vectors barred, before, behind and between what is allowed.
#[test]
fn barred_sections_leave_no_trace() {
    let vocab = 3 * SECTION + 77;
    let mut case = Case::new(6, vocab, 16, 3.0, 4);
    let mut masks = MaskTable::none(6, vocab);
    let ranges = [
        0..5,
        SECTION..SECTION + 1,
        3 * SECTION + 70..3 * SECTION + 77,
        2 * SECTION - 3..2 * SECTION + 3,
        SECTION + 40..SECTION + 41,
    ];
    for (row, range) in ranges.into_iter().enumerate() {
        case.targets[row] = range.start as u32;
        masks.allow(row, range.map(|t| t as u32));
    }
    case.targets[5] = 17;
    masks.allow(5, (17..vocab as u32).step_by(SECTION));
    case.masks = Some(masks);
    case.check(6);
}

/// Rows do not depend on masks of others, on the number of threads, or on what was kept.
#[test]
fn rows_with_and_without_masks_are_those_of_each_alone() {
    let counts: Vec<usize> = (0..90).map(|row| [0, 7, 1, 2000, 40][row % 5]).collect();
    let case = masked(&counts, 2300, 24, 12);
    let (d_logprob, d_entropy) = (random(90, 1), random(90, 2));
    for kernels in KernelSet::available_f32() {
        let dev = Cpu::new(kernels, 1);
        let all = case.forward(&dev);
        assert_eq!(all, case.forward(&Cpu::new(kernels, 3)));
        let one = case.backward(&dev, &d_logprob, &d_entropy);
        let three = case.backward(&Cpu::new(kernels, 3), &d_logprob, &d_entropy);
        assert_eq!(one, three);
        for row in 0..5 {
            let alone = case.of_rows(|other| other == row).forward(&dev);
            let of_all = all.each_ref().map(|column| column[row]);
            assert_eq!(alone.map(|v| v[0]), of_all);
        }
        let mut scratch = LogprobScratch::keeping(usize::MAX);
        let [mut logprob, mut lse, mut entropy] = [(); 3].map(|()| vec![f32::NAN; 90]);
        let out = LogprobOut {
            logprob: &mut logprob,
            lse: &mut lse,
            entropy: Some(&mut entropy),
        };
        linear_logprob_forward(&dev, &case.input(), out, &mut scratch);
        let grad = LogprobGrad {
            lse: &lse,
            d_logprob: &d_logprob,
            entropy: Some((&entropy, &d_entropy)),
        };
        let (mut dx, mut dw) = (vec![f32::NAN; 90 * 24], vec![0.5; 2300 * 24]);
        let (input, head) = (case.input(), of_weights(Some(&mut dw)));
        linear_logprob_backward(&dev, &input, grad, &mut dx, head, &mut scratch);
        assert_eq!((dx, dw), one, "kept");
    }
}

/// An engine's results from logits in memory have the bits of training, masked or not.
#[test]
fn logits_in_memory_have_the_bits_of_the_fused_head() {
    let counts = [0, 1, 2, 33, 4000, 4601];
    let case = masked(&counts, 4601, 40, 21);
    for kernels in KernelSet::available_f32() {
        let dev = Cpu::new(kernels, 2);
        let [logprob, lse, _] = case.forward(&dev);
        let mut logits = vec![0.0; counts.len() * 4601];
        dev.matmul_nt(
            Mat::new(&case.x, counts.len(), 40),
            Mat::new(&case.w, 4601, 40),
            crate::MatMut::new(&mut logits, counts.len(), 4601),
            false,
        );
        for (row, logits) in logits.chunks_mut(4601).enumerate() {
            let input = case.input();
            let (mask, target) = (input.mask(row), case.targets[row] as usize);
            let softmax = SoftmaxRow::new(&dev, logits, case.temperatures[row], mask);
            assert_eq!(
                softmax.logprob(logits[target]),
                logprob[row],
                "{kernels} {row}"
            );
            assert_eq!(softmax.lse(), lse[row], "{kernels} {row}");
            let Some(mask) = mask else { continue };
            // Logits of barred tokens are ignored.
            for (token, logit) in logits.iter_mut().enumerate() {
                if !masks::allows(mask, token as u32) {
                    *logit = [f32::NAN, f32::INFINITY, 1e38][token % 3];
                }
            }
            let blind = SoftmaxRow::new(&dev, logits, case.temperatures[row], Some(mask));
            assert_eq!(blind, softmax, "{kernels} {row}");
        }
    }
}

#[test]
#[should_panic(expected = "row 1 asks for token 5, which its mask bars")]
fn barred_targets_are_refused() {
    let mut case = Case::new(2, 40, 4, 1.0, 1);
    case.targets = vec![3, 5];
    let mut masks = MaskTable::none(2, 40);
    masks.allow(1, [4, 6]);
    case.masks = Some(masks);
    case.forward(&Cpu::new(KernelSet::Portable, 1));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    #[test]
    fn any_masks_agree_with_f64(
        shares in prop::collection::vec(0f32..1.0, 1..60),
        vocab in 1usize..400,
        dim in prop::sample::select(vec![1usize, 5, 16, 24, 32]),
        seed in 1u64..1000,
    ) {
        let count = |share: &f32| (share * share * vocab as f32) as usize;
        let counts: Vec<usize> = shares.iter().map(count).collect();
        masked(&counts, vocab, dim, seed).check(seed);
    }
}
