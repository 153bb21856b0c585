//! Definitions of benchmarks, and the recipe that measures a model with one.

use serde::Deserialize;
use std::path::PathBuf;
use toml::{Table, Value};

/// Names and definitions, in the order of listings.
const FILES: [(&str, &str); 15] = [
    ("gsm8k", include_str!("../benches/gsm8k.toml")),
    ("math", include_str!("../benches/math.toml")),
    ("mbpp", include_str!("../benches/mbpp.toml")),
    ("humaneval", include_str!("../benches/humaneval.toml")),
    ("humaneval+", include_str!("../benches/humaneval-plus.toml")),
    ("ifeval", include_str!("../benches/ifeval.toml")),
    ("mmlu", include_str!("../benches/mmlu.toml")),
    ("bfcl", include_str!("../benches/bfcl.toml")),
    (
        "bfcl-multi-turn",
        include_str!("../benches/bfcl-multi-turn.toml"),
    ),
    ("tau2-airline", include_str!("../benches/tau2-airline.toml")),
    ("tau2-retail", include_str!("../benches/tau2-retail.toml")),
    (
        "tau2-airline-solo",
        include_str!("../benches/tau2-airline-solo.toml"),
    ),
    (
        "tau2-retail-solo",
        include_str!("../benches/tau2-retail-solo.toml"),
    ),
    (
        "reasoning-gym",
        include_str!("../benches/reasoning-gym.toml"),
    ),
    ("miniwob", include_str!("../benches/miniwob.toml")),
];

/// The benchmark of a folder of tasks, whose name is this and the folder.
const HARBOR: (&str, &str) = ("harbor:", include_str!("../benches/harbor.toml"));

/// Names that stand for several benchmarks.
const GROUPS: [(&str, &[&str]); 2] = [
    ("tau2", &["tau2-airline", "tau2-retail"]),
    ("tau2-solo", &["tau2-airline-solo", "tau2-retail-solo"]),
];

/// Shape of the model in the recipe of servers that only chat: none of it is used but its tokens, which are
/// bytes.
const BYTES: [(&str, i64); 5] = [
    ("d_model", 64),
    ("layers", 2),
    ("heads", 4),
    ("kv_heads", 2),
    ("d_ff", 128),
];

/// KV capacity of the embedded engine, in tokens, unless two contexts need more.
const KV_TOKENS: u32 = 32_768;

/// Seconds that the turns of an episode may take: a slow machine must not change a score.
const EPISODE_S: f64 = 3600.0;

/// Reason why a benchmark cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BenchError {
    /// There is no benchmark of this name.
    #[error("--bench {name}: there is no such benchmark; allowed: {}", allowed.join(", "))]
    Unknown {
        /// The name.
        name: String,
        /// Names of all benchmarks.
        allowed: Vec<String>,
    },
    /// The folder of tasks has no name that a result could have.
    #[error(
        "--bench harbor:{folder}: the last part of the path names the result; allowed: letters, digits, `.`, `_` and `-`"
    )]
    Folder {
        /// The folder.
        folder: String,
    },
    /// An option has no effect with a benchmark.
    #[error("{option}: has no effect with --bench {bench}, {why}")]
    Unused {
        /// The option.
        option: &'static str,
        /// Name of the benchmark.
        bench: String,
        /// Reason in words.
        why: &'static str,
    },
    /// A benchmark has a user that nobody plays.
    #[error(
        "--user is missing: a model plays the user of --bench {bench}\n  hint: --user NAME --user-url URL for a server, or \
         --user MODEL for a model that is loaded here"
    )]
    NoUser {
        /// Name of the benchmark.
        bench: String,
    },
    /// The definition cannot be read or written.
    #[error("benchmark {name}: {reason}")]
    Broken {
        /// Name of the benchmark.
        name: String,
        /// The error of the format.
        reason: String,
    },
}

/// A benchmark: rows or an environment, a prompt, a scorer and limits.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bench {
    /// Name on the command line.
    #[serde(skip)]
    pub name: String,
    /// One line for listings.
    pub about: String,
    /// Paper or page.
    pub link: String,
    /// Rows: a data set of the hub with its split. `None`: the environment has the tasks.
    pub source: Option<String>,
    /// Beginning of the names of local files with these rows.
    pub split: Option<String>,
    /// Columns that a row must have.
    #[serde(default)]
    pub needs: Vec<String>,
    /// Columns that are made of others: Jinja templates, in the order of their names.
    #[serde(default)]
    pub columns: std::collections::BTreeMap<String, String>,
    /// Python packages that the interpreter needs.
    pub packages: Option<String>,
    /// A model plays its user.
    #[serde(default)]
    pub user: bool,
    /// The sandbox level of its tasks can be chosen.
    #[serde(skip)]
    pub has_level: bool,
    /// The evaluation of another project that scores should agree with, and how it differs.
    pub reference: String,
    /// The recipe without model, rows and measurement.
    pub recipe: Table,
}

