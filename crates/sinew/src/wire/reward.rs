//! The reward of a recipe: rewards by name, and Python functions in sandboxed workers.
//!
//! Functions of one recipe share their workers. A function that hangs, crashes or raises makes its sample
//! unscored; it harms no other one.

use crate::failure::Failure;
use sinew_bridge::{
    PythonCode, PythonReward, PythonWorkers, StartError, Target, TargetKind, WorkersConfig,
};
use sinew_env::{Reward, Split, Taskset};
use sinew_recipe::RewardSection;
use sinew_reward::{RewardSum, Term};
use std::path::Path;
use std::sync::Arc;

/// Worker processes for functions: each core of a small machine can score.
const WORKERS: usize = 2;

/// The sum of a recipe's rewards. Workers start only for functions, and stop with the last reward.
///
/// # Errors
/// If a function cannot be loaded, or has a parameter that is no column of the tasks.
pub(super) fn reward(
    section: &RewardSection,
    tasks: &dyn Taskset,
) -> Result<Arc<dyn Reward>, Failure> {
    let terms = section.terms();
    let names = terms.iter().map(|(name, ..)| *name);
    let functions: Vec<&str> = names.filter(|n| RewardSection::is_python(n)).collect();
    let workers = match functions.is_empty() {
        true => None,
        false => Some(workers(&functions).map_err(refused)?),
    };
    let mut sum = Vec::new();
    for (name, weight, clip) in terms {
        let target = functions.iter().position(|f| *f == name);
        let (short, reward): (&str, Arc<dyn Reward>) = match (target, &workers) {
            (Some(target), Some(workers)) => {
                let short = name.rsplit_once(':').map_or(name, |(_, function)| function);
                (short, Arc::new(function(workers, target, short, tasks)?))
            }
            _ => {
                let named = sinew_reward::named(name);
                let named = named.map_err(|e| Failure::input(format!("reward: {e}")))?;
                (name.split_once('(').map_or(name, |(s, _)| s), named)
            }
        };
        sum.push(Term {
            name: short.to_owned(),
            reward,
            weight,
            clip,
        });
    }
    Ok(Arc::new(RewardSum::new(sum)))
}

/// A function that cannot be used is wrong input: its file is the user's.
fn refused(e: StartError) -> Failure {
    Failure::input(format!("reward: {e}"))
}

/// Starts workers that have loaded all functions.
fn workers(functions: &[&str]) -> Result<PythonWorkers, StartError> {
    let parsed = functions
        .iter()
        .map(|f| Target::parse(f, TargetKind::Reward, Path::new(".")));
    let targets = parsed.collect::<Result<Vec<_>, _>>()?;
    let search = std::env::var("PATH").unwrap_or_default();
    let code = PythonCode::find(&targets, "python3", &search)?;
    // One more lives for a moment while a dead worker is replaced.
    let provider = code.process_provider(WORKERS + 1)?;
    let mut config = WorkersConfig::new(provider);
    config.workers = WORKERS;
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
        let task = tasks.get(split, 0).map_err(Failure::input)?;
        let columns = task.data.as_object().into_iter().flatten();
        let columns: Vec<&str> = columns.map(|(name, _)| name.as_str()).collect();
        reward.check(&columns).map_err(refused)?;
    }
    Ok(reward)
}
