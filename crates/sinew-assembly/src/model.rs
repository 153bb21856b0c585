//! The policy's model: its files, tokenizer, shape and weights.
//!
//! A pretrained model is found each time by its source; a second look finds it in the cache. A model from
//! scratch has no files: its shape is in the recipe, its vocabulary is the environment's alphabet, and its
//! weights are a function of the seed.

use crate::failure::Failure;
use crate::run_model::{RunModel, run_model};
use crate::run_pins;
use sinew_model::{
    Family, Lora, LoraConfig, ModelConfig, ModelFiles, Params, Progress, ProgressSink, ResolveEnv,
    ResolveError, RopeScaling, check_model, load_config, load_gguf_metadata, load_model,
    resolve_model,
};
use sinew_recipe::{EnvSection, ModelSection, RUN, RunPlan, TemplateOptions};
use sinew_render::{ChatRenderer, GgufVocab, Renderer, TinyRenderer};
use sinew_tinker::client::ServiceState;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Places where models are searched for, from the environment of this process.
///
/// | variable | meaning | left out |
/// |---|---|---|
/// | `SINEW_PACKAGE_DIRS` | folders of Python packages, searched first | - |
/// | `SINEW_CACHE` | unpacked models | `sinew` in `XDG_CACHE_HOME` or `~/.cache` |
/// | `HF_HUB_CACHE`, `HF_HOME` | downloads | `~/.cache/huggingface/hub` |
/// | `HF_ENDPOINT`, `HF_TOKEN` | another hub, access to it | the public hub, none |
/// | `HF_HUB_OFFLINE` | no downloads, unless `0` | downloads |
pub fn resolve_env() -> ResolveEnv {
    let var = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
    let home = PathBuf::from(var("HOME").unwrap_or_else(|| ".".into()));
    let cache_root = var("XDG_CACHE_HOME").map_or_else(|| home.join(".cache"), PathBuf::from);
    let hub_home = var("HF_HOME").map_or_else(|| cache_root.join("huggingface"), PathBuf::from);
    let mut package_dirs: Vec<PathBuf> = var("SINEW_PACKAGE_DIRS")
        .map(|v| std::env::split_paths(&v).collect())
        .unwrap_or_default();
    package_dirs.push(PathBuf::from(".cache/wheels"));
    let program = std::env::current_exe().unwrap_or_default();
    package_dirs.extend(program.ancestors().map(|a| a.join(".cache/wheels")));
    package_dirs.extend(crate::python::package_dirs());
    ResolveEnv {
        package_dirs: package_dirs.into_iter().filter(|d| d.is_dir()).collect(),
        cache_dir: var("SINEW_CACHE").map_or_else(|| cache_root.join("sinew"), PathBuf::from),
        hub_cache: var("HF_HUB_CACHE").map_or_else(|| hub_home.join("hub"), PathBuf::from),
        hub_endpoint: var("HF_ENDPOINT").unwrap_or_else(|| ResolveEnv::HUB.into()),
        hub_token: var("HF_TOKEN"),
        offline: var("HF_HUB_OFFLINE").is_some_and(|v| v != "0"),
        progress: Some(download_progress()),
    }
}

/// Pause between two lines about one download.
const PROGRESS_PAUSE: Duration = Duration::from_secs(2);

/// Writes lines about downloads that take long to standard error.
fn download_progress() -> ProgressSink {
    let last = Mutex::new((String::new(), Instant::now()));
    Arc::new(move |now: Progress<'_>| {
        let Ok(mut last) = last.lock() else { return };
        if last.0 != now.file {
            *last = (now.file.to_owned(), Instant::now());
        }
        if last.1.elapsed() >= PROGRESS_PAUSE {
            last.1 = Instant::now();
            sinew_view::say(&progress_line(&now));
        }
    })
}

/// One line about a download, in MiB.
fn progress_line(now: &Progress<'_>) -> String {
    const MIB: u64 = 1 << 20;
    let (file, done) = (now.file, now.bytes / MIB);
    match now.total {
        Some(total) => format!("downloading {file}: {done} of {} MiB", total / MIB),
        None => format!("downloading {file}: {done} MiB"),
    }
}

