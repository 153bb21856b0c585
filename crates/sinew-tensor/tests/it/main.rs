//! Operators against their references, on every kernel set that the CPU runs.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
mod gemm;
mod ops;
mod reference;

use sinew_tensor::{Cpu, KernelSet};

/// A device for each kernel set.
fn devices() -> Vec<Cpu> {
    KernelSet::available_f32()
        .into_iter()
        .map(|set| Cpu::new(set, 2))
        .collect()
}

/// Values in -1..1 from a seed (splitmix64).
fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
            (z >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        })
        .collect()
}

/// Panics unless all values agree to `tol` relative to the largest one.
fn assert_close(got: &[f32], want: &[f32], tol: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let scale = want.iter().fold(1e-3f32, |m, x| m.max(x.abs()));
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        assert!(
            (a - b).abs() <= tol * scale,
            "{what}: value {i} is {a}, not {b}"
        );
    }
}
