use proptest::prelude::*;
use sinew_tensor::ops::{self, AdamW, RopeTable};
use sinew_tensor::{Cpu, Mat, MatMut};

use crate::{assert_close, devices, random, reference};

const EPS: f32 = 1e-5;

fn to_f32(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&x| x as f32).collect()
}

fn widths() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..70, Just(576), 500usize..700]
}

/// `grad` agrees with central differences of `sum(dy * f(x))` at some places of `x`.
fn check_gradient(x: &[f32], dy: &[f32], grad: &[f64], f: impl Fn(&[f32]) -> Vec<f64>) {
    assert_eq!(x.len(), grad.len());
    let loss = |x: &[f32]| -> f64 { f(x).iter().zip(dy).map(|(y, &dy)| y * f64::from(dy)).sum() };
    for i in (0..x.len()).step_by(x.len() / 11 + 1) {
        let at = |delta: f32| {
            let mut x = x.to_vec();
            x[i] += delta;
            (f64::from(x[i]), loss(&x))
        };
        let ((x0, y0), (x1, y1)) = (at(-1e-3), at(1e-3));
        let slope = (y1 - y0) / (x1 - x0);
        assert!(
            (slope - grad[i]).abs() < 1e-4 * (1.0 + slope.abs()),
            "{i}: {slope}, not {}",
            grad[i]
        );
    }
}

#[test]
fn reference_gradients_match_finite_differences() {
    let (dim, rows) = (12, 4);
    let (x, w, dy) = (random(1, rows * dim), random(2, dim), random(3, rows * dim));
    let (dx, dw) = reference::rms_norm_backward(&x, &w, EPS, &dy);
    check_gradient(&x, &dy, &dx, |x| reference::rms_norm(x, &w, EPS));
    check_gradient(&w, &dy, &dw, |w| reference::rms_norm(&x, w, EPS));

    let positions = [0, 3, 77, 1000];
    let turned = |x: &[f32]| reference::rope(x, 2, 6, &positions, 1e4, 1.0);
    check_gradient(
        &x,
        &dy,
        &reference::rope(&dy, 2, 6, &positions, 1e4, -1.0),
        turned,
    );

    let x: Vec<f32> = x.iter().map(|x| x * 4.0).collect();
    let dy = &dy[..rows * dim / 2];
    check_gradient(&x, dy, &reference::swiglu_backward(&x, dy, 6), |x| {
        reference::swiglu(x, 6)
    });
}

fn check_rms_norm(dev: &Cpu, rows: usize, groups: usize, dim: usize, pad: usize, accumulate: bool) {
    let (cols, ld) = (groups * dim, groups * dim + pad);
    let (data, w, dy) = (random(4, rows * ld), random(5, dim), random(6, rows * cols));
    let x = Mat::with_ld(&data, rows, cols, ld);
    let dense: Vec<f32> = data
        .chunks_exact(ld.max(1))
        .flat_map(|row| row[..cols].to_vec())
        .collect();
    let (mut y, mut rstd) = (vec![0.0; rows * cols], vec![0.0; rows * groups]);
    ops::rms_norm(dev, x, &w, EPS, MatMut::new(&mut y, rows, cols), &mut rstd);
    assert_close(
        &y,
        &to_f32(&reference::rms_norm(&dense, &w, EPS)),
        2e-6,
        "y",
    );

    let mut in_place = dense.clone();
    ops::rms_norm_in_place(dev, MatMut::new(&mut in_place, rows, cols), &w, EPS);
    assert_eq!(in_place, y);

    let (want_dx, want_dw) = reference::rms_norm_backward(&dense, &w, EPS, &dy);
    let start = random(7, rows * cols);
    let (mut dx, mut dw) = (start.clone(), vec![0.5; dim]);
    let out = MatMut::new(&mut dx, rows, cols);
    ops::rms_norm_backward(
        dev,
        x,
        &w,
        &rstd,
        Mat::new(&dy, rows, cols),
        out,
        &mut dw,
        accumulate,
    );
    let base = |i: usize| if accumulate { start[i] } else { 0.0 };
    let want_dx: Vec<f32> = want_dx
        .iter()
        .enumerate()
        .map(|(i, d)| *d as f32 + base(i))
        .collect();
    let want_dw: Vec<f32> = want_dw.iter().map(|d| *d as f32 + 0.5).collect();
    // The terms of `dx` cancel in narrow rows: the rest is exact to the rounding of the terms.
    let terms = w.iter().chain(&dy).fold(0f32, |m, v| m.max(v.abs()));
    let terms = terms * terms * rstd.iter().fold(0f32, |m, r| m.max(*r));
    for (i, (got, want)) in dx.iter().zip(&want_dx).enumerate() {
        let bound = 1e-5 * want.abs().max(1e-3) + 4e-7 * terms;
        assert!(
            (got - want).abs() <= bound,
            "dx: value {i} is {got}, not {want}"
        );
    }
    assert_close(&dw, &want_dw, 1e-5, "dw");
}

