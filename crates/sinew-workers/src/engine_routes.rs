//! The newest weights of a run behind two routes, for the rollout workers of the run: tokens in, tokens out.
//!
//! An answer is of the weights that its call names. At the first token of others it ends, and its caller
//! continues from the tokens that came. A caller that closes its connection ends its generation.

use crate::follow::Loaded;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use sinew_engines::{
    GENERATE_PATH, STATE_PATH, ServedCall, ServedEvent, ServedMark, ServedState, ServedToken,
};
use sinew_types::{
    Engine, EngineError, EngineEvent, GenerateRequest, PolicyVersion, RequestId, SampledToken,
    WeightsId,
};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use tokio::sync::mpsc;

/// First request id: far from those that a gateway in front of the same engine gives.
const FIRST_ID: u64 = 1 << 61;
/// Maximum bytes of a call: a long prompt as JSON, with targets of its log-probabilities.
const MAX_CALL: usize = 64 << 20;
/// Maximum generations at a time; more are refused, and come again later.
const MAX_RUNNING: usize = 4096;

/// An engine that follows the weights of a run, for other processes.
pub struct EngineRoutes {
    engine: Arc<dyn Engine>,
    loaded: Loaded,
    context: usize,
    vocab: usize,
    next: AtomicU64,
    running: AtomicUsize,
}

sinew_types::debug_fields!(
    EngineRoutes as this,
    loaded = this.loaded,
    running = this.running()
);

impl EngineRoutes {
    /// `loaded` are the weights of `engine`. `context` is its maximum of tokens of prompt and output, `vocab`
    /// its number of token ids.
    pub fn new(engine: Arc<dyn Engine>, loaded: Loaded, context: usize, vocab: usize) -> Self {
        Self {
            engine,
            loaded,
            context,
            vocab,
            next: AtomicU64::new(FIRST_ID),
            running: AtomicUsize::new(0),
        }
    }

    /// The routes. Whoever serves them checks the token of the run.
    pub fn router(self: &Arc<Self>) -> Router {
        Router::new()
            .route(STATE_PATH, get(state))
            .route(GENERATE_PATH, post(generate))
            .layer(DefaultBodyLimit::max(MAX_CALL))
            .with_state(Arc::clone(self))
    }

    /// Generations that have not ended.
    pub fn running(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }

    fn mark(&self) -> ServedMark {
        let mark = self.loaded.mark();
        mark.map_or_else(ServedMark::default, |(id, manifest)| ServedMark {
            id: id.to_string(),
            manifest,
        })
    }

    /// Begins a generation, or says why not.
    fn begin(self: &Arc<Self>, call: ServedCall) -> Result<Answer, ServedEvent> {
        let mark = self.mark();
        let wanted = call.weights.id.parse::<WeightsId>().ok();
        let Some(wanted) = wanted.filter(|_| mark == call.weights) else {
            return Err(ServedEvent::Weights(mark));
        };
        let full = EngineError::QueueFull {
            waiting: MAX_RUNNING,
            limit: MAX_RUNNING,
        };
        let running = Running::new(self).ok_or(ServedEvent::Failed(full))?;
        let id = RequestId(self.next.fetch_add(1, Ordering::Relaxed));
        // Bounded by the tokens of the call, its prompt and its end; a sink must not block, so it cannot
        // wait.
        let most = (call.sampling.max_tokens as usize).min(self.context);
        let (to, events) = mpsc::channel(most + 3);
        let request = GenerateRequest {
            priority: call.priority,
            prompt_logprobs: call.prompt_logprobs,
            ..GenerateRequest::new(id, call.prompt, call.sampling)
        };
        let submitted = self.engine.submit(
            request,
            Box::new(move |event| {
                // Fails only after the receiver was dropped.
                let _ = to.try_send(event);
            }),
        );
        submitted.map_err(ServedEvent::Failed)?;
        Ok(Answer {
            events,
            id,
            version: wanted.version,
            weights: call.weights,
            next: None,
            over: false,
            running,
        })
    }
}

