//! The engine of a worker follows the weights of the owner.
//!
//! New weights are loaded between two tokens. A version that cannot be fetched or verified leaves the one
//! before in use: tickets that ask for it wait, and go to other workers. Where a service has the weights,
//! only their address comes from the owner.

use crate::client::{DeskClient, DeskError};
use crate::mirror::{MirrorError, WeightsMirror};
use crate::terms::PublishedMark;
use sinew_engines::{FollowedWeights, WeightsFollower};
use sinew_rollout::Hop;
use sinew_types::{Engine, TensorSource, TensorView, WeightsId};
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
    /// Version and lineage, and the hash of their manifest.
    mark: Option<(WeightsId, String)>,
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
        self.mark().map(|(id, _)| id)
    }

    /// The weights that sample now, with the hash of their manifest.
    pub fn mark(&self) -> Option<(WeightsId, String)> {
        self.state().mark.clone()
    }

    /// Versions that were followed, and the seconds of fetching, verifying and loading them.
    pub fn hop(&self) -> Hop {
        self.state().hop
    }

    /// Waits until other weights than `seen` sample, at most for a time.
    pub fn wait_for_other(&self, seen: Option<WeightsId>, at_most: Duration) {
        let same = |state: &mut LoadedState| state.mark.as_ref().map(|(id, _)| *id) == seen;
        // A poisoned lock is usable, and the end of the wait is no error.
        drop(self.0.1.wait_timeout_while(self.state(), at_most, same));
    }

    /// Reason why the newest weights are not in use, if that is so.
    pub fn cause(&self) -> Option<String> {
        self.state().cause.clone()
    }

    /// The engine samples with these weights from now on. `manifest` is the hash of their manifest.
    pub fn set(&self, id: WeightsId, manifest: &str) {
        let mark = Some((id, manifest.to_owned()));
        {
            let mut state = self.state();
            (state.mark, state.cause) = (mark, None);
        }
        self.0.1.notify_all();
    }

    /// As [`Self::set`], of weights of which this worker heard at a moment.
    fn set_since(&self, id: WeightsId, manifest: &str, heard: Instant) {
        self.state().hop.call(1, heard.elapsed().as_secs_f64());
        self.set(id, manifest);
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

/// Weights at a service: their address, and no tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceWeights(pub String);

impl TensorSource for ServiceWeights {
    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn tensor(&self, _: &str) -> Option<TensorView<'_>> {
        None
    }

    fn address(&self) -> Option<&str> {
        Some(&self.0)
    }
}

