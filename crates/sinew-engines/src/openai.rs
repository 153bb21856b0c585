//! Any server with `/v1/completions`: for evaluation only.
//!
//! The protocol has no token ids and no versions of weights, so nothing that it samples may be trained on;
//! its fidelity is [`sinew_types::Fidelity::Evaluation`]. Some servers add ids to the log-probabilities
//! (llama.cpp does), and those are used. Otherwise a [`TextCodec`] makes ids from the text, which may differ
//! from the sampled ones.

use crate::attempt::{Attempt, AttemptEnd, ServerEnd};
use crate::backend::{AttemptSink, Backend, Probe};
use crate::check::{max_new_tokens, refused};
use crate::config::{ConfigError, ServerConfig};
use crate::error::{AttemptError, Stage};
use crate::http::{self, within};
use crate::plain::{self, PlainServer, made_up, stopped};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sinew_types::{Fidelity, FinishReason, PromptLogprobs, SamplingParams, TokenId, WeightsId};
use std::sync::Arc;

/// Text to ids and back, for servers that support only text. Implemented by the renderer's tokenizer.
pub trait TextCodec: Send + Sync {
    /// The text of `ids`, control tokens written out.
    fn decode(&self, ids: &[TokenId]) -> String;

    /// Ids of a text that a model wrote. They need not be the ids that the server sampled.
    fn encode(&self, text: &str) -> Vec<TokenId>;
}

/// An OpenAI-compatible server. Its tokens are of [`Fidelity::Evaluation`], and it loads no
/// weights.
pub struct OpenaiBackend {
    server: PlainServer,
    codec: Option<Arc<dyn TextCodec>>,
    extra: Map<String, Value>,
}

sinew_types::debug_fields!(
    OpenaiBackend as this,
    server = this.server,
    codec = this.codec.is_some()
);

#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(default)]
    text: String,
    finish_reason: Option<String>,
    logprobs: Option<Logprobs>,
}

#[derive(Debug, Deserialize)]
struct Logprobs {
    content: Option<Vec<Content>>,
}

/// One token, as llama.cpp returns it.
#[derive(Debug, Deserialize)]
struct Content {
    id: Option<TokenId>,
    logprob: Option<f64>,
}

impl OpenaiBackend {
    /// A client of the server of `config`, which need not be up yet. A `codec` makes it send text, and turn
    /// the server's text into ids if the server returns none. Without a codec it sends ids, and the server
    /// must return ids.
    ///
    /// # Errors
    /// If the address cannot be one.
    pub fn new(
        config: ServerConfig,
        codec: Option<Arc<dyn TextCodec>>,
    ) -> Result<Self, ConfigError> {
        Ok(Self {
            server: PlainServer::new(config)?,
            codec,
            extra: Map::new(),
        })
    }

    /// Sends these fields along, for servers with their own defaults: llama.cpp keeps the 40 most likely
    /// tokens unless it is sent `top_k = 0` and `min_p = 0`.
    #[must_use]
    pub fn with_extra(mut self, extra: Map<String, Value>) -> Self {
        self.extra = extra;
        self
    }

    fn body(&self, attempt: &Attempt, model: &str, max_tokens: u32) -> Value {
        let s = &attempt.sampling;
        let prompt = match &self.codec {
            Some(codec) => json!(codec.decode(&attempt.prompt)),
            None => json!(*attempt.prompt),
        };
        let mut body = json!({
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            // Signed 64 bits are what most servers read.
            "seed": s.seed & i64::MAX as u64,
            "stream": true,
        });
        if self.codec.is_none() {
            body["logprobs"] = json!(1);
        }
        if !s.stop_strings.is_empty() {
            body["stop"] = json!(s.stop_strings);
        }
        for (key, value) in &self.extra {
            body[key] = value.clone();
        }
        body
    }

    async fn run(
        &self,
        attempt: &Attempt,
        sink: &mut AttemptSink,
    ) -> Result<AttemptEnd, AttemptError> {
        let max_tokens = max_new_tokens(attempt, self.server.config.context)?;
        let body = self.body(attempt, &self.server.model().await?, max_tokens);
        let limit_s = self.server.http.timeouts.whole_s;
        let reason = within(
            Stage::Whole,
            limit_s,
            self.stream(&body, attempt, max_tokens, sink),
        )
        .await??;
        Ok(AttemptEnd {
            reason,
            cached_prompt_tokens: 0,
            routes: None,
        })
    }

