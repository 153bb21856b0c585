//! Engines outside of this process: addresses of the command line and of recipes.
//!
//! Several addresses are one engine: requests go to the server that suits them, and to another one when it
//! fails. `SINEW_ENGINE_KEY` is sent to each as the bearer token.

use crate::failure::Failure;
use crate::first_weights::FirstWeights;
use sinew_engines::{
    Backend, ConnectOptions, EngineKind, FolderDtype, FormatMode, LogprobMode, RemoteConfig,
    RemoteEngine, ServerConfig, TextCodec, VllmApi, VllmOptions, WeightsFolder, connect, split_url,
};
use sinew_recipe::{Api, EnginePlan, EngineType, Formats, Logprobs, Place, RunPlan};
use sinew_render::Renderer;
use sinew_types::{Engine, TokenId, WeightsId};
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Time that servers get until they answer: they may still be loading their model.
pub(crate) const READY_WITHIN: Duration = Duration::from_secs(120);

/// Tokens as text, for servers that know text only.
struct Codec(Arc<dyn Renderer>);

impl TextCodec for Codec {
    /// Bytes that are not UTF-8, such as half a character, become replacement characters.
    fn decode(&self, ids: &[TokenId]) -> String {
        let bytes = ids.iter().filter_map(|id| self.0.token_bytes(*id));
        let bytes: Vec<u8> = bytes.flat_map(|b| b.to_vec()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn encode(&self, text: &str) -> Vec<TokenId> {
        // A text that cannot be encoded scores as an empty answer.
        self.0.encode_text(text).unwrap_or_default()
    }
}

/// Random bits, which decide no sample: names of sessions, and when a failed server is tried again.
fn random() -> u64 {
    RandomState::new().hash_one(0)
}

/// Options of the router. `first`: the weights that unlabelled servers are taken to hold, with the lineage of
/// all that are loaded.
pub(crate) fn config(first: WeightsId, formats: Option<FormatMode>) -> RemoteConfig {
    let jitter = || (random() >> 11) as f64 / (1u64 << 53) as f64;
    let mut config = RemoteConfig::new(Box::new(jitter));
    (config.version, config.lineage) = (first.version, first.lineage);
    config.router.formats = formats.unwrap_or_default();
    config
}

/// The engine of `sinew serve --engine URL[,URL...]`; an address may begin with `vllm+`,
/// `sglang+` or `openai+`, otherwise the server is asked what it is. `context` is the maximum of tokens of
/// prompt and output.
///
/// # Errors
/// If an address is none, or a server does not answer within two minutes.
pub fn serve_engine(
    urls: &str,
    logprobs: Option<LogprobMode>,
    formats: Option<FormatMode>,
    renderer: &Arc<dyn Renderer>,
    context: usize,
) -> Result<Arc<dyn Engine>, Failure> {
    let failed =
        |url: &str, e: &dyn std::fmt::Display| Failure::input(format!("--engine {url}: {e}"));
    let mut backends = Vec::new();
    for url in urls.split(',').map(str::trim) {
        let (kind, address) = split_url(url).map_err(|e| failed(url, &e))?;
        let server = ServerConfig {
            context: Some(context),
            vocab: Some(renderer.vocab_size()),
            api_key: std::env::var("SINEW_ENGINE_KEY").ok(),
            ..ServerConfig::new(address)
        };
        let options = ConnectOptions {
            kind,
            codec: Some(Arc::new(Codec(Arc::clone(renderer)))),
            session: random(),
            ..ConnectOptions::default()
        }
        .logprobs(logprobs);
        backends.push(connect(server, &options).map_err(|e| failed(url, &e))?);
    }
    let mut config = config(WeightsId::default(), formats);
    // Whoever trains the servers' model may publish weights while agents are at work.
    config.router.follow = true;
    let engine = RemoteEngine::new(backends, None, config);
    let engine = engine.map_err(|e| failed(urls, &e))?;
    engine
        .wait_ready(READY_WITHIN)
        .map_err(|e| failed(urls, &e))?;
    Ok(Arc::new(engine))
}

/// Whether what the recipe's engine samples may be trained on.
///
/// # Errors
/// If its servers only measure.
pub fn check_trained(recipe: &RunPlan) -> Result<(), Failure> {
    if recipe.engine.kind != EngineType::Openai {
        return Ok(());
    }
    Err(Failure::input(
        "engine.type = \"openai\": such a server reports neither the tokens that it sampled nor the version of its \
         weights, and cannot load new ones, so nothing is trained on what it says\n  hint: `sinew eval RECIPE` measures \
         it; train with embedded, vllm or sglang",
    ))
}

/// The engine of a recipe that trains with servers. They load the trainer's weights
/// before the first token, whatever they were started with. `base` is a folder with the
/// model's configuration and tokenizer.
///
/// # Errors
/// If a server does not answer, or cannot load the weights from the folder `engine.weights_dir`.
pub(crate) fn training_engine(
    recipe: &RunPlan,
    renderer: &Arc<dyn Renderer>,
    base: Option<PathBuf>,
    weights: FirstWeights,
) -> Result<Arc<dyn Engine>, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::system(format!("engine: {e}"));
    let section = &recipe.engine;
    let backends = connected(section, renderer, sleep_level(recipe))?;
    let formats = section.formats.map(format_mode);
    let folder = section.weights_dir.as_ref();
    let folder = folder.map(|dir| {
        let folder = WeightsFolder::new(dir, base, FolderDtype::F32);
        folder.untied(section.untied).fenced(weights.fence.clone())
    });
    let first = WeightsId::new(weights.version, weights.lineage);
    let mut config = config(first, formats);
    config.router.adapters = section.adapters.then(|| recipe.name.clone());
    let engine = RemoteEngine::new(backends, folder, config);
    let engine = engine.map_err(|e| failed(&e))?;
    let turns = takes_turns(recipe);
    if turns {
        // Its servers sleep already; the engine has to know it before it loads weights.
        engine.sleep().map_err(|e| failed(&e))?;
    }
    let loaded = engine.load_weights(weights.version, weights.tensors);
    loaded.map_err(|e| failed(&e))?;
    if turns {
        engine.wake().map_err(|e| failed(&e))?;
    }
    Ok(Arc::new(engine))
}

/// Makes the servers of a recipe leave their GPUs, before its trainer loads a model there.
///
/// # Errors
/// If a server does not answer, or was not started for it.
pub(crate) fn sleep(recipe: &RunPlan, renderer: &Arc<dyn Renderer>) -> Result<(), Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::outside(format!("engine: {e}"));
    let backends = connected(&recipe.engine, renderer, sleep_level(recipe))?;
    let mut config = config(WeightsId::default(), None);
    // Whatever weights they have: they load others before they sample.
    config.router.follow = true;
    let engine = RemoteEngine::new(backends, None, config).map_err(|e| failed(&e))?;
    engine.wait_ready(READY_WITHIN).map_err(|e| failed(&e))?;
    engine.sleep().map_err(|e| failed(&e))
}

