//! Products on AMX tiles: the same machine code emulated and, if there is some, on hardware. Results are
//! compared bit by bit with the model, and within stated bounds with `f32` operators and with f64.

#![expect(unsafe_code, reason = "one instruction by itself")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::arch::asm;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use sinew_amx_emulator::{On, ROW_BYTES, ROWS, Tiles};
use sinew_tensor::amx::model;
use sinew_tensor::logprob::{
    HeadGrads, LinearLogprob, LogprobGrad, LogprobOut, LogprobScratch, linear_logprob_backward,
    linear_logprob_forward,
};
use sinew_tensor::{Cpu, KernelSet, Mat, MatMut, PackedWeights};

use crate::gemm::{Case, cases, view};
use crate::{assert_close, random};

/// Half a unit of a bfloat16 for each of both operands, and room for the sums.
const PRODUCT_BOUND: f32 = 1.02 / 256.0;

sinew_amx_emulator::on_both!(
    products_have_the_bits_of_the_model,
    every_edge_of_the_blocking_has_the_bits_of_the_model,
    products_are_near_those_of_f32_operands,
    rows_and_threads_do_not_change_bits,
    special_values_go_through_as_in_the_model,
    the_instruction_does_what_the_emulator_says,
    products_run_where_they_were_asked_for,
    the_limit_of_the_machine_is_counted_in_tiles,
    the_fused_head_is_that_of_f32_within_its_bound,
    a_row_of_the_fused_head_has_the_same_bits_alone,
);

/// Compares with the model's bits on all threads, on one, and (if `b` is stored transposed without gaps)
/// packed. Nothing may be written outside of `c`.
fn check(dev: &Cpu, x: Case) {
    let Case {
        m,
        n,
        k,
        pad,
        accumulate,
        ..
    } = x;
    let room = |r: usize, c: usize| (r + pad) * (c + pad);
    let (a_data, b_data) = (random(1, room(m, k)), random(2, room(k, n)));
    let a = view(&a_data, m, k, pad, x.transpose[0]);
    let b = view(&b_data, k, n, pad, x.transpose[1]);
    let start = random(3, m * n);
    let mut want = start.clone();
    model::product(a, b, &mut want, accumulate);
    let ldc = n + pad;
    let mut before = vec![7.0; m * ldc];
    for i in 0..m {
        before[i * ldc..i * ldc + n].copy_from_slice(&start[i * n..(i + 1) * n]);
    }
    let compare = |c: &[f32], what: &str| {
        for i in 0..m {
            assert_eq!(
                c[i * ldc..i * ldc + n],
                want[i * n..(i + 1) * n],
                "{what} row {i} of {x:?}"
            );
            assert!(
                c[i * ldc + n..(i + 1) * ldc].iter().all(|&v| v == 7.0),
                "{what} {x:?}"
            );
        }
    };
    let mut c = before.clone();
    dev.gemm(a, b, MatMut::with_ld(&mut c, m, n, ldc), accumulate);
    compare(&c, "all threads");
    if x.transpose[1] && pad == 0 {
        let packed = PackedWeights::pack(dev, &b_data[..n * k], n, k);
        c.clone_from(&before);
        dev.matmul_packed(a, &packed, MatMut::with_ld(&mut c, m, n, ldc), accumulate);
        compare(&c, "packed");
    }
}

fn case() -> impl Strategy<Value = Case> {
    let dim = prop_oneof![1 => 0usize..3, 4 => 1usize..50, 2 => 60usize..110];
    cases(
        dim,
        prop_oneof![1 => 0usize..3, 4 => 1usize..70, 1 => 90usize..200],
    )
}

