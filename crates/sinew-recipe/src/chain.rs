//! Chains: recipes with several `[[stage]]` tables. Each stage continues to train the weights of the stage
//! before it.
//!
//! The keys above the stages are the defaults of all of them. The keys of a stage are merged over the
//! defaults, and the result is parsed as a separate recipe by the same code. Messages show positions in the
//! original text. Tables are merged key by key; a table with a `type`, and `[reward]`, replaces the default
//! table as a whole.
//!
//! A default may have no effect in some stages, such as `[critic]` in a stage that imitates. It is left out
//! there, and refused only if no stage uses it.
//!
//! Order of the functions in this file:
//! 1. [`Recipe::parse`] looks for stages, and reads a run or a chain.
//! 2. [`ChainPlan::parse`] lays each stage over the defaults, takes out the defaults without effect
//!    in it, and checks it as a recipe and as a part of the chain.
//! 3. [`ChainPlan::run`] makes the recipe of one stage once the folder of the chain is known.
//! 4. [`ChainPlan::before_it_runs`] and [`ChainPlan::to_measure`] make recipes that do not need what
//!    other stages make, for checks and for measurements.
//!
//! A stage starts from the model of the stage before it, unless it has `[model]`. With `[model]` it must
//! learn from another stage, which is its teacher or provides its episodes: stages that share nothing should
//! be two recipes.

use crate::read::{Broken, Source};
use crate::references::{RUN, STAGE, is_of_stage, references};
use crate::typed::typed;
use crate::{DataSection, ModelSection, RecipeError, RunPlan, messages};
use serde::{Serialize, Serializer};
use sinew_algo::{AlgorithmConfig, AlgorithmKind};
use sinew_env::Registry;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use toml::de::{DeTable, DeValue};

/// Maximum number of stages.
const MAX_STAGES: usize = 100;

/// Maximum length of a stage's name, in characters.
const MAX_NAME: usize = 40;

/// Content of a recipe file: one run or a chain of runs. It serializes as the effective recipe.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Recipe {
    /// A recipe without stages.
    Run(Box<RunPlan>),
    /// A recipe with `[[stage]]`s.
    Chain(ChainPlan),
}

/// Several runs, one after the other. It serializes as the effective recipe: all keys of each stage.
#[derive(Clone, Debug, PartialEq)]
pub struct ChainPlan {
    /// Short name, as for a run; the default folder is `runs/NAME`.
    pub name: String,
    /// Stages in the order in which they run; at least one.
    pub stages: Vec<StagePlan>,
}

/// One run of a chain.
#[derive(Clone, Debug, PartialEq)]
pub struct StagePlan {
    /// Name of its folder in the chain's folder: 1 to 40 letters, digits, `_` and `-`.
    pub name: String,
    /// The run. Its model is its own `[model]`, or else that of the nearest stage before with one, or else
    /// that of the chain. `stage:NAME` refers to other stages. [`ChainPlan::run`] replaces both by folders.
    pub plan: RunPlan,
    /// Whether the stage starts from its own model instead of the weights of the stage before.
    pub own_model: bool,
}

impl Recipe {
    /// Reads and checks a recipe file, with stages or without.
    ///
    /// # Errors
    /// The first problem, with its line, what is allowed and the nearest valid spelling.
    pub fn load(path: &Path, registry: Registry) -> Result<Self, RecipeError> {
        let text = std::fs::read_to_string(path).map_err(|source| RecipeError::Read {
            path: path.into(),
            source,
        })?;
        if is_chain(&text) {
            ChainPlan::parse(path, &text, registry).map(Self::Chain)
        } else {
            RunPlan::load(path, registry).map(|plan| Self::Run(Box::new(plan)))
        }
    }

    /// Like [`Recipe::load`], but for a text. `path` is only used in messages.
    ///
    /// # Errors
    /// Fails as [`Recipe::load`] does, but not for the file.
    pub fn parse(path: &Path, text: &str, registry: Registry) -> Result<Self, RecipeError> {
        if is_chain(text) {
            ChainPlan::parse(path, text, registry).map(Self::Chain)
        } else {
            RunPlan::parse(path, text, registry).map(|plan| Self::Run(Box::new(plan)))
        }
    }

    /// Returns the run, or the runs of the stages in their order.
    pub fn plans(&self) -> Vec<&RunPlan> {
        match self {
            Self::Run(plan) => vec![plan],
            Self::Chain(chain) => chain.stages.iter().map(|s| &s.plan).collect(),
        }
    }

    /// Sets the seed of the run, or of every stage. Stages have no separate seeds.
    pub fn seed(&mut self, seed: u64) {
        match self {
            Self::Run(plan) => plan.seed = seed,
            Self::Chain(chain) => chain.stages.iter_mut().for_each(|s| s.plan.seed = seed),
        }
    }
}

