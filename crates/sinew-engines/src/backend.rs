//! What the router needs of an engine: attempts, probes, weights.

use crate::attempt::{Attempt, AttemptEnd, AttemptId, AttemptToken, ServerEnd};
use crate::check::AttemptCheck;
use crate::error::AttemptError;
use futures::FutureExt;
use futures::future::BoxFuture;
use sinew_types::{
    Fidelity, FinishReason, PolicyVersion, SamplingParams, TensorSource, TokenId, TokenLogprob,
};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Which weights a server says it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServedWeights {
    /// Labelled by us.
    Version(PolicyVersion),
    /// As it was started: never labelled, or started anew.
    Unlabelled,
    /// Labelled by another client, or in the middle of loading.
    Foreign(String),
}

impl ServedWeights {
    /// What a server's label means. `default` is what vLLM and SGLang start with.
    pub fn from_label(label: &str) -> Self {
        let number = label.strip_prefix('v').and_then(|n| n.parse().ok());
        match number {
            Some(number) => Self::Version(PolicyVersion(number)),
            None if label == "default" || label.is_empty() => Self::Unlabelled,
            None => Self::Foreign(label.to_owned()),
        }
    }

    /// That they are those of `version`.
    ///
    /// # Errors
    /// If they are not.
    pub(crate) fn verify(&self, version: PolicyVersion) -> Result<(), AttemptError> {
        if *self == Self::Version(version) {
            return Ok(());
        }
        Err(AttemptError::Version {
            expected: version,
            found: self.to_string(),
        })
    }
}

impl fmt::Display for ServedWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => write!(f, "{version}"),
            Self::Unlabelled => f.write_str("no label"),
            Self::Foreign(label) => write!(f, "the label `{label}`"),
        }
    }
}

/// What a probe of a server shows.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    pub weights: ServedWeights,
    /// Asleep servers answer, but must not be asked to generate.
    pub sleeping: bool,
    pub running: usize,
    pub waiting: usize,
    /// KV capacity in tokens, if the server reports it.
    pub kv_tokens_total: Option<usize>,
    pub kv_tokens_free: Option<usize>,
    /// Most tokens of prompt and output together, if known.
    pub context: Option<usize>,
    /// Number of token ids, if known.
    pub vocab: Option<usize>,
    /// Counters since the server's start.
    pub sampled_tokens: u64,
    pub prefill_tokens: u64,
    pub cached_prompt_tokens: u64,
    pub preemptions: u64,
}

impl Probe {
    /// A probe that shows nothing but `weights`.
    pub fn new(weights: ServedWeights) -> Self {
        Self {
            weights,
            sleeping: false,
            running: 0,
            waiting: 0,
            kv_tokens_total: None,
            kv_tokens_free: None,
            context: None,
            vocab: None,
            sampled_tokens: 0,
            prefill_tokens: 0,
            cached_prompt_tokens: 0,
            preemptions: 0,
        }
    }
}

/// Weights to load.
#[derive(Clone)]
pub struct Weights {
    pub version: PolicyVersion,
    /// A published directory that `transformers` could load; servers get its path.
    pub folder: Option<PathBuf>,
    /// The tensors themselves, while the caller of `load_weights` waits.
    pub source: Option<Arc<dyn TensorSource>>,
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Weights")
            .field("version", &self.version)
            .field("folder", &self.folder)
            .field("source", &self.source.is_some())
            .finish()
    }
}

/// An engine as the router sees it. Calls end when their future is dropped: an attempt's server
/// sees its connection close.
pub trait Backend: Send + Sync + fmt::Debug {
    /// For messages: its address.
    fn name(&self) -> &str;

    /// What its tokens are worth.
    fn fidelity(&self) -> Fidelity;

    /// Refuses what this kind of engine cannot do for any request, before it is queued.
    ///
    /// # Errors
    /// Names the parameter and what is allowed.
    fn accepts(&self, _sampling: &SamplingParams) -> Result<(), AttemptError> {
        Ok(())
    }

