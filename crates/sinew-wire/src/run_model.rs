//! Models that runs made: `run:DIR` is the newest weights of the run, or of the last stage of the chain, in a
//! folder. Tokenizer and template are those that the run trained with.
//!
//! A run may have begun with the model of another run, and so on: adapters need the weights below them.

use crate::failure::Failure;
use crate::model::{loaded_params, model_config, renderer};

use sinew_model::{Lora, ModelConfig, ModelFiles, Params, load_config, load_model, merge_lora};
use sinew_recipe::{EnvSection, ModelSection, RUN, RunPlan};
use sinew_render::Renderer;
use sinew_train::checkpoint::CheckpointStore;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum number of runs of which each began with the next.
const MAX_DEPTH: usize = 1000;

/// A run as a model.
#[derive(Debug)]
pub struct RunModel {
    /// Its folder; of a chain that of a stage.
    folder: PathBuf,
    /// The effective recipe in that folder: it says which tokenizer and which first weights the run had.
    recipe: RunPlan,
}

/// The run that a source names; `None` for other sources.
///
/// # Errors
/// As [`RunModel::open`].
pub fn run_model(source: &str) -> Result<Option<RunModel>, Failure> {
    let folder = source.strip_prefix(RUN).map(Path::new);
    folder.map(RunModel::open).transpose()
}

/// The source of a model that is typed on the command line, where the folder of a run needs no `run:`.
pub fn typed_source(source: &str) -> String {
    let folder = Path::new(source);
    match sinew_project::holds_run(folder) || sinew_chain::holds_chain(folder) {
        true => format!("{RUN}{source}"),
        false => source.to_owned(),
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
            ModelSection::Pretrained { source } if source.starts_with(RUN) => source.clone(),
            _ => return Ok(section),
        };
        let folder = run_folder(Path::new(source.trim_start_matches(RUN)))?;
        section = sinew_project::recipe(&folder)?.model;
    }
    Err(Failure::input(format!(
        "model: more than {MAX_DEPTH} runs that each began with another: does one begin with itself?"
    )))
}

/// Of a chain the folder of its last stage that ended, else the folder itself.
fn run_folder(folder: &Path) -> Result<PathBuf, Failure> {
    sinew_chain::run_folder(folder).map_err(Failure::input)
}

impl RunModel {
    /// The run in a folder, or the last stage that ended of a chain.
    ///
    /// # Errors
    /// If the folder holds no run, or a model that the run goes back to is not there.
    pub fn open(folder: &Path) -> Result<Self, Failure> {
        let folder = run_folder(folder)?;
        let recipe = sinew_project::recipe(&folder)?;
        origin(&recipe.model)?;
        Ok(Self { folder, recipe })
    }

    /// The newest checkpoint whose checksums are right. Damaged ones are passed over, with a line in the log.
    ///
    /// # Errors
    /// If there is no checkpoint, or none that can be read.
    pub fn checkpoint(&self) -> Result<PathBuf, Failure> {
        let dir = self.folder.join("checkpoints");
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
        let loaded = store.load().map_err(Failure::system)?;
        let loaded = loaded.ok_or_else(none)?;
        for skipped in &loaded.skipped {
            tracing::error!(checkpoint = %skipped.name, reason = %skipped.reason, "checkpoint passed over");
        }
        Ok(loaded.path)
    }

    /// The renderer of the run.
    ///
    /// # Errors
    /// If its tokenizer cannot be found: see [`renderer`].
    pub fn renderer(&self) -> Result<Arc<dyn Renderer>, Failure> {
        renderer(&self.recipe.model, &self.recipe.env)
    }

    /// Whether an environment's tokens are those that the run trained with: worlds with an alphabet of their
    /// own have a tokenizer of their own.
    ///
    /// # Errors
    /// If they differ: the same id would mean another character.
    pub fn check_alphabet(&self, env: &EnvSection) -> Result<(), Failure> {
        let own = self.recipe.env.needs().alphabet;
        match own == env.needs().alphabet {
            true => Ok(()),
            false => Err(Failure::input(format!(
                "model = \"{RUN}{}\": it was trained with the tokenizer of env.type = \"{}\", and env.type = \"{}\" \
                 has another",
                self.folder.display(),
                self.recipe.env.name(),
                env.name()
            ))),
        }
    }

    /// Shape of its model; weights are not read.
    ///
    /// # Errors
    /// If the configuration of the newest checkpoint, or of the model below its adapters, cannot be read.
    pub fn config(&self) -> Result<ModelConfig, Failure> {
        let checkpoints = self.folder.join("checkpoints");
        let latest = std::fs::read_to_string(checkpoints.join("LATEST"));
        let folder = latest.map(|name| checkpoints.join(name.trim()));
        match folder {
            Ok(folder) if folder.join("config.json").is_file() => {
                let files = ModelFiles::Dir(folder);
                load_config(&files).map_err(|e| Failure::input(format!("model: {e}")))
            }
            _ => model_config(&self.recipe),
        }
    }

    /// Its newest weights in 32 bits, adapters merged as for the engine that sampled with them.
    ///
    /// # Errors
    /// If no checkpoint is whole, or the weights below its adapters cannot be loaded.
    pub fn params(&self) -> Result<Params, Failure> {
        let checkpoint = self.checkpoint()?;
        if !checkpoint.join("adapter_config.json").exists() {
            let files = ModelFiles::Dir(checkpoint);
            return Ok(load_model(&files).map_err(Failure::input)?.params);
        }
        let base = loaded_params(&self.recipe, self.renderer()?.as_ref())?;
        let lora = Lora::load(&checkpoint, base.config()).map_err(Failure::input)?;
        let mut merged = Params::zeros(base.config());
        merge_lora(&crate::device()?, &base, &lora, &mut merged).map_err(Failure::input)?;
        Ok(merged)
    }
}
