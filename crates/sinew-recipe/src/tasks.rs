//! `[tasks]`: which tasks a step runs.

use crate::RunPlan;
use crate::rule::Rules;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which tasks a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "sampling", rename_all = "snake_case", deny_unknown_fields)]
pub enum TasksSection {
    /// All of them, once an epoch, in an order that the seed decides.
    // With braces: serde lets a variant without them have any keys.
    Uniform {},
    /// Task types that are neither solved nor hopeless are drawn more often.
    Adaptive(sinew_algo::AdaptiveConfig),
}

impl Default for TasksSection {
    fn default() -> Self {
        Self::Uniform {}
    }
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let TasksSection::Adaptive(config) = &plan.tasks else {
        return;
    };
    if let Some((field, value, allowed)) = config.broken() {
        rules.allowed(&format!("tasks.{field}"), value, allowed, false);
    }
    let reason = "has no effect: with [data] no tasks are run to train on; remove [tasks]";
    rules.custom(
        "tasks.sampling",
        "\"adaptive\"",
        reason.into(),
        plan.data.is_none(),
    );
}
