//! vLLM: token ids in and out, weights from a folder, sleep.
//!
//! Facts are from the schemas that vLLM 0.32 publishes: `/v1/completions` takes ids as `prompt` and returns
//! ids with `return_token_ids`; `/inference/v1/generate` is token ids only (server flag
//! `--enable-scale-out`); weights, their label, pause and sleep are on the development endpoints
//! (`VLLM_SERVER_DEV_MODE=1`). Log-probabilities are those of the raw logits, which fit temperatures 0 and 1.
//! The flag `--logprobs-mode processed_logprobs` takes them after temperature, bias and truncation, which
//! fits any temperature without the other two. Options that would make them differ from the sampling policy's
//! are refused. Log-probabilities of a prompt are of the raw logits in both modes.

mod adapters;
mod experts;
mod prompt;
mod sleep;
mod weights;
mod wire;

use crate::answer_pieces::AnswerPieces;
use crate::asleep::Asleep;
use crate::attempt::{Attempt, AttemptEnd};
use crate::backend::{AttemptSink, Backend, NamedAdapter, Probe, Weights};
use crate::check::{LogprobMode, raw_fits, refused};
use crate::config::{ConfigError, ServerConfig};
use crate::error::{AttemptError, Stage};
use crate::guided;
use crate::http::{self, Http, within};
use crate::metrics::Metrics;
use crate::swap::{SwapWatch, Swaps};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_types::{Fidelity, PromptLogprobs, SamplingParams, WeightsId};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// Endpoint that generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VllmApi {
    /// `/v1/completions`: always there.
    Completions,
    /// `/inference/v1/generate`: smaller answers, and the server itself reports which weights sampled which
    /// token.
    Generate,
}

/// Options of vLLM servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VllmOptions {
    /// Endpoint that generates. Default: `/v1/completions`.
    pub api: VllmApi,
    /// [`LogprobMode::Processed`] where the server runs with `--logprobs-mode processed_logprobs`.
    pub logprobs: LogprobMode,
    /// Level of [`Backend::sleep`]: 1 keeps the weights in host memory, 2 discards them. Default:
    /// 1.
    pub sleep_level: u8,
    /// Send priorities; the server must run with `--scheduling-policy priority`. Default: off.
    pub priorities: bool,
}

impl VllmOptions {
    /// vLLM raises temperatures between 0 and this one to it, and warns only in its log; they are refused
    /// here.
    pub const LOWEST_TEMPERATURE: f32 = 0.01;
}

impl Default for VllmOptions {
    fn default() -> Self {
        Self {
            api: VllmApi::Completions,
            logprobs: LogprobMode::Raw,
            sleep_level: 1,
            priorities: false,
        }
    }
}

/// Facts about the model that are requested once per process of the server.
#[derive(Clone, Debug)]
struct Model {
    id: String,
    context: Option<usize>,
}

/// State that is kept between calls.
#[derive(Debug, Default)]
struct Memory {
    model: Option<Model>,
    /// Start time of the process that `model` and `held` are about.
    started: Option<f64>,
    /// Weights that this process has loaded, for servers that have no label.
    held: Option<WeightsId>,
    /// Whether the server has no `/weight_info`.
    unlabelled: bool,
    /// Memory that it has given up for us.
    asleep: Asleep,
    /// Name and weights of the newest adapter that was loaded here.
    adapter: Option<(String, WeightsId)>,
    /// Adapters that were loaded here for requests that name them.
    named: BTreeSet<String>,
    /// Whether its answers report the weights of each token.
    spans: bool,
    /// Whether it ends its requests when it is asked to keep them: a version before `mode=keep`.
    ends_requests: bool,
    /// Whether the last load asked it to.
    asked_to_keep: bool,
}

/// A vLLM server.
#[derive(Debug)]
pub struct VllmBackend {
    http: Http,
    config: ServerConfig,
    options: VllmOptions,
    memory: Mutex<Memory>,
    swaps: Swaps,
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelCard>,
}

#[derive(Deserialize)]
struct ModelCard {
    id: String,
    max_model_len: Option<usize>,
}

impl VllmBackend {
    /// The server of `config`, which need not be up yet.
    ///
    /// # Errors
    /// If the address cannot be one.
    pub fn new(config: ServerConfig, options: VllmOptions) -> Result<Self, ConfigError> {
        let http = Http::new(&config.url, config.api_key.as_deref(), config.timeouts)?;
        if options.sleep_level != 1 && options.sleep_level != 2 {
            return Err(ConfigError::Value {
                name: "sleep_level",
                value: options.sleep_level.to_string(),
                allowed: "1 (weights kept in host memory) or 2 (discarded)".to_owned(),
            });
        }
        Ok(Self {
            http,
            config,
            options,
            memory: Mutex::default(),
            swaps: Swaps::default(),
        })
    }

