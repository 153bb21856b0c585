use proptest::prelude::*;
use sinew_tensor::{Cpu, KernelSet, Mat, MatMut, PackedWeights};

use crate::{devices, random, reference};

/// `c = c0 + a b` in `f64`, all dense.
fn plain(
    m: usize,
    n: usize,
    k: usize,
    a: Mat<'_>,
    b: Mat<'_>,
    c0: &[f32],
    data: [&[f32]; 2],
) -> Vec<f32> {
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            let mut sum = f64::from(c0[i * n + j]);
            for p in 0..k {
                let x = data[0][i * a.row_stride() + p * a.col_stride()];
                let y = data[1][p * b.row_stride() + j * b.col_stride()];
                sum += f64::from(x) * f64::from(y);
            }
            c[i * n + j] = sum as f32;
        }
    }
    c
}

/// A product of `[m, k]` and `[k, n]`, whose operands have gaps of `pad` and may be stored transposed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) pad: usize,
    pub(crate) transpose: [bool; 2],
    pub(crate) accumulate: bool,
}

/// Cases of rows and columns `dim` and of depths `deep`.
pub(crate) fn cases(
    dim: impl Strategy<Value = usize> + Clone,
    deep: impl Strategy<Value = usize>,
) -> impl Strategy<Value = Case> {
    let flags = (any::<[bool; 2]>(), any::<bool>());
    (dim.clone(), dim, deep, 0usize..5, flags).prop_map(|(m, n, k, pad, flags)| Case {
        m,
        n,
        k,
        pad,
        transpose: flags.0,
        accumulate: flags.1,
    })
}

fn case() -> impl Strategy<Value = Case> {
    let dim = prop_oneof![2 => 0usize..4, 4 => 1usize..70, 2 => 100usize..170, 1 => 190usize..270];
    cases(dim, prop_oneof![0usize..4, 1usize..70, 380usize..800])
}

/// A `[rows, cols]` view over `data`, which is stored transposed or not.
pub(crate) fn view(
    data: &[f32],
    rows: usize,
    cols: usize,
    pad: usize,
    transposed: bool,
) -> Mat<'_> {
    if transposed {
        Mat::with_ld(data, cols, rows, rows + pad).t()
    } else {
        Mat::with_ld(data, rows, cols, cols + pad)
    }
}

