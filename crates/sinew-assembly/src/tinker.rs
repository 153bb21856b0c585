//! Training and sampling at a Tinker service: `type = "tinker"` of `[trainer]` and `[engine]`.
//!
//! The service has the weights and the optimizer's state. This process has the tokenizer and the shape of the
//! model, and computes the loss. A checkpoint names a state at the service, and a version its weights for
//! samplers.

use crate::failure::Failure;
use crate::model::{check_context, model_files, wrong_model};
use crate::run_model::{origin, run_model, typed_source};
use crate::start_shape::StartShape;
use crate::{clock, plan, scoring, servers};
use sinew_algo::Needs;
use sinew_engines::{FormatMode, RemoteEngine};
use sinew_model::{ModelFiles, load_config, model_of_service};
use sinew_pipeline::{FrozenModel, Reference, ScoringModels};
use sinew_recipe::{LoraSection, RunPlan, TINKER};
use sinew_tensor::Cpu;
use sinew_tinker::client::{
    AdapterOptions, BaseModel, ClientError, SamplerOptions, ServiceOptions, ServiceState,
    TinkerBackend, TinkerPolicy, TinkerSetup, base_models,
};
use sinew_train::{ModelPolicy, Policy, Trainer};
use sinew_types::{Engine, Lineage, PolicyVersion, TensorSource, WeightsId};
use std::sync::Arc;
use std::time::Duration;

/// Variable with the key of a service, unless another one is named.
const KEY: &str = "TINKER_API_KEY";
/// Time in which a service must answer a check.
const WITHIN: Duration = Duration::from_secs(10);
/// Seconds between two probes of a service, which serves others as well.
const PROBE_S: f64 = 5.0;

/// Weights of a service that training begins with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ServiceStart {
    /// Name of the base model; `None`: the only one that the service trains.
    base_model: Option<String>,
    /// Address of a saved state; `None`: the base model itself.
    state: Option<String>,
}

/// Parts of a trainer at a service.
pub(crate) struct TinkerParts<'a> {
    pub(crate) recipe: &'a RunPlan,
    /// The recipe with the versions of its models.
    pub(crate) pinned: &'a RunPlan,
    pub(crate) device: &'a Cpu,
    pub(crate) start: ServiceStart,
    pub(crate) shape: &'a StartShape,
    pub(crate) needs: Needs,
}

/// An error of the client, by the side that can act.
fn failed(error: ClientError) -> Failure {
    match error {
        ClientError::Setup(_)
        | ClientError::Refused { .. }
        | ClientError::Failed {
            is_request: true, ..
        } => Failure::input(error),
        ClientError::Connection { .. }
        | ClientError::Deadline { .. }
        | ClientError::Key { .. }
        | ClientError::Gone { .. } => Failure::outside(error),
        ClientError::Failed { .. } | ClientError::Answer { .. } | ClientError::Partial(_) => {
            Failure::system(error)
        }
    }
}

/// The key of a service in an environment variable: the named one, or `TINKER_API_KEY`. `field` is for the
/// message.
///
/// # Errors
/// If the variable is not set.
pub fn key(field: &str, variable: Option<&str>) -> Result<String, Failure> {
    let variable = variable.unwrap_or(KEY);
    match std::env::var(variable).ok().filter(|key| !key.is_empty()) {
        Some(key) => Ok(key),
        None => Err(Failure::outside(format!(
            "{field}: the environment variable {variable} is not set\n  hint: export {variable}=..., with the key \
             of the Tinker service"
        ))),
    }
}

/// The service that trains, and the one that samples; usually they are one.
struct Services {
    trainer: ServiceOptions,
    sampler: ServiceOptions,
}

/// The services of a recipe, with their keys.
fn services(plan: &RunPlan) -> Result<Services, Failure> {
    let settings = plan.tinker();
    let settings = settings.ok_or_else(|| Failure::system("trainer.type is not \"tinker\""))?;
    let own = key("trainer.api_key_env", settings.api_key_env.as_deref())?;
    let trainer = ServiceOptions {
        timeout: Duration::from_secs_f64(settings.timeout_s),
        run: plan.name.clone(),
        ..ServiceOptions::new(settings.url.clone().unwrap_or_default(), own)
    };
    let (engine, mut sampler) = (&plan.engine, trainer.clone());
    if let Some(url) = engine.urls().first() {
        sampler.url.clone_from(url);
    }
    if let Some(variable) = &engine.api_key_env {
        sampler.api_key = key("engine.api_key_env", Some(variable))?;
    }
    if let Some(seconds) = engine.timeout_s {
        sampler.timeout = Duration::from_secs_f64(seconds);
    }
    Ok(Services { trainer, sampler })
}

