//! Tasks of a folder of Harbor without a recipe, for checks and measurements.

use crate::env::facts;
use crate::failure::Failure;
use crate::reward::sandboxed;
use sinew_env::EnvConfig;
use sinew_harbor::{Harbor, HarborFactory, HarborTasks, PlaceFacts};
use sinew_recipe::{Level, SandboxPlan};

/// The tasks of a folder that sandboxes of these settings can run, for solutions and idle agents.
///
/// # Errors
/// If the folder or a key is wrong.
pub fn harbor_tasks(keys: &Harbor, sandbox: &SandboxPlan) -> Result<HarborTasks, Failure> {
    keys.check().map_err(Failure::input)?;
    let place = PlaceFacts::new(&facts(sandbox, false, None)?, keys.passed());
    HarborTasks::open(&keys.tasks_config(0), &place).map_err(Failure::input)
}

/// Starts the sandboxes of these settings, and gives the environments of tasks in them.
///
/// # Errors
/// If the level cannot be started here.
pub fn harbor_environments(keys: &Harbor, sandbox: &SandboxPlan) -> Result<HarborFactory, Failure> {
    let mut sandboxes = sandboxed(sandbox)?;
    if sandbox.level == Level::Container {
        sandboxes.machines = Some(crate::levels::machines(sandbox, Vec::new())?);
    }
    Ok(keys.environments(sandboxes))
}
