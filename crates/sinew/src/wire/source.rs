//! Training data that exists already: rows of files, stored episodes, or a data pool. With `[data]`, tasks
//! are run for the measurement only.

use super::model::renderer;
use super::plan;
use crate::failure::Failure;
use serde_json::Value;
use sinew_algo::Advantage;
use sinew_grammar::Grammars;
use sinew_pipeline::{DatasetSource, PoolClient, PoolSource, PoolSourceConfig, SampleSource};
use sinew_pool::schema::Kind;
use sinew_project::RunDir;
use sinew_recipe::{DataSection, RunPlan};
use sinew_render::Renderer;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The source of `[data]`; `None` where the run samples its own episodes.
///
/// # Errors
/// If a row cannot be read or rendered, or the pool does not answer or has another tokenizer.
pub(crate) fn source(
    recipe: &RunPlan,
    dir: &RunDir,
    renderer: &dyn Renderer,
    grammars: &Arc<dyn Grammars>,
    cancel: &watch::Receiver<bool>,
) -> Result<Option<Box<dyn SampleSource>>, Failure> {
    if let Some(data) = plan::dataset(recipe, renderer)? {
        let grammars = Arc::clone(grammars);
        return Ok(Some(Box::new(DatasetSource { data, grammars })));
    }
    let pool = pool(recipe, dir.path(), cancel.clone())?;
    Ok(pool.map(|pool| Box::new(pool) as Box<dyn SampleSource>))
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
pub(crate) fn check_pool(recipe: &RunPlan) -> Result<String, Failure> {
    let (_, reply) = reached(recipe)?;
    Ok(format!(
        "pool: {} whole groups wait",
        reply["groups"]["whole"]
    ))
}

/// Minimum trajectories of a group that a recipe's algorithm compares.
pub(super) fn min_group(recipe: &RunPlan) -> usize {
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
