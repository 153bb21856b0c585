//! Pinned inputs of a run: weights of other runs, and the content of files that its recipe names. They are
//! recorded when it begins and compared when it resumes.
//!
//! | name | what is compared |
//! |---|---|
//! | `model.weights`, `teacher.weights`, `reference.weights` | the checkpoint of `run:DIR`, which stays the same |
//! | `tasks.rows` | rows after filter and split, in their order |
//! | `data.rows` | what `[data]` gives: tokens, rewards and groups, in their order |
//! | `adapter` | name and content of the adapter that a measurement samples with |
//! | `env.version` | code of an environment of Python; what a server or the program says of its own |
//! | `reward.FILE.py:FUNCTION` | the file |
//! | `judge.NAME.rubric` | the file |
//!
//! The names for rows and versions in a mixture contain that of their environment: `env.NAME.tasks.rows`.

use crate::Session;
use crate::failure::Failure;
use crate::run_model::{RunModel, at_checkpoint, run_model, typed_source};
use sinew_env::EnvFactory;
use sinew_orchestrator::RunEvent;
use sinew_recipe::{ModelSection, RUN, RubricSource, RunPlan};
use sinew_rollout::REWARD;
use sinew_runs::{PinnedInputs, PinnedWeights};
use sinew_train::checkpoint::weights_hash;
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the weights that a run begins with.
const MODEL: &str = "model.weights";
/// Name of what `[data]` gives.
pub(crate) const DATA: &str = "data.rows";
/// Name of the adapter that a measurement samples with.
pub(crate) const ADAPTER: &str = "adapter";

/// Names and sources of the weights of a plan.
fn sources(plan: &mut RunPlan) -> Vec<(&'static str, &mut String)> {
    let mut sources = Vec::new();
    if let ModelSection::Pretrained { source, .. } = &mut plan.model {
        sources.push((MODEL, source));
    }
    let scoring = [
        ("teacher.weights", &mut plan.teacher),
        ("reference.weights", &mut plan.reference),
    ];
    for (name, scoring) in scoring {
        sources.extend(scoring.as_mut().map(|s| (name, &mut s.model)));
    }
    sources
}

/// The plan of the run in `folder` with the checkpoints that it began with, as far as it kept them.
pub(crate) fn of_folder(folder: &Path, recipe: &RunPlan) -> Result<RunPlan, Failure> {
    let mut plan = recipe.clone();
    let pinned = PinnedInputs::read(folder)?.unwrap_or_default();
    for (name, source) in sources(&mut plan) {
        let run = typed_source(source);
        if let (true, Some(kept)) = (run.starts_with(RUN), pinned.weights.get(name)) {
            *source = at_checkpoint(&run, &kept.checkpoint);
        }
    }
    Ok(plan)
}

/// Pinned inputs of a session.
pub(crate) struct RunPins {
    /// The recipe, with a checkpoint for each source that is a run.
    pub(crate) plan: RunPlan,
    old: Option<PinnedInputs>,
    new: PinnedInputs,
    changes: Vec<String>,
}

impl RunPins {
    /// Finds the weights that the run began with, or the newest ones for a run that begins.
    ///
    /// # Errors
    /// If the checkpoint is gone or has other weights, and that was not allowed.
    pub(crate) fn weights(recipe: &RunPlan, session: &Session<'_>) -> Result<Self, Failure> {
        let old = match session.resume {
            Some(_) => PinnedInputs::read(session.dir.path())?,
            None => None,
        };
        let mut pins = Self {
            plan: recipe.clone(),
            old,
            new: PinnedInputs::default(),
            changes: Vec::new(),
        };
        let mut named = session.dir.portable(recipe);
        let named: Vec<String> = sources(&mut named)
            .into_iter()
            .map(|(_, s)| s.clone())
            .collect();
        let mut plan = recipe.clone();
        for ((name, source), named) in sources(&mut plan).into_iter().zip(named) {
            let run = typed_source(source);
            if !run.starts_with(RUN) {
                continue;
            }
            if let (MODEL, Some(kept)) = (name, pins.outgrown(&run, recipe, session)) {
                *source = format!("{RUN}{}", session.dir.path().display());
                let kept = PinnedWeights { run: named, ..kept };
                pins.new.weights.insert(name.to_owned(), kept);
                continue;
            }
            let kept = pins.weights_of(name, &run, named, session)?;
            *source = at_checkpoint(&run, &kept.checkpoint);
            pins.new.weights.insert(name.to_owned(), kept);
        }
        pins.plan = plan;
        Ok(pins)
    }

