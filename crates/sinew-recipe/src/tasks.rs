//! `[tasks]`: the rows to run, their prompts, and the order in which they are drawn.

use crate::Level;
use crate::RunPlan;
use crate::World;
use crate::rule::Rules;
use crate::section::{choice, section};
use crate::text_or_table::text_or_table;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use sinew_algo::AdaptiveConfig;
use sinew_algo::Signal;
use sinew_tasks::Example;
use std::collections::BTreeMap;

choice! {
    /// Order of tasks.
    TaskOrder {
        /// All of them, once an epoch, in an order that the seed decides.
        Uniform = "uniform",
        /// Task types that are neither solved nor hopeless are drawn more often.
        Adaptive = "adaptive",
    }
}

/// Source of the held-out split.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "a share of the rows such as 0.05, or a file or folder of their own"
)]
pub enum HeldOut {
    /// Share of the rows, chosen by the hash of their prompts.
    Share(f64),
    /// File or folder of their own.
    Source(String),
}

section! {
    /// The tasks of a run: rows of a user's own, and the order in which tasks are drawn. A file or folder
    /// alone, such as `tasks = "tasks.jsonl"`, is the key `source`.
    TasksKeys => TasksPlan, "tasks" {
        /// Rows: a file that ends in .jsonl, .json, .csv, .tsv or .parquet, a folder of such files, a data
        /// set of the Hugging Face hub as `hf:ORG/NAME[/CONFIGURATION][:SPLIT]`, or a Python function as
        /// `gen.py:rows`. Paths are relative to the current folder. Folders with `task.toml` are tasks of
        /// `env.type = "harbor"`. Left out: the environment's own tasks.
        source: String;
        /// Held-out split: a share of the rows, above 0, or a source of its own. 1 holds out all of them, for
        /// `sinew eval`. Left out: the source's own one, which a folder with files named `train…` and
        /// `test…` (or `eval…`, `valid…`, `dev…`), a data set of the hub and a function with the parameter
        /// `split` can have; else 0.05.
        held_out: HeldOut;
        /// Jinja template of the prompt over the columns of a row, such as `{{ question }}`. Left out: the
        /// column `prompt`, text or a list of messages.
        prompt: String;
        /// Jinja expression over the columns, such as `level <= 3`: other rows are left out.
        filter: String;
        /// System prompt. Rows whose messages have one of their own are refused.
        system: String;
        /// Worked examples between the system prompt and the prompt.
        examples: Vec<Example> = Vec::new();
        /// Column whose value is the task type, for metrics by type and `adaptive` order. Left out: one type.
        kind: String;
        /// Weight of each task type, above 0: its share of the draws is its weight over the sum of all. Left
        /// out: every task is drawn as often as any other.
        weights: BTreeMap<String, f64>;
        /// Order in which tasks are drawn.
        sampling: TaskOrder = TaskOrder::Uniform;
        /// The signal that `adaptive` follows. `success`: types are drawn by the expected variance of their
        /// outcome.
        /// `reward`: by the variance of their rewards. `mixed`: by the share of their groups whose rewards
        /// differ. `progress`: by how much their success rate changes, up or down. `aim`: types are levels,
        /// by the numbers in their names; the level is looked for that is solved as often as `target` says.
        /// `pools`: tasks that their last group solved, or failed, are drawn rarely.
        signal: Signal = AdaptiveConfig::default().signal;
        /// Successes of the prior, above 0.
        prior_successes: f64 = AdaptiveConfig::default().prior_successes;
        /// Failures of the prior, above 0.
        prior_failures: f64 = AdaptiveConfig::default().prior_failures;
        /// Share of uniform draws, 0 to 1.
        floor: f64 = AdaptiveConfig::default().floor;
        /// Factor of older trials at each update, above 0 and at most 1. Below 1, estimates follow a
        /// changing policy.
        decay: f64 = AdaptiveConfig::default().memory;
        /// Episodes of each of the two windows that signal `progress` compares, 1 to 10000. A type without
        /// two full windows is drawn most.
        window: usize = AdaptiveConfig::default().window;
        /// Success rate that signal `aim` looks for, above 0 and below 1.
        target: f64 = AdaptiveConfig::default().target;
        /// Levels by which signal `aim` moves after a step, times the success above `target`; above 0, at
        /// most 10.
        gain: f64 = AdaptiveConfig::default().gain;
        /// Share of draws of hard tasks with signal `pools`, 0 to 1; with `easy_share` at most 1.
        hard_share: f64 = AdaptiveConfig::default().hard_share;
        /// Share of draws of easy tasks with signal `pools`, 0 to 1.
        easy_share: f64 = AdaptiveConfig::default().easy_share;
        /// Success rate of its last group up to which a task is hard, 0 to 1.
        hard_at: f64 = AdaptiveConfig::default().hard_at;
        /// Success rate of its last group from which on a task is easy; above `hard_at`, at most 1.
        easy_at: f64 = AdaptiveConfig::default().easy_at;
        /// Shares move between the environments of `[[env]]`, too: their weights multiply what the signal
        /// says. With `success`, `reward`, `mixed` and `progress`.
        across: bool = AdaptiveConfig::default().across;
    }
}