/// A model that is not there: something to get first, or a name that cannot be one.
pub(crate) fn unresolved(key: &str, e: ResolveError) -> Failure {
    let hint = match &e {
        ResolveError::Missing { spec, .. } => of_a_run(spec),
        ResolveError::NoConfig(folder) => folder.to_str().and_then(of_a_run),
        _ => None,
    };
    let text = format!("{key}: {e}{}", hint.unwrap_or_default());
    match e {
        ResolveError::NoPath { .. }
        | ResolveError::Missing { .. }
        | ResolveError::NoPackage { .. }
        | ResolveError::Offline { .. }
        | ResolveError::Hub { .. } => Failure::outside(text),
        _ => Failure::input(text),
    }
}

/// A model that is there and cannot be used.
pub(crate) fn wrong_model(e: impl std::fmt::Display) -> Failure {
    Failure::input(format!("model: {e}"))
}

/// A hint for the folder of a run, which `run:` names, or of one that was not trained yet.
fn of_a_run(spec: &str) -> Option<String> {
    let folders = [PathBuf::from(spec), Path::new("runs").join(spec)];
    let holds = |f: &&PathBuf| sinew_runs::holds_run(f) || sinew_runs::chain::holds_chain(f);
    if let Some(run) = folders.iter().find(holds) {
        return Some(format!(
            "\n  hint: the newest weights of that run are \"{RUN}{}\"",
            run.display()
        ));
    }
    let recipe = Path::new("recipes")
        .join(Path::new(spec).file_name()?)
        .with_extension("toml");
    let (named, there) = (spec.starts_with("runs/"), recipe.is_file());
    (named && there).then(|| {
        let recipe = recipe.display();
        format!("\n  hint: `sinew train {recipe} --run-dir {spec}` trains it; its weights are \"{RUN}{spec}\"")
    })
}

/// Files of the recipe's model, downloaded if they are on the hub; `None` for one from scratch, and for one
/// of a run that keeps adapters.
///
/// # Errors
/// If the source cannot be found or downloaded, or a run has no checkpoint yet.
pub(crate) fn model_files(section: &ModelSection) -> Result<Option<ModelFiles>, Failure> {
    match section {
        ModelSection::Scratch { .. } => Ok(None),
        ModelSection::Pretrained { source, .. } if source.starts_with(RUN) => {
            let run = run_model(source)?.map(|run| run.checkpoint()).transpose()?;
            let whole = run.filter(|folder| folder.join("config.json").is_file());
            Ok(whole.map(ModelFiles::Dir))
        }
        ModelSection::Pretrained { source, .. } => resolve_model(source, &resolve_env())
            .map(Some)
            .map_err(|e| unresolved("model", e)),
    }
}

/// Same as [`model_files`], for what reads only folders: `None` also for a GGUF file.
pub(crate) fn model_folder(section: &ModelSection) -> Result<Option<PathBuf>, Failure> {
    Ok(match model_files(section)? {
        Some(ModelFiles::Dir(dir)) => Some(dir),
        _ => None,
    })
}

/// Tokenizer and chat template of a folder or a GGUF file, which has both in its metadata. `template` are
/// variables of the chat template.
///
/// # Errors
/// If tokenizer or chat template are missing, or of a form that is not known, or the template does not read a
/// variable.
pub fn chat_renderer(
    files: &ModelFiles,
    template: &TemplateOptions,
) -> Result<ChatRenderer, Failure> {
    let options = template.0.clone().into_iter().collect();
    match files {
        ModelFiles::Dir(dir) => ChatRenderer::from_dir(dir, options).map_err(wrong_model),
        ModelFiles::Gguf(path) => {
            let meta = load_gguf_metadata(path).map_err(wrong_model)?;
            let types = meta.token_types().map_err(wrong_model)?.unwrap_or_default();
            let vocab = GgufVocab {
                model: meta.tokenizer_model().map_err(wrong_model)?.into(),
                pre: meta
                    .pre_tokenizer()
                    .map_err(wrong_model)?
                    .unwrap_or_default()
                    .into(),
                tokens: meta.tokens().map_err(wrong_model)?.to_vec(),
                token_types: types.iter().map(|&t| t as i32).collect(),
                merges: meta.merges().map_err(wrong_model)?.to_vec(),
            };
            ChatRenderer::from_gguf(
                &vocab,
                meta.chat_template().map_err(wrong_model)?,
                meta.token_id("bos").map_err(wrong_model)?,
                meta.token_id("eos").map_err(wrong_model)?,
                options,
            )
            .map_err(wrong_model)
        }
    }
}

