//! A whole GRPO step: sampling, gradients, update, new weights in the engine.

use super::decode::{engine, next};
use super::machine::CpuTime;
use super::row::{Better, Row, Summary};
use super::{Bench, shapes, train};
use crate::failure::Failure;
use sinew_infer::{EmbeddedEngine, SchedulerConfig};
use sinew_model::{InferModel, Keep, ModelConfig, Params};
use sinew_types::{
    Engine, EngineEvent, GenerateRequest, PolicyVersion, RequestId, SamplingParams, Surrogate,
    TokenId, TrainRow,
};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

const TASKS: usize = 2;
const SAMPLES: usize = 8;
const PROMPT: usize = 208;
const SAMPLED: usize = 64;
/// Measured steps, after one more.
const STEPS: usize = 2;

/// The prompt of a task, the same for the peer.
fn prompt(config: &ModelConfig, task: usize) -> Vec<TokenId> {
    let token = |i| ((1000 + task * 1009 + i * 31) % config.vocab) as TokenId;
    (0..PROMPT).map(token).collect()
}

/// Samples a group for each task, all at once; rows for the trainer.
fn sample(
    engine: &EmbeddedEngine,
    config: &ModelConfig,
    round: usize,
) -> Result<Vec<TrainRow>, Failure> {
    let count = TASKS * SAMPLES;
    let (send, events) = sync_channel(count * (SAMPLED + 2));
    for id in 0..count {
        let request = GenerateRequest {
            id: RequestId((round * count + id) as u64),
            prompt: prompt(config, id / SAMPLES),
            sampling: SamplingParams {
                seed: (round * count + id) as u64,
                max_tokens: SAMPLED as u32,
                ..SamplingParams::default()
            },
            priority: 0,
        };
        let send = send.clone();
        let sink = Box::new(move |event| {
            let _ = send.try_send((id, event));
        });
        engine.submit(request, sink).map_err(Failure::system)?;
    }
    let mut sampled = vec![(Vec::new(), Vec::new()); count];
    let mut open = count;
    while open > 0 {
        match next(&events)? {
            (id, EngineEvent::Tokens { tokens, .. }) => {
                let (ids, logprobs) = &mut sampled[id];
                ids.extend(tokens.iter().map(|t| t.id));
                logprobs.extend(tokens.iter().map(|t| t.logprob));
            }
            (_, EngineEvent::Finished { .. }) => open -= 1,
            (_, EngineEvent::Failed { error, .. }) => return Err(Failure::system(error)),
        }
    }
    let share = 1.0 / (count * SAMPLED) as f32;
    let rows = sampled.into_iter().enumerate();
    Ok(rows
        .map(|(id, (ids, logprobs))| {
            let all = [prompt(config, id / SAMPLES), ids].concat();
            let mut row = train::row(all, PROMPT, share);
            row.behaviour_logprobs = [vec![0.0; PROMPT], logprobs].concat();
            // The rewards of the peer, less their mean.
            let advantage = f32::from(u8::from(id % 3 == 0)) - 1.0 / 3.0;
            row.advantages[PROMPT..].fill(advantage);
            row
        })
        .collect())
}

/// Whole steps against TRL's.
pub(super) fn run(bench: &Bench) -> Result<(), Failure> {
    let config = shapes::smollm2();
    let context = PROMPT + SAMPLED;
    let params = Params::random(&config, 1);
    let model = InferModel::new(&bench.dev, &config, &params, context).map_err(Failure::system)?;
    let rows = TASKS * SAMPLES;
    let engine = engine(
        bench,
        model,
        rows * (context + 16),
        SchedulerConfig::default(),
    )?;
    let mut trainer = train::trainer(&bench.dev, &config, Keep::All, context, 4096)?;
    let spec = train::spec(Surrogate::Clip {
        low: 0.2,
        high: 0.2,
        dual: None,
    });
    let cpu = CpuTime::now();
    let mut times = Vec::new();
    for round in 0..=STEPS {
        let start = Instant::now();
        let rows = sample(&engine, &config, round)?;
        trainer.step(&rows, &spec).map_err(Failure::system)?;
        let weights = Arc::new(trainer.policy().params().clone());
        let version = PolicyVersion(round as u64 + 1);
        engine
            .load_weights(version, weights)
            .map_err(Failure::system)?;
        if round > 0 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    let others = CpuTime::others_since(cpu);
    drop((engine, trainer));
    let ours = Summary::of(times, Better::Less).unwrap_or_default();
    let name = format!("whole GRPO step, {TASKS}x{SAMPLES}, {PROMPT} + {SAMPLED} tokens, no tools");
    let row = Row::new(name, "s", ours).others(others);
    let sizes = [TASKS, SAMPLES, PROMPT, SAMPLED].map(|n| n.to_string());
    let args: Vec<&str> = sizes.iter().map(String::as_str).collect();
    bench
        .printer
        .row(&match bench.peers.run("trl_grpo.py", &args) {
            Ok(r) => row
                .against(&r.version, r.summary.median, Better::Less)
                .target(8.0),
            Err(why) => row.target(8.0).without_peer("TRL GRPOTrainer", &why),
        });
    Ok(())
}
