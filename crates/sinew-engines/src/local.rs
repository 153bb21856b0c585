//! Another engine of this process behind the router, such as the embedded one.
//!
//! It needs no network and reports its version with every token. Weights are loaded from tensors; a second
//! load only from a folder is not supported, so an engine that failed a load stays unused until the next one.

use crate::attempt::{Attempt, AttemptEnd, ServerEnd};
use crate::backend::{AttemptSink, Backend, Probe, ServedWeights, Weights};
use crate::error::AttemptError;
use futures::FutureExt;
use futures::future::BoxFuture;
use sinew_types::{
    Engine, EngineError, EngineEvent, Fidelity, FinishReason, GenerateRequest, PolicyVersion,
    RequestId,
};
use std::sync::Arc;
use tokio::sync::mpsc;

/// First request id of attempts: far from those that other callers give to an engine that they
/// share.
const FIRST_ID: u64 = 1 << 62;

/// An engine of this process, such as the embedded one.
pub struct LocalBackend {
    name: String,
    engine: Arc<dyn Engine>,
}

impl std::fmt::Debug for LocalBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalBackend")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Aborts the attempt's request if its future is dropped.
struct AbortOnDrop<'a> {
    engine: &'a dyn Engine,
    id: RequestId,
}

impl Drop for AbortOnDrop<'_> {
    fn drop(&mut self) {
        self.engine.abort(self.id);
    }
}

impl LocalBackend {
    /// `engine` under a name for messages.
    pub fn new(name: impl Into<String>, engine: Arc<dyn Engine>) -> Self {
        Self {
            name: name.into(),
            engine,
        }
    }

    /// Submits the attempt as a request of the engine and follows its events to the last one.
    async fn run(
        &self,
        attempt: &Attempt,
        sink: &mut AttemptSink,
    ) -> Result<AttemptEnd, AttemptError> {
        let id = RequestId(FIRST_ID + attempt.id.0);
        let request = GenerateRequest {
            id,
            prompt: Arc::clone(&attempt.prompt),
            sampling: attempt.sampling.clone(),
            priority: attempt.priority,
        };
        // Bounded by the tokens of the request; a sink must not block, so it cannot wait.
        let (to, mut events) = mpsc::channel(attempt.sampling.max_tokens as usize + 2);
        let submitted = self.engine.submit(
            request,
            Box::new(move |event| {
                // Fails only after the receiver was dropped.
                let _ = to.try_send(event);
            }),
        );
        submitted.map_err(refusal)?;
        let _abort = AbortOnDrop {
            engine: &*self.engine,
            id,
        };
        while let Some(event) = events.recv().await {
            match event {
                EngineEvent::Tokens { tokens, .. } => {
                    if let Some(other) = tokens.iter().find(|t| t.version != attempt.version) {
                        return Err(AttemptError::Version {
                            expected: attempt.version,
                            found: other.version.to_string(),
                        });
                    }
                    let ids: Vec<_> = tokens.iter().map(|t| t.id).collect();
                    let logprobs = tokens.iter().map(|t| Some(f64::from(t.logprob)));
                    let logprobs: Vec<_> = logprobs.collect();
                    let top = tokens.into_iter().map(|t| t.top).collect();
                    sink.tokens(&ids, &logprobs, top).await?;
                }
                EngineEvent::Finished {
                    reason,
                    cached_prompt_tokens,
                    ..
                } => {
                    let reason = match &reason {
                        FinishReason::ContextFull => reason,
                        other => sink.end(&server_end(other)).await?,
                    };
                    return Ok(AttemptEnd {
                        reason,
                        cached_prompt_tokens,
                    });
                }
                EngineEvent::Failed { error, .. } => return Err(refusal(error)),
            }
        }
        Err(AttemptError::Cut("the engine said nothing more".to_owned()))
    }
}

fn server_end(reason: &FinishReason) -> ServerEnd {
    match reason {
        FinishReason::StopId { id } => ServerEnd::StopId(Some(*id)),
        FinishReason::StopString { text } => ServerEnd::StopString(text.clone()),
        FinishReason::Length | FinishReason::ContextFull => ServerEnd::Length,
        FinishReason::Aborted => ServerEnd::Aborted("somebody else aborted it".to_owned()),
    }
}

/// Sorts an engine's error by the part that it blames.
fn refusal(error: EngineError) -> AttemptError {
    match error {
        EngineError::QueueFull { .. } => AttemptError::Busy {
            status: 429,
            body: error.to_string(),
        },
        EngineError::PromptTooLong { .. }
        | EngineError::UnknownToken { .. }
        | EngineError::InvalidSampling { .. }
        | EngineError::Format(_) => AttemptError::Refused(error),
        EngineError::Weights(_) | EngineError::Stopped(_) | EngineError::Failed(_) => {
            AttemptError::Cut(error.to_string())
        }
    }
}

impl Backend for LocalBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn fidelity(&self) -> Fidelity {
        self.engine.fidelity()
    }

    fn generate<'a>(
        &'a self,
        attempt: &'a Attempt,
        sink: &'a mut AttemptSink,
    ) -> BoxFuture<'a, Result<AttemptEnd, AttemptError>> {
        self.run(attempt, sink).boxed()
    }

    fn probe(&self) -> BoxFuture<'_, Result<Probe, AttemptError>> {
        let status = self.engine.status();
        let known = status.kv_tokens_total > 0;
        let probe = Probe {
            running: status.running,
            waiting: status.waiting,
            kv_tokens_total: known.then_some(status.kv_tokens_total),
            kv_tokens_free: known.then_some(status.kv_tokens_free),
            sampled_tokens: status.sampled_tokens,
            prefill_tokens: status.prefill_tokens,
            cached_prompt_tokens: status.cached_prompt_tokens,
            preemptions: status.preemptions,
            ..Probe::new(ServedWeights::Version(status.version))
        };
        std::future::ready(Ok(probe)).boxed()
    }

    fn label(&self, _version: PolicyVersion) -> BoxFuture<'_, Result<(), AttemptError>> {
        std::future::ready(Ok(())).boxed()
    }

    fn load<'a>(&'a self, weights: &'a Weights) -> BoxFuture<'a, Result<(), AttemptError>> {
        async move {
            let Some(source) = weights.source.clone() else {
                let why = "loading weights again from a folder".to_owned();
                return Err(AttemptError::Unsupported(why));
            };
            let (engine, version) = (Arc::clone(&self.engine), weights.version);
            let loaded = tokio::task::spawn_blocking(move || engine.load_weights(version, source));
            let loaded = loaded.await.map_err(|e| AttemptError::Cut(e.to_string()))?;
            loaded.map_err(|e| AttemptError::Unsupported(e.to_string()))
        }
        .boxed()
    }

    fn sleep(&self, asleep: bool) -> BoxFuture<'_, Result<(), AttemptError>> {
        // It keeps its memory, but computes nothing.
        self.engine.pause(asleep);
        std::future::ready(Ok(())).boxed()
    }
}
