//! A whole GRPO step: sampling, a tool call, sampling again, gradients, update, new weights in the engine.

use super::decode::{engine, next};
use super::machine::CpuTime;
use super::row::{Better, Row, Summary};
use super::{Bench, shapes, train};
use crate::{BenchError, programs};
use sinew_infer::{EmbeddedEngine, SchedulerConfig};
use sinew_model::{InferModel, Keep, ModelConfig, Params, Precision};
use sinew_sandbox::{Ending, ExecRequest, Program, SandboxError, SandboxProvider, SandboxSpec};
use sinew_types::{
    Correction, Engine, EngineEvent, LossSpec, PolicyVersion, Surrogate, TokenId, TrainRow,
};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

// Lengths of the quickstart recipe's episodes, half of its tasks.
const TASKS: usize = 4;
/// Episodes of a task.
const SAMPLES: usize = 8;
/// Tokens of a prompt.
const PROMPT: usize = 208;
/// Sampled before the tool call, and again after it.
const TURN: usize = 13;
/// Tokens of the tool's answer.
const ANSWER: usize = 10;
/// Tokens of a whole episode.
const CONTEXT: usize = PROMPT + 2 * TURN + ANSWER;
/// Measured steps, after one more.
const STEPS: usize = 3;
/// The tool's program, the same for the peer.
const CODE: &str = "print(17 * 23)";

/// The prompt of a task, the same for the peer.
fn prompt(config: &ModelConfig, task: usize) -> Vec<TokenId> {
    let token = |i| ((1000 + task * 1009 + i * 31) % config.vocab) as TokenId;
    (0..PROMPT).map(token).collect()
}

/// Output of the tool as [`ANSWER`] tokens.
fn answer_tokens(stdout: &[u8]) -> Vec<TokenId> {
    let said = stdout.iter().map(|&byte| 5000 + TokenId::from(byte));
    said.chain(std::iter::repeat(5000)).take(ANSWER).collect()
}

/// Runs [`CODE`] in a separate sandbox.
async fn call_tool(sandboxes: &dyn SandboxProvider) -> Result<Vec<TokenId>, SandboxError> {
    let mut sandbox = sandboxes.acquire(&SandboxSpec::default()).await?;
    let request = ExecRequest {
        program: Program::Python(CODE.to_owned()),
        stdin: Vec::new(),
        deadline: Duration::from_secs(20),
    };
    let result = sandbox.exec(request).await?;
    sandbox.destroy().await?;
    match result.ending {
        Ending::Exited { code: 0 } => Ok(answer_tokens(&result.stdout)),
        other => Err(SandboxError::Died(format!("the tool ended with {other:?}"))),
    }
}

/// Event of an episode.
enum Event {
    /// Event of a request.
    Engine(EngineEvent),
    /// Answer of a tool.
    Answer(Result<Vec<TokenId>, SandboxError>),
}

/// An episode so far.
#[derive(Default)]
struct Episode {
    /// Prompt, turns and the tool's answer so far.
    tokens: Vec<TokenId>,
    /// Log-probabilities of `tokens`; 0 where they were not sampled.
    logprobs: Vec<f32>,
    /// The tool has answered.
    answered: bool,
}

impl Episode {
    /// Appends tokens that were given, not sampled.
    fn given(&mut self, tokens: Vec<TokenId>) {
        self.tokens.extend(tokens);
        self.logprobs.resize(self.tokens.len(), 0.0);
    }

    /// `advantage` for the sampled tokens, 0 for the others.
    fn row(self, advantage: f32) -> TrainRow {
        let share = 1.0 / (TASKS * SAMPLES * 2 * TURN) as f32;
        let mut row = train::row(self.tokens, PROMPT, share);
        row.behaviour_logprobs = self.logprobs;
        row.advantages[PROMPT..].fill(advantage);
        let answer = PROMPT + TURN..PROMPT + TURN + ANSWER;
        row.weights[answer.clone()].fill(0.0);
        row.advantages[answer].fill(0.0);
        row
    }
}

