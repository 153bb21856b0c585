//! Models that runs made. `run:DIR` names the newest weights of the run in DIR, or of the last stage if DIR
//! holds a chain. Tokenizer and template are those of the training.
//!
//! A run may have begun with the model of another run, and so on: adapters need the weights below them.

use crate::failure::Failure;

use sinew_recipe::{EnvSection, ModelSection, RUN, RunPlan};
use sinew_tinker::client::ServiceState;
use sinew_train::checkpoint::CheckpointStore;
use std::path::{Path, PathBuf};

/// Maximum number of runs of which each began with the next.
const MAX_DEPTH: usize = 1000;

/// A run as a model.
#[derive(Debug)]
pub struct RunModel {
    /// Folder of the run; for a chain, the folder of a stage.
    pub(crate) folder: PathBuf,
    pub(crate) recipe: RunPlan,
    /// The checkpoint that the source names; `None`: the newest.
    named: Option<String>,
}

/// Separator between the folder of a run and the name of one of its checkpoints.
const AT: &str = "@step-";

/// Folder and checkpoint of `DIR@step-00000040`.
fn parts(source: &str) -> (&Path, Option<&str>) {
    let digits = |name: &str| name.chars().all(|c| c.is_ascii_digit() || c == '.');
    match source.rsplit_once(AT) {
        Some((folder, step)) if !step.is_empty() && digits(step) => {
            (Path::new(folder), Some(&source[folder.len() + 1..]))
        }
        _ => (Path::new(source), None),
    }
}

/// The source of one checkpoint of a run.
pub(crate) fn at_checkpoint(source: &str, checkpoint: &str) -> String {
    let folder = parts(source).0.display();
    format!("{folder}@{checkpoint}")
}

/// The run that a source names; `None` for other sources.
///
/// # Errors
/// Fails as [`RunModel::open`] does.
pub fn run_model(source: &str) -> Result<Option<RunModel>, Failure> {
    let Some(source) = source.strip_prefix(RUN) else {
        return Ok(None);
    };
    let (folder, named) = parts(source);
    let run = RunModel::open(folder)?;
    let named = named.map(str::to_owned);
    Ok(Some(RunModel { named, ..run }))
}

/// The source of a model that is typed on the command line, where the folder of a run needs no `run:`.
pub fn typed_source(source: &str) -> String {
    let folder = Path::new(source);
    if sinew_runs::holds_run(folder) || sinew_runs::chain::holds_chain(folder) {
        format!("{RUN}{source}")
    } else {
        source.to_owned()
    }
}

/// The model that a recipe's model goes back to: its own, or of a run the one that the first run began with.
///
/// # Errors
/// If a folder on the way holds no run, or the runs go round in a circle.
pub fn origin(section: &ModelSection) -> Result<ModelSection, Failure> {
    let mut section = section.clone();
    for _ in 0..MAX_DEPTH {
        let source = match &section {
            ModelSection::Pretrained { source, .. } if source.starts_with(RUN) => source.clone(),
            _ => return Ok(section),
        };
        let folder = run_folder(parts(source.trim_start_matches(RUN)).0)?;
        section = crate::environments::recipe_of(&folder)?.model;
    }
    Err(Failure::input(format!(
        "model: more than {MAX_DEPTH} runs that each began with another: does one begin with itself?"
    )))
}

/// Returns the folder of the last stage that ended, if `folder` holds a chain, else `folder` itself.
fn run_folder(folder: &Path) -> Result<PathBuf, Failure> {
    sinew_runs::chain::run_folder(folder).map_err(Failure::input)
}

impl RunModel {
    /// The run in a folder, or the last stage that ended of a chain.
    ///
    /// # Errors
    /// If the folder holds no run, or a model that the run goes back to is not there.
    pub fn open(folder: &Path) -> Result<Self, Failure> {
        let folder = run_folder(folder)?;
        let recipe = crate::environments::recipe_of(&folder)?;
        origin(&recipe.model)?;
        Ok(Self {
            folder,
            recipe,
            named: None,
        })
    }

    /// Folder of its checkpoints.
    pub(crate) fn checkpoints(&self) -> PathBuf {
        self.folder.join("checkpoints")
    }

    /// Folder of the checkpoint that the source names, or of the newest one; no file is checked.
    pub(crate) fn latest(&self) -> Option<PathBuf> {
        let latest = || std::fs::read_to_string(self.checkpoints().join("LATEST")).ok();
        let name = self.named.clone().or_else(latest)?;
        Some(self.checkpoints().join(name.trim()))
    }

    /// The checkpoint that the source names, or the newest one whose checksums are right. Damaged ones are
    /// passed over, with a line in the log.
    ///
    /// # Errors
    /// If there is no checkpoint, or none that can be read.
    pub fn checkpoint(&self) -> Result<PathBuf, Failure> {
        let dir = self.checkpoints();
        let none = || {
            Failure::input(format!(
                "{}: no checkpoint, so there are no weights yet",
                dir.display()
            ))
        };
        if !dir.is_dir() {
            return Err(none());
        }
        let store = CheckpointStore::open(&dir, 1).map_err(Failure::system)?;
        if let Some(name) = &self.named {
            return Ok(store.named(name).map_err(Failure::input)?.path);
        }
        let loaded = store.load().map_err(Failure::system)?;
        let loaded = loaded.ok_or_else(none)?;
        for skipped in &loaded.skipped {
            tracing::error!(checkpoint = %skipped.name, reason = %skipped.reason, "checkpoint passed over");
        }
        Ok(loaded.path)
    }

    /// The state at a Tinker service that its checkpoint names; `None`: its weights are in the checkpoint.
    ///
    /// # Errors
    /// If there is no checkpoint, or none that can be read.
    pub(crate) fn service_state(&self) -> Result<Option<ServiceState>, Failure> {
        ServiceState::of_checkpoint(&self.checkpoint()?).map_err(Failure::system)
    }

    /// Whether an environment's tokens are those that the run trained with: worlds with their own alphabet
    /// have their own tokenizer.
    ///
    /// # Errors
    /// If they differ: the same id would mean another character.
    pub fn check_alphabet(&self, env: &EnvSection) -> Result<(), Failure> {
        let own = self.recipe.env.needs().alphabet;
        if own == env.needs().alphabet {
            Ok(())
        } else {
            Err(Failure::input(format!(
                "model = \"{RUN}{}\": it was trained with the tokenizer of env.type = \"{}\", and env.type = \"{}\" \
                 has another",
                self.folder.display(),
                self.recipe.env.name(),
                env.name()
            )))
        }
    }
}