    /// Runs an attempt, handing tokens to `sink` as they come.
    fn generate<'a>(
        &'a self,
        attempt: &'a Attempt,
        sink: &'a mut AttemptSink,
    ) -> BoxFuture<'a, Result<AttemptEnd, AttemptError>>;

    /// After an attempt's future was dropped: makes sure that the server has stopped too. Most abort what
    /// has no reader and need nothing.
    fn cancel(&self, _attempt: AttemptId) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }

    /// Probes the server.
    fn probe(&self) -> BoxFuture<'_, Result<Probe, AttemptError>>;

    /// Says that the weights which the server was started with are `version`.
    fn label(&self, version: PolicyVersion) -> BoxFuture<'_, Result<(), AttemptError>>;

    /// Loads weights and verifies that the server has them. No attempt of this process runs.
    fn load<'a>(&'a self, weights: &'a Weights) -> BoxFuture<'a, Result<(), AttemptError>>;

    /// Gives up memory (`true`) or takes it back.
    fn sleep(&self, asleep: bool) -> BoxFuture<'_, Result<(), AttemptError>>;
}

/// What attempts send to the thread that started them.
#[derive(Debug)]
pub(crate) struct AttemptTokens {
    pub(crate) attempt: AttemptId,
    pub(crate) tokens: Vec<AttemptToken>,
    /// Why it ends, once that is known.
    pub(crate) end: Option<FinishReason>,
}

/// Checks what a server says about an attempt and hands it on.
#[derive(Debug)]
pub struct AttemptSink {
    check: AttemptCheck,
    attempt: AttemptId,
    to: mpsc::Sender<AttemptTokens>,
    /// Tokens that wait for the end, if they must.
    held: Option<Vec<AttemptToken>>,
}

impl AttemptSink {
    pub(crate) fn new(
        attempt: &Attempt,
        vocab: Option<usize>,
        context: Option<usize>,
        to: mpsc::Sender<AttemptTokens>,
        hold: bool,
    ) -> Self {
        Self {
            check: AttemptCheck::new(attempt, vocab, context),
            attempt: attempt.id,
            to,
            held: hold.then(Vec::new),
        }
    }

    /// Tokens seen so far.
    pub fn sampled(&self) -> usize {
        self.check.sampled().len()
    }

    /// The ids seen so far.
    pub fn ids(&self) -> &[TokenId] {
        self.check.sampled()
    }

    /// The server says which prompt it used.
    ///
    /// # Errors
    /// If it is not the one that was sent.
    pub fn echo(&mut self, prompt: &[TokenId]) -> Result<(), AttemptError> {
        Ok(self.check.echo(prompt)?)
    }

    /// Hands on the next tokens: one log-probability and one list of alternatives for each
    /// id (`top` may be empty if none were asked for).
    ///
    /// # Errors
    /// If they cannot be right; none of them is handed on then.
    pub async fn tokens(
        &mut self,
        ids: &[TokenId],
        logprobs: &[Option<f64>],
        top: Vec<Vec<TokenLogprob>>,
    ) -> Result<(), AttemptError> {
        let tokens = self.check.tokens(ids, logprobs, top)?;
        match &mut self.held {
            Some(held) => held.extend(tokens),
            None => self.send(tokens, None).await?,
        }
        Ok(())
    }

    /// What the server's reason for the end amounts to. Sent to the router at once, so that
    /// an interruption before the attempt is over does not sample past it.
    ///
    /// # Errors
    /// If it contradicts the tokens.
    pub async fn end(&mut self, end: &ServerEnd) -> Result<FinishReason, AttemptError> {
        let reason = self.check.end(end)?;
        if self.held.is_none() {
            self.send(Vec::new(), Some(reason.clone())).await?;
        }
        Ok(reason)
    }

    /// Hands on what was held back.
    pub(crate) async fn flush(&mut self) -> Result<(), AttemptError> {
        let held = self.held.as_mut().map(std::mem::take).unwrap_or_default();
        self.send(held, None).await
    }

    async fn send(
        &self,
        tokens: Vec<AttemptToken>,
        end: Option<FinishReason>,
    ) -> Result<(), AttemptError> {
        if tokens.is_empty() && end.is_none() {
            return Ok(());
        }
        let attempt = self.attempt;
        let sent = self
            .to
            .send(AttemptTokens {
                attempt,
                tokens,
                end,
            })
            .await;
        sent.map_err(|_| AttemptError::Cut("the engine was dropped".to_owned()))
    }
}