fn check(dev: &Cpu, x: Case) {
    let Case { m, n, k, pad, .. } = x;
    let room = |r: usize, c: usize| (r + pad) * (c + pad);
    let (a_data, b_data) = (random(1, room(m, k)), random(2, room(k, n)));
    let a = view(&a_data, m, k, pad, x.transpose[0]);
    let b = view(&b_data, k, n, pad, x.transpose[1]);
    let start = random(3, m * n);
    let zero = vec![0.0; m * n];
    let want = plain(
        m,
        n,
        k,
        a,
        b,
        if x.accumulate { &start } else { &zero },
        [&a_data, &b_data],
    );
    let ldc = n + pad;
    let mut c = vec![7.0; m * ldc];
    for i in 0..m {
        c[i * ldc..i * ldc + n].copy_from_slice(&start[i * n..(i + 1) * n]);
    }
    dev.gemm(a, b, MatMut::with_ld(&mut c, m, n, ldc), x.accumulate);
    let tol = 3e-6 * (2.0 + (k as f32).sqrt());
    for i in 0..m {
        let what = format!("{} row {i} of {x:?}", dev.kernels());
        for (got, want) in c[i * ldc..].iter().zip(&want[i * n..(i + 1) * n]) {
            assert!((got - want).abs() <= tol, "{what}: {got}, not {want}");
        }
        assert!(
            c[i * ldc + n..(i + 1) * ldc].iter().all(|&v| v == 7.0),
            "{what}: padding"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn products_match_plain_loops(x in case()) {
        for dev in devices() {
            check(&dev, x);
        }
    }

    /// The rows of a batch have the same bits as each row separately, and as on one thread.
    #[test]
    fn a_row_does_not_depend_on_its_batch(
        m in prop_oneof![1usize..40, 193usize..230], n in 1usize..200, k in 1usize..900, accumulate: bool,
    ) {
        for dev in devices() {
            let w = random(4, n * k);
            let packed = PackedWeights::pack(&dev, &w, n, k);
            let x = random(5, m * k);
            let start = random(6, m * n);
            let mut batch = start.clone();
            dev.matmul_packed(Mat::new(&x, m, k), &packed, MatMut::new(&mut batch, m, n), accumulate);
            let mut unpacked = start.clone();
            let single = Cpu::new(dev.kernels(), 1);
            let (a, b) = (Mat::new(&x, m, k), Mat::new(&w, n, k));
            single.matmul_nt(a, b, MatMut::new(&mut unpacked, m, n), accumulate);
            prop_assert_eq!(&batch, &unpacked);
            for i in 0..m {
                let mut row = start[i * n..(i + 1) * n].to_vec();
                let x = Mat::new(&x[i * k..(i + 1) * k], 1, k);
                dev.matmul_packed(x, &packed, MatMut::new(&mut row, 1, n), accumulate);
                prop_assert_eq!(&row[..], &batch[i * n..(i + 1) * n]);
            }
        }
    }
}

#[test]
fn large_products_run_in_passes() {
    // m k and n k exceed the room for packed operands, in each of the three layouts.
    let dev = Cpu::new(KernelSet::detect_f32(), 2);
    let (m, n, k) = (40, 24, 190_000);
    let (a, b) = (random(7, m * k), random(8, n * k));
    let sum = |i: usize, j: usize| -> f64 {
        (0..k)
            .map(|p| f64::from(a[i * k + p]) * f64::from(b[j * k + p]))
            .sum()
    };
    let mut c = vec![0.0; m * n];
    dev.matmul_nt(
        Mat::new(&a, m, k),
        Mat::new(&b, n, k),
        MatMut::new(&mut c, m, n),
        false,
    );
    let packed = PackedWeights::pack(&dev, &b, n, k);
    let mut from_packed = vec![0.0; m * n];
    dev.matmul_packed(
        Mat::new(&a, m, k),
        &packed,
        MatMut::new(&mut from_packed, m, n),
        false,
    );
    assert_eq!(c, from_packed);
    for (i, j) in [(0, 0), (39, 23), (17, 5)] {
        assert!(
            (f64::from(c[i * n + j]) - sum(i, j)).abs() < 0.2,
            "({i}, {j})"
        );
    }
    // [k, n] = aᵀ-like layouts: contraction over 40, a result with 190 000 rows.
    let mut wide = vec![0.0; k * 3];
    let b = random(9, m * 3);
    dev.matmul_tn(
        Mat::new(&a, m, k),
        Mat::new(&b, m, 3),
        MatMut::new(&mut wide, k, 3),
        false,
    );
    for (i, j) in [(0, 0), (189_999, 2), (104_857, 1)] {
        let want: f64 = (0..m)
            .map(|p| f64::from(a[p * k + i]) * f64::from(b[p * 3 + j]))
            .sum();
        assert!(
            (f64::from(wide[i * 3 + j]) - want).abs() < 1e-4,
            "({i}, {j})"
        );
    }
}

#[test]
fn large_weights_meet_the_rows_in_parts() {
    // More rows than share a packed `a`, more weights than one part of `b`.
    let dev = Cpu::new(KernelSet::detect_f32(), 2);
    let (m, n, k) = (200, 2101, 1100);
    let (x, w) = (random(20, m * k), random(21, n * k));
    let (mut plain, mut packed) = (vec![0.0; m * n], vec![0.0; m * n]);
    dev.matmul_nt(
        Mat::new(&x, m, k),
        Mat::new(&w, n, k),
        MatMut::new(&mut plain, m, n),
        false,
    );
    let weights = PackedWeights::pack(&dev, &w, n, k);
    dev.matmul_packed(
        Mat::new(&x, m, k),
        &weights,
        MatMut::new(&mut packed, m, n),
        false,
    );
    assert_eq!(plain, packed);
    for (i, j) in [(0, 0), (199, 2100), (77, 2047), (100, 2048), (128, 1000)] {
        let want = &reference::matmul_nt(&x[i * k..(i + 1) * k], &w[j * k..(j + 1) * k], k)[0];
        assert!(
            (f64::from(plain[i * n + j]) - want).abs() < 1e-3,
            "({i}, {j})"
        );
    }
}

#[test]
fn vector_sets_agree_to_the_bit() {
    let sets: Vec<_> = devices()
        .into_iter()
        .filter(|d| d.kernels() != KernelSet::Portable)
        .collect();
    let (m, n, k) = (37, 65, 1000);
    let (a, b) = (random(10, m * k), random(11, n * k));
    let results: Vec<Vec<f32>> = sets
        .iter()
        .map(|dev| {
            let mut c = vec![0.0; m * n];
            dev.matmul_nt(
                Mat::new(&a, m, k),
                Mat::new(&b, n, k),
                MatMut::new(&mut c, m, n),
                false,
            );
            c
        })
        .collect();
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn repacking_replaces_the_weights() {
    for dev in devices() {
        let (n, k) = (33, 50);
        let (old, new) = (random(12, n * k), random(13, n * k));
        let mut packed = PackedWeights::pack(&dev, &old, n, k);
        packed.repack(&dev, &new);
        let x = random(14, k);
        let (mut y, mut want) = (vec![0.0; n], vec![0.0; n]);
        dev.matmul_packed(
            Mat::new(&x, 1, k),
            &packed,
            MatMut::new(&mut y, 1, n),
            false,
        );
        dev.matmul_nt(
            Mat::new(&x, 1, k),
            Mat::new(&new, n, k),
            MatMut::new(&mut want, 1, n),
            false,
        );
        assert_eq!(y, want);
    }
}

#[test]
#[should_panic(expected = "b is [k, n]")]
fn shapes_that_do_not_fit_are_refused() {
    let dev = Cpu::new(KernelSet::Portable, 1);
    let mut c = [0.0; 4];
    dev.gemm(
        Mat::new(&[0.0; 6], 2, 3),
        Mat::new(&[0.0; 4], 2, 2),
        MatMut::new(&mut c, 2, 2),
        false,
    );
}
