//! Starts model calls: from the body of a request to a running call.
//!
//! 1. Scan the body for messages that were parsed before ([`crate::known_bodies`]); only the rest is parsed.
//! 2. Find a call that this request repeats, and join it.
//! 3. Parse, restore what the request continues by id, choose the format of the output.
//! 4. Join the request to the captured tokens: the session returns the prompt, or refuses.
//! 5. Start the task that runs the call ([`crate::drive`]); the caller has a reader of it.
//!
//! A session is locked only in step 4. Rendering happens under the lock, so that two calls of one rollout see
//! each other's tokens.

use crate::adapters::Adapters;
use crate::capacity::Capacity;
use crate::config::{GatewayConfig, GatewayParts};
use crate::drive::{self, Work};
use crate::failures::NEEDS_ALL;
use crate::keys::{Key, StateId, head as head_key, hex};
use crate::known_bodies::{KnownBody, Scan};
use crate::output_format;
use crate::prompts::{Prompts, note_media};
use crate::rollout::{Rollout, unix_s};
use crate::running::{RunningCall, Subscription};
use crate::session::{CallRequest, CallStart, RolloutSpec, Session};
use crate::stats::Counters;
use sinew_dialect::fields::Notes;
use sinew_dialect::format::FormatAsk;
use sinew_dialect::{AnswerContext, ApiError, Dialect, ModelRequest, Prompt, ToolChoice};
use sinew_render::{
    Renderer, ToolCallFormat, TurnFormat, TurnOptions, call_end, forced_opening, text_only,
};
use sinew_types::{
    Engine, EngineStatus, EpisodeId, Fidelity, Format, GenerateRequest, Grammar, PromptLogprobs,
    RequestId, Role, SamplingParams, TokenId, ToolNeed,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Number of tokens at the end of a prompt that are searched for an opened reasoning tag.
const TAIL_TOKENS: usize = 16;

/// Properties by which a repeated request is recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Retry<'a> {
    /// Path of the request: the same body in another dialect is a different call.
    pub(crate) path: &'a str,
    /// Idempotency key of the client: requests with different keys are different, even if their bodies are
    /// equal.
    pub(crate) idempotency: Option<&'a str>,
    /// Whether the client marks the request as a retry.
    pub(crate) again: bool,
}

impl Retry<'_> {
    /// Returns the hash that identifies the request; `scan` is the result of scanning its body.
    pub(crate) fn key(&self, body: &[u8], scan: Option<&Scan>) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(self.path.len() as u64).to_le_bytes());
        hasher.update(self.path.as_bytes());
        let key = self.idempotency.unwrap_or_default();
        hasher.update(&[u8::from(self.idempotency.is_some())]);
        hasher.update(&(key.len() as u64).to_le_bytes());
        hasher.update(key.as_bytes());
        // Another body is another request, whatever the client's key.
        match scan {
            Some(scan) => hasher.update(b"scan").update(&scan.body_key(body)),
            None => hasher.update(b"body").update(body),
        };
        *hasher.finalize().as_bytes()
    }
}

/// A request body that is stored to recognize a later one that starts with the same messages.
#[derive(Clone, Copy, Debug)]
struct Repeat<'a> {
    /// The body as it arrived.
    body: &'a [u8],
    /// Position of its messages.
    scan: &'a Scan,
    /// Hash of the request's part before the messages.
    head: Key,
}

/// Whether a later body may extend the messages of this request: the model speaks next, and the messages are
/// the complete prompt.
fn may_grow(request: &ModelRequest) -> bool {
    let goes_on = request.continuation.as_ref();
    // Tools that messages define are not known without these messages.
    let alone = goes_on.is_none_or(|c| c.previous.is_none()) && !request.defines_tools;
    let last = match &request.prompt {
        Prompt::Messages(messages) => messages[request.head..].last(),
        _ => None,
    };
    alone && last.is_some_and(|m| m.role != Role::Assistant)
}

