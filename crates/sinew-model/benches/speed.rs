//! Times of training passes and of generation at the shape of SmolLM2-135M, random weights.
//!
//! `cargo bench -p sinew-model --bench speed --profile dev -- [ARGUMENT...]` with arguments
//! `rows=N` (packed rows, default 4096), `threads=N`, `steps=N`, and any of `train`, `lora`,
//! `recompute`, `infer` (default: all).
//!
//! Prints one JSON object a line: milliseconds of the best and the median step, least CPU
//! milliseconds of all threads (steadier on a shared machine), rows a second, and the share of the
//! machine's own f32 matrix product speed that the arithmetic reached, both on CPU time.

#![expect(clippy::print_stdout, reason = "a bench reports on standard output")]

use sinew_model::{
    Activations, Family, Grads, InferBatch, InferModel, InferScratch, Keep, Lora, LoraConfig,
    ModelConfig, OutputGrads, Params, Projection, RopeScaling, TrainModel, Weights,
};
use sinew_tensor::attention::{Segment, TreeLayout};
use sinew_tensor::paged::{KvPool, PagedSequence};
use sinew_tensor::{Buffer, Cpu, KernelSet, Mat, MatMut};
use std::time::Instant;

fn smollm2() -> ModelConfig {
    ModelConfig {
        family: Family::Llama,
        vocab: 49152,
        d_model: 576,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        d_ff: 1536,
        rope_theta: 100_000.0,
        rope_scaling: RopeScaling::None,
        rms_eps: 1e-5,
        tied_embeddings: true,
        qkv_bias: false,
        qk_norm: false,
        max_context: 8192,
        bos_id: None,
        eos_ids: vec![2],
    }
}

/// CPU milliseconds of the process, in steps of 10 (`/proc/self/stat`).
fn cpu_ms() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit(") ").next().unwrap_or_default();
    let ticks = |n: usize| after.split(' ').nth(n).and_then(|t| t.parse::<f64>().ok());
    10.0 * (ticks(11).unwrap_or(0.0) + ticks(12).unwrap_or(0.0))
}

struct Time {
    best_ms: f64,
    median_ms: f64,
    cpu_ms: f64,
}

fn measure(steps: usize, mut body: impl FnMut()) -> Time {
    body();
    let (mut wall, mut cpu) = (Vec::new(), f64::INFINITY);
    for _ in 0..steps {
        let (start, cpu_start) = (Instant::now(), cpu_ms());
        body();
        wall.push(start.elapsed().as_secs_f64() * 1e3);
        cpu = cpu.min(cpu_ms() - cpu_start);
    }
    wall.sort_by(f64::total_cmp);
    Time {
        best_ms: wall[0],
        median_ms: wall[steps / 2],
        cpu_ms: cpu,
    }
}

struct Bench {
    dev: Cpu,
    rows: usize,
    steps: usize,
    /// f32 matrix products, floating-point operations per CPU millisecond.
    gemm: f64,
}

impl Bench {
    fn report(&self, name: &str, rows: usize, flop: f64, time: &Time) {
        println!(
            r#"{{"name":"{name}","rows":{rows},"best_ms":{:.0},"median_ms":{:.0},"cpu_ms":{:.0},"rows_per_s":{:.0},"gflops":{:.0},"of_gemm":{:.2}}}"#,
            time.best_ms,
            time.median_ms,
            time.cpu_ms,
            rows as f64 / time.best_ms * 1e3,
            flop / time.best_ms / 1e6,
            flop / time.cpu_ms / self.gemm,
        );
    }

