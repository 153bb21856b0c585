//! Savings of the prefix cache: tokens computed for many episodes of several turns.
//!
//! The figure is a count and not a time: rows of forward passes, with the cache and with a first token that
//! makes each request different. The target is at most 5 % more than the minimum.

use super::decode::{engine, next};
use super::row::{Better, Row, Summary};
use super::{Bench, request, shapes};
use crate::BenchError;
use sinew_infer::SchedulerConfig;
use sinew_model::{InferModel, Params};
use sinew_types::{Engine, EngineEvent, TokenId};
use std::sync::mpsc::sync_channel;

/// Episodes at once.
const EPISODES: usize = 64;
/// Episodes of one task.
const GROUP: usize = 8;
/// Turns of each episode.
const TURNS: usize = 5;
/// Tokens that all episodes share.
const SYSTEM: usize = 150;
/// Tokens that a group shares.
const QUESTION: usize = 50;
/// Tokens of each turn.
const SAMPLED: usize = 32;
/// Tokens between two turns.
const OBSERVED: usize = 24;

/// Any token, the same for the same number.
fn token(n: usize) -> TokenId {
    (1 + n * 769 % 1000) as TokenId
}

/// System text and the question of its group.
fn first_prompt(episode: usize) -> Vec<TokenId> {
    let question = (0..QUESTION).map(|t| token(7 + episode / GROUP * 331 + t * 3));
    (0..SYSTEM).map(token).chain(question).collect()
}

/// Rows of all forward passes. `apart` gives each request a different first token, so that nothing is ever
/// found in the cache.
fn computed_rows(bench: &Bench, apart: bool) -> Result<usize, BenchError> {
    let config = shapes::tiny();
    let params = Params::random(&config, 1);
    let model = InferModel::new(&bench.dev, &config, &params, 1024).map_err(BenchError::system)?;
    let engine = engine(bench, model, 1 << 17, SchedulerConfig::default())?;
    let (send, events) = sync_channel(EPISODES * (SAMPLED + 2));
    let submit = |episode: usize, turn: usize, prompt: &[TokenId]| {
        let id = turn * EPISODES + episode;
        let mut prompt = prompt.to_vec();
        if apart {
            prompt[0] = 1 + id as TokenId;
        }
        let request = request(id as u64, prompt, id as u64, SAMPLED as u32);
        let send = send.clone();
        let sink = Box::new(move |event| {
            // The receiver outlives the engine's work; at the end nobody listens.
            let _ = send.send((episode, event));
        });
        engine.submit(request, sink).map_err(BenchError::system)
    };
    let mut episodes: Vec<(usize, Vec<TokenId>)> =
        (0..EPISODES).map(|e| (0, first_prompt(e))).collect();
    for (e, (_, tokens)) in episodes.iter().enumerate() {
        submit(e, 0, tokens)?;
    }
    let mut left = EPISODES * TURNS;
    while left > 0 {
        let (e, event) = next(&events)?;
        let (turn, tokens) = &mut episodes[e];
        match event {
            EngineEvent::Prompt { .. } => {}
            EngineEvent::Tokens { tokens: new, .. } => tokens.extend(new.iter().map(|t| t.id)),
            EngineEvent::Failed { error, .. } => return Err(BenchError::system(error)),
            EngineEvent::Finished { .. } => {
                left -= 1;
                *turn += 1;
                if *turn < TURNS {
                    let seen = (0..OBSERVED).map(|t| token(11 + e * 17 + *turn * 131 + t));
                    tokens.extend(seen);
                    submit(e, *turn, tokens)?;
                }
            }
        }
    }
    let status = engine.status();
    // Each sampled token but a turn's first came from a separate row.
    let first = (EPISODES * TURNS) as u64;
    Ok((status.prefill_tokens + status.sampled_tokens - first) as usize)
}

/// Rows if every token is computed once, and none that nobody asks what follows.
fn minimum_rows() -> usize {
    let prompts = SYSTEM + EPISODES / GROUP * QUESTION;
    let turns = TURNS * SAMPLED + (TURNS - 1) * OBSERVED;
    prompts + EPISODES * (turns - 1)
}

/// `prefix cache`: 5-turn episodes, 64 at once.
pub(super) fn run(bench: &Bench) -> Result<(), BenchError> {
    let one = |rows: usize| Summary {
        median: rows as f64,
        ..Summary::default()
    };
    let cached = computed_rows(bench, false)?;
    let apart = computed_rows(bench, true)?;
    let name = "prefix cache: 64 episodes of 5 turns at once";
    let least = minimum_rows() as f64;
    let row = Row::new(name, "tokens computed", one(cached));
    let row = row.against("the least there can be", least, Better::Less);
    bench.printer.row(&row.target(1.0 / 1.05));
    let row = Row::new(name, "tokens computed", one(cached));
    let row = row.against("ours, nothing found", apart as f64, Better::Less);
    bench.printer.row(&row);
    Ok(())
}
