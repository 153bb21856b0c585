//! The folder of a run: one owner at a time, the recipe that ran, everything it produced.

use crate::failure::Failure;
use crate::recipe::Recipe;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Why a run folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunDirError {
    #[error("{}: {source}\n  hint: --run-dir needs a folder that can be written", path.display())]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{} holds a run already\n  hint: go on with the same command and --resume, or name another --run-dir", path.display())]
    Exists { path: PathBuf },
    #[error("{} holds no run to resume\n  hint: leave out --resume to start one", path.display())]
    Nothing { path: PathBuf },
    #[error("{} is in use by another sinew process", path.display())]
    Locked { path: PathBuf },
    #[error("{}: the recipe differs from the one that this run began with in {keys}\n  hint: resume with {}/recipe.toml, or start a new run in another --run-dir", path.display(), path.display())]
    Recipe { path: PathBuf, keys: String },
}

/// An opened run folder. The lock is held until it is dropped, or the process dies.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    _lock: File,
}

impl RunDir {
    /// Creates the folder for `recipe`, or opens it again if `resume`.
    pub(crate) fn open(path: &Path, recipe: &Recipe, resume: bool) -> Result<Self, RunDirError> {
        let io = |source| RunDirError::Io {
            path: path.into(),
            source,
        };
        if resume && !path.join("recipe.toml").exists() {
            return Err(RunDirError::Nothing { path: path.into() });
        }
        std::fs::create_dir_all(path).map_err(io)?;
        let lock = File::create(path.join("lock")).map_err(io)?;
        if let Err(e) = lock.try_lock() {
            return Err(match e {
                std::fs::TryLockError::WouldBlock => RunDirError::Locked { path: path.into() },
                std::fs::TryLockError::Error(source) => io(source),
            });
        }
        let run = Self {
            path: path.into(),
            _lock: lock,
        };
        let saved = run.recipe_path();
        match (saved.exists(), resume) {
            (true, false) => Err(RunDirError::Exists { path: path.into() }),
            (false, _) => {
                let text = toml::to_string(recipe).map_err(|e| io(std::io::Error::other(e)))?;
                write_atomic(&saved, text.as_bytes()).map_err(io)?;
                Ok(run)
            }
            (true, true) => {
                let text = std::fs::read_to_string(&saved).map_err(io)?;
                run.check_same(&text, recipe)?;
                Ok(run)
            }
        }
    }

    /// A resumed run may only differ in what bounds it: steps, wall time.
    fn check_same(&self, saved: &str, recipe: &Recipe) -> Result<(), RunDirError> {
        let differ = |keys: String| RunDirError::Recipe {
            path: self.path.clone(),
            keys,
        };
        let old: Recipe = toml::from_str(saved).map_err(|e| differ(e.to_string()))?;
        let mut same = old.clone();
        same.train.steps = recipe.train.steps;
        same.train.max_wall_s = recipe.train.max_wall_s;
        if same == *recipe {
            return Ok(());
        }
        let table = |r: &Recipe| toml::Table::try_from(r).unwrap_or_default();
        let (old, new) = (table(&same), table(recipe));
        let keys: Vec<&str> = new
            .keys()
            .chain(old.keys())
            .filter(|k| old.get(*k) != new.get(*k))
            .map(String::as_str)
            .collect();
        let mut keys: Vec<&str> = keys;
        keys.sort_unstable();
        keys.dedup();
        Err(differ(keys.join(", ")))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn recipe_path(&self) -> PathBuf {
        self.path.join("recipe.toml")
    }

    pub(crate) fn evals_path(&self) -> PathBuf {
        self.path.join("evals.jsonl")
    }

    pub(crate) fn metrics_path(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    pub(crate) fn report_path(&self) -> PathBuf {
        self.path.join("report.html")
    }

    pub(crate) fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    pub(crate) fn store(&self) -> PathBuf {
        store_path(&self.path)
    }
}

/// Whether a process holds the run.
pub(crate) fn in_use(run_dir: &Path) -> bool {
    let lock = File::open(run_dir.join("lock"));
    let tried = lock.map(|lock| lock.try_lock());
    matches!(tried, Ok(Err(std::fs::TryLockError::WouldBlock)))
}

/// The recipe that a run folder began with.
pub(crate) fn recipe(run_dir: &Path) -> Result<Recipe, Failure> {
    let path = run_dir.join("recipe.toml");
    if !path.is_file() {
        return Err(Failure::input(format!(
            "{} holds no run\n  hint: give the folder of a run, as in `sinew train --run-dir`",
            run_dir.display()
        )));
    }
    Recipe::load(&path).map_err(Failure::input)
}

/// Where a run folder keeps its episodes.
pub(crate) fn store_path(run_dir: &Path) -> PathBuf {
    run_dir.join("store")
}

/// Writes a file so that a reader sees the old or the new content, never a part.
pub(crate) fn write_atomic(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = File::create(&temporary)?;
    std::io::Write::write_all(&mut file, content)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(extra: &str) -> Recipe {
        let text = format!(
            "name = \"t\"\nmodel = {{ type = \"pretrained\", source = \"x\" }}\nenv = {{ type = \"tool_math\" }}\nalgorithm = {{ type = \"grpo\" }}\n{extra}"
        );
        Recipe::parse(Path::new("r.toml"), &text).unwrap()
    }

    fn open(dir: &Path, extra: &str, resume: bool) -> Result<RunDir, RunDirError> {
        RunDir::open(dir, &recipe(extra), resume)
    }

    #[test]
    fn a_run_is_begun_once_and_resumed_with_the_same_recipe() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        assert!(matches!(
            open(&path, "", true),
            Err(RunDirError::Nothing { .. })
        ));
        assert!(
            !path.exists(),
            "nothing is made for a run that is not there"
        );
        let first = open(&path, "", false).unwrap();
        assert!(matches!(
            open(&path, "", true),
            Err(RunDirError::Locked { .. })
        ));
        drop(first);
        assert!(matches!(
            open(&path, "", false),
            Err(RunDirError::Exists { .. })
        ));
        drop(open(&path, "[train]\nsteps = 99\n", true).unwrap());
        let e = open(&path, "[rollout]\ngroup_size = 2\n", true)
            .unwrap_err()
            .to_string();
        assert!(e.contains("rollout"), "{e}");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let e = open(Path::new("/proc/sinew"), "", false)
            .unwrap_err()
            .to_string();
        assert!(e.contains("/proc/sinew") && e.contains("--run-dir"), "{e}");
    }
}
