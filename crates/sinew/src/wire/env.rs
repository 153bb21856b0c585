//! Tasks and environments.

use super::sandbox::{sandbox_spec, sandboxes};
use crate::failure::Failure;
use sinew_env::{EnvFactory, Sandboxes, Taskset};
use sinew_recipe::{EnvSection, RunPlan};
use std::sync::Arc;

type World = (Arc<dyn Taskset>, Arc<dyn EnvFactory>);

/// Tasks of a recipe.
pub(crate) fn taskset(env: &EnvSection, seed: u64) -> Result<Arc<dyn Taskset>, Failure> {
    let tasks = env.config().taskset(seed);
    tasks.map_err(|e| Failure::input(format!("env: {e}")))
}

/// Tasks and environments of a recipe.
pub(crate) fn world(recipe: &RunPlan) -> Result<World, Failure> {
    let sandboxes = match recipe.env.needs().sandbox {
        false => None,
        true => Some(Sandboxes {
            provider: sandboxes(&recipe.sandbox)?,
            spec: sandbox_spec(&recipe.sandbox)?,
        }),
    };
    let envs = recipe.env.config().factory(sandboxes);
    let envs = envs.map_err(|e| Failure::input(format!("env: {e}")))?;
    Ok((taskset(&recipe.env, recipe.seed)?, envs))
}
