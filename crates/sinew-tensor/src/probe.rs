//! Measurements of the machine's own limits, for comparison with speeds: arithmetic and reading memory.
//!
//! Nothing here reads a clock: callers time the calls.

use std::sync::PoisonError;

use crate::amx;
use crate::cpu::{Cpu, KernelSet};
use crate::simd::simd_fn;

/// Sums in flight, enough to hide the latency of two units with 4 to 5 cycles each.
const CHAINS: usize = 12;
/// Values that a task of [`read`] reads (1 MiB).
const CHUNK: usize = 256 << 10;
/// Values between a read and the request for its cache line.
const AHEAD: usize = 512;

/// `turns` rounds of independent multiply-adds on each thread, only in registers: those of the device's
/// matrix products, which for AMX are in tiles. Returns the number of floating-point operations, two for each
/// multiply-add.
#[must_use]
pub fn multiply_add(dev: &Cpu, turns: usize) -> f64 {
    let threads = dev.threads();
    if dev.kernels() == KernelSet::Amx {
        let done = std::sync::Mutex::new(0.0);
        dev.pool().parallel_for(threads, &|_| {
            // SAFETY: a device with these kernels exists only where they run.
            let operations = unsafe { amx::product::spin(turns) };
            *done.lock().unwrap_or_else(PoisonError::into_inner) += operations;
        });
        return done.into_inner().unwrap_or_else(PoisonError::into_inner);
    }
    let lanes = std::sync::atomic::AtomicUsize::new(0);
    dev.pool().parallel_for(threads, &|_| {
        // SAFETY: the kernel touches no memory.
        let used = unsafe { spin(dev, turns) };
        lanes.store(used, std::sync::atomic::Ordering::Relaxed);
    });
    2.0 * (threads * turns * CHAINS * lanes.into_inner()) as f64
}

simd_fn! {
/// Returns the number of lanes.
fn spin<V>(turns: usize) -> usize {
    let (a, b) = (V::splat(std::hint::black_box(0.999)), V::splat(std::hint::black_box(1e-3)));
    let mut sums = [b; CHAINS];
    for _ in 0..turns {
        for sum in &mut sums {
            *sum = sum.fma(a, b);
        }
    }
    let mut all = sums[0];
    for sum in &sums[1..] {
        all = all.add(*sum);
    }
    std::hint::black_box(all.sum());
    V::LANES
}
}

/// Reads all of `values` once, on all threads. Returns their sum, so that the compiler keeps the
/// reads.
#[must_use]
pub fn read(dev: &Cpu, values: &[f32]) -> f32 {
    let tasks = values.len().div_ceil(CHUNK);
    let sums: Vec<_> = (0..tasks)
        .map(|_| std::sync::atomic::AtomicU32::new(0))
        .collect();
    dev.pool().parallel_for(tasks, &|task| {
        let part = &values[task * CHUNK..values.len().min((task + 1) * CHUNK)];
        // SAFETY: the kernel only reads `part`.
        let sum = unsafe { sum(dev, part) };
        sums[task].store(sum.to_bits(), std::sync::atomic::Ordering::Relaxed);
    });
    sums.into_iter()
        .map(|sum| f32::from_bits(sum.into_inner()))
        .sum()
}

simd_fn! {
fn sum<V>(values: &[f32]) -> f32 {
    let (from, len) = (values.as_ptr(), values.len());
    let mut sums = [V::splat(0.0); 4];
    let whole = len / (4 * V::LANES) * (4 * V::LANES);
    let mut at = 0;
    while at < whole {
        for (i, sum) in sums.iter_mut().enumerate() {
            V::prefetch(from.wrapping_add(at + i * V::LANES + AHEAD));
            *sum = sum.add(V::load(from.add(at + i * V::LANES)));
        }
        at += 4 * V::LANES;
    }
    let mut rest = 0.0;
    for &value in &values[whole..] {
        rest += value;
    }
    sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum() + rest
}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_everything_once_and_counts_the_operations() {
        for set in KernelSet::available_f32() {
            let dev = Cpu::new(set, 2);
            let values: Vec<f32> = (0..CHUNK + 77).map(|i| (i % 3) as f32).collect();
            let expected: f64 = values.iter().map(|&v| f64::from(v)).sum();
            assert_eq!(f64::from(read(&dev, &values)), expected, "{set}");
            let operations = multiply_add(&dev, 10);
            assert!(operations >= 2.0 * 2.0 * 10.0 * CHAINS as f64, "{set}");
        }
    }
}
