//! Compares some pushed log-probabilities with the engine's own.
//!
//! A few tokens suffice to notice a sender whose log-probabilities are of another temperature or of other
//! weights.

use crate::check::Entry;
use crate::config::SpotCheck;
use crate::reason::Reason;
use crate::schema::Kind;
use sinew_types::{
    Engine, EngineEvent, GenerateRequest, NodeId, RequestId, SamplingParams, TokenId, TokenKind,
};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

/// Maximum time for the engine to score one token.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Bias of the logit of the token that is to be drawn: no other one is drawn, and the
/// log-probability that comes back is from before any bias.
const FORCE: f32 = 1e4;

/// The maximum difference in nats over the tokens that could be compared; `None` if there was none:
/// the engine has other weights, or does not honour the bias.
///
/// # Errors
/// The first token that exceeds the bound.
pub(crate) fn check(
    engine: &dyn Engine,
    spot: SpotCheck,
    requests: &AtomicU64,
    entry: &Entry,
) -> Result<Option<f32>, Reason> {
    let version = engine.status().version;
    let mut gap: Option<f32> = None;
    if entry.kind != Kind::Rl {
        return Ok(None);
    }
    for (node, index) in chosen(entry, spot.tokens) {
        let trace = &entry.trace;
        let Some(here) = trace.nodes.get(node as usize) else {
            continue;
        };
        let by_version = here
            .versions
            .iter()
            .any(|s| s.version == version && (s.start..s.start + s.len).contains(&index));
        if !by_version {
            continue;
        }
        let mut prompt: Vec<TokenId> = trace
            .path_tokens(here.parent)
            .iter()
            .map(|t| t.id)
            .collect();
        prompt.extend(&here.tokens[..index as usize]);
        let (token, pushed) = (here.tokens[index as usize], here.logprobs[index as usize]);
        let id = RequestId(requests.fetch_add(1, Ordering::Relaxed));
        let Some(engine) = score(engine, id, prompt, here.temperature, token) else {
            continue;
        };
        let difference = (engine - pushed).abs();
        if difference.is_nan() || difference > spot.gap {
            return Err(Reason::LogprobGap {
                node,
                index,
                engine,
                pushed,
                bound: spot.gap,
            });
        }
        gap = Some(gap.unwrap_or(0.0).max(difference));
    }
    Ok(gap)
}

/// Tokens spread evenly over all sampled ones: node and index within it.
fn chosen(entry: &Entry, count: u32) -> Vec<(NodeId, u32)> {
    let nodes = entry.trace.nodes.iter().enumerate();
    let sampled = nodes.filter(|(_, n)| n.kind == TokenKind::Sampled);
    let all: Vec<(NodeId, u32)> = sampled
        .flat_map(|(i, n)| (0..n.tokens.len() as u32).map(move |t| (i as NodeId, t)))
        .collect();
    let count = (count as usize).min(all.len());
    (0..count)
        .map(|i| all[(2 * i + 1) * all.len() / (2 * count)])
        .collect()
}

/// The engine's log-probability of `token` after `prompt` at `temperature`; `None` if it is busy,
/// too slow or draws another token. Runs at priority -1, after generation.
fn score(
    engine: &dyn Engine,
    id: RequestId,
    prompt: Vec<TokenId>,
    temperature: f32,
    token: TokenId,
) -> Option<f32> {
    let sampling = SamplingParams {
        temperature,
        max_tokens: 1,
        logit_bias: vec![(token, FORCE)],
        ..SamplingParams::default()
    };
    let request = GenerateRequest {
        priority: -1,
        ..GenerateRequest::new(id, prompt, sampling)
    };
    let (sender, events) = mpsc::sync_channel(16);
    // A full channel means that the answer is there already.
    let sink = Box::new(move |event| drop(sender.try_send(event)));
    if let Err(error) = engine.submit(request, sink) {
        tracing::debug!(%error, "a log-probability was not compared");
        return None;
    }
    match events.recv_timeout(TIMEOUT) {
        Ok(EngineEvent::Tokens { tokens, .. }) => {
            let first = tokens.first()?;
            (first.id == token).then_some(first.logprob)
        }
        Ok(_) | Err(_) => {
            engine.abort(id);
            None
        }
    }
}
