//! Stages of a chain that the keys of a recipe name.

use crate::{DataSection, RunPlan, ScoringModel};

/// Before the name of a stage, where a key names one.
pub(crate) const STAGE: &str = "stage:";

/// The stages that a plan names: key and name.
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

/// Whether data are the episodes of a stage.
pub(crate) fn is_of_stage(data: Option<&DataSection>) -> bool {
    matches!(data, Some(DataSection::Episodes { path, .. }) if path.starts_with(STAGE))
}
