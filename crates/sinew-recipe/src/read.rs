//! From a recipe's text to its plan, and back.
//!
//! The order of the checks decides which message is reported first: old names, the keys of the
//! environment, the types of all keys, the rules of the tables, and last the rules that need the
//! algorithm to be built.

use crate::keys::RecipeKeys;
use crate::messages::{self, explain};
use crate::rule::Rule;
use crate::{ModelSection, RecipeError, RunPlan, env, renamed, rules};
use serde::{Serialize, Serializer};
use std::path::Path;
use toml::de::DeTable;

impl RunPlan {
    /// Reads and checks a recipe file.
    ///
    /// A file beside a `began.toml` is the recipe of a run folder: old names are read as the new
    /// ones there, and keys without effect are ignored, so that the run of an earlier version can go on.
    ///
    /// # Errors
    /// The first problem, with its line, what is allowed and the nearest valid spelling.
    pub fn load(path: &Path) -> Result<Self, RecipeError> {
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

    /// Parses and checks a recipe's text; `path` is for messages and is not opened.
    ///
    /// # Errors
    /// As of [`RunPlan::load`], without those of the file.
    pub fn parse(path: &Path, text: &str) -> Result<Self, RecipeError> {
        Self::read(path, text, false)
    }

    /// Reads what a run saved, this version or an earlier one, without checking it again: a rule that
    /// became stricter must not make a checkpoint unreadable.
    ///
    /// # Errors
    /// If the text is no recipe of this version or an earlier one.
    pub fn saved(text: &str) -> Result<Self, toml::de::Error> {
        let keys: RecipeKeys = toml::from_str(renamed::upgraded(text).as_deref().unwrap_or(text))?;
        Ok(keys.resolve(""))
    }

    fn read(path: &Path, text: &str, saved: bool) -> Result<Self, RecipeError> {
        let parse = |message: String| RecipeError::Parse {
            path: path.into(),
            key: messages::key_of(text, &message),
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
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let plan = keys.resolve(&stem);
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
    /// sessions of a run: 64 hexadecimal digits. Checkpoints keep it.
    pub fn hash(&self) -> Result<String, toml::ser::Error> {
        let text = toml::to_string(&self.without_bounds())?;
        Ok(blake3::hash(text.as_bytes()).to_hex().to_string())
    }

    /// The plan without what may differ between the sessions of a run: steps and wall time.
    pub(crate) fn without_bounds(&self) -> Self {
        let mut same = self.clone();
        (same.train.steps, same.train.max_wall_s) = (1, 0.0);
        same
    }

    /// Source of the model as typed, or `scratch`.
    pub fn model_source(&self) -> String {
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
