//! The judges of a recipe: at servers, or in this process.
//!
//! A judge in this process is loaded when it is first asked, so that commands that judge nothing start at once.

use super::device::device;
use super::engine::{embedded, grammars};
use super::model::{chat_renderer, resolve_env, unresolved};
use crate::failure::Failure;
use futures::FutureExt;
use futures::future::BoxFuture;
use sinew_env::{Split, Taskset};
use sinew_judge::{
    AnswerFormat, ChatAnswer, ChatError, ChatModel, ChatRequest, EngineChat, Exhausted, Item,
    Judge, JudgeConfig, Ledger, Limits, Mode, OpenAiChat, OpenAiConfig, Rubric, View,
};
use sinew_model::{ModelFiles, check_model, load_model, resolve_model};
use sinew_recipe::{
    EnginePlan, JudgeFormat, JudgeMode, JudgePlan, JudgeView, RolloutPlan, RubricItem,
    RubricSource, RunPlan,
};
use sinew_render::Renderer;
use sinew_types::PolicyVersion;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{OnceCell, watch};

/// Maximum tokens of question and verdict of a judge in this process.
const MAX_CONTEXT: usize = 8192;

/// Where judges keep what they decided, and what a spent budget ends. Without a run, nothing is kept, and a
/// spent budget leaves samples unscored.
#[derive(Clone, Default)]
pub(crate) struct Bench {
    run: Option<(PathBuf, watch::Sender<bool>)>,
    spent: Arc<OnceLock<String>>,
}

impl Bench {
    /// The judges of the run in `dir`, which ends once `stop` is true.
    pub(crate) fn of_run(dir: &Path, stop: watch::Sender<bool>) -> Self {
        Self {
            run: Some((dir.join("judges"), stop)),
            spent: Arc::default(),
        }
    }

    /// The budget that ended the run, if one did.
    pub(crate) fn spent(&self) -> Option<&str> {
        self.spent.get().map(String::as_str)
    }

    fn ledger(&self, name: &str) -> Result<Ledger, Failure> {
        let Some((folder, _)) = &self.run else {
            return Ok(Ledger::in_memory());
        };
        let path = folder.join(format!("{name}.jsonl"));
        Ledger::open(&path).map_err(|e| Failure::system(format!("{}: {e}", path.display())))
    }

    fn exhausted(&self) -> Exhausted {
        let Some((_, stop)) = &self.run else {
            return Exhausted::Unscored;
        };
        let (stop, spent) = (stop.clone(), Arc::clone(&self.spent));
        Exhausted::Stop(Arc::new(move |why| {
            // The first one counts; the others follow from it.
            let _ = spent.set(why.to_owned());
            stop.send_replace(true);
        }))
    }
}

/// The judge `name` of a recipe.
///
/// # Errors
/// If its key, rubric or model is missing, or a column that it is to see.
pub(crate) fn judge(
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
        let known = super::reward::columns(tasks, split)?;
        if let Some(column) = plan.columns.iter().find(|c| !known.contains(c)) {
            return Err(Failure::input(format!(
                "{full}.columns: tasks have no column {column}; columns: {}",
                known.join(", ")
            )));
        }
    }
    let model = model(recipe, plan, &full)?;
    let config = config(plan, &full)?;
    let (ledger, exhausted) = (bench.ledger(name)?, bench.exhausted());
    Ok(Arc::new(Judge::new(config, model, ledger, exhausted)))
}

fn config(plan: &JudgePlan, full: &str) -> Result<JudgeConfig, Failure> {
    let [low, high] = plan.scale;
    Ok(JudgeConfig {
        name: full.to_owned(),
        rubric: rubric(plan.rubric.as_ref(), full)?,
        view: match plan.view {
            JudgeView::Last => View::Last,
            JudgeView::Dialogue => View::Dialogue,
            JudgeView::Calls => View::Calls,
        },
        columns: plan.columns.clone(),
        mode: match plan.mode {
            JudgeMode::Each => Mode::Each,
            JudgeMode::Scale => Mode::Scale { low, high },
            JudgeMode::Compare => Mode::Compare,
        },
        votes: plan.votes,
        retries: plan.retries,
        temperature: plan.temperature,
        max_tokens: plan.max_tokens,
        reasons: plan.reasons,
        concurrency: plan.concurrency,
        cache: plan.cache,
        limits: Limits {
            calls: plan.max_calls,
            tokens: plan.max_total_tokens,
            cost: plan.max_cost,
            price: plan.price.unwrap_or_default(),
        },
    })
}

