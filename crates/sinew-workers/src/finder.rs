//! Engines of the run's registry and the weights that they may sample with, looked up again and again.

use crate::client::DeskClient;
use sinew_engines::{EngineAddress, EngineSeats, KnownWeights};
use sinew_types::WeightsId;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait for new weights in one call.
const WAIT: Duration = Duration::from_secs(1);
/// Interval between two looks at the registry.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Interval of warnings while no engine is there.
const REMIND_EVERY: Duration = Duration::from_secs(30);
/// Pause after an owner that gave no answer.
const PAUSE: Duration = Duration::from_millis(200);

/// The registry gave no answer, with the reason in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the registry of engines does not answer: {0}")]
pub struct DirectoryError(pub String);

/// The registry, as far as engines are concerned. Calls may block for seconds.
pub trait EngineDirectory: Send {
    /// The engines that may be asked now.
    ///
    /// # Errors
    /// If the registry does not answer.
    fn engines(&mut self) -> Result<Vec<EngineAddress>, DirectoryError>;
}

/// Parts of a finder.
pub struct FinderParts {
    /// The owner, which announces weights.
    pub owner: Arc<DeskClient>,
    /// The registry.
    pub directory: Box<dyn EngineDirectory>,
    /// Seats for engines.
    pub seats: EngineSeats,
    /// Weights that the owner announced.
    pub known: KnownWeights,
    /// Hash of the manifest of those that are known already.
    pub seen: String,
}

sinew_types::debug_fields!(FinderParts, owner, seats);

/// A thread that keeps seats and known weights new. Dropping it ends it within a second or two.
#[derive(Debug)]
pub struct EngineFinder {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EngineFinder {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system gives none.
    pub fn start(parts: FinderParts) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("engines".into());
        let thread = thread.spawn(move || find(parts, &theirs))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for EngineFinder {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of it was reported where it happened.
            let _ = thread.join();
        }
    }
}

/// Looks until it is stopped. While the owner gives no answer, engines and weights stay as they are.
fn find(mut parts: FinderParts, stop: &AtomicBool) {
    let (mut looked, mut silent) = (None::<Instant>, false);
    let mut empty = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        if looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
            looked = Some(Instant::now());
            let found = parts.directory.engines();
            if let Err(error) = &found
                && !silent
            {
                tracing::warn!(%error, "engines stay as they are");
            }
            silent = found.is_err();
            for fault in found.iter().flat_map(|engines| parts.seats.seat(engines)) {
                tracing::warn!(%fault, "an engine of the registry has an address that is none");
            }
            if parts.seats.taken() > 0 {
                empty = Instant::now();
            } else if empty.elapsed() >= REMIND_EVERY {
                empty = Instant::now();
                tracing::warn!("the registry has no engine that may be asked: episodes wait");
            }
        }
        match parts.owner.weights(&parts.seen, WAIT) {
            Ok(Some(mark)) if mark.manifest != parts.seen => {
                match mark.id.parse::<WeightsId>() {
                    Ok(id) => parts.known.announce(id, mark.manifest.clone()),
                    Err(error) => {
                        tracing::warn!(%error, "the owner announced weights without a name")
                    }
                }
                parts.seen = mark.manifest;
            }
            Ok(_) => {}
            // A refusal is the affair of the thread that reports.
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}
