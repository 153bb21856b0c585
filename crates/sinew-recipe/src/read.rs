//! Parses a recipe's text into its plan, and serializes it.
//!
//! Only the first error is reported. The order of the checks is: keys of the environment, types of all keys,
//! rules of the tables, and last the rules that need the built algorithm.

use crate::keys::RecipeKeys;
use crate::messages::{self, explain};
use crate::references::references;
use crate::rule::Rule;
use crate::typed::typed;
use crate::{EnvSection, ModelSection, RecipeError, RolloutPlan, RunPlan, rules};
use serde::{Deserialize, Serialize, Serializer};
use sinew_algo::ConfigError;
use sinew_env::Registry;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, Deserializer};

/// A recipe's text with the data that messages need.
pub(crate) struct Source<'a> {
    /// Path for messages; the file is not opened.
    pub(crate) path: &'a Path,
    pub(crate) text: &'a str,
    /// Environments that the recipe may name.
    pub(crate) registry: Registry,
}

/// A violated rule.
pub(crate) struct Broken {
    /// Key of the rule.
    pub(crate) key: String,
    /// Whether the key has no effect, so that removing it satisfies the rule.
    pub(crate) inert: bool,
    pub(crate) error: RecipeError,
}

impl RunPlan {
    /// Loads and checks a recipe file.
    ///
    /// A file next to a `began.toml` is the recipe of a run folder. If that is the folder of a stage,
    /// `stage:NAME` is the folder of stage NAME in the same chain.
    ///
    /// # Errors
    /// The first problem, with its line, what is allowed and the nearest valid spelling.
    pub fn load(path: &Path, registry: Registry) -> Result<Self, RecipeError> {
        let text = std::fs::read_to_string(path).map_err(|source| RecipeError::Read {
            path: path.into(),
            source,
        })?;
        let saved = path.with_file_name("began.toml").exists();
        let source = Source {
            path,
            text: &text,
            registry,
        };
        Self::read(&source, saved)
    }

    /// Parses and checks a recipe's text; `path` is only used in messages.
    ///
    /// # Errors
    /// Fails as [`RunPlan::load`] does, but not for the file.
    pub fn parse(path: &Path, text: &str, registry: Registry) -> Result<Self, RecipeError> {
        let source = Source {
            path,
            text,
            registry,
        };
        Self::read(&source, false)
    }

    /// Parses the recipe that a run saved, without checking it again.
    ///
    /// # Errors
    /// Fails if the text is not a recipe.
    pub fn saved(text: &str, registry: Registry) -> Result<Self, RecipeError> {
        let source = Source {
            path: Path::new("recipe.toml"),
            text,
            registry,
        };
        source.plan(source.table()?.into_inner(), "")
    }

    fn read(source: &Source<'_>, saved: bool) -> Result<Self, RecipeError> {
        let (path, text) = (source.path, source.text);
        let root = source.table()?;
        if let Some((key, _)) = root.get_ref().get_key_value("stage") {
            let place = messages::place(text, &key.span());
            return Err(source.parse_error(format!(
                "{place}`stage`: this is a chain of runs, which `sinew train` and `sinew check` take\n  \
                 hint: the recipe of a stage is recipe.toml in its folder, DIR/STAGE"
            )));
        }
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let mut plan = source.plan(root.get_ref().clone(), &stem)?;
        let folder = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if let (true, Some(chain)) = (saved, folder.parent().and_then(Path::parent)) {
            plan.in_chain(chain);
        }
        source.check(&plan, root.get_ref()).map_err(|b| b.error)?;
        match references(&plan).first() {
            Some((key, _)) => {
                let why = "allowed in a [[stage]] of a chain; elsewhere name the folder of a run";
                Err(source.value_error(root.get_ref(), key, why))
            }
            None => Ok(plan),
        }
    }

    /// Returns the BLAKE3 hash of the effective recipe, without the keys that may differ between the sessions
    /// of a run, as 64 hexadecimal digits. Checkpoints contain it.
    pub fn hash(&self) -> Result<String, toml::ser::Error> {
        let text = toml::to_string(&self.without_bounds())?;
        Ok(blake3::hash(text.as_bytes()).to_hex().to_string())
    }

    /// Returns the plan without the keys that may differ between the sessions of a run: name, steps, wall
    /// time, the processes in which episodes run, and the places of its roles.
    pub(crate) fn without_bounds(&self) -> Self {
        let mut same = self.clone();
        (same.train.steps, same.train.max_wall_s) = (1, 0.0);
        same.name.clear();
        let places = RolloutPlan::default();
        same.rollout.place = places.place;
        same.rollout.ticket_lease_s = places.ticket_lease_s;
        same.rollout.ticket_attempts = places.ticket_attempts;
        if let Some(trainer) = &mut same.trainer {
            trainer.clear_bounds();
        }
        same.engine.clear_bounds();
        same.launch = None;
        same
    }

