//! The recipe: what was typed (TOML), checked into what runs.
//!
//! Unknown keys, impossible settings and settings without effect are refused with the place,
//! the reason and the nearest valid spelling. The effective recipe is saved with the run.
//!
//! A new key is a field in `sections.rs` (with its default) and a line in `rules.rs`.

mod env;
mod messages;
mod renamed;
mod rules;
mod sections;

pub(crate) use env::EnvSection;
pub(crate) use messages::explain;
pub(crate) use sections::*;

use crate::harness::HarnessSection;
use serde::{Deserialize, Serialize};
use sinew_algo::{Algorithm, AlgorithmConfig, ConfigError, Needs, Repair, RunFacts};
use sinew_types::LossSpec;
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
        key: String,
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
        // The recipe of a run folder may be one that an earlier version wrote.
        let saved = path.with_file_name("began.toml").exists();
        match renamed::upgraded(&text) {
            Some(text) if saved => Self::parse(path, &text),
            _ => Self::parse(path, &text),
        }
    }

    /// Reads what a run saved, this version or an earlier one, without checking it again.
    pub(crate) fn saved(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(renamed::upgraded(text).as_deref().unwrap_or(text))
    }

    /// Parses and checks a recipe's text; `path` is for messages.
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, RecipeError> {
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
        let recipe: Self = toml::from_str(text).map_err(|e| parse(explain(text, &e)))?;
        recipe.check(path)?;
        Ok(recipe)
    }

    fn check(&self, path: &Path) -> Result<(), RecipeError> {
        let fail = |key: &str, value: String, reason: &str| {
            Err(RecipeError::Value {
                path: path.into(),
                key: key.into(),
                value,
                reason: reason.into(),
            })
        };
        if let Some(broken) = rules::broken(self) {
            return fail(&broken.key, broken.value, &broken.reason);
        }
        let algorithm = match self.algorithm() {
            Ok(algorithm) => algorithm,
            Err(e) => {
                let kind = format!("{:?}", self.algorithm.kind.name());
                return fail("algorithm", kind, &e.to_string());
            }
        };
        match rules::broken_with(self, &algorithm) {
            Some(broken) => fail(&broken.key, broken.value, &broken.reason),
            None => Ok(()),
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
        let old = self
            .rollout
            .cross_policy
            .map_or(0, |c| c.every.saturating_mul(updates));
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
        let pretrained = matches!(self.model, ModelSection::Pretrained { .. });
        self.eval.temperature > 0.0 && self.eval.greedy.unwrap_or(pretrained)
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
    loss.correction.bounds_ratio()
}

#[cfg(test)]
mod tests;
