//! The gateway without its server: rollouts are opened, called, scored and finished.
//!
//! Life of a rollout: opened (journal), called (journal), scored, finished (store, then journal). Finishing
//! can be retried at any point. Locks are taken in the order rollouts, session, answers, counters; no lock is
//! held while waiting for the engine or the disk.

use crate::adapters::Adapters;
use crate::archive::{Archive, taken};
use crate::call::Caller;
use crate::config::{GatewayConfig, GatewayParts};
use crate::conversations::Conversations;
use crate::hooks::{RolloutHooks, seed_of};
use crate::journal::{Receipt, Record};
use crate::keys::{hex, unhex};
use crate::live::LiveRollouts;
use crate::rollout::{Rollout, unix_s};
use crate::rollouts::Rollouts;
use crate::running::ABORT_GRACE;
use crate::secret::Secret;
use crate::session::{CallRecord, Entry, Reward, RolloutSpec, Session, SessionStats};
use crate::stats::{Counters, GatewayStats};
use serde::Serialize;
use sinew_dialect::{Answers, ApiError};
use sinew_types::{EpisodeEnd, EpisodeId, FailureKind, Limit, Trace};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Maximum length of an id that a caller chooses.
const MAX_ID_BYTES: usize = 128;

/// Credentials of an agent. The agent only has to set its base URL and its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Credentials {
    pub id: EpisodeId,
    /// Base URL of this rollout; ends in `/v1`.
    pub base_url: String,
    /// Key that gives access to this rollout's model only.
    pub api_key: String,
    /// Base URL for clients that serve many rollouts, so that only the key identifies the rollout. Ends in
    /// `/v1`.
    pub shared_url: String,
    /// W3C trace context that can replace the key, for clients that cannot change the key per request.
    pub traceparent: String,
}

/// A rollout as the control API shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RolloutView {
    pub id: EpisodeId,
    /// Whether the rollout is open; the trace is then a snapshot.
    pub live: bool,
    /// Reward of the whole trace; `None` without one.
    pub reward: Option<f64>,
    /// The trace so far.
    pub trace: Trace,
    pub stats: Option<SessionStats>,
    /// Share of calls whose history differs from the captured one.
    pub divergence_rate: f64,
    /// The calls; only for open rollouts.
    pub calls: Vec<CallRecord>,
}

struct Inner {
    config: GatewayConfig,
    caller: Caller,
    rollouts: Rollouts,
    archive: Archive,
    adapters: Arc<Adapters>,
    counters: Arc<Counters>,
    hooks: Option<Arc<dyn RolloutHooks>>,
    /// Conversations of clients with the fixed key.
    conversations: Conversations,
    /// Public URL, set by the first server that listens.
    public_url: OnceLock<String>,
}

/// A model server that has a separate address for each rollout. Clones are cheap and share one gateway.
#[derive(Clone)]
pub struct Gateway {
    inner: Arc<Inner>,
}

sinew_types::debug_fields!(
    Gateway as this,
    model = this.inner.config.model,
    stats = this.stats()
);

impl Gateway {
    /// Creates a gateway without rollouts.
    pub fn new(config: GatewayConfig, parts: GatewayParts) -> Self {
        let counters: Arc<Counters> = Arc::default();
        let adapters = Arc::new(Adapters::new(
            Arc::clone(&parts.engine),
            config.model.clone(),
            config.adapter_dir.clone(),
            config.server.max_adapter_bytes,
        ));
        let caller = Caller::new(
            config.clone(),
            &parts,
            Arc::clone(&adapters),
            Arc::clone(&counters),
        );
        Self {
            inner: Arc::new(Inner {
                caller,
                adapters,
                rollouts: Rollouts::new(config.server.max_rollouts),
                archive: Archive::new(config.journal.clone(), parts.store),
                counters,
                hooks: parts.hooks,
                conversations: Conversations::default(),
                public_url: OnceLock::new(),
                config,
            }),
        }
    }

    pub fn config(&self) -> &GatewayConfig {
        &self.inner.config
    }

