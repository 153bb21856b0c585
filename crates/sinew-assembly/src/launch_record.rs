//! The record of a run whose owner an engine starts: by it a command finds the jobs of the run while no owner
//! answers, such as one that still waits for a place.

use crate::environments::ENVIRONMENTS;
use crate::failure::Failure;
use serde::{Deserialize, Serialize};
use sinew_recipe::RunPlan;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Appended to the name of a run's folder: the record is next to it, as the folder may be in a cluster only.
const SUFFIX: &str = ".launch.json";

/// Facts by which the engine knows the run.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LaunchRecord {
    /// Name of the run for the engine.
    run: String,
    /// Folder of the run as its owner sees it.
    folder: PathBuf,
    /// The recipe, as TOML.
    recipe: String,
}

/// The record of a run with this folder.
fn record_of(dir: &Path) -> PathBuf {
    let mut name = dir.file_name().unwrap_or_default().to_owned();
    name.push(SUFFIX);
    dir.with_file_name(name)
}

/// Keeps what finds the jobs of a run again. `dir` is its folder on this host, `folder` that of its owner.
pub(crate) fn keep_record(
    plan: &RunPlan,
    dir: &Path,
    folder: &Path,
    run: &str,
) -> Result<(), Failure> {
    let record = LaunchRecord {
        run: run.to_owned(),
        folder: folder.to_owned(),
        recipe: toml::to_string(plan).map_err(Failure::system)?,
    };
    let path = record_of(dir);
    let failed = |e: std::io::Error| Failure::input(format!("{}: {e}", path.display()));
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    let text = serde_json::to_vec(&record).map_err(Failure::system)?;
    sinew_runs::write_atomic(&path, &text).map_err(failed)
}

/// A run that an engine knows.
pub(crate) struct LaunchedRun {
    /// Its name for the engine.
    pub(crate) run: String,
    /// Its folder as its owner sees it.
    pub(crate) folder: PathBuf,
    /// Its recipe.
    pub(crate) plan: RunPlan,
}

/// The run with this folder on this host, if an engine was asked to start its owner.
pub(crate) fn read_record(dir: &Path) -> Result<Option<LaunchedRun>, Failure> {
    let path = record_of(dir);
    let wrong = |e: &dyn std::fmt::Display| Failure::input(format!("{}: {e}", path.display()));
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(wrong(&e)),
    };
    let record: LaunchRecord = serde_json::from_str(&text).map_err(|e| wrong(&e))?;
    let plan = RunPlan::parse(&path, &record.recipe, ENVIRONMENTS)?;
    Ok(Some(LaunchedRun {
        run: record.run,
        folder: record.folder,
        plan,
    }))
}
