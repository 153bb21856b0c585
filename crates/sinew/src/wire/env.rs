//! Tasks and environments. An environment is made of its keys by the registry of `sinew-env`; nothing here
//! knows one by name.

use super::sandbox::{sandbox_spec, sandboxes};
use crate::failure::Failure;
use sinew_env::{EnvFactory, Sandboxes, Taskset};
use sinew_recipe::{EnvSection, RunPlan};
use std::sync::Arc;

/// Tasks, and what makes the environment of one.
type World = (Arc<dyn Taskset>, Arc<dyn EnvFactory>);

/// Tasks of a recipe. They are a function of its keys and the seed.
pub(crate) fn taskset(env: &EnvSection, seed: u64) -> Result<Arc<dyn Taskset>, Failure> {
    let tasks = env.config().taskset(seed);
    tasks.map_err(|e| Failure::input(format!("env: {e}")))
}

/// Tasks and environments of a recipe. Sandboxes are started only for an environment that needs them.
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