    pub(crate) fn set_public_url(&self, url: String) {
        // The first server that listens is the one that agents are sent to.
        let _ = self.inner.public_url.set(url);
    }

    /// Returns the part that calls the model.
    pub(crate) fn caller(&self) -> &Caller {
        &self.inner.caller
    }

    /// Rollouts of clients with the fixed key.
    pub(crate) fn conversations(&self) -> &Conversations {
        &self.inner.conversations
    }

    /// The counters.
    pub(crate) fn counters(&self) -> &Counters {
        &self.inner.counters
    }

    /// The adapters of the engine.
    pub fn adapters(&self) -> &Adapters {
        &self.inner.adapters
    }

    /// The open rollouts.
    pub(crate) fn rollouts(&self) -> &Rollouts {
        &self.inner.rollouts
    }

    /// Counters since start.
    pub fn stats(&self) -> GatewayStats {
        let open = self.inner.rollouts.all();
        let tokens = open.iter().map(|r| r.session().stats().sampled_tokens);
        let unread = open.iter().map(|rollout| {
            let calls = rollout.running();
            calls.iter().filter(|call| call.is_unread()).count()
        });
        GatewayStats {
            rollouts: open.len(),
            in_flight: self.running(),
            unread: unread.sum(),
            open_tokens: tokens.sum(),
            ..self.inner.counters.stats()
        }
    }

    /// Up to `limit` open rollouts, longest in their phase first.
    pub fn live(&self, limit: usize) -> LiveRollouts {
        let ttl_s = self.config().server.rollout_ttl.as_secs_f64();
        self.inner.rollouts.live(limit, ttl_s)
    }

    /// Waits for the first model call, and returns whether it was accepted.
    ///
    /// # Errors
    /// The refusal.
    pub async fn first_answer(&self) -> Result<(), ApiError> {
        self.inner.counters.first_answer().await
    }

    /// Refuses new calls and new rollouts with status 503 from now on. Running calls continue, and rollouts
    /// can be scored and finished.
    pub fn drain(&self) {
        self.inner.caller.drain();
    }

    /// Like [`Gateway::drain`], but final: clients get status 410 and do not wait for another session.
    pub(crate) fn end(&self) {
        self.inner.caller.end();
    }

    /// Number of running calls.
    pub fn running(&self) -> usize {
        self.inner.caller.running()
    }

    /// Ends every running call; its readers get the error that the gateway stops. The tokens sampled so far
    /// are captured. Returns the number of calls.
    pub(crate) async fn cut(&self) -> usize {
        let mut cut = 0;
        for rollout in self.inner.rollouts.all() {
            for call in rollout.running() {
                call.cancel_for(ApiError::stopping("the call was cut"));
                cut += 1;
            }
        }
        if cut > 0 {
            self.inner.caller.drained(ABORT_GRACE * 2).await;
        }
        cut
    }

    /// Opens a rollout. Its agent may call the model until [`Gateway::finish`]. Whether the engine has the
    /// adapter of `spec` is not checked, since the caller may have loaded it by itself.
    ///
    /// # Errors
    /// If the gateway does not listen yet, has too many rollouts, or a field of `spec` is wrong or its id
    /// taken.
    pub fn open_rollout(&self, spec: RolloutSpec) -> Result<Credentials, ApiError> {
        if let Some(id) = &spec.id {
            self.is_new(id, self.inner.archive.stored_now(id)?)?;
        }
        // Later records follow this one in the journal: once one of them is durable, this one is, too.
        self.open_with(spec).map(|(credentials, _)| credentials)
    }

    /// Like [`Gateway::open_rollout`], but waits until the journal is on disk, for clients that outlive this
    /// process. After an error no rollout is open.
    pub(crate) async fn open_durably(
        &self,
        mut spec: RolloutSpec,
    ) -> Result<Credentials, ApiError> {
        if let Some(adapter) = &spec.adapter {
            self.inner.adapters.check(adapter)?;
        }
        self.admit(&mut spec)?;
        if let Some(id) = spec.id.clone() {
            let stored = self.inner.archive.stored(&id).await?;
            self.is_new(&id, stored)?;
        }
        let (credentials, receipt) = self.open_with(spec)?;
        if let Some(receipt) = receipt
            && let Err(error) = receipt.wait().await
        {
            self.inner.rollouts.remove(&credentials.id);
            // Its end closes the gap. If that is lost, no client has the id.
            let end = self.inner.archive.append(&credentials.id, Record::Finished);
            end.ok();
            return Err(error);
        }
        Ok(credentials)
    }

