//! Plans that the binary carries.

use super::PlanError;

/// Their names and texts.
pub const PRESETS: [(&str, &str); 11] = [
    ("areal-sync", include_str!("../../presets/areal-sync.toml")),
    (
        "areal-async",
        include_str!("../../presets/areal-async.toml"),
    ),
    (
        "relax-colocate",
        include_str!("../../presets/relax-colocate.toml"),
    ),
    (
        "relax-async",
        include_str!("../../presets/relax-async.toml"),
    ),
    ("verl-async", include_str!("../../presets/verl-async.toml")),
    (
        "seer-baseline",
        include_str!("../../presets/seer-baseline.toml"),
    ),
    ("seer", include_str!("../../presets/seer.toml")),
    (
        "skyrl-batch",
        include_str!("../../presets/skyrl-batch.toml"),
    ),
    (
        "skyrl-pipeline",
        include_str!("../../presets/skyrl-pipeline.toml"),
    ),
    (
        "search-agents",
        include_str!("../../presets/search-agents.toml"),
    ),
    ("large", include_str!("../../presets/large.toml")),
];

/// The text of a preset.
///
/// # Errors
/// If there is none of this name.
pub fn preset(name: &str) -> Result<&'static str, PlanError> {
    let found = PRESETS.iter().find(|(known, _)| *known == name);
    found.map(|(_, text)| *text).ok_or_else(|| {
        let names: Vec<&str> = PRESETS.iter().map(|(known, _)| *known).collect();
        PlanError::Value {
            key: "preset".into(),
            value: format!("{name:?}"),
            allowed: format!("allowed: {}", names.join(", ")),
        }
    })
}
