//! The recipe, in two stages: what was typed (TOML, `RecipeKeys`), and what runs ([`RunPlan`]).
//!
//! Unknown keys, impossible settings and settings without effect are refused with the line, the
//! reason and the nearest valid spelling. The effective recipe is saved with the run: every key
//! that has an effect in it, defaults included.
//!
//! A table is one file: its keys with documentation, defaults and ranges, and its rules. A new key
//! is one line there. `sinew schema`, `docs/recipe-keys.md` and the messages follow from it.

mod algorithm;
mod data;
mod engine;
mod env;
mod eval;
mod harness;
mod keys;
mod messages;
mod model;
mod renamed;
mod rollout;
mod rules;
mod sandbox;
mod schema;
mod section;
mod store;
mod tasks;
mod train;

pub(crate) use data::DataSection;
use engine::EngineKeys;
pub(crate) use engine::{EnginePlan, EngineType};
pub(crate) use env::EnvSection;
use eval::EvalKeys;
pub(crate) use eval::EvalPlan;
pub(crate) use harness::{CommandSection, HarnessLevel, HarnessSection};
pub(crate) use messages::explain;
pub(crate) use model::{CriticPlan, ModelSection, ScoringModel};
pub(crate) use rollout::RolloutPlan;
#[cfg(feature = "container")]
pub(crate) use sandbox::ContainerEngine;
#[cfg(feature = "microvm")]
pub(crate) use sandbox::MicrovmBackend;
pub(crate) use sandbox::{LEVEL_NAMES, Level, SandboxPlan};
pub(crate) use schema::{json_schema, markdown};
use store::StoreKeys;
pub(crate) use store::{StoreKind, StorePlan};
pub(crate) use tasks::TasksSection;
pub(crate) use train::{LoraSection, LrSchedule, TrainPlan};

use keys::RecipeKeys;
use rules::Rule;
use serde::{Serialize, Serializer};
use sinew_algo::AlgorithmConfig;
use std::path::{Path, PathBuf};
use toml::de::DeTable;

/// Memory that a sandbox may have, in MiB.
pub(crate) const MEMORY_MB: std::ops::RangeInclusive<u64> = 32..=65_536;

/// What [`is_time`] takes, in words.
pub(crate) const TIME: &str = "a number of seconds above 0, at most 31536000 (a year)";

/// Whether a number of seconds can be waited for.
pub(crate) fn is_time(seconds: f64) -> bool {
    seconds > 0.0 && seconds <= 31_536_000.0
}

/// A whole run: every choice is made, every number is allowed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RunPlan {
    /// Short name, used in titles.
    pub(crate) name: String,
    /// Seed of the run: tasks, sampling, initialization.
    pub(crate) seed: u64,
    pub(crate) model: ModelSection,
    pub(crate) env: EnvSection,
    pub(crate) harness: HarnessSection,
    pub(crate) sandbox: SandboxPlan,
    pub(crate) tasks: TasksSection,
    pub(crate) rollout: RolloutPlan,
    pub(crate) algorithm: AlgorithmConfig,
    pub(crate) critic: Option<CriticPlan>,
    pub(crate) reference: Option<ScoringModel>,
    pub(crate) teacher: Option<ScoringModel>,
    pub(crate) data: Option<DataSection>,
    pub(crate) train: TrainPlan,
    pub(crate) eval: EvalPlan,
    pub(crate) engine: EnginePlan,
    pub(crate) store: StorePlan,
}

/// Why a recipe is refused. Each text names the key, the value, what is allowed, what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecipeError {
    #[error(
        "recipe {}: {source}\n  hint: recipes that ship are in recipes/, for example \
         recipes/quickstart.toml",
        path.display()
    )]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("recipe {}: {message}", path.display())]
    Parse { path: PathBuf, message: String },
    #[error("recipe {}: {place}{key} = {value}: {reason}", path.display())]
    Value {
        path: PathBuf,
        /// The line of the key, if it was typed.
        place: String,
        key: String,
        value: String,
        reason: String,
    },
}

