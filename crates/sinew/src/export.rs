//! `sinew export`: the weights of a run as one model folder, adapters merged into the model that they adapt.
//!
//! The folder has the form of Hugging Face: `config.json`, `model.safetensors`, `tokenizer.json` and the
//! chat template. vLLM, SGLang and transformers load it, and so does `model = "FOLDER"` in a recipe.

use crate::failure::Failure;
use crate::{output, wire};
use clap::{Args, ValueEnum};
use sinew_model::{Lora, ModelFiles, Params, SaveDtype, load_model, merge_lora, save_pretrained};
use sinew_train::checkpoint::CheckpointStore;
use std::path::{Path, PathBuf};

/// Arguments of `sinew export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Folder of the run
    run_dir: PathBuf,
    /// Folder to write: config.json, model.safetensors, tokenizer
    out: PathBuf,
    /// How the weights are stored
    #[arg(long, value_enum, default_value_t = Stored::F32)]
    dtype: Stored,
}

/// Values of `--dtype`. Training keeps weights in 32 bits; bf16 halves the file and rounds.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Stored {
    /// 32 bits, as trained
    F32,
    /// bfloat16: half the size
    Bf16,
}

/// `sinew export RUN OUT`, from the newest whole checkpoint.
///
/// # Errors
/// If `out` is not empty, or the run has no checkpoint whose checksums are right.
pub(crate) fn run(args: &ExportArgs) -> Result<(), Failure> {
    if args
        .out
        .read_dir()
        .is_ok_and(|mut files| files.next().is_some())
    {
        return Err(Failure::input(format!(
            "{}: the folder is not empty: name another, or remove it",
            args.out.display()
        )));
    }
    let recipe = sinew_project::recipe(&args.run_dir)?;
    let checkpoint = checkpoint(&args.run_dir)?;
    let renderer = wire::renderer(&recipe.model, &recipe.env)?;
    let adapters = checkpoint.join("adapter_config.json").exists();
    let params = if adapters {
        let base = wire::loaded_params(&recipe, renderer.as_ref())?;
        merged(&checkpoint, &base)?
    } else {
        let files = ModelFiles::Dir(checkpoint.clone());
        load_model(&files).map_err(Failure::input)?.params
    };
    let dtype = match args.dtype {
        Stored::F32 => SaveDtype::F32,
        Stored::Bf16 => SaveDtype::Bf16,
    };
    let files = renderer.files().map_err(Failure::system)?;
    save_pretrained(&args.out, &params, dtype, &files).map_err(Failure::system)?;
    output::print(&format!(
        "{}: the weights of {}\n",
        args.out.display(),
        checkpoint.display()
    ));
    Ok(())
}

/// The newest good checkpoint of a run. Damaged ones are passed over, with a line in the log.
fn checkpoint(run_dir: &Path) -> Result<PathBuf, Failure> {
    let dir = run_dir.join("checkpoints");
    let none = || Failure::input(format!("{}: no checkpoint to export", dir.display()));
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

/// `base` with the adapters of a checkpoint added, in 32 bits.
fn merged(checkpoint: &Path, base: &Params) -> Result<Params, Failure> {
    let lora = Lora::load(checkpoint, base.config()).map_err(Failure::input)?;
    let mut merged = Params::zeros(base.config());
    merge_lora(&wire::device()?, base, &lora, &mut merged).map_err(Failure::input)?;
    Ok(merged)
}
