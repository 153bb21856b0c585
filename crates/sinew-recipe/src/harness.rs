//! The `[harness]` table of a recipe.

use crate::RunPlan;
use crate::rule::Rules;
use crate::section::choice;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

choice! {
    /// Where an agent program runs.
    HarnessLevel {
        /// In a process with namespaces, seccomp and limits.
        Process = "process",
        /// In a container, started as `[sandbox]` says.
        Container = "container",
    }
}

/// What drives the turns of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum HarnessSection {
    /// The environment's own turns.
    // With braces: serde lets a variant without them have any keys.
    BuiltIn {},
    /// A program that talks to the gateway.
    Command(CommandSection),
}

/// A program, run once for each episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CommandSection {
    /// Program and arguments; files are found relative to the current folder.
    pub command: Vec<String>,
    /// Where it runs.
    #[serde(default)]
    pub level: HarnessLevel,
    /// At level `container`: what `sandbox.image` may be; the program is then a path inside of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Wall time of one run, in seconds.
    #[serde(default = "default_timeout_s")]
    pub timeout_s: f64,
    /// CPU time of one run, in seconds.
    #[serde(default = "default_cpu_s")]
    pub cpu_s: f64,
    /// Memory of a sandbox, in MiB: of one run, or with `preload` of all together. Left out: 512, or
    /// 4096 with `preload`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// Processes and threads of one run.
    #[serde(default = "default_processes")]
    #[schemars(range(min = 1, max = 4096))]
    pub processes: u64,
    /// Maximum number of programs that run at a time.
    #[serde(default = "default_max_programs")]
    #[schemars(range(min = 1, max = 16_384))]
    pub max_programs: usize,
    /// Import a Python program's packages once and fork each run from there.
    #[serde(default)]
    pub preload: bool,
    /// Environment variables in addition to those of the rollout.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Folders to show in the sandbox, read-only: path inside = folder of the host.
    #[serde(default)]
    pub mounts: BTreeMap<String, PathBuf>,
}

fn default_timeout_s() -> f64 {
    60.0
}

fn default_cpu_s() -> f64 {
    30.0
}

fn default_processes() -> u64 {
    64
}

fn default_max_programs() -> usize {
    64
}

impl Default for HarnessSection {
    fn default() -> Self {
        Self::BuiltIn {}
    }
}

impl CommandSection {
    /// Memory of a sandbox.
    pub fn memory_mb(&self) -> u64 {
        let default = if self.preload { 4096 } else { 512 };
        self.memory_mb.unwrap_or(default)
    }
}

impl HarnessSection {
    /// Whether the environment's own turns are driven, and no program from outside.
    pub fn is_built_in(&self) -> bool {
        matches!(self, Self::BuiltIn {})
    }

    /// Maximum number of programs that run at a time, and the wall time of one; none with the built-in loop.
    pub fn quota(&self) -> Option<(usize, f64)> {
        match self {
            Self::BuiltIn {} => None,
            Self::Command(c) => Some((c.max_programs, c.timeout_s)),
        }
    }
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    let HarnessSection::Command(c) = &plan.harness else {
        return;
    };
    let container = c.level == HarnessLevel::Container;
    rules.allowed(
        "harness.image",
        "set",
        "with harness.level = \"container\" only: elsewhere the program is one of the host",
        c.image.is_none() || container,
    );
    rules.allowed(
        "harness.preload",
        c.preload,
        "false with harness.level = \"container\": there every run has a container of its own",
        !(c.preload && container),
    );
    rules.seconds("harness.timeout_s", c.timeout_s);
    rules.seconds("harness.cpu_s", c.cpu_s);
    rules.range("harness.memory_mb", c.memory_mb(), 32..=1 << 20);
    rules.range("harness.processes", c.processes, 1..=4096);
    rules.range("harness.max_programs", c.max_programs, 1..=16_384);
    rules.allowed(
        "harness.preload",
        c.preload,
        "false with sandbox.strict = true: forked episodes share a sandbox, so they are not isolated from \
         each other",
        !(c.preload && plan.sandbox.strict),
    );
}
