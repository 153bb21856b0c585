//! Tasks and environments. An environment is made of its keys by the registry of `sinew-env`;
//! nothing here knows one by name.

use super::model::{resolve_env, unresolved};
use crate::failure::Failure;
use sinew_bridge::{PythonRows, RowLimits};
use sinew_env::{EnvFactory, Reward, Rewarded, Sandboxes, Taskset};
use sinew_judge::Bench;
use sinew_levels::{sandbox_spec, sandboxes};
use sinew_model::resolve_dataset;
use sinew_recipe::{HeldOut, RunPlan, TasksPlan};
use sinew_tasks::{Source, Splits, TableConfig, TableTaskset, TasksError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tasks, and what makes the environment of one.
type World = (Arc<dyn Taskset>, Arc<dyn EnvFactory>);

/// Tasks of a recipe: rows of its own, or those of the environment.
///
/// All rows are read and rendered once, so that a run of a million rows starts after seconds, and never
/// fails at a row later.
pub(crate) fn taskset(recipe: &RunPlan) -> Result<Arc<dyn Taskset>, Failure> {
    if let Some(rows) = rows(recipe)? {
        return Ok(Arc::new(rows));
    }
    if recipe.harness.live().is_some() {
        return Ok(Arc::new(sinew_env::NoTasks));
    }
    let tasks = recipe.env.config().taskset(recipe.seed);
    tasks.map_err(|e| Failure::input(format!("env: {e}")))
}

/// The rows of `[tasks]`, if it has a source. Functions of Python run in a worker that ends with them.
pub(crate) fn rows(recipe: &RunPlan) -> Result<Option<TableTaskset>, Failure> {
    let tasks = &recipe.tasks;
    let Some(name) = &tasks.source else {
        return Ok(None);
    };
    let (source, own) = source(recipe, "tasks.source", name)?;
    let config = TableConfig {
        name: stem(name),
        source,
        held_out: match (&tasks.held_out, own) {
            (HeldOut::Source(other), _) => {
                Splits::Own(self::source(recipe, "tasks.held_out", other)?.0)
            }
            (HeldOut::Share(_), Some(own)) => Splits::Own(own),
            (HeldOut::Share(share), None) => Splits::Share(*share),
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

/// Rows of a source, and those that a function gives for its held-out split.
fn source(recipe: &RunPlan, key: &str, source: &str) -> Result<(Source, Option<Source>), Failure> {
    if !TasksPlan::is_python(source) {
        return Ok((files(key, source)?.into(), None));
    }
    let spec = sandbox_spec(&recipe.sandbox)?;
    let made = PythonRows::read(source, ("python3", recipe.seed), spec, RowLimits::default());
    let made = made.map_err(|e| Failure::input(format!("{key}: {e}")))?;
    let by = |rows| Source::Made {
        by: source.into(),
        rows,
    };
    Ok((by(made.train), made.held_out.map(by)))
}

/// Name of the tasks: the last part of the source without its ending.
fn stem(source: &str) -> String {
    let source = source.strip_prefix("hf:").unwrap_or(source);
    let source = source.rsplit_once(".py:").map_or(source, |(file, _)| file);
    let stem = Path::new(source).file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// Files of a source: a path as it is, or a data set of the hub, downloaded where needed.
fn files(key: &str, source: &str) -> Result<PathBuf, Failure> {
    let found = resolve_dataset(source, &resolve_env());
    found.map_err(|e| unresolved(&format!("{key} = {source:?}"), e))
}

/// The recipe's own reward, without an environment; `None` if it has none.
pub(crate) fn own_reward(
    recipe: &RunPlan,
    tasks: &dyn Taskset,
) -> Result<Option<Arc<dyn Reward>>, Failure> {
    let section = recipe.reward.as_ref().filter(|s| !s.terms().is_empty());
    let reward = section.map(|s| super::reward::reward(recipe, s, tasks, &Bench::default()));
    reward.transpose()
}

/// Tasks and environments of a recipe. Sandboxes are started only for an environment that needs them.
pub(crate) fn world(recipe: &RunPlan) -> Result<World, Failure> {
    if cfg!(not(feature = "mcp")) && recipe.env.name() == "mcp" {
        return Err(sinew_levels::missing_feature("env.type = \"mcp\"", "mcp").into());
    }
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
    // Rewards from outside alone leave the environment's own score.
    if let Some(section) = recipe.reward.as_ref().filter(|s| !s.terms().is_empty()) {
        let reward = super::reward::reward(recipe, section, taskset.as_ref(), bench)?;
        envs = Arc::new(Rewarded::new(envs, reward));
    }
    Ok((taskset, envs))
}