/// The rubric, read from its file if it has one.
fn rubric(source: Option<&RubricSource>, full: &str) -> Result<Rubric, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::input(format!("{full}.rubric: {e}"));
    let rubric = match source {
        Some(RubricSource::File(path)) => {
            let text = std::fs::read_to_string(path);
            Rubric::from_markdown(&text.map_err(|e| failed(&format!("{path:?}: {e}")))?)
        }
        Some(RubricSource::Items(items)) => {
            let parts = items.iter().map(RubricItem::parts);
            let item = |(text, weight): (&str, f64)| Item {
                text: text.to_owned(),
                weight,
            };
            Rubric::new(parts.map(item).collect())
        }
        None => Rubric::new(Vec::new()),
    };
    rubric.map_err(|e| failed(&e))
}

/// The model of a judge, as it is typed.
fn model(recipe: &RunPlan, plan: &JudgePlan, full: &str) -> Result<Arc<dyn ChatModel>, Failure> {
    let name = plan.model.clone().unwrap_or_default();
    let Some(url) = &plan.url else {
        let files = resolve_model(&name, &resolve_env())
            .map_err(|e| unresolved(&format!("{full}.model = {name:?}"), e))?;
        check_model(&files).map_err(|e| Failure::input(format!("{full}.model: {e}")))?;
        let (engine, cell) = (recipe.engine.clone(), OnceCell::new());
        return Ok(Arc::new(Loaded {
            name,
            files,
            engine,
            cell,
        }));
    };
    let key = key(plan.key_env.as_deref(), full)?;
    let chat = OpenAiChat::new(OpenAiConfig {
        url: url.clone(),
        key,
        model: name,
        format: match plan.format {
            JudgeFormat::JsonSchema => AnswerFormat::JsonSchema,
            JudgeFormat::JsonObject => AnswerFormat::JsonObject,
            JudgeFormat::Text => AnswerFormat::Text,
        },
        timeout: Duration::from_secs_f64(plan.timeout_s),
    });
    Ok(Arc::new(
        chat.map_err(|e| Failure::input(format!("{full}.url: {e}")))?,
    ))
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

/// A model in this process, loaded when it is first asked.
struct Loaded {
    name: String,
    files: ModelFiles,
    engine: EnginePlan,
    cell: OnceCell<EngineChat>,
}

impl Loaded {
    /// Loads the model, with formats as masks.
    fn load(name: String, files: &ModelFiles, engine: &EnginePlan) -> Result<EngineChat, Failure> {
        let loaded = load_model(files).map_err(Failure::input)?;
        let renderer: Arc<dyn Renderer> = Arc::new(chat_renderer(files)?);
        let config = loaded.params.config();
        let rollout = RolloutPlan {
            max_context_tokens: config.max_context.min(MAX_CONTEXT) as u32,
            ..RolloutPlan::default()
        };
        let grammars = grammars(None, &renderer, config.vocab)?;
        let model = embedded(
            engine,
            &rollout,
            &device()?,
            &loaded.params,
            renderer.as_ref(),
            &grammars,
            PolicyVersion::default(),
        )?;
        let requests = Arc::new(AtomicU64::new(1));
        Ok(EngineChat::new(name, Arc::new(model), renderer, requests))
    }
}

impl ChatModel for Loaded {
    fn identity(&self) -> String {
        self.name.clone()
    }

    fn ask<'a>(&'a self, request: &'a ChatRequest) -> BoxFuture<'a, Result<ChatAnswer, ChatError>> {
        let load = || async {
            let (name, files, engine) =
                (self.name.clone(), self.files.clone(), self.engine.clone());
            let loading = tokio::task::spawn_blocking(move || Self::load(name, &files, &engine));
            let loaded = loading.await.map_err(|e| e.to_string())?;
            loaded.map_err(|e| e.text().to_owned())
        };
        async move {
            let loaded = self.cell.get_or_try_init(load).await;
            let chat = loaded.map_err(|e| ChatError::Lasting(format!("{}: {e}", self.name)))?;
            chat.ask(request).await
        }
        .boxed()
    }
}