/// The model that plays a simulated user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetupUser {
    /// Its name at `url`, else a source as in a recipe.
    pub model: String,
    /// Address of a server with the chat-completions protocol.
    pub url: Option<String>,
    /// Environment variable with the server's key.
    pub key_env: Option<String>,
}

/// Settings of one measurement.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Setup {
    /// Source of the model, as in a recipe; `None`: it is behind servers that only chat.
    pub model: Option<String>,
    /// The simulated user, for benchmarks that have one.
    pub user: Option<SetupUser>,
    /// Seed of tasks that are made, and of the samples.
    pub seed: u64,
    /// Sandbox level of benchmarks that run at several.
    pub level: Option<String>,
    /// File with the prepared rows, of a benchmark that has rows.
    pub rows: Option<PathBuf>,
    /// Python interpreter with the packages of the benchmark.
    pub python: Option<String>,
    /// Maximum number of sampled tokens of a turn in place of the benchmark's.
    pub max_tokens: Option<u32>,
    /// Maximum tokens of an episode in place of the benchmark's.
    pub context: Option<u32>,
    /// Nucleus mass in place of 1.
    pub top_p: Option<f32>,
    /// Sampled episodes of each task; 0: only a greedy one.
    pub samples: usize,
    /// Temperature of sampled episodes.
    pub temperature: f32,
    /// Also a greedy episode of each task.
    pub greedy: bool,
}

impl Bench {
    /// All benchmarks.
    ///
    /// # Errors
    /// If a definition is not one.
    pub fn all() -> Result<Vec<Self>, BenchError> {
        FILES
            .iter()
            .map(|(name, text)| Self::parse(name, text))
            .collect()
    }

    /// The benchmark of the task folders in `folder`, which has the name of that folder.
    ///
    /// # Errors
    /// If the folder has no name, or the definition is not one.
    pub fn harbor(folder: &str) -> Result<Self, BenchError> {
        let last = folder.trim_end_matches('/').rsplit('/').next();
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let own = last.filter(|n| !n.is_empty() && n.chars().all(plain) && !n.starts_with('.'));
        let own = own.ok_or_else(|| BenchError::Folder {
            folder: folder.to_owned(),
        })?;
        let mut bench = Self::parse(&format!("{}{own}", HARBOR.0), HARBOR.1)?;
        table(&mut bench.recipe, "env").insert("tasks".into(), folder.into());
        bench.has_level = true;
        Ok(bench)
    }