/// The adapters of `train.lora`.
fn adapters(plan: &RunPlan) -> Result<Option<AdapterOptions>, Failure> {
    let of = |lora: &LoraSection| {
        AdapterOptions::from_targets(lora.rank, lora.alpha, &lora.targets).map_err(failed)
    };
    plan.train.lora.as_ref().map(of).transpose()
}

/// The weights that a plan begins with: those of the base model, or of a run at a service.
///
/// # Errors
/// If the run's weights are not at a service, or of another base model, or have other adapters.
pub(crate) fn start(plan: &RunPlan) -> Result<ServiceStart, Failure> {
    let source = plan.model_source();
    let asked = plan.tinker().and_then(|trainer| trainer.base_model.clone());
    let Some(run) = run_model(&source)? else {
        let named = model_of_service(&source).map(str::to_owned);
        return Ok(ServiceStart {
            base_model: asked.or(named),
            state: None,
        });
    };
    let refuse = |why: String| Err(Failure::input(format!("model = {source:?}: {why}")));
    let Some(state) = run.service_state()? else {
        return refuse(
            "its weights are here, and a Tinker service trains models that it has\n  hint: start from a run with \
             trainer.type = \"tinker\", or from \"tinker:ORG/NAME\""
                .to_owned(),
        );
    };
    if let Some(asked) = asked.filter(|asked| *asked != state.base_model) {
        return refuse(format!(
            "it trained {:?}, and trainer.base_model = {asked:?}: both must be one",
            state.base_model
        ));
    }
    let own = adapters(plan)?;
    if own != state.adapters {
        let (own, others) = (in_words(own), in_words(state.adapters));
        return refuse(format!(
            "it trained {others}, and train.lora asks for {own}"
        ));
    }
    Ok(ServiceStart {
        base_model: Some(state.base_model),
        state: Some(state.path),
    })
}

fn in_words(adapters: Option<AdapterOptions>) -> String {
    let Some(adapters) = adapters else {
        return "all weights".to_owned();
    };
    let groups = [
        (adapters.attn, "attention"),
        (adapters.mlp, "feed-forward layers"),
        (adapters.unembed, "output matrix"),
    ];
    let groups: Vec<&str> = groups.iter().filter(|g| g.0).map(|g| g.1).collect();
    format!(
        "adapters of rank {} on {}",
        adapters.rank,
        groups.join(", ")
    )
}

/// The shape of a plan's model, of any family: its configuration is read, and no weights.
///
/// # Errors
/// If the model cannot be found, or its configuration cannot be read.
pub(crate) fn shape(plan: &RunPlan) -> Result<StartShape, Failure> {
    match model_files(&origin(&plan.model)?)? {
        Some(ModelFiles::Dir(folder)) => StartShape::of_folder(&folder),
        Some(files) => Ok(StartShape::of(load_config(&files).map_err(wrong_model)?)),
        None => Err(Failure::input(
            "model: a model from scratch has its weights here, and a Tinker service trains models that it has",
        )),
    }
}

fn setup(plan: &RunPlan, start: ServiceStart) -> Result<TinkerSetup, Failure> {
    Ok(TinkerSetup {
        base_model: start.base_model,
        adapters: adapters(plan)?,
        seed: plan.seed,
        start: start.state,
        keep: plan.train.keep_checkpoints,
        ..TinkerSetup::new(services(plan)?.trainer)
    })
}

/// A trainer whose model is made at the service, and the models that score for it.
///
/// # Errors
/// If the service does not answer, refuses the key or the model, or a model that scores is missing.
pub(crate) fn trainer(
    parts: TinkerParts<'_>,
) -> Result<(Trainer<TinkerPolicy>, ScoringModels), Failure> {
    let recipe = parts.recipe;
    let policy = TinkerPolicy::open(&setup(recipe, parts.start.clone())?);
    let policy = policy.map_err(|e| failed(e).of("trainer"))?;
    if let Some(context) = policy.context() {
        check_context(recipe.rollout.max_context_tokens, context)?;
    }
    let scorers = scorers(&parts, &policy)?;
    let config = plan::policy(recipe)?.trainer;
    let trainer = Trainer::new(policy, config, clock()).map_err(Failure::system)?;
    Ok((trainer, scorers))
}

/// Reference and teacher: a second model at the service that is never trained, another model of it, or
/// weights in this process.
fn scorers(parts: &TinkerParts<'_>, policy: &TinkerPolicy) -> Result<ScoringModels, Failure> {
    let (plan, needs) = (parts.pinned, parts.needs);
    let reference = match &plan.reference {
        _ if !needs.reference() => Reference::None,
        Some(named) => Reference::Model(scorer("reference.model", &named.model, parts, policy)?),
        None => {
            let first = policy.reference();
            Reference::Model(Box::new(first.map_err(|e| failed(e).of("reference"))?))
        }
    };
    let teacher = plan.teacher.as_ref();
    let teacher = teacher.map(|named| scorer("teacher.model", &named.model, parts, policy));
    let tokens = parts.recipe.train.micro_batch_tokens;
    Ok(ScoringModels::new(reference, teacher.transpose()?, tokens))
}

