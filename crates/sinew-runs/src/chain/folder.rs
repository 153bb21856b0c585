//! The folder of a chain: one owner at a time, and which stages have ended.

use crate::run_dir::{create_locked, write_atomic};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sinew_recipe::{CHAIN_FILE as RECIPE, ChainPlan, RunPlan, StagePlan, changes};
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

const ENDED: &str = "chain.json";

/// Reason why a chain's folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// It cannot be made, read or written.
    #[error("{}: {source}\n  hint: --run-dir needs a folder that can be written", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// It holds a chain or a run, and `--resume` was not given, or it is none of this chain.
    #[error("{} holds a {what} already\n  hint: {hint}", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
        /// `chain` or `run`.
        what: &'static str,
        /// Way out, for the message.
        hint: &'static str,
    },
    /// Another process holds the lock.
    #[error("{} is in use by another sinew process", path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// A file is not what a chain writes.
    #[error("{}: {message}\n  hint: put the file right, or start a new chain in another --run-dir", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Fault of the file.
        message: String,
    },
    /// A stage that others build on would change.
    #[error(
        "stage {stage} has {state}, and {what}\n  hint: put that back, or start a new chain in another --run-dir; \
         model = \"run:{}\" begins one with its weights", folder.display()
    )]
    Changed {
        /// Name of the stage.
        stage: String,
        /// `begun` or `ended`.
        state: &'static str,
        /// The part that changed.
        what: String,
        /// Folder of the stage.
        folder: PathBuf,
    },
    /// A stage that ended would be trained by itself, in its folder.
    #[error(
        "stage {stage} has ended, and other stages begin with its weights\n  hint: give it more train.steps in {0}/chain.toml, \
         and go on with `sinew train {0}/chain.toml --run-dir {0} --resume`", chain.display()
    )]
    Alone {
        /// Name of the stage.
        stage: String,
        /// The folder of the chain.
        chain: PathBuf,
    },
    /// The weights in a stage's folder are not those that it ended with.
    #[error(
        "stage {stage} ended with the weights {expected}, but its folder {} gives {found}\n  hint: copy the folder \
         back as it was, or start a new chain in another --run-dir; adapters are merged in 32 bits, and another \
         kernel set can round otherwise", folder.display()
    )]
    Weights {
        /// Name of the stage.
        stage: String,
        /// BLAKE3 in hexadecimal digits.
        expected: String,
        /// BLAKE3 of what the folder gives now.
        found: String,
        /// Folder of the stage.
        folder: PathBuf,
    },
}

/// Result of a stage, for the next one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageEnd {
    /// Name of the stage.
    pub name: String,
    /// BLAKE3 of its effective recipe, without what only bounds a run.
    pub recipe: String,
    /// Steps that the recipe asked for.
    pub steps: u64,
    /// Folder of its last checkpoint, below `checkpoints`.
    pub checkpoint: String,
    /// BLAKE3 of its last weights in 32 bits, adapters merged: 64 hexadecimal digits.
    pub weights: String,
    /// The last line of its run, as `sinew train --json` gives it.
    pub last: Value,
}

/// `chain.json`.
#[derive(Default, Serialize, Deserialize)]
struct ChainRecord {
    ended: Vec<StageEnd>,
}

/// An opened chain folder. The lock is held until it is dropped, or the process dies.
#[derive(Debug)]
pub struct ChainDir {
    path: PathBuf,
    ended: Vec<StageEnd>,
    _lock: File,
}