/// The renderer of a recipe's model: its tokenizer and chat template, or characters of the environment's
/// alphabet for one from scratch.
///
/// # Errors
/// If the model cannot be found, or a run trained with another alphabet than that of `env`.
pub fn renderer(section: &ModelSection, env: &EnvSection) -> Result<Arc<dyn Renderer>, Failure> {
    if let Some(run) = of_run(section)? {
        run.check_alphabet(env)?;
        return run.renderer_with(section.template());
    }
    Ok(match (model_files(section)?, env.needs().alphabet) {
        (Some(files), _) => Arc::new(chat_renderer(&files, section.template())?),
        (None, Some(alphabet)) => Arc::new(TinyRenderer::new(alphabet)),
        (None, None) => {
            let bytes = sinew_render::byte_renderer();
            Arc::new(bytes.map_err(|e| Failure::system(format!("model: {e}")))?)
        }
    })
}

/// The renderer of a model that only samples and trains given tokens, which may have no chat template.
pub(crate) fn token_renderer(
    section: &ModelSection,
    env: &EnvSection,
) -> Result<Arc<dyn Renderer>, Failure> {
    if of_run(section)?.is_none()
        && let Some(dir) = model_folder(section)?
    {
        let made = ChatRenderer::from_dir_for_tokens(&dir);
        return Ok(Arc::new(made.map_err(wrong_model)?));
    }
    renderer(section, env)
}

/// Folder in that of a run with the tokenizer and the chat template of its model.
const TOKENIZER: &str = "tokenizer";

/// Keeps the tokenizer in the folder of a run, so that what is stored there can be read wherever the folder
/// lies. Renderers without files follow from the recipe.
///
/// # Errors
/// If the folder cannot be written.
pub fn keep_renderer(folder: &Path, renderer: &dyn Renderer) -> Result<(), Failure> {
    let kept = folder.join(TOKENIZER);
    let failed = |e: std::io::Error| Failure::system(format!("{}: {e}", kept.display()));
    for (name, content) in renderer.files().map_err(Failure::system)? {
        let file = kept.join(name);
        if std::fs::read(&file).is_ok_and(|old| old == content) {
            continue;
        }
        std::fs::create_dir_all(&kept).map_err(failed)?;
        sinew_runs::write_atomic(&file, &content).map_err(failed)?;
    }
    Ok(())
}

/// The renderer of the run in a folder: with the tokenizer that it keeps, or that of its recipe.
///
/// # Errors
/// If it keeps none and the model of the recipe cannot be found.
pub fn renderer_of(folder: &Path, recipe: &RunPlan) -> Result<Arc<dyn Renderer>, Failure> {
    let kept = folder.join(TOKENIZER);
    if kept.join("tokenizer.json").is_file() {
        // Variables of its template are set in the template that was kept.
        let template = TemplateOptions::default();
        return Ok(Arc::new(chat_renderer(&ModelFiles::Dir(kept), &template)?));
    }
    match recipe.env.needs().alphabet {
        // No other tokenizer fits, whichever run the weights are of.
        Some(alphabet) => Ok(Arc::new(TinyRenderer::new(alphabet))),
        None => renderer(&recipe.model, &recipe.env),
    }
}

/// The run that a model is of, if it is.
fn of_run(section: &ModelSection) -> Result<Option<RunModel>, Failure> {
    match section {
        ModelSection::Pretrained { source, .. } => run_model(source),
        ModelSection::Scratch { .. } => Ok(None),
    }
}

/// Weights that a run begins with, in 32 bits: from files, of another run, or random ones from the seed.
///
/// # Errors
/// If files are missing or damaged, or the shape of `[model]` cannot be built.
pub fn loaded_params(recipe: &RunPlan, renderer: &dyn Renderer) -> Result<Params, Failure> {
    if let Some(run) = of_run(&recipe.model)? {
        return run.params();
    }
    if let Some(files) = model_files(&recipe.model)? {
        return Ok(load_model(&files).map_err(wrong_model)?.params);
    }
    let config = scratch_config(recipe, renderer)?;
    Ok(Params::random(&config, recipe.seed))
}

/// Shape of a recipe's model, without its weights.
///
/// # Errors
/// Same as [`loaded_params`], but the weights are not read, so damage in them is not found. Those of a Tinker
/// service are not here.
pub fn model_config(recipe: &RunPlan) -> Result<ModelConfig, Failure> {
    if let Some(run) = of_run(&recipe.model)? {
        return run.config();
    }
    match model_files(&recipe.model)? {
        None => scratch_config(recipe, renderer(&recipe.model, &recipe.env)?.as_ref()),
        Some(files) if recipe.tinker().is_some() => load_config(&files).map_err(wrong_model),
        Some(files) => check_model(&files).map_err(wrong_model),
    }
}

