//! Another engine of this process behind the router, such as the embedded one.
//!
//! It needs no network and reports its version with every token. It has no lineage: the one of the last load
//! or label is taken to be its own. Weights are loaded from tensors; a second load only from a folder is not
//! supported, so an engine that failed a load stays unused until the next one. Adapters have the names that
//! servers would have them under.

use crate::attempt::{Attempt, AttemptEnd, ServerEnd};
use crate::backend::{AttemptSink, Backend, NamedAdapter, Probe, ServedWeights, Weights};
use crate::error::AttemptError;
use futures::FutureExt;
use futures::future::BoxFuture;
use sinew_types::{
    AdapterName, Engine, EngineError, EngineEvent, Fidelity, FinishReason, GenerateRequest,
    Lineage, PromptLogprobs, RequestId, WeightsId,
};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;

/// First request id of attempts: far from those that other callers give to an engine that they
/// share.
const FIRST_ID: u64 = 1 << 62;

/// An engine of this process, such as the embedded one.
pub struct LocalBackend {
    name: String,
    engine: Arc<dyn Engine>,
    /// Lineage of its weights, once they were loaded or labelled.
    lineage: Mutex<Option<Lineage>>,
    /// Adapters that were loaded here.
    adapters: Mutex<BTreeSet<String>>,
}