/// Keys about the order of draws, which belong to the whole run.
const ORDER: [&str; 14] = [
    "sampling",
    "signal",
    "prior_successes",
    "prior_failures",
    "floor",
    "decay",
    "window",
    "target",
    "gain",
    "hard_share",
    "easy_share",
    "hard_at",
    "easy_at",
    "across",
];

/// Returns those keys of [`ORDER`] that a signal reads.
fn read(signal: Signal) -> &'static [&'static str] {
    match signal {
        Signal::Success | Signal::Reward | Signal::Mixed => &[
            "prior_successes",
            "prior_failures",
            "floor",
            "decay",
            "across",
        ],
        Signal::Progress => &["floor", "window", "across"],
        Signal::Aim => &["floor", "target", "gain"],
        Signal::Pools => &["hard_share", "easy_share", "hard_at", "easy_at"],
    }
}

impl TasksKeys {
    /// Returns the first key about the order of draws that the recipe contains.
    pub(crate) fn typed_order(&self) -> Option<&'static str> {
        let typed = serde_json::to_value(self).unwrap_or_default();
        ORDER.into_iter().find(|key| typed.get(*key).is_some())
    }
}

impl TasksPlan {
    /// Whether a source is a Python function, `FILE.py:FUNCTION`, which runs in a sandbox.
    pub fn is_python(source: &str) -> bool {
        !source.starts_with("hf:") && source.contains(".py:")
    }

    /// Whether rows come from a Python function.
    pub fn has_python(&self) -> bool {
        let held_out = match &self.held_out {
            Some(HeldOut::Source(source)) => Some(source),
            Some(HeldOut::Share(_)) | None => None,
        };
        self.source
            .iter()
            .chain(held_out)
            .any(|s| Self::is_python(s))
    }

    /// Returns the keys about rows, with all values explicit.
    pub(crate) fn keys_without_order(&self) -> TasksKeys {
        let mut keys = self.keys();
        keys.leave_out(&ORDER.map(|key| format!("tasks.{key}")));
        keys
    }

    /// Returns the settings of the adaptive order; `None` for another order.
    pub fn adaptive(&self) -> Option<AdaptiveConfig> {
        (self.sampling == TaskOrder::Adaptive).then_some(AdaptiveConfig {
            signal: self.signal,
            prior_successes: self.prior_successes,
            prior_failures: self.prior_failures,
            floor: self.floor,
            memory: self.decay,
            window: self.window,
            target: self.target,
            gain: self.gain,
            hard_share: self.hard_share,
            easy_share: self.easy_share,
            hard_at: self.hard_at,
            easy_at: self.easy_at,
            across: self.across && read(self.signal).contains(&"across"),
        })
    }
}

/// Parses a table, or only the source.
pub(crate) fn tasks_or_source<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<TasksKeys>, D::Error> {
    let expected = "a file or folder of tasks such as \"tasks.jsonl\", or a table";
    let of = |source: &str| TasksKeys {
        source: Some(source.into()),
        ..TasksKeys::default()
    };
    text_or_table(deserializer, expected, of).map(Some)
}

/// Keys about rows, which only have an effect with a source.
const OF_ROWS: [&str; 6] = ["held_out", "prompt", "filter", "system", "examples", "kind"];

pub(crate) fn rules(plan: &RunPlan, rules: &mut Rules) {
    plan.tasks.ranges(rules);
    if plan.env.is_mixture() {
        rules.custom(
            "env",
            "[[env]]",
            "running agents bring their own tasks: with harness.type = \"live\" there is one [env]",
            plan.harness.live().is_none(),
        );
        let typed = plan.tasks.source.is_some() || plan.tasks.weights.is_some();
        rules.custom(
            "tasks",
            "{ ... }",
            "has no effect with [[env]]: each environment has tasks of its own; put it into them",
            !typed,
        );
        for key in OF_ROWS {
            let reason = "has no effect with [[env]]; put it into `tasks` of an environment";
            rules.unused(&format!("tasks.{key}"), reason, false);
        }
    }
    for (i, world) in plan.worlds().into_iter().enumerate() {
        let key = if plan.env.is_mixture() {
            format!("{}.tasks", plan.env.key(i))
        } else {
            "tasks".to_owned()
        };
        rows(&world, &key, plan, rules);
    }
    order(plan, rules);
}