    /// The weights that the run began with, if their checkpoint is gone and nothing needs it now: the run has
    /// a separate checkpoint, and adapters, reference and judges do not stand on the first weights.
    fn outgrown(
        &self,
        source: &str,
        recipe: &RunPlan,
        session: &Session<'_>,
    ) -> Option<PinnedWeights> {
        let resume = session.resume?;
        let needed = recipe.train.lora.is_some()
            || (recipe.needs().reference() && recipe.reference.is_none())
            || recipe.judges.values().any(|judge| judge.is_policy());
        if needed || resume.allows(MODEL) {
            return None;
        }
        let old = self.old.as_ref()?.weights.get(MODEL)?;
        let there = run_model(source).ok()??;
        if there.checkpoints().join(&old.checkpoint).exists() {
            return None;
        }
        let own = RunModel::open(session.dir.path()).ok()?;
        own.checkpoint().ok()?;
        Some(old.clone())
    }

    /// The weights of one source, which the recipe in the folder calls `named`.
    fn weights_of(
        &mut self,
        name: &str,
        source: &str,
        named: String,
        session: &Session<'_>,
    ) -> Result<PinnedWeights, Failure> {
        let old = self
            .old
            .as_ref()
            .and_then(|old| old.weights.get(name))
            .cloned();
        let Some(old) = old else {
            return newest(source, named);
        };
        let there = run_model(&at_checkpoint(source, &old.checkpoint))?;
        let folder = there.map(|run| run.checkpoints().join(&old.checkpoint));
        let found = folder
            .as_deref()
            .and_then(|folder| weights_hash(folder).ok());
        if found.as_ref() == Some(&old.weights) {
            return Ok(PinnedWeights { run: named, ..old });
        }
        let is = match &found {
            Some(found) => format!("it has the weights {found} now"),
            None => "it is not there any more".to_owned(),
        };
        let was = format!(
            "{name}: this run stands on the checkpoint {} of {}, with the weights {}, and {is}",
            old.checkpoint, old.run, old.weights
        );
        if session.resume.is_none_or(|resume| !resume.allows(name)) {
            let place = folder.as_deref().unwrap_or(Path::new("")).display();
            return Err(Failure::input(format!(
                "{was}\n  hint: put back {place}, or start a new run in another --run-dir; to go on with the newest \
                 weights all the same: --allow-change {name}"
            )));
        }
        let new = newest(source, named)?;
        self.changes
            .push(format!("{was}: {} took its place", new.checkpoint));
        Ok(new)
    }

