//! The [`Backend`] port, which the router needs of an engine: attempts, probes and weights.
//!
//! A new kind of server implements only [`Backend`]. It reports tokens through an [`AttemptSink`], which
//! checks them; retries, failover, order and deadlines are the router's part.

use crate::attempt::{Attempt, AttemptEnd, AttemptId, AttemptToken, ServerEnd};
use crate::check::{AttemptCheck, refused};
use crate::error::AttemptError;
use crate::sums::ReplicaSums;
use futures::FutureExt;
use futures::future::BoxFuture;
use sinew_types::{
    Adapter, Fidelity, FinishReason, PolicyVersion, PromptLogprob, PromptLogprobs, SamplingParams,
    TensorSource, TokenId, TokenLogprob, WeightsId,
};
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Weights that a server reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ServedWeights {
    /// Labelled by this system: version and lineage, such as `v13-9f3c12ab`.
    Version(WeightsId),
    /// The weights with which the server was started: never labelled, or restarted since.
    #[default]
    Unlabelled,
    /// Labelled by another client, without a lineage, or in the middle of loading. Never sampled from.
    Foreign(String),
}

impl ServedWeights {
    /// Parses the label of a server's weights. `default` is the label with which vLLM and SGLang start.
    pub fn from_label(label: &str) -> Self {
        match label.parse() {
            Ok(id) => Self::Version(id),
            Err(_) if label == "default" || label.is_empty() => Self::Unlabelled,
            Err(_) => Self::Foreign(label.to_owned()),
        }
    }

    /// Checks that they are `id`: the same number of another lineage is other weights.
    ///
    /// # Errors
    /// If they are not.
    pub(crate) fn verify(&self, id: WeightsId) -> Result<(), AttemptError> {
        if *self == Self::Version(id) {
            return Ok(());
        }
        Err(AttemptError::Version {
            expected: id,
            found: self.to_string(),
        })
    }
}

/// Checks a label of the server's own weights: also if the attempt asks for an adapter, they must be those
/// that it is applied to.
///
/// # Errors
/// If it is of other weights.
pub(crate) fn check_label(attempt: &Attempt, label: &str) -> Result<(), AttemptError> {
    let served = attempt.served();
    let right = served.map_or(ServedWeights::Unlabelled, ServedWeights::Version);
    if ServedWeights::from_label(label) == right {
        return Ok(());
    }
    Err(AttemptError::Version {
        expected: served.unwrap_or(attempt.weights),
        found: label.to_owned(),
    })
}

impl fmt::Display for ServedWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(id) => write!(f, "{id}"),
            Self::Unlabelled => f.write_str("no label"),
            Self::Foreign(label) => write!(f, "the label `{label}`"),
        }
    }
}

/// The state of a server, as one probe shows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Probe {
    /// The weights that the server has now; the engine serves only if they are the router's.
    pub weights: ServedWeights,
    /// Asleep servers answer, but must not be asked to generate.
    pub sleeping: bool,
    /// Requests that the server computes now, of all its clients.
    pub running: usize,
    /// Requests in the server's own queue, of all its clients.
    pub waiting: usize,
    /// KV capacity in tokens, if the server reports it.
    pub kv_tokens_total: Option<usize>,
    /// Free KV capacity in tokens. An engine that does not report it is limited only by the number of
    /// attempts.
    pub kv_tokens_free: Option<usize>,
    /// Maximum tokens of prompt and output together, if known.
    pub context: Option<usize>,
    /// Number of token ids, if known.
    pub vocab: Option<usize>,
    /// Names of the adapters of [`Backend::load_adapter`] that the server has; `None`: unknown, as before.
    pub adapters: Option<BTreeSet<String>>,
    /// Sampled tokens since the server's start, of all its clients, as are the next counters.
    pub sampled_tokens: u64,
    /// Prompt tokens since the server's start, as the server counts them.
    pub prefill_tokens: u64,
    /// Prompt tokens that the prefix cache had.
    pub cached_prompt_tokens: u64,
    /// Times that a request gave up its KV capacity to another one.
    pub preemptions: u64,
}

impl Probe {
    /// A probe with `weights`, awake and idle, and everything else unknown.
    pub fn new(weights: ServedWeights) -> Self {
        Self {
            weights,
            ..Self::default()
        }
    }
}

