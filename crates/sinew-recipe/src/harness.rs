//! The `[harness]` table of a recipe.

use crate::rollout::no_retry;
use crate::rule::Rules;
use crate::section::choice;
use crate::store::needs_durable;
use crate::{RewardSection, RunPlan};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_agents::Agent;
use std::collections::BTreeMap;
use std::path::PathBuf;

choice! {
    /// Place of an agent program.
    HarnessLevel {
        /// In a process with namespaces, seccomp and limits.
        Process = "process",
        /// In a container, started as `[sandbox]` says.
        Container = "container",
    }
}

choice! {
    /// The scorer of an agent's episode.
    ScoredBy {
        /// The environment and the rewards of the recipe grade the agent's answer.
        Environment = "environment",
        /// The agent gives its own reward, and is trusted with it: as the last line that it prints, as the
        /// answer of its service, or with its key at the address in `SINEW_REWARD_URL`.
        Agent = "agent",
    }
}

choice! {
    /// A coding agent whose installation, start and output are known.
    CliAgent {
        /// Claude Code, by messages.
        ClaudeCode = "claude-code",
        /// Cline, by chat completions.
        Cline = "cline",
        /// Codex, by responses.
        Codex = "codex",
        /// Gemini CLI, by generateContent.
        GeminiCli = "gemini-cli",
        /// mini-swe-agent, by chat completions.
        MiniSweAgent = "mini-swe-agent",
        /// OpenCode, by chat completions.
        Opencode = "opencode",
        /// Pi, by chat completions.
        Pi = "pi",
        /// Qwen Code, by chat completions.
        QwenCode = "qwen-code",
    }
}

impl CliAgent {
    /// Returns the facts about the agent.
    pub fn agent(self) -> &'static Agent {
        match self {
            Self::ClaudeCode => &sinew_agents::CLAUDE_CODE,
            Self::Cline => &sinew_agents::CLINE,
            Self::Codex => &sinew_agents::CODEX,
            Self::GeminiCli => &sinew_agents::GEMINI_CLI,
            Self::MiniSweAgent => &sinew_agents::MINI_SWE_AGENT,
            Self::Opencode => &sinew_agents::OPENCODE,
            Self::Pi => &sinew_agents::PI,
            Self::QwenCode => &sinew_agents::QWEN_CODE,
        }
    }
}

/// The program that drives the turns of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum HarnessSection {
    /// The environment's own turns.
    // The braces are needed: serde lets a variant without them have any keys.
    BuiltIn {},
    /// A program that talks to the gateway.
    Command(CommandSection),
    /// A coding agent from npm or PyPI.
    Cli(CliSection),
    /// A Python function of the author's: `async def solve(task, model)`, which returns its reward.
    Function(FunctionSection),
    /// A service that runs already: each task is posted to it, with the key of a rollout.
    Service(ServiceSection),
    /// Agents that run already and open rollouts themselves at `sinew train --serve`: what they finish with
    /// a reward is trained at once.
    Live(LiveSection),
}

/// A Python function, called once for each episode in a fork of one interpreter.
///
/// The sandbox is that of a program with `preload`: it shows the folder of the file and the interpreter's
/// packages, and reaches the run's model and nothing else.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FunctionSection {
    /// `FILE.py:NAME`, relative to the current folder. Its parameters are any of `task`, `model`, `base_url`
    /// and `api_key`.
    pub function: String,
    /// Interpreter, whose packages it imports.
    #[serde(default = "default_python")]
    pub python: String,
    /// Wall time of one call, in seconds.
    #[serde(default = "default_timeout_s")]
    pub timeout_s: f64,
    /// CPU time of one call, in seconds.
    #[serde(default = "default_cpu_s")]
    pub cpu_s: f64,
    /// Memory of all calls together, in MiB.
    #[serde(default = "default_function_mb")]
    #[schemars(range(min = 32, max = 1_048_576))]
    pub memory_mb: u64,
    /// Maximum number of calls at a time.
    #[serde(default = "default_max_programs")]
    #[schemars(range(min = 1, max = 16_384))]
    pub max_programs: usize,
    /// Environment variables in addition to those of the rollout.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The scorer of an episode; `agent`: the number, truth value or `{"reward": ...}` that it returns.
    #[serde(default = "agent_scores")]
    pub scored_by: ScoredBy,
}

