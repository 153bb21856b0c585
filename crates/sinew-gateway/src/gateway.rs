//! The gateway without its server: rollouts are opened, called, scored and finished.

use crate::error::ApiError;
use crate::flight::{ABORT_GRACE, Flight};
use crate::gate::Gate;
use crate::journal::{Journal, Receipt, Record};
use crate::kept::Kept;
use crate::limits::{ServerLimits, SessionLimits};
use crate::repeated::Scan;
use crate::secret::Secret;
use crate::session::{CallRecord, Entry, Reward, RolloutSpec, Session, SessionStats};
use crate::stats::{Counters, GatewayStats};
use serde::Serialize;
use sinew_render::{Reasoning, Renderer, ToolCallFormat, TurnFormat};
use sinew_store::{Committed, TraceStore};
use sinew_types::{Engine, EpisodeEnd, EpisodeId, FailureKind, Limit, Trace};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

/// Calls of a rollout that can be told again after their end.
const REPLAYS: usize = 2;

/// Longest id that a caller may choose.
const MAX_ID_BYTES: usize = 128;

/// How a gateway behaves.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// Name under which `GET /v1/models` lists the model.
    pub model: String,
    pub session: SessionLimits,
    pub server: ServerLimits,
    /// What open rollouts captured goes here before its end is told; `None`: a crash loses it.
    pub journal: Option<Arc<Journal>>,
    /// How the model writes tool calls and reasoning.
    pub format: TurnFormat,
    /// Fields of requests without effect are refused, not counted.
    pub strict_fields: bool,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            model: "policy".into(),
            session: SessionLimits::default(),
            server: ServerLimits::default(),
            journal: None,
            format: TurnFormat {
                calls: Some(ToolCallFormat::Hermes),
                reasoning: Some(Reasoning {
                    open: "<think>".into(),
                    close: "</think>".into(),
                    opened_by_prompt: false,
                }),
            },
            strict_fields: false,
        }
    }
}

/// What a gateway works with.
#[derive(Clone)]
pub struct GatewayParts {
    pub engine: Arc<dyn Engine>,
    pub renderer: Arc<dyn Renderer>,
    /// Finished traces go here before anyone is told; `None`: whoever calls
    /// [`Gateway::finish`] keeps them.
    pub store: Option<Arc<dyn TraceStore>>,
    /// Source of request ids, shared by everybody who uses the engine.
    pub requests: Arc<AtomicU64>,
    /// Who may generate; `None`: every call at once.
    pub gate: Option<Arc<dyn Gate>>,
}

impl std::fmt::Debug for GatewayParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GatewayParts")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

/// What an agent needs: it sets base URL and key, and nothing else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Credentials {
    pub id: EpisodeId,
    /// Ends in `/v1`.
    pub base_url: String,
    /// Opens this rollout's model and nothing else.
    pub api_key: String,
}

/// A live rollout.
#[derive(Debug)]
pub(crate) struct Rollout {
    key: Secret,
    session: Mutex<Session>,
    journal: Option<Arc<Journal>>,
    flights: Mutex<Flights>,
    idle: Notify,
    pub(crate) kept: Arc<Kept>,
}

#[derive(Debug, Default)]
pub(crate) struct Flights {
    pub(crate) running: Vec<(Option<[u8; 32]>, Arc<Flight>)>,
    pub(crate) ended: VecDeque<([u8; 32], Arc<Flight>)>,
}

impl Rollout {
    pub(crate) fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands what happened since the last time to the journal, in its order.
    ///
    /// # Errors
    /// If the journal takes no more; the rollout is closed then, as its entries have a gap.
    pub(crate) fn record(&self, session: &mut Session) -> Result<Option<Receipt>, ApiError> {
        let Some(journal) = &self.journal else {
            return Ok(None);
        };
        let entries = session.take_entries();
        if entries.is_empty() {
            return Ok(None);
        }
        let appended = journal.append(session.id(), Record::Entries { entries });
        if appended.is_err() {
            session.close();
        }
        appended.map(Some)
    }

