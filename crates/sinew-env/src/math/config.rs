//! The keys of `tool_math` in a recipe.

use super::env::gives;
use super::{
    Arithmetic, Calls, Gsm8k, MAX_PROCESS_REWARD, MathTaskConfig, Mixed, PromptConfig,
    ToolMathConfig, ToolMathFactory, Word,
};
use crate::port::{EnvError, EnvFactory};
use crate::registry::{EnvConfig, EnvKind, KeyError, Needs, Sandboxes};
use crate::taskset::{Taskset, TasksetError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_types::Gives;
use std::sync::Arc;

/// The environment of the registry.
pub const KIND: EnvKind = EnvKind::new::<ToolMath>(
    "tool_math",
    "arithmetic and word problems with a Python tool",
    Needs {
        sandbox: true,
        alphabet: None,
        rows: false,
        tasks: false,
        reward: false,
    },
);

/// Problems to draw from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Tasks {
    Arithmetic,
    Word,
    #[default]
    Mixed,
    /// 200 rows of GSM8K; see `data/README.md`.
    Gsm8k,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct ToolMath {
    /// Problems to draw from.
    tasks: Tasks,
    /// Difficulties to draw from, 1 to 3. Empty: the taskset's own choice.
    #[schemars(inner(range(min = 1, max = 3)))]
    levels: Vec<u8>,
    /// Notation of tool calls: `tag` is taught by the prompt and suits models without tool training;
    /// `template` is the format of the model's chat template.
    calls: Calls,
    /// Reward for the first call of an episode that ran without an error.
    #[schemars(range(min = 0.0, max = MAX_PROCESS_REWARD))]
    process_reward: f64,
    /// Deadline of one tool call, in seconds.
    #[schemars(range(min = 0.1, max = 600.0))]
    tool_timeout_s: f64,
}

impl Default for ToolMath {
    fn default() -> Self {
        Self {
            tasks: Tasks::default(),
            levels: Vec::new(),
            calls: Calls::default(),
            process_reward: 0.0,
            tool_timeout_s: 5.0,
        }
    }
}

impl EnvConfig for ToolMath {
    fn check(&self) -> Result<(), KeyError> {
        let wrong = |key, value: String, reason: String| Err(KeyError { key, value, reason });
        let levels = format!("{:?}", self.levels);
        if self.tasks == Tasks::Gsm8k && !self.levels.is_empty() {
            let reason = "has no effect on tasks = \"gsm8k\"; remove it".into();
            return wrong("levels", levels, reason);
        }
        if self.levels.iter().any(|l| !(1..=3).contains(l)) {
            return wrong("levels", levels, "allowed: 1, 2 and 3".into());
        }
        if !(0.0..=MAX_PROCESS_REWARD).contains(&self.process_reward) {
            let reason = format!(
                "allowed: 0 to {MAX_PROCESS_REWARD}: it must stay small compared with the outcome"
            );
            return wrong("process_reward", self.process_reward.to_string(), reason);
        }
        if !(0.1..=600.0).contains(&self.tool_timeout_s) {
            let reason = "allowed: 0.1 to 600 seconds".into();
            return wrong("tool_timeout_s", self.tool_timeout_s.to_string(), reason);
        }
        Ok(())
    }

    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        let mut config = MathTaskConfig {
            seed,
            ..MathTaskConfig::default()
        };
        if !self.levels.is_empty() {
            config.levels = self.levels.clone();
        }
        Ok(match self.tasks {
            Tasks::Arithmetic => Arc::new(Arithmetic::new(config)?),
            Tasks::Word => Arc::new(Word::new(config)?),
            Tasks::Mixed => Arc::new(Mixed::new(config)?),
            Tasks::Gsm8k => Arc::new(Gsm8k::shipped()?),
        })
    }

    fn factory(&self, sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        let Some(Sandboxes { provider, spec, .. }) = sandboxes else {
            return Err(EnvError::Sandbox("tool_math was given no sandboxes".into()));
        };
        let config = ToolMathConfig {
            prompt: PromptConfig::with_calls(self.calls),
            process_reward: self.process_reward,
            tool_timeout_s: self.tool_timeout_s,
        };
        Ok(Arc::new(ToolMathFactory::new(provider, spec, config)?))
    }

    fn gives(&self) -> Gives {
        gives(self.process_reward)
    }
}
