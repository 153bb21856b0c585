//! `sinew gc`: deletes episodes that were trained and that no resume will ask for.
//!
//! A resume goes back to a checkpoint and trains the steps after it again, from the store. So the episodes
//! of steps before the oldest kept checkpoint are needed by people alone.

use crate::output;
use clap::Args;
use serde_json::json;
use sinew_store::{GcPolicy, StoreError, TraceStore};
use sinew_wire::Failure;
use std::path::{Path, PathBuf};

/// Arguments of `sinew gc`.
#[derive(Debug, Args)]
pub(crate) struct GcArgs {
    /// Folder of the run
    run_dir: PathBuf,
    /// Go on without stored episodes that cannot be read any more
    #[arg(long)]
    accept_loss: bool,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Removes trained episodes of the steps that every kept checkpoint holds. Held-out episodes, and
/// those that nothing trained on, stay: a resumed run compares with the former.
///
/// # Errors
/// If a process holds the store, or the run has no checkpoint, as those that do not train.
pub(crate) fn run(args: &GcArgs) -> Result<(), Failure> {
    let recipe = sinew_project::recipe(&args.run_dir)?;
    let does_not_train = [("-collect", "collection"), ("-eval", "measurement")];
    let kind = does_not_train
        .iter()
        .find(|(end, _)| recipe.name.ends_with(end));
    let checkpoints = args.run_dir.join("checkpoints");
    if let (Some((_, kind)), false) = (kind, checkpoints.exists()) {
        return Err(Failure::input(format!(
            "{run} is a {kind}: nothing was trained on its episodes, which are what it is for, so none can go\n  hint: \
             `sinew episodes {run} --export FILE` keeps some of them elsewhere; delete the folder to be rid of all",
            run = args.run_dir.display()
        )));
    }
    let store = sinew_project::store_path(&args.run_dir);
    if !store.exists() {
        return Err(Failure::input(format!(
            "{} keeps no episodes: its recipe has store.type = \"memory\"",
            args.run_dir.display()
        )));
    }
    let step = oldest_step(&checkpoints)?;
    let store = sinew_wire::disk_store(&store, args.accept_loss).map_err(|e| match e {
        e @ StoreError::Locked { .. } => Failure::input(e),
        e => Failure::system(e),
    })?;
    let removed = store
        .gc(GcPolicy {
            before_update: step + 1,
            keep_untrained: true,
        })
        .map_err(Failure::system)?;
    if args.json {
        output::print_json(&json!({
            "through_step": step, "episodes": removed.episodes, "bytes": removed.bytes
        }));
    } else {
        output::print(&format!(
            "{} trained episodes of steps 1 to {step} removed, {:.1} MiB freed\n",
            removed.episodes,
            removed.bytes as f64 / f64::from(1 << 20)
        ));
    }
    Ok(())
}

/// The step of the run that the oldest checkpoint holds: no resume goes back further.
///
/// # Errors
/// If there is no checkpoint: every episode may still be needed.
fn oldest_step(checkpoints: &Path) -> Result<u64, Failure> {
    let named = |e: &dyn std::fmt::Display| {
        Failure::input(format!(
            "{}: {e}; every episode is still needed to resume",
            checkpoints.display()
        ))
    };
    let mut oldest: Option<u64> = None;
    for entry in checkpoints.read_dir().map_err(|e| named(&e))? {
        let state = entry.map_err(|e| named(&e))?.path().join("state.json");
        if !state.is_file() {
            continue;
        }
        let text = std::fs::read_to_string(&state).map_err(|e| named(&e))?;
        let saved: serde_json::Value = serde_json::from_str(&text).map_err(|e| named(&e))?;
        let step = saved["commit"]["cursor"]["step"].as_u64();
        let step = step.ok_or_else(|| named(&format!("{} has no step", state.display())))?;
        oldest = Some(oldest.map_or(step, |other| other.min(step)));
    }
    oldest.ok_or_else(|| named(&"there is no checkpoint"))
}