/// Weights to load, as a folder, as tensors, or both. A backend takes the form that its server can
/// read.
#[derive(Clone)]
pub struct Weights {
    /// Version and lineage that the engine must report afterwards.
    pub id: WeightsId,
    /// A published directory that `transformers` could load; servers get its path and must see the
    /// same file system.
    pub folder: Option<PathBuf>,
    /// Name of the adapter that the folder holds; `None`: it holds whole weights.
    pub adapter: Option<String>,
    /// Sums of the replicas that have loaded this version, for backends whose servers report sums. `None`:
    /// there is no other replica.
    pub sums: Option<ReplicaSums>,
    /// The tensors themselves, valid while the caller of `load_weights` waits. Absent when an
    /// engine that came back is given the last weights again.
    pub source: Option<Arc<dyn TensorSource>>,
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Weights")
            .field("id", &self.id)
            .field("folder", &self.folder)
            .field("adapter", &self.adapter)
            .field("source", &self.source.is_some())
            .finish()
    }
}

/// An adapter for requests that name it. Any number of them are on a server at the same time.
#[derive(Clone, Debug)]
pub struct NamedAdapter {
    /// Its name on servers, which no other load of this engine has. It is a valid
    /// [`AdapterName`](sinew_types::AdapterName).
    pub server_name: String,
    /// Version of tokens that it samples.
    pub id: WeightsId,
    /// A folder in PEFT's layout, which servers see under the same path.
    pub folder: Option<PathBuf>,
    /// The tensors themselves, valid while the caller of `load_adapter` waits. Absent when an engine that
    /// came back is given the adapter again.
    pub source: Option<Adapter>,
}

impl NamedAdapter {
    /// The folder, for servers that read one.
    pub(crate) fn folder(&self) -> Result<&PathBuf, AttemptError> {
        self.folder.as_ref().ok_or_else(|| {
            let why = "loading adapters without a folder: set `weights_dir`";
            AttemptError::Unsupported(why.to_owned())
        })
    }
}

/// An engine as the router sees it. Calls end when their future is dropped: an attempt's server
/// sees its connection close.
pub trait Backend: Send + Sync + fmt::Debug {
    /// The engine's address, for messages.
    fn name(&self) -> &str;

    /// Whether its tokens may be trained on.
    fn fidelity(&self) -> Fidelity;

    /// Refuses what this kind of engine cannot do for any request, before it is queued.
    ///
    /// # Errors
    /// Names the parameter and what is allowed.
    fn accepts(&self, _sampling: &SamplingParams) -> Result<(), AttemptError> {
        Ok(())
    }

    /// Refuses log-probabilities of prompts that this kind of engine cannot report, before a request is
    /// queued. The default refuses all.
    ///
    /// # Errors
    /// Names the parameter and what is allowed.
    fn accepts_prompt(&self, _asked: &PromptLogprobs) -> Result<(), AttemptError> {
        let allowed = "nothing: this server does not report log-probs of a prompt";
        Err(refused("prompt_logprobs", &"set", allowed))
    }

