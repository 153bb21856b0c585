//! Checks that the disk has room for the checkpoints of a run.
//!
//! A full disk would end a run at its first checkpoint, after hours of work. The store of episodes is not
//! counted: its size depends on how much the model samples.

use sinew_assembly::Failure;
use sinew_model::{ModelConfig, ModelShape, ParamLayout};
use sinew_recipe::RunPlan;
use std::path::Path;

/// Bytes of a checkpoint without weights, which a Tinker service has: the tokenizer.
const TOKENIZER: u64 = 32 << 20;

/// Disk needs: weights, two moments, and as many checkpoints as are kept plus the one being written. A
/// checkpoint of adapters counts half of the weights.
///
/// # Errors
/// If the file system of `at` has less free.
pub(super) fn disk(recipe: &RunPlan, at: &Path) -> Result<String, Failure> {
    let per_checkpoint = checkpoint_bytes(recipe)?;
    let at_once = (recipe.train.keep_checkpoints as u64).saturating_add(1);
    room(at, per_checkpoint.saturating_mul(at_once))?;
    Ok(format!(
        "room for {at_once} checkpoints of {} MiB",
        per_checkpoint.div_ceil(1 << 20)
    ))
}

/// Bytes of one checkpoint.
fn checkpoint_bytes(recipe: &RunPlan) -> Result<u64, Failure> {
    if recipe.tinker().is_some() {
        return Ok(TOKENIZER);
    }
    if recipe.torch().is_some() {
        return Ok(torch_bytes(recipe, &sinew_assembly::model_shape(recipe)?));
    }
    let weights = weight_bytes(&sinew_assembly::model_config(recipe)?);
    Ok(if recipe.train.lora.is_some() {
        weights / 2
    } else {
        3 * weights
    })
}

/// Bytes that the ranks of PyTorch write: 12 for each trained parameter.
fn torch_bytes(recipe: &RunPlan, model: &ModelShape) -> u64 {
    let trained = match &recipe.train.lora {
        Some(lora) => model.adapter_parameters(lora.rank as u64, &lora.targets),
        None => model.parameters,
    };
    trained.saturating_mul(12)
}

/// Bytes of all weights in 32 bits, as checkpoints hold them.
fn weight_bytes(config: &ModelConfig) -> u64 {
    4 * ParamLayout::new(config).total() as u64
}

/// A folder, or the nearest one above it that exists.
pub(crate) fn nearest(path: &Path) -> &Path {
    let found = path.ancestors().find(|at| at.exists());
    found.unwrap_or(Path::new("."))
}

/// Whether the file system of a folder has `bytes` free. The folder need not exist yet.
fn room(path: &Path, bytes: u64) -> Result<(), Failure> {
    let at = nearest(path);
    let free = sinew_telemetry::disk_free(at)
        .map_err(|e| Failure::system(format!("{}: {e}", at.display())))?;
    if free >= bytes {
        return Ok(());
    }
    let mib = |b: u64| b >> 20;
    Err(Failure::input(format!(
        "{}: {} MiB free, checkpoints of this run need about {} MiB\n  hint: free some space, or lower train.keep_checkpoints",
        at.display(),
        mib(free),
        mib(bytes)
    )))
}
