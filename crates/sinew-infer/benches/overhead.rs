//! Overhead of a pass in addition to the model: scheduling and sampling, over logits that cost nothing.
//!
//! `cargo bench --profile dev -p sinew-infer --bench overhead`
#![expect(clippy::print_stdout, reason = "a bench prints its results")]

use sinew_infer::{
    Batch, BlockCopy, DeviceError, EmbeddedEngine, EngineConfig, Forward, ForwardLimits,
    SchedulerConfig,
};
use sinew_tensor::{Cpu, KernelSet};
use sinew_types::{Engine, EngineEvent, GenerateRequest, RequestId, SamplingParams, TensorSource};
use std::sync::mpsc::sync_channel;
use std::time::Instant;

/// Logits of a peaked distribution, the same rows in every pass.
struct Still {
    limits: ForwardLimits,
    logits: Vec<f32>,
    device: Cpu,
}

impl Still {
    fn new(vocab: usize, rows: usize) -> Self {
        let limits = ForwardLimits {
            vocab,
            context: 4096,
            block_tokens: 16,
            blocks: rows * 64,
        };
        let noise = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7) % 10_000;
        let logits = (0..rows * vocab).map(|i| {
            let u = (noise(i) as f32 + 1.0) / 10_001.0;
            // Normal-like bulk with an exponential tail, as language models have.
            -2.0 * (1.0 - u).ln() - 4.0
        });
        Self {
            limits,
            logits: logits.collect(),
            device: Cpu::new(KernelSet::detect(), 2),
        }
    }
}

impl Forward for Still {
    fn limits(&self) -> ForwardLimits {
        self.limits
    }
    fn copy_block(&mut self, _: BlockCopy) {}
    fn logits(&mut self, batch: &Batch) -> Result<&[f32], DeviceError> {
        Ok(&self.logits[..batch.logit_rows.len() * self.limits.vocab])
    }
    fn load_weights(&mut self, _: &dyn TensorSource) -> Result<(), DeviceError> {
        Ok(())
    }
    fn cpu(&self) -> Option<Cpu> {
        Some(self.device.clone())
    }
}

/// Best of some runs, since others may use the machine.
fn best_ms(vocab: usize, sampling: &SamplingParams) -> f64 {
    let runs = (0..5).map(|_| pass_ms(vocab, 128, sampling));
    runs.fold(f64::INFINITY, f64::min)
}

/// Milliseconds of a pass with `rows` generating sequences.
fn pass_ms(vocab: usize, rows: usize, sampling: &SamplingParams) -> f64 {
    let config = EngineConfig {
        scheduler: SchedulerConfig {
            max_num_seqs: rows,
            ..SchedulerConfig::default()
        },
        ..EngineConfig::default()
    };
    let start = Instant::now();
    let clock = Box::new(move || start.elapsed().as_secs_f64());
    let engine = EmbeddedEngine::new(Still::new(vocab, rows), config, None, clock);
    let engine = engine.expect("the limits are fine");
    let (send, ended) = sync_channel(rows);
    engine.pause(true);
    for id in 0..rows as u64 {
        let send = send.clone();
        let sink = Box::new(move |event| {
            if !matches!(event, EngineEvent::Tokens { .. }) {
                let _ = send.send(());
            }
        });
        let prompt = (0..200).map(|i| (i + i / 190 * id as u32) % vocab as u32);
        let sampling = SamplingParams {
            seed: id,
            max_tokens: 30,
            ..sampling.clone()
        };
        let prompt: Vec<u32> = prompt.collect();
        let request = GenerateRequest::new(RequestId(id), prompt, sampling);
        engine.submit(request, sink).expect("the queue has room");
    }
    engine.pause(false);
    for _ in 0..rows {
        ended.recv().expect("an end for each request");
    }
    let status = engine.status();
    status.busy_s * 1e3 / (status.sampled_tokens as f64 / rows as f64)
}

fn main() {
    let plain = SamplingParams::default();
    let cases = [
        ("plain, T 1", plain.clone()),
        (
            "plain, T 0.7",
            SamplingParams {
                temperature: 0.7,
                ..plain.clone()
            },
        ),
        (
            "greedy",
            SamplingParams {
                temperature: 0.0,
                ..plain.clone()
            },
        ),
        (
            "top_p 0.9",
            SamplingParams {
                top_p: 0.9,
                ..plain.clone()
            },
        ),
        (
            "top_k 50",
            SamplingParams {
                top_k: 50,
                ..plain.clone()
            },
        ),
        (
            "top 5 logprobs",
            SamplingParams {
                top_logprobs: 5,
                ..plain
            },
        ),
    ];
    println!(
        "scheduler alone, 128 rows: {:.3} ms a pass",
        best_ms(16, &cases[0].1)
    );
    for vocab in [49_152, 151_936] {
        for (name, sampling) in &cases {
            let ms = best_ms(vocab, sampling);
            println!("{name}, 128 rows of {vocab}: {ms:.2} ms a pass");
        }
    }
}