/// Parts that a step samples with.
struct Sampling<'a> {
    /// Samples.
    engine: &'a EmbeddedEngine,
    /// Run the tool.
    sandboxes: Arc<dyn SandboxProvider>,
    /// Runtime of engines and servers.
    runtime: &'a Runtime,
    /// Sender for sinks and tool calls; holds all events of a step.
    send: SyncSender<(usize, Event)>,
    events: Receiver<(usize, Event)>,
}

impl Sampling<'_> {
    /// Asks for the next turn of episode `id`.
    fn ask(&self, id: usize, request: u64, episode: &Episode) -> Result<(), BenchError> {
        let prompt = episode.tokens.clone();
        let request = super::request(request, prompt, request, TURN as u32);
        let send = self.send.clone();
        let sink = Box::new(move |event| {
            // There is room for all events of a step.
            let _ = send.try_send((id, Event::Engine(event)));
        });
        self.engine
            .submit(request, sink)
            .map_err(BenchError::system)
    }

    /// Calls the tool for episode `id`, while everything else continues.
    fn call(&self, id: usize) {
        let (sandboxes, send) = (self.sandboxes.clone(), self.send.clone());
        self.runtime.spawn(async move {
            let answer = call_tool(sandboxes.as_ref()).await;
            let _ = send.try_send((id, Event::Answer(answer)));
        });
    }

    /// Samples a group for each task, all at once; rows for the trainer.
    fn step(&self, config: &ModelConfig, round: usize) -> Result<Vec<TrainRow>, BenchError> {
        let count = TASKS * SAMPLES;
        let mut episodes: Vec<Episode> = (0..count).map(|_| Episode::default()).collect();
        let request = |id: usize, turn| (2 * (round * count + id) + turn) as u64;
        for (id, episode) in episodes.iter_mut().enumerate() {
            episode.given(prompt(config, id / SAMPLES));
            self.ask(id, request(id, 0), episode)?;
        }
        let mut open = count;
        while open > 0 {
            let (id, event) = next(&self.events)?;
            let episode = &mut episodes[id];
            match event {
                Event::Engine(EngineEvent::Prompt { .. }) => {}
                Event::Engine(EngineEvent::Tokens { tokens, .. }) => {
                    episode.tokens.extend(tokens.iter().map(|t| t.id));
                    episode.logprobs.extend(tokens.iter().map(|t| t.logprob));
                }
                Event::Engine(EngineEvent::Finished { .. }) if episode.answered => open -= 1,
                Event::Engine(EngineEvent::Finished { .. }) => self.call(id),
                Event::Engine(EngineEvent::Failed { error, .. }) => {
                    return Err(BenchError::system(error));
                }
                Event::Answer(answer) => {
                    episode.given(answer.map_err(BenchError::system)?);
                    episode.answered = true;
                    self.ask(id, request(id, 1), episode)?;
                }
            }
        }
        // The rewards of the peer, less their mean.
        let advantage = |id: usize| f32::from(u8::from(id.is_multiple_of(3))) - 1.0 / 3.0;
        let episodes = episodes.into_iter().enumerate();
        Ok(episodes.map(|(id, e)| e.row(advantage(id))).collect())
    }
}

