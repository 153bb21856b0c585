//! Times of attention and log-probabilities at the sizes of SmolLM2-135M.
//!
//! Prints one JSON object a line: name, milliseconds (best and median of the repetitions), least CPU
//! milliseconds of all threads (steadier on a shared machine), and GFLOP/s of the visible pairs of
//! rows. An argument `threads=N` sets the number of threads; `only`
//! with `attention`, `logprob` or `paged` leaves out the others.

#![expect(unsafe_code, reason = "reads the CPU clock")]
#![expect(clippy::print_stdout, reason = "a bench reports on standard output")]

use std::time::Instant;

use sinew_tensor::Buffer;
use sinew_tensor::attention::{
    AttentionScratch, AttentionShape, BackwardInput, Segment, TreeLayout, tree_attention_backward,
    tree_attention_forward,
};
use sinew_tensor::cpu::{Cpu, KernelSet};
use sinew_tensor::logprob::{
    HeadGrads, LinearLogprob, LogprobGrad, LogprobOut, LogprobScratch, linear_logprob_backward,
    linear_logprob_forward,
};
use sinew_tensor::paged::{KvPool, PagedBatch, PagedSequence, paged_attention};

const REPETITIONS: usize = 7;

/// CPU time of the process in milliseconds.
fn cpu_ms() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the clock exists on Linux, and `time` is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

fn measure(name: &str, flop: f64, mut body: impl FnMut()) {
    body();
    let (mut wall, mut cpu) = (Vec::new(), f64::INFINITY);
    for _ in 0..REPETITIONS {
        let (start, cpu_start) = (Instant::now(), cpu_ms());
        body();
        wall.push(start.elapsed().as_secs_f64() * 1e3);
        cpu = cpu.min(cpu_ms() - cpu_start);
    }
    wall.sort_by(f64::total_cmp);
    let (best, median) = (wall[0], wall[REPETITIONS / 2]);
    let rate = flop / best / 1e6;
    println!(
        r#"{{"name":"{name}","best_ms":{best:.2},"median_ms":{median:.2},"cpu_ms":{cpu:.2},"gflops":{rate:.0}}}"#
    );
}

fn random(len: usize, seed: u64) -> Buffer {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut values = Buffer::zeros(len);
    for value in values.iter_mut() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *value = (state >> 40) as f32 / 8_388_608.0 - 1.0;
    }
    values
}

/// A system prompt, `tasks` questions below it, and `samples` completions of about `len` tokens each.
fn samples_of_tasks(prompt: u32, tasks: u32, question: u32, samples: u32, len: u32) -> TreeLayout {
    let mut segments = vec![Segment {
        start: 0,
        len: prompt,
        position: 0,
        parent: None,
    }];
    let mut rows = prompt;
    let mut push = |len: u32, position: u32, parent: u32| {
        segments.push(Segment {
            start: rows,
            len,
            position,
            parent: Some(parent),
        });
        rows += len;
        segments.len() as u32 - 1
    };
    for task in 0..tasks {
        let parent = push(question, prompt, 0);
        for sample in 0..samples {
            push(
                len + (task * 7 + sample * 13) % 9,
                prompt + question,
                parent,
            );
        }
    }
    TreeLayout::new(segments).expect("segments are made in order")
}

fn attention(dev: &Cpu, name: &str, layout: &TreeLayout) {
    let shape = AttentionShape::new(9, 3, 64).expect("nine heads in three groups");
    let rows = layout.rows();
    let qkv = random(rows * shape.qkv_width(), 1);
    let d_out = random(rows * shape.out_width(), 2);
    let mut out = Buffer::zeros(rows * shape.out_width());
    let mut lse = Buffer::zeros(rows * shape.heads());
    let mut d_qkv = Buffer::zeros(rows * shape.qkv_width());
    let mut scratch = AttentionScratch::default();
    let pairs: f64 = layout.positions().iter().map(|&p| f64::from(p) + 1.0).sum();
    let flop = pairs * shape.out_width() as f64 * 4.0;
    measure(&format!("{name} forward, {rows} rows"), flop, || {
        tree_attention_forward(dev, layout, &shape, &qkv, &mut out, &mut lse, &mut scratch);
    });
    let input = BackwardInput {
        qkv: &qkv,
        out: &out,
        lse: &lse,
        d_out: &d_out,
    };
    measure(&format!("{name} backward, {rows} rows"), 2.5 * flop, || {
        tree_attention_backward(dev, layout, &shape, input, &mut d_qkv, &mut scratch);
    });
}

