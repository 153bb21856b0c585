//! Recipes.

use sinew_env::{BUILT_IN, Registry};
use sinew_recipe::RunPlan;
use std::path::Path;

/// Tables, keys and values.
pub(crate) const WORDS: &[&str] = &[
    "[train]\n",
    "[engine]\n",
    "[sandbox]\n",
    "[rollout]\n",
    "[[env.tasks]]\n",
    "env = { type = \"tool_math\" }\n",
    "level = \"wasm\"\n",
    "level = \"container\"\n",
    "lr = 1e999\n",
    "steps = -1\n",
    "steps = 9223372036854775807\n",
    "nan",
    "inf",
    "\"\"",
    "[]",
    "{}",
    "1979-05-27",
];

/// A recipe. It is refused with a message, or gives a plan whose effective recipe gives the same plan
/// again.
pub(crate) fn recipe(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let read = |text: &str| RunPlan::parse(Path::new("fuzz.toml"), text, Registry::new(&BUILT_IN));
    match read(&text) {
        Err(refused) => assert!(!refused.to_string().is_empty()),
        Ok(plan) => {
            let effective = toml::to_string(&plan).expect("a plan is written");
            let again = read(&effective).unwrap_or_else(|e| panic!("{e}\n{effective}"));
            let once_more = toml::to_string(&again).expect("a plan is written");
            assert_eq!(once_more, effective, "the effective recipe changes");
        }
    }
}