fn default_python() -> String {
    "python3".into()
}

fn default_function_mb() -> u64 {
    4096
}

fn agent_scores() -> ScoredBy {
    ScoredBy::Agent
}

impl FunctionSection {
    /// Returns file and name of the function; `None` if the text has another form.
    pub fn parts(&self) -> Option<(&str, &str)> {
        let (file, name) = self.function.rsplit_once(':')?;
        let plain = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_');
        (file.ends_with(".py") && plain).then_some((file, name))
    }

    /// Returns the command that calls the function.
    fn command(&self) -> CommandSection {
        let (file, name) = self.parts().unwrap_or_default();
        let words = [self.python.as_str(), file, "--sinew-call", name];
        CommandSection {
            command: words.map(str::to_owned).into(),
            level: HarnessLevel::Process,
            image: None,
            timeout_s: self.timeout_s,
            cpu_s: self.cpu_s,
            memory_mb: Some(self.memory_mb),
            processes: default_processes(),
            max_programs: self.max_programs,
            preload: true,
            env: self.env.clone(),
            mounts: BTreeMap::new(),
            scored_by: self.scored_by,
            agent: None,
        }
    }
}

/// A coding agent, run once for each episode. `sinew setup agents` installs it.
///
/// The environment and the rewards of the recipe grade its last message. Limits that are left out are the
/// agent's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CliSection {
    /// The agent.
    pub agent: CliAgent,
    /// More arguments of the agent's command line.
    #[serde(default)]
    pub arguments: Vec<String>,
    /// Name by which the agent asks for the model. Some agents choose their prompt by it.
    #[serde(default = "default_model")]
    pub model: String,
    /// Folder with installed agents. Left out: the one of `sinew setup agents`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<PathBuf>,
    /// Place of the agent.
    #[serde(default)]
    pub level: HarnessLevel,
    /// Image at level `container`, as `sandbox.image`; it needs a shell, and the C library of Debian or
    /// Ubuntu.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Wall time of one run, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<f64>,
    /// CPU time of one run, in seconds, with the programs that the agent starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_s: Option<f64>,
    /// Memory of the sandbox of one run, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 32, max = 1_048_576))]
    pub memory_mb: Option<u64>,
    /// Processes and threads of one run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096))]
    pub processes: Option<u64>,
    /// Maximum number of agents that run at a time.
    #[serde(default = "default_max_agents")]
    #[schemars(range(min = 1, max = 16_384))]
    pub max_programs: usize,
    /// Environment variables in addition to those of the rollout.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Folders to show in the sandbox, read-only: path inside = folder of the host.
    #[serde(default)]
    pub mounts: BTreeMap<String, PathBuf>,
}

fn default_model() -> String {
    "policy".into()
}

fn default_max_agents() -> usize {
    16
}

/// Folder in the sandbox that shows the installed agents.
pub const AGENTS_INSIDE: &str = "/agents";

impl CliSection {
    /// Returns the command that starts the agent. Its folder is mounted only if the recipe names it.
    fn command(&self) -> CommandSection {
        let agent = self.agent.agent();
        let shell = match self.image {
            Some(_) => "/bin/sh",
            None => "sh",
        };
        let mut command = vec![shell.into(), "-c".into(), agent.script(), agent.name.into()];
        command.extend(self.arguments.clone());
        let own = [
            ("SINEW_AGENTS", AGENTS_INSIDE),
            ("SINEW_MODEL", self.model.as_str()),
        ];
        let own = own.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let mut env = BTreeMap::from(own);
        env.extend(self.env.clone());
        let mut mounts = self.mounts.clone();
        let folder = self.folder.clone();
        mounts.extend(folder.map(|folder| (AGENTS_INSIDE.to_owned(), folder)));
        CommandSection {
            command,
            level: self.level,
            image: self.image.clone(),
            timeout_s: self.timeout_s.unwrap_or(agent.needs.timeout_s),
            cpu_s: self.cpu_s.unwrap_or(agent.needs.cpu_s),
            memory_mb: Some(self.memory_mb.unwrap_or(agent.needs.memory_mb)),
            processes: self.processes.unwrap_or(agent.needs.processes),
            max_programs: self.max_programs,
            preload: false,
            env,
            mounts,
            scored_by: ScoredBy::Environment,
            agent: Some(agent),
        }
    }
}

