//! The engine of a worker follows the weights of the owner.
//!
//! New weights are loaded between two tokens. A version that cannot be fetched or verified leaves the one
//! before in use: tickets that ask for it wait, and go to other workers.

use crate::client::DeskClient;
use crate::mirror::{MirrorError, WeightsMirror};
use crate::terms::PublishedMark;
use sinew_engines::{FollowedWeights, WeightsFollower};
use sinew_rollout::Hop;
use sinew_types::{Engine, WeightsId};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait for new weights in one call.
const WAIT: Duration = Duration::from_secs(1);
/// Pause after weights that could not be had.
const PAUSE: Duration = Duration::from_millis(200);

/// Weights of an engine, and the reason why it has no newer ones.
#[derive(Debug, Default)]
struct LoadedState {
    id: Option<WeightsId>,
    cause: Option<String>,
    /// Versions that were followed, with the seconds from the owner's word to their first token.
    hop: Hop,
}

/// The weights with which a worker's engine samples. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Loaded(Arc<(Mutex<LoadedState>, Condvar)>);

impl Loaded {
    /// The weights that sample now.
    pub fn get(&self) -> Option<WeightsId> {
        self.state().id
    }

    /// Versions that were followed, and the seconds of fetching, verifying and loading them.
    pub fn hop(&self) -> Hop {
        self.state().hop
    }

    /// Waits until other weights than `seen` sample, at most for a time.
    pub fn wait_for_other(&self, seen: Option<WeightsId>, at_most: Duration) {
        let state = self.state();
        let same = |state: &mut LoadedState| state.id == seen;
        // A poisoned lock is usable, and the end of the wait is no error.
        drop(self.0.1.wait_timeout_while(state, at_most, same));
    }

    /// Reason why the newest weights are not in use, if that is so.
    pub fn cause(&self) -> Option<String> {
        self.state().cause.clone()
    }

    /// The engine samples with these weights from now on.
    pub fn set(&self, id: WeightsId) {
        {
            let mut state = self.state();
            (state.id, state.cause) = (Some(id), None);
        }
        self.0.1.notify_all();
    }

    /// As [`Self::set`], of weights of which this worker heard at a moment.
    fn set_since(&self, id: WeightsId, heard: Instant) {
        self.state().hop.call(1, heard.elapsed().as_secs_f64());
        self.set(id);
    }

    fn keep(&self, why: String) {
        tracing::warn!(why, "new weights are not in use");
        self.state().cause = Some(why);
    }

    /// Every change is one assignment, so a poisoned lock is usable.
    fn state(&self) -> MutexGuard<'_, LoadedState> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Weights that a worker begins with, and their mark.
pub type FirstWeights = (FollowedWeights, PublishedMark);

/// Waits for published weights until the patience ends or `stop` is true; `None` then.
///
/// # Errors
/// If the owner refuses, or a version cannot be fetched when the patience ends.
pub fn first_weights(
    owner: &DeskClient,
    mirror: &WeightsMirror,
    follower: &mut WeightsFollower,
    patience: Duration,
    stop: &dyn Fn() -> bool,
) -> Result<Option<FirstWeights>, MirrorError> {
    let end = Instant::now() + patience;
    let mut last = None;
    while !stop() && Instant::now() < end {
        match fetched(owner, mirror, follower, "") {
            Ok(Some(Fetched {
                weights: Some(first),
                mark,
                ..
            })) => return Ok(Some((first, mark))),
            Ok(_) => {}
            Err(MirrorError::Desk(error)) if !(error.may_pass() || error.is_gone()) => {
                return Err(error.into());
            }
            Err(error) => {
                last = Some(error);
                std::thread::sleep(PAUSE);
            }
        }
    }
    last.filter(|_| !stop()).map_or(Ok(None), Err)
}

/// Weights that an owner named.
struct Fetched {
    /// Missing if the follower gave them out before.
    weights: Option<FollowedWeights>,
    mark: PublishedMark,
    /// Time at which the owner named them.
    heard: Instant,
}

/// Weights that are others than `seen`, if there are some within the wait.
fn fetched(
    owner: &DeskClient,
    mirror: &WeightsMirror,
    follower: &mut WeightsFollower,
    seen: &str,
) -> Result<Option<Fetched>, MirrorError> {
    let mark = owner.weights(seen, WAIT)?;
    let Some(mark) = mark.filter(|mark| mark.manifest != seen) else {
        return Ok(None);
    };
    let heard = Instant::now();
    mirror.sync(owner, &mark)?;
    Ok(Some(Fetched {
        weights: follower.look()?,
        mark,
        heard,
    }))
}

/// A thread that loads new weights into an engine. Dropping it ends it within a second or two.
#[derive(Debug)]
pub struct Following {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Parts of a thread that follows weights.
pub struct FollowParts {
    /// The owner.
    pub owner: Arc<DeskClient>,
    /// Folder of this host with its weights.
    pub mirror: WeightsMirror,
    /// Reads the folder, and has given the first weights.
    pub follower: WeightsFollower,
    /// Mark of the first weights, which the engine has.
    pub first: PublishedMark,
    /// Engine that gets the weights.
    pub engine: Arc<dyn Engine>,
    /// Weights of the engine.
    pub loaded: Loaded,
}

impl std::fmt::Debug for FollowParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FollowParts")
            .field("owner", &self.owner)
            .field("loaded", &self.loaded)
            .finish_non_exhaustive()
    }
}

impl Following {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system gives none.
    pub fn start(parts: FollowParts) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("weights".into());
        let thread = thread.spawn(move || follow(parts, &theirs))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of it was reported where it happened.
            let _ = thread.join();
        }
    }
}

/// Loads new weights until it is stopped.
fn follow(mut parts: FollowParts, stop: &AtomicBool) {
    let mut seen = parts.first.manifest.clone();
    let mut last = None;
    while !stop.load(Ordering::Relaxed) {
        let found = fetched(&parts.owner, &parts.mirror, &mut parts.follower, &seen);
        let why = match found {
            Ok(None) => continue,
            Ok(Some(Fetched {
                weights: None,
                mark,
                ..
            })) => {
                seen = mark.manifest;
                continue;
            }
            Ok(Some(Fetched {
                weights: Some(weights),
                mark,
                heard,
            })) => {
                let id = weights.id();
                match parts.engine.load_weights(id.version, Arc::new(weights)) {
                    Ok(()) => {
                        parts.loaded.set_since(id, heard);
                        (seen, last) = (mark.manifest, None);
                        continue;
                    }
                    Err(e) => {
                        // It gives them out once more.
                        parts.follower = parts.mirror.follower();
                        e.to_string()
                    }
                }
            }
            // The owner may be away, or has published a newer version meanwhile.
            Err(MirrorError::Desk(e)) if e.may_pass() || e.is_gone() => {
                std::thread::sleep(PAUSE);
                continue;
            }
            Err(e) => e.to_string(),
        };
        if last.as_ref() != Some(&why) {
            parts.loaded.keep(why.clone());
        }
        last = Some(why);
        std::thread::sleep(PAUSE);
    }
}
