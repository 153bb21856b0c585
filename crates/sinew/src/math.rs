//! The tool_math environment of a recipe.

use crate::failure::Failure;
use crate::recipe::{EnvSection, Recipe};
use sinew_env::math::{
    Arithmetic, Gsm8k, MathTaskConfig, Mixed, ToolMathConfig, ToolMathFactory, Word,
};
use sinew_env::{EnvFactory, Taskset};
use sinew_sandbox::{SandboxProvider, SandboxSpec};
use std::sync::Arc;

fn bad(e: impl std::fmt::Display) -> Failure {
    Failure::input(format!("env: {e}"))
}

/// Its tasks.
pub(crate) fn taskset(recipe: &Recipe) -> Result<Arc<dyn Taskset>, Failure> {
    let EnvSection::ToolMath { tasks, levels, .. } = &recipe.env else {
        return Err(Failure::system("env.type is not `tool_math`"));
    };
    let mut config = MathTaskConfig {
        seed: recipe.seed,
        ..MathTaskConfig::default()
    };
    if !levels.is_empty() {
        config.levels = levels.clone();
    }
    Ok(match tasks.as_str() {
        "arithmetic" => Arc::new(Arithmetic::new(config).map_err(bad)?),
        "word" => Arc::new(Word::new(config).map_err(bad)?),
        "gsm8k" => Arc::new(Gsm8k::shipped().map_err(bad)?),
        _ => Arc::new(Mixed::new(config).map_err(bad)?),
    })
}

/// Its environments.
pub(crate) fn factory(
    recipe: &Recipe,
    sandboxes: Arc<dyn SandboxProvider>,
    spec: SandboxSpec,
) -> Result<Arc<dyn EnvFactory>, Failure> {
    let EnvSection::ToolMath {
        process_reward,
        tool_timeout_s,
        ..
    } = &recipe.env
    else {
        return Err(Failure::system("env.type is not `tool_math`"));
    };
    let config = ToolMathConfig {
        process_reward: *process_reward,
        tool_timeout_s: *tool_timeout_s,
        ..ToolMathConfig::default()
    };
    Ok(Arc::new(
        ToolMathFactory::new(sandboxes, spec, config).map_err(bad)?,
    ))
}
