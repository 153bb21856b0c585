//! The `[harness]` table of a recipe.

use crate::recipe;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What drives the turns of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum HarnessSection {
    /// The environment's own turns.
    // With braces: serde lets a variant without them have any keys.
    BuiltIn {},
    /// A program that talks to the gateway.
    Command(CommandSection),
}

/// A program, run once for each episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CommandSection {
    /// Program and arguments; files are found relative to the current folder.
    pub(crate) command: Vec<String>,
    /// Where it runs: `process`, or `container` (started as `[sandbox]` says).
    #[serde(default = "default_level")]
    pub(crate) level: String,
    /// At level `container`: what `sandbox.image` may be; the program is then a path inside of it.
    #[serde(default)]
    pub(crate) image: Option<String>,
    /// Wall time of one run.
    #[serde(default = "default_timeout_s")]
    pub(crate) timeout_s: f64,
    /// CPU time of one run.
    #[serde(default = "default_cpu_s")]
    pub(crate) cpu_s: f64,
    /// Memory of a sandbox: of one run, or with `preload` of all together.
    #[serde(default)]
    pub(crate) memory_mb: Option<u64>,
    /// Processes and threads of one run.
    #[serde(default = "default_processes")]
    pub(crate) processes: u64,
    /// Most programs that run at once.
    #[serde(default = "default_max_live")]
    pub(crate) max_live: usize,
    /// Import a Python program's packages once and fork each run from there.
    #[serde(default)]
    pub(crate) preload: bool,
    /// Environment variables beside those of the rollout.
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    /// Folders to show in the sandbox, read-only: path inside = folder of the host.
    #[serde(default)]
    pub(crate) mounts: BTreeMap<String, PathBuf>,
}

fn default_level() -> String {
    "process".into()
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

fn default_max_live() -> usize {
    64
}

impl Default for HarnessSection {
    fn default() -> Self {
        Self::BuiltIn {}
    }
}

impl CommandSection {
    /// Memory of a sandbox.
    pub(super) fn memory_mb(&self) -> u64 {
        let default = if self.preload { 4096 } else { 512 };
        self.memory_mb.unwrap_or(default)
    }
}

impl HarnessSection {
    /// Whether the environment's own turns are driven, and no program from outside.
    pub(crate) fn is_built_in(&self) -> bool {
        matches!(self, Self::BuiltIn {})
    }

    /// Most programs that run at once, and the wall time of one; none with the built-in loop.
    pub(crate) fn quota(&self) -> Option<(usize, f64)> {
        match self {
            Self::BuiltIn {} => None,
            Self::Command(c) => Some((c.max_live, c.timeout_s)),
        }
    }

    /// Every rule about values: key, value, what is allowed, whether it holds.
    pub(crate) fn rules(&self, strict: bool) -> Vec<(&'static str, String, &'static str, bool)> {
        let Self::Command(c) = self else {
            return Vec::new();
        };
        let mut rules = Vec::new();
        let mut rule = |key, value, allowed, ok| rules.push((key, value, allowed, ok));
        let container = c.level == "container";
        rule(
            "harness.level",
            format!("{:?}", c.level),
            "process, container",
            container || c.level == "process",
        );
        rule(
            "harness.image",
            "set".into(),
            "with harness.level = \"container\" only: elsewhere the program is one of the host",
            c.image.is_none() || container,
        );
        rule(
            "harness.preload",
            c.preload.to_string(),
            "false with harness.level = \"container\": there every run has a container of its own",
            !(c.preload && container),
        );
        rule(
            "harness.timeout_s",
            c.timeout_s.to_string(),
            recipe::TIME,
            recipe::is_time(c.timeout_s),
        );
        rule(
            "harness.cpu_s",
            c.cpu_s.to_string(),
            recipe::TIME,
            recipe::is_time(c.cpu_s),
        );
        rule(
            "harness.memory_mb",
            c.memory_mb().to_string(),
            "32 to 1048576",
            (32..=1 << 20).contains(&c.memory_mb()),
        );
        rule(
            "harness.processes",
            c.processes.to_string(),
            "1 to 4096",
            (1..=4096).contains(&c.processes),
        );
        rule(
            "harness.max_live",
            c.max_live.to_string(),
            "1 to 16384",
            (1..=16384).contains(&c.max_live),
        );
        rule(
            "harness.preload",
            c.preload.to_string(),
            "false with sandbox.strict = true: forked episodes share a sandbox, so they are not isolated from each other",
            !(c.preload && strict),
        );
        rules
    }
}
