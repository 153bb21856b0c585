//! The store of a run: on disk, in memory or in a database. Every command that reads or changes the episodes
//! of a run's folder opens them by [`run_reader`] or [`run_store`], and the recipe of the run says where they
//! are.
//!
//! This file reports once the episodes that a store on disk lost in a crash, when it is opened for writing.
//! The loop runs again those that are still needed.

use crate::database;
use crate::environments::recipe_of;
use crate::failure::Failure;
use sinew_orchestrator::Goal;
use sinew_pipeline::RunStore;
use sinew_recipe::{StoreKind, StorePlan};
use sinew_runs::{RunDir, in_use, store_id_path, store_path};
use sinew_store::{
    DiskStore, ImportReport, MemoryStore, Recovery, StoreError, StoreOptions, StoreReader,
    TraceStore, import_file, import_scores,
};
use sinew_types::Fence;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
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
pub(crate) fn open_for(goal: Goal, plan: &StorePlan, dir: &RunDir) -> Result<RunStore, Failure> {
    let mut store = open_store(plan, dir)?;
    if goal == Goal::Train {
        let fence = sinew_store::own(&store.traces, dir.path());
        store.fence = fence.map_err(|e| Failure::system(format!("store: {e}")))?;
        tracing::debug!(fence = store.fence.number(), "this process owns the run");
    }
    Ok(store)
}

/// The store of a run's folder in a database, if its recipe says so and the run began to use it.
///
/// # Errors
/// If the recipe cannot be read, the database cannot be reached, or it has not the store of this run.
pub(crate) fn database_of(run_dir: &Path) -> Result<Option<Arc<dyn TraceStore>>, Failure> {
    if !store_id_path(run_dir).is_file() {
        return Ok(None);
    }
    let plan = recipe_of(run_dir)?.store;
    match plan.kind {
        StoreKind::Disk | StoreKind::Memory => Ok(None),
        StoreKind::Postgres => database::begun_store_of(&plan, run_dir).map(Some),
    }
}

/// The store that a run's folder has inside.
fn folder_of(run_dir: &Path) -> Result<PathBuf, Failure> {
    let folder = store_path(run_dir);
    if folder.exists() {
        return Ok(folder);
    }
    Err(Failure::input(format!(
        "{} keeps no episodes\n  hint: give the folder of `sinew train --run-dir`; runs with store.type = \
         \"memory\" keep none, and those of a database without a run become a folder by `sinew runs copy \
         postgres://HOST/DATABASE#NAME DIR`",
        run_dir.display()
    )))
}

/// Opens the store of a run's folder for reading. The run may be at work.
///
/// # Errors
/// If the run keeps no episodes, or they cannot be read.
pub fn run_reader(run_dir: &Path) -> Result<StoreReader, Failure> {
    match database_of(run_dir)? {
        Some(store) => Ok(StoreReader::of(store)),
        None => StoreReader::open(&folder_of(run_dir)?).map_err(Failure::system),
    }
}

/// Opens the store of a run's folder for changes. `accept_loss` is for a store on disk.
///
/// # Errors
/// As [`run_reader`], or if another process writes a store on disk.
pub fn run_store(run_dir: &Path, accept_loss: bool) -> Result<Arc<dyn TraceStore>, Failure> {
    if let Some(store) = database_of(run_dir)? {
        return Ok(store);
    }
    match disk_store(&folder_of(run_dir)?, accept_loss) {
        Ok(store) => Ok(Arc::new(store)),
        Err(e @ StoreError::Locked { .. }) => Err(Failure::input(e)),
        Err(e) => Err(Failure::system(e)),
    }
}

/// Adds the scores of a file of JSON lines to the store of a run's folder. The run may be at work: it then
/// takes the scores of a store on disk from the inbox of that store.
///
/// # Errors
/// If the file cannot be read, or the run keeps no episodes.
pub fn import_rewards(
    run_dir: &Path,
    file: &Path,
    source: &str,
    now_us: u64,
) -> Result<ImportReport, Failure> {
    let imported = match database_of(run_dir)? {
        Some(store) => {
            let rows = File::open(file);
            let rows = rows.map_err(|e| Failure::input(format!("{}: {e}", file.display())))?;
            import_scores(&mut BufReader::new(rows), store.as_ref(), source, now_us)
        }
        None => {
            let live = in_use(run_dir);
            import_file(&store_path(run_dir), file, source, now_us, live)
        }
    };
    imported.map_err(|e| match e {
        StoreError::Missing { .. } | StoreError::Io { .. } => Failure::input(e),
        e => Failure::system(format!("store: {e}")),
    })
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