    /// Source of the model as typed, or `scratch`.
    pub fn model_source(&self) -> String {
        match &self.model {
            ModelSection::Pretrained { source, .. } => source.clone(),
            ModelSection::Scratch { .. } => "scratch".into(),
        }
    }
}

impl<'a> Source<'a> {
    /// Parses the keys, with their positions.
    pub(crate) fn table(&self) -> Result<Spanned<DeTable<'a>>, RecipeError> {
        let table = DeTable::parse(self.text)
            .map_err(|e| self.parse_error(explain(self.text, &e, self.registry)))?;
        match messages::too_large(self.text, table.get_ref()) {
            Some(message) => Err(self.parse_error(message)),
            None => Ok(table),
        }
    }

    pub(crate) fn parse_error(&self, message: String) -> RecipeError {
        RecipeError::Parse {
            path: self.path.into(),
            key: messages::key_of(self.text, &message),
            message,
        }
    }

    /// Returns the error for a refused value, at its position in `root` if the text contains it.
    pub(crate) fn value_error(&self, root: &DeTable<'_>, key: &str, reason: &str) -> RecipeError {
        self.refused(root, key, None, reason.to_owned())
    }

    fn refused(
        &self,
        root: &DeTable<'_>,
        key: &str,
        value: Option<String>,
        reason: String,
    ) -> RecipeError {
        let found = typed(root, key);
        let shown = found
            .as_ref()
            .map_or_else(String::new, |(span, _)| messages::place(self.text, span));
        RecipeError::Value {
            path: self.path.into(),
            place: shown,
            key: key.into(),
            value: value.unwrap_or_else(|| messages::value(self.text, found.map(|f| f.1))),
            reason,
        }
    }

    /// Returns the plan for the keys in `root`, unchecked; `name` is used if the recipe has no name.
    pub(crate) fn plan(&self, root: DeTable<'a>, name: &str) -> Result<RunPlan, RecipeError> {
        let env = EnvSection::read(&root, self.registry).map_err(|(span, message)| {
            let at = Some(span);
            self.parse_error(messages::explained(self.text, at, &message, self.registry))
        })?;
        let whole = Spanned::new(0..self.text.len(), root);
        let keys = RecipeKeys::deserialize(Deserializer::from(whole));
        let keys = keys.map_err(|e| self.parse_error(explain(self.text, &e, self.registry)))?;
        let env = env.unwrap_or_else(|| EnvSection::chat(self.registry));
        Ok(keys.resolve(name, env))
    }

    /// Checks a plan by all rules; `root` contains the keys that it was made from.
    pub(crate) fn check(&self, plan: &RunPlan, root: &DeTable<'_>) -> Result<(), Box<Broken>> {
        // A key without effect is refused where it is typed.
        let broken = |rules: Vec<Rule>| {
            let mut broken = rules.into_iter().filter(|r| !r.holds);
            broken.find(|r| !r.is_unused() || typed(root, &r.key).is_some())
        };
        let fail = |rule: Rule| {
            Err(Box::new(Broken {
                inert: rule.is_inert(),
                error: self.refused(root, &rule.key, rule.value, rule.reason),
                key: rule.key,
            }))
        };
        if let Some(rule) = broken(rules::all(plan)) {
            return fail(rule);
        }
        let algorithm = match plan.algorithm() {
            Ok(algorithm) => algorithm,
            Err(e) => {
                let kind = format!("{:?}", plan.algorithm.kind.name());
                let elsewhere = match &e {
                    ConfigError::NoEffect { field, .. } => messages::elsewhere(field, "algorithm"),
                    _ => None,
                };
                let hint = elsewhere.map_or_else(String::new, |hint| format!("\n  hint: {hint}"));
                return Err(Box::new(Broken {
                    key: "algorithm".into(),
                    inert: false,
                    error: self.refused(root, "algorithm", Some(kind), format!("{e}{hint}")),
                }));
            }
        };
        broken(rules::of_algorithm(plan, &algorithm)).map_or(Ok(()), fail)
    }
}

/// Writes the effective recipe: all keys that have an effect.
impl Serialize for RunPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rules = rules::all(self).into_iter();
        let unused: Vec<String> = rules.filter(Rule::is_unused).map(|r| r.key).collect();
        RecipeKeys::effective(self, &unused).serialize(serializer)
    }
}
