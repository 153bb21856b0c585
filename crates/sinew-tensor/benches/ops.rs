//! Time of the row-wise and elementwise operators, and the bytes they touch per second.
//!
//! `cargo bench --profile dev -p sinew-tensor --bench ops [-- THREADS] [KERNEL SET] [FILTER]`
#![expect(unsafe_code, reason = "the clock of the thread")]
#![expect(clippy::print_stdout, reason = "a bench prints its results")]

mod timing;

use std::time::Duration;

use sinew_tensor::ops::{self, AdamW, RopeTable};
use sinew_tensor::{Buffer, Cpu, KernelSet, Mat, MatMut};
use timing::{best, read_bandwidth};

fn filled(len: usize) -> Buffer {
    let mut buffer = Buffer::zeros(len);
    buffer
        .iter_mut()
        .enumerate()
        .for_each(|(i, x)| *x = (i % 31) as f32 * 0.1 - 1.5);
    buffer
}

struct Bench {
    dev: Cpu,
    filter: Vec<String>,
}

impl Bench {
    /// `values`: how many the operator reads and writes.
    fn run(&self, name: &str, values: usize, mut f: impl FnMut(&Cpu)) {
        if self.filter.iter().all(|filter| name.contains(filter)) {
            let seconds = best(self.dev.threads(), Duration::from_millis(250), || {
                f(&self.dev)
            });
            let rate = values as f64 * 4e-9 / seconds;
            println!("{name:32} {:9.1} us {rate:7.1} GB/s", seconds * 1e6);
        }
    }
}

fn rows(bench: &Bench, m: usize) {
    let (dim, heads, head_dim, ff) = (576, 9, 64, 1536);
    let (x, w, dy) = (filled(m * dim), filled(dim), filled(m * dim));
    let (mut y, mut rstd, mut dw) = (filled(m * dim), filled(m), filled(dim));
    let view = Mat::new(&x, m, dim);
    bench.run(&format!("rms_norm {m}"), 2 * m * dim, |dev| {
        ops::rms_norm(dev, view, &w, 1e-5, MatMut::new(&mut y, m, dim), &mut rstd);
    });
    bench.run(&format!("rms_norm_backward {m}"), 4 * m * dim, |dev| {
        let dx = MatMut::new(&mut y, m, dim);
        ops::rms_norm_backward(
            dev,
            view,
            &w,
            &rstd,
            Mat::new(&dy, m, dim),
            dx,
            &mut dw,
            true,
        );
    });
    let table = RopeTable::new(head_dim, 1e5, 2048);
    let positions: Vec<u32> = (0..m as u32).map(|i| i % 2048).collect();
    bench.run(&format!("rope {m}"), 2 * m * dim, |dev| {
        ops::rope(
            dev,
            MatMut::new(&mut y, m, heads * head_dim),
            &positions,
            &table,
        );
    });
    bench.run(&format!("add {m}"), 3 * m * dim, |dev| {
        ops::add(dev, &x, &mut y)
    });
    let (gate_up, mut out) = (filled(m * 2 * ff), filled(m * ff));
    bench.run(&format!("swiglu {m}"), 3 * m * ff, |dev| {
        ops::swiglu(dev, &gate_up, ff, &mut out)
    });
    let mut grad = filled(m * 2 * ff);
    bench.run(&format!("swiglu_backward {m}"), 5 * m * ff, |dev| {
        ops::swiglu_backward(dev, &gate_up, &out, ff, &mut grad);
    });
    let ids: Vec<u32> = (0..m as u32).map(|i| i * 7919 % 4096).collect();
    let mut embeddings = filled(4096 * dim);
    bench.run(&format!("embedding {m}"), 2 * m * dim, |dev| {
        ops::embedding(dev, &embeddings, dim, &ids, &mut y);
    });
    bench.run(&format!("embedding_backward {m}"), 3 * m * dim, |dev| {
        ops::embedding_backward(dev, &ids, &dy, dim, &mut embeddings);
    });
    bench.run(&format!("bias_backward {m}"), m * dim, |dev| {
        ops::bias_backward(dev, &dy, &mut dw)
    });
}

fn main() {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let set = args
        .iter()
        .find_map(|a| KernelSet::parse(a).ok())
        .unwrap_or(KernelSet::detect());
    let threads = args.iter().find_map(|a| a.parse().ok()).unwrap_or(2);
    let named = |a: &String| a.parse::<usize>().is_err() && a.parse::<KernelSet>().is_err();
    let filter = args.iter().filter(|a| named(a)).cloned().collect();
    let bench = Bench {
        dev: Cpu::new(set, threads),
        filter,
    };
    println!(
        "{set}, {threads} threads, {:.1} GB/s read",
        read_bandwidth(&bench.dev) * 1e-9
    );
    for m in [1, 32, 1024] {
        rows(&bench, m);
    }
    let len = 8 << 20;
    let (mut p, g, mut m, mut v) = (filled(len), filled(len), filled(len), Buffer::zeros(len));
    bench.run("adamw 8M", 7 * len, |dev| {
        ops::adamw(dev, &AdamW::default(), 1, 1.0, &mut p, &g, &mut m, &mut v);
    });
    bench.run("sum_of_squares 8M", len, |dev| {
        std::hint::black_box(ops::sum_of_squares(dev, &g));
    });
}
