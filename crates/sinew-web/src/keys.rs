//! The environment `web` in a recipe: its keys and their checks.

use crate::miniwob::FAMILIES;
use crate::shop::LEVELS;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sinew_env::KeyError;
use sinew_types::{Given, Gives};
use std::path::PathBuf;

/// Which sites and tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WebTasks {
    /// A shop of this program: find, filter, put into the cart, check out.
    #[default]
    Shop,
    /// Pages of the package `miniwob`.
    Miniwob,
}

/// Keys of `[env] type = "web"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Web {
    /// Sites and tasks.
    pub tasks: WebTasks,
    /// Levels of the shop's tasks, 1 to 5: a product by name; with quantity and size; by properties; an order
    /// of two; a cart to be changed. Empty: all.
    #[schemars(inner(range(min = 1, max = 5)))]
    pub levels: Vec<u8>,
    /// Families of MiniWoB++ pages, such as `click-button`. Empty: all that have a gold policy.
    pub families: Vec<String>,
    /// Folder with the pages of MiniWoB++: that of the package which has `miniwob/click-button.html`.
    pub pages: PathBuf,
    /// Number of training tasks.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub train: usize,
    /// Number of held-out tasks.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub held_out: usize,
    /// The browser: a path, or a name in PATH. Tried with Chromium 156.
    pub browser: String,
    /// Browsers at once.
    #[schemars(range(min = 1, max = 64))]
    pub browsers: usize,
    /// Episodes at once in one browser, each in a context of its own.
    #[schemars(range(min = 1, max = 64))]
    pub pages_per_browser: usize,
    /// Episodes after which a browser is replaced by a new one.
    #[schemars(range(min = 1, max = 100_000))]
    pub episodes_per_browser: u64,
    /// Empty pages that each browser keeps ready.
    #[schemars(range(min = 0, max = 16))]
    pub warm_pages: usize,
    /// Calls of tools in an episode; after the last one it is scored as it stands.
    #[schemars(range(min = 1, max = 1000))]
    pub max_calls: u32,
    /// Characters of a page that the model sees.
    #[schemars(range(min = 200, max = 100_000))]
    pub max_chars: usize,
    /// Milliseconds that a page's scripts get after an action, before it is looked at.
    #[schemars(range(min = 0, max = 5000))]
    pub settle_ms: u64,
    /// Deadline of each request to the browser, and of its start, in seconds.
    #[schemars(range(min = 1.0, max = 600.0))]
    pub timeout_s: f64,
    /// Folder for a screenshot of every page that the model sees, named by its BLAKE3. Empty: none.
    pub screenshots: PathBuf,
}

impl Default for Web {
    fn default() -> Self {
        Self {
            tasks: WebTasks::Shop,
            levels: Vec::new(),
            families: Vec::new(),
            pages: ".cache/miniwob/miniwob/html".into(),
            train: 10_000,
            held_out: 200,
            browser: "chromium".into(),
            browsers: 1,
            pages_per_browser: 8,
            episodes_per_browser: 500,
            warm_pages: 1,
            max_calls: 40,
            max_chars: 6000,
            settle_ms: 20,
            timeout_s: 30.0,
            screenshots: PathBuf::new(),
        }
    }
}

/// Whether a value is in its range; not a number is in none.
fn within<T: PartialOrd + std::fmt::Display>(
    key: &'static str,
    value: T,
    range: std::ops::RangeInclusive<T>,
) -> Result<(), KeyError> {
    match range.contains(&value) {
        true => Ok(()),
        false => Err(KeyError {
            key,
            value: value.to_string(),
            reason: format!("allowed: {} to {}", range.start(), range.end()),
        }),
    }
}

impl Web {
    /// The levels of the shop that are drawn.
    pub(crate) fn levels(&self) -> Vec<u8> {
        match self.levels.is_empty() {
            true => LEVELS.collect(),
            false => self.levels.clone(),
        }
    }

    /// The families that are drawn.
    pub(crate) fn families(&self) -> Vec<String> {
        match self.families.is_empty() {
            true => FAMILIES.iter().map(|f| f.name.to_owned()).collect(),
            false => self.families.clone(),
        }
    }

    /// Keys of the other task set have no effect, and unknown families no pages.
    fn check_tasks(&self) -> Result<(), KeyError> {
        let wrong = |key, value: String, reason: String| Err(KeyError { key, value, reason });
        let levels = format!("{:?}", self.levels);
        match self.tasks {
            WebTasks::Shop if !self.families.is_empty() => {
                let reason = "has no effect on tasks = \"shop\"; remove it".into();
                wrong("families", format!("{:?}", self.families), reason)
            }
            WebTasks::Miniwob if !self.levels.is_empty() => wrong(
                "levels",
                levels,
                "has no effect on tasks = \"miniwob\"; remove it".into(),
            ),
            _ if self.levels.iter().any(|l| !LEVELS.contains(l)) => {
                wrong("levels", levels, "allowed: 1 to 5".into())
            }
            _ => {
                let known = |name: &&String| !FAMILIES.iter().any(|f| f.name == **name);
                let Some(name) = self.families.iter().find(known) else {
                    return Ok(());
                };
                let names: Vec<_> = FAMILIES.iter().map(|f| f.name).collect();
                wrong(
                    "families",
                    name.clone(),
                    format!("allowed: {}", names.join(", ")),
                )
            }
        }
    }
}

impl Web {
    /// What the ranges and the combination of keys allow.
    pub(crate) fn check_keys(&self) -> Result<(), KeyError> {
        self.check_tasks()?;
        within("train", self.train, 1..=1_000_000)?;
        within("held_out", self.held_out, 1..=1_000_000)?;
        within("browsers", self.browsers, 1..=64)?;
        within("pages_per_browser", self.pages_per_browser, 1..=64)?;
        within(
            "episodes_per_browser",
            self.episodes_per_browser,
            1..=100_000,
        )?;
        within("warm_pages", self.warm_pages, 0..=16)?;
        within("max_calls", self.max_calls, 1..=1000)?;
        within("max_chars", self.max_chars, 200..=100_000)?;
        within("settle_ms", self.settle_ms, 0..=5000)?;
        within("timeout_s", self.timeout_s, 1.0..=600.0)
    }
}

/// What algorithms can read of an episode.
pub(crate) const GIVES: Gives = Gives {
    states: Given::Yes,
    turn_rewards: Given::No("pages are scored at the end; take an algorithm without turn rewards"),
    tool_counts: Given::Yes,
    format_penalty: Given::Yes,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_without_effect_and_unknown_families_are_refused() {
        let web = |change: fn(&mut Web)| {
            let mut web = Web::default();
            change(&mut web);
            web.check_keys().map_err(|e| (e.key, e.reason))
        };
        assert_eq!(web(|_| {}), Ok(()));
        assert_eq!(web(|w| w.levels = vec![6]).unwrap_err().0, "levels");
        assert_eq!(
            web(|w| w.families = vec!["click-link".into()])
                .unwrap_err()
                .0,
            "families"
        );
        let (key, reason) = web(|w| {
            w.tasks = WebTasks::Miniwob;
            w.families = vec!["bisect-angle".into()];
        })
        .unwrap_err();
        assert!(
            key == "families" && reason.contains("click-link"),
            "{reason}"
        );
        assert_eq!(web(|w| w.timeout_s = f64::NAN).unwrap_err().0, "timeout_s");
    }
}
