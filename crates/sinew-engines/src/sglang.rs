//! SGLang: `/generate` with ids, weights from a folder, abort.
//!
//! Facts are from the schemas of SGLang 0.5.23. Every piece of an answer names the weights that sampled it,
//! so a wrong version is found before its tokens are forwarded. Its log-probabilities are taken after the
//! temperature and the logit bias, and before truncation, unless the server runs with
//! `SGLANG_RETURN_ORIGINAL_LOGPROB=1`: then they are the model's own. Options that would make them differ
//! from the sampling policy's are refused. Log-probabilities of a prompt are always the model's own.

mod adapters;
mod prompt;
mod sleep;
mod weights;
mod wire;

use crate::answer_pieces::AnswerPieces;
use crate::asleep::Asleep;
use crate::attempt::{Attempt, AttemptEnd, AttemptId};
use crate::backend::{AttemptSink, Backend, NamedAdapter, Probe, ServedWeights, Weights};
use crate::check::{LogprobMode, raw_fits, refused};
use crate::config::{ConfigError, ServerConfig};
use crate::error::{AttemptError, Stage};
use crate::guided;
use crate::http::{self, Http, within};
use crate::metrics::Metrics;
use crate::swap::Swaps;
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_types::{Fidelity, PromptLogprobs, SamplingParams, WeightsId};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Options of SGLang servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SglangOptions {
    /// [`LogprobMode::Raw`] where the server runs with `SGLANG_RETURN_ORIGINAL_LOGPROB=1`.
    pub logprobs: LogprobMode,
    /// Send priorities; the server must run with `--enable-priority-scheduling`. Default: off.
    pub priorities: bool,
}

impl Default for SglangOptions {
    fn default() -> Self {
        Self {
            logprobs: LogprobMode::Processed,
            priorities: false,
        }
    }
}

/// Facts about the server that are requested once, and again when its weights are not ours.
#[derive(Clone, Copy, Debug)]
struct Limits {
    context: Option<usize>,
    kv_tokens: Option<usize>,
}

/// State that is kept between calls, until the server's label shows that it may be another process.
#[derive(Debug, Default)]
struct Memory {
    limits: Option<Limits>,
    /// Memory that it has given up for us.
    asleep: Asleep,
    /// The newest adapter that was loaded here.
    adapter: Option<adapters::Loaded>,
    /// Adapters that were loaded here for requests that name them, and whether the server lists each.
    named: BTreeMap<String, bool>,
    /// Whether its answers report the weights of each token.
    spans: bool,
    /// Whether it ends its requests when it is asked to keep them: a version before `retract`.
    ends_requests: bool,
    /// Whether the last load asked it to.
    asked_to_keep: bool,
}

/// An SGLang server.
#[derive(Debug)]
pub struct SglangBackend {
    http: Http,
    config: ServerConfig,
    options: SglangOptions,
    memory: Mutex<Memory>,
    swaps: Swaps,
    /// Makes request ids differ from those of another process.
    session: u64,
}

#[derive(Deserialize)]
struct ServerInfo {
    context_length: Option<usize>,
    max_req_input_len: Option<usize>,
    max_total_num_tokens: Option<usize>,
}

impl SglangBackend {
    /// The server of `config`, which need not be up yet. `session` distinguishes this process
    /// from others that use the server.
    ///
    /// # Errors
    /// If the address cannot be one.
    pub fn new(
        config: ServerConfig,
        options: SglangOptions,
        session: u64,
    ) -> Result<Self, ConfigError> {
        Ok(Self {
            http: Http::new(&config.url, config.api_key.as_deref(), config.timeouts)?,
            config,
            options,
            memory: Mutex::default(),
            swaps: Swaps::default(),
            session,
        })
    }

