//! The keys of `harbor` in a recipe.

use crate::env::{GIVES, HarborFactory, Settings};
use crate::set::{HarborTasks, HeldOutTasks, PlaceFacts, TaskKind, TasksConfig};
use crate::shell::Shell;
use crate::stages::World;
use crate::template::PassedEnv;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_env::math::Calls;
use sinew_env::{
    EnvConfig, EnvError, EnvFactory, EnvKind, KeyError, McpFacts, Needs, SandboxFacts, Sandboxes,
    Taskset, TasksetError,
};
use sinew_sandbox::SandboxSpec;
use sinew_types::Gives;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The environment of the registry.
pub static KIND: EnvKind = EnvKind::new::<Harbor>(
    "harbor",
    "task folders in the format of Harbor: a shell or an agent program, then a verifier",
    Needs {
        sandbox: true,
        alphabet: None,
        rows: false,
        tasks: false,
        reward: false,
    },
);

/// Keys of `[env] type = "harbor"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Harbor {
    /// A task folder, a folder of task folders, or a folder with a `registry.json`. Paths are relative to
    /// the current folder.
    pub tasks: String,
    /// Data set of `registry.json`, as `NAME` or `NAME@VERSION`. Empty: the only one.
    #[serde(default)]
    pub dataset: String,
    /// Held-out split: a share of the tasks such as 0.1 (1 holds out all), another folder, or a list of
    /// families, which are values of `metadata.category` or starts of names. Left out: 0.05.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out: Option<HeldOutTasks>,
    /// Source of the task type, for metrics by type, `tasks.weights` and `adaptive` order. A task without it
    /// has the name of its folder without the number at the end.
    #[serde(default)]
    pub kind: TaskKind,
    /// Notation of calls: `template` is the format of the model's chat template; `tag` is taught by the
    /// prompt (`<tool>COMMAND</tool>`) and suits models without tool training.
    #[serde(default = "template")]
    pub calls: Calls,
    /// System prompt. Empty: a short one that explains the shell.
    #[serde(default)]
    pub system: String,
    /// Deadline of one command of the model, in seconds.
    #[serde(default = "default_tool_timeout")]
    #[schemars(range(min = 0.1, max = 86_400.0))]
    pub tool_timeout_s: f64,
    /// Characters of a command's output that the model reads; the middle of a longer one is left out.
    #[serde(default = "default_output_chars")]
    #[schemars(range(min = 100, max = 1_000_000))]
    pub output_chars: usize,
    /// Calls after which the verifier runs. 0: the model ends the episode with a turn without a call.
    #[serde(default)]
    pub end_after_calls: u32,
    /// Factor of the timeouts that the tasks name for agents, verifiers and checks.
    #[serde(default = "default_factor")]
    #[schemars(range(min = 0.01, max = 100.0))]
    pub timeout_factor: f64,
    /// Variables of this process that `${NAME}` in the tasks' `env` tables may name; no others are passed.
    #[serde(default)]
    pub pass_env: Vec<String>,
    /// Folder of this host in which `/logs/artifacts` of each episode is kept, and the `artifacts` that its
    /// task names. Empty: they are not kept.
    #[serde(default)]
    pub artifacts: String,
    /// Bytes of an episode's artifacts, in MiB; those of a separate verifier are among them.
    #[serde(default = "default_artifacts")]
    #[schemars(range(min = 1, max = 4096))]
    pub artifacts_mb: u64,
}

fn template() -> Calls {
    Calls::Template
}

fn default_tool_timeout() -> f64 {
    60.0
}

fn default_output_chars() -> usize {
    8000
}

fn default_factor() -> f64 {
    1.0
}

fn default_artifacts() -> u64 {
    16
}

impl Harbor {
    /// The keys of a folder with their defaults.
    pub fn new(tasks: impl Into<String>) -> Self {
        Self {
            tasks: tasks.into(),
            dataset: String::new(),
            held_out: None,
            kind: TaskKind::default(),
            calls: template(),
            system: String::new(),
            tool_timeout_s: default_tool_timeout(),
            output_chars: default_output_chars(),
            end_after_calls: 0,
            timeout_factor: default_factor(),
            pass_env: Vec::new(),
            artifacts: String::new(),
            artifacts_mb: default_artifacts(),
        }
    }

    /// Source and split of the tasks.
    pub fn tasks_config(&self, seed: u64) -> TasksConfig {
        TasksConfig {
            tasks: PathBuf::from(&self.tasks),
            dataset: (!self.dataset.is_empty()).then(|| self.dataset.clone()),
            held_out: self.held_out.clone(),
            kind: self.kind,
            seed,
        }
    }