    /// Runs an attempt and hands tokens to `sink` as they arrive: first the log-probabilities of its
    /// prompt, if it asks for them.
    ///
    /// The call ends by returning, or by being dropped at any await: then the server must stop as
    /// well, see [`Backend::cancel`]. An implementation limits every wait by its
    /// [`crate::Timeouts`].
    ///
    /// # Errors
    /// The error's [`crate::Blame`] decides what follows. Tokens that were forwarded before stay valid,
    /// except for [`AttemptError::Version`].
    fn generate<'a>(
        &'a self,
        attempt: &'a Attempt,
        sink: &'a mut AttemptSink,
    ) -> BoxFuture<'a, Result<AttemptEnd, AttemptError>>;

    /// Makes sure that the server has stopped an attempt whose future was dropped. Most servers
    /// abort a request when its connection closes and need nothing.
    fn cancel(&self, _attempt: AttemptId) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }

    /// Asks the server for its state. Called once per probe interval, and after every change of
    /// weights.
    fn probe(&self) -> BoxFuture<'_, Result<Probe, AttemptError>>;

    /// Labels the weights that the server was started with as `id`. Called only while the server
    /// reports [`ServedWeights::Unlabelled`] and no other weights were ever loaded.
    fn label(&self, id: WeightsId) -> BoxFuture<'_, Result<(), AttemptError>>;

    /// Whether attempts that run may stay open while weights are loaded: then each of their tokens is
    /// handed on with the version of the weights that sampled it.
    fn keeps_attempts(&self) -> bool {
        false
    }

    /// Loads weights and verifies that the server has them. Unless [`Backend::keeps_attempts`] holds or
    /// they are an adapter, no attempt of this process runs meanwhile. An error leaves the weights unknown;
    /// adapters that were loaded earlier stay. The default refuses, as do those of the commands below.
    fn load<'a>(&'a self, _weights: &'a Weights) -> BoxFuture<'a, Result<(), AttemptError>> {
        cannot("loading weights")
    }

    /// Loads an adapter for requests that name it, and verifies that the server has it. Attempts run
    /// meanwhile, and the server's own weights stay.
    fn load_adapter<'a>(
        &'a self,
        _adapter: &'a NamedAdapter,
    ) -> BoxFuture<'a, Result<(), AttemptError>> {
        cannot("loading adapters by name")
    }

    /// Removes an adapter that no attempt asks for any more. One that is not there counts as removed.
    fn unload<'a>(&'a self, _adapter: &'a str) -> BoxFuture<'a, Result<(), AttemptError>> {
        std::future::ready(Ok(())).boxed()
    }

    /// Releases the memory of weights and KV cache. The weights may be lost by this, which the next probe
    /// shows. [`Backend::load`] takes back the memory of weights, but not that of the KV cache.
    fn sleep(&self) -> BoxFuture<'_, Result<(), AttemptError>> {
        cannot("sleeping")
    }

    /// Allocates all memory again.
    fn wake(&self) -> BoxFuture<'_, Result<(), AttemptError>> {
        cannot("waking up")
    }
}

/// The answer to a command that an engine does not have.
fn cannot<'a>(what: &str) -> BoxFuture<'a, Result<(), AttemptError>> {
    let why = what.to_owned();
    std::future::ready(Err(AttemptError::Unsupported(why))).boxed()
}

/// One message from an attempt to the thread that started it.
#[derive(Debug)]
pub(crate) struct AttemptTokens {
    pub(crate) attempt: AttemptId,
    /// Log-probabilities of the prompt, before the first token.
    pub(crate) prompt: Option<Vec<PromptLogprob>>,
    pub(crate) tokens: Vec<AttemptToken>,
    /// Reason of the attempt's end, once that is known; sent before the attempt itself is over.
    pub(crate) end: Option<FinishReason>,
}

/// Checks the tokens and the end of an attempt, and hands them on.
///
/// The only path from a backend to the router: no unchecked token reaches a request. Its channel is bounded;
/// a full one makes the attempt wait, and so the server's stream.
#[derive(Debug)]
pub struct AttemptSink {
    check: AttemptCheck,
    attempt: AttemptId,
    to: mpsc::Sender<AttemptTokens>,
    /// Tokens that wait for the end of the attempt; `None` hands them on at once.
    held: Option<Vec<AttemptToken>>,
    /// Log-probabilities of the prompt that wait with `held`.
    held_prompt: Option<Vec<PromptLogprob>>,
    /// Tokens that wait for the version of the weights that sampled them.
    unstamped: Vec<AttemptToken>,
}

/// The version of a part of an attempt's tokens, by their positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) version: PolicyVersion,
    pub(crate) start: usize,
    /// Position after the last one.
    pub(crate) end: usize,
}

