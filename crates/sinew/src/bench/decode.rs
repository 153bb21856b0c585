//! Sampled tokens a second at several batch sizes, through the whole engine.

use super::machine::{CpuTime, Floors};
use super::row::{Better, Row, Summary};
use super::{Bench, shapes};
use crate::failure::Failure;
use crate::wire::clock;
use sinew_infer::{EmbeddedEngine, EngineConfig, ModelForward, SchedulerConfig};
use sinew_model::{InferModel, ModelConfig, Params};
use sinew_types::{Engine, EngineEvent, GenerateRequest, RequestId, SamplingParams, TensorSource};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

const PROMPT: usize = 64;
/// Sampled by each sequence; the passes in the middle are measured, when all generate.
const SAMPLED: usize = 56;
const WARM: usize = 12;
const MEASURED: usize = 30;
/// Longest wait for the next token.
const PATIENCE: Duration = Duration::from_secs(120);

const BATCHES: [usize; 4] = [1, 8, 32, 128];

/// An engine over random weights with room for `tokens` tokens.
pub(super) fn engine(
    bench: &Bench,
    model: InferModel,
    tokens: usize,
    scheduler: SchedulerConfig,
) -> Result<EmbeddedEngine, Failure> {
    let forward = ModelForward::new(bench.dev.clone(), model, tokens).map_err(Failure::system)?;
    let config = EngineConfig {
        scheduler,
        ..EngineConfig::default()
    };
    EmbeddedEngine::new(forward, config, None, clock()).map_err(Failure::system)
}

/// The next event, or why there is none.
pub(super) fn next<T>(events: &Receiver<T>) -> Result<T, Failure> {
    events.recv_timeout(PATIENCE).map_err(|e| match e {
        RecvTimeoutError::Timeout => Failure::system("engine: no token for two minutes"),
        RecvTimeoutError::Disconnected => Failure::system("engine: ended without a last event"),
    })
}

/// Seconds of passes in which `rows` sequences generate.
fn pass_seconds(bench: &Bench, model: InferModel, rows: usize) -> Result<Vec<f64>, Failure> {
    let scheduler = SchedulerConfig {
        max_running: rows,
        ..SchedulerConfig::default()
    };
    let vocab = model.config().vocab;
    let engine = engine(bench, model, rows * (PROMPT + SAMPLED + 16), scheduler)?;
    let (send, events) = sync_channel(rows * (SAMPLED + 1));
    engine.pause(true);
    for id in 0..rows {
        let prompt = (0..PROMPT).map(|i| ((500 + i * 13 + id * 7919) % vocab) as u32);
        let request = GenerateRequest {
            id: RequestId(id as u64),
            prompt: prompt.collect(),
            sampling: SamplingParams {
                seed: id as u64,
                max_tokens: SAMPLED as u32,
                ..SamplingParams::default()
            },
            priority: 0,
        };
        let send = send.clone();
        let sink = Box::new(move |event| {
            let failed = match event {
                EngineEvent::Failed { error, .. } => Some(error),
                _ => None,
            };
            // Nobody listens any more once enough was measured.
            let _ = send.try_send((Instant::now(), failed));
        });
        engine.submit(request, sink).map_err(Failure::system)?;
    }
    engine.pause(false);
    let mut marks = Vec::new();
    for count in 1..=rows * (WARM + MEASURED) {
        let (at, failed) = next(&events)?;
        if let Some(error) = failed {
            return Err(Failure::system(error));
        }
        if count % rows == 0 && count / rows >= WARM {
            marks.push(at);
        }
    }
    Ok(marks
        .windows(2)
        .map(|w| (w[1] - w[0]).as_secs_f64())
        .collect())
}

/// Bytes that a pass of one token reads at least: every packed weight once.
fn weight_bytes(config: &ModelConfig) -> f64 {
    4.0 * sinew_model::ParamLayout::new(config).weights() as f64
}

fn peer_rows(bench: &Bench, name: &str, ours: Summary, others: Option<f64>, rows: usize) {
    let batch = rows.to_string();
    for (script, args, peer, target) in [
        (
            "torch_decode.py",
            ["f32", &batch],
            "PyTorch f32 cache loop",
            2.0,
        ),
        (
            "torch_decode.py",
            ["bf16", &batch],
            "PyTorch bf16 cache loop",
            2.0,
        ),
        (
            "generate.py",
            ["f32", &batch],
            "transformers.generate f32",
            5.0,
        ),
        ("llama_cpp.py", ["bf16", &batch], "llama.cpp bf16", 1.2),
    ] {
        let row = Row::new(name, "tok/s", ours).others(others);
        bench.printer.row(&match bench.peers.run(script, &args) {
            Ok(r) => {
                let peer = format!("{peer} ({})", r.version);
                row.against(&peer, r.summary.median, Better::More)
                    .target(target)
            }
            Err(why) => row.target(target).without_peer(peer, why),
        });
    }
}

/// `decode, batch N` against the bandwidth floor and the peers.
pub(super) fn run(bench: &Bench, floors: Option<Floors>) -> Result<(), Failure> {
    let config = shapes::smollm2();
    let params = Params::random(&config, 1);
    for rows in BATCHES {
        let cpu = CpuTime::now();
        let source: &dyn TensorSource = &params;
        let model = InferModel::new(&bench.dev, &config, source, PROMPT + SAMPLED + 16)
            .map_err(Failure::system)?;
        let times = pass_seconds(bench, model, rows)?;
        let others = CpuTime::others_since(cpu);
        let rates = times.iter().map(|s| rows as f64 / s).collect();
        let ours = Summary::of(rates, Better::More).unwrap_or_default();
        let name = format!("decode f32, batch {rows}, SmolLM2-135M shape");
        if let Some(floors) = floors {
            // Of the best pass: the floor is that of the best read.
            let (bandwidth, arithmetic) = (
                floors.bandwidth / weight_bytes(&config) * rows as f64,
                floors.peak / (weight_bytes(&config) / 2.0),
            );
            let best = Summary {
                median: ours.best,
                ..ours
            };
            let row = Row::new(format!("{name}, best pass"), "tok/s", best).others(others);
            let (peer, floor) = if bandwidth < arithmetic {
                ("reading the weights at memory bandwidth", bandwidth)
            } else {
                ("the products at the multiply-add peak", arithmetic)
            };
            let row = row.against(peer, floor, Better::More);
            bench
                .printer
                .row(&if rows == 1 { row.target(0.85) } else { row });
        }
        peer_rows(bench, &name, ours, others, rows);
    }
    Ok(())
}
