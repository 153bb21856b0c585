//! Fast kernels against the reference, and the reference against finite differences.

use proptest::prelude::*;

use super::*;
use crate::cpu::KernelSet;

/// Values in -1..1 that depend only on `seed`.
pub(crate) fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// A forest whose segment `i` has `lens[i]` rows and hangs below `parents[i] % (i + 1)` (`i`: a root).
fn forest(parts: &[(u32, usize)]) -> TreeLayout {
    let mut segments: Vec<Segment> = Vec::new();
    let mut start = 0;
    for (i, &(len, parent)) in parts.iter().enumerate() {
        let parent = Some(parent % (i + 1)).filter(|&p| p < i);
        let position = parent.map_or(0, |p| segments[p].position + segments[p].len);
        segments.push(Segment {
            start,
            len,
            position,
            parent: parent.map(|p| p as u32),
        });
        start += len;
    }
    TreeLayout::new(segments).unwrap()
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x.into()).collect()
}

#[track_caller]
fn assert_close(what: &str, fast: &[f32], exact: &[f64], tolerance: f64) {
    assert_eq!(fast.len(), exact.len());
    for (i, (f, e)) in fast.iter().zip(exact).enumerate() {
        let error = (f64::from(*f) - e).abs();
        assert!(
            error <= tolerance * (1.0 + e.abs()),
            "{what}[{i}] is {f}, expected {e}"
        );
    }
}

struct Run {
    out: Vec<f32>,
    lse: Vec<f32>,
    d_qkv: Vec<f32>,
}

fn run(dev: &Cpu, layout: &TreeLayout, shape: &AttentionShape, qkv: &[f32], d_out: &[f32]) -> Run {
    let rows = layout.rows();
    let mut scratch = AttentionScratch::default();
    let mut out = vec![f32::NAN; rows * shape.out_width()];
    let mut lse = vec![f32::NAN; rows * shape.heads()];
    let mut d_qkv = vec![f32::NAN; rows * shape.qkv_width()];
    tree_attention_forward(dev, layout, shape, qkv, &mut out, &mut lse, &mut scratch);
    let input = BackwardInput {
        qkv,
        out: &out,
        lse: &lse,
        d_out,
    };
    tree_attention_backward(dev, layout, shape, input, &mut d_qkv, &mut scratch);
    Run { out, lse, d_qkv }
}

fn check(layout: &TreeLayout, shape: &AttentionShape, scale: f32, seed: u64) {
    let mut qkv = random(layout.rows() * shape.qkv_width(), seed);
    qkv.iter_mut().for_each(|x| *x *= scale);
    let d_out = random(layout.rows() * shape.out_width(), seed + 1);
    let exact = reference::forward(layout, shape, &widen(&qkv));
    let gradient = reference::backward(layout, shape, &widen(&qkv), &widen(&d_out));
    for kernels in KernelSet::available_f32() {
        let fast = run(&Cpu::new(kernels, 2), layout, shape, &qkv, &d_out);
        assert_close(&format!("{kernels} out"), &fast.out, &exact.out, 2e-5);
        assert_close(&format!("{kernels} lse"), &fast.lse, &exact.lse, 1e-5);
        assert_close(&format!("{kernels} d_qkv"), &fast.d_qkv, &gradient, 1e-4);
    }
}

#[test]
fn shapes_that_do_not_group_are_refused() {
    let heads = |heads, kv_heads| Err(ShapeError::Heads { heads, kv_heads });
    assert_eq!(AttentionShape::new(9, 2, 64), heads(9, 2));
    assert_eq!(AttentionShape::new(0, 1, 64), heads(0, 1));
    assert_eq!(AttentionShape::new(4, 0, 64), heads(4, 0));
    assert_eq!(AttentionShape::new(4, 2, 0), Err(ShapeError::HeadDim));
    let shape = AttentionShape::new(9, 3, 64).unwrap();
    assert_eq!(
        (shape.qkv_width(), shape.group(), shape.group_of(5)),
        (960, 3, 1)
    );
}

#[test]
fn reference_gradient_agrees_with_finite_differences() {
    let layout = forest(&[(3, 0), (2, 0), (1, 0), (2, 1), (2, 9)]);
    let shape = AttentionShape::new(4, 2, 3).unwrap();
    let mut qkv = widen(&random(layout.rows() * shape.qkv_width(), 5));
    let d_out = widen(&random(layout.rows() * shape.out_width(), 6));
    let gradient = reference::backward(&layout, &shape, &qkv, &d_out);
    let mut loss = |i: usize, step: f64| {
        let kept = qkv[i];
        qkv[i] += step;
        let out = reference::forward(&layout, &shape, &qkv).out;
        qkv[i] = kept;
        out.iter().zip(&d_out).map(|(o, d)| o * d).sum::<f64>()
    };
    for (i, g) in gradient.iter().enumerate() {
        let numeric = (loss(i, 1e-5) - loss(i, -1e-5)) / 2e-5;
        assert!(
            (numeric - g).abs() < 1e-8,
            "d_qkv[{i}] is {g}, differences give {numeric}"
        );
    }
}