    /// The benchmarks that a name stands for: one, those of a group, or the tasks of a folder.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn named(name: &str) -> Result<Vec<Self>, BenchError> {
        if let Some(folder) = name.strip_prefix(HARBOR.0) {
            return Ok(vec![Self::harbor(folder)?]);
        }
        let group = GROUPS.iter().find(|(group, _)| *group == name);
        let single = [name];
        let names = group.map_or(&single[..], |(_, names)| *names);
        let found = names.iter().map(|name| {
            let file = FILES.iter().find(|(known, _)| known == name);
            let (name, text) = file.ok_or_else(|| BenchError::Unknown {
                name: (*name).to_owned(),
                allowed: allowed(),
            })?;
            Self::parse(name, text)
        });
        found.collect()
    }

    fn parse(name: &str, text: &str) -> Result<Self, BenchError> {
        let bench: Result<Self, _> = toml::from_str(text);
        let bench = bench.map_err(|e| BenchError::Broken {
            name: name.to_owned(),
            reason: e.to_string(),
        })?;
        Ok(Self {
            name: name.to_owned(),
            ..bench
        })
    }

    /// Name of its folder and its recipe.
    pub fn folder(&self) -> String {
        self.name.replace('+', "-plus").replace(':', "-")
    }

    /// The recipe that measures a model, as TOML.
    ///
    /// # Errors
    /// If an option of `setup` has no effect here.
    pub fn recipe(&self, setup: &Setup) -> Result<String, BenchError> {
        let mut recipe = self.recipe.clone();
        recipe.insert("name".into(), format!("{}-eval", self.folder()).into());
        recipe.insert("seed".into(), integer(setup.seed));
        recipe.insert("model".into(), model(setup.model.as_deref()));
        if self.user {
            recipe.insert("user".into(), self.user_table(setup)?);
        }
        if let Some(rows) = &setup.rows {
            let tasks = table(&mut recipe, "tasks");
            tasks.insert("source".into(), rows.display().to_string().into());
            tasks.insert("held_out".into(), Value::Float(1.0));
        }
        if let (true, Some(level)) = (self.has_level, &setup.level) {
            table(&mut recipe, "sandbox").insert("level".into(), level.clone().into());
        }
        if let Some(python) = &setup.python {
            self.interpreter(&mut recipe, python)?;
        }
        let context = limits(&mut recipe, setup);
        let train = table(&mut recipe, "train");
        train.insert("micro_batch_tokens".into(), integer(context.max(4096)));
        let engine = table(&mut recipe, "engine");
        engine.insert(
            "kv_tokens".into(),
            integer(context.saturating_mul(2).max(KV_TOKENS)),
        );
        let sampled = setup.samples > 0;
        let eval = table(&mut recipe, "eval");
        eval.insert(
            "episodes_per_task".into(),
            integer(setup.samples.max(1) as u64),
        );
        let temperature = if sampled { setup.temperature } else { 0.0 };
        eval.insert("temperature".into(), f64::from(temperature).into());
        if sampled {
            eval.insert("greedy".into(), setup.greedy.into());
        }
        toml::to_string(&recipe).map_err(|e| BenchError::Broken {
            name: self.name.clone(),
            reason: e.to_string(),
        })
    }

    /// The table `user` of the recipe.
    fn user_table(&self, setup: &Setup) -> Result<Value, BenchError> {
        let missing = || BenchError::NoUser {
            bench: self.name.clone(),
        };
        let user = setup.user.as_ref().ok_or_else(missing)?;
        let mut table = Table::new();
        table.insert("model".into(), user.model.clone().into());
        for (key, value) in [("url", &user.url), ("key_env", &user.key_env)] {
            if let Some(value) = value {
                table.insert(key.into(), value.clone().into());
            }
        }
        Ok(Value::Table(table))
    }

    /// Names the interpreter of an environment in Python, else that of the reward.
    fn interpreter(&self, recipe: &mut Table, python: &str) -> Result<(), BenchError> {
        let env = recipe.get_mut("env").and_then(Value::as_table_mut);
        if let Some(env) = env.filter(|_| !self.has_level) {
            env.insert("python".into(), python.into());
            return Ok(());
        }
        match recipe.get_mut("reward").and_then(Value::as_table_mut) {
            // `tests` and `program` run in sandboxes, which have an interpreter.
            Some(reward) if reward.contains_key("math(answer)") => {
                reward.insert("python".into(), python.into());
                Ok(())
            }
            _ => Err(BenchError::Unused {
                option: "--python",
                bench: self.name.clone(),
                why: "whose scorer needs no packages; leave it out",
            }),
        }
    }
}

/// Names of all benchmarks, for messages.
fn allowed() -> Vec<String> {
    let names = FILES.iter().map(|(known, _)| (*known).to_owned());
    names.chain([format!("{}DIR", HARBOR.0)]).collect()
}

/// The key `model` of the recipe.
fn model(source: Option<&str>) -> Value {
    if let Some(source) = source {
        return source.into();
    }
    let shape = BYTES.map(|(key, value)| (key.to_owned(), Value::Integer(value)));
    let mut table = Table::from_iter(shape);
    table.insert("type".into(), "scratch".into());
    Value::Table(table)
}

/// Sets the limits of episodes; gives the maximum tokens of their context.
fn limits(recipe: &mut Table, setup: &Setup) -> u32 {
    let rollout = table(recipe, "rollout");
    let number = |table: &Table, key: &str| {
        let value = table.get(key).and_then(Value::as_integer).unwrap_or(0);
        u32::try_from(value).unwrap_or(0)
    };
    let mut context = number(rollout, "max_context_tokens");
    if let Some(most) = setup.max_tokens {
        // The room for prompts stays as it is.
        context = context
            .saturating_sub(number(rollout, "max_turn_tokens"))
            .saturating_add(most);
        rollout.insert("max_turn_tokens".into(), integer(most));
    }
    context = setup.context.unwrap_or(context);
    rollout.insert("max_context_tokens".into(), integer(context));
    rollout
        .entry("episode_timeout_s")
        .or_insert(EPISODE_S.into());
    if let Some(mass) = setup.top_p {
        rollout.insert("top_p".into(), f64::from(mass).into());
    }
    context
}

