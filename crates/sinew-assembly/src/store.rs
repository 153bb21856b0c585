//! The store of a run: on disk, in memory or in a database.
//!
//! This file reports once the episodes that a store on disk lost in a crash, when it is opened for writing.
//! The loop runs again those that are still needed.

use crate::database;
use crate::failure::Failure;
use sinew_orchestrator::Goal;
use sinew_pipeline::RunStore;
use sinew_recipe::{StoreKind, StorePlan};
use sinew_runs::RunDir;
use sinew_store::{DiskStore, MemoryStore, Recovery, StoreError, StoreOptions, TraceStore};
use sinew_types::Fence;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Capacity of a store in memory; what does not fit is refused.
const MEMORY_STORE_BYTES: u64 = 4 << 30;

/// Time in which a store that another process holds must become free.
const LOCK_WAIT: Duration = Duration::from_secs(10);
/// Interval between two attempts.
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// Opens the store of a run, and lists the trained episodes whose traces were lost. This process does not
/// become the owner of the run.
///
/// # Errors
/// If another process holds it, or a part of it cannot be read and the loss was not accepted.
pub(crate) fn open_store(plan: &StorePlan, dir: &RunDir) -> Result<RunStore, Failure> {
    let of = |traces: Arc<dyn TraceStore>, forgets: bool| RunStore {
        traces,
        fence: Fence::default(),
        torn: BTreeSet::new(),
        forgets,
        draws_per_step: 1,
    };
    match plan.kind {
        StoreKind::Memory => {
            return Ok(of(Arc::new(MemoryStore::new(MEMORY_STORE_BYTES)), true));
        }
        StoreKind::Postgres => return Ok(of(database::store_of(plan, dir.path())?, false)),
        StoreKind::Disk => {}
    }
    let store = free_store(&dir.store(), dir.accepts_loss())
        .map_err(|e| Failure::system(format!("store: {e}")))?;
    let recovery = store.recovery();
    let gone = recovery.torn_trained.iter().chain(&recovery.lost_trained);
    let torn = gone.cloned().collect();
    Ok(RunStore {
        torn,
        ..of(Arc::new(store), false)
    })
}

/// Opens the store of a run like [`open_store`]. If this process trains the run, it becomes its owner: from
/// then on, no earlier owner commits, publishes or saves.
///
/// # Errors
/// Same as [`open_store`].
pub(crate) fn open_for(goal: Goal, plan: &StorePlan, dir: &RunDir) -> Result<RunStore, Failure> {
    let mut store = open_store(plan, dir)?;
    if goal == Goal::Train {
        let fence = sinew_store::own(&store.traces, dir.path());
        store.fence = fence.map_err(|e| Failure::system(format!("store: {e}")))?;
        tracing::debug!(fence = store.fence.number(), "this process owns the run");
    }
    Ok(store)
}

/// Opens the store of a run, which `sinew reward import` may hold for a moment.
fn free_store(folder: &Path, accept_loss: bool) -> Result<DiskStore, StoreError> {
    let began = Instant::now();
    let mut said = false;
    loop {
        match disk_store(folder, accept_loss) {
            Err(StoreError::Locked { .. }) if began.elapsed() < LOCK_WAIT => {
                if !said {
                    sinew_view::say(&format!(
                        "store: another process holds {}: waiting for it",
                        folder.display()
                    ));
                }
                said = true;
                std::thread::sleep(LOCK_PAUSE);
            }
            opened => return opened,
        }
    }
}

/// Opens a store for writing, and logs each damage that it repaired or went around.
///
/// # Errors
/// If another process holds it, or a part of it cannot be read and `accept_loss` is not set.
pub fn disk_store(folder: &Path, accept_loss: bool) -> Result<DiskStore, StoreError> {
    let options = StoreOptions {
        accept_loss,
        ..StoreOptions::default()
    };
    let store = DiskStore::open(folder, options)?;
    let Recovery {
        torn,
        torn_trained,
        damaged,
        lost,
        lost_trained,
        index_remade,
        ..
    } = store.recovery();
    if let Some(reason) = index_remade {
        tracing::error!(
            store = %folder.display(), reason,
            "the index was made anew from the segments; a damaged one is kept as index.sqlite.damaged"
        );
    }
    for stretch in damaged {
        tracing::error!(
            segment = %stretch.path.display(), from = stretch.from, to = stretch.to,
            "cannot be read: left as it is, what was stored there is given up"
        );
    }
    if let Some(first) = lost.first().or(lost_trained.first()) {
        tracing::error!(
            store = %folder.display(), lost = lost.len(), lost_trained = lost_trained.len(), first = %first,
            "known episodes cannot be read: those that are still needed are run again, trained ones are not"
        );
    }
    if let Some(first) = torn.first().or(torn_trained.first()) {
        tracing::error!(
            store = %folder.display(), lost = torn.len(), lost_trained = torn_trained.len(), first = %first,
            "the newest segment ended in a torn write: what of the lost episodes is still needed is run again, trained ones are not"
        );
    }
    Ok(store)
}