    pub(crate) fn flights(&self) -> MutexGuard<'_, Flights> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A flight has ended: it may be told again for a while.
    pub(crate) fn landed(&self, flight: &Arc<Flight>) {
        let mut flights = self.flights();
        let found = flights
            .running
            .iter()
            .position(|(_, f)| Arc::ptr_eq(f, flight));
        if let Some((Some(key), flight)) = found.map(|i| flights.running.swap_remove(i))
            && flight.is_replayable()
        {
            flights.ended.push_back((key, flight));
            if flights.ended.len() > REPLAYS {
                flights.ended.pop_front();
            }
        }
        drop(flights);
        self.idle.notify_waiters();
    }

    /// The call that `key` stands for, running or just ended.
    pub(crate) fn same(&self, key: [u8; 32]) -> Option<Arc<Flight>> {
        let flights = self.flights();
        let running = flights.running.iter().find(|(k, _)| *k == Some(key));
        let ended = flights.ended.iter().rev().find(|(k, _)| *k == key);
        let found = running.map(|(_, f)| f).or(ended.map(|(_, f)| f));
        found.map(Arc::clone)
    }
}

/// How a repeated request is recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Retry<'a> {
    pub(crate) path: &'a str,
    /// The client's own key of the request: with it, equal bodies are told apart.
    pub(crate) idempotency: Option<&'a str>,
    /// The client says that it has sent it before.
    pub(crate) again: bool,
}

impl Retry<'_> {
    /// Key of the request; `scan` is what was seen of its body.
    pub(crate) fn key(&self, body: &[u8], scan: Option<&Scan>) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(self.path.len() as u64).to_le_bytes());
        hasher.update(self.path.as_bytes());
        let key = self.idempotency.unwrap_or_default();
        hasher.update(&[u8::from(self.idempotency.is_some())]);
        hasher.update(&(key.len() as u64).to_le_bytes());
        hasher.update(key.as_bytes());
        // Whatever a client's key says, another body is another request.
        match scan {
            Some(scan) => hasher.update(b"scan").update(&scan.body_key(body)),
            None => hasher.update(b"body").update(body),
        };
        *hasher.finalize().as_bytes()
    }
}

/// A rollout as the control API shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RolloutView {
    pub id: EpisodeId,
    pub live: bool,
    /// Of the whole trace; `None`: it has no reward.
    pub reward: Option<f64>,
    pub trace: Trace,
    pub stats: Option<SessionStats>,
    /// Share of calls whose history was not the captured one.
    pub divergence_rate: f64,
    pub calls: Vec<CallRecord>,
}

pub(crate) struct Inner {
    pub(crate) config: GatewayConfig,
    pub(crate) parts: GatewayParts,
    pub(crate) rollouts: RwLock<HashMap<String, Arc<Rollout>>>,
    pub(crate) in_flight: Arc<Semaphore>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) public_url: OnceLock<String>,
    /// It takes no more calls: see [`Gateway::drain`].
    pub(crate) draining: AtomicBool,
}

/// A model server that gives each rollout its own address. Cheap to clone.
#[derive(Clone)]
pub struct Gateway {
    pub(crate) inner: Arc<Inner>,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway")
            .field("model", &self.inner.config.model)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// Seconds since 1970.
pub(crate) fn unix_s() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0.0, |d| d.as_secs_f64())
}

impl Gateway {
    /// A gateway without rollouts.
    pub fn new(config: GatewayConfig, parts: GatewayParts) -> Self {
        let in_flight = Arc::new(Semaphore::new(config.server.max_in_flight));
        Self {
            inner: Arc::new(Inner {
                config,
                parts,
                rollouts: RwLock::default(),
                in_flight,
                counters: Arc::default(),
                public_url: OnceLock::new(),
                draining: AtomicBool::new(false),
            }),
        }
    }

