//! A trainer's state as a checkpoint, and back: to the bit.

use crate::checkpoint::{CheckpointError, CheckpointStore, Loaded, Part, StoredTensors};
use crate::optim::Moments;
use crate::policy::{Policy, TrainTensor};
use crate::trainer::{Trainer, TrainerConfig};
use serde::{Deserialize, Serialize};
use sinew_tensor::Buffer;
use sinew_types::TensorView;
use std::path::PathBuf;

const STATE: &str = "state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
/// Version of `state.json`; newer ones are refused.
const FORMAT_VERSION: u32 = 1;

/// What the caller ties to the weights in one commit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Commit {
    /// Batches whose update is in these weights: a batch named here must not be trained again.
    pub trained_batches: Vec<String>,
    /// Hash of the run's configuration.
    pub config_hash: String,
    /// Anything else that must be restored together: data cursor, random states, counters.
    pub cursor: serde_json::Value,
}

/// The contents of `state.json`. The trainer's only randomness, the order of minibatches, follows
/// from `trainer.seed` and `step`; the learning rate from `trainer.schedule` and `step`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResumeState {
    pub format_version: u32,
    /// Optimizer updates applied: also the version of the weights.
    pub step: u64,
    pub skipped_updates: u64,
    /// Files of tensors, which say what was trained.
    pub weights_files: Vec<String>,
    pub trainer: TrainerConfig,
    pub commit: Commit,
}

impl<P: Policy> Trainer<P> {
    /// Commits weights, optimizer, step and `commit` as one checkpoint; returns its directory, which
    /// `number` names: the caller's steps, in which there may be several updates or none. `extra`
    /// files (tokenizer, effective configuration) go beside the weights.
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
        let tensors = self.policy.tensors();
        let state = ResumeState {
            format_version: FORMAT_VERSION,
            step: self.optimizer.step(),
            skipped_updates: self.skipped_updates,
            weights_files: files_of(&tensors).iter().map(|&f| f.to_owned()).collect(),
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
            tensors: self
                .optimizer
                .moments
                .iter()
                .flat_map(moment_tensors)
                .collect(),
        });
        for file in files_of(&tensors) {
            let of_file = tensors.iter().filter(|t| t.file == file).map(|t| {
                let view = TensorView {
                    shape: t.shape,
                    data: t.values,
                };
                (t.name.to_owned(), view)
            });
            parts.push(Part::Tensors {
                file: file.to_owned(),
                tensors: of_file.collect(),
            });
        }
        store.save(number, &parts)
    }

    /// Takes weights, moments and step of a checkpoint; returns what was committed with them.
    /// On an error of the checkpoint's contents nothing changed.
    ///
    /// The trainer's own configuration stays: a changed learning rate is a legitimate wish, and
    /// the caller can compare [`ResumeState::trainer`].
    pub fn restore(&mut self, loaded: &Loaded) -> Result<ResumeState, CheckpointError> {
        let mismatch = |reason: String| CheckpointError::Mismatch {
            path: loaded.path.clone(),
            reason,
        };
        let state: ResumeState = serde_json::from_slice(&loaded.bytes(STATE)?)
            .map_err(|e| mismatch(format!("{STATE}: {e}")))?;
        if state.format_version > FORMAT_VERSION {
            return Err(mismatch(format!(
                "{STATE} has format version {}, this program reads up to {FORMAT_VERSION}",
                state.format_version
            )));
        }
        let mut tensors = self.policy.tensors();
        let files = files_of(&tensors);
        if state.weights_files != files {
            return Err(mismatch(format!(
                "it holds {:?}, this run trains {files:?}",
                state.weights_files
            )));
        }
        let mut weights = Tensors::new(loaded);
        for file in files {
            weights.tensors.extend(loaded.tensors(file)?);
        }
        let mut saved = Tensors::new(loaded);
        saved.tensors = loaded.tensors(OPTIMIZER)?;
        let mut values = Vec::with_capacity(tensors.len());
        let mut moments = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            values.push(weights.take(tensor.name, tensor.shape)?);
            if state.step > 0 {
                moments.push(saved.take_moments(tensor)?);
            }
        }
        if let Some(name) = weights.tensors.keys().next() {
            return Err(mismatch(format!("tensor {name} is not part of this model")));
        }
        for (tensor, values) in tensors.iter_mut().zip(&values) {
            tensor.values.copy_from_slice(values);
        }
        self.optimizer.moments = moments;
        self.optimizer.step = state.step;
        self.skipped_updates = state.skipped_updates;
        self.policy
            .weights_changed()
            .map_err(|e| mismatch(e.to_string()))?;
        Ok(state)
    }
}

/// Tensors of a checkpoint on their way into a trainer.
struct Tensors<'a> {
    loaded: &'a Loaded,
    tensors: StoredTensors,
}

impl<'a> Tensors<'a> {
    fn new(loaded: &'a Loaded) -> Self {
        Self {
            loaded,
            tensors: StoredTensors::new(),
        }
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        let reason = match self.tensors.remove(name) {
            Some((found, values)) if found == shape => return Ok(values),
            Some((found, _)) => format!("{name} has shape {found:?}, expected {shape:?}"),
            None => format!("{name} is missing"),
        };
        Err(CheckpointError::Mismatch {
            path: self.loaded.path.clone(),
            reason,
        })
    }

    fn take_moments(&mut self, tensor: &TrainTensor<'_>) -> Result<Moments, CheckpointError> {
        let mut take = |kind: &str| {
            let values = self.take(&format!("{kind}.{}", tensor.name), tensor.shape)?;
            Ok(Buffer::from_slice(&values))
        };
        Ok(Moments {
            name: tensor.name.to_owned(),
            shape: tensor.shape.to_vec(),
            m: take("m")?,
            v: take("v")?,
        })
    }
}

/// The files that hold the tensors, each once.
fn files_of(tensors: &[TrainTensor<'_>]) -> Vec<&'static str> {
    let mut files: Vec<&'static str> = tensors.iter().map(|t| t.file).collect();
    files.dedup();
    files
}

fn moment_tensors(moments: &Moments) -> [(String, TensorView<'_>); 2] {
    [("m", &moments.m), ("v", &moments.v)].map(|(kind, data)| {
        let view = TensorView {
            shape: &moments.shape,
            data,
        };
        (format!("{kind}.{}", moments.name), view)
    })
}
