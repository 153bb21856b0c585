//! The environments that recipes can name.

use sinew_bridge::{HTTP_KIND, KIND, MCP_KIND};
use sinew_env::{EnvKind, Registry, chat, math, tiny};
use sinew_harbor::KIND as HARBOR_KIND;
use sinew_peers::{NEMO_KIND, OPENENV_KIND};
use sinew_recipe::RunPlan;
use sinew_runs::RunDirError;
use std::path::Path;

/// The environments in the order of the documentation. A new environment crate adds one line here.
static KINDS: [&EnvKind; 9] = [
    &chat::KIND,
    &math::KIND,
    &tiny::KIND,
    &KIND,
    &HTTP_KIND,
    &MCP_KIND,
    &OPENENV_KIND,
    &NEMO_KIND,
    &HARBOR_KIND,
];

/// All environments of the program.
pub const ENVIRONMENTS: Registry = Registry::new(&KINDS);

/// The recipe in a run folder.
///
/// # Errors
/// Fails if the folder holds no run, or its recipe cannot be read.
pub fn recipe_of(run_dir: &Path) -> Result<RunPlan, RunDirError> {
    sinew_runs::recipe(run_dir, ENVIRONMENTS)
}
