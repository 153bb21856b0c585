//! One benchmark made ready: its rows, its recipe, its tasks, and the settings that a comparison needs.

use crate::check;
use serde_json::Value;
use sinew_assembly::{ENVIRONMENTS, Failure, MeasuredServers, Tasks, spread};
use sinew_env::Split;
use sinew_evaluation::{Bench, Overlap, Setup, local_files, overlap, prepare};
use sinew_recipe::RunPlan;
use sinew_runs::holds_run;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Settings by which all benchmarks of a command are measured.
pub(super) struct How {
    /// Model as it was named.
    pub(super) model: String,
    /// Settings of the recipes, with the source of the model, or of the tokenizer for a server.
    pub(super) setup: Setup,
    /// Servers, if the model is behind some.
    pub(super) servers: Option<MeasuredServers>,
    /// Maximum number of tasks of each.
    pub(super) tasks: usize,
    /// Measurements that are there continue.
    pub(super) resume: bool,
    pub(super) seeds: Vec<u64>,
    pub(super) price: Option<[f64; 2]>,
    /// Price of the model that plays a user.
    pub(super) user_price: Option<[f64; 2]>,
    pub(super) data: Option<PathBuf>,
    /// There is one benchmark only.
    pub(super) single: bool,
}

/// Folder of the prepared rows in the folder of an evaluation.
const ROWS: &str = "rows";

/// Keys of a recipe that decide what is asked and how it is scored; everything below them counts.
const COMPARED: [&str; 16] = [
    "env",
    "harness",
    "reward",
    "user.model",
    "user.temperature",
    "user.max_tokens",
    "tasks.prompt",
    "tasks.system",
    "tasks.examples",
    "tasks.filter",
    "tasks.kind",
    "rollout.max_turns",
    "rollout.max_turn_tokens",
    "rollout.max_context_tokens",
    "rollout.top_p",
    "rollout.format",
];

/// Keys below these that change no score: folders, interpreters and processes of this machine. The tasks
/// themselves are compared by their hash.
const OF_THIS_MACHINE: [&str; 10] = [
    "env.tasks",
    "env.artifacts",
    "env.pass_env",
    "env.python",
    "env.workers",
    "env.sessions_per_worker",
    "env.timeout_s",
    "env.startup_timeout_s",
    "reward.python",
    "reward.workers",
];

/// A benchmark that can be run.
pub(super) struct Planned {
    /// Its definition.
    pub(super) bench: Bench,
    /// Folder of its run.
    pub(super) folder: PathBuf,
    /// The recipe.
    pub(super) plan: RunPlan,
    /// Tasks of the recipe.
    pub(super) tasks: Tasks,
    /// Number of measured tasks.
    pub(super) count: usize,
    /// Settings of a comparison.
    pub(super) settings: BTreeMap<String, Value>,
    /// BLAKE3 of the measured tasks.
    pub(super) tasks_hash: String,
    /// Ids and prompts of the measured tasks.
    prompts: Vec<(String, String)>,
}

impl Planned {
    /// Makes a benchmark ready in the folder of an evaluation, and checks all that can be checked before the
    /// first episode.
    ///
    /// # Errors
    /// If its rows, packages or options are refused, or something that it needs is missing.
    pub(super) fn new(how: &How, folder: &Path, bench: Bench) -> Result<Self, Failure> {
        let of = |e: Failure| e.of(&format!("--bench {}", bench.name));
        let place = folder.join(bench.folder());
        if holds_run(&place) && !how.resume {
            return Err(Failure::input(format!(
                "{} holds a measurement\n  hint: --resume continues it; another --run-dir begins anew",
                place.display()
            )));
        }
        let source = bench.source.as_deref();
        let rows = source.map(|source| rows(how, folder, &bench, source));
        let setup = Setup {
            rows: rows.transpose()?,
            ..how.setup.clone()
        };
        let text = bench.recipe(&setup).map_err(Failure::input)?;
        let mut plan = RunPlan::parse(&place.join("recipe.toml"), &text, ENVIRONMENTS)
            .map_err(|e| of(Failure::from(e)))?;
        let tasks = check::before_measuring(&plan, how.servers.is_some()).map_err(|e| {
            let context = e.text().contains("rollout.max_context_tokens");
            let hint = if context {
                "\n  hint: --context N sets it"
            } else {
                ""
            };
            of(with(e, hint))
        })?;
        let chosen = spread(how.tasks, tasks.all.len(Split::HeldOut));
        plan.eval.tasks = Some(chosen.len());
        let (tasks_hash, prompts) = asked(&tasks, &chosen)?;
        let sampled = how.setup.samples > 0;
        Ok(Self {
            settings: settings(&plan, sampled.then_some(how.setup.temperature))?,
            folder: place,
            count: chosen.len(),
            bench,
            plan,
            tasks,
            tasks_hash,
            prompts,
        })
    }

    /// Overlap of the prompts with those that the model was trained on.
    pub(super) fn contamination(&self, trained: &Result<Vec<String>, String>) -> Overlap {
        match trained {
            Ok(trained) => {
                let prompts = self.prompts.iter();
                let prompts = prompts.map(|(id, text)| (id.as_str(), text.as_str()));
                overlap(prompts, trained.iter().map(String::as_str))
            }
            Err(why) => Overlap::NotChecked { why: why.clone() },
        }
    }
}

