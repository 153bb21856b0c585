//! Sampled tokens a second at several batch sizes, through the whole engine.
//!
//! Each batch size is measured with weights in f32, bf16 and int8. All sequences start together; the passes
//! in the middle are timed, when every sequence generates. The target of batch 1 is that the best pass
//! reaches 85 % of the memory bandwidth; the targets of others are the ratios to a peer in the table
//! [`PEERS`].

use super::machine::{CpuTime, limits};
use super::row::{Better, Row, Summary};
use super::{Bench, clock, request, shapes};
use crate::BenchError;
use sinew_infer::{EmbeddedEngine, EngineConfig, ModelForward, SchedulerConfig};
use sinew_model::{InferModel, ModelConfig, Params, Precision};
use sinew_types::{Engine, EngineEvent};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// Tokens of each prompt.
const PROMPT: usize = 64;
/// Sampled by each sequence; the passes in the middle are measured, when all generate.
const SAMPLED: usize = 56;
/// Passes before the measured ones.
const WARM: usize = 12;
/// Measured passes.
const MEASURED: usize = 30;
/// Longest wait for the next token.
const PATIENCE: Duration = Duration::from_secs(120);

/// An engine over random weights with room for `tokens` tokens.
pub(super) fn engine(
    bench: &Bench,
    model: InferModel,
    tokens: usize,
    scheduler: SchedulerConfig,
) -> Result<EmbeddedEngine, BenchError> {
    let forward =
        ModelForward::new(bench.dev.clone(), model, tokens).map_err(BenchError::system)?;
    let config = EngineConfig {
        scheduler,
        ..EngineConfig::default()
    };
    EmbeddedEngine::new(forward, config, None, clock()).map_err(BenchError::system)
}

/// The next event, or why there is none.
pub(super) fn next<T>(events: &Receiver<T>) -> Result<T, BenchError> {
    events.recv_timeout(PATIENCE).map_err(|e| match e {
        RecvTimeoutError::Timeout => BenchError::system("engine: no token for two minutes"),
        RecvTimeoutError::Disconnected => BenchError::system("engine: ended without a last event"),
    })
}

