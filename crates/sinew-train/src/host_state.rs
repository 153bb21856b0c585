//! Checkpoints of policies whose weights and optimizer state are in the memory of this process.

use crate::checkpoint::{CheckpointError, Draft, LoadedCheckpoint, Part, StoredTensors};
use crate::policy_error::PolicyError;
use sinew_types::TensorSource;

/// File name of the optimizer's moments.
const OPTIMIZER: &str = "optimizer.safetensors";

/// A file of a checkpoint with tensors.
#[derive(Debug)]
pub struct TensorFile<'a> {
    /// File name in the checkpoint.
    pub name: &'static str,
    /// Its tensors, read one after the other.
    pub tensors: Box<dyn TensorSource + 'a>,
}

/// The state of a policy as tensors in host memory.
pub trait HostState {
    /// The trained weights, as the files of a checkpoint; none for a frozen model.
    fn trained(&self) -> Vec<TensorFile<'_>>;

    /// The optimizer's state: `m.NAME` and `v.NAME` of each trained tensor. None before the first update.
    fn optimizer(&self) -> Box<dyn TensorSource + '_>;

    /// Restores the trained weights from the tensors of all files, and the optimizer's state (`None` before
    /// the first update).
    ///
    /// # Errors
    /// If a tensor is missing, left over or of another shape; nothing is changed in that case.
    fn restore(
        &mut self,
        weights: &dyn TensorSource,
        optimizer: Option<&dyn TensorSource>,
    ) -> Result<(), PolicyError>;

    /// Files that make the weights loadable by other programs (`config.json`), as names and bytes.
    ///
    /// # Errors
    /// If one cannot be made.
    fn side_files(&self) -> Result<Vec<(String, Vec<u8>)>, PolicyError>;
}

/// Writes all files of a state, as [`Policy::save`](crate::Policy::save).
pub(crate) fn save(
    state: &dyn HostState,
    draft: &mut Draft<'_>,
) -> Result<Vec<String>, CheckpointError> {
    for (file, bytes) in state.side_files()? {
        draft.write(&Part::Bytes { file, bytes })?;
    }
    draft.write(&Part::Tensors {
        file: OPTIMIZER.to_owned(),
        tensors: state.optimizer(),
    })?;
    let mut names = Vec::new();
    for file in state.trained() {
        names.push(file.name.to_owned());
        draft.write(&Part::Tensors {
            file: file.name.to_owned(),
            tensors: file.tensors,
        })?;
    }
    Ok(names)
}

/// Restores a state, as [`Policy::load`](crate::Policy::load).
pub(crate) fn load(
    state: &mut dyn HostState,
    loaded: &LoadedCheckpoint,
    weights: &[String],
    updates: u64,
) -> Result<(), CheckpointError> {
    let own: Vec<&str> = state.trained().into_iter().map(|file| file.name).collect();
    if weights != own {
        return Err(loaded.mismatch(format!("it holds {weights:?}, this run trains {own:?}")));
    }
    let mut tensors = StoredTensors::default();
    for file in own {
        tensors.extend(loaded.tensors(file)?);
    }
    let optimizer = loaded.tensors(OPTIMIZER)?;
    let moments = (updates > 0).then_some(&optimizer as &dyn TensorSource);
    let restored = state.restore(&tensors, moments);
    restored.map_err(|e| loaded.mismatch(e.to_string()))
}