/// Waits for the announcement of weights until the patience ends or `stop` is true; `None` then.
///
/// # Errors
/// If the owner refuses.
pub fn first_mark(
    owner: &DeskClient,
    patience: Duration,
    stop: &dyn Fn() -> bool,
) -> Result<Option<PublishedMark>, DeskError> {
    let end = Instant::now() + patience;
    while !stop() && Instant::now() < end {
        match owner.weights("", WAIT) {
            Ok(Some(mark)) => return Ok(Some(mark)),
            Ok(None) => {}
            Err(error) if error.may_pass() => std::thread::sleep(PAUSE),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

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
            Ok(Some((Some(first), mark, _))) => return Ok(Some((first, mark))),
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

/// Weights that an owner named, their mark, and the time at which it named them. The weights are missing if
/// the follower gave them out before.
type Fetched = (Option<FollowedWeights>, PublishedMark, Instant);

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
    Ok(Some((follower.look()?, mark, heard)))
}

/// Origin of the weights that an owner announces.
#[derive(Debug)]
pub enum WeightsOrigin {
    /// The owner's folder.
    Folder {
        /// Folder of this host with its weights.
        mirror: WeightsMirror,
        /// Reads the folder, and has given the first weights.
        follower: WeightsFollower,
    },
    /// A service, at the address that the owner names.
    Service,
}

/// New weights.
struct NewWeights {
    /// None if they were given out before.
    weights: Option<(WeightsId, Arc<dyn TensorSource>)>,
    mark: PublishedMark,
    /// Time at which the owner named them.
    heard: Instant,
}

impl WeightsOrigin {
    /// Weights that are others than `seen`, if there are some within the wait.
    fn fetched(
        &mut self,
        owner: &DeskClient,
        seen: &str,
    ) -> Result<Option<NewWeights>, MirrorError> {
        match self {
            Self::Folder { mirror, follower } => {
                let found = fetched(owner, mirror, follower, seen)?;
                Ok(found.map(|(weights, mark, heard)| NewWeights {
                    weights: weights.map(|weights| {
                        let id = weights.id();
                        (id, Arc::new(weights) as Arc<dyn TensorSource>)
                    }),
                    mark,
                    heard,
                }))
            }
            Self::Service => {
                let mark = owner.weights(seen, WAIT)?.filter(|m| m.manifest != seen);
                let Some(mark) = mark else { return Ok(None) };
                Ok(Some(NewWeights {
                    weights: Some(at_service(&mark)?),
                    mark,
                    heard: Instant::now(),
                }))
            }
        }
    }

    /// Weights that were given out are given out once more.
    fn again(&mut self) {
        if let Self::Folder { mirror, follower } = self {
            *follower = mirror.follower();
        }
    }
}

/// The weights of a mark that names an address at a service.
///
/// # Errors
/// If it names none.
pub fn at_service(mark: &PublishedMark) -> Result<(WeightsId, Arc<dyn TensorSource>), MirrorError> {
    let id = mark.id.parse::<WeightsId>()?;
    let address = mark.address.clone().ok_or_else(|| MirrorError::Manifest {
        id: mark.id.clone(),
        why: "the owner names no address of them at a service".to_owned(),
    })?;
    Ok((id, Arc::new(ServiceWeights(address))))
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
    /// Origin of its weights.
    pub origin: WeightsOrigin,
    /// Mark of the first weights, which the engine has.
    pub first: PublishedMark,
    /// Engine that gets the weights.
    pub engine: Arc<dyn Engine>,
    /// Weights of the engine.
    pub loaded: Loaded,
}

sinew_types::debug_fields!(FollowParts, owner, loaded);

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
        let found = parts.origin.fetched(&parts.owner, &seen);
        let why = match found {
            Ok(None) => continue,
            Ok(Some(NewWeights {
                weights: None,
                mark,
                ..
            })) => {
                // They were loaded under an earlier mark: another worker of the host was faster.
                let loaded = parts.loaded.get();
                let named = mark.id.parse::<WeightsId>();
                if let Some(id) = loaded.filter(|id| named.is_ok_and(|named| named == *id)) {
                    parts.loaded.set(id, &mark.manifest);
                }
                seen = mark.manifest;
                continue;
            }
            Ok(Some(NewWeights {
                weights: Some((id, weights)),
                mark,
                heard,
            })) => match parts.engine.load_weights(id.version, weights) {
                Ok(()) => {
                    parts.loaded.set_since(id, &mark.manifest, heard);
                    (seen, last) = (mark.manifest, None);
                    continue;
                }
                Err(e) => {
                    parts.origin.again();
                    e.to_string()
                }
            },
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

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(address: Option<&str>) -> PublishedMark {
        PublishedMark {
            id: "v00000003-0000000a".into(),
            manifest: "aa".into(),
            address: address.map(str::to_owned),
        }
    }

    #[test]
    fn weights_at_a_service_need_their_address() {
        let (id, weights) = at_service(&mark(Some("tinker://run/weights/3"))).unwrap();
        assert_eq!(id.version.0, 3);
        assert_eq!(weights.address(), Some("tinker://run/weights/3"));
        assert!(weights.names().is_empty());
        let missing = at_service(&mark(None)).err().unwrap().to_string();
        assert!(missing.contains("v00000003-0000000a"), "{missing}");
        let unnamed = PublishedMark {
            id: "3".into(),
            ..mark(Some("tinker://x"))
        };
        assert!(at_service(&unnamed).is_err());
    }

    #[test]
    fn loaded_weights_have_a_manifest_and_end_an_earlier_cause() {
        let loaded = Loaded::default();
        assert_eq!((loaded.get(), loaded.mark()), (None, None));
        loaded.keep("no memory".into());
        let id = "v3-0000000a".parse::<WeightsId>().unwrap();
        loaded.set(id, "aa");
        assert_eq!(loaded.mark(), Some((id, "aa".to_owned())));
        assert_eq!((loaded.get(), loaded.cause()), (Some(id), None));
    }
}