    /// Compares rows, functions, rubrics and environments with those of the sessions before, and also the
    /// hashes of `others`, as far as the run has them.
    ///
    /// # Errors
    /// If one changed and that was not allowed, or a file cannot be read.
    pub(crate) fn inputs(
        &mut self,
        recipe: &RunPlan,
        envs: &dyn EnvFactory,
        session: &Session<'_>,
        others: impl IntoIterator<Item = (&'static str, Option<String>)>,
    ) -> Result<(), Failure> {
        self.new.inputs = versions(recipe, envs, &session.tasks.digests)?;
        let others = others.into_iter();
        let others = others.filter_map(|(name, hash)| Some((name.to_owned(), hash?)));
        self.new.inputs.extend(others);
        let (Some(old), Some(resume)) = (&self.old, session.resume) else {
            return Ok(());
        };
        let changes = session
            .dir
            .check_inputs(&old.inputs, &self.new.inputs, resume)?;
        self.changes.extend(changes);
        Ok(())
    }

    /// Versions of what a worker must have as well: rows, environments, functions and rubrics.
    pub(crate) fn versions(&self) -> BTreeMap<String, String> {
        let mut versions = self.new.inputs.clone();
        versions.retain(|name, _| ![DATA, ADAPTER].contains(&name.as_str()));
        versions
    }

    /// Versions of the rewards: of their keys in the recipe, and of the files that it names.
    pub(crate) fn rewards(&self, recipe: &RunPlan) -> BTreeMap<String, String> {
        reward_versions(recipe, &self.new.inputs)
    }

    /// Keeps what the session stands on in its folder, and reports what changed. `step` is the last one that
    /// was trained.
    pub(crate) fn keep(mut self, session: &Session<'_>, step: u64) -> Result<(), Failure> {
        let warn = |text: String| session.bus.emit(RunEvent::Warning(text));
        if self.old.is_none() && step > 0 {
            warn(
                "pinned.json is missing, which keeps what this run stands on: weights, rows and functions of now are \
                 taken for those that it began with"
                    .into(),
            )?;
        }
        let old = self.old.unwrap_or_default();
        self.new.changes.clone_from(&old.changes);
        for change in self.changes {
            warn(format!("changed, as allowed: {change}"))?;
            self.new
                .changes
                .push(format!("after step {step}: {change}"));
        }
        if self.new != old {
            self.new.write(session.dir.path())?;
        }
        Ok(())
    }
}

/// Versions of the rewards of a recipe: of their keys, and of the files that it names, whose versions are
/// among `inputs`.
pub(crate) fn reward_versions(
    recipe: &RunPlan,
    inputs: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let files = inputs.iter().filter_map(|(name, version)| {
        let name = if name.starts_with(REWARD) {
            name.clone()
        } else {
            format!("{REWARD}{}", name.strip_suffix(".rubric")?)
        };
        Some((name, version.get(..16).unwrap_or(version).to_owned()))
    });
    let mut versions: BTreeMap<String, String> = files.collect();
    for world in recipe.worlds() {
        if let Some(text) = world.reward.and_then(|r| serde_json::to_vec(r).ok()) {
            let hash = blake3::hash(&text).to_hex();
            let own = world.env.name.as_str();
            let name = format!(
                "{REWARD}section{}{own}",
                if own.is_empty() { "" } else { "." }
            );
            versions.insert(name, hash[..16].to_owned());
        }
    }
    versions
}

/// The newest whole checkpoint of a run, or the one that the source names.
fn newest(source: &str, named: String) -> Result<PinnedWeights, Failure> {
    let run = run_model(source)?;
    let run = run.ok_or_else(|| Failure::system(format!("{source} names no run")))?;
    let folder = run.checkpoint()?;
    let name = folder.file_name().unwrap_or_default();
    Ok(PinnedWeights {
        run: named,
        checkpoint: name.to_string_lossy().into_owned(),
        weights: weights_hash(&folder).map_err(Failure::system)?,
    })
}

/// Inputs outside of a recipe that it names, with a hash or version of each; `rows` are those of its tasks.
pub(crate) fn versions(
    recipe: &RunPlan,
    envs: &dyn EnvFactory,
    rows: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, Failure> {
    let mut table = rows.clone();
    let members = envs.members();
    for (name, member) in &members {
        table.insert(format!("env.{name}.version"), member.version.clone());
    }
    if members.is_empty() {
        table.insert("env.version".into(), envs.version().to_owned());
    }
    let rewards = recipe.worlds().into_iter().filter_map(|w| w.reward);
    for term in rewards.flat_map(|r| r.terms()) {
        if let (true, Some((file, _))) = (term.is_function(), term.name.split_once(".py:")) {
            let name = format!("reward.{}", term.name);
            table.insert(name, file_hash(&format!("{file}.py"))?);
        }
    }
    for (name, judge) in &recipe.judges {
        if let Some(RubricSource::File(file)) = &judge.rubric {
            table.insert(format!("judge.{name}.rubric"), file_hash(file)?);
        }
    }
    Ok(table)
}

fn file_hash(path: &str) -> Result<String, Failure> {
    let content = std::fs::read(path).map_err(|e| Failure::input(format!("{path}: {e}")))?;
    Ok(blake3::hash(&content).to_hex().to_string())
}