/// Seconds of passes in which `rows` sequences generate.
fn pass_seconds(bench: &Bench, model: InferModel, rows: usize) -> Result<Vec<f64>, BenchError> {
    let scheduler = SchedulerConfig {
        max_num_seqs: rows,
        ..SchedulerConfig::default()
    };
    let vocab = model.config().vocab;
    let engine = engine(bench, model, rows * (PROMPT + SAMPLED + 16), scheduler)?;
    let (send, events) = sync_channel(rows * (SAMPLED + 1));
    engine.pause(true);
    for id in 0..rows {
        let prompt = (0..PROMPT).map(|i| ((500 + i * 13 + id * 7919) % vocab) as u32);
        let prompt: Vec<_> = prompt.collect();
        let request = request(id as u64, prompt, id as u64, SAMPLED as u32);
        let send = send.clone();
        let sink = Box::new(move |event| {
            let failed = match event {
                EngineEvent::Failed { error, .. } => Some(error),
                _ => None,
            };
            // Nobody listens any more once enough was measured.
            let _ = send.try_send((Instant::now(), failed));
        });
        engine.submit(request, sink).map_err(BenchError::system)?;
    }
    engine.pause(false);
    let mut marks = Vec::new();
    for count in 1..=rows * (WARM + MEASURED) {
        let (at, failed) = next(&events)?;
        if let Some(error) = failed {
            return Err(BenchError::system(error));
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

/// Other systems at the same work, and how many times faster this one is to be.
const PEERS: [(&str, &str, &str, f64); 4] = [
    ("torch_decode.py", "f32", "PyTorch f32 cache loop", 2.0),
    ("torch_decode.py", "bf16", "PyTorch bf16 cache loop", 2.0),
    ("generate.py", "f32", "transformers.generate f32", 5.0),
    ("llama_cpp.py", "bf16", "llama.cpp bf16", 1.2),
];

/// One batch size with one storage of the weights.
struct Measured {
    /// Precision of the stored matrices.
    stored: Precision,
    name: String,
    /// Tokens a second over all sequences.
    rate: Summary,
    /// Share of CPU time that other processes took.
    others: Option<f64>,
}

impl Measured {
    /// Builds the model with this precision and measures it.
    fn new(
        bench: &Bench,
        params: &Params,
        rows: usize,
        stored: Precision,
    ) -> Result<Self, BenchError> {
        let cpu = CpuTime::now();
        let config = params.config();
        let context = PROMPT + SAMPLED + 16;
        let model = InferModel::with_precision(&bench.dev, config, params, context, stored)
            .map_err(BenchError::system)?;
        let bytes = model.matrix_bytes() as f64;
        let floor = Floor::measure(bench, bytes, weights(config), rows);
        let times = pass_seconds(bench, model, rows)?;
        let rates = times.iter().map(|s| rows as f64 / s).collect();
        let measured = Self {
            stored,
            name: format!("decode {}, batch {rows}, SmolLM2-135M shape", stored.name()),
            rate: Summary::of(rates, Better::More).unwrap_or_default(),
            others: CpuTime::others_since(cpu),
        };
        floor.row(bench, &measured, rows);
        Ok(measured)
    }

    /// A row without a peer.
    fn row(&self) -> Row {
        Row::new(self.name.clone(), "tok/s", self.rate).others(self.others)
    }
}

/// Weights of all matrices that a pass multiplies with.
fn weights(c: &ModelConfig) -> f64 {
    let layer = c.d_model * (c.qkv_dim() + c.q_dim() + 3 * c.d_ff);
    (c.layers * layer + c.vocab * c.d_model) as f64
}

/// Upper bounds that no code can pass: the weights have to be read, and `f32` has to be multiplied.
struct Floor {
    /// Tokens a second if only reading the weights took time.
    bandwidth: f64,
    /// Tokens a second if only multiply-adds took time.
    arithmetic: f64,
}

impl Floor {
    /// Just before the passes that are compared with it.
    fn measure(bench: &Bench, bytes: f64, weights: f64, rows: usize) -> Self {
        let (read, peak) = limits(&bench.dev);
        Self {
            bandwidth: read / bytes * rows as f64,
            arithmetic: peak / (2.0 * weights),
        }
    }

    /// Compares the best pass with the best read.
    fn row(&self, bench: &Bench, measured: &Measured, rows: usize) {
        let best = Summary {
            median: measured.rate.best,
            ..measured.rate
        };
        let name = format!("{}, best pass", measured.name);
        let row = Row::new(name, "tok/s", best).others(measured.others);
        let int8 = measured.stored == Precision::Int8;
        let row = if self.bandwidth < self.arithmetic || int8 {
            let peer = "reading the weights at memory bandwidth";
            row.against(peer, self.bandwidth, Better::More)
        } else {
            let peer = "the products at the multiply-add peak";
            row.against(peer, self.arithmetic, Better::More)
        };
        let aimed = rows == 1 && !int8;
        bench
            .printer
            .row(&if aimed { row.target(0.85) } else { row });
    }
}

/// `decode, batch N` against the floors and the peers.
pub(super) fn run(bench: &Bench, batches: &[usize]) -> Result<(), BenchError> {
    if let Some(bad) = batches.iter().find(|n| !(1..=1024).contains(*n)) {
        return Err(BenchError::input(format!(
            "--batches {bad}: allowed: 1 to 1024"
        )));
    }
    let params = Params::random(&shapes::smollm2(), 1);
    for &rows in batches {
        let exact = Measured::new(bench, &params, rows, Precision::F32)?;
        let rounded = [Precision::Bf16, Precision::Int8]
            .map(|stored| Measured::new(bench, &params, rows, stored));
        let [bf16, int8] = rounded;
        let (bf16, int8) = (bf16?, int8?);
        let batch = rows.to_string();
        for (script, dtype, peer, target) in PEERS {
            let result = bench.peers.run(script, &[dtype, &batch]);
            for ours in [&exact, &bf16, &int8] {
                bench.printer.row(&match &result {
                    Ok(r) => {
                        let peer = format!("{peer} ({})", r.version);
                        let row = ours.row().against(&peer, r.summary.median, Better::More);
                        row.target(target)
                    }
                    Err(why) => ours.row().target(target).without_peer(peer, why),
                });
            }
        }
        for rounded in [&bf16, &int8] {
            let row = rounded.row();
            let row = row.against("ours, f32", exact.rate.median, Better::More);
            bench.printer.row(&row);
        }
    }
    Ok(())
}
