use super::*;
use crate::cpu::KernelSet;
use proptest::prelude::*;

/// Values without a pattern, some of them large.
fn values(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    (0..len)
        .map(|i| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let v = (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0;
            if i % 97 == 5 { 9.0 * v } else { v }
        })
        .collect()
}

fn devices() -> Vec<Cpu> {
    let sets = KernelSet::available_f32().into_iter();
    sets.flat_map(|set| [1, 3].map(|threads| Cpu::new(set, threads)))
        .collect()
}

fn product(dev: &Cpu, x: &[f32], w: &[f32], m: usize, n: usize, k: usize) -> Vec<f32> {
    let packed = PackedInt8::pack(dev, w, n, k);
    let mut y = vec![7.0; m * n];
    dev.matmul_int8(Mat::new(x, m, k), &packed, MatMut::new(&mut y, m, n), false);
    y
}

/// The definition, value by value, in f64. Values are rounded by the kernels' own factor: another one moves
/// some of them over the edge between two integers.
fn definition(x: &[f32], w: &[f32]) -> f64 {
    let groups = x.chunks(GROUP).zip(w.chunks(GROUP));
    let rounded = |v: &[f32]| {
        let largest = v.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let q = |v: &f32| f64::from((v * inverse(largest)).round_ties_even());
        (
            f64::from(largest / MAX),
            v.iter().map(q).collect::<Vec<_>>(),
        )
    };
    groups
        .map(|(x, w)| {
            let ((sx, x), (sw, w)) = (rounded(x), rounded(w));
            sx * sw * x.iter().zip(&w).map(|(a, b)| a * b).sum::<f64>()
        })
        .sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// All kernels give the same bits, near the definition and not far from the exact product.
    #[test]
    fn all_kernels_agree_with_the_definition(
        m in 1usize..15,
        n in 1usize..100,
        k in 1usize..300,
        seed in 0u32..1000,
    ) {
        let (x, w) = (values(m * k, seed), values(n * k, seed + 1));
        let mut first: Option<Vec<f32>> = None;
        for dev in devices() {
            let y = product(&dev, &x, &w, m, n, k);
            match &first {
                None => first = Some(y),
                Some(first) => prop_assert_eq!(first, &y),
            }
        }
        let y = first.unwrap_or_default();
        for i in 0..m {
            for j in 0..n {
                let (x, w) = (&x[i * k..(i + 1) * k], &w[j * k..(j + 1) * k]);
                let norm = |v: &[f32]| v.iter().map(|v| f64::from(v * v)).sum::<f64>().sqrt();
                let exact: f64 = x.iter().zip(w).map(|(a, b)| f64::from(a * b)).sum();
                let found = f64::from(y[i * n + j]);
                let (near, far) = (1e-5 * norm(x) * norm(w), 0.05 * norm(x) * norm(w));
                prop_assert!((found - definition(x, w)).abs() <= near + 1e-6);
                prop_assert!((found - exact).abs() <= far + 1e-6);
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_batch(m in 2usize..20, n in 1usize..70, k in 1usize..200) {
        let (x, w) = (values(m * k, 3), values(n * k, 4));
        let dev = Cpu::new(KernelSet::detect_f32(), 2);
        let all = product(&dev, &x, &w, m, n, k);
        for i in 0..m {
            let alone = product(&dev, &x[i * k..(i + 1) * k], &w, 1, n, k);
            prop_assert_eq!(&all[i * n..(i + 1) * n], &alone[..]);
        }
    }
}

#[test]
fn results_are_added_where_asked_and_columns_beside_stay() {
    for dev in devices() {
        let (m, n, k) = (3, 20, 70);
        let (x, w) = (values(m * k, 1), values(n * k, 2));
        let plain = product(&dev, &x, &w, m, n, k);
        let packed = PackedInt8::pack(&dev, &w, n, k);
        let mut y = vec![1.0; m * (n + 4)];
        let view = MatMut::with_ld(&mut y, m, n, n + 4);
        dev.matmul_int8(Mat::new(&x, m, k), &packed, view, true);
        for (row, plain) in y.chunks(n + 4).zip(plain.chunks(n)) {
            let added: Vec<f32> = plain.iter().map(|v| 1.0 + v).collect();
            assert_eq!(row[..n], added);
            assert_eq!(row[n..], [1.0; 4]);
        }
    }
}

#[test]
fn rows_of_zeros_and_huge_values_stay_finite() {
    for dev in devices() {
        let w = values(40 * 64, 5);
        let zeros = product(&dev, &[0.0; 64], &w, 1, 40, 64);
        assert!(zeros.iter().all(|&v| v == 0.0));
        let tiny = product(&dev, &[1e-42; 64], &w, 1, 40, 64);
        assert!(tiny.iter().all(|v| v.abs() < 1e-30));
        let large = product(&dev, &[1e30; 64], &w, 1, 40, 64);
        assert!(large.iter().all(|v| v.is_finite()));
    }
}

#[test]
fn repacking_replaces_all_weights() {
    let dev = Cpu::new(KernelSet::detect_f32(), 2);
    let (n, k) = (33, 100);
    let (old, new, x) = (values(n * k, 1), values(n * k, 2), values(k, 3));
    let mut packed = PackedInt8::pack(&dev, &old, n, k);
    packed.repack(&dev, &new);
    let mut y = vec![0.0; n];
    dev.matmul_int8(
        Mat::new(&x, 1, k),
        &packed,
        MatMut::new(&mut y, 1, n),
        false,
    );
    assert_eq!(y, product(&dev, &x, &new, 1, n, k));
    assert!(packed.bytes() < 2 * n.next_multiple_of(LANES) * 128);
}

#[test]
fn what_is_not_finite_reaches_the_result() {
    for dev in devices() {
        let w = values(20 * 130, 5);
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [3, 129] {
                let mut x = values(130, 6);
                x[at] = bad;
                let y = product(&dev, &x, &w, 1, 20, 130);
                assert!(y.iter().all(|v| !v.is_finite()), "{bad} at {at}: {y:?}");
            }
        }
    }
}
