//! The model and the device that the benches compute with.

use crate::BenchError;
use crate::model_output::Real;
use sinew_env::math::{MathTaskConfig, Mixed, PromptConfig};
use sinew_env::{Split, Taskset};
use sinew_model::{ModelFiles, ResolveEnv, load_gguf_metadata, load_model, resolve_model};
use sinew_render::{ChatRenderer, GgufVocab, Renderer};
use sinew_tensor::{Cpu, KernelSet};
use std::path::PathBuf;
use std::sync::Arc;

/// The device that `SINEW_CPU` and `SINEW_THREADS` ask for, else all cores with the best kernels.
///
/// `SINEW_THREADS` may be 1 to 1024.
///
/// # Errors
/// If a variable has another value; the message has the allowed ones.
pub(crate) fn device() -> Result<Cpu, BenchError> {
    let kernels = match std::env::var("SINEW_CPU") {
        Ok(name) => {
            KernelSet::parse(&name).map_err(|e| BenchError::input(format!("SINEW_CPU: {e}")))?
        }
        Err(_) => KernelSet::detect(),
    };
    let threads = match std::env::var("SINEW_THREADS") {
        Ok(text) => text
            .parse()
            .ok()
            .filter(|n| (1..=1024).contains(n))
            .ok_or_else(|| {
                BenchError::input(format!("SINEW_THREADS = {text:?}: allowed: 1 to 1024"))
            })?,
        Err(_) => std::thread::available_parallelism().map_or(1, usize::from),
    };
    Ok(Cpu::new(kernels, threads))
}

/// Places of models: those of `sinew`, except the packages of other Python environments.
///
/// Variables: `SINEW_PACKAGE_DIRS`, `SINEW_CACHE`, `XDG_CACHE_HOME`, `HF_HOME`, `HF_HUB_CACHE`,
/// `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`. The folder `.cache/wheels` is searched here and above the
/// program.
fn places() -> ResolveEnv {
    let var = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
    let home = PathBuf::from(var("HOME").unwrap_or_else(|| ".".into()));
    let cache = var("XDG_CACHE_HOME").map_or_else(|| home.join(".cache"), PathBuf::from);
    let hub = var("HF_HOME").map_or_else(|| cache.join("huggingface"), PathBuf::from);
    let named = var("SINEW_PACKAGE_DIRS").unwrap_or_default();
    let program = std::env::current_exe().unwrap_or_default();
    let dirs = std::env::split_paths(&named)
        .chain([".cache/wheels".into()])
        .chain(program.ancestors().map(|a| a.join(".cache/wheels")));
    ResolveEnv {
        package_dirs: dirs.filter(|d| d.is_dir()).collect(),
        cache_dir: var("SINEW_CACHE").map_or_else(|| cache.join("sinew"), PathBuf::from),
        hub_cache: var("HF_HUB_CACHE").map_or_else(|| hub.join("hub"), PathBuf::from),
        hub_endpoint: var("HF_ENDPOINT").unwrap_or_else(|| ResolveEnv::HUB.into()),
        hub_token: var("HF_TOKEN"),
        offline: var("HF_HUB_OFFLINE").is_some_and(|v| v != "0"),
        progress: None,
    }
}

/// The tokenizer and template of a model.
///
/// Renderer from the files of a folder, or from the metadata of a GGUF file.
fn renderer(files: &ModelFiles) -> Result<ChatRenderer, BenchError> {
    let path = match files {
        ModelFiles::Dir(dir) => {
            return ChatRenderer::from_dir(dir, serde_json::Map::new()).map_err(BenchError::system);
        }
        ModelFiles::Gguf(path) => path,
    };
    let meta = load_gguf_metadata(path).map_err(BenchError::system)?;
    let failed = |e: sinew_model::ConfigError| BenchError::system(e);
    let types = meta.token_types().map_err(failed)?.unwrap_or_default();
    let vocab = GgufVocab {
        model: meta.tokenizer_model().map_err(failed)?.into(),
        pre: (meta.pre_tokenizer().map_err(failed)?)
            .unwrap_or_default()
            .into(),
        tokens: meta.tokens().map_err(failed)?.to_vec(),
        token_types: types.iter().map(|&t| t as i32).collect(),
        merges: meta.merges().map_err(failed)?.to_vec(),
    };
    ChatRenderer::from_gguf(
        &vocab,
        meta.chat_template().map_err(failed)?,
        meta.token_id("bos").map_err(failed)?,
        meta.token_id("eos").map_err(failed)?,
        serde_json::Map::new(),
    )
    .map_err(BenchError::system)
}

/// The model `source`, as a recipe's `model` names it, with prompts of the `tool_math` environment.
///
/// # Errors
/// The reason, as a row prints it: a bench without its model continues with the other parts.
pub(crate) fn load(source: &str) -> Result<Real, BenchError> {
    let files = resolve_model(source, &places()).map_err(BenchError::system)?;
    let params = load_model(&files).map_err(BenchError::system)?.params;
    let renderer: Arc<dyn Renderer> = Arc::new(renderer(&files)?);
    let tasks = Mixed::new(MathTaskConfig::default()).map_err(BenchError::system)?;
    let prompts = (0..Real::PROMPTS).map(|i| {
        let task = tasks.get(Split::Train, i).map_err(BenchError::system)?;
        let messages = PromptConfig::default().messages(&task.prompt);
        let prompt = renderer.render_prompt(&messages, &[]);
        prompt.map_err(BenchError::system)
    });
    let prompts = prompts.collect::<Result<_, _>>()?;
    let columns = params.config().vocab;
    Ok(Real {
        grammars: sinew_pipeline::grammars(&renderer, columns).map_err(BenchError::system)?,
        prompts,
        params,
        renderer,
    })
}