/// One frozen model.
fn scorer(
    key: &str,
    source: &str,
    parts: &TinkerParts<'_>,
    policy: &TinkerPolicy,
) -> Result<FrozenModel, Failure> {
    let of_service = |error: ClientError| failed(error).of(&format!("{key} = {source:?}"));
    if source.starts_with(TINKER) {
        let name = model_of_service(source).filter(|name| !name.starts_with("//"));
        let model = policy.scorer(name.unwrap_or(source));
        return Ok(Box::new(model.map_err(of_service)?));
    }
    if let Some(state) = state_of(source)? {
        if key == "teacher.model" && parts.needs.teacher_top > 0 {
            return Err(Failure::input(format!(
                "{key} = {source:?}: this algorithm compares the most likely tokens, and a Tinker service ranks none \
                 for models in training: name weights for samplers, \"tinker://...\", or a base model"
            )));
        }
        return Ok(Box::new(policy.frozen(&state).map_err(of_service)?));
    }
    let params = scoring::load(key, source, parts.shape.vocab)?;
    let context = parts.recipe.rollout.max_context_tokens as usize;
    let model = ModelPolicy::frozen(params, context, parts.device.clone());
    Ok(Box::new(model.map_err(Failure::system)?))
}

/// The state of a run at a service; `None`: the source is another one.
fn state_of(source: &str) -> Result<Option<ServiceState>, Failure> {
    match run_model(&typed_source(source))? {
        Some(run) => run.service_state(),
        None => Ok(None),
    }
}

/// The engine of a recipe that trains at a service: its samplers, with these weights.
///
/// # Errors
/// If the service does not answer, or does not have the weights.
pub(crate) fn engine(
    recipe: &RunPlan,
    vocab: usize,
    first: WeightsId,
    weights: Arc<dyn TensorSource>,
) -> Result<Arc<dyn Engine>, Failure> {
    let engine = samplers(recipe, None, vocab, first)?;
    let loaded = engine.load_weights(first.version, weights);
    loaded.map_err(|e| Failure::system(format!("engine: {e}")))?;
    Ok(Arc::new(engine))
}

/// The engine of a recipe that only samples: with the base model, or the weights of a run at the service.
///
/// # Errors
/// If the service does not answer, or has no such model.
pub(crate) fn sampling_engine(
    plan: &RunPlan,
    version: PolicyVersion,
) -> Result<Arc<dyn Engine>, Failure> {
    let (first, vocab) = (
        WeightsId::new(version, Lineage::default()),
        shape(plan)?.vocab,
    );
    let start = start(plan)?;
    let unreached = |e: &dyn std::fmt::Display| Failure::outside(format!("engine: {e}"));
    if start.state.is_none() {
        let base = base_of(&services(plan)?.sampler, start.base_model.as_deref())?;
        let engine = samplers(plan, Some(base.name), vocab, first)?;
        let ready = engine.wait_ready(servers::READY_WITHIN);
        ready.map_err(|e| unreached(&e))?;
        return Ok(Arc::new(engine));
    }
    // A state is not sampled: a model gets it, which saves its weights for samplers.
    let mut policy = TinkerPolicy::open(&setup(plan, start)?).map_err(failed)?;
    let weights = policy.weights(version).map_err(|e| unreached(&e))?;
    let engine = samplers(plan, None, vocab, first)?;
    engine
        .load_weights(version, weights)
        .map_err(|e| unreached(&e))?;
    Ok(Arc::new(engine))
}

/// Samplers of the service of a recipe: those of a base model, or without weights yet.
fn samplers(
    plan: &RunPlan,
    base_model: Option<String>,
    vocab: usize,
    first: WeightsId,
) -> Result<RemoteEngine, Failure> {
    let refused = |e: &dyn std::fmt::Display| Failure::input(format!("engine: {e}"));
    let backend = TinkerBackend::new(SamplerOptions {
        service: services(plan)?.sampler,
        base_model,
        vocab: Some(vocab),
        context: None,
    });
    let backend = backend.map_err(|e| refused(&e))?;
    let formats = plan.engine.formats.map(servers::format_mode);
    let mut config = servers::config(first, Some(formats.unwrap_or(FormatMode::Refuse)));
    config.probe_interval_s = PROBE_S;
    RemoteEngine::new(vec![Arc::new(backend)], None, config).map_err(|e| refused(&e))
}