/// A service that answers tasks over HTTP and calls its model through the gateway.
///
/// It runs already and is not started or ended. Each task comes with the key of its rollout as the bearer
/// token, with which the service calls its model at the address of `sinew train --serve`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ServiceSection {
    /// Address that tasks are posted to.
    pub url: String,
    /// JSON body; `{prompt}`, `{id}`, `{kind}` and `{COLUMN}` of the task's row are filled in where they
    /// stand in its texts.
    #[serde(default = "default_body")]
    pub body: BTreeMap<String, serde_json::Value>,
    /// Field of the JSON answer that holds the agent's answer, as in `result.text`. Left out: the whole body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// Maximum number of tasks that the service works on at a time.
    #[serde(default = "default_max_programs")]
    #[schemars(range(min = 1, max = 16_384))]
    pub slots: usize,
    /// Wall time of one task, in seconds; then the episode is truncated.
    #[serde(default = "default_service_s")]
    pub timeout_s: f64,
    /// The scorer of an episode; `agent`: the field `reward` of the JSON answer.
    #[serde(default)]
    pub scored_by: ScoredBy,
}

/// Agents that open rollouts by themselves, with the control token of the run.
///
/// They bring their own tasks and rewards. Rollouts of one group, or else of one task, are compared with
/// each other; one without either is compared with earlier ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LiveSection {
    /// Seconds from the first finished rollout of a group to its end, whole or not.
    #[serde(default = "default_service_s")]
    pub group_wait_s: f64,
    /// Seconds without a new or finished rollout after which the run ends.
    #[serde(default = "default_idle_s")]
    pub idle_s: f64,
    /// Updates that a rollout's oldest token may be behind; older ones are dropped and counted.
    #[serde(default = "default_max_age")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_age: u64,
}

fn default_body() -> BTreeMap<String, serde_json::Value> {
    BTreeMap::from([("task".into(), "{prompt}".into())])
}

fn default_service_s() -> f64 {
    300.0
}

fn default_idle_s() -> f64 {
    3600.0
}

fn default_max_age() -> u64 {
    4
}

/// A program, run once for each episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CommandSection {
    /// Program and arguments; files are found relative to the current folder.
    pub command: Vec<String>,
    /// Place of the program.
    #[serde(default)]
    pub level: HarnessLevel,
    /// Image at level `container`, as `sandbox.image`; the program is then a path in it.
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
    /// The scorer of an episode. `agent` trusts the program: what runs in its sandbox may claim any reward.
    #[serde(default)]
    pub scored_by: ScoredBy,
    /// The coding agent that the command starts, whose output has a known form.
    #[serde(skip)]
    pub agent: Option<&'static Agent>,
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
    /// Returns the settings for external agents that open rollouts themselves, if the recipe trains these.
    pub fn live(&self) -> Option<&LiveSection> {
        match self {
            Self::Live(section) => Some(section),
            _ => None,
        }
    }

    /// Returns the program that runs for each episode, if there is one.
    pub fn program(&self) -> Option<CommandSection> {
        match self {
            Self::Command(command) => Some(command.clone()),
            Self::Cli(cli) => Some(cli.command()),
            Self::Function(function) => Some(function.command()),
            _ => None,
        }
    }

    /// Whether the run's gateway listens at the address of `sinew train --serve`, where external agents can
    /// reach it.
    pub fn is_served(&self) -> bool {
        matches!(self, Self::Service(_) | Self::Live(_))
    }

    /// Whether episodes are scored by the environment or the rewards of the recipe.
    pub fn is_graded(&self) -> bool {
        match self {
            Self::BuiltIn {} | Self::Cli(_) => true,
            Self::Command(c) => c.scored_by == ScoredBy::Environment,
            Self::Function(f) => f.scored_by == ScoredBy::Environment,
            Self::Service(s) => s.scored_by == ScoredBy::Environment,
            Self::Live(_) => false,
        }
    }

    /// Returns the type of the harness as written in recipes.
    pub fn name(&self) -> &'static str {
        match self {
            Self::BuiltIn {} => "built_in",
            Self::Command(_) => "command",
            Self::Cli(_) => "cli",
            Self::Function(_) => "function",
            Self::Service(_) => "service",
            Self::Live(_) => "live",
        }
    }

    /// Whether the built-in loop drives the turns, instead of an external program.
    pub fn is_built_in(&self) -> bool {
        matches!(self, Self::BuiltIn {})
    }

    /// Returns the maximum number of concurrent agents and the wall time of one; `None` without such a limit.
    pub fn quota(&self) -> Option<(usize, f64)> {
        match self {
            Self::BuiltIn {} | Self::Live(_) => None,
            Self::Service(s) => Some((s.slots, s.timeout_s)),
            Self::Command(c) => Some((c.max_programs, c.timeout_s)),
            Self::Cli(c) => {
                let needs = c.agent.agent().needs;
                Some((c.max_programs, c.timeout_s.unwrap_or(needs.timeout_s)))
            }
            Self::Function(f) => Some((f.max_programs, f.timeout_s)),
        }
    }
}

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    match &plan.harness {
        HarnessSection::BuiltIn {} => {}
        HarnessSection::Command(c) => command(plan, c, rules),
        HarnessSection::Cli(c) => {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/".contains(c);
            rules.allowed(
                "harness.model",
                format!("{:?}", c.model),
                "letters, digits, -, _, ., : and /, at least one",
                !c.model.is_empty() && c.model.chars().all(plain),
            );
            command(plan, &c.command(), rules);
        }
        HarnessSection::Function(f) => {
            rules.allowed(
                "harness.function",
                format!("{:?}", f.function),
                "a file and a function in it, as in \"agent.py:solve\"",
                f.parts().is_some(),
            );
            command(plan, &f.command(), rules);
        }
        HarnessSection::Service(s) => service(s, rules),
        HarnessSection::Live(l) => live(plan, l, rules),
    }
    let late = |r: &RewardSection| r.all().is_empty() && r.late().is_some();
    rules.allowed(
        "reward",
        "set",
        "missing, or [reward.late] alone, where agents give their own rewards: remove it, or harness.scored_by",
        plan.harness.is_graded() || plan.reward.as_ref().is_none_or(late),
    );
}

