//! The folder of a run as it was before a step, as a copy: for a session that does steps again and leaves the
//! run unchanged.

use crate::run_dir::STORE_ID;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

/// Folder of checkpoints in a run.
const CHECKPOINTS: &str = "checkpoints";
/// Beginning of the name of a checkpoint; the number of its step follows.
const STEP: &str = "step-";
/// The file that names the newest checkpoint.
const LATEST: &str = "LATEST";
/// Files that a resumed run does not need: the lock, and output for users; and the name of a store in a
/// database, which only the run itself may use.
const LEFT_OUT: [&str; 8] = [
    "lock",
    STORE_ID,
    "report.html",
    "end.json",
    "live.json",
    "timeline.jsonl",
    "phases.jsonl",
    "phases.1.jsonl",
];

/// The step in the name of a checkpoint, and how often it was saved before.
fn step_of(name: &OsStr) -> Option<(u64, u64)> {
    let number = name.to_str()?.strip_prefix(STEP)?;
    let (step, again) = number.split_once('.').unwrap_or((number, "0"));
    Some((step.parse().ok()?, again.parse().ok()?))
}

/// The newest checkpoint of a run among those whose step fits.
fn newest(run_dir: &Path, fits: impl Fn(u64) -> bool) -> io::Result<Option<(u64, PathBuf)>> {
    let entries = match std::fs::read_dir(run_dir.join(CHECKPOINTS)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries?,
    };
    let mut found = None;
    for entry in entries {
        let entry = entry?;
        let Some(step) = step_of(&entry.file_name()).filter(|(step, _)| fits(*step)) else {
            continue;
        };
        if found.as_ref().is_none_or(|(other, _)| step > *other) {
            found = Some((step, entry.path()));
        }
    }
    Ok(found.map(|((step, _), path)| (step, path)))
}

/// The checkpoint of a step, if the run keeps it.
///
/// # Errors
/// An error of the file system.
pub fn checkpoint_of(run_dir: &Path, step: u64) -> io::Result<Option<PathBuf>> {
    Ok(newest(run_dir, |s| s == step)?.map(|(_, path)| path))
}

/// Copies a run with the newest checkpoint before `step`, whose number it gives; 0: there is none, and the
/// copy begins with the first weights. The run must not be in use.
///
/// # Errors
/// An error of the file system.
pub fn copy_before(run_dir: &Path, to: &Path, step: u64) -> io::Result<u64> {
    for entry in std::fs::read_dir(run_dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let left_out = name == CHECKPOINTS || LEFT_OUT.iter().any(|n| name == *n);
        if !left_out {
            copy(&entry.path(), &to.join(&name))?;
        }
    }
    let Some((from, checkpoint)) = newest(run_dir, |s| s < step)? else {
        return Ok(0);
    };
    let name = checkpoint.file_name().unwrap_or_default();
    let folder = to.join(CHECKPOINTS);
    copy(&checkpoint, &folder.join(name))?;
    let latest = format!("{}\n", name.to_string_lossy());
    std::fs::write(folder.join(LATEST), latest)?;
    Ok(from)
}

/// Copies a file, or a folder with all that is in it. Links and sockets are left out: a run has none.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let kind = std::fs::symlink_metadata(from)?.file_type();
    if kind.is_dir() {
        std::fs::create_dir_all(to)?;
        for entry in std::fs::read_dir(from)? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
    } else if kind.is_file() {
        std::fs::copy(from, to)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copy_ends_before_the_step() {
        let (run, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = |path: &str| {
            let path = run.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        };
        file("recipe.toml");
        file("lock");
        file("store.id");
        file("store/segments/0");
        for step in ["00000004", "00000004.1", "00000010", "00000020"] {
            file(&format!("checkpoints/step-{step}/model"));
        }
        file("checkpoints/.tmp-step-00000005/model");
        assert_eq!(copy_before(run.path(), to.path(), 10).unwrap(), 4);
        let has = |path: &str| to.path().join(path).exists();
        assert!(has("recipe.toml") && has("store/segments/0"));
        assert!(
            has("checkpoints/step-00000004.1/model"),
            "the newest of step 4"
        );
        assert!(!has("lock") && !has("store.id") && !has("checkpoints/step-00000010"));
        let latest = std::fs::read_to_string(to.path().join("checkpoints/LATEST")).unwrap();
        assert_eq!(latest, "step-00000004.1\n");
        let kept = checkpoint_of(run.path(), 20).unwrap();
        assert!(kept.unwrap().ends_with("step-00000020"));
        assert_eq!(checkpoint_of(run.path(), 5).unwrap(), None);
    }

    #[test]
    fn without_an_older_checkpoint_it_begins_at_the_start() {
        let (run, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(run.path().join("recipe.toml"), "x").unwrap();
        assert_eq!(copy_before(run.path(), to.path(), 1).unwrap(), 0);
        assert!(to.path().join("recipe.toml").exists());
    }
}
