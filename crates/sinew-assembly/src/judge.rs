//! The judges of a recipe and its simulated user: at servers, or in this process.
//!
//! A model in this process is loaded when it is first asked, so that commands that judge nothing start at
//! once.

use crate::device::device;
use crate::engine::{EngineModel, embedded, grammars};
use crate::failure::Failure;
use crate::judge_settings::{
    chat_config, judge_config, reward_server_config, user_chat_config, user_config,
};
use crate::model::{chat_renderer, loaded_params, renderer, resolve_env, unresolved};
use sinew_env::{SimulatedUser, Split, Taskset};
use sinew_judge::{
    Bench, ChatError, ChatModel, EngineChat, Judge, LazyChat, ModelUser, OpenAiChat, OpenAiConfig,
    RewardModel, RewardServer, ServerConfig,
};
use sinew_model::{ModelFiles, Params, check_model, load_model, resolve_model};
use sinew_recipe::{
    EnginePlan, JudgePlan, RewardServerPlan, RolloutPlan, RunPlan, TemplateOptions,
};
use sinew_render::Renderer;
use sinew_types::PolicyVersion;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Maximum tokens of question and verdict of a judge in this process.
const MAX_CONTEXT: usize = 8192;

/// Columns of the first task of a split, or of the held-out tasks if it has none, as in a benchmark.
///
/// A reward may name only columns that are there, so that a typing error ends a run at its start.
///
/// # Errors
/// If neither has a task, or the first one cannot be read.
pub(crate) fn columns(tasks: &dyn Taskset, split: Split) -> Result<Vec<String>, Failure> {
    let split = if tasks.is_empty(split) {
        Split::HeldOut
    } else {
        split
    };
    let task = tasks.get(split, 0).map_err(Failure::input)?;
    let columns = task.data.as_object().into_iter().flatten();
    Ok(columns.map(|(name, _)| name.clone()).collect())
}

/// The judge `name` of a recipe.
///
/// # Errors
/// If its key, rubric or model is missing, or a column that it is to see.
pub fn judge(
    recipe: &RunPlan,
    name: &str,
    tasks: &dyn Taskset,
    bench: &Bench,
) -> Result<Arc<Judge>, Failure> {
    let full = format!("judge.{name}");
    let Some(plan) = recipe.judges.get(name) else {
        return Err(Failure::input(format!("reward: there is no [{full}]")));
    };
    for split in [Split::Train, Split::HeldOut] {
        let known = columns(tasks, split)?;
        if let Some(column) = plan.columns.iter().find(|c| !known.contains(c)) {
            return Err(Failure::input(format!(
                "{full}.columns: tasks have no column {column}; columns: {}",
                known.join(", ")
            )));
        }
    }
    bench.judge(name, || {
        let model = model(recipe, plan, &full)?;
        let config = judge_config(&full, plan)?;
        let ledger = bench.ledger(name).map_err(Failure::system)?;
        if ledger.torn() > 0 {
            tracing::error!(
                judge = full, bytes = ledger.torn(),
                "the newest verdict was cut in a torn write: it was dropped, and its question is asked again"
            );
        }
        Ok(Judge::new(config, model, ledger, bench.exhausted()))
    })
}

/// The model of a judge, as it is typed.
///
/// If `url` is set, it is a server, else files that are checked now and loaded at the first question.
///
/// # Errors
/// Fails if the files are missing or are not a model, or if the key of the server is not set.
fn model(recipe: &RunPlan, plan: &JudgePlan, full: &str) -> Result<Arc<dyn ChatModel>, Failure> {
    let name = plan.model.clone().unwrap_or_default();
    if plan.is_policy() {
        let source = recipe.model_source();
        let (recipe, known) = (recipe.clone(), format!("policy {source} {}", recipe.seed));
        let load =
            move || policy(recipe.clone()).map_err(|e| ChatError::Lasting(e.text().to_owned()));
        return Ok(Arc::new(LazyChat::new(known, Arc::new(load))));
    }
    match &plan.url {
        None => here(recipe, &name, &plan.template, full),
        Some(url) => {
            let key = key(plan.key_env.as_deref(), full)?;
            at_server(chat_config(plan, url, key), full)
        }
    }
}

/// A model at a server.
fn at_server(config: OpenAiConfig, full: &str) -> Result<Arc<dyn ChatModel>, Failure> {
    let chat = OpenAiChat::new(config).map_err(|e| Failure::input(format!("{full}.url: {e}")))?;
    Ok(Arc::new(chat))
}

/// A model in this process: its files are checked now, and loaded at the first question.
fn here(
    recipe: &RunPlan,
    name: &str,
    template: &TemplateOptions,
    full: &str,
) -> Result<Arc<dyn ChatModel>, Failure> {
    let files = resolve_model(name, &resolve_env())
        .map_err(|e| unresolved(&format!("{full}.model = {name:?}"), e))?;
    check_model(&files).map_err(|e| Failure::input(format!("{full}.model: {e}")))?;
    let renderer = chat_renderer(&files, template)
        .map_err(|e| Failure::input(format!("{full}: {}", e.text())))?;
    // Answers under another template are those of another model.
    let known = if template.is_empty() {
        name.to_owned()
    } else {
        format!("{name} {}", renderer.template_hash().unwrap_or_default())
    };
    let (engine, renderer) = (recipe.engine.clone(), Arc::new(renderer));
    let named = known.clone();
    let load = move || {
        let loaded = load(
            &named,
            &files,
            Arc::clone(&renderer) as Arc<dyn Renderer>,
            &engine,
        );
        loaded.map_err(|e| ChatError::Lasting(e.text().to_owned()))
    };
    Ok(Arc::new(LazyChat::new(known, Arc::new(load))))
}