/// The failure with a hint behind its text.
fn with(failure: Failure, hint: &str) -> Failure {
    match failure {
        Failure::Input(text) => Failure::Input(text + hint),
        other => other,
    }
}

/// The prepared rows of a benchmark. A resumed session asks those of the first one.
fn rows(how: &How, folder: &Path, bench: &Bench, source: &str) -> Result<PathBuf, Failure> {
    let folder = folder.join(ROWS);
    let target = folder.join(format!("{}.jsonl", bench.folder()));
    if how.resume && target.is_file() {
        return Ok(target);
    }
    let split = bench.split.as_deref().unwrap_or_default();
    let key = format!("--bench {}", bench.name);
    let files = match how.local(bench)? {
        Some(path) => local_files(&path, split).map_err(Failure::input)?,
        None => sinew_assembly::dataset_files(&key, source).map_err(|e| {
            let text = format!(
                "{}\n  hint: --data PATH reads the rows from files",
                e.text()
            );
            match e {
                Failure::Outside(_) => Failure::Outside(text),
                other => other,
            }
        })?,
    };
    let failed = |e: std::io::Error| Failure::system(format!("{}: {e}", folder.display()));
    fs::create_dir_all(&folder).map_err(failed)?;
    let part = target.with_extension("part");
    prepare(bench, &files, &part).map_err(Failure::input)?;
    fs::rename(&part, &target).map_err(failed)?;
    Ok(target)
}

/// BLAKE3 of the chosen tasks, and their ids and prompts.
fn asked(tasks: &Tasks, chosen: &[usize]) -> Result<(String, Vec<(String, String)>), Failure> {
    let (mut hash, mut prompts) = (blake3::Hasher::new(), Vec::new());
    for index in chosen {
        let task = tasks.all.get(Split::HeldOut, *index);
        let task = task.map_err(Failure::system)?;
        for part in [task.id.as_str(), &task.prompt, &task.data.to_string()] {
            hash.update(part.as_bytes());
            hash.update(b"\0");
        }
        prompts.push((task.id.as_str().to_owned(), task.prompt));
    }
    Ok((hash.finalize().to_hex().to_string(), prompts))
}

/// The settings of a recipe that two measurements must share, by key; with the temperature of samples.
///
/// # Errors
/// If the recipe cannot be written, which is a bug.
pub(super) fn settings(
    plan: &RunPlan,
    temperature: Option<f32>,
) -> Result<BTreeMap<String, Value>, Failure> {
    let table = toml::Table::try_from(plan).map_err(Failure::system)?;
    let mut found = BTreeMap::new();
    for key in COMPARED {
        let mut parts = key.split('.');
        let first = parts.next().and_then(|part| table.get(part));
        let value = parts.try_fold(first, |value, part| Some(value?.get(part)));
        if let Some(value) = value.flatten() {
            flatten(key, value, &mut found)?;
        }
    }
    if let Some(temperature) = temperature {
        let shown = format!("{temperature}");
        let number = shown.parse().unwrap_or(f64::from(temperature));
        found.insert("temperature".into(), number.into());
    }
    Ok(found)
}

/// The leaves of a value by their keys.
fn flatten(
    key: &str,
    value: &toml::Value,
    found: &mut BTreeMap<String, Value>,
) -> Result<(), Failure> {
    if OF_THIS_MACHINE.contains(&key) {
        return Ok(());
    }
    match value {
        toml::Value::Table(table) => {
            for (name, below) in table {
                flatten(&format!("{key}.{name}"), below, found)?;
            }
        }
        leaf => {
            let leaf = serde_json::to_value(leaf).map_err(Failure::system)?;
            found.insert(key.to_owned(), leaf);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> BTreeMap<String, Value> {
        let text = format!(
            "name = \"t\"\nmodel = \"m\"\ntasks = {{ source = \"t.jsonl\", prompt = \"{{{{ q }}}}\" }}\n{text}"
        );
        let plan = RunPlan::parse(Path::new("r.toml"), &text, ENVIRONMENTS).unwrap();
        settings(&plan, Some(0.7)).unwrap()
    }

    /// Prompts, limits and scorers count; the machine does not.
    #[test]
    fn settings_are_the_keys_that_change_a_score() {
        let here =
            of("[reward]\n\"math(a)\" = 1.0\npython = \"p\"\n[rollout]\nmax_turn_tokens = 7\n");
        assert_eq!(here["rollout.max_turn_tokens"], 7);
        assert_eq!(here["tasks.prompt"], "{{ q }}");
        assert_eq!(here["reward.math(a)"], 1.0);
        assert_eq!(here["temperature"], 0.7);
        assert!(!here.contains_key("reward.python") && !here.contains_key("tasks.source"));
        let there = of(
            "seed = 5\n[reward]\n\"math(a)\" = 1.0\npython = \"q\"\n[rollout]\nmax_turn_tokens = 7\nmax_in_flight = 3\n",
        );
        assert_eq!(here, there);
        assert_ne!(here, of("[reward]\n\"math(a)\" = 1.0\n"));
    }
}
