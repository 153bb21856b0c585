//! Runs a model call: receives engine events, and sends deltas and one result to its readers.
//!
//! 1. Wait for capacity, if the engine is shared. A cancelled or late call ends here without a token.
//! 2. Submit one request for each choice. Each has a sink that never blocks the engine's thread: the
//!    channel has one place for each token that may come.
//! 3. Follow the events. Tokens are decoded into pieces of text, reasoning and calls; readers of a stream get
//!    them at once.
//! 4. When a choice ends, capture its tokens in the session, wait for the journal, then send the end to the
//!    client. An aborted choice is captured, too.
//! 5. Send the result of all choices, or the first error, to the readers, and count it.
//!
//! The call waits at most [`ABORT_GRACE`] for the engine to end aborted requests.

use crate::capacity::{Capacity, CapacityPermit};
use crate::rollout::{Rollout, unix_s};
use crate::running::{ABORT_GRACE, RunningCall};
use crate::session::SampledTurn;
use crate::stats::Counters;
use sinew_dialect::{ApiError, Choice, Delta, ModelResponse, StoredAnswer, TurnEnd, Usage};
use sinew_render::{Piece, TurnOptions, TurnReader};
use sinew_types::{
    Engine, EngineError, EngineEvent, EventSink, FinishReason, GenerateRequest, PromptLogprob,
    RequestId, RouteSpan, SampledToken, TokenId,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, sleep_until};
use tracing::Instrument;

/// Maximum number of engine events that are handled together.
const EVENT_BATCH: usize = 64;
/// Permits for compiling formats, over the whole process.
static COMPILING: Semaphore = Semaphore::const_new(1);

/// All data that a call needs to run.
pub(crate) struct Work {
    pub(crate) engine: Arc<dyn Engine>,
    /// Admission control, if the engine is shared with a training loop.
    pub(crate) capacity: Option<Arc<dyn Capacity>>,
    pub(crate) rollout: Arc<Rollout>,
    pub(crate) counters: Arc<Counters>,
    /// Number of the call within its rollout, from 1.
    pub(crate) call: u32,
    /// One request per choice, with ascending ids.
    pub(crate) requests: Vec<GenerateRequest>,
    /// Path of the request field that sets the output format, if there is one.
    pub(crate) format_path: Option<String>,
    /// Options for separating text, reasoning and calls.
    pub(crate) turn: TurnOptions,
    /// Time for which a call without clients continues, so that a client may return.
    pub(crate) client_grace: Duration,
}

/// One choice while it is being sampled.
struct Output {
    /// Decodes tokens into pieces of text, reasoning and calls.
    reader: TurnReader,
    /// All sampled tokens, for the trace.
    tokens: Vec<SampledToken>,
    /// Tokens that no delta has sent to the client.
    unsent: Vec<SampledToken>,
    /// Tokens of the client's answer.
    kept: Vec<SampledToken>,
    /// Number of text bytes sent.
    sent_bytes: usize,
    /// Set after the output was captured in the trace.
    done: Option<Choice>,
}

/// A running call, owned by one task.
struct Driver {
    work: Work,
    /// State that the readers of the call follow.
    running: Arc<RunningCall>,
    /// Id of the first request; choice `i` has `first + i`.
    first: u64,
    outputs: Vec<Output>,
    /// Number of prompt tokens found in the engine's prefix cache; the maximum over the choices.
    cached: u32,
    prompt_tokens: u32,
    /// Sampling temperature of the policy.
    temperature: f32,
    /// Log-probabilities of the prompt, once the engine has reported them.
    prompt: Option<Vec<PromptLogprob>>,
    /// Reason for aborting the requests, if they are.
    stopping: Option<ApiError>,
    /// Answer that is stored for later calls.
    kept: Option<StoredAnswer>,
}

/// Runs a call to its end, with or without readers. `permit` is its place among the concurrent calls.
pub(crate) async fn drive(work: Work, running: Arc<RunningCall>, permit: OwnedSemaphorePermit) {
    let rollout = Arc::clone(&work.rollout);
    let counters = Arc::clone(&work.counters);
    let call = work.call;
    let mut driver = Driver::new(work, Arc::clone(&running));
    let span = tracing::debug_span!("episode", id = %rollout.session().id(), call);
    let result = driver.run().instrument(span).await;
    if let Err(error) = &result {
        counters.count(|stats| {
            stats.failed += 1;
            stats.clients_gone += u64::from(running.is_abandoned());
        });
        let mut session = rollout.session();
        if let Some(join) = session.fail(call, &error.message, unix_s()) {
            counters.unjoined(join);
        }
        if let Err(error) = rollout.record(&mut session) {
            tracing::error!(%error, "a failed call is not in the journal");
        }
    }
    if result.is_ok()
        && let Some(answer) = driver.kept.take()
    {
        rollout.answers.keep(answer);
    }
    drop((driver, permit));
    rollout.ended(&running, result);
}

