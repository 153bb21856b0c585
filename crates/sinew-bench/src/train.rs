//! Training steps: against PyTorch, and packed with shared prefixes against without.
//!
//! | row | unit | peer |
//! |---|---|---|
//! | `train step 4x256` | tokens a second of forward, backward and AdamW | PyTorch, eager and compiled |
//! | `peak memory` | GB of this process against GB of the peer | PyTorch |
//! | `GRPO update 8x8` | seconds of a step with shared prompts | the same step with nothing shared |
//!
//! All have random weights in the shape of SmolLM2-135M: the time does not depend on the values.

use super::machine::{CpuTime, peak_memory, seconds, seconds_now};
use super::row::{Better, Row, Summary};
use super::{Bench, shapes};
use crate::BenchError;
use crate::clock;
use sinew_model::{Keep, ModelConfig, Params};
use sinew_tensor::{Cpu, KernelSet};
use sinew_train::{ModelPolicy, Trainer, TrainerConfig};
use sinew_types::{EpisodeId, LossSpec, PolicyVersion, Surrogate, TokenId, TrainRow};

/// Sequences and tokens of each in a plain step.
const ROWS: usize = 4;
/// Tokens of a row.
const LENGTH: usize = 256;
/// Measured steps.
const STEPS: usize = 5;

/// A row that trains the tokens from `prompt` on.
///
/// `weight` is that of each trained token; the first token is never trained, as nothing precedes it.
/// Advantages are 1 and behaviour log-probabilities -10 where a token is trained.
pub(super) fn row(tokens: Vec<TokenId>, prompt: usize, weight: f32) -> TrainRow {
    let from = |value: f32| -> Vec<f32> {
        let trained = |t| if t < prompt.max(1) { 0.0 } else { value };
        (0..tokens.len()).map(trained).collect()
    };
    TrainRow {
        episode: EpisodeId::new("bench"),
        weights: from(weight),
        advantages: from(1.0),
        behaviour_logprobs: from(-10.0),
        tokens,
        ..TrainRow::default()
    }
}

/// Any token, the same for the same number.
pub(super) fn token(config: &ModelConfig, n: usize) -> TokenId {
    (n * 7919 % config.vocab) as TokenId
}

/// A trainer of random weights.
///
/// `context` is the longest row in tokens, `micro_batch_tokens` the number of tokens that are packed into
/// one pass. AdamW with a learning rate of 1e-5.
pub(super) fn trainer(
    dev: &Cpu,
    config: &ModelConfig,
    keep: Keep,
    context: usize,
    micro_batch_tokens: usize,
) -> Result<Trainer<ModelPolicy>, BenchError> {
    let params = Params::random(config, 1);
    let policy =
        ModelPolicy::full(params, context, keep, dev.clone()).map_err(BenchError::system)?;
    let config = TrainerConfig::new(micro_batch_tokens, 1e-5);
    Trainer::new(policy, config, clock()).map_err(BenchError::system)
}

/// Sequences without anything in common, all of whose tokens are trained; each computes `length` rows.
pub(super) fn sequences(config: &ModelConfig, rows: usize, length: usize) -> Vec<TrainRow> {
    let share = 1.0 / (rows * length) as f32;
    (0..rows)
        .map(|r| {
            let tokens = (0..=length)
                .map(|t| token(config, 1 + r + t * 31))
                .collect();
            row(tokens, 1, share)
        })
        .collect()
}

/// Seconds of `steps` optimizer steps over `rows`, after one that is not counted unless the trainer has
/// taken one already.
///
/// Gives the number of tokens that a step computed after packing, too: prefixes that rows share count once.
pub(super) fn step_seconds(
    trainer: &mut Trainer<ModelPolicy>,
    rows: &[TrainRow],
    surrogate: Surrogate,
    steps: usize,
) -> Result<(Vec<f64>, usize), BenchError> {
    let spec = LossSpec::new(surrogate);
    let mut outcome = Ok(0);
    let fresh = trainer.version() == PolicyVersion(0);
    let timed: fn(usize, &mut dyn FnMut()) -> Vec<f64> = if fresh { seconds } else { seconds_now };
    let times = timed(steps, &mut || {
        let report = trainer.step(rows, &spec);
        if let Ok(report) = &report {
            let tokens = report.packed_tokens;
            tracing::info!(tokens, phases = ?report.seconds, "training step");
        }
        if outcome.is_ok() {
            outcome = report.map(|r| r.packed_tokens);
        }
    });
    let packed = outcome.map_err(BenchError::system)?;
    Ok((times, packed))
}

