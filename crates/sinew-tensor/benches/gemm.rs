//! GFLOP/s of the matrix products against the measured peak of fused multiply-adds and the time that
//! reading the weights takes at the measured memory bandwidth.
//!
//! `cargo bench --profile dev -p sinew-tensor --bench gemm [-- FILTER]`
#![expect(unsafe_code, reason = "the register loop that measures the peak")]
#![expect(clippy::print_stdout, reason = "a bench prints its results")]

mod timing;

use std::hint::black_box;
use std::time::Duration;

use sinew_tensor::{Buffer, Cpu, KernelSet, Mat, MatMut, PackedWeights};
use timing::{best, read_bandwidth};

const PEAK_STEPS: usize = 200_000;

#[cfg(target_arch = "x86_64")]
mod peak {
    use super::{PEAK_STEPS, black_box};
    use std::arch::x86_64::*;

    /// # Safety
    /// Needs AVX-512 F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512() -> f64 {
        let x = black_box(_mm512_set1_ps(0.5));
        let mut acc = [x; 12];
        for _ in 0..PEAK_STEPS {
            acc.iter_mut().for_each(|a| *a = _mm512_fmadd_ps(*a, x, x));
        }
        black_box(acc);
        (12 * 16 * 2 * PEAK_STEPS) as f64
    }

    /// # Safety
    /// Needs AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2() -> f64 {
        let x = black_box(_mm256_set1_ps(0.5));
        let mut acc = [x; 12];
        for _ in 0..PEAK_STEPS {
            acc.iter_mut().for_each(|a| *a = _mm256_fmadd_ps(*a, x, x));
        }
        black_box(acc);
        (12 * 8 * 2 * PEAK_STEPS) as f64
    }
}

/// Flop/s of a loop of independent fused multiply-adds on all threads; `None` for portable kernels,
/// whose instructions the compiler chooses.
fn fma_peak(dev: &Cpu) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    {
        let run: unsafe fn() -> f64 = match dev.kernels() {
            KernelSet::Avx512 => peak::avx512,
            KernelSet::Avx2 => peak::avx2,
            _ => return None,
        };
        let threads = dev.threads();
        let flop = (12 * 2 * PEAK_STEPS * threads) as f64
            * if dev.kernels() == KernelSet::Avx512 {
                16.0
            } else {
                8.0
            };
        let time = best(threads, Duration::from_millis(60), || {
            dev.pool().parallel_for(threads, &|_| {
                // SAFETY: the device exists, so the CPU has the instructions.
                black_box(unsafe { run() });
            });
        });
        Some(flop / time)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        None
    }
}

fn filled(len: usize) -> Buffer {
    let mut buffer = Buffer::zeros(len);
    buffer
        .iter_mut()
        .enumerate()
        .for_each(|(i, x)| *x = (i % 31) as f32 * 0.01);
    buffer
}

fn report(name: &str, flop: f64, seconds: f64, peak: Option<f64>, floor: f64) {
    let of_peak = peak.map_or(String::new(), |p| {
        format!("{:5.1} % of peak", 100.0 * flop / seconds / p)
    });
    println!(
        "{name:32} {:9.1} us {:7.1} GFLOP/s {of_peak:16} {:5.1} % of bandwidth",
        seconds * 1e6,
        flop / seconds * 1e-9,
        100.0 * floor / seconds
    );
}

struct Bench {
    dev: Cpu,
    filter: Vec<String>,
    bandwidth: f64,
}

impl Bench {
    const BUDGET: Duration = Duration::from_millis(250);

    fn wanted(&self, name: &str) -> bool {
        let setting = |f: &String| f.parse::<usize>().is_ok() || f.parse::<KernelSet>().is_ok();
        self.filter.iter().all(|f| setting(f) || name.contains(f))
    }

    /// Products with weights `[n, k]`.
    fn weights(&self, n: usize, k: usize) {
        let w = filled(n * k);
        let mut packed = PackedWeights::pack(&self.dev, &w, n, k);
        for m in [1, 8, 32, 64, 128, 1024] {
            self.products(m, &w, &packed);
        }
        let name = format!("repack {n}x{k}");
        if self.wanted(&name) {
            let seconds = best(self.dev.threads(), Self::BUDGET, || {
                packed.repack(&self.dev, &w);
            });
            report(
                &name,
                0.0,
                seconds,
                None,
                (n * k * 4) as f64 / self.bandwidth,
            );
        }
    }

    fn products(&self, m: usize, w: &[f32], packed: &PackedWeights) {
        let (n, k) = (packed.n(), packed.k());
        let (x, dy) = (filled(m * k), filled(m * n));
        let (mut y, mut dx, mut dw) = (filled(m * n), filled(m * k), filled(n * k));
        let (x, dy, w) = (Mat::new(&x, m, k), Mat::new(&dy, m, n), Mat::new(w, n, k));
        let run = |kind: &str, f: &mut dyn FnMut()| {
            let name = format!("{kind} {m}x{n}x{k}");
            if self.wanted(&name) {
                let peak = fma_peak(&self.dev);
                let seconds = best(self.dev.threads(), Self::BUDGET, f);
                let floor = (n * k * 4) as f64 / self.bandwidth;
                report(&name, (2 * m * n * k) as f64, seconds, peak, floor);
            }
        };
        let dev = &self.dev;
        run("packed", &mut || {
            dev.matmul_packed(x, packed, MatMut::new(&mut y, m, n), false)
        });
        if m >= 1024 {
            run("nt", &mut || {
                dev.matmul_nt(x, w, MatMut::new(&mut y, m, n), false)
            });
            run("nn", &mut || {
                dev.matmul_nn(dy, w, MatMut::new(&mut dx, m, k), false)
            });
            run("tn", &mut || {
                dev.matmul_tn(dy, x, MatMut::new(&mut dw, n, k), true)
            });
        }
    }
}

fn main() {
    let args = std::env::args().skip(1);
    let filter: Vec<String> = args.filter(|a| !a.starts_with('-')).collect();
    let set = filter.iter().find_map(|f| KernelSet::parse(f).ok());
    let threads = filter.iter().find_map(|f| f.parse().ok()).unwrap_or(2);
    let dev = Cpu::new(set.unwrap_or(KernelSet::detect()), threads);
    let peak = fma_peak(&dev).unwrap_or(f64::NAN) * 1e-9;
    let bandwidth = read_bandwidth(&dev);
    let set = dev.kernels();
    println!(
        "{set}, {threads} threads: {peak:.0} GFLOP/s peak, {:.1} GB/s read",
        bandwidth * 1e-9
    );
    let bench = Bench {
        dev,
        filter,
        bandwidth,
    };
    for (n, k) in [
        (960, 576),
        (576, 576),
        (3072, 576),
        (576, 1536),
        (49152, 576),
    ] {
        bench.weights(n, k);
    }
}