impl Driver {
    fn new(work: Work, running: Arc<RunningCall>) -> Self {
        let first = work.requests.first();
        let prompt_tokens = first.map_or(0, |r| r.prompt.len());
        let temperature = first.map_or(1.0, |r| r.sampling.policy_temperature());
        let outputs = work.requests.iter().enumerate().map(|(i, _)| {
            let mut options = work.turn.clone();
            options.call_prefix = format!("{}{i}", options.call_prefix);
            let (reader, pieces) = TurnReader::new(options);
            if !pieces.is_empty() {
                running.push(Delta {
                    choice: i as u32,
                    pieces,
                    ..Delta::default()
                });
            }
            Output {
                reader,
                tokens: Vec::new(),
                unsent: Vec::new(),
                kept: Vec::new(),
                sent_bytes: 0,
                done: None,
            }
        });
        Self {
            first: first.map_or(0, |r| r.id.0),
            temperature,
            outputs: outputs.collect(),
            cached: 0,
            prompt_tokens: prompt_tokens as u32,
            prompt: None,
            stopping: None,
            kept: None,
            running,
            work,
        }
    }

    /// Runs steps 1 to 5 of the module's description.
    async fn run(&mut self) -> Result<Arc<ModelResponse>, ApiError> {
        let requests = std::mem::take(&mut self.work.requests);
        let prompt = requests.first().map_or(&[][..], |r| &r.prompt);
        let _capacity = self.acquire(prompt).await?;
        // It is set only here.
        let _ = self.running.submitted.set(Instant::now());
        // Each event has at least one token, has the prompt's log-probabilities, or is the last one of its
        // request, so that the engine's thread never finds the queue full.
        let events_of = |r: &GenerateRequest| {
            let scored = usize::from(r.prompt_logprobs.is_some());
            r.sampling.max_tokens as usize + scored + 2
        };
        let scored = requests.iter().any(|r| r.prompt_logprobs.is_some());
        let (sender, mut events) = mpsc::channel(requests.iter().map(events_of).sum());
        let overflow = Arc::new(AtomicBool::new(false));
        let stream = self.running.context.request.stream;
        let mut submitted = 0;
        for request in requests {
            let sink = sink(sender.clone(), Arc::clone(&overflow), stream);
            if let Err(error) = self.submit(request, sink).await {
                self.stop(error);
                break;
            }
            submitted += 1;
        }
        drop(sender);
        self.follow(&mut events, submitted).await;
        if overflow.load(Ordering::Acquire) {
            let why = "the engine sent more events than tokens were asked for";
            return Err(ApiError::server("engine_failed", why));
        }
        if let Some(error) = self.stopping.take() {
            return Err(error);
        }
        let prompt = self.prompt.take();
        if scored && prompt.is_none() {
            let why = "this engine reports none for a prompt: serve an embedded engine, vLLM or SGLang, or leave echo out";
            return Err(ApiError::unsupported("logprobs", why));
        }
        let choices: Option<Vec<Choice>> = self.outputs.iter_mut().map(|o| o.done.take()).collect();
        let choices = choices.ok_or_else(|| {
            ApiError::server(
                "engine_failed",
                "the engine ended a request without an event",
            )
        })?;
        let sampled: usize = self.outputs.iter().map(|o| o.tokens.len()).sum();
        Ok(Arc::new(ModelResponse {
            choices,
            prompt: prompt.unwrap_or_default(),
            usage: Usage {
                prompt_tokens: self.prompt_tokens,
                cached_tokens: self.cached,
                completion_tokens: sampled as u32,
            },
        }))
    }

    /// Submits a request to the engine. Compiling a format may take seconds; it happens on a separate thread,
    /// one format at a time in the process, so that it uses at most one CPU core. Rollouts take turns: each
    /// waits with one format at a time.
    async fn submit(&self, request: GenerateRequest, sink: EventSink) -> Result<(), ApiError> {
        if request.sampling.format.is_none() {
            let submitted = self.work.engine.submit(request, sink);
            return submitted.map_err(|e| self.refused(e));
        }
        let turn = async {
            let own = Arc::clone(&self.work.rollout.compiling).lock_owned().await;
            (own, COMPILING.acquire().await)
        };
        let turn = tokio::select! {
            turn = turn => turn,
            () = self.running.cancel_asked() => return Err(self.running.cancelled()),
            () = sleep_until(self.running.deadline) => {
                return Err(ApiError::deadline("the format could not be compiled in time"));
            }
        };
        let engine = Arc::clone(&self.work.engine);
        let submitted = tokio::task::spawn_blocking(move || {
            let submitted = engine.submit(request, sink);
            drop(turn);
            submitted
        });
        let submitted = submitted.await;
        let submitted = submitted.map_err(|e| ApiError::server("engine_failed", e.to_string()))?;
        submitted.map_err(|e| self.refused(e))
    }