/// Text of the stages, and all keys above them.
struct StageTexts<'a> {
    defaults: DeTable<'a>,
    stages: Vec<(String, DeTable<'a>)>,
}

impl ChainPlan {
    /// Parses and checks the text of a chain; `path` is only used in messages.
    ///
    /// # Errors
    /// Fails as [`Recipe::load`] does, but not for the file.
    pub fn parse(path: &Path, text: &str, registry: Registry) -> Result<Self, RecipeError> {
        let source = Source {
            path,
            text,
            registry,
        };
        let StageTexts { defaults, stages } = typed_stages(&source)?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let name = match defaults.get("name").map(toml::Spanned::get_ref) {
            Some(DeValue::String(name)) => name.to_string(),
            _ => stem.into_owned(),
        };
        let mut chain = Self {
            name,
            stages: Vec::new(),
        };
        let mut used = BTreeSet::new();
        let mut model = None;
        for (name, own) in stages {
            let own_model = own.contains_key("model");
            if own_model {
                model = own
                    .get_key_value("model")
                    .map(|(k, v)| (k.clone(), v.clone()));
            }
            let mut merged = defaults.clone();
            if let Some((key, value)) = model.clone() {
                merged.remove("model");
                merged.insert(key, value);
            }
            lay_over(&mut merged, own.clone());
            let title = format!("{}-{name}", chain.name);
            let plan = chain.stage_plan(&source, &title, &name, &mut merged, &own)?;
            spans(&merged, "", &mut |_, span| {
                used.insert((span.start, span.end));
            });
            let stage = StagePlan {
                name,
                plan,
                own_model,
            };
            chain.check_stage(&source, &stage, &own)?;
            chain.stages.push(stage);
        }
        let mut unused = None;
        spans(&defaults, "", &mut |key, span| {
            let plain = key != "name" && key != "model" && !key.starts_with("model.");
            if plain && !used.contains(&(span.start, span.end)) && unused.is_none() {
                unused = Some(key.to_owned());
            }
        });
        match unused {
            Some(key) => Err(source.value_error(
                &defaults,
                &key,
                "has no effect in any stage, which either have their own or do not use it: remove it",
            )),
            None => Ok(chain),
        }
    }