    async fn stream(
        &self,
        body: &Value,
        attempt: &Attempt,
        max_tokens: u32,
        sink: &mut AttemptSink,
    ) -> Result<FinishReason, AttemptError> {
        let mut events = self.server.http.stream("/v1/completions", body).await?;
        let mut text = String::new();
        let mut finish = None;
        while let Some(data) = events.next().await? {
            let Some(chunk) = http::event::<Chunk>(&data)? else {
                break;
            };
            let Some(choice) = chunk.choices.into_iter().next() else {
                continue;
            };
            let content = choice.logprobs.and_then(|l| l.content).unwrap_or_default();
            if self.codec.is_some() {
                text.push_str(&choice.text);
            } else if !returned(&content, sink, max_tokens).await? && !choice.text.is_empty() {
                let why = "telling token ids: give it a tokenizer, to be sent text".to_owned();
                return Err(AttemptError::Unsupported(why));
            }
            finish = choice.finish_reason.or(finish);
        }
        let Some(finish) = finish else {
            let why = format!("after {} bytes of text, without a reason", text.len());
            return Err(AttemptError::Cut(why));
        };
        if let Some(codec) = &self.codec {
            let mut ids = codec.encode(&text);
            ids.truncate(max_tokens as usize);
            made_up(&ids, attempt, sink).await?;
        }
        ended(&finish, attempt, max_tokens, sink).await
    }
}

/// Translates the reason of the end.
async fn ended(
    finish: &str,
    attempt: &Attempt,
    max_tokens: u32,
    sink: &mut AttemptSink,
) -> Result<FinishReason, AttemptError> {
    match finish {
        "stop" => stopped(attempt, max_tokens, sink).await,
        // Its count of tokens need not be ours.
        "length" => Ok(FinishReason::Length),
        other => sink.end(&ServerEnd::Aborted(other.to_owned())).await,
    }
}

/// The fidelity of all such servers.
pub(crate) fn fidelity() -> Fidelity {
    let why = "an OpenAI-compatible server tells neither which token ids it sampled with which \
        log-probs nor by which weights, and cannot be given new ones"
        .to_owned();
    Fidelity::Evaluation { why }
}

/// Forwards the tokens of a piece if the server returns their ids. Returns false if it does not.
async fn returned(
    content: &[Content],
    sink: &mut AttemptSink,
    max_tokens: u32,
) -> Result<bool, AttemptError> {
    let left = (max_tokens as usize).saturating_sub(sink.sampled());
    let ids: Option<Vec<TokenId>> = content.iter().take(left).map(|c| c.id).collect();
    let Some(ids) = ids.filter(|ids| !ids.is_empty()) else {
        return Ok(false);
    };
    let logprobs: Vec<_> = content.iter().take(left).map(|c| c.logprob).collect();
    sink.tokens(&ids, &logprobs, Vec::new()).await?;
    Ok(true)
}

impl Backend for OpenaiBackend {
    fn name(&self) -> &str {
        self.server.http.name()
    }

    fn fidelity(&self) -> Fidelity {
        fidelity()
    }

    fn accepts(&self, sampling: &SamplingParams) -> Result<(), AttemptError> {
        plain::accepts(sampling)
    }

    fn accepts_prompt(&self, _asked: &PromptLogprobs) -> Result<(), AttemptError> {
        let allowed = "nothing: the OpenAI protocol does not have log-probs of a prompt by ids";
        Err(refused("prompt_logprobs", &"set", allowed))
    }

    fn generate<'a>(
        &'a self,
        attempt: &'a Attempt,
        sink: &'a mut AttemptSink,
    ) -> BoxFuture<'a, Result<AttemptEnd, AttemptError>> {
        self.run(attempt, sink).boxed()
    }

    fn probe(&self) -> BoxFuture<'_, Result<Probe, AttemptError>> {
        self.server.probe().boxed()
    }

    fn label(&self, id: WeightsId) -> BoxFuture<'_, Result<(), AttemptError>> {
        self.server.label(id);
        std::future::ready(Ok(())).boxed()
    }
}