impl ChainDir {
    /// Creates the folder for `chain`, or opens it again with `resume`. Stages that have not started may have
    /// changed since; the last one that ended may have more steps, if no other has begun, and continues then.
    ///
    /// # Errors
    /// If it cannot be written, is in use, holds something else, or a stage that ended has changed.
    pub fn open(path: &Path, chain: &ChainPlan, resume: bool) -> Result<Self, ChainError> {
        let io = |source| ChainError::Io {
            path: path.into(),
            source,
        };
        let exists = |what, hint| ChainError::Exists {
            path: path.into(),
            what,
            hint,
        };
        if path.join("recipe.toml").exists() {
            return Err(exists(
                "run",
                "a chain needs a folder of its own: name another --run-dir",
            ));
        }
        if holds_chain(path) && !resume {
            let hint = "go on with the same command and --resume, or name another --run-dir";
            return Err(exists("chain", hint));
        }
        let lock = create_locked(path).map_err(|e| match e {
            TryLockError::WouldBlock => ChainError::Locked { path: path.into() },
            TryLockError::Error(source) => io(source),
        })?;
        let mut dir = Self {
            path: std::path::absolute(path).map_err(io)?,
            ended: ended(path)?,
            _lock: lock,
        };
        dir.check(chain)?;
        let text = toml::to_string(chain).map_err(|e| io(std::io::Error::other(e)))?;
        dir.write(RECIPE, text.as_bytes())?;
        Ok(dir)
    }

    /// The folder, absolute.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Folder of a stage.
    pub fn stage(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The stages that ended, in their order.
    pub fn ended(&self) -> &[StageEnd] {
        &self.ended
    }

    /// Makes the end of a stage durable: the mark from which on the next one runs.
    ///
    /// # Errors
    /// If it cannot be written; the stage has not ended then.
    pub fn end(&mut self, end: StageEnd) -> Result<(), ChainError> {
        let mut ended = self.ended.clone();
        ended.push(end);
        self.mark(ended)
    }

    fn mark(&mut self, ended: Vec<StageEnd>) -> Result<(), ChainError> {
        let all = ChainRecord { ended };
        let text = serde_json::to_string_pretty(&all).map_err(|e| ChainError::Damaged {
            path: self.path.join(ENDED),
            message: e.to_string(),
        })?;
        self.write(ENDED, text.as_bytes())?;
        self.ended = all.ended;
        Ok(())
    }

    /// Writes a file atomically, so that a crash of the process or the machine never leaves a partial file
    /// under `name`.
    pub(crate) fn write(&self, name: &str, content: &[u8]) -> Result<(), ChainError> {
        let path = self.path.join(name);
        let written = || {
            write_atomic(&path, content)?;
            File::open(&self.path)?.sync_all()
        };
        written().map_err(|source| ChainError::Io {
            path: path.clone(),
            source,
        })
    }

    /// A stage that has begun keeps its place: what stands before it made the weights that it began with.
    fn check_begun(&self, chain: &ChainPlan) -> Result<(), ChainError> {
        let before = stages_before(&self.path);
        let begun = |name: &String| self.stage(name).join("recipe.toml").exists();
        for (at, name) in before.iter().enumerate().skip(self.ended.len()) {
            let now = chain.stages.get(at).map(|stage| &stage.name);
            if now == Some(name) || !begun(name) {
                continue;
            }
            let now = now.map_or_else(
                || "the recipe ends before it".to_owned(),
                |now| format!("the recipe has {now:?} there"),
            );
            return Err(ChainError::Changed {
                stage: name.clone(),
                state: "begun",
                what: format!("it was stage {} of the chain: now {now}", at + 1),
                folder: self.stage(name),
            });
        }
        Ok(())
    }

    /// The keys by which a stage differs from the recipe in its folder, in parentheses; empty if that
    /// cannot be read.
    fn changed_keys(&self, chain: &ChainPlan, at: usize) -> String {
        let folder = self.stage(&chain.stages[at].name);
        let read = |file| std::fs::read_to_string(folder.join(file)).ok();
        let text = read("began.toml").or_else(|| read("recipe.toml"));
        let Some(saved) =
            text.and_then(|text| RunPlan::saved(&text, chain.stages[at].plan.env.registry()).ok())
        else {
            return String::new();
        };
        let changes = changes(&saved, &chain.run(at, &self.path).portable(&self.path));
        let keys: Vec<String> = changes.into_iter().map(|c| c.key).collect();
        if keys.is_empty() {
            String::new()
        } else {
            format!(" ({})", keys.join(", "))
        }
    }

    /// Compares the stages that ended with the recipe.
    fn check(&mut self, chain: &ChainPlan) -> Result<(), ChainError> {
        for (at, end) in self.ended.iter().enumerate() {
            let changed = |what: String| ChainError::Changed {
                stage: end.name.clone(),
                state: "ended",
                what,
                folder: self.stage(&end.name),
            };
            let Some(stage) = chain.stages.get(at).filter(|s| s.name == end.name) else {
                let what = format!("the recipe has no such stage as number {} any more", at + 1);
                return Err(changed(what));
            };
            if recipe_hash(stage) != end.recipe {
                let keys = self.changed_keys(chain, at);
                return Err(changed(format!("its recipe is another one now{keys}")));
            }
            let (asked, done) = (stage.plan.train.steps, end.steps);
            let next = chain.stages.get(at + 1);
            let built_on =
                next.is_some_and(|next| self.stage(&next.name).join("recipe.toml").exists());
            if asked < done || (asked > done && built_on) {
                let what = format!("its train.steps are {asked} now, of {done} that it did");
                return Err(changed(what));
            }
        }
        self.check_begun(chain)?;
        // Only the last one can have more steps to do.
        let longer = |(end, stage): (&StageEnd, &StagePlan)| stage.plan.train.steps > end.steps;
        if let Some(at) = self.ended.iter().zip(&chain.stages).position(longer) {
            let kept = self.ended.iter().take(at).cloned().collect();
            self.mark(kept)?;
        }
        Ok(())
    }
}

/// Names of the stages of the last session, as the folder's recipe has them.
fn stages_before(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path.join(RECIPE)).unwrap_or_default();
    let table: toml::Table = text.parse().unwrap_or_default();
    let stages = table.get("stage").and_then(toml::Value::as_array);
    let named = stages.into_iter().flatten();
    let names = named.filter_map(|stage| Some(stage.get("name")?.as_str()?.to_owned()));
    names.collect()
}

