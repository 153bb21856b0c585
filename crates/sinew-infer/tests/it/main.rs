//! Engines as their users see them: through the `Engine` port, on their own threads.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod adapters;
mod engine_thread;
mod fake;
mod format;
mod model;
mod plain;

use sinew_types::{
    EngineError, EngineEvent, EventSink, FinishReason, GenerateRequest, PromptLogprob, RequestId,
    SampledToken, SamplingParams, TokenId,
};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

/// Far above what any test needs: a hang fails instead of blocking the run.
const PATIENCE: Duration = Duration::from_secs(60);

fn request(id: u64, prompt: &[TokenId], max_tokens: u32) -> GenerateRequest {
    let sampling = SamplingParams {
        max_tokens,
        seed: id,
        ..SamplingParams::default()
    };
    GenerateRequest::new(RequestId(id), prompt.to_vec(), sampling)
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

/// All tokens of a request without log-probabilities of its prompt, and how it ended; its events end there.
fn collect(events: &Receiver<EngineEvent>) -> (Vec<SampledToken>, End) {
    let (prompt, tokens, end) = collect_all(events);
    assert_eq!(prompt, None, "nobody asked for the prompt");
    (tokens, end)
}

/// The log-probabilities of a request's prompt, its tokens, and how it ended.
fn collect_all(
    events: &Receiver<EngineEvent>,
) -> (Option<Vec<PromptLogprob>>, Vec<SampledToken>, End) {
    let (mut prompt, mut all) = (None, Vec::new());
    let end = loop {
        match events.recv_timeout(PATIENCE).expect("an event") {
            EngineEvent::Prompt { logprobs, .. } => {
                assert!(all.is_empty(), "a prompt after the first token");
                assert_eq!(prompt.replace(logprobs), None, "it is reported once");
            }
            EngineEvent::Tokens { tokens, .. } => all.extend(tokens),
            EngineEvent::Finished { reason, .. } => break Ok(reason),
            EngineEvent::Failed { error, .. } => break Err(error),
        }
    };
    (prompt, all, end)
}

fn ids(tokens: &[SampledToken]) -> Vec<TokenId> {
    tokens.iter().map(|t| t.id).collect()
}
