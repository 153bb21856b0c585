//! Common parts of the clients of servers that only speak OpenAI's protocol: the name of the model, probes,
//! and ids that the server did not report.

use crate::attempt::{Attempt, ServerEnd};
use crate::backend::{AttemptSink, Probe, ServedWeights};
use crate::config::{ConfigError, ServerConfig};
use crate::error::AttemptError;
use crate::http::Http;
use sinew_types::{EngineError, FinishReason, SamplingParams, TokenId, WeightsId};
use std::sync::{Mutex, PoisonError};

/// A server with a list of models.
pub(crate) struct PlainServer {
    pub(crate) http: Http,
    pub(crate) config: ServerConfig,
    model: Mutex<Option<String>>,
    /// The label that the router gave it: the protocol has none.
    label: Mutex<Option<WeightsId>>,
}

// The key of the configuration is not for logs.
sinew_types::debug_fields!(PlainServer, http);

impl PlainServer {
    /// A client of the server of `config`, which need not be up yet.
    ///
    /// # Errors
    /// If the address cannot be one.
    pub(crate) fn new(config: ServerConfig) -> Result<Self, ConfigError> {
        Ok(Self {
            http: Http::new(&config.url, config.api_key.as_deref(), config.timeouts)?,
            config,
            model: Mutex::default(),
            label: Mutex::default(),
        })
    }

    /// Name of the served model: configured, or the first one that the server lists.
    pub(crate) async fn model(&self) -> Result<String, AttemptError> {
        if let Some(model) = &self.config.model {
            return Ok(model.clone());
        }
        let known = self
            .model
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some(model) = known {
            return Ok(model);
        }
        let Some(first) = self.http.models().await?.into_iter().next() else {
            let why = "naming a model: it lists none, set `model`".to_owned();
            return Err(AttemptError::Unsupported(why));
        };
        let mut model = self.model.lock().unwrap_or_else(PoisonError::into_inner);
        *model = Some(first.clone());
        Ok(first)
    }

    /// The state of the server, as far as the protocol has one.
    pub(crate) async fn probe(&self) -> Result<Probe, AttemptError> {
        match self.http.get_bytes("/health").await {
            Ok(_) => {}
            // It is not a part of the protocol; the list of models is.
            Err(AttemptError::Status { .. }) => {
                self.http.get_bytes("/v1/models").await?;
            }
            Err(error) => return Err(error),
        }
        let label = *self.label.lock().unwrap_or_else(PoisonError::into_inner);
        let weights = label.map_or(ServedWeights::Unlabelled, ServedWeights::Version);
        Ok(Probe {
            context: self.config.context,
            vocab: self.config.vocab,
            ..Probe::new(weights)
        })
    }

    /// Keeps the label of its weights.
    pub(crate) fn label(&self, id: WeightsId) {
        *self.label.lock().unwrap_or_else(PoisonError::into_inner) = Some(id);
    }
}

/// Refuses parameters that the protocol does not have.
///
/// # Errors
/// Names the parameter and what is allowed.
pub(crate) fn accepts(sampling: &SamplingParams) -> Result<(), AttemptError> {
    let unknown = [
        ("top_k", sampling.top_k != 0),
        ("min_p", sampling.min_p != 0.0),
        ("logit_bias", !sampling.logit_bias.is_empty()),
        ("top_logprobs", sampling.top_logprobs != 0),
        ("format", sampling.format.is_some()),
    ];
    match unknown.iter().find(|(_, used)| *used) {
        None => Ok(()),
        Some((name, _)) => Err(AttemptError::Refused(EngineError::InvalidSampling {
            name: (*name).to_owned(),
            value: "set".to_owned(),
            allowed: "nothing: the OpenAI protocol does not have it for ids".to_owned(),
        })),
    }
}

/// Forwards ids that the server did not report: those of its encoded text, and a stop id. Their
/// log-probabilities are unknown, so 0 is used.
pub(crate) async fn made_up(
    ids: &[TokenId],
    attempt: &Attempt,
    sink: &mut AttemptSink,
) -> Result<(), AttemptError> {
    // A stop token in the middle is text to this server.
    let stop = ids
        .iter()
        .position(|id| attempt.sampling.stop_ids.contains(id));
    let ids = &ids[..stop.map_or(ids.len(), |at| at + 1)];
    if ids.is_empty() {
        return Ok(());
    }
    let unknown = vec![Some(0.0); ids.len()];
    sink.tokens(ids, &unknown, Vec::new()).await
}

/// The end of an output that the model ended itself. The protocol does not report the token or string that
/// ended it, and the text does not contain it, so the first stop id is used.
pub(crate) async fn stopped(
    attempt: &Attempt,
    max_tokens: u32,
    sink: &mut AttemptSink,
) -> Result<FinishReason, AttemptError> {
    let stops = &attempt.sampling.stop_ids;
    let last = sink.ids().last();
    if last.is_some_and(|id| stops.contains(id)) {
        return sink.end(&ServerEnd::StopId(None)).await;
    }
    if let Some(&id) = stops.first() {
        if sink.sampled() >= max_tokens as usize {
            return sink.end(&ServerEnd::Length).await;
        }
        made_up(&[id], attempt, sink).await?;
        return sink.end(&ServerEnd::StopId(Some(id))).await;
    }
    match attempt.sampling.stop_strings.first() {
        Some(text) => sink.end(&ServerEnd::StopString(text.clone())).await,
        // It has its own end, which was not asked for.
        None => Ok(FinishReason::Length),
    }
}