/// Whether servers and trainer use the same GPUs in turns.
fn takes_turns(recipe: &RunPlan) -> bool {
    recipe.torch().is_some_and(|t| t.place == Place::Turns)
}

/// The engine of a recipe that samples with the weights that its servers have already.
///
/// # Errors
/// If a server does not answer within two minutes.
pub(crate) fn sampling_engine(
    section: &EnginePlan,
    renderer: &Arc<dyn Renderer>,
) -> Result<Arc<dyn Engine>, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::outside(format!("engine: {e}"));
    let backends = connected(section, renderer, 1)?;
    let formats = section.formats.map(format_mode);
    let mut config = config(WeightsId::default(), formats);
    // Whoever trains the servers' model may publish weights meanwhile: each token has its version.
    config.router.follow = true;
    let engine = RemoteEngine::new(backends, None, config).map_err(|e| failed(&e))?;
    engine.wait_ready(READY_WITHIN).map_err(|e| failed(&e))?;
    Ok(Arc::new(engine))
}

/// Level at which vLLM sleeps. A trainer that takes turns loads new weights before the KV cache wakes, so
/// the old ones are discarded; adapters belong to the weights that the servers were started with, which are
/// kept.
fn sleep_level(recipe: &RunPlan) -> u8 {
    if takes_turns(recipe) && !recipe.engine.adapters {
        2
    } else {
        1
    }
}

/// The servers of a recipe; vLLM sleeps at `sleep_level`.
fn connected(
    section: &EnginePlan,
    renderer: &Arc<dyn Renderer>,
    sleep_level: u8,
) -> Result<Vec<Arc<dyn Backend>>, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::system(format!("engine: {e}"));
    let kind = section.kind.name().parse::<EngineKind>();
    let kind = kind.map_err(|e| failed(&e))?;
    let logprobs = section.logprobs.map(logprob_mode);
    let mut backends = Vec::new();
    for url in section.urls() {
        let server = ServerConfig {
            vocab: Some(renderer.vocab_size()),
            api_key: std::env::var("SINEW_ENGINE_KEY").ok(),
            ..ServerConfig::new(url)
        };
        let options = ConnectOptions {
            kind: Some(kind),
            codec: Some(Arc::new(Codec(Arc::clone(renderer)))),
            vllm: VllmOptions {
                api: section.api.map_or(VllmApi::Completions, vllm_api),
                sleep_level,
                ..VllmOptions::default()
            },
            session: random(),
            ..ConnectOptions::default()
        }
        .logprobs(logprobs);
        backends.push(connect(server, &options).map_err(|e| failed(&e))?);
    }
    Ok(backends)
}

/// The endpoint of `engine.api`.
fn vllm_api(api: Api) -> VllmApi {
    match api {
        Api::Completions => VllmApi::Completions,
        Api::Generate => VllmApi::Generate,
    }
}

/// The log-probs of `engine.logprobs`.
fn logprob_mode(logprobs: Logprobs) -> LogprobMode {
    match logprobs {
        Logprobs::Raw => LogprobMode::Raw,
        Logprobs::Processed => LogprobMode::Processed,
    }
}

/// The treatment of output formats of `engine.formats`.
pub(crate) fn format_mode(formats: Formats) -> FormatMode {
    match formats {
        Formats::Guided => FormatMode::Guided,
        Formats::Advice => FormatMode::Advice,
        Formats::Refuse => FormatMode::Refuse,
    }
}

/// The recipe refuses the same temperatures as the client of the server would at the first token.
const _: () = assert!(sinew_recipe::VLLM_LOWEST_TEMPERATURE == VllmOptions::LOWEST_TEMPERATURE);