    /// How it behaves.
    pub fn config(&self) -> &GatewayConfig {
        &self.inner.config
    }

    pub(crate) fn set_public_url(&self, url: String) {
        // The first server that listens is the one that agents are sent to.
        let _ = self.inner.public_url.set(url);
    }

    /// Counters since start.
    pub fn stats(&self) -> GatewayStats {
        let open: Vec<_> = self.rollouts().values().map(Arc::clone).collect();
        let tokens = open.iter().map(|r| r.session().stats().sampled_tokens);
        GatewayStats {
            rollouts: open.len(),
            in_flight: self.running(),
            open_tokens: tokens.sum(),
            ..self.inner.counters.stats()
        }
    }

    /// Takes no more calls and opens no more rollouts: both are refused with status 503. What
    /// runs goes on, and rollouts can be scored and finished.
    pub fn drain(&self) {
        self.inner.draining.store(true, Ordering::Release);
    }

    /// Calls that run now.
    pub fn running(&self) -> usize {
        self.inner.config.server.max_in_flight - self.inner.in_flight.available_permits()
    }

    /// Waits until no call runs, at most so long.
    pub(crate) async fn drained(&self, within: Duration) {
        let all = self.inner.config.server.max_in_flight as u32;
        // Too late or not, what still runs is for the caller to see.
        let _ = tokio::time::timeout(within, self.inner.in_flight.acquire_many(all)).await;
    }

    /// Ends every call that runs; its readers are told that the gateway stops. What was sampled
    /// is captured. Gives the number of calls.
    pub(crate) async fn cut(&self) -> usize {
        let rollouts: Vec<_> = self.rollouts().values().map(Arc::clone).collect();
        let mut cut = 0;
        for rollout in rollouts {
            let flights = rollout.flights();
            cut += flights.running.len();
            for (_, flight) in &flights.running {
                flight.cancel_for(ApiError::stopping("the call was cut"));
            }
        }
        if cut > 0 {
            self.drained(ABORT_GRACE * 2).await;
        }
        cut
    }

    /// That calls are taken.
    pub(crate) fn is_open(&self) -> Result<(), ApiError> {
        match self.inner.draining.load(Ordering::Acquire) {
            true => Err(ApiError::stopping("it takes no more calls")),
            false => Ok(()),
        }
    }

    pub(crate) fn engine_status(&self) -> sinew_types::EngineStatus {
        self.inner.parts.engine.status()
    }