    /// Lets the receiver of finished rollouts set values of a new one, or refuse it.
    ///
    /// # Errors
    /// The refusal.
    pub(crate) fn admit(&self, spec: &mut RolloutSpec) -> Result<(), ApiError> {
        let hooks = self.inner.hooks.as_ref();
        hooks.map_or(Ok(()), |hooks| hooks.opening(spec))
    }

    /// Checks that no finished rollout has this id, since its trace would be mistaken for that of the new
    /// one.
    fn is_new(&self, id: &EpisodeId, stored: Option<Trace>) -> Result<(), ApiError> {
        match stored {
            None => Ok(()),
            Some(_) => Err(taken(id)),
        }
    }

    /// Validates the spec, creates id and key, and opens the rollout. The receipt resolves when the journal
    /// entry is durable.
    fn open_with(&self, mut spec: RolloutSpec) -> Result<(Credentials, Option<Receipt>), ApiError> {
        self.inner.caller.is_open()?;
        self.inner.caller.describe(&mut spec);
        if let Some((path, why)) = spec.fault() {
            return Err(ApiError::invalid(path, format!("{path} = {why}")));
        }
        let public = self.inner.public_url.get().ok_or_else(|| {
            ApiError::overloaded("not_listening", "the gateway has no address yet")
        })?;
        let id = match spec.id.clone() {
            Some(id) => checked_id(id)?,
            None => EpisodeId::new(format!("r-{}", Secret::random_hex(8)?)),
        };
        if spec.seed == 0 {
            spec.seed = seed_of(&id, 0);
        }
        // The journal has it: a restart with another default changes no open rollout.
        spec.thinking.get_or_insert(self.inner.config.thinking);
        let api_key = format!("sk-sinew-{}", Secret::random_hex(24)?);
        let (key, now_s) = (Secret::new(&api_key), unix_s());
        let trace_id = Secret::random_id()?;
        let opened = Record::Opened {
            spec: Box::new(spec.clone()),
            key: key.hash_hex(),
            trace_id: hex(&trace_id),
            opened_s: now_s,
        };
        let session = Session::new(id.clone(), spec, self.inner.config.session, now_s);
        let journal = self.inner.archive.journal().cloned();
        let rollout = Rollout::new(key, trace_id, session, Answers::default(), journal);
        let record = || self.inner.archive.append(&id, opened);
        let receipt = self.inner.rollouts.open(&id, rollout, record)?;
        self.inner.counters.count(|stats| stats.opened += 1);
        let trace_id = hex(&trace_id);
        let credentials = Credentials {
            base_url: format!("{public}/r/{id}/v1"),
            shared_url: format!("{public}/v1"),
            // The parent's span is of no use here, but must not be 0.
            traceparent: format!("00-{trace_id}-{}-01", &trace_id[..16]),
            id,
            api_key,
        };
        Ok((credentials, receipt))
    }

