//! Saves a trainer's state as a checkpoint and restores it bit for bit.
//!
//! The trainer's only randomness, the order of minibatches, follows from seed and step; the learning rate
//! follows from schedule and step. No generator state has to be saved.

use crate::checkpoint::{CheckpointError, CheckpointStore, LoadedCheckpoint, Part, StoredTensors};
use crate::policy::Policy;
use crate::trainer::{Trainer, TrainerConfig};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// File name of the state.
const STATE: &str = "state.json";
/// File name of the optimizer's moments.
const OPTIMIZER: &str = "optimizer.safetensors";
/// Version of `state.json`; newer ones are refused.
const FORMAT_VERSION: u32 = 1;

/// State of the caller that is committed together with the weights.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Commit {
    /// Batches whose update is contained in these weights. They must not be trained again.
    pub trained_batches: Vec<String>,
    /// Hash of the run's configuration, to detect a resume with a different configuration.
    pub config_hash: String,
    /// Any other state that must be restored together: data cursor, random states, counters.
    pub cursor: serde_json::Value,
}

/// The contents of `state.json`. The trainer's only randomness, the order of minibatches, follows
/// from `trainer.seed` and `step`; the learning rate from `trainer.schedule` and `step`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResumeState {
    /// Version of this format, 1.
    pub format_version: u32,
    /// Optimizer updates applied: also the version of the weights.
    pub step: u64,
    /// Number of updates that were skipped because a gradient was not finite.
    pub skipped_updates: u64,
    /// Names of the tensor files; they show which kind of weights was trained.
    pub weights_files: Vec<String>,
    /// Settings at the time of saving, for comparison.
    pub trainer: TrainerConfig,
    /// State of the caller.
    pub commit: Commit,
}

impl<P: Policy> Trainer<P> {
    /// Commits weights, optimizer, step and `commit` as one checkpoint and returns its directory, which is
    /// named after `number`, the caller's step. A step may contain several updates or none. `extra` files
    /// (tokenizer, effective configuration) are stored with the weights.
    ///
    /// # Errors
    /// Same as [`CheckpointStore::save`]; the previous checkpoint is intact.
    pub fn save(
        &mut self,
        store: &CheckpointStore,
        number: u64,
        commit: &Commit,
        extra: Vec<(String, Vec<u8>)>,
    ) -> Result<PathBuf, CheckpointError> {
        let part = |file: &str, reason: String| CheckpointError::Part {
            file: file.to_owned(),
            reason,
        };
        let side = self.policy.side_files();
        let side = side.map_err(|e| part("weights", e.to_string()))?;
        let weights = self.policy.weights();
        let state = ResumeState {
            format_version: FORMAT_VERSION,
            step: self.updates,
            skipped_updates: self.skipped_updates,
            weights_files: weights.iter().map(|file| file.name.to_owned()).collect(),
            trainer: self.config,
            commit: commit.clone(),
        };
        let bytes = serde_json::to_vec_pretty(&state).map_err(|e| part(STATE, e.to_string()))?;
        let mut files = vec![(STATE.to_owned(), bytes)];
        files.extend(extra);
        files.extend(side);
        let mut parts: Vec<Part<'_>> = files
            .into_iter()
            .map(|(file, bytes)| Part::Bytes { file, bytes })
            .collect();
        parts.push(Part::Tensors {
            file: OPTIMIZER.to_owned(),
            tensors: self.policy.optimizer(),
        });
        parts.extend(weights.into_iter().map(|file| Part::Tensors {
            file: file.name.to_owned(),
            tensors: file.tensors,
        }));
        store.save(number, &parts)
    }

    /// Restores weights, optimizer state and step from a checkpoint. Returns the state that was committed
    /// with them.
    ///
    /// The trainer keeps its own configuration, since a resumed run may change the learning rate. The caller
    /// can compare it with [`ResumeState::trainer`].
    ///
    /// # Errors
    /// If the checkpoint has another format or other weights. Nothing is changed in that case.
    pub fn restore(&mut self, loaded: &LoadedCheckpoint) -> Result<ResumeState, CheckpointError> {
        let mismatch = |reason: String| CheckpointError::Mismatch {
            path: loaded.path.clone(),
            reason,
        };
        let state: ResumeState = serde_json::from_slice(&loaded.bytes(STATE)?)
            .map_err(|e| mismatch(format!("{STATE}: {e}")))?;
        if state.format_version != FORMAT_VERSION {
            return Err(mismatch(format!(
                "{STATE} has format version {}, this program reads {FORMAT_VERSION}",
                state.format_version
            )));
        }
        let files = self.policy.weights();
        let files: Vec<&'static str> = files.into_iter().map(|file| file.name).collect();
        if state.weights_files != files {
            return Err(mismatch(format!(
                "it holds {:?}, this run trains {files:?}",
                state.weights_files
            )));
        }
        let mut weights = StoredTensors::default();
        for file in files {
            weights.extend(loaded.tensors(file)?);
        }
        let optimizer = loaded.tensors(OPTIMIZER)?;
        let restored = match state.step {
            0 => self.policy.restore(&weights, None),
            _ => self.policy.restore(&weights, Some(&optimizer)),
        };
        restored.map_err(|e| mismatch(e.0))?;
        self.updates = state.step;
        self.skipped_updates = state.skipped_updates;
        self.place = state.step + state.skipped_updates;
        Ok(state)
    }
}