    pub(crate) fn rollouts(&self) -> std::sync::RwLockReadGuard<'_, HashMap<String, Arc<Rollout>>> {
        let rollouts = self.inner.rollouts.read();
        rollouts.unwrap_or_else(PoisonError::into_inner)
    }

    fn rollouts_mut(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<String, Arc<Rollout>>> {
        let rollouts = self.inner.rollouts.write();
        rollouts.unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, id: &str) -> Option<Arc<Rollout>> {
        self.rollouts().get(id).map(Arc::clone)
    }

    /// Opens a rollout. Its agent may call the model until [`Gateway::finish`].
    ///
    /// # Errors
    /// If the gateway does not listen yet, has no room, or a field of `spec` is wrong or its id
    /// taken.
    pub fn open_rollout(&self, spec: RolloutSpec) -> Result<Credentials, ApiError> {
        if let Some(id) = &spec.id {
            self.is_new(id, self.stored_now(id)?)?;
        }
        // What follows is later in the journal: once that is durable, so is this.
        self.open_with(spec).map(|(credentials, _)| credentials)
    }

    /// [`Gateway::open_rollout`] for somebody who outlives this process: the journal has it on
    /// disk. After an error nothing is open.
    pub(crate) async fn open_durably(&self, spec: RolloutSpec) -> Result<Credentials, ApiError> {
        if let Some(id) = spec.id.clone() {
            let stored = self.stored(&id).await?;
            self.is_new(&id, stored)?;
        }
        let (credentials, receipt) = self.open_with(spec)?;
        if let Some(receipt) = receipt
            && let Err(error) = receipt.wait().await
        {
            self.rollouts_mut().remove(credentials.id.as_str());
            if let Some(journal) = &self.inner.config.journal {
                // Its end closes the gap. Lost, the gap is of an id that nobody was told.
                journal.append(&credentials.id, Record::Finished).ok();
            }
            return Err(error);
        }
        Ok(credentials)
    }

    /// That no finished rollout has this id: its trace would be taken for the new one's.
    fn is_new(&self, id: &EpisodeId, stored: Option<Trace>) -> Result<(), ApiError> {
        match stored {
            None => Ok(()),
            Some(_) => Err(taken(id)),
        }
    }

    fn open_with(&self, spec: RolloutSpec) -> Result<(Credentials, Option<Receipt>), ApiError> {
        self.is_open()?;
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
        let api_key = format!("sk-sinew-{}", Secret::random_hex(24)?);
        let (key, now_s) = (Secret::new(&api_key), unix_s());
        let opened = Record::Opened {
            spec: Box::new(spec.clone()),
            key: key.hash_hex(),
            opened_s: now_s,
        };
        let session = Session::new(id.clone(), spec, self.inner.config.session, now_s);
        let rollout = self.rollout(key, session, Kept::default());
        let mut rollouts = self.rollouts_mut();
        let limit = self.inner.config.server.max_rollouts;
        if rollouts.len() >= limit {
            let why = format!("{limit} rollouts are open, the limit of this gateway");
            return Err(ApiError::overloaded("too_many_rollouts", why));
        }
        if rollouts.contains_key(id.as_str()) {
            let why = format!("rollout {id} is open already");
            return Err(ApiError::conflict("rollout_exists", why));
        }
        let receipt = match &self.inner.config.journal {
            Some(journal) => Some(journal.append(&id, opened)?),
            None => None,
        };
        rollouts.insert(id.as_str().to_owned(), rollout);
        drop(rollouts);
        Counters::add(&self.inner.counters.opened, 1);
        let credentials = Credentials {
            base_url: format!("{public}/r/{id}/v1"),
            id,
            api_key,
        };
        Ok((credentials, receipt))
    }

    fn rollout(&self, key: Secret, mut session: Session, kept: Kept) -> Arc<Rollout> {
        let journal = self.inner.config.journal.clone();
        if journal.is_some() {
            session.keep_entries();
        }
        Arc::new(Rollout {
            key,
            session: Mutex::new(session),
            journal,
            flights: Mutex::default(),
            idle: Notify::new(),
            kept: Arc::new(kept),
        })
    }

    /// Opens the rollouts that the journal says were open when the last process ended: agents go
    /// on with the same addresses and keys. Gives their number.
    ///
    /// # Errors
    /// If the journal does not fit together, or the store cannot be asked what is finished.
    pub fn recover(&self) -> Result<usize, ApiError> {
        let Some(journal) = &self.inner.config.journal else {
            return Ok(0);
        };
        let mut count = 0;
        for found in journal.take_recovered() {
            let stored = match &self.inner.parts.store {
                Some(store) => store.get(&found.id)?,
                None => None,
            };
            if stored.is_some() {
                // The process ended between the store and the journal.
                journal.append(&found.id, Record::Finished)?;
                continue;
            }
            let broken = |why: &str| {
                let why = format!("journal of rollout {}: {why}", found.id);
                ApiError::server("journal_broken", why)
            };
            let key = Secret::from_hash_hex(&found.key).ok_or_else(|| broken("no key"))?;
            let limits = self.inner.config.session;
            let kept = Kept::default();
            for entry in &found.entries {
                if let Entry::Kept { answer } = entry {
                    kept.keep(answer.clone());
                }
            }
            let session = Session::new(found.id.clone(), found.spec, limits, found.opened_s)
                .restore(found.entries, unix_s())
                .map_err(|e| broken(&e.to_string()))?;
            let tokens = session.stats().sampled_tokens;
            Counters::add(&self.inner.counters.sampled_tokens, tokens);
            let rollout = self.rollout(key, session, kept);
            let mut rollouts = self.rollouts_mut();
            rollouts.insert(found.id.as_str().to_owned(), rollout);
            count += 1;
        }
        Ok(count)
    }

    /// The rollout that `key` opens. Unknown ids and wrong keys are told alike.
    pub(crate) fn authorize(&self, id: &str, key: Option<&str>) -> Result<Arc<Rollout>, ApiError> {
        let refused = || ApiError::unauthorized("this key does not open this rollout");
        let rollout = self.find(id).ok_or_else(refused)?;
        match key {
            Some(key) if rollout.key.matches(key) => Ok(rollout),
            _ => Err(refused()),
        }
    }

    fn known(&self, id: &EpisodeId) -> Result<Arc<Rollout>, ApiError> {
        self.find(id.as_str())
            .ok_or_else(|| ApiError::not_found(format!("there is no open rollout {id}")))
    }

    /// Scores an open rollout.
    ///
    /// # Errors
    /// If it is not open, or the reward is no number.
    pub fn reward(&self, id: &EpisodeId, reward: &Reward) -> Result<(), ApiError> {
        self.score(id, reward).map(|_| ())
    }

    /// Scores an open rollout, and tells when that is durable.
    pub(crate) fn score(
        &self,
        id: &EpisodeId,
        reward: &Reward,
    ) -> Result<Option<Receipt>, ApiError> {
        let rollout = self.known(id)?;
        let mut session = rollout.session();
        session.reward(reward)?;
        rollout.record(&mut session)
    }

    /// A rollout, open or stored.
    ///
    /// # Errors
    /// If it is unknown.
    pub async fn view(&self, id: &EpisodeId) -> Result<RolloutView, ApiError> {
        if let Some(rollout) = self.find(id.as_str()) {
            let session = rollout.session();
            let stats = session.stats().clone();
            let trace = session.snapshot(unix_s());
            return Ok(RolloutView {
                id: id.clone(),
                live: true,
                reward: trace.score(),
                trace,
                divergence_rate: stats.divergence_rate(),
                stats: Some(stats),
                calls: session.calls(),
            });
        }
        let trace = self.stored(id).await?.ok_or_else(|| {
            ApiError::not_found(format!("there is no rollout {id}, open or stored"))
        })?;
        Ok(RolloutView {
            id: id.clone(),
            live: false,
            reward: trace.score(),
            trace,
            stats: None,
            divergence_rate: 0.0,
            calls: Vec::new(),
        })
    }

    async fn stored(&self, id: &EpisodeId) -> Result<Option<Trace>, ApiError> {
        let Some(store) = self.inner.parts.store.clone() else {
            return Ok(None);
        };
        let id = id.clone();
        blocking(move || store.get(&id).map_err(ApiError::from)).await
    }

    /// [`Gateway::stored`] on this thread.
    fn stored_now(&self, id: &EpisodeId) -> Result<Option<Trace>, ApiError> {
        match &self.inner.parts.store {
            Some(store) => Ok(store.get(id)?),
            None => Ok(None),
        }
    }

    /// Ends a rollout: running calls are aborted, the trace is checked, committed to the store
    /// if there is one, and given. `end: None` lets the rollout say how it ended: by a limit
    /// it ran into, or else because its task did. Finishing twice gives the stored trace.
    ///
    /// # Errors
    /// If the rollout is unknown, an invariant of its capture is broken, or the store refuses;
    /// in the last two cases it stays, closed, and finishing can be tried again.
    pub async fn finish(&self, id: &EpisodeId, end: Option<EpisodeEnd>) -> Result<Trace, ApiError> {
        let Some(rollout) = self.find(id.as_str()) else {
            let stored = self.stored(id).await?;
            return stored.ok_or_else(|| ApiError::not_found(format!("there is no rollout {id}")));
        };
        rollout.session().close();
        self.land_all(&rollout).await;
        let trace = {
            let session = rollout.session();
            let end = end.unwrap_or_else(|| session.natural_end());
            session.trace(end, unix_s()).inspect_err(|_| {
                Counters::add(&self.inner.counters.unproven, 1);
            })?
        };
        let trace = match self.inner.parts.store.clone() {
            None => trace,
            Some(store) => {
                blocking(move || match store.commit(&trace)? {
                    Committed::New => Ok(trace),
                    // Finishing was tried before, and came as far as this.
                    Committed::Duplicate => match store.get(&trace.episode)? {
                        Some(stored) if stored.nodes == trace.nodes => Ok(stored),
                        _ => Err(taken(&trace.episode)),
                    },
                })
                .await?
            }
        };
        if let Some(journal) = &self.inner.config.journal {
            // Lost, it is made up for by a look into the store.
            journal.append(id, Record::Finished)?;
        }
        if self.rollouts_mut().remove(id.as_str()).is_some() {
            Counters::add(&self.inner.counters.finished, 1);
            let tokens = trace.sampled_tokens() as u64;
            Counters::add(&self.inner.counters.stored_tokens, tokens);
        }
        Ok(trace)
    }

    /// Aborts what runs and waits until it is captured.
    async fn land_all(&self, rollout: &Arc<Rollout>) {
        let deadline = Instant::now() + ABORT_GRACE * 2;
        loop {
            let idle = rollout.idle.notified();
            let running: Vec<_> = {
                let flights = rollout.flights();
                flights.running.iter().map(|(_, f)| Arc::clone(f)).collect()
            };
            if running.is_empty() {
                return;
            }
            running.iter().for_each(|f| f.cancel());
            if tokio::time::timeout_at(deadline, idle).await.is_err() {
                return;
            }
        }
    }

    /// Ends rollouts that nobody has called for longer than the limit. The server does this
    /// by itself.
    pub async fn sweep(&self) {
        self.inner.counters.alarm();
        let ttl = self.inner.config.server.rollout_ttl.as_secs_f64();
        let now = unix_s();
        let stale = |r: &Rollout| {
            let session = r.session();
            session.stats().running == 0 && now - session.touched_s() > ttl
        };
        let old: Vec<_> = self
            .rollouts()
            .values()
            .filter(|r| stale(r))
            .map(Arc::clone)
            .collect();
        for rollout in old {
            rollout.session().cut(Limit::WallTime);
            let id = rollout.session().id().clone();
            if let Err(error) = self.finish(&id, None).await {
                tracing::error!(rollout = %id, %error, "an expired rollout could not be stored");
            }
        }
    }

    /// Ends every rollout as cancelled; what they captured is stored.
    pub async fn close(&self) {
        let ids: Vec<String> = self.rollouts().keys().cloned().collect();
        for id in ids {
            let end = EpisodeEnd::Failed {
                kind: FailureKind::Cancelled,
                message: "the gateway was stopped".into(),
            };
            if let Err(error) = self.finish(&EpisodeId::new(id.as_str()), Some(end)).await {
                tracing::error!(rollout = id, %error, "an open rollout could not be stored");
            }
        }
    }

    /// How often rollouts are looked at for their age.
    pub(crate) fn sweep_every(&self) -> Duration {
        let ttl = self.inner.config.server.rollout_ttl;
        (ttl / 10).clamp(Duration::from_millis(100), Duration::from_secs(10))
    }
}

/// A stored trace has this id.
fn taken(id: &EpisodeId) -> ApiError {
    let why = format!("a finished rollout has the id {id}: choose another one, or leave it out");
    ApiError::conflict("rollout_exists", why)
}

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

/// Runs what blocks where it may.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(ApiError::server("store_failed", e.to_string())))
}