fn products_have_the_bits_of_the_model(on: On) {
    let Some(dev) = on.device(2) else { return };
    let config = ProptestConfig {
        cases: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let run = TestRunner::new(config).run(&case(), |x| {
        check(&dev, x);
        Ok(())
    });
    run.unwrap_or_else(|e| panic!("{e}"));
}

fn every_edge_of_the_blocking_has_the_bits_of_the_model(on: On) {
    let Some(dev) = on.device(3) else { return };
    for (m, n, k) in [
        // Tiles and blocks: exactly, one less, one more.
        (16, 16, 32),
        (32, 32, 64),
        (31, 33, 31),
        (33, 31, 33),
        (17, 15, 65),
        (48, 64, 96),
        // More than one part of the depth, and of the columns in a task.
        (40, 420, 1060),
        (1, 900, 576),
        // More than one pass: over steps, rows, columns.
        (5, 9, 4200),
        (2060, 3, 4100),
        (3, 2070, 4100),
    ] {
        // Long sums take the model long: once is enough.
        for accumulate in [true, false].into_iter().skip(usize::from(k > 4096)) {
            let transpose = [accumulate, !accumulate];
            check(
                &dev,
                Case {
                    m,
                    n,
                    k,
                    pad: 0,
                    transpose,
                    accumulate,
                },
            );
        }
    }
}

fn products_are_near_those_of_f32_operands(on: On) {
    let Some(dev) = on.device(2) else { return };
    let (m, n, k) = (50, 70, 333);
    let (x, w) = (random(5, m * k), random(6, n * k));
    let mut y = vec![0.0; m * n];
    dev.matmul_nt(
        Mat::new(&x, m, k),
        Mat::new(&w, n, k),
        MatMut::new(&mut y, m, n),
        false,
    );
    let exact = crate::reference::matmul_nt(&x, &w, k);
    let mut worst = 0.0f32;
    for i in 0..m {
        for j in 0..n {
            let size: f32 = (0..k).map(|p| (x[i * k + p] * w[j * k + p]).abs()).sum();
            let error = (f64::from(y[i * n + j]) - exact[i * n + j]).abs() as f32;
            worst = worst.max(error / size);
        }
    }
    eprintln!("worst error {worst:.1e} of the sum of sizes, bound {PRODUCT_BOUND:.1e}");
    assert!(
        worst <= PRODUCT_BOUND && worst > 1e-6,
        "{worst}: operands are rounded to 8 bits"
    );
    let exact = dev.with_f32_products();
    let mut y32 = vec![0.0; m * n];
    exact.matmul_nt(
        Mat::new(&x, m, k),
        Mat::new(&w, n, k),
        MatMut::new(&mut y32, m, n),
        false,
    );
    assert_eq!(exact.kernels(), KernelSet::Avx512);
    assert_ne!(y, y32);
}

fn rows_and_threads_do_not_change_bits(on: On) {
    let Some(dev) = on.device(1) else { return };
    let (m, n, k) = (45, 100, 130);
    let (x, w) = (random(7, m * k), random(8, n * k));
    let packed = PackedWeights::pack(&dev, &w, n, k);
    let mut y = vec![0.0; m * n];
    dev.matmul_packed(
        Mat::new(&x, m, k),
        &packed,
        MatMut::new(&mut y, m, n),
        false,
    );
    for i in 0..m {
        let mut row = vec![0.0; n];
        let x = Mat::new(&x[i * k..(i + 1) * k], 1, k);
        dev.matmul_packed(x, &packed, MatMut::new(&mut row, 1, n), false);
        assert_eq!(row, y[i * n..(i + 1) * n], "row {i}");
    }
    for threads in [2, 5] {
        let Some(dev) = on.device(threads) else {
            return;
        };
        for _ in 0..3 {
            let mut again = vec![0.0; m * n];
            let (x, w) = (Mat::new(&x, m, k), Mat::new(&w, n, k));
            dev.matmul_nt(x, w, MatMut::new(&mut again, m, n), false);
            assert_eq!(again, y, "{threads} threads");
        }
    }
}

/// Infinities, NaN and numbers below the smallest normal one, in operands and in the old values.
fn special_values_go_through_as_in_the_model(on: On) {
    let Some(dev) = on.device(1) else { return };
    let special = [
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1e-40,
        -1e-38,
        f32::MAX,
        -0.0,
    ];
    let (m, n, k) = (20, 18, 40);
    for (round, &value) in special.iter().enumerate() {
        let (mut a, mut b) = (random(11, m * k), random(12, k * n));
        let mut c = random(13, m * n);
        a[(round * 31 + 3) % (m * k)] = value;
        b[(round * 17 + 5) % (k * n)] = value;
        c[(round * 13 + 7) % (m * n)] = value;
        let mut want = c.clone();
        let (a, b) = (Mat::new(&a, m, k), Mat::new(&b, k, n));
        model::product(a, b, &mut want, true);
        dev.gemm(a, b, MatMut::new(&mut c, m, n), true);
        for (i, (got, want)) in c.iter().zip(&want).enumerate() {
            let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            assert!(same, "{value}: {i} is {got}, not {want}");
        }
    }
}

#[repr(align(64))]
struct Aligned<T>(T);

/// One `tdpbf16ps` of whole tiles by the instruction itself.
fn instruction(sum: &mut [u32; 256], a: &[u32; 256], b: &[u32; 256]) {
    let mut config = Aligned([0u8; 64]);
    config.0[0] = 1;
    for tile in 0..3 {
        (config.0[16 + 2 * tile], config.0[48 + tile]) = (64, 16);
    }
    // SAFETY: called where a device with AMX exists; the arrays hold whole tiles.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tileloadd tmm0, [{sum} + {row}*1]",
            "tileloadd tmm1, [{a} + {row}*1]",
            "tileloadd tmm2, [{b} + {row}*1]",
            "tdpbf16ps tmm0, tmm1, tmm2",
            "tilestored [{sum} + {row}*1], tmm0",
            "tilerelease",
            config = in(reg) config.0.as_ptr(),
            sum = in(reg) sum.as_mut_ptr(),
            a = in(reg) a.as_ptr(),
            b = in(reg) b.as_ptr(),
            row = in(reg) 64usize,
            options(nostack),
        );
    }
}