    /// Returns the error for a request that the engine refuses.
    fn refused(&self, error: EngineError) -> ApiError {
        match (error, &self.work.format_path) {
            (EngineError::Format(why), Some(path)) => ApiError {
                code: "invalid_format",
                ..ApiError::invalid(path.as_str(), format!("{path}: {why}"))
            },
            (error, _) => error.into(),
        }
    }

    /// Waits for capacity, if the engine is shared. No token has been sampled yet.
    async fn acquire(&self, prompt: &[TokenId]) -> Result<Option<CapacityPermit>, ApiError> {
        let Some(capacity) = &self.work.capacity else {
            return Ok(None);
        };
        let rollout = self.work.rollout.session().id().clone();
        tokio::select! {
            permit = capacity.acquire(&rollout, prompt) => Ok(Some(permit)),
            () = self.running.cancel_asked() => Err(self.running.cancelled()),
            () = self.running.abandoned(self.work.client_grace) => Err(self.running.cancelled()),
            () = sleep_until(self.running.deadline) => {
                Err(ApiError::deadline("the engine had no capacity in time"))
            }
        }
    }

    /// Handles events until `pending` requests have ended, or the engine fails to end aborted ones in time.
    async fn follow(&mut self, events: &mut mpsc::Receiver<EngineEvent>, mut pending: usize) {
        let running = Arc::clone(&self.running);
        let mut deadline = running.deadline;
        let mut batch = Vec::with_capacity(EVENT_BATCH);
        let mut abandoned = std::pin::pin!(running.abandoned(self.work.client_grace));
        while pending > 0 {
            let stopping = self.stopping.is_some();
            if stopping {
                deadline = deadline.min(Instant::now() + ABORT_GRACE);
            }
            tokio::select! {
                count = events.recv_many(&mut batch, EVENT_BATCH) => {
                    if count == 0 {
                        return;
                    }
                    for event in batch.drain(..) {
                        pending -= usize::from(self.take(event).await);
                    }
                }
                () = running.cancel_asked(), if !stopping => {
                    self.stop(running.cancelled());
                }
                () = &mut abandoned, if !stopping => {
                    self.stop(running.cancelled());
                }
                () = sleep_until(deadline) => {
                    if stopping {
                        return;
                    }
                    self.stop(ApiError::deadline("the model did not answer in time"));
                    deadline = Instant::now() + ABORT_GRACE;
                }
            }
        }
    }

    /// Aborts all requests. The first reason becomes the error of the call.
    fn stop(&mut self, error: ApiError) {
        self.stopping.get_or_insert(error);
        for i in 0..self.outputs.len() as u64 {
            self.work.engine.abort(RequestId(self.first + i));
        }
    }

    /// Handles an event. Returns whether it was the last one of its request.
    async fn take(&mut self, event: EngineEvent) -> bool {
        match event {
            EngineEvent::Prompt { logprobs, .. } => {
                self.prompt = Some(logprobs);
                false
            }
            EngineEvent::Tokens { request, tokens } => {
                self.tokens(request, &tokens);
                false
            }
            EngineEvent::Finished {
                request,
                reason,
                cached_prompt_tokens,
                routes,
            } => {
                self.cached = self.cached.max(cached_prompt_tokens);
                if reason == FinishReason::Aborted && self.stopping.is_none() {
                    self.stop(ApiError::overloaded(
                        "aborted",
                        "the engine aborted the generation",
                    ));
                }
                self.finished(request, reason, routes).await;
                true
            }
            EngineEvent::Failed { error, .. } => {
                self.stop(error.into());
                true
            }
        }
    }

    /// Returns the index of a request's choice.
    fn index(&self, request: RequestId) -> Option<usize> {
        let index = request.0.checked_sub(self.first)? as usize;
        (index < self.outputs.len()).then_some(index)
    }

