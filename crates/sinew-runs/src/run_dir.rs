//! The folder of a run: one owner at a time, the recipe that ran, everything it produced.
//!
//! | file | content |
//! |---|---|
//! | `recipe.toml` | the effective recipe; people may edit it |
//! | `began.toml` | the recipe of the last session, for the comparison when the run goes on |
//! | `pinned.json` | weights, rows and functions that the run stands on, for the same comparison |
//! | `lock` | held by the process that trains; freed by the kernel when it dies |
//! | `metrics.jsonl` | a record for each step |
//! | `evals.jsonl` | a record for each held-out measurement |
//! | `checkpoints/` | weights, optimizer and state, the newest few |
//! | `store/` | episodes |
//! | `store.id` | random name of the store in a database that has the episodes instead |
//! | `tokenizer/` | tokenizer and chat template of its model, so that the folder can be read anywhere |
//! | `report.html` | the report |
//! | `end.json` | how the last process ended |

use sinew_env::Registry;
use sinew_orchestrator::Process;
use sinew_recipe::{CHAIN_FILE, Change, RecipeError, RunPlan, changes};
use sinew_view::{RunSummary, ViewError};
use std::fs::{DirBuilder, File, TryLockError};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Reason why a run folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RunDirError {
    /// It cannot be made, read or written.
    #[error("{}: {source}\n  hint: --run-dir needs a folder that can be written", path.display())]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    /// There is a run, and `--resume` was not given: a mistyped folder must not overwrite it.
    #[error("{} holds a run already\n  hint: go on with the same command and --resume, or name another --run-dir", path.display())]
    Exists { path: PathBuf },
    /// Another process holds the lock.
    #[error("{} is in use by another sinew process", path.display())]
    Locked { path: PathBuf },
    /// A resumed run would not be the run that its checkpoints come from.
    #[error("{}: the recipe differs from the one that this run was trained with:\n{changes}  hint: put that back, or start a new run in another --run-dir; to go on with the change all the same: {flags}", path.display())]
    Recipe {
        path: PathBuf,
        /// A line for each key: its old and its new value.
        changes: String,
        /// The options that allow these changes.
        flags: String,
    },
    /// A run keeps its mode: which episodes a step has depends on it.
    #[error("{}: train.mode: {old} became {new}, but a run keeps its mode, since which episodes a step has depends on it\n  hint: put that back, or begin a new run from its weights in another --run-dir: model = \"run:{}\"", path.display(), path.display())]
    Mode {
        path: PathBuf,
        old: String,
        new: String,
    },
    /// The files that the recipe names are not those that the run was trained with.
    #[error("{}: what this run was trained with has changed:\n{changes}  hint: put that back, or start a new run in another --run-dir; to go on with the change all the same: {flags}", path.display())]
    Inputs {
        path: PathBuf,
        /// A line for each name: its old and its new hash or version.
        changes: String,
        /// The options that allow these changes.
        flags: String,
    },
    /// A file of the folder is not what a run writes.
    #[error("{}: {message}\n  hint: put the file right, or start a new run in another --run-dir", path.display())]
    Damaged { path: PathBuf, message: String },
    /// The folder holds no run.
    #[error("{} holds no run\n  hint: give the folder of a run, as in `sinew train --run-dir`", path.display())]
    NoRun { path: PathBuf },
    /// The recipe in the folder cannot be read.
    #[error(transparent)]
    Plan(#[from] RecipeError),
    /// The records of the steps cannot be read.
    #[error(transparent)]
    Metrics(#[from] ViewError),
}

/// End of the names of recipes of collections.
pub const COLLECTION: &str = "-collect";
/// The end of the names of recipes of measurements.
pub const EVALUATION: &str = "-eval";

/// End of a process that held a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd<'a> {
    /// The run ended, with the reason if it did not finish its work.
    Ended(Option<&'a str>),
    /// It was asked to stop, with Ctrl-C or TERM.
    Interrupted(&'a str),
    /// It failed, for this reason.
    Failed(&'a str),
    /// It ended without recording an end. This is written before the run begins.
    Killed(&'a str),
}

/// An opened run folder. The lock is held until it is dropped, or the process dies.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// Whether episodes that cannot be read any more may be left out.
    accept_loss: bool,
    _lock: File,
}

/// Options for opening a folder again.
#[derive(Clone, Debug, Default)]
pub struct Resume {
    /// Keys that may differ from the recipe that the run was trained with; one names all below it.
    pub allow_change: Vec<String>,
}

impl Resume {
    /// Whether a key, or a name such as `tasks.rows`, may differ.
    pub fn allows(&self, key: &str) -> bool {
        let names = |allowed: &String| {
            let below = key.strip_prefix(allowed.as_str());
            below.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.allow_change.iter().any(names)
    }
}

impl RunDir {
    /// Creates the folder for `recipe`, or opens it again. If `resume` is set, a folder without a run is
    /// created, too, so that a script can use the same command each time.
    ///
    /// # Errors
    /// If it cannot be written, another process holds it, or the run in it is another one.
    pub fn open(
        path: &Path,
        recipe: &RunPlan,
        resume: Option<&Resume>,
    ) -> Result<Self, RunDirError> {
        let io = |source| RunDirError::Io {
            path: path.into(),
            source,
        };
        let lock = create_locked(path).map_err(|e| match e {
            TryLockError::WouldBlock => RunDirError::Locked { path: path.into() },
            TryLockError::Error(source) => io(source),
        })?;
        let run = Self {
            path: path.into(),
            accept_loss: false,
            _lock: lock,
        };
        match (run.recipe_path().exists(), resume) {
            (true, None) => return Err(RunDirError::Exists { path: path.into() }),
            (true, Some(resume)) => run.check_same(recipe, resume)?,
            // A resumed run writes its own once its checkpoint agrees.
            (false, _) => run.write_recipe(recipe)?,
        }
        // The file holds the end of the last process, not of this one.
        match std::fs::remove_file(path.join(END)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(io(e)),
            _ => {}
        }
        Ok(run)
    }

    /// Writes the effective recipe where it is not written yet: for users, and as what a later session is
    /// compared with.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn write_recipe(&self, recipe: &RunPlan) -> Result<(), RunDirError> {
        let io = |source| RunDirError::Io {
            path: self.path.clone(),
            source,
        };
        let (registry, recipe) = (recipe.env.registry(), &self.portable(recipe));
        let text = toml::to_string(recipe).map_err(|e| io(std::io::Error::other(e)))?;
        for path in [self.recipe_path(), self.began_path()] {
            let same = std::fs::read_to_string(&path)
                .is_ok_and(|old| RunPlan::saved(&old, registry).is_ok_and(|old| old == *recipe));
            if !same {
                write_atomic(&path, text.as_bytes()).map_err(io)?;
            }
        }
        Ok(())
    }

    /// The recipe as the folder keeps it: in the folder of a stage, other stages have their names and not
    /// their paths, so that the folder of the chain can be moved.
    pub fn portable(&self, recipe: &RunPlan) -> RunPlan {
        let folder = std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone());
        match folder
            .parent()
            .filter(|above| above.join(CHAIN_FILE).exists())
        {
            Some(chain) => recipe.portable(chain),
            None => recipe.clone(),
        }
    }

    /// Compares with the recipe of the last session, of which `recipe.toml` is a copy that people edit.
    fn check_same(&self, recipe: &RunPlan, resume: &Resume) -> Result<(), RunDirError> {
        let began = self.began_path();
        let path = if began.exists() {
            began
        } else {
            self.recipe_path()
        };
        let damaged = |message: String| RunDirError::Damaged {
            path: path.clone(),
            message: format!(
                "{message}\n  hint: it is the recipe of the last session, which this one is compared with; \
                 without began.toml, recipe.toml is taken for it"
            ),
        };
        let text = std::fs::read_to_string(&path).map_err(|e| damaged(e.to_string()))?;
        let old =
            RunPlan::saved(&text, recipe.env.registry()).map_err(|e| damaged(e.to_string()))?;
        self.check_changes(&old, recipe, resume)
    }

    /// A resumed run may differ in its name, in what bounds it (steps, wall time), and in what was allowed.
    ///
    /// # Errors
    /// Another mode, which nothing allows: episodes of one mode would be taken for those of the other. All
    /// changes that were not allowed, with the options that allow them.
    pub fn check_changes(
        &self,
        old: &RunPlan,
        new: &RunPlan,
        resume: &Resume,
    ) -> Result<(), RunDirError> {
        let mut changes = changes(old, &self.portable(new));
        if let Some(mode) = changes.iter().find(|c| c.key == "train.mode") {
            return Err(RunDirError::Mode {
                path: self.path.clone(),
                old: mode.old.clone(),
                new: mode.new.clone(),
            });
        }
        let kinds =
            [old, new].map(|plan| [EVALUATION, COLLECTION].map(|end| plan.name.ends_with(end)));
        if kinds[0] != kinds[1] {
            changes.push(Change {
                key: "name".into(),
                old: old.name.clone(),
                new: new.name.clone(),
            });
        }
        let refused: Vec<&Change> = changes.iter().filter(|c| !resume.allows(&c.key)).collect();
        if refused.is_empty() {
            return Ok(());
        }
        let line = |c: &&Change| format!("    {}: {} became {}\n", c.key, c.old, c.new);
        let flag = |c: &&Change| format!("--allow-change {}", c.key);
        let flags: Vec<String> = refused.iter().map(flag).collect();
        Err(RunDirError::Recipe {
            path: self.path.clone(),
            changes: refused.iter().map(line).collect(),
            flags: flags.join(" "),
        })
    }

    /// Sets whether a store with unreadable parts is accepted; these parts are then left out.
    pub fn accepting_loss(self, accept_loss: bool) -> Self {
        Self {
            accept_loss,
            ..self
        }
    }

    /// Returns the setting of [`RunDir::accepting_loss`].
    pub fn accepts_loss(&self) -> bool {
        self.accept_loss
    }

    /// Writes to `end.json` how the process ended, for `sinew runs`. A killed process cannot write, so every
    /// process writes [`RunEnd::Killed`] when it begins. The next session removes the file first.
    pub fn note_end(&self, end: RunEnd<'_>) {
        let (state, why) = match end {
            RunEnd::Ended(trouble) => ("ended", trouble),
            RunEnd::Interrupted(why) => ("interrupted", Some(why)),
            RunEnd::Failed(why) => ("failed", Some(why)),
            RunEnd::Killed(why) => ("killed", Some(why)),
        };
        let end = serde_json::json!({ "state": state, "why": why });
        // It is information only: a folder that cannot be written has failed in other ways already.
        if let Err(e) = write_atomic(&self.path.join(END), end.to_string().as_bytes()) {
            let path = self.path.join(END);
            tracing::warn!(error = %e, path = %path.display(), "the end of the run was not written");
        }
    }

    /// The folder as it was named.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The effective recipe.
    pub fn recipe_path(&self) -> PathBuf {
        self.path.join("recipe.toml")
    }

    /// The recipe of the last session; not to be edited.
    fn began_path(&self) -> PathBuf {
        self.path.join("began.toml")
    }

    /// Records of steps, one JSON object a line.
    pub fn metrics_path(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// Returns the path of the report, which is rewritten while the run continues.
    pub fn report_path(&self) -> PathBuf {
        self.path.join("report.html")
    }

    /// Folder of checkpoints; `LATEST` in it names the newest.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// Folder of the store; there is none with another `store.type` than `"disk"`.
    pub fn store(&self) -> PathBuf {
        store_path(&self.path)
    }
}

/// Longest wait for a lock. A process that checks whether a run is in use holds its lock for an instant.
const LOCK_WAIT: Duration = Duration::from_secs(2);
/// Pause between two attempts.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Creates a folder and takes its lock. Only its user can read it: it holds the texts of agents and users.
pub(crate) fn create_locked(path: &Path) -> Result<File, TryLockError> {
    let mut folder = DirBuilder::new();
    let made = folder.recursive(true).mode(0o700).create(path);
    let lock = made.and_then(|()| File::create(path.join("lock")));
    let lock = lock.map_err(TryLockError::Error)?;
    let began = Instant::now();
    loop {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) if began.elapsed() < LOCK_WAIT => {
                std::thread::sleep(LOCK_PAUSE);
            }
            tried => return tried.map(|()| lock),
        }
    }
}

/// File with the end of a run's last process.
const END: &str = "end.json";
/// File with the name of a store in a database.
pub(crate) const STORE_ID: &str = "store.id";

/// Returns the state of a run's process, and the reason for its end that the process wrote.
pub fn process_of(run_dir: &Path) -> (Process, Option<String>) {
    if in_use(run_dir) {
        return (Process::Running, None);
    }
    let text = std::fs::read_to_string(run_dir.join(END)).unwrap_or_default();
    let end: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let process = end["state"].as_str().and_then(Process::parse);
    let why = end["why"].as_str().map(str::to_owned);
    process.map_or((Process::Killed, None), |process| (process, why))
}

/// Whether a run was started in this folder, ended or not.
pub fn holds_run(run_dir: &Path) -> bool {
    run_dir.join("recipe.toml").exists()
}

/// Whether a process holds the run. The lock is shared with others who look, and released at once.
pub fn in_use(run_dir: &Path) -> bool {
    let lock = File::open(run_dir.join("lock"));
    let tried = lock.map(|lock| lock.try_lock_shared());
    matches!(tried, Ok(Err(TryLockError::WouldBlock)))
}

/// The recipe in a run folder.
///
/// # Errors
/// If the folder holds no run, or its recipe cannot be read.
pub fn recipe(run_dir: &Path, registry: Registry) -> Result<RunPlan, RunDirError> {
    let path = run_dir.join("recipe.toml");
    if !path.is_file() {
        return Err(RunDirError::NoRun {
            path: run_dir.into(),
        });
    }
    Ok(RunPlan::load(&path, registry)?)
}

/// Returns the progress of the run in a folder, from its recipe and its metrics. The run may be training.
///
/// # Errors
/// Fails as [`recipe`] does, or if the metrics cannot be read.
pub fn summary(run_dir: &Path, registry: Registry) -> Result<RunSummary, RunDirError> {
    let recipe = recipe(run_dir, registry)?;
    Ok(RunSummary::read(run_dir, recipe.name, recipe.train.steps)?)
}

/// Whether a folder is of `sinew collect`, which trains nothing.
pub fn is_collection(run_dir: &Path, recipe: &RunPlan) -> bool {
    recipe.name.ends_with(COLLECTION) && !run_dir.join("checkpoints").exists()
}

/// Folder of the episodes in a run folder.
pub fn store_path(run_dir: &Path) -> PathBuf {
    run_dir.join("store")
}

/// File with the random name of a run's store in a database; it is there once the run began to use that.
pub fn store_id_path(run_dir: &Path) -> PathBuf {
    run_dir.join(STORE_ID)
}

/// Whether the episodes of a run are kept, in its folder or in a database.
pub fn keeps_episodes(run_dir: &Path) -> bool {
    store_path(run_dir).is_dir() || store_id_path(run_dir).is_file()
}

/// Writes a file so that a reader sees the old or the new content, never a part.
///
/// # Errors
/// An error of the file system.
pub fn write_atomic(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = File::create(&temporary)?;
    std::io::Write::write_all(&mut file, content)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_env::BUILT_IN;

    const BUILT: Registry = Registry::new(&BUILT_IN);

    fn recipe(extra: &str) -> RunPlan {
        let text = format!(
            "name = \"t\"\nmodel = {{ type = \"pretrained\", source = \"x\" }}\nenv = {{ type = \"tool_math\" }}\nalgorithm = {{ type = \"grpo\", dual_clip = 3.0 }}\nengine = {{ weights = \"int8\" }}\n{extra}"
        );
        RunPlan::parse(Path::new("r.toml"), &text, BUILT).unwrap()
    }

    fn open(dir: &Path, extra: &str, resume: bool) -> Result<RunDir, RunDirError> {
        RunDir::open(dir, &recipe(extra), resume.then(Resume::default).as_ref())
    }

    #[test]
    fn a_run_is_begun_once_and_resumed_with_the_same_recipe() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        assert!(!holds_run(&path));
        let first = open(&path, "", false).unwrap();
        assert!(holds_run(&path));
        assert!(matches!(
            open(&path, "", true),
            Err(RunDirError::Locked { .. })
        ));
        drop(first);
        assert!(matches!(
            open(&path, "", false),
            Err(RunDirError::Exists { .. })
        ));
        let longer = "[train]\nsteps = 99\n";
        let resumed = open(&path, longer, true).unwrap();
        resumed.write_recipe(&recipe(longer)).unwrap();
        drop(resumed);
        assert_eq!(super::recipe(&path, BUILT).unwrap().train.steps, 99);
        let e = open(&path, "[rollout]\ngroup_size = 2\n", true)
            .unwrap_err()
            .to_string();
        let needles = [
            "rollout.group_size: 8 became 2",
            "--allow-change rollout.group_size",
        ];
        assert!(needles.iter().all(|n| e.contains(n)), "{e}");
    }

    #[test]
    fn who_looks_whether_a_run_is_in_use_is_not_taken_for_it() {
        let dir = tempfile::tempdir().unwrap();
        drop(create_locked(dir.path()).unwrap());
        let look = File::open(dir.path().join("lock")).unwrap();
        look.try_lock_shared().unwrap();
        assert!(!in_use(dir.path()));
        drop(look);
        let held = create_locked(dir.path()).unwrap();
        assert!(in_use(dir.path()));
        drop(held);
    }

    #[test]
    fn a_run_keeps_its_mode_whatever_is_allowed() {
        let modes = ["sync", "one_step_off", "async"];
        let with = |mode: &str| format!("[train]\nmode = \"{mode}\"\n");
        for old in modes {
            let dir = tempfile::tempdir().unwrap();
            drop(open(dir.path(), &with(old), false).unwrap());
            for new in modes {
                let allow = Resume {
                    allow_change: vec!["train".to_owned()],
                };
                let opened = RunDir::open(dir.path(), &recipe(&with(new)), Some(&allow));
                let refused = opened.err().map(|e| e.to_string());
                assert_eq!(refused.is_some(), old != new, "{old} to {new}: {refused:?}");
                let names = |e: &String| e.contains("train.mode") && e.contains("model = \"run:");
                assert!(refused.iter().all(names), "{refused:?}");
            }
        }
    }

    #[test]
    fn a_recipe_that_was_edited_in_the_folder_is_compared_with_what_ran() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        drop(open(&path, "", false).unwrap());
        let edited = "[train]\nlearning_rate = 0.5\n";
        let text = toml::to_string(&recipe(edited)).unwrap();
        std::fs::write(path.join("recipe.toml"), text).unwrap();
        let e = open(&path, edited, true).unwrap_err().to_string();
        assert!(e.contains("train.learning_rate: 1e-5 became 0.5"), "{e}");
        let allow = |key: &str| Resume {
            allow_change: vec![key.to_owned()],
        };
        for wrong in ["train.learning", "train.seed", "rollout"] {
            let opened = RunDir::open(&path, &recipe(edited), Some(&allow(wrong)));
            assert!(opened.is_err(), "{wrong}");
        }
        let resumed = RunDir::open(&path, &recipe(edited), Some(&allow("train"))).unwrap();
        resumed.write_recipe(&recipe(edited)).unwrap();
        drop(resumed);
        open(&path, edited, true).expect("it is the recipe of the last session now");
        std::fs::write(path.join("began.toml"), "name = [").unwrap();
        let e = open(&path, edited, true).unwrap_err();
        assert!(matches!(e, RunDirError::Damaged { .. }), "{e}");
        assert!(e.to_string().contains("began.toml"), "{e}");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let e = open(Path::new("/proc/sinew"), "", false)
            .unwrap_err()
            .to_string();
        assert!(e.contains("/proc/sinew") && e.contains("--run-dir"), "{e}");
    }
}