impl AttemptSink {
    /// A sink for one attempt. `vocab` and `context` are the server's limits, if known; with `hold`
    /// the tokens wait for [`AttemptSink::flush`].
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
            held_prompt: None,
            unstamped: Vec::new(),
        }
    }

    /// Number of tokens of this attempt so far.
    pub fn sampled(&self) -> usize {
        self.check.sampled().len()
    }

    /// The ids of this attempt so far, in order.
    pub fn ids(&self) -> &[TokenId] {
        self.check.sampled()
    }

    /// Compares the prompt that the server reports with the one that was sent.
    ///
    /// # Errors
    /// If they differ: the server tokenized again, cut the prompt, or answers another request.
    pub fn echo(&mut self, prompt: &[TokenId]) -> Result<(), AttemptError> {
        Ok(self.check.echo(prompt)?)
    }

    /// Forwards the log-probabilities of the prompt. Called once, before the first token, if the attempt asks
    /// for them.
    ///
    /// # Errors
    /// If they cannot be right: one for each place that was asked for, in order, all finite, one for each
    /// target.
    pub async fn prompt(&mut self, mut scored: Vec<PromptLogprob>) -> Result<(), AttemptError> {
        self.check.prompt(&mut scored)?;
        if self.held.is_some() {
            self.held_prompt = Some(scored);
            return Ok(());
        }
        self.send(Some(scored), Vec::new(), None).await
    }

    /// Forwards the next tokens: one log-probability and one list of alternatives for each id (`top` is empty
    /// if none were requested). Waits while the channel is full.
    ///
    /// # Errors
    /// If they cannot be right; none of them is forwarded then: as many log-probabilities as ids, all finite,
    /// no id outside the vocabulary, none after a stop id, not more than `max_tokens`.
    pub async fn tokens(
        &mut self,
        ids: &[TokenId],
        logprobs: &[Option<f64>],
        top: Vec<Vec<TokenLogprob>>,
    ) -> Result<(), AttemptError> {
        let tokens = self.check.tokens(ids, logprobs, top)?;
        self.pass(tokens).await
    }

    /// Checks the next tokens, as [`AttemptSink::tokens`] does, and keeps them until [`AttemptSink::stamp`]
    /// names their weights.
    pub(crate) fn hold(
        &mut self,
        ids: &[TokenId],
        logprobs: &[Option<f64>],
        top: Vec<Vec<TokenLogprob>>,
    ) -> Result<(), AttemptError> {
        let tokens = self.check.tokens(ids, logprobs, top)?;
        self.unstamped.extend(tokens);
        Ok(())
    }

    /// Number of tokens that do not wait for their version.
    pub(crate) fn handed_on(&self) -> usize {
        self.sampled() - self.unstamped.len()
    }

    /// Forwards the tokens that wait, each with its version, up to the first one without.
    pub(crate) async fn stamp(&mut self, stamps: &[Stamp]) -> Result<(), AttemptError> {
        let first = self.handed_on();
        let mut known = 0;
        for (index, token) in self.unstamped.iter_mut().enumerate() {
            let of = |s: &&Stamp| (s.start..s.end).contains(&(first + index));
            let Some(stamp) = stamps.iter().find(of) else {
                break;
            };
            token.version = Some(stamp.version);
            known += 1;
        }
        let tokens = self.unstamped.drain(..known).collect();
        self.pass(tokens).await
    }

    /// Sends checked tokens, or keeps them until the end of the attempt.
    async fn pass(&mut self, tokens: Vec<AttemptToken>) -> Result<(), AttemptError> {
        match &mut self.held {
            Some(held) => held.extend(tokens),
            None => self.send(None, tokens, None).await?,
        }
        Ok(())
    }

    /// Translates the server's reason for the end. It is sent to the router at once, so that an
    /// interruption before the attempt is over does not sample past it.
    ///
    /// # Errors
    /// If the reason contradicts the tokens, as a stop id that was not sampled does.
    pub async fn end(&mut self, end: &ServerEnd) -> Result<FinishReason, AttemptError> {
        let reason = self.check.end(end)?;
        if self.held.is_none() {
            self.send(None, Vec::new(), Some(reason.clone())).await?;
        }
        Ok(reason)
    }

    /// Forwards what was held back; called after the attempt has ended and was verified.
    pub(crate) async fn flush(&mut self) -> Result<(), AttemptError> {
        let held = self.held.as_mut().map(std::mem::take).unwrap_or_default();
        let prompt = self.held_prompt.take();
        self.send(prompt, held, None).await
    }

    /// Sends a message to the thread, if there is anything to send.
    ///
    /// # Errors
    /// If the engine was dropped; the attempt ends then.
    async fn send(
        &self,
        prompt: Option<Vec<PromptLogprob>>,
        tokens: Vec<AttemptToken>,
        end: Option<FinishReason>,
    ) -> Result<(), AttemptError> {
        if prompt.is_none() && tokens.is_empty() && end.is_none() {
            return Ok(());
        }
        let attempt = self.attempt;
        let sent = self
            .to
            .send(AttemptTokens {
                attempt,
                prompt,
                tokens,
                end,
            })
            .await;
        sent.map_err(|_| AttemptError::Cut("the engine was dropped".to_owned()))
    }
}
