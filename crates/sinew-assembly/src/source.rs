//! Training data that is not sampled: rows of files, stored episodes, a data pool, a queue, or gold runs.
//! With `[data]`, the model runs tasks only for the measurement.

use crate::env::{World, tasks, world};
use crate::failure::Failure;
use crate::model::renderer;
use crate::queue::{open_queue, place};
use crate::{Session, plan};
use serde_json::Value;
use sinew_algo::Advantage;
use sinew_env::{EnvFactory, Taskset};
use sinew_grammar::Grammars;
use sinew_pipeline::SampleSource;
use sinew_pool::schema::Kind;
use sinew_queue::Place;
use sinew_recipe::{DataSection, RunPlan};
use sinew_render::Renderer;
use sinew_rollout::RunInfo;
use sinew_sources::{
    Dataset, DatasetSource, GoldRuns, GoldSource, PoolClient, PoolSource, PoolSourceConfig,
    QueueSource, QueueSourceConfig, unused_gold,
};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

/// Parts from which gold runs are made.
pub(crate) struct Gold<'a> {
    pub taskset: &'a Arc<dyn Taskset>,
    pub envs: &'a Arc<dyn EnvFactory>,
    pub renderer: &'a Arc<dyn Renderer>,
    /// Run that their traces name.
    pub run: RunInfo,
}

impl<'a> Gold<'a> {
    pub(crate) fn new(
        taskset: &'a Arc<dyn Taskset>,
        envs: &'a Arc<dyn EnvFactory>,
        renderer: &'a Arc<dyn Renderer>,
        run: RunInfo,
    ) -> Self {
        Self {
            taskset,
            envs,
            renderer,
            run,
        }
    }

    /// Gold runs within the limits of a recipe's episodes.
    pub(crate) fn runs(self, recipe: &RunPlan) -> Arc<GoldRuns> {
        let r = &recipe.rollout;
        Arc::new(GoldRuns {
            taskset: Arc::clone(self.taskset),
            envs: Arc::clone(self.envs),
            renderer: Arc::clone(self.renderer),
            run: self.run,
            max_turns: r.max_turns,
            max_context_tokens: r.max_context_tokens as usize,
            timeout: Duration::from_secs_f64(r.episode_timeout_s),
            max_in_flight: r.max_in_flight,
            asking: Mutex::new(()),
        })
    }
}

/// The source of `[data]`, whose rows are `data` where it has some; `None` where the run samples its own
/// episodes.
///
/// # Errors
/// If the pool does not answer or has another tokenizer.
pub(crate) fn source(
    recipe: &RunPlan,
    data: Option<Dataset>,
    gold: Gold<'_>,
    grammars: &Arc<dyn Grammars>,
    session: &Session<'_>,
) -> Result<Option<Box<dyn SampleSource>>, Failure> {
    if let Some(data) = data {
        let grammars = Arc::clone(grammars);
        return Ok(Some(Box::new(DatasetSource { data, grammars })));
    }
    if let Some(DataSection::Gold {}) = recipe.data {
        return Ok(Some(Box::new(GoldSource {
            tasks: plan::draws(recipe, gold.taskset.as_ref())?,
            runs: gold.runs(recipe),
            runtime: session.runtime.clone(),
            cancel: session.cancel.clone(),
        })));
    }
    let dir = session.dir.path();
    if let Some(source) = queue(recipe, dir, session.cancel.clone())? {
        return Ok(Some(Box::new(source)));
    }
    let pool = pool(recipe, dir, session.cancel.clone())?;
    Ok(pool.map(|pool| Box::new(pool) as Box<dyn SampleSource>))
}

/// Maximum number of gold runs of each environment that a check plays.
const TRIED: usize = 3;

/// Whether a recipe's environment has a gold policy whose turns this model can write: some are played.
///
/// # Errors
/// If there is no gold policy, or one of the runs fails or does not fit the limits of `[rollout]`.
pub fn check_gold(recipe: &RunPlan) -> Result<String, Failure> {
    let renderer = renderer(&recipe.model, &recipe.env)?;
    let World { taskset, envs, .. } = world(recipe, &tasks(recipe)?)?;
    let gold = Gold {
        taskset: &taskset,
        envs: &envs,
        renderer: &renderer,
        run: RunInfo::default(),
    };
    let runs = gold.runs(recipe);
    if let Some(place) = runs.without_gold()? {
        let worlds = recipe.worlds();
        let kind = worlds.get(place).map_or("", |w| w.env.kind_name());
        let key = recipe.env.key(place);
        return Err(Failure::input(format!(
            "data.type = \"gold\": {key}.type = \"{kind}\" has no gold policy: {way}, or use data.type = \"demonstrations\"",
            way = match kind {
                "chat" =>
                    format!("name the column with a right answer, as in {key}.gold = \"answer\""),
                _ => "give a class of Python a method `gold`".to_owned(),
            }
        )));
    }
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::system)?;
    let (mut played, mut tokens) = (0, 0);
    for (_, tasks) in taskset.members() {
        for index in tasks.take(TRIED) {
            let trace = runtime.block_on(runs.play(recipe.seed, 0, index))?;
            if let Some(why) = unused_gold(&trace) {
                return Err(Failure::input(format!(
                    "data.type = \"gold\": task {}: {why}: {:?}",
                    trace.task, trace.end
                )));
            }
            played += 1;
            tokens += trace.sampled_tokens();
        }
    }
    Ok(format!(
        "gold runs of {played} tasks are solved, with {tokens} tokens to imitate"
    ))
}

