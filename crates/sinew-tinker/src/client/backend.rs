//! Samplers of a service as a server behind the router of `sinew-engines`.
//!
//! Weights are not sent: a version is an address at the service, and gets a sampling session. The weights of
//! a sampling session never change, so requests in flight finish with those that they began with. The
//! protocol does not stream: all tokens of a request come at its end.

mod prompt;

use super::api::{Api, SamplerSource};
use super::error::ClientError;
use super::future::Job;
use super::http::{End, Message};
use super::options::ServiceOptions;
use super::session::Session;
use crate::desk::types::{
    SampleInput, SampleParams, SampledSequence, SamplerId, SamplerRef, Stop, StopReason,
};
use crate::wire::SampleRequest;
use crate::wire::client::{read_sample_output, write_sample};
use futures::FutureExt;
use futures::future::BoxFuture;
use sinew_engines::{
    Attempt, AttemptEnd, AttemptError, AttemptId, AttemptSink, Backend, Probe, ServedWeights,
    ServerEnd, Stage, Weights, max_new_tokens, refused,
};
use sinew_types::{EngineError, Fidelity, PromptLogprobs, SamplingParams, TokenLogprob, WeightsId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::OnceCell;

/// Versions whose samplers are remembered. Older ones have no request in flight: the router asks for the
/// newest version.
const REMEMBERED: usize = 16;
/// Limit of the first contact.
const CONNECT: Duration = Duration::from_secs(30);
/// Name of the calls in messages.
const CALL: &str = "asample";

/// Settings of a service's samplers.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerOptions {
    /// The service.
    pub service: ServiceOptions,
    /// Base model that samples before any weights are loaded: for measuring it and for collections. `None`:
    /// weights are loaded first.
    pub base_model: Option<String>,
    /// Number of token ids, if known: unknown ids are then refused before they are sent.
    pub vocab: Option<usize>,
    /// Maximum tokens of prompt and output together; `None`: the service reports it, or does not limit it.
    pub context: Option<usize>,
}

/// The samplers of a service. Tokens are exact: ids, log-probabilities and versions are those of the service.
pub struct TinkerBackend {
    options: SamplerOptions,
    connected: OnceCell<Connected>,
    memory: Mutex<Memory>,
}

/// A service that was reached.
struct Connected {
    api: Arc<Api>,
    session: Session,
    context: Option<usize>,
}

/// A version with its sampler.
#[derive(Clone)]
struct Version {
    id: WeightsId,
    source: SamplerSource,
    /// Sampling session; `None`: it was lost and has to be made again.
    sampler: Option<String>,
    /// Number of its next request.
    next: u64,
}

#[derive(Default)]
struct Memory {
    /// Newest last.
    versions: Vec<Version>,
    /// Requests that run, by attempt.
    requests: HashMap<AttemptId, String>,
}

sinew_types::debug_fields!(TinkerBackend, options);

impl TinkerBackend {
    /// The samplers of a service, which need not be up yet.
    ///
    /// # Errors
    /// If address or key cannot be sent.
    pub fn new(options: SamplerOptions) -> Result<Self, ClientError> {
        super::http::Http::new(&options.service)?;
        Ok(Self {
            options,
            connected: OnceCell::new(),
            memory: Mutex::default(),
        })
    }