/// A place among the generations that run.
struct Running(Arc<EngineRoutes>);

impl Running {
    fn new(routes: &Arc<EngineRoutes>) -> Option<Self> {
        let taken = Self(Arc::clone(routes));
        // Dropping it gives the place back.
        (routes.running.fetch_add(1, Ordering::Relaxed) < MAX_RUNNING).then_some(taken)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The events of one generation. Dropping it aborts what has not ended.
struct Answer {
    events: mpsc::Receiver<EngineEvent>,
    id: RequestId,
    version: PolicyVersion,
    weights: ServedMark,
    /// An event that follows the last one.
    next: Option<ServedEvent>,
    over: bool,
    running: Running,
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.running.0.engine.abort(self.id);
    }
}

impl Answer {
    async fn next(&mut self) -> Option<ServedEvent> {
        if self.over {
            return None;
        }
        let event = match self.next.take() {
            Some(event) => event,
            None => match self.events.recv().await {
                Some(event) => self.served(event),
                None => stopped(),
            },
        };
        self.over = !matches!(event, ServedEvent::Prompt(_) | ServedEvent::Tokens(_));
        Some(event)
    }

    fn served(&mut self, event: EngineEvent) -> ServedEvent {
        match event {
            EngineEvent::Prompt { logprobs, .. } => ServedEvent::Prompt(logprobs),
            EngineEvent::Tokens { tokens, .. } => self.tokens(tokens),
            EngineEvent::Finished {
                reason,
                cached_prompt_tokens,
                routes,
                ..
            } => ServedEvent::Finished {
                reason,
                cached_prompt_tokens,
                routes,
            },
            EngineEvent::Failed { error, .. } => ServedEvent::Failed(error),
        }
    }

    /// The tokens of the wanted weights; at the first one of others the answer ends.
    fn tokens(&mut self, tokens: Vec<SampledToken>) -> ServedEvent {
        let mark = self.running.0.mark();
        let version = self.version;
        // The same version may be published again with other weights.
        let again = mark.id == self.weights.id && mark.manifest != self.weights.manifest;
        let count = tokens.len();
        let own = tokens
            .into_iter()
            .take_while(|t| t.version == version && !again);
        let own: Vec<ServedToken> = own.map(token).collect();
        if own.len() == count {
            return ServedEvent::Tokens(own);
        }
        let others = ServedEvent::Weights(mark);
        if own.is_empty() {
            return others;
        }
        self.next = Some(others);
        ServedEvent::Tokens(own)
    }
}

fn token(token: SampledToken) -> ServedToken {
    ServedToken {
        id: token.id,
        logprob: token.logprob,
        top: token.top,
    }
}

fn stopped() -> ServedEvent {
    let why = "the engine said nothing more".to_owned();
    ServedEvent::Failed(EngineError::Stopped(why))
}

/// `GET /engine/state`.
async fn state(State(routes): State<Arc<EngineRoutes>>) -> Json<ServedState> {
    Json(ServedState {
        weights: routes.mark(),
        context: routes.context,
        vocab: routes.vocab,
        status: routes.engine.status(),
    })
}

/// `POST /engine/generate`.
async fn generate(
    State(routes): State<Arc<EngineRoutes>>,
    Json(call): Json<ServedCall>,
) -> Response {
    let frames = match routes.begin(call) {
        Ok(answer) => {
            let next = |mut answer: Answer| async move {
                let event = answer.next().await?;
                Some((frame(&event), answer))
            };
            Body::from_stream(futures::stream::unfold(answer, next))
        }
        Err(event) => Body::from_stream(futures::stream::iter([frame(&event)])),
    };
    ([(CONTENT_TYPE, "text/event-stream")], frames).into_response()
}

/// An event as a frame of a stream of server-sent events.
fn frame(event: &ServedEvent) -> Result<String, Infallible> {
    // These are plain structures, which always have a form in JSON.
    let text = serde_json::to_string(event).unwrap_or_default();
    Ok(format!("data: {text}\n\n"))
}