impl RunPlan {
    /// Reads and checks a recipe file.
    pub(crate) fn load(path: &Path) -> Result<Self, RecipeError> {
        let text = std::fs::read_to_string(path).map_err(|source| RecipeError::Read {
            path: path.into(),
            source,
        })?;
        // The recipe of a run folder may be one that an earlier version wrote, with old names and
        // with keys that have no effect.
        let saved = path.with_file_name("began.toml").exists();
        match renamed::upgraded(&text) {
            Some(text) if saved => Self::read(path, &text, saved),
            _ => Self::read(path, &text, saved),
        }
    }

    /// Parses and checks a recipe's text; `path` is for messages.
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, RecipeError> {
        Self::read(path, text, false)
    }

    /// Reads what a run saved, this version or an earlier one, without checking it again.
    pub(crate) fn saved(text: &str) -> Result<Self, toml::de::Error> {
        let keys: RecipeKeys = toml::from_str(renamed::upgraded(text).as_deref().unwrap_or(text))?;
        Ok(keys.resolve())
    }

    fn read(path: &Path, text: &str, saved: bool) -> Result<Self, RecipeError> {
        let parse = |message| RecipeError::Parse {
            path: path.into(),
            message,
        };
        if let Some((span, message)) = renamed::old_key(text) {
            let place = messages::place(text, &span);
            return Err(parse(format!("{place}{message}")));
        }
        if let Some((span, message)) = env::problem(text) {
            return Err(parse(messages::explained(text, Some(span), &message)));
        }
        let keys: RecipeKeys = toml::from_str(text).map_err(|e| parse(explain(text, &e)))?;
        let plan = keys.resolve();
        plan.check(path, text, saved)?;
        Ok(plan)
    }

    fn check(&self, path: &Path, text: &str, saved: bool) -> Result<(), RecipeError> {
        let root = DeTable::parse(text).map(toml::Spanned::into_inner);
        let root = root.unwrap_or_default();
        let typed = |key: &str| renamed::typed(&root, key);
        let fail = |key: &str, value: Option<String>, reason: String| {
            let found = typed(key);
            let shown = found
                .as_ref()
                .map_or_else(String::new, |(span, _)| messages::place(text, span));
            Err(RecipeError::Value {
                path: path.into(),
                place: shown,
                key: key.into(),
                value: value.unwrap_or_else(|| messages::value(text, found.map(|f| f.1))),
                reason,
            })
        };
        // What has no effect is refused where it is typed, but for what a run saved.
        let broken = |rules: Vec<Rule>| {
            let mut broken = rules.into_iter().filter(|r| !r.holds);
            broken.find(|r| !r.is_unused() || (!saved && typed(&r.key).is_some()))
        };
        if let Some(rule) = broken(rules::all(self)) {
            return fail(&rule.key, rule.value, rule.reason);
        }
        let algorithm = match self.algorithm() {
            Ok(algorithm) => algorithm,
            Err(e) => {
                let kind = format!("{:?}", self.algorithm.kind.name());
                return fail("algorithm", Some(kind), e.to_string());
            }
        };
        match broken(rules::of_algorithm(self, &algorithm)) {
            Some(rule) => fail(&rule.key, rule.value, rule.reason),
            None => Ok(()),
        }
    }

    /// BLAKE3 of the recipe as it runs, defaults included, without what may differ between the
    /// sessions of a run.
    pub(crate) fn hash(&self) -> Result<String, toml::ser::Error> {
        let text = toml::to_string(&crate::run_dir::without_bounds(self))?;
        Ok(blake3::hash(text.as_bytes()).to_hex().to_string())
    }

    /// Where the model comes from, in words.
    pub(crate) fn model_source(&self) -> String {
        match &self.model {
            ModelSection::Pretrained { source } => source.clone(),
            ModelSection::Scratch { .. } => "scratch".into(),
        }
    }
}

/// As the effective recipe: all keys that have an effect.
impl Serialize for RunPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rules = rules::all(self).into_iter();
        let unused: Vec<String> = rules.filter(Rule::is_unused).map(|r| r.key).collect();
        RecipeKeys::effective(self, &unused).serialize(serializer)
    }
}

#[cfg(test)]
mod schema_tests;
#[cfg(test)]
mod tests;
