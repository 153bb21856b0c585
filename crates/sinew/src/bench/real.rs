//! What depends on what a model says: guessed tokens, and the gap that rounded weights make.

use super::Bench;
use super::decode::{engine, next};
use super::row::{Better, Row, Summary};
use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::wire;
use sinew_env::Split;
use sinew_env::math::PromptConfig;
use sinew_infer::{EmbeddedEngine, SchedulerConfig};
use sinew_model::{InferModel, Params, Precision, load_model};
use sinew_render::Renderer;
use sinew_train::{ModelPolicy, score_rows};
use sinew_types::{
    Engine, EngineEvent, EpisodeId, GenerateRequest, PolicyVersion, RequestId, SamplingParams,
    TokenId, TrainRow,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

const CONTEXT: usize = 512;
const MAX_TOKENS: u32 = 48;
/// Rounds over the same tasks with other seeds, as the steps of a training run.
const ROUNDS: u64 = 3;

/// A model with its tokenizer and prompts of the `tool_math` environment.
pub(super) struct Real {
    params: Params,
    renderer: Arc<dyn Renderer>,
    prompts: Vec<Vec<TokenId>>,
}

/// What was sampled after one prompt.
struct Said {
    prompt: usize,
    tokens: Vec<TokenId>,
    logprobs: Vec<f32>,
}

impl Real {
    /// Loads `source`, as a recipe's `model` names it.
    pub(super) fn load(source: &str) -> Result<Self, String> {
        let text = format!(
            "name = \"bench\"\nmodel = {source:?}\nenv = {{ type = \"tool_math\" }}\nalgorithm = {{ type = \"grpo\" }}\n"
        );
        let recipe = Recipe::parse(Path::new("--model"), &text).map_err(|e| e.to_string())?;
        let failed = |e: Failure| e.text().to_owned();
        let files = wire::model_files(&recipe).map_err(failed)?;
        let files = files.ok_or("a model from scratch says nothing worth measuring")?;
        let params = load_model(&files).map_err(|e| e.to_string())?.params;
        let renderer = wire::renderer(&recipe).map_err(failed)?;
        let tasks = wire::taskset(&recipe).map_err(failed)?;
        let prompts = (0..8).map(|i| {
            let task = tasks.get(Split::Train, i).map_err(|e| e.to_string())?;
            let messages = PromptConfig::default().messages(&task.prompt);
            let prompt = renderer.render_prompt(&messages, &[]);
            prompt.map_err(|e| e.to_string())
        });
        Ok(Self {
            prompts: prompts.collect::<Result<_, _>>()?,
            params,
            renderer,
        })
    }

    fn engine(
        &self,
        bench: &Bench,
        precision: Precision,
        speculation_rows: usize,
    ) -> Result<EmbeddedEngine, Failure> {
        let config = self.params.config();
        let model =
            InferModel::with_precision(&bench.dev, config, &self.params, CONTEXT, precision)
                .map_err(Failure::system)?;
        let scheduler = SchedulerConfig {
            speculation_rows,
            ..SchedulerConfig::default()
        };
        engine(bench, model, 64 * CONTEXT, scheduler)
    }

    /// Samples `group` answers to each of the first `tasks` prompts, all at once.
    fn sample(
        &self,
        engine: &EmbeddedEngine,
        tasks: usize,
        group: usize,
        seed: u64,
    ) -> Result<Vec<Said>, Failure> {
        let count = tasks * group;
        let (send, events) = sync_channel(count * (MAX_TOKENS as usize + 2));
        let mut said = Vec::with_capacity(count);
        for id in 0..count {
            let prompt = id / group;
            said.push(Said {
                prompt,
                tokens: Vec::new(),
                logprobs: Vec::new(),
            });
            let request = GenerateRequest {
                id: RequestId(id as u64),
                prompt: self.prompts[prompt].clone(),
                sampling: SamplingParams {
                    seed: seed * 1000 + id as u64,
                    max_tokens: MAX_TOKENS,
                    stop_ids: self.renderer.stop_ids().to_vec(),
                    ..SamplingParams::default()
                },
                priority: 0,
            };
            let send = send.clone();
            let sink = Box::new(move |event| {
                // The receiver stays until the last event.
                let _ = send.send((id, event));
            });
            engine.submit(request, sink).map_err(Failure::system)?;
        }
        let mut left = count;
        while left > 0 {
            let (id, event) = next(&events)?;
            match event {
                EngineEvent::Tokens { tokens, .. } => {
                    said[id].tokens.extend(tokens.iter().map(|t| t.id));
                    said[id].logprobs.extend(tokens.iter().map(|t| t.logprob));
                }
                EngineEvent::Finished { .. } => left -= 1,
                EngineEvent::Failed { error, .. } => return Err(Failure::system(error)),
            }
        }
        Ok(said)
    }

    /// Seconds of each round, and all that was sampled.
    fn rounds(
        &self,
        engine: &EmbeddedEngine,
        tasks: usize,
        group: usize,
    ) -> Result<(Vec<f64>, Vec<Vec<TokenId>>), Failure> {
        // The prompts are in the cache and the first guesses can be made.
        self.sample(engine, tasks, group, 0)?;
        let (mut times, mut all) = (Vec::new(), Vec::new());
        for round in 1..=ROUNDS {
            let start = Instant::now();
            let said = self.sample(engine, tasks, group, round)?;
            times.push(start.elapsed().as_secs_f64());
            all.extend(said.into_iter().map(|s| s.tokens));
        }
        Ok((times, all))
    }
}

/// Guessing against none, with few and with many answers at once. The tokens have to be the same.
pub(super) fn speculation(bench: &Bench, real: &Real) -> Result<(), Failure> {
    for (tasks, group) in [(1, 1), (1, 8), (8, 8)] {
        let plain = real.engine(bench, Precision::F32, 0)?;
        let (times, expected) = real.rounds(&plain, tasks, group)?;
        drop(plain);
        let plain = Summary::of(times, Better::Less).unwrap_or_default();
        for rows in [8, 16, 32] {
            let engine = real.engine(bench, Precision::F32, rows)?;
            let (times, found) = real.rounds(&engine, tasks, group)?;
            if found != expected {
                return Err(Failure::system(format!(
                    "guessing with {rows} rows changed what was sampled"
                )));
            }
            let ours = Summary::of(times, Better::Less).unwrap_or_default();
            let name = format!("tool_math answers, {tasks}x{group} at once, {rows} rows to guess");
            let row = Row::new(name, "s", ours);
            let row = row.against("ours without guesses", plain.median, Better::Less);
            bench.printer.row(&row);
        }
    }
    Ok(())
}

/// Difference between the engine's log-probabilities of what it sampled and the trainer's.
pub(super) fn rounding(bench: &Bench, real: &Real) -> Result<(), Failure> {
    let mut mean_of_f32 = 0.0;
    for precision in Precision::ALL {
        let name = precision.name();
        let engine = real.engine(bench, precision, 0)?;
        let said = real.sample(&engine, 8, 4, 7)?;
        drop(engine);
        let gaps = gaps(bench, real, &said)?;
        let count = gaps.len() as f64;
        let mean = gaps.iter().map(|d| d.abs()).sum::<f64>() / count;
        // KL(engine || trainer) by k3 of what the engine sampled (Schulman 2020).
        let kl = gaps.iter().map(|d| d.exp_m1() - d).sum::<f64>() / count;
        let one = |median: f64| Summary {
            median,
            ..Summary::default()
        };
        let title = |what: &str| format!("log-probs, {name} engine and trainer: {what}");
        let row = Row::new(title("mean gap"), "nats", one(mean));
        bench.printer.row(&match precision {
            Precision::F32 => row,
            Precision::Bf16 | Precision::Int8 => {
                row.against("f32 engine", mean_of_f32, Better::Less)
            }
        });
        if precision == Precision::F32 {
            mean_of_f32 = mean;
        }
        let largest = gaps.iter().fold(0.0f64, |m, d| m.max(d.abs()));
        let rows = [
            Row::new(title("largest gap"), "nats", one(largest)),
            Row::new(title("divergence"), "nats", one(kl)),
        ];
        rows.iter().for_each(|row| bench.printer.row(row));
    }
    Ok(())
}

/// Trainer's log-probability minus the engine's, for each sampled token.
fn gaps(bench: &Bench, real: &Real, said: &[Said]) -> Result<Vec<f64>, Failure> {
    let rows: Vec<TrainRow> = said.iter().map(|s| row(real, s)).collect();
    let policy = ModelPolicy::frozen(real.params.clone(), CONTEXT, bench.dev.clone());
    let mut policy = policy.map_err(Failure::system)?;
    let scored = score_rows(&mut policy, &rows, 4096).map_err(Failure::system)?;
    Ok(rows
        .iter()
        .zip(&scored)
        .flat_map(|(row, scored)| {
            let known = row.behaviour_logprobs.iter().zip(&row.weights);
            let pairs = scored.iter().zip(known).filter(|(_, (_, w))| **w != 0.0);
            pairs.map(|(ours, (theirs, _))| f64::from(*ours) - f64::from(*theirs))
        })
        .collect())
}

fn row(real: &Real, said: &Said) -> TrainRow {
    let prompt = &real.prompts[said.prompt];
    let column = |sampled: &[f32]| [&vec![0.0; prompt.len()][..], sampled].concat();
    let ones = vec![1.0; said.tokens.len()];
    TrainRow {
        episode: EpisodeId::new("bench"),
        tokens: [&prompt[..], &said.tokens[..]].concat(),
        weights: column(&ones),
        advantages: column(&ones),
        behaviour_logprobs: column(&said.logprobs),
        ref_logprobs: None,
        prox_logprobs: None,
        values: None,
        returns: None,
        teacher_top: None,
        oldest_version: PolicyVersion(0),
    }
}