    /// Reopens the rollouts that were open in the journal when the last process ended; agents continue with
    /// the same addresses and keys. Returns their number.
    ///
    /// # Errors
    /// If the journal does not fit together, or the store cannot be asked what is finished.
    pub fn recover(&self) -> Result<usize, ApiError> {
        let Some(journal) = self.inner.archive.journal() else {
            return Ok(0);
        };
        let mut count = 0;
        for found in journal.take_recovered() {
            if let Some(trace) = self.inner.archive.stored_now(&found.id)? {
                // The process ended between the store and the journal.
                if let Some(hooks) = &self.inner.hooks {
                    hooks.finished(&trace);
                }
                journal.append(&found.id, Record::Finished)?;
                continue;
            }
            let broken = |why: &str| {
                let why = format!("journal of rollout {}: {why}", found.id);
                ApiError::server("journal_broken", why)
            };
            let key = Secret::from_hash_hex(&found.key).ok_or_else(|| broken("no key"))?;
            let trace_id = unhex(&found.trace_id).ok_or_else(|| broken("no trace id"))?;
            let limits = self.inner.config.session;
            let answers = Answers::default();
            for entry in &found.entries {
                if let Entry::Kept { answer } = entry {
                    answers.keep(answer.clone());
                }
            }
            let session = Session::new(found.id.clone(), found.spec, limits, found.opened_s)
                .restore(found.entries, unix_s())
                .map_err(|e| broken(&e.to_string()))?;
            let tokens = session.stats().sampled_tokens;
            self.inner
                .counters
                .count(|stats| stats.sampled_tokens += tokens);
            let rollout = Rollout::new(key, trace_id, session, answers, Some(Arc::clone(journal)));
            self.inner.rollouts.restore(&found.id, rollout);
            count += 1;
        }
        Ok(count)
    }

    /// Scores an open rollout.
    ///
    /// # Errors
    /// If it is not open, or the reward is not a number.
    pub fn reward(&self, id: &EpisodeId, reward: &Reward) -> Result<(), ApiError> {
        self.score(id, reward).map(|_| ())
    }

    /// Scores an open rollout. The receipt resolves when the score is durable.
    pub(crate) fn score(
        &self,
        id: &EpisodeId,
        reward: &Reward,
    ) -> Result<Option<Receipt>, ApiError> {
        let rollout = self.inner.rollouts.known(id)?;
        let mut session = rollout.session();
        session.reward(reward)?;
        rollout.record(&mut session)
    }

    /// Returns the archive of rollouts.
    pub(crate) fn archive(&self) -> &Archive {
        &self.inner.archive
    }

    /// Returns a rollout, open or stored.
    ///
    /// # Errors
    /// If it is unknown.
    pub async fn view(&self, id: &EpisodeId) -> Result<RolloutView, ApiError> {
        let (trace, stats, calls) = match self.inner.rollouts.find(id.as_str()) {
            Some(rollout) => {
                let session = rollout.session();
                let trace = session.snapshot(unix_s());
                (trace, Some(session.stats().clone()), session.calls())
            }
            None => {
                let unknown =
                    || ApiError::not_found(format!("there is no rollout {id}, open or stored"));
                let stored = self.inner.archive.stored(id).await?;
                (stored.ok_or_else(unknown)?, None, Vec::new())
            }
        };
        Ok(RolloutView {
            id: id.clone(),
            live: stats.is_some(),
            reward: trace.score(),
            trace,
            divergence_rate: stats.as_ref().map_or(0.0, SessionStats::divergence_rate),
            stats,
            calls,
        })
    }

    /// Returns the trace of a finished rollout, including one that is being written.
    pub(crate) async fn finished(&self, id: &EpisodeId) -> Result<Option<Trace>, ApiError> {
        match self.inner.rollouts.find(id.as_str()) {
            Some(rollout) if !rollout.session().is_sealed() => Ok(None),
            Some(_) => self.finish(id, None).await.map(Some),
            None => self.inner.archive.stored(id).await,
        }
    }

    /// Ends a rollout: running calls are aborted, the trace is checked, committed to the store if there is
    /// one, and returned. With `end: None` the rollout ended by the limit that it reached, or otherwise
    /// because its task ended. Finishing twice returns the stored trace.
    ///
    /// # Errors
    /// If the rollout is unknown, an invariant of its capture is broken, or the store refuses; in the last
    /// two cases the rollout stays, without accepting calls, and finishing can be retried.
    pub async fn finish(&self, id: &EpisodeId, end: Option<EpisodeEnd>) -> Result<Trace, ApiError> {
        let Some(rollout) = self.inner.rollouts.find(id.as_str()) else {
            let stored = self.inner.archive.stored(id).await?;
            return stored.ok_or_else(|| ApiError::not_found(format!("there is no rollout {id}")));
        };
        rollout.session().close();
        rollout.end_calls().await;
        let trace = {
            let mut session = rollout.session();
            let end = end.unwrap_or_else(|| session.natural_end());
            let trace = session.trace(end, unix_s()).inspect_err(|_| {
                self.inner.counters.count(|stats| stats.unproven += 1);
            })?;
            session.seal();
            trace
        };
        let trace = self.inner.archive.commit(trace).await?;
        if self.inner.rollouts.remove(id) {
            self.inner.counters.count(|stats| {
                stats.finished += 1;
                stats.stored_tokens += trace.sampled_tokens() as u64;
                for (cause, count) in trace.branches() {
                    *stats.branches.entry(cause).or_default() += u64::from(count);
                }
            });
            if let Some(hooks) = &self.inner.hooks {
                hooks.finished(&trace);
            }
        }
        // If this is lost, a look into the store makes up for it.
        self.inner.archive.append(id, Record::Finished)?;
        Ok(trace)
    }