/// Refuses the folder of a stage that ended: its chain decides about it, and other stages begin with exactly
/// the weights that it ended with.
///
/// # Errors
/// If `run_dir` is such a folder, or the file of its chain is damaged.
pub fn check_alone(run_dir: &Path) -> Result<(), ChainError> {
    let folder = std::path::absolute(run_dir).unwrap_or_else(|_| run_dir.to_owned());
    let (Some(chain), Some(name)) = (folder.parent(), folder.file_name()) else {
        return Ok(());
    };
    let holds = holds_chain(chain) && ended(chain)?.iter().any(|end| *end.name == *name);
    if holds {
        Err(ChainError::Alone {
            stage: name.to_string_lossy().into_owned(),
            chain: chain.to_owned(),
        })
    } else {
        Ok(())
    }
}

/// Hash of the recipe without steps, wall time and folders. The end of a stage is bound to it.
pub(crate) fn recipe_hash(stage: &StagePlan) -> String {
    stage.plan.hash().unwrap_or_default()
}

fn ended(path: &Path) -> Result<Vec<StageEnd>, ChainError> {
    let file = path.join(ENDED);
    let text = match std::fs::read_to_string(&file) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(|source| ChainError::Io {
            path: file.clone(),
            source,
        })?,
    };
    let ended: Result<ChainRecord, _> = serde_json::from_str(&text);
    let damaged = |e: serde_json::Error| ChainError::Damaged {
        path: file,
        message: e.to_string(),
    };
    Ok(ended.map_err(damaged)?.ended)
}

/// Whether a chain was started in this folder, ended or not.
pub fn holds_chain(path: &Path) -> bool {
    path.join(RECIPE).exists()
}

/// The last stage of the chain in `path` that ended.
///
/// # Errors
/// If its file is damaged, or no stage has ended yet.
pub fn last_stage(path: &Path) -> Result<StageEnd, ChainError> {
    let last = ended(path)?.pop();
    last.ok_or_else(|| ChainError::Damaged {
        path: path.join(ENDED),
        message: "no stage of this chain has ended yet".into(),
    })
}

/// The folder of a run, or of the last stage that ended of the chain in `path`.
///
/// # Errors
/// Fails as [`last_stage`] does.
pub fn run_folder(path: &Path) -> Result<PathBuf, ChainError> {
    if holds_chain(path) {
        Ok(path.join(last_stage(path)?.name))
    } else {
        Ok(path.to_owned())
    }
}