sinew_types::debug_fields!(LocalBackend, name);

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
            lineage: Mutex::default(),
            adapters: Mutex::default(),
        }
    }

    /// The lineage of its weights; `new` replaces it.
    fn lineage(&self, new: Option<Lineage>) -> Option<Lineage> {
        let mut lineage = self.lineage.lock().unwrap_or_else(PoisonError::into_inner);
        *lineage = new.or(*lineage);
        *lineage
    }

    fn adapters<T>(&self, f: impl FnOnce(&mut BTreeSet<String>) -> T) -> T {
        f(&mut self.adapters.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Submits the attempt as a request of the engine and follows its events to the last one.
    async fn run(
        &self,
        attempt: &Attempt,
        sink: &mut AttemptSink,
    ) -> Result<AttemptEnd, AttemptError> {
        let id = RequestId(FIRST_ID + attempt.id.0);
        let (prompt, sampling) = (Arc::clone(&attempt.prompt), attempt.sampling.clone());
        let adapter = attempt.adapter.as_deref().map(adapter_name);
        let request = GenerateRequest {
            priority: attempt.priority,
            adapter: adapter.transpose()?,
            prompt_logprobs: attempt.prompt_logprobs.as_deref().cloned(),
            ..GenerateRequest::new(id, prompt, sampling)
        };
        // Bounded by the tokens of the request, its prompt and its end; a sink must not block, so it cannot
        // wait.
        let (to, mut events) = mpsc::channel(attempt.sampling.max_tokens as usize + 3);
        let submitted = self.engine.submit(
            request,
            Box::new(move |event| {
                // Fails only after the receiver was dropped.
                let _ = to.try_send(event);
            }),
        );
        submitted.map_err(|e| refusal(e, attempt))?;
        let _abort = AbortOnDrop {
            engine: &*self.engine,
            id,
        };
        while let Some(event) = events.recv().await {
            match event {
                EngineEvent::Prompt { logprobs, .. } => sink.prompt(logprobs).await?,
                EngineEvent::Tokens { tokens, .. } => {
                    let expected = attempt.weights;
                    if let Some(other) = tokens.iter().find(|t| t.version != expected.version) {
                        let found = other.version.to_string();
                        return Err(AttemptError::Version { expected, found });
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
                    routes,
                    ..
                } => {
                    return Ok(AttemptEnd {
                        reason: checked_end(sink, reason).await?,
                        cached_prompt_tokens,
                        routes,
                    });
                }
                EngineEvent::Failed { error, .. } => return Err(refusal(error, attempt)),
            }
        }
        Err(AttemptError::Cut("the engine said nothing more".to_owned()))
    }
}

/// The reason of an engine's end, checked like that of a server. A full context is the engine's to know.
pub(crate) async fn checked_end(
    sink: &mut AttemptSink,
    reason: FinishReason,
) -> Result<FinishReason, AttemptError> {
    match &reason {
        FinishReason::ContextFull => Ok(reason),
        other => sink.end(&server_end(other)).await,
    }
}

/// The reason of an engine's end, as that of a server.
fn server_end(reason: &FinishReason) -> ServerEnd {
    match reason {
        FinishReason::StopId { id } => ServerEnd::StopId(Some(*id)),
        FinishReason::StopString { text } => ServerEnd::StopString(text.clone()),
        FinishReason::Length | FinishReason::ContextFull => ServerEnd::Length,
        FinishReason::Aborted => ServerEnd::Aborted("somebody else aborted it".to_owned()),
    }
}

/// Name in the engine of an adapter that a server would have under `server_name`.
fn adapter_name(server_name: &str) -> Result<AdapterName, AttemptError> {
    let name = AdapterName::new(server_name);
    name.map_err(|e| AttemptError::Unsupported(e.to_string()))
}

/// Sorts an engine's error by the part that it blames.
pub(crate) fn refusal(error: EngineError, attempt: &Attempt) -> AttemptError {
    match error {
        EngineError::UnknownAdapter { name } => AttemptError::Version {
            expected: attempt.weights,
            found: format!("no adapter {name}"),
        },
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

/// An engine that cannot do what it was asked.
fn unsupported(error: EngineError) -> AttemptError {
    AttemptError::Unsupported(error.to_string())
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

    /// The engine itself refuses what it cannot report.
    fn accepts_prompt(&self, _: &PromptLogprobs) -> Result<(), AttemptError> {
        Ok(())
    }

    fn probe(&self) -> BoxFuture<'_, Result<Probe, AttemptError>> {
        let status = self.engine.status();
        let known = status.kv_tokens_total > 0;
        let weights = match self.lineage(None) {
            Some(lineage) => ServedWeights::Version(WeightsId::new(status.version, lineage)),
            None => ServedWeights::Unlabelled,
        };
        let probe = Probe {
            running: status.running,
            waiting: status.waiting,
            kv_tokens_total: known.then_some(status.kv_tokens_total),
            kv_tokens_free: known.then_some(status.kv_tokens_free),
            adapters: Some(self.adapters(|adapters| adapters.clone())),
            sampled_tokens: status.sampled_tokens,
            prefill_tokens: status.prefill_tokens,
            cached_prompt_tokens: status.cached_prompt_tokens,
            preemptions: status.preemptions,
            ..Probe::new(weights)
        };
        std::future::ready(Ok(probe)).boxed()
    }

    fn label(&self, id: WeightsId) -> BoxFuture<'_, Result<(), AttemptError>> {
        let version = self.engine.status().version;
        let labelled = if version == id.version {
            self.lineage(Some(id.lineage));
            Ok(())
        } else {
            let found = version.to_string();
            Err(AttemptError::Version {
                expected: id,
                found,
            })
        };
        std::future::ready(labelled).boxed()
    }

    fn load<'a>(&'a self, weights: &'a Weights) -> BoxFuture<'a, Result<(), AttemptError>> {
        async move {
            if weights.adapter.is_some() {
                let why = "loading adapters by name".to_owned();
                return Err(AttemptError::Unsupported(why));
            }
            let Some(source) = weights.source.clone() else {
                let why = "loading weights again from a folder".to_owned();
                return Err(AttemptError::Unsupported(why));
            };
            let (engine, id) = (Arc::clone(&self.engine), weights.id);
            let load = move || engine.load_weights(id.version, source);
            let loaded = tokio::task::spawn_blocking(load).await;
            let loaded = loaded.map_err(|e| AttemptError::Cut(e.to_string()))?;
            loaded.map_err(unsupported)?;
            self.lineage(Some(id.lineage));
            Ok(())
        }
        .boxed()
    }

    fn load_adapter<'a>(
        &'a self,
        adapter: &'a NamedAdapter,
    ) -> BoxFuture<'a, Result<(), AttemptError>> {
        async move {
            let Some(source) = adapter.source.clone() else {
                let why = "loading an adapter again from a folder".to_owned();
                return Err(AttemptError::Unsupported(why));
            };
            let name = adapter_name(&adapter.server_name)?;
            let (engine, version) = (Arc::clone(&self.engine), adapter.id.version);
            let load = move || engine.load_adapter(&name, version, source);
            let loaded = tokio::task::spawn_blocking(load).await;
            let loaded = loaded.map_err(|e| AttemptError::Cut(e.to_string()))?;
            loaded.map_err(unsupported)?;
            self.adapters(|adapters| adapters.insert(adapter.server_name.clone()));
            Ok(())
        }
        .boxed()
    }

    fn unload<'a>(&'a self, adapter: &'a str) -> BoxFuture<'a, Result<(), AttemptError>> {
        async move {
            // One that was never loaded here is not the engine's to drop.
            if !self.adapters(|adapters| adapters.remove(adapter)) {
                return Ok(());
            }
            let (engine, name) = (Arc::clone(&self.engine), adapter_name(adapter)?);
            let unload = move || engine.unload_adapter(&name);
            let unloaded = tokio::task::spawn_blocking(unload).await;
            let unloaded = unloaded.map_err(|e| AttemptError::Cut(e.to_string()))?;
            unloaded.map_err(unsupported)
        }
        .boxed()
    }

    fn sleep(&self) -> BoxFuture<'_, Result<(), AttemptError>> {
        let slept = self.engine.sleep().map_err(unsupported);
        std::future::ready(slept).boxed()
    }

    fn wake(&self) -> BoxFuture<'_, Result<(), AttemptError>> {
        let woke = self.engine.wake().map_err(unsupported);
        std::future::ready(woke).boxed()
    }
}