/// The same by the emulator's semantics.
fn emulated(sum: &mut [u32; 256], a: &[u32; 256], b: &[u32; 256]) {
    let mut config = [0u8; 64];
    config[0] = 1;
    for tile in 0..3 {
        (config[16 + 2 * tile], config[48 + tile]) = (ROW_BYTES as u8, ROWS as u8);
    }
    let mut tiles = Tiles::new();
    tiles.configure(&config).unwrap();
    for (tile, words) in [(0, &*sum), (1, a), (2, b)] {
        let read = |row: usize, to: &mut [u8]| {
            for (to, word) in to.chunks_exact_mut(4).zip(&words[row * 16..]) {
                to.copy_from_slice(&word.to_le_bytes());
            }
        };
        tiles.load(tile, read).unwrap();
    }
    tiles.dot(0, 1, 2).unwrap();
    let out = std::cell::RefCell::new(&mut sum[..]);
    let write = |row: usize, from: &[u8]| {
        for (to, bytes) in out.borrow_mut()[row * 16..]
            .iter_mut()
            .zip(from.chunks_exact(4))
        {
            *to = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
    };
    tiles.store(0, write).unwrap();
}

/// Compares hardware with the emulator. Machines without it compare the way through the signal handler with
/// the direct one.
fn the_instruction_does_what_the_emulator_says(on: On) {
    if on.device(1).is_none() {
        return;
    }
    let mut state = 3u64;
    let mut word = |plain: bool| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let bits = (state >> 32) as u32;
        // Any bits, or values of like size, whose sums need every bit.
        if plain {
            (bits & 0x83ff_83ff) | 0x3c00_3c00
        } else {
            bits
        }
    };
    for round in 0..40 {
        let plain = round % 4 != 0;
        let mut sum: [u32; 256] = std::array::from_fn(|_| word(plain));
        let a: [u32; 256] = std::array::from_fn(|_| word(plain));
        let b: [u32; 256] = std::array::from_fn(|_| word(plain));
        let mut want = sum;
        emulated(&mut want, &a, &b);
        instruction(&mut sum, &a, &b);
        for (i, (&got, &want)) in sum.iter().zip(&want).enumerate() {
            let (got, want) = (f32::from_bits(got), f32::from_bits(want));
            let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            assert!(same, "round {round}, element {i}: {got:e}, not {want:e}");
        }
    }
}

fn products_run_where_they_were_asked_for(on: On) {
    let Some(dev) = on.device(1) else { return };
    let before = sinew_amx_emulator::products();
    let x = random(1, 48 * 64);
    let mut y = [0.0; 48 * 48];
    let x = Mat::new(&x, 48, 64);
    dev.matmul_nt(x, x, MatMut::new(&mut y, 48, 48), false);
    // Three tiles of rows, columns filled up to four, two deep.
    let emulated = match on {
        On::Emulated => 3 * 4 * 2,
        On::Hardware => 0,
    };
    assert_eq!(sinew_amx_emulator::products() - before, emulated);
    assert_eq!(sinew_amx_emulator::granted(), on == On::Hardware);
    assert_eq!(KernelSet::detect() == KernelSet::Amx, on == On::Hardware);
}

fn the_limit_of_the_machine_is_counted_in_tiles(on: On) {
    let Some(dev) = on.device(2) else { return };
    // Two threads, ten rounds of four products of 16 x 16 x 32.
    let operations = sinew_tensor::probe::multiply_add(&dev, 10);
    assert_eq!(operations, 2.0 * (2 * 10 * 4 * 16 * 16 * 32) as f64);
}