    /// Variables of this process that tasks may name.
    pub fn passed(&self) -> PassedEnv {
        PassedEnv::new(&self.pass_env, &|name| std::env::var(name).ok())
    }

    /// Factory of episodes.
    pub fn environments(&self, sandboxes: Sandboxes) -> HarborFactory {
        let text = |text: &String| (!text.is_empty()).then(|| text.clone());
        let settings = Settings {
            shell: Shell {
                calls: self.calls,
                system: text(&self.system),
                timeout: Duration::try_from_secs_f64(self.tool_timeout_s).unwrap_or_default(),
                output_chars: self.output_chars,
            },
            end_after_calls: self.end_after_calls,
            artifacts: text(&self.artifacts).map(PathBuf::from),
        };
        let world = World {
            sandboxes,
            passed: self.passed(),
            timeout_factor: self.timeout_factor,
            artifacts_bytes: self.artifacts_mb << 20,
            keep_artifacts: !self.artifacts.is_empty(),
        };
        HarborFactory {
            world: Arc::new(world),
            settings: Arc::new(settings),
        }
    }
}

impl EnvConfig for Harbor {
    fn check(&self) -> Result<(), KeyError> {
        let wrong = |key, value: String, reason: &str| {
            let reason = reason.into();
            Err(KeyError { key, value, reason })
        };
        if self.tasks.is_empty() {
            return wrong("tasks", "\"\"".into(), "allowed: a folder of tasks");
        }
        if let Some(HeldOutTasks::Share(share)) = &self.held_out
            && !(*share > 0.0 && *share <= 1.0)
        {
            let reason = "allowed: above 0, up to 1, for example 0.1";
            return wrong("held_out", share.to_string(), reason);
        }
        if !(0.1..=86_400.0).contains(&self.tool_timeout_s) {
            let reason = "allowed: 0.1 to 86400 seconds";
            return wrong("tool_timeout_s", self.tool_timeout_s.to_string(), reason);
        }
        if !(100..=1_000_000).contains(&self.output_chars) {
            let reason = "allowed: 100 to 1000000";
            return wrong("output_chars", self.output_chars.to_string(), reason);
        }
        if !(0.01..=100.0).contains(&self.timeout_factor) {
            let reason = "allowed: 0.01 to 100";
            return wrong("timeout_factor", self.timeout_factor.to_string(), reason);
        }
        if !(1..=4096).contains(&self.artifacts_mb) {
            let reason = "allowed: 1 to 4096";
            return wrong("artifacts_mb", self.artifacts_mb.to_string(), reason);
        }
        Ok(())
    }

    /// The tasks that the process level can run: without facts of a recipe there are no containers.
    fn taskset(&self, seed: u64) -> Result<Arc<dyn Taskset>, TasksetError> {
        let facts = SandboxFacts {
            spec: SandboxSpec::default(),
            level: "process",
            network: false,
            host_lists: false,
            program: false,
            mcp: Some(McpFacts::BUILT_IN_LOOP),
        };
        self.taskset_at(seed, &facts)
    }

    fn taskset_at(
        &self,
        seed: u64,
        facts: &SandboxFacts,
    ) -> Result<Arc<dyn Taskset>, TasksetError> {
        let place = PlaceFacts::new(facts, self.passed());
        let tasks = HarborTasks::open(&self.tasks_config(seed), &place);
        let tasks = tasks.map_err(|e| TasksetError::Config {
            taskset: "harbor".into(),
            field: "env.tasks",
            value: format!("{:?}", self.tasks),
            allowed: e.to_string(),
        })?;
        Ok(Arc::new(tasks))
    }

    fn factory(&self, sandboxes: Option<Sandboxes>) -> Result<Arc<dyn EnvFactory>, EnvError> {
        let missing = || EnvError::Sandbox("harbor was given no sandboxes".into());
        let sandboxes = sandboxes.ok_or_else(missing)?;
        if sandboxes.provider.level() == "wasm" {
            return Err(EnvError::Config {
                field: "type",
                value: "\"harbor\"".into(),
                allowed:
                    "sandbox.level = \"process\", \"container\" or \"microvm\": level wasm has \
                          no shell"
                        .into(),
            });
        }
        Ok(Arc::new(self.environments(sandboxes)))
    }

    fn gives(&self) -> Gives {
        GIVES
    }

    fn machines(&self) -> bool {
        true
    }
}
