//! Costs of holding outputs to formats: the same prompts and as many tokens, with and without a format.
//!
//! Pairs of runs, one with a format and one without, over the same prompts and seeds; the row is the ratio of
//! their times.

use super::decode::next;
use super::model_output::Real;
use super::row::{Better, Row, Summary};
use super::{Bench, machine::CpuTime};
use crate::BenchError;
use crate::{clock, request};
use sinew_infer::{EmbeddedEngine, EngineConfig, ModelForward, SchedulerConfig};
use sinew_model::InferModel;
use sinew_types::{Engine, EngineEvent, Format, Grammar};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

/// Sequences at a time.
const BATCH: usize = 8;
/// Sampled by each.
const TOKENS: u32 = 64;
/// Longest sequence.
const CONTEXT: usize = 1024;
/// Pairs of a run with a format and one without.
const ROUNDS: u64 = 7;

/// No output of these ends within [`TOKENS`].
const FORMATS: [(&str, &str); 2] = [
    (
        "JSON of any kind",
        r#"{"type":"array","items":{"type":"object"},"minItems":200}"#,
    ),
    (
        "objects of 8 fields",
        r#"{"type":"array","minItems":200,"items":{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer","minimum":0,"maximum":150},"email":{"type":"string"},"active":{"type":"boolean"},"score":{"type":"number"},"kind":{"enum":["person","company"]},"tags":{"type":"array","items":{"type":"string"},"maxItems":3},"city":{"type":"string"}},"required":["name","age","email","active","score","kind","tags","city"],"additionalProperties":false}}"#,
    ),
];

/// Seconds to generate, and how many tokens had no choice.
///
/// All sequences start together. A format that let a sequence end early is an error, as less work would look
/// faster.
fn run(
    engine: &EmbeddedEngine,
    real: &Real,
    format: Option<&Arc<Format>>,
    seed: u64,
) -> Result<(f64, usize), BenchError> {
    let (send, events) = sync_channel(BATCH * (TOKENS as usize + 2));
    engine.pause(true);
    for id in 0..BATCH {
        let prompt = real.prompts[id % real.prompts.len()].clone();
        let mut request = request(id as u64, prompt, seed * 1000 + id as u64, TOKENS);
        request.sampling.format = format.cloned();
        let send = send.clone();
        // The receiver stays until the last event.
        let sink = Box::new(move |event| drop(send.send(event)));
        engine.submit(request, sink).map_err(BenchError::system)?;
    }
    let start = Instant::now();
    engine.pause(false);
    let (mut left, mut count, mut forced) = (BATCH, 0, 0);
    while left > 0 {
        match next(&events)? {
            EngineEvent::Prompt { .. } => {}
            EngineEvent::Tokens { tokens, .. } => {
                count += tokens.len();
                let choices = tokens.iter().filter_map(|t| t.choice.as_ref());
                forced += choices.filter(|c| c.allowed == 1).count();
            }
            EngineEvent::Finished { .. } => left -= 1,
            EngineEvent::Failed { error, .. } => return Err(BenchError::system(error)),
        }
    }
    if count != BATCH * TOKENS as usize {
        let why = format!("{count} tokens, expected {}", BATCH * TOKENS as usize);
        return Err(BenchError::system(why));
    }
    Ok((start.elapsed().as_secs_f64(), forced))
}

/// Compares the speed of generation with an output format (guided decoding) to that of free generation.
///
/// Target: at most 1.10 times the time of free decoding. Compiling the format and prefilling the prompts
/// happen before the measured time.
pub(super) fn formats(bench: &Bench, real: &Real) -> Result<(), BenchError> {
    let config = real.params.config();
    let model = InferModel::new(&bench.dev, config, &real.params, CONTEXT);
    let model = model.map_err(BenchError::system)?;
    let forward = ModelForward::new(bench.dev.clone(), model, 2 * BATCH * CONTEXT);
    let engine = EmbeddedEngine::with_formats(
        forward.map_err(BenchError::system)?,
        EngineConfig {
            scheduler: SchedulerConfig {
                max_num_seqs: BATCH,
                ..SchedulerConfig::default()
            },
            ..EngineConfig::default()
        },
        None,
        Some(Arc::clone(&real.grammars)),
        clock(),
    );
    let engine = engine.map_err(BenchError::system)?;
    for (name, schema) in FORMATS {
        let schema = schema.to_owned();
        let format = Arc::new(Format::new(Grammar::JsonSchema { schema }));
        // Prompts are in the cache, the format is compiled.
        run(&engine, real, None, 0)?;
        run(&engine, real, Some(&format), 0)?;
        let cpu = CpuTime::now();
        let (mut ratios, mut without) = (Vec::new(), 0);
        for round in 1..=ROUNDS {
            let (free, _) = run(&engine, real, None, round)?;
            let (held, forced) = run(&engine, real, Some(&format), round)?;
            ratios.push(held / free);
            without += forced;
        }
        let share = without as f64 / (ROUNDS as f64 * BATCH as f64 * f64::from(TOKENS));
        let title = format!(
            "decode under a format, batch {BATCH}: {name}, {:.0} % of tokens without a choice",
            share * 100.0
        );
        let ratios = Summary::of(ratios, Better::Less).unwrap_or_default();
        let row = Row::new(title, "times free decoding", ratios);
        let others = CpuTime::others_since(cpu);
        bench.printer.row(&row.others(others).at_most(1.10));
    }
    Ok(())
}