fn check_rope(dev: &Cpu, rows: usize, heads: usize, half: usize, pad: usize) {
    let (dim, cols) = (2 * half, 2 * half * heads);
    let positions: Vec<u32> = (0..rows as u32).map(|i| (i * 37) % 300).collect();
    let frequency = |j: usize| 1.0 / 10_000f32.powf((2 * j) as f32 / dim as f32);
    let frequencies: Vec<f32> = (0..half).map(frequency).collect();
    let table = RopeTable::from_inv_freq(&frequencies, 300);
    let x = random(8, rows * cols);
    let ld = cols + pad;
    let mut y = vec![9.0; rows * ld];
    for i in 0..rows {
        y[i * ld..i * ld + cols].copy_from_slice(&x[i * cols..(i + 1) * cols]);
    }
    ops::rope(
        dev,
        MatMut::with_ld(&mut y, rows, cols, ld),
        &positions,
        &table,
    );
    let want = to_f32(&reference::rope(&x, heads, dim, &positions, 1e4, 1.0));
    for i in 0..rows {
        // The angle is rounded to f32: 300 * 2^-24.
        assert_close(
            &y[i * ld..i * ld + cols],
            &want[i * cols..(i + 1) * cols],
            5e-5,
            "turned",
        );
        assert!(
            y[i * ld + cols..(i + 1) * ld].iter().all(|&v| v == 9.0),
            "padding"
        );
    }
    ops::rope_backward(
        dev,
        MatMut::with_ld(&mut y, rows, cols, ld),
        &positions,
        &table,
    );
    for i in 0..rows {
        assert_close(
            &y[i * ld..i * ld + cols],
            &x[i * cols..(i + 1) * cols],
            1e-6,
            "turned back",
        );
    }
}

fn check_swiglu(dev: &Cpu, rows: usize, ff: usize) {
    let gate_up: Vec<f32> = random(9, rows * 2 * ff).iter().map(|x| x * 20.0).collect();
    let dout = random(10, rows * ff);
    let (mut out, mut grad) = (vec![0.0; rows * ff], vec![0.0; rows * 2 * ff]);
    ops::swiglu(dev, &gate_up, ff, &mut out);
    ops::swiglu_backward(dev, &gate_up, &dout, ff, &mut grad);
    assert_close(&out, &to_f32(&reference::swiglu(&gate_up, ff)), 1e-6, "out");
    assert_close(
        &grad,
        &to_f32(&reference::swiglu_backward(&gate_up, &dout, ff)),
        4e-6,
        "gradient",
    );
}

fn check_sums(dev: &Cpu, rows: usize, n: usize) {
    let (dy, bias) = (random(11, rows * n), random(12, n));
    let mut y = dy.clone();
    ops::bias_add(dev, &bias, &mut y);
    assert!(y.iter().enumerate().all(|(i, &y)| y == dy[i] + bias[i % n]));
    let mut dbias = vec![1.0; n];
    ops::bias_backward(dev, &dy, &mut dbias);
    let want: Vec<f32> = reference::bias_backward(&dy, n)
        .iter()
        .map(|d| *d as f32 + 1.0)
        .collect();
    assert_close(&dbias, &want, 1e-5, "dbias");

    let mut sum = y.clone();
    ops::add(dev, &dy, &mut sum);
    assert!(sum.iter().zip(&y).zip(&dy).all(|((s, y), d)| *s == y + d));
    ops::scale(dev, 3.0, &mut y);
    assert!((0..y.len()).all(|i| y[i] == (dy[i] + bias[i % n]) * 3.0));

    let square = |x: &f32| f64::from(*x).powi(2);
    let want = dy.iter().map(square).sum::<f64>();
    let squares = ops::sum_of_squares(dev, &dy);
    assert!(
        (squares - want).abs() <= 1e-12 * want,
        "{squares}, not {want}"
    );
    assert_eq!(
        ops::sum_of_squares(dev, &[f32::MAX]),
        f64::from(f32::MAX).powi(2)
    );
}

