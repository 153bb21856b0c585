use super::*;
use sinew_tensor::{Cpu, KernelSet};
use sinew_types::TensorSource;

fn device() -> Cpu {
    Cpu::new(KernelSet::detect_f32(), 2)
}

struct Tensor {
    name: &'static str,
    shape: Vec<usize>,
    decay: bool,
    values: Vec<f32>,
    gradient: Vec<f32>,
}

impl Tensor {
    fn new(name: &'static str, decay: bool, values: &[f32]) -> Self {
        Self {
            name,
            shape: vec![values.len()],
            decay,
            values: values.to_vec(),
            gradient: vec![0.0; values.len()],
        }
    }

    fn view(&mut self) -> HostTensor<'_> {
        HostTensor {
            name: self.name,
            shape: &self.shape,
            decay: self.decay,
            lr_scale: 1.0,
            values: &mut self.values,
            gradient: &self.gradient,
        }
    }
}

/// Compares with torch.optim.AdamW (two groups, decay 0.1 and none, lr 0.01, betas 0.9/0.95) with
/// clip_grad_norm_(1.0), three updates. PyTorch's clip divides by `norm + 1e-6`, ours by `norm`: the
/// difference is below the tolerance.
#[test]
fn three_updates_match_pytorch() {
    let mut p = Tensor::new("p.weight", true, &[0.5, -1.0, 2.0, 0.0]);
    let mut q = Tensor::new("norm.weight", false, &[1.0, -0.25]);
    let mut optimizer = AdamW::new(device());
    let adamw = AdamWConfig {
        weight_decay: 0.1,
        ..AdamWConfig::default()
    };
    let steps = [
        ([0.1, -0.2, 0.3, 0.0], [1.0, -2.0], 2.267_156_8),
        ([-0.3, 0.1, 0.05, 1e-6], [0.5, 0.5], 0.776_208_7),
        ([3.0, 4.0, 0.0, 0.0], [0.0, 0.0], 5.0),
    ];
    for ((gp, gq, norm), number) in steps.into_iter().zip(1..) {
        p.gradient = gp.to_vec();
        q.gradient = gq.to_vec();
        let update = Update {
            number,
            lr: 0.01,
            adamw,
            max_grad_norm: Some(1.0),
        };
        let outcome = optimizer.apply(&update, &mut [p.view(), q.view()]);
        let Ok(Outcome::Applied { grad_norm }) = outcome else {
            panic!("{outcome:?}");
        };
        assert!((grad_norm - norm).abs() < 1e-5);
    }
    let expected_p = [0.491_419_58, -0.994_466_1, 1.968_016_3, -0.012_897_834];
    for (a, e) in p.values.iter().zip(expected_p) {
        assert!((a - e).abs() < 2e-6, "{a} expected {e}");
    }
    for (a, e) in q.values.iter().zip([0.972_174_7, -0.236_127_26]) {
        assert!((a - e).abs() < 2e-6, "{a} expected {e}");
    }
}

fn moments(optimizer: &AdamW) -> Vec<Vec<f32>> {
    let of = |name: &String| Some(optimizer.tensor(name)?.into_f32().into_owned());
    optimizer.names().iter().filter_map(of).collect()
}

#[test]
fn a_non_finite_gradient_changes_nothing() {
    let mut p = Tensor::new("a", true, &[1.0; 40]);
    let mut q = Tensor::new("b", true, &[2.0; 3]);
    let mut optimizer = AdamW::new(device());
    p.gradient.fill(0.5);
    q.gradient.fill(f32::MAX);
    // The largest finite gradients are finite in norm.
    let mut update = Update {
        number: 1,
        lr: 0.1,
        adamw: AdamWConfig::default(),
        max_grad_norm: Some(1.0),
    };
    let outcome = optimizer.apply(&update, &mut [p.view(), q.view()]);
    assert!(matches!(outcome, Ok(Outcome::Applied { grad_norm }) if grad_norm.is_finite()));
    (update.number, update.max_grad_norm) = (2, None);
    let before = (p.values.clone(), q.values.clone(), moments(&optimizer));
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 2] {
            q.gradient = vec![0.0; 3];
            q.gradient[at] = bad;
            let outcome = optimizer.apply(&update, &mut [p.view(), q.view()]);
            let expected = Outcome::SkippedNonFinite { tensor: "b".into() };
            assert_eq!(outcome, Ok(expected));
            assert_eq!((&p.values, &q.values), (&before.0, &before.1));
            assert_eq!(moments(&optimizer), before.2);
        }
    }
}

#[test]
fn schedules_pass_through_their_corners() {
    let linear = Schedule {
        peak_lr: 1.0,
        warmup_steps: 4,
        decay: Decay::Linear {
            total_steps: 12,
            final_fraction: 0.2,
        },
    };
    let expected = [
        (0, 0.25),
        (3, 1.0),
        (4, 1.0),
        (8, 0.6),
        (12, 0.2),
        (1000, 0.2),
    ];
    for (step, lr) in expected {
        assert!(
            (linear.lr(step) - lr).abs() < 1e-6,
            "lr({step}) = {}",
            linear.lr(step)
        );
    }
    let cosine = Schedule {
        decay: Decay::Cosine {
            total_steps: 12,
            final_fraction: 0.0,
        },
        ..linear
    };
    assert!((cosine.lr(8) - 0.5).abs() < 1e-6);
    assert!(cosine.lr(12).abs() < 1e-6);
    assert!((4..12).all(|s| cosine.lr(s) > cosine.lr(s + 1)));
    assert_eq!(Schedule::constant(0.5).lr(u64::MAX), 0.5);
}

#[test]
fn bad_settings_are_named() {
    let bad = AdamWConfig {
        beta2: 1.0,
        ..AdamWConfig::default()
    };
    assert_eq!(bad.validate().unwrap_err().field, "beta2");
    let mut schedule = Schedule::constant(f32::NAN);
    assert_eq!(schedule.validate().unwrap_err().field, "peak_lr");
    schedule = Schedule {
        peak_lr: 1.0,
        warmup_steps: 10,
        decay: Decay::Linear {
            total_steps: 10,
            final_fraction: 0.0,
        },
    };
    assert_eq!(schedule.validate().unwrap_err().field, "total_steps");
}
