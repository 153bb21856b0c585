//! References to stages of a chain in the keys of a recipe.
//!
//! While a stage runs, its plan contains the folders of other stages. The plan saved in its folder contains
//! `stage:NAME` instead, so that the folder of a chain can be moved. [`RunPlan::portable`] creates this form,
//! and [`RunPlan::load`] resolves it.

use crate::{DataSection, ModelSection, RunPlan, ScoringModel};
use std::path::Path;

/// Prefix for the folder of a run that is used as a model.
pub const RUN: &str = "run:";

/// Prefix for the name of a stage.
pub(crate) const STAGE: &str = "stage:";

/// File with the recipe of a chain, in its folder.
pub const CHAIN_FILE: &str = "chain.toml";

/// Prefix of a reference, and the value that contains it.
type Slot<'a> = (&'static str, &'a mut String);

/// Returns the values of a plan that can refer to the folder of a run.
fn slots(plan: &mut RunPlan) -> Vec<Slot<'_>> {
    let mut slots: Vec<Slot<'_>> = Vec::new();
    if let ModelSection::Pretrained { source, .. } = &mut plan.model {
        slots.push((RUN, source));
    }
    let scoring = plan.teacher.iter_mut().chain(plan.reference.iter_mut());
    slots.extend(scoring.map(|m| (RUN, &mut m.model)));
    if let Some(DataSection::Episodes { path, .. }) = &mut plan.data {
        slots.push(("", path));
    }
    slots
}

impl RunPlan {
    /// Returns the plan of a stage of the chain in `chain`, as it is saved: folders of other stages become
    /// `stage:NAME`.
    #[must_use]
    pub fn portable(&self, chain: &Path) -> Self {
        let mut plan = self.clone();
        for (prefix, value) in slots(&mut plan) {
            let Some(folder) = value.strip_prefix(prefix).map(Path::new) else {
                continue;
            };
            let is_stage = folder.parent() == Some(chain);
            if let (true, Some(name)) = (is_stage, folder.file_name()) {
                *value = format!("{STAGE}{}", name.to_string_lossy());
            }
        }
        plan
    }

    /// Inverse of [`RunPlan::portable`]: `stage:NAME` becomes a folder below `chain`.
    ///
    /// Has no effect if the folder `chain` does not contain a chain.
    pub(crate) fn in_chain(&mut self, chain: &Path) {
        if !chain.join(CHAIN_FILE).exists() {
            return;
        }
        for (prefix, value) in slots(self) {
            if let Some(name) = value.strip_prefix(STAGE) {
                *value = format!("{prefix}{}", chain.join(name).display());
            }
        }
    }
}

/// Returns the stages that a plan refers to: key and name.
pub(crate) fn references(plan: &RunPlan) -> Vec<(&'static str, String)> {
    let model = |m: &Option<ScoringModel>| m.as_ref().map(|m| m.model.clone());
    let path = match &plan.data {
        Some(DataSection::Episodes { path, .. }) => Some(path.clone()),
        _ => None,
    };
    let all = [
        ("teacher.model", model(&plan.teacher)),
        ("reference.model", model(&plan.reference)),
        ("data.path", path),
        ("model.source", Some(plan.model_source())),
    ];
    let named = |(key, value): (&'static str, Option<String>)| {
        let name = value?.strip_prefix(STAGE)?.to_owned();
        Some((key, name))
    };
    all.into_iter().filter_map(named).collect()
}

/// Whether the training data are the episodes of a stage.
pub(crate) fn is_of_stage(data: Option<&DataSection>) -> bool {
    matches!(data, Some(DataSection::Episodes { path, .. }) if path.starts_with(STAGE))
}
