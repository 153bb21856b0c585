//! `sinew export`: the weights of a run as one model folder, adapters merged into the model that they adapt;
//! or a model of a package, of the hub or in a GGUF file, in 32 bits as this program computes with it.
//!
//! The folder has the form of Hugging Face: `config.json`, `model.safetensors`, `tokenizer.json` and the
//! chat template. vLLM, SGLang and transformers load it, and so does `model = "FOLDER"` in a recipe.

use crate::output;
use clap::{Args, ValueEnum};
use sinew_assembly::{Failure, chat_renderer, resolve_env};
use sinew_model::{Params, SaveDtype, load_model, resolve_model, save_pretrained};
use sinew_recipe::TemplateOptions;
use sinew_render::Renderer;
use std::fs;
use std::path::{Path, PathBuf};

/// Arguments of `sinew export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Folder of the run, or of a chain: the last stage that ended. Or a model as in a recipe: package:NAME,
    /// hf:ORG/NAME, FILE.gguf
    #[arg(value_name = "RUN|MODEL")]
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

/// Whether a text names a model that no run made.
fn is_source(text: &str) -> bool {
    let prefixes = ["package:", "pypi:", "hf:"];
    prefixes.iter().any(|prefix| text.starts_with(prefix)) || text.ends_with(".gguf")
}

/// Writes weights with the files of their tokenizer.
fn save(args: &ExportArgs, params: &Params, renderer: &dyn Renderer) -> Result<(), Failure> {
    let dtype = match args.dtype {
        WeightDtype::F32 => SaveDtype::F32,
        WeightDtype::Bf16 => SaveDtype::Bf16,
    };
    let files = renderer.files().map_err(Failure::system)?;
    save_pretrained(&args.out, params, dtype, &files).map_err(Failure::system)
}

/// Writes a model that no run made.
fn source(args: &ExportArgs, source: &str) -> Result<(), Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::input(format!("{source}: {e}"));
    let files = resolve_model(source, &resolve_env())
        .map_err(|e| Failure::outside(format!("{source}: {e}")))?;
    let renderer = chat_renderer(&files, &TemplateOptions::default())?;
    let loaded = load_model(&files).map_err(|e| failed(&e))?;
    save(args, &loaded.params, &renderer)
}

/// `sinew export RUN OUT`, from the newest whole checkpoint, or `sinew export MODEL OUT`.
///
/// # Errors
/// If `out` is not empty, the run has no checkpoint whose checksums are right, or the model is not there.
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
    let named = args.run_dir.to_string_lossy();
    if is_source(&named) {
        source(args, &named)?;
        output::print(&format!("{}: the weights of {named}\n", args.out.display()));
        return Ok(());
    }
    let run = sinew_assembly::RunModel::open(&args.run_dir)?;
    let (renderer, checkpoint) = (run.renderer()?, run.checkpoint()?);
    match run.config() {
        // PyTorch trains families that this program does not compute: their checkpoints are whole models.
        Err(unknown) if checkpoint.join("config.json").is_file() => {
            copy(args, &checkpoint, &unknown)?;
        }
        _ => {
            save(args, &run.params()?, renderer.as_ref())?;
        }
    }
    output::print(&format!(
        "{}: the weights of {}\n",
        args.out.display(),
        checkpoint.display()
    ));
    Ok(())
}