    fn remember<T>(&self, f: impl FnOnce(&mut Memory) -> T) -> T {
        // Nothing is done to it in more than one step.
        f(&mut self.memory.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn request_id(&self, attempt: AttemptId) -> String {
        format!("sinew-{:016x}-{}", self.session, attempt.0)
    }

    /// Context and KV capacity. Asked for once; the configured context is used if the server does
    /// not report one.
    async fn limits(&self) -> Result<Limits, AttemptError> {
        if let Some(limits) = self.remember(|m| m.limits) {
            return Ok(limits);
        }
        let info: ServerInfo = match self.http.get("/server_info").await {
            // Its name until 0.5.
            Err(AttemptError::Status { status: 404, .. }) => {
                self.http.get("/get_server_info").await?
            }
            other => other?,
        };
        let limits = Limits {
            // A prompt may be one token short of the context.
            context: info
                .context_length
                .or(info.max_req_input_len.map(|n| n + 1))
                .or(self.config.context),
            kv_tokens: info.max_total_num_tokens,
        };
        self.remember(|m| m.limits = Some(limits));
        Ok(limits)
    }

    async fn run(
        &self,
        attempt: &Attempt,
        sink: &mut AttemptSink,
    ) -> Result<AttemptEnd, AttemptError> {
        let watch = self.swaps.watch();
        let limits = self.limits().await?;
        let max_tokens = crate::check::max_new_tokens(attempt, limits.context)?;
        if let Some(asked) = &attempt.prompt_logprobs {
            let scored = self.score_prompt(attempt, asked).await;
            let scored = scored.map_err(|e| watch.excused(self.missing(attempt, e)))?;
            sink.prompt(scored).await?;
        }
        let mut body = wire::generate(attempt, &self.request_id(attempt.id), max_tokens);
        if self.options.priorities {
            body["priority"] = json!(attempt.priority);
        }
        if let Some(name) = &attempt.adapter {
            body["lora_path"] = json!(name);
        }
        let limit_s = self.http.timeouts.whole_s;
        let mut pieces = AnswerPieces::new(attempt, watch);
        let streamed = self.stream(&body, attempt, &mut pieces, sink);
        let streamed = within(Stage::Whole, limit_s, streamed).await?;
        let (spans, ended) = (pieces.spanned(), pieces.was_cut_by_a_load());
        self.remember(|m| {
            m.spans |= spans;
            m.ends_requests |= ended && m.asked_to_keep;
        });
        streamed.map_err(|e| self.missing(attempt, e))?;
        pieces.end(sink)
    }

    async fn stream(
        &self,
        body: &Value,
        attempt: &Attempt,
        pieces: &mut AnswerPieces<'_>,
        sink: &mut AttemptSink,
    ) -> Result<(), AttemptError> {
        let mut events = self.http.stream("/generate", body).await?;
        while let Some(data) = self.swaps.next(&mut events).await? {
            let Some(chunk) = http::event::<wire::Chunk>(&data)? else {
                break;
            };
            let asked = usize::from(attempt.sampling.top_logprobs);
            let seen = wire::read(chunk, sink.ids(), attempt.prompt.len(), asked);
            if matches!(seen, Err(AttemptError::Cut(_))) {
                pieces.server_aborts();
            }
            pieces.take(seen?, sink).await?;
        }
        Ok(())
    }

    /// One probe: health, weights, limits, and metrics where the server has `--enable-metrics`.
    async fn look(&self) -> Result<Probe, AttemptError> {
        if self.remember(|m| m.asleep) == Asleep::No {
            // A server that sleeps may call itself unhealthy.
            self.http.get_bytes("/health").await?;
        }
        let base = self.weights().await?;
        let weights = self.served(base).await?;
        match weights {
            ServedWeights::Version(_) => {}
            // Another process than the one that it is about.
            ServedWeights::Unlabelled => self.remember(|m| {
                let (adapter, named) = (m.adapter.take(), std::mem::take(&mut m.named));
                *m = Memory {
                    adapter,
                    named,
                    ..Memory::default()
                };
            }),
            // Perhaps another one.
            ServedWeights::Foreign(_) => self.remember(|m| m.limits = None),
        }
        let limits = self.limits().await?;
        let mut probe = Probe {
            sleeping: self.remember(|m| m.asleep) != Asleep::No,
            context: limits.context,
            vocab: self.config.vocab,
            adapters: Some(self.named_there().await?),
            kv_tokens_total: limits.kv_tokens,
            ..Probe::new(weights)
        };
        // Served only with --enable-metrics.
        let metrics = match self.http.get_text("/metrics").await {
            Ok(text) => Metrics::parse(&text),
            Err(AttemptError::Status { status: 404, .. }) => return Ok(probe),
            Err(error) => return Err(error),
        };
        let used = metrics.sum("sglang:num_used_tokens");
        let share = metrics
            .first("sglang:token_usage")
            .filter(|s| s.is_finite());
        let share = share
            .zip(limits.kv_tokens)
            .map(|(s, total)| s * total as f64);
        let used = used.or(share).map(|u| u.max(0.0) as usize);
        let used = limits.kv_tokens.zip(used);
        probe.kv_tokens_free = used.map(|(total, used)| total.saturating_sub(used));
        probe.running = metrics.count("sglang:num_running_reqs") as usize;
        probe.waiting = metrics.count("sglang:num_queue_reqs") as usize;
        probe.sampled_tokens = metrics.count("sglang:generation_tokens_total");
        probe.prefill_tokens = metrics.count("sglang:prompt_tokens_total");
        probe.cached_prompt_tokens = metrics.count("sglang:cached_tokens_total");
        probe.preemptions = metrics.count("sglang:num_retracted_requests_total");
        Ok(probe)
    }
}

impl Backend for SglangBackend {
    fn name(&self) -> &str {
        self.http.name()
    }

    fn fidelity(&self) -> Fidelity {
        Fidelity::TokenExact
    }

    fn accepts(&self, sampling: &SamplingParams) -> Result<(), AttemptError> {
        if let Some(format) = &sampling.format {
            guided::sglang(format).map_err(AttemptError::Refused)?;
        }
        if self.options.logprobs == LogprobMode::Raw {
            let instead = "0 or 1 with SGLang of `logprobs = \"raw\"`, whose log-probs are those of temperature 1; \
                start it without SGLANG_RETURN_ORIGINAL_LOGPROB and leave `logprobs` out";
            raw_fits(sampling, instead)?;
        }
        if !sampling.logit_bias.is_empty() {
            let value = format!("{} entries", sampling.logit_bias.len());
            let allowed = "none with SGLang, whose log-probs are taken after the bias";
            return Err(refused("logit_bias", &value, allowed));
        }
        Ok(())
    }

    fn accepts_prompt(&self, asked: &PromptLogprobs) -> Result<(), AttemptError> {
        prompt::accepts(asked)
    }

    fn generate<'a>(
        &'a self,
        attempt: &'a Attempt,
        sink: &'a mut AttemptSink,
    ) -> BoxFuture<'a, Result<AttemptEnd, AttemptError>> {
        // No attempt goes out without its format: a server does not enforce a format that it does not get.
        async move {
            self.accepts(&attempt.sampling)?;
            self.run(attempt, sink).await
        }
        .boxed()
    }