    /// Returns the plan of a stage. Defaults without effect in this stage are removed from `merged`.
    ///
    /// The function parses and checks again after each removed default, until no error is left. A key that
    /// the stage itself contains is never removed, since its author has to correct it.
    fn stage_plan<'a>(
        &self,
        source: &Source<'a>,
        title: &str,
        name: &str,
        merged: &mut DeTable<'a>,
        own: &DeTable<'a>,
    ) -> Result<RunPlan, RecipeError> {
        merged.remove("name");
        loop {
            let mut plan = source.plan(merged.clone(), title)?;
            let before = self.stages.last().map(|s| format!("{STAGE}{}", s.name));
            let taught = plan.needs().teacher_logprobs || plan.needs().teacher_top > 0;
            if let (Some(model), None, true) = (before, &plan.teacher, taught)
                && own.contains_key("model")
            {
                plan.teacher = Some(crate::ScoringModel { model });
            }
            let Err(broken) = source.check(&plan, merged) else {
                return Ok(plan);
            };
            let Broken { key, inert, error } = *broken;
            let default = typed(merged, &key).is_some() && typed(own, &key).is_none();
            if !(inert && default && remove(merged, &key)) {
                return Err(error.in_stage(name));
            }
        }
    }

    /// Checks the rules of a chain for a stage. `self` contains only the stages before it.
    ///
    /// The stage may name only stages before it, needs a reason for its own model, must differ from the stage
    /// before in more than its name, and cannot have a longer context than a model from scratch was made for.
    fn check_stage(
        &self,
        source: &Source<'_>,
        stage: &StagePlan,
        own: &DeTable<'_>,
    ) -> Result<(), RecipeError> {
        let refuse = |key: &str, reason: &str| {
            let error = source.value_error(own, key, reason);
            Err(error.in_stage(&stage.name))
        };
        let known: Vec<String> = self.stages.iter().map(|s| s.name.clone()).collect();
        for (key, named) in references(&stage.plan) {
            if !known.contains(&named) {
                let reason = if known.is_empty() {
                    "names no stage before this one: this is the first".to_owned()
                } else {
                    format!("allowed: a stage before this one: {}", known.join(", "))
                };
                return refuse(key, &reason);
            }
        }
        let learns = stage.plan.teacher.is_some() || is_of_stage(stage.plan.data.as_ref());
        if stage.own_model && (known.is_empty() || !learns) {
            return refuse(
                "model",
                "a stage begins with the weights of the stage before: remove it, or learn from another stage: \
                 with `teacher = { model = \"stage:NAME\" }` and an algorithm that reads a teacher, or with \
                 `data = { type = \"episodes\", path = \"stage:NAME\" }`",
            );
        }
        let Some(before) = self.stages.last() else {
            return Ok(());
        };
        let renamed = RunPlan {
            name: before.plan.name.clone(),
            ..stage.plan.clone()
        };
        if renamed == before.plan {
            return refuse(
                "name",
                "is a stage without effect of its own, equal to the one before: raise train.steps there instead",
            );
        }
        let made = self.maker(stage);
        let (asked, most) = (
            stage.plan.rollout.max_context_tokens,
            made.map_or(u32::MAX, |m| m.plan.rollout.max_context_tokens),
        );
        let scratch = matches!(stage.plan.model, ModelSection::Scratch { .. });
        if scratch && asked > most {
            refuse(
                "rollout.max_context_tokens",
                &format!(
                    "allowed: up to {most}, the context of the model from scratch, which its first stage sets"
                ),
            )
        } else {
            Ok(())
        }
    }

    /// Returns the stage that started from the model which `stage` continues to train: the last one with its
    /// own model, otherwise the first stage. `None` if `stage` has its own model or is the first.
    fn maker(&self, stage: &StagePlan) -> Option<&StagePlan> {
        if stage.own_model {
            return None;
        }
        let with_model = self.stages.iter().rev().find(|s| s.own_model);
        with_model.or(self.stages.first())
    }

    /// Returns the run of stage `at` in the chain's folder. It starts from the weights of the stage before,
    /// and refers to other stages by their folders.
    ///
    /// The result is a recipe without `stage:`; in the stage's folder it is saved with the names of stages
    /// ([`RunPlan::portable`]).
    ///
    /// # Panics
    /// If the chain has no stage `at`.
    pub fn run(&self, at: usize, folder: &Path) -> RunPlan {
        let stage = &self.stages[at];
        let mut plan = stage.plan.clone();
        let run_of = |name: &str| format!("{RUN}{}", folder.join(name).display());
        for scoring in [&mut plan.teacher, &mut plan.reference]
            .into_iter()
            .flatten()
        {
            if let Some(name) = scoring.model.strip_prefix(STAGE) {
                scoring.model = run_of(name);
            }
        }
        if let Some(DataSection::Episodes { path, .. }) = &mut plan.data
            && let Some(name) = path.strip_prefix(STAGE)
        {
            *path = folder.join(name).display().to_string();
        }
        if let (Some(before), false) = (at.checked_sub(1), stage.own_model) {
            // The renderer is that of the stage before, with its variables of the template.
            plan.model = ModelSection::pretrained(run_of(&self.stages[before].name));
        }
        plan
    }

    /// Returns the names of the stages whose weights stage `at` reads: as its first weights, as teacher or as
    /// reference. Their folders must be kept until this stage has ended. A name can occur more than once.
    ///
    /// # Panics
    /// If the chain has no stage `at`.
    pub fn weights_of(&self, at: usize) -> Vec<String> {
        let stage = &self.stages[at];
        let scoring = references(&stage.plan).into_iter();
        let scoring = scoring.filter(|(key, _)| *key != "data.path");
        let before = at.checked_sub(1).filter(|_| !stage.own_model);
        let before = before.map(|b| self.stages[b].name.clone());
        scoring.map(|(_, name)| name).chain(before).collect()
    }

    /// Returns the plan of stage `at` for checks before any stage has run: results of other stages are left
    /// out, or replaced by the first models of these stages.
    ///
    /// A teacher or reference that is another stage is replaced by the model which that stage names. A model
    /// from scratch does not exist before the run, so it is left out.
    ///
    /// # Panics
    /// If the chain has no stage `at`.
    pub fn before_it_runs(&self, at: usize) -> RunPlan {
        let mut plan = self.stages[at].plan.clone();
        let source = |name: &str| {
            let named = self.stages.iter().find(|s| s.name == name)?;
            match &named.plan.model {
                ModelSection::Pretrained { source, .. } => Some(source.clone()),
                ModelSection::Scratch { .. } => None,
            }
        };
        for scoring in [&mut plan.teacher, &mut plan.reference] {
            let named = scoring.as_ref().and_then(|m| m.model.strip_prefix(STAGE));
            if let Some(named) = named.map(source) {
                *scoring = named.map(|model| crate::ScoringModel { model });
            }
        }
        if is_of_stage(plan.data.as_ref()) {
            plan.data = None;
        }
        plan
    }

    /// Returns the last stage as a recipe that only measures: the plan of [`ChainPlan::before_it_runs`], with
    /// GRPO in place of the algorithm if the teacher had to be left out.
    ///
    /// # Panics
    /// If the chain has no stage.
    pub fn to_measure(&self) -> RunPlan {
        let at = self.stages.len() - 1;
        let mut plan = self.before_it_runs(at);
        if plan.teacher.is_none() && self.stages[at].plan.teacher.is_some() {
            plan.algorithm = AlgorithmConfig::new(AlgorithmKind::Grpo);
        }
        plan
    }
}