#[test]
fn training_shape_agrees_with_reference() {
    // A system prompt, two questions, and samples of which some fork again.
    let layout = forest(&[
        (70, 0),
        (33, 0),
        (25, 0),
        (20, 1),
        (61, 1),
        (1, 1),
        (40, 2),
        (17, 2),
        (5, 3),
        (1, 3),
        (64, 10),
    ]);
    check(&layout, &AttentionShape::new(9, 3, 64).unwrap(), 2.0, 3);
}

#[test]
fn long_sequences_and_large_scores_agree_with_reference() {
    let layout = TreeLayout::sequences(&[300, 1, 47]).unwrap();
    check(&layout, &AttentionShape::new(2, 1, 16).unwrap(), 6.0, 9);
}

#[test]
fn many_tiny_segments_agree_with_reference() {
    let chain: Vec<_> = (0..90)
        .map(|i| (1 + i % 3, i as usize * 7 % 11 + i as usize / 2))
        .collect();
    check(
        &forest(&chain),
        &AttentionShape::new(3, 1, 8).unwrap(),
        1.0,
        4,
    );
}

#[test]
fn empty_layouts_do_nothing() {
    check(&forest(&[]), &AttentionShape::new(2, 1, 8).unwrap(), 1.0, 1);
}

#[test]
fn results_do_not_depend_on_threads() {
    let layout = forest(&[(50, 0), (30, 0), (45, 0), (20, 2), (80, 4)]);
    let shape = AttentionShape::new(6, 2, 16).unwrap();
    let qkv = random(layout.rows() * shape.qkv_width(), 1);
    let d_out = random(layout.rows() * shape.out_width(), 2);
    for kernels in KernelSet::available_f32() {
        let one = run(&Cpu::new(kernels, 1), &layout, &shape, &qkv, &d_out);
        let three = run(&Cpu::new(kernels, 3), &layout, &shape, &qkv, &d_out);
        assert_eq!(
            (one.out, one.lse, one.d_qkv),
            (three.out, three.lse, three.d_qkv)
        );
    }
}

#[test]
fn a_scratch_serves_changing_layouts() {
    let dev = Cpu::new(KernelSet::detect_f32(), 2);
    let shape = AttentionShape::new(2, 2, 8).unwrap();
    let mut scratch = AttentionScratch::default();
    for parts in [
        &[(9, 0), (3, 0)][..],
        &[(9, 0), (3, 1)],
        &[(4, 0)],
        &[(9, 0), (3, 0)],
    ] {
        let layout = forest(parts);
        let qkv = random(layout.rows() * shape.qkv_width(), 8);
        let mut out = vec![0.0; layout.rows() * shape.out_width()];
        let mut lse = vec![0.0; layout.rows() * shape.heads()];
        tree_attention_forward(
            &dev,
            &layout,
            &shape,
            &qkv,
            &mut out,
            &mut lse,
            &mut scratch,
        );
        let exact = reference::forward(&layout, &shape, &widen(&qkv));
        assert_close("out", &out, &exact.out, 1e-5);
    }
}

#[test]
#[should_panic(expected = "out holds 15 values, the layout and shape ask for 16")]
fn wrong_lengths_are_refused() {
    let dev = Cpu::new(KernelSet::Portable, 1);
    let layout = TreeLayout::sequences(&[2]).unwrap();
    let shape = AttentionShape::new(1, 1, 8).unwrap();
    let (mut out, mut lse) = (vec![0.0; 15], vec![0.0; 2]);
    let scratch = &mut AttentionScratch::default();
    tree_attention_forward(
        &dev, &layout, &shape, &[0.0; 48], &mut out, &mut lse, scratch,
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_forest_and_shape_agrees_with_reference(
        parts in prop::collection::vec((1u32..40, 0usize..64), 1..12),
        kv_heads in 1usize..3,
        group in prop::sample::select(vec![1usize, 2, 3, 5, 7, 25]),
        head_dim in prop::sample::select(vec![1usize, 5, 8, 16, 24, 48]),
        seed in 1u64..1000,
    ) {
        let shape = AttentionShape::new(kv_heads * group, kv_heads, head_dim).unwrap();
        check(&forest(&parts), &shape, 2.0, seed);
    }
}