/// The parts of a run's model: made as those of its own recipe, with its newest weights.
impl RunModel {
    /// The renderer of the run.
    pub fn renderer(&self) -> Result<Arc<dyn Renderer>, Failure> {
        renderer_of(&self.folder, &self.recipe)
    }

    /// Same as [`RunModel::renderer`]; `template` replaces the variables of the run, if it has any.
    pub fn renderer_with(&self, template: &TemplateOptions) -> Result<Arc<dyn Renderer>, Failure> {
        if template.is_empty() {
            return self.renderer();
        }
        match &self.recipe.model {
            ModelSection::Pretrained { source, .. } => {
                let (source, template) = (source.clone(), template.clone());
                renderer(
                    &ModelSection::Pretrained { source, template },
                    &self.recipe.env,
                )
            }
            ModelSection::Scratch { .. } => Err(Failure::input(
                "model.template has no effect: a model from scratch has no chat template of its own; remove it",
            )),
        }
    }

    /// Shape of its model, with adapters merged; weights are not read.
    pub fn config(&self) -> Result<ModelConfig, Failure> {
        match self.latest() {
            Some(folder) if folder.join("config.json").is_file() => {
                load_config(&ModelFiles::Dir(folder)).map_err(wrong_model)
            }
            Some(folder) if folder.join("adapter_config.json").is_file() => {
                let base = model_config(&self.recipe)?;
                let lora = LoraConfig::load(&folder).map_err(Failure::input)?;
                Ok(lora.merged_config(&base))
            }
            _ => model_config(&self.recipe),
        }
    }

    /// Returns the newest weights in 32 bits, with adapters merged as in the engine that sampled with them.
    pub fn params(&self) -> Result<Params, Failure> {
        let checkpoint = self.checkpoint()?;
        let state = ServiceState::of_checkpoint(&checkpoint).map_err(Failure::system)?;
        if let Some(state) = state {
            return Err(Failure::input(format!(
                "{}: its weights are at the Tinker service, {}, not here\n  hint: a recipe with trainer.type = \
                 \"tinker\" starts from them",
                self.folder.display(),
                state.path
            )));
        }
        if !checkpoint.join("adapter_config.json").exists() {
            let files = ModelFiles::Dir(checkpoint);
            return Ok(load_model(&files).map_err(Failure::input)?.params);
        }
        // The adapters belong on the weights that their run began with.
        let recipe = run_pins::of_folder(&self.folder, &self.recipe)?;
        let base = loaded_params(&recipe, self.renderer()?.as_ref())?;
        let lora = Lora::load(&checkpoint, base.config()).map_err(Failure::input)?;
        let merged = lora.merged(&crate::device()?, &base);
        merged.map_err(Failure::input)
    }
}

/// Configuration of a model from scratch: a small Llama with tied embeddings, whose context is that of
/// `rollout.max_context_tokens`.
fn scratch_config(recipe: &RunPlan, renderer: &dyn Renderer) -> Result<ModelConfig, Failure> {
    let ModelSection::Scratch {
        d_model,
        layers,
        heads,
        kv_heads,
        d_ff,
    } = recipe.model
    else {
        return Err(Failure::system("model.type is not `scratch`"));
    };
    ModelConfig {
        family: Family::Llama,
        vocab: renderer.vocab_size(),
        d_model,
        layers,
        heads,
        kv_heads,
        head_dim: d_model / heads,
        d_ff,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        rms_eps: 1e-5,
        tied_embeddings: true,
        qkv_bias: false,
        qk_norm: false,
        max_context: recipe.rollout.max_context_tokens as usize,
        bos_id: None,
        eos_ids: renderer.stop_ids().to_vec(),
    }
    .checked()
    .map_err(wrong_model)
}

/// Whether the model has the context that `rollout.max_context_tokens` asks for.
///
/// # Errors
/// If the recipe asks for more tokens than the model has positions for.
pub fn check_context(asked: u32, context: usize) -> Result<(), Failure> {
    let asked = asked as usize;
    if asked <= context {
        return Ok(());
    }
    Err(Failure::input(format!(
        "rollout.max_context_tokens = {asked}: allowed: up to {context}, the context of the model"
    )))
}