    fn cancel(&self, attempt: AttemptId) -> BoxFuture<'_, ()> {
        async move {
            let body = json!({ "rid": self.request_id(attempt) });
            let control_s = self.http.timeouts.control_s;
            // A server that is gone has stopped too.
            let _ = self
                .http
                .post("/abort_request", Some(&body), control_s)
                .await;
        }
        .boxed()
    }

    fn probe(&self) -> BoxFuture<'_, Result<Probe, AttemptError>> {
        self.look().boxed()
    }

    fn label(&self, id: WeightsId) -> BoxFuture<'_, Result<(), AttemptError>> {
        async move {
            self.set_label(&id.to_string()).await?;
            self.verify(id).await
        }
        .boxed()
    }

    fn keeps_attempts(&self) -> bool {
        self.remember(|m| m.spans && !m.ends_requests)
    }

    fn load<'a>(&'a self, weights: &'a Weights) -> BoxFuture<'a, Result<(), AttemptError>> {
        async move {
            let Some(folder) = &weights.folder else {
                let why = "loading weights without a folder: set `weights_dir`".to_owned();
                return Err(AttemptError::Unsupported(why));
            };
            match &weights.adapter {
                Some(name) => self.load_adapter(weights, name, folder).await,
                None => self.swap(weights, folder).await,
            }
        }
        .boxed()
    }

    fn load_adapter<'a>(
        &'a self,
        adapter: &'a NamedAdapter,
    ) -> BoxFuture<'a, Result<(), AttemptError>> {
        self.load_named(adapter).boxed()
    }

    fn unload<'a>(&'a self, adapter: &'a str) -> BoxFuture<'a, Result<(), AttemptError>> {
        self.unload_adapter(adapter).boxed()
    }

    fn sleep(&self) -> BoxFuture<'_, Result<(), AttemptError>> {
        self.fall_asleep().boxed()
    }

    fn wake(&self) -> BoxFuture<'_, Result<(), AttemptError>> {
        self.wake_up().boxed()
    }
}