/// Whether a request, parsed without its known messages, continues the known one. If so, only its new
/// messages remain in it.
fn grown(rollout: &Rollout, seen: &KnownBody, request: &mut ModelRequest) -> bool {
    if !may_grow(request) {
        return false;
    }
    let Prompt::Messages(messages) = &mut request.prompt else {
        return false;
    };
    if head_key(&request.tools, &messages[..request.head]) != seen.head {
        return false;
    }
    if let Some(continuation) = &mut request.continuation {
        let id = call_id(rollout.session().id(), seen.call);
        let id = format!("{}{id}", continuation.prefix);
        if continuation.keep && !rollout.answers.has(&id) {
            return false;
        }
        continuation.grown_from = Some(id);
        continuation.own_from = 0;
    }
    messages.drain(..request.head);
    request.head = 0;
    true
}

/// Starts model calls, up to a limit of concurrent ones.
pub(crate) struct Caller {
    /// Limits and the model's turn format.
    config: GatewayConfig,
    engine: Arc<dyn Engine>,
    renderer: Arc<dyn Renderer>,
    capacity: Option<Arc<dyn Capacity>>,
    adapters: Arc<Adapters>,
    /// Source of request ids, unique among all users of the engine.
    requests: Arc<AtomicU64>,
    /// Message roles that the model's template supports.
    prompts: Prompts,
    counters: Arc<Counters>,
    /// Semaphore with one permit per call, at most `max_in_flight`.
    in_flight: Arc<Semaphore>,
    /// Whether new calls are refused with status 503, after which clients may wait for another session.
    draining: AtomicBool,
    /// Whether new calls are refused for good: their samples would not be trained.
    ended: AtomicBool,
}

impl Caller {
    pub(crate) fn new(
        config: GatewayConfig,
        parts: &GatewayParts,
        adapters: Arc<Adapters>,
        counters: Arc<Counters>,
    ) -> Self {
        Self {
            engine: Arc::clone(&parts.engine),
            renderer: Arc::clone(&parts.renderer),
            capacity: parts.capacity.clone(),
            adapters,
            requests: Arc::clone(&parts.requests),
            prompts: Prompts::of(parts.renderer.as_ref()),
            counters,
            in_flight: Arc::new(Semaphore::new(config.server.max_in_flight)),
            draining: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            config,
        }
    }

