//! Rows that depend on a model's output: guessed tokens, and the gap that rounded weights make.
//!
//! A real model is needed if the content of the output matters: whether drafts are accepted, how rounded
//! weights change log-probabilities. These rows report if there is none.

use super::decode::{engine, next};
use super::row::{Better, Row, Summary};
use super::{Bench, request};
use crate::BenchError;
use sinew_grammar::Grammars;
use sinew_infer::{EmbeddedEngine, SchedulerConfig};
use sinew_model::{InferModel, Params, Precision};
use sinew_render::Renderer;
use sinew_train::{ModelPolicy, score_rows};
use sinew_types::{Engine, EngineEvent, TokenId, TrainRow};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

/// Longest sequence.
const CONTEXT: usize = 512;
/// Tokens of each answer.
const MAX_TOKENS: u32 = 48;
/// Rounds over the same tasks with other seeds, as the steps of a training run.
const ROUNDS: u64 = 3;

/// A model with its tokenizer and prompts of the `tool_math` environment.
pub(crate) struct Real {
    /// Weights of the model.
    pub(crate) params: Params,
    /// Tokenizer and chat template of the model.
    pub(crate) renderer: Arc<dyn Renderer>,
    /// Makes masks over its vocabulary.
    pub(crate) grammars: Arc<dyn Grammars>,
    /// [`Real::PROMPTS`] rendered prompts.
    pub(crate) prompts: Vec<Vec<TokenId>>,
}

/// Answer to one prompt.
struct PromptAnswer {
    /// Index into the prompts.
    prompt: usize,
    /// The answer.
    tokens: Vec<TokenId>,
    /// Log-probabilities as the engine reported them, one a token.
    logprobs: Vec<f32>,
}

impl std::fmt::Debug for Real {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Weights are long.
        let prompts = self.prompts.len();
        f.debug_struct("Real")
            .field("prompts", &prompts)
            .finish_non_exhaustive()
    }
}

impl Real {
    /// Prompts that the parts which need a model ask for.
    pub(crate) const PROMPTS: usize = 8;

    /// An engine over the model's weights in this precision.
    fn engine(
        &self,
        bench: &Bench,
        precision: Precision,
        speculative_tokens: usize,
    ) -> Result<EmbeddedEngine, BenchError> {
        let config = self.params.config();
        let model =
            InferModel::with_precision(&bench.dev, config, &self.params, CONTEXT, precision)
                .map_err(BenchError::system)?;
        let scheduler = SchedulerConfig {
            speculative_tokens,
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
    ) -> Result<Vec<PromptAnswer>, BenchError> {
        let count = tasks * group;
        let (send, events) = sync_channel(count * (MAX_TOKENS as usize + 2));
        let mut said = Vec::with_capacity(count);
        for id in 0..count {
            let prompt = id / group;
            said.push(PromptAnswer {
                prompt,
                tokens: Vec::new(),
                logprobs: Vec::new(),
            });
            let prompt = self.prompts[prompt].clone();
            let mut request = request(id as u64, prompt, seed * 1000 + id as u64, MAX_TOKENS);
            request.sampling.stop_ids = self.renderer.stop_ids().to_vec();
            let send = send.clone();
            let sink = Box::new(move |event| {
                // The receiver stays until the last event.
                let _ = send.send((id, event));
            });
            engine.submit(request, sink).map_err(BenchError::system)?;
        }
        let mut left = count;
        while left > 0 {
            let (id, event) = next(&events)?;
            match event {
                EngineEvent::Prompt { .. } => {}
                EngineEvent::Tokens { tokens, .. } => {
                    said[id].tokens.extend(tokens.iter().map(|t| t.id));
                    said[id].logprobs.extend(tokens.iter().map(|t| t.logprob));
                }
                EngineEvent::Finished { .. } => left -= 1,
                EngineEvent::Failed { error, .. } => return Err(BenchError::system(error)),
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
    ) -> Result<(Vec<f64>, Vec<Vec<TokenId>>), BenchError> {
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
pub(super) fn speculation(bench: &Bench, real: &Real) -> Result<(), BenchError> {
    for (tasks, group) in [(1, 1), (1, 8), (8, 8)] {
        let plain = real.engine(bench, Precision::F32, 0)?;
        let (times, expected) = real.rounds(&plain, tasks, group)?;
        drop(plain);
        let plain = Summary::of(times, Better::Less).unwrap_or_default();
        for rows in [8, 16, 32] {
            let engine = real.engine(bench, Precision::F32, rows)?;
            let (times, found) = real.rounds(&engine, tasks, group)?;
            if found != expected {
                return Err(BenchError::system(format!(
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
pub(super) fn rounding(bench: &Bench, real: &Real) -> Result<(), BenchError> {
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
fn gaps(bench: &Bench, real: &Real, said: &[PromptAnswer]) -> Result<Vec<f64>, BenchError> {
    let rows: Vec<TrainRow> = said.iter().map(|s| row(real, s)).collect();
    let policy = ModelPolicy::frozen(real.params.clone(), CONTEXT, bench.dev.clone());
    let mut policy = policy.map_err(BenchError::system)?;
    let scored = score_rows(&mut policy, &rows, 4096).map_err(BenchError::system)?;
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

/// An answer as a row that weights only its tokens.
fn row(real: &Real, said: &PromptAnswer) -> TrainRow {
    let prompt = &real.prompts[said.prompt];
    TrainRow {
        behaviour_logprobs: [&vec![0.0; prompt.len()][..], &said.logprobs].concat(),
        ..super::train::row([&prompt[..], &said.tokens].concat(), prompt.len(), 1.0)
    }
}