/// `train step 4x256` on AMX tiles against compiled PyTorch in bfloat16; a row with the reason if the kernels
/// do not run.
///
/// Target: twice the peer's rate. A machine without AMX, or other kernels chosen by `SINEW_CPU`, miss the
/// target; the row has the reason.
fn tiles(bench: &Bench) -> Result<(), BenchError> {
    let (name, target) = ("train step 4x256, SmolLM2-135M shape, AMX bf16", 2.0);
    let peer = "PyTorch bf16 compile";
    let chosen = bench.dev.kernels();
    let why = match KernelSet::parse("amx") {
        Err(error) => Some(error.to_string()),
        Ok(_) if chosen != KernelSet::Amx => Some(format!("SINEW_CPU chose `{chosen}`")),
        Ok(_) => None,
    };
    if let Some(why) = why {
        let row = Row::missing(name, "tok/s", why.clone()).target(target);
        bench.printer.row(&row.without_peer(peer, why));
        return Ok(());
    }
    let config = shapes::smollm2();
    let cpu = CpuTime::now();
    let rows = sequences(&config, ROWS, LENGTH);
    let mut trainer = trainer(&bench.dev, &config, Keep::All, LENGTH + 1, ROWS * LENGTH)?;
    let (times, packed) = step_seconds(&mut trainer, &rows, Surrogate::CrossEntropy, STEPS)?;
    drop(trainer);
    let rates = times.iter().map(|s| packed as f64 / s).collect();
    let ours = Summary::of(rates, Better::More).unwrap_or_default();
    let row = Row::new(name, "tok/s", ours).others(CpuTime::others_since(cpu));
    let (batch, length) = (ROWS.to_string(), LENGTH.to_string());
    let result = bench
        .peers
        .run("torch_train.py", &["bf16", "compile", &batch, &length]);
    bench.printer.row(&match &result {
        Ok(r) => {
            let peer = format!("{} bf16 compile", r.version);
            row.against(&peer, r.summary.median, Better::More)
                .target(target)
        }
        Err(why) => row.target(target).without_peer(peer, why),
    });
    Ok(())
}

/// `train step 4x256`: on AMX tiles ([`tiles`]), and in f32 against PyTorch eager and compiled, with the
/// memory of both.
///
/// Target: 1.2 times the peer's rate in f32, with no more memory. Runs first of all parts, as the peak of
/// memory is that of the whole process.
pub(super) fn plain(bench: &Bench) -> Result<(), BenchError> {
    tiles(bench)?;
    let config = shapes::smollm2();
    let cpu = CpuTime::now();
    let rows = sequences(&config, ROWS, LENGTH);
    let dev = bench.dev.with_f32_products();
    let mut trainer = trainer(&dev, &config, Keep::All, LENGTH + 1, ROWS * LENGTH)?;
    let (times, packed) = step_seconds(&mut trainer, &rows, Surrogate::CrossEntropy, STEPS)?;
    drop(trainer);
    let rates = times.iter().map(|s| packed as f64 / s).collect();
    let ours = Summary::of(rates, Better::More).unwrap_or_default();
    let memory = peak_memory();
    let others = CpuTime::others_since(cpu);
    let name = "train step 4x256, SmolLM2-135M shape, f32";
    let (batch, length) = (ROWS.to_string(), LENGTH.to_string());
    for mode in ["eager", "compile"] {
        let row = Row::new(name, "tok/s", ours).others(others);
        let peer = format!("PyTorch f32 {mode}");
        let result = bench
            .peers
            .run("torch_train.py", &["f32", mode, &batch, &length]);
        bench.printer.row(&match &result {
            Ok(r) => {
                let peer = format!("{} f32 {mode}", r.version);
                row.against(&peer, r.summary.median, Better::More)
                    .target(1.2)
            }
            Err(why) => row.target(1.2).without_peer(&peer, why),
        });
        if let (Ok(r), Some(memory)) = (&result, memory)
            && let Some(peak) = r.peak_bytes
        {
            let value = Summary {
                median: memory / 1e9,
                ..Summary::default()
            };
            let row = Row::new("train step 4x256: peak memory", "GB", value);
            let row = row.against(&peer, peak / 1e9, Better::Less).target(1.0);
            bench.printer.row(&row);
        }
    }
    Ok(())
}

/// 8 tasks x 8 samples, 200 shared + 100 own tokens each: prefixes computed once against a step
/// whose rows have nothing in common.
///
/// Rows without sharing differ only in their first token, so that packing finds no prefix to share. One
/// measured step each. The target is half the time.
pub(super) fn grpo(bench: &Bench) -> Result<(), BenchError> {
    /// Tokens of a prompt that a group shares.
    const SHARED: usize = 200;
    /// Tokens of each answer.
    const OWN: usize = 100;
    let config = shapes::smollm2();
    let share = 1.0 / (64 * OWN) as f32;
    let rows = |unshare: bool| -> Vec<TrainRow> {
        let one = |sample: usize| {
            let task = sample / 8;
            let prompt = (0..SHARED).map(|t| token(&config, 1 + task * 1009 + t * 31));
            let own = (0..OWN).map(|t| token(&config, 5 + sample * 2003 + t * 17));
            let mut tokens: Vec<_> = prompt.chain(own).collect();
            if unshare {
                tokens[0] = token(&config, 20_000 + sample);
            }
            row(tokens, SHARED, share)
        };
        (0..64).map(one).collect()
    };
    let surrogate = Surrogate::Clip {
        low: 0.2,
        high: 0.2,
        dual: None,
    };
    let cpu = CpuTime::now();
    let context = SHARED + OWN;
    let mut trainer = trainer(&bench.dev, &config, Keep::All, context, 4096)?;
    let (ours, packed) = step_seconds(&mut trainer, &rows(false), surrogate.clone(), 1)?;
    let (apart, unpacked) = step_seconds(&mut trainer, &rows(true), surrogate, 1)?;
    let ours = Summary::of(ours, Better::Less).unwrap_or_default();
    let apart = Summary::of(apart, Better::Less).unwrap_or_default();
    let name = format!("GRPO update 8x8, 200 shared + 100 own ({packed} of {unpacked} tokens)");
    let row = Row::new(name, "s", ours)
        .against("ours, nothing shared", apart.median, Better::Less)
        .target(2.0);
    bench.printer.row(&row.others(CpuTime::others_since(cpu)));
    Ok(())
}