impl Serialize for ChainPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let failed = |e: toml::ser::Error| serde::ser::Error::custom(e);
        let mut table = toml::Table::new();
        let mut stages = Vec::new();
        for stage in &self.stages {
            let mut keys = toml::Table::try_from(&stage.plan).map_err(failed)?;
            let model = keys.remove("model");
            keys.insert("name".into(), stage.name.clone().into());
            if let Some(model) = model {
                match stage.own_model {
                    true => keys.insert("model".into(), model),
                    false if stages.is_empty() => table.insert("model".into(), model),
                    false => None,
                };
            }
            stages.push(toml::Value::Table(keys));
        }
        table.insert("name".into(), self.name.clone().into());
        table.insert("stage".into(), stages.into());
        table.serialize(serializer)
    }
}

fn is_chain(text: &str) -> bool {
    DeTable::parse(text).is_ok_and(|root| root.get_ref().contains_key("stage"))
}

/// Splits a text into defaults and stages.
fn typed_stages<'a>(source: &Source<'a>) -> Result<StageTexts<'a>, RecipeError> {
    let mut defaults = source.table()?.into_inner();
    let refuse = |span: Range<usize>, why: &str| {
        let place = messages::place(source.text, &span);
        Err(source.parse_error(format!("{place}{why}")))
    };
    let stage = defaults.remove("stage");
    let (span, value) = stage.map_or((0..0, None), |s| (s.span(), Some(s.into_inner())));
    let Some(DeValue::Array(items)) = value else {
        return refuse(span, "stage: allowed: one table `[[stage]]` for each stage");
    };
    if items.is_empty() || items.len() > MAX_STAGES {
        let why = format!("{} stages: allowed: 1 to {MAX_STAGES}", items.len());
        return refuse(span, &why);
    }
    let mut stages: Vec<(String, DeTable<'a>)> = Vec::new();
    for item in items {
        let span = item.span();
        let DeValue::Table(mut own) = item.into_inner() else {
            return refuse(span, "stage: allowed: tables `[[stage]]` alone");
        };
        let Some(name) = own.remove("name") else {
            return refuse(
                span,
                "the stage has no `name`: it names the stage's folder, as in name = \"sft\"",
            );
        };
        let at = name.span();
        let DeValue::String(name) = name.into_inner() else {
            return refuse(at, "stage.name: allowed: a text");
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        let fits = name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(plain);
        if !fits || name.len() > MAX_NAME || name == "lock" {
            let why = format!(
                "stage.name = {name:?}: allowed: 1 to {MAX_NAME} letters, digits, `_` and `-`, a letter or digit \
                 first, and not `lock`: it names the stage's folder"
            );
            return refuse(at, &why);
        }
        if stages
            .iter()
            .any(|(known, _)| known.eq_ignore_ascii_case(&name))
        {
            let why = format!(
                "stage.name = {name:?}: another stage has this name: choose one of its own"
            );
            return refuse(at, &why);
        }
        stages.push((name.to_string(), own));
    }
    Ok(StageTexts { defaults, stages })
}

/// Merges the keys of a stage over the defaults.
fn lay_over<'a>(base: &mut DeTable<'a>, over: DeTable<'a>) {
    for (key, value) in over {
        let name = key.get_ref().to_string();
        let whole = name == "reward"
            || value
                .get_ref()
                .as_table()
                .is_none_or(|t| t.contains_key("type"));
        let below = base.get_mut(name.as_str()).map(toml::Spanned::get_mut);
        match (whole, below, value.get_ref()) {
            (false, Some(DeValue::Table(below)), DeValue::Table(table)) => {
                lay_over(below, table.clone());
            }
            _ => {
                base.remove(name.as_str());
                base.insert(key, value);
            }
        }
    }
}

/// Removes a key such as `train.lora.rank`. Returns whether it existed.
fn remove(table: &mut DeTable<'_>, key: &str) -> bool {
    let Some((name, below)) = key.split_once('.') else {
        return table.remove(key).is_some();
    };
    match table.get_mut(name).map(toml::Spanned::get_mut) {
        Some(DeValue::Table(table)) => remove(table, below),
        _ => false,
    }
}

/// Reports path and position of every key that is not a table.
fn spans(table: &DeTable<'_>, above: &str, found: &mut impl FnMut(&str, Range<usize>)) {
    for (key, value) in table {
        let path = match above {
            "" => key.get_ref().to_string(),
            above => format!("{above}.{}", key.get_ref()),
        };
        match value.get_ref() {
            DeValue::Table(table) => spans(table, &path, found),
            _ => found(&path, key.span()),
        }
    }
}