fn check_embedding(dev: &Cpu, rows: usize, dim: usize, vocab: usize) {
    let table = random(13, vocab * dim);
    let ids: Vec<u32> = (0..rows)
        .map(|i| (i * i + i) as u32 % vocab as u32)
        .collect();
    let mut out = vec![0.0; rows * dim];
    ops::embedding(dev, &table, dim, &ids, &mut out);
    for (row, &id) in out.chunks_exact(dim).zip(&ids) {
        assert_eq!(row, &table[id as usize * dim..][..dim]);
    }
    // Every other row, spread out again.
    let place = |i: usize| match i % 2 {
        0 => i as u32 / 2,
        _ => ops::NOWHERE,
    };
    let places: Vec<u32> = (0..rows).map(place).collect();
    let mut spread = vec![0.5; rows * dim];
    ops::spread(dev, &out, dim, &places, &mut spread);
    for (i, row) in spread.chunks_exact(dim).enumerate() {
        let want = &out[i / 2 * dim..][..dim];
        let kept = i % 2 == 0;
        assert!(
            row.iter()
                .zip(want)
                .all(|(x, w)| *x == if kept { *w } else { 0.0 })
        );
    }
    let dy = random(14, rows * dim);
    let mut dtable = vec![0.25; vocab * dim];
    ops::embedding_backward(dev, &ids, &dy, dim, &mut dtable);
    let want = reference::embedding_backward(&ids, &dy, dim, vocab);
    let want: Vec<f32> = want.iter().map(|d| *d as f32 + 0.25).collect();
    assert_close(&dtable, &want, 1e-5, "dtable");
}

fn check_adamw(dev: &Cpu, len: usize) {
    let config = AdamW {
        lr: 0.01,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
    };
    let mut p = random(15, len);
    let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
    let mut want: Vec<[f64; 3]> = p.iter().map(|&p| [f64::from(p), 0.0, 0.0]).collect();
    for step in 1..4 {
        let g = random(16 + step, len);
        ops::adamw(dev, &config, step, 0.5, &mut p, &g, &mut m, &mut v);
        for (want, &g) in want.iter_mut().zip(&g) {
            *want = reference::adamw(&config, step, *want, 0.5 * f64::from(g));
        }
    }
    for (i, got) in [p, m, v].iter().enumerate() {
        let want: Vec<f32> = want.iter().map(|w| w[i] as f32).collect();
        assert_close(got, &want, 2e-6, ["p", "m", "v"][i]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn operators_match_references(
        rows in 0usize..90, dim in widths(), groups in 1usize..4, pad in 0usize..4, accumulate: bool,
    ) {
        for dev in devices() {
            check_rms_norm(&dev, rows, groups, dim, pad, accumulate);
            check_rope(&dev, rows, groups, dim.min(65), pad);
            check_swiglu(&dev, rows, dim);
            check_sums(&dev, rows, dim);
            check_embedding(&dev, rows, dim, 17);
            check_adamw(&dev, rows * dim);
        }
    }

    #[test]
    fn results_do_not_depend_on_the_thread_count(rows in 1usize..300, dim in widths()) {
        let (x, w, dy) = (random(20, rows * dim), random(21, dim), random(22, rows * dim));
        let ids: Vec<u32> = (0..rows as u32).map(|i| i * 7 % 13).collect();
        let set = sinew_tensor::KernelSet::detect_f32();
        let mut results = [1, 2, 5].map(|threads| {
            let dev = Cpu::new(set, threads);
            let (mut y, mut rstd) = (vec![0.0; rows * dim], vec![0.0; rows]);
            let x = Mat::new(&x, rows, dim);
            ops::rms_norm(&dev, x, &w, EPS, MatMut::new(&mut y, rows, dim), &mut rstd);
            let mut dw = vec![0.0; 15 * dim];
            let dx = MatMut::new(&mut y, rows, dim);
            ops::rms_norm_backward(&dev, x, &w, &rstd, Mat::new(&dy, rows, dim), dx, &mut dw[..dim], false);
            ops::bias_backward(&dev, &dy, &mut dw[dim..2 * dim]);
            ops::embedding_backward(&dev, &ids, &dy, dim, &mut dw[2 * dim..]);
            y.extend(&dw);
            (y, ops::sum_of_squares(&dev, &dy).to_bits())
        }).into_iter();
        let first = results.next();
        prop_assert!(results.all(|r| Some(&r) == first.as_ref()));
    }
}

#[test]
#[should_panic(expected = "position 300 is beyond the 300 of the table")]
fn positions_beyond_the_table_are_refused() {
    let dev = Cpu::new(sinew_tensor::KernelSet::Portable, 1);
    let table = RopeTable::from_inv_freq(&[1.0, 0.01], 300);
    ops::rope(&dev, MatMut::new(&mut [0.0; 4], 1, 4), &[300], &table);
}

#[test]
#[should_panic(expected = "7 columns are no multiple of the 3 weights")]
fn widths_that_do_not_fit_are_refused() {
    let dev = Cpu::new(sinew_tensor::KernelSet::Portable, 1);
    let x = [0.0; 7];
    ops::rms_norm(
        &dev,
        Mat::new(&x, 1, 7),
        &[1.0; 3],
        EPS,
        MatMut::new(&mut [0.0; 7], 1, 7),
        &mut [0.0; 2],
    );
}
