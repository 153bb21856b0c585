//! The reward of a recipe: rewards by name, Python functions in sandboxed workers, judges.
//!
//! Functions of one recipe share their workers. A function that hangs, crashes or raises makes its sample
//! unscored; it harms no other one.

use super::judge;
use crate::failure::Failure;
use sinew_bridge::{
    PythonCode, PythonReward, PythonWorkers, StartError, Target, TargetKind, WorkersConfig,
};
use sinew_env::{Reward, Split, Taskset};
use sinew_judge::Bench;
use sinew_levels::sandbox_spec;
use sinew_recipe::{RewardSection, RunPlan};
use sinew_reward::{Argument, RewardSpec, RewardSum, SpecError, Term};
use sinew_sandbox::SandboxSpec;
use std::path::Path;
use std::sync::Arc;

/// Worker processes for functions: each core of a small machine can score.
const WORKERS: usize = 2;

/// The sum of a recipe's rewards. Workers start only for functions, and stop with the last reward.
///
/// # Errors
/// If a function or a judge cannot be loaded, or needs a column that the tasks do not have.
pub(super) fn reward(
    recipe: &RunPlan,
    section: &RewardSection,
    tasks: &dyn Taskset,
    bench: &Bench,
) -> Result<Arc<dyn Reward>, Failure> {
    let terms = section.terms();
    let names: Vec<&str> = terms.iter().map(|(name, ..)| *name).collect();
    let python = names.iter().filter(|n| RewardSection::is_python(n));
    let functions: Vec<&str> = python.copied().collect();
    let workers = match functions.is_empty() {
        true => None,
        false => Some(workers(&functions, sandbox_spec(&recipe.sandbox)?).map_err(refused)?),
    };
    let mut sum = Vec::new();
    for (name, weight, clip) in terms {
        let target = functions.iter().position(|f| *f == name);
        let reward: Arc<dyn Reward> = match (target, &workers) {
            (Some(target), Some(workers)) => {
                Arc::new(function(workers, target, short(name), tasks)?)
            }
            _ => other(recipe, section, name, tasks, bench)?,
        };
        // Two rewards of one short name must not share a metric.
        let twin = |other: &&str| **other != *name && short(other) == short(name);
        let shared = names.iter().any(twin);
        sum.push(Term {
            name: if shared { name } else { short(name) }.to_owned(),
            reward,
            weight,
            clip,
        });
    }
    Ok(Arc::new(RewardSum::new(sum)))
}

/// A reward that is no function: a judge, a server, a model, or one by name.
fn other(
    recipe: &RunPlan,
    section: &RewardSection,
    name: &str,
    tasks: &dyn Taskset,
    bench: &Bench,
) -> Result<Arc<dyn Reward>, Failure> {
    if let Some(judge) = name.strip_prefix("judge.") {
        return Ok(judge::judge(recipe, judge, tasks, bench)?);
    }
    if let Some(server) = section.server(name) {
        return Ok(judge::server(&server)?);
    }
    match RewardSection::model(name) {
        Some(source) => Ok(judge::reward_model(source)?),
        None => named(name, tasks),
    }
}

/// Name of a reward in metrics: without arguments, or the function without its file.
fn short(name: &str) -> &str {
    if name.contains("://") {
        return name;
    }
    match RewardSection::is_python(name) {
        true => name.rsplit_once(':').map_or(name, |(_, function)| function),
        false => name.split_once('(').map_or(name, |(short, _)| short),
    }
}

/// A reward by name, whose column the first task of each split must have.
fn named(name: &str, tasks: &dyn Taskset) -> Result<Arc<dyn Reward>, Failure> {
    let refused = |e: SpecError| Failure::input(format!("reward: {e}"));
    let spec = RewardSpec::parse(name).map_err(refused)?;
    for split in [Split::Train, Split::HeldOut] {
        let columns = judge::columns(tasks, split)?;
        for argument in &spec.positional {
            if let Argument::Column(column) = argument
                && !columns.contains(column)
            {
                return Err(Failure::input(format!(
                    "reward: {name}: tasks have no column {column}; columns: {}",
                    columns.join(", ")
                )));
            }
        }
    }
    sinew_reward::named(name).map_err(refused)
}

/// A function that cannot be used is wrong input: its file is the user's.
fn refused(e: StartError) -> Failure {
    Failure::input(format!("reward: {e}"))
}

/// Starts workers that have loaded all functions.
fn workers(functions: &[&str], spec: SandboxSpec) -> Result<PythonWorkers, StartError> {
    let parsed = functions
        .iter()
        .map(|f| Target::parse(f, TargetKind::Reward, Path::new(".")));
    let targets = parsed.collect::<Result<Vec<_>, _>>()?;
    let search = std::env::var("PATH").unwrap_or_default();
    let code = PythonCode::find(&targets, "python3", &search)?;
    // One more lives for a moment while a dead worker is replaced.
    let provider = code.process_provider(WORKERS + 1)?;
    let mut config = WorkersConfig::new(provider);
    (config.workers, config.spec) = (WORKERS, spec);
    PythonWorkers::start(config, code)
}

/// A function, whose parameters must be known for the first task of each split.
fn function(
    workers: &PythonWorkers,
    target: usize,
    name: &str,
    tasks: &dyn Taskset,
) -> Result<PythonReward, Failure> {
    let reward = PythonReward::new(workers.clone(), target, name).map_err(refused)?;
    if reward.is_group() {
        return Err(Failure::input(format!(
            "reward: {name} has the parameter `group`: a recipe scores one sample at a time; use `output`, `messages` \
             and columns of the task"
        )));
    }
    for split in [Split::Train, Split::HeldOut] {
        let columns = judge::columns(tasks, split)?;
        let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
        reward.check(&columns).map_err(refused)?;
    }
    Ok(reward)
}