    fn remember<T>(&self, f: impl FnOnce(&mut Memory) -> T) -> T {
        // Nothing is done to it in more than one step.
        f(&mut self.memory.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The service, with a session from the first call on.
    async fn connected(&self) -> Result<&Connected, AttemptError> {
        let connect = || async {
            let api = Api::connect_within(&self.options.service, CONNECT).await?;
            let api = Arc::new(api);
            let base = api.base_model(self.options.base_model.as_deref()).await;
            let context = base.ok().and_then(|base| base.context);
            Ok::<_, ClientError>(Connected {
                session: Session::open(Arc::clone(&api)).await?,
                api,
                context: self.options.context.or(context),
            })
        };
        let connected = self.connected.get_or_try_init(connect).await;
        connected.map_err(|error| self.failed(error))
    }

    /// Makes the sampler of a version the newest one.
    async fn adopt(&self, id: WeightsId, source: SamplerSource) -> Result<(), AttemptError> {
        let service = self.connected().await?;
        let made = service.session.sampler(&source).await;
        let sampler = made.map_err(|error| self.failed(error))?;
        self.remember(|memory| {
            memory.versions.retain(|version| version.id != id);
            let surplus = (memory.versions.len() + 1).saturating_sub(REMEMBERED);
            memory.versions.drain(..surplus);
            memory.versions.push(Version {
                id,
                source,
                sampler: Some(sampler),
                next: 0,
            });
        });
        Ok(())
    }

    /// The sampler of a version and the number of its next request; `None` in its place if it was lost.
    fn next_of(&self, id: WeightsId) -> Option<(SamplerSource, Option<(String, u64)>)> {
        self.remember(|memory| {
            let version = memory.versions.iter_mut().find(|v| v.id == id)?;
            let Some(sampler) = version.sampler.clone() else {
                return Some((version.source.clone(), None));
            };
            let seq = version.next;
            version.next += 1;
            Some((version.source.clone(), Some((sampler, seq))))
        })
    }

    /// The sampler of an attempt's version and the number of its request.
    async fn sampler(&self, attempt: &Attempt) -> Result<(String, u64), AttemptError> {
        let expected = attempt.weights;
        let unknown = || AttemptError::Version {
            expected,
            found: "no sampler of them".to_owned(),
        };
        let (source, next) = self.next_of(expected).ok_or_else(unknown)?;
        if let Some(next) = next {
            return Ok(next);
        }
        let made = self.connected().await?.session.sampler(&source).await;
        let sampler = made.map_err(|error| self.failed(error))?;
        self.remember(|memory| {
            let version = memory.versions.iter_mut().find(|v| v.id == expected);
            if let Some(version) = version {
                version.sampler = Some(sampler);
                version.next = 0;
            }
        });
        self.next_of(expected)
            .and_then(|(_, next)| next)
            .ok_or_else(unknown)
    }

    /// Runs an attempt to its end.
    async fn run(
        &self,
        attempt: &Attempt,
        sink: &mut AttemptSink,
    ) -> Result<AttemptEnd, AttemptError> {
        let service = self.connected().await?;
        let max_tokens = max_new_tokens(attempt, service.context)?;
        let (sampler, seq) = self.sampler(attempt).await?;
        let request = SampleRequest {
            sampler: SamplerRef::Session(SamplerId::from(sampler.as_str())),
            seq: Some(seq),
            input: input(attempt, max_tokens),
        };
        let job = Job {
            call: CALL,
            message: Message::json("/api/v1/asample", &write_sample(&request)),
            wants_protobuf: true,
        };
        let sampled = self.sampled(&service.api, attempt.id, &job).await;
        self.remember(|memory| memory.requests.remove(&attempt.id));
        let payload = sampled.map_err(|error| {
            if let ClientError::Gone { .. } = error {
                self.forget(attempt.weights);
            }
            self.failed(error)
        })?;
        let body = payload.protobuf(CALL).map_err(|error| self.failed(error))?;
        let output = read_sample_output(&body);
        let output = output.map_err(|error| AttemptError::Protocol(error.to_string()))?;
        if let Some(asked) = &attempt.prompt_logprobs {
            let scored = prompt::read(asked, attempt.prompt.len(), &output)?;
            sink.prompt(scored).await?;
        }
        let count = output.sequences.len();
        let mut sequences = output.sequences.into_iter();
        let (Some(sequence), None) = (sequences.next(), sequences.next()) else {
            let why = format!("{count} sequences for one request");
            return Err(AttemptError::Protocol(why));
        };
        let reason = hand_on(sequence, attempt, sink).await?;
        Ok(AttemptEnd {
            reason,
            cached_prompt_tokens: output.cached_prompt_tokens,
            routes: None,
        })
    }

    /// Submits a request and waits for its result; its id is remembered, so that it can be cancelled.
    async fn sampled(
        &self,
        api: &Api,
        attempt: AttemptId,
        job: &Job,
    ) -> Result<super::future::Payload, ClientError> {
        let end = End::after(self.options.service.timeout);
        let request = api.submit(job, end).await?;
        self.remember(|memory| memory.requests.insert(attempt, request.clone()));
        api.result(job, &request, end).await
    }

    /// Makes the sampler of a version again before its next request.
    fn forget(&self, id: WeightsId) {
        self.remember(|memory| {
            if let Some(version) = memory.versions.iter_mut().find(|v| v.id == id) {
                version.sampler = None;
            }
        });
    }

    /// An error of the client, in the words of the router.
    fn failed(&self, error: ClientError) -> AttemptError {
        let limit_s = self.options.service.timeout.as_secs_f64();
        match error {
            ClientError::Connection { why, .. } => AttemptError::Connect {
                to: self.options.service.url.clone(),
                why,
            },
            ClientError::Deadline { .. } => AttemptError::Timeout {
                stage: Stage::Whole,
                limit_s,
            },
            ClientError::Refused {
                status: 400 | 413 | 422,
                text,
                ..
            } => AttemptError::Refused(EngineError::Failed(text)),
            ClientError::Failed {
                is_request: true,
                text,
                ..
            } => AttemptError::Refused(EngineError::Failed(text)),
            ClientError::Failed { text, .. } => AttemptError::Cut(text),
            ClientError::Refused { status, text, .. }
            | ClientError::Key { status, text, .. }
            | ClientError::Gone { status, text, .. } => AttemptError::Status { status, body: text },
            ClientError::Answer { .. } => AttemptError::Protocol(error.to_string()),
            ClientError::Setup(_) | ClientError::Partial(_) => {
                AttemptError::Unsupported(error.to_string())
            }
        }
    }
}

/// The request of an attempt.
fn input(attempt: &Attempt, max_tokens: u32) -> SampleInput {
    let sampling = &attempt.sampling;
    let mut input = SampleInput {
        prompt: attempt.prompt.to_vec(),
        samples: 1,
        params: SampleParams {
            max_tokens: Some(max_tokens),
            // Services keep seeds in 63 bits.
            seed: Some(sampling.seed & i64::MAX as u64),
            // Only what the request names ends it; the model's own idea of an end does not.
            stop: if sampling.stop_ids.is_empty() {
                Stop::Never
            } else {
                Stop::Tokens(sampling.stop_ids.clone())
            },
            temperature: sampling.temperature,
            top_k: -1,
            top_p: 1.0,
        },
        top_sample: u32::from(sampling.top_logprobs),
        ..SampleInput::default()
    };
    if let Some(asked) = &attempt.prompt_logprobs {
        prompt::ask(asked, &mut input);
    }
    input
}

/// Hands on a sequence with its end.
async fn hand_on(
    sequence: SampledSequence,
    attempt: &Attempt,
    sink: &mut AttemptSink,
) -> Result<sinew_types::FinishReason, AttemptError> {
    let asked = usize::from(attempt.sampling.top_logprobs);
    let top: Vec<Vec<TokenLogprob>> = match sequence.top {
        Some(top) if asked > 0 => top,
        None if asked > 0 && !sequence.tokens.is_empty() => {
            let why = "reporting the most likely tokens (`topk_sample_logprobs`)".to_owned();
            return Err(AttemptError::Unsupported(why));
        }
        _ => Vec::new(),
    };
    let logprobs: Vec<Option<f64>> = sequence
        .logprobs
        .iter()
        .map(|&logprob| Some(f64::from(logprob)))
        .collect();
    sink.tokens(&sequence.tokens, &logprobs, top).await?;
    let end = match sequence.stop {
        StopReason::Stop => ServerEnd::StopId(None),
        StopReason::Length => ServerEnd::Length,
    };
    sink.end(&end).await
}

/// Refuses parameters that the protocol does not have, or with which it does not define the distribution of
/// its log-probabilities.
fn fits(sampling: &SamplingParams) -> Result<(), AttemptError> {
    let temperature = sampling.temperature;
    if sampling.policy_temperature() != 1.0 {
        let allowed = "0 (greedy) or 1: the Tinker protocol does not define log-probs at others";
        return Err(refused("temperature", &temperature, allowed));
    }
    if let Some(format) = &sampling.format {
        let name = format.grammar.name();
        return Err(AttemptError::Refused(EngineError::Format(format!(
            "the Tinker protocol has no output formats, so that {name} is not held to; set engine.formats = \
             \"advice\" to check answers afterwards"
        ))));
    }
    let truncations = [
        ("top_p", sampling.top_p, 1.0),
        ("top_k", sampling.top_k as f32, 0.0),
    ];
    let cut = truncations.iter().find(|(_, value, all)| value != all);
    if let Some((name, value, all)) = cut.filter(|_| temperature != 0.0) {
        let why = "the Tinker protocol does not define log-probs under truncation";
        return Err(refused(name, value, &format!("{all}: {why}")));
    }
    if sampling.min_p != 0.0 {
        let allowed = "0: the Tinker protocol has none";
        return Err(refused("min_p", &sampling.min_p, allowed));
    }
    if !sampling.logit_bias.is_empty() {
        let value = format!("{} entries", sampling.logit_bias.len());
        let allowed = "none: the Tinker protocol has no biases";
        return Err(refused("logit_bias", &value, allowed));
    }
    if !sampling.stop_strings.is_empty() {
        let value = format!("{:?}", sampling.stop_strings);
        let allowed = "none: results of the Tinker protocol do not name the string that ended them; use \
                       stop_ids";
        return Err(refused("stop_strings", &value, allowed));
    }
    Ok(())
}

impl Backend for TinkerBackend {
    fn name(&self) -> &str {
        &self.options.service.url
    }

    fn fidelity(&self) -> Fidelity {
        Fidelity::TokenExact
    }

    fn accepts(&self, sampling: &SamplingParams) -> Result<(), AttemptError> {
        fits(sampling)
    }

    /// The protocol has all of them.
    fn accepts_prompt(&self, _: &PromptLogprobs) -> Result<(), AttemptError> {
        Ok(())
    }

    fn generate<'a>(
        &'a self,
        attempt: &'a Attempt,
        sink: &'a mut AttemptSink,
    ) -> BoxFuture<'a, Result<AttemptEnd, AttemptError>> {
        async move {
            self.accepts(&attempt.sampling)?;
            self.run(attempt, sink).await
        }
        .boxed()
    }