/// Decoding steps and a prompt chunk of one layer: each sequence has `shared` tokens in common blocks and
/// `own` tokens in separate blocks, the last `rows` of which are queries.
fn paged(dev: &Cpu, name: &str, count: usize, shared: usize, own: usize, rows: usize) {
    const BLOCK: usize = 16;
    let shape = AttentionShape::new(9, 3, 64).expect("nine heads in three groups");
    let (common, each) = (shared / BLOCK, own.div_ceil(BLOCK));
    let blocks = common + count * each;
    let mut pool = KvPool::new(1, shape, BLOCK, blocks).expect("whole blocks");
    for block in 0..blocks as u32 {
        let slots: Vec<u32> = (0..BLOCK as u32)
            .map(|t| block * BLOCK as u32 + t)
            .collect();
        pool.write(
            dev,
            0,
            &random(BLOCK * shape.qkv_width(), block.into()),
            &slots,
        );
    }
    let tables: Vec<Vec<u32>> = (0..count)
        .map(|i| {
            let first = common + i * each;
            (0..common)
                .chain(first..first + each)
                .map(|b| b as u32)
                .collect()
        })
        .collect();
    let past = shared + own - rows;
    let sequences = tables
        .iter()
        .map(|blocks| PagedSequence { blocks, past, rows })
        .collect();
    let batch = PagedBatch::new(sequences);
    let qkv = random(batch.rows() * shape.qkv_width(), 1);
    let mut out = Buffer::zeros(batch.rows() * shape.out_width());
    let mut scratch = AttentionScratch::default();
    let keys = count * (0..rows).map(|i| past + i + 1).sum::<usize>();
    let flop = 4.0 * (keys * shape.out_width()) as f64;
    measure(
        &format!("paged {name}, {} rows", batch.rows()),
        flop,
        || {
            paged_attention(dev, &pool, 0, &batch, &qkv, &mut out, &mut scratch);
        },
    );
    let slots: Vec<u32> = tables
        .iter()
        .map(|t| t[t.len() - 1] * BLOCK as u32 + 3)
        .collect();
    measure(&format!("paged write, {count} rows"), 0.0, || {
        pool.write(dev, 0, &qkv[..count * shape.qkv_width()], &slots);
    });
}

fn logprob(dev: &Cpu, n: usize) {
    const DIM: usize = 576;
    const VOCAB: usize = 49_152;
    let (x, w) = (random(n * DIM, 1), random(VOCAB * DIM, 2));
    let targets: Vec<u32> = (0..n).map(|i| (i * 7919 % VOCAB) as u32).collect();
    let input = LinearLogprob {
        x: &x,
        w: &w,
        low_rank: None,
        dim: DIM,
        targets: &targets,
        temperatures: &[],
        masks: None,
    };
    let (mut logprob, mut lse, mut entropy) =
        (Buffer::zeros(n), Buffer::zeros(n), Buffer::zeros(n));
    let (mut dx, mut dw) = (Buffer::zeros(n * DIM), Buffer::zeros(VOCAB * DIM));
    let mut scratch = LogprobScratch::default();
    let flop = 2.0 * (n * DIM * VOCAB) as f64;
    measure(&format!("log-probability forward, {n} rows"), flop, || {
        let out = LogprobOut {
            logprob: &mut logprob,
            lse: &mut lse,
            entropy: Some(&mut entropy),
        };
        linear_logprob_forward(dev, &input, out, &mut scratch);
    });
    let d_logprob = random(n, 3);
    let grad = LogprobGrad {
        lse: &lse,
        d_logprob: &d_logprob,
        entropy: None,
    };
    measure(
        &format!("log-probability backward, {n} rows"),
        3.0 * flop,
        || {
            let head = HeadGrads {
                w: Some(&mut dw),
                low_rank: None,
            };
            linear_logprob_backward(dev, &input, grad, &mut dx, head, &mut scratch);
        },
    );
}

fn main() {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let wanted = std::env::args().find_map(|a| a.strip_prefix("threads=")?.parse().ok());
    let threads = wanted.unwrap_or(all);
    let dev = Cpu::new(KernelSet::detect(), threads);
    let wanted =
        |name: &str| std::env::args().all(|a| a != "only") || std::env::args().any(|a| a == name);
    if wanted("attention") {
        attention(
            &dev,
            "64 samples of 8 tasks",
            &samples_of_tasks(200, 8, 50, 8, 52),
        );
        attention(
            &dev,
            "one sequence",
            &TreeLayout::sequences(&[4096]).expect("4096 rows"),
        );
    }
    if wanted("logprob") {
        for n in [1, 64, 1024] {
            logprob(&dev, n);
        }
    }
    if wanted("paged") {
        paged(
            &dev,
            "decode, 256 shared and 256 own tokens",
            128,
            256,
            256,
            1,
        );
        paged(&dev, "decode, 1000 own tokens", 64, 0, 1000, 1);
        paged(&dev, "decode, 1000 shared tokens", 128, 992, 8, 1);
        paged(&dev, "prompt of 512 tokens", 1, 0, 512, 512);
    }
}
