//! Plans that the binary carries.

use super::PlanError;

/// A plan of `recipes/sim/published/`, by its name.
macro_rules! published {
    ($name:literal) => {
        (
            $name,
            include_str!(concat!(
                "../../../../recipes/sim/published/",
                $name,
                ".toml"
            )),
        )
    };
}

/// Their names and texts. Those of set-ups of papers are recipes.
pub const PRESETS: [(&str, &str); 11] = [
    published!("areal-sync"),
    published!("areal-async"),
    published!("relax-colocate"),
    published!("relax-async"),
    published!("verl-async"),
    published!("seer-baseline"),
    published!("seer"),
    published!("skyrl-batch"),
    published!("skyrl-pipeline"),
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