    /// Refuses new calls from now on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Refuses new calls for good, and reports this to clients.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.drain();
    }

    /// Number of running calls.
    pub(crate) fn running(&self) -> usize {
        self.config.server.max_in_flight - self.in_flight.available_permits()
    }

    /// Waits until no call is running, but no longer than `within`.
    pub(crate) async fn drained(&self, within: Duration) {
        let all = self.config.server.max_in_flight as u32;
        // Too late or not, what still runs is for the caller to see.
        let _ = tokio::time::timeout(within, self.in_flight.acquire_many(all)).await;
    }

    /// Checks that calls are accepted.
    ///
    /// # Errors
    /// 503 after [`Caller::drain`], 410 after [`Caller::end`].
    pub(crate) fn is_open(&self) -> Result<(), ApiError> {
        if self.ended.load(Ordering::Acquire) {
            return Err(ApiError::run_ended());
        }
        if self.draining.load(Ordering::Acquire) {
            Err(ApiError::stopping("it takes no more calls"))
        } else {
            Ok(())
        }
    }

    /// Adds the facts that the gateway knows to a rollout's provenance.
    pub(crate) fn describe(&self, spec: &mut RolloutSpec) {
        spec.describe(self.renderer.as_ref());
        let fidelity = self.engine.fidelity();
        spec.provenance.logprobs_unknown = matches!(fidelity, Fidelity::Evaluation { .. });
    }

    pub(crate) fn engine_status(&self) -> EngineStatus {
        self.engine.status()
    }

    /// Calls the model for a rollout, with a request body in a dialect.
    pub(crate) fn call(
        &self,
        rollout: &Arc<Rollout>,
        dialect: &dyn Dialect,
        body: &[u8],
        retry: Retry<'_>,
    ) -> Result<Subscription, ApiError> {
        let scan = dialect
            .repeated()
            .and_then(|field| rollout.session().bodies().scan(body, field));
        let key = retry.key(body, scan.as_ref());
        if let Some(reader) = rollout.repeated(key, retry.again) {
            self.counters.count(|stats| stats.coalesced += 1);
            return Ok(reader);
        }
        self.is_open()?;
        let notes = || Notes::new(self.config.strict_fields).with_answers(&rollout.answers);
        let repeat = |head| {
            let scan = scan.as_ref()?;
            Some(Repeat { body, scan, head })
        };
        if let Some((seen, rest)) = scan.as_ref().and_then(|s| s.cut.as_ref())
            && let Ok(mut request) = dialect.parse(rest, &notes())
            && grown(rollout, seen, &mut request)
        {
            match self.begin(rollout, request, key, repeat(seen.head), Some(seen.state)) {
                Err(error) if error.code == NEEDS_ALL => {}
                begun => {
                    let recognized = u64::from(begun.is_ok());
                    self.counters.count(|stats| stats.recognized += recognized);
                    return begun;
                }
            }
        }
        let request = dialect.parse(body, &notes())?;
        let repeat = match &request.prompt {
            Prompt::Messages(messages) if may_grow(&request) => {
                repeat(head_key(&request.tools, &messages[..request.head]))
            }
            _ => None,
        };
        self.begin(rollout, request, key, repeat, None)
    }

    /// Joins a call to the trace, plans and starts it. `known` is the state after the messages that were cut
    /// off.
    fn begin(
        &self,
        rollout: &Arc<Rollout>,
        mut request: ModelRequest,
        key: [u8; 32],
        repeat: Option<Repeat<'_>>,
        known: Option<StateId>,
    ) -> Result<Subscription, ApiError> {
        request.restore(&rollout.answers)?;
        let adapter = rollout.session().spec().adapter.clone();
        self.adapters.fits(&request.model, adapter.as_ref())?;
        self.check(&request)?;
        if let Prompt::Messages(messages) = &mut request.prompt {
            note_media(messages, &mut request.ignored);
            self.prompts.adapt(messages, known.is_some());
        }
        let permit = self.permit()?;
        let (format, held) = self.formats(&mut request)?;
        let opening = match &held {
            // A format already fixes how the turn begins.
            Some(_) => String::new(),
            None => self.opening(&request)?,
        };
        let ask = CallRequest {
            prompt: &request.prompt,
            known,
            tools: &request.tools,
            opening: &opening,
            choices: request.n,
            ignored: &request.ignored,
        };
        let (begun, id, requests) = {
            let mut session = rollout.session();
            let begun = session.begin(self.renderer.as_ref(), &ask, unix_s())?;
            if let Some(Repeat { body, scan, head }) = repeat {
                session.remember(begun.call, body, scan, head);
            }
            let mut sampling = self.sampling(&session, &request, &begun, format.calls.as_ref());
            sampling.format = held.as_ref().map(|h| Arc::clone(&h.format));
            let requests = self.requests(&session, &request, &begun, &sampling);
            let id = call_id(session.id(), begun.call);
            (begun, id, requests)
        };
        self.count(&begun, &id);
        self.counters.ignored(&request.ignored);
        let turn = self.turn(&request, &begun, &id, format, opening);
        let context = self.context(id, request, &begun.prompt);
        let deadline = Instant::now() + self.config.server.call_timeout;
        let running = RunningCall::new(context, deadline);
        let subscription = Subscription::new(&running);
        rollout
            .calls()
            .running
            .push((Some(key), Arc::clone(&running)));
        let work = Work {
            engine: Arc::clone(&self.engine),
            capacity: self.capacity.clone(),
            rollout: Arc::clone(rollout),
            counters: Arc::clone(&self.counters),
            call: begun.call,
            requests,
            format_path: held.map(|h| h.path),
            turn,
            client_grace: self.config.server.client_grace,
        };
        tokio::spawn(drive::drive(work, running, permit));
        Ok(subscription)
    }

    /// Options for parsing the model's turn.
    fn turn(
        &self,
        request: &ModelRequest,
        begun: &CallStart,
        id: &str,
        mut format: TurnFormat,
        opening: String,
    ) -> TurnOptions {
        if let Some(reasoning) = &mut format.reasoning {
            reasoning.opened_by_prompt = self.prompt_ends_with(&begun.prompt, &reasoning.open);
        }
        TurnOptions {
            format,
            tools: request.callable().cloned().collect(),
            stop: request.sampling.stop.clone(),
            opening,
            call_prefix: format!("call_{}", call_tag(id)),
        }
    }

    /// Counts the way in which a call joined its trace.
    fn count(&self, begun: &CallStart, call: &str) {
        self.counters.joined(begun.join);
        if begun.join.diverges() {
            tracing::debug!(join = ?begun.join, call, "a client's history is not the captured one");
        }
    }

    /// Returns the format for parsing the turn, and the format that constrains the output.
    fn formats(
        &self,
        request: &mut ModelRequest,
    ) -> Result<(TurnFormat, Option<FormatAsk>), ApiError> {
        let mut format = self.turn_format(request)?;
        let holds = self.engine.holds_formats();
        let calls = format.calls.as_ref().filter(|_| takes_calls(request));
        let held = output_format::resolve(request, calls, holds)?;
        if held.as_ref().is_some_and(|h| !may_reason(&h.format)) {
            format.reasoning = None;
        }
        Ok((format, held))
    }

    /// Returns the data that is needed to write the answer.
    fn context(&self, id: String, request: ModelRequest, prompt: &[TokenId]) -> AnswerContext {
        let prompt_ids = if request.return_token_ids || request.echo_prompt {
            prompt.to_vec()
        } else {
            Vec::new()
        };
        AnswerContext {
            id,
            created_s: unix_s() as u64,
            request: Arc::new(request),
            renderer: Arc::clone(&self.renderer),
            prompt_ids,
        }
    }

    /// Refuses `n` if it is 0 or above the server's limit and, in strict mode, content that is not text.
    fn check(&self, request: &ModelRequest) -> Result<(), ApiError> {
        if self.config.strict_fields
            && let Prompt::Messages(messages) = &request.prompt
        {
            text_only(messages)?;
        }
        let n = request.n;
        let max = self.config.server.max_choices;
        if n == 0 || n > max {
            let why = format!("n is {n}, allowed: 1 to {max}");
            return Err(ApiError::invalid("n", why));
        }
        Ok(())
    }

    /// Takes a place among the running calls, or refuses at once. A queue here would only hide the load.
    fn permit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let permit = Arc::clone(&self.in_flight).try_acquire_owned();
        permit.map_err(|_| {
            let limit = self.config.server.max_in_flight;
            let why = format!("{limit} model calls are running, the limit of this gateway");
            ApiError::overloaded("too_many_calls", why)
        })
    }

    /// Returns the format for parsing the turn: plain text for text and token prompts, and no calls where
    /// none are allowed, except in notations that frame text.
    fn turn_format(&self, request: &ModelRequest) -> Result<TurnFormat, ApiError> {
        if !matches!(request.prompt, Prompt::Messages(_)) {
            return Ok(TurnFormat::default());
        }
        let format = self.config.format.clone();
        if !takes_calls(request) {
            return Ok(format.without_calls());
        }
        if format.calls.is_none() {
            let why = "this model has no known way to write tool calls";
            return Err(ApiError::unsupported("tools", why));
        }
        let calls = format.calls.as_ref();
        if !request.parallel_tool_calls && calls.is_some_and(|f| call_end(f).is_none()) {
            let why = "one call cannot be told from several in this model's way to write them";
            return Err(ApiError::unsupported("parallel_tool_calls", why));
        }
        Ok(format)
    }

    /// Counts the tokens of a request's conversation, rendered as a whole.
    ///
    /// # Errors
    /// If it cannot be rendered.
    pub(crate) fn count_tokens(&self, request: ModelRequest) -> Result<usize, ApiError> {
        let tools: &[_] = match request.tool_choice {
            ToolChoice::None => &[],
            _ => &request.tools,
        };
        match request.prompt {
            Prompt::Messages(mut messages) => {
                self.prompts.adapt(&mut messages, false);
                let ids = self.renderer.render_prompt(&messages, tools)?;
                Ok(ids.len())
            }
            Prompt::Text(text) => Ok(self.renderer.encode_text(&text)?.len()),
            Prompt::Tokens(ids) => Ok(ids.len()),
        }
    }

    /// Returns the text that the turn is forced to start with, so that a required call follows.
    fn opening(&self, request: &ModelRequest) -> Result<String, ApiError> {
        let tool = match &request.tool_choice {
            ToolChoice::Auto | ToolChoice::None => return Ok(String::new()),
            ToolChoice::Required => None,
            ToolChoice::Named(name) => Some(name.as_str()),
        };
        let format = self.config.format.calls.as_ref();
        format.and_then(|f| forced_opening(f, tool)).ok_or_else(|| {
            let why = "this call cannot be forced in this model's way to write calls";
            ApiError::unsupported("tool_choice", why)
        })
    }

    /// Whether the rendered prompt ends with `mark`, ignoring white space: a template may open the reasoning
    /// tag.
    fn prompt_ends_with(&self, prompt: &[TokenId], mark: &str) -> bool {
        let tail = &prompt[prompt.len().saturating_sub(TAIL_TOKENS)..];
        let text = self.renderer.decode_with_special(tail);
        text.trim_end().ends_with(mark)
    }

    /// Returns the sampling parameters for the engine. Each value is the rollout's if pinned, else the
    /// request's, else the rollout's default, else the gateway's.
    fn sampling(
        &self,
        session: &Session,
        request: &ModelRequest,
        begun: &CallStart,
        format: Option<&ToolCallFormat>,
    ) -> SamplingParams {
        let rollout = &session.spec().sampling;
        let ask = &request.sampling;
        fn choose<T: Copy>(pinned: bool, rollout: Option<T>, ask: Option<T>) -> Option<T> {
            if pinned {
                rollout.or(ask)
            } else {
                ask.or(rollout)
            }
        }
        let pinned = rollout.pinned;
        let max_tokens = choose(pinned, rollout.max_tokens, ask.max_tokens);
        // An engine samples at least one token, also where the client asks for none.
        let max_tokens = if request.is_prompt_only() {
            1
        } else {
            max_tokens.unwrap_or(session.limits().default_max_tokens)
        };
        let mut stop_strings = ask.stop.clone();
        if !request.parallel_tool_calls {
            stop_strings.extend(format.and_then(call_end));
        }
        SamplingParams {
            temperature: choose(pinned, rollout.temperature, ask.temperature).unwrap_or(1.0),
            top_p: choose(pinned, rollout.top_p, ask.top_p).unwrap_or(1.0),
            top_k: choose(pinned, rollout.top_k, ask.top_k).unwrap_or(0),
            min_p: choose(pinned, rollout.min_p, ask.min_p).unwrap_or(0.0),
            max_tokens: max_tokens.clamp(1, begun.max_tokens),
            stop_ids: self.renderer.stop_ids().to_vec(),
            stop_strings,
            seed: 0,
            logit_bias: ask.logit_bias.clone(),
            top_logprobs: request.logprobs.unwrap_or(0),
            routes_from: rollout.routes.then_some(begun.routes_known),
            format: None,
        }
    }

    /// Builds one engine request per choice, with ascending ids; all share the prompt.
    fn requests(
        &self,
        session: &Session,
        request: &ModelRequest,
        begun: &CallStart,
        sampling: &SamplingParams,
    ) -> Vec<GenerateRequest> {
        let scored = request.echo_prompt.then_some(request.logprobs).flatten();
        let scored = scored.map(|top| PromptLogprobs {
            top,
            ..PromptLogprobs::default()
        });
        let count = u64::from(request.n);
        let first = self.requests.fetch_add(count, Ordering::Relaxed);
        let one = |(choice, id)| {
            let sampling = SamplingParams {
                seed: session.seed(begun.call, choice, request.sampling.seed),
                ..sampling.clone()
            };
            let prompt = Arc::clone(&begun.prompt);
            GenerateRequest {
                adapter: session.spec().adapter.clone(),
                // All choices have one prompt.
                prompt_logprobs: scored.clone().filter(|_| choice == 0),
                ..GenerateRequest::new(RequestId(id), prompt, sampling)
            }
        };
        (0..request.n).zip(first..).map(one).collect()
    }
}

/// Whether the model may call tools.
fn takes_calls(request: &ModelRequest) -> bool {
    request.callable().next().is_some() && request.tool_choice != ToolChoice::None
}

/// Whether an output of this format may begin with reasoning.
fn may_reason(format: &Format) -> bool {
    matches!(&format.grammar, Grammar::Tools(tools) if tools.need == ToolNeed::Auto)
}

/// Returns the unique id of a call; dialects add their own prefix.
fn call_id(rollout: &EpisodeId, call: u32) -> String {
    format!("{rollout}-{call}")
}

/// Returns a short tag of a call, unique within one gateway.
fn call_tag(id: &str) -> String {
    hex(&blake3::hash(id.as_bytes()).as_bytes()[..8])
}
