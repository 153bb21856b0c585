//! Saves a trainer's state as a checkpoint and restores it bit for bit.
//!
//! The trainer's only randomness, the order of minibatches, follows from seed and step; the learning rate
//! follows from schedule and step. No generator state has to be saved.

use crate::checkpoint::{CheckpointError, CheckpointStore, LoadedCheckpoint, Part};
use crate::policy::Policy;
use crate::trainer::{Trainer, TrainerConfig};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// File name of the state.
const STATE: &str = "state.json";
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
        let mut draft = store.begin(number)?;
        let state = ResumeState {
            format_version: FORMAT_VERSION,
            step: self.updates,
            skipped_updates: self.skipped_updates,
            weights_files: self.policy.save(&mut draft)?,
            trainer: self.config,
            commit: commit.clone(),
        };
        let bytes = serde_json::to_vec_pretty(&state).map_err(|e| CheckpointError::Part {
            file: STATE.to_owned(),
            reason: e.to_string(),
        })?;
        let state = (STATE.to_owned(), bytes);
        for (file, bytes) in std::iter::once(state).chain(extra) {
            draft.write(&Part::Bytes { file, bytes })?;
        }
        draft.commit()
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
        let state: ResumeState = serde_json::from_slice(&loaded.bytes(STATE)?)
            .map_err(|e| loaded.mismatch(format!("{STATE}: {e}")))?;
        if state.format_version != FORMAT_VERSION {
            return Err(loaded.mismatch(format!(
                "{STATE} has format version {}, this program reads {FORMAT_VERSION}",
                state.format_version
            )));
        }
        self.policy.load(loaded, &state.weights_files, state.step)?;
        self.updates = state.step;
        self.skipped_updates = state.skipped_updates;
        self.place = state.step + state.skipped_updates;
        Ok(state)
    }
}