fn service(s: &ServiceSection, rules: &mut Rules) {
    rules.address("harness.url", &s.url);
    rules.seconds("harness.timeout_s", s.timeout_s);
    rules.range("harness.slots", s.slots, 1..=16_384);
}

/// Checks the keys of `live`, and refuses settings that external agents cannot follow: they bring their own
/// tasks and rewards, and Sinew does not run them.
fn live(plan: &RunPlan, l: &LiveSection, rules: &mut Rules) {
    rules.seconds("harness.group_wait_s", l.group_wait_s);
    rules.seconds("harness.idle_s", l.idle_s);
    rules.range("harness.max_age", l.max_age, 1..=1_000_000);
    let why =
        "agents bring their own requests; remove it, or drive them with harness.type = \"service\"";
    rules.allowed(
        "tasks",
        "set",
        &format!("missing with harness.type = \"live\": {why}"),
        plan.tasks.source.is_none(),
    );
    rules.allowed(
        "env.type",
        format!("{:?}", plan.env.name()),
        "only \"chat\" with harness.type = \"live\": agents have their own world",
        plan.env.name() == "chat",
    );
    rules.allowed(
        "data",
        "set",
        "missing with harness.type = \"live\": agents give the data",
        plan.data.is_none(),
    );
    needs_durable(plan, "what agents did cannot be done again", rules);
    no_retry(plan, "rollouts of agents outside", rules);
    rules.custom(
        "algorithm.refill",
        plan.algorithm.refill.unwrap_or_default(),
        "has no effect: agents outside choose their tasks; remove it",
        plan.algorithm.refill.is_none(),
    );
    for key in [
        "rollout.max_in_flight",
        "rollout.max_starting",
        "rollout.order",
        "rollout.admission",
        "rollout.episode_timeout_s",
        "rollout.score_timeout_s",
        "rollout.cross_policy",
        "rollout.ticket_lease_s",
        "rollout.ticket_attempts",
        "tasks.sampling",
        "eval.tasks",
        "eval.episodes_per_task",
        "eval.every",
        "eval.temperature",
        "eval.greedy",
    ] {
        let reason =
            "has no effect with harness.type = \"live\": agents run by themselves; remove it";
        rules.unused(key, reason, false);
    }
}

fn command(plan: &RunPlan, c: &CommandSection, rules: &mut Rules) {
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