    /// The speed of the product that dominates a step, `[rows, d] x [2 ff, d]^T`.
    fn gemm_speed(dev: &Cpu, rows: usize) -> f64 {
        let (n, k) = (3072, 576);
        let (x, w) = (
            Buffer::from_slice(&vec![0.5; rows * k]),
            Buffer::from_slice(&vec![0.5; n * k]),
        );
        let mut y = Buffer::zeros(rows * n);
        let time = measure(5, || {
            for _ in 0..10 {
                let out = MatMut::new(&mut y, rows, n);
                dev.matmul_nt(Mat::new(&x, rows, k), Mat::new(&w, n, k), out, false);
            }
        });
        let flop = 20.0 * rows as f64 * n as f64 * k as f64;
        println!(
            r#"{{"name":"gemm","rows":{rows},"best_ms":{:.1},"gflops":{:.0}}}"#,
            time.best_ms / 10.0,
            flop / time.best_ms / 1e6
        );
        flop / time.cpu_ms
    }
}

/// Groups of 8 answers of 64 tokens to a prompt of 200; the items are the answers' tokens.
fn packed(rows: usize) -> (Vec<u32>, TreeLayout, Vec<(u32, u32)>) {
    let (mut segments, mut items, mut row) = (Vec::new(), Vec::new(), 0u32);
    while (row as usize) < rows {
        let parent = segments.len() as u32;
        segments.push(Segment {
            start: row,
            len: 200,
            position: 0,
            parent: None,
        });
        row += 200;
        for _ in 0..8 {
            segments.push(Segment {
                start: row,
                len: 64,
                position: 200,
                parent: Some(parent),
            });
            items.extend((row..row + 63).map(|r| (r, r * 31 % 49152)));
            row += 64;
        }
    }
    let tokens = (0..row).map(|r| r * 7919 % 49152).collect();
    let layout = TreeLayout::new(segments).unwrap_or_else(|error| panic!("{error}"));
    (tokens, layout, items)
}

/// Operations of one forward pass: linear layers of all rows, attention, output of the items.
fn forward_flop(c: &ModelConfig, layout: &TreeLayout, items: usize) -> (f64, f64) {
    let linear = c.d_model * (c.qkv_dim() + c.q_dim() + 3 * c.d_ff);
    let pairs: f64 = (0..layout.rows())
        .map(|r| layout.positions()[r] as f64 + 1.0)
        .sum();
    let rows = layout.rows() as f64;
    let hidden =
        2.0 * rows * (linear * c.layers) as f64 + 4.0 * pairs * (c.q_dim() * c.layers) as f64;
    (hidden, 2.0 * items as f64 * (c.vocab * c.d_model) as f64)
}

impl Bench {
    fn train(&self, name: &str, keep: Keep, lora: Option<&Lora>, params: &Params) {
        let c = params.config();
        let model = TrainModel::new(c, 1024).unwrap_or_else(|error| panic!("{error}"));
        let weights = Weights { params, lora };
        let (tokens, layout, items) = packed(self.rows);
        let rows = layout.rows();
        let mut acts = Activations::new(keep);
        let mut grads = match lora {
            Some(lora) => Grads::of_lora(lora.layout()),
            None => Grads::of_params(params.layout()),
        };
        let d_logprob: Vec<f32> = (0..items.len()).map(|i| (i % 7) as f32 - 3.0).collect();
        let (hidden, output) = forward_flop(c, &layout, items.len());
        let fail = |error| -> ! { panic!("{error}") };
        let forward = |acts: &mut Activations| {
            model
                .forward(&self.dev, weights, &tokens, &layout, acts)
                .unwrap_or_else(|e| fail(e));
        };
        let time = measure(self.steps, || forward(&mut acts));
        self.report(&format!("{name}_hidden"), rows, hidden, &time);
        let asked = |acts: &mut Activations| {
            let out = model.logprobs(&self.dev, weights, acts, &items, &[], false);
            out.map(|_| ()).unwrap_or_else(|e| fail(e));
        };
        let time = measure(self.steps, || asked(&mut acts));
        self.report(&format!("{name}_logprobs"), rows, output, &time);
        let time = measure(self.steps, || {
            forward(&mut acts);
            asked(&mut acts);
            grads.zero();
            let outputs = OutputGrads {
                d_logprob: &d_logprob,
                ..OutputGrads::default()
            };
            let result = model.backward(&self.dev, weights, &mut acts, outputs, &mut grads);
            result.unwrap_or_else(|e| fail(e));
        });
        // Backward: twice the forward work (with adapters, once: no gradient of the weights);
        // the output layer's logits are computed anew; recomputation is not counted as work.
        let times = if lora.is_some() { 2.0 } else { 3.0 };
        let total = times * hidden + (times + 1.0) * output;
        self.report(&format!("{name}_step"), rows, total, &time);
    }