/// Seconds of whole steps that sample with weights of `precision`; rounded ones need the correction.
fn step_seconds(bench: &Bench, precision: Precision) -> Result<Vec<f64>, BenchError> {
    let config = shapes::smollm2();
    let params = Params::random(&config, 1);
    let model = InferModel::with_precision(&bench.dev, &config, &params, CONTEXT, precision)
        .map_err(BenchError::system)?;
    let count = TASKS * SAMPLES;
    let engine = engine(
        bench,
        model,
        count * (CONTEXT + 16),
        SchedulerConfig::default(),
    )?;
    let mut trainer = train::trainer(&bench.dev, &config, Keep::All, CONTEXT, 4096)?;
    let correction = match precision {
        Precision::F32 => Correction::None,
        Precision::Bf16 | Precision::Int8 => Correction::Truncate {
            low: 0.0,
            high: 2.0,
        },
    };
    let spec = LossSpec {
        correction,
        ..LossSpec::new(Surrogate::Clip {
            low: 0.2,
            high: 0.2,
            dual: None,
        })
    };
    let runtime = Runtime::new().map_err(BenchError::system)?;
    let (send, events) = sync_channel(count * (2 * (TURN + 2) + 1));
    let sampling = Sampling {
        engine: &engine,
        sandboxes: {
            let _inside = runtime.enter();
            programs::sandboxes(count)?
        },
        runtime: &runtime,
        send,
        events,
    };
    let mut times = Vec::new();
    for round in 0..=STEPS {
        let start = Instant::now();
        let rows = sampling.step(&config, round)?;
        let sampled = start.elapsed().as_secs_f64();
        let report = trainer.step(&rows, &spec).map_err(BenchError::system)?;
        let weights = trainer.policy().shared_params();
        let version = PolicyVersion(round as u64 + 1);
        engine
            .load_weights(version, weights)
            .map_err(BenchError::system)?;
        let all = start.elapsed().as_secs_f64();
        tracing::info!(
            sampled,
            all,
            tokens = report.packed_tokens,
            phases = ?report.seconds,
            "whole step"
        );
        if round > 0 {
            times.push(all);
        }
    }
    Ok(times)
}

/// Our row of whole steps.
fn ours(bench: &Bench, precision: Precision) -> Result<Row, BenchError> {
    let cpu = CpuTime::now();
    let times = step_seconds(bench, precision)?;
    let others = CpuTime::others_since(cpu);
    let ours = Summary::of(times, Better::Less).unwrap_or_default();
    let sampled_with = match precision {
        Precision::F32 => String::new(),
        rounded => format!(", engine.weights = {}, truncate", rounded.name()),
    };
    let name = format!(
        "whole GRPO step with a tool call, {TASKS}x{SAMPLES}, {PROMPT} + {TURN} + {ANSWER} + {TURN} \
         tokens{sampled_with}"
    );
    Ok(Row::new(name, "s", ours).others(others))
}

/// Whole steps against TRL's, which samples with the weights it trains. The second row, with rounded weights
/// and the correction that they need, is not the same algorithm.
///
/// The ratio is TRL's seconds over ours. Target of the first row: 8.
pub(super) fn run(bench: &Bench) -> Result<(), BenchError> {
    let rows = [
        (ours(bench, Precision::F32)?, Some(8.0)),
        (ours(bench, Precision::Bf16)?, None),
    ];
    let sizes = [TASKS, SAMPLES, PROMPT, TURN, ANSWER].map(|n| n.to_string());
    let args: Vec<&str> = sizes.iter().map(String::as_str).collect();
    let peer = bench.peers.run("trl_grpo.py", &args);
    for (row, target) in rows {
        let row = match &peer {
            Ok(r) => row.against(&r.version, r.summary.median, Better::Less),
            Err(why) => row.without_peer("TRL GRPOTrainer", why),
        };
        bench.printer.row(&match target {
            Some(least) => row.target(least),
            None => row,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sampled_tokens_are_trained() {
        let mut episode = Episode::default();
        let turn = |episode: &mut Episode, logprob| {
            episode.tokens.extend([7; TURN]);
            episode.logprobs.extend([logprob; TURN]);
        };
        episode.given(prompt(&shapes::smollm2(), 1));
        turn(&mut episode, -1.0);
        episode.given(answer_tokens(b"391\n"));
        turn(&mut episode, -2.0);
        let row = episode.row(0.5);
        row.validate().unwrap();
        assert_eq!(row.tokens.len(), CONTEXT);
        assert_eq!(row.tokens[PROMPT + TURN], 5000 + TokenId::from(b'3'));
        for t in 0..CONTEXT {
            let sampled = row.tokens[t] == 7 && t >= PROMPT;
            assert_eq!(row.weights[t] > 0.0, sampled, "{t}");
            assert_eq!(row.advantages[t] != 0.0, sampled, "{t}");
            assert_eq!(row.behaviour_logprobs[t] < 0.0, sampled, "{t}");
        }
        assert_eq!(answer_tokens(&[b'x'; 99]).len(), ANSWER);
    }
}
