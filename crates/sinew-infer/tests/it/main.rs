//! Engines as their users see them: through the `Engine` port, on their own threads.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod engine_thread;
mod fake;
mod format;
mod model;
mod plain;

use sinew_types::{
    EngineError, EngineEvent, EventSink, FinishReason, GenerateRequest, RequestId, SampledToken,
    SamplingParams, TokenId,
};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

/// Far above what any test needs: a hang fails instead of blocking the run.
const PATIENCE: Duration = Duration::from_secs(60);

fn request(id: u64, prompt: &[TokenId], max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        id: RequestId(id),
        prompt: prompt.to_vec().into(),
        sampling: SamplingParams {
            max_tokens,
            seed: id,
            ..SamplingParams::default()
        },
        priority: 0,
    }
}

/// A sink and where its events arrive.
fn channel() -> (EventSink, Receiver<EngineEvent>) {
    let (send, receive) = sync_channel(10_000);
    let sink = Box::new(move |event| {
        // A test that has seen enough drops its end.
        let _ = send.send(event);
    });
    (sink, receive)
}

type End = Result<FinishReason, EngineError>;

/// All tokens of a request, and how it ended; its events end there.
fn collect(events: &Receiver<EngineEvent>) -> (Vec<SampledToken>, End) {
    let mut all = Vec::new();
    let end = loop {
        match events.recv_timeout(PATIENCE).expect("an event") {
            EngineEvent::Tokens { tokens, .. } => all.extend(tokens),
            EngineEvent::Finished { reason, .. } => break Ok(reason),
            EngineEvent::Failed { error, .. } => break Err(error),
        }
    };
    (all, end)
}

fn ids(tokens: &[SampledToken]) -> Vec<TokenId> {
    tokens.iter().map(|t| t.id).collect()
}