    /// Adds sampled tokens to a choice.
    fn tokens(&mut self, request: RequestId, tokens: &[SampledToken]) {
        let Some(index) = self.index(request) else {
            return;
        };
        let context = &self.running.context;
        if context.request.is_prompt_only() {
            // The engine had to sample one; nobody asked for it.
            return;
        }
        let output = &mut self.outputs[index];
        let pieces = output.reader.push(tokens, context.renderer.as_ref());
        output.tokens.extend_from_slice(tokens);
        let asked = &context.request;
        if asked.return_token_ids || asked.logprobs.is_some() {
            // Control tokens are not part of the text that log-probabilities are given for. After a repeated
            // prompt they are: clients count its tokens from the end.
            let all = asked.return_token_ids || asked.echo_prompt;
            let wanted = |t: &&SampledToken| all || !context.renderer.is_special(t.id);
            output.unsent.extend(tokens.iter().filter(wanted).cloned());
        }
        if asked.stream {
            self.send(index, pieces, None);
        }
    }

    /// Sends the new pieces of a choice to the readers of a stream.
    fn send(&mut self, index: usize, pieces: Vec<Piece>, end: Option<TurnEnd>) {
        let output = &mut self.outputs[index];
        let text = output.reader.raw()[output.sent_bytes..].to_owned();
        output.sent_bytes += text.len();
        if pieces.is_empty() && text.is_empty() && end.is_none() {
            return;
        }
        let tokens = std::mem::take(&mut output.unsent);
        output.kept.extend_from_slice(&tokens);
        self.running.push(Delta {
            choice: index as u32,
            pieces,
            text,
            tokens,
            end,
        });
    }

    /// Captures an output in the trace, and waits until it is durable.
    async fn capture(&self, turn: SampledTurn) -> Result<(), ApiError> {
        let receipt = {
            let mut session = self.work.rollout.session();
            let tokens = turn.tokens.len() as u64;
            session.commit(self.work.call, turn, unix_s())?;
            if let Some(answer) = &self.kept {
                session.kept(answer);
            }
            self.work
                .counters
                .count(|stats| stats.sampled_tokens += tokens);
            self.work.rollout.record(&mut session)?
        };
        match receipt {
            Some(receipt) => receipt.wait().await,
            None => Ok(()),
        }
    }

    /// Captures an output, then sends its end to the client.
    async fn finished(
        &mut self,
        request: RequestId,
        reason: FinishReason,
        routes: Option<RouteSpan>,
    ) {
        let Some(index) = self.index(request) else {
            return;
        };
        let output = &mut self.outputs[index];
        let pieces = output.reader.finish();
        let end = turn_end(&output.reader, &reason);
        let turn = SampledTurn {
            tokens: output.tokens.clone(),
            temperature: self.temperature,
            finish: reason,
            message: output.reader.message().clone(),
            text: output.reader.raw().to_owned(),
            routes,
        };
        let context = &self.running.context;
        if index == 0 && turn.finish != FinishReason::Aborted {
            self.kept = context.request.stored_answer(&context.id, &turn.message);
        }
        if let Err(error) = self.capture(turn).await {
            self.stop(error);
            return;
        }
        self.send(index, pieces, Some(end.clone()));
        let output = &mut self.outputs[index];
        output.done = Some(Choice {
            message: output.reader.message().clone(),
            text: output.reader.raw().to_owned(),
            end,
            tokens: std::mem::take(&mut output.kept),
        });
    }
}

/// Receives a request's events on the engine's thread. Without streaming, all events are sent together at the
/// end, which costs one wake-up per answer instead of one per token.
fn sink(sender: mpsc::Sender<EngineEvent>, overflow: Arc<AtomicBool>, stream: bool) -> EventSink {
    let mut held = Vec::new();
    Box::new(move |event| {
        let send = |event| {
            if sender.try_send(event).is_err() {
                overflow.store(true, Ordering::Release);
            }
        };
        match event {
            EngineEvent::Tokens { mut tokens, .. } if !stream => held.append(&mut tokens),
            EngineEvent::Prompt { .. } | EngineEvent::Tokens { .. } => send(event),
            EngineEvent::Finished { request, .. } | EngineEvent::Failed { request, .. } => {
                let tokens = std::mem::take(&mut held);
                if !tokens.is_empty() {
                    send(EngineEvent::Tokens { request, tokens });
                }
                send(event);
            }
        }
    })
}

/// Returns the reason that the client gets for the end of the turn. A turn that a limit cut counts as cut
/// even after complete calls, since more calls might have followed. Calls come before all other reasons.
fn turn_end(reader: &TurnReader, reason: &FinishReason) -> TurnEnd {
    let cut = matches!(reason, FinishReason::Length | FinishReason::ContextFull);
    if cut && reader.stopped().is_none() {
        return TurnEnd::Length;
    }
    if !reader.message().tool_calls.is_empty() {
        return TurnEnd::ToolCalls;
    }
    match reader.stopped() {
        Some(stop) => TurnEnd::StopString(stop.to_owned()),
        None => TurnEnd::Stop,
    }
}