/// Log-probabilities and gradients of the fused head.
fn head(dev: &Cpu, input: &LinearLogprob<'_>, weights: &[f32]) -> [Vec<f32>; 5] {
    let n = input.targets.len();
    let zeros = || vec![0.0; n];
    let (mut logprob, mut lse, mut entropy) = (zeros(), zeros(), zeros());
    let mut scratch = LogprobScratch::default();
    let out = LogprobOut {
        logprob: &mut logprob,
        lse: &mut lse,
        entropy: Some(&mut entropy),
    };
    linear_logprob_forward(dev, input, out, &mut scratch);
    let d_entropy: Vec<f32> = weights.iter().map(|w| 0.3 * w).collect();
    let grad = LogprobGrad {
        lse: &lse,
        d_logprob: weights,
        entropy: Some((&entropy, &d_entropy)),
    };
    let (mut dx, mut dw) = (vec![0.0; input.x.len()], vec![0.0; input.w.len()]);
    let head = HeadGrads {
        w: Some(&mut dw),
        low_rank: None,
    };
    linear_logprob_backward(dev, input, grad, &mut dx, head, &mut scratch);
    [logprob, lse, entropy, dx, dw]
}

fn the_fused_head_is_that_of_f32_within_its_bound(on: On) {
    let Some(dev) = on.device(2) else { return };
    for (n, vocab, dim) in [(37, 2500, 40), (1, 70, 64), (1030, 33, 17)] {
        let (x, w) = (random(21, n * dim), random(22, vocab * dim));
        let targets: Vec<u32> = (0..n as u32)
            .map(|i| (i * 7919 + 3) % vocab as u32)
            .collect();
        let temperatures: Vec<f32> = (0..n).map(|i| [0.8, 1.0, 1.3][i % 3]).collect();
        let input = LinearLogprob {
            x: &x,
            w: &w,
            low_rank: None,
            dim,
            targets: &targets,
            temperatures: &temperatures,
            masks: None,
        };
        let mut weights = random(23, n);
        weights.iter_mut().step_by(5).for_each(|w| *w = 0.0);
        let got = head(&dev, &input, &weights);
        let want = head(&dev.with_f32_products(), &input, &weights);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_close(got, want, 0.02, &format!("{i} of [{n}, {vocab}, {dim}]"));
        }
        // The forward pass on rounded operands is the same to f32's precision.
        let round = |v: &[f32]| v.iter().map(|&v| model::round(v)).collect::<Vec<_>>();
        let (x, w) = (round(&x), round(&w));
        let input = LinearLogprob {
            x: &x,
            w: &w,
            ..input
        };
        let got = head(&dev, &input, &weights);
        let want = head(&dev.with_f32_products(), &input, &weights);
        for (i, (got, want)) in got.iter().zip(&want).enumerate().take(3) {
            assert_close(
                got,
                want,
                1e-5,
                &format!("rounded {i} of [{n}, {vocab}, {dim}]"),
            );
        }
    }
}

fn a_row_of_the_fused_head_has_the_same_bits_alone(on: On) {
    let Some(dev) = on.device(2) else { return };
    let (n, vocab, dim) = (19, 2100, 33);
    let (x, w) = (random(31, n * dim), random(32, vocab * dim));
    let targets: Vec<u32> = (0..n as u32).map(|i| i * 97 % vocab as u32).collect();
    let temperatures: Vec<f32> = (0..n).map(|i| [0.7, 1.0, 1.2][i % 3]).collect();
    let input = LinearLogprob {
        x: &x,
        w: &w,
        low_rank: None,
        dim,
        targets: &targets,
        temperatures: &temperatures,
        masks: None,
    };
    let weights = vec![1.0; n];
    let [logprob, lse, entropy, dx, _] = head(&dev, &input, &weights);
    for i in [0, 7, 18] {
        let x = &x[i * dim..(i + 1) * dim];
        let alone = LinearLogprob {
            x,
            targets: &targets[i..=i],
            temperatures: &temperatures[i..=i],
            ..input
        };
        let got = head(&dev, &alone, &weights[..1]);
        assert_eq!(
            [got[0][0], got[1][0], got[2][0]],
            [logprob[i], lse[i], entropy[i]]
        );
        assert_eq!(got[3], dx[i * dim..(i + 1) * dim]);
    }
}
