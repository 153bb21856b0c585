//! `sinew export`: the weights of a run as one model folder, adapters merged into the model that they adapt.
//!
//! The folder has the form of Hugging Face: `config.json`, `model.safetensors`, `tokenizer.json` and the
//! chat template. vLLM, SGLang and transformers load it, and so does `model = "FOLDER"` in a recipe.

use crate::output;
use clap::{Args, ValueEnum};
use sinew_assembly::Failure;
use sinew_model::{SaveDtype, save_pretrained};
use std::fs;
use std::path::{Path, PathBuf};

/// Arguments of `sinew export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Folder of the run, or of a chain: the last stage that ended
    run_dir: PathBuf,
    /// Folder to write: config.json, model.safetensors, tokenizer
    out: PathBuf,
    /// Format of the weights
    #[arg(long, value_enum, default_value_t = WeightDtype::F32)]
    dtype: WeightDtype,
}

/// Values of `--dtype`. Training keeps weights in 32 bits; bf16 halves the file and rounds.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum WeightDtype {
    /// 32 bits, as trained
    F32,
    /// bfloat16: half the size
    Bf16,
}

/// Copies the files of a checkpoint that make a model: all but the trainer's state.
///
/// # Errors
/// If another type of numbers is asked for, or a file cannot be copied.
fn copy(args: &ExportArgs, checkpoint: &Path, unknown: &Failure) -> Result<(), Failure> {
    if matches!(args.dtype, WeightDtype::Bf16) {
        return Err(Failure::input(format!(
            "--dtype bf16: the weights can only be copied, as trained: {}\n  hint: leave --dtype out",
            unknown.text()
        )));
    }
    let failed = |e: std::io::Error| Failure::system(format!("{}: {e}", args.out.display()));
    fs::create_dir_all(&args.out).map_err(failed)?;
    for entry in fs::read_dir(checkpoint).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default();
        let state = ["state.json", "checksums.json", "critic.safetensors"];
        if path.is_file() && !state.iter().any(|file| name == *file) {
            fs::copy(&path, args.out.join(name)).map_err(failed)?;
        }
    }
    Ok(())
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
    let run = sinew_assembly::RunModel::open(&args.run_dir)?;
    let (renderer, checkpoint) = (run.renderer()?, run.checkpoint()?);
    match run.config() {
        // PyTorch trains families that this program does not compute: their checkpoints are whole models.
        Err(unknown) if checkpoint.join("config.json").is_file() => {
            copy(args, &checkpoint, &unknown)?;
        }
        _ => {
            let params = run.params()?;
            let dtype = match args.dtype {
                WeightDtype::F32 => SaveDtype::F32,
                WeightDtype::Bf16 => SaveDtype::Bf16,
            };
            let files = renderer.files().map_err(Failure::system)?;
            save_pretrained(&args.out, &params, dtype, &files).map_err(Failure::system)?;
        }
    }
    output::print(&format!(
        "{}: the weights of {}\n",
        args.out.display(),
        checkpoint.display()
    ));
    Ok(())
}
