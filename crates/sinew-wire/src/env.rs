//! Tasks and environments. An environment is made of its keys by the registry of `sinew-env`;
//! nothing here knows one by name.

use crate::failure::Failure;
use crate::model::{resolve_env, unresolved};
use crate::reward::{rewards, sandboxed};
use sinew_bridge::{PythonRows, RowLimits};
use sinew_env::{EnvFactory, MixtureFactory, MixtureTasks, Reward, Rewarded, Taskset};
use sinew_judge::Bench;
use sinew_levels::sandbox_spec;
use sinew_model::resolve_dataset;
use sinew_recipe::{HeldOut, RunPlan, TasksPlan};
use sinew_tasks::{Source, Splits, TableConfig, TableTaskset, TasksError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The tasks of a recipe, read once for checks and training.
///
/// All rows are read and rendered, so that a run of a million rows starts after seconds, and never fails at a
/// row later.
#[derive(Clone)]
pub struct Tasks {
    /// Of the whole run.
    pub all: Arc<dyn Taskset>,
    /// Of each environment, in the order of the recipe.
    each: Vec<Arc<dyn Taskset>>,
    /// Rows that the filter left out, and rows that are held out as well; `None` without rows.
    pub left_out: Option<(usize, usize)>,
}

/// Tasks, and what makes the environment of one.
pub struct World {
    /// Tasks of the whole run, by split and index.
    pub taskset: Arc<dyn Taskset>,
    /// Starts the environment of a task, with the rewards of the recipe around it.
    pub envs: Arc<dyn EnvFactory>,
}

impl std::fmt::Debug for Tasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tasks")
            .field("left_out", &self.left_out)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World")
            .field("envs", &self.envs.name())
            .finish_non_exhaustive()
    }
}

/// Reads the tasks of a recipe: rows of its own, or those of its environments.
///
/// # Errors
/// If a source is missing or a row cannot be read or rendered; in a mixture the text names the environment.
pub fn tasks(recipe: &RunPlan) -> Result<Tasks, Failure> {
    let (mut each, mut named, mut left_out) = (Vec::new(), Vec::new(), None);
    for world in recipe.worlds() {
        let (tasks, own) = member(recipe, &world, taskset(recipe, &world))?;
        let add = |(a, b): (usize, usize)| own.map_or((a, b), |(c, d)| (a + c, b + d));
        left_out = left_out.map(add).or(own);
        named.push((world.env.name.clone(), Arc::clone(&tasks)));
        each.push(tasks);
    }
    let all = match (&each[..], recipe.env.is_mixture()) {
        ([only], false) => Arc::clone(only),
        _ => Arc::new(MixtureTasks::new(named).map_err(Failure::input)?),
    };
    Ok(Tasks {
        all,
        each,
        left_out,
    })
}

/// The result for one environment; in a mixture, failures name it.
fn member<T>(
    recipe: &RunPlan,
    world: &sinew_recipe::World<'_>,
    made: Result<T, Failure>,
) -> Result<T, Failure> {
    made.map_err(|e| match recipe.env.is_mixture() {
        true => e.of(&format!("env {:?}", world.env.name)),
        false => e,
    })
}

/// Tasks of one environment, and what was left out of their rows.
type Counted = (Arc<dyn Taskset>, Option<(usize, usize)>);

/// Tasks of one environment: rows of `[tasks]`, none where agents bring their own, else those that the
/// environment makes from the seed.
fn taskset(recipe: &RunPlan, world: &sinew_recipe::World<'_>) -> Result<Counted, Failure> {
    if let Some(rows) = rows(recipe, world.tasks)? {
        let summary = rows.summary();
        let left_out = Some((summary.filtered, summary.overlapping));
        return Ok((Arc::new(rows), left_out));
    }
    if recipe.harness.live().is_some() {
        return Ok((Arc::new(sinew_env::NoTasks), None));
    }
    let tasks = world.env.config().taskset(recipe.seed);
    let tasks = tasks.map_err(|e| Failure::input(format!("env: {e}")))?;
    Ok((tasks, None))
}

/// The rows of a source, if there is one. Functions of Python run in a worker that ends with them.
fn rows(recipe: &RunPlan, tasks: &TasksPlan) -> Result<Option<TableTaskset>, Failure> {
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
///
/// # Errors
/// If a reward cannot be made, or compares the samples of a group: stored episodes are scored one by one.
pub fn own_reward(
    recipe: &RunPlan,
    tasks: &dyn Taskset,
) -> Result<Option<Arc<dyn Reward>>, Failure> {
    let Some(section) = recipe.reward.as_ref().filter(|s| !s.terms().is_empty()) else {
        return Ok(None);
    };
    let rewards = rewards(recipe, section, tasks, &Bench::default())?;
    match rewards.group {
        None => Ok(Some(Arc::new(rewards.single))),
        Some(_) => Err(Failure::input(
            "reward: rewards of a group are not scored anew; name others with --reward",
        )),
    }
}

/// Environments of a recipe with its tasks. Sandboxes are started only for environments that need them.
///
/// # Errors
/// If an environment, a reward or a sandbox cannot be made, or this build lacks a feature that one needs.
pub fn world(recipe: &RunPlan, tasks: &Tasks) -> Result<World, Failure> {
    let mcp = recipe.worlds().iter().any(|w| w.env.kind_name() == "mcp");
    if cfg!(not(feature = "mcp")) && mcp {
        return Err(sinew_levels::missing_feature("env.type = \"mcp\"", "mcp").into());
    }
    world_with(recipe, tasks, &Bench::default())
}

/// As [`world`], with the judges of a run.
pub(crate) fn world_with(recipe: &RunPlan, tasks: &Tasks, bench: &Bench) -> Result<World, Failure> {
    let sandboxes = match recipe.env.needs().sandbox {
        false => None,
        true => Some(sandboxed(&recipe.sandbox)?),
    };
    let mut envs = Vec::new();
    for (world, taskset) in recipe.worlds().into_iter().zip(&tasks.each) {
        let sandboxes = sandboxes.clone().filter(|_| world.env.needs().sandbox);
        let made = || {
            let envs = world.env.config().factory(sandboxes);
            let envs = envs.map_err(|e| Failure::input(format!("env: {e}")))?;
            // Rewards from outside alone leave the environment's own score.
            let Some(section) = world.reward.filter(|s| !s.terms().is_empty()) else {
                return Ok(envs);
            };
            let rewards = rewards(recipe, section, taskset.as_ref(), bench)?;
            let rewarded = Rewarded::new(envs, Arc::new(rewards.single));
            let rewarded = match rewards.group {
                None => rewarded,
                Some(group) => rewarded.with_group(Arc::new(group)),
            };
            Ok(Arc::new(rewarded) as Arc<dyn EnvFactory>)
        };
        envs.push((world.env.name.clone(), member(recipe, &world, made())?));
    }
    let envs: Arc<dyn EnvFactory> = match (&envs[..], recipe.env.is_mixture()) {
        ([(_, only)], false) => Arc::clone(only),
        _ => Arc::new(MixtureFactory::new(envs)),
    };
    Ok(World {
        taskset: Arc::clone(&tasks.all),
        envs,
    })
}