/// Whether an environment has tasks, from rows or its own.
fn rows(world: &World<'_>, key: &str, plan: &RunPlan, rules: &mut Rules) {
    let (tasks, env, needs) = (world.tasks, world.env.kind_name(), world.env.needs());
    let given = tasks.source.is_some();
    rules.allowed(
        key,
        "missing",
        "a file of rows, such as tasks = \"tasks.jsonl\", or an environment with tasks of its own, such as \
         [env] type = \"tool_math\"",
        given || !needs.tasks || plan.harness.live().is_some(),
    );
    let reason = format!("has no effect: env.type = \"{env}\" has tasks of its own; remove it");
    rules.inert(
        &format!("{key}.source"),
        format!("{:?}", tasks.source.as_deref().unwrap_or_default()),
        reason,
        !given || needs.rows,
    );
    for name in OF_ROWS {
        let reason = format!("has no effect without {key}.source; remove it");
        rules.unused(&format!("{key}.{name}"), reason, given);
    }
    for key in ["system", "examples"] {
        let reason = "has no effect with [harness]: the program writes its own messages; remove it";
        rules.unused(&format!("tasks.{key}"), reason, plan.harness.is_built_in());
    }
    let level = plan.sandbox.level;
    rules.custom(
        "sandbox.level",
        level.name(),
        "functions of tasks.source run at level \"process\"",
        level == Level::Process || !tasks.has_python(),
    );
    if let Some(HeldOut::Share(share)) = tasks.held_out {
        rules.allowed(
            &format!("{key}.held_out"),
            share,
            "above 0, up to 1, or a file",
            share > 0.0 && share <= 1.0,
        );
    }
    weights(tasks, key, plan, rules);
}

/// Adds the rules for weights of types, which contradict other orders.
fn weights(tasks: &TasksPlan, key: &str, plan: &RunPlan, rules: &mut Rules) {
    let Some(weights) = &tasks.weights else {
        return;
    };
    let key = format!("{key}.weights");
    for (kind, weight) in weights {
        rules.allowed(
            &key,
            format!("{{ {kind} = {weight} }}"),
            "weights above 0, up to 1e9; `filter` leaves rows out",
            *weight > 0.0 && *weight <= 1e9,
        );
    }
    rules.custom(
        &key,
        "{ ... }",
        "has no effect without tasks.kind, which names the column of the type",
        tasks.kind.is_some() || tasks.source.is_none(),
    );
    rules.custom(
        &key,
        "{ ... }",
        "has no effect with tasks.sampling = \"adaptive\", which chooses the shares itself; remove one",
        plan.tasks.sampling == TaskOrder::Uniform,
    );
    rules.inert(
        &key,
        "{ ... }",
        "has no effect: with [data] no tasks are run to train on; remove it",
        plan.data.is_none(),
    );
}

fn signal_name(signal: Signal) -> &'static str {
    match signal {
        Signal::Success => "success",
        Signal::Reward => "reward",
        Signal::Mixed => "mixed",
        Signal::Progress => "progress",
        Signal::Aim => "aim",
        Signal::Pools => "pools",
    }
}

/// Adds the rules for the order of draws.
fn order(plan: &RunPlan, rules: &mut Rules) {
    let adaptive = plan.tasks.adaptive();
    for key in &ORDER[1..] {
        let reason = "has no effect without tasks.sampling = \"adaptive\"; remove it";
        rules.unused(&format!("tasks.{key}"), reason, adaptive.is_some());
    }
    let Some(config) = adaptive else { return };
    for key in ORDER[2..]
        .iter()
        .filter(|key| !read(config.signal).contains(key))
    {
        let name = signal_name(config.signal);
        let reason = format!("has no effect with tasks.signal = \"{name}\"; remove it");
        rules.unused(&format!("tasks.{key}"), reason, false);
    }
    rules.custom(
        "tasks.signal",
        "\"mixed\"",
        "needs groups, rollout.group_size of 2 or more: it counts those whose rewards differ",
        config.signal != Signal::Mixed || plan.rollout.group_size > 1,
    );
    rules.custom(
        "tasks.across",
        config.across,
        "has no effect without [[env]]: shares of one environment move anyway; remove it",
        !config.across || plan.env.is_mixture(),
    );
    if let Some((field, value, allowed)) = config.broken() {
        let key = if field == "memory" { "decay" } else { field };
        rules.allowed(&format!("tasks.{key}"), value, allowed, false);
    }
    let reason = "has no effect: with [data] no tasks are run to train on; remove [tasks]";
    rules.inert(
        "tasks.sampling",
        "\"adaptive\"",
        reason,
        plan.data.is_none(),
    );
}