/// The simulated user of a recipe, if it has one.
///
/// # Errors
/// If its key or its model is missing.
pub(crate) fn user(
    recipe: &RunPlan,
    bench: &Bench,
) -> Result<Option<Arc<dyn SimulatedUser>>, Failure> {
    let Some(plan) = &recipe.user else {
        return Ok(None);
    };
    let made = bench.user(|| {
        let name = plan.model.as_deref().unwrap_or_default();
        let model = match &plan.url {
            None => here(recipe, name, &TemplateOptions::default(), "user")?,
            Some(url) => {
                let key = key(plan.key_env.as_deref(), "user")?;
                at_server(user_chat_config(plan, url, key), "user")?
            }
        };
        let ledger = bench.user_ledger().map_err(Failure::system)?;
        Ok::<_, Failure>(ModelUser::new(
            user_config(plan),
            model,
            ledger,
            bench.exhausted(),
        ))
    })?;
    Ok(Some(made))
}

/// The key in an environment variable.
///
/// # Errors
/// If the variable is not set: the recipe is right, but needs it first.
fn key(variable: Option<&str>, full: &str) -> Result<Option<String>, Failure> {
    let Some(variable) = variable else {
        return Ok(None);
    };
    match std::env::var(variable).ok().filter(|key| !key.is_empty()) {
        Some(key) => Ok(Some(key)),
        None => Err(Failure::outside(format!(
            "{full}.key_env = {variable:?}: the environment variable is not set\n  hint: export {variable}=..."
        ))),
    }
}

/// Settings of a reward server, with its key.
///
/// # Errors
/// If its key is missing.
pub fn server_config(plan: &RewardServerPlan<'_>) -> Result<ServerConfig, Failure> {
    let key = key(plan.key_env, &format!("reward.{:?}", plan.url))?;
    Ok(reward_server_config(plan, key))
}

/// A reward server as a reward.
///
/// # Errors
/// If its key is missing, or its address is none.
pub(crate) fn server(plan: &RewardServerPlan<'_>) -> Result<Arc<RewardServer>, Failure> {
    let server = RewardServer::new(server_config(plan)?);
    let server = server.map_err(|e| Failure::input(format!("reward: {e}")))?;
    Ok(Arc::new(server))
}

/// A reward model, whose files are checked now and whose weights are loaded with the first sample.
///
/// # Errors
/// If the files are missing, or hold no reward model.
pub(crate) fn reward_model(source: &str) -> Result<Arc<RewardModel>, Failure> {
    let full = format!("reward: model:{source}");
    let files = resolve_model(source, &resolve_env()).map_err(|e| unresolved(&full, e))?;
    let model = RewardModel::open(full.clone(), files, device()?);
    Ok(Arc::new(
        model.map_err(|e| Failure::input(format!("{full}: {e}")))?,
    ))
}

/// Loads a model into an engine of this process, with formats as masks.
fn load(
    name: &str,
    files: &ModelFiles,
    renderer: Arc<dyn Renderer>,
    engine: &EnginePlan,
) -> Result<EngineChat, Failure> {
    let loaded = load_model(files).map_err(Failure::input)?;
    chat(name, &loaded.params, renderer, engine)
}

/// The recipe's model with the weights that the run begins with, in a separate engine.
///
/// They stay as they are: judged by the current weights, an answer would be worth another reward in every
/// step, verdicts could not be kept, and the policy could learn to change its judge. A model from scratch has
/// no positions that it learned, so its context is that of a judge.
fn policy(mut recipe: RunPlan) -> Result<EngineChat, Failure> {
    let asked = recipe.rollout.max_context_tokens;
    recipe.rollout.max_context_tokens = asked.max(MAX_CONTEXT as u32);
    let renderer = renderer(&recipe.model, &recipe.env)?;
    let params = loaded_params(&recipe, renderer.as_ref())?;
    chat("policy", &params, renderer, &recipe.engine)
}

/// Weights in an engine of this process.
fn chat(
    name: &str,
    params: &Params,
    renderer: Arc<dyn Renderer>,
    engine: &EnginePlan,
) -> Result<EngineChat, Failure> {
    let config = params.config();
    let rollout = RolloutPlan {
        max_context_tokens: config.max_context.min(MAX_CONTEXT) as u32,
        ..RolloutPlan::default()
    };
    let grammars = grammars(None, &renderer, config.vocab)?;
    let weights = EngineModel {
        config,
        version: PolicyVersion::default(),
        weights: params,
    };
    let model = embedded(
        engine,
        &rollout,
        &device()?,
        &weights,
        renderer.as_ref(),
        &grammars,
    )?;
    let requests = Arc::new(AtomicU64::new(1));
    Ok(EngineChat::new(
        name.to_owned(),
        Arc::new(model),
        renderer,
        requests,
    ))
}
