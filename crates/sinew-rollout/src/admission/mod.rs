//! Admission control: [`AdmissionCore`] decides, and [`Admission`] applies the decisions to running episodes.
//!
//! The core is pure and takes the time as an argument, so that a simulator can drive it. This module adds the
//! clock, the engine's status, and the futures of waiting episodes. Dropping a place lets the next waiter
//! continue at once. The engine's status is read every 250 ms.

mod bucket;
mod core;
mod pressure;

pub use self::core::{AdmissionConfig, AdmissionCore, AdmissionReading, EpisodeKey, Ticket};
pub use pressure::PressureConfig;

use sinew_types::{Engine, EpisodeId, TokenId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

/// Interval at which the engine's status is read while episodes run.
pub(crate) const READ_EVERY: Duration = Duration::from_millis(250);

/// Lets episodes start and generate when the core allows it. All episodes of a run share it.
pub struct Admission {
    engine: Arc<dyn Engine>,
    origin: Instant,
    state: Mutex<State>,
    /// Notified when waiting episodes have started.
    begun: Arc<Notify>,
}

struct State {
    core: AdmissionCore,
    /// Episodes that have asked to start and have not ended.
    keys: HashMap<EpisodeId, EpisodeKey>,
    waiting: HashMap<Ticket, oneshot::Sender<()>>,
    read_at: Option<Instant>,
}

impl std::fmt::Debug for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let reading = self.reading();
        f.debug_struct("Admission")
            .field("reading", &reading)
            .finish_non_exhaustive()
    }
}

/// Permission of an episode to run. Dropping it releases the episode's capacity.
#[derive(Debug)]
pub struct Place {
    admission: Arc<Admission>,
    episode: EpisodeId,
    key: EpisodeKey,
    ticket: Ticket,
    /// Time from the request until the episode could start.
    pub waited: Duration,
}

impl Drop for Place {
    fn drop(&mut self) {
        let now_s = self.admission.now_s();
        let mut state = self.admission.lock();
        state.waiting.remove(&self.ticket);
        if state.keys.get(&self.episode) == Some(&self.key) {
            state.keys.remove(&self.episode);
        }
        state.core.ended(self.key);
        self.admission.settle(&mut state, now_s);
    }
}

/// Request of an episode that waits for its place.
#[derive(Debug)]
pub(crate) struct AdmissionRequest {
    place: Place,
    granted: oneshot::Receiver<()>,
    now_s: f64,
}

impl AdmissionRequest {
    /// Waits for the place.
    pub(crate) async fn granted(self) -> Place {
        let mut place = self.place;
        // An error is impossible: only this place drops the sender.
        let _ = self.granted.await;
        let waited = place.admission.now_s() - self.now_s;
        place.waited = Duration::from_secs_f64(waited.max(0.0));
        place
    }
}

/// Permission of a turn to generate, until it is dropped.
#[derive(Debug)]
pub struct TurnPlace {
    admission: Arc<Admission>,
    key: EpisodeKey,
    ticket: Ticket,
    /// Time that the turn waited for permission.
    pub waited: Duration,
}

impl Drop for TurnPlace {
    fn drop(&mut self) {
        let now_s = self.admission.now_s();
        let mut state = self.admission.lock();
        state.waiting.remove(&self.ticket);
        state.core.turn_ended(self.key, self.ticket, now_s);
        self.admission.settle(&mut state, now_s);
    }
}

impl Admission {
    /// Creates the admission control for `engine`.
    pub fn new(config: AdmissionConfig, engine: Arc<dyn Engine>) -> Arc<Self> {
        Arc::new(Self {
            engine,
            origin: Instant::now(),
            state: Mutex::new(State {
                core: AdmissionCore::new(config),
                keys: HashMap::new(),
                waiting: HashMap::new(),
                read_at: None,
            }),
            begun: Arc::default(),
        })
    }

    /// Reads the state and the counters.
    pub fn reading(&self) -> AdmissionReading {
        self.lock().core.reading()
    }

    /// Waits until `episode` may start.
    pub async fn begin(self: &Arc<Self>, episode: &EpisodeId) -> Place {
        self.ask(episode).granted().await
    }

    /// Adds `episode` at the end of the queue of episodes that wait to start.
    pub(crate) fn ask(self: &Arc<Self>, episode: &EpisodeId) -> AdmissionRequest {
        let now_s = self.now_s();
        let mut state = self.lock();
        let (key, ticket) = state.core.ask();
        state.keys.insert(episode.clone(), key);
        let granted = state.wait(ticket);
        self.settle(&mut state, now_s);
        let place = Place {
            admission: Arc::clone(self),
            episode: episode.clone(),
            key,
            ticket,
            waited: Duration::ZERO,
        };
        AdmissionRequest {
            place,
            granted,
            now_s,
        }
    }

    /// Whether an episode waits to start, so that another one would have to wait too.
    pub(crate) fn is_full(&self) -> bool {
        self.reading().new > 0
    }

    /// Returns the notification that waiting episodes have started.
    pub(crate) fn begun(&self) -> Arc<Notify> {
        Arc::clone(&self.begun)
    }

    /// Waits until `episode` may generate after `context`; an episode without a place here may at once. The
    /// call also reports that its environment has started.
    pub async fn turn(
        self: &Arc<Self>,
        episode: &EpisodeId,
        context: &[TokenId],
    ) -> Option<TurnPlace> {
        let now_s = self.now_s();
        let (mut place, granted) = {
            let mut state = self.lock();
            let key = *state.keys.get(episode)?;
            let ticket = state.core.ask_turn(key, context, now_s);
            let granted = state.wait(ticket);
            self.settle(&mut state, now_s);
            let place = TurnPlace {
                admission: Arc::clone(self),
                key,
                ticket,
                waited: Duration::ZERO,
            };
            (place, granted)
        };
        let _ = granted.await;
        place.waited = Duration::from_secs_f64((self.now_s() - now_s).max(0.0));
        Some(place)
    }

    /// Reads the engine's status and lets waiters continue. Callers do this from time to time while episodes
    /// run.
    pub fn look(&self) {
        let now_s = self.now_s();
        let mut state = self.lock();
        self.settle(&mut state, now_s);
    }

    fn settle(&self, state: &mut State, now_s: f64) {
        let due = |at: Instant| at.elapsed() >= READ_EVERY;
        if state.read_at.is_none_or(due) {
            state.read_at = Some(Instant::now());
            state.core.read(&self.engine.status(), now_s);
        }
        let waited = state.core.reading().new;
        for ticket in state.core.decide(now_s) {
            if let Some(waiting) = state.waiting.remove(&ticket) {
                // Fails if the turn that waited is gone; dropping its place gives the capacity back.
                let _ = waiting.send(());
            }
        }
        if state.core.reading().new < waited {
            self.begun.notify_one();
        }
    }

    fn now_s(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }

    /// No invariant spans a panic while the lock is held, so a poisoned lock is usable.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn wait(&mut self, ticket: Ticket) -> oneshot::Receiver<()> {
        let (sender, granted) = oneshot::channel();
        self.waiting.insert(ticket, sender);
        granted
    }
}