    /// Finishes a rollout like [`Gateway::finish`], for a client of the control API. With hooks, a rollout
    /// without model calls is stored as failed, and this call returns an error unless `end` is a failure
    /// itself.
    pub(crate) async fn finish_used(
        &self,
        id: &EpisodeId,
        end: Option<EpisodeEnd>,
    ) -> Result<Trace, ApiError> {
        let asked = self.inner.hooks.is_some() && !matches!(end, Some(EpisodeEnd::Failed { .. }));
        let calls = self.inner.rollouts.find(id.as_str());
        let mute = asked && calls.is_some_and(|r| r.session().stats().calls == 0);
        if !mute {
            return self.finish(id, end).await;
        }
        let message = format!(
            "rollout {id} called no model, so that there is nothing to train: its client must use the \
             rollout's key (`api_key=sinew.key`) and the gateway's address (OPENAI_BASE_URL)"
        );
        let end = EpisodeEnd::Failed {
            kind: FailureKind::Harness,
            message: message.clone(),
        };
        self.finish(id, Some(end)).await?;
        Err(ApiError::conflict("no_model_call", message))
    }

    /// Ends rollouts that had no call for longer than the limit. The server does this periodically.
    pub async fn sweep(&self) {
        self.inner.counters.alarm();
        let ttl = self.inner.config.server.rollout_ttl.as_secs_f64();
        let now = unix_s();
        let stale = |r: &Rollout| {
            let session = r.session();
            session.stats().running == 0 && now - session.touched_s() > ttl
        };
        let mut old = self.inner.rollouts.all();
        old.retain(|r| stale(r));
        for rollout in old {
            rollout.session().cut(Limit::WallTime);
            let id = rollout.session().id().clone();
            if let Err(error) = self.finish(&id, None).await {
                tracing::error!(rollout = %id, %error, "an expired rollout could not be stored");
            }
        }
    }

    /// Ends every rollout as cancelled; the captured data is stored.
    pub async fn close(&self) {
        for rollout in self.inner.rollouts.all() {
            let id = rollout.session().id().clone();
            let end = EpisodeEnd::Failed {
                kind: FailureKind::Cancelled,
                message: "the gateway was stopped".into(),
            };
            if let Err(error) = self.finish(&id, Some(end)).await {
                tracing::error!(rollout = %id, %error, "an open rollout could not be stored");
            }
        }
    }

    /// Interval at which rollouts are checked for their age.
    pub(crate) fn sweep_every(&self) -> Duration {
        let ttl = self.inner.config.server.rollout_ttl;
        (ttl / 10).clamp(Duration::from_millis(100), Duration::from_secs(10))
    }
}

/// Validates that an id may be part of a URL.
fn checked_id(id: EpisodeId) -> Result<EpisodeId, ApiError> {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    let text = id.as_str();
    // `.` and `..` are steps in an address, not names.
    let steps = text.bytes().all(|b| b == b'.');
    if steps || text.len() > MAX_ID_BYTES || !text.bytes().all(fits) {
        let why = format!(
            "id {text:?}: allowed are 1 to {MAX_ID_BYTES} letters, digits, `.`, `_` and `-`, and \
             not dots alone"
        );
        return Err(ApiError::invalid("id", why));
    }
    Ok(id)
}