/// The model of a recipe that trains at a service: in words, and its number of tokens.
///
/// # Errors
/// If its files cannot be found or read, it has fewer positions than the recipe asks for, or a service cannot
/// have the adapters.
pub fn service_model(recipe: &RunPlan) -> Result<(String, usize), Failure> {
    start(recipe)?;
    adapters(recipe)?;
    let shape = shape(recipe)?;
    check_context(recipe.rollout.max_context_tokens, shape.context)?;
    Ok((shape.words, shape.vocab))
}

/// Whether a Tinker service has the weights of a reference or teacher.
///
/// # Errors
/// If it is of a run that cannot be read.
pub fn is_at_service(source: &str) -> Result<bool, Failure> {
    Ok(source.starts_with(TINKER) || state_of(source)?.is_some())
}

/// Asks the services of a recipe for their models, and compares them with the recipe.
///
/// # Errors
/// If a key is not set, a service does not answer, or it does not have the model.
pub fn check_service(recipe: &RunPlan) -> Result<String, Failure> {
    let Services { trainer, sampler } = services(recipe)?;
    let named = start(recipe)?.base_model;
    let base = base_of(&trainer, named.as_deref())?;
    if base.trainable == Some(false) {
        return Err(not_served("trainer.base_model", &base, "trained"));
    }
    let sampled = if sampler.url == trainer.url {
        base.clone()
    } else {
        base_of(&sampler, Some(&base.name))?
    };
    if sampled.sampleable == Some(false) {
        return Err(not_served("engine.url", &base, "sampled"));
    }
    for context in [base.context, sampled.context].into_iter().flatten() {
        check_context(recipe.rollout.max_context_tokens, context)?;
    }
    let context = base.context;
    let context = context.map_or(String::new(), |tokens| format!(", context {tokens}"));
    Ok(format!("{} at {}{context}", base.name, trainer.url))
}

fn base_of(service: &ServiceOptions, name: Option<&str>) -> Result<BaseModel, Failure> {
    let models = base_models(service, WITHIN).map_err(failed)?;
    BaseModel::choose(&models, name).cloned().map_err(failed)
}

fn not_served(key: &str, base: &BaseModel, what: &str) -> Failure {
    Failure::input(format!(
        "{key}: the Tinker service has {:?}, which cannot be {what} there",
        base.name
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ENVIRONMENTS;
    use std::path::Path;

    fn plan(model: &str, more: &str) -> RunPlan {
        let text = format!(
            "name = \"t\"\nmodel = {model:?}\nenv = {{ type = \"tool_math\" }}\n\
             algorithm = {{ type = \"grpo\", dual_clip = 3.0 }}\n\
             [trainer]\ntype = \"tinker\"\nurl = \"http://a\"\n{more}\n[engine]\ntype = \"tinker\"\n"
        );
        RunPlan::parse(Path::new("r.toml"), &text, ENVIRONMENTS).unwrap()
    }

    #[test]
    fn the_base_model_is_named_by_the_key_or_the_source() {
        let named = |model: &str, more: &str| start(&plan(model, more)).unwrap().base_model;
        let key = "base_model = \"other\"";
        assert_eq!(named("tinker:a/b@v1", ""), Some("a/b".into()));
        assert_eq!(named("tinker:a/b", key), Some("other".into()));
        assert_eq!(named("folder", ""), None);
    }

    #[test]
    fn keys_come_from_the_environment_and_adapters_are_whole_groups() {
        let missing = plan("tinker:a/b", "api_key_env = \"SINEW_NO_SUCH_KEY\"");
        let why = services(&missing).err().unwrap();
        assert!(matches!(why, Failure::Outside(_)));
        assert!(why.text().contains("SINEW_NO_SUCH_KEY"), "{why:?}");
        let lora = "[train.lora]\nrank = 4\ntargets = [\"q_proj\"]";
        let why = adapters(&plan("tinker:a/b", lora)).unwrap_err();
        assert!(why.text().contains("train.lora.targets"), "{why:?}");
        let lora = "[train.lora]\nrank = 4";
        let own = adapters(&plan("tinker:a/b", lora)).unwrap();
        assert_eq!(
            in_words(own),
            "adapters of rank 4 on attention, feed-forward layers"
        );
        assert_eq!(in_words(None), "all weights");
    }

    #[test]
    fn models_of_a_service_are_known_by_their_source() {
        for source in ["tinker:a/b", "tinker://s:train:0/sampler_weights/x"] {
            assert!(is_at_service(source).unwrap());
        }
        assert!(!is_at_service("hf:a/b").unwrap());
    }
}