/// A table of the recipe, which is made if it is not there.
fn table<'a>(recipe: &'a mut Table, name: &str) -> &'a mut Table {
    let entry = recipe
        .entry(name.to_owned())
        .or_insert_with(|| Value::Table(Table::new()));
    if !entry.is_table() {
        *entry = Value::Table(Table::new());
    }
    match entry {
        Value::Table(table) => table,
        _ => unreachable!("it was made a table"),
    }
}

fn integer(number: impl Into<u64>) -> Value {
    Value::Integer(i64::try_from(number.into()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_definition_is_read_and_names_are_known() {
        let all = Bench::all().unwrap();
        assert_eq!(all.len(), FILES.len());
        for bench in &all {
            assert!(
                bench.about.len() > 20 && bench.link.starts_with("https://"),
                "{bench:?}"
            );
            assert!(!bench.reference.is_empty(), "{}", bench.name);
            // Rows come with the columns that a prompt and a scorer need, an environment with its tasks.
            assert_eq!(
                bench.source.is_some(),
                !bench.needs.is_empty(),
                "{}",
                bench.name
            );
            assert_eq!(
                bench.source.is_some(),
                bench.split.is_some(),
                "{}",
                bench.name
            );
        }
        let both = Bench::named("tau2").unwrap();
        assert_eq!(both.len(), 2);
        let error = Bench::named("gsm9k").unwrap_err().to_string();
        assert!(error.contains("allowed: gsm8k, math, "), "{error}");
    }

    #[test]
    fn a_recipe_has_model_rows_limits_and_measurement() {
        let bench = Bench::named("gsm8k").unwrap().remove(0);
        let setup = Setup {
            model: Some("hf:a/b".into()),
            seed: 7,
            rows: Some("run/rows.jsonl".into()),
            max_tokens: Some(8000),
            top_p: Some(0.5),
            samples: 4,
            temperature: 0.5,
            greedy: true,
            ..Setup::default()
        };
        let recipe: Table = bench.recipe(&setup).unwrap().parse().unwrap();
        assert_eq!(recipe["name"].as_str(), Some("gsm8k-eval"));
        assert_eq!(recipe["tasks"]["source"].as_str(), Some("run/rows.jsonl"));
        assert_eq!(recipe["tasks"]["held_out"].as_float(), Some(1.0));
        assert_eq!(
            recipe["rollout"]["max_turn_tokens"].as_integer(),
            Some(8000)
        );
        // 2,048 less the benchmark's turn of 512, and the longer turn.
        assert_eq!(
            recipe["rollout"]["max_context_tokens"].as_integer(),
            Some(9536)
        );
        assert_eq!(
            recipe["train"]["micro_batch_tokens"].as_integer(),
            Some(9536)
        );
        assert_eq!(recipe["engine"]["kv_tokens"].as_integer(), Some(32_768));
        assert_eq!(recipe["eval"]["episodes_per_task"].as_integer(), Some(4));
        assert_eq!(recipe["eval"]["greedy"].as_bool(), Some(true));
        // The measurement is the greedy one if there are no samples.
        let only = Setup {
            samples: 0,
            context: Some(1024),
            ..setup.clone()
        };
        let recipe: Table = bench.recipe(&only).unwrap().parse().unwrap();
        assert_eq!(recipe["eval"]["temperature"].as_float(), Some(0.0));
        assert!(recipe["eval"].get("greedy").is_none());
        let context = &recipe["rollout"]["max_context_tokens"];
        assert_eq!(context.as_integer(), Some(1024));
        let python = Setup {
            python: Some("python3.13".into()),
            ..setup
        };
        let error = bench.recipe(&python).unwrap_err().to_string();
        assert!(
            error.contains("--python: has no effect with --bench gsm8k"),
            "{error}"
        );
    }

    #[test]
    fn a_user_and_a_server_without_a_tokenizer_have_their_tables() {
        let bench = Bench::named("tau2").unwrap().remove(0);
        let error = bench.recipe(&Setup::default()).unwrap_err().to_string();
        assert!(error.starts_with("--user is missing"), "{error}");
        let setup = Setup {
            user: Some(SetupUser {
                model: "u".into(),
                url: Some("http://h/v1".into()),
                key_env: None,
            }),
            ..Setup::default()
        };
        let recipe: Table = bench.recipe(&setup).unwrap().parse().unwrap();
        assert_eq!(recipe["user"]["url"].as_str(), Some("http://h/v1"));
        assert_eq!(recipe["model"]["type"].as_str(), Some("scratch"));
        assert_eq!(recipe["env"]["options"]["user"].as_bool(), Some(true));
        // Benchmarks without a user have no such table.
        for bench in Bench::named("tau2-solo").unwrap() {
            let recipe: Table = bench.recipe(&setup).unwrap().parse().unwrap();
            assert!(recipe.get("user").is_none(), "{}", bench.name);
        }
    }

    #[test]
    fn a_folder_of_tasks_is_a_benchmark_with_its_name() {
        let bench = Bench::named("harbor:data/my-tasks/").unwrap().remove(0);
        assert_eq!(
            (bench.name.as_str(), bench.folder().as_str()),
            ("harbor:my-tasks", "harbor-my-tasks")
        );
        let setup = Setup {
            level: Some("container".into()),
            ..Setup::default()
        };
        let recipe: Table = bench.recipe(&setup).unwrap().parse().unwrap();
        assert_eq!(recipe["env"]["tasks"].as_str(), Some("data/my-tasks/"));
        assert_eq!(recipe["env"]["held_out"].as_float(), Some(1.0));
        assert_eq!(recipe["sandbox"]["level"].as_str(), Some("container"));
        let python = Setup {
            python: Some("p".into()),
            ..setup.clone()
        };
        assert!(bench.recipe(&python).is_err());
        // Others run at one level.
        let other = Bench::named("humaneval").unwrap().remove(0);
        let recipe: Table = other.recipe(&setup).unwrap().parse().unwrap();
        assert!(recipe.get("sandbox").is_none());
        for wrong in ["harbor:", "harbor:a/..", "harbor:a b"] {
            let error = Bench::named(wrong).unwrap_err().to_string();
            assert!(error.contains("names the result"), "{error}");
        }
    }

    #[test]
    fn the_interpreter_goes_to_what_needs_packages() {
        let setup = Setup {
            python: Some("p".into()),
            ..Setup::default()
        };
        for (name, at) in [("bfcl", "env"), ("math", "reward"), ("ifeval", "env")] {
            let bench = Bench::named(name).unwrap().remove(0);
            let recipe: Table = bench.recipe(&setup).unwrap().parse().unwrap();
            assert_eq!(recipe[at]["python"].as_str(), Some("p"), "{name}");
        }
    }

    /// The page states rows, limits, prompts and references as they are here.
    #[test]
    fn the_page_states_every_benchmark() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/evaluation.md");
        let page = std::fs::read_to_string(page).unwrap();
        for bench in Bench::all().unwrap() {
            let name = &bench.name;
            let row = format!("| [`{name}`]({}) |", bench.link);
            let row = page.lines().find(|line| line.starts_with(&row));
            let row = row.unwrap_or_else(|| panic!("{name} has no row"));
            let rollout = &bench.recipe["rollout"];
            let limit = |key: &str| rollout[key].as_integer().unwrap();
            let limits = format!(
                "| {}, {}, {} |",
                limit("max_turns"),
                limit("max_turn_tokens"),
                limit("max_context_tokens")
            );
            assert!(row.contains(&limits), "{name}: {limits}");
            let source = bench.source.as_deref().unwrap_or("of the package");
            assert!(row.contains(source), "{name}: {source}");
            let columns = bench.needs.iter().map(|column| format!("`{column}`"));
            let columns = columns.collect::<Vec<_>>().join(", ");
            assert!(row.contains(&columns), "{name}: {columns}");
            let reference = bench.reference.replace(' ', "");
            assert!(
                page.replace([' ', '\n'], "").contains(&reference),
                "{name}: {reference}"
            );
            let tasks = bench.recipe.get("tasks");
            let prompt = tasks.and_then(|tasks| tasks.get("prompt"));
            if let Some(prompt) = prompt.and_then(Value::as_str) {
                // A prompt with a block of code is described in words.
                let first = prompt.lines().next().unwrap();
                let shown = if prompt.contains("```") {
                    first
                } else {
                    prompt
                };
                assert!(page.contains(shown), "{name}: {shown}");
            }
        }
    }
}