/// The kind of rows that a recipe's algorithm draws from a pool.
fn kind_of(recipe: &RunPlan) -> Kind {
    let composition = recipe.algorithm.composition(recipe.rollout.group_size);
    match composition.map(|c| c.advantage) {
        Ok(Advantage::One) => Kind::Sft,
        Ok(Advantage::Preference { .. }) => Kind::Dpo,
        _ => Kind::Rl,
    }
}

/// A recipe's pool, if it answers and has the tokenizer of the model, and its status.
fn reached(recipe: &RunPlan) -> Result<(PoolClient, Value), Failure> {
    let Some(DataSection::Pool {
        url, token_file, ..
    }) = &recipe.data
    else {
        return Err(Failure::system("data.type is not `pool`"));
    };
    let client = PoolClient::new(url, Path::new(token_file))?;
    let reply = client.call("GET", "/pool", &Value::Null)?;
    let own = sinew_pool::tokenizer_hash(renderer(&recipe.model, &recipe.env)?.as_ref());
    if reply["tokenizer"] != own.as_str() {
        return Err(Failure::input(format!(
            "data.url = {url:?}: its tokenizer is {}, this model's is {own}\n  \
             hint: serve the pool with the same --model",
            reply["tokenizer"]
        )));
    }
    Ok((client, reply))
}

/// Whether a recipe's pool can be drawn from, with the number of whole groups in it.
///
/// # Errors
/// If the pool does not answer, refuses the token, or was filled with another tokenizer.
pub fn check_pool(recipe: &RunPlan) -> Result<String, Failure> {
    let (_, reply) = reached(recipe)?;
    Ok(format!(
        "pool: {} whole groups wait",
        reply["groups"]["whole"]
    ))
}

/// Minimum trajectories of a group that a recipe's algorithm compares.
pub(crate) fn min_group(recipe: &RunPlan) -> usize {
    let composition = recipe.algorithm.composition(recipe.rollout.group_size);
    let compares = composition.is_ok_and(|c| c.advantage.compares());
    if compares { 2 } else { 1 }
}

/// The pool of `[data] type = "pool"`; `None` with other data.
fn pool(
    recipe: &RunPlan,
    run_dir: &Path,
    cancel: watch::Receiver<bool>,
) -> Result<Option<PoolSource>, Failure> {
    let Some(DataSection::Pool {
        wait_s, lease_s, ..
    }) = &recipe.data
    else {
        return Ok(None);
    };
    let (client, _) = reached(recipe)?;
    let config = PoolSourceConfig {
        run_dir: run_dir.into(),
        kind: kind_of(recipe),
        wait: Duration::from_secs_f64(*wait_s),
        lease_s: *lease_s,
        min_group: min_group(recipe),
    };
    Ok(Some(PoolSource::new(client, config, cancel)?))
}

/// The queue of `[data] type = "queue"`; `None` with other data.
fn queue(
    recipe: &RunPlan,
    run_dir: &Path,
    cancel: watch::Receiver<bool>,
) -> Result<Option<QueueSource>, Failure> {
    let Some(DataSection::Queue {
        consumer,
        wait_s,
        lease_s,
        ..
    }) = &recipe.data
    else {
        return Ok(None);
    };
    let config = QueueSourceConfig {
        run_dir: run_dir.into(),
        consumer: consumer.clone(),
        wait: Duration::from_secs_f64(*wait_s),
        lease: Duration::from_secs_f64(*lease_s),
        min_group: min_group(recipe),
    };
    let Some(place) = data_queue(recipe)? else {
        return Ok(None);
    };
    let queue = open_queue(&place)?;
    Ok(Some(QueueSource::new(queue, config, cancel)?))
}

/// Address of the queue of a recipe's `[data]`; `None` with other data.
///
/// # Errors
/// If the file of its token cannot be read.
pub fn data_queue(recipe: &RunPlan) -> Result<Option<Place>, Failure> {
    let Some(DataSection::Queue {
        queue,
        token_file,
        name,
        ..
    }) = &recipe.data
    else {
        return Ok(None);
    };
    let place = place(queue, name, token_file.as_deref().map(Path::new));
    place.map(Some).map_err(|e| e.of("data"))
}

/// Whether a recipe's queue can be drawn from, with the number of its rows.
///
/// # Errors
/// If the queue does not answer, or refuses the token.
pub fn check_queue(recipe: &RunPlan) -> Result<String, Failure> {
    let Some(mut place) = data_queue(recipe)? else {
        return Err(Failure::system("data.type is not `queue`"));
    };
    place.patience = Duration::from_secs(5);
    let stats = open_queue(&place)?.stats();
    let stats = stats.map_err(|e| Failure::outside(format!("data.queue: {e}")))?;
    Ok(format!("queue: {} rows are not done", stats.rows))
}