    fn remember<T>(&self, f: impl FnOnce(&mut Memory) -> T) -> T {
        // Nothing is done to it in more than one step.
        f(&mut self.memory.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn model(&self) -> Result<Model, AttemptError> {
        if let Some(model) = self.remember(|m| m.model.clone()) {
            return Ok(model);
        }
        let list: ModelList = self.http.get("/v1/models").await?;
        let wanted = self.config.model.as_deref();
        let named = |card: &&ModelCard| wanted.is_none_or(|w| w == card.id);
        let Some(card) = list.data.iter().find(named) else {
            let served: Vec<_> = list.data.iter().map(|c| c.id.as_str()).collect();
            let why = format!("serving model {wanted:?}: it serves {served:?}");
            return Err(AttemptError::Unsupported(why));
        };
        let model = Model {
            id: card.id.clone(),
            context: card.max_model_len.or(self.config.context),
        };
        self.remember(|m| m.model = Some(model.clone()));
        Ok(model)
    }

    /// Runs an attempt. The server's own weights are verified before it and, unless the answer names the
    /// weights of each token, after it: a swap by another client in between shows only then. An attempt that
    /// asks for an adapter names that itself.
    async fn run(
        &self,
        attempt: &Attempt,
        sink: &mut AttemptSink,
    ) -> Result<AttemptEnd, AttemptError> {
        let watch = self.swaps.watch();
        let model = self.model().await?;
        let max_tokens = crate::check::max_new_tokens(attempt, model.context)?;
        self.verify_served(attempt, watch).await?;
        if let Some(asked) = &attempt.prompt_logprobs {
            let name = attempt.adapter.as_deref().unwrap_or(&model.id);
            let scored = self.score_prompt(attempt, asked, name).await;
            let scored = scored.map_err(|e| adapters::missing(attempt, e))?;
            // The answer does not name the weights.
            self.verify_served(attempt, watch).await?;
            sink.prompt(scored).await?;
        }
        let model = attempt.adapter.as_deref().unwrap_or(&model.id);
        let (path, body) = match self.options.api {
            VllmApi::Completions => (
                "/v1/completions",
                wire::completions(attempt, model, max_tokens),
            ),
            VllmApi::Generate => (
                "/inference/v1/generate",
                wire::generate(attempt, model, max_tokens),
            ),
        };
        let mut body = body;
        if self.options.priorities {
            // vLLM runs smaller numbers first.
            body["priority"] = json!(-i64::from(attempt.priority));
        }
        let limit_s = self.http.timeouts.whole_s;
        let mut pieces = AnswerPieces::new(attempt, watch);
        let streamed = self.stream((path, &body), attempt, &mut pieces, sink);
        let streamed = within(Stage::Whole, limit_s, streamed).await?;
        if pieces.was_cut_by_a_load() {
            self.remember(|m| m.ends_requests |= m.asked_to_keep);
        }
        streamed.map_err(|e| adapters::missing(attempt, e))?;
        let (echoed, spanned) = (pieces.echoed(), pieces.spanned());
        let end = pieces.end(sink)?;
        if !echoed {
            let why = "it does not tell which prompt it used: is it a vLLM of 0.10.2 or later?";
            return Err(AttemptError::Protocol(why.to_owned()));
        }
        if spanned {
            self.remember(|m| m.spans = true);
        } else {
            self.verify_served(attempt, watch).await?;
        }
        Ok(end)
    }

    /// Verifies the server's own weights, unless they are those that it was started with.
    async fn verify_served(
        &self,
        attempt: &Attempt,
        watch: SwapWatch<'_>,
    ) -> Result<(), AttemptError> {
        let Some(served) = attempt.served() else {
            return Ok(());
        };
        let verified = self.verify(served).await;
        verified.map_err(|e| watch.excused(e))
    }

    /// Sends a request, a path and a body, and takes its answer to the end.
    async fn stream(
        &self,
        (path, body): (&str, &Value),
        attempt: &Attempt,
        pieces: &mut AnswerPieces<'_>,
        sink: &mut AttemptSink,
    ) -> Result<(), AttemptError> {
        let mut events = self.http.stream(path, body).await?;
        while let Some(data) = self.swaps.next(&mut events).await? {
            let Some(chunk) = http::event::<wire::Chunk>(&data)? else {
                break;
            };
            let seen = wire::read(chunk, &attempt.sampling)?;
            pieces.take(seen, sink).await?;
        }
        Ok(())
    }

    /// One probe: health, metrics, model and weights. Another start time means another process.
    async fn look(&self) -> Result<Probe, AttemptError> {
        self.http.get_bytes("/health").await?;
        let metrics = Metrics::parse(&self.http.get_text("/metrics").await?);
        let started = metrics.first("process_start_time_seconds");
        self.remember(|m| {
            if m.started != started {
                // Another process: nothing that was known of the old one holds.
                *m = Memory {
                    started,
                    ..Memory::default()
                };
            }
        });
        let model = self.model().await?;
        let weights = self.served().await?;
        let adapters = self.named_there().await?;
        let total = kv_total(&metrics);
        let used = metrics.all("vllm:kv_cache_usage_perc").map(|s| s.value);
        let used = used.fold(None, |a: Option<f64>, u| Some(a.map_or(u, |a| a.max(u))));
        let free = total.zip(used).map(|(total, used)| {
            let used = if used.is_finite() {
                used.clamp(0.0, 1.0)
            } else {
                1.0
            };
            ((1.0 - used) * total as f64) as usize
        });
        let asleep = |s: &&crate::metrics::Sample| {
            s.labels.get("sleep_state").is_some_and(|s| s == "awake") && s.value == 0.0
        };
        Ok(Probe {
            // The metric shows a server as awake once it has the memory of its weights.
            sleeping: metrics.all("vllm:engine_sleep_state").any(|s| asleep(&s))
                || self.remember(|m| m.asleep != Asleep::No),
            running: metrics.count("vllm:num_requests_running") as usize,
            waiting: metrics.count("vllm:num_requests_waiting") as usize,
            kv_tokens_total: total,
            kv_tokens_free: free,
            context: model.context,
            vocab: self.config.vocab,
            adapters: Some(adapters),
            sampled_tokens: metrics.count("vllm:generation_tokens_total"),
            prefill_tokens: metrics.count("vllm:prompt_tokens_total"),
            cached_prompt_tokens: metrics.count("vllm:prefix_cache_hits_total"),
            preemptions: metrics.count("vllm:num_preemptions_total"),
            ..Probe::new(weights)
        })
    }
}

/// KV capacity in tokens, over all processes of the server; `None` if it reports none.
fn kv_total(metrics: &Metrics) -> Option<usize> {
    let each = metrics.all("vllm:cache_config_info").filter_map(|s| {
        let number = |key: &str| s.labels.get(key)?.parse::<usize>().ok();
        let blocks = number("num_gpu_blocks").zip(number("block_size"));
        number("kv_cache_size_tokens").or(blocks.map(|(n, size)| n * size))
    });
    let total: usize = each.sum();
    (total > 0).then_some(total)
}

/// Refuses parameters with which processed log-probabilities are not the policy's: bias and
/// truncation. Greedy sampling drops truncation, but not the bias.
fn processed_fits(sampling: &SamplingParams) -> Result<(), AttemptError> {
    const WHY: &str = "with vLLM of `logprobs = \"processed\"`, whose log-probs are taken after it";
    if !sampling.logit_bias.is_empty() {
        let value = format!("{} entries", sampling.logit_bias.len());
        return Err(refused("logit_bias", &value, &format!("none {WHY}")));
    }
    if sampling.temperature == 0.0 {
        return Ok(());
    }
    let truncations = [
        ("top_p", sampling.top_p, 1.0),
        ("top_k", sampling.top_k as f32, 0.0),
        ("min_p", sampling.min_p, 0.0),
    ];
    match truncations.iter().find(|(_, value, all)| value != all) {
        None => Ok(()),
        Some((name, value, all)) => Err(refused(name, value, &format!("{all} {WHY}"))),
    }
}

impl Backend for VllmBackend {
    fn name(&self) -> &str {
        self.http.name()
    }

    fn fidelity(&self) -> Fidelity {
        Fidelity::TokenExact
    }

    fn accepts(&self, sampling: &SamplingParams) -> Result<(), AttemptError> {
        if let Some(format) = &sampling.format {
            guided::vllm(format).map_err(AttemptError::Refused)?;
        }
        let temperature = sampling.temperature;
        if temperature > 0.0 && temperature < VllmOptions::LOWEST_TEMPERATURE {
            let allowed = "0 (greedy) or at least 0.01 with vLLM, which samples at 0.01 instead";
            return Err(refused("temperature", &temperature, allowed));
        }
        match self.options.logprobs {
            LogprobMode::Processed => processed_fits(sampling),
            LogprobMode::Raw => {
                let instead = "0 or 1 with vLLM of `logprobs = \"raw\"`, whose log-probs are those of temperature \
                    1; start it with --logprobs-mode processed_logprobs and say `logprobs = \"processed\"`";
                raw_fits(sampling, instead)
            }
        }
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

    fn probe(&self) -> BoxFuture<'_, Result<Probe, AttemptError>> {
        self.look().boxed()
    }

    fn label(&self, id: WeightsId) -> BoxFuture<'_, Result<(), AttemptError>> {
        async move {
            // Asked first: it shows whether there are labels at all.
            self.weights().await?;
            self.set_label(&id.to_string()).await?;
            self.remember(|m| m.held = Some(id));
            self.verify(id).await
        }
        .boxed()
    }

    /// Only the endpoint of token ids reports the weights of each token.
    fn keeps_attempts(&self) -> bool {
        let reports = self.options.api == VllmApi::Generate;
        self.remember(|m| reports && m.spans && !m.ends_requests)
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