    fn infer(&self, params: &Params) {
        let c = params.config();
        let fail = |error: String| -> ! { panic!("{error}") };
        let mut model =
            InferModel::new(&self.dev, c, params, 2048).unwrap_or_else(|e| fail(e.to_string()));
        let time = measure(self.steps, || {
            model
                .repack(&self.dev, params)
                .unwrap_or_else(|e| fail(e.to_string()));
        });
        self.report("repack", 1, 0.0, &time);
        let mut kv = KvPool::new(c.layers, model.attention_shape(), 16, 64 * 32)
            .unwrap_or_else(|e| fail(e.to_string()));
        let mut scratch = InferScratch::new();
        let tables: Vec<Vec<u32>> = (0..64).map(|s| (s * 32..s * 32 + 32).collect()).collect();
        let per_row = 2.0 * (params.layout().weights()) as f64;
        for (name, sequences, past, rows) in [
            ("prefill", 1, 0, 512),
            ("decode", 1, 256, 1),
            ("decode", 8, 256, 1),
            ("decode", 16, 256, 1),
            ("decode", 32, 256, 1),
            ("decode", 64, 256, 1),
        ] {
            let batch: Vec<_> = (0..sequences)
                .map(|s| PagedSequence {
                    blocks: &tables[s],
                    past,
                    rows,
                })
                .collect();
            let tokens: Vec<u32> = (0..sequences * rows)
                .map(|i| i as u32 * 31 % 49152)
                .collect();
            let wanted: Vec<usize> = (0..sequences).map(|s| s * rows + rows - 1).collect();
            let batch = InferBatch {
                tokens: &tokens,
                sequences: &batch,
                adapters: &[],
                logit_rows: &wanted,
            };
            let time = measure(self.steps * 3, || {
                let result = model.forward(&self.dev, &mut kv, &batch, &mut scratch);
                result.map(|_| ()).unwrap_or_else(|e| fail(e.to_string()));
            });
            let flop = per_row * tokens.len() as f64;
            self.report(&format!("{name}_{sequences}"), tokens.len(), flop, &time);
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str, default: usize| {
        let found = arguments
            .iter()
            .find_map(|a| a.strip_prefix(name)?.parse().ok());
        found.unwrap_or(default)
    };
    let names = ["train", "lora", "recompute", "infer"];
    let all = !arguments.iter().any(|a| names.contains(&a.as_str()));
    let on = |name: &str| all || arguments.iter().any(|a| a == name);
    let dev = Cpu::new(KernelSet::detect(), number("threads=", 2));
    let rows = number("rows=", 4096);
    let gemm = Bench::gemm_speed(&dev, rows);
    let bench = Bench {
        dev,
        rows,
        steps: number("steps=", 3),
        gemm,
    };
    let params = Params::random(&smollm2(), 1);
    if on("train") {
        bench.train("train", Keep::All, None, &params);
    }
    if on("recompute") {
        bench.train("recompute", Keep::LayerInputs, None, &params);
    }
    if on("lora") {
        let config = LoraConfig {
            rank: 16,
            alpha: 32.0,
            targets: Projection::LAYERS.to_vec(),
        };
        match Lora::random(&config, params.config(), 1) {
            Ok(lora) => bench.train("lora", Keep::All, Some(&lora), &params),
            Err(error) => panic!("{error}"),
        }
    }
    if on("infer") {
        bench.infer(&params);
    }
}
