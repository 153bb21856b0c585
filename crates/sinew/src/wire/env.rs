//! Tasks and environments. An environment is made of its keys by the registry of `sinew-env`;
//! nothing here knows one by name.

use super::judge::Bench;
use super::model::{resolve_env, unresolved};
use crate::failure::Failure;
use sinew_env::{EnvFactory, Rewarded, Sandboxes, Taskset};
use sinew_levels::{sandbox_spec, sandboxes};
use sinew_model::resolve_dataset;
use sinew_recipe::{HeldOut, RunPlan, TasksPlan};
use sinew_tasks::{Splits, TableConfig, TableTaskset, TasksError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tasks, and what makes the environment of one.
type World = (Arc<dyn Taskset>, Arc<dyn EnvFactory>);

/// Tasks of a recipe: rows of its own, or those of the environment.
///
/// All rows are read and rendered once, so that a run of a million rows starts after seconds, and never
/// fails at a row later.
pub(crate) fn taskset(recipe: &RunPlan) -> Result<Arc<dyn Taskset>, Failure> {
    if let Some(rows) = rows(&recipe.tasks)? {
        return Ok(Arc::new(rows));
    }
    let tasks = recipe.env.config().taskset(recipe.seed);
    tasks.map_err(|e| Failure::input(format!("env: {e}")))
}

/// The rows of `[tasks]`, if it has a source.
pub(crate) fn rows(tasks: &TasksPlan) -> Result<Option<TableTaskset>, Failure> {
    let Some(source) = &tasks.source else {
        return Ok(None);
    };
    let config = TableConfig {
        name: stem(source),
        source: files("tasks.source", source)?,
        held_out: match &tasks.held_out {
            HeldOut::Share(share) => Splits::Share(*share),
            HeldOut::Source(source) => Splits::File(files("tasks.held_out", source)?),
        },
        prompt: tasks.prompt.clone(),
        filter: tasks.filter.clone(),
        system: tasks.system.clone(),
        examples: tasks.examples.clone(),
        kind: tasks.kind.clone(),
    };
    let table = TableTaskset::open(config).map_err(|e| match e {
        TasksError::Read { .. } => Failure::outside(e),
        _ => Failure::input(e),
    })?;
    Ok(Some(table))
}

/// Name of the tasks: the last part of the source without its ending.
fn stem(source: &str) -> String {
    let source = source.strip_prefix("hf:").unwrap_or(source);
    let stem = Path::new(source).file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// Files of a source: a path as it is, or a data set of the hub, downloaded where needed.
fn files(key: &str, source: &str) -> Result<PathBuf, Failure> {
    let found = resolve_dataset(source, &resolve_env());
    found.map_err(|e| unresolved(&format!("{key} = {source:?}"), e))
}

/// Tasks and environments of a recipe. Sandboxes are started only for an environment that needs them.
pub(crate) fn world(recipe: &RunPlan) -> Result<World, Failure> {
    world_with(recipe, &Bench::default())
}

/// As [`world`], with the judges of a run.
pub(crate) fn world_with(recipe: &RunPlan, bench: &Bench) -> Result<World, Failure> {
    let sandboxes = match recipe.env.needs().sandbox {
        false => None,
        true => Some(Sandboxes {
            provider: sandboxes(&recipe.sandbox)?,
            spec: sandbox_spec(&recipe.sandbox)?,
        }),
    };
    let envs = recipe.env.config().factory(sandboxes);
    let mut envs = envs.map_err(|e| Failure::input(format!("env: {e}")))?;
    let taskset = taskset(recipe)?;
    if let Some(section) = &recipe.reward {
        let reward = super::reward::reward(recipe, section, taskset.as_ref(), bench)?;
        envs = Arc::new(Rewarded::new(envs, reward));
    }
    Ok((taskset, envs))
}