    fn cancel(&self, attempt: AttemptId) -> BoxFuture<'_, ()> {
        async move {
            let request = self.remember(|memory| memory.requests.remove(&attempt));
            if let (Some(request), Some(service)) = (request, self.connected.get()) {
                service.api.cancel(&request).await;
            }
        }
        .boxed()
    }

    fn probe(&self) -> BoxFuture<'_, Result<Probe, AttemptError>> {
        async move {
            let service = self.connected().await?;
            let healthy = service.api.health().await;
            healthy.map_err(|error| self.failed(error))?;
            let newest = self.remember(|memory| memory.versions.last().map(|v| v.id));
            let weights = match newest {
                Some(id) => ServedWeights::Version(id),
                None if self.options.base_model.is_some() => ServedWeights::Unlabelled,
                // The router would take them for those of the run.
                None => ServedWeights::Foreign("base model".to_owned()),
            };
            Ok(Probe {
                context: service.context,
                vocab: self.options.vocab,
                ..Probe::new(weights)
            })
        }
        .boxed()
    }

    fn label(&self, id: WeightsId) -> BoxFuture<'_, Result<(), AttemptError>> {
        async move {
            let Some(base) = &self.options.base_model else {
                let why = "sampling with a base model that is not named".to_owned();
                return Err(AttemptError::Unsupported(why));
            };
            self.adopt(id, SamplerSource::Base(base.clone())).await
        }
        .boxed()
    }

    /// The weights of a sampling session never change.
    fn keeps_attempts(&self) -> bool {
        true
    }

    fn load<'a>(&'a self, weights: &'a Weights) -> BoxFuture<'a, Result<(), AttemptError>> {
        async move {
            let address = weights.source.as_deref().and_then(|s| s.address());
            let Some(address) = address else {
                let why =
                    "loading weights that are not at the service: its own trainer publishes them"
                        .to_owned();
                return Err(AttemptError::Unsupported(why));
            };
            let source = SamplerSource::Path(address.to_owned());
            self.adopt(weights.id, source).await
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests;
